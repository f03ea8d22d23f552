/* Products of many places in bf16 with experts' weights in FP8, by wgmma of compute capability 9.0: expert_hopper.cuh says
 * how. Codes are read from their stage as fragments of A and widened in registers, while the products of the step before
 * are made; between two stages, those of the other warpgroup.
 *
 * A scale is 2^e m with m in [1, 2). The power goes into the weights, in which code times 2^e is exact. Before the
 * inputs of another block, which are all of a warpgroup's outputs', sums are multiplied by the m of the block before over
 * that of the next one, and in the end by the last m: there are no registers for the sums of a block beside those of all.
 * Scales of single outputs are multiplied with in the end. */
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/experts/expert_hopper.cuh"

namespace {

using element = __nv_bfloat16;

constexpr int STAGES = 5, STEPS = SPAN / STEP;
constexpr int SPANS_OF_SCALE = CPA_CUDA_SCALE_BLOCK / SPAN;
using ring_of_stages = expert_ring<1, STAGES, 160>; /* more columns need more registers than there are */
static_assert(OWN_OUTPUTS == CPA_CUDA_SCALE_BLOCK, "the outputs of a warpgroup share their scales");

__device__ inline float power_of(float scale) {
    return __uint_as_float(__float_as_uint(scale) & 0x7f800000u);
}
__device__ inline float mantissa_of(float scale) {
    return __uint_as_float((__float_as_uint(scale) & 0x007fffffu) | 0x3f800000u);
}

/* The scales of the blocks that a warpgroup meets; 1 where single outputs have theirs. */
struct block_scales {
    const cpa_expert_linear_args &a;
    int32_t expert, output;
    bool of_blocks;

    __device__ block_scales(const cpa_expert_linear_args &a, const expert_work &work)
        : a(a), expert(work.expert),
          output(min(work.output + (int)threadIdx.x / WARPGROUP * OWN_OUTPUTS, a.outputs - 1)),
          of_blocks(a.weight_scale_columns > 1 || a.weight_scale_rows != a.outputs) {}
    /* Of the inputs of a stage. */
    __device__ float of(int32_t span) const {
        return of_blocks ? scale_of(a, expert, output, min(span * SPAN, a.inputs - 1)) : 1;
    }
};

/* Two neighbouring codes as elements, times a power of two. */
__device__ inline uint32_t widen_pair(uint16_t two, float power) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
    const float2 x = __half22float2(bits_pair(pair));
    return pack_pair<element>(x.x * power, x.y * power);
}

/* A of step k for all groups: where lines of 64 bytes are swizzled by the bulk copies, the vector of 16 bytes of a line is
 * its number xor that of the 128 bytes that it is in, mod 4. Lanes read from 16 banks, two from each. */
__device__ inline void read_weights(uint32_t (&a)[GROUPS][4], const char *codes, int k, float power) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP_LANES;
    const int row = thread / WARP_LANES * 16 + lane / 4;
    const char *const line = codes + row * SPAN + ((k ^ (row / 2 % 4)) * STEP) + lane % 4 * 2;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = (g * GROUP_ROWS + i % 2 * 8) * SPAN + i / 2 * 8;
            a[g][i] = widen_pair(*(const uint16_t *)(line + at), power);
        }
    }
}

template <int N>
__device__ void scale_sums(float (&sums)[GROUPS][N], float factor) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < N; i++) sums[g][i] *= factor;
    }
}

/* The sums of all inputs, of stages from `first` on. The weights of all steps of a stage have registers of their own, and
 * nothing is under way where they begin anew: else ptxas makes each product wait for the one before. */
template <int N>
__device__ void multiply(ring_of_stages &ring, const cpa_expert_linear_args &a, const expert_work &work, uint32_t first,
                         char *stages, float (&sums)[GROUPS][N]) {
    const block_scales scales(a, work);
    const int32_t spans = (a.inputs + SPAN - 1) / SPAN;
    float scale = scales.of(0), next = scale;
    for (int32_t span = 0; span < spans; span++) {
        const uint32_t n = first + span, stage = ring.tile(n);
        const char *const codes =
            stages + n % STAGES * ring_of_stages::STAGE_BYTES + threadIdx.x / WARPGROUP * OWN_OUTPUTS * SPAN;
        const uint64_t x = wgmma_descriptor(stage + ring_of_stages::WEIGHTS, 0);
        uint32_t weights[STEPS][GROUPS][4];
        if (span % SPANS_OF_SCALE == 0 && span > 0) {
            scale_sums(sums, mantissa_of(scale) / mantissa_of(next));
            scale = next;
        }
        if (span % SPANS_OF_SCALE == 0) next = scales.of(span + SPANS_OF_SCALE); /* waited for at that block */
        ring.wait_full(n);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            read_weights(weights[k], codes, k, power_of(scale) * e4m3_codes::FACTOR);
            wgmma_fence();
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                expert_wgmma<element>::multiply(sums[g], weights[k][g], wgmma_advance(x, k * STEP * 2), 1);
            wgmma_commit();
        }
        wgmma_wait<0>();
        hold<2 * N>(sums);
        ring.release(n);
    }
    scale_sums(sums, mantissa_of(scale));
}

/* Scales of single outputs. */
template <int N>
__device__ void scale_outputs(const cpa_expert_linear_args &a, const expert_work &work, float (&sums)[GROUPS][N]) {
    const int32_t output = work.output + threadIdx.x / WARPGROUP * OWN_OUTPUTS;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const float upper = scale_of(a, work.expert, min(output + output_of(g, 0), a.outputs - 1), 0);
        const float lower = scale_of(a, work.expert, min(output + output_of(g, 2), a.outputs - 1), 0);
#pragma unroll
        for (int i = 0; i < N; i++) sums[g][i] *= i / 2 % 2 ? lower : upper;
    }
}

__global__ void __launch_bounds__(THREADS, 1) expert_linear_codes(const __grid_constant__ expert_args args) {
    extern __shared__ __align__(128) char shared[];
    const cpa_expert_linear_args &a = args.product.args;
    run<element, ring_of_stages>(
        args, shared, [&](ring_of_stages &ring, const expert_work &work, uint32_t n, auto &sums) {
            multiply(ring, a, work, n, (char *)&ring - STAGES * ring_of_stages::STAGE_BYTES, sums);
            if (!block_scales(a, work).of_blocks) scale_outputs(a, work, sums);
        });
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_multiply_hopper_codes(const cpa_cuda_expert_product *product,
                                                            cpa_stream *stream) {
    static uint64_t prepared;
    return launch_persistent<ring_of_stages>(expert_linear_codes, *product, &prepared, stream);
}
