/* linear of a few rows in bf16 or fp16: weights are read once, at the speed of memory, and go by shared memory to the
 * tensor cores, where the rows of x are the columns of B.
 *
 * A tile is 16 outputs, or 32 for more than 8 rows, and a CTA takes one after the other; its warps share the inputs, in
 * spans of SPAN each in turn. Any order of the inputs will do, as long as it is that of weights and x alike: each
 * thread takes 8 neighbouring ones of a chunk, 16 bytes, of which the first four stand in the places of one mma and the
 * others in those of the next. It copies its weights to shared memory some stages ahead, where it alone reads them, so
 * that no barrier is needed; the first stages, of all CTAs some 25 MB, are under way before the kernel in front, which
 * makes x, has ended.
 *
 * A row has the same bits whatever the number of rows: spans, and the order of sums, are the same for all. */
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/linear.h"
#include "kernels/cuda/nn/row_norm.cuh"
#include "kernels/cuda/nn/silu.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP_LANES, CHUNK = 32, SPAN = 4 * CHUNK, TILE = 16, COLUMNS = 8;

struct few_args {
    int32_t rows, inputs, outputs; /* gated: outputs are half of the weights' rows */
    const void *x, *weight, *bias;
    int64_t x_stride, weight_stride, out_stride;
    void *out;
    int32_t out_fp32, adds;
    const void *norm_weight;
    float norm_eps;
    int64_t x_batch_stride, weight_batch_stride, out_batch_stride; /* of the products that a grid has in y */
};

/* Eight elements from `at`; zeros past the end. */
template <typename T, bool VECTORS>
__device__ uint4 load_eight(const T *row, int32_t at, int32_t end) {
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (VECTORS) { /* the end is a multiple of 8 */
        if (at < end) eight = *(const uint4 *)(row + at);
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

/* How a kernel takes its work. GROUPS: of 8 rows of x. CHUNKS: of a stage, which divide a span. GATED: the upper halves
 * of tiles are gates, and the lower ones what they scale. NORMED: x, a single row, is normed first. */
template <typename Element, int Tiles, int Groups, int Chunks, int Stages, bool Vectors, bool Gated, bool Normed>
struct config {
    using T = Element;
    static constexpr int TILES = Tiles, GROUPS = Groups, CHUNKS = Chunks, STAGES = Stages;
    static constexpr bool VECTORS = Vectors, GATED = Gated, NORMED = Normed;
    static constexpr int PLACES = TILES * TILE, OUTPUTS = GATED ? PLACES / 2 : PLACES, ROWS = GROUPS * COLUMNS;
    static constexpr int STEPS = SPAN / (CHUNK * CHUNKS); /* of a span */
    static constexpr int STAGE_BYTES = CHUNKS * TILES * 2 * 16 * THREADS, RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int SUM_BYTES = WARPS * ROWS * PLACES * 4;
    static constexpr int SHARED_BYTES = RING_BYTES + SUM_BYTES + (NORMED ? CPA_CUDA_NORMED_INPUTS * 2 : 0);
    static constexpr int ITEMS = (ROWS * OUTPUTS + THREADS - 1) / THREADS; /* results of a thread */
};

/* A thread's way through the weights of its CTA's tiles, some stages ahead of the products: of each stage CHUNKS
 * chunks, and of each tile rows lane / 4 and 8 more, inputs 8 * (lane % 4) and on. */
template <typename C>
struct weight_loader {
    using T = typename C::T;
    const few_args &a;
    char *const own; /* this thread's 16 bytes of the first part of the first stage */
    const int32_t steps;
    int32_t tile, step = 0;
    const T *rows[C::TILES][2];

    __device__ weight_loader(const few_args &a, char *ring, int32_t steps)
        : a(a), own(ring + threadIdx.x * 16), steps(steps), tile(blockIdx.x) {
        begin_tile();
    }
    __device__ char *place(int stage, int c, int t, int h) const {
        return own + stage * C::STAGE_BYTES + ((c * C::TILES + t) * 2 + h) * 16 * THREADS;
    }
    __device__ void begin_tile() {
#pragma unroll
        for (int t = 0; t < C::TILES; t++) {
#pragma unroll
            for (int h = 0; h < 2; h++) { /* past the last output the last one's, which is not stored */
                const int row = C::GATED ? t * 8 : t * TILE + h * 8, lane = threadIdx.x % WARP_LANES;
                const int output = min(tile * C::OUTPUTS + row + lane / 4, a.outputs - 1);
                rows[t][h] = (const T *)a.weight + blockIdx.y * a.weight_batch_stride +
                             ((C::GATED && h ? a.outputs : 0) + output) * a.weight_stride;
            }
        }
    }
    /* Step i of this warp: where the inputs of this thread begin. */
    static __device__ int32_t begin_of(int32_t i) {
        const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
        return (i / C::STEPS * WARPS + warp) * SPAN + i % C::STEPS * C::CHUNKS * CHUNK + lane % 4 * 8;
    }
    /* The next step's weights, if there is one, to a stage; zeros behind the end. */
    __device__ void load(int stage) {
        if (tile * C::OUTPUTS < a.outputs) {
            const int32_t at = begin_of(step);
#pragma unroll
            for (int c = 0; c < C::CHUNKS; c++) {
#pragma unroll
                for (int t = 0; t < C::TILES; t++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) load_part(stage, c, t, h, at + c * CHUNK);
                }
            }
            if (++step == steps) step = 0, tile += gridDim.x, begin_tile();
        }
        copy_async_commit();
    }
    __device__ void load_part(int stage, int c, int t, int h, int32_t at) const {
        if (C::VECTORS) {
            const bool valid = at < a.inputs;
            copy_async_16(shared_address(place(stage, c, t, h)), rows[t][h] + (valid ? at : 0), valid);
        } else {
            *(uint4 *)place(stage, c, t, h) = load_eight<T, false>(rows[t][h], at, a.inputs);
        }
    }
};

/* The rows of x as B operands: of each group row lane / 4, the inputs that the thread has of the weights. */
template <typename C>
struct x_loader {
    using T = typename C::T;
    const T *rows[C::GROUPS]; /* NULL: there is none */
    int32_t inputs;

    __device__ x_loader(const few_args &a, const T *x) : inputs(a.inputs) {
#pragma unroll
        for (int g = 0; g < C::GROUPS; g++) {
            const int row = g * COLUMNS + threadIdx.x % WARP_LANES / 4;
            rows[g] = row < a.rows ? x + row * a.x_stride : NULL;
        }
    }
    __device__ void load(uint4 (&eight)[C::CHUNKS][C::GROUPS], int32_t at) const {
#pragma unroll
        for (int k = 0; k < C::CHUNKS; k++) {
#pragma unroll
            for (int g = 0; g < C::GROUPS; g++)
                eight[k][g] = rows[g] ? load_eight<T, C::VECTORS>(rows[g], at + k * CHUNK, inputs)
                                      : make_uint4(0, 0, 0, 0);
        }
    }
};

/* The sums of the warps, which become results. */
template <typename C>
struct tile_sums {
    using T = typename C::T;
    float (*warps)[C::ROWS][C::PLACES]; /* [WARPS], shared */

    __device__ void leave(const float (&c)[C::TILES][C::GROUPS][4]) const {
        const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
#pragma unroll
        for (int t = 0; t < C::TILES; t++) {
#pragma unroll
            for (int g = 0; g < C::GROUPS; g++) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    warps[warp][g * COLUMNS + lane % 4 * 2 + e % 2][t * TILE + e / 2 * 8 + lane / 4] = c[t][g][e];
            }
        }
    }
    __device__ float of(const few_args &a, int row, int place, int32_t weight_row) const {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += warps[w][row][place];
        if (a.bias) sum += to_float(((const T *)a.bias)[weight_row]);
        return sum;
    }
    __device__ static float rounded(float x) { return to_float(from_float<T>(x)); }
    /* visit(n, row, o, output) for the results of this thread in a tile. */
    template <typename Visit>
    __device__ static void for_results(const few_args &a, int32_t tile, const Visit &visit) {
#pragma unroll
        for (int n = 0; n < C::ITEMS; n++) {
            const int i = threadIdx.x + n * THREADS, row = i / C::OUTPUTS, o = i % C::OUTPUTS;
            if (row < a.rows && tile * C::OUTPUTS + o < a.outputs) visit(n, row, o, tile * C::OUTPUTS + o);
        }
    }
    __device__ void store(const few_args &a, int32_t tile, const float (&before)[C::ITEMS]) const {
        for_results(a, tile, [&](int n, int row, int o, int32_t output) {
            const int place = C::GATED ? o / 8 * TILE + o % 8 : o;
            float value = of(a, row, place, output);
            if (C::GATED) value = silu<T>(rounded(value)) * rounded(of(a, row, place + 8, a.outputs + output));
            if (a.adds) value = before[n] + rounded(value);
            const int64_t at = blockIdx.y * a.out_batch_stride + row * a.out_stride + output;
            if (a.out_fp32) {
                ((float *)a.out)[at] = value;
            } else {
                ((T *)a.out)[at] = from_float<T>(value);
            }
        });
    }
};

template <typename C>
__global__ void __launch_bounds__(THREADS, 2) linear_few(const __grid_constant__ few_args a) {
    using T = typename C::T;
    extern __shared__ __align__(128) char shared[];
    const int32_t steps = (a.inputs + WARPS * SPAN - 1) / (WARPS * SPAN) * C::STEPS;
    const tile_sums<C> sums = {(float(*)[C::ROWS][C::PLACES])(shared + C::RING_BYTES)};
    weight_loader<C> weights(a, shared, steps);
#pragma unroll
    for (int s = 0; s < C::STAGES; s++) weights.load(s);
    const T *rows = (const T *)a.x + blockIdx.y * a.x_batch_stride;
    if constexpr (C::NORMED) {
        T *normed = (T *)(shared + C::RING_BYTES + C::SUM_BYTES);
        const row_norm<T, THREADS, CPA_CUDA_NORMED_INPUTS> norm(a.norm_weight, a.inputs);
        dependent_wait();
        dependent_allow();
        norm.apply(rows, a.norm_eps, normed);
        rows = normed;
    } else {
        dependent_wait();
        dependent_allow();
    }
    const x_loader<C> x(a, rows);
    uint4 next[C::CHUNKS][C::GROUPS];
    x.load(next, weights.begin_of(0));
    int stage = 0;
    for (int32_t tile = blockIdx.x; tile * C::OUTPUTS < a.outputs; tile += gridDim.x) {
        float c[C::TILES][C::GROUPS][4] = {}, before[C::ITEMS] = {};
        if (a.adds)
            sums.for_results(a, tile, [&](int n, int row, int, int32_t output) {
                before[n] = to_float(((const T *)a.out)[blockIdx.y * a.out_batch_stride + row * a.out_stride + output]);
            });
        for (int32_t i = 0; i < steps; i++) {
            uint4 eight[C::CHUNKS][C::GROUPS];
#pragma unroll
            for (int k = 0; k < C::CHUNKS; k++) {
#pragma unroll
                for (int g = 0; g < C::GROUPS; g++) eight[k][g] = next[k][g];
            }
            x.load(next, weights.begin_of(i + 1 < steps ? i + 1 : 0));
            copy_async_wait<C::STAGES - 1>();
#pragma unroll
            for (int k = 0; k < C::CHUNKS; k++) {
#pragma unroll
                for (int t = 0; t < C::TILES; t++) {
                    const uint4 upper = *(const uint4 *)weights.place(stage, k, t, 0);
                    const uint4 lower = *(const uint4 *)weights.place(stage, k, t, 1);
                    const uint32_t one[4] = {upper.x, lower.x, upper.y, lower.y};
                    const uint32_t two[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                    for (int g = 0; g < C::GROUPS; g++) {
                        mma<T>(c[t][g], one, eight[k][g].x, eight[k][g].y);
                        mma<T>(c[t][g], two, eight[k][g].z, eight[k][g].w);
                    }
                }
            }
            asm volatile("" ::: "memory"); /* the stage has been read */
            weights.load(stage);
            stage = stage + 1 == C::STAGES ? 0 : stage + 1;
        }
        sums.leave(c);
        __syncthreads();
        sums.store(a, tile, before);
        __syncthreads(); /* the sums have been read */
    }
}

template <typename C>
cpa_status launch(const few_args &a, unsigned batch, cpa_stream *stream) {
    static uint64_t prepared;
    const int tiles = (a.outputs + C::OUTPUTS - 1) / C::OUTPUTS, most = 2 * cpa_cuda_device_of(stream)->multiprocessors;
    cpa_status status = cpa_cuda_shared_memory(stream, (const void *)linear_few<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    return launch_early(linear_few<C>, dim3((unsigned)(tiles < most ? tiles : most), batch), THREADS, a, stream, "linear",
                        C::SHARED_BYTES);
}

/* With as many stages as fit. */
template <typename T, int TILES, int GROUPS, int CHUNKS, bool GATED, bool NORMED = false>
cpa_status launch_stages(const few_args &a, unsigned batch, cpa_stream *stream) {
    using three = config<T, TILES, GROUPS, CHUNKS, 3, true, GATED, NORMED>;
    using two = config<T, TILES, GROUPS, CHUNKS, 2, true, GATED, NORMED>;
    return cpa_cuda_fits(stream, (const void *)linear_few<three>, three::SHARED_BYTES) ? launch<three>(a, batch, stream)
                                                                                       : launch<two>(a, batch, stream);
}

template <typename T, bool GATED>
cpa_status launch_rows(const few_args &a, unsigned batch, bool vectors, cpa_stream *stream) {
    if (a.norm_weight) return launch_stages<T, 1, 1, 4, GATED, true>(a, batch, stream);
    if (!vectors) return launch<config<T, 1, 2, 1, 4, false, GATED, false>>(a, batch, stream);
    return a.rows <= COLUMNS ? launch_stages<T, 1, 1, 4, GATED>(a, batch, stream)
                             : launch_stages<T, 2, 2, 2, GATED>(a, batch, stream);
}

template <typename T>
cpa_status launch_gated(const few_args &a, unsigned batch, bool gated, bool vectors, cpa_stream *stream) {
    return gated ? launch_rows<T, true>(a, batch, vectors, stream) : launch_rows<T, false>(a, batch, vectors, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_linear_few(const cpa_linear_args *args, const cpa_linear_fusion *fusion,
                                          cpa_stream *stream) {
    static_assert(CPA_CUDA_FEW_ROWS <= 2 * COLUMNS, "what a CTA has places for");
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const few_args a = {(int32_t)args->rows,
                        args->inputs,
                        fusion->gated ? args->outputs / 2 : args->outputs,
                        args->x,
                        args->weight,
                        args->bias,
                        args->x_stride,
                        args->weight_stride,
                        args->out_stride,
                        args->out,
                        args->out_dtype == CPA_F32,
                        fusion->adds,
                        fusion->norm_weight,
                        fusion->norm_eps,
                        args->x_batch_stride,
                        args->weight_batch_stride,
                        args->out_batch_stride};
    const unsigned batch = args->batch > 1 ? (unsigned)args->batch : 1;
    const int64_t batch_strides = batch > 1 ? args->x_batch_stride | args->weight_batch_stride : 0;
    const bool vectors = in_vectors(args->dtype, args->x_stride | args->weight_stride | args->inputs | batch_strides,
                                    (uintptr_t)args->x | (uintptr_t)args->weight | (uintptr_t)fusion->norm_weight);
    if (a.norm_weight && (!vectors || a.rows > 1 || a.inputs > CPA_CUDA_NORMED_INPUTS))
        return cpa_cuda_unsupported(stream, "linear: no norm for rows that are not one, aligned and of few inputs",
                                    a.inputs);
    return args->dtype == CPA_BF16 ? launch_gated<__nv_bfloat16>(a, batch, fusion->gated != 0, vectors, stream)
                                   : launch_gated<__half>(a, batch, fusion->gated != 0, vectors, stream);
}
