/* linear of a few rows in bf16 or fp16: weights are read once, at the speed of memory, and go from registers to the
 * tensor cores, where the rows of x are the columns of B.
 *
 * A CTA makes 16 outputs, or 32 for more than 8 rows; its warps share the inputs, in spans of SPAN each in turn. Any
 * order of the inputs will do, as long as it is that of weights and x alike: each thread takes 8 neighbouring ones of a
 * chunk, 16 bytes, of which the first four stand in the places of one mma and the others in those of the next. The
 * first weights are under way before the kernel in front, which makes x, has ended.
 *
 * A row has the same bits whatever the number of rows: spans, and the order of sums, are the same for all. */
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/linear.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP_LANES, CHUNK = 32, SPAN = 4 * CHUNK, TILE = 16, COLUMNS = 8;

struct few_args {
    int32_t rows, inputs, outputs;
    const void *x, *weight, *bias;
    int64_t x_stride, weight_stride, out_stride;
    void *out;
    int32_t out_fp32;
};

/* Read once, and past the first-level cache, which x has for itself. */
__device__ uint4 load_once(const void *from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

/* Eight elements from `at`; zeros past the end. */
template <typename T, bool VECTORS, bool ONCE>
__device__ uint4 load_eight(const T *row, int32_t at, int32_t end) {
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (VECTORS) { /* the end is a multiple of 8 */
        if (at < end) eight = ONCE ? load_once(row + at) : *(const uint4 *)(row + at);
        return eight;
    }
    const uint16_t *bits = (const uint16_t *)row;
    uint32_t pairs[4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const int32_t first = at + 2 * p;
        pairs[p] = first < end ? bits[first] : 0;
        if (first + 1 < end) pairs[p] |= (uint32_t)bits[first + 1] << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

/* The weights of CHUNKS chunks and the outputs of a CTA, as a thread holds them: rows lane / 4 and 8 more of each tile,
 * inputs 8 * (lane % 4) and on of each chunk. */
template <typename T, int TILES, int CHUNKS, bool VECTORS>
struct weights {
    uint4 eight[CHUNKS][TILES][2];
    __device__ void load(const T *const (&rows)[TILES][2], int32_t at, int32_t end) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#pragma unroll
                for (int h = 0; h < 2; h++)
                    eight[c][t][h] = load_eight<T, VECTORS, true>(rows[t][h], at + c * CHUNK, end);
            }
        }
    }
};

/* GROUPS: of 8 rows of x. CHUNKS: at once, which divide a span. */
template <typename T, int TILES, int GROUPS, int CHUNKS, bool VECTORS>
__global__ void __launch_bounds__(THREADS, 2) linear_few(const __grid_constant__ few_args a) {
    constexpr int OUTPUTS = TILES * TILE, STEPS = SPAN / (CHUNK * CHUNKS);
    __shared__ float sums[WARPS][GROUPS * COLUMNS][OUTPUTS];
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, first = blockIdx.x * OUTPUTS;
    const T *rows[TILES][2], *x[GROUPS];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int h = 0; h < 2; h++) /* past the last output the last one's, which is not stored */
            rows[t][h] =
                (const T *)a.weight + min(first + t * TILE + h * 8 + lane / 4, a.outputs - 1) * a.weight_stride;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int row = g * COLUMNS + lane / 4;
        x[g] = row < a.rows ? (const T *)a.x + row * a.x_stride : NULL;
    }
    float c[TILES][GROUPS][4] = {};
    /* Step i of this warp: its inputs begin there, and those of this thread 8 * (lane % 4) later. */
    auto begin_of = [&](int32_t i) {
        return (i / STEPS * WARPS + warp) * SPAN + i % STEPS * CHUNKS * CHUNK + lane % 4 * 8;
    };
    const int32_t last = (a.inputs + WARPS * SPAN - 1) / (WARPS * SPAN) * STEPS;
    weights<T, TILES, CHUNKS, VECTORS> next;
    next.load(rows, begin_of(0), a.inputs);
    dependent_wait();
    dependent_allow();
    for (int32_t i = 0; i < last; i++) {
        const weights<T, TILES, CHUNKS, VECTORS> now = next;
        const int32_t at = begin_of(i);
        uint4 eight[CHUNKS][GROUPS];
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                eight[k][g] =
                    x[g] ? load_eight<T, VECTORS, false>(x[g], at + k * CHUNK, a.inputs) : make_uint4(0, 0, 0, 0);
        }
        next.load(rows, begin_of(i + 1), a.inputs); /* zeros behind the end */
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const uint4 &upper = now.eight[k][t][0], &lower = now.eight[k][t][1];
                const uint32_t one[4] = {upper.x, lower.x, upper.y, lower.y};
                const uint32_t two[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    mma<T>(c[t][g], one, eight[k][g].x, eight[k][g].y);
                    mma<T>(c[t][g], two, eight[k][g].z, eight[k][g].w);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[warp][g * COLUMNS + lane % 4 * 2 + e % 2][t * TILE + e / 2 * 8 + lane / 4] = c[t][g][e];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUPS * COLUMNS * OUTPUTS; i += THREADS) {
        const int row = i / OUTPUTS, o = i % OUTPUTS, output = first + o;
        if (row >= a.rows || output >= a.outputs) continue;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][row][o];
        if (a.bias) sum += to_float(((const T *)a.bias)[output]);
        const int64_t at = row * a.out_stride + output;
        if (a.out_fp32) {
            ((float *)a.out)[at] = sum;
        } else {
            ((T *)a.out)[at] = from_float<T>(sum);
        }
    }
}

template <typename T, int TILES, int GROUPS, int CHUNKS, bool VECTORS>
cpa_status launch(const few_args &a, cpa_stream *stream) {
    const int outputs = TILES * TILE;
    return launch_early(linear_few<T, TILES, GROUPS, CHUNKS, VECTORS>,
                        dim3((unsigned)((a.outputs + outputs - 1) / outputs)), THREADS, a, stream, "linear");
}

template <typename T>
cpa_status launch_rows(const few_args &a, bool vectors, cpa_stream *stream) {
    if (!vectors) return launch<T, 1, 2, 1, false>(a, stream);
    return a.rows <= COLUMNS ? launch<T, 1, 1, 4, true>(a, stream) : launch<T, 2, 2, 2, true>(a, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_linear_few(const cpa_linear_args *args, cpa_stream *stream) {
    static_assert(CPA_CUDA_FEW_ROWS <= 2 * COLUMNS, "what a CTA has places for");
    const few_args a = {(int32_t)args->rows,
                        args->inputs,
                        args->outputs,
                        args->x,
                        args->weight,
                        args->bias,
                        args->x_stride,
                        args->weight_stride,
                        args->out_stride,
                        args->out,
                        args->out_dtype == CPA_F32};
    const bool vectors = in_vectors(args->dtype, args->x_stride | args->weight_stride | args->inputs,
                                    (uintptr_t)args->x | (uintptr_t)args->weight);
    return args->dtype == CPA_BF16 ? launch_rows<__nv_bfloat16>(a, vectors, stream)
                                   : launch_rows<__half>(a, vectors, stream);
}
