/* The decode kernel over CPA_VLLM_X caches, whose rows lie in runs: keys [k_dim / x, block_size, x], values [v_dim,
 * block_size] of each head (cpattn/shape.h).
 *
 * Keys come to shared memory as rows, as they do from other layouts: 16 bytes of one of them lie together, and the
 * lanes take neighbouring keys. Values stay transposed there, a row of 16 keys for each column, which is how mma wants
 * its operand B: without ldmatrix's transposition. Of codes a lane gets those of four keys at once, so that there the
 * keys of a run have another order in both products: key 4 c + 2 n + e is column 2 c + e of the n-th eight. */
#ifndef CPA_CUDA_DECODE_RUNS_CUH
#define CPA_CUDA_DECODE_RUNS_CUH

#include "kernels/cuda/attend/decode_loads.cuh"

/* The first `bytes` of 16 bytes, and zeros behind them. */
__device__ inline void copy_async_part(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

/* Where the values of a column lie in a stage: 32 bytes of elements, whose halves change places so that the rows which
 * ldmatrix reads together lie in different banks; or 16 of codes. */
template <typename C>
__device__ uint32_t value_row(int column, int half) {
    return C::QUANTISED ? column * 16 : column * 32 + ((half ^ (column >> 2 & 1)) << 4);
}

/* In place of stage_loader; a warp copies its runs by itself. */
template <typename C>
struct runs_loader {
    static constexpr int K_CHUNKS = C::K_DIM * C::BYTES / 16, V_PARTS = C::BYTES; /* of 16 bytes, of a column's keys */
    static constexpr int AT_ONCE = C::K_DIM > 128 && !C::QUANTISED ? 2 : 16; /* more would make registers spill */
    static_assert(C::HEADS == 1, "a warp loads for itself");
    const char *k, *v; /* keys and values of the head, at token 0 of block 0 */
    int32_t kv_head;

    __device__ runs_loader(const cpa_cuda_attend_args &a, int kv_group, int, int)
        : k(a.k + kv_group * a.k_head_stride * C::BYTES), v(a.v + kv_group * a.v_head_stride * C::BYTES),
          kv_head(kv_group) {}

    __device__ lane_run run(const cpa_cuda_attend_args &a, int, int block, int key, int keys, int) const {
        const int token = key & ((1 << a.block_shift) - 1);
        return {k + block * a.k_block_stride * C::BYTES + token * 16,
                v + (block * a.v_block_stride + token) * C::BYTES, block, token, keys};
    }
    __device__ void load(const cpa_cuda_attend_args &a, const lane_run &r, uint32_t shared, int, int lane) const {
        using key_layout = typename C::key_layout;
        const int row = lane % DECODE_RUN, most_keys = r.keys - row;
        const int64_t k_run = a.k_run_stride * C::BYTES, v_run = a.v_run_stride * C::BYTES;
        const int chunks = a.k_dim * C::BYTES / 16;
#pragma unroll AT_ONCE
        for (int i = 0; i < K_CHUNKS / 2; i++) {
            const int chunk = 2 * i + lane / DECODE_RUN;
            const uint32_t to = shared + row * key_layout::BYTES + ((chunk ^ key_layout::twist(row)) << 4);
            copy_async_16(to, r.k + chunk * k_run + row * 16, chunk < chunks && most_keys > 0);
        }
        const int half = lane % V_PARTS, keys = min(max(r.keys - half * (16 / C::BYTES), 0), 16 / C::BYTES);
#pragma unroll AT_ONCE
        for (int i = 0; i < C::V_DIM * V_PARTS / 32; i++) {
            const int column = (32 * i + lane) / V_PARTS;
            copy_async_part(shared + C::K_BYTES + value_row<C>(column, half), r.v + column * v_run + half * 16,
                            column < a.v_dim ? keys * C::BYTES : 0);
        }
        if constexpr (C::QUANTISED) load_words<C>(a, kv_head, r.block, r.token + row, most_keys > 0, shared, lane);
    }
    __device__ void prefetch(const cpa_cuda_attend_args &a, const lane_run &r, int lane) const {
        if (r.keys <= 0) return;
        for (int chunk = lane; chunk < a.k_dim * C::BYTES / 16; chunk += 32) {
            prefetch_l2(r.k + chunk * a.k_run_stride * C::BYTES);
            prefetch_l2(r.k + chunk * a.k_run_stride * C::BYTES + 128);
        }
        for (int column = lane; column < a.v_dim; column += 32) prefetch_l2(r.v + column * a.v_run_stride * C::BYTES);
    }
};

/* o += P V for a run of 16 keys. */
template <typename C>
__device__ void weigh_columns(float (&o)[C::V_DIM / 8][4], const uint32_t (&p)[4], uint32_t values, int lane) {
    if constexpr (C::QUANTISED) {
#pragma unroll
        for (int n = 0; n < C::V_DIM / 32; n++) {
            uint32_t codes[4];
            load_matrices(codes, values + (32 * n + lane) * 16);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                uint32_t low, high;
                C::codes::widen(codes[t], 0, low, high);
                mma<__half>(o[4 * n + t], p, low, high);
            }
        }
    } else {
        const uint32_t from = values + value_row<C>((lane >> 4) * 8 + lane % 8, lane >> 3 & 1);
#pragma unroll
        for (int n = 0; n < C::V_DIM / 16; n++) {
            uint32_t part[4];
            load_matrices(part, from + n * 512);
            mma<typename C::element>(o[2 * n], p, part[0], part[1]);
            mma<typename C::element>(o[2 * n + 1], p, part[2], part[3]);
        }
    }
}

#endif
