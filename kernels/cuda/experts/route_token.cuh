/* How a warp routes a token: expert_route. Files that include it are compiled without contraction to fma, as bits are the
 * host's. */
#ifndef CPA_CUDA_ROUTE_TOKEN_CUH
#define CPA_CUDA_ROUTE_TOKEN_CUH

#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/nn.h"
#include "kernels/route.h"

static_assert(CPA_ROUTE_SUMS == WARP_LANES, "a lane has a sum, and warp_sum adds them as the host does");
static_assert(CPA_MOST_TOP_K <= WARP_LANES, "a lane has a choice");

/* What a warp knows of its token; shared. */
struct token_scores {
    float score[CPA_MOST_EXPERTS];
    float key[CPA_MOST_EXPERTS];    /* orders experts; -infinity: takes no part */
    float groups[CPA_MOST_EXPERTS]; /* scores of groups */
    bool taking_part[CPA_MOST_EXPERTS];
};

/* The first of n keys, for all lanes. */
__device__ inline int32_t first_of(const float *keys, int32_t n) {
    float best = -INFINITY;
    int32_t at = n;
    for (int32_t i = threadIdx.x % WARP_LANES; i < n; i += WARP_LANES) {
        if (cpa_route_is_before(keys[i], i, best, at)) best = keys[i], at = i;
    }
    for (int step = WARP_LANES / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, best, step);
        const int32_t other_at = __shfl_xor_sync(0xffffffff, at, step);
        if (cpa_route_is_before(other, other_at, best, at)) best = other, at = other_at;
    }
    return at;
}

/* false if a number is wild. */
__device__ inline bool score_experts(const cpa_expert_route_args &a, const float *logits, token_scores &t) {
    const int lane = threadIdx.x % WARP_LANES;
    bool wild = false;
    float largest = -INFINITY;
    double sum = 0;
    for (int32_t e = lane; e < a.experts; e += WARP_LANES) {
        wild |= cpa_route_is_wild(logits[e]);
        largest = fmaxf(largest, logits[e]);
    }
    if (__any_sync(0xffffffff, wild)) return false;
    largest = warp_max(largest);
    if (a.scores == CPA_SCORES_SOFTMAX) {
        for (int32_t e = lane; e < a.experts; e += WARP_LANES) sum += cpa_route_exp(logits[e], largest);
        sum = warp_sum(sum);
    }
    for (int32_t e = lane; e < a.experts; e += WARP_LANES) {
        t.score[e] = a.scores == CPA_SCORES_SOFTMAX ? (float)(cpa_route_exp(logits[e], largest) / sum)
                                                    : cpa_route_sigmoid(logits[e]);
        t.key[e] = a.bias ? t.score[e] + a.bias[e] : logits[e];
        wild |= cpa_route_is_wild(t.key[e]);
    }
    return !__any_sync(0xffffffff, wild);
}

__device__ inline float group_score(const cpa_expert_route_args &a, const token_scores &t, int32_t first, int32_t n) {
    const bool two = a.group_scores == CPA_GROUP_BEST_TWO && n > 1;
    float best = -INFINITY, second = -INFINITY;
    for (int32_t e = first; e < first + n; e++) {
        const float x = two && !a.bias ? t.score[e] : t.key[e];
        second = x > best ? best : x > second ? x : second;
        best = x > best ? x : best;
    }
    return two ? best + second : best;
}

/* Takes the experts of all groups out but for those of the best ones. */
__device__ inline void limit_groups(const cpa_expert_route_args &a, token_scores &t) {
    const int lane = threadIdx.x % WARP_LANES;
    const int32_t of_group = a.experts / a.n_group;
    for (int32_t g = lane; g < a.n_group; g += WARP_LANES) {
        t.groups[g] = group_score(a, t, g * of_group, of_group);
        t.taking_part[g] = false;
    }
    __syncwarp();
    for (int32_t i = 0; i < a.topk_group; i++) {
        const int32_t g = first_of(t.groups, a.n_group);
        __syncwarp();
        if (lane == 0) t.groups[g] = -INFINITY, t.taking_part[g] = true;
        __syncwarp();
    }
    for (int32_t e = lane; e < a.experts; e += WARP_LANES) {
        if (!t.taking_part[e / of_group]) t.key[e] = -INFINITY;
    }
}

/* The experts of a row, and their weights. By all lanes. */
__device__ inline void route_token(const cpa_expert_route_args &a, int64_t row, token_scores &t) {
    const int lane = threadIdx.x % WARP_LANES;
    int32_t *ids = a.ids + row * a.top_k, id = lane;
    float *weights = a.weights + row * a.top_k, score = NAN, sum = 0;
    if (score_experts(a, a.logits + row * a.logits_stride, t)) {
        __syncwarp();
        if (a.topk_group < a.n_group) limit_groups(a, t);
        __syncwarp();
        for (int32_t k = 0; k < a.top_k; k++) { /* lane k keeps choice k */
            const int32_t chosen = first_of(t.key, a.experts);
            const float chosen_score = t.score[chosen];
            if (lane == k) id = chosen, score = chosen_score;
            sum += chosen_score;
            __syncwarp();
            if (lane == 0) t.key[chosen] = -INFINITY;
            __syncwarp();
        }
        score = cpa_route_weight(score, sum, a.normalise, a.scale);
    }
    if (lane < a.top_k) ids[lane] = id, weights[lane] = score;
    __syncwarp();
}

#endif
