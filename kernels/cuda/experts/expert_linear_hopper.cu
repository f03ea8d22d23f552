/* Products of many places with experts' weights in bf16 or fp16, by wgmma of compute capability 9.0: a CTA makes OUTPUTS
 * outputs of up to PLACES places of an expert. Each of its warpgroups has half of the outputs: weights are A, rows of x
 * are B, both in shared memory as rows of 64 inputs, 128 bytes, swizzled as wgmma wants them. A result for 2 x 64 outputs
 * of 128 places takes 128 registers of a thread.
 *
 * All threads copy. Step i multiplies stage i and copies that of step i + AHEAD, where step i - 2 was: behind the barrier
 * of step i all warpgroups are through with it, as each has waited for it before it came there. */
#include "kernels/cuda/attend/hopper.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/wgmma.cuh"
#include "kernels/cuda/experts/expert_tiles.cuh"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int WARPGROUPS = 2, WARPGROUP = 128, THREADS = WARPGROUPS * WARPGROUP;
constexpr int SPAN = 64, STEP = 16;              /* inputs of a stage and of a wgmma */
constexpr int GROUP_ROWS = 64, GROUPS = 2;       /* outputs of a wgmma, and how many times so many a warpgroup has */
constexpr int OUTPUTS = WARPGROUPS * GROUPS * GROUP_ROWS, PLACES = 128;
constexpr int STAGES = 4, AHEAD = STAGES - 2;
constexpr int LINE = SPAN * 2, VECTORS = LINE / 16; /* bytes, and vectors of 16 bytes, of a row of a stage */
constexpr int X_AT = OUTPUTS * LINE, STAGE_BYTES = X_AT + PLACES * LINE;
constexpr int TILE_ALIGNMENT = 1024; /* of swizzled tiles */
constexpr int SUM_LINE = OUTPUTS + SUM_PAD;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + TILE_ALIGNMENT;
static_assert(PLACES * SUM_LINE * 4 <= STAGES * STAGE_BYTES, "sums take the place of stages");

using group_sums = float[GROUPS][PLACES / 2];

/* What a thread copies of each stage: a vector of every ROWS-th row. */
template <typename T>
struct stage_loader {
    static constexpr int ROWS = THREADS / VECTORS, WEIGHT_COPIES = OUTPUTS / ROWS, X_COPIES = PLACES / ROWS;
    const cpa_expert_linear_args &a;
    const T *weights;     /* of the expert */
    int32_t output;       /* of the first copy */
    const T *x[X_COPIES]; /* NULL: zeros */

    __device__ stage_loader(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t first)
        : a(a), weights((const T *)a.weight + tile.expert * a.expert_stride), output(first + threadIdx.x / VECTORS) {
#pragma unroll
        for (int n = 0; n < X_COPIES; n++) {
            const int row = threadIdx.x / VECTORS + n * ROWS;
            const int64_t of_x = row < tile.places ? row_of_place(a, tile.first + row) : -1;
            x[n] = of_x >= 0 ? (const T *)a.x + of_x * a.x_stride : NULL;
        }
    }
    /* Inputs [at, at + SPAN), zeros behind the last; the number of inputs is a multiple of a vector. */
    __device__ void load(uint32_t stage, int32_t at) const {
        const int vector = threadIdx.x % VECTORS, row = threadIdx.x / VECTORS;
        const int32_t input = at + vector * 8;
        const bool inside = input < a.inputs;
        const uint32_t to = stage + swizzled<SPAN>(row, vector); /* ROWS is a multiple of the 8 rows of a swizzle */
        static_assert(ROWS % 8 == 0, "the swizzle of all copies is the same");
#pragma unroll
        for (int n = 0; n < WEIGHT_COPIES; n++) { /* past the last output the last one's, which is not stored */
            const int64_t of_weights = min(output + n * ROWS, a.outputs - 1);
            copy_async_16(to + n * ROWS * LINE, weights + of_weights * a.weight_stride + (inside ? input : 0), inside);
        }
#pragma unroll
        for (int n = 0; n < X_COPIES; n++) {
            const bool valid = inside && x[n];
            copy_async_16(to + X_AT + n * ROWS * LINE, valid ? (const void *)(x[n] + input) : a.x, valid);
        }
    }
};

/* Starts the products of a stage; with `more`, sums += them. */
template <typename T>
__device__ void multiply_stage(uint32_t stage, group_sums &sums, int more) {
    const uint64_t x = wgmma_descriptor(stage + X_AT, 0);
    const int group = threadIdx.x / WARPGROUP * GROUPS;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < SPAN / STEP; k++) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const uint64_t weights = wgmma_descriptor(stage + (group + g) * GROUP_ROWS * LINE, 0);
            wgmma<T>::multiply(sums[g], wgmma_advance(weights, k * STEP * 2), wgmma_advance(x, k * STEP * 2),
                               k > 0 || more);
        }
    }
    wgmma_commit();
}

/* The sums of all inputs. `shared` is aligned. */
template <typename T>
__device__ void multiply(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t output, uint32_t shared,
                         group_sums &sums) {
    const stage_loader<T> loader(a, tile, output);
    const int32_t steps = (a.inputs + SPAN - 1) / SPAN;
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
        if (s < steps) loader.load(shared + s * STAGE_BYTES, s * SPAN);
        copy_async_commit();
    }
    for (int32_t step = 0; step < steps; step++) {
        const int32_t next = step + AHEAD;
        copy_async_wait<AHEAD - 1>();
        async_proxy_fence();
        __syncthreads(); /* the stage is there, and all are through with that of step - 2 */
        multiply_stage<T>(shared + step % STAGES * STAGE_BYTES, sums, step > 0);
        if (next < steps) loader.load(shared + next % STAGES * STAGE_BYTES, next * SPAN);
        copy_async_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int g = 0; g < GROUPS; g++) wgmma_hold(sums[g]);
    copy_async_wait<0>();
    __syncthreads(); /* the stages have been read */
}

template <typename T>
__device__ void store(const cpa_cuda_expert_product &p, const expert_tile &tile, int32_t output, float *shared,
                      const group_sums &sums) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP_LANES;
    const int row = threadIdx.x / WARPGROUP * GROUPS * GROUP_ROWS + thread / WARP_LANES * 16 + lane / 4;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < PLACES / 2; i++) { /* see wgmma.cuh */
            const int place = i / 4 * 8 + lane % 4 * 2 + i % 2;
            shared[place * SUM_LINE + row + g * GROUP_ROWS + i / 2 % 2 * 8] = sums[g][i];
        }
    }
    __syncthreads();
    store_sums<T, OUTPUTS, THREADS>(p, tile, output, shared, SUM_LINE);
    __syncthreads(); /* the sums have been read */
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) expert_linear_hopper(const __grid_constant__ cpa_cuda_expert_product p) {
    extern __shared__ __align__(128) char shared[];
    const cpa_expert_linear_args &a = p.args;
    const uint32_t first = shared_address(shared), skipped = (TILE_ALIGNMENT - first % TILE_ALIGNMENT) % TILE_ALIGNMENT;
    const int32_t output = blockIdx.x * OUTPUTS;
    dependent_wait();
    dependent_allow();
    for (int64_t index = blockIdx.y;; index += gridDim.y) {
        const expert_tile tile = find_expert_tile(a.offsets, a.experts, (int32_t)a.rows, PLACES, (int32_t)index);
        if (tile.expert < 0 || tile.places <= 0) return;
        group_sums sums;
        multiply<T>(a, tile, output, first + skipped, sums);
        store<T>(p, tile, output, (float *)(shared + skipped), sums);
    }
}

template <typename T>
cpa_status launch(const cpa_cuda_expert_product &p, cpa_stream *stream) {
    static uint64_t prepared;
    const cpa_expert_linear_args &a = p.args;
    const dim3 grid((unsigned)((a.outputs + OUTPUTS - 1) / OUTPUTS),
                    grid_rows(most_expert_tiles(a.rows, a.experts, PLACES)));
    cpa_status status = cpa_cuda_shared_memory(stream, (const void *)expert_linear_hopper<T>, SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    return launch_early(expert_linear_hopper<T>, grid, THREADS, p, stream, "expert_linear", SHARED_BYTES);
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_multiply_hopper(const cpa_cuda_expert_product *product, cpa_stream *stream) {
    return product->args.dtype == CPA_BF16 ? launch<__nv_bfloat16>(*product, stream) : launch<__half>(*product, stream);
}
