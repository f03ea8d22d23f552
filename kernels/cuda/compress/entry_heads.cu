/* q_norm_rope_kv_write and inverse_rope_quant: a warp has a head of a row, or the row of a token that goes to the
 * cache, 32 bytes a lane at 16 bits. blockIdx.x is the row, and blockIdx.y which of its warps a CTA has. */
#include "kernels/cuda/compress/entry_row.cuh"
#include "kernels/cuda/nn/nn.h"

namespace {

__device__ int32_t warp_of_row() {
    return (int32_t)(blockIdx.y * WARPS + threadIdx.x / WARP_LANES);
}

/* ---- q_norm_rope_kv_write ---- */

struct q_args {
    cpa_q_norm_rope_kv_write_args call;
    entry_pool pool;
};

template <typename T>
__device__ void write_row(const q_args &q, int64_t token, int lane) {
    const cpa_q_norm_rope_kv_write_args &a = q.call;
    const int64_t slot = a.slots[token];
    lane_part x;
    if (slot < 0) return;
    load_part(x, (const T *)a.kv_rows + token * a.kv_stride, lane);
    turn_columns(x, lane * PART, a.rope, a.positions[token], 1);
#pragma unroll
    for (int e = 0; e < PART; e++) x[e] = to_float(from_float<T>(x[e]));
    store_entry(q.pool, token, slot, x, lane);
}

template <typename T>
__device__ void norm_head(const cpa_q_norm_rope_kv_write_args &a, int64_t token, int32_t head, int lane) {
    lane_part x;
    load_part(x, (const T *)a.q + token * a.q_stride + head * CPA_ENTRY_DIM, lane);
    const float norm = cpa_entry_norm(row_squares(x), CPA_ENTRY_DIM, a.eps);
#pragma unroll
    for (int e = 0; e < PART; e++) x[e] *= norm;
    turn_columns(x, lane * PART, a.rope, a.positions[token], 1);
    store_part((T *)a.q_out + token * a.q_out_stride + head * CPA_ENTRY_DIM, lane, x);
}

/* The last of a token's warps has its row. */
template <typename T>
__global__ void __launch_bounds__(THREADS, ctas_before_9(4)) q_norm_rope_kv_write(const __grid_constant__ q_args q) {
    const cpa_q_norm_rope_kv_write_args &a = q.call;
    const int64_t token = blockIdx.x;
    const int32_t head = warp_of_row();
    const int lane = threadIdx.x % WARP_LANES;
    dependent_allow();
    dependent_wait();
    if (head > a.out_heads) return;
    if (head == a.out_heads) {
        write_row<T>(q, token, lane);
    } else if (head < a.heads) {
        norm_head<T>(a, token, head, lane);
    } else {
        lane_part zeros;
#pragma unroll
        for (int e = 0; e < PART; e++) zeros[e] = 0;
        store_part((T *)a.q_out + token * a.q_out_stride + head * CPA_ENTRY_DIM, lane, zeros);
    }
}

/* ---- inverse_rope_quant ---- */

constexpr int TILES = CPA_ENTRY_DIM / CPA_RESULT_TILE, TILE_LANES = CPA_RESULT_TILE / PART;

/* The scale of the lane's tile, by the first lane of each, or of all four; `exponent` 0 for a row that fills up. All
 * lanes of the warp come here. */
__device__ void store_scales(const cpa_inverse_rope_quant_args &a, int64_t row, int32_t head, uint32_t exponent,
                             int lane) {
    const int64_t padded = (a.rows + 3) / 4 * 4;
    if (a.packed) {
        uint32_t word = exponent << (lane / TILE_LANES * 8);
        word |= __shfl_xor_sync(0xffffffff, word, TILE_LANES);
        word |= __shfl_xor_sync(0xffffffff, word, 2 * TILE_LANES);
        if (lane == 0) ((uint32_t *)a.scales)[head * padded + row] = word;
    } else if (lane % TILE_LANES == 0) {
        ((float *)a.scales)[((int64_t)head * TILES + lane / TILE_LANES) * padded + row] = cpa_power_of(exponent);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, ctas_before_9(4))
    inverse_rope_quant(const __grid_constant__ cpa_inverse_rope_quant_args a) {
    const int64_t row = blockIdx.x;
    const int32_t head = warp_of_row(), of_group = a.heads / a.groups;
    const int lane = threadIdx.x % WARP_LANES;
    dependent_allow();
    dependent_wait();
    if (head >= a.heads) return;
    if (row >= a.rows) {
        store_scales(a, row, head, 0, lane);
        return;
    }
    lane_part x;
    load_part(x, (const T *)a.o + row * a.o_stride + head * CPA_ENTRY_DIM, lane);
    turn_columns(x, lane * PART, a.rope, a.positions[row], -1);
    const uint32_t exponent = cpa_power_exponent(lanes_most(part_most(x), TILE_LANES), CPA_RESULT_FLOOR);
    const int32_t group = head / of_group;
    const int64_t at = ((int64_t)group * a.rows + row) * of_group + (head - group * of_group);
    *(uint4 *)((uint8_t *)a.codes + at * CPA_ENTRY_DIM + lane * PART) = power_codes(x, inverse_power(exponent));
    store_scales(a, row, head, exponent, lane);
}

dim3 grid_of(int64_t rows, int64_t warps) {
    return dim3((unsigned)rows, (unsigned)((warps + WARPS - 1) / WARPS));
}

} // namespace

extern "C" cpa_status cpa_cuda_q_norm_rope_kv_write(const cpa_q_norm_rope_kv_write_args *args, cpa_stream *stream) {
    const cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->tokens > INT32_MAX)
        return cpa_cuda_unsupported(stream, "q_norm_rope_kv_write: more rows than a grid takes", args->tokens);
    const q_args q = {*args, entry_pool_of(args->kv, stream)};
    return launch_for_elements(args->dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        return launch_early(q_norm_rope_kv_write<T>, grid_of(args->tokens, args->out_heads + 1), THREADS, q, stream,
                            "q_norm_rope_kv_write");
    });
}

extern "C" cpa_status cpa_cuda_inverse_rope_quant(const cpa_inverse_rope_quant_args *args, cpa_stream *stream) {
    const int64_t rows = (args->rows + 3) / 4 * 4;
    const cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "inverse_rope_quant: more rows than a grid takes", args->rows);
    return launch_for_elements(args->dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        return launch_early(inverse_rope_quant<T>, grid_of(rows, args->heads), THREADS, *args, stream,
                            "inverse_rope_quant");
    });
}
