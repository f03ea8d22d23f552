/* The passes of XAttention over chunks on compute capability 9.0: products of packed groups by wgmma, of which only what
 * is asked for leaves the multiprocessor. A CTA has 128 groups of queries of a head and walks through tiles of 256
 * groups of keys. Two CTAs of neighbouring queries are a cluster: each copies half of a tile of keys to both.
 *
 * A warp fills a ring of stages of 64 elements of each group; a stage is full when its bytes are there, and empty once
 * all warps that multiply, of both CTAs, are done with it. Each of two warpgroups has 64 groups of queries; while one
 * looks at its scores, the other goes on multiplying, as far as the ring reaches. */
#include <math.h>

#include "kernels/cuda/attend/hopper.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/xattn/xattn.h"
#include "kernels/cuda/xattn/xattn_scores.cuh"
#include "kernels/cuda/xattn/xattn_wgmma.cuh"

namespace {

constexpr int STAGES = 4, SPAN = 64, STEP = 16; /* stages; elements of a stage, and of a wgmma */
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP, PAIR = 2;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int LINE = SPAN * 2, Q_BYTES = Q_TILE * LINE, K_BYTES = K_TILE * LINE, STAGE_BYTES = Q_BYTES + K_BYTES;
constexpr int TILE_ALIGNMENT = 1024; /* of swizzled tiles */
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + TILE_ALIGNMENT;

struct hopper_pass {
    cpa_cuda_xattn_pass p;
    CUtensorMap q, k; /* of (element, group, head, 1), boxes of SPAN by BOX_GROUPS */
};
constexpr int BOX_GROUPS = K_TILE / PAIR;
static_assert(BOX_GROUPS == Q_TILE, "one box is the queries of a stage, or the half of its keys");

struct ring_barriers {
    uint64_t full[STAGES], empty[STAGES];
};

/* The n-th stage of all tiles, one behind the other. */
struct stage_place {
    uint32_t stage = 0, parity = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ void produce(const hopper_pass &args, const xattn_tiles &tiles, uint32_t shared, ring_barriers &ring,
                        uint32_t cta) {
    const int32_t steps = (args.p.width + SPAN - 1) / SPAN, kv_head = tiles.head / args.p.group;
    stage_place to;
    for (int32_t tile = 0; tile < tiles.count; tile++) {
        for (int32_t step = 0; step < steps; step++, to.advance()) {
            const uint32_t at = shared + to.stage * STAGE_BYTES, full = shared_address(&ring.full[to.stage]);
            barrier_wait(shared_address(&ring.empty[to.stage]), to.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            copy_box(at, &args.q, full, step * SPAN, tiles.first_q, tiles.head, 0);
            copy_box_to_pair(at + Q_BYTES + cta * (K_BYTES / PAIR), &args.k, full, step * SPAN,
                             tile * K_TILE + (int)cta * BOX_GROUPS, kv_head, 0);
        }
    }
}

/* z of a tile, not scaled yet; `from` moves behind its stages. */
template <typename Element>
__device__ void multiply(float (&z)[K_TILE / 2], int32_t steps, uint32_t shared, ring_barriers &ring,
                         stage_place &from) {
    const int consumer = threadIdx.x / WARPGROUP - 1;
    uint32_t before = 0;
    const auto release = [&](uint32_t stage) {
        if (threadIdx.x % WARP_LANES < PAIR)
            barrier_arrive_in(shared_address(&ring.empty[stage]), threadIdx.x % WARP_LANES);
    };
    for (int32_t step = 0; step < steps; step++, from.advance()) {
        const uint32_t at = shared + from.stage * STAGE_BYTES;
        barrier_wait(shared_address(&ring.full[from.stage]), from.parity);
        const uint64_t q = wgmma_descriptor(at + consumer * GROUP_ROWS * LINE, 0),
                       k = wgmma_descriptor(at + Q_BYTES, 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SPAN / STEP; i++)
            xattn_wgmma<Element>::multiply(z, wgmma_advance(q, i * STEP * 2), wgmma_advance(k, i * STEP * 2),
                                           step > 0 || i > 0);
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            release(before);
        }
        before = from.stage;
    }
    wgmma_wait<0>();
    wgmma_hold(z);
    release(before);
}

template <typename Element, cpa_cuda_xattn_kind KIND, int OF_BLOCK>
__device__ void consume(const hopper_pass &args, const xattn_tiles &tiles, uint32_t shared, ring_barriers &ring,
                        xattn_exchange &exchange) {
    const int32_t steps = (args.p.width + SPAN - 1) / SPAN;
    tile_rows<KIND> rows(args.p, tiles);
    stage_place from;
    float z[K_TILE / 2];
    for (int32_t tile = 0; tile < tiles.count; tile++) {
        multiply<Element>(z, steps, shared, ring, from);
        if (tiles.is_masked(args.p, tile)) hide<KIND>(z, args.p, rows, tile);
        take<KIND, OF_BLOCK>(z, args.p, tiles, rows, tile, exchange);
    }
    finish<KIND, OF_BLOCK>(args.p, tiles, rows);
}

template <typename Element, cpa_cuda_xattn_kind KIND, int OF_BLOCK>
__global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(THREADS, 1)
    xattn_hopper(const __grid_constant__ hopper_pass args) {
    extern __shared__ char memory[];
    __shared__ ring_barriers ring;
    __shared__ xattn_tiles tiles;
    __shared__ xattn_exchange exchange;
    const uint32_t shared = (shared_address(memory) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);
    const uint32_t cta = cluster_rank();
    if (threadIdx.x == 0) {
        /* The last queries, which see most, first. */
        tiles.begin(args.p, (int32_t)(gridDim.x / PAIR - 1 - blockIdx.x / PAIR) * PAIR, (int32_t)cta, blockIdx.y);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&ring.full[i]), 1);
            barrier_init(shared_address(&ring.empty[i]), PAIR * CONSUMERS * (WARPGROUP / WARP_LANES));
        }
        barrier_init_fence();
    }
    __syncthreads();
    cluster_sync(); /* both have their barriers */
    if (warpgroup == 0) {
        registers_shrink<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(args, tiles, shared, ring, cta);
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        consume<Element, KIND, OF_BLOCK>(args, tiles, shared, ring, exchange);
    }
    __syncwarp();
    cluster_sync(); /* the other is done with what is this one's */
}

/* ---- on the host ---- */

cpa_status encode(const cpa_cuda_xattn_pass &p, const void *memory, int32_t groups, int32_t heads, int64_t head_stride,
                  CUtensorMap *out, cpa_stream *stream) {
    const cuuint64_t row = (cuuint64_t)p.width * 2, head = (cuuint64_t)head_stride * 2;
    const cuuint64_t dims[] = {(cuuint64_t)p.width, (cuuint64_t)groups, (cuuint64_t)heads, 1};
    const cuuint64_t strides[] = {row, head, head};
    const cuuint32_t box[] = {SPAN, BOX_GROUPS, 1, 1}, steps[] = {1, 1, 1, 1};
    const CUtensorMapDataType type =
        p.shape.dtype == CPA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUresult result = cpa_cuda_device_of(stream)->encode(
        out, type, 4, (void *)(uintptr_t)memory, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return cpa_cuda_unsupported(stream, "xattn: cuTensorMapEncodeTiled failed with error", (int64_t)result);
    return CPA_OK;
}

template <typename Element, cpa_cuda_xattn_kind KIND, int OF_BLOCK>
cpa_status launch(const hopper_pass &args, cpa_stream *stream) {
    static uint64_t prepared;
    const int32_t pairs = (args.p.q_groups + PAIR * Q_TILE - 1) / (PAIR * Q_TILE);
    const cpa_status status = cpa_cuda_shared_memory(stream, (const void *)xattn_hopper<Element, KIND, OF_BLOCK>,
                                                     SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    xattn_hopper<Element, KIND, OF_BLOCK>
        <<<dim3(PAIR * pairs, args.p.shape.q_heads), THREADS, SHARED_BYTES, cpa_cuda_handle(stream)>>>(args);
    return cpa_cuda_launched(stream, "xattn");
}

/* Sums depend on the groups of a block. */
template <typename Element>
cpa_status launch_kind(const hopper_pass &args, cpa_stream *stream) {
    const cpa_cuda_xattn_pass &p = args.p;
    if (p.kind == CPA_CUDA_XATTN_STATS) return launch<Element, CPA_CUDA_XATTN_STATS, 0>(args, stream);
    if (p.kind == CPA_CUDA_XATTN_SCORES) return launch<Element, CPA_CUDA_XATTN_SCORES, 0>(args, stream);
    if (p.of_block == 8) return launch<Element, CPA_CUDA_XATTN_SUMS, 8>(args, stream);
    if (p.of_block == 16) return launch<Element, CPA_CUDA_XATTN_SUMS, 16>(args, stream);
    return launch<Element, CPA_CUDA_XATTN_SUMS, 32>(args, stream);
}

} // namespace

extern "C" int cpa_cuda_xattn_hopper_takes(const cpa_cuda_xattn_pass *pass, const cpa_stream *stream) {
    const uintptr_t places = (uintptr_t)pass->chunks.q | (uintptr_t)pass->chunks.k;
    const int32_t of_block = pass->of_block;
    return cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER && pass->shape.dtype != CPA_F32 && pass->k_groups > 0 &&
           (of_block == 8 || of_block == 16 || of_block == 32) && places % 16 == 0 && pass->chunks.k_stride % 8 == 0;
}

extern "C" cpa_status cpa_cuda_xattn_hopper(const cpa_cuda_xattn_pass *pass, cpa_stream *stream) {
    hopper_pass args = {*pass, {}, {}};
    cpa_status status = encode(*pass, pass->chunks.q, pass->q_groups, pass->shape.q_heads,
                               (int64_t)pass->q_groups * pass->width, &args.q, stream);
    if (status == CPA_OK)
        status = encode(*pass, pass->chunks.k, pass->k_groups, pass->shape.kv_heads, pass->chunks.k_stride, &args.k,
                        stream);
    if (status != CPA_OK) return status;
    return pass->shape.dtype == CPA_BF16 ? launch_kind<__nv_bfloat16>(args, stream) : launch_kind<__half>(args, stream);
}
