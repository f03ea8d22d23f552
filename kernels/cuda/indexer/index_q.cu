/* index_q: a warp makes a few heads of a token, whose rotation it reads once. */
#include <math.h>

#include "kernels/cuda/indexer/index_row.cuh"
#include "kernels/cuda/nn/nn.h"

namespace {

struct q_args {
    cpa_index_q_args a;
    float hadamard; /* dim^-0.5, or 0 */
    int32_t groups; /* of heads, in a token */
    cpa_dtype out_dtype; /* CPA_FP8_E4M3: codes, of whichever form */
    bool whole_q, whole_out;
};

/* Heads of a warp: enough bytes on their way to keep memory busy. */
constexpr int HEADS = 4;

template <typename T, int W>
__global__ void __launch_bounds__(THREADS) index_q(const __grid_constant__ q_args q) {
    __shared__ float shared[WARPS][WARP_LANES * W];
    const cpa_index_q_args &a = q.a;
    const int32_t lane = threadIdx.x % WARP_LANES;
    const int64_t index = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP_LANES;
    const int64_t token = index / q.groups;
    const int32_t first = (int32_t)(index - token * q.groups) * HEADS;
    float x[HEADS][W];
    if (token >= a.tokens) return;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (first + h < a.heads)
            load_row<T, W>(x[h], (const T *)a.q + token * a.q_row_stride + (first + h) * a.dim, a.dim, q.whole_q);
    const row_rotation<W> rotation(a.rope, a.positions, a.tokens, token);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int32_t head = first + h;
        const int64_t at = token * a.heads + head;
        float scale = 1;
        if (head >= a.heads) break;
        finish_row<W>(x[h], a.dim, rotation, a.rope.table != NULL, q.hadamard, q.out_dtype,
                      shared[threadIdx.x / WARP_LANES]);
        if (q.out_dtype != CPA_FP8_E4M3) {
            store_plain_row<W>((char *)a.out + at * a.dim * (q.out_dtype == CPA_F32 ? 4 : 2), x[h], q.out_dtype, a.dim,
                               q.whole_out);
        } else if (a.format == CPA_INDEX_MXFP4) {
            store_mxfp4<W>((uint8_t *)a.out + at * (a.dim / 2), a.scales + at * (a.dim / CPA_INDEX_MXFP4_BLOCK), x[h],
                           a.dim, q.whole_out);
        } else {
            unit_of<uint8_t, W> codes;
            scale = row_codes<W>(codes, x[h], a.floor, true);
            store_row<uint8_t, W>((uint8_t *)a.out + at * a.dim, codes, a.dim, q.whole_out);
        }
        if (lane == 0 && a.weights)
            a.weights_out[at] = read_element(a.weights, a.weight_dtype, token * a.weight_row_stride + head) * scale *
                                a.softmax_scale * a.head_scale;
    }
}

template <typename T, int W>
void launch(q_args &q, cpa_stream *stream) {
    const int64_t ctas = (q.a.tokens * q.groups + WARPS - 1) / WARPS;
    q.whole_q = lanes_are_aligned<T, W>(q.a.q, q.a.q_row_stride | q.a.dim);
    q.out_dtype = q.a.format == CPA_INDEX_F32 ? CPA_F32 : q.a.format == CPA_INDEX_BF16 ? CPA_BF16 : CPA_FP8_E4M3;
    q.whole_out = stores_are_aligned<W>(q.a.out, q.a.dim * cpa_dtype_bytes(q.out_dtype), q.out_dtype);
    index_q<T, W><<<(unsigned)ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(q);
}

} // namespace

extern "C" cpa_status cpa_cuda_index_q(const cpa_index_q_args *args, cpa_stream *stream) {
    const int32_t groups = (args->heads + HEADS - 1) / HEADS;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->tokens > (int64_t)INT32_MAX * WARPS / groups)
        return cpa_cuda_unsupported(stream, "index_q: more tokens than a grid has warps", args->tokens);
    q_args q = {};
    q.a = *args;
    q.hadamard = args->hadamard ? (float)(1 / sqrt((double)args->dim)) : 0;
    q.groups = groups;
    launch_for_elements(args->dtype, [&](auto element) {
        launch_for_width(args->dim, [&](auto width) {
            launch<typename decltype(element)::element, decltype(width)::W>(q, stream);
        });
    });
    return cpa_cuda_launched(stream, "index_q");
}
