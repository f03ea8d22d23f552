/* index_q of the common form: a warp makes heads of a token, eight at a time, of which the next are on their way
 * meanwhile. */
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/indexer/index_quad.cuh"
#include "kernels/cuda/indexer/index_quads.h"
#include "kernels/cuda/nn/nn.h"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP_LANES;
constexpr int MOST_HEADS = 4 * ROWS; /* that a warp makes, where there are many */

struct q_args {
    cpa_index_q_args a;
    int32_t of_warp, groups; /* heads that a warp makes, and how many such groups a token has */
};

/* One behind the last is as the last. */
__device__ void load_head(raw_row &raw, const cpa_index_q_args &a, int32_t token, int32_t head) {
    load_row(raw, (const __nv_bfloat16 *)a.q + token * a.q_row_stride + min(head, a.heads - 1) * ROW);
}

template <quad_turn TURN>
__global__ void __launch_bounds__(THREADS) index_q_quads(const __grid_constant__ q_args q) {
    const cpa_index_q_args &a = q.a;
    const int32_t index = (int32_t)(blockIdx.x * WARPS + threadIdx.x / WARP_LANES), token = index / q.groups;
    if (token >= a.tokens) return;
    const int32_t begin = (index - token * q.groups) * q.of_warp, end = min(begin + q.of_warp, a.heads);
    const int32_t position = position_in_table(a.rope, __ldg(a.positions + token));
    raw_row raw;
    quad_angles<TURN> angles;
    load_head(raw, a, token, begin + quad_of_warp());
    angles.load(a.rope, position);
#pragma unroll 1
    for (int32_t first = begin; first < end; first += ROWS) {
        const int32_t head = first + quad_of_warp();
        const int64_t at = (int64_t)token * a.heads + head;
        quad_row x;
        packed_row packed;
        widen_row(x, raw);
        if (first + ROWS < end) load_head(raw, a, token, head + ROWS);
        angles.turn(x);
        round_parts<TURN == QUAD_HALVES ? 0 : 2, TURN == QUAD_HALVES ? 2 : 4>(x); /* the others are of bf16 */
        finish_row(packed, x, position);
        const bool weighs = quad_lane() == 0 && a.weights && head < a.heads;
        const float weight =
            weighs ? read_element(a.weights, a.weight_dtype, token * a.weight_row_stride + head) : 0;
        const float scale = store_row_codes((uint8_t *)a.out + at * ROW, packed, a.floor, head < a.heads);
        if (weighs) a.weights_out[at] = weight * scale * a.softmax_scale * a.head_scale;
    }
}

} // namespace

extern "C" int cpa_cuda_index_q_by_quads(const cpa_index_q_args *a) {
    const int64_t most = (int64_t)INT32_MAX / CPA_INDEX_MOST_HEADS;
    return a->dtype == CPA_BF16 && a->dim == ROW && a->hadamard && a->format == CPA_INDEX_FP8 &&
           a->tokens <= most &&
           (((uintptr_t)a->q | (uintptr_t)a->out) % 16 | (uint64_t)a->q_row_stride * 2 % 16) == 0 &&
           quad_turn_of(a->rope) != QUAD_OTHER;
}

extern "C" cpa_status cpa_cuda_index_q_quads(const cpa_index_q_args *args, cpa_stream *stream) {
    const int64_t few = 16 * (int64_t)cpa_cuda_device_of(stream)->multiprocessors; /* warps that all run at once */
    const int32_t of_warp = args->tokens * args->heads <= few * ROWS ? ROWS : MOST_HEADS;
    const int32_t groups = (args->heads + of_warp - 1) / of_warp;
    const q_args q = {*args, of_warp, groups};
    const unsigned ctas = (unsigned)((args->tokens * groups + WARPS - 1) / WARPS);
    launch_for_quad_turn(quad_turn_of(args->rope), [&](auto tag) {
        index_q_quads<decltype(tag)::TURN><<<ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(q);
    });
    return cpa_cuda_launched(stream, "index_q");
}
