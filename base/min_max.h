/* The smaller and the larger of two counts. */
#ifndef CPA_BASE_MIN_MAX_H
#define CPA_BASE_MIN_MAX_H

#include <stdint.h>

static inline int64_t cpa_min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t cpa_max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

#endif
