/* The merge of two partial states on the device; see kernels/host/attend/state.h. */
#ifndef CPA_CUDA_STATE_CUH
#define CPA_CUDA_STATE_CUH

#include <math.h>
#include <stdint.h>

/* One step of the fold: O = a O + b O_state; b = 0 changes nothing, with a = 0 the sum so far does not count. */
struct alignas(16) fold_step {
    float a, b;
    int32_t from; /* row of the state */
};

/* +inf counts as -inf, and NaN in foreign states. */
__device__ inline float counted_lse(float lse, int32_t foreign) {
    return lse < INFINITY || (isnan(lse) && !foreign) ? lse : -INFINITY;
}

/* The weights of folding lse_b into lse_a, and the new lse_a. All NaN if one of the
 * two is and the second not -inf: a NaN in lse_a has made the sum NaN before. */
__device__ inline fold_step fold_lse(float &lse_a, float lse_b, int32_t from) {
    if (lse_b == -INFINITY) return {1, 0, from};
    const float max = fmaxf(lse_a, lse_b), w_a = expf(lse_a - max), w_b = expf(lse_b - max), sum = w_a + w_b;
    lse_a = max + logf(sum);
    return {w_a / sum, w_b / sum, from};
}

/* 1 / (1 + exp(sink - lse)): what the sink of a head leaves of a row's result (cpattn/score.h). 1 where the row is
 * empty, as its O is 0. */
__device__ inline float sink_factor(const float *sinks, int32_t head, float lse) {
    return lse == -INFINITY ? 1 : __fdividef(1, 1 + __expf(sinks[head] - lse));
}

template <int UNIT>
__device__ inline void add_part(float (&value)[UNIT], const fold_step &step, const float (&part)[UNIT]) {
    if (step.b == 0) return;
#pragma unroll
    for (int e = 0; e < UNIT; e++) value[e] = step.a == 0 ? part[e] : fmaf(step.b, part[e], step.a * value[e]);
}

#endif
