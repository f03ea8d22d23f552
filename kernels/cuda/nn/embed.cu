/* embed: a thread copies a unit of a row, in which bits are all that counts. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int THREADS = 256;

struct embed_args {
    int64_t rows, row_units, vocabulary;
    const void *table;
    const uint32_t *tokens;
    void *out;
    uint32_t nan; /* of 4 bytes of the dtype, or its low half of 2 */
};

template <typename Unit>
__device__ Unit all_nan(uint32_t nan) {
    return (Unit)nan;
}
template <>
__device__ uint4 all_nan(uint32_t nan) {
    return make_uint4(nan, nan, nan, nan);
}

template <typename Unit>
__global__ void __launch_bounds__(THREADS) embed(const __grid_constant__ embed_args a) {
    const int64_t column = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    dependent_wait();
    dependent_allow();
    if (column >= a.row_units) return;
    for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
        const uint32_t token = a.tokens[row];
        ((Unit *)a.out)[row * a.row_units + column] =
            token < a.vocabulary ? ((const Unit *)a.table)[token * a.row_units + column] : all_nan<Unit>(a.nan);
    }
}

template <typename Unit>
cpa_status launch(embed_args a, int64_t row_bytes, cpa_stream *stream) {
    a.row_units = row_bytes / (int64_t)sizeof(Unit);
    return launch_early(embed<Unit>, dim3((unsigned)((a.row_units + THREADS - 1) / THREADS), grid_rows(a.rows)),
                        THREADS, a, stream, "embed");
}

} // namespace

extern "C" cpa_status cpa_cuda_embed(const cpa_embed_args *args, cpa_stream *stream) {
    const uint32_t nans[CPA_DTYPE_COUNT] = {0x7fc00000u, 0x7fc07fc0u, 0x7e007e00u}; /* fp32, bf16, fp16 */
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const embed_args a = {args->rows, 0, args->vocabulary, args->table, args->tokens, args->out, nans[args->dtype]};
    const int64_t row_bytes = args->width * cpa_dtype_bytes(args->dtype);
    if (in_vectors(args->dtype, args->width, (uintptr_t)args->table | (uintptr_t)args->out))
        return launch<uint4>(a, row_bytes, stream);
    return args->dtype == CPA_F32 ? launch<uint32_t>(a, row_bytes, stream) : launch<uint16_t>(a, row_bytes, stream);
}
