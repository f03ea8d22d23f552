/* The kernels of the unfused reference: softmax of whole rows of masked scores, one CTA a row and head, and |x|. They
 * share nothing with attend. */
#include <math.h>

#include "kernels/cuda/check/reference.h"

namespace {

constexpr int THREADS = 128;

__device__ bool sees(const cpa_mask &mask, int64_t q, int64_t k) {
    if (mask.causal && k > q) return false;
    if (mask.right > 0 && k - q >= mask.right) return false;
    return mask.window == 0 || q - k < mask.window || k < mask.sinks;
}

template <bool Max>
__device__ float reduce(float value) {
    __shared__ float all[THREADS];
    __syncthreads();
    all[threadIdx.x] = value;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const float a = all[threadIdx.x], b = all[threadIdx.x + half];
            all[threadIdx.x] = Max ? fmaxf(a, b) : a + b;
        }
    }
    __syncthreads();
    return all[0];
}

__global__ void __launch_bounds__(THREADS) softmax_rows(const cpa_reference_attend_args a, float *scores) {
    const int64_t row = blockIdx.x, head = blockIdx.y;
    float *s = scores + (head * a.rows + row) * a.keys;
    const int64_t q = a.q_positions[row], limit = a.limit_base + a.limits[row];
    float max = -INFINITY, sum = 0;
    for (int64_t k = threadIdx.x; k < a.keys; k += THREADS) {
        if (k >= limit || !sees(a.mask, q, a.k_positions[k])) s[k] = -INFINITY;
        max = fmaxf(max, s[k]);
    }
    max = reduce<true>(max);
    for (int64_t k = threadIdx.x; k < a.keys; k += THREADS) {
        s[k] = max == -INFINITY ? 0 : expf(s[k] - max);
        sum += s[k];
    }
    sum = reduce<false>(sum);
    for (int64_t k = threadIdx.x; k < a.keys && sum > 0; k += THREADS) s[k] /= sum;
    if (threadIdx.x == 0) a.lse[row * a.shape.q_heads + head] = sum > 0 ? max + logf(sum) : -INFINITY;
}

__global__ void __launch_bounds__(THREADS) magnitudes(float *dst, const float *src, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i < n) dst[i] = fabsf(src[i]);
}

} // namespace

extern "C" cpa_status cpa_cuda_reference_softmax(const cpa_reference_attend_args *args, float *scores,
                                                 cpa_stream *stream) {
    const dim3 grid((unsigned)args->rows, (unsigned)args->shape.q_heads);
    softmax_rows<<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(*args, scores);
    return cpa_cuda_launched(stream, "reference softmax");
}

extern "C" cpa_status cpa_cuda_reference_magnitude(float *dst, const float *src, int64_t n, cpa_stream *stream) {
    magnitudes<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, cpa_cuda_handle(stream)>>>(dst, src, n);
    return cpa_cuda_launched(stream, "reference magnitude");
}
