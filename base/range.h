/* Ranges that a profiler shows (NVTX), in builds with CUDA; elsewhere nothing. */
#ifndef CPA_BASE_RANGE_H
#define CPA_BASE_RANGE_H

#include <stdint.h>

#ifdef CPA_HAVE_CUDA
#include <nvtx3/nvToolsExt.h>

/* Opens a range; ranges may overlap. */
static inline uint64_t cpa_range_begin(const char *name) {
    return nvtxRangeStartA(name);
}
static inline void cpa_range_end(uint64_t range) {
    nvtxRangeEnd(range);
}
#else
static inline uint64_t cpa_range_begin(const char *name) {
    (void)name;
    return 0;
}
static inline void cpa_range_end(uint64_t range) {
    (void)range;
}
#endif

#endif
