#include "program/chart/shares.h"

#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void cpa_shares_add(cpa_series_set *set, const char *label, double *values, int64_t n) {
    enum { MOST_POINTS = 500 };
    const int64_t points = n < MOST_POINTS ? n : MOST_POINTS;
    if (n == 0) return;
    qsort(values, (size_t)n, sizeof *values, ascending);
    cpa_series_add(set, label, values[0], 0);
    for (int64_t p = 1; p <= points; p++) {
        const int64_t up_to = p * n / points;
        cpa_series_add(set, label, values[up_to - 1], (double)up_to / (double)n);
    }
}
