/* index_q: a warp makes several heads of a token at a time, whose rotation it reads once. */
#include <math.h>

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

/* Heads of a lane: enough bytes on their way to keep memory busy, in few registers. */
template <typename T>
constexpr int HEADS = 8 / (int)sizeof(T);

template <typename T, int LANES>
constexpr int HEADS_OF_WARP = HEADS<T> * (WARP_LANES / LANES);

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

template <typename T, int LANES>
__global__ void __launch_bounds__(THREADS) index_q(const __grid_constant__ q_args q) {
    constexpr int AT_ONCE = WARP_LANES / LANES;
    __shared__ float shared[WARPS][WARP_LANES * PARTS * PART];
    const cpa_index_q_args &a = q.a;
    const int32_t lane = threadIdx.x % WARP_LANES;
    const int64_t index = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP_LANES;
    const int64_t token = index / q.groups;
    const int32_t begin = (int32_t)(index - token * q.groups) * HEADS_OF_WARP<T, LANES>, first = begin + lane / LANES;
    raw_row<T> raw[HEADS<T>];
    float weight[HEADS<T>];
    if (token >= a.tokens) return;
#pragma unroll
    for (int h = 0; h < HEADS<T>; h++) {
        const int32_t head = first + h * AT_ONCE;
        load_row<T, LANES>(raw[h], (const T *)a.q + token * a.q_row_stride + head * a.dim,
                           head < a.heads ? a.dim : 0, q.whole_q);
        weight[h] = a.weights && head < a.heads
                        ? read_element(a.weights, a.weight_dtype, token * a.weight_row_stride + head)
                        : 0;
    }
    const row_angles<LANES> angles(q.turn, a.rope, a.positions, a.tokens, token, true,
                                   q.turn.kind == TURN_NONE ? 0 : a.positions[token]);
#pragma unroll
    for (int h = 0; h < HEADS<T>; h++) {
        const int32_t head = first + h * AT_ONCE;
        const int64_t at = token * a.heads + head;
        lane_row x;
        if (begin + h * AT_ONCE >= a.heads) break;
        widen_row<T>(x, raw[h]);
        turn_row<LANES>(x, q.turn, angles, a.rope, a.positions, a.tokens, token, true,
                        shared[threadIdx.x / WARP_LANES]);
        finish_row<LANES>(x, a.dim, q.hadamard, q.out_dtype);
        const float scale = store_head<LANES>(q, x, at, head < a.heads);
        if (lane % LANES == 0 && a.weights && head < a.heads)
            a.weights_out[at] = weight[h] * scale * a.softmax_scale * a.head_scale;
    }
}

template <typename T, int LANES>
cpa_status launch(q_args &q, cpa_stream *stream) {
    q.groups = (q.a.heads + HEADS_OF_WARP<T, LANES> - 1) / HEADS_OF_WARP<T, LANES>;
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
    q_args q = {};
    q.a = *args;
    q.hadamard = args->hadamard ? (float)(1 / sqrt((double)args->dim)) : 0;
    return launch_for_elements(args->dtype, [&](auto element) {
        return launch_for_lanes(args->dim, [&](auto lanes) {
            return launch<typename decltype(element)::element, decltype(lanes)::LANES>(q, stream);
        });
    });
}
