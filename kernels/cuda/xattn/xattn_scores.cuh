/* What xattn_hopper.cu does with the scores of a tile: which keys a group of queries sees, statistics, sums of blocks,
 * and scores as they are. A thread has of the tile of its warpgroup what wgmma leaves it (wgmma.cuh): two rows, 8 apart,
 * and two neighbours of every 8 keys. */
#ifndef CPA_CUDA_XATTN_SCORES_CUH
#define CPA_CUDA_XATTN_SCORES_CUH

#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/xattn/xattn.h"

namespace {

constexpr int CONSUMERS = 2, WARPGROUP = 128, GROUP_ROWS = 64;
constexpr int Q_TILE = CONSUMERS * GROUP_ROWS, K_TILE = 256; /* groups */
constexpr int EIGHTS = K_TILE / 8;                           /* of the keys of a tile */

/* The tiles of a CTA. */
struct xattn_tiles {
    int32_t first_q, head; /* its first group of queries */
    int32_t count;         /* tiles of keys, the same for both CTAs of a pair */
    int64_t place;         /* of the block of its first group, in the sequence */

    __device__ void begin(const cpa_cuda_xattn_pass &p, int32_t first_tile, int32_t cta, int32_t of_head) {
        const cpa_xattn_chunks &c = p.chunks;
        const int32_t last = min((first_tile + 2) * Q_TILE, p.q_groups) - 1;
        const int64_t last_place = cpa_xattn_place(&p.shape, c.map, c.q_set, c.q_first, last / p.of_block);
        const int64_t seen = cpa_xattn_blocks_seen(&p.shape, &c, last_place);
        head = of_head;
        first_q = (first_tile + cta) * Q_TILE;
        count = (int32_t)((seen * p.of_block + K_TILE - 1) / K_TILE);
        place = cpa_xattn_place(&p.shape, c.map, c.q_set, c.q_first, min(first_q, last) / p.of_block);
    }
    /* Whether a group of the CTA may not see a key of the tile. */
    __device__ bool is_masked(const cpa_cuda_xattn_pass &p, int32_t tile) const {
        const int32_t end = (tile + 1) * K_TILE;
        if (end > p.k_groups) return true;
        return p.shape.causal && cpa_xattn_place(&p.shape, p.chunks.map, p.chunks.k_set, p.chunks.k_first,
                                                 (end - 1) / p.of_block) >= place;
    }
};

/* Sums of warps that share a block of queries. */
struct xattn_exchange {
    float sums[2][CONSUMERS][WARPGROUP / WARP_LANES][EIGHTS];
};

__device__ inline float quad_most(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float quad_total(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

/* The two rows of a thread: groups of queries. */
template <cpa_cuda_xattn_kind KIND>
struct tile_rows {
    int32_t group[2];         /* past the last one: none */
    int64_t at[2];            /* among those of all heads */
    float max[2], sum[2];     /* STATS: so far */
    float base[2];            /* SUMS: log2 of what exp2 of a score is divided by; +inf: the row has no share */
    float scale_log2;

    __device__ tile_rows(const cpa_cuda_xattn_pass &p, const xattn_tiles &tiles) {
        const int consumer = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
        scale_log2 = p.shape.scale * (float)M_LOG2E;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            group[half] = tiles.first_q + consumer * GROUP_ROWS + thread / WARP_LANES * 16 + thread % WARP_LANES / 4 +
                          8 * half;
            at[half] = tiles.head * (int64_t)p.q_groups + group[half];
            const bool exists = group[half] < p.q_groups;
            max[half] = -INFINITY, sum[half] = 0, base[half] = INFINITY;
            if (!exists || KIND == CPA_CUDA_XATTN_SCORES) continue;
            if (KIND == CPA_CUDA_XATTN_STATS) {
                if (p.resume) max[half] = p.max[at[half]], sum[half] = p.sum[at[half]];
            } else {
                const float of_row = p.sum[at[half]];
                if (of_row != 0) base[half] = p.max[at[half]] * (float)M_LOG2E + log2f(of_row);
            }
        }
    }
};

/* Keys that a row does not see become -inf. */
template <cpa_cuda_xattn_kind KIND>
__device__ void hide(float (&z)[K_TILE / 2], const cpa_cuda_xattn_pass &p, const tile_rows<KIND> &rows, int32_t tile) {
    const cpa_xattn_chunks &c = p.chunks;
    int64_t place[2];
    int32_t within[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t group = min(rows.group[half], p.q_groups - 1);
        place[half] = cpa_xattn_place(&p.shape, c.map, c.q_set, c.q_first, group / p.of_block);
        within[half] = group % p.of_block;
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        const int32_t first = tile * K_TILE + 8 * n, own = first + 2 * (threadIdx.x % 4);
        const int64_t of_keys =
            p.shape.causal ? cpa_xattn_place(&p.shape, c.map, c.k_set, c.k_first, first / p.of_block) : -1;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int32_t key = own + e % 2;
            const bool behind =
                of_keys > place[e / 2] || (of_keys == place[e / 2] && key % p.of_block > within[e / 2]);
            if (key >= p.k_groups || behind) z[4 * n + e] = -INFINITY;
        }
    }
}

/* Lane i gets the sum over all lanes of the element i % N; N is a power of two up to 32. */
template <int N>
__device__ float sum_transposed(float (&x)[N]) {
    const int lane = threadIdx.x % WARP_LANES;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) {
            const bool upper = lane & half;
            const float sent = upper ? x[i] : x[i + half], kept = upper ? x[i + half] : x[i];
            x[i] = kept + __shfl_xor_sync(0xffffffff, sent, half);
        }
    }
#pragma unroll
    for (int step = N; step < WARP_LANES; step *= 2) x[0] += __shfl_xor_sync(0xffffffff, x[0], step);
    return x[0];
}

__device__ inline void take_stats(float (&z)[K_TILE / 2], const cpa_cuda_xattn_pass &p,
                                  tile_rows<CPA_CUDA_XATTN_STATS> &rows) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -INFINITY, sum = 0;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) most = fmaxf(most, fmaxf(z[4 * n + 2 * half], z[4 * n + 2 * half + 1]));
        most = quad_most(most) * p.shape.scale;
        const float base = most == -INFINITY ? 0 : most * (float)M_LOG2E;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
            sum += exp2_fast(z[4 * n + 2 * half] * rows.scale_log2 - base) +
                   exp2_fast(z[4 * n + 2 * half + 1] * rows.scale_log2 - base);
        sum = quad_total(sum);
        const float larger = fmaxf(rows.max[half], most);
        rows.sum[half] = larger == -INFINITY ? rows.sum[half] + sum
                                             : rows.sum[half] * exp2f((rows.max[half] - larger) * (float)M_LOG2E) +
                                                   sum * exp2f((most - larger) * (float)M_LOG2E);
        rows.max[half] = larger;
    }
}

/* Stores the sum of block `block` of the tile, in a row of blocks. */
__device__ inline void store_sum(const cpa_cuda_xattn_pass &p, const xattn_tiles &tiles, int32_t q_group, int32_t block,
                                 int of_block, float sum) {
    if (q_group >= p.q_groups || block >= p.k_blocks) return;
    const int64_t row = tiles.head * (int64_t)p.q_blocks + q_group / of_block;
    p.out[row * p.row_stride + block] = sum;
}

template <int OF_BLOCK>
__device__ void take_sums(float (&z)[K_TILE / 2], const cpa_cuda_xattn_pass &p, const xattn_tiles &tiles,
                          const tile_rows<CPA_CUDA_XATTN_SUMS> &rows, int32_t tile, xattn_exchange &exchange) {
    constexpr int BLOCKS = K_TILE / OF_BLOCK, EACH = OF_BLOCK / 8; /* of a tile; eights of a block */
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES % 4;
    const int consumer = threadIdx.x / WARPGROUP - 1;
    const int32_t first_row = tiles.first_q + consumer * GROUP_ROWS + warp * 16, first_block = tile * BLOCKS;
    float sums[2][BLOCKS];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            sums[half][b] = 0;
#pragma unroll
            for (int n = b * EACH; n < (b + 1) * EACH; n++)
                sums[half][b] += exp2_fast(z[4 * n + 2 * half] * rows.scale_log2 - rows.base[half]) +
                                 exp2_fast(z[4 * n + 2 * half + 1] * rows.scale_log2 - rows.base[half]);
        }
    if constexpr (OF_BLOCK == 8) { /* each half of the warp's rows is a block */
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_sum(p, tiles, first_row + 8 * half, first_block + lane, OF_BLOCK, sum_transposed(sums[half]));
    } else {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) sums[0][b] += sums[1][b];
        float sum = sum_transposed(sums[0]);
        if constexpr (OF_BLOCK == 32) { /* those of two warps are one */
            float(&of_warps)[WARPGROUP / WARP_LANES][EIGHTS] = exchange.sums[tile % 2][consumer];
            if (lane < BLOCKS) of_warps[warp][lane] = sum;
            named_sync(1 + consumer, WARPGROUP);
            if (lane < BLOCKS && warp % 2 == 0) sum += of_warps[warp + 1][lane];
        }
        if (lane < BLOCKS && (OF_BLOCK != 32 || warp % 2 == 0))
            store_sum(p, tiles, first_row, first_block + lane, OF_BLOCK, sum);
    }
}

__device__ inline void take_scores(const float (&z)[K_TILE / 2], const cpa_cuda_xattn_pass &p,
                                   const tile_rows<CPA_CUDA_XATTN_SCORES> &rows, int32_t tile) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (rows.group[half] >= p.q_groups) continue;
        float *out = p.out + rows.at[half] * p.row_stride;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int32_t key = tile * K_TILE + 8 * n + 2 * (threadIdx.x % 4) + e;
                if (key < p.k_groups) out[key] = z[4 * n + 2 * half + e] * p.shape.scale;
            }
    }
}

template <cpa_cuda_xattn_kind KIND, int OF_BLOCK>
__device__ void take(float (&z)[K_TILE / 2], const cpa_cuda_xattn_pass &p, const xattn_tiles &tiles,
                     tile_rows<KIND> &rows, int32_t tile, xattn_exchange &exchange) {
    if constexpr (KIND == CPA_CUDA_XATTN_STATS) take_stats(z, p, rows);
    if constexpr (KIND == CPA_CUDA_XATTN_SUMS) take_sums<OF_BLOCK>(z, p, tiles, rows, tile, exchange);
    if constexpr (KIND == CPA_CUDA_XATTN_SCORES) take_scores(z, p, rows, tile);
}

/* What is left once all tiles are taken: statistics, and what no row of the CTA sees. */
template <cpa_cuda_xattn_kind KIND, int OF_BLOCK>
__device__ void finish(const cpa_cuda_xattn_pass &p, const xattn_tiles &tiles, const tile_rows<KIND> &rows) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (rows.group[half] >= p.q_groups) continue;
        if constexpr (KIND == CPA_CUDA_XATTN_STATS) {
            if (threadIdx.x % 4 != 0) continue;
            p.max[rows.at[half]] = rows.max[half];
            p.sum[rows.at[half]] = rows.sum[half];
        } else if constexpr (KIND == CPA_CUDA_XATTN_SCORES) {
            for (int32_t key = tiles.count * K_TILE + threadIdx.x % 4; key < p.k_groups; key += 4)
                p.out[rows.at[half] * p.row_stride + key] = -INFINITY;
        } else {
            if (rows.group[half] % OF_BLOCK != 0) continue; /* one quad for each block of queries */
            for (int32_t block = tiles.count * (K_TILE / OF_BLOCK) + threadIdx.x % 4; block < p.k_blocks; block += 4)
                store_sum(p, tiles, rows.group[half], block, OF_BLOCK, 0);
        }
    }
}

} // namespace

#endif
