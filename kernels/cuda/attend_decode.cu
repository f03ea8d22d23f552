/* attend over few rows and many keys: bound by memory, so what counts is how many loads are under way. The plan gives
 * each CTA a list of pieces. The query heads of a group fill a 16-row tile; each warp takes every WARPS-th run of 16
 * keys through cp.async stages of its own, without a barrier, and the warps' states are joined at the end of the piece.
 */
#include <type_traits>

#include "base/dependent.cuh"
#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/decode_quant.cuh"
#include "kernels/cuda/mma.cuh"

namespace {

constexpr int ROWS = CPA_CUDA_DECODE_ROWS;
constexpr int KEYS = DECODE_RUN;

/* Rows of 16-bit elements as `swizzled` places them. */
template <int DIM>
struct element_rows {
    static constexpr int BYTES = DIM * 2;
    static __device__ constexpr int twist(int row) { return row & 7; }
};

/* Codes: of a quantised cache, or void. */
template <typename Element, typename Codes, int KeyDim, int ValueDim, int Stages, int Warps>
struct config {
    using element = Element;
    using codes = Codes;
    static constexpr bool QUANTISED = !std::is_void<Codes>::value;
    static constexpr int BYTES = QUANTISED ? 1 : 2; /* of an element of the cache */
    static constexpr int K_DIM = KeyDim, V_DIM = ValueDim, STAGES = Stages, WARPS = Warps, THREADS = 32 * WARPS;
    static constexpr int K_BYTES = KEYS * KeyDim * BYTES, WORDS_AT = K_BYTES + KEYS * ValueDim * BYTES;
    static constexpr int STAGE_BYTES = WORDS_AT + (QUANTISED ? 2 * KEYS * 4 : 0); /* the scales of keys and of values */
    static constexpr int WARP_BYTES = Stages * STAGE_BYTES;
    static constexpr int SHARED_BYTES = WARPS * WARP_BYTES;
    static constexpr int CTAS = KeyDim <= 128 && ValueDim <= 128 ? 2 : 1; /* as cpa_cuda_decode_occupancy says */
    static_assert(ROWS * ValueDim * 4 <= WARP_BYTES, "the accumulators of a warp fit into its stages");

    using key_layout = typename std::conditional<QUANTISED, key_codes<KeyDim>, element_rows<KeyDim>>::type;
    using value_layout = typename std::conditional<QUANTISED, value_codes<ValueDim>, element_rows<ValueDim>>::type;
};

/* The value, as one that the compiler keeps rather than computes again, if there are registers for it. */
template <bool KEEP, typename T>
__device__ T kept(T x) {
    if constexpr (!KEEP) {
    } else if constexpr (sizeof(T) == 8) {
        asm volatile("" : "+l"(x));
    } else {
        asm volatile("" : "+r"(x));
    }
    return x;
}

/* What a lane copies of every run of keys, or of values: the same chunks of 16 bytes of the rows first + i * STEP, so
 * that little is computed for a run. Layout: BYTES of a row in shared memory, and twist(row), by which the chunks of a
 * row change places; it is linear in the bits of the row, so that of first + i * STEP it is that of both, xored. */
template <typename Layout>
struct lane_rows {
    static constexpr int CHUNKS = Layout::BYTES / 16, LANES = CHUNKS & -CHUNKS, PARTS = CHUNKS / LANES,
                         STEP = 32 / LANES;
    static_assert(LANES <= 32 && KEYS % STEP == 0, "whole rows");

    const char *from; /* of row `first` of the run at token 0 of block 0 */
    uint32_t row_at, chunk_at;
    int32_t first, chunks; /* of the head, from this lane's on */

    __device__ lane_rows(const char *head, int64_t token_bytes, int head_bytes, int lane) {
        const int chunk = lane % LANES;
        constexpr bool KEEP = Layout::BYTES < 512;
        first = kept<KEEP>(lane / LANES);
        from = kept<KEEP>(head + first * token_bytes + chunk * 16);
        row_at = kept<KEEP>((uint32_t)(first * Layout::BYTES));
        chunk_at = kept<KEEP>((uint32_t)(chunk ^ Layout::twist(first)) * 16);
        chunks = kept<KEEP>(head_bytes / 16 - chunk);
    }
    /* The rows `offset` bytes on, `keys` of them; zeros past those and past the head's width. */
    __device__ void load(int64_t offset, int64_t token_bytes, int keys, uint32_t shared) const {
        const char *row = from + offset;
        const bool whole = keys >= KEYS;
        shared += row_at;
#pragma unroll
        for (int i = 0; i < KEYS; i += STEP) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const uint32_t twisted = chunk_at ^ (uint32_t)((part * LANES) ^ Layout::twist(i)) * 16;
                copy_async_16(shared + i * Layout::BYTES + twisted, row + part * LANES * 16,
                              part * LANES < chunks && (whole || first + i < keys));
            }
            row += STEP * token_bytes;
        }
    }
};

/* A warp's way through the keys and values of a head. */
template <typename C>
struct stage_loader {
    lane_rows<typename C::key_layout> k;
    lane_rows<typename C::value_layout> v;

    __device__ stage_loader(const cpa_cuda_attend_args &a, int kv_head, int lane)
        : k(a.k + kv_head * a.k_head_stride * C::BYTES, a.k_token_stride * C::BYTES, a.k_dim * C::BYTES, lane),
          v(a.v + kv_head * a.v_head_stride * C::BYTES, a.v_token_stride * C::BYTES, a.v_dim * C::BYTES, lane) {}

    /* The run of `keys` keys from `token` of `block` on. */
    __device__ void load(const cpa_cuda_attend_args &a, int kv_head, int64_t block, int64_t token, int keys,
                         uint32_t shared, int lane) const {
        k.load((block * a.k_block_stride + token * a.k_token_stride) * C::BYTES, a.k_token_stride * C::BYTES, keys,
               shared);
        v.load((block * a.v_block_stride + token * a.v_token_stride) * C::BYTES, a.v_token_stride * C::BYTES, keys,
               shared + C::K_BYTES);
        if constexpr (C::QUANTISED) load_words<C>(a, kv_head, block, token, keys, shared, lane);
    }
};

/* The queries as A operands; zeros past the last row and past the head's width. */
template <typename C>
__device__ void load_queries(uint32_t (&q)[C::K_DIM / 16][4], const cpa_cuda_attend_args &a,
                             const cpa_cuda_piece &piece, int kv_group, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = piece.row_begin + 8 * half + lane / 4;
        bool valid = row < piece.row_end;
        row_place place(a, piece.q_row, valid ? row : piece.row_begin, kv_group);
        const char *from = a.q + (place.state_row * a.q_row_stride + (int64_t)place.head * a.k_dim) * 2;
#pragma unroll
        for (int k = 0; k < C::K_DIM / 16; k++) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                int column = 16 * k + 8 * side + 2 * (lane % 4);
                q[k][2 * side + half] = valid && column < a.k_dim ? *(const uint32_t *)(from + (int64_t)column * 2) : 0;
            }
        }
    }
}

/* The queries where mma takes them from: registers, or shared memory where codes need the registers. */
template <typename C, bool SHARED = C::QUANTISED>
struct query_operands {
    uint32_t part[C::K_DIM / 16][4];
};
template <typename C>
struct query_operands<C, true> {
    uint32_t shared; /* this lane's part of the first step */
};

/* What a warp has of its rows lane / 4 and lane / 4 + 8, over its own keys. */
template <typename C>
struct warp_state {
    float o[C::V_DIM / 8][4];
    float max[2], sum[2]; /* max of raw scores; sum over this lane's columns */
    float q_scale[2];     /* quantised: see decode_quant.cuh */
    float largest;        /* scale of values so far */
};

/* The scales of this lane's keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9. */
__device__ void read_words(uint32_t (&words)[4], uint32_t address, int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        uint32_t pair[2];
        load_shared(pair, address + (8 * n + 2 * (lane % 4)) * 4);
        words[2 * n] = pair[0], words[2 * n + 1] = pair[1];
    }
}

/* The factors of the probabilities of this lane's keys; what was accumulated follows the largest scale. */
template <typename C>
__device__ void weigh_scales(float (&weight)[4], warp_state<C> &state, const uint32_t (&words)[4]) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) weight[i] = C::codes::scale(words[i]), top = fmaxf(top, weight[i]);
    top = quad_max(top);
    if (top > state.largest) { /* the same for all lanes; scales settle early */
        const float shrink = state.largest / top;
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) state.o[n][e] *= shrink;
        state.largest = top;
    }
    const float inverse = __fdividef(DECODE_P_SCALE, state.largest);
#pragma unroll
    for (int i = 0; i < 4; i++) weight[i] *= inverse;
}

/* One run of 16 keys. */
template <typename C>
__device__ void attend_keys(const cpa_cuda_attend_args &a, warp_state<C> &state,
                            const query_operands<C> &q, uint32_t stage, bool masked,
                            const row_keys (&bounds)[2], int sinks, int key, int lane) {
    using product = typename std::conditional<C::QUANTISED, __half, typename C::element>::type;
    const float scale_log2 = a.scale_log2;
    float s[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, weight[4];
    uint32_t words[4];
    if constexpr (C::QUANTISED) {
        for (int i = 0; i < 4; i++) words[i] = C::codes::word(a.k_scale);
        if (a.k_words_at) read_words(words, stage + C::WORDS_AT, lane);
        score_codes<C>(s, q.shared, state.q_scale, stage, words, a.k_words_at != 0, lane);
        for (int i = 0; i < 4; i++) words[i] = C::codes::word(a.v_scale);
        if (a.k_words_at) read_words(words, stage + C::WORDS_AT + KEYS * 4, lane);
        weigh_scales<C>(weight, state, words);
    } else {
        const uint32_t keys_at = keys_base<C::K_DIM>(stage, lane);
#pragma unroll
        for (int k = 0; k < C::K_DIM / 16; k++) {
            uint32_t keys[4];
            load_matrices(keys, at_pair<C::K_DIM>(keys_at, k));
            mma<product>(s[0], q.part[k], keys[0], keys[1]);
            mma<product>(s[1], q.part[k], keys[2], keys[3]);
        }
    }
    if (masked) {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!sees(bounds[e / 2], sinks, key + 8 * n + 2 * (lane % 4) + e % 2)) s[n][e] = -INFINITY;
    }
    uint32_t p[4];
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
        max = fmaxf(state.max[half], quad_max(max));
        float base = max == -INFINITY ? 0 : max * scale_log2, sum = 0;
        keep[half] = exp2_fast(state.max[half] * scale_log2 - base);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float low = exp2_fast(s[n][2 * half] * scale_log2 - base);
            float high = exp2_fast(s[n][2 * half + 1] * scale_log2 - base);
            sum += low + high;
            if constexpr (C::QUANTISED) low *= weight[2 * n], high *= weight[2 * n + 1];
            p[2 * n + half] = pack_pair<product>(low, high);
        }
        state.max[half] = max;
        state.sum[half] = state.sum[half] * keep[half] + sum;
    }
    if (__any_sync(0xffffffff, keep[0] != 1 || keep[1] != 1)) { /* maxima settle early: most runs skip this */
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) state.o[n][e] *= keep[e / 2];
    }
    if constexpr (C::QUANTISED) {
        weigh_codes<C>(state.o, p, stage + C::K_BYTES, words, lane);
    } else {
        const uint32_t values_at = values_base<C::V_DIM>(stage + C::K_BYTES, lane);
#pragma unroll
        for (int n = 0; n < C::V_DIM / 16; n++) {
            uint32_t values[4];
            load_matrices_transposed(values, at_pair<C::V_DIM>(values_at, n));
            mma<product>(state.o[2 * n], p, values[0], values[1]);
            mma<product>(state.o[2 * n + 1], p, values[2], values[3]);
        }
    }
}

/* Joins the warps' states in the order of the warps and stores the rows. */
template <typename C>
__device__ void join_warps(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_group,
                           const warp_state<C> &state, char *shared, float (&max)[C::WARPS][ROWS],
                           float (&sum)[C::WARPS][ROWS], int warp, int lane) {
    float *o = (float *)(shared + warp * C::WARP_BYTES);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = 8 * half + lane / 4;
        float total = quad_sum(state.sum[half]);
        if (lane % 4 == 0) max[warp][row] = state.max[half], sum[warp][row] = total;
        if constexpr (C::QUANTISED) {
            store_code_columns<C>(o + row * C::V_DIM, state.o, half, state.largest / DECODE_P_SCALE, lane);
        } else {
#pragma unroll
            for (int n = 0; n < C::V_DIM / 8; n++) {
                const float pair[2] = {state.o[n][2 * half], state.o[n][2 * half + 1]};
                store_floats(o + row * C::V_DIM + 8 * n + 2 * (lane % 4), pair);
            }
        }
    }
    __syncthreads();
    const int rows = piece.row_end - piece.row_begin, quads = a.v_dim / 4;
    for (int pass = 0; pass < 2; pass++) { /* O, then the LSE, which everyone has read by then */
        for (int i = threadIdx.x; i < (pass == 0 ? rows * quads : rows); i += C::THREADS) {
            int row = pass == 0 ? i / quads : i, column = pass == 0 ? i % quads * 4 : 0;
            float top = -INFINITY, total = 0, value[4] = {0, 0, 0, 0};
            for (int w = 0; w < C::WARPS; w++) top = fmaxf(top, max[w][row]);
            for (int w = 0; w < C::WARPS; w++) {
                if (max[w][row] == -INFINITY) continue;
                float weight = exp2_fast((max[w][row] - top) * a.scale_log2), part[4];
                load_floats((const float *)(shared + w * C::WARP_BYTES) + row * C::V_DIM + column, part);
                total += weight * sum[w][row];
                for (int e = 0; e < 4; e++) value[e] += weight * part[e];
            }
            float inverse = total > 0 ? 1 / total : 0;
            float lse = total > 0 ? top * a.scale + logf(total) : -INFINITY;
            for (int e = 0; e < 4; e++) value[e] *= inverse;
            row_sink sink(a, piece, piece.row_begin + row, kv_group, lse);
            if (pass == 0) {
                sink.store<typename C::element>(column, value);
            } else {
                sink.store_lse();
            }
        }
        __syncthreads();
    }
}

template <typename C>
__device__ void attend_piece(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const key_walk<KEYS> &walk,
                             int kv_group, warp_state<C> &state, uint32_t stages, uint32_t queries, int warp,
                             int lane) {
    const int kv_head = (kv_group + a.head_skew) % a.kv_heads;
    const int32_t *table = a.tables + piece.table;
    auto block_of = [&](int i) { return i < walk.count ? __ldg(table + ((walk.tile(i) * KEYS) >> a.block_shift)) : 0; };
    int ahead = warp, next_block = block_of(ahead); /* the run that is loaded next, and the page it lies in */
    const stage_loader<C> loader(a, kv_head, lane);
    auto load_next = [&](int stage) {
        if (ahead < walk.count) {
            int block = next_block;
            int key = walk.tile(ahead) * KEYS;
            ahead += C::WARPS;
            next_block = block_of(ahead);
            loader.load(a, kv_head, block, key & ((1 << a.block_shift) - 1), piece.k_end - key,
                        stages + stage * C::STAGE_BYTES, lane);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int stage = 0; stage < C::STAGES - 1; stage++) load_next(stage);
    query_operands<C> q;
    if constexpr (C::QUANTISED) {
        q.shared = queries + lane * 16;
        store_query_codes<C>(q.shared, state.q_scale, a, piece, kv_group, warp, lane);
        __syncthreads();
    } else {
        load_queries<C>(q.part, a, piece, kv_group, lane);
    }
    row_keys bounds[2];
#pragma unroll
    for (int half = 0; half < 2; half++) bounds[half] = walk.keys_of(a, piece, piece.row_begin + 8 * half + lane / 4);
    int stage = 0;
    for (int i = warp; i < walk.count; i += C::WARPS) {
        copy_async_wait<C::STAGES - 2>();
        __syncwarp(); /* the run is there for all lanes, and all are done with the stage that is loaded next */
        load_next(stage == 0 ? C::STAGES - 1 : stage - 1);
        int tile = walk.tile(i);
        attend_keys<C>(a, state, q, stages + stage * C::STAGE_BYTES, walk.masked(tile), bounds, walk.sinks, tile * KEYS,
                       lane);
        stage = stage + 1 == C::STAGES ? 0 : stage + 1;
    }
    copy_async_wait<0>();
    __syncwarp();
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS) attend_decode(const __grid_constant__ cpa_cuda_attend_args a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ cpa_cuda_piece piece;
    __shared__ key_walk<KEYS> walk;
    __shared__ float max[C::WARPS][ROWS], sum[C::WARPS][ROWS];
    __shared__ uint4 queries[C::QUANTISED ? C::K_DIM / 16 * 32 : 1];
    dependent_allow();
    const int kv_group = blockIdx.x, warp = kept<C::CTAS == 2>((int)threadIdx.x / 32),
              lane = kept<C::CTAS == 2>((int)threadIdx.x % 32);
    for (int at = blockIdx.y, next; at >= 0; at = next) {
        if (threadIdx.x == 0) piece = a.pieces[at];
        __syncthreads();
        walk.start(a, piece);
        next = piece.next;
        warp_state<C> state;
#pragma unroll
        for (int half = 0; half < 2; half++) state.max[half] = -INFINITY, state.sum[half] = 0;
        state.largest = 1e-30f; /* below any scale that matters */
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) state.o[n][e] = 0;
        attend_piece<C>(a, piece, walk, kv_group, state, shared_address(shared) + warp * C::WARP_BYTES,
                        shared_address(queries), warp, lane);
        join_warps<C>(a, piece, kv_group, state, shared, max, sum, warp, lane);
    }
}

template <typename C>
cpa_status launch(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream) {
    static uint64_t prepared;
    cpa_status status = cpa_cuda_shared_memory(stream, (const void *)attend_decode<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    dim3 grid(args->kv_heads, ctas);
    attend_decode<C><<<grid, C::THREADS, C::SHARED_BYTES, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "attend");
}

/* Codes are half the bytes but the same work: it takes more warps to keep the memory busy, with as much under way. */
template <typename Element, typename Codes>
cpa_status launch_widths(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream) {
    constexpr bool Q = !std::is_void<Codes>::value;
    int32_t k_dim = args->k_dim, v_dim = args->v_dim;
    if (k_dim <= 64 && v_dim <= 64)
        return launch<config<Element, Codes, 64, 64, Q ? 7 : 6, Q ? 6 : 4>>(args, ctas, stream);
    if (k_dim <= 128 && v_dim <= 128)
        return launch<config<Element, Codes, 128, 128, Q ? 4 : 3, Q ? 6 : 4>>(args, ctas, stream);
    if (k_dim <= 192 && v_dim <= 128)
        return launch<config<Element, Codes, 192, 128, Q ? 6 : 4, 4>>(args, ctas, stream);
    return launch<config<Element, Codes, 256, 256, Q ? 5 : 3, 4>>(args, ctas, stream);
}

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream) {
    if (args->kv_dtype == CPA_FP8_E4M3) return launch_widths<Element, e4m3_codes>(args, ctas, stream);
    if (args->kv_dtype == CPA_INT8) return launch_widths<Element, int8_codes>(args, ctas, stream);
    return launch_widths<Element, void>(args, ctas, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream) {
    return args->q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(args, ctas, stream)
                                     : launch_codes<__half>(args, ctas, stream);
}
