#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/cuda/device/cuda.h"
#include "bench/cuda.h"

constexpr int THREADS = 512;

/* The bandwidth that decode is measured against. A CTA reads 32 KiB that lie together: rows that are megabytes apart
 * may lie in the same banks, which on some devices halves the rate. */
static __global__ void __launch_bounds__(THREADS) read_all(const uint4 *from, int64_t n, uint4 *to) {
    uint4 sum = {0, 0, 0, 0};
    for (int64_t at = (int64_t)blockIdx.x * 4 * THREADS; at + 4 * THREADS <= n;
         at += (int64_t)gridDim.x * 4 * THREADS) {
        const uint4 *i = from + at + threadIdx.x;
        uint4 a = i[0], b = i[THREADS], c = i[2 * THREADS], d = i[3 * THREADS];
        sum.x ^= a.x ^ b.x ^ c.x ^ d.x, sum.y ^= a.y ^ b.y ^ c.y ^ d.y;
        sum.z ^= a.z ^ b.z ^ c.z ^ d.z, sum.w ^= a.w ^ b.w ^ c.w ^ d.w;
    }
    if (sum.x == 12345 && sum.y == 678 && sum.z == 9 && sum.w == 10) *to = sum; /* or the reads would go */
}

cpa_status cpa_bench_cuda_read(void *memory, int64_t bytes, cpa_stream *stream, cpa_error *err) {
    read_all<<<1056, THREADS, 0, cpa_cuda_handle(stream)>>>((const uint4 *)memory, bytes / 16, (uint4 *)memory);
    return cpa_cuda_check(err, cudaGetLastError(), "bench: read");
}
