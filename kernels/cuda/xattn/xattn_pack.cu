/* xattn_pack_q and xattn_pack_k: a thread moves a unit of a row, 16 bytes of rows that keep their bits, or an element. */
#include "kernels/cuda/cache/turboquant.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/cuda/xattn/xattn.h"
#include "kernels/kv_view.h"

namespace {

constexpr int THREADS = 256;

/* Which unit of which row a thread has: rows are tokens of groups in the order in which they are stored. */
struct unit_place {
    int32_t head, column;
    int64_t token, at; /* of the tokens, and the unit in `out` */

    __device__ unit_place(const cpa_xattn_shape &shape, int64_t groups, int64_t index, int unit, bool descending) {
        const int32_t units = shape.dim / unit;
        const int64_t row = index / units, in_head = groups * shape.stride;
        column = (int32_t)(index - row * units) * unit;
        head = (int32_t)(row / in_head);
        token = row - head * in_head;
        at = token * shape.dim + column;
        if (descending) token += shape.stride - 1 - 2 * (token % shape.stride);
    }
};

/* Index of the units of all heads. */
__device__ int64_t unit_index() {
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}
int64_t units_of(const cpa_xattn_shape &shape, int32_t heads, int64_t tokens, int unit) {
    return heads * cpa_xattn_groups(&shape, tokens) * shape.stride * (shape.dim / unit);
}
unsigned ctas_of(int64_t units) {
    return (unsigned)((units + THREADS - 1) / THREADS);
}

template <typename T, int UNIT>
__global__ void __launch_bounds__(THREADS) pack_q(const __grid_constant__ cpa_xattn_pack_q_args a, int64_t groups,
                                                  int64_t units) {
    const int64_t index = unit_index();
    if (index >= units) return;
    const unit_place place(a.shape, groups, index, UNIT, true);
    unit_of<T, UNIT> unit = {};
    if (place.token < a.tokens)
        unit = *(const unit_of<T, UNIT> *)((const T *)a.q + place.token * a.q_row_stride +
                                           place.head * a.q_head_stride + place.column);
    *(unit_of<T, UNIT> *)((T *)a.out + place.head * groups * a.shape.stride * a.shape.dim + place.at) = unit;
}

struct key_args {
    cpa_xattn_pack_k_args a;
    int32_t run_shift, block_shift;
    int64_t run_stride, words_at; /* words_at 0: rows have no scales */
    float scale;                  /* of all rows that have none */
};

template <typename T, int UNIT>
__global__ void __launch_bounds__(THREADS) pack_k(const __grid_constant__ key_args k, int64_t groups, int64_t units) {
    const cpa_xattn_pack_k_args &a = k.a;
    const int64_t index = unit_index();
    if (index >= units) return;
    const unit_place place(a.shape, groups, index, UNIT, false);
    unit_of<T, UNIT> unit = {};
    if (place.token < a.tokens) {
        const int64_t entry = a.table[place.token >> k.block_shift];
        const int64_t block = max((int64_t)0, min(entry, a.kv.num_blocks - 1));
        const int64_t offset = place.token & ((1 << k.block_shift) - 1);
        const int64_t row =
            block * a.kv.k_block_stride + offset * a.kv.k_token_stride + place.head * a.kv.k_head_stride;
        const int64_t at =
            row + (place.column >> k.run_shift) * k.run_stride + (place.column & ((1 << k.run_shift) - 1));
        if constexpr (UNIT > 1) {
            unit = *(const unit_of<T, UNIT> *)((const T *)a.kv.k + at);
        } else if (is_code(a.kv.dtype)) {
            const char *words = (const char *)a.kv.k + block * a.kv.k_block_stride + k.words_at;
            const uint32_t word =
                k.words_at ? ((const uint32_t *)words)[((int64_t)place.head << k.block_shift) + offset]
                           : __float_as_uint(head_scale(k.scale, a.kv.k_scales, a.kv.n_scales > 1, place.head));
            unit.element[0] = from_float<T>(read_code(a.kv.k, a.kv.dtype, at, word));
        } else {
            unit.element[0] = from_float<T>(read_element(a.kv.k, a.kv.dtype, at));
        }
    }
    *(unit_of<T, UNIT> *)((T *)a.out + place.head * a.out_stride + place.at) = unit;
}

/* Rows of TurboQuant, rotated back: a warp a row. */
template <typename T>
__global__ void __launch_bounds__(THREADS) pack_k_turboquant(const __grid_constant__ key_args k, int64_t groups,
                                                             int64_t rows) {
    const cpa_xattn_pack_k_args &a = k.a;
    const int64_t in_head = groups * a.shape.stride, row = unit_index() / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES, width = a.shape.dim / WARP_LANES;
    if (row >= rows) return;
    const int64_t head = row / in_head, token = row - head * in_head;
    float x[TQ_WIDTH] = {};
    if (token < a.tokens) {
        const int64_t entry = a.table[token >> k.block_shift];
        const int64_t block = max((int64_t)0, min(entry, a.kv.num_blocks - 1));
        const int64_t offset = token & ((1 << k.block_shift) - 1);
        const char *from = (const char *)a.kv.k + block * a.kv.k_block_stride + offset * a.kv.k_token_stride +
                           head * a.kv.k_head_stride;
        tq_read_row(from, a.kv.dtype, true, a.shape.dim, lane, x);
    }
    T *to = (T *)a.out + head * a.out_stride + token * a.shape.dim + lane * width;
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++)
        if (e < width) to[e] = from_float<T>(x[e]);
}

} // namespace

extern "C" cpa_status cpa_cuda_xattn_pack_q(const cpa_xattn_pack_q_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const cpa_xattn_pack_q_args a = *args;
    const int64_t groups = cpa_xattn_groups(&a.shape, a.tokens);
    const bool vectors = in_vectors(a.shape.dtype, a.q_row_stride | a.q_head_stride | a.shape.dim,
                                    (uintptr_t)a.q | (uintptr_t)a.out);
    launch_for_elements(a.shape.dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        const int64_t units = units_of(a.shape, a.shape.q_heads, a.tokens, vectors ? VECTOR<T> : 1);
        if (vectors) {
            pack_q<T, VECTOR<T>><<<ctas_of(units), THREADS, 0, cpa_cuda_handle(stream)>>>(a, groups, units);
        } else {
            pack_q<T, 1><<<ctas_of(units), THREADS, 0, cpa_cuda_handle(stream)>>>(a, groups, units);
        }
        return 0;
    });
    return cpa_cuda_launched(stream, "xattn_pack_q");
}

extern "C" cpa_status cpa_cuda_xattn_pack_k(const cpa_xattn_pack_k_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    key_args k = {};
    k.a = *args;
    const cpa_kv_view kv = k.a.kv = cpa_kv_view_resolve(args->kv);
    k.run_shift = cpa_kv_run_shift(&kv, CPA_KEYS);
    k.run_stride = (int64_t)kv.block_size * cpa_kv_key_run(kv.dtype);
    k.block_shift = cpa_cuda_log2(kv.block_size);
    k.words_at = cpa_kv_words_at(&kv, CPA_KEYS);
    k.scale = cpa_kv_tensor_scale(&kv, CPA_KEYS);
    const cpa_xattn_shape &shape = k.a.shape;
    const int64_t groups = cpa_xattn_groups(&shape, k.a.tokens);
    const bool vectors = kv.dtype == shape.dtype && kv.layout != CPA_VLLM_X &&
                         in_vectors(shape.dtype, kv.k_block_stride | kv.k_token_stride | kv.k_head_stride | shape.dim |
                                                     k.a.out_stride,
                                    (uintptr_t)kv.k | (uintptr_t)k.a.out);
    launch_for_elements(shape.dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        if (cpa_dtype_is_turboquant(kv.dtype)) {
            const int64_t rows = shape.kv_heads * groups * shape.stride;
            pack_k_turboquant<T>
                <<<ctas_of(rows * WARP_LANES), THREADS, 0, cpa_cuda_handle(stream)>>>(k, groups, rows);
            return 0;
        }
        const int64_t units = units_of(shape, shape.kv_heads, k.a.tokens, vectors ? VECTOR<T> : 1);
        if (vectors) {
            pack_k<T, VECTOR<T>><<<ctas_of(units), THREADS, 0, cpa_cuda_handle(stream)>>>(k, groups, units);
        } else {
            pack_k<T, 1><<<ctas_of(units), THREADS, 0, cpa_cuda_handle(stream)>>>(k, groups, units);
        }
        return 0;
    });
    return cpa_cuda_launched(stream, "xattn_pack_k");
}
