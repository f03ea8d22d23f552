/* q_norm_rope_kv_write and inverse_rope_quant: a warp has HEADS heads of a row, which it reads at once, or the row of a
 * token that goes to the cache. blockIdx.x is the row, and blockIdx.y which of its warps a CTA has. */
#include "kernels/cuda/compress/entry_row.cuh"
#include "kernels/cuda/nn/nn.h"

namespace {

constexpr int HEADS = 2;

__device__ int32_t warp_of_row() {
    return (int32_t)(blockIdx.y * WARPS + threadIdx.x / WARP_LANES);
}

__host__ __device__ int32_t warps_of_heads(int32_t heads) {
    return (heads + HEADS - 1) / HEADS;
}

/* Of the heads from `first` on, those below `heads`. */
template <typename T>
__device__ void load_heads(raw_row<T> (&raw)[HEADS], const T *row, int32_t first, int32_t heads, int lane) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (first + h < heads) load_row(raw[h], row + (first + h) * CPA_ENTRY_DIM, lane);
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
    raw_row<T> raw;
    lane_row x;
    if (slot < 0) return;
    load_row(raw, (const T *)a.kv_rows + token * a.kv_stride, lane);
    const row_angles angles(a.rope, a.positions[token], 1, lane);
    widen_row<T>(x, raw);
    angles.turn(x);
#pragma unroll
    for (int p = 0; p < PARTS; p++) widen<T, PART>(x[p], narrow<T, PART>(x[p]));
    store_entry(q.pool, token, slot, x, lane);
}

/* Heads from `first` on; zeros of those that queries do not have. */
template <typename T>
__device__ void norm_heads(const cpa_q_norm_rope_kv_write_args &a, int64_t token, int32_t first, int lane) {
    raw_row<T> raw[HEADS];
    load_heads<T>(raw, (const T *)a.q + token * a.q_stride, first, a.heads, lane);
    const row_angles angles(a.rope, a.positions[token], 1, lane);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int32_t head = first + h;
        lane_row x = {};
        if (head >= a.out_heads) break;
        if (head < a.heads) {
            widen_row<T>(x, raw[h]);
            const float norm = cpa_entry_norm(row_squares(x), CPA_ENTRY_DIM, a.eps);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
#pragma unroll
                for (int e = 0; e < PART; e++) x[p][e] *= norm;
            }
            angles.turn(x);
        }
        store_row((T *)a.q_out + token * a.q_out_stride + head * CPA_ENTRY_DIM, lane, x);
    }
}

/* The last of a token's warps has its row. */
template <typename T>
__global__ void __launch_bounds__(THREADS, ctas_before_9(4)) q_norm_rope_kv_write(const __grid_constant__ q_args q) {
    const int32_t warp = warp_of_row(), of_heads = warps_of_heads(q.call.out_heads);
    const int lane = threadIdx.x % WARP_LANES;
    dependent_allow();
    dependent_wait();
    if (warp < of_heads)
        norm_heads<T>(q.call, blockIdx.x, warp * HEADS, lane);
    else if (warp == of_heads)
        write_row<T>(q, blockIdx.x, lane);
}

/* ---- inverse_rope_quant ---- */

constexpr int TILES = CPA_ENTRY_DIM / CPA_RESULT_TILE, TILE_LANES = CPA_RESULT_TILE / PART;
static_assert(2 * TILE_LANES == WARP_LANES && TILES == 2 * PARTS, "of each part, half of the lanes have a tile");

/* The scales of the tiles of a head, of which a lane has one in each part, by the first lane of each, or of all; 0 for
 * a row that fills up. All lanes of the warp come here. */
__device__ void store_scales(const cpa_inverse_rope_quant_args &a, int64_t row, int32_t head,
                             const uint32_t (&exponent)[PARTS], int lane) {
    const int64_t padded = (a.rows + 3) / 4 * 4;
    if (a.packed) {
        uint32_t word = (exponent[0] | exponent[1] << 16) << (lane / TILE_LANES * 8);
        word |= __shfl_xor_sync(0xffffffff, word, TILE_LANES);
        if (lane == 0) ((uint32_t *)a.scales)[head * padded + row] = word;
    } else if (lane % TILE_LANES == 0) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            ((float *)a.scales)[((int64_t)head * TILES + 2 * p + lane / TILE_LANES) * padded + row] =
                cpa_power_of(exponent[p]);
    }
}

/* `codes`: where those of the head are. */
__device__ void store_result(const cpa_inverse_rope_quant_args &a, uint8_t *codes, int64_t row, int32_t head,
                             const lane_row &x, int lane) {
    uint32_t exponent[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const part_numbers numbers(x[p]);
        exponent[p] = cpa_power_exponent(lanes_most(numbers.most, TILE_LANES), CPA_RESULT_FLOOR);
        *(uint2 *)(codes + part_first(p, lane)) = power_codes(numbers.x, inverse_power(exponent[p]));
    }
    store_scales(a, row, head, exponent, lane);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, ctas_before_9(4))
    inverse_rope_quant(const __grid_constant__ cpa_inverse_rope_quant_args a) {
    const int64_t row = blockIdx.x;
    const int32_t first = warp_of_row() * HEADS, of_group = a.heads / a.groups, end = min(first + HEADS, a.heads);
    const int lane = threadIdx.x % WARP_LANES;
    raw_row<T> raw[HEADS];
    dependent_allow();
    dependent_wait();
    if (row >= a.rows) {
        const uint32_t none[PARTS] = {};
        for (int32_t head = first; head < end; head++) store_scales(a, row, head, none, lane);
        return;
    }
    if (first >= end) return;
    load_heads<T>(raw, (const T *)a.o + row * a.o_stride, first, a.heads, lane);
    const row_angles angles(a.rope, a.positions[row], -1, lane);
    int32_t group = first / of_group, within = first - group * of_group;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int64_t at = ((int64_t)group * a.rows + row) * of_group + within;
        lane_row x;
        if (first + h >= end) break;
        widen_row<T>(x, raw[h]);
        angles.turn(x);
        store_result(a, (uint8_t *)a.codes + at * CPA_ENTRY_DIM, row, first + h, x, lane);
        if (++within == of_group) group++, within = 0;
    }
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
        return launch_early(q_norm_rope_kv_write<T>, grid_of(args->tokens, warps_of_heads(args->out_heads) + 1),
                            THREADS, q, stream, "q_norm_rope_kv_write");
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
        return launch_early(inverse_rope_quant<T>, grid_of(rows, warps_of_heads(args->heads)), THREADS, *args, stream,
                            "inverse_rope_quant");
    });
}
