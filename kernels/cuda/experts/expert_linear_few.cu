/* Products of few places of each expert, in bf16 or fp16, by mma.sync at the speed of memory, and beside them, where asked
 * for, one of few rows with a matrix that all of them have, as shared experts are. A piece of work is TILE rows of weights
 * and up to ROWS places; a CTA has every so many-th piece, neighbours in time other outputs of the same places. Of the
 * inputs of a piece each warp has every WARPS-th span; the sums of the warps are added in the order of the warps. Weights
 * come as in nn/linear_few.cu: a thread copies to shared memory, STAGES steps ahead, what it alone reads, so that no
 * barrier is needed, and goes on to those of the next piece while one ends. The pieces beside come first, and what is
 * copied of them before the kernel in front has ended hides how experts are chosen.
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
constexpr int MOST_TILES = 512; /* of experts, that are listed */

/* Matrices of weights, and what they are multiplied by. */
struct few_matrix {
    const void *weight, *x;
    void *out;
    int64_t weight_stride, x_stride, out_stride;
    int32_t inputs, outputs; /* of a place; gated: there are twice as many rows of weights */
    int32_t pieces, steps;   /* pieces of a tile of places, and steps of a piece */
};

enum few_kind { OF_EXPERTS, BESIDE };

struct few_args {
    few_matrix of[2]; /* by few_kind */
    int32_t experts, rows, x_rows, beside_rows;
    int64_t expert_stride;
    const int32_t *offsets;
    const uint32_t *tokens;
    cpa_dtype out_dtype;
    int32_t beside_adds; /* out += the product beside, rounded */
    int32_t beside_turns; /* that a piece beside takes, in turns of a piece of experts */
};

template <typename Element, bool Gated, int Groups, int Stages>
struct config {
    using T = Element;
    static constexpr bool GATED = Gated;
    static constexpr int GROUPS = Groups, STAGES = Stages;
    static constexpr int ROWS = GROUPS * COLUMNS, OUTPUTS = GATED ? TILE / 2 : TILE;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES, SUM_BYTES = WARPS * ROWS * TILE * 4;
    static constexpr int SHARED_BYTES = RING_BYTES + SUM_BYTES + MOST_TILES * (int)sizeof(expert_tile);
    static_assert(ROWS * OUTPUTS <= THREADS, "a thread has a result");
};

/* Lists the tiles of all experts, by the lanes of a warp; returns how many there are. */
template <int ROWS>
__device__ int32_t list_tiles(const few_args &a, expert_tile *list) {
    const int lane = threadIdx.x % WARP_LANES;
    const int32_t range = (a.experts + WARP_LANES - 1) / WARP_LANES;
    const int32_t begin = min(a.experts, lane * range), end = min(a.experts, begin + range);
    int32_t own = 0, sum;
    for (int32_t e = begin; e < end; e++) own += (places_of(a.offsets, e, a.rows).places + ROWS - 1) / ROWS;
    sum = own;
    for (int step = 1; step < WARP_LANES; step *= 2) {
        const int32_t before = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += before;
    }
    int32_t at = sum - own;
    for (int32_t e = begin; e < end; e++) {
        const expert_tile all = places_of(a.offsets, e, a.rows);
        for (int32_t skipped = 0; skipped < all.places; skipped += ROWS)
            list[at++] = {e, all.first + skipped, min(ROWS, all.places - skipped)};
    }
    return __shfl_sync(0xffffffff, sum, WARP_LANES - 1);
}

struct few_piece {
    few_kind kind;
    expert_tile tile; /* beside: expert 0 */
    int32_t output;   /* its first */
};

/* The pieces of all CTAs: those beside, and behind them those of the tiles that are listed. A CTA has a piece each turn,
 * those with the numbers of the CTA, of it and all CTAs, and so on; where a piece beside takes more turns, what would be
 * the CTA's in these goes to the others. */
template <typename C>
struct few_pieces {
    const few_args &a;
    const expert_tile *const list;
    const int32_t beside;
    int32_t of_experts = 0;

    __device__ few_pieces(const few_args &a, const expert_tile *list)
        : a(a), list(list), beside((a.beside_rows + C::ROWS - 1) / C::ROWS * a.of[BESIDE].pieces) {}
    /* The number among those of experts. */
    __device__ int32_t index_of(int32_t piece) const {
        if (a.beside_turns <= 1) return piece - beside;
        const int32_t ctas = gridDim.x, turn = piece / ctas, cta = piece - turn * ctas;
        if (turn < a.beside_turns) return turn * (ctas - beside) + cta - beside;
        return a.beside_turns * (ctas - beside) + (turn - a.beside_turns) * ctas + cta;
    }
    __device__ bool has(int32_t piece) const { return piece < beside || index_of(piece) < of_experts; }
    __device__ int32_t next(int32_t piece) const {
        return piece + (piece < beside ? a.beside_turns : 1) * (int32_t)gridDim.x;
    }
    __device__ few_piece at(int32_t piece) const {
        const few_kind kind = piece < beside ? BESIDE : OF_EXPERTS;
        const int32_t index = kind == BESIDE ? piece : index_of(piece), of_tile = a.of[kind].pieces, t = index / of_tile;
        const int32_t output = (index - t * of_tile) * C::OUTPUTS;
        if (kind == OF_EXPERTS) return {kind, list[t], output};
        return {kind, {0, t * C::ROWS, min(C::ROWS, a.beside_rows - t * C::ROWS)}, output};
    }
    __device__ int32_t steps_of(int32_t piece) const { return a.of[piece < beside ? BESIDE : OF_EXPERTS].steps; }
};

/* Where the inputs of this thread begin in a step. */
__device__ inline int32_t begin_of(int32_t step) {
    return (step * WARPS + threadIdx.x / WARP_LANES) * SPAN + threadIdx.x % 4 * 8;
}

/* A thread's way through the weights of its CTA's pieces: of each chunk rows lane / 4 and 8 more of the tile, inputs
 * 8 * (lane % 4) and on. */
template <typename C>
struct weight_loader {
    using T = typename C::T;
    const few_args &a;
    const few_pieces<C> &pieces;
    char *const own; /* this thread's 16 bytes of the first part of the first stage */
    int32_t piece, step = 0, steps, inputs;
    const T *rows[2];

    __device__ weight_loader(const few_args &a, const few_pieces<C> &pieces, char *ring)
        : a(a), pieces(pieces), own(ring + threadIdx.x * 16), piece(blockIdx.x) {}
    __device__ char *place(int stage, int c, int h) const {
        return own + stage * STAGE_BYTES + (c * 2 + h) * 16 * THREADS;
    }
    __device__ void begin_piece() {
        const few_piece p = pieces.at(piece);
        const few_matrix &m = a.of[p.kind];
        const T *const weights = (const T *)m.weight + p.tile.expert * a.expert_stride;
        const int row = threadIdx.x % WARP_LANES / 4;
        steps = m.steps, inputs = m.inputs;
#pragma unroll
        for (int h = 0; h < 2; h++) { /* past the last output the last one's, which is not stored */
            const int32_t output = min(p.output + row + (C::GATED ? 0 : h * 8), m.outputs - 1);
            rows[h] = weights + ((C::GATED ? h * (int64_t)m.outputs : 0) + output) * m.weight_stride;
        }
    }
    /* The next step's weights, if there is one, to a stage; zeros behind the last input. */
    __device__ void load(int stage) {
        if (step > 0 || pieces.has(piece)) {
            if (step == 0) begin_piece();
            const int32_t begin = begin_of(step);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int32_t at = begin + c * CHUNK;
                const bool valid = at < inputs;
#pragma unroll
                for (int h = 0; h < 2; h++)
                    copy_async_16(shared_address(place(stage, c, h)), rows[h] + (valid ? at : 0), valid);
            }
            if (++step == steps) step = 0, piece = pieces.next(piece);
        }
        copy_async_commit();
    }
};

/* The rows of x of a piece as B operands: of each group row lane / 4. */
template <typename C>
struct x_rows {
    using T = typename C::T;
    static constexpr int64_t NONE = -2, ABSENT = -1; /* no place: zeros; one that x does not have: NaN */
    few_kind kind;
    int64_t rows[C::GROUPS];

    __device__ x_rows(const few_args &a, const few_pieces<C> &pieces, int32_t piece) : kind(OF_EXPERTS) {
#pragma unroll
        for (int g = 0; g < C::GROUPS; g++) rows[g] = NONE;
        if (!pieces.has(piece)) return;
        const few_piece p = pieces.at(piece);
        kind = p.kind;
#pragma unroll
        for (int g = 0; g < C::GROUPS; g++) {
            const int row = g * COLUMNS + threadIdx.x % WARP_LANES / 4;
            if (row >= p.tile.places) continue;
            rows[g] = p.tile.first + row;
            if (kind == BESIDE) continue;
            if (a.tokens) rows[g] = a.tokens[rows[g]];
            if (rows[g] >= a.x_rows) rows[g] = ABSENT;
        }
    }
    __device__ void load(uint4 (&eight)[CHUNKS][C::GROUPS], const few_args &a, int32_t step) const {
        const few_matrix &m = a.of[kind];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int32_t at = begin_of(step) + c * CHUNK;
#pragma unroll
            for (int g = 0; g < C::GROUPS; g++) {
                const uint32_t none = rows[g] == ABSENT ? 0x7fff7fff : 0;
                eight[c][g] = make_uint4(none, none, none, none);
                if (rows[g] >= 0 && at < m.inputs)
                    eight[c][g] = *(const uint4 *)((const T *)m.x + rows[g] * m.x_stride + at);
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

template <typename T>
__device__ inline float rounded(float x) {
    return to_float(from_float<T>(x));
}

/* The results of a piece, of the sums of all warps; shared is [WARPS][ROWS][TILE]. */
template <typename C>
__device__ void store(const few_args &a, const few_piece &p, const float (&sums)[C::GROUPS][4],
                      float (*shared)[C::ROWS][TILE]) {
    using T = typename C::T;
    const few_matrix &m = a.of[p.kind];
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int row = threadIdx.x / C::OUTPUTS, o = threadIdx.x % C::OUTPUTS;
    const bool adds = p.kind == BESIDE && a.beside_adds;
    const auto sum_of = [&](int at) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += shared[w][row][at];
        return sum;
    };
#pragma unroll
    for (int g = 0; g < C::GROUPS; g++) {
#pragma unroll
        for (int e = 0; e < 4; e++) shared[warp][g * COLUMNS + lane % 4 * 2 + e % 2][e / 2 * 8 + lane / 4] = sums[g][e];
    }
    __syncthreads();
    if (row < p.tile.places && p.output + o < m.outputs) {
        const int64_t at = (int64_t)(p.tile.first + row) * m.out_stride + p.output + o;
        float value = sum_of(o);
        if (C::GATED) value = silu<T>(rounded<T>(value)) * rounded<T>(sum_of(o + TILE / 2));
        if (adds) value = to_float(((const T *)m.out)[at]) + rounded<T>(value);
        write_element(m.out, a.out_dtype, at, value);
    }
    __syncthreads(); /* the sums have been read */
}

template <typename C>
__global__ void __launch_bounds__(THREADS, 2) expert_linear_few(const __grid_constant__ few_args a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int32_t tiles;
    float(*const of_warps)[C::ROWS][TILE] = (float(*)[C::ROWS][TILE])(shared + C::RING_BYTES);
    expert_tile *const list = (expert_tile *)(shared + C::RING_BYTES + C::SUM_BYTES);
    few_pieces<C> pieces(a, list);
    weight_loader<C> weights(a, pieces, shared);
    int stage = 0;
    for (; stage < C::STAGES && weights.piece < pieces.beside; stage++) weights.load(stage);
    dependent_wait();
    dependent_allow();
    if (threadIdx.x < WARP_LANES) {
        const int32_t listed = list_tiles<C::ROWS>(a, list);
        if (threadIdx.x == 0) tiles = listed;
    }
    __syncthreads();
    pieces.of_experts = tiles * a.of[OF_EXPERTS].pieces;
    for (; stage < C::STAGES; stage++) weights.load(stage);
    stage = 0;
    x_rows<C> x(a, pieces, blockIdx.x);
    uint4 next[CHUNKS][C::GROUPS];
    x.load(next, a, 0);
    for (int32_t piece = blockIdx.x; pieces.has(piece); piece = pieces.next(piece)) {
        float sums[C::GROUPS][4] = {};
        const x_rows<C> x_ahead(a, pieces, pieces.next(piece));
        const int32_t steps = pieces.steps_of(piece);
        for (int32_t step = 0; step < steps; step++) {
            uint4 eight[CHUNKS][C::GROUPS];
            const bool last = step + 1 == steps;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
                for (int g = 0; g < C::GROUPS; g++) eight[c][g] = next[c][g];
            }
            if (last) x = x_ahead;
            x.load(next, a, last ? 0 : step + 1);
            copy_async_wait<C::STAGES - 1>();
            multiply<C>(weights, stage, eight, sums);
            weights.load(stage);
            stage = stage + 1 == C::STAGES ? 0 : stage + 1;
        }
        store<C>(a, pieces.at(piece), sums, of_warps);
    }
}

template <typename C>
void count_pieces(few_matrix *m) {
    m->pieces = (m->outputs + C::OUTPUTS - 1) / C::OUTPUTS;
    m->steps = (m->inputs + WARPS * SPAN - 1) / (WARPS * SPAN);
}

template <typename C>
cpa_status launch(few_args a, cpa_stream *stream) {
    static uint64_t prepared;
    count_pieces<C>(&a.of[OF_EXPERTS]);
    count_pieces<C>(&a.of[BESIDE]);
    const int64_t beside = (a.beside_rows + C::ROWS - 1) / C::ROWS * (int64_t)a.of[BESIDE].pieces;
    const int64_t pieces = beside + most_expert_tiles(a.rows, a.experts, C::ROWS) * a.of[OF_EXPERTS].pieces;
    const int64_t most = 2 * cpa_cuda_device_of(stream)->multiprocessors;
    const int64_t ctas = pieces < most ? pieces : most;
    const int32_t turns = beside <= ctas ? a.of[BESIDE].steps / a.of[OF_EXPERTS].steps : 1;
    a.beside_turns = turns > 1 ? turns : 1;
    cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)expert_linear_few<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    return launch_early(expert_linear_few<C>, dim3((unsigned)ctas), THREADS, a, stream,
                        "expert_linear", C::SHARED_BYTES);
}

/* With as many stages as fit. */
template <typename T, bool GATED, int GROUPS>
cpa_status launch_stages(const few_args &a, cpa_stream *stream) {
    using six = config<T, GATED, GROUPS, 6>;
    using three = config<T, GATED, GROUPS, 3>;
    return cpa_cuda_fits(stream, (const void *)expert_linear_few<six>, six::SHARED_BYTES) ? launch<six>(a, stream)
                                                                                           : launch<three>(a, stream);
}

template <typename T>
cpa_status launch_rows(const few_args &a, bool gated, cpa_stream *stream) {
    const bool one = a.rows / a.experts <= COLUMNS / 2; /* group, which most experts fit in */
    if (gated) return one ? launch_stages<T, true, 1>(a, stream) : launch_stages<T, true, 2>(a, stream);
    return one ? launch_stages<T, false, 1>(a, stream) : launch_stages<T, false, 2>(a, stream);
}

} // namespace

extern "C" int cpa_cuda_expert_is_few(const cpa_expert_linear_args *a) {
    return a->rows / a->experts <= COLUMNS && most_expert_tiles(a->rows, a->experts, COLUMNS) <= MOST_TILES &&
           a->x_rows <= INT32_MAX;
}

extern "C" cpa_status cpa_cuda_expert_multiply_few(const cpa_expert_linear_args *args, const cpa_expert_fusion *fusion,
                                                   cpa_stream *stream) {
    const cpa_linear_args *b = fusion->beside;
    const int32_t parts = fusion->gated ? 2 : 1;
    few_args a = {};
    a.of[OF_EXPERTS] = {args->weight,     args->x,      args->out,            args->weight_stride, args->x_stride,
                        args->out_stride, args->inputs, args->outputs / parts};
    if (b)
        a.of[BESIDE] = {b->weight,   b->x,          b->out,    b->weight_stride,
                        b->x_stride, b->out_stride, b->inputs, b->outputs / parts};
    a.experts = args->experts;
    a.rows = (int32_t)args->rows;
    a.x_rows = (int32_t)args->x_rows;
    a.beside_rows = b ? (int32_t)b->rows : 0;
    a.expert_stride = args->expert_stride;
    a.offsets = args->offsets;
    a.tokens = args->tokens;
    a.out_dtype = args->out_dtype;
    a.beside_adds = fusion->beside_adds;
    return args->dtype == CPA_BF16 ? launch_rows<__nv_bfloat16>(a, parts > 1, stream)
                                   : launch_rows<__half>(a, parts > 1, stream);
}
