/* The smaller and the larger of two counts, and their quotient rounded up. */
#ifndef CPA_BASE_MIN_MAX_H
#define CPA_BASE_MIN_MAX_H

#include <stdint.h>

static inline int64_t cpa_min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t cpa_max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}
/* Of no less than 0 by more than 0. */
static inline int64_t cpa_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

#endif
