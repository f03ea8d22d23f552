/* rank_tokens: a CTA takes a row, in which each thread has every THREADS-th token, and finds
 *
 *     1. the largest logit, and NaN
 *     2. the sum of exponentials, and how many logits are larger than that of the row's token
 *     3. the most probable tokens one by one: the best of what the threads have to offer is the next, and the thread that
 *        offered it looks through its tokens for what comes behind that
 *
 * Tokens are compared by a number that orders them by their logits, and equal ones by their ids. */
#include <math.h>

#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP_LANES;

/* Larger for a larger logit, and of equal ones for the smaller token; above 0. -0 is 0. */
__device__ uint64_t order_of(float logit, int32_t token) {
    const uint32_t bits = logit == 0 ? 0 : __float_as_uint(logit);
    const uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)order << 32 | (0xffffffffu - (uint32_t)token);
}

__device__ int32_t token_of(uint64_t order) {
    return (int32_t)(0xffffffffu - (uint32_t)order);
}

/* The largest number of the CTA, for each of its threads. */
__device__ uint64_t cta_largest(uint64_t number, uint64_t *warps) {
    for (int step = WARP_LANES / 2; step > 0; step /= 2) {
        const uint64_t other = __shfl_xor_sync(0xffffffff, number, step);
        number = other > number ? other : number;
    }
    if (threadIdx.x % WARP_LANES == 0) warps[threadIdx.x / WARP_LANES] = number;
    __syncthreads();
    number = warps[0];
    for (int w = 1; w < WARPS; w++) number = warps[w] > number ? warps[w] : number;
    __syncthreads(); /* `warps` is free again */
    return number;
}

template <typename Number>
__device__ Number cta_sum(Number number, Number *warps) {
    number = warp_sum(number);
    if (threadIdx.x % WARP_LANES == 0) warps[threadIdx.x / WARP_LANES] = number;
    __syncthreads();
    number = 0;
    for (int w = 0; w < WARPS; w++) number += warps[w];
    return number;
}

/* The largest order among the tokens of this thread that are below `bound`; 0 if there is none. */
__device__ uint64_t best_below(const float *logits, int32_t vocabulary, uint64_t bound) {
    uint64_t best = 0;
#pragma unroll 4
    for (int32_t token = (int32_t)threadIdx.x; token < vocabulary; token += THREADS) {
        const uint64_t order = order_of(logits[token], token);
        if (order < bound && order > best) best = order;
    }
    return best;
}

__global__ void __launch_bounds__(THREADS) rank_tokens(const __grid_constant__ cpa_rank_tokens_args a) {
    __shared__ uint64_t orders[WARPS];
    __shared__ double sums[WARPS];
    __shared__ int32_t counts[WARPS];
    const int64_t row = blockIdx.x;
    const int32_t vocabulary = (int32_t)a.vocabulary;
    const float *logits = a.logits + row * a.logits_stride;
    dependent_wait();
    dependent_allow();
    int32_t is_nan = 0, larger = 0;
    for (int32_t token = (int32_t)threadIdx.x; token < vocabulary; token += THREADS) is_nan |= isnan(logits[token]);
    uint64_t offer = best_below(logits, vocabulary, UINT64_MAX);
    const float largest = logits[token_of(cta_largest(offer, orders))];
    const bool has_none = __syncthreads_or(is_nan) || isinf(largest);
    const uint32_t token = a.tokens[row * a.tokens_stride];
    const bool is_known = !has_none && token < (uint32_t)vocabulary;
    const float own = is_known ? logits[token] : 0;
    double sum = 0;
    for (int32_t t = (int32_t)threadIdx.x; t < vocabulary; t += THREADS) {
        sum += (double)expf(logits[t] - largest);
        larger += logits[t] > own;
    }
    const double log_sum = (double)largest + log(cta_sum(sum, sums));
    larger = cta_sum(larger, counts);
    cpa_token_ranks *out = &a.ranks[row];
    if (threadIdx.x == 0) {
        out->logprob = is_known ? (float)((double)own - log_sum) : NAN;
        out->rank = is_known ? 1 + larger : 0;
        if (a.logprobs) a.logprobs[row * a.logprobs_stride] = out->logprob;
    }
    int32_t wanted = has_none || !a.top ? 0 : a.top[row];
    wanted = wanted < vocabulary ? wanted : vocabulary;
    for (int32_t i = 0; i < CPA_MOST_TOP_LOGPROBS; i++) {
        cpa_token_logprob next = {CPA_NO_TOKEN, NAN};
        if (i < wanted) { /* alike for all threads */
            const uint64_t best = cta_largest(offer, orders);
            next.token = (uint32_t)token_of(best);
            next.logprob = (float)((double)logits[next.token] - log_sum);
            if (offer == best && i + 1 < wanted) offer = best_below(logits, vocabulary, best);
        }
        if (threadIdx.x == 0) out->top[i] = next;
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_rank_tokens(const cpa_rank_tokens_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "rank_tokens: more rows than a grid has CTAs", args->rows);
    return launch_early(rank_tokens, dim3((unsigned)args->rows), THREADS, *args, stream, "rank_tokens");
}
