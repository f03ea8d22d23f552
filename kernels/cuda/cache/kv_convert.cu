/* kv_convert: blocks from one layout and dtype to another; and what kv_copy and kv_pack move where rows do not lie in
 * one piece. A CTA takes some tokens of a head of a block through shared memory, a cell of 32 bits an element: read and
 * written 16 bytes at a time in the order in which either side lies. The list of blocks travels in the parameters, as
 * in kv_copy.cu. Between equal forms cells are the bits as they are, else floats. */
#include "kernels/cuda/cache/kv_convert.h"

#include "kernels/cuda/cache/latent_rows.h"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/cache/turboquant_rows.h"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/launch_bounds.cuh"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int THREADS = 128, MOST_TOKENS = 32, PAD = 4; /* cells between rows: what lies side by side stays aligned */
constexpr int BLOCKS_A_LAUNCH = 1024;

/* Which elements lie together: columns of a token, row after row; the same, run after run of all tokens; or tokens of a
 * column. */
enum order { ROWS, KEY_RUNS, VALUE_RUNS };

/* The keys or the values of a view; strides in bytes. */
struct side {
    char *pool;
    int64_t block_stride, token_stride, head_stride, run_stride, words_at; /* words_at 0: rows have no scales */
    int32_t run_shift, order;
    float scale;
    const float *head_scales;
    int32_t head_scale_step;
};

struct convert_args {
    side src[2], dst[2];
    int32_t dim[2];
    cpa_dtype from, to;
    int32_t heads, block_shift, tokens; /* tokens of a CTA, a power of two */
    int32_t raw;                        /* the bits as they are */
    int32_t parts;                      /* 1: there are no values but those in keys */
    cpa_cuda_block_move moves[BLOCKS_A_LAUNCH];
};

/* Where an element of a block lies. */
__device__ int64_t place_of(const side &s, int64_t token, int32_t head, int32_t column, int bytes) {
    return token * s.token_stride + head * s.head_stride + (column >> s.run_shift) * s.run_stride +
           (column & ((1 << s.run_shift) - 1)) * bytes;
}

/* The first token and column of the i-th unit of neighbouring elements. */
__device__ void unit_place(const side &s, int i, int unit, int tokens, int dim, int &token, int &column) {
    if (s.order == ROWS) {
        const int in_row = dim / unit;
        token = i / in_row;
        column = (i - token * in_row) * unit;
    } else if (s.order == KEY_RUNS) {
        token = i & (tokens - 1);
        column = i / tokens * unit;
    } else {
        const int in_column = tokens / unit;
        column = i / in_column;
        token = (i - column * in_column) * unit;
    }
}

/* Elements as cells; word: of the row, of codes. */
template <int BYTES>
__device__ uint32_t to_cell(uint32_t bits, cpa_dtype dtype, bool raw, uint32_t word) {
    if (raw || BYTES == 4) return bits;
    if constexpr (BYTES == 2) {
        const uint16_t half = (uint16_t)bits;
        return __float_as_uint(dtype == CPA_BF16 ? to_float(*(const __nv_bfloat16 *)&half)
                                                 : to_float(*(const __half *)&half));
    } else {
        const uint8_t code = (uint8_t)bits;
        return __float_as_uint(read_code(&code, dtype, 0, word));
    }
}

template <int BYTES>
__device__ uint32_t from_cell(uint32_t cell, cpa_dtype dtype, bool raw, uint32_t word) {
    if (raw || BYTES == 4) return cell;
    if constexpr (BYTES == 2) {
        uint16_t half;
        if (dtype == CPA_BF16) {
            *(__nv_bfloat16 *)&half = from_float<__nv_bfloat16>(__uint_as_float(cell));
        } else {
            *(__half *)&half = from_float<__half>(__uint_as_float(cell));
        }
        return half;
    } else {
        return code_of(dtype, word, __uint_as_float(cell));
    }
}

template <int BYTES>
__device__ uint32_t element_of(const uint4 &vector, int e) {
    const int at = e * BYTES;
    const uint32_t word = at < 4 ? vector.x : at < 8 ? vector.y : at < 12 ? vector.z : vector.w;
    return BYTES == 4 ? word : (word >> (at % 4 * 8)) & ((1u << (BYTES * 8 % 32)) - 1);
}

/* The words of a CTA's rows: of their source, and of what they become. */
struct row_words {
    uint32_t from[MOST_TOKENS], to[MOST_TOKENS];
};

/* Reads the source's words, or what stands for them. */
__device__ void load_words(const convert_args &a, const side &s, const char *block, int head, int first, int tokens,
                           row_words &words) {
    if (!is_code(a.from) || (int)threadIdx.x >= tokens) return;
    const uint32_t *at =
        (const uint32_t *)(block + s.words_at) + ((int64_t)head << a.block_shift) + first + threadIdx.x;
    words.from[threadIdx.x] =
        s.words_at ? __ldg(at) : __float_as_uint(head_scale(s.scale, s.head_scales, s.head_scale_step, head));
}

/* Those of the rows in the cells; they go to the block, if its rows have any. A warp a row. */
__device__ void make_words(const convert_args &a, const side &s, char *block, int head, int first, int tokens, int dim,
                           const uint32_t *cells, row_words &words) {
    const int lane = threadIdx.x % WARP_LANES, pitch = dim + PAD;
    if (!is_code(a.to)) return;
    for (int token = threadIdx.x / WARP_LANES; token < tokens; token += THREADS / WARP_LANES) {
        uint32_t word = words.from[token];
        if (!a.raw) {
            float low = 0, high = 0;
            for (int d = lane; s.words_at && d < dim; d += WARP_LANES) {
                const float finite = finite_or_zero(__uint_as_float(cells[token * pitch + d]));
                low = fminf(low, finite);
                high = fmaxf(high, finite);
            }
            const float scale = s.words_at ? 0 : head_scale(s.scale, s.head_scales, s.head_scale_step, head);
            word = scale_word(a.to, scale, -warp_max(-low), warp_max(high));
        }
        if (lane == 0) words.to[token] = word;
        if (lane == 0 && s.words_at)
            ((uint32_t *)(block + s.words_at))[((int64_t)head << a.block_shift) + first + token] = word;
    }
}

/* UNIT_FROM, UNIT_TO: elements that are read and written at once, 16 bytes or one. */
template <int FROM_BYTES, int TO_BYTES, bool VECTORS>
__global__ void __launch_bounds__(THREADS, ctas_before_9(4)) kv_convert(const __grid_constant__ convert_args a) {
    constexpr int UNIT_FROM = VECTORS ? 16 / FROM_BYTES : 1, UNIT_TO = VECTORS ? 16 / TO_BYTES : 1, AT_ONCE = 4;
    extern __shared__ __align__(16) uint32_t cells[];
    __shared__ row_words words;
    const int part = blockIdx.y % a.parts, head = blockIdx.y / a.parts, first = blockIdx.z * a.tokens, dim = a.dim[part];
    const int pitch = dim + PAD;
    const cpa_cuda_block_move move = a.moves[blockIdx.x];
    const int tokens = min(a.tokens, move.tokens - first);
    const side &from = a.src[part], &to = a.dst[part];
    if (tokens <= 0) return;
    const char *src = from.pool + move.src * from.block_stride;
    char *dst = to.pool + move.dst * to.block_stride;
    load_words(a, from, src, head, move.first + first, tokens, words);
    __syncthreads();
    const int loads = a.tokens * dim / UNIT_FROM, stores = a.tokens * dim / UNIT_TO;
    for (int begin = threadIdx.x; begin < loads; begin += AT_ONCE * THREADS) {
        uint4 value[AT_ONCE];
        int token[AT_ONCE], column[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            unit_place(from, begin + i * THREADS, UNIT_FROM, a.tokens, dim, token[i], column[i]);
            if (begin + i * THREADS >= loads || token[i] >= tokens) token[i] = -1;
            const char *at = src + place_of(from, move.first + first + token[i], head, column[i], FROM_BYTES);
            if (token[i] < 0) continue;
            if constexpr (VECTORS) {
                value[i] = __ldg((const uint4 *)at);
            } else {
                value[i].x = FROM_BYTES == 4   ? *(const uint32_t *)at
                             : FROM_BYTES == 2 ? *(const uint16_t *)at
                                               : *(const uint8_t *)at;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (token[i] < 0) continue;
            uint32_t *cell = cells + token[i] * pitch + column[i];
            uint32_t out[UNIT_FROM];
            const bool by_token = from.order == VALUE_RUNS;
#pragma unroll
            for (int e = 0; e < UNIT_FROM; e++) {
                const int row = min(token[i] + (by_token ? e : 0), MOST_TOKENS - 1);
                out[e] = to_cell<FROM_BYTES>(element_of<FROM_BYTES>(value[i], e), a.from, a.raw,
                                             FROM_BYTES == 1 ? words.from[row] : 0);
            }
            if (by_token || UNIT_FROM == 1) {
#pragma unroll
                for (int e = 0; e < UNIT_FROM; e++) cell[e * pitch] = out[e];
            } else {
#pragma unroll
                for (int e = 0; e < UNIT_FROM / 4; e++)
                    ((uint4 *)cell)[e] = make_uint4(out[4 * e], out[4 * e + 1], out[4 * e + 2], out[4 * e + 3]);
            }
        }
    }
    __syncthreads();
    if (is_code(a.to)) {
        make_words(a, to, dst, head, first, tokens, dim, cells, words);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < stores; i += THREADS) {
        int token, column;
        unit_place(to, i, UNIT_TO, a.tokens, dim, token, column);
        const bool by_token = to.order == VALUE_RUNS;
        if (token >= tokens) continue;
        const uint32_t *cell = cells + token * pitch + column;
        uint32_t in[UNIT_TO], packed[4] = {0, 0, 0, 0};
        if (by_token || UNIT_TO == 1) {
#pragma unroll
            for (int e = 0; e < UNIT_TO; e++) in[e] = cell[e * pitch];
        } else {
#pragma unroll
            for (int e = 0; e < UNIT_TO / 4; e++) {
                const uint4 four = ((const uint4 *)cell)[e];
                in[4 * e] = four.x, in[4 * e + 1] = four.y, in[4 * e + 2] = four.z, in[4 * e + 3] = four.w;
            }
        }
#pragma unroll
        for (int e = 0; e < UNIT_TO; e++) {
            const int row = min(token + (by_token ? e : 0), MOST_TOKENS - 1);
            const uint32_t bits = from_cell<TO_BYTES>(in[e], a.to, a.raw, TO_BYTES == 1 ? words.to[row] : 0);
            packed[e * TO_BYTES / 4] |= bits << (e * TO_BYTES % 4 * 8);
        }
        char *at = dst + place_of(to, first + token, head, column, TO_BYTES);
        if (UNIT_TO > 1 && (!by_token || token + UNIT_TO <= tokens)) {
            *(uint4 *)at = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            continue;
        }
#pragma unroll
        for (int e = 0; e < UNIT_TO; e++) { /* of a vector over the last token, the tokens before it */
            if (by_token && token + e >= tokens) continue;
            const uint32_t bits = packed[e * TO_BYTES / 4] >> (e * TO_BYTES % 4 * 8);
            if (TO_BYTES == 4) *(uint32_t *)(at + e * 4) = bits;
            if (TO_BYTES == 2) *(uint16_t *)(at + e * 2) = (uint16_t)bits;
            if (TO_BYTES == 1) *(uint8_t *)(at + e) = (uint8_t)bits;
        }
    }
}

side side_of(const cpa_kv_view &kv, cpa_kv_part part) {
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, part);
    const int32_t order = kv.layout != CPA_VLLM_X ? ROWS : part == CPA_KEYS ? KEY_RUNS : VALUE_RUNS;
    return {pool.memory,
            pool.block_stride,
            pool.token_stride,
            pool.head_stride,
            pool.run_stride,
            cpa_kv_words_at(&kv, part),
            cpa_kv_run_shift(&kv, part),
            order,
            pool.tensor_scale,
            pool.head_scales,
            pool.head_scale_step};
}

/* Whether all that lies together is a multiple of 16 bytes, aligned to them. */
bool vectors_fit(const side &s, int32_t dim, int32_t tokens, int64_t bytes) {
    const int64_t places = (int64_t)(uintptr_t)s.pool | s.block_stride | s.head_stride;
    if (s.order == VALUE_RUNS) return (places | s.run_stride | tokens * bytes) % 16 == 0;
    return (places | s.token_stride | dim * bytes) % 16 == 0;
}

template <int FROM, int TO>
void launch(const convert_args &a, dim3 grid, int shared, bool vectors, cudaStream_t stream) {
    if (vectors) {
        kv_convert<FROM, TO, true><<<grid, THREADS, shared, stream>>>(a);
    } else {
        kv_convert<FROM, TO, false><<<grid, THREADS, shared, stream>>>(a);
    }
}

template <int FROM>
void launch_to(const convert_args &a, dim3 grid, int shared, bool vectors, cudaStream_t stream) {
    const int64_t bytes = cpa_dtype_bytes(a.to);
    if (bytes == 4) {
        launch<FROM, 4>(a, grid, shared, vectors, stream);
    } else if (bytes == 2) {
        launch<FROM, 2>(a, grid, shared, vectors, stream);
    } else {
        launch<FROM, 1>(a, grid, shared, vectors, stream);
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_kv_move_tokens(const cpa_kv_view *src, const cpa_kv_view *dst,
                                              const cpa_cuda_block_move *moves, int64_t n, int keep_bits,
                                              const char *operation, cpa_stream *stream) {
    const cpa_kv_view from = cpa_kv_view_resolve(*src), to = cpa_kv_view_resolve(*dst);
    const int64_t from_bytes = cpa_dtype_bytes(from.dtype), to_bytes = cpa_dtype_bytes(to.dtype);
    if (cpa_dtype_is_turboquant(from.dtype) || cpa_dtype_is_turboquant(to.dtype))
        return cpa_cuda_turboquant_move(&from, &to, moves, n, keep_bits, operation, stream);
    convert_args a;
    a.from = from.dtype, a.to = to.dtype, a.heads = from.kv_heads;
    a.block_shift = cpa_cuda_log2(from.block_size);
    a.raw = keep_bits;
    a.parts = cpa_kv_parts(&from);
    const int32_t widest = from.k_dim > from.v_dim ? from.k_dim : from.v_dim, most = widest > 128 ? 16 : MOST_TOKENS;
    a.tokens = from.block_size < most ? from.block_size : most;
    bool vectors = true;
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        a.dim[part] = part == CPA_KEYS ? from.k_dim : from.v_dim;
        a.src[part] = side_of(from, (cpa_kv_part)part);
        a.dst[part] = side_of(to, (cpa_kv_part)part);
        vectors = vectors && vectors_fit(a.src[part], a.dim[part], a.tokens, from_bytes) &&
                  vectors_fit(a.dst[part], a.dim[part], a.tokens, to_bytes);
    }
    const int shared = a.tokens * (widest + PAD) * 4;
    if (from.kv_heads > INT16_MAX)
        return cpa_cuda_unsupported(stream, "kv_convert: more KV heads than a grid has CTAs", from.kv_heads);
    if (from.layout == CPA_VLLM_X) /* values of neighbouring tokens are read together */
        for (int64_t i = 0; i < n; i++) vectors = vectors && moves[i].first * from_bytes % 16 == 0;
    for (int64_t done = 0; done < n; done += BLOCKS_A_LAUNCH) {
        const int count = (int)(n - done < BLOCKS_A_LAUNCH ? n - done : BLOCKS_A_LAUNCH);
        const dim3 grid(count, a.parts * from.kv_heads, from.block_size / a.tokens);
        for (int i = 0; i < count; i++) a.moves[i] = moves[done + i];
        if (from_bytes == 4) {
            launch_to<4>(a, grid, shared, vectors, cpa_cuda_handle(stream));
        } else if (from_bytes == 2) {
            launch_to<2>(a, grid, shared, vectors, cpa_cuda_handle(stream));
        } else {
            launch_to<1>(a, grid, shared, vectors, cpa_cuda_handle(stream));
        }
        const cpa_status status = cpa_cuda_launched(stream, operation);
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

extern "C" cpa_status cpa_cuda_kv_convert(const cpa_kv_convert_args *args, cpa_stream *stream) {
    cpa_cuda_block_move moves[BLOCKS_A_LAUNCH];
    const cpa_kv_view src = cpa_kv_view_resolve(args->src), dst = cpa_kv_view_resolve(args->dst);
    const int same = cpa_kv_same_form(&src, &dst);
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (cpa_dtype_has_tiles(src.dtype) || cpa_dtype_has_tiles(dst.dtype))
        return status == CPA_OK ? cpa_cuda_latent_convert(args, stream) : status;
    for (int64_t done = 0; done < args->n_pairs && status == CPA_OK; done += BLOCKS_A_LAUNCH) {
        const int64_t left = args->n_pairs - done, count = left < BLOCKS_A_LAUNCH ? left : BLOCKS_A_LAUNCH;
        for (int64_t i = 0; i < count; i++)
            moves[i] = {(int32_t)args->pairs[done + i][0], (int32_t)args->pairs[done + i][1], args->src.block_size, 0};
        status = cpa_cuda_kv_move_tokens(&args->src, &args->dst, moves, count, same, "kv_convert", stream);
    }
    return status;
}

extern "C" cpa_status cpa_cuda_kv_gather(const cpa_kv_gather_args *args, const cpa_kv_view *rows, cpa_stream *stream) {
    cpa_cuda_block_move moves[BLOCKS_A_LAUNCH];
    const int keeps_bits = args->src.dtype == args->dst_dtype;
    int64_t n = 0;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    for (int64_t s = 0; s < args->n_spans; s++) {
        const cpa_kv_span span = args->spans[s];
        for (int64_t done = 0; done < span.count && status == CPA_OK;) {
            const cpa_span_run run = cpa_span_run_of(&span, done, args->src.block_size);
            moves[n++] = {args->block_tables[run.entry], (int32_t)(span.dst_row + done), run.count, run.first};
            done += run.count;
            if (n < BLOCKS_A_LAUNCH) continue;
            status = cpa_cuda_kv_move_tokens(&args->src, rows, moves, n, keeps_bits, "kv_gather", stream);
            n = 0;
        }
    }
    if (status != CPA_OK || n == 0) return status;
    return cpa_cuda_kv_move_tokens(&args->src, rows, moves, n, keeps_bits, "kv_gather", stream);
}
