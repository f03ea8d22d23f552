#include "src/text/utf8.h"

/* The bounds of the second byte depend on the first (The Unicode Standard, table 3-7); all others are 0x80 to 0xbf. */
int cpa_utf8_next(const char *text, size_t bytes) {
    const unsigned char *at = (const unsigned char *)text, lead = at[0];
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return -1;
    const int length = (int)cpa_utf8_length(text[0]);
    unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == bytes) return 0;
        if (at[i] < low || at[i] > high) return -i;
        low = 0x80, high = 0xbf;
    }
    return length;
}

size_t cpa_utf8_valid(const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        const int length = cpa_utf8_next(text + at, bytes - at);
        if (length <= 0) break;
        at += (size_t)length;
    }
    return at;
}

uint32_t cpa_utf8_code(const char *text) {
    const unsigned char *at = (const unsigned char *)text;
    switch (cpa_utf8_length(text[0])) {
        case 1: return at[0];
        case 2: return (at[0] & 0x1fu) << 6 | (at[1] & 0x3fu);
        case 3: return (at[0] & 0x0fu) << 12 | (at[1] & 0x3fu) << 6 | (at[2] & 0x3fu);
        default: return (at[0] & 0x07u) << 18 | (at[1] & 0x3fu) << 12 | (at[2] & 0x3fu) << 6 | (at[3] & 0x3fu);
    }
}

size_t cpa_utf8_write(uint32_t code, char out[CPA_UTF8_MAX]) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    const size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = length - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(leads[length] | code);
    return length;
}

int cpa_utf8_is_space(uint32_t code) {
    return (code >= 0x09 && code <= 0x0d) || code == 0x20 || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f ||
           code == 0x3000;
}
