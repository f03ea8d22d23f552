/* merge: partial states of the same rows over disjoint keys, as the left fold of the two-state merge. */
#include <math.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element.cuh"

namespace {

constexpr int THREADS = 256;

struct state {
    const float *o, *lse;
    int64_t o_row_stride, lse_row_stride;
    const int32_t *map;
};

struct merge_args {
    state states[CPA_MERGE_MAX_STATES];
    int64_t rows;
    int32_t heads, v_dim, n_states;
    int32_t lanes_shift; /* log2 of the lanes that share a row of a head */
    void *out;
    int64_t out_row_stride;
    float *out_lse;
    int64_t out_lse_row_stride;
};

/* NaN and +inf count as -inf. */
__device__ float counted(float lse) {
    return lse < INFINITY ? lse : -INFINITY;
}

/* Folds (lse_b, b) into (lse_a, a); see kernels/host/state.h. The elements of a state that weighs nothing do not count. */
template <int UNIT>
__device__ void fold(float (&a)[UNIT], float &lse_a, const float (&b)[UNIT], float lse_b) {
    if (lse_b == -INFINITY) return;
    const float max = fmaxf(lse_a, lse_b);
    float w_a = expf(lse_a - max), w_b = expf(lse_b - max);
    const float sum = w_a + w_b;
    lse_a = max + logf(sum);
    w_a /= sum;
    w_b /= sum;
    if (w_b == 0) return;
#pragma unroll
    for (int e = 0; e < UNIT; e++) a[e] = w_a == 0 ? b[e] : w_a * a[e] + w_b * b[e];
}

__device__ void load_unit(const float *from, float (&value)[4]) {
    load_floats(from, value);
}
__device__ void load_unit(const float *from, float (&value)[1]) {
    value[0] = *from;
}
template <typename Out>
__device__ void store_unit(void *out, int64_t at, const float (&value)[4]) {
    store_elements<Out>((char *)out, at, value);
}
template <>
__device__ void store_unit<float>(void *out, int64_t at, const float (&value)[4]) {
    store_floats((float *)out + at, value);
}
template <typename Out>
__device__ void store_unit(void *out, int64_t at, const float (&value)[1]) {
    ((Out *)out)[at] = from_float<Out>(value[0]);
}

/* A row of a head that a group of lanes merges. */
struct place {
    int64_t row;
    int32_t head;
    bool valid;
};

/* UNIT neighbouring elements of ROWS rows, through all states. */
template <int UNIT, int ROWS, int AT_ONCE>
__device__ void fold_states(const merge_args &a, const place (&at)[ROWS], int32_t column, float (&value)[ROWS][UNIT],
                            float (&lse)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        lse[r] = -INFINITY;
#pragma unroll
        for (int e = 0; e < UNIT; e++) value[r][e] = 0;
    }
    for (int first = 0; first < a.n_states; first += AT_ONCE) {
        float lses[ROWS][AT_ONCE], parts[ROWS][AT_ONCE][UNIT];
        int64_t from[ROWS][AT_ONCE];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const state &s = a.states[min(first + i, a.n_states - 1)];
                const bool used = at[r].valid && first + i < a.n_states;
                from[r][i] = !used ? -1 : s.map ? s.map[at[r].row] : at[r].row;
                lses[r][i] =
                    from[r][i] < 0 ? -INFINITY : counted(s.lse[from[r][i] * s.lse_row_stride + at[r].head]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const state &s = a.states[min(first + i, a.n_states - 1)];
                if (lses[r][i] > -INFINITY)
                    load_unit(s.o + from[r][i] * s.o_row_stride + (int64_t)at[r].head * a.v_dim + column, parts[r][i]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) fold<UNIT>(value[r], lse[r], parts[r][i], lses[r][i]);
    }
}

/* The lanes of a row and head are neighbours in a warp, so the out LSE may overwrite that of the first state. Each group
 * of lanes merges ROWS rows, a CTA's groups apart, AT_ONCE states at a time: that many loads are under way. */
template <typename Out, int UNIT, int ROWS, int AT_ONCE>
__global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ merge_args a) {
    const int32_t lanes = 1 << a.lanes_shift, lane = threadIdx.x & (lanes - 1), groups = THREADS >> a.lanes_shift;
    const int64_t first = (int64_t)blockIdx.x * groups * ROWS + (threadIdx.x >> a.lanes_shift);
    place at[ROWS];
    float lse[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t index = first + r * groups;
        at[r].row = index / a.heads;
        at[r].head = (int32_t)(index - at[r].row * a.heads);
        at[r].valid = at[r].row < a.rows;
    }
    for (int32_t column = lane * UNIT; column < a.v_dim; column += lanes * UNIT) {
        float value[ROWS][UNIT];
        fold_states<UNIT, ROWS, AT_ONCE>(a, at, column, value, lse);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (at[r].valid)
                store_unit<Out>(a.out, at[r].row * a.out_row_stride + (int64_t)at[r].head * a.v_dim + column, value[r]);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (lane == 0 && at[r].valid && a.out_lse) a.out_lse[at[r].row * a.out_lse_row_stride + at[r].head] = lse[r];
}

template <typename Out, int UNIT, int ROWS, int AT_ONCE>
void launch_kernel(const merge_args &a, cpa_stream *stream) {
    const int64_t a_cta = (int64_t)ROWS * (THREADS >> a.lanes_shift), ctas = (a.rows * a.heads + a_cta - 1) / a_cta;
    merge<Out, UNIT, ROWS, AT_ONCE><<<(unsigned)ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
}

template <typename Out>
void launch(const merge_args &a, bool vectors, cpa_stream *stream) {
    if (!vectors) {
        launch_kernel<Out, 1, 1, 4>(a, stream);
    } else if (a.n_states <= 2) {
        launch_kernel<Out, 4, 4, 2>(a, stream);
    } else {
        launch_kernel<Out, 4, 2, 4>(a, stream);
    }
}

}  // namespace

extern "C" cpa_status cpa_cuda_merge(const cpa_merge_args *args, cpa_stream *stream) {
    const int32_t warp = 5; /* log2 of its lanes */
    if (args->rows == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    merge_args a = {};
    a.rows = args->rows;
    a.heads = args->heads;
    a.v_dim = args->v_dim;
    a.n_states = args->n_states;
    a.out = args->out;
    a.out_row_stride = args->out_row_stride ? args->out_row_stride : (int64_t)args->heads * args->v_dim;
    a.out_lse = args->out_lse;
    a.out_lse_row_stride = args->out_lse_row_stride ? args->out_lse_row_stride : args->heads;
    int64_t strides = a.out_row_stride | args->v_dim;
    uintptr_t pointers = (uintptr_t)args->out;
    for (int32_t i = 0; i < args->n_states; i++) {
        const cpa_partial s = cpa_partial_resolve(args->states[i], args->heads, args->v_dim);
        a.states[i] = {s.o, s.lse, s.o_row_stride, s.lse_row_stride, args->row_maps ? args->row_maps[i] : NULL};
        strides |= s.o_row_stride;
        pointers |= (uintptr_t)s.o;
    }
    const bool vectors = strides % 4 == 0 && pointers % 16 == 0;
    while (a.lanes_shift < warp && (vectors ? 4 : 1) << a.lanes_shift < args->v_dim) a.lanes_shift++;
    if (args->out_dtype == CPA_F32) {
        launch<float>(a, vectors, stream);
    } else if (args->out_dtype == CPA_BF16) {
        launch<__nv_bfloat16>(a, vectors, stream);
    } else {
        launch<__half>(a, vectors, stream);
    }
    return cpa_cuda_launched(stream, "merge");
}
