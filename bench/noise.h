/* Numbers without a pattern, the same in every run. */
#ifndef CPA_BENCH_NOISE_H
#define CPA_BENCH_NOISE_H

#include "base/hash.h"

/* A well-mixed 64-bit number from a counter (splitmix64; Steele, Lea and Flood, 2014). */
static inline uint64_t cpa_bench_hash(uint64_t counter) {
    return cpa_mix64(counter + CPA_GOLDEN);
}

/* A number of mean 0 and variance 1 from 64 random bits: the sum of four uniform ones, which is nearly normal. */
static inline float cpa_bench_normal(uint64_t bits) {
    int32_t sum = (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff) + (int32_t)(bits >> 32 & 0xffff) +
                  (int32_t)(bits >> 48);
    return ((float)sum - 131070.0f) * (1.7320508f / 65536.0f);
}

#endif
