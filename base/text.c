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
