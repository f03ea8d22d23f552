/* kv_write: new keys and values into their pages, by slot mapping. Threads walk over the new rows, UNIT elements each,
 * so that a token's reads are contiguous; blockIdx.y says keys or values. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element.cuh"

namespace {

constexpr int THREADS = 256;

/* Keys or values: where they come from and where they go. */
struct tensor {
    const void *from;
    void *to;
    int32_t dim;
    int64_t block_stride, token_stride, head_stride;
};

struct write_args {
    tensor tensors[2];
    int64_t tokens;
    int32_t heads, block_shift;
    int64_t slots;
    const int64_t *slot_mapping;
    cpa_cuda_bad_slot *bad_slot;
};

template <typename To, typename From>
__device__ To converted(From x) {
    return from_float<To>(to_float(x));
}
/* The same dtype: the same bits, those of a NaN as well. */
template <>
__device__ float converted(float x) {
    return x;
}
template <>
__device__ __nv_bfloat16 converted(__nv_bfloat16 x) {
    return x;
}
template <>
__device__ __half converted(__half x) {
    return x;
}

template <typename From, typename To, int UNIT>
__device__ void convert(To *to, const From *from) {
    struct alignas(UNIT * sizeof(From) < 16 ? UNIT * sizeof(From) : 16) source { From element[UNIT]; };
    struct alignas(UNIT * sizeof(To) < 16 ? UNIT * sizeof(To) : 16) target { To element[UNIT]; };
    const source in = *(const source *)from;
    target out;
#pragma unroll
    for (int i = 0; i < UNIT; i++) out.element[i] = converted<To>(in.element[i]);
    *(target *)to = out;
}

template <typename From, typename To, int UNIT>
__global__ void __launch_bounds__(THREADS) kv_write(const __grid_constant__ write_args a) {
    const tensor t = a.tensors[blockIdx.y];
    const int32_t head_units = t.dim / UNIT, token_units = a.heads * head_units;
    const int64_t units = a.tokens * token_units, step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < units; i += step) {
        const int64_t token = i / token_units;
        const int32_t in_token = (int32_t)(i - token * token_units), head = in_token / head_units;
        const int64_t slot = a.slot_mapping[token];
        if (slot == -1) continue;
        if (slot < -1 || slot >= a.slots) {
            if (atomicExch(&a.bad_slot->found, 1) == 0) a.bad_slot->token = token, a.bad_slot->slot = slot;
            continue;
        }
        const int64_t block = slot >> a.block_shift, offset = slot & ((1 << a.block_shift) - 1);
        const int64_t at = block * t.block_stride + offset * t.token_stride + head * t.head_stride;
        convert<From, To, UNIT>((To *)t.to + at + (in_token - head * head_units) * UNIT, (const From *)t.from + i * UNIT);
    }
}

template <typename From, typename To, int UNIT>
void launch(const write_args &a, cpa_stream *stream) {
    const int64_t most_ctas = 1 << 15, widest = a.tensors[0].dim > a.tensors[1].dim ? a.tensors[0].dim : a.tensors[1].dim;
    int64_t ctas = (a.tokens * a.heads * (widest / UNIT) + THREADS - 1) / THREADS;
    dim3 grid((unsigned)(ctas < most_ctas ? ctas : most_ctas), 2);
    kv_write<From, To, UNIT><<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(a);
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

}  // namespace

extern "C" cpa_status cpa_cuda_kv_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    if (args->tokens == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    int32_t block_shift = 0;
    while (kv.block_size >> block_shift > 1) block_shift++;
    const write_args a = {
        {{args->k, kv.k, kv.k_dim, kv.k_block_stride, kv.k_token_stride, kv.k_head_stride},
         {args->v, kv.v, kv.v_dim, kv.v_block_stride, kv.v_token_stride, kv.v_head_stride}},
        args->tokens,
        kv.kv_heads,
        block_shift,
        kv.num_blocks * kv.block_size,
        args->slot_mapping,
        ((cpa_cuda_stream *)stream)->bad_slot,
    };
    const int64_t strides = kv.k_block_stride | kv.k_token_stride | kv.k_head_stride | kv.v_block_stride |
                            kv.v_token_stride | kv.v_head_stride | kv.k_dim | kv.v_dim;
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
