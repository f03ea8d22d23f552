/* Products of many places in bf16 with experts' weights in FP8, by wgmma of compute capability 9.0: expert_hopper.cuh says
 * how. Codes are copied as they lie; each thread widens those that it has copied itself, so that no barrier is needed in
 * between, while the products of the step before are made.
 *
 * A scale is 2^e m with m in [1, 2). The power goes into the weights, in which code times 2^e is exact. Before the
 * inputs of another block, which are all of a warpgroup's outputs', sums are multiplied by the m of the block before over
 * that of the next one, and in the end by the last m: there are no registers for the sums of a block beside those of all.
 * Scales of single outputs are multiplied with in the end. */
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/experts/expert_hopper.cuh"

namespace {

using element = __nv_bfloat16;

/* Widened weights lie in a ring of their own: the tile of step i is written while the products of step i - 1 read the
 * one before it, and perhaps those of other warpgroups of step i - 2 one more. */
constexpr int TILES = 3, CODE_STAGES = AHEAD + 1;
constexpr int CODE_VECTORS = SPAN / 16, CODE_ROWS = THREADS / CODE_VECTORS, COPIES = OUTPUTS / CODE_ROWS;
constexpr int CODE_BYTES = OUTPUTS * SPAN; /* of a stage */
constexpr int X_AT = TILES * WEIGHT_BYTES, CODES_AT = X_AT + STAGES * X_BYTES;
constexpr int USED_BYTES = CODES_AT + CODE_STAGES * CODE_BYTES, SHARED_BYTES = USED_BYTES + TILE_ALIGNMENT;
constexpr int STEPS_OF_SCALE = CPA_CUDA_SCALE_BLOCK / SPAN, COPIES_OF_SCALE = CPA_CUDA_SCALE_BLOCK / CODE_ROWS;
static_assert(PLACES * SUM_LINE * 4 <= USED_BYTES, "sums take the place of stages");
static_assert(GROUPS * GROUP_ROWS == CPA_CUDA_SCALE_BLOCK, "the outputs of a warpgroup share their scales");

__device__ inline float power_of(float scale) {
    return __uint_as_float(__float_as_uint(scale) & 0x7f800000u);
}
__device__ inline float mantissa_of(float scale) {
    return __uint_as_float((__float_as_uint(scale) & 0x007fffffu) | 0x3f800000u);
}

/* The scales of blocks that a tile meets; 1 where single outputs have theirs. */
struct block_scales {
    const cpa_expert_linear_args &a;
    int32_t expert, output;
    bool of_blocks;

    __device__ block_scales(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t output)
        : a(a), expert(tile.expert), output(output),
          of_blocks(a.weight_scale_columns > 1 || a.weight_scale_rows != a.outputs) {}
    /* Of the tile's block of outputs `block`, and the inputs of a step. */
    __device__ float of(int block, int32_t step) const {
        const int32_t first = min(output + block * CPA_CUDA_SCALE_BLOCK, a.outputs - 1);
        return of_blocks ? scale_of(a, expert, first, min(step * SPAN, a.inputs - 1)) : 1;
    }
};

/* What a thread copies of the codes, and widens: a vector of every CODE_ROWS-th row. */
struct code_loader {
    const cpa_expert_linear_args &a;
    char *const own;      /* this thread's 16 bytes of the first copy of the first stage */
    const uint8_t *codes; /* of the expert */
    int32_t output;       /* of the first copy */

    __device__ code_loader(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t first, char *shared)
        : a(a), own(shared + CODES_AT + threadIdx.x * 16),
          codes((const uint8_t *)a.weight + tile.expert * a.expert_stride),
          output(first + threadIdx.x / CODE_VECTORS) {}
    __device__ char *place(int32_t step, int n) const {
        return own + step % CODE_STAGES * CODE_BYTES + n * THREADS * 16;
    }
    __device__ void load(int32_t step) const {
        const int32_t input = step * SPAN + threadIdx.x % CODE_VECTORS * 16;
        const bool inside = input < a.inputs;
#pragma unroll
        for (int n = 0; n < COPIES; n++) { /* past the last output the last one's, which is not stored */
            const int64_t row = min(output + n * CODE_ROWS, a.outputs - 1);
            copy_async_16(shared_address(place(step, n)), codes + row * a.weight_stride + (inside ? input : 0), inside);
        }
    }
    /* To a tile, times the powers of their scales. */
    __device__ void widen_to(char *tile, int32_t step, const float (&scales)[OUTPUTS / CPA_CUDA_SCALE_BLOCK]) const {
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const uint4 sixteen = *(const uint4 *)place(step, n);
            const float power = power_of(scales[n / COPIES_OF_SCALE]) * e4m3_codes::FACTOR;
            const int row = threadIdx.x / CODE_VECTORS + n * CODE_ROWS, vector = threadIdx.x % CODE_VECTORS * 2;
            *(uint4 *)(tile + swizzled<SPAN>(row, vector)) =
                widen_eight<e4m3_codes, element>(make_uint2(sixteen.x, sixteen.y), 0, power);
            *(uint4 *)(tile + swizzled<SPAN>(row, vector + 1)) =
                widen_eight<e4m3_codes, element>(make_uint2(sixteen.z, sixteen.w), 0, power);
        }
    }
};

__device__ inline void scale_sums(group_sums &sums, float factor) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < PLACES / 2; i++) sums[g][i] *= factor;
    }
}

/* The sums of all inputs. */
__device__ void multiply(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t output, char *shared,
                         group_sums &sums) {
    const code_loader codes(a, tile, output, shared);
    const x_loader<element> x(a, tile);
    const block_scales scales(a, tile, output);
    const int32_t steps = (a.inputs + SPAN - 1) / SPAN, own_block = threadIdx.x / WARPGROUP;
    const auto load = [&](int32_t step) {
        if (step < steps) {
            codes.load(step);
            x.load(shared_address(shared) + X_AT + step % STAGES * X_BYTES, step * SPAN);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int s = 0; s < AHEAD; s++) load(s);
    float next[] = {scales.of(0, 0), scales.of(1, 0)}, mantissa = mantissa_of(own_block ? next[1] : next[0]);
    for (int32_t step = 0; step < steps; step++) {
        const float now[] = {next[0], next[1]};
        char *const weights = shared + step % TILES * WEIGHT_BYTES;
        next[0] = scales.of(0, step + 1), next[1] = scales.of(1, step + 1); /* waited for in the next step */
        copy_async_wait<AHEAD - 1>();
        codes.widen_to(weights, step, now);
        async_proxy_fence();
        __syncthreads(); /* the tile and x are there, and all are through with x of step - 2 */
        if (step % STEPS_OF_SCALE == 0 && step > 0) {
            const float before = mantissa;
            mantissa = mantissa_of(own_block ? now[1] : now[0]);
            wgmma_wait<0>();
            hold(sums);
            scale_sums(sums, before / mantissa);
        }
        multiply_stage<element>(shared_address(weights), shared_address(shared) + X_AT + step % STAGES * X_BYTES, sums,
                                step > 0);
        load(step + AHEAD);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    hold(sums);
    scale_sums(sums, mantissa);
    copy_async_wait<0>();
    __syncthreads(); /* the stages have been read */
}

/* Scales of single outputs. */
__device__ void scale_outputs(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t output,
                              group_sums &sums) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const float upper = scale_of(a, tile.expert, min(output + output_of(g, 0), a.outputs - 1), 0);
        const float lower = scale_of(a, tile.expert, min(output + output_of(g, 2), a.outputs - 1), 0);
#pragma unroll
        for (int i = 0; i < PLACES / 2; i++) sums[g][i] *= i / 2 % 2 ? lower : upper;
    }
}

__global__ void __launch_bounds__(THREADS, 1) expert_linear_codes(const __grid_constant__ cpa_cuda_expert_product p) {
    extern __shared__ __align__(128) char shared[];
    dependent_wait();
    dependent_allow();
    for_tiles<element>(p, shared, [&](const expert_tile &tile, int32_t output, char *memory, group_sums &sums) {
        multiply(p.args, tile, output, memory, sums);
        if (!block_scales(p.args, tile, output).of_blocks) scale_outputs(p.args, tile, output, sums);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_multiply_hopper_codes(const cpa_cuda_expert_product *product,
                                                            cpa_stream *stream) {
    static uint64_t prepared;
    return launch_tiles(expert_linear_codes, *product, SHARED_BYTES, &prepared, stream);
}
