/* What the products of experts by wgmma share. A CTA makes OUTPUTS outputs of up to COLUMNS places of an expert, each
 * of its two consuming warpgroups half of the outputs: weights are A, rows of x are B, so that an expert's weights are
 * read once for all places that it has in the mean, and products are as wide as these, in steps of 16. There is a CTA for
 * each multiprocessor, which takes every so many-th piece of work, neighbours in time other outputs of the same places.
 *
 * A warpgroup of producers fills a ring of stages of SPAN inputs: weights by bulk tensor copies, which zero what is past
 * the last output or input, rows of x, gathered, by their threads' copies. A stage is full once the bytes of the one have
 * come and each producing warp has seen its own of the other; empty once each consuming warp is done with it. Producers
 * go on to the next piece while consumers store the results of one.
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
constexpr int PRODUCER_WARPS = WARPGROUP / WARP_LANES, CONSUMER_WARPS = CONSUMERS * PRODUCER_WARPS;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
constexpr int SPAN = 64, STEP = 16;        /* inputs of a stage and of a wgmma */
constexpr int GROUP_ROWS = 64, GROUPS = 2; /* outputs of a wgmma, and how many times so many a warpgroup has */
constexpr int OWN_OUTPUTS = GROUPS * GROUP_ROWS, OUTPUTS = CONSUMERS * OWN_OUTPUTS;
constexpr int LINE = SPAN * 2, VECTORS = LINE / 16; /* bytes, and vectors of 16 bytes, of a row of x of a stage */
constexpr int TILE_ALIGNMENT = 1024;                /* of swizzled tiles */
constexpr int LAG = 2; /* stages behind the one that they copy of which producers await their copies */
constexpr int SUM_PLACES = 8, SUM_LINE = OWN_OUTPUTS + SUM_PAD; /* that a warpgroup transposes at once */
constexpr int OUT_PLACES = 16, OUT_LINE = OWN_OUTPUTS + 8;      /* the same of 16-bit results, lines in other banks */

template <int N>
using group_sums = float[GROUPS][N / 2];

struct expert_args {
    cpa_cuda_expert_product product;
    CUtensorMap weights; /* of (input, output, expert): boxes of SPAN by OUTPUTS */
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
    static_assert(LAG <= STAGES - 2, "consumers give a stage back once they have begun with the next");

    union transposed {
        float sums[SUM_PLACES][SUM_LINE];
        uint16_t out[OUT_PLACES][OUT_LINE];
    };
    __align__(16) transposed results[CONSUMERS];
    expert_work works[WORKS]; /* those of the stages in the ring, written before the first one is full */
    uint64_t full[STAGES], empty[STAGES];

    static constexpr int shared_bytes() { return STAGES * STAGE_BYTES + (int)sizeof(expert_ring) + TILE_ALIGNMENT; }
    __device__ void start() {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&full[i]), PRODUCER_WARPS + 1);
            barrier_init(shared_address(&empty[i]), CONSUMER_WARPS);
        }
        barrier_init_fence();
    }
    /* Stages are counted from 0. */
    __device__ uint32_t tile(uint32_t n) const { return shared_address(this) - (STAGES - n % STAGES) * STAGE_BYTES; }
    __device__ uint32_t full_at(uint32_t n) { return shared_address(&full[n % STAGES]); }
    __device__ void wait_full(uint32_t n) { barrier_wait(full_at(n), n / STAGES & 1); }
    __device__ void wait_empty(uint32_t n) { barrier_wait(shared_address(&empty[n % STAGES]), (n / STAGES & 1) ^ 1); }
    /* By all lanes of a consuming warp. */
    __device__ void release(uint32_t n) {
        __syncwarp();
        if (threadIdx.x % WARP_LANES == 0) barrier_arrive(shared_address(&empty[n % STAGES]));
    }
};

/* ---- producers ---- */

__device__ const uint4 ROW_OF_NAN = {0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff}; /* bf16 or fp16 */

/* What a thread copies of the rows of x: a vector of every ROWS-th of them. */
template <typename T, int COLUMNS>
struct x_loader {
    static constexpr int ROWS = WARPGROUP / VECTORS, COPIES = COLUMNS / ROWS;
    static_assert(ROWS % 8 == 0, "the swizzle of all copies is the same");
    const cpa_expert_linear_args &a;
    int own;               /* rows of the tile that this thread copies of */
    const T *rows[COPIES]; /* NULL: NaN */

    __device__ x_loader(const cpa_expert_linear_args &a, const expert_tile &tile) : a(a) {
        const int thread = threadIdx.x % WARPGROUP;
        own = (tile.places - thread / VECTORS + ROWS - 1) / ROWS;
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            const int64_t row = n < own ? row_of_place(a, tile.first + thread / VECTORS + n * ROWS) : -1;
            rows[n] = row >= 0 ? (const T *)a.x + row * a.x_stride : NULL;
        }
    }
    /* Inputs [at, at + SPAN), zeros behind the last; the number of inputs is a multiple of a vector. */
    __device__ void load(uint32_t stage, int32_t at) const {
        const int thread = threadIdx.x % WARPGROUP;
        const int32_t input = at + thread % VECTORS * 8;
        const uint32_t to = stage + swizzled<SPAN>(thread / VECTORS, thread % VECTORS);
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            if (n < own)
                copy_async_16(to + n * ROWS * LINE, rows[n] ? (const void *)(rows[n] + input) : &ROW_OF_NAN,
                              input < a.inputs);
        }
    }
};

/* Waits for this warp's copies but those of the last LEFT stages, and says that they are in [first, end). */
template <int LEFT, class Ring>
__device__ void tell_full(Ring &ring, uint32_t first, uint32_t end) {
    copy_async_wait<LEFT>();
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % WARP_LANES != 0) return;
    for (uint32_t n = first; n != end; n++) barrier_arrive(ring.full_at(n));
}

template <typename T, class Ring>
__device__ void produce(const expert_args &args, Ring &ring) {
    const cpa_expert_linear_args &a = args.product.args;
    const int32_t steps = (a.inputs + SPAN - 1) / SPAN, of_outputs = (a.outputs + OUTPUTS - 1) / OUTPUTS;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    uint32_t n = 0, works = 0;
    for (int64_t index = blockIdx.x;; index += gridDim.x) {
        const expert_tile tile = find_expert_tile(a.offsets, a.experts, (int32_t)a.rows, Ring::COLUMNS,
                                                  (int32_t)min(index / of_outputs, (int64_t)INT32_MAX));
        const bool none = tile.expert < 0 || tile.places <= 0;
        const int32_t output = (int32_t)(index % of_outputs) * OUTPUTS;
        const x_loader<T, Ring::COLUMNS> x(a, none ? expert_tile{-1, 0, 0} : tile);
        ring.wait_empty(n);
        if (leader) ring.works[works % Ring::WORKS] = {none ? -1 : tile.expert, tile.first, tile.places, output};
        works++;
        if (none) break;
        for (int32_t step = 0; step < steps; step++, n++) {
            ring.wait_empty(n);
            if (leader) {
                barrier_expect(ring.full_at(n), Ring::WEIGHTS);
                copy_box(ring.tile(n), &args.weights, ring.full_at(n), step * SPAN, output, tile.expert, 0);
            }
            x.load(ring.tile(n) + Ring::WEIGHTS, step * SPAN);
            copy_async_commit();
            tell_full<LAG>(ring, n >= LAG ? n - LAG : 0, n >= LAG ? n - LAG + 1 : 0);
        }
    }
    if (leader) barrier_arrive(ring.full_at(n)); /* a stage of no weights, which brings the end */
    tell_full<0>(ring, n >= LAG ? n - LAG : 0, n + 1);
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

/* Four matrices of 8 outputs by 8 places, of which a lane has what mma has of results, to lines of places. */
__device__ inline void store_matrices(uint32_t address, const uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

/* Whether results are 16-bit elements in vectors of 16 bytes, which nothing is added to. */
template <typename T>
__device__ bool is_in_vectors(const cpa_cuda_expert_product &p) {
    const cpa_expert_linear_args &a = p.args;
    const int64_t places = (int64_t)(uintptr_t)a.out | a.out_stride * (int64_t)sizeof(T) | a.outputs * (int64_t)sizeof(T);
    return a.out_dtype != CPA_F32 && !p.bias && places % 16 == 0;
}

/* The results of a warpgroup that are in vectors, of OUT_PLACES places after another by way of shared memory, so that
 * neighbouring threads store neighbouring vectors. */
template <typename T, int N>
__device__ void store_vectors(const cpa_expert_linear_args &a, const expert_work &work,
                              uint16_t (&shared)[OUT_PLACES][OUT_LINE], const group_sums<N> &sums) {
    constexpr int VECTORS_OF_PLACE = OWN_OUTPUTS / VECTOR<T>, ROWS = WARPGROUP / VECTORS_OF_PLACE;
    static_assert(N % OUT_PLACES == 0, "columns are whole sixteens");
    const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP_LANES, consumer = threadIdx.x / WARPGROUP;
    const int own = thread / WARP_LANES * 16 + lane / 8 % 2 * 8, line = lane / 16 * 8 + lane % 8;
    const int32_t output = work.output + consumer * OWN_OUTPUTS + thread % VECTORS_OF_PLACE * VECTOR<T>;
    T *const out = (T *)a.out + work.first * a.out_stride + output;
#pragma unroll
    for (int n = 0; n < N / OUT_PLACES; n++) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const uint32_t matrices[4] = {pack_pair<T>(sums[g][8 * n], sums[g][8 * n + 1]),
                                          pack_pair<T>(sums[g][8 * n + 2], sums[g][8 * n + 3]),
                                          pack_pair<T>(sums[g][8 * n + 4], sums[g][8 * n + 5]),
                                          pack_pair<T>(sums[g][8 * n + 6], sums[g][8 * n + 7])};
            store_matrices(shared_address(&shared[line][g * GROUP_ROWS + own]), matrices);
        }
        named_sync(1 + consumer, WARPGROUP);
#pragma unroll
        for (int row = thread / VECTORS_OF_PLACE; row < OUT_PLACES; row += ROWS) {
            const int place = n * OUT_PLACES + row;
            if (place < work.places && output < a.outputs)
                *(uint4 *)(out + place * a.out_stride) =
                    *(const uint4 *)&shared[row][thread % VECTORS_OF_PLACE * VECTOR<T>];
        }
        named_sync(1 + consumer, WARPGROUP);
    }
}

/* Any results of a warpgroup, of SUM_PLACES places after another in the same way. */
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
    const bool in_vectors = is_in_vectors<T>(args.product);
    for (uint32_t n = 0, works = 0;; n += steps, works++) {
        ring.wait_full(n);
        const expert_work work = ring.works[works % Ring::WORKS];
        if (__shfl_sync(0xffffffff, work.expert, 0) < 0) return;
        with_columns<Ring::COLUMNS>(__shfl_sync(0xffffffff, work.places, 0), [&](auto columns) {
            constexpr int N = decltype(columns)::value;
            group_sums<N> sums = {};
            multiply(work, n, sums);
            auto &results = ring.results[threadIdx.x / WARPGROUP];
            if (in_vectors)
                store_vectors<T, N>(args.product.args, work, results.out, sums);
            else
                store<T, N>(args.product, work, results.sums, sums);
        });
    }
}

/* A CTA: multiply as consume has it. */
template <typename T, class Ring, typename Multiply>
__device__ void run(const expert_args &args, char *shared, const Multiply &multiply) {
    const uint32_t first = shared_address(shared), skipped = (TILE_ALIGNMENT - first % TILE_ALIGNMENT) % TILE_ALIGNMENT;
    Ring &ring = *(Ring *)(shared + skipped + Ring::STAGES * Ring::STAGE_BYTES);
    if (threadIdx.x == 0) ring.start();
    __syncthreads();
    dependent_wait();
    dependent_allow();
    if (threadIdx.x / WARPGROUP == CONSUMERS) {
        registers_shrink<PRODUCER_REGISTERS>();
        produce<T>(args, ring);
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        consume<T>(args, ring, [&](const expert_work &work, uint32_t n, auto &sums) { multiply(ring, work, n, sums); });
    }
}

/* ---- on the host ---- */

inline cpa_status encode_weights(const cpa_expert_linear_args &a, CUtensorMap *out, cpa_stream *stream) {
    const cuuint64_t bytes = a.weight_scale ? 1 : 2, row = (cuuint64_t)a.weight_stride * bytes;
    const cuuint64_t matrix = a.experts > 1 ? (cuuint64_t)a.expert_stride * bytes : row * (cuuint64_t)a.outputs;
    const cuuint64_t dims[] = {(cuuint64_t)a.inputs, (cuuint64_t)a.outputs, (cuuint64_t)a.experts, 1};
    const cuuint64_t strides[] = {row, matrix, matrix * (cuuint64_t)a.experts};
    const cuuint32_t box[] = {SPAN, OUTPUTS, 1, 1}, steps[] = {1, 1, 1, 1};
    const CUtensorMapDataType type = a.weight_scale        ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                     : a.dtype == CPA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUresult result = cpa_cuda_device_of(stream)->encode(
        out, type, 4, (void *)(uintptr_t)a.weight, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        a.weight_scale ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return cpa_cuda_unsupported(stream, "expert_linear: cuTensorMapEncodeTiled failed with error", (int64_t)result);
    return CPA_OK;
}

template <class Ring>
cpa_status launch_persistent(void (*kernel)(expert_args), const cpa_cuda_expert_product &p, uint64_t *prepared,
                             cpa_stream *stream) {
    const cpa_expert_linear_args &a = p.args;
    const int64_t pieces = most_expert_tiles(a.rows, a.experts, Ring::COLUMNS) * ((a.outputs + OUTPUTS - 1) / OUTPUTS);
    const int64_t most = cpa_cuda_device_of(stream)->multiprocessors;
    expert_args args = {p, {}};
    cpa_status status = encode_weights(a, &args.weights, stream);
    if (status == CPA_OK) status = cpa_cuda_shared_memory(stream, (const void *)kernel, Ring::shared_bytes(), prepared);
    if (status != CPA_OK) return status;
    return launch_early(kernel, dim3((unsigned)(pieces < most ? pieces : most)), THREADS, args, stream,
                        "expert_linear", Ring::shared_bytes());
}

} // namespace

#endif
