/* Products with experts' weights in bf16 or fp16, or in FP8, by mma.sync: a CTA makes OUTPUTS outputs of up to PLACES
 * places of an expert, which it finds from the offsets. Weights are A, rows of x the columns of B.
 *
 * The order of inputs within a chunk of 32 is free, as long as it is that of weights and x alike: a lane takes 8
 * neighbouring ones of its row, of which the first four stand in the places of one mma and the others in those of the
 * next (as in nn/linear_few.cu). So a tile in shared memory is chunks of rows of 64 bytes, or of 32 where they are codes,
 * and the lanes that read together read 128 neighbouring bytes, without a swizzle.
 *
 * Codes become elements in registers, in which each is exact; the sum over 128 inputs, which share a scale, is
 * multiplied by it in fp32. */
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/experts/expert_tiles.cuh"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int CHUNK = 32, CHUNKS = 2, SPAN = CHUNKS * CHUNK; /* inputs of a chunk, chunks and inputs of a stage */
constexpr int VECTOR_BYTES = 16;                              /* bytes that are copied at once */

/* RowWarps: warps side by side along the outputs; ColumnWarps: along the places. */
template <typename Element, bool Codes, int Outputs, int Places, int RowWarps, int ColumnWarps, int Stages, int Ctas>
struct config {
    using T = Element;
    static constexpr bool CODES = Codes;
    static constexpr int OUTPUTS = Outputs, PLACES = Places, COLUMN_WARPS = ColumnWarps, STAGES = Stages;
    static constexpr int CTAS = Ctas; /* of a multiprocessor */
    static constexpr int THREADS = RowWarps * ColumnWarps * WARP_LANES;
    static constexpr int ROW_TILES = OUTPUTS / RowWarps / 16, COLUMN_TILES = PLACES / ColumnWarps / 8; /* of a warp */
    static constexpr int WEIGHT_BYTES = CODES ? 1 : 2;
    static constexpr int WEIGHT_LINE = CHUNK * WEIGHT_BYTES, X_LINE = CHUNK * 2; /* bytes of a row of a chunk */
    static constexpr int X_AT = CHUNKS * OUTPUTS * WEIGHT_LINE, STAGE_BYTES = X_AT + CHUNKS * PLACES * X_LINE;
    /* Vectors of a row of a stage, and how many of all rows a thread copies. */
    static constexpr int WEIGHT_VECTORS = SPAN * WEIGHT_BYTES / VECTOR_BYTES, X_VECTORS = SPAN * 2 / VECTOR_BYTES;
    static constexpr int WEIGHT_COPIES = OUTPUTS * WEIGHT_VECTORS / THREADS, X_COPIES = PLACES * X_VECTORS / THREADS;
    static_assert(WEIGHT_COPIES * THREADS == OUTPUTS * WEIGHT_VECTORS && X_COPIES * THREADS == PLACES * X_VECTORS,
                  "threads share the copies evenly");
    static constexpr int SUM_LINE = OUTPUTS + SUM_PAD;
    static constexpr int SUM_BYTES = PLACES * SUM_LINE * 4;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;
};

/* Where a vector of a row of a stage goes: its chunk, its row, its place in the row's line. */
__device__ inline int line_offset(int vector, int row, int rows, int line_bytes) {
    const int of_line = line_bytes / VECTOR_BYTES;
    return (vector / of_line * rows + row) * line_bytes + vector % of_line * VECTOR_BYTES;
}

/* What a thread copies of each stage. */
template <typename C>
struct stage_loader {
    using T = typename C::T;
    const cpa_expert_linear_args &a;
    const char *weights; /* of the expert */
    int32_t output;      /* of the first copy */
    const T *x[C::X_COPIES]; /* NULL: zeros */

    __device__ stage_loader(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t first)
        : a(a), weights((const char *)a.weight + tile.expert * a.expert_stride * C::WEIGHT_BYTES),
          output(first + threadIdx.x / C::WEIGHT_VECTORS) {
#pragma unroll
        for (int n = 0; n < C::X_COPIES; n++) {
            const int row = (threadIdx.x + n * C::THREADS) / C::X_VECTORS;
            const int64_t of_x = row < tile.places ? row_of_place(a, tile.first + row) : -1;
            x[n] = of_x >= 0 ? (const T *)a.x + of_x * a.x_stride : NULL;
        }
    }
    /* Inputs [at, at + SPAN), zeros behind the last; the numbers of inputs are multiples of a vector. */
    __device__ void load(uint32_t stage, int32_t at) const {
        constexpr int OF_WEIGHTS = VECTOR_BYTES / C::WEIGHT_BYTES, OF_X = VECTOR_BYTES / 2;
#pragma unroll
        for (int n = 0; n < C::WEIGHT_COPIES; n++) {
            const int i = threadIdx.x + n * C::THREADS, vector = i % C::WEIGHT_VECTORS;
            const int32_t input = at + vector * OF_WEIGHTS;
            const bool valid = input < a.inputs;
            /* Past the last output the last one's, which is not stored. */
            const int64_t row = min(output + n * (C::THREADS / C::WEIGHT_VECTORS), a.outputs - 1);
            copy_async_16(stage + line_offset(vector, i / C::WEIGHT_VECTORS, C::OUTPUTS, C::WEIGHT_LINE),
                          weights + (row * a.weight_stride + (valid ? input : 0)) * C::WEIGHT_BYTES, valid);
        }
#pragma unroll
        for (int n = 0; n < C::X_COPIES; n++) {
            const int i = threadIdx.x + n * C::THREADS, vector = i % C::X_VECTORS;
            const int32_t input = at + vector * OF_X;
            const bool valid = x[n] && input < a.inputs;
            copy_async_16(stage + C::X_AT + line_offset(vector, i / C::X_VECTORS, C::PLACES, C::X_LINE),
                          valid ? (const void *)(x[n] + input) : a.x, valid);
        }
    }
};

/* The eight inputs of a lane in a row of weights, as elements. */
template <typename C>
__device__ uint4 load_weights(const char *line, int lane) {
    if constexpr (C::CODES) {
        const uint2 codes = *(const uint2 *)(line + lane % 4 * 8);
        return widen_eight<e4m3_codes, typename C::T>(codes, 0, e4m3_codes::FACTOR);
    } else {
        return *(const uint4 *)(line + lane % 4 * 16);
    }
}

template <typename C>
using warp_sums = float[C::ROW_TILES][C::COLUMN_TILES][4];

/* sums += the products of a stage. */
template <typename C>
__device__ void multiply_stage(const char *stage, warp_sums<C> &sums) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int row = warp / C::COLUMN_WARPS * C::ROW_TILES * 16 + lane / 4;
    const int column = warp % C::COLUMN_WARPS * C::COLUMN_TILES * 8 + lane / 4;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const char *weights = stage + (c * C::OUTPUTS + row) * C::WEIGHT_LINE;
        const char *x = stage + C::X_AT + (c * C::PLACES + column) * C::X_LINE + lane % 4 * 16;
        uint32_t one[C::ROW_TILES][4], two[C::ROW_TILES][4];
#pragma unroll
        for (int t = 0; t < C::ROW_TILES; t++) {
            const uint4 upper = load_weights<C>(weights + t * 16 * C::WEIGHT_LINE, lane);
            const uint4 lower = load_weights<C>(weights + (t * 16 + 8) * C::WEIGHT_LINE, lane);
            one[t][0] = upper.x, one[t][1] = lower.x, one[t][2] = upper.y, one[t][3] = lower.y;
            two[t][0] = upper.z, two[t][1] = lower.z, two[t][2] = upper.w, two[t][3] = lower.w;
        }
#pragma unroll
        for (int n = 0; n < C::COLUMN_TILES; n++) {
            const uint4 eight = *(const uint4 *)(x + n * 8 * C::X_LINE);
#pragma unroll
            for (int t = 0; t < C::ROW_TILES; t++) {
                mma<typename C::T>(sums[t][n], one[t], eight.x, eight.y);
                mma<typename C::T>(sums[t][n], two[t], eight.z, eight.w);
            }
        }
    }
}

/* total += scale * sums, of inputs that have the scale of input i; sums = 0. */
template <typename C>
__device__ void add_scaled(const cpa_expert_linear_args &a, int32_t expert, int32_t output, int32_t i,
                           warp_sums<C> &sums, warp_sums<C> &total) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int32_t first = output + warp / C::COLUMN_WARPS * C::ROW_TILES * 16 + lane / 4;
#pragma unroll
    for (int t = 0; t < C::ROW_TILES; t++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float scale = scale_of(a, expert, min(first + t * 16 + half * 8, a.outputs - 1), i);
#pragma unroll
            for (int n = 0; n < C::COLUMN_TILES; n++) {
#pragma unroll
                for (int e = half * 2; e < half * 2 + 2; e++) {
                    total[t][n][e] = fmaf(scale, sums[t][n][e], total[t][n][e]);
                    sums[t][n][e] = 0;
                }
            }
        }
    }
}

/* The sums of all inputs. */
template <typename C>
__device__ void multiply(const cpa_expert_linear_args &a, const expert_tile &tile, int32_t output, char *shared,
                         warp_sums<C> &total) {
    const stage_loader<C> loader(a, tile, output);
    const int32_t steps = (a.inputs + SPAN - 1) / SPAN;
    constexpr int STEPS_OF_SCALE = CPA_CUDA_SCALE_BLOCK / SPAN;
    warp_sums<C> sums = {};
#pragma unroll
    for (int s = 0; s < C::STAGES - 1; s++) {
        if (s < steps) loader.load(shared_address(shared) + s * C::STAGE_BYTES, s * SPAN);
        copy_async_commit();
    }
    for (int32_t step = 0; step < steps; step++) {
        const int32_t next = step + C::STAGES - 1;
        copy_async_wait<C::STAGES - 2>();
        __syncthreads(); /* the stage is there for all, and what `next` goes over has been read by all */
        if (next < steps) loader.load(shared_address(shared) + next % C::STAGES * C::STAGE_BYTES, next * SPAN);
        copy_async_commit();
        if constexpr (C::CODES) {
            multiply_stage<C>(shared + step % C::STAGES * C::STAGE_BYTES, sums);
            if (step % STEPS_OF_SCALE == STEPS_OF_SCALE - 1 || step == steps - 1)
                add_scaled<C>(a, tile.expert, output, step * SPAN, sums, total);
        } else {
            multiply_stage<C>(shared + step % C::STAGES * C::STAGE_BYTES, total);
        }
    }
    copy_async_wait<0>();
    __syncthreads(); /* the stages have been read */
}

/* The results, by way of shared memory, so that neighbouring threads store neighbouring outputs. */
template <typename C>
__device__ void store(const cpa_cuda_expert_product &p, const expert_tile &tile, int32_t output, char *shared,
                      const warp_sums<C> &total) {
    using T = typename C::T;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int row = warp / C::COLUMN_WARPS * C::ROW_TILES * 16 + lane / 4;
    const int column = warp % C::COLUMN_WARPS * C::COLUMN_TILES * 8 + lane % 4 * 2;
    float *sums = (float *)shared; /* [PLACES][SUM_LINE] */
#pragma unroll
    for (int t = 0; t < C::ROW_TILES; t++) {
#pragma unroll
        for (int n = 0; n < C::COLUMN_TILES; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[(column + n * 8 + e % 2) * C::SUM_LINE + row + t * 16 + e / 2 * 8] = total[t][n][e];
        }
    }
    __syncthreads();
    store_sums<T, C::OUTPUTS, C::THREADS>(p, tile, output, sums, C::SUM_LINE);
    __syncthreads(); /* the sums have been read */
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS) expert_linear_tiles(const __grid_constant__ cpa_cuda_expert_product p) {
    extern __shared__ __align__(128) char shared[];
    const cpa_expert_linear_args &a = p.args;
    const int32_t output = blockIdx.x * C::OUTPUTS;
    dependent_wait();
    dependent_allow();
    for (int64_t index = blockIdx.y;; index += gridDim.y) {
        const expert_tile tile = find_expert_tile(a.offsets, a.experts, (int32_t)a.rows, C::PLACES, (int32_t)index);
        if (tile.expert < 0 || tile.places <= 0) return;
        warp_sums<C> total = {};
        multiply<C>(a, tile, output, shared, total);
        store<C>(p, tile, output, shared, total);
    }
}

template <typename C>
cpa_status launch(const cpa_cuda_expert_product &p, cpa_stream *stream) {
    static uint64_t prepared;
    const cpa_expert_linear_args &a = p.args;
    const dim3 grid((unsigned)((a.outputs + C::OUTPUTS - 1) / C::OUTPUTS),
                    grid_rows(most_expert_tiles(a.rows, a.experts, C::PLACES)));
    cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)expert_linear_tiles<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    return launch_early(expert_linear_tiles<C>, grid, C::THREADS, p, stream, "expert_linear", C::SHARED_BYTES);
}

/* Tiles as wide as what an expert has, if all have the same. */
template <typename T, bool CODES>
cpa_status launch_places(const cpa_cuda_expert_product &p, cpa_stream *stream) {
    using few = config<T, CODES, 64, 16, 4, 1, 5, 4>;
    using some = config<T, CODES, 128, 64, 4, 2, 3, 1>;
    using many = config<T, CODES, 128, 128, 4, 2, 4, 1>;
    const int64_t mean = p.args.rows / p.args.experts;
    if (mean <= few::PLACES) return launch<few>(p, stream);
    if (mean <= some::PLACES || !cpa_cuda_fits(stream, (const void *)expert_linear_tiles<many>, many::SHARED_BYTES))
        return launch<some>(p, stream);
    return launch<many>(p, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_multiply_tiles(const cpa_cuda_expert_product *product, cpa_stream *stream) {
    const bool codes = product->args.weight_scale != NULL;
    if (product->args.dtype == CPA_BF16)
        return codes ? launch_places<__nv_bfloat16, true>(*product, stream)
                     : launch_places<__nv_bfloat16, false>(*product, stream);
    return codes ? launch_places<__half, true>(*product, stream) : launch_places<__half, false>(*product, stream);
}
