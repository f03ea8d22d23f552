/* The monotonic clock, in seconds. */
#ifndef CPA_BASE_CLOCK_H
#define CPA_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline double cpa_clock_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* A moment so many seconds from now, for waits on CLOCK_MONOTONIC: setting the clock on the wall does not move it. */
static inline struct timespec cpa_clock_after(double seconds) {
    struct timespec when;
    clock_gettime(CLOCK_MONOTONIC, &when);
    const int64_t nanoseconds = when.tv_nsec + (int64_t)(seconds * 1e9);
    when.tv_sec += nanoseconds / 1000000000;
    when.tv_nsec = nanoseconds % 1000000000;
    return when;
}

#endif
