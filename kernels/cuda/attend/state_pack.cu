/* state_pack and state_merge_packed: partial states cut by heads into messages, and the merge of such. A warp takes one
 * head of a row: rows are few, and what counts is how many loads wait for one another. */
#include "base/dependent.cuh"
#include "kernels/cuda/attend/state.cuh"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"

namespace {

constexpr int THREADS = 128, WARP_LANES = 32, WARPS = THREADS / WARP_LANES;

/* The head of a row that a warp takes; row = rows past the last. */
struct head_of_row {
    int64_t row;
    int32_t head;
};
__device__ head_of_row own_head(int64_t rows, int32_t heads) {
    const int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_LANES, row = index / heads;
    return {row < rows ? row : rows, (int32_t)(index - row * heads)};
}

template <typename Args>
cpa_status launch_heads(void (*kernel)(Args), const Args &args, const char *what, cpa_stream *stream) {
    const int64_t ctas = (args.rows * args.heads + WARPS - 1) / WARPS;
    if (ctas > INT32_MAX) return cpa_cuda_unsupported(stream, "more rows than a grid counts", args.rows);
    return cpa_cuda_check(&stream->error,
                          launch_dependent(kernel, dim3((unsigned)ctas), THREADS, args,
                                           cpa_cuda_starts_early(stream, ctas), cpa_cuda_handle(stream)),
                          what);
}

/* cpa_packed_width of a dtype of elements. */
template <typename T>
__device__ int64_t packed_width(int32_t v_dim) {
    return v_dim + (int64_t)(sizeof(float) / sizeof(T));
}

/* An LSE behind the elements of a head, which need not be aligned to it. */
__device__ void store_lse(float *behind, float lse) {
    *behind = lse;
}
template <typename Half>
__device__ void store_lse(Half *behind, float lse) {
    const uint32_t bits = __float_as_uint(lse);
    ((uint16_t *)behind)[0] = (uint16_t)bits;
    ((uint16_t *)behind)[1] = (uint16_t)(bits >> 16);
}
__device__ float load_lse(const float *behind) {
    return *behind;
}
template <typename Half>
__device__ float load_lse(const Half *behind) {
    const uint16_t *halves = (const uint16_t *)behind;
    return __uint_as_float((uint32_t)halves[1] << 16 | halves[0]);
}

/* ---- state_pack ---- */

struct pack_args {
    const void *o;
    const float *lse;
    int64_t o_row_stride, lse_row_stride;
    const int32_t *row_map;
    int64_t rows;
    int32_t heads, v_dim, n_slices;
    void *slices[CPA_MERGE_MAX_STATES];
};

/* Keeps the bits of what has the dtype already. */
__device__ void convert(float &to, float from) {
    to = from;
}
template <typename T>
__device__ void convert(T &to, T from) {
    to = from;
}
template <typename Half>
__device__ void convert(Half &to, float from) {
    to = from_float<Half>(from);
}

template <typename In, typename Out>
__global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ pack_args a) {
    dependent_wait();
    dependent_allow();
    const head_of_row at = own_head(a.rows, a.heads);
    const int lane = threadIdx.x % WARP_LANES;
    if (at.row >= a.rows) return;
    /* The last slice that begins at this head or before it. */
    const int32_t slice = (int32_t)(((int64_t)(at.head + 1) * a.n_slices - 1) / a.heads);
    if (!a.slices[slice]) return;
    const int64_t first = cpa_slice_begin(a.heads, a.n_slices, slice);
    const int64_t heads = cpa_slice_begin(a.heads, a.n_slices, slice + 1) - first;
    Out *to = (Out *)a.slices[slice] + (at.row * heads + at.head - first) * packed_width<Out>(a.v_dim);
    const int64_t from = a.row_map ? a.row_map[at.row] : at.row;
    const In *o = (const In *)a.o + from * a.o_row_stride + (int64_t)at.head * a.v_dim;
    for (int32_t i = lane; i < a.v_dim; i += WARP_LANES) {
        if (from < 0) {
            to[i] = from_float<Out>(0);
        } else {
            convert(to[i], o[i]);
        }
    }
    if (lane == 0) store_lse(to + a.v_dim, from < 0 ? -INFINITY : a.lse[from * a.lse_row_stride + at.head]);
}

template <typename Out>
cpa_status launch_pack(const pack_args &a, cpa_dtype o_dtype, cpa_stream *stream) {
    return launch_heads(o_dtype == CPA_F32 ? pack<float, Out> : pack<Out, Out>, a, "state_pack", stream);
}

/* ---- state_merge_packed ---- */

struct merge_args {
    const void *parts[CPA_MERGE_MAX_STATES];
    const int32_t *order;
    int64_t rows;
    int32_t heads, v_dim, n_parts, foreign_lse;
    void *out;
    int64_t out_row_stride;
    float *out_lse;
    int64_t out_lse_row_stride;
    const float *sink_logits;
    const float *out_scale; /* where Out is a code */
};

/* An element of the result; code of e4m3: of a scale, given its inverse. */
template <typename Out>
__device__ void store_result(Out &to, float value, float) {
    to = from_float<Out>(value);
}
__device__ void store_result(uint8_t &to, float value, float inverse) {
    to = e4m3_code(value * inverse);
}

/* A lane has UNITS elements, a warp's lanes apart. */
template <typename In, typename Out, int UNITS>
__global__ void __launch_bounds__(THREADS) merge_packed(const __grid_constant__ merge_args a) {
    constexpr int AT_ONCE = 4; /* parts whose loads are under way together */
    dependent_wait();
    dependent_allow();
    const head_of_row at = own_head(a.rows, a.heads);
    const int lane = threadIdx.x % WARP_LANES;
    if (at.row >= a.rows) return;
    const int64_t begin = (at.row * a.heads + at.head) * packed_width<In>(a.v_dim);
    float value[UNITS] = {}, lse = -INFINITY;
    for (int32_t first = 0; first < a.n_parts; first += AT_ONCE) {
        float part[AT_ONCE][UNITS], part_lse[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int32_t n = first + i, of = n >= a.n_parts ? -1 : a.order ? a.order[at.row * a.n_parts + n] : n;
            const In *from = of < 0 || of >= a.n_parts ? nullptr : (const In *)a.parts[of] + begin;
            part_lse[i] = from ? counted_lse(load_lse(from + a.v_dim), a.foreign_lse) : -INFINITY;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int32_t column = u * WARP_LANES + lane;
                part[i][u] = from && column < a.v_dim ? to_float(from[column]) : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) add_part(value, fold_lse(lse, part_lse[i], 0), part[i]);
    }
    Out *out = (Out *)a.out + at.row * a.out_row_stride + (int64_t)at.head * a.v_dim;
    const float kept = a.sink_logits ? sink_factor(a.sink_logits, at.head, lse) : 1;
    const float inverse = a.out_scale ? __fdiv_rn(1, __ldg(a.out_scale)) : 1;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int32_t column = u * WARP_LANES + lane;
        if (column < a.v_dim) store_result(out[column], value[u] * kept, inverse);
    }
    if (a.out_lse && lane == 0) a.out_lse[at.row * a.out_lse_row_stride + at.head] = lse;
}

template <typename In, typename Out>
cpa_status launch_merge(const merge_args &a, cpa_stream *stream) {
    const char *what = "state_merge_packed";
    if (a.v_dim <= 4 * WARP_LANES) return launch_heads(merge_packed<In, Out, 4>, a, what, stream);
    if (a.v_dim <= 8 * WARP_LANES) return launch_heads(merge_packed<In, Out, 8>, a, what, stream);
    return launch_heads(merge_packed<In, Out, CPA_MAX_HEAD_DIM / WARP_LANES>, a, what, stream);
}

template <typename In>
cpa_status launch_merge_to(const merge_args &a, cpa_dtype out_dtype, cpa_stream *stream) {
    return out_dtype == CPA_F32        ? launch_merge<In, float>(a, stream)
           : out_dtype == CPA_BF16     ? launch_merge<In, __nv_bfloat16>(a, stream)
           : out_dtype == CPA_FP8_E4M3 ? launch_merge<In, uint8_t>(a, stream)
                                       : launch_merge<In, __half>(a, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_state_pack(const cpa_state_pack_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    pack_args a = {};
    a.o = args->o;
    a.lse = args->lse;
    a.o_row_stride = args->o_row_stride;
    a.lse_row_stride = args->lse_row_stride;
    a.row_map = args->row_map;
    a.rows = args->rows;
    a.heads = args->heads;
    a.v_dim = args->v_dim;
    a.n_slices = args->n_slices;
    for (int32_t i = 0; i < args->n_slices; i++) a.slices[i] = args->slices[i];
    return args->dtype == CPA_F32    ? launch_pack<float>(a, args->o_dtype, stream)
           : args->dtype == CPA_BF16 ? launch_pack<__nv_bfloat16>(a, args->o_dtype, stream)
                                     : launch_pack<__half>(a, args->o_dtype, stream);
}

extern "C" cpa_status cpa_cuda_state_merge_packed(const cpa_state_merge_packed_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    merge_args a = {};
    for (int32_t i = 0; i < args->n_parts; i++) a.parts[i] = args->parts[i];
    a.order = args->order;
    a.rows = args->rows;
    a.heads = args->heads;
    a.v_dim = args->v_dim;
    a.n_parts = args->n_parts;
    a.foreign_lse = args->foreign_lse;
    a.out = args->out;
    a.out_row_stride = args->out_row_stride;
    a.out_lse = args->out_lse;
    a.out_lse_row_stride = args->out_lse_row_stride;
    a.sink_logits = args->sink_logits;
    a.out_scale = args->out_scale;
    return args->dtype == CPA_F32    ? launch_merge_to<float>(a, args->out_dtype, stream)
           : args->dtype == CPA_BF16 ? launch_merge_to<__nv_bfloat16>(a, args->out_dtype, stream)
                                     : launch_merge_to<__half>(a, args->out_dtype, stream);
}
