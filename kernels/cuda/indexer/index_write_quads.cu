/* index_write of the common form: a warp makes the keys of eight tokens at a time, of which the next, and their angles,
 * are on their way meanwhile. */
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/indexer/index_quad.cuh"
#include "kernels/cuda/indexer/index_quads.h"
#include "kernels/cuda/nn/nn.h"
#include "kernels/kv_view.h"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP_LANES, CTAS_OF_MULTIPROCESSOR = 4;

struct write_args {
    cpa_index_write_args a;
    char *memory;
    int64_t block_stride, token_stride, scales_at, slots; /* strides in bytes */
    int32_t block_shift;
    cpa_cuda_bad_slot *bad_slot;
};

/* What a quad reads of its token, which is on its way while the one before is made. */
template <quad_turn TURN>
struct raw_token {
    raw_row k;
    quad_angles<TURN> angles;
    int64_t slot;
    int32_t position; /* in the table */

    __device__ void load(const cpa_index_write_args &a, int32_t token) {
        slot = __ldg(a.slot_mapping + token);
        load_row(k, (const __nv_bfloat16 *)a.k + token * a.k_row_stride);
    }
};

/* The slot, -1 where that is none. */
__device__ int64_t checked_slot(const write_args &w, int32_t token, int64_t slot) {
    if (slot < w.slots) return slot;
    if (quad_lane() == 0 && atomicExch(&w.bad_slot->found, 1) == 0)
        w.bad_slot->token = token, w.bad_slot->slot = slot;
    return -1;
}

__device__ void store_key(const write_args &w, packed_row &x, int64_t slot) {
    const int64_t offset = slot & ((1 << w.block_shift) - 1);
    char *block = w.memory + (slot >> w.block_shift) * w.block_stride;
    const float scale = store_row_codes((uint8_t *)block + offset * w.token_stride, x, w.a.floor, slot >= 0);
    if (slot >= 0 && quad_lane() == 0) ((float *)(block + w.scales_at))[offset] = scale;
}

template <quad_turn TURN>
__global__ void __launch_bounds__(THREADS, CTAS_OF_MULTIPROCESSOR)
    index_write_quads(const __grid_constant__ write_args w) {
    __shared__ float4 gamma[ROW / 4], beta[ROW / 4];
    const cpa_index_write_args &a = w.a;
    const int32_t last = (int32_t)a.tokens - 1, apart = (int32_t)gridDim.x * WARPS * ROWS;
    int32_t first = (int32_t)(blockIdx.x * WARPS + threadIdx.x / WARP_LANES) * ROWS;
    if (a.gamma) {
        ((float *)gamma)[threadIdx.x] = a.gamma[threadIdx.x], ((float *)beta)[threadIdx.x] = a.beta[threadIdx.x];
        __syncthreads();
    }
    raw_token<TURN> raw;
    const auto position_of = [&](int32_t token) {
        return position_in_table(a.rope, __ldg(a.positions + min(token, last)));
    };
    int32_t next_position = position_of(first + quad_of_warp() + apart);
    raw.position = position_of(first + quad_of_warp());
    raw.load(a, min(first + quad_of_warp(), last));
    raw.angles.load(a.rope, raw.position);
#pragma unroll 1
    for (; first <= last; first += apart) {
        const int32_t token = first + quad_of_warp();
        const int64_t slot = token > last ? -1 : checked_slot(w, token, raw.slot);
        quad_row x;
        packed_row packed;
        widen_row(x, raw.k);
        raw.load(a, min(token + apart, last));
        if (a.gamma) norm_row(x, a.eps, gamma, beta);
        raw.angles.turn(x);
        const int32_t position = raw.position;
        raw.position = next_position;
        raw.angles.load(a.rope, raw.position);
        next_position = position_of(token + 2 * apart);
        round_parts<0, PARTS>(x);
        finish_row(packed, x, position);
        store_key(w, packed, slot);
    }
}

} // namespace

extern "C" int cpa_cuda_index_write_by_quads(const cpa_index_write_args *a) {
    const cpa_kv_view kv = cpa_kv_view_resolve(a->cache.kv);
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, CPA_KEYS);
    const uint64_t places = (uintptr_t)a->k | (uint64_t)a->k_row_stride * 2;
    const uint64_t stores = (uintptr_t)pool.memory | (uint64_t)pool.block_stride | (uint64_t)pool.token_stride;
    return a->dtype == CPA_BF16 && kv.dtype == CPA_FP8_E4M3 && kv.k_dim == ROW && a->cache.hadamard && a->scales_pow2 &&
           places % 16 == 0 && stores % 8 == 0 && a->tokens <= INT32_MAX / 4 && quad_turn_of(a->rope) != QUAD_OTHER;
}

extern "C" cpa_status cpa_cuda_index_write_quads(const cpa_index_write_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->cache.kv);
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, CPA_KEYS);
    const write_args w = {*args,
                          pool.memory,
                          pool.block_stride,
                          pool.token_stride,
                          pool.scales_at,
                          kv.num_blocks * kv.block_size,
                          cpa_cuda_log2(kv.block_size),
                          ((cpa_cuda_stream *)stream)->bad_slot};
    const int64_t ctas = (args->tokens + WARPS * ROWS - 1) / (WARPS * ROWS);
    const int64_t most = cpa_cuda_device_of(stream)->multiprocessors * CTAS_OF_MULTIPROCESSOR;
    launch_for_quad_turn(quad_turn_of(args->rope), [&](auto tag) {
        index_write_quads<decltype(tag)::TURN>
            <<<(unsigned)(ctas < most ? ctas : most), THREADS, 0, cpa_cuda_handle(stream)>>>(w);
    });
    return cpa_cuda_launched(stream, "index_write");
}
