#include "src/text/unicode.h"

#include <stddef.h>

#include "src/text/unicode_tables.h"
#include "src/text/utf8.h"

static const cpa_unicode_range *find(const cpa_unicode_range *ranges, int count, uint32_t code) {
    int low = 0, high = count; /* the range, if any, is in [low, high) */
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (code < ranges[middle].first) {
            high = middle;
        } else if (code > ranges[middle].last) {
            low = middle + 1;
        } else {
            return &ranges[middle];
        }
    }
    return NULL;
}

int cpa_unicode_is_inert(uint32_t code) {
    return find(cpa_unicode_inert, CPA_UNICODE_INERT, code) != NULL;
}

uint32_t cpa_unicode_stand_in(uint32_t code) {
    const cpa_unicode_range *range = find(cpa_unicode_stand_ins, CPA_UNICODE_STAND_INS, code);
    return range ? range->stand_in : code;
}

const char *cpa_unicode_for_patterns(const char *text, size_t bytes, cpa_bytes *out) {
    int is_copied = 0;
    for (size_t at = 0; at < bytes; at += cpa_utf8_length(text[at])) {
        if ((unsigned char)text[at] < 0x80) continue;
        const uint32_t code = cpa_utf8_code(text + at), stand_in = cpa_unicode_stand_in(code);
        if (stand_in == code) continue;
        if (!is_copied) {
            out->count = 0;
            if (!cpa_bytes_add(out, text, bytes)) return NULL;
        }
        is_copied = 1;
        cpa_utf8_write(stand_in, out->data + at);
    }
    return is_copied ? out->data : text;
}
