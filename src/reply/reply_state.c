#include "src/reply/reply_state.h"

#include <string.h>

int cpa_reply_skip_space(cpa_reply *r) {
    while (r->at < r->held.count && r->held.data[r->at] && strchr(" \n\r\t", r->held.data[r->at])) r->at++;
    return r->at < r->held.count;
}

int cpa_reply_takes(cpa_reply *r, const char *text) {
    const size_t left = (size_t)(r->held.count - r->at), bytes = strlen(text);
    const size_t n = left < bytes ? left : bytes;
    if (n > 0 && memcmp(r->held.data + r->at, text, n) != 0) return 0;
    if (n < bytes) return -1;
    r->at += (int64_t)bytes;
    return 1;
}

void cpa_reply_drop_read(cpa_reply *r) {
    r->held.count -= r->at;
    if (r->held.count > 0) memmove(r->held.data, r->held.data + r->at, (size_t)r->held.count);
    r->at = 0;
}
