/* index_write: a warp makes the key of a token and stores it in its slot. */
#include <math.h>

#include "kernels/cuda/indexer/index_row.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/kv_view.h"

namespace {

struct write_args {
    cpa_index_write_args a;
    char *memory;
    int64_t block_stride, token_stride, scales_at, slots; /* strides in bytes */
    int32_t dim, block_shift;
    float hadamard; /* dim^-0.5, or 0 */
    bool whole_k, whole_rows;
    cpa_cuda_bad_slot *bad_slot;
};

template <typename T, int W>
__global__ void __launch_bounds__(THREADS) index_write(const __grid_constant__ write_args w) {
    __shared__ float shared[WARPS][WARP_LANES * W];
    const cpa_index_write_args &a = w.a;
    const int32_t lane = threadIdx.x % WARP_LANES;
    const int64_t token = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP_LANES;
    float x[W];
    if (token >= a.tokens) return;
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    if (slot >= w.slots) {
        if (lane == 0 && atomicExch(&w.bad_slot->found, 1) == 0) w.bad_slot->token = token, w.bad_slot->slot = slot;
        return;
    }
    load_row<T, W>(x, (const T *)a.k + token * a.k_row_stride, w.dim, w.whole_k);
    const row_rotation<W> rotation(a.rope, a.positions, a.tokens, token);
    if (a.gamma) norm_row<W>(x, w.dim, a.gamma, a.beta, a.eps);
    finish_row<W>(x, w.dim, rotation, a.rope.table != NULL, w.hadamard, shared[threadIdx.x / WARP_LANES]);
    const int64_t offset = slot & ((1 << w.block_shift) - 1);
    char *block = w.memory + (slot >> w.block_shift) * w.block_stride, *row = block + offset * w.token_stride;
    if (a.cache.kv.dtype == CPA_BF16) {
        store_row<__nv_bfloat16, W>((__nv_bfloat16 *)row, narrow<__nv_bfloat16, W>(x), w.dim, w.whole_rows);
        return;
    }
    unit_of<uint8_t, W> codes;
    const float scale = row_codes<W>(codes, x, a.floor, a.scales_pow2);
    store_row<uint8_t, W>((uint8_t *)row, codes, w.dim, w.whole_rows);
    if (lane == 0) ((float *)(block + w.scales_at))[offset] = scale;
}

template <typename T, int W>
void launch(write_args &w, cpa_stream *stream) {
    const int64_t ctas = (w.a.tokens + WARPS - 1) / WARPS, strides = w.block_stride | w.token_stride;
    w.whole_k = lanes_are_aligned<T, W>(w.a.k, w.a.k_row_stride);
    w.whole_rows = w.a.cache.kv.dtype == CPA_BF16 ? lanes_are_aligned<__nv_bfloat16, W>(w.memory, strides / 2)
                                                  : lanes_are_aligned<uint8_t, W>(w.memory, strides);
    index_write<T, W><<<(unsigned)ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(w);
}

} // namespace

extern "C" cpa_status cpa_cuda_index_write(const cpa_index_write_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->cache.kv);
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, CPA_KEYS);
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->tokens > (int64_t)INT32_MAX * WARPS)
        return cpa_cuda_unsupported(stream, "index_write: more tokens than a grid has warps", args->tokens);
    write_args w = {};
    w.a = *args;
    w.memory = pool.memory;
    w.block_stride = pool.block_stride, w.token_stride = pool.token_stride, w.scales_at = pool.scales_at;
    w.slots = kv.num_blocks * kv.block_size;
    w.dim = kv.k_dim;
    w.block_shift = cpa_cuda_log2(kv.block_size);
    w.hadamard = args->cache.hadamard ? (float)(1 / sqrt((double)kv.k_dim)) : 0;
    w.bad_slot = ((cpa_cuda_stream *)stream)->bad_slot;
    launch_for_elements(args->dtype, [&](auto element) {
        launch_for_width(w.dim, [&](auto width) {
            launch<typename decltype(element)::element, decltype(width)::W>(w, stream);
        });
    });
    return cpa_cuda_launched(stream, "index_write");
}
