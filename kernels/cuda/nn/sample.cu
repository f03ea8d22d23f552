/* sample: a cluster of CTAs takes a row of logits, each of them every SHARES-th part of it, and reads it from the
 * caches again in each pass:
 *
 *     1. the largest logit, and NaN; which is all there is to do without a temperature
 *     2. for top_k, and then for top_p, the least z that stays: its bits from the upper ones on, by a histogram of the
 *        next ones over the tokens whose upper bits they are, of how many tokens or how much weight each value has
 *     3. the largest z + gumbel of what stays
 *
 * Biases are few, and looked for where a filter of bits in shared memory says that a token may have one.
 *
 * The numbers are those of kernels/draw.h, and sums of weights are integers, so that the tokens are the host's. Where
 * devices have no clusters, a row is one CTA's. */
#include <math.h>

#include "kernels/cuda/device/team.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/draw.h"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP_LANES, SHARES = 8, BINS = 2048, FILTER_BITS = 4096;

/* The largest of some numbers, the first token that has it, and whether one of them was NaN. */
template <typename Number>
struct best_token {
    Number value;
    int32_t token, has_nan;
};

/* What a CTA found, for the others of its row. */
struct findings {
    best_token<float> adjusted, plain;
    double sum;
    best_token<double> drawn;
};

struct shared_memory {
    uint32_t low[BINS], high[BINS]; /* halves of the 64-bit sums of this CTA: atomic additions of 32 bits are quick */
    uint64_t sums[BINS];            /* over all CTAs of the row, of this one's part of the bins */
    uint64_t warp_sums[WARPS];
    int32_t bin;
    uint64_t before;
    findings own;
    best_token<float> floats[WARPS];
    best_token<double> doubles[WARPS];
    double numbers[WARPS];
    uint32_t bias_filter[FILTER_BITS / 32];
};

/* A row and its rules. */
struct sampled_row {
    const float *logits;
    const uint32_t *in_prompt, *in_output; /* NULL: no token is */
    const uint32_t *output_counts;         /* NULL: 1 for all in_output */
    const uint32_t *path_tokens;
    const int32_t *path_parents;
    int32_t path_end, path_entries; /* -1: no path */
    const uint32_t *mask;           /* NULL: any token */
    const uint32_t *bias_tokens;    /* [biases] */
    const float *bias_values;
    const uint32_t *bias_filter; /* the bits of their tokens, modulo FILTER_BITS */
    int32_t biases;
    float temperature, top_p, min_p;
    cpa_draw_penalties penalties;
    int32_t top_k, vocabulary;
    uint64_t key;
    float largest; /* the largest logit after bias, penalties and mask */

    __device__ sampled_row(const cpa_sample_args &a, int64_t row);
    __device__ void filter_biases(uint32_t *filter);
    /* The logit after bias, penalties and mask. */
    __device__ float adjusted(int32_t token) const {
        float l = logits[token];
        if (mask && !(mask[token / 32] >> (token % 32) & 1)) return cpa_draw_leave_out(l);
        if (biases > 0 && bias_filter[token % FILTER_BITS / 32] >> (token % 32) & 1)
            l = cpa_draw_add_bias(l, bias_tokens, bias_values, biases, token);
        if (!in_prompt && !in_output && path_end < 0) return l;
        const uint32_t bit = 1u << (token % 32);
        const bool prompt = in_prompt && (in_prompt[token / 32] & bit);
        uint32_t outputs = cpa_draw_times_on_path(path_tokens, path_parents, path_entries, path_end, token);
        if (in_output && (in_output[token / 32] & bit)) outputs += output_counts ? output_counts[token] : 1;
        return cpa_draw_penalise(l, prompt, outputs, penalties);
    }
    __device__ float z(int32_t token) const { return (adjusted(token) - largest) / temperature; }
};

/* What is out of range becomes what changes nothing. */
__device__ float number_of(const float *numbers, int64_t row, float least, float most) {
    const float number = numbers ? numbers[row] : 0;
    return number > least && number < most ? number : 0;
}

__device__ sampled_row::sampled_row(const cpa_sample_args &a, int64_t row) {
    const int64_t sequence = a.sequence ? a.sequence[row] : -1, words = (a.vocabulary + 31) / 32;
    const bool known = sequence >= 0 && sequence < a.sequences;
    logits = a.logits + row * a.logits_stride;
    in_prompt = known && a.in_prompt ? a.in_prompt + sequence * words : NULL;
    in_output = known && a.in_output ? a.in_output + sequence * words : NULL;
    output_counts = known && a.output_counts ? a.output_counts + sequence * a.vocabulary : NULL;
    path_tokens = a.path_tokens;
    path_parents = a.path_parents;
    path_end = a.path_ends ? a.path_ends[row] : -1;
    path_entries = (int32_t)a.path_entries;
    const int64_t mask_index = a.mask_index ? a.mask_index[row] : -1;
    mask = mask_index >= 0 && mask_index < a.n_masks ? a.masks + mask_index * words : NULL;
    const int64_t first = a.bias_count ? a.bias_first[row] : 0;
    biases = a.bias_count ? a.bias_count[row] : 0;
    if (first < 0 || biases < 0 || first + biases > a.bias_entries) biases = 0;
    bias_tokens = a.bias_tokens + first;
    bias_values = a.bias_values + first;
    bias_filter = NULL;
    temperature = number_of(a.temperature, row, 0, INFINITY);
    top_p = number_of(a.top_p, row, 0, 1);
    min_p = number_of(a.min_p, row, 0, CPA_DRAW_ABOVE_ONE);
    penalties.repetition = number_of(a.repetition, row, 0, INFINITY);
    penalties.presence = number_of(a.presence, row, -INFINITY, INFINITY);
    penalties.frequency = number_of(a.frequency, row, -INFINITY, INFINITY);
    top_k = a.top_k ? a.top_k[row] : 0;
    vocabulary = (int32_t)a.vocabulary;
    key = cpa_draw_key(a.seed ? a.seed[row] : 0, a.position ? a.position[row] : 0);
    largest = 0;
}

/* Called by all threads of the CTA. */
__device__ void sampled_row::filter_biases(uint32_t *filter) {
    bias_filter = filter;
    if (biases == 0) return;
    for (int i = threadIdx.x; i < FILTER_BITS / 32; i += THREADS) filter[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < biases; i += THREADS)
        atomicOr(&filter[bias_tokens[i] % FILTER_BITS / 32], 1u << (bias_tokens[i] % 32));
    __syncthreads();
}

/* visit(token) for the tokens of this thread, in ascending order. */
template <typename Visit>
__device__ void for_tokens(const team &cta, int32_t vocabulary, const Visit &visit) {
    const int32_t step = THREADS * cta.size();
#pragma unroll 4
    for (int32_t token = cta.rank() * THREADS + (int32_t)threadIdx.x; token < vocabulary; token += step) visit(token);
}

/* ---- Over the threads of a row ---- */

/* Of equal numbers the first token's; a token of -1 has none. */
template <typename Number>
__device__ void take_better(best_token<Number> &a, const best_token<Number> &b) {
    const int32_t has_nan = a.has_nan | b.has_nan;
    if (b.token >= 0 && (a.token < 0 || b.value > a.value || (b.value == a.value && b.token < a.token))) a = b;
    a.has_nan = has_nan;
}

/* Over the CTA, for each of its threads; `warps` is not in use. */
template <typename Number>
__device__ best_token<Number> cta_best(best_token<Number> best, best_token<Number> *warps) {
    for (int step = WARP_LANES / 2; step > 0; step /= 2) {
        best_token<Number> other;
        other.value = __shfl_xor_sync(0xffffffff, best.value, step);
        other.token = __shfl_xor_sync(0xffffffff, best.token, step);
        other.has_nan = __shfl_xor_sync(0xffffffff, best.has_nan, step);
        take_better(best, other);
    }
    if (threadIdx.x % WARP_LANES == 0) warps[threadIdx.x / WARP_LANES] = best;
    __syncthreads();
    best = warps[0];
    for (int w = 1; w < WARPS; w++) take_better(best, warps[w]);
    __syncthreads(); /* `warps` is free again */
    return best;
}

/* Over the row; `own` is written once. */
template <typename Number>
__device__ best_token<Number> row_best(const team &cta, best_token<Number> best, best_token<Number> *warps,
                                       best_token<Number> &own) {
    best = cta_best(best, warps);
    if (threadIdx.x == 0) own = best;
    cta.sync();
    best = cta.read(own, 0);
    for (int c = 1; c < cta.size(); c++) take_better(best, cta.read(own, c));
    return best;
}

/* The logarithm of the sum of exp(logit - largest) over the row. */
__device__ double log_of_sum(const team &cta, const sampled_row &row, float largest, shared_memory &shared) {
    double sum = 0;
    for_tokens(cta, row.vocabulary, [&](int32_t token) { sum += (double)expf(row.logits[token] - largest); });
    sum = warp_sum(sum);
    if (threadIdx.x % WARP_LANES == 0) shared.numbers[threadIdx.x / WARP_LANES] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += shared.numbers[w];
    if (threadIdx.x == 0) shared.own.sum = sum;
    cta.sync();
    sum = 0;
    for (int c = 0; c < cta.size(); c++) sum += cta.read(shared.own.sum, c);
    return log(sum);
}

/* ---- The least z that stays ---- */

/* The order of -inf: all stay. */
constexpr uint32_t LAST_ORDER = 0x7f800000u;

/* Adds to a bin. The upper half of a sum is touched where the lower one overflows. */
__device__ void add_to_bin(shared_memory &shared, uint32_t bin, uint64_t mass) {
    const uint32_t low = (uint32_t)mass, before = atomicAdd(&shared.low[bin], low);
    const uint32_t high = (uint32_t)(mass >> 32) + (before + low < before ? 1 : 0);
    if (high) atomicAdd(&shared.high[bin], high);
}

/* The sums of all CTAs of the row: each adds up its part of the bins. Then sums[b] of this thread is that of bin
 * threadIdx.x * BINS / THREADS + b. */
__device__ void share_bins(const team &cta, shared_memory &shared, uint64_t (&sums)[BINS / THREADS]) {
    const int part = BINS / cta.size();
    cta.sync();
    for (int i = threadIdx.x; i < part; i += THREADS) {
        const int bin = cta.rank() * part + i;
        uint64_t sum = 0;
        for (int c = 0; c < cta.size(); c++)
            sum += ((uint64_t)cta.read(shared.high[bin], c) << 32) + cta.read(shared.low[bin], c);
        shared.sums[i] = sum;
    }
    cta.sync();
#pragma unroll
    for (int b = 0; b < BINS / THREADS; b++) {
        const int bin = (int)threadIdx.x * (BINS / THREADS) + b;
        sums[b] = cta.read(shared.sums[bin % part], bin / part);
    }
}

/* The first bin at which `reaches` is true of *before and all bins up to it, which it is not of nothing; *before
 * becomes what lies in front of that bin. -1 if there is none. *total becomes the sum of everything where it is 0. */
template <typename Reaches>
__device__ int32_t find_bin(shared_memory &shared, const uint64_t (&sums)[BINS / THREADS], uint64_t *before,
                            uint64_t *total, const Reaches &reaches) {
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    uint64_t own = 0, upto, sum = 0, all = *before;
#pragma unroll
    for (int b = 0; b < BINS / THREADS; b++) own += sums[b];
    upto = own;
    for (int step = 1; step < WARP_LANES; step *= 2) {
        const uint64_t other = __shfl_up_sync(0xffffffff, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == WARP_LANES - 1) shared.warp_sums[warp] = upto;
    if (threadIdx.x == 0) shared.bin = -1;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) sum = all + upto - own;
        all += shared.warp_sums[w];
    }
    if (*total == 0) *total = all;
    if (!reaches(sum, *total) && reaches(sum + own, *total)) {
#pragma unroll
        for (int b = 0; b < BINS / THREADS; b++) {
            const uint64_t next = sum + sums[b];
            if (!reaches(sum, *total) && reaches(next, *total)) {
                shared.bin = (int32_t)threadIdx.x * (BINS / THREADS) + b;
                shared.before = sum;
            }
            sum = next;
        }
    }
    __syncthreads();
    const int32_t bin = shared.bin;
    if (bin >= 0) *before = shared.before;
    __syncthreads(); /* the next search may write */
    return bin;
}

/* The least order (cpa_draw_order) at which `reaches` is true of the sum of what mass(z, order) says of each token up
 * to it, and of that of all; that of -inf if there is none. */
template <typename Mass, typename Reaches>
__device__ uint32_t find_order(const team &cta, const sampled_row &row, shared_memory &shared, const Mass &mass,
                               const Reaches &reaches) {
    constexpr int SHIFTS[] = {20, 10, 0}; /* of 31 bits: 11, 10 and 10 */
    uint32_t found = 0;
    uint64_t before = 0, total = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = SHIFTS[level], bits = level == 0 ? 11 : 10;
        for (int b = threadIdx.x; b < BINS; b += THREADS) shared.low[b] = shared.high[b] = 0;
        __syncthreads();
        for_tokens(cta, row.vocabulary, [&](int32_t token) {
            const float z = row.z(token);
            const uint32_t order = cpa_draw_order(z);
            if (order >> shift >> bits != found) return;
            const uint64_t amount = mass(z, order);
            if (amount) add_to_bin(shared, (order >> shift) & ((1u << bits) - 1), amount);
        });
        uint64_t sums[BINS / THREADS];
        share_bins(cta, shared, sums);
        const int32_t bin = find_bin(shared, sums, &before, &total, reaches);
        if (bin < 0) return LAST_ORDER;
        found = found << bits | (uint32_t)bin;
    }
    return found;
}

/* The order up to which tokens stay, by top_k and top_p. */
__device__ uint32_t last_that_stays(const team &cta, const sampled_row &row, shared_memory &shared) {
    uint32_t last = LAST_ORDER;
    if (row.top_k > 0 && row.top_k < row.vocabulary) {
        const uint64_t wanted = (uint64_t)row.top_k;
        last = find_order(
            cta, row, shared, [](float, uint32_t order) { return (uint64_t)(order < LAST_ORDER); },
            [&](uint64_t sum, uint64_t) { return sum >= wanted; });
    }
    if (row.top_p > 0) {
        const uint32_t of = last;
        last = find_order(
            cta, row, shared, [&](float z, uint32_t order) { return order <= of ? cpa_draw_weight(z) : (uint64_t)0; },
            [&](uint64_t sum, uint64_t total) { return cpa_draw_reaches(sum, total, row.top_p); });
    }
    return last;
}

/* ---- The draw ---- */

/* Whether exp(z) is at least min_p, which most tokens are too far from to need the exact exponential. */
struct min_p_rule {
    float least, surely, min_p;
    __device__ min_p_rule(float p) : min_p(p) {
        const float margin = 1e-3f;
        least = p > 0 ? logf(p) - margin : -INFINITY;
        surely = p > 0 ? least + 2 * margin : -INFINITY;
    }
    __device__ bool keeps(float z) const {
        return z >= surely || (z >= least && cpa_draw_exp((double)z) >= (double)min_p);
    }
};

/* More than z + gumbel(key, token), by a little: with v = 1 - u, -ln u >= v, so that gumbel <= -ln v. */
__device__ float bound_of(float z, uint64_t key, int32_t token) {
    const float ln2 = 0x1.62e430p-1f, margin = 1e-3f;
    const uint64_t h = cpa_mix64(key + (uint64_t)(token + 1) * CPA_GOLDEN);
    const uint32_t v = ~(uint32_t)(h >> 32); /* of 2^32, rounded down */
    return z + margin + (v ? (32 - __log2f((float)v)) * ln2 : (float)CPA_DRAW_MOST_GUMBEL);
}

__device__ best_token<double> score_of(const sampled_row &row, int32_t token, float z) {
    return {(double)z + cpa_draw_gumbel(row.key, token), token, 0};
}

/* The token with the largest z + gumbel of those that stay. Each thread looks for its token of the largest bound, and
 * computes that one exactly; then those whose bound is not below the best of the CTA, which are few. */
__device__ int32_t draw(const team &cta, const sampled_row &row, uint32_t last, shared_memory &shared) {
    const float farthest = -41; /* the largest has z = 0 and a gumbel above -3.7, and none is CPA_DRAW_MOST_GUMBEL */
    const min_p_rule rule(row.min_p);
    float bound = -INFINITY, second = -INFINITY, bound_z = 0;
    int32_t bound_token = -1;
    auto for_kept = [&](auto visit) {
        for_tokens(cta, row.vocabulary, [&](int32_t token) {
            const float z = row.z(token);
            if (z >= farthest && cpa_draw_order(z) <= last && rule.keeps(z)) visit(token, z);
        });
    };
    for_kept([&](int32_t token, float z) {
        const float of_token = bound_of(z, row.key, token);
        if (of_token > bound) {
            second = bound, bound = of_token, bound_z = z, bound_token = token;
        } else {
            second = fmaxf(second, of_token);
        }
    });
    best_token<double> best = {0, -1, 0};
    if (bound_token >= 0) best = score_of(row, bound_token, bound_z);
    best = cta_best(best, shared.doubles);
    if (best.token >= 0 && (double)second >= best.value) {
        const double least = best.value;
        for_kept([&](int32_t token, float z) {
            if ((double)bound_of(z, row.key, token) >= least) take_better(best, score_of(row, token, z));
        });
    }
    best = row_best(cta, best, shared.doubles, shared.own.drawn);
    return best.token;
}

/* ---- The kernel ---- */

__global__ void __launch_bounds__(THREADS, 1) sample(const __grid_constant__ cpa_sample_args a) {
    __shared__ shared_memory shared;
    const team cta;
    const int64_t index = blockIdx.x / cta.size(), given = a.given ? a.given[index] : -1;
    sampled_row row(a, index);
    best_token<float> plain = {0, -1, 0}, adjusted = {0, -1, 0};
    row.filter_biases(shared.bias_filter);
    for_tokens(cta, row.vocabulary, [&](int32_t token) {
        const float l = row.logits[token], p = row.adjusted(token);
        take_better(plain, {l, token, isnan(l)});
        take_better(adjusted, {p, token, isnan(p)});
    });
    plain = row_best(cta, plain, shared.floats, shared.own.plain);
    adjusted = row_best(cta, adjusted, shared.floats, shared.own.adjusted);
    row.largest = adjusted.value;
    uint32_t token = CPA_NO_TOKEN;
    if (given >= 0) {
        token = (uint32_t)given;
    } else if (!adjusted.has_nan && !isinf(adjusted.value)) {
        token = (uint32_t)adjusted.token;
        if (row.temperature > 0) {
            const uint32_t last = last_that_stays(cta, row, shared);
            token = (uint32_t)draw(cta, row, last, shared);
        }
    }
    float logprob = NAN;
    if (a.logprobs && token < (uint32_t)row.vocabulary && !plain.has_nan) {
        const double log_sum = log_of_sum(cta, row, plain.value, shared);
        logprob = (float)((double)row.logits[token] - (double)plain.value - log_sum);
    }
    if (cta.rank() == 0 && threadIdx.x == 0) {
        a.tokens[index * a.tokens_stride] = token;
        if (a.logprobs) a.logprobs[index * a.logprobs_stride] = logprob;
    }
    cta.sync(); /* the others may still read this CTA's shared memory */
}

} // namespace

extern "C" cpa_status cpa_cuda_sample(const cpa_sample_args *args, cpa_stream *stream) {
    const cpa_cuda_device *device = cpa_cuda_device_of(stream);
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX / SHARES)
        return cpa_cuda_unsupported(stream, "sample: more rows than a grid has clusters", args->rows);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = SHARES, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    const bool clusters = device->path == CPA_CUDA_HOPPER;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)args->rows * (clusters ? SHARES : 1));
    config.blockDim = dim3(THREADS);
    config.stream = cpa_cuda_handle(stream);
    config.attrs = &attribute;
    config.numAttrs = clusters ? 1 : 0;
    return cpa_cuda_check(&stream->error, cudaLaunchKernelEx(&config, sample, *args), "sample");
}
