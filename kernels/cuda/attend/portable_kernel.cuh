/* attend over prefill tiles with mma.sync (compute capability 8.0 and later): online softmax over tiles of keys
 * (FlashAttention-2, Dao, arXiv:2307.08691). One CTA a piece and KV head. Keys and values come through the block table
 * by cp.async, two tiles deep; tiles that no row sees are skipped, and a mask is applied only where some row does not
 * see a key. */
#ifndef CPA_CUDA_PORTABLE_KERNEL_CUH
#define CPA_CUDA_PORTABLE_KERNEL_CUH

#include <type_traits>

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"
#include "kernels/cuda/attend/score.cuh"
#include "kernels/cuda/cache/quant.cuh"

namespace {

constexpr int ROWS = CPA_CUDA_PREFILL_ROWS;
constexpr int STAGES = 2;

/* What a shape of heads is compiled for: widths of keys and values (multiples of 64, the rest is zeros), keys a tile,
 * warps. Codes: of a quantised cache, or void. */
template <typename Element, typename Codes, int KeyDim, int ValueDim, int Keys, int Warps, bool Ruled>
struct config {
    using element = Element;
    using codes = Codes;
    static constexpr bool QUANTISED = !std::is_void<Codes>::value, RULED = Ruled; /* Ruled: scores have rules */
    static constexpr int K_DIM = KeyDim, V_DIM = ValueDim, KEYS = Keys;
    static constexpr int THREADS = 32 * Warps;
    static constexpr int M_TILES = ROWS / (16 * Warps); /* 16-row tiles of a warp */
    static constexpr int Q_BYTES = ROWS * KeyDim * 2, K_BYTES = Keys * KeyDim * 2, V_BYTES = Keys * ValueDim * 2;
    static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
    static constexpr int SHARED_BYTES = Q_BYTES + STAGES * STAGE_BYTES;
    /* Of 227 KB, which a multiprocessor of 9.0 has; others place fewer. Codes under way, and
     * rules, need more registers than two CTAs of 8 warps have. */
    static constexpr int CTAS = SHARED_BYTES <= 113 * 1024 && !QUANTISED && !Ruled ? 2 : 1;
};

/* Rows [from, to) of the tile's queries, zeros past the last. */
template <typename C>
__device__ void load_queries(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_group,
                             uint32_t shared) {
    constexpr int CHUNKS = C::K_DIM / 8;
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += C::THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool valid = piece.row_begin + row < piece.row_end && chunk * 8 < a.k_dim;
        row_place place(a, piece.q_row, valid ? piece.row_begin + row : piece.row_begin, kv_group);
        const char *from =
            a.q + (place.state_row * a.q_row_stride + place.head * a.q_head_stride + (valid ? chunk * 8 : 0)) * 2;
        copy_async_16(shared + swizzled<C::K_DIM>(row, chunk), from, valid);
    }
}

/* KEYS rows of DIM elements from key `key` of the item on, zeros past the last key and past the head's width. */
template <typename C, int DIM>
__device__ void load_pages(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const char *pool, int dim,
                           int64_t block_stride, int64_t token_stride, int64_t head_offset, int key, uint32_t shared) {
    constexpr int CHUNKS = DIM / 8;
    static_assert(C::KEYS * CHUNKS % C::THREADS == 0, "threads divide a tile evenly");
#pragma unroll 1
    for (int i = 0; i < C::KEYS * CHUNKS / C::THREADS; i++) {
        int at_once = threadIdx.x + i * C::THREADS, row = at_once / CHUNKS, chunk = at_once % CHUNKS, at = key + row;
        bool valid = at < piece.k_end && chunk * 8 < dim;
        const char *from = pool;
        if (valid) {
            int64_t block = __ldg(a.tables + piece.table + (at >> a.block_shift));
            int64_t token = at & ((1 << a.block_shift) - 1);
            from = pool + (block * block_stride + token * token_stride + head_offset + chunk * 8) * 2;
        }
        copy_async_16(shared + swizzled<DIM>(row, chunk), from, valid);
    }
}

/* A quantised tile of keys or of values on its way: fetched into registers, and placed in shared memory later. There
 * keys are codes less their zero, exact in the element, with their scales beside them; values are what they stand for,
 * rounded. A thread has every THREADS-th chunk of 8 codes. */
template <typename C, int DIM, bool KEYS>
struct code_tile {
    using codes = typename C::codes;
    static constexpr int CHUNKS = DIM / 8, COUNT = C::KEYS * CHUNKS / C::THREADS;

    /* Chunk i: zeros past the last key and past the head's width. */
    static __device__ void fetch(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_head, int key,
                                 int i, uint2 &eight, uint32_t &word) {
        const int at_once = threadIdx.x + i * C::THREADS, chunk = at_once % CHUNKS, at = key + at_once / CHUNKS;
        const int64_t block_stride = KEYS ? a.k_block_stride : a.v_block_stride;
        const int64_t token_stride = KEYS ? a.k_token_stride : a.v_token_stride;
        const int64_t head_stride = KEYS ? a.k_head_stride : a.v_head_stride;
        const int64_t words_at = KEYS ? a.k_words_at : a.v_words_at;
        const char *pool = KEYS ? a.k : a.v;
        eight = make_uint2(0, 0);
        word = 0;
        if (at >= piece.k_end || chunk * 8 >= (KEYS ? a.k_dim : a.v_dim)) return;
        const int64_t block = __ldg(a.tables + piece.table + (at >> a.block_shift));
        const int64_t token = at & ((1 << a.block_shift) - 1);
        eight = __ldg((const uint2 *)(pool + block * block_stride + token * token_stride + kv_head * head_stride +
                                      chunk * 8));
        /* Of the row, or of the head, whose step is 0 where there are none. */
        const float *heads = (KEYS ? a.k_head_scales : a.v_head_scales) + kv_head * a.head_scale_step;
        const void *words =
            words_at ? (const void *)scale_word_at(a, pool, block_stride, words_at, block, kv_head, token) : heads;
        word = words ? __ldg((const uint32_t *)words) : codes::word(KEYS ? a.k_scale : a.v_scale);
    }
    static __device__ void place(uint32_t shared, float *scales, int i, uint2 eight, uint32_t word) {
        const int at_once = threadIdx.x + i * C::THREADS, row = at_once / CHUNKS, chunk = at_once % CHUNKS;
        const float scale = codes::scale(word);
        const uint4 out = widen_eight<codes, typename C::element>(eight, word, KEYS ? 1 : scale);
        if (KEYS && chunk == 0) scales[row] = scale;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared + swizzled<DIM>(row, chunk)), "r"(out.x),
                     "r"(out.y), "r"(out.z), "r"(out.w)
                     : "memory");
    }
};

/* Both tiles; they are fetched while the tile before is worked on, where registers suffice. */
template <typename C>
struct code_tiles {
    using keys = code_tile<C, C::K_DIM, true>;
    using values = code_tile<C, C::V_DIM, false>;
    static constexpr bool AHEAD = C::K_DIM < 256 && !C::RULED;
    uint2 k[AHEAD ? keys::COUNT : 1], v[AHEAD ? values::COUNT : 1];
    uint32_t k_word[AHEAD ? keys::COUNT : 1], v_word[AHEAD ? values::COUNT : 1];

    __device__ void fetch(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_head, int tile) {
        if constexpr (AHEAD) {
#pragma unroll
            for (int i = 0; i < keys::COUNT; i++) keys::fetch(a, piece, kv_head, tile * C::KEYS, i, k[i], k_word[i]);
#pragma unroll
            for (int i = 0; i < values::COUNT; i++)
                values::fetch(a, piece, kv_head, tile * C::KEYS, i, v[i], v_word[i]);
        }
    }
    /* The next barrier ends it. */
    __device__ void place(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_head, int tile,
                          uint32_t shared, float *scales) {
        if constexpr (AHEAD) {
#pragma unroll
            for (int i = 0; i < keys::COUNT; i++) keys::place(shared, scales, i, k[i], k_word[i]);
#pragma unroll
            for (int i = 0; i < values::COUNT; i++) values::place(shared + C::K_BYTES, scales, i, v[i], v_word[i]);
        } else {
#pragma unroll 2
            for (int i = 0; i < keys::COUNT; i++) {
                keys::fetch(a, piece, kv_head, tile * C::KEYS, i, k[0], k_word[0]);
                keys::place(shared, scales, i, k[0], k_word[0]);
            }
#pragma unroll 2
            for (int i = 0; i < values::COUNT; i++) {
                values::fetch(a, piece, kv_head, tile * C::KEYS, i, v[0], v_word[0]);
                values::place(shared + C::K_BYTES, scales, i, v[0], v_word[0]);
            }
        }
    }
};

template <typename C>
__device__ void load_tile(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_head, int tile,
                          uint32_t shared) {
    load_pages<C, C::K_DIM>(a, piece, a.k, a.k_dim, a.k_block_stride, a.k_token_stride, kv_head * a.k_head_stride,
                            tile * C::KEYS, shared);
    load_pages<C, C::V_DIM>(a, piece, a.v, a.v_dim, a.v_block_stride, a.v_token_stride, kv_head * a.v_head_stride,
                            tile * C::KEYS, shared + C::K_BYTES);
}

/* What a warp holds of its rows: lane / 4 and lane / 4 + 8 of each 16-row tile. */
template <typename C>
struct warp_state {
    float o[C::M_TILES][C::V_DIM / 8][4];
    float max[C::M_TILES][2], sum[C::M_TILES][2]; /* max of raw scores; sum over this lane's columns */
};

template <typename C>
using scores = float[C::M_TILES][C::KEYS / 8][4];
/* Pairs of probabilities: of a key pair for row lane / 4, and for row lane / 4 + 8. */
template <typename C>
using probabilities = uint32_t[C::M_TILES][C::KEYS / 8][2];

template <typename C>
__device__ void multiply_keys(scores<C> &s, uint32_t q_base, uint32_t k_base) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++)
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[m][n][e] = 0;
#pragma unroll 2 /* more, and the loads that move ahead make registers spill */
    for (int k = 0; k < C::K_DIM / 16; k++) {
        uint32_t q[C::M_TILES][4];
#pragma unroll
        for (int m = 0; m < C::M_TILES; m++)
            load_matrices(q[m], at_pair<C::K_DIM>(at_row<C::K_DIM>(q_base, 16 * m), k));
#pragma unroll
        for (int n = 0; n < C::KEYS / 16; n++) {
            uint32_t keys[4];
            load_matrices(keys, at_pair<C::K_DIM>(at_row<C::K_DIM>(k_base, 16 * n), k));
#pragma unroll
            for (int m = 0; m < C::M_TILES; m++) {
                mma<typename C::element>(s[m][2 * n], q[m], keys[0], keys[1]);
                mma<typename C::element>(s[m][2 * n + 1], q[m], keys[2], keys[3]);
            }
        }
    }
}

/* Scores of codes become scores of keys. */
template <typename C>
__device__ void scale_scores(scores<C> &s, const float *scales, int lane) {
#pragma unroll
    for (int n = 0; n < C::KEYS / 8; n++) {
        const float2 pair = *(const float2 *)(scales + 8 * n + 2 * (lane % 4));
#pragma unroll
        for (int m = 0; m < C::M_TILES; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[m][n][e] *= e % 2 ? pair.y : pair.x;
        }
    }
}

template <typename C>
__device__ void mask_scores(scores<C> &s, const row_keys *bounds, int sinks, int key, int row, int lane) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_keys keys = bounds[row + 16 * m + 8 * half + lane / 4];
#pragma unroll
            for (int n = 0; n < C::KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (!sees(keys, sinks, key + 8 * n + 2 * (lane % 4) + e)) s[m][n][2 * half + e] = -INFINITY;
                }
            }
        }
    }
}

/* Raw scores become those of the rules, less what is hidden; rows: those of the CTA. Masked: some row does not see all
 * of the tile. */
template <typename C>
__device__ void rule_scores(scores<C> &s, const cpa_cuda_attend_args &a, const ruled_piece &ruled,
                            const row_score *rows, const row_keys *bounds, const int32_t (&indices)[C::KEYS],
                            bool masked, int sinks, int key, int row, int lane) {
    const cpa_cuda_score &rules = a.score;
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at_row = row + 16 * m + 8 * half + lane / 4, column = 2 * (lane % 4);
            const row_score &of = rows[at_row];
            const auto at = [&](int n, int e) -> float & { return s[m][n][2 * half + e]; };
            if (rules.transforms) {
                if (rules.softcap > 0) cap_row<C::KEYS>(at, rules);
#pragma unroll
                for (int n = 0; n < C::KEYS / 8; n++) at(n, 0) *= of.factor, at(n, 1) *= of.factor;
                if (rules.alibi_slopes) {
                    const float alike = slope_row(at, of.slope, ruled, of, indices, key, column);
#pragma unroll
                    for (int n = 0; n < C::KEYS / 8; n++) at(n, 0) += alike, at(n, 1) += alike;
                }
                if (of.bias) bias_row(at, rules.bias, ruled, of, indices, key, column);
            }
            if (masked)
                mask_row_bits<C::KEYS>(
                    at, shown_of_tile(ruled, of, bounds[at_row], sinks, a.mask.causal, indices, key, lane), lane);
        }
    }
}

/* Turns scores into probabilities relative to the new maximum, and scales what was accumulated to it. */
template <typename C>
__device__ void online_softmax(probabilities<C> &p, const scores<C> &s, warp_state<C> &state, float scale_log2) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float max = state.max[m][half];
#pragma unroll
            for (int n = 0; n < C::KEYS / 8; n++) max = fmaxf(max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            max = quad_max(max);
            const float base = max * scale_log2, keep = worth_of(state.max[m][half], max, scale_log2);
            float sum = 0;
#pragma unroll
            for (int n = 0; n < C::KEYS / 8; n++) {
                float low = exp2_fast(s[m][n][2 * half] * scale_log2 - base);
                float high = exp2_fast(s[m][n][2 * half + 1] * scale_log2 - base);
                sum += low + high;
                p[m][n][half] = pack_pair<typename C::element>(low, high);
            }
            state.max[m][half] = max;
            state.sum[m][half] = state.sum[m][half] * keep + sum;
#pragma unroll
            for (int n = 0; n < C::V_DIM / 8; n++) {
                state.o[m][n][2 * half] *= keep;
                state.o[m][n][2 * half + 1] *= keep;
            }
        }
    }
}

template <typename C>
__device__ void multiply_values(warp_state<C> &state, const probabilities<C> &p, uint32_t v_base) {
#pragma unroll
    for (int k = 0; k < C::KEYS / 16; k++) {
        uint32_t a[C::M_TILES][4];
#pragma unroll
        for (int m = 0; m < C::M_TILES; m++) {
            a[m][0] = p[m][2 * k][0], a[m][1] = p[m][2 * k][1];
            a[m][2] = p[m][2 * k + 1][0], a[m][3] = p[m][2 * k + 1][1];
        }
#pragma unroll
        for (int n = 0; n < C::V_DIM / 16; n++) {
            uint32_t values[4];
            load_matrices_transposed(values, at_pair<C::V_DIM>(at_row<C::V_DIM>(v_base, 16 * k), n));
#pragma unroll
            for (int m = 0; m < C::M_TILES; m++) {
                mma<typename C::element>(state.o[m][2 * n], a[m], values[0], values[1]);
                mma<typename C::element>(state.o[m][2 * n + 1], a[m], values[2], values[3]);
            }
        }
    }
}

template <typename C>
__device__ void store_state(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_group,
                            const warp_state<C> &state, int row, int lane) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = piece.row_begin + row + 16 * m + 8 * half + lane / 4;
            const float max = state.max[m][half], sum = counted_sum(quad_sum(state.sum[m][half]), max, a.scale_log2);
            const float inverse = inverse_of_sum(sum), lse = lse_of(sum, max * a.scale + logf(sum));
            if (at < piece.row_end) {
                const row_sink sink(a, piece, at, kv_group, lse);
#pragma unroll
                for (int n = 0; n < C::V_DIM / 8; n++) {
                    float o[2] = {state.o[m][n][2 * half] * inverse, state.o[m][n][2 * half + 1] * inverse};
                    int column = 8 * n + 2 * (lane % 4);
                    if (column < a.v_dim) sink.template store<typename C::element>(column, o);
                }
                __syncwarp(0xfu << (lane & ~3)); /* the quad of the row */
                if (lane % 4 == 0) sink.store_lse();
            }
        }
    }
}

/* The rows of a piece that the part-th CTA of those that share it takes. */
__device__ cpa_cuda_piece part_of(cpa_cuda_piece piece, int part) {
    piece.row_begin += part * ROWS;
    piece.row_end = min(piece.row_end, piece.row_begin + ROWS);
    if (piece.partial >= 0) piece.partial += part * ROWS;
    return piece;
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS) attend_portable(const __grid_constant__ cpa_cuda_attend_args a) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t q_tile = shared_address(shared), kv_tiles = q_tile + C::Q_BYTES;
    __shared__ cpa_cuda_piece piece; /* in shared memory what would cost registers in the loop */
    __shared__ walk_of<C::RULED, C::KEYS> walk;
    __shared__ row_keys bounds[ROWS];
    __shared__ row_score rows[C::RULED ? ROWS : 1];
    __shared__ ruled_piece ruled;
    __shared__ int32_t indices[C::RULED ? STAGES : 1][C::KEYS]; /* of the keys of a tile */
    __shared__ alignas(8) float scales[STAGES][C::QUANTISED ? C::KEYS : 1]; /* of the keys of a tile */
    const cta_work work(a, blockIdx.x);
    const int kv_group = work.kv_group;
    int kv_head = kv_group; /* the compiler is not told that they are one: it would divide in the loop, and spill */
    asm volatile("" : "+r"(kv_head));
    const int lane = threadIdx.x % 32, row = (threadIdx.x / 32) * 16 * C::M_TILES;
    if (threadIdx.x == 0) piece = part_of(a.pieces[work.piece], blockIdx.y);
    __syncthreads();
    if (piece.row_begin >= piece.row_end) return;
    walk.start(a, piece);

    int left = walk.count - 1;
    load_queries<C>(a, piece, kv_group, q_tile);
    typename std::conditional<C::QUANTISED, code_tiles<C>, char>::type coming;
    auto begin_load = [&](int next) {
        if constexpr (C::QUANTISED) {
            coming.fetch(a, piece, kv_head, walk.tile(next));
        } else {
            load_tile<C>(a, piece, kv_head, walk.tile(next), kv_tiles + (next % STAGES) * C::STAGE_BYTES);
        }
    };
    auto end_load = [&](int next) {
        if constexpr (C::QUANTISED)
            coming.place(a, piece, kv_head, walk.tile(next), kv_tiles + (next % STAGES) * C::STAGE_BYTES,
                         scales[next % STAGES]);
    };
    const auto index_keys = [&](int next) {
        if constexpr (C::RULED)
            if (a.score.indexed && !keys_are_linear(a, piece))
                index_tile(indices[next % STAGES], a, piece, walk.tile(next) * C::KEYS, threadIdx.x, C::THREADS);
    };
    if (left >= 0) {
        begin_load(left);
        end_load(left);
        index_keys(left);
    }
    copy_async_commit();
    for (int i = threadIdx.x; i < ROWS; i += C::THREADS) bounds[i] = walk.keys_of(a, piece, piece.row_begin + i);
    if constexpr (C::RULED) {
        if (threadIdx.x == 0) ruled.fill(a, piece);
        for (int i = threadIdx.x; i < ROWS; i += C::THREADS)
            fill_row_score(rows[i], a, piece, piece.row_begin + i, kv_group, ruled_piece::origin_of(a, piece));
    }

    const uint32_t q_base = a_base<C::K_DIM>(q_tile, row, lane);
    warp_state<C> state;
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) state.max[m][half] = lowest_max(a.scale_log2), state.sum[m][half] = 0;
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) state.o[m][n][e] = 0;
    }
    for (; left >= 0; left--) {
        int tile = walk.tile(left);
        uint32_t k_tile = kv_tiles + (left % STAGES) * C::STAGE_BYTES;
        copy_async_wait<0>();
        __syncthreads(); /* the tile is there, and everyone is done with the other stage */
        if (left > 0) {
            begin_load(left - 1);
            copy_async_commit();
        }
        scores<C> s;
        probabilities<C> p;
        multiply_keys<C>(s, q_base, keys_base<C::K_DIM>(k_tile, lane));
        if (C::QUANTISED) scale_scores<C>(s, scales[left % STAGES], lane);
        if constexpr (C::RULED) {
            rule_scores<C>(s, a, ruled, rows, bounds, indices[left % STAGES], walk.masked(tile), walk.sinks,
                           tile * C::KEYS, row, lane);
        } else {
            if (walk.masked(tile)) mask_scores<C>(s, bounds, walk.sinks, tile * C::KEYS, row, lane);
        }
        online_softmax<C>(p, s, state, a.scale_log2);
        multiply_values<C>(state, p, values_base<C::V_DIM>(k_tile + C::K_BYTES, lane));
        if (left > 0) {
            end_load(left - 1);
            index_keys(left - 1);
        }
    }
    store_state<C>(a, piece, kv_group, state, row, lane);
}

template <typename C>
cpa_status launch(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    static uint64_t prepared;
    if (l->count == 0)
        return cpa_cuda_fits(stream, (const void *)attend_portable<C>, C::SHARED_BYTES) ? CPA_OK : CPA_UNSUPPORTED;
    cpa_status status = cpa_cuda_shared_memory(stream, (const void *)attend_portable<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    const dim3 grid(l->count * l->args->kv_heads, (l->plan->tile_rows + ROWS - 1) / ROWS);
    attend_portable<C><<<grid, C::THREADS, C::SHARED_BYTES, cpa_cuda_handle(stream)>>>(*l->args);
    return cpa_cuda_launched(stream, "attend");
}

} // namespace

#endif
