/* qk_norm_rope: a CTA takes a row, or some heads of one; a group of lanes takes a head after the other, of which each
 * lane has the same columns, and so the same cosines and sines. The kernel here takes any head, and pairs that are
 * rotated meet in shared memory; that of qk_pairs.cuh, which is faster, takes those whose pairs a lane can have. */
#include <math.h>

#include "kernels/cuda/nn/qk_heads.cuh"
#include "kernels/cuda/nn/qk_pairs.cuh"

namespace {

/* How the column of a lane is rotated: x cosine + partner sine, where the partner lies `apart` columns on. Columns that
 * pass have no partner, apart = 0. */
struct rotation {
    float cosine, sine;
    int32_t apart;
};

__device__ rotation rotation_of(const cpa_rope &rope, int64_t position, int32_t column) {
    const int32_t half = rope.dim / 2, i = column - rope.first;
    if (i < 0 || i >= rope.dim) return {1, 0, 0};
    const int32_t pair = rope.interleaved ? i / 2 : i % half, apart = rope.interleaved ? 1 : half;
    const bool second = rope.interleaved ? i % 2 : i >= half;
    const float *row = rope.table + position * rope.dim;
    return {row[pair], second ? row[half + pair] : -row[half + pair], second ? -apart : apart};
}

/* Norms and rotates a part of a head; `staged` holds the columns of the group's head. All lanes of the warp come here.
 */
template <typename T, int UNIT, int ROUNDS>
__device__ void norm_and_rotate(const rope_args &a, head_place at, int32_t lane,
                                const rotation (&rotations)[ROUNDS][UNIT], bool no_position, float *staged,
                                head_part<T, UNIT, ROUNDS> &part) {
    const void *weight = at.kind == 0 ? a.q_weight : at.kind == 1 ? a.k_weight : NULL;
    float x[ROUNDS][UNIT], squares = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        widen<T, UNIT>(x[r], part.unit[r]); /* zeros past the head */
#pragma unroll
        for (int e = 0; e < UNIT; e++) squares = fmaf(x[r][e], x[r][e], squares);
    }
    squares = group_sum(squares, a.lanes);
    const float scale = 1 / sqrtf(squares / (float)a.k_dim + a.eps);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int32_t column = (lane + r * a.lanes) * UNIT;
        if (weight && column < at.dim) {
            float w[UNIT];
            widen<T, UNIT>(w, *(const unit_of<T, UNIT> *)((const T *)weight + column));
#pragma unroll
            for (int e = 0; e < UNIT; e++) x[r][e] = x[r][e] * scale * (w[e] + a.weight_offset);
        }
#pragma unroll
        for (int e = 0; e < UNIT; e++) staged[column + e] = x[r][e];
    }
    __syncwarp();
    if (at.kind <= 1) {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int32_t column = (lane + r * a.lanes) * UNIT;
#pragma unroll
            for (int e = 0; e < UNIT; e++) {
                const rotation &by = rotations[r][e];
                const float partner = staged[column + e + by.apart];
                if (by.apart) x[r][e] = x[r][e] * by.cosine + partner * by.sine;
                if (no_position) x[r][e] = NAN;
            }
            part.unit[r] = narrow<T, UNIT>(x[r]);
        }
    }
    __syncwarp(); /* before the next head is staged */
}

/* The CTAs of a row, in blockIdx.y, take its heads in turn, AT_ONCE for each group of lanes. */
template <typename T, int UNIT, int ROUNDS, int AT_ONCE>
__global__ void __launch_bounds__(THREADS) qk_norm_rope(const __grid_constant__ rope_args a) {
    __shared__ __align__(16) float staged[THREADS * UNIT * ROUNDS];
    const int32_t lane = threadIdx.x & (a.lanes - 1), group = threadIdx.x / a.lanes, groups = THREADS / a.lanes;
    const int32_t heads = a.q_heads + 2 * a.kv_heads, step = groups * gridDim.y;
    const int64_t row = blockIdx.x;
    const T *qkv = (const T *)a.qkv + row * a.qkv_stride;
    rotation rotations[ROUNDS][UNIT];
    dependent_wait();
    dependent_allow();
    const int64_t position = a.rope.table ? a.positions[row] : 0, slot = slot_of(a, row);
    const bool no_position = a.rope.table && (position < 0 || position >= a.rope.max_position);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
            const int32_t column = (lane + r * a.lanes) * UNIT + e;
            rotations[r][e] = {1, 0, 0};
            if (a.rope.table && !no_position) rotations[r][e] = rotation_of(a.rope, position, column);
        }
    }
    for (int32_t base = blockIdx.y * groups; base < heads; base += AT_ONCE * step) {
        head_part<T, UNIT, ROUNDS> part[AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const head_place at = place_of(a, base + group + i * step);
            const T *from = qkv + offset_of(a, at);
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int32_t column = (lane + r * a.lanes) * UNIT;
                if (column < at.dim) part[i].unit[r] = *(const unit_of<T, UNIT> *)(from + column);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const head_place at = place_of(a, base + group + i * step);
            norm_and_rotate<T, UNIT, ROUNDS>(a, at, lane, rotations, no_position,
                                             staged + group * a.lanes * UNIT * ROUNDS, part[i]);
            store_head<T, UNIT, ROUNDS>(a, at, {lane * UNIT, a.lanes * UNIT}, a.lanes, row, slot, part[i]);
        }
    }
}

/* A grid of enough CTAs for the device, a lane of which has `columns` of a head. */
cpa_status launch(void (*kernel)(rope_args), rope_args a, int32_t columns, int64_t rows, cpa_stream *stream) {
    const int32_t widest = a.k_dim > a.v_dim ? a.k_dim : a.v_dim, units = (widest + columns - 1) / columns;
    a.lanes = 1;
    while (a.lanes < WARP_LANES && a.lanes < units) a.lanes *= 2;
    const int32_t groups = THREADS / a.lanes, most = (a.q_heads + 2 * a.kv_heads + groups - 1) / groups;
    const int64_t ctas = 8 * (int64_t)cpa_cuda_device_of(stream)->multiprocessors, wanted = (ctas + rows - 1) / rows;
    const unsigned parts = (unsigned)(wanted < most ? wanted : most);
    return launch_early(kernel, dim3((unsigned)rows, parts), THREADS, a, stream, "qk_norm_rope");
}

template <typename T>
cpa_status launch_units(const rope_args &a, int64_t rows, bool vectors, cpa_stream *stream) {
    constexpr int WIDEST = MOST_DIM / WARP_LANES;
    if (!vectors) return launch(qk_norm_rope<T, 1, WIDEST, 1>, a, 1, rows, stream);
    if constexpr (sizeof(T) == 2) {
        if (in_pairs(a)) return launch(pairs_kernel<T>(a), a, PAIR_COLUMNS, rows, stream);
        return launch(qk_norm_rope<T, 8, 1, 3>, a, 8, rows, stream);
    } else {
        return launch(qk_norm_rope<T, 4, 2, 2>, a, 4, rows, stream);
    }
}

target target_of(const cpa_kv_view &kv, cpa_kv_part part, void *rows, int64_t row_stride) {
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, part);
    const int64_t unit = cpa_dtype_bytes(kv.dtype);
    return {rows,
            row_stride,
            pool.memory,
            pool.block_stride / unit,
            pool.token_stride / unit,
            pool.head_stride / unit,
            cpa_kv_words_at(&kv, part),
            pool.tensor_scale,
            pool.head_scales,
            pool.head_scale_step,
            cpa_kv_run_shift(&kv, part),
            pool.run_stride / unit};
}

/* Fills in the cache; false if its rows are not aligned for vectors. */
bool take_cache(const cpa_qk_norm_rope_args *args, rope_args &a, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    a.targets[0] = target_of(kv, CPA_KEYS, args->k, args->k_stride);
    a.targets[1] = target_of(kv, CPA_VALUES, args->v, args->v_stride);
    a.slot_mapping = args->slot_mapping;
    a.kv_dtype = kv.dtype;
    a.block_shift = cpa_cuda_log2(kv.block_size);
    a.slots = kv.num_blocks * kv.block_size;
    a.bad_slot = ((cpa_cuda_stream *)stream)->bad_slot;
    a.nonfinite = args->nonfinite;
    const int64_t strides = kv.k_block_stride | kv.k_token_stride | kv.k_head_stride | kv.v_block_stride |
                            kv.v_token_stride | kv.v_head_stride;
    return (strides % 8 == 0 || kv.layout == CPA_VLLM_X) && ((uintptr_t)kv.k | (uintptr_t)kv.v) % 16 == 0;
}

} // namespace

extern "C" cpa_status cpa_cuda_qk_norm_rope(const cpa_qk_norm_rope_args *args, cpa_stream *stream) {
    const cpa_attention_shape &s = args->shape;
    if (s.q_heads + 2 * s.kv_heads == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "qk_norm_rope: more rows than a grid has CTAs", args->rows);
    const int32_t widest = s.k_dim > s.v_dim ? s.k_dim : s.v_dim;
    if (widest > MOST_DIM) return cpa_cuda_unsupported(stream, "qk_norm_rope: heads wider than 256", widest);
    rope_args a = {};
    a.qkv = args->qkv;
    a.qkv_stride = args->qkv_stride;
    a.q_heads = s.q_heads, a.kv_heads = s.kv_heads, a.k_dim = s.k_dim, a.v_dim = s.v_dim;
    a.q_weight = args->q_weight, a.k_weight = args->k_weight;
    a.weight_offset = args->weight_offset, a.eps = args->eps;
    a.rope = args->rope;
    a.positions = args->positions;
    a.q = args->q;
    a.q_stride = args->q_stride;
    a.targets[0].rows = args->k, a.targets[0].row_stride = args->k_stride;
    a.targets[1].rows = args->v, a.targets[1].row_stride = args->v_stride;
    const bool cache_in_vectors = !args->slot_mapping || s.kv_heads == 0 || take_cache(args, a, stream);
    const int64_t strides = args->qkv_stride | args->q_stride | args->k_stride | args->v_stride | s.k_dim | s.v_dim;
    const uintptr_t pointers = (uintptr_t)args->qkv | (uintptr_t)args->q | (uintptr_t)args->k | (uintptr_t)args->v |
                               (uintptr_t)args->q_weight | (uintptr_t)args->k_weight;
    const bool vectors = cache_in_vectors && in_vectors(s.dtype, strides, pointers);
    return launch_for_elements(s.dtype, [&](auto tag) {
        return launch_units<typename decltype(tag)::element>(a, args->rows, vectors, stream);
    });
}
