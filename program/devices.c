#include "program/devices.h"

#include <string.h>

static int are_single_and_distinct(const cpa_visible_devices *seen, int32_t n) {
    for (int32_t a = 0; a < n; a++) {
        if (seen[a].count != 1 || !seen[a].first[0]) return 0;
        for (int32_t b = 0; b < a; b++) {
            if (strcmp(seen[a].first, seen[b].first) == 0) return 0;
        }
    }
    return 1;
}

int32_t cpa_devices_choose(const cpa_visible_devices *seen, int32_t n, int32_t me) {
    int32_t least = seen[0].count;
    for (int32_t r = 1; r < n; r++) {
        if (seen[r].count < least) least = seen[r].count;
    }
    if (least >= n) return me;
    return are_single_and_distinct(seen, n) ? 0 : -1;
}
