/* The monotonic clock, in seconds. */
#ifndef CPA_BASE_CLOCK_H
#define CPA_BASE_CLOCK_H

#include <time.h>

static inline double cpa_clock_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
