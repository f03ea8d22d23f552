/* How a warp of decode_packed.cuh brings tiles of keys and values, and the scales of their rows, to its stages. */
#ifndef CPA_CUDA_PACKED_FEED_CUH
#define CPA_CUDA_PACKED_FEED_CUH

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/packed_rows.cuh"

namespace {

constexpr int KEYS = 32, RUN = DECODE_RUN, RUNS = KEYS / RUN; /* keys of a tile, and of a run */

/* A warp's way through the tiles of its head: every GANGS-th of the walk, each as runs of one block.
 * Has_room: there are registers for what is the same for all of them. */
template <typename C, bool Has_room>
struct packed_feed {
    static constexpr bool LEAVES_TAILS = false; /* they are zeros */
    const char *k, *v; /* first chunk of the head's row at token 0 of block 0 */
    uint32_t k_phase, v_phase;
    typename C::k_rows k_rows;
    typename C::v_rows v_rows;
    const int32_t *table;
    int32_t blocks[RUNS];
    int key, k_end, kv_head; /* first key of the tile that is filled next */

    /* The first run of keys of a stage, and of values. */
    static __device__ uint32_t keys_at(uint32_t stage) { return stage; }
    static __device__ uint32_t values_at(uint32_t stage) { return stage + C::K_BYTES; }
    static __device__ uint32_t phase_of(const char *row) { return (uint32_t)(uintptr_t)row % CHUNK; }
    static __device__ uint64_t product(int32_t n, int64_t bytes) { return (uint64_t)(uint32_t)n * (uint32_t)bytes; }

    __device__ packed_feed(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const key_walk<KEYS> &walk,
                           int head, int gang, int lane)
        : k(a.k + head * a.k_head_stride), v(a.v + head * a.v_head_stride), k_phase(phase_of(k)),
          v_phase(phase_of(v)), k_rows(a.k_token_stride, k_phase, lane), v_rows(a.v_token_stride, v_phase, lane),
          table(kept<Has_room>(a.tables + piece.table)), key(0), k_end(piece.k_end), kv_head(head) {
        k = kept<Has_room>(k - k_phase);
        v = kept<Has_room>(v - v_phase);
        if (Has_room) k_rows.keep(), v_rows.keep();
        find(a, walk, gang);
    }
    /* Of tile `next` of the walk, if it has one. */
    __device__ void find(const cpa_cuda_attend_args &a, const key_walk<KEYS> &walk, int next) {
        if (next >= walk.count) return;
        key = walk.tile(next) * KEYS;
#pragma unroll
        for (int i = 0; i < RUNS; i++)
            blocks[i] = __ldg(table + (uint32_t)(min(key + i * RUN, k_end - 1) >> a.block_shift));
    }
    __device__ uint64_t k_distance(const cpa_cuda_attend_args &a, int32_t block, int token) const {
        return product(block, a.k_block_stride) + product(token, a.k_token_stride);
    }
    __device__ uint64_t v_distance(const cpa_cuda_attend_args &a, int32_t block, int token) const {
        return product(block, a.v_block_stride) + product(token, a.v_token_stride);
    }
    /* The runs of the tile to a stage; of a tile that is not WHOLE, what there is of them. */
    template <bool WHOLE>
    __device__ void fill_rows(const cpa_cuda_attend_args &a, uint32_t stage) const {
#pragma unroll
        for (int i = 0; i < RUNS; i++) {
            const int token = (key + i * RUN) & ((1 << a.block_shift) - 1), keys = k_end - key - i * RUN;
            const char *k_run = kept<true>(k + k_distance(a, blocks[i], token));
            k_rows.template load<WHOLE>(k_run, (int32_t)a.k_token_stride, keys, stage + i * C::k_rows::RUN_BYTES);
            const char *v_run = kept<true>(v + v_distance(a, blocks[i], token));
            v_rows.template load<WHOLE>(v_run, (int32_t)a.v_token_stride, keys,
                                        stage + C::K_BYTES + i * C::v_rows::RUN_BYTES);
        }
    }
    /* Has tile `next` copied to a stage, as a group of the lane's asynchronous copies; it was found, and the one behind
     * it is. */
    __device__ void fill(const cpa_cuda_attend_args &a, const key_walk<KEYS> &walk, int next, uint32_t stage,
                         int lane) {
        if (next < walk.count) {
            if (Has_room && key + KEYS <= k_end) {
                fill_rows<true>(a, stage);
            } else {
                fill_rows<false>(a, stage);
            }
            if (C::ends::WORDS && a.k_words_at) fill_words(a, stage, lane);
            find(a, walk, next + C::GANGS);
        }
        copy_async_commit();
    }
    /* The words of the rows: 16 bytes a lane of those of a run's keys, or of its values; zeros behind the last key. */
    __device__ void fill_words(const cpa_cuda_attend_args &a, uint32_t stage, int lane) const {
        const int of_run = lane / 4 % RUNS, first = (key + of_run * RUN) & ((1 << a.block_shift) - 1);
        const bool of_keys = lane < 4 * RUNS;
        const int64_t block = of_run == 0 ? blocks[0] : blocks[1];
        const char *words = of_keys ? scale_word_at(a, a.k, a.k_block_stride, a.k_words_at, block, kv_head, first)
                                    : scale_word_at(a, a.v, a.v_block_stride, a.v_words_at, block, kv_head, first);
        const int left = k_end - key - of_run * RUN - lane % 4 * 4;
        if (lane < 2 * 4 * RUNS)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                             stage + C::WORDS_AT + lane * CHUNK),
                         "l"(words + lane % 4 * CHUNK), "r"(min(max(left, 0), 4) * 4));
    }
    /* Has the next tiles brought to the L2 cache, a row a lane. */
    __device__ void prefetch(const cpa_cuda_attend_args &a, const key_walk<KEYS> &walk, int gang, int lane) const {
        packed_feed early = *this;
        for (int next = gang; next < gang + C::STAGES * C::GANGS && next < walk.count; next += C::GANGS) {
            const int token = (early.key + lane) & ((1 << a.block_shift) - 1);
            const int32_t block = lane < RUN ? early.blocks[0] : early.blocks[1];
            if (early.key + lane < k_end) {
                prefetch_l2(k + k_distance(a, block, token));
                prefetch_l2(v + v_distance(a, block, token));
            }
            early.find(a, walk, next + C::GANGS);
        }
    }
};

} // namespace

#endif
