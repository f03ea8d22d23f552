#include "src/grammar/plain_text.h"

int cpa_is_plain_byte(uint8_t byte) {
    return byte >= 0x20 && byte != '"' && byte != '\\' && byte != 0xc0 && byte != 0xc1 && byte <= 0xf4;
}

/* The bytes of a character that begins so; 0: none does. */
static size_t length_of(uint8_t lead) {
    if (!cpa_is_plain_byte(lead) || (lead >= 0x80 && lead < 0xc2)) return 0;
    return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* Bytes that follow each other in a character (Unicode, table 3-7). */
static int is_tail(uint8_t lead, size_t i, uint8_t byte) {
    const uint8_t lo = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const uint8_t hi = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    return byte >= lo && byte <= hi;
}

void cpa_count_plain(const char *text, size_t bytes, uint16_t *plain) {
    for (size_t at = bytes; at-- > 0;) {
        const uint8_t lead = (uint8_t)text[at];
        const size_t n = length_of(lead);
        int is_plain = n > 0;
        for (size_t i = 1; i < n && at + i < bytes; i++) is_plain &= is_tail(lead, i, (uint8_t)text[at + i]);
        const uint16_t rest = at + n < bytes ? plain[at + n] : 0;
        plain[at] = is_plain && rest < CPA_MOST_PLAIN ? (uint16_t)(rest + 1) : CPA_NOT_PLAIN;
    }
}
