/* The choice of experts for a few rows in one kernel: the router's product, expert_route and expert_permute in turn, by the
 * CTAs of a cluster. Their warps share the experts, of which each makes the logits of all rows; then each CTA routes its
 * share of the rows, by a warp each; and the first CTA sorts all choices. The router's weights are fetched before the
 * kernel in front, which makes x, has ended. */
#include "kernels/cuda/attend/cluster.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/experts/expert_fused.h"
#include "kernels/cuda/experts/route_token.cuh"

namespace {

constexpr int CTAS = 8, WARPS = 8, THREADS = WARPS * WARP_LANES;
constexpr int MOST_ROWS = 16, ROUTERS = MOST_ROWS / CTAS; /* warps of a CTA that route */
constexpr int MOST_CHOICES = MOST_ROWS * CPA_MOST_TOP_K;

struct choose_args {
    const void *x, *weight;
    int64_t x_stride, weight_stride;
    int32_t inputs;
    float *logits; /* those that `route` reads */
    cpa_expert_route_args route;
    cpa_expert_permute_args permute;
};

/* The products of an expert's row of the router with ROWS rows of x, by a warp, a vector of 8 inputs a lane at a time. */
template <typename T, int ROWS>
__device__ void multiply(const choose_args &a, int32_t expert) {
    const int lane = threadIdx.x % WARP_LANES;
    const T *weights = (const T *)a.weight + expert * a.weight_stride;
    float sums[ROWS] = {};
#pragma unroll(ROWS > 1 ? 2 : 8)
    for (int32_t at = lane * VECTOR<T>; at < a.inputs; at += WARP_LANES * VECTOR<T>) {
        float weight[VECTOR<T>], x[VECTOR<T>];
        widen<T, VECTOR<T>>(weight, *(const unit_of<T, VECTOR<T>> *)(weights + at));
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (row >= a.route.rows) break;
            widen<T, VECTOR<T>>(x, *(const unit_of<T, VECTOR<T>> *)((const T *)a.x + row * a.x_stride + at));
#pragma unroll
            for (int e = 0; e < VECTOR<T>; e++) sums[row] = fmaf(weight[e], x[e], sums[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const float sum = warp_sum(sums[row]);
        if (lane == 0 && row < a.route.rows) a.logits[row * a.route.logits_stride + expert] = sum;
    }
}

/* expert_permute of a few choices, by a CTA: each finds its place by comparing itself with all others. */
__device__ void permute(const cpa_expert_permute_args &a, int32_t (&experts)[MOST_CHOICES]) {
    const int32_t choices = (int32_t)a.rows * a.top_k;
    for (int32_t i = threadIdx.x; i < choices; i += THREADS) {
        const int64_t e = (int64_t)a.ids[i] - a.first_expert;
        experts[i] = e >= 0 && e < a.experts ? (int32_t)e : INT32_MAX; /* elsewhere: behind all others */
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < choices; i += THREADS) {
        const int32_t own = experts[i];
        int32_t place = 0;
        for (int32_t n = 0; n < choices; n++) place += experts[n] < own || (experts[n] == own && n < i);
        a.places[i] = own == INT32_MAX ? -1 : place;
        a.tokens[place] = own == INT32_MAX ? UINT32_MAX : (uint32_t)(i / a.top_k);
    }
    for (int32_t e = threadIdx.x; e <= a.experts; e += THREADS) {
        int32_t before = 0;
        for (int32_t n = 0; n < choices; n++) before += experts[n] < e;
        a.offsets[e] = before;
    }
}

template <typename T, int ROWS>
__global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS)
    expert_choose(const __grid_constant__ choose_args a) {
    __shared__ token_scores scores[ROWS > 1 ? ROUTERS : 1];
    __shared__ int32_t experts[MOST_CHOICES];
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, cta = blockIdx.x;
    for (int32_t e = cta * WARPS + warp; e < a.route.experts; e += CTAS * WARPS) {
        for (int32_t at = lane * 128 / (int)sizeof(T); at < a.inputs; at += WARP_LANES * 128 / (int)sizeof(T))
            prefetch_l2((const T *)a.weight + e * a.weight_stride + at);
    }
    dependent_allow();
    dependent_wait();
    for (int32_t e = cta * WARPS + warp; e < a.route.experts; e += CTAS * WARPS) multiply<T, ROWS>(a, e);
    join_cluster();
    if (warp < (ROWS > 1 ? ROUTERS : 1)) {
        const int32_t row = warp * CTAS + cta;
        if (row < a.route.rows) route_token(a.route, row, scores[warp]);
    }
    join_cluster();
    if (cta == 0) permute(a.permute, experts);
}

template <typename T>
cpa_status launch(const choose_args &a, cpa_stream *stream) {
    return launch_early(a.route.rows > 1 ? expert_choose<T, MOST_ROWS> : expert_choose<T, 1>, dim3(CTAS), THREADS, a,
                        stream, "expert_choose");
}

} // namespace

extern "C" int cpa_cuda_chooses_experts(const cpa_linear_args *router, const cpa_stream *stream) {
    return router->rows <= MOST_ROWS && router->dtype != CPA_F32 && !router->weight_scale && !router->bias &&
           cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER &&
           in_vectors(router->dtype, router->x_stride | router->weight_stride | router->inputs,
                      (uintptr_t)router->x | (uintptr_t)router->weight);
}

extern "C" cpa_status cpa_cuda_expert_choose(const cpa_linear_args *router, const cpa_expert_route_args *route,
                                             const cpa_expert_permute_args *permute, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const choose_args a = {router->x,      router->weight,       router->x_stride, router->weight_stride,
                           router->inputs, (float *)router->out, *route,           *permute};
    return router->dtype == CPA_BF16 ? launch<__nv_bfloat16>(a, stream) : launch<__half>(a, stream);
}
