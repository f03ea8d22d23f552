/* merge: partial states of the same rows over disjoint keys, as the left fold of the two-state merge.
 *
 * A warp merges up to 32 rows of heads, fewer where there are too few of them for all warps of the device. First each
 * lane folds the LSEs of one of them, which gives the weights of every step; then the lanes share the elements of one
 * row after the other. The exponentials are computed once a row that way, and the loads of several rows and states are
 * under way together.
 *
 * Few rows, as in decode, are merged by a warp each, in another kernel: there it counts how many loads wait for one
 * another. Its lanes load the LSEs of all states at once, and the elements before the weights are known.
 *
 * Either may have to wait for states that other devices store here. What comes behind it may be placed while it merges.
 */
#include <math.h>
#include <type_traits>

#include "base/dependent.cuh"
#include "base/stored.cuh"
#include "kernels/cuda/attend/state.cuh"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"

namespace {

constexpr int THREADS = 128, WARP_LANES = 32, WARPS = THREADS / WARP_LANES;
constexpr int LEAST_WARP_ROWS = 4;  /* of heads: fewer are not worth what a warp does for all of them */
constexpr int FEW_ROWS = 4 * WARPS; /* of heads, for each multiprocessor */
/* Dynamic shared memory that any device gives to any kernel: 48 KiB less what is static. More has to be asked for, and
 * not every device has what CPA_MERGE_MAX_STATES take. */
constexpr int UNASKED_BYTES = 46 << 10;

struct state {
    const float *o, *lse;
    int64_t o_row_stride, lse_row_stride;
    const int32_t *map;
};

struct merge_args {
    state states[CPA_MERGE_MAX_STATES];
    int64_t rows;
    int32_t heads, v_dim, n_states;
    int32_t warp_rows;   /* rows of heads of a warp */
    int32_t lanes_shift; /* log2 of the lanes that share a row of a head */
    void *out;
    const float *out_scale; /* scale of codes */
    int64_t out_row_stride;
    float *out_lse;
    int64_t out_lse_row_stride;
    cpa_store_batch awaited; /* no parts: the states are there */
    int32_t foreign_lse;
};

/* Past the first-level cache, as nothing is read twice; without streaming hints, which cost 3 - 6%. */
__device__ void load_unit(const float *from, float (&value)[4]) {
    const float4 v = __ldcg((const float4 *)from);
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}
__device__ void load_unit(const float *from, float (&value)[1]) {
    value[0] = *from;
}
/* Stored times `factor`, if they are codes: Out is then e4m3_codes. */
template <typename Out>
__device__ void store_unit(void *out, int64_t at, const float (&value)[4], float) {
    const uint2 pairs = make_uint2(pack_pair<Out>(value[0], value[1]), pack_pair<Out>(value[2], value[3]));
    *(uint2 *)((Out *)out + at) = pairs;
}
template <>
__device__ void store_unit<float>(void *out, int64_t at, const float (&value)[4], float) {
    *(float4 *)((float *)out + at) = make_float4(value[0], value[1], value[2], value[3]);
}
template <>
__device__ void store_unit<e4m3_codes>(void *out, int64_t at, const float (&value)[4], float factor) {
    const uint32_t low = e4m3_pair(value[0] * factor, value[1] * factor);
    *(uint32_t *)((char *)out + at) = low | (uint32_t)e4m3_pair(value[2] * factor, value[3] * factor) << 16;
}
template <typename Out>
__device__ void store_unit(void *out, int64_t at, const float (&value)[1], float) {
    ((Out *)out)[at] = from_float<Out>(value[0]);
}

/* The factor of store_unit. */
template <typename Out>
__device__ float factor_of(const merge_args &a) {
    return std::is_same<Out, e4m3_codes>::value ? __fdiv_rn(1, __ldg(a.out_scale)) : 1;
}

/* A row of a head; row < 0 past the last. */
struct place {
    int32_t row, head;
};

/* Each lane folds the LSEs of its row and head, and leaves the steps in steps[state * WARP_LANES + lane]. */
__device__ float fold_lses(const merge_args &a, place at, fold_step *steps, int lane) {
    constexpr int AT_ONCE = 4; /* loads under way together */
    float lse = -INFINITY;
    for (int32_t begin = 0; begin < a.n_states; begin += AT_ONCE) {
        int32_t row[AT_ONCE];
        float next[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const state &from = a.states[min(begin + i, a.n_states - 1)];
            row[i] = at.row < 0 || !from.map ? at.row : from.map[at.row];
            next[i] =
                row[i] < 0 ? -INFINITY : counted_lse(from.lse[row[i] * from.lse_row_stride + at.head], a.foreign_lse);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (begin + i < a.n_states) steps[(begin + i) * WARP_LANES + lane] = fold_lse(lse, next[i], row[i]);
    }
    return lse;
}

/* UNIT elements of ROWS rows, the `apart`-th after each other from `first`, through all states. */
template <typename Out, int UNIT, int ROWS, int AT_ONCE>
__device__ void fold_rows(const merge_args &a, const place *places, const fold_step *steps, int first, int apart,
                          int32_t column, float factor) {
    float value[ROWS][UNIT] = {};
    for (int32_t begin = 0; begin < a.n_states; begin += AT_ONCE) {
        fold_step step[ROWS][AT_ONCE];
        float part[ROWS][AT_ONCE][UNIT];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int at = first + r * apart;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const state &s = a.states[min(begin + i, a.n_states - 1)];
                step[r][i] = steps[min(begin + i, a.n_states - 1) * WARP_LANES + at];
                if (begin + i >= a.n_states) step[r][i].b = 0;
                if (step[r][i].b != 0)
                    load_unit(s.o + step[r][i].from * s.o_row_stride + (int64_t)places[at].head * a.v_dim + column,
                              part[r][i]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                add_part(value[r], step[r][i], part[r][i]);
            }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const place at = places[first + r * apart];
        if (at.row >= 0)
            store_unit<Out>(a.out, at.row * a.out_row_stride + (int64_t)at.head * a.v_dim + column, value[r], factor);
    }
}

/* The lane that writes a row's LSE has read it before, and so has the lane that writes an element: the result may take
 * the place of the first state. */
template <typename Out, int UNIT, int ROWS, int AT_ONCE>
__global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ merge_args a) {
    /* Rounding to codes without the instruction takes the registers of a second row. */
    constexpr int TOGETHER = std::is_same<Out, e4m3_codes>::value && !HAS_CODES ? 1 : ROWS;
    if (!await_stored(a.awaited)) return;
    extern __shared__ __align__(16) char shared[];
    __shared__ place all_places[THREADS];
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int lanes = 1 << a.lanes_shift, groups = WARP_LANES >> a.lanes_shift;
    fold_step *steps = (fold_step *)shared + warp * WARP_LANES * a.n_states;
    place *places = all_places + warp * WARP_LANES;
    const int64_t index = ((int64_t)blockIdx.x * WARPS + warp) * a.warp_rows + lane, row = index / a.heads;
    const place own = {lane < a.warp_rows && row < a.rows ? (int32_t)row : -1, (int32_t)(index - row * a.heads)};
    places[lane] = own;
    const float lse = fold_lses(a, own, steps, lane), factor = factor_of<Out>(a);
    __syncwarp();
    for (int32_t column = (lane & (lanes - 1)) * UNIT; column < a.v_dim; column += lanes * UNIT) {
        int r = lane >> a.lanes_shift;
        for (; r + (TOGETHER - 1) * groups < a.warp_rows; r += TOGETHER * groups)
            fold_rows<Out, UNIT, TOGETHER, AT_ONCE>(a, places, steps, r, groups, column, factor);
        for (; r < a.warp_rows; r += groups)
            fold_rows<Out, UNIT, 1, AT_ONCE>(a, places, steps, r, groups, column, factor);
    }
    if (a.out_lse && own.row >= 0) a.out_lse[own.row * a.out_lse_row_stride + own.head] = lse;
}

/* A warp a row of a head, of at most WARP_LANES states. */
template <typename Out>
__global__ void __launch_bounds__(THREADS) merge_few(const __grid_constant__ merge_args a) {
    constexpr int UNIT = 4, AT_ONCE = 4;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int32_t index = (int32_t)blockIdx.x * WARPS + warp, row = index / a.heads, head = index - row * a.heads;
    if (!await_stored(a.awaited) || row >= a.rows) return;
    int32_t own_from = -1; /* of the state of this lane */
    if (lane < a.n_states) own_from = a.states[lane].map ? a.states[lane].map[row] : row;
    float own_lse = -INFINITY;
    if (own_from >= 0)
        own_lse = counted_lse(a.states[lane].lse[own_from * a.states[lane].lse_row_stride + head], a.foreign_lse);
    const float factor = factor_of<Out>(a);
    float lse = -INFINITY;
    for (int32_t first = 0; first < a.v_dim; first += WARP_LANES * UNIT) {
        const int32_t column = first + lane * UNIT;
        float value[UNIT] = {};
        lse = -INFINITY;
        for (int32_t begin = 0; begin < a.n_states; begin += AT_ONCE) {
            float part[AT_ONCE][UNIT] = {};
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) { /* a lane past the last state has none */
                const int64_t from = __shfl_sync(0xffffffff, own_from, begin + i);
                const state &s = a.states[min(begin + i, a.n_states - 1)];
                if (from >= 0 && column < a.v_dim)
                    load_unit(s.o + from * s.o_row_stride + (int64_t)head * a.v_dim + column, part[i]);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                add_part(value, fold_lse(lse, __shfl_sync(0xffffffff, own_lse, begin + i), 0), part[i]);
            }
        }
        if (column < a.v_dim)
            store_unit<Out>(a.out, row * a.out_row_stride + (int64_t)head * a.v_dim + column, value, factor);
    }
    if (a.out_lse && lane == 0) a.out_lse[row * a.out_lse_row_stride + head] = lse;
}

template <typename Out>
cpa_status launch_few(const merge_args &a, cpa_stream *stream) {
    const int64_t ctas = (a.rows * a.heads + WARPS - 1) / WARPS;
    return cpa_cuda_check(&stream->error,
                          launch_dependent(merge_few<Out>, dim3((unsigned)ctas), THREADS, a,
                                           cpa_cuda_starts_early(stream, ctas), cpa_cuda_handle(stream)),
                          "merge");
}

template <typename Out, int UNIT, int ROWS, int AT_ONCE>
cpa_status launch_kernel(const merge_args &a, cpa_stream *stream) {
    static uint64_t prepared;
    const int bytes = THREADS * a.n_states * (int)sizeof(fold_step);
    const int most_bytes =
        min(THREADS * CPA_MERGE_MAX_STATES * (int)sizeof(fold_step), (int)stream->device->caps.shared_bytes);
    const int64_t cta_rows = (int64_t)WARPS * a.warp_rows, ctas = (a.rows * a.heads + cta_rows - 1) / cta_rows;
    if (bytes > UNASKED_BYTES) {
        cpa_status status =
            cpa_cuda_shared_memory(stream, (const void *)merge<Out, UNIT, ROWS, AT_ONCE>, most_bytes, &prepared);
        if (status != CPA_OK) return status;
    }
    return cpa_cuda_check(
        &stream->error,
        launch_dependent(merge<Out, UNIT, ROWS, AT_ONCE>, dim3((unsigned)ctas), THREADS, a,
                         cpa_cuda_starts_early(stream, ctas), cpa_cuda_handle(stream), bytes),
        "merge");
}

template <typename Out>
cpa_status launch(const merge_args &a, bool vectors, cpa_stream *stream) {
    const int64_t few = (int64_t)cpa_cuda_device_of(stream)->multiprocessors * FEW_ROWS;
    if constexpr (!std::is_same<Out, e4m3_codes>::value)
        if (!vectors) return launch_kernel<Out, 1, 1, 4>(a, stream);
    if (a.n_states <= WARP_LANES && a.rows * a.heads <= few) return launch_few<Out>(a, stream);
    if (a.n_states <= 2) return launch_kernel<Out, 4, 2, 2>(a, stream);
    return a.n_states % 3 == 0 ? launch_kernel<Out, 4, 1, 3>(a, stream) : launch_kernel<Out, 4, 1, 4>(a, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_merge(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream) {
    const int32_t warp = 5; /* log2 of its lanes */
    if (args->rows == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "merge: more rows than a 32-bit index counts", args->rows);
    if (args->state_dtype != CPA_F32 || args->tail_rows > 0 || args->lse_head_stride || args->out_lse_head_stride ||
        args->lse_base2 || args->sink_logits)
        return cpa_cuda_merge_forms(args, awaited, stream);
    merge_args a = {};
    a.rows = args->rows;
    a.heads = args->heads;
    a.v_dim = args->v_dim;
    a.n_states = args->n_states;
    a.out = args->out;
    a.out_scale = args->out_scale;
    a.out_row_stride = args->out_row_stride ? args->out_row_stride : (int64_t)args->heads * args->v_dim;
    a.out_lse = args->out_lse;
    a.out_lse_row_stride = args->out_lse_row_stride ? args->out_lse_row_stride : args->heads;
    if (awaited) a.awaited = *awaited;
    a.foreign_lse = args->foreign_lse;
    int64_t strides = a.out_row_stride | args->v_dim;
    uintptr_t pointers = (uintptr_t)args->out;
    for (int32_t i = 0; i < args->n_states; i++) {
        const cpa_partial s = cpa_partial_resolve(args->states[i], args->heads, args->v_dim);
        a.states[i] = {s.o, s.lse, s.o_row_stride, s.lse_row_stride, args->row_maps ? args->row_maps[i] : NULL};
        strides |= s.o_row_stride;
        pointers |= (uintptr_t)s.o;
    }
    const int64_t warps = (int64_t)cpa_cuda_device_of(stream)->multiprocessors * WARPS;
    a.warp_rows = WARP_LANES;
    while (a.warp_rows > LEAST_WARP_ROWS && a.rows * a.heads < warps * a.warp_rows) a.warp_rows /= 2;
    const bool vectors = strides % 4 == 0 && pointers % 16 == 0;
    while (a.lanes_shift < warp && (vectors ? 4 : 1) << a.lanes_shift < args->v_dim) a.lanes_shift++;
    if (args->out_dtype == CPA_FP8_E4M3)
        return vectors ? launch<e4m3_codes>(a, true, stream) : cpa_cuda_merge_forms(args, awaited, stream);
    return args->out_dtype == CPA_F32    ? launch<float>(a, vectors, stream)
           : args->out_dtype == CPA_BF16 ? launch<__nv_bfloat16>(a, vectors, stream)
                                         : launch<__half>(a, vectors, stream);
}
