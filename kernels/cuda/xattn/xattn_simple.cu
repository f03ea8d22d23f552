/* The passes of XAttention over chunks for any dtype, width and block, in fp32 without tensor cores, and
 * xattn_merge_stats. A warp has a group of queries, or for sums a block of them and one of keys; its lanes share the
 * elements of a group. */
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/xattn/xattn.h"
#include "kernels/cuda/xattn/xattn_stats.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP_LANES;

/* z of a group of queries and one of keys, for all lanes. */
__device__ float score_of(const cpa_cuda_xattn_pass &p, int32_t head, int64_t i, int64_t j) {
    const int64_t q = (head * (int64_t)p.q_groups + i) * p.width;
    const int64_t k = head / p.group * p.chunks.k_stride + j * p.width;
    float dot = 0;
    for (int32_t d = threadIdx.x % WARP_LANES; d < p.width; d += WARP_LANES)
        dot += read_element(p.chunks.q, p.shape.dtype, q + d) * read_element(p.chunks.k, p.shape.dtype, k + d);
    return warp_sum(dot) * p.shape.scale;
}

__device__ int64_t place_of_q(const cpa_cuda_xattn_pass &p, int32_t block) {
    return cpa_xattn_place(&p.shape, p.chunks.map, p.chunks.q_set, p.chunks.q_first, block);
}

/* Of a block of keys: the groups that it has, and how it lies to a block of queries. */
struct key_block {
    int32_t first, all;
    bool behind, own; /* it lies behind the queries, or is theirs */

    __device__ key_block(const cpa_cuda_xattn_pass &p, int64_t place, int32_t block)
        : first(block * p.of_block), all(min(p.of_block, p.k_groups - first)), behind(false), own(false) {
        if (!p.shape.causal) return;
        const int64_t at = cpa_xattn_place(&p.shape, p.chunks.map, p.chunks.k_set, p.chunks.k_first, block);
        behind = at > place, own = at == place;
    }
    /* How many of them the `within`-th group of the queries sees. */
    __device__ int32_t seen(int32_t within) const { return behind ? 0 : own ? min(all, within + 1) : all; }
};

/* Statistics, or scores, of a group. */
__global__ void __launch_bounds__(THREADS) xattn_groups(const __grid_constant__ cpa_cuda_xattn_pass p) {
    const int32_t group = blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
    const int32_t head = blockIdx.y, lane = threadIdx.x % WARP_LANES;
    if (group >= p.q_groups) return;
    const int64_t place = place_of_q(p, group / p.of_block), at = head * (int64_t)p.q_groups + group;
    const int64_t blocks = cpa_xattn_blocks_seen(&p.shape, &p.chunks, place);
    const bool stats = p.kind == CPA_CUDA_XATTN_STATS;
    group_stats state = {-INFINITY, 0};
    if (stats && p.resume) state = {p.max[at], p.sum[at]};
    for (int32_t j = lane; !stats && j < p.k_groups; j += WARP_LANES) p.out[at * p.row_stride + j] = -INFINITY;
    __syncwarp();
    for (int32_t block = 0; block < blocks; block++) {
        const key_block keys(p, place, block);
        const int32_t seen = keys.seen(group % p.of_block);
        for (int32_t j = 0; j < seen; j++) {
            const float z = score_of(p, head, group, keys.first + j);
            if (stats) {
                state.fold(z, isnan(z) ? z : z > -INFINITY);
            } else if (lane == 0) {
                p.out[at * p.row_stride + keys.first + j] = z;
            }
        }
    }
    if (!stats || lane != 0) return;
    p.max[at] = state.max;
    p.sum[at] = state.sum;
}

/* Sums of a block of queries and one of keys. */
__global__ void __launch_bounds__(THREADS) xattn_blocks(const __grid_constant__ cpa_cuda_xattn_pass p) {
    const int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
    const int32_t q_block = (int32_t)(index / p.k_blocks), k_block = (int32_t)(index - (int64_t)q_block * p.k_blocks);
    const int32_t head = blockIdx.y, first = q_block * p.of_block;
    if (q_block >= p.q_blocks) return;
    const key_block keys(p, place_of_q(p, q_block), k_block);
    const int64_t stats = head * (int64_t)p.q_groups + first;
    float total = 0;
    for (int32_t i = 0; i < p.of_block && first + i < p.q_groups; i++) {
        const float max = p.max[stats + i], sum = p.sum[stats + i];
        const int32_t seen = sum == 0 ? 0 : keys.seen(i);
        float of_row = 0;
        for (int32_t j = 0; j < seen; j++) of_row += expf(score_of(p, head, first + i, keys.first + j) - max);
        if (seen > 0) total += of_row / sum;
    }
    if (threadIdx.x % WARP_LANES == 0)
        p.out[(head * (int64_t)p.q_blocks + q_block) * p.row_stride + k_block] = total;
}

__global__ void __launch_bounds__(THREADS) merge_stats(const __grid_constant__ cpa_xattn_merge_stats_args a) {
    for (int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x; row < a.rows; row += (int64_t)gridDim.x * THREADS) {
        group_stats state = {a.part_max[row], a.part_sum[row]};
        for (int32_t part = 1; part < a.n; part++)
            state.fold(a.part_max[part * a.part_stride + row], a.part_sum[part * a.part_stride + row]);
        a.max[row] = state.max;
        a.sum[row] = state.sum;
    }
}

unsigned ctas_of(int64_t n, int each) {
    const int64_t ctas = (n + each - 1) / each, most = INT32_MAX;
    return (unsigned)(ctas < most ? ctas : most);
}

} // namespace

extern "C" cpa_status cpa_cuda_xattn_simple(const cpa_cuda_xattn_pass *pass, cpa_stream *stream) {
    const cpa_cuda_xattn_pass p = *pass;
    const int64_t blocks = (int64_t)p.q_blocks * p.k_blocks;
    if (p.kind == CPA_CUDA_XATTN_SUMS) {
        xattn_blocks<<<dim3(ctas_of(blocks, WARPS), p.shape.q_heads), THREADS, 0, cpa_cuda_handle(stream)>>>(p);
    } else {
        xattn_groups<<<dim3(ctas_of(p.q_groups, WARPS), p.shape.q_heads), THREADS, 0, cpa_cuda_handle(stream)>>>(p);
    }
    return cpa_cuda_launched(stream, "xattn");
}

extern "C" cpa_status cpa_cuda_xattn_merge_stats(const cpa_xattn_merge_stats_args *args, cpa_stream *stream) {
    const cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    merge_stats<<<ctas_of(args->rows, THREADS), THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "xattn_merge_stats");
}
