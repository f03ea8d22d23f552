/* kv_write: new keys and values into their pages, by slot mapping. blockIdx.y says keys or values. */
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/cache/kv_quantise.h"
#include "kernels/cuda/cache/latent_rows.h"
#include "kernels/cuda/cache/turboquant_rows.h"

namespace {

constexpr int THREADS = 256, WARP_LANES = 32, AT_ONCE = 4;

/* Keys or values: where they come from and where they go. */
struct tensor {
    const void *from;
    int64_t row_stride, gap; /* elements from token to token of what comes, and between its heads */
    void *to;
    int32_t dim;
    int64_t block_stride, token_stride, head_stride;
};

struct write_args {
    tensor tensors[2];
    int64_t tokens;
    int32_t heads, block_shift, parts; /* parts 1: there are no values but those in keys */
    int64_t slots;
    const int64_t *slot_mapping;
    cpa_cuda_bad_slot *bad_slot;
    uint8_t *nonfinite;
};

/* A warp moves the keys or the values of a token; its lanes have AT_ONCE units each under way together. Streaming hints
 * would cost 1 - 3% on an H200. APART: there are gaps between heads, and fewer CTAs a multiprocessor, as ptxas, left to
 * itself, spills to have more. */
template <typename From, typename To, int UNIT, bool APART>
__global__ void __launch_bounds__(THREADS, APART ? 3 : 0) kv_write(const __grid_constant__ write_args a) {
    const tensor t = a.tensors[blockIdx.y];
    const int32_t head_units = t.dim / UNIT, token_units = a.heads * head_units, lane = threadIdx.x % WARP_LANES;
    const int64_t token = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP_LANES;
    if (token >= a.tokens) return;
    const int64_t slot = a.slot_mapping[token];
    if (slot == -1) return;
    if (slot < -1 || slot >= a.slots) {
        if (lane == 0 && atomicExch(&a.bad_slot->found, 1) == 0) a.bad_slot->token = token, a.bad_slot->slot = slot;
        return;
    }
    const int64_t block = slot >> a.block_shift, offset = slot & ((1 << a.block_shift) - 1);
    const unit_of<From, UNIT> *from = (const unit_of<From, UNIT> *)((const From *)t.from + token * t.row_stride);
    To *to = (To *)t.to + block * t.block_stride + offset * t.token_stride;
    bool nonfinite = false;
    for (int32_t first = lane; first < token_units; first += AT_ONCE * WARP_LANES) {
        unit_of<From, UNIT> value[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (const int32_t unit = first + i * WARP_LANES; unit < token_units)
                value[i] = from[APART ? unit + unit / head_units * (t.gap / UNIT) : unit];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int32_t unit = first + i * WARP_LANES, head = unit / head_units;
            if (unit >= token_units) continue;
            unit_of<To, UNIT> out;
#pragma unroll
            for (int e = 0; e < UNIT; e++) {
                out.element[e] = converted<To>(value[i].element[e]);
                nonfinite |= is_nonfinite(to_float(value[i].element[e]));
            }
            *(unit_of<To, UNIT> *)(to + head * t.head_stride + (unit - head * head_units) * UNIT) = out;
        }
    }
    if (nonfinite && a.nonfinite) a.nonfinite[token] = 1;
}

template <typename From, typename To, int UNIT>
void launch(const write_args &a, cpa_stream *stream) {
    const dim3 grid((unsigned)((a.tokens * WARP_LANES + THREADS - 1) / THREADS), a.parts);
    const bool apart = a.tensors[0].gap != 0 || a.tensors[1].gap != 0;
    const auto kernel = apart ? kv_write<From, To, UNIT, true> : kv_write<From, To, UNIT, false>;
    kernel<<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
}

template <typename From, typename To>
void launch_unit(const write_args &a, bool vectors, cpa_stream *stream) {
    constexpr int UNIT = 8;
    if (vectors) {
        launch<From, To, UNIT>(a, stream);
    } else {
        launch<From, To, 1>(a, stream);
    }
}

template <typename From>
void launch_from(const write_args &a, cpa_dtype to, bool vectors, cpa_stream *stream) {
    if (to == CPA_F32) {
        launch_unit<From, float>(a, vectors, stream);
    } else if (to == CPA_BF16) {
        launch_unit<From, __nv_bfloat16>(a, vectors, stream);
    } else {
        launch_unit<From, __half>(a, vectors, stream);
    }
}

/* Into a cache whose rows lie in runs: a thread an element, neighbouring ones of a token. */
struct runs_args {
    write_args write;
    cpa_dtype from, to;
    int32_t run_shift[2]; /* log2 of the elements of a run, of keys and of values */
    int64_t run_stride[2];
};

__global__ void __launch_bounds__(THREADS) kv_write_runs(const __grid_constant__ runs_args r) {
    const write_args &a = r.write;
    const tensor t = a.tensors[blockIdx.y];
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x, width = (int64_t)a.heads * t.dim;
    const int64_t token = index / width;
    if (token >= a.tokens) return;
    const int64_t slot = a.slot_mapping[token];
    const int32_t column = (int32_t)(index - token * width), head = column / t.dim, d = column - head * t.dim;
    if (slot == -1) return;
    if (slot < -1 || slot >= a.slots) {
        if (column == 0 && atomicExch(&a.bad_slot->found, 1) == 0) a.bad_slot->token = token, a.bad_slot->slot = slot;
        return;
    }
    const int32_t shift = r.run_shift[blockIdx.y];
    const int64_t block = slot >> a.block_shift, offset = slot & ((1 << a.block_shift) - 1);
    const int64_t from = token * t.row_stride + column + head * t.gap;
    const int64_t to = block * t.block_stride + offset * t.token_stride + head * t.head_stride +
                       (d >> shift) * r.run_stride[blockIdx.y] + (d & ((1 << shift) - 1));
    const float value = read_element(t.from, r.from, from);
    if (is_nonfinite(value) && a.nonfinite) a.nonfinite[token] = 1;
    if (r.from != r.to) {
        write_element(t.to, r.to, to, value);
    } else if (r.to == CPA_F32) { /* the same bits, those of a NaN as well */
        ((uint32_t *)t.to)[to] = ((const uint32_t *)t.from)[from];
    } else {
        ((uint16_t *)t.to)[to] = ((const uint16_t *)t.from)[from];
    }
}

cpa_status write_runs(const write_args &a, cpa_dtype from, const cpa_kv_view &kv, cpa_stream *stream) {
    const int64_t run_k = (int64_t)kv.block_size * cpa_kv_key_run(kv.dtype);
    const runs_args r = {
        a,
        from,
        kv.dtype,
        {cpa_kv_run_shift(&kv, CPA_KEYS), cpa_kv_run_shift(&kv, CPA_VALUES)},
        {run_k, kv.block_size}};
    const int64_t elements = a.tokens * a.heads * (kv.k_dim > kv.v_dim ? kv.k_dim : kv.v_dim);
    const int64_t ctas = (elements + THREADS - 1) / THREADS;
    if (ctas > INT32_MAX) return cpa_cuda_unsupported(stream, "kv_write: more elements than a grid takes", elements);
    kv_write_runs<<<dim3((unsigned)ctas, 2), THREADS, 0, cpa_cuda_handle(stream)>>>(r);
    return cpa_cuda_launched(stream, "kv_write");
}

} // namespace

extern "C" cpa_status cpa_cuda_kv_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    if (args->tokens == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (cpa_dtype_has_tiles(args->kv.dtype)) return cpa_cuda_latent_write(args, stream);
    if (cpa_dtype_is_turboquant(args->kv.dtype)) return cpa_cuda_turboquant_write(args, stream);
    if (cpa_dtype_is_quantised(args->kv.dtype)) return cpa_cuda_kv_quantise(args, stream);
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    const int64_t k_row_stride = args->k_row_stride ? args->k_row_stride : (int64_t)kv.kv_heads * kv.k_dim;
    const int64_t v_row_stride = kv.v_in_k            ? k_row_stride
                                 : args->v_row_stride ? args->v_row_stride
                                                      : (int64_t)kv.kv_heads * kv.v_dim;
    const int64_t k_gap = args->k_head_stride ? args->k_head_stride - kv.k_dim : 0,
                  v_gap = args->v_head_stride && !kv.v_in_k ? args->v_head_stride - kv.v_dim : 0;
    const write_args a = {
        {{args->k, k_row_stride, k_gap, kv.k, kv.k_dim, kv.k_block_stride, kv.k_token_stride, kv.k_head_stride},
         {args->v, v_row_stride, v_gap, kv.v, kv.v_dim, kv.v_block_stride, kv.v_token_stride, kv.v_head_stride}},
        args->tokens,
        kv.kv_heads,
        cpa_cuda_log2(kv.block_size),
        cpa_kv_parts(&kv),
        kv.num_blocks * kv.block_size,
        args->slot_mapping,
        ((cpa_cuda_stream *)stream)->bad_slot,
        args->nonfinite,
    };
    if (kv.layout == CPA_VLLM_X) return write_runs(a, args->dtype, kv, stream);
    const int64_t strides = kv.k_block_stride | kv.k_token_stride | kv.k_head_stride | kv.v_block_stride |
                            kv.v_token_stride | kv.v_head_stride | kv.k_dim | kv.v_dim | k_row_stride | v_row_stride |
                            k_gap | v_gap;
    const uintptr_t pointers = (uintptr_t)args->k | (uintptr_t)args->v | (uintptr_t)kv.k | (uintptr_t)kv.v;
    const bool vectors = strides % 8 == 0 && pointers % 16 == 0;
    if (args->dtype == CPA_F32) {
        launch_from<float>(a, kv.dtype, vectors, stream);
    } else if (args->dtype == CPA_BF16) {
        launch_from<__nv_bfloat16>(a, kv.dtype, vectors, stream);
    } else {
        launch_from<__half>(a, kv.dtype, vectors, stream);
    }
    return cpa_cuda_launched(stream, "kv_write");
}
