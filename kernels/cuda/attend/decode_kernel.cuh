/* attend over few rows and many keys: bound by memory, so what counts is how many loads are under way. The plan gives
 * each CTA a list of pieces. The query heads of a group fill a 16-row tile; a warp takes one run of 16 keys after the
 * other through cp.async stages of its own, without a barrier, and the warps' states are joined at the end of the
 * piece. With two heads a CTA, pairs of warps walk together: each has its own head, and copies half of the keys for
 * both; where the query heads of several tokens fill more than a tile, each has a tile, and they share the keys of
 * their head. The kernel may be placed beside the one before it: it then reads the plan, takes pieces whose queries are
 * ready or has the L2 cache fetch the first keys and values, and waits before it looks at anything else. */
#ifndef CPA_CUDA_DECODE_KERNEL_CUH
#define CPA_CUDA_DECODE_KERNEL_CUH

#include <type_traits>

#include "base/dependent.cuh"
#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/decode_loads.cuh"
#include "kernels/cuda/attend/decode_quant.cuh"
#include "kernels/cuda/attend/decode_runs.cuh"
#include "kernels/cuda/attend/decode_turboquant.cuh"
#include "kernels/cuda/attend/decode_warp.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"
#include "kernels/cuda/attend/score.cuh"

namespace {

constexpr int KEYS = DECODE_RUN;

/* Codes: of a quantised cache, or void. Heads: a CTA's; a gang of as many warps walks through the same keys. Ruled:
 * scores have rules (score.cuh). Rows: of runs; where codes are arithmetic enough to hide the question, one kernel
 * takes either. Runs: rows lie in runs of their own. Tiles: of rows, of a piece; a gang has a warp for each, and those
 * of a head share its stages. Turboquant: rows are codes of CPA_TQ_, which lie in the stages as elements. */
template <typename Element, typename Codes, int KeyDim, int ValueDim, int Stages, int Warps, int Heads, bool Ruled,
          run_rows Rows = std::is_void<Codes>::value ? ROWS_TOGETHER : ROWS_EITHER, bool Runs = false, int Tiles = 1,
          bool Turboquant = false>
struct config {
    using element = Element;
    using codes = Codes;
    static constexpr bool QUANTISED = !std::is_void<Codes>::value, RULED = Ruled, RUNS = Runs, TURBOQUANT = Turboquant;
    static constexpr int BYTES = QUANTISED ? 1 : 2; /* of an element of the cache */
    static constexpr int K_DIM = KeyDim, V_DIM = ValueDim, STAGES = Stages, WARPS = Warps, THREADS = 32 * WARPS;
    static constexpr run_rows ROWS = Rows;
    static constexpr int HEADS = Heads, TILES = Tiles, MEMBERS = Heads * Tiles, GANGS = Warps / MEMBERS;
    static_assert(Warps % MEMBERS == 0 && (Tiles == 1 || !QUANTISED), "gangs of whole warps; codes have one tile");
    /* Queries lie in shared memory where codes under way, or rules of the widest heads, need the registers. */
    static constexpr bool Q_SHARED = QUANTISED || (Ruled && KeyDim > 192);
    /* Codes of rows in runs have another order of keys in both products: see run_key. */
    static constexpr bool REORDERED = Runs && QUANTISED;
    static constexpr int K_BYTES = KEYS * KeyDim * BYTES, WORDS_AT = K_BYTES + KEYS * ValueDim * BYTES;
    /* The scales of keys and of values; or what scores are multiplied by, up to the next 128 bytes. */
    static constexpr int STAGE_BYTES = WORDS_AT + (QUANTISED ? 2 * KEYS * 4 : Turboquant ? 128 : 0);
    static constexpr int WARP_BYTES = Stages * STAGE_BYTES;
    static constexpr int SHARED_BYTES = WARPS / Tiles * WARP_BYTES;
    /* Of a multiprocessor, as cpa_cuda_decode_geometry says. */
    static constexpr int CTAS = 2 * SHARED_BYTES <= CPA_CUDA_WIDE_BYTES ? 2 : 1;
    static_assert(WARP_BYTES % 16 == 0, "of whole chunks");

    using key_layout = typename std::conditional<QUANTISED, key_codes<KeyDim>, element_rows<KeyDim>>::type;
    using value_layout = typename std::conditional<QUANTISED, value_codes<ValueDim>, element_rows<ValueDim>>::type;
};

template <typename C>
using loader_of = typename std::conditional<
    C::TURBOQUANT, turboquant_loader<C>,
    typename std::conditional<C::RUNS, runs_loader<C>, stage_loader<C>>::type>::type;

/* Which of the 16 keys of a run a row sees; own: the index of the key `lane` mod 16 of it, if bits ask for it. */
__device__ uint32_t shown_of_run(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const row_score &row,
                                 int32_t own, int sinks, int key) {
    const uint32_t within = seen_within(row.keys, sinks, key);
    if (!a.score.custom.bits) return within;
    if (runs_of(a, piece, KEYS)) {
        const int32_t first = __shfl_sync(0xffffffff, own, 0);
        return row.bits ? within & seen_keys(row, a.mask.causal, first) : within;
    }
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < KEYS; i++) {
        const int32_t t = __shfl_sync(0xffffffff, own, i);
        seen |= (row.bits ? seen_keys(row, a.mask.causal, t) & 1 : 1) << i;
    }
    return within & seen;
}

/* Hides what is not among the keys that are shown to both rows of a lane, the first of them being its first. */
template <bool REORDERED>
__device__ void hide_keys(float (&s)[2][4], const uint32_t (&shown)[2]) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!(shown[e / 2] >> run_key<REORDERED>(n, e % 2) & 1)) s[n][e] = -INFINITY;
}

/* Raw scores of a run become those of the rules, less what is hidden; rows: the lane's first, and 8 on its second, which
 * counts for nothing where there are `few`. */
template <bool REORDERED>
__device__ void rule_run(float (&s)[2][4], const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                         const row_score *rows, bool few, bool masked, int sinks, int key, int lane) {
    const cpa_cuda_score &rules = a.score;
    int32_t own = 0;
    if (rules.indexed && (masked || rules.transforms))
        own = relative(key_index(a, piece, key + lane % KEYS), rows->origin);
    if (rules.transforms) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half == 1 && few) break;
            float *of_row[] = {&s[0][2 * half], &s[0][2 * half + 1], &s[1][2 * half], &s[1][2 * half + 1]};
            if (rules.softcap > 0) cap_scores_of(rules.tanh, rules.tanh_line, of_row);
            for (int i = 0; i < 4; i++) *of_row[i] *= rows[8 * half].factor;
        }
        if (rules.alibi_slopes || rules.bias.values) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int32_t t = __shfl_sync(0xffffffff, own, run_key<REORDERED>(n, 2 * (lane % 4) + e));
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const row_score &row = rows[8 * half];
                        float more = row.slope * (float)(t - row.index);
                        if (row.bias) more += bias_at(rules.bias, row.bias, t - row.bias_first);
                        s[n][2 * half + e] += more;
                    }
                }
            }
        }
    }
    if (!masked) return; /* bits hide nothing either: the walk is masked from the first key on that they tell of */
    uint32_t shown[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        shown[half] = shown_of_run(a, piece, rows[8 * half], own, sinks, key) >> run_key<REORDERED>(0, 2 * (lane % 4));
    hide_keys<REORDERED>(s, shown);
}

/* O += P V of a run whose values are elements, row by row. */
template <typename C>
__device__ void weigh_elements(float (&o)[C::V_DIM / 8][4], const uint32_t (&p)[4], uint32_t values_of_run, int lane) {
    const uint32_t at = values_base<C::V_DIM>(values_of_run, lane);
#pragma unroll
    for (int n = 0; n < C::V_DIM / 16; n++) {
        uint32_t values[4];
        load_matrices_transposed(values, at_pair<C::V_DIM>(at, n));
        mma<typename C::element>(o[2 * n], p, values[0], values[1]);
        mma<typename C::element>(o[2 * n + 1], p, values[2], values[3]);
    }
}

/* One run of 16 keys. */
template <typename C>
__device__ void attend_keys(const cpa_cuda_attend_args &a, warp_state<C> &state,
                            const query_operands<C> &q, uint32_t stage, bool masked,
                            const row_keys (&bounds)[2], int sinks, int key, int lane,
                            const cpa_cuda_piece &piece, const row_score *rows) {
    using product = typename std::conditional<C::QUANTISED, __half, typename C::element>::type;
    const float scale_log2 = a.scale_log2;
    float s[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, weight[4];
    uint32_t words[4];
    if constexpr (C::QUANTISED) {
        for (int i = 0; i < 4; i++) words[i] = C::codes::word(a.k_scale);
        if (a.k_words_at) read_words<C::RUNS>(words, stage + C::WORDS_AT, lane);
        score_codes<C>(s, q.shared, state.q_scale, stage, words, a.k_words_at != 0, lane);
        for (int i = 0; i < 4; i++) words[i] = C::codes::word(a.v_scale);
        if (a.k_words_at) read_words<C::RUNS>(words, stage + C::WORDS_AT + KEYS * 4, lane);
        weigh_scales<C>(weight, state, words);
    } else {
        const uint32_t keys_at = keys_base<C::K_DIM>(stage, lane);
#pragma unroll
        for (int k = 0; k < C::K_DIM / 16; k++) {
            uint32_t keys[4];
            load_matrices(keys, at_pair<C::K_DIM>(keys_at, k));
            if constexpr (C::Q_SHARED) {
                uint32_t part[4];
                load_shared(part, q.shared + k * 512);
                mma<product>(s[0], part, keys[0], keys[1]);
                mma<product>(s[1], part, keys[2], keys[3]);
            } else {
                mma<product>(s[0], q.part[k], keys[0], keys[1]);
                mma<product>(s[1], q.part[k], keys[2], keys[3]);
            }
        }
    }
    if constexpr (C::TURBOQUANT) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t worth[2];
            load_shared(worth, stage + C::WORDS_AT + (8 * n + 2 * (lane % 4)) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] *= __uint_as_float(worth[e % 2]);
        }
    }
    if constexpr (C::RULED) {
        rule_run<C::REORDERED>(s, a, piece, rows, C::TILES == 1 && piece.row_end - piece.row_begin <= 8, masked, sinks, key,
                               lane);
    } else if (masked) {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!sees(bounds[e / 2], sinks,
                          key + run_key<C::REORDERED>(n, 2 * (lane % 4) + e % 2)))
                    s[n][e] = -INFINITY;
    }
    uint32_t p[4];
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
        max = fmaxf(state.max[half], quad_max(max));
        keep[half] = worth_of(state.max[half], max, scale_log2);
        state.max[half] = max;
        const float base = max * scale_log2;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float low = exp2_fast(s[n][2 * half] * scale_log2 - base);
            float high = exp2_fast(s[n][2 * half + 1] * scale_log2 - base);
            sum += low + high;
            if constexpr (C::QUANTISED) low *= weight[2 * n], high *= weight[2 * n + 1];
            p[2 * n + half] = pack_pair<product>(low, high);
        }
        state.sum[half] = state.sum[half] * keep[half] + sum;
    }
    state.rescale(keep);
    if constexpr (C::RUNS) {
        weigh_columns<C>(state.o, p, stage + C::K_BYTES, lane);
    } else if constexpr (C::QUANTISED) {
        weigh_codes<C>(state.o, p, stage + C::K_BYTES, words, lane);
    } else {
        weigh_elements<C>(state.o, p, stage + C::K_BYTES, lane);
    }
}

/* The keys of a piece that each warp takes for its head: every GANGS-th run. */
template <typename C>
__device__ void attend_piece(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                             const walk_of<C::RULED, KEYS> &walk, int kv_group, bool prefetches, warp_state<C> &state,
                             uint32_t shared, uint32_t queries, row_score *scores, int warp, int lane) {
    const int gang = warp / C::MEMBERS, member = warp % C::MEMBERS, kv_head = kv_group + member / C::TILES;
    const int first_row = piece.row_begin + member % C::TILES * CPA_CUDA_DECODE_ROWS; /* of this warp's tile */
    const uint32_t stages = shared + warp / C::TILES * C::WARP_BYTES;
    const uint32_t loaded = shared + gang * C::HEADS * C::WARP_BYTES;
    const int32_t *table = a.tables + piece.table;
    auto block_of = [&](int i) { /* of the run, or of the lane's row of it */
        if (i >= walk.count) return 0;
        int key = walk.tile(i) * KEYS;
        if (rows_lie_apart<C>(a)) key = min(key + lane % KEYS, piece.k_end - 1);
        return __ldg(table + (key >> a.block_shift));
    };
    const loader_of<C> loader(a, kv_group, member, lane);
    int ahead = gang, next_block = block_of(ahead); /* the run that is loaded next, and the page it lies in */
    auto next_run = [&] {
        if (ahead >= walk.count) return lane_run{};
        const int block = next_block, key = walk.tile(ahead) * KEYS;
        ahead += C::GANGS;
        next_block = block_of(ahead);
        return loader.run(a, kv_group, block, key, piece.k_end - key, lane);
    };
    auto load = [&](const lane_run &run, int stage) {
        if constexpr (C::TURBOQUANT) {
            if (run.keys == 0) loader.settle(a, lane);
        }
        if (run.keys > 0) loader.load(a, run, loaded + stage * C::STAGE_BYTES, member, lane);
        copy_async_commit();
    };
    lane_run first[C::STAGES - 1];
#pragma unroll
    for (lane_run &run : first) {
        run = next_run();
        if (prefetches) loader.prefetch(a, run, lane); /* while the kernel before this one ends */
    }
    const query_rows rows(a, piece, first_row, kv_head, lane);
    row_keys bounds[2];
#pragma unroll
    for (int half = 0; half < 2 && !C::RULED; half++)
        bounds[half] = walk.keys_of(a, piece, first_row + 8 * half + lane / 4);
    if (!piece.ready && !a.beside_shared) { /* only the plan, and what is ready, has been read so far */
        dependent_wait();
        dependent_allow();
    }
#pragma unroll
    for (int stage = 0; stage < C::STAGES - 1; stage++) load(first[stage], stage);
    if constexpr (C::RULED) {
        const int64_t origin = query_index(a, piece, token_of_row(a, piece.row_begin));
        if (lane < CPA_CUDA_DECODE_ROWS) {
            fill_row_score(scores[lane], a, piece, first_row + lane, kv_head, origin);
            scores[lane].keys = walk.keys_of(a, piece, first_row + lane);
        }
        __syncwarp();
    }
    query_operands<C> q;
    take_queries<C, false>(q, state, a, piece, rows, kv_head, walk.count > 0,
                           queries + member * (C::K_DIM / 16 * 512), gang, lane);
    if constexpr (C::TURBOQUANT) {
        if (walk.count > 0 && tq_key_bits(a.kv_dtype) < 8) rotate_queries<C>(q.part, a.k_dim, lane);
    }
    int stage = 0;
    for (int i = gang; i < walk.count; i += C::GANGS) {
        copy_async_wait<C::STAGES - 2>();
        sync_gang<C>(gang); /* the run is there for all lanes, and all are done with the stage that is loaded next */
        load(next_run(), stage == 0 ? C::STAGES - 1 : stage - 1);
        const int tile = walk.tile(i);
        attend_keys<C>(a, state, q, stages + stage * C::STAGE_BYTES, walk.masked(tile), bounds, walk.sinks, tile * KEYS,
                       lane, piece, scores + (C::RULED ? lane / 4 : 0));
        stage = stage + 1 == C::STAGES ? 0 : stage + 1;
    }
    /* All gangs pass their barriers equally often: else racecheck takes what follows for unordered. */
    if (C::MEMBERS > 1 && walk.count % C::GANGS != 0 && gang >= walk.count % C::GANGS) sync_gang<C>(gang);
    copy_async_wait<0>();
    if (C::TILES > 1) sync_gang<C>(gang); /* what one leaves lies where the others' keys were */
    __syncwarp();
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS) attend_decode(const __grid_constant__ cpa_cuda_attend_args a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ cpa_cuda_piece pieces[C::WARPS]; /* a copy for each warp, which waits for no other at the start */
    __shared__ walk_of<C::RULED, KEYS> walks[C::WARPS];
    __shared__ row_score scores[C::RULED ? C::WARPS : 1][C::RULED ? CPA_CUDA_DECODE_ROWS : 1]; /* of each warp's rows */
    __shared__ warp_states<C> states;
    __shared__ uint4 queries[C::Q_SHARED ? C::HEADS * C::K_DIM / 16 * 32 : 1];
    const int kv_group = blockIdx.x * C::HEADS, warp = kept<C::CTAS == 2>((int)threadIdx.x / 32),
              lane = kept<C::CTAS == 2>((int)threadIdx.x % 32);
    const cpa_cuda_piece &piece = pieces[warp];
    walk_of<C::RULED, KEYS> &walk = walks[warp];
    bool waited = false;
    for (int at = blockIdx.y; at >= 0; at = piece.next) {
        copy_piece(pieces[warp], a.pieces[at], lane);
        walk.start_warp(a, piece, lane);
        warp_state<C> state;
        state.clear(a.scale_log2);
        attend_piece<C>(a, piece, walk, kv_group, a.early && !waited && !piece.ready && !a.beside_shared, state,
                        shared_address(shared), shared_address(queries), scores[C::RULED ? warp : 0], warp, lane);
        waited |= !piece.ready;
        float values_scale = 1;
        if constexpr (C::QUANTISED)
            values_scale = head_scale(1, a.v_head_scales, a.head_scale_step, kv_group + warp % C::HEADS);
        const int rows = piece.row_end - piece.row_begin - warp % C::TILES * CPA_CUDA_DECODE_ROWS; /* of this warp's */
        leave_state<C>(state, rows, values_scale, states, (float *)shared, warp, lane);
        store_rows<C>(a, piece, kv_group, states, (const float *)shared, warp, lane);
    }
    dependent_wait(); /* what comes behind takes this kernel's end for that of the one before it */
    dependent_allow();
}

template <typename C>
cpa_status launch(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    static uint64_t prepared;
    return launch_decode<C>(attend_decode<C>, &prepared, l, stream);
}

} // namespace

#endif
