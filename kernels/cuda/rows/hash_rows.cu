/* hash_rows: the sum that kernels/host/rows/hash_rows.c documents. A CTA a row of a layer; the sum is the same in any
 * order. */
#include "base/hash.h"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) hash_rows(const __grid_constant__ cpa_hash_rows_args args) {
    const int lane = threadIdx.x % WARP_LANES;
    const int64_t letters = args.row_bytes / 2;
    const char *src = (const char *)args.src + blockIdx.y * args.layer_bytes;
    uint8_t *marks = args.nonfinite ? args.nonfinite + blockIdx.y * args.layer_marks : NULL;
    uint64_t total = 0;
    for (int64_t r = blockIdx.x; r < args.rows; r += gridDim.x) {
        if (args.row_index[r] < 0) continue;
        const uint16_t *row = (const uint16_t *)(src + args.row_index[r] * args.row_bytes);
        const uint64_t start = cpa_mix64(args.salts[r] ^ (args.salt + blockIdx.y + 1) * CPA_GOLDEN);
        uint64_t sum = 0;
        bool nonfinite = false;
        for (int64_t i = threadIdx.x; i < letters; i += THREADS) {
            sum += cpa_mix64(start + ((uint64_t)i << 16 | row[i]));
            nonfinite |= cpa_letter_is_nonfinite(args.dtype, i, row[i]);
        }
        if (marks && nonfinite) marks[args.row_index[r]] = 1;
        sum = warp_sum(sum);
        if (lane == 0 && args.sums) atomicAdd((unsigned long long *)args.sums + r, (unsigned long long)sum);
        total += sum;
    }
    if (lane == 0 && total) atomicAdd((unsigned long long *)args.sum, (unsigned long long)total);
}

} // namespace

extern "C" cpa_status cpa_cuda_hash_rows(const cpa_hash_rows_args *args, cpa_stream *stream) {
    const int64_t most_ctas = 4096;
    if (args->rows == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const dim3 grid((unsigned)(args->rows < most_ctas ? args->rows : most_ctas), (unsigned)args->layers);
    hash_rows<<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "hash_rows");
}
