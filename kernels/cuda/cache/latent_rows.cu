/* Rows of latents from one form to another, a warp a row: kv_write into rows with scales of tiles, kv_convert to and
 * from such rows, and latent_gather. Lists of blocks and spans travel in the parameters of the kernel. */
#include "kernels/cuda/cache/latent_rows.h"

#include <float.h>

#include "kernels/cuda/cache/cache_rows.cuh"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP_LANES, WIDTH = 4;
/* A lane has WIDTH neighbours of each 128 elements, which are one tile. */
constexpr int ROUNDS = (CPA_MAX_HEAD_DIM + TILE - 1) / TILE;
static_assert(WARP_LANES * WIDTH == TILE, "a round is a tile");

using elements = float[ROUNDS][WIDTH];

/* x = element(d) of each of the lane's columns; 0 past the end. */
template <typename Element>
__device__ void for_columns(int32_t dim, int lane, elements &x, const Element &element) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const int32_t d = r * TILE + lane * WIDTH + e;
            x[r][e] = d < dim ? element(d) : 0;
        }
    }
}

__device__ void read_row(const rows_of &from, const row_place &at, int32_t dim, int lane, elements &x) {
    const char *row = from.row(at.block, at.offset, at.head);
    if (has_tiles(from.dtype)) {
        const uint8_t *bytes = from.bytes(at.block, at.offset);
        for_columns(dim, lane, x, [&](int32_t d) { return read_tiled(row, bytes, from.dtype, dim, d); });
    } else if (is_code(from.dtype)) {
        const uint32_t word =
            from.words_at ? *from.word(at.block, at.offset, at.head) : __float_as_uint(from.scale_of(at.head));
        for_columns(dim, lane, x, [&](int32_t d) { return read_code(row, from.dtype, d, word); });
    } else {
        for_columns(dim, lane, x, [&](int32_t d) { return read_element(row, from.dtype, d); });
    }
}

/* The largest magnitude of the tile of the lane's elements of a round: those of `lanes` neighbouring lanes. All lanes
 * of the warp come here. */
__device__ float tile_most(const float (&x)[WIDTH], int lanes) {
    float most = 0;
#pragma unroll
    for (int e = 0; e < WIDTH; e++) most = fmaxf(most, fabsf(finite_or_zero(x[e])));
    for (int step = lanes / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    return most;
}

/* Four codes, or elements of the tail, of a row. */
__device__ void write_four(cpa_dtype dtype, char *row, int32_t dim, int32_t first, const float (&x)[WIDTH],
                           float scale) {
    const int32_t codes = dim - TILE_TAIL;
    if (first < codes) {
        uint32_t four = 0;
#pragma unroll
        for (int e = 0; e < WIDTH; e++) four |= (uint32_t)e4m3_code(__fdiv_rn(x[e], scale)) << (8 * e);
        *(uint32_t *)(row + first) = four;
    } else if (first < dim) {
        uint32_t *tail = (uint32_t *)(row + tile_tail_at(dtype, dim) + (first - codes) * 2);
        tail[0] = pack_pair<__nv_bfloat16>(x[0], x[1]);
        tail[1] = pack_pair<__nv_bfloat16>(x[2], x[3]);
    }
}

__device__ void write_tiles(char *row, int32_t dim, int lane, const elements &x) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const float scale = fmaxf(__fdiv_rn(tile_most(x[r], WARP_LANES), 448.0f), FLT_MIN);
        if (lane == 0 && r * TILE < dim - TILE_TAIL) ((float *)(row + tile_scales_at(dim)))[r] = scale;
        write_four(CPA_FP8_T128, row, dim, r * TILE + lane * WIDTH, x[r], scale);
    }
}

/* A round of T64 is two tiles; the byte of the tail is the pad. */
__device__ void write_power_tiles(char *row, uint8_t *bytes, int32_t dim, int lane, const elements &x) {
    constexpr int LANES = POWER_TILE / WIDTH;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int32_t first = r * TILE + lane * WIDTH;
        float rounded[WIDTH];
#pragma unroll
        for (int e = 0; e < WIDTH; e++) rounded[e] = to_float(from_float<__nv_bfloat16>(x[r][e]));
        const uint32_t byte = power_byte(tile_most(rounded, LANES));
        if (first % POWER_TILE == 0 && first < dim)
            bytes[first / POWER_TILE] = (uint8_t)(first < dim - TILE_TAIL ? byte : 0);
        write_four(CPA_FP8_T64, row, dim, first, rounded, power_of(byte));
    }
}

__device__ void write_codes(const rows_of &to, const row_place &at, int32_t dim, int lane, const elements &x) {
    char *row = to.row(at.block, at.offset, at.head);
    float low = 0, high = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const float finite = finite_or_zero(x[r][e]); /* 0 past the end */
            low = fminf(low, finite);
            high = fmaxf(high, finite);
        }
    }
    const float scale = to.words_at ? 0 : to.scale_of(at.head);
    const uint32_t word = scale_word(to.dtype, scale, -warp_max(-low), warp_max(high));
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const int32_t d = r * TILE + lane * WIDTH + e;
            if (d < dim) row[d] = (char)code_of(to.dtype, word, x[r][e]);
        }
    }
    if (to.words_at && lane == 0) *to.word(at.block, at.offset, at.head) = word;
}

/* All lanes of the warp come here with the same place. */
__device__ void write_row(const rows_of &to, const row_place &at, int32_t dim, int lane, const elements &x) {
    char *row = to.row(at.block, at.offset, at.head);
    if (to.dtype == CPA_FP8_T128) {
        write_tiles(row, dim, lane, x);
    } else if (to.dtype == CPA_FP8_T64) {
        write_power_tiles(row, to.bytes(at.block, at.offset), dim, lane, x);
    } else if (to.dtype >= CPA_DTYPE_COUNT) {
        write_codes(to, at, dim, lane, x);
    } else {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
            for (int e = 0; e < WIDTH; e++) {
                const int32_t d = r * TILE + lane * WIDTH + e;
                if (d < dim) write_element(row, to.dtype, d, x[r][e]);
            }
        }
    }
}

/* The bytes of a row as they are. */
__device__ void copy_row(const char *src, char *dst, int64_t bytes, int lane) {
    if (((uintptr_t)src | (uintptr_t)dst | (uintptr_t)bytes) % 16 == 0) {
        for (int64_t at = lane * 16; at < bytes; at += WARP_LANES * 16)
            *(uint4 *)(dst + at) = *(const uint4 *)(src + at);
    } else {
        for (int64_t at = lane; at < bytes; at += WARP_LANES) dst[at] = src[at];
    }
}

__device__ int64_t warp_of_grid() {
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
}

/* ---- kv_write ---- */

struct write_args {
    rows_of from, to;
    int64_t tokens, slots;
    int32_t heads, dim;
    const int64_t *slot_mapping;
    cpa_cuda_bad_slot *bad_slot;
    uint8_t *nonfinite;
};

__global__ void __launch_bounds__(THREADS) latent_write(const __grid_constant__ write_args a) {
    const int64_t row = warp_of_grid(), token = row / a.heads;
    const int lane = threadIdx.x % WARP_LANES, head = (int)(row - token * a.heads);
    if (token >= a.tokens) return;
    const int64_t slot = a.slot_mapping[token];
    if (slot == -1) return;
    if (slot < -1 || slot >= a.slots) {
        if (lane == 0 && atomicExch(&a.bad_slot->found, 1) == 0) a.bad_slot->token = token, a.bad_slot->slot = slot;
        return;
    }
    elements x;
    bool nonfinite = false;
    read_row(a.from, {0, token, head}, a.dim, lane, x);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) nonfinite |= is_nonfinite(x[r][e]);
    }
    if (nonfinite && a.nonfinite) a.nonfinite[token] = 1;
    write_row(a.to, {slot >> a.to.block_shift, slot & ((1 << a.to.block_shift) - 1), head}, a.dim, lane, x);
}

/* ---- kv_convert ---- */

constexpr int PAIRS_A_LAUNCH = 1024;

struct convert_args {
    rows_of from, to;
    int32_t heads, dim;
    int64_t row_bytes;   /* not 0: of rows that are copied as bytes, */
    int64_t scale_bytes; /* and of the scales behind them */
    int32_t pairs[PAIRS_A_LAUNCH][2];
};

/* blockIdx.y names the pair. */
__global__ void __launch_bounds__(THREADS) latent_convert(const __grid_constant__ convert_args a) {
    const int64_t row = warp_of_grid(), offset = row / a.heads;
    const int lane = threadIdx.x % WARP_LANES, head = (int)(row - offset * a.heads);
    if (offset >> a.from.block_shift) return;
    const row_place from = {a.pairs[blockIdx.y][0], offset, head}, to = {a.pairs[blockIdx.y][1], offset, head};
    if (a.row_bytes > 0) {
        copy_row(a.from.row(from.block, offset, head), a.to.row(to.block, offset, head), a.row_bytes, lane);
        if (a.scale_bytes)
            copy_row((const char *)a.from.bytes(from.block, offset), (char *)a.to.bytes(to.block, offset),
                     a.scale_bytes, lane);
        return;
    }
    elements x;
    read_row(a.from, from, a.dim, lane, x);
    write_row(a.to, to, a.dim, lane, x);
}

/* ---- latent_gather ---- */

/* Rows of a span that lie in one block. */
struct gather_run {
    int32_t block, offset, count;
    int64_t dst_row;
};
constexpr int RUNS_A_LAUNCH = 512;

struct gather_args {
    rows_of from, to;
    int32_t dim, count;
    int64_t row_bytes; /* not 0: of rows that are copied as bytes */
    gather_run runs[RUNS_A_LAUNCH];
};

/* blockIdx.x names the run, whose rows the warps take in turn. */
__global__ void __launch_bounds__(THREADS) latent_gather(const __grid_constant__ gather_args a) {
    const gather_run run = a.runs[blockIdx.x];
    const int lane = threadIdx.x % WARP_LANES;
    for (int32_t i = threadIdx.x / WARP_LANES; i < run.count; i += WARPS) {
        const row_place from = {run.block, run.offset + i, 0}, to = {0, run.dst_row + i, 0};
        if (a.row_bytes == 0) {
            elements x;
            read_row(a.from, from, a.dim, lane, x);
            write_row(a.to, to, a.dim, lane, x);
            continue;
        }
        copy_row(a.from.row(from.block, from.offset, 0), a.to.row(to.block, to.offset, 0), a.row_bytes, lane);
    }
}

/* ---- on the host ---- */

cpa_status launch_gather(gather_args &a, cpa_stream *stream) {
    if (a.count == 0) return CPA_OK;
    latent_gather<<<(unsigned)a.count, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
    a.count = 0;
    return cpa_cuda_launched(stream, "latent_gather");
}

} // namespace

extern "C" cpa_status cpa_cuda_latent_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    const int64_t bytes = cpa_dtype_bytes(args->dtype);
    const int64_t stride = args->k_row_stride ? args->k_row_stride : (int64_t)kv.kv_heads * kv.k_dim;
    const write_args a = {tensor_of(args->k, args->dtype, stride * bytes,
                                    (args->k_head_stride ? args->k_head_stride : kv.k_dim) * bytes),
                          cache_of(kv, CPA_KEYS),
                          args->tokens,
                          kv.num_blocks * kv.block_size,
                          kv.kv_heads,
                          kv.k_dim,
                          args->slot_mapping,
                          ((cpa_cuda_stream *)stream)->bad_slot,
                          args->nonfinite};
    const int64_t ctas = (args->tokens * kv.kv_heads + WARPS - 1) / WARPS;
    if (ctas > INT32_MAX) return cpa_cuda_unsupported(stream, "kv_write: more rows than a grid takes", args->tokens);
    latent_write<<<(unsigned)ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
    return cpa_cuda_launched(stream, "kv_write");
}

extern "C" cpa_status cpa_cuda_latent_convert(const cpa_kv_convert_args *args, cpa_stream *stream) {
    const cpa_kv_view src = cpa_kv_view_resolve(args->src), dst = cpa_kv_view_resolve(args->dst);
    convert_args a;
    a.from = cache_of(src, CPA_KEYS), a.to = cache_of(dst, CPA_KEYS);
    a.heads = src.kv_heads, a.dim = src.k_dim;
    a.row_bytes = src.dtype == dst.dtype ? cpa_kv_row_bytes(src.dtype, CPA_KEYS, src.k_dim) : 0;
    a.scale_bytes = cpa_kv_scale_bytes(src.dtype, CPA_KEYS, 0);
    const int64_t rows = (int64_t)src.block_size * src.kv_heads;
    for (int64_t done = 0; done < args->n_pairs; done += PAIRS_A_LAUNCH) {
        const int count = (int)(args->n_pairs - done < PAIRS_A_LAUNCH ? args->n_pairs - done : PAIRS_A_LAUNCH);
        for (int i = 0; i < count; i++) {
            a.pairs[i][0] = (int32_t)args->pairs[done + i][0];
            a.pairs[i][1] = (int32_t)args->pairs[done + i][1];
        }
        latent_convert<<<dim3((unsigned)((rows + WARPS - 1) / WARPS), count), THREADS, 0, cpa_cuda_handle(stream)>>>(a);
        const cpa_status status = cpa_cuda_launched(stream, "kv_convert");
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

extern "C" cpa_status cpa_cuda_latent_gather(const cpa_latent_gather_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->src);
    const int64_t unit = args->raw ? 1 : cpa_dtype_bytes(args->dst_dtype);
    const bool same = args->raw || args->dst_dtype == kv.dtype;
    gather_args a;
    a.from = cache_of(kv, CPA_KEYS);
    a.to = tensor_of(args->dst, args->dst_dtype, args->dst_row_stride * unit, 0);
    a.dim = kv.k_dim;
    a.row_bytes = same ? cpa_kv_row_bytes(kv.dtype, CPA_KEYS, kv.k_dim) : 0;
    a.count = 0;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    for (int64_t s = 0; s < args->n_spans; s++) {
        const cpa_kv_span span = args->spans[s];
        for (int64_t done = 0; done < span.count && status == CPA_OK;) {
            const cpa_span_run run = cpa_span_run_of(&span, done, kv.block_size);
            a.runs[a.count++] = {args->block_tables[run.entry], run.first, run.count, span.dst_row + done};
            done += run.count;
            if (a.count == RUNS_A_LAUNCH) status = launch_gather(a, stream);
        }
    }
    return status == CPA_OK ? launch_gather(a, stream) : status;
}
