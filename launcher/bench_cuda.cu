#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/cuda/cuda.h"
#include "launcher/bench_cuda.h"

/* The bandwidth that decode is measured against. */
static __global__ void __launch_bounds__(512) read_all(const uint4 *from, int64_t n, uint4 *to) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    uint4 sum = {0, 0, 0, 0};
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < n; i += 4 * step) {
        uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        sum.x ^= a.x ^ b.x ^ c.x ^ d.x, sum.y ^= a.y ^ b.y ^ c.y ^ d.y;
        sum.z ^= a.z ^ b.z ^ c.z ^ d.z, sum.w ^= a.w ^ b.w ^ c.w ^ d.w;
    }
    if (sum.x == 12345 && sum.y == 678 && sum.z == 9 && sum.w == 10) *to = sum; /* or the reads would go */
}

cpa_status cpa_bench_cuda_read(void *memory, int64_t bytes, cpa_stream *stream, cpa_error *err) {
    read_all<<<1056, 512, 0, cpa_cuda_handle(stream)>>>((const uint4 *)memory, bytes / 16, (uint4 *)memory);
    return cpa_cuda_check(err, cudaGetLastError(), "bench: read");
}
