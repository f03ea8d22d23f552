#include "base/text.h"

#include <stdio.h>
#include <string.h>

/* How many bytes of a control character begin here: U+0080 to U+009F are two in UTF-8. */
static size_t control_bytes(const unsigned char *text) {
    if (text[0] < 0x20 || text[0] == 0x7f) return 1;
    return text[0] == 0xc2 && text[1] >= 0x80 && text[1] < 0xa0 ? 2 : 0;
}

static size_t escape(unsigned char c, char out[5]) {
    static const char names[] = "\nn\tt\rr";
    const char *name = strchr(names, c);
    if (c && name) return (size_t)sprintf(out, "\\%c", name[1]);
    return (size_t)sprintf(out, "\\x%02x", c);
}

size_t cpa_text_escape(const char *text, char *out, size_t bytes) {
    const unsigned char *at = (const unsigned char *)text;
    size_t used = 0;
    while (*at) {
        char piece[9];
        size_t length = 0, controls = control_bytes(at);
        for (size_t i = 0; i < controls; i++) length += escape(at[i], piece + length);
        if (controls == 0) piece[length++] = (char)*at;
        if (used + length >= bytes) break;
        memcpy(out + used, piece, length);
        used += length;
        at += controls ? controls : 1;
    }
    out[used] = 0;
    return used;
}

static char plain(char c) {
    return c == '_' ? '-' : c;
}

int cpa_name_distance(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    int row[CPA_NAME_BYTES + 1];
    for (size_t j = 0; j <= b_bytes; j++) row[j] = (int)j;
    for (size_t i = 1; i <= a_bytes; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= b_bytes; j++) {
            int best = diagonal + (plain(a[i - 1]) != plain(b[j - 1]));
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[b_bytes];
}
