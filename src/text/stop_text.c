#include "src/text/stop_text.h"

#include <string.h>

int64_t cpa_stop_text_find(const cpa_stop_text *stops, int n, const char *text, int64_t bytes, int64_t from,
                           int *which) {
    int64_t first = -1;
    for (int i = 0; i < n; i++) {
        const char *found = memmem(text + from, (size_t)(bytes - from), stops[i].text, stops[i].bytes);
        if (!found || (first >= 0 && found - text >= first)) continue;
        first = found - text;
        *which = i;
    }
    return first;
}

int64_t cpa_stop_text_begun(const cpa_stop_text *stops, int n, const char *text, int64_t bytes) {
    int64_t most = 0;
    for (int i = 0; i < n; i++) {
        int64_t begun = (int64_t)stops[i].bytes - 1;
        if (begun > bytes) begun = bytes;
        while (begun > most && memcmp(text + bytes - begun, stops[i].text, (size_t)begun) != 0) begun--;
        if (begun > most) most = begun;
    }
    return most;
}
