/* index_q: a warp makes several heads of a token at a time, whose rotation it reads once. */
#include <math.h>

#include "kernels/cuda/indexer/index_quads.h"
#include "kernels/cuda/indexer/index_turn.cuh"
#include "kernels/cuda/nn/nn.h"

namespace {

struct q_args {
    cpa_index_q_args a;
    row_turn turn;
    float hadamard; /* dim^-0.5, or 0 */
    int32_t groups; /* of heads, in a token: those of a warp */
    cpa_dtype out_dtype; /* CPA_FP8_E4M3: codes, of whichever form */
    bool whole_q, whole_out;
};

/* Heads that a lane makes, one after another. */
constexpr int HEADS = 4;

/* Stores a head; returns its scale. `here`: of the lanes that have one. */
template <int LANES>
__device__ float store_head(const q_args &q, const lane_row &x, int64_t at, bool here) {
    const cpa_index_q_args &a = q.a;
    if (q.out_dtype != CPA_FP8_E4M3) {
        char *row = (char *)a.out + at * a.dim * (q.out_dtype == CPA_F32 ? 4 : 2);
        if (here) store_plain_row<LANES>(row, x, q.out_dtype, a.dim, q.whole_out);
        return 1;
    }
    if (a.format == CPA_INDEX_MXFP4) {
        store_mxfp4<LANES>((uint8_t *)a.out + at * (a.dim / 2), a.scales + at * (a.dim / CPA_INDEX_MXFP4_BLOCK), x,
                           a.dim, q.whole_out, here);
        return 1;
    }
    uint2 codes[PARTS];
    const float scale = row_codes<LANES>(codes, x, a.floor, true);
    if (here) store_codes_of_row<LANES>((uint8_t *)a.out + at * a.dim, codes, a.dim, q.whole_out);
    return scale;
}

/* A head before it is made; zeros of one behind the last. */
template <typename T, int LANES>
struct raw_head {
    raw_row<T> x;
    float weight;

    __device__ raw_head(const q_args &q, int64_t token, int32_t head) : weight(0) {
        const cpa_index_q_args &a = q.a;
        const bool here = head < a.heads;
        load_row<T, LANES>(x, (const T *)a.q + token * a.q_row_stride + head * a.dim, here ? a.dim : 0, q.whole_q);
        if (here && a.weights)
            weight = read_element(a.weights, a.weight_dtype, token * a.weight_row_stride + head);
    }
};

template <typename T, int LANES>
__global__ void __launch_bounds__(THREADS) index_q(const __grid_constant__ q_args q) {
    constexpr int AT_ONCE = WARP_LANES / LANES;
    __shared__ float shared[WARPS][WARP_LANES * PARTS * PART];
    const cpa_index_q_args &a = q.a;
    const int32_t lane = threadIdx.x % WARP_LANES;
    const int64_t index = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP_LANES;
    const int64_t token = index / q.groups;
    if (token >= a.tokens) return;
    const int32_t begin = (int32_t)(index - token * q.groups) * HEADS * AT_ONCE;
    const int32_t end = min(begin + HEADS * AT_ONCE, a.heads);
    raw_head<T, LANES> next(q, token, begin + lane / LANES);
    const row_angles<LANES> angles(q.turn, a.rope, a.positions, a.tokens, token, true,
                                   q.turn.kind == TURN_NONE ? 0 : a.positions[token]);
#pragma unroll 1
    for (int32_t first = begin; first < end; first += AT_ONCE) {
        const int32_t head = first + lane / LANES;
        const int64_t at = token * a.heads + head;
        const float weight = next.weight;
        lane_row x;
        widen_row<T>(x, next.x);
        if (first + AT_ONCE < end) next = raw_head<T, LANES>(q, token, head + AT_ONCE);
        turn_row<LANES>(x, q.turn, angles, a.rope, a.positions, a.tokens, token, true,
                        shared[threadIdx.x / WARP_LANES]);
        finish_row<LANES>(x, a.dim, q.hadamard, q.out_dtype);
        const float scale = store_head<LANES>(q, x, at, head < a.heads);
        if (lane % LANES == 0 && a.weights && head < a.heads)
            a.weights_out[at] = weight * scale * a.softmax_scale * a.head_scale;
    }
}

template <typename T, int LANES>
cpa_status launch(q_args &q, cpa_stream *stream) {
    const int32_t of_warp = HEADS * (WARP_LANES / LANES);
    q.groups = (q.a.heads + of_warp - 1) / of_warp;
    if (q.a.tokens > (int64_t)INT32_MAX * WARPS / q.groups)
        return cpa_cuda_unsupported(stream, "index_q: more tokens than a grid has warps", q.a.tokens);
    const int64_t ctas = (q.a.tokens * q.groups + WARPS - 1) / WARPS;
    q.turn = turn_of<LANES>(q.a.rope);
    q.whole_q = parts_are_aligned<T>(q.a.q, q.a.q_row_stride | q.a.dim);
    q.out_dtype = q.a.format == CPA_INDEX_F32 ? CPA_F32 : q.a.format == CPA_INDEX_BF16 ? CPA_BF16 : CPA_FP8_E4M3;
    q.whole_out = stores_are_aligned(q.a.out, q.a.dim * cpa_dtype_bytes(q.out_dtype), q.out_dtype);
    index_q<T, LANES><<<(unsigned)ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(q);
    return cpa_cuda_launched(stream, "index_q");
}

} // namespace

extern "C" cpa_status cpa_cuda_index_q(const cpa_index_q_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (cpa_cuda_index_q_by_quads(args)) return cpa_cuda_index_q_quads(args, stream);
    q_args q = {};
    q.a = *args;
    q.hadamard = args->hadamard ? (float)(1 / sqrt((double)args->dim)) : 0;
    return launch_for_elements(args->dtype, [&](auto element) {
        return launch_for_lanes(args->dim, [&](auto lanes) {
            return launch<typename decltype(element)::element, decltype(lanes)::LANES>(q, stream);
        });
    });
}
