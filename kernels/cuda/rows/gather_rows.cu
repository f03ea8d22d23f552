/* gather_rows: row map[i] of src, or row i without a map, to row i of dst. */
#include "kernels/cuda/device/cuda.h"

namespace {

constexpr int THREADS = 256;

template <typename Unit>
__global__ void __launch_bounds__(THREADS)
    gather_rows(Unit *dst, const Unit *src, const int32_t *map, int64_t units, int32_t row_units) {
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < units; i += step) {
        int64_t row = i / row_units, column = i - row * row_units;
        dst[i] = map ? src[map[row] * (int64_t)row_units + column] : src[i];
    }
}

template <typename Unit>
void launch(void *dst, const void *src, const int32_t *map, int64_t rows, int64_t row_bytes, cpa_stream *stream) {
    const int64_t most_ctas = 1 << 16, row_units = row_bytes / (int64_t)sizeof(Unit), units = rows * row_units;
    int64_t ctas = (units + THREADS - 1) / THREADS;
    gather_rows<Unit><<<(unsigned)(ctas < most_ctas ? ctas : most_ctas), THREADS, 0, cpa_cuda_handle(stream)>>>(
        (Unit *)dst, (const Unit *)src, map, units, (int32_t)row_units);
}

} // namespace

extern "C" cpa_status cpa_cuda_gather_rows(void *dst, const void *src, const int32_t *map, int64_t rows,
                                           int64_t row_bytes, cpa_stream *stream) {
    const uintptr_t bits = (uintptr_t)dst | (uintptr_t)src | (uintptr_t)row_bytes;
    if (rows <= 0 || row_bytes <= 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (bits % sizeof(uint4) == 0) {
        launch<uint4>(dst, src, map, rows, row_bytes, stream);
    } else if (bits % sizeof(uint32_t) == 0) {
        launch<uint32_t>(dst, src, map, rows, row_bytes, stream);
    } else {
        launch<uint8_t>(dst, src, map, rows, row_bytes, stream);
    }
    return cpa_cuda_launched(stream, "gather_rows");
}
