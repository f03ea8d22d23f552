/* merge of states of other libraries' forms, or to codes: see the options of cpa_merge_args. A group of lanes has a row
 * of a head, UNIT neighbouring elements each; all of them fold its LSEs. The arithmetic is that of merge.cu. Dtypes are
 * looked at once an access, which all lanes agree on. */
#include <math.h>

#include "base/stored.cuh"
#include "kernels/cuda/attend/state.cuh"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int THREADS = 256, AT_ONCE = 2;

struct state {
    const char *o;
    const float *lse;
    int64_t o_row_stride, lse_row_stride;
    const int32_t *map;
};

struct forms_args {
    state states[CPA_MERGE_MAX_STATES];
    int64_t head_rows, merged_rows; /* rows of heads; rows that are merged */
    int32_t heads, v_dim, n_states;
    int32_t lanes_shift; /* log2 of the lanes of a row of a head */
    cpa_dtype state_dtype, out_dtype;
    int64_t lse_head_stride;
    char *out;
    const float *out_scale;
    int64_t out_row_stride;
    float *out_lse;
    int64_t out_lse_row_stride, out_lse_head_stride;
    cpa_store_batch awaited; /* no parts: the states are there */
    int32_t foreign_lse, lse_base2;
    const float *sink_logits;
};

/* 8 neighbouring elements that are aligned to 16 bytes, or one. */
__device__ void load_unit(const char *from, cpa_dtype dtype, int64_t at, float (&value)[8]) {
    if (dtype == CPA_F32) {
        const float4 low = __ldcg((const float4 *)from + at / 4), high = __ldcg((const float4 *)from + at / 4 + 1);
        value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
        value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
        return;
    }
    const uint4 packed = __ldcg((const uint4 *)from + at / 8);
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = dtype == CPA_BF16 ? __bfloat1622float2(*(const __nv_bfloat162 *)&pairs[i])
                                              : __half22float2(*(const __half2 *)&pairs[i]);
        value[2 * i] = pair.x, value[2 * i + 1] = pair.y;
    }
}
__device__ void load_unit(const char *from, cpa_dtype dtype, int64_t at, float (&value)[1]) {
    value[0] = read_element(from, dtype, at);
}

__device__ void store_unit(const forms_args &a, int64_t at, const float (&value)[8]) {
    if (a.out_dtype == CPA_F32) {
        float4 *to = (float4 *)a.out + at / 4;
        to[0] = make_float4(value[0], value[1], value[2], value[3]);
        to[1] = make_float4(value[4], value[5], value[6], value[7]);
        return;
    }
    uint32_t word[4] = {0, 0, 0, 0};
    if (a.out_dtype == CPA_FP8_E4M3) {
        const float inverse = __fdiv_rn(1, __ldg(a.out_scale));
#pragma unroll
        for (int e = 0; e < 8; e++) word[e / 4] |= (uint32_t)e4m3_code(value[e] * inverse) << (8 * (e % 4));
        *(uint2 *)(a.out + at) = make_uint2(word[0], word[1]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = a.out_dtype == CPA_BF16 ? pack_pair<__nv_bfloat16>(value[2 * i], value[2 * i + 1])
                                          : pack_pair<__half>(value[2 * i], value[2 * i + 1]);
    *((uint4 *)a.out + at / 8) = make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ void store_unit(const forms_args &a, int64_t at, const float (&value)[1]) {
    if (a.out_dtype == CPA_FP8_E4M3) {
        a.out[at] = (char)e4m3_code(value[0] * __fdiv_rn(1, __ldg(a.out_scale)));
    } else {
        write_element(a.out, a.out_dtype, at, value[0]);
    }
}

/* The same bits. */
template <int UNIT>
__device__ void move_unit(const forms_args &a, int64_t to, const char *from, int64_t at) {
    if constexpr (UNIT == 8) {
        const int vectors = a.out_dtype == CPA_F32 ? 2 : 1;
        for (int i = 0; i < vectors; i++)
            ((uint4 *)a.out)[to / 8 * vectors + i] = ((const uint4 *)from)[at / 8 * vectors + i];
    } else if (a.out_dtype == CPA_F32) {
        ((uint32_t *)a.out)[to] = ((const uint32_t *)from)[at];
    } else {
        ((uint16_t *)a.out)[to] = ((const uint16_t *)from)[at];
    }
}

/* A row of a head, whose elements from `column` on this lane has. */
struct place {
    int64_t row, out;
    int32_t head, column;
};

__device__ int64_t state_row_of(const state &s, int64_t row) {
    return s.map ? s.map[row] : row;
}

/* Through all states; the LSE of the result, in their base. */
template <int UNIT>
__device__ float merge_unit(const forms_args &a, const place &at) {
    const float ln2 = 0.693147180559945309f, log2e = 1.44269504088896341f;
    float value[UNIT] = {}, lse = -INFINITY;
    for (int32_t begin = 0; begin < a.n_states; begin += AT_ONCE) {
        float part[AT_ONCE][UNIT] = {}, next[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) { /* also of empty states: the weights are not awaited */
            next[i] = -INFINITY;
            if (begin + i >= a.n_states) continue;
            const state &s = a.states[begin + i];
            const int64_t from = state_row_of(s, at.row);
            if (from < 0) continue;
            const float loaded = s.lse[from * s.lse_row_stride + at.head * a.lse_head_stride];
            next[i] = counted_lse(a.lse_base2 ? loaded * ln2 : loaded, a.foreign_lse);
            load_unit(s.o, a.state_dtype, from * s.o_row_stride + (int64_t)at.head * a.v_dim + at.column, part[i]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) add_part(value, fold_lse(lse, next[i], 0), part[i]);
    }
    const float kept = a.sink_logits ? sink_factor(a.sink_logits, at.head, lse) : 1;
#pragma unroll
    for (int e = 0; e < UNIT; e++) value[e] *= kept;
    store_unit(a, at.out + at.column, value);
    return a.lse_base2 ? lse * log2e : lse;
}

/* That of the last state alone, as it is. */
template <int UNIT>
__device__ float take_unit(const forms_args &a, const place &at) {
    const state &s = a.states[a.n_states - 1];
    const int64_t from = state_row_of(s, at.row);
    float value[UNIT] = {};
    if (from < 0) {
        store_unit(a, at.out + at.column, value);
        return -INFINITY;
    }
    const int64_t o_at = from * s.o_row_stride + (int64_t)at.head * a.v_dim + at.column;
    if (a.state_dtype == a.out_dtype) {
        move_unit<UNIT>(a, at.out + at.column, s.o, o_at);
    } else {
        load_unit(s.o, a.state_dtype, o_at, value);
        store_unit(a, at.out + at.column, value);
    }
    return s.lse[from * s.lse_row_stride + at.head * a.lse_head_stride];
}

/* A lane that writes an element has read it before, and the LSE is written when all lanes of the row have read those
 * that there are: the result may take the place of the first state. */
template <int UNIT>
__global__ void __launch_bounds__(THREADS) merge_forms(const __grid_constant__ forms_args a) {
    if (!await_stored(a.awaited)) return;
    const int64_t index = ((int64_t)blockIdx.x * THREADS + threadIdx.x) >> a.lanes_shift;
    const int lanes = 1 << a.lanes_shift, lane = threadIdx.x & (lanes - 1);
    const bool is_row = index < a.head_rows;
    place at;
    at.row = index <= INT32_MAX ? (int64_t)((uint32_t)index / (uint32_t)a.heads) : index / a.heads;
    at.head = (int32_t)(index - at.row * a.heads);
    at.out = at.row * a.out_row_stride + (int64_t)at.head * a.v_dim;
    float lse = -INFINITY;
    for (at.column = lane * UNIT; is_row && at.column < a.v_dim; at.column += lanes * UNIT)
        lse = at.row < a.merged_rows ? merge_unit<UNIT>(a, at) : take_unit<UNIT>(a, at);
    __syncwarp();
    if (a.out_lse && is_row && lane == 0)
        a.out_lse[at.row * a.out_lse_row_stride + at.head * a.out_lse_head_stride] = lse;
}

template <int UNIT>
void launch(const forms_args &a, cpa_stream *stream) {
    const int64_t threads = a.head_rows << a.lanes_shift;
    merge_forms<UNIT><<<(unsigned)((threads + THREADS - 1) / THREADS), THREADS, 0, cpa_cuda_handle(stream)>>>(a);
}

} // namespace

extern "C" cpa_status cpa_cuda_merge_forms(const cpa_merge_args *args, const cpa_store_batch *awaited,
                                           cpa_stream *stream) {
    forms_args a = {};
    a.head_rows = args->rows * args->heads;
    a.merged_rows = args->rows - args->tail_rows;
    a.heads = args->heads, a.v_dim = args->v_dim, a.n_states = args->n_states;
    a.state_dtype = args->state_dtype, a.out_dtype = args->out_dtype;
    a.lse_head_stride = args->lse_head_stride ? args->lse_head_stride : 1;
    a.out = (char *)args->out;
    a.out_scale = args->out_scale;
    a.sink_logits = args->sink_logits;
    a.out_row_stride = args->out_row_stride ? args->out_row_stride : (int64_t)args->heads * args->v_dim;
    a.out_lse = args->out_lse;
    a.out_lse_head_stride = args->out_lse_head_stride ? args->out_lse_head_stride : 1;
    const int64_t lse_row_stride = args->out_lse_row_stride ? args->out_lse_row_stride : a.heads;
    a.out_lse_row_stride = args->out_lse_head_stride ? 1 : lse_row_stride;
    a.foreign_lse = args->foreign_lse, a.lse_base2 = args->lse_base2;
    if (awaited) a.awaited = *awaited;
    int64_t strides = a.out_row_stride | args->v_dim;
    uintptr_t pointers = (uintptr_t)args->out;
    for (int32_t i = 0; i < args->n_states; i++) {
        const cpa_partial &s = args->states[i];
        const int64_t o_row = s.o_row_stride ? s.o_row_stride : (int64_t)args->heads * args->v_dim;
        const int64_t lse_row = args->lse_head_stride ? 1 : s.lse_row_stride ? s.lse_row_stride : args->heads;
        a.states[i] = {(const char *)s.o, s.lse, o_row, lse_row, args->row_maps ? args->row_maps[i] : NULL};
        strides |= o_row;
        pointers |= (uintptr_t)s.o;
    }
    const bool vectors = strides % 8 == 0 && pointers % 16 == 0;
    while (1 << a.lanes_shift < WARP_LANES && (vectors ? 8 : 1) << a.lanes_shift < args->v_dim) a.lanes_shift++;
    if (a.head_rows > (int64_t)INT32_MAX * (THREADS >> a.lanes_shift))
        return cpa_cuda_unsupported(stream, "merge: more rows and heads than a grid takes", a.head_rows);
    if (vectors) {
        launch<8>(a, stream);
    } else {
        launch<1>(a, stream);
    }
    return cpa_cuda_launched(stream, "merge");
}
