#include "src/text/byte_level.h"

#include "src/text/utf8.h"

/* Of the bytes that are not themselves, 0x00 to 0x20, 0x7f to 0xa0 and 0xad: how many come before. */
static uint32_t character_of(unsigned char byte) {
    if (byte <= 0x20) return 0x100u + byte;
    if (byte >= 0x7f && byte <= 0xa0) return 0x100u + 0x21 + (byte - 0x7fu);
    return byte == 0xad ? 0x100 + 0x21 + 0x22 : byte;
}

static int byte_of(uint32_t code) {
    if (code < 0x100) return character_of((unsigned char)code) == code ? (int)code : -1;
    if (code <= 0x120) return (int)code - 0x100;
    if (code <= 0x142) return (int)code - 0x121 + 0x7f;
    return code == 0x143 ? 0xad : -1;
}

int cpa_byte_level_write(const char *bytes, size_t n, cpa_bytes *out) {
    if (!cpa_bytes_reserve(out, 2 * n)) return 0;
    for (size_t i = 0; i < n; i++)
        out->count += (int64_t)cpa_utf8_write(character_of((unsigned char)bytes[i]), out->data + out->count);
    return 1;
}

int cpa_byte_level_read(const char *text, size_t n, cpa_bytes *out) {
    const int64_t before = out->count;
    if (!cpa_bytes_reserve(out, n)) return 0;
    for (size_t at = 0; at < n; at += cpa_utf8_length(text[at])) {
        const int byte = byte_of(cpa_utf8_code(text + at));
        if (byte < 0) {
            out->count = before;
            return cpa_bytes_add(out, text, n);
        }
        out->data[out->count++] = (char)byte;
    }
    return 1;
}
