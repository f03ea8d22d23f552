/* What the kernels of qk_norm_rope share: their arguments, the heads of a row, and where a part of a head goes. */
#ifndef CPA_CUDA_NN_QK_HEADS_CUH
#define CPA_CUDA_NN_QK_HEADS_CUH

#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int THREADS = 128;

/* The widest head: that of a warp whose lanes have 16 bytes each. */
constexpr int MOST_DIM = 256;

/* Keys or values: where they go. */
struct target {
    void *rows; /* NULL: not there */
    int64_t row_stride;
    char *pool;
    int64_t block_stride, token_stride, head_stride; /* in elements of the cache */
    int64_t words_at;                                /* quantised caches: bytes from a block to its scales; 0: none */
    float scale;
    const float *head_scales;
    int32_t head_scale_step;
    int32_t run_shift;  /* log2 of the elements of a run of a row; CPA_KV_ONE_RUN: rows are not cut into runs */
    int64_t run_stride; /* elements from one run of a row to the next */
};

struct rope_args {
    const void *qkv;
    int64_t qkv_stride;
    int32_t q_heads, kv_heads, k_dim, v_dim;
    const void *q_weight, *k_weight;
    float weight_offset, eps;
    cpa_rope rope;
    const int64_t *positions;
    void *q;
    int64_t q_stride;
    target targets[2]; /* keys, values */
    const int64_t *slot_mapping;
    cpa_dtype kv_dtype;
    int32_t block_shift;
    int64_t slots;
    cpa_cuda_bad_slot *bad_slot;
    uint8_t *nonfinite;
    int32_t lanes; /* lanes of a group, a power of two */
};

/* Over the lanes of a group; all lanes of the warp come here. */
__device__ float group_sum(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}
__device__ float group_max(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

/* The slot of a row; -1 if it goes to no cache, as it does where the slot is none, of which the stream is told. */
__device__ int64_t slot_of(const rope_args &a, int64_t row) {
    if (!a.slot_mapping || a.kv_heads == 0) return -1;
    const int64_t slot = a.slot_mapping[row];
    if (slot >= -1 && slot < a.slots) return slot;
    if (threadIdx.x == 0 && atomicExch(&a.bad_slot->found, 1) == 0) a.bad_slot->token = row, a.bad_slot->slot = slot;
    return -1;
}

template <typename To, typename T, int UNIT>
__device__ void store_converted(char *pool, int64_t at, const unit_of<T, UNIT> &value) {
    unit_of<To, UNIT> out;
#pragma unroll
    for (int e = 0; e < UNIT; e++) out.element[e] = converted<To>(value.element[e]);
    *(unit_of<To, UNIT> *)((To *)pool + at) = out;
}

/* Columns of a head to the cache, in its dtype, as kv_write brings them there. */
template <typename T, int UNIT>
__device__ void store_plain(char *pool, cpa_dtype dtype, int64_t at, const unit_of<T, UNIT> &value) {
    if (dtype == CPA_F32) {
        store_converted<float>(pool, at, value);
    } else if (dtype == CPA_BF16) {
        store_converted<__nv_bfloat16>(pool, at, value);
    } else {
        store_converted<__half>(pool, at, value);
    }
}

template <typename T, int UNIT>
__device__ void store_codes(char *to, cpa_dtype dtype, uint32_t word, const unit_of<T, UNIT> &value) {
    unit_of<uint8_t, UNIT> codes;
#pragma unroll
    for (int e = 0; e < UNIT; e++) codes.element[e] = code_of(dtype, word, to_float(value.element[e]));
    *(unit_of<uint8_t, UNIT> *)to = codes;
}

/* The same to a cache whose rows lie in runs, element by element. */
template <typename T, int UNIT>
__device__ void store_runs(const target &t, cpa_dtype dtype, int64_t row, int32_t column, uint32_t word,
                           const unit_of<T, UNIT> &value) {
    for (int e = 0; e < UNIT; e++) {
        const int32_t d = column + e;
        const int64_t at = row + (d >> t.run_shift) * t.run_stride + (d & ((1 << t.run_shift) - 1));
        const unit_of<T, 1> one = {{value.element[e]}};
        if (is_code(dtype)) {
            store_codes<T, 1>(t.pool + at, dtype, word, one);
        } else {
            store_plain<T, 1>(t.pool, dtype, at, one);
        }
    }
}

/* The part of a head that a lane of a group has: units at the columns first, first + apart, ... that lie in the
 * head. */
struct lane_columns {
    int32_t first, apart;
};

template <typename T, int UNIT, int ROUNDS>
struct head_part {
    unit_of<T, UNIT> unit[ROUNDS];
};

/* Which head of a row: a query (0), a key (1) or a value (2), or none (3); and which of its kind. */
struct head_place {
    int32_t kind, head, dim;
};

__device__ head_place place_of(const rope_args &a, int32_t head) {
    if (head < a.q_heads) return {0, head, a.k_dim};
    head -= a.q_heads;
    if (head < a.kv_heads) return {1, head, a.k_dim};
    head -= a.kv_heads;
    return {head < a.kv_heads ? 2 : 3, head, head < a.kv_heads ? a.v_dim : 0};
}

/* From the start of a row to a head. */
__device__ int64_t offset_of(const rope_args &a, head_place at) {
    const int64_t queries = (int64_t)a.q_heads * a.k_dim, keys = (int64_t)a.kv_heads * a.k_dim;
    return (at.kind == 0 ? 0 : at.kind == 1 ? queries : queries + keys) + (int64_t)at.head * at.dim;
}

/* A key or a value to the cache. All lanes of the warp come here, those without one with slot -1; `lanes` share a
 * head. */
template <typename T, int UNIT, int ROUNDS>
__device__ void store_cached(const rope_args &a, head_place at, lane_columns columns, int lanes, int64_t slot,
                             const head_part<T, UNIT, ROUNDS> &part) {
    if (!__any_sync(0xffffffff, slot >= 0)) return;
    const target &t = a.targets[at.kind == 1 ? 0 : 1];
    const int64_t offset = slot & ((1 << a.block_shift) - 1), block = slot >> a.block_shift;
    const bool quantised = is_code(a.kv_dtype);
    uint32_t word = 0;
    if (quantised) {
        float low = 0, high = 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
            for (int e = 0; e < UNIT; e++) {
                const float finite = finite_or_zero(to_float(part.unit[r].element[e]));
                low = fminf(low, finite);
                high = fmaxf(high, finite);
            }
        }
        const float scale = head_scale(t.scale, t.head_scales, t.head_scale_step, at.head);
        word = scale_word(a.kv_dtype, scale, -group_max(-low, lanes), group_max(high, lanes));
    }
    if (slot < 0) return;
    const int64_t row = block * t.block_stride + offset * t.token_stride + at.head * t.head_stride;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int32_t column = columns.first + r * columns.apart;
        if (column >= at.dim) continue;
        if (t.run_shift < CPA_KV_ONE_RUN) {
            store_runs<T, UNIT>(t, a.kv_dtype, row, column, word, part.unit[r]);
        } else if (quantised) {
            store_codes<T, UNIT>(t.pool + row + column, a.kv_dtype, word, part.unit[r]);
        } else {
            store_plain<T, UNIT>(t.pool, a.kv_dtype, row + column, part.unit[r]);
        }
    }
    if (quantised && t.words_at && columns.first == 0) {
        uint32_t *words = (uint32_t *)(t.pool + block * t.block_stride + t.words_at);
        words[((int64_t)at.head << a.block_shift) + offset] = word;
    }
}

template <typename T, int UNIT, int ROUNDS>
__device__ bool part_is_nonfinite(const head_part<T, UNIT, ROUNDS> &part) {
    bool nonfinite = false;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int e = 0; e < UNIT; e++) nonfinite |= is_nonfinite(to_float(part.unit[r].element[e]));
    }
    return nonfinite;
}

/* A head to the rows of its kind, where there are any. */
template <typename T, int UNIT, int ROUNDS>
__device__ void store_row(const rope_args &a, head_place at, lane_columns columns, int64_t row,
                          const head_part<T, UNIT, ROUNDS> &part) {
    const target &t = a.targets[at.kind == 1 ? 0 : 1];
    if (at.kind > 2 || (at.kind > 0 && !t.rows)) return;
    T *to = at.kind == 0 ? (T *)a.q + row * a.q_stride : (T *)t.rows + row * t.row_stride;
    to += (int64_t)at.head * at.dim;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int32_t column = columns.first + r * columns.apart;
        if (column < at.dim) *(unit_of<T, UNIT> *)(to + column) = part.unit[r];
    }
}

/* A head that has been normed and rotated, to where it goes, with what it tells of its row. All lanes of the warp come
 * here. */
template <typename T, int UNIT, int ROUNDS>
__device__ void store_head(const rope_args &a, head_place at, lane_columns columns, int lanes, int64_t row,
                           int64_t slot, const head_part<T, UNIT, ROUNDS> &part) {
    const bool cached = slot >= 0 && (at.kind == 1 || at.kind == 2);
    if (cached && a.nonfinite && part_is_nonfinite(part)) a.nonfinite[row] = 1;
    store_cached<T, UNIT, ROUNDS>(a, at, columns, lanes, cached ? slot : -1, part);
    store_row<T, UNIT, ROUNDS>(a, at, columns, row, part);
}

} // namespace

#endif
