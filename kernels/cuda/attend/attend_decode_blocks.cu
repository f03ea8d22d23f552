/* attend over few rows and many keys of CPA_VLLM_X caches of 16 tokens a block or more, whose blocks have the keys of a
 * head in one piece of memory, [k_dim / x, block_size, x], and its values in another, [v_dim, block_size]. A warp has a
 * ring of slots in shared memory, to which it copies the keys of two blocks of 16 tokens, of one of 32 or of 32 tokens
 * of a larger one, then their values. It takes 32 keys after the other, and fills each slot again as soon as it has
 * been read: no barrier of the CTA, and no address but that of a block.
 *
 * Eight keys of a chunk of x are 128 bytes, which is how ldmatrix wants rows; values lie transposed, which is how mma
 * wants its operand B. Of codes a lane gets those of four keys at once, so that there the keys have another order in
 * both products: see run_key. */
#include <type_traits>

#include "kernels/cuda/attend/decode_loads.cuh"
#include "kernels/cuda/attend/decode_warp.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"

namespace {

constexpr int KEYS = 32, STEP = DECODE_RUN, STEPS = KEYS / STEP; /* keys of a slot, and of a step of P V */
constexpr int WORD_LANES = KEYS * 4 / 16; /* that copy the scales of a slot's rows, 16 bytes each */

/* Codes: e4m3_codes or void. Block: tokens of one in a slot, 16 or 32. */
template <typename Element, typename Codes, int Block>
struct config {
    using element = Element;
    using codes = Codes;
    static constexpr bool QUANTISED = !std::is_void<Codes>::value, Q_SHARED = QUANTISED, RUNS = true;
    static constexpr int BYTES = QUANTISED ? 1 : 2;
    static constexpr int K_DIM = 128, V_DIM = 128, BLOCK = Block, BLOCKS = KEYS / Block;
    /* Codes are half the bytes for the same work, which one more warp of a scheduler hides. */
    static constexpr int WARPS = QUANTISED ? 6 : 4, THREADS = 32 * WARPS, HEADS = 1, TILES = 1, GANGS = WARPS, CTAS = 2;
    /* A slot has the blocks, then the scales of their rows. */
    static constexpr int BLOCK_BYTES = Block * K_DIM * BYTES, WORD_BYTES = QUANTISED ? Block * 4 : 0;
    static constexpr int WORDS_AT = BLOCKS * BLOCK_BYTES, SLOT_BYTES = WORDS_AT + BLOCKS * WORD_BYTES;
    static constexpr int SLOTS = (104 << 10) / WARPS / SLOT_BYTES; /* as many as let two CTAs share a multiprocessor */
    static constexpr int WARP_BYTES = SLOTS * SLOT_BYTES, SHARED_BYTES = WARPS * WARP_BYTES;
    static constexpr int COLUMN_BYTES = Block * BYTES, CHUNK_BYTES = Block * 16;
    /* Bytes from the keys of a step to those of the next, and from values to values. */
    static constexpr int KEY_STEP = BLOCKS > 1 ? BLOCK_BYTES : STEP * 16;
    static constexpr int VALUE_STEP = BLOCKS > 1 ? BLOCK_BYTES : STEP * BYTES;
};

/* The slots of a warp. Parts, keys and values in turn, are filled and taken in one order: what goes to the slot of a
 * part that was taken is SLOTS further on. A part is a group of the asynchronous copies of each lane, maybe an empty
 * one. */
template <typename C>
struct slot_ring {
    uint32_t slots;
    int filled = 0, taken = 0;

    __device__ uint32_t filling_slot() const { return slots + filled * C::SLOT_BYTES; }
    __device__ void pass() {
        copy_async_commit();
        filled = filled + 1 == C::SLOTS ? 0 : filled + 1;
    }
    /* Waits for the next part, while those behind it are under way; it is free from the next __syncwarp on. */
    __device__ uint32_t take() {
        const uint32_t slot = slots + taken * C::SLOT_BYTES;
        copy_async_wait<C::SLOTS - 1>();
        __syncwarp();
        taken = taken + 1 == C::SLOTS ? 0 : taken + 1;
        return slot;
    }
};

/* The parts of a warp's tiles of KEYS keys in their order: every GANGS-th tile of the walk, its keys and then its
 * values. All lanes copy blocks, 16 bytes of every 512 each, and WORD_LANES of them the scales of the blocks' rows, if
 * they have any. */
template <typename C>
struct part_feed {
    static constexpr int LANES_A_BLOCK = WORD_LANES / C::BLOCKS;

    const char *k, *v; /* what this lane copies first, in block 0 */
    const char *k_words, *v_words;
    const int32_t *table;
    int32_t block; /* block whose scales this lane copies; the first of LANES_A_BLOCK lanes knows it for all others */
    int32_t token; /* token of a larger block at which the tile begins */
    int next, k_end;
    bool copies_words;

    __device__ part_feed(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const key_walk<KEYS> &walk,
                         int kv_head, int warp, int lane)
        : k(a.k + kv_head * a.k_head_stride * C::BYTES + lane * 16), v(a.v + kv_head * a.v_head_stride * C::BYTES),
          table(a.tables + piece.table), block(0), token(0), next(warp), k_end(piece.k_end),
          copies_words(a.k_words_at && lane < WORD_LANES) {
        const int column = lane * 16 / C::COLUMN_BYTES;
        v += (column * C::BYTES << a.block_shift) + lane * 16 % C::COLUMN_BYTES;
        k_words = scale_word_at(a, a.k, 0, a.k_words_at, 0, kv_head, lane * 4 % C::BLOCK);
        v_words = scale_word_at(a, a.v, 0, a.v_words_at, 0, kv_head, lane * 4 % C::BLOCK);
        find_block(a, walk, lane);
    }
    /* Behind the last key there may be none: the tile's first block, whose copy is hidden, stands for it. */
    __device__ void find_block(const cpa_cuda_attend_args &a, const key_walk<KEYS> &walk, int lane) {
        if (next >= walk.count) return;
        const int key = walk.tile(next) * KEYS, of_tile = lane / LANES_A_BLOCK % C::BLOCKS;
        const bool has_keys = key + of_tile * C::BLOCK < k_end;
        block = __ldg(table + (key >> a.block_shift) + (has_keys ? of_tile : 0));
        if (C::BLOCK == KEYS) token = key & ((1 << a.block_shift) - 1);
    }
    __device__ void advance(bool values, const cpa_cuda_attend_args &a, const key_walk<KEYS> &walk, int lane) {
        if (!values) return;
        next += C::GANGS;
        find_block(a, walk, lane);
    }
    /* From block 0 to that one. */
    static __device__ uint64_t distance(bool values, const cpa_cuda_attend_args &a, int32_t to) {
        return (uint64_t)(uint32_t)to * ((uint32_t)(values ? a.v_block_stride : a.k_block_stride) * C::BYTES);
    }
    /* Whether a slot is filled by blocks as they lie. */
    static __device__ bool whole(bool values, const cpa_cuda_attend_args &a) {
        return (values ? a.v_dim : a.k_dim) == C::K_DIM && 1 << a.block_shift == C::BLOCK;
    }
    /* Fills the rest of a slot with zeros: behind narrower heads queries and probabilities meet nothing else. */
    __device__ void copy_parts(bool values, const cpa_cuda_attend_args &a, const char *(&from)[C::BLOCKS],
                               uint32_t to, int lane) const {
        const int32_t step = C::BLOCK == KEYS ? 16 << a.block_shift : 512;
        const int32_t bytes = (values ? a.v_dim : a.k_dim) * C::BLOCK * C::BYTES - lane * 16;
#pragma unroll 1
        for (int i = 0; i < C::BLOCK_BYTES / 512; i++)
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++)
                copy_async_16(to + b * C::BLOCK_BYTES + i * 512, from[b] + token * (values ? C::BYTES : 16) + i * step,
                              i * 512 < bytes);
    }
    /* Has the next part, whether these are values or not, copied to the next slot. Called by all lanes. */
    __device__ void fill(bool values, const cpa_cuda_attend_args &a, const key_walk<KEYS> &walk, slot_ring<C> &ring,
                         int lane) {
        if (next >= walk.count) return ring.pass();
        const uint32_t to = ring.filling_slot() + lane * 16;
        const char *from[C::BLOCKS];
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++)
            from[b] = (values ? v : k) + distance(values, a, __shfl_sync(0xffffffff, block, b * LANES_A_BLOCK));
        if (whole(values, a)) {
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++)
#pragma unroll
                for (int at = 0; at < C::BLOCK_BYTES; at += 512)
                    copy_async_16(to + b * C::BLOCK_BYTES + at, from[b] + at);
        } else {
            copy_parts(values, a, from, to, lane);
        }
        if (C::QUANTISED && copies_words)
            copy_async_16(to + C::WORDS_AT, (values ? v_words : k_words) + distance(values, a, block) + token * 4);
        ring.pass();
        advance(values, a, walk, lane);
    }
    /* Has the next part brought to the L2 cache, if its blocks are whole. */
    __device__ void prefetch(bool values, const cpa_cuda_attend_args &a, const key_walk<KEYS> &walk, int lane) {
        if (next >= walk.count) return;
        if (lane < WORD_LANES && lane % LANES_A_BLOCK == 0 && whole(values, a)) {
            const char *from = (values ? v : k) - lane * 16 + distance(values, a, block);
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(C::BLOCK_BYTES));
        }
        if (C::QUANTISED && copies_words)
            prefetch_l2((values ? v_words : k_words) + distance(values, a, block) + token * 4);
        advance(values, a, walk, lane);
    }
};

/* The values of the keys from `keys` on, and their scales, become zeros: a probability of 0 is no match for what may
 * lie there. */
template <typename C>
__device__ void clear_past(uint32_t values, int keys, int lane) {
    constexpr int WORDS = C::COLUMN_BYTES / 4, KEYS_A_WORD = 4 / C::BYTES;
#pragma unroll 1
    for (int i = lane; i < C::WORDS_AT / 4; i += 32) {
        const int first = i / (C::BLOCK_BYTES / 4) * C::BLOCK + i % WORDS * KEYS_A_WORD;
        const int left = min(max(keys - first, 0), KEYS_A_WORD);
        uint32_t word;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(values + i * 4));
        if (left < KEYS_A_WORD) store_shared(values + i * 4, left ? word & ((1u << left * 8 * C::BYTES) - 1) : 0);
    }
    if (C::QUANTISED && keys + lane < KEYS) store_shared(values + C::WORDS_AT + (keys + lane) * 4, 0);
    __syncwarp();
}

/* The scales of this lane's keys. */
template <typename C>
__device__ void tile_words(uint32_t (&words)[4 * STEPS], uint32_t slot, float tensor_scale, bool of_rows, int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t four[4];
        for (int i = 0; i < 4; i++) four[i] = C::codes::word(tensor_scale);
        if (of_rows) read_words<true>(four, slot + C::WORDS_AT + step * STEP * 4, lane);
        for (int i = 0; i < 4; i++) words[4 * step + i] = four[i];
    }
}

/* Scores of a tile: [steps][8 keys][rows as mma's C]. */
template <typename C>
__device__ void score_elements(float (&s)[STEPS][2][4], const uint32_t (&q)[C::K_DIM / 16][4], uint32_t keys,
                               int lane) {
    const uint32_t from = keys + (lane >> 3 & 1) * C::CHUNK_BYTES + ((lane & 7) + (lane >> 4) * 8) * 16;
#pragma unroll
    for (int k = 0; k < C::K_DIM / 16; k++) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t part[4];
            load_matrices(part, from + 2 * k * C::CHUNK_BYTES + step * C::KEY_STEP);
            mma<typename C::element>(s[step][0], q[k], part[0], part[1]);
            mma<typename C::element>(s[step][1], q[k], part[2], part[3]);
        }
    }
}

/* The same of codes. A matrix of ldmatrix is a chunk of eight keys, and gives a lane four dims of one. */
template <typename C>
__device__ void score_chunks(float (&s)[STEPS][2][4], uint32_t queries, const float (&q_scale)[2], uint32_t keys,
                             const uint32_t (&words)[4 * STEPS], int lane) {
    const uint32_t from = keys + (lane >> 3) * C::CHUNK_BYTES;
#pragma unroll
    for (int j = 0; j < C::K_DIM / 64; j++) {
        uint32_t part[STEPS][2][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < 2; n++)
                load_matrices(part[step][n],
                              from + 4 * j * C::CHUNK_BYTES + step * C::KEY_STEP + run_key<true>(n, lane & 7) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t q[4];
            load_shared(q, queries + (4 * j + i) * 512);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    uint32_t low, high;
                    C::codes::widen(part[step][n][i], 0, low, high);
                    mma<__half>(s[step][n], q, low, high);
                }
            }
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[step][n][e] *= C::codes::scale(words[4 * step + 2 * n + e % 2]) * q_scale[e / 2];
}

/* o += P V for a tile. */
template <typename C>
__device__ void weigh_tile(float (&o)[C::V_DIM / 8][4], const uint32_t (&p)[STEPS][4], uint32_t values, int lane) {
    if constexpr (C::QUANTISED) {
#pragma unroll
        for (int n = 0; n < C::V_DIM / 32; n++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32_t codes[4];
                load_matrices(codes, values + (32 * n + lane) * C::COLUMN_BYTES + step * C::VALUE_STEP);
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    uint32_t low, high;
                    C::codes::widen(codes[t], 0, low, high);
                    mma<__half>(o[4 * n + t], p[step], low, high);
                }
            }
        }
    } else {
        const uint32_t from = values + ((lane >> 4) * 8 + lane % 8) * C::COLUMN_BYTES + (lane >> 3 & 1) * 16;
#pragma unroll
        for (int n = 0; n < C::V_DIM / 16; n++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32_t part[4];
                load_matrices(part, from + 16 * n * C::COLUMN_BYTES + step * C::VALUE_STEP);
                mma<typename C::element>(o[2 * n], p[step], part[0], part[1]);
                mma<typename C::element>(o[2 * n + 1], p[step], part[2], part[3]);
            }
        }
    }
}

/* The tile whose keys are next in the ring, then its values. */
template <typename C>
__device__ void attend_tile(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                             const key_walk<KEYS> &walk, const row_keys (&bounds)[2], const query_operands<C> &q,
                             warp_state<C> &state, slot_ring<C> &ring, part_feed<C> &feed, int tile,
                             int lane) {
    using product = typename std::conditional<C::QUANTISED, __half, typename C::element>::type;
    const float scale_log2 = a.scale_log2;
    const int key = tile * KEYS;
    float s[STEPS][2][4], weight[4 * STEPS];
    uint32_t words[4 * STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int e = 0; e < 8; e++) s[step][e / 4][e % 4] = 0;
    const uint32_t keys = ring.take();
    if constexpr (C::QUANTISED) {
        tile_words<C>(words, keys, a.k_scale, a.k_words_at != 0, lane);
        score_chunks<C>(s, q.shared, state.q_scale, keys, words, lane);
    } else {
        score_elements<C>(s, q.part, keys, lane);
    }
    __syncwarp();
    feed.fill(C::SLOTS % 2 == 1, a, walk, ring, lane);
    if (walk.masked(tile)) {
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!sees(bounds[e / 2], walk.sinks,
                              key + step * STEP + run_key<C::QUANTISED>(n, 2 * (lane % 4) + e % 2)))
                        s[step][n][e] = -INFINITY;
    }
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = state.max[half], sum = 0;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < 2; n++) max = fmaxf(max, fmaxf(s[step][n][2 * half], s[step][n][2 * half + 1]));
        max = quad_max(max);
        const float base = max * scale_log2;
        keep[half] = worth_of(state.max[half], max, scale_log2);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s[step][n][e] = exp2_fast(s[step][n][e] * scale_log2 - base);
                    sum += s[step][n][e];
                }
            }
        }
        state.max[half] = max;
        state.sum[half] = state.sum[half] * keep[half] + sum;
    }
    state.rescale(keep);
    const uint32_t values = ring.take();
    if (key + KEYS > piece.k_end) clear_past<C>(values, piece.k_end - key, lane);
    if constexpr (C::QUANTISED) {
        tile_words<C>(words, values, a.v_scale, a.k_words_at != 0, lane);
        weigh_scales<C>(weight, state, words);
    }
    uint32_t p[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float low = s[step][n][2 * half], high = s[step][n][2 * half + 1];
                if constexpr (C::QUANTISED) low *= weight[4 * step + 2 * n], high *= weight[4 * step + 2 * n + 1];
                p[step][2 * n + half] = pack_pair<product>(low, high);
            }
        }
    }
    weigh_tile<C>(state.o, p, values, lane);
    __syncwarp();
    feed.fill(C::SLOTS % 2 == 0, a, walk, ring, lane);
}

/* The tiles of a piece that each warp takes. */
template <typename C>
__device__ void attend_blocks(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const key_walk<KEYS> &walk,
                              int kv_head, bool prefetches, warp_state<C> &state, slot_ring<C> &ring, uint32_t queries,
                              int warp, int lane) {
    part_feed<C> feed(a, piece, walk, kv_head, warp, lane);
    if (prefetches) { /* while the kernel before this one ends */
        part_feed<C> early = feed;
        for (int i = 0; i < C::SLOTS; i++) early.prefetch(i % 2, a, walk, lane);
    }
    const query_rows rows(a, piece, piece.row_begin, kv_head, lane);
    row_keys bounds[2];
#pragma unroll
    for (int half = 0; half < 2; half++) bounds[half] = walk.keys_of(a, piece, piece.row_begin + 8 * half + lane / 4);
    if (!piece.ready && !a.beside_shared) { /* only the plan, and what is ready, has been read so far */
        dependent_wait();
        dependent_allow();
    }
    for (int i = 0; i < C::SLOTS; i++) feed.fill(i % 2, a, walk, ring, lane);
    query_operands<C> q;
    take_queries<C, true>(q, state, a, piece, rows, kv_head, walk.count > 0, queries, warp, lane);
    for (int i = warp; i < walk.count; i += C::GANGS)
        attend_tile<C>(a, piece, walk, bounds, q, state, ring, feed, walk.tile(i), lane);
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS)
    attend_decode_blocks(const __grid_constant__ cpa_cuda_attend_args a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ cpa_cuda_piece pieces[C::WARPS]; /* a copy for each warp, which waits for no other at the start */
    __shared__ key_walk<KEYS> walks[C::WARPS];
    __shared__ warp_states<C> states;
    __shared__ uint4 queries[C::QUANTISED ? C::K_DIM / 16 * 32 : 1];
    const int kv_head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const cpa_cuda_piece &piece = pieces[warp];
    key_walk<KEYS> &walk = walks[warp];
    slot_ring<C> ring = {shared_address(shared) + warp * C::WARP_BYTES};
    bool waited = false;
    for (int at = blockIdx.y; at >= 0; at = piece.next) {
        copy_piece(pieces[warp], a.pieces[at], lane);
        walk.start_warp(a, piece, lane);
        warp_state<C> state;
        state.clear(a.scale_log2);
        attend_blocks<C>(a, piece, walk, kv_head, a.early && !waited && !piece.ready && !a.beside_shared, state, ring,
                         shared_address(queries), warp, lane);
        waited |= !piece.ready;
        const float values_scale = C::QUANTISED ? head_scale(1, a.v_head_scales, a.head_scale_step, kv_head) : 1;
        leave_state<C>(state, piece.row_end - piece.row_begin, values_scale, states, (float *)shared, warp, lane);
        store_rows<C>(a, piece, kv_head, states, (const float *)shared, warp, lane);
    }
    dependent_wait(); /* what comes behind takes this kernel's end for that of the one before it */
    dependent_allow();
}

template <typename C>
cpa_status launch(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    static uint64_t prepared;
    return launch_decode<C>(attend_decode_blocks<C>, &prepared, l, stream);
}

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    const bool long_blocks = l->spec->block_size >= KEYS;
    if (l->spec->call.cache == CPA_CUDA_RUN_CODES)
        return long_blocks ? launch<config<Element, e4m3_codes, 32>>(l, stream)
                           : launch<config<Element, e4m3_codes, 16>>(l, stream);
    return long_blocks ? launch<config<Element, void, 32>>(l, stream) : launch<config<Element, void, 16>>(l, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode_blocks(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(l, stream) : launch_codes<__half>(l, stream);
}
