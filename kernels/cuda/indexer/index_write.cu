/* index_write: a warp makes the keys of several tokens at a time and stores them in their slots; then those of others,
 * which it has read meanwhile. */
#include <math.h>

#include "kernels/cuda/indexer/index_quads.h"
#include "kernels/cuda/indexer/index_turn.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/kv_view.h"

namespace {

struct write_args {
    cpa_index_write_args a;
    char *memory;
    int64_t block_stride, token_stride, scales_at, slots; /* strides in bytes */
    int32_t dim, block_shift;
    row_turn turn;
    float hadamard; /* dim^-0.5, or 0 */
    bool whole_k, whole_rows;
    cpa_cuda_bad_slot *bad_slot;
};

/* What there is of a token before it is made. */
template <typename T, int LANES>
struct raw_token {
    raw_row<T> k;
    int64_t slot, position;

    /* Of one behind the last: zeros, and slot -1. */
    __device__ raw_token(const write_args &w, int64_t token) : slot(-1), position(0) {
        const bool here = token < w.a.tokens;
        if (here) slot = w.a.slot_mapping[token];
        if (here && w.turn.kind != TURN_NONE) position = w.a.positions[token];
        load_row<T, LANES>(k, (const T *)w.a.k + token * w.a.k_row_stride, here ? w.dim : 0, w.whole_k);
    }
};

template <int LANES>
__device__ void store_key(const write_args &w, const lane_row &x, int64_t slot) {
    const cpa_index_write_args &a = w.a;
    const int64_t offset = slot & ((1 << w.block_shift) - 1);
    char *block = w.memory + (slot >> w.block_shift) * w.block_stride, *row = block + offset * w.token_stride;
    if (a.cache.kv.dtype != CPA_FP8_E4M3) {
        if (slot >= 0) store_plain_row<LANES>(row, x, a.cache.kv.dtype, w.dim, w.whole_rows);
        return;
    }
    uint2 codes[PARTS];
    const float scale = row_codes<LANES>(codes, x, a.floor, a.scales_pow2);
    if (slot < 0) return;
    store_codes_of_row<LANES>((uint8_t *)row, codes, w.dim, w.whole_rows);
    if (threadIdx.x % LANES == 0) ((float *)(block + w.scales_at))[offset] = scale;
}

/* The slot of a token, -1 where that is none. */
template <int LANES>
__device__ int64_t checked_slot(const write_args &w, int64_t token, int64_t slot) {
    if (slot < w.slots) return slot;
    if (threadIdx.x % LANES == 0 && atomicExch(&w.bad_slot->found, 1) == 0)
        w.bad_slot->token = token, w.bad_slot->slot = slot;
    return -1;
}

template <typename T, int LANES>
__global__ void __launch_bounds__(THREADS) index_write(const __grid_constant__ write_args w) {
    constexpr int AT_ONCE = WARP_LANES / LANES;
    __shared__ float shared[WARPS][WARP_LANES * PARTS * PART];
    const cpa_index_write_args &a = w.a;
    const int64_t warp = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
    const int64_t apart = (int64_t)gridDim.x * WARPS * AT_ONCE, place = threadIdx.x % WARP_LANES / LANES;
    lane_row gamma, beta;
    if (a.gamma) {
        load_floats_of_row<LANES>(gamma, a.gamma, w.dim);
        load_floats_of_row<LANES>(beta, a.beta, w.dim);
    }
    raw_token<T, LANES> next(w, warp * AT_ONCE + place);
    for (int64_t begin = warp * AT_ONCE; begin < a.tokens; begin += apart) {
        const int64_t token = begin + place, slot = checked_slot<LANES>(w, token, next.slot);
        const row_angles<LANES> angles(w.turn, a.rope, a.positions, a.tokens, token, slot >= 0, next.position);
        lane_row x;
        widen_row<T>(x, next.k);
        next = raw_token<T, LANES>(w, token + apart);
        if (a.gamma) norm_row<LANES>(x, w.dim, gamma, beta, a.eps);
        turn_row<LANES>(x, w.turn, angles, a.rope, a.positions, a.tokens, token, slot >= 0,
                        shared[threadIdx.x / WARP_LANES]);
        finish_row<LANES>(x, w.dim, w.hadamard, a.cache.kv.dtype);
        store_key<LANES>(w, x, slot);
    }
}

/* CTAs that keep a device busy: what all of the rows of a warp need alone is then read a few times. */
constexpr int64_t MOST_CTAS = 4096;

template <typename T, int LANES>
cpa_status launch(write_args &w, cpa_stream *stream) {
    const int64_t of_cta = WARPS * (WARP_LANES / LANES), ctas = (w.a.tokens + of_cta - 1) / of_cta;
    w.turn = turn_of<LANES>(w.a.rope);
    w.whole_k = parts_are_aligned<T>(w.a.k, w.a.k_row_stride);
    w.whole_rows = stores_are_aligned(w.memory, w.block_stride | w.token_stride, w.a.cache.kv.dtype);
    index_write<T, LANES>
        <<<(unsigned)(ctas < MOST_CTAS ? ctas : MOST_CTAS), THREADS, 0, cpa_cuda_handle(stream)>>>(w);
    return cpa_cuda_launched(stream, "index_write");
}

} // namespace

extern "C" cpa_status cpa_cuda_index_write(const cpa_index_write_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->cache.kv);
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, CPA_KEYS);
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (cpa_cuda_index_write_by_quads(args)) return cpa_cuda_index_write_quads(args, stream);
    write_args w = {};
    w.a = *args;
    w.memory = pool.memory;
    w.block_stride = pool.block_stride, w.token_stride = pool.token_stride, w.scales_at = pool.scales_at;
    w.slots = kv.num_blocks * kv.block_size;
    w.dim = kv.k_dim;
    w.block_shift = cpa_cuda_log2(kv.block_size);
    w.hadamard = args->cache.hadamard ? (float)(1 / sqrt((double)kv.k_dim)) : 0;
    w.bad_slot = ((cpa_cuda_stream *)stream)->bad_slot;
    return launch_for_elements(args->dtype, [&](auto element) {
        return launch_for_lanes(w.dim, [&](auto lanes) {
            return launch<typename decltype(element)::element, decltype(lanes)::LANES>(w, stream);
        });
    });
}
