/* What the products of experts by wgmma share. A CTA makes OUTPUTS outputs of up to COLUMNS places of an expert, each
 * of its two consuming warpgroups half of the outputs: weights are A, rows of x are B, so that an expert's weights are
 * read once for all places that it has in the mean, and products are as wide as these, in steps of 16. There is a CTA for
 * each multiprocessor. The CTAs of a cluster make neighbouring outputs of the same places, and take every so many-th piece
 * of such work, neighbours in time other outputs of the same places.
 *
 * A producing warp fills a ring of stages of SPAN inputs by bulk tensor copies: weights, of which what is past the last
 * output or input is zeros, and rows of x, one after another where they are gathered. Each CTA copies its share of the
 * rows, to all of its cluster: what the L2 cache gives out bounds these products, and rows of x would be a third of it. A
 * stage is full once its bytes have come, and empty once each consuming warp of the cluster is done with it. The producer
 * goes on to the next piece while consumers store the results of one.
 *
 * A column of the product depends on its own row of x alone: rows behind the last place are left as they are, and a place
 * whose row x does not have gets its NaN from a row of NaN. */
#ifndef CPA_CUDA_EXPERT_HOPPER_CUH
#define CPA_CUDA_EXPERT_HOPPER_CUH

#include "base/check.h"
#include "kernels/cuda/attend/hopper.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/experts/expert_tiles.cuh"
#include "kernels/cuda/experts/expert_wgmma.cuh"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int CLUSTER = 2; /* CTAs of a cluster */
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / WARP_LANES;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
constexpr int SPAN = 64, STEP = 16;        /* inputs of a stage and of a wgmma */
constexpr int GROUP_ROWS = 64, GROUPS = 2; /* outputs of a wgmma, and how many times so many a warpgroup has */
constexpr int OWN_OUTPUTS = GROUPS * GROUP_ROWS, OUTPUTS = CONSUMERS * OWN_OUTPUTS;
constexpr int LINE = SPAN * 2;                      /* bytes of a row of x of a stage */
constexpr int TILE_ALIGNMENT = 1024;                /* of swizzled tiles */
constexpr int BOX_ROWS = 8;                         /* rows of x that a copy takes where they are not gathered */
constexpr int SUM_PLACES = 8, SUM_LINE = OWN_OUTPUTS + SUM_PAD; /* that a warpgroup transposes at once */

template <int N>
using group_sums = float[GROUPS][N / 2];

struct expert_args {
    cpa_cuda_expert_product product;
    CUtensorMap weights; /* of (input, output, expert): boxes of SPAN by OUTPUTS */
    CUtensorMap x;       /* of (input, row): boxes of SPAN by box_rows; zeros behind the last input */
    CUtensorMap absent;  /* the same, with boxes of a row, and NaN in rows that x does not have */
    int32_t box_rows;
};

/* A piece of work; expert -1: there is none left. */
struct expert_work {
    int32_t expert, first, places, output; /* its places are [first, first + places), `output` is the first one */
};

/* Behind Stages stages of weights, of WeightBytes bytes a weight, and of Columns rows of x. */
template <int WeightBytes, int Stages, int Columns>
struct expert_ring {
    static constexpr int STAGES = Stages, COLUMNS = Columns;
    static constexpr int WEIGHTS = OUTPUTS * SPAN * WeightBytes, STAGE_BYTES = WEIGHTS + COLUMNS * LINE;
    static_assert(STAGE_BYTES % TILE_ALIGNMENT == 0 && WEIGHTS % TILE_ALIGNMENT == 0, "tiles are aligned");
    static constexpr int WORKS = STAGES + 1; /* a piece has one stage or more, and consumers keep that of one more */

    float sums[CONSUMERS][SUM_PLACES][SUM_LINE];
    expert_work works[WORKS]; /* those of the stages in the ring, written before the first one is full */
    uint64_t full[STAGES], empty[STAGES];

    static constexpr int shared_bytes() { return STAGES * STAGE_BYTES + (int)sizeof(expert_ring) + TILE_ALIGNMENT; }
    __device__ void start() {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&full[i]), 1);
            barrier_init(shared_address(&empty[i]), CLUSTER * CONSUMER_WARPS);
        }
        barrier_init_fence();
    }
    /* Stages are counted from 0. */
    __device__ uint32_t tile(uint32_t n) const { return shared_address(this) - (STAGES - n % STAGES) * STAGE_BYTES; }
    __device__ uint32_t full_at(uint32_t n) { return shared_address(&full[n % STAGES]); }
    __device__ void wait_full(uint32_t n) { barrier_wait(full_at(n), n / STAGES & 1); }
    __device__ void wait_empty(uint32_t n) { barrier_wait(shared_address(&empty[n % STAGES]), (n / STAGES & 1) ^ 1); }
    /* By all lanes of a consuming warp; tells the whole cluster. */
    __device__ void release(uint32_t n) {
        const uint32_t cta = threadIdx.x % WARP_LANES;
        __syncwarp();
        if (cta < CLUSTER) barrier_arrive_in(shared_address(&empty[n % STAGES]), cta);
    }
};

/* ---- the producer ---- */

/* A piece of a CTA, and what a lane copies of its rows of x: every so many-th box of those of the cluster. */
template <class Ring>
struct produced_piece {
    static constexpr int BOXES = (Ring::COLUMNS + CLUSTER * WARP_LANES - 1) / (CLUSTER * WARP_LANES);
    static constexpr int32_t NONE = -2, ABSENT = -1; /* no box; a row that x does not have */
    expert_work work;
    int32_t rows[BOXES]; /* first row of each box */

    /* Pieces of the cluster are counted from 0. By all lanes of a warp. */
    __device__ produced_piece(const expert_args &args, int64_t index) {
        const cpa_expert_linear_args &a = args.product.args;
        const int32_t lane = threadIdx.x % WARP_LANES, rank = (int32_t)cluster_rank();
        const int32_t of_outputs = (a.outputs + CLUSTER * OUTPUTS - 1) / (CLUSTER * OUTPUTS);
        const expert_tile tile = find_expert_tile(a.offsets, a.experts, (int32_t)a.rows, Ring::COLUMNS,
                                                  (int32_t)min(index / of_outputs, (int64_t)INT32_MAX));
        const bool none = tile.expert < 0 || tile.places <= 0;
        work = {none ? -1 : tile.expert, tile.first, none ? 0 : tile.places,
                (int32_t)(index % of_outputs * CLUSTER + rank) * OUTPUTS};
#pragma unroll
        for (int n = 0; n < BOXES; n++) {
            const int32_t at = ((n * WARP_LANES + lane) * CLUSTER + rank) * args.box_rows;
            rows[n] = at < work.places ? (int32_t)row_of_place(a, work.first + at) : NONE;
        }
    }
    __device__ uint32_t x_bytes(int32_t box_rows) const {
        return (uint32_t)((work.places + box_rows - 1) / box_rows * box_rows * LINE);
    }
    /* This lane's boxes of inputs [at, at + SPAN), to the same place in all of the cluster. */
    __device__ void copy_x(const expert_args &args, uint32_t to, uint32_t barrier, int32_t at) const {
        const int32_t lane = threadIdx.x % WARP_LANES, rank = (int32_t)cluster_rank();
#pragma unroll
        for (int n = 0; n < BOXES; n++) {
            if (rows[n] == NONE) continue;
            const int32_t line = ((n * WARP_LANES + lane) * CLUSTER + rank) * args.box_rows;
            copy_box_to_pair(to + line * LINE, rows[n] == ABSENT ? &args.absent : &args.x, barrier, at,
                             rows[n] == ABSENT ? (int32_t)args.product.args.x_rows : rows[n], 0, 0);
        }
    }
};
static_assert(CLUSTER == 2, "copies go to pairs");

/* By a warp. */
template <class Ring>
__device__ void produce(const expert_args &args, Ring &ring) {
    const cpa_expert_linear_args &a = args.product.args;
    const int32_t steps = (a.inputs + SPAN - 1) / SPAN;
    const bool leads = threadIdx.x % WARP_LANES == 0;
    uint32_t n = 0, works = 0;
    int64_t index = blockIdx.x / CLUSTER;
    for (produced_piece<Ring> piece(args, index), next = piece;; piece = next, works++) {
        ring.wait_empty(n);
        if (leads) ring.works[works % Ring::WORKS] = piece.work;
        if (piece.work.expert < 0) break;
        const uint32_t bytes = Ring::WEIGHTS + piece.x_bytes(args.box_rows);
        for (int32_t step = 0; step < steps; step++, n++) {
            ring.wait_empty(n);
            if (leads) {
                barrier_expect(ring.full_at(n), bytes);
                copy_box(ring.tile(n), &args.weights, ring.full_at(n), step * SPAN, piece.work.output,
                         piece.work.expert, 0);
            }
            piece.copy_x(args, ring.tile(n) + Ring::WEIGHTS, ring.full_at(n), step * SPAN);
            if (step == 0) next = produced_piece<Ring>(args, index += gridDim.x / CLUSTER);
        }
    }
    __syncwarp();
    if (leads) barrier_arrive(ring.full_at(n)); /* a stage of no bytes, which brings the end */
}

/* ---- consumers ---- */

template <int N>
__device__ void hold(group_sums<N> &sums) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) wgmma_hold(sums[g]);
}

/* Of the output of sums[g][i] among those of its warpgroup; see wgmma.cuh. */
__device__ inline int output_of(int g, int i) {
    const int thread = threadIdx.x % WARPGROUP;
    return g * GROUP_ROWS + thread / WARP_LANES * 16 + thread % WARP_LANES / 4 + i / 2 % 2 * 8;
}

/* Four outputs of a place, from `o` on; in_fours: whole fours of a row lie at multiples of their size. */
template <typename T>
__device__ void store_four(const cpa_cuda_expert_product &p, bool in_fours, int64_t place, int32_t o,
                           const float *sums) {
    const cpa_expert_linear_args &a = p.args;
    const int64_t at = place * a.out_stride + o;
    if (in_fours && o + 4 <= a.outputs && !p.bias) {
        const float4 four = *(const float4 *)sums;
        if (a.out_dtype == CPA_F32)
            *(float4 *)((float *)a.out + at) = four;
        else
            *(uint2 *)((T *)a.out + at) = make_uint2(pack_pair<T>(four.x, four.y), pack_pair<T>(four.z, four.w));
        return;
    }
#pragma unroll 1
    for (int e = 0; e < min(4, a.outputs - o); e++) {
        const float bias = p.bias ? to_float(((const T *)p.bias)[o + e]) : 0;
        write_element(a.out, a.out_dtype, at + e, sums[e] + bias);
    }
}

/* The results of a warpgroup, of SUM_PLACES places after another by way of shared memory, so that neighbouring threads
 * store neighbouring outputs. */
template <typename T, int N>
__device__ void store(const cpa_cuda_expert_product &p, const expert_work &work, float (&shared)[SUM_PLACES][SUM_LINE],
                      const group_sums<N> &sums) {
    constexpr int LANES = 16; /* that store a place, each 4 outputs of each group */
    const int thread = threadIdx.x % WARPGROUP, consumer = threadIdx.x / WARPGROUP;
    const int32_t output = work.output + consumer * OWN_OUTPUTS + thread % LANES * 4;
    const int64_t four_bytes = 4 * element_bytes(p.args.out_dtype);
    const bool in_fours = ((int64_t)(uintptr_t)p.args.out | p.args.out_stride * four_bytes / 4) % four_bytes == 0;
#pragma unroll
    for (int n = 0; n < N / SUM_PLACES; n++) {
        const int place = n * SUM_PLACES + thread / LANES;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
#pragma unroll
            for (int i = 0; i < 4; i++) shared[thread % 4 * 2 + i % 2][output_of(g, i)] = sums[g][4 * n + i];
        }
        named_sync(1 + consumer, WARPGROUP);
        if (place < work.places) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                store_four<T>(p, in_fours, work.first + place, output + g * GROUP_ROWS,
                              &shared[thread / LANES][g * GROUP_ROWS + thread % LANES * 4]);
        }
        named_sync(1 + consumer, WARPGROUP);
    }
}

/* Visits the pieces of work of a CTA: multiply(work, n, sums) with the number of its first stage makes the sums. */
template <typename T, class Ring, typename Multiply>
__device__ void consume(const expert_args &args, Ring &ring, const Multiply &multiply) {
    const uint32_t steps = (args.product.args.inputs + SPAN - 1) / SPAN;
    for (uint32_t n = 0, works = 0;; n += steps, works++) {
        ring.wait_full(n);
        const expert_work work = ring.works[works % Ring::WORKS];
        if (__shfl_sync(0xffffffff, work.expert, 0) < 0) return;
        with_columns<Ring::COLUMNS>(__shfl_sync(0xffffffff, work.places, 0), [&](auto columns) {
            constexpr int N = decltype(columns)::value;
            group_sums<N> sums = {};
            multiply(work, n, sums);
            store<T, N>(args.product, work, ring.sums[threadIdx.x / WARPGROUP], sums);
        });
    }
}

/* A CTA: multiply as consume has it. */
template <typename T, class Ring, typename Multiply>
__device__ void run(const expert_args &args, char *shared, const Multiply &multiply) {
    const uint32_t first = shared_address(shared), skipped = (TILE_ALIGNMENT - first % TILE_ALIGNMENT) % TILE_ALIGNMENT;
    Ring &ring = *(Ring *)(shared + skipped + Ring::STAGES * Ring::STAGE_BYTES);
    if (threadIdx.x == 0) ring.start();
    cluster_sync();
    dependent_wait();
    dependent_allow();
    if (threadIdx.x / WARPGROUP == CONSUMERS) {
        registers_shrink<PRODUCER_REGISTERS>();
        if (threadIdx.x / WARP_LANES == CONSUMER_WARPS) produce(args, ring);
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        consume<T>(args, ring, [&](const expert_work &work, uint32_t n, auto &sums) { multiply(ring, work, n, sums); });
    }
    cluster_sync(); /* others may write here */
}

/* ---- on the host ---- */

/* A map of up to three dimensions, of boxes of SPAN inputs by so many rows. */
inline cpa_status encode_boxes(CUtensorMap *out, CUtensorMapDataType type, const void *matrices,
                               const cuuint64_t (&sizes)[3], const cuuint64_t (&steps)[2], cuuint32_t rows, bool nan,
                               cpa_stream *stream) {
    const cuuint64_t dims[] = {sizes[0], sizes[1], sizes[2], 1}, strides[] = {steps[0], steps[1], steps[1] * sizes[2]};
    const cuuint32_t box[] = {SPAN, rows, 1, 1}, every[] = {1, 1, 1, 1};
    const CUresult result = cpa_cuda_device_of(stream)->encode(
        out, type, 4, (void *)(uintptr_t)matrices, dims, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
        type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        nan ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA : CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return cpa_cuda_unsupported(stream, "expert_linear: cuTensorMapEncodeTiled failed with error", (int64_t)result);
    return CPA_OK;
}

inline cpa_status encode_maps(expert_args *args, cpa_stream *stream) {
    const cpa_expert_linear_args &a = args->product.args;
    const CUtensorMapDataType type =
        a.dtype == CPA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const cuuint64_t bytes = a.weight_scale ? 1 : 2, inputs = (cuuint64_t)a.inputs, x_row = (cuuint64_t)a.x_stride * 2;
    const cuuint64_t row = (cuuint64_t)a.weight_stride * bytes;
    const cuuint64_t matrix = a.experts > 1 ? (cuuint64_t)a.expert_stride * bytes : row * (cuuint64_t)a.outputs;
    const cuuint64_t of_weights[] = {inputs, (cuuint64_t)a.outputs, (cuuint64_t)a.experts}, weight_steps[] = {row, matrix};
    const cuuint64_t of_x[] = {inputs, (cuuint64_t)a.x_rows, 1}, x_steps[] = {x_row, x_row * (cuuint64_t)a.x_rows};
    args->box_rows = a.tokens || a.x_rows < a.rows ? 1 : BOX_ROWS;
    cpa_status status = encode_boxes(&args->weights, a.weight_scale ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : type, a.weight,
                                     of_weights, weight_steps, OUTPUTS, false, stream);
    if (status == CPA_OK)
        status = encode_boxes(&args->x, type, a.x, of_x, x_steps, (cuuint32_t)args->box_rows, false, stream);
    return status == CPA_OK ? encode_boxes(&args->absent, type, a.x, of_x, x_steps, 1, true, stream) : status;
}

template <class Ring>
cpa_status launch_persistent(void (*kernel)(expert_args), const cpa_cuda_expert_product &p, uint64_t *prepared,
                             cpa_stream *stream) {
    const cpa_expert_linear_args &a = p.args;
    const int64_t pieces = most_expert_tiles(a.rows, a.experts, Ring::COLUMNS) *
                           ((a.outputs + CLUSTER * OUTPUTS - 1) / (CLUSTER * OUTPUTS));
    const int64_t most = cpa_cuda_device_of(stream)->multiprocessors / CLUSTER;
    expert_args args = {p, {}, {}, {}, 0};
    cpa_status status = encode_maps(&args, stream);
    if (status == CPA_OK) status = cpa_cuda_shared_memory(stream, (const void *)kernel, Ring::shared_bytes(), prepared);
    if (status != CPA_OK) return status;
    return launch_early(kernel, dim3((unsigned)(pieces < most ? pieces : most) * CLUSTER), THREADS, args, stream,
                        "expert_linear", Ring::shared_bytes());
}

} // namespace

#endif
