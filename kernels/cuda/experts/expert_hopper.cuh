/* What the products of experts by wgmma share. A CTA makes OUTPUTS outputs of up to PLACES places of an expert, each of
 * its warpgroups half of the outputs: weights are A, rows of x are B, both in shared memory as rows of 64 inputs, 128
 * bytes, swizzled as wgmma wants them. Results for 2 x 64 outputs of 128 places take 128 registers of a thread.
 *
 * All threads copy. Step i multiplies what was copied for it, and copies for step i + AHEAD, where step i - 2 had its own:
 * behind the barrier of step i all warpgroups are through with that, as each has waited for it before it came there. */
#ifndef CPA_CUDA_EXPERT_HOPPER_CUH
#define CPA_CUDA_EXPERT_HOPPER_CUH

#include "kernels/cuda/attend/hopper.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/wgmma.cuh"
#include "kernels/cuda/experts/expert_tiles.cuh"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int WARPGROUPS = 2, WARPGROUP = 128, THREADS = WARPGROUPS * WARPGROUP;
constexpr int SPAN = 64, STEP = 16;        /* inputs of a stage and of a wgmma */
constexpr int GROUP_ROWS = 64, GROUPS = 2; /* outputs of a wgmma, and how many times so many a warpgroup has */
constexpr int OUTPUTS = WARPGROUPS * GROUPS * GROUP_ROWS, PLACES = 128;
constexpr int STAGES = 4, AHEAD = STAGES - 2;
constexpr int LINE = SPAN * 2, VECTORS = LINE / 16; /* bytes, and vectors of 16 bytes, of a row of a stage */
constexpr int WEIGHT_BYTES = OUTPUTS * LINE, X_BYTES = PLACES * LINE; /* of a stage */
constexpr int TILE_ALIGNMENT = 1024;                                   /* of swizzled tiles */
constexpr int SUM_LINE = OUTPUTS + SUM_PAD;

using group_sums = float[GROUPS][PLACES / 2];

/* What a thread copies of the rows of x: a vector of every ROWS-th of them. */
template <typename T>
struct x_loader {
    static constexpr int ROWS = THREADS / VECTORS, COPIES = PLACES / ROWS;
    static_assert(ROWS % 8 == 0, "the swizzle of all copies is the same");
    const cpa_expert_linear_args &a;
    const T *rows[COPIES]; /* NULL: zeros */

    __device__ x_loader(const cpa_expert_linear_args &a, const expert_tile &tile) : a(a) {
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const int row = threadIdx.x / VECTORS + n * ROWS;
            const int64_t of_x = row < tile.places ? row_of_place(a, tile.first + row) : -1;
            rows[n] = of_x >= 0 ? (const T *)a.x + of_x * a.x_stride : NULL;
        }
    }
    /* Inputs [at, at + SPAN), zeros behind the last; the number of inputs is a multiple of a vector. */
    __device__ void load(uint32_t stage, int32_t at) const {
        const int vector = threadIdx.x % VECTORS, row = threadIdx.x / VECTORS;
        const int32_t input = at + vector * 8;
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const bool valid = input < a.inputs && rows[n];
            copy_async_16(stage + swizzled<SPAN>(row, vector) + n * ROWS * LINE,
                          valid ? (const void *)(rows[n] + input) : a.x, valid);
        }
    }
};

/* Starts the products of a step; with `more`, sums += them. */
template <typename T>
__device__ void multiply_stage(uint32_t weights, uint32_t x, group_sums &sums, int more) {
    const int group = threadIdx.x / WARPGROUP * GROUPS;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < SPAN / STEP; k++) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const uint64_t a = wgmma_descriptor(weights + (group + g) * GROUP_ROWS * LINE, 0);
            wgmma<T>::multiply(sums[g], wgmma_advance(a, k * STEP * 2),
                               wgmma_advance(wgmma_descriptor(x, 0), k * STEP * 2), k > 0 || more);
        }
    }
    wgmma_commit();
}

__device__ inline void hold(group_sums &sums) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) wgmma_hold(sums[g]);
}

/* Which of a tile's outputs sums[g][i] is of, and place(i) of its places; see wgmma.cuh. */
__device__ inline int output_of(int g, int i) {
    const int thread = threadIdx.x % WARPGROUP;
    const int row = thread / WARP_LANES * 16 + thread % WARP_LANES / 4 + i / 2 % 2 * 8;
    return (threadIdx.x / WARPGROUP * GROUPS + g) * GROUP_ROWS + row;
}
__device__ inline int place_of(int i) {
    return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

/* The results. `shared` has room for PLACES times SUM_LINE floats, which nobody uses any more. */
template <typename T>
__device__ void store(const cpa_cuda_expert_product &p, const expert_tile &tile, int32_t output, float *shared,
                      const group_sums &sums) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < PLACES / 2; i++) shared[place_of(i) * SUM_LINE + output_of(g, i)] = sums[g][i];
    }
    __syncthreads();
    store_sums<T, OUTPUTS, THREADS>(p, tile, output, shared, SUM_LINE);
    __syncthreads(); /* the sums have been read */
}

/* Visits the tiles of a CTA: make(tile, output, shared, sums) with the first output and aligned shared memory. */
template <typename T, typename Make>
__device__ void for_tiles(const cpa_cuda_expert_product &p, char *shared, const Make &make) {
    const cpa_expert_linear_args &a = p.args;
    const uint32_t first = shared_address(shared), skipped = (TILE_ALIGNMENT - first % TILE_ALIGNMENT) % TILE_ALIGNMENT;
    const int32_t output = blockIdx.x * OUTPUTS;
    for (int64_t index = blockIdx.y;; index += gridDim.y) {
        const expert_tile tile = find_expert_tile(a.offsets, a.experts, (int32_t)a.rows, PLACES, (int32_t)index);
        if (tile.expert < 0 || tile.places <= 0) return;
        group_sums sums;
        make(tile, output, shared + skipped, sums);
        store<T>(p, tile, output, (float *)(shared + skipped), sums);
    }
}

/* On the host. */
inline cpa_status launch_tiles(void (*kernel)(cpa_cuda_expert_product), const cpa_cuda_expert_product &p,
                               int shared_bytes, uint64_t *prepared, cpa_stream *stream) {
    const cpa_expert_linear_args &a = p.args;
    const dim3 grid((unsigned)((a.outputs + OUTPUTS - 1) / OUTPUTS),
                    grid_rows(most_expert_tiles(a.rows, a.experts, PLACES)));
    cpa_status status = cpa_cuda_shared_memory(stream, (const void *)kernel, shared_bytes, prepared);
    if (status != CPA_OK) return status;
    return launch_early(kernel, grid, THREADS, p, stream, "expert_linear", shared_bytes);
}

} // namespace

#endif
