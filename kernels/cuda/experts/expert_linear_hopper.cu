/* Products of many places with experts' weights in bf16 or fp16, by wgmma of compute capability 9.0: expert_hopper.cuh
 * says how. */
#include "kernels/cuda/experts/expert_hopper.cuh"

namespace {

using ring_of_stages = expert_ring<2, 4, 176>;

/* The sums of all inputs, of stages from `first` on. */
template <typename T, int N>
__device__ void multiply(ring_of_stages &ring, int32_t inputs, uint32_t first, float (&sums)[GROUPS][N]) {
    const uint32_t end = first + (inputs + SPAN - 1) / SPAN;
    const uint32_t own = threadIdx.x / WARPGROUP * GROUPS;
    for (uint32_t n = first; n != end; n++) {
        const uint32_t stage = ring.tile(n);
        const uint64_t x = wgmma_descriptor(stage + ring_of_stages::WEIGHTS, 0);
        ring.wait_full(n);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < SPAN / STEP; k++) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const uint64_t weights = wgmma_descriptor(stage + (own + g) * GROUP_ROWS * LINE, 0);
                expert_wgmma<T>::multiply(sums[g], wgmma_advance(weights, k * STEP * 2),
                                          wgmma_advance(x, k * STEP * 2), 1);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (n != first) ring.release(n - 1);
    }
    wgmma_wait<0>();
    ring.release(end - 1);
    hold<2 * N>(sums);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) expert_linear_hopper(const __grid_constant__ expert_args args) {
    extern __shared__ __align__(128) char shared[];
    run<T, ring_of_stages>(args, shared, [&](ring_of_stages &ring, const expert_work &, uint32_t n, auto &sums) {
        multiply<T>(ring, args.product.args.inputs, n, sums);
    });
}

template <typename T>
cpa_status launch(const cpa_cuda_expert_product &p, cpa_stream *stream) {
    static uint64_t prepared;
    return launch_persistent<ring_of_stages>(expert_linear_hopper<T>, p, &prepared, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_multiply_hopper(const cpa_cuda_expert_product *product, cpa_stream *stream) {
    return product->args.dtype == CPA_BF16 ? launch<__nv_bfloat16>(*product, stream) : launch<__half>(*product, stream);
}
