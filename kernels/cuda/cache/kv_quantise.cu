/* kv_write into a quantised cache: a warp quantises a row, the key or the value of one token and head. */
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/cache/kv_quantise.h"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int THREADS = 256;

/* Keys or values: where they come from and where they go. */
struct tensor {
    const void *from;
    int64_t row_stride, from_head_stride; /* elements from token to token and from head to head of what comes */
    char *to;
    int32_t dim;
    int64_t block_stride, token_stride, head_stride;
    int64_t words_at; /* from the start of a block to its scales; 0: rows have none */
    float scale;      /* scale of the tensor */
    const float *head_scales;
    int32_t head_scale_step;
    int32_t run_shift; /* log2 of the codes of a run */
    int64_t run_stride;
};

struct quantise_args {
    tensor tensors[2];
    cpa_dtype from, to;
    int64_t rows;
    int32_t heads, block_shift;
    int64_t slots;
    const int64_t *slot_mapping;
    cpa_cuda_bad_slot *bad_slot;
    uint8_t *nonfinite;
};

/* A lane takes WIDTH neighbouring elements of every 32 * WIDTH, of at most MOST_DIM. */
template <int WIDTH, int MOST_DIM>
__global__ void __launch_bounds__(THREADS) kv_quantise(const __grid_constant__ quantise_args a) {
    constexpr int ROUNDS = (MOST_DIM + WARP_LANES * WIDTH - 1) / (WARP_LANES * WIDTH);
    const tensor t = a.tensors[blockIdx.y];
    const int32_t lane = threadIdx.x % WARP_LANES;
    const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP_LANES;
    if (row >= a.rows) return;
    const int64_t token = row / a.heads, head = row - token * a.heads, slot = a.slot_mapping[token];
    if (slot == -1) return;
    if (slot < -1 || slot >= a.slots) {
        if (lane == 0 && atomicExch(&a.bad_slot->found, 1) == 0) a.bad_slot->token = token, a.bad_slot->slot = slot;
        return;
    }
    const int64_t from = token * t.row_stride + head * t.from_head_stride;
    float x[ROUNDS][WIDTH], low = 0, high = 0;
    bool nonfinite = false;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const int32_t d = (i * WARP_LANES + lane) * WIDTH + e;
            x[i][e] = d < t.dim ? read_element(t.from, a.from, from + d) : 0;
            const float finite = finite_or_zero(x[i][e]);
            nonfinite |= is_nonfinite(x[i][e]);
            low = fminf(low, finite);
            high = fmaxf(high, finite);
        }
    }
    if (nonfinite && a.nonfinite) a.nonfinite[token] = 1;
    const float scale = head_scale(t.scale, t.head_scales, t.head_scale_step, (int32_t)head);
    const uint32_t word = scale_word(a.to, scale, -warp_max(-low), warp_max(high));
    const int64_t offset = slot & ((1 << a.block_shift) - 1);
    char *block = t.to + (slot >> a.block_shift) * t.block_stride;
    char *to = block + offset * t.token_stride + head * t.head_stride;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int32_t first = (i * WARP_LANES + lane) * WIDTH;
        uint32_t codes = 0;
        if (first >= t.dim) continue;
#pragma unroll
        for (int e = 0; e < WIDTH; e++) codes |= (uint32_t)code_of(a.to, word, x[i][e]) << (8 * e);
        const int64_t at = (first >> t.run_shift) * t.run_stride + (first & ((1 << t.run_shift) - 1));
        if (WIDTH == 4) {
            *(uint32_t *)(to + at) = codes;
        } else {
            to[at] = (char)codes;
        }
    }
    if (t.words_at && lane == 0) ((uint32_t *)(block + t.words_at))[(head << a.block_shift) + offset] = word;
}

tensor tensor_of(const cpa_kv_view &kv, cpa_kv_part part, const void *from, int64_t row_stride, int64_t head_stride) {
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, part);
    return {from,
            row_stride ? row_stride : (int64_t)kv.kv_heads * pool.dim,
            head_stride ? head_stride : pool.dim,
            pool.memory,
            pool.dim,
            pool.block_stride,
            pool.token_stride,
            pool.head_stride,
            cpa_kv_words_at(&kv, part),
            pool.tensor_scale,
            pool.head_scales,
            pool.head_scale_step,
            cpa_kv_run_shift(&kv, part),
            pool.run_stride};
}

/* Whether every four codes lie together, aligned to them. */
bool fours_fit(const tensor &t) {
    const int64_t places = (int64_t)(uintptr_t)t.to | t.block_stride | t.token_stride | t.head_stride | t.dim;
    return places % 4 == 0 && t.run_shift >= 2;
}

/* Most heads are narrow, and those take fewer registers. */
template <int MOST_DIM>
void launch(const quantise_args &a, dim3 grid, cpa_stream *stream) {
    if (fours_fit(a.tensors[0]) && fours_fit(a.tensors[1])) {
        kv_quantise<4, MOST_DIM><<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
    } else {
        kv_quantise<1, MOST_DIM><<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_kv_quantise(const cpa_kv_write_args *args, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    const quantise_args a = {
        {tensor_of(kv, CPA_KEYS, args->k, args->k_row_stride, args->k_head_stride),
         tensor_of(kv, CPA_VALUES, args->v, args->v_row_stride, args->v_head_stride)},
        args->dtype,
        kv.dtype,
        args->tokens * kv.kv_heads,
        kv.kv_heads,
        cpa_cuda_log2(kv.block_size),
        kv.num_blocks * kv.block_size,
        args->slot_mapping,
        ((cpa_cuda_stream *)stream)->bad_slot,
        args->nonfinite,
    };
    constexpr int NARROW = 256;
    const dim3 grid((unsigned)((a.rows * WARP_LANES + THREADS - 1) / THREADS), cpa_kv_parts(&kv));
    if (kv.k_dim <= NARROW && kv.v_dim <= NARROW) {
        launch<NARROW>(a, grid, stream);
    } else {
        launch<CPA_MAX_HEAD_DIM>(a, grid, stream);
    }
    return cpa_cuda_launched(stream, "kv_write");
}
