/* The statistics of a group of queries on the device. */
#ifndef CPA_CUDA_XATTN_STATS_CUH
#define CPA_CUDA_XATTN_STATS_CUH

#include <math.h>

/* Maximum and sum of exp(score - max) of the keys seen so far; (-inf, 0) before any. */
struct group_stats {
    float max, sum;

    /* Goes on with those of others. */
    __device__ void fold(float of, float by) {
        const float most = fmaxf(max, of);
        sum = most == -INFINITY ? sum + by : sum * expf(max - most) + by * expf(of - most);
        max = most;
    }
};

#endif
