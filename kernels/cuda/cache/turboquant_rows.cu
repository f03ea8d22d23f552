/* Rows into and out of caches of TurboQuant, a warp a row: kv_write, and tokens of blocks from one form to another. */
#include "kernels/cuda/cache/turboquant_rows.h"

#include "kernels/cuda/cache/cache_rows.cuh"
#include "kernels/cuda/cache/turboquant.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP_LANES;

__device__ void read_row(const rows_of &from, const row_place &at, bool key, int dim, int lane, float (&x)[TQ_WIDTH]) {
    const char *row = from.row(at.block, at.offset, at.head);
    const int width = dim / WARP_LANES;
    if (cpa_dtype_is_turboquant(from.dtype)) {
        tq_read_row(row, from.dtype, key, dim, lane, x);
        return;
    }
    const uint32_t word = !is_code(from.dtype) ? 0
                          : from.words_at      ? *from.word(at.block, at.offset, at.head)
                                               : __float_as_uint(from.scale_of(at.head));
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++) {
        const int column = lane * width + e;
        if (e >= width) {
            x[e] = 0;
        } else if (is_code(from.dtype)) {
            x[e] = read_code(row, from.dtype, column, word);
        } else {
            x[e] = read_element(row, from.dtype, column);
        }
    }
}

/* The codes of the lanes, which `shared` takes a byte each, go to where they lie, two bytes a lane and turn. */
__device__ void put_codes(char *row, uint8_t *shared, const int (&codes)[TQ_WIDTH], int bits, int dim, int lane) {
    const int width = dim / WARP_LANES;
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++)
        if (e < width) shared[lane * width + e] = (uint8_t)codes[e];
    __syncwarp();
    for (int pair = lane; pair < dim * bits / 16; pair += WARP_LANES) {
        uint32_t placed = 0;
        for (int column = pair * 16 / bits; column * bits < (pair + 1) * 16; column++) {
            const int shift = column * bits - pair * 16;
            placed |= shift < 0 ? (uint32_t)shared[column] >> -shift : (uint32_t)shared[column] << shift;
        }
        ((uint16_t *)row)[pair] = (uint16_t)placed;
    }
    __syncwarp();
}

__device__ void put_half(char *row, int bits, int dim, int index, float x) {
    ((__half *)(row + dim * bits / 8))[index] = __float2half_rn(fminf(fmaxf(x, -65504), 65504));
}

/* How many midpoints of neighbouring centroids are at most x; they are symmetric. */
template <int BITS>
__device__ int level_of(float x) {
    constexpr float THREE[] = {CPA_CODEBOOK_3BIT}, FOUR[] = {CPA_CODEBOOK_4BIT};
    constexpr int HALF = 1 << (BITS - 1);
    int code = 0 <= x;
#pragma unroll
    for (int i = 1; i < HALF; i++) {
        const float midpoint = BITS == 3 ? (THREE[(i - 1) % 4] + THREE[i % 4]) / 2 : (FOUR[i - 1] + FOUR[i]) / 2;
        code += (midpoint <= x) + (-midpoint <= x);
    }
    return code;
}

/* x: finite. */
__device__ void write_key(char *row, uint8_t *shared, float (&x)[TQ_WIDTH], int bits, int dim, int lane) {
    const float length = __fsqrt_rn(tq_sum_of_squares(x)), divisor = length + 1e-8f;
    int codes[TQ_WIDTH];
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++) x[e] = __fdiv_rn(x[e], divisor);
    tq_rotate(x, dim / WARP_LANES, lane);
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++) {
        codes[e] = bits == 3 ? level_of<3>(x[e]) : level_of<4>(x[e]);
    }
    put_codes(row, shared, codes, bits, dim, lane);
    if (lane == 0) put_half(row, bits, dim, 0, length);
}

__device__ void write_value(char *row, uint8_t *shared, const float (&x)[TQ_WIDTH], int bits, int dim, int lane) {
    const int width = dim / WARP_LANES;
    float least = INFINITY, most = -INFINITY;
    int codes[TQ_WIDTH];
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++)
        if (e < width) least = fminf(least, x[e]), most = fmaxf(most, x[e]);
    least = -warp_max(-least), most = warp_max(most);
    const float levels = (float)((1 << bits) - 1), scale = fmaxf(__fdiv_rn(most - least, levels), 1e-8f);
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++)
        codes[e] = (int)fminf(fmaxf(floorf(__fdiv_rn(x[e] - least, scale) + 0.5f), 0), levels);
    put_codes(row, shared, codes, bits, dim, lane);
    if (lane == 0) put_half(row, bits, dim, 0, scale), put_half(row, bits, dim, 1, least);
}

/* All lanes of the warp come here with the same place. */
__device__ void write_row(const rows_of &to, const row_place &at, bool key, int dim, uint8_t *shared, int lane,
                          float (&x)[TQ_WIDTH]) {
    char *row = to.row(at.block, at.offset, at.head);
    const int width = dim / WARP_LANES;
    if (cpa_dtype_is_turboquant(to.dtype)) {
        const int bits = key ? tq_key_bits(to.dtype) : tq_value_bits(to.dtype);
        if (bits < 8) {
#pragma unroll
            for (int e = 0; e < TQ_WIDTH; e++) x[e] = finite_or_zero(x[e]);
            key ? write_key(row, shared, x, bits, dim, lane) : write_value(row, shared, x, bits, dim, lane);
            return;
        }
    }
    uint32_t word = __float_as_uint(1.0f);
    if (is_code(to.dtype)) {
        float low = 0, high = 0;
#pragma unroll
        for (int e = 0; e < TQ_WIDTH; e++)
            low = fminf(low, finite_or_zero(x[e])), high = fmaxf(high, finite_or_zero(x[e]));
        const float scale = to.words_at ? 0 : to.scale_of(at.head);
        word = scale_word(to.dtype, scale, -warp_max(-low), warp_max(high));
        if (to.words_at && lane == 0) *to.word(at.block, at.offset, at.head) = word;
    }
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++) {
        if (e >= width) continue;
        if (to.dtype < CPA_DTYPE_COUNT) {
            write_element(row, to.dtype, lane * width + e, x[e]);
        } else {
            row[lane * width + e] = (char)code_of(is_code(to.dtype) ? to.dtype : CPA_FP8_E4M3, word, x[e]);
        }
    }
}

/* ---- kv_write ---- */

struct write_args {
    rows_of from[2], to[2];
    int32_t dim[2];
    int64_t tokens, slots;
    int32_t heads;
    const int64_t *slot_mapping;
    cpa_cuda_bad_slot *bad_slot;
    uint8_t *nonfinite;
};

/* blockIdx.y says keys or values. */
__global__ void __launch_bounds__(THREADS) turboquant_write(const __grid_constant__ write_args a) {
    __shared__ uint8_t codes[WARPS][CPA_TQ_MOST_DIM];
    const int part = blockIdx.y, warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int64_t row = (int64_t)blockIdx.x * WARPS + warp, token = row / a.heads;
    const int head = (int)(row - token * a.heads);
    if (token >= a.tokens) return;
    const int64_t slot = a.slot_mapping[token];
    if (slot == -1) return;
    if (slot < -1 || slot >= a.slots) {
        if (lane == 0 && atomicExch(&a.bad_slot->found, 1) == 0) a.bad_slot->token = token, a.bad_slot->slot = slot;
        return;
    }
    float x[TQ_WIDTH];
    bool nonfinite = false;
    read_row(a.from[part], {0, token, head}, part == CPA_KEYS, a.dim[part], lane, x);
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++) nonfinite |= is_nonfinite(x[e]);
    if (nonfinite && a.nonfinite) a.nonfinite[token] = 1;
    const int32_t shift = a.to[part].block_shift;
    write_row(a.to[part], {slot >> shift, slot & ((1 << shift) - 1), head}, part == CPA_KEYS, a.dim[part], codes[warp],
              lane, x);
}

/* ---- from one form to another ---- */

constexpr int MOVES_A_LAUNCH = 1024;

struct move_args {
    rows_of from[2], to[2];
    int32_t dim[2];
    int64_t row_bytes[2]; /* of rows that are copied as they are; 0: they are not */
    int32_t heads;
    cpa_cuda_block_move moves[MOVES_A_LAUNCH];
};

/* blockIdx.x names the move, whose rows its warps take in turn. */
__global__ void __launch_bounds__(THREADS) turboquant_move(const __grid_constant__ move_args a) {
    __shared__ uint8_t codes[WARPS][CPA_TQ_MOST_DIM];
    const int part = blockIdx.y, warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const cpa_cuda_block_move move = a.moves[blockIdx.x];
    for (int32_t i = warp; i < move.tokens * a.heads; i += WARPS) {
        const int32_t token = i / a.heads, head = i - token * a.heads;
        const row_place from = {move.src, move.first + token, head}, to = {move.dst, token, head};
        if (a.row_bytes[part] > 0) {
            const uint16_t *src = (const uint16_t *)a.from[part].row(from.block, from.offset, from.head);
            uint16_t *dst = (uint16_t *)a.to[part].row(to.block, to.offset, to.head);
            for (int64_t at = lane; at < a.row_bytes[part] / 2; at += WARP_LANES) dst[at] = src[at];
            continue;
        }
        float x[TQ_WIDTH];
        read_row(a.from[part], from, part == CPA_KEYS, a.dim[part], lane, x);
        write_row(a.to[part], to, part == CPA_KEYS, a.dim[part], codes[warp], lane, x);
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_turboquant_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    const int64_t k_row = (int64_t)kv.kv_heads * kv.k_dim, v_row = (int64_t)kv.kv_heads * kv.v_dim;
    const int64_t bytes = cpa_dtype_bytes(args->dtype);
    const write_args a = {{tensor_of(args->k, args->dtype, (args->k_row_stride ? args->k_row_stride : k_row) * bytes,
                                     (args->k_head_stride ? args->k_head_stride : kv.k_dim) * bytes),
                           tensor_of(args->v, args->dtype, (args->v_row_stride ? args->v_row_stride : v_row) * bytes,
                                     (args->v_head_stride ? args->v_head_stride : kv.v_dim) * bytes)},
                          {cache_of(kv, CPA_KEYS), cache_of(kv, CPA_VALUES)},
                          {kv.k_dim, kv.v_dim},
                          args->tokens,
                          kv.num_blocks * kv.block_size,
                          kv.kv_heads,
                          args->slot_mapping,
                          ((cpa_cuda_stream *)stream)->bad_slot,
                          args->nonfinite};
    const int64_t ctas = (args->tokens * kv.kv_heads + WARPS - 1) / WARPS;
    if (ctas > INT32_MAX) return cpa_cuda_unsupported(stream, "kv_write: more rows than a grid takes", args->tokens);
    turboquant_write<<<dim3((unsigned)ctas, 2), THREADS, 0, cpa_cuda_handle(stream)>>>(a);
    return cpa_cuda_launched(stream, "kv_write");
}

extern "C" cpa_status cpa_cuda_turboquant_move(const cpa_kv_view *src, const cpa_kv_view *dst,
                                               const cpa_cuda_block_move *moves, int64_t n, int keep_bits,
                                               const char *operation, cpa_stream *stream) {
    move_args a;
    a.heads = src->kv_heads;
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        a.from[part] = cache_of(*src, (cpa_kv_part)part), a.to[part] = cache_of(*dst, (cpa_kv_part)part);
        a.dim[part] = part == CPA_KEYS ? src->k_dim : src->v_dim;
        a.row_bytes[part] = keep_bits ? cpa_kv_row_bytes(src->dtype, (cpa_kv_part)part, a.dim[part]) : 0;
    }
    for (int64_t done = 0; done < n; done += MOVES_A_LAUNCH) {
        const int count = (int)(n - done < MOVES_A_LAUNCH ? n - done : MOVES_A_LAUNCH);
        for (int i = 0; i < count; i++) a.moves[i] = moves[done + i];
        turboquant_move<<<dim3((unsigned)count, 2), THREADS, 0, cpa_cuda_handle(stream)>>>(a);
        const cpa_status status = cpa_cuda_launched(stream, operation);
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}
