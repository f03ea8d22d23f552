/* Products of few places of each expert, in bf16 or fp16, by mma.sync at the speed of memory. A piece of work is TILE rows
 * of an expert's weights and up to ROWS of its places; a CTA has every so many-th piece, neighbours in time other outputs
 * of the same places. Of the inputs of a piece each warp has every WARPS-th span; the sums of the warps are added in the
 * order of the warps. Weights come as in nn/linear_few.cu: a thread copies to shared memory, STAGES steps ahead, what it
 * alone reads, so that no barrier is needed, and goes on to those of the next piece while one ends.
 *
 * A place has the same bits whatever else its expert has, and however many rows of x a piece takes.
 *
 * Gated: the upper halves of tiles are gates, and the lower ones what they scale, whose weights lie behind those of all
 * gates; both are rounded, as swiglu reads them. */
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/experts/expert_tiles.cuh"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/cuda/nn/silu.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP_LANES;
constexpr int CHUNK = 32, CHUNKS = 2, SPAN = CHUNKS * CHUNK; /* inputs of two mma; of a warp in a step */
constexpr int TILE = 16, COLUMNS = 8;                         /* rows of weights, and of x, of a mma */
constexpr int STAGE_BYTES = CHUNKS * 2 * 16 * THREADS;
constexpr int MOST_TILES = 512; /* that are listed */

template <typename Element, bool Gated, int Groups, int Stages>
struct config {
    using T = Element;
    static constexpr bool GATED = Gated;
    static constexpr int GROUPS = Groups, STAGES = Stages;
    static constexpr int ROWS = GROUPS * COLUMNS, OUTPUTS = GATED ? TILE / 2 : TILE;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES, SUM_BYTES = WARPS * ROWS * TILE * 4;
    static_assert(ROWS * OUTPUTS <= THREADS, "a thread has a result");
    static constexpr int SHARED_BYTES = RING_BYTES + SUM_BYTES + MOST_TILES * (int)sizeof(expert_tile);
};

/* Lists the tiles of all experts, by the lanes of a warp; returns how many there are. */
template <int ROWS>
__device__ int32_t list_tiles(const cpa_expert_linear_args &a, expert_tile *list) {
    const int lane = threadIdx.x % WARP_LANES;
    const int32_t range = (a.experts + WARP_LANES - 1) / WARP_LANES, rows = (int32_t)a.rows;
    const int32_t begin = min(a.experts, lane * range), end = min(a.experts, begin + range);
    int32_t own = 0, sum;
    for (int32_t e = begin; e < end; e++) own += (places_of(a.offsets, e, rows).places + ROWS - 1) / ROWS;
    sum = own;
    for (int step = 1; step < WARP_LANES; step *= 2) {
        const int32_t before = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += before;
    }
    int32_t at = sum - own;
    for (int32_t e = begin; e < end; e++) {
        const expert_tile all = places_of(a.offsets, e, rows);
        for (int32_t skipped = 0; skipped < all.places; skipped += ROWS)
            list[at++] = {e, all.first + skipped, min(ROWS, all.places - skipped)};
    }
    return __shfl_sync(0xffffffff, sum, WARP_LANES - 1);
}

/* The pieces of all CTAs. */
template <typename C>
struct few_pieces {
    const expert_tile *list;
    int32_t outputs, of_outputs; /* results of a place, and pieces of a tile */
    int64_t count;
    int32_t steps; /* of a piece */

    __device__ few_pieces(const cpa_expert_linear_args &a, const expert_tile *list, int32_t tiles)
        : list(list), outputs(C::GATED ? a.outputs / 2 : a.outputs),
          of_outputs((outputs + C::OUTPUTS - 1) / C::OUTPUTS), count((int64_t)tiles * of_outputs),
          steps((a.inputs + WARPS * SPAN - 1) / (WARPS * SPAN)) {}
    __device__ const expert_tile &tile(int64_t piece) const { return list[piece / of_outputs]; }
    __device__ int32_t output(int64_t piece) const { return (int32_t)(piece % of_outputs) * C::OUTPUTS; }
    /* Where the inputs of this thread begin in a step. */
    static __device__ int32_t begin_of(int32_t step) {
        return (step * WARPS + threadIdx.x / WARP_LANES) * SPAN + threadIdx.x % 4 * 8;
    }
};

/* A thread's way through the weights of its CTA's pieces: of each chunk rows lane / 4 and 8 more of the tile, inputs
 * 8 * (lane % 4) and on. */
template <typename C>
struct weight_loader {
    using T = typename C::T;
    const cpa_expert_linear_args &a;
    const few_pieces<C> &pieces;
    char *const own; /* this thread's 16 bytes of the first part of the first stage */
    int64_t piece;
    int32_t step = 0;
    const T *rows[2];

    __device__ weight_loader(const cpa_expert_linear_args &a, const few_pieces<C> &pieces, char *ring)
        : a(a), pieces(pieces), own(ring + threadIdx.x * 16), piece(blockIdx.x) {
        begin_piece();
    }
    __device__ char *place(int stage, int c, int h) const {
        return own + stage * STAGE_BYTES + (c * 2 + h) * 16 * THREADS;
    }
    __device__ void begin_piece() {
        if (piece >= pieces.count) return;
        const T *const weights = (const T *)a.weight + pieces.tile(piece).expert * a.expert_stride;
        const int row = threadIdx.x % WARP_LANES / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) { /* past the last output the last one's, which is not stored */
            const int32_t output = min(pieces.output(piece) + row + (C::GATED ? 0 : h * 8), pieces.outputs - 1);
            rows[h] = weights + ((C::GATED ? h * (int64_t)pieces.outputs : 0) + output) * a.weight_stride;
        }
    }
    /* The next step's weights, if there is one, to a stage; zeros behind the last input. */
    __device__ void load(int stage) {
        if (piece < pieces.count) {
            const int32_t begin = pieces.begin_of(step);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int32_t at = begin + c * CHUNK;
                const bool valid = at < a.inputs;
#pragma unroll
                for (int h = 0; h < 2; h++)
                    copy_async_16(shared_address(place(stage, c, h)), rows[h] + (valid ? at : 0), valid);
            }
            if (++step == pieces.steps) step = 0, piece += gridDim.x, begin_piece();
        }
        copy_async_commit();
    }
};

/* The rows of x of a piece as B operands: of each group row lane / 4. */
template <typename C>
struct x_loader {
    using T = typename C::T;
    static constexpr int64_t NONE = -2, ABSENT = -1; /* no place: zeros; one that x does not have: NaN */
    const cpa_expert_linear_args &a;
    const few_pieces<C> &pieces;

    __device__ void find(int64_t (&rows)[C::GROUPS], int64_t piece) const {
#pragma unroll
        for (int g = 0; g < C::GROUPS; g++) {
            const int row = g * COLUMNS + threadIdx.x % WARP_LANES / 4;
            rows[g] = NONE;
            if (piece >= pieces.count) continue;
            const expert_tile &tile = pieces.tile(piece);
            if (row < tile.places) rows[g] = row_of_place(a, tile.first + row);
        }
    }
    __device__ void load(uint4 (&eight)[CHUNKS][C::GROUPS], const int64_t (&rows)[C::GROUPS], int32_t step) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int32_t at = pieces.begin_of(step) + c * CHUNK;
#pragma unroll
            for (int g = 0; g < C::GROUPS; g++) {
                const uint32_t none = rows[g] == ABSENT ? 0x7fff7fff : 0;
                eight[c][g] = make_uint4(none, none, none, none);
                if (rows[g] >= 0 && at < a.inputs)
                    eight[c][g] = *(const uint4 *)((const T *)a.x + rows[g] * a.x_stride + at);
            }
        }
    }
};

/* sums += the products of a stage. */
template <typename C>
__device__ void multiply(const weight_loader<C> &weights, int stage, const uint4 (&x)[CHUNKS][C::GROUPS],
                         float (&sums)[C::GROUPS][4]) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const uint4 upper = *(const uint4 *)weights.place(stage, c, 0);
        const uint4 lower = *(const uint4 *)weights.place(stage, c, 1);
        const uint32_t one[4] = {upper.x, lower.x, upper.y, lower.y};
        const uint32_t two[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
        for (int g = 0; g < C::GROUPS; g++) {
            mma<typename C::T>(sums[g], one, x[c][g].x, x[c][g].y);
            mma<typename C::T>(sums[g], two, x[c][g].z, x[c][g].w);
        }
    }
    asm volatile("" ::: "memory"); /* the stage has been read */
}

/* The results of a piece, of the sums of all warps; shared is [WARPS][ROWS][TILE]. */
template <typename C>
__device__ void store(const cpa_expert_linear_args &a, const few_pieces<C> &pieces, int64_t piece,
                      const float (&sums)[C::GROUPS][4], float (*shared)[C::ROWS][TILE]) {
    using T = typename C::T;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int row = threadIdx.x / C::OUTPUTS, o = threadIdx.x % C::OUTPUTS;
    const expert_tile &tile = pieces.tile(piece);
    const auto sum_of = [&](int at) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += shared[w][row][at];
        return sum;
    };
    const auto rounded = [](float x) { return to_float(from_float<T>(x)); };
#pragma unroll
    for (int g = 0; g < C::GROUPS; g++) {
#pragma unroll
        for (int e = 0; e < 4; e++) shared[warp][g * COLUMNS + lane % 4 * 2 + e % 2][e / 2 * 8 + lane / 4] = sums[g][e];
    }
    __syncthreads();
    if (row < tile.places && pieces.output(piece) + o < pieces.outputs) {
        const int64_t at = (int64_t)(tile.first + row) * a.out_stride + pieces.output(piece) + o;
        const float sum = sum_of(o);
        write_element(a.out, a.out_dtype, at, C::GATED ? silu<T>(rounded(sum)) * rounded(sum_of(o + TILE / 2)) : sum);
    }
    __syncthreads(); /* the sums have been read */
}

template <typename C>
__global__ void __launch_bounds__(THREADS, 2) expert_linear_few(const __grid_constant__ cpa_expert_linear_args a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int32_t tiles;
    float(*const of_warps)[C::ROWS][TILE] = (float(*)[C::ROWS][TILE])(shared + C::RING_BYTES);
    expert_tile *const list = (expert_tile *)(shared + C::RING_BYTES + C::SUM_BYTES);
    dependent_wait();
    dependent_allow();
    if (threadIdx.x < WARP_LANES) {
        const int32_t listed = list_tiles<C::ROWS>(a, list);
        if (threadIdx.x == 0) tiles = listed;
    }
    __syncthreads();
    const few_pieces<C> pieces(a, list, tiles);
    const x_loader<C> x = {a, pieces};
    weight_loader<C> weights(a, pieces, shared);
    uint4 next[CHUNKS][C::GROUPS];
    int64_t rows[C::GROUPS], rows_ahead[C::GROUPS];
#pragma unroll
    for (int s = 0; s < C::STAGES; s++) weights.load(s);
    x.find(rows, blockIdx.x);
    x.load(next, rows, 0);
    int stage = 0;
    for (int64_t piece = blockIdx.x; piece < pieces.count; piece += gridDim.x) {
        float sums[C::GROUPS][4] = {};
        x.find(rows_ahead, piece + gridDim.x);
        for (int32_t step = 0; step < pieces.steps; step++) {
            uint4 eight[CHUNKS][C::GROUPS];
            const bool last = step + 1 == pieces.steps;
#pragma unroll
            for (int g = 0; g < C::GROUPS; g++) {
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) eight[c][g] = next[c][g];
                if (last) rows[g] = rows_ahead[g];
            }
            x.load(next, rows, last ? 0 : step + 1);
            copy_async_wait<C::STAGES - 1>();
            multiply<C>(weights, stage, eight, sums);
            weights.load(stage);
            stage = stage + 1 == C::STAGES ? 0 : stage + 1;
        }
        store<C>(a, pieces, piece, sums, of_warps);
    }
}

template <typename C>
cpa_status launch(const cpa_expert_linear_args &a, cpa_stream *stream) {
    static uint64_t prepared;
    const int64_t tiles = most_expert_tiles(a.rows, a.experts, C::ROWS), most = 2 * cpa_cuda_device_of(stream)->multiprocessors;
    const int64_t pieces = tiles * (((C::GATED ? a.outputs / 2 : a.outputs) + C::OUTPUTS - 1) / C::OUTPUTS);
    cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)expert_linear_few<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    return launch_early(expert_linear_few<C>, dim3((unsigned)(pieces < most ? pieces : most)), THREADS, a, stream,
                        "expert_linear", C::SHARED_BYTES);
}

/* With as many stages as fit. */
template <typename T, bool GATED, int GROUPS>
cpa_status launch_stages(const cpa_expert_linear_args &a, cpa_stream *stream) {
    using six = config<T, GATED, GROUPS, 6>;
    using three = config<T, GATED, GROUPS, 3>;
    return cpa_cuda_fits(stream, (const void *)expert_linear_few<six>, six::SHARED_BYTES) ? launch<six>(a, stream)
                                                                                           : launch<three>(a, stream);
}

template <typename T>
cpa_status launch_rows(const cpa_expert_linear_args &a, bool gated, cpa_stream *stream) {
    const bool one = a.rows / a.experts <= COLUMNS / 2; /* group, which most experts fit in */
    if (gated) return one ? launch_stages<T, true, 1>(a, stream) : launch_stages<T, true, 2>(a, stream);
    return one ? launch_stages<T, false, 1>(a, stream) : launch_stages<T, false, 2>(a, stream);
}

} // namespace

extern "C" int cpa_cuda_expert_is_few(const cpa_expert_linear_args *a) {
    return a->rows / a->experts <= COLUMNS && most_expert_tiles(a->rows, a->experts, COLUMNS) <= MOST_TILES;
}

extern "C" cpa_status cpa_cuda_expert_multiply_few(const cpa_expert_linear_args *args, int gated, cpa_stream *stream) {
    return args->dtype == CPA_BF16 ? launch_rows<__nv_bfloat16>(*args, gated != 0, stream)
                                   : launch_rows<__half>(*args, gated != 0, stream);
}
