/* join_columns and sum_parts: what ranks have computed parts of. */
#include "base/dependent.cuh"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t MOST_CTAS = 1 << 16;

unsigned ctas_of(int64_t units) {
    const int64_t ctas = (units + THREADS - 1) / THREADS;
    return (unsigned)(ctas < MOST_CTAS ? ctas : MOST_CTAS);
}

/* ---- join_columns: a part in each y of the grid ---- */

struct join_args {
    const void *parts[CPA_MERGE_MAX_STATES];
    int64_t begins[CPA_MERGE_MAX_STATES + 1]; /* units */
    int64_t rows, row_units;
    void *out;
};

template <typename Unit>
__global__ void __launch_bounds__(THREADS) join_columns(const __grid_constant__ join_args a) {
    dependent_wait();
    dependent_allow();
    const int64_t begin = a.begins[blockIdx.y], width = a.begins[blockIdx.y + 1] - begin, step = gridDim.x * THREADS;
    const Unit *part = (const Unit *)a.parts[blockIdx.y];
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < a.rows * width; i += step) {
        const int64_t row = i / width;
        ((Unit *)a.out)[row * a.row_units + begin + i - row * width] = part[i];
    }
}

template <typename Unit>
cpa_status launch_join(const cpa_join_columns_args *args, cpa_stream *stream) {
    const int64_t bytes = (int64_t)sizeof(Unit);
    join_args a = {};
    int64_t widest = 0;
    for (int32_t p = 0; p <= args->n_parts; p++) a.begins[p] = args->begins[p] / bytes;
    for (int32_t p = 0; p < args->n_parts; p++) {
        a.parts[p] = args->parts[p];
        widest = a.begins[p + 1] - a.begins[p] > widest ? a.begins[p + 1] - a.begins[p] : widest;
    }
    a.rows = args->rows;
    a.row_units = a.begins[args->n_parts];
    a.out = args->out;
    const unsigned ctas = ctas_of(a.rows * widest), parts = (unsigned)args->n_parts;
    return cpa_cuda_check(&stream->error,
                          launch_dependent(join_columns<Unit>, dim3(ctas, parts), THREADS, a,
                                           cpa_cuda_starts_early(stream, ctas * parts), cpa_cuda_handle(stream)),
                          "join_columns");
}

/* ---- sum_parts ---- */

struct sum_args {
    const float *parts[CPA_MERGE_MAX_STATES];
    int64_t elements;
    int32_t width, n_parts;
    const void *bias;
    void *out;
};

template <typename T>
__device__ void store_sum(T *out, const float (&sum)[4]) {
    store_elements<T>((char *)out, 0, sum);
}
__device__ void store_sum(float *out, const float (&sum)[4]) {
    store_floats(out, sum);
}
template <typename T>
__device__ void store_sum(T *out, const float (&sum)[1]) {
    *out = from_float<T>(sum[0]);
}
__device__ void load_part(const float *from, float (&value)[4]) {
    load_floats(from, value);
}
__device__ void load_part(const float *from, float (&value)[1]) {
    value[0] = *from;
}

/* UNIT neighbouring elements a thread, all of one row. */
template <typename T, int UNIT>
__global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ sum_args a) {
    dependent_wait();
    dependent_allow();
    const int64_t step = (int64_t)gridDim.x * THREADS * UNIT;
    for (int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * UNIT; at < a.elements; at += step) {
        float sum[UNIT];
        load_part(a.parts[0] + at, sum);
#pragma unroll 4
        for (int32_t p = 1; p < a.n_parts; p++) {
            float part[UNIT];
            load_part(a.parts[p] + at, part);
#pragma unroll
            for (int e = 0; e < UNIT; e++) sum[e] += part[e];
        }
        const int64_t column = at % a.width;
#pragma unroll
        for (int e = 0; e < UNIT; e++)
            if (a.bias) sum[e] += to_float(((const T *)a.bias)[column + e]);
        store_sum((T *)a.out + at, sum);
    }
}

template <typename T>
cpa_status launch_sum(const sum_args &a, bool vectors, cpa_stream *stream) {
    const unsigned ctas = ctas_of(vectors ? a.elements / 4 : a.elements);
    return cpa_cuda_check(&stream->error,
                          launch_dependent(vectors ? sum_parts<T, 4> : sum_parts<T, 1>, dim3(ctas), THREADS, a,
                                           cpa_cuda_starts_early(stream, ctas), cpa_cuda_handle(stream)),
                          "sum_parts");
}

} // namespace

extern "C" cpa_status cpa_cuda_join_columns(const cpa_join_columns_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    uintptr_t bits = (uintptr_t)args->out | (uintptr_t)args->begins[args->n_parts];
    if (args->begins[args->n_parts] == 0) return CPA_OK;
    for (int32_t p = 0; p < args->n_parts; p++) {
        if (args->begins[p + 1] > args->begins[p]) bits |= (uintptr_t)args->parts[p];
        bits |= (uintptr_t)args->begins[p];
    }
    if (bits % sizeof(uint4) == 0) return launch_join<uint4>(args, stream);
    if (bits % sizeof(uint32_t) == 0) return launch_join<uint32_t>(args, stream);
    return launch_join<uint8_t>(args, stream);
}

extern "C" cpa_status cpa_cuda_sum_parts(const cpa_sum_parts_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    sum_args a = {};
    uintptr_t bits = (uintptr_t)args->out;
    for (int32_t p = 0; p < args->n_parts; p++) {
        a.parts[p] = args->parts[p];
        bits |= (uintptr_t)args->parts[p];
    }
    a.elements = args->rows * args->width;
    a.width = args->width;
    a.n_parts = args->n_parts;
    a.bias = args->bias;
    a.out = args->out;
    const bool vectors = bits % 16 == 0 && args->width % 4 == 0;
    return args->dtype == CPA_F32    ? launch_sum<float>(a, vectors, stream)
           : args->dtype == CPA_BF16 ? launch_sum<__nv_bfloat16>(a, vectors, stream)
                                     : launch_sum<__half>(a, vectors, stream);
}
