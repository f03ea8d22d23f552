/* Products of many places with experts' weights in bf16 or fp16, by wgmma of compute capability 9.0: expert_hopper.cuh
 * says how. */
#include "kernels/cuda/experts/expert_hopper.cuh"

namespace {

constexpr int X_AT = WEIGHT_BYTES, STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + TILE_ALIGNMENT;
static_assert(PLACES * SUM_LINE * 4 <= STAGES * STAGE_BYTES, "sums take the place of stages");

/* What a thread copies of the weights: a vector of every ROWS-th row. */
template <typename T>
struct weight_loader {
    static constexpr int ROWS = THREADS / VECTORS, COPIES = OUTPUTS / ROWS;
    static_assert(ROWS % 8 == 0, "the swizzle of all copies is the same");
    const cpa_expert_linear_args &a;
    const T *weights; /* of the expert */
    int32_t output;   /* of the first copy */

    __device__ weight_loader(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t first)
        : a(a), weights((const T *)a.weight + tile.expert * a.expert_stride), output(first + threadIdx.x / VECTORS) {}
    __device__ void load(uint32_t stage, int32_t at) const {
        const int vector = threadIdx.x % VECTORS, row = threadIdx.x / VECTORS;
        const int32_t input = at + vector * 8;
        const bool inside = input < a.inputs;
#pragma unroll
        for (int n = 0; n < COPIES; n++) { /* past the last output the last one's, which is not stored */
            const int64_t of_weights = min(output + n * ROWS, a.outputs - 1);
            copy_async_16(stage + swizzled<SPAN>(row, vector) + n * ROWS * LINE,
                          weights + of_weights * a.weight_stride + (inside ? input : 0), inside);
        }
    }
};

/* The sums of all inputs. */
template <typename T>
__device__ void multiply(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t output, uint32_t shared,
                         group_sums &sums) {
    const weight_loader<T> weights(a, tile, output);
    const x_loader<T> x(a, tile);
    const int32_t steps = (a.inputs + SPAN - 1) / SPAN;
    const auto load = [&](int32_t step) {
        const uint32_t stage = shared + step % STAGES * STAGE_BYTES;
        if (step < steps) {
            weights.load(stage, step * SPAN);
            x.load(stage + X_AT, step * SPAN);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int s = 0; s < AHEAD; s++) load(s);
    for (int32_t step = 0; step < steps; step++) {
        const uint32_t stage = shared + step % STAGES * STAGE_BYTES;
        copy_async_wait<AHEAD - 1>();
        async_proxy_fence();
        __syncthreads(); /* the stage is there, and all are through with that of step - 2 */
        multiply_stage<T>(stage, stage + X_AT, sums, step > 0);
        load(step + AHEAD);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    hold(sums);
    copy_async_wait<0>();
    __syncthreads(); /* the stages have been read */
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) expert_linear_hopper(const __grid_constant__ cpa_cuda_expert_product p) {
    extern __shared__ __align__(128) char shared[];
    dependent_wait();
    dependent_allow();
    for_tiles<T>(p, shared, [&](const expert_tile &tile, int32_t output, char *memory, group_sums &sums) {
        multiply<T>(p.args, tile, output, shared_address(memory), sums);
    });
}

template <typename T>
cpa_status launch(const cpa_cuda_expert_product &p, cpa_stream *stream) {
    static uint64_t prepared;
    return launch_tiles(expert_linear_hopper<T>, p, SHARED_BYTES, &prepared, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_multiply_hopper(const cpa_cuda_expert_product *product, cpa_stream *stream) {
    return product->args.dtype == CPA_BF16 ? launch<__nv_bfloat16>(*product, stream) : launch<__half>(*product, stream);
}
