/* How the warps of the decode kernel bring keys and values to shared memory: each copies its share of a run of 16 keys,
 * of all heads of its gang, to a stage of theirs. The rows of a run lie in one block; or apart, where blocks are
 * shorter: then each lane knows where one lies, and the others learn it by shuffles. C: the kernel's configuration. */
#ifndef CPA_CUDA_DECODE_LOADS_CUH
#define CPA_CUDA_DECODE_LOADS_CUH

#include "kernels/cuda/attend/decode_quant.cuh"

static_assert(DECODE_RUN == CPA_CUDA_DECODE_RUN, "as the launcher knows it");

/* What a kernel is compiled for: runs in one block, runs whose rows lie apart, or both. */
enum run_rows { ROWS_TOGETHER, ROWS_APART, ROWS_EITHER };

template <typename C>
__device__ bool rows_lie_apart(const cpa_cuda_attend_args &a) {
    return C::ROWS == ROWS_APART || (C::ROWS == ROWS_EITHER && 1 << a.block_shift < DECODE_RUN);
}

/* Rows of 16-bit elements as `swizzled` places them. */
template <int DIM>
struct element_rows {
    static constexpr int BYTES = DIM * 2;
    static __device__ constexpr int twist(int row) { return row & 7; }
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
 * that little is computed for a run. Its warp copies an equal share of the rows of all heads. Layout: BYTES of a row in
 * shared memory, and twist(row), by which the chunks of a row change places; it is linear in the bits of the row, so
 * that of first + i * STEP it is that of both, xored. */
template <typename C, typename Layout>
struct lane_rows {
    static constexpr int CHUNKS = Layout::BYTES / 16, LANES = CHUNKS & -CHUNKS, PARTS = CHUNKS / LANES,
                         STEP = 32 / (LANES * C::HEADS), SHARE = DECODE_RUN / C::MEMBERS;
    static_assert(LANES * C::HEADS <= 32 && SHARE % STEP == 0, "whole rows");

    const char *from; /* address of row `first` of the run at token 0 of block 0 */
    int64_t within;   /* rows that lie apart: from the first chunk in the CTA's first head to this lane's */
    uint32_t row_at, chunk_at;
    int32_t first, chunks; /* of the head, from this lane's on */

    /* The lane's head among those of the CTA. */
    static __device__ int head_of(int lane) { return lane / LANES % C::HEADS; }

    /* head: the first one of the CTA, at token 0 of block 0. */
    __device__ lane_rows(const char *head, int64_t head_bytes, int64_t token_bytes, int row_bytes, int member,
                         int lane) {
        const int chunk = lane % LANES;
        constexpr bool KEEP = Layout::BYTES < 512;
        first = kept<KEEP>(lane / (LANES * C::HEADS) + member * SHARE);
        within = head_of(lane) * head_bytes + chunk * 16;
        if constexpr (C::ROWS != ROWS_APART) from = kept<KEEP>(head + within + first * token_bytes);
        row_at = kept<KEEP>((uint32_t)(first * Layout::BYTES + head_of(lane) * C::WARP_BYTES));
        chunk_at = kept<KEEP>((uint32_t)(chunk ^ Layout::twist(first)) * 16);
        chunks = kept<KEEP>(row_bytes / 16 - chunk);
    }
    /* Row first + i of a run of so many keys; zeros past those and past the head's width, of which there are none if
     * the run is WHOLE. */
    template <bool WHOLE>
    __device__ void load_row(const char *row, int i, int keys, uint32_t shared) const {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint32_t twisted = chunk_at ^ (uint32_t)((part * LANES) ^ Layout::twist(i)) * 16;
            const uint32_t to = shared + row_at + i * Layout::BYTES + twisted;
            if constexpr (WHOLE) {
                copy_async_16(to, row + part * LANES * 16);
            } else {
                copy_async_16(to, row + part * LANES * 16, part * LANES < chunks && first + i < keys);
            }
        }
    }
    /* The rows from `row` on. */
    template <bool WHOLE>
    __device__ void load(const char *row, int64_t token_bytes, int keys, uint32_t shared) const {
#pragma unroll
        for (int i = 0; i < SHARE; i += STEP) {
            load_row<WHOLE>(row, i, keys, shared);
            row += STEP * token_bytes;
        }
    }
    /* Rows that lie apart: each lane has one of them. Called by all lanes. */
    template <bool WHOLE>
    __device__ void load_apart(const char *row, int keys, uint32_t shared) const {
#pragma unroll
        for (int i = 0; i < SHARE; i += STEP) {
            const char *from_lane = (const char *)__shfl_sync(0xffffffff, (unsigned long long)row, first + i);
            load_row<WHOLE>(from_lane + within, i, keys, shared);
        }
    }
};

/* A run of keys, as this lane loads it: the first row that it copies; or of rows that lie apart the one that it knows,
 * the lane-th, in the first head of the CTA. */
struct lane_run {
    const char *k, *v;
    int32_t block, token; /* block and token of the run, or of the row that this lane knows */
    int32_t keys;         /* keys of the run; 0: there is no run */
};

/* A warp's share of its gang's way through keys and values. */
template <typename C>
struct stage_loader {
    using k_rows = lane_rows<C, typename C::key_layout>;
    using v_rows = lane_rows<C, typename C::value_layout>;
    k_rows k;
    v_rows v;
    int32_t kv_head; /* KV head of this warp */

    __device__ stage_loader(const cpa_cuda_attend_args &a, int kv_group, int member, int lane)
        : k(a.k + kv_group * a.k_head_stride * C::BYTES, a.k_head_stride * C::BYTES, a.k_token_stride * C::BYTES,
            a.k_dim * C::BYTES, member, lane),
          v(a.v + kv_group * a.v_head_stride * C::BYTES, a.v_head_stride * C::BYTES, a.v_token_stride * C::BYTES,
            a.v_dim * C::BYTES, member, lane),
          kv_head(kv_group + member / C::TILES) {}

    /* The run of `keys` keys from key `key` of the item on; block: that of block_of. */
    __device__ lane_run run(const cpa_cuda_attend_args &a, int kv_group, int block, int key, int keys,
                            int lane) const {
        const int within_block = (1 << a.block_shift) - 1;
        if (rows_lie_apart<C>(a)) {
            const int token = (key + lane % DECODE_RUN) & within_block;
            const int64_t k_at = block * a.k_block_stride + token * a.k_token_stride + kv_group * a.k_head_stride;
            const int64_t v_at = block * a.v_block_stride + token * a.v_token_stride + kv_group * a.v_head_stride;
            return {a.k + k_at * C::BYTES, a.v + v_at * C::BYTES, block, token, keys};
        }
        const int token = key & within_block;
        return {k.from + (block * a.k_block_stride + token * a.k_token_stride) * C::BYTES,
                v.from + (block * a.v_block_stride + token * a.v_token_stride) * C::BYTES, block, token, keys};
    }
    /* To the stage at `shared` of the gang's first warp. */
    __device__ void load(const cpa_cuda_attend_args &a, const lane_run &r, uint32_t shared, int member,
                         int lane) const {
        const int64_t k_token = a.k_token_stride * C::BYTES, v_token = a.v_token_stride * C::BYTES;
        const bool whole = r.keys >= DECODE_RUN && a.k_dim == C::K_DIM && a.v_dim == C::V_DIM;
        if constexpr (C::ROWS == ROWS_APART) {
            if (whole) {
                k.template load_apart<true>(r.k, r.keys, shared);
                v.template load_apart<true>(r.v, r.keys, shared + C::K_BYTES);
            } else {
                k.template load_apart<false>(r.k, r.keys, shared);
                v.template load_apart<false>(r.v, r.keys, shared + C::K_BYTES);
            }
        } else if (rows_lie_apart<C>(a)) {
            k.template load_apart<false>(r.k, r.keys, shared);
            v.template load_apart<false>(r.v, r.keys, shared + C::K_BYTES);
        } else if (whole) {
            k.template load<true>(r.k, k_token, r.keys, shared);
            v.template load<true>(r.v, v_token, r.keys, shared + C::K_BYTES);
        } else {
            k.template load<false>(r.k, k_token, r.keys, shared);
            v.template load<false>(r.v, v_token, r.keys, shared + C::K_BYTES);
        }
        if constexpr (C::QUANTISED)
            load_words<C>(a, kv_head, r.block, r.token + row_of_lane(a, lane), lane % DECODE_RUN < r.keys,
                          shared + member * C::WARP_BYTES, lane);
    }
    /* What the lane-th row of a run adds to its token. */
    static __device__ int row_of_lane(const cpa_cuda_attend_args &a, int lane) {
        return rows_lie_apart<C>(a) ? 0 : lane % DECODE_RUN;
    }
    /* Has its own head's keys and values brought to the L2 cache, a row a lane. */
    __device__ void prefetch(const cpa_cuda_attend_args &a, const lane_run &r, int lane) const {
        if (lane % DECODE_RUN >= r.keys) return;
        const int64_t token = r.token + row_of_lane(a, lane);
        const int64_t k_at = r.block * a.k_block_stride + token * a.k_token_stride + kv_head * a.k_head_stride;
        const int64_t v_at = r.block * a.v_block_stride + token * a.v_token_stride + kv_head * a.v_head_stride;
        const bool of_key = lane < DECODE_RUN;
        const char *from = of_key ? a.k + k_at * C::BYTES : a.v + v_at * C::BYTES;
        for (int at = 0; at < (of_key ? a.k_dim : a.v_dim) * C::BYTES; at += 128) prefetch_l2(from + at);
    }
};

/* Waits for the warps of a gang. */
template <typename C>
__device__ void sync_gang(int gang) {
    __syncwarp();
    if constexpr (C::MEMBERS > 1) {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + gang), "n"(32 * C::MEMBERS) : "memory");
    }
}

#endif
