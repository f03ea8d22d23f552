/* xattn_select: a CTA a row of blocks. What is not forced is sorted in shared memory, and what lies before each block
 * is summed over the CTA. */
#include <math.h>

#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/xattn/xattn.h"
#include "kernels/topk.h"

namespace {

constexpr int LEAST_THREADS = 64, MOST_THREADS = 512;
constexpr int GIVEN_BYTES = 40 << 10; /* of shared memory that every kernel may have, beside what is not dynamic */
constexpr int MOST_WORDS = CPA_XATTN_MOST_BLOCKS / 32;

/* Sorts as a number: larger sums first, then smaller indices; behind all of them what pads a row. */
__device__ uint64_t key_of(float sum, int32_t block) {
    return (uint64_t)~cpa_topk_order(sum) << 32 | (uint32_t)block;
}
__device__ float sum_of(uint64_t key) {
    const uint32_t order = ~(uint32_t)(key >> 32), sign = 0x80000000u;
    return __uint_as_float(order & sign ? order ^ sign : ~order);
}
constexpr uint64_t PADDING = ~(uint64_t)0;

/* Ascending (Batcher, 1968); n is a power of two. */
__device__ void sort(uint64_t *keys, int32_t n) {
    for (int32_t run = 2; run <= n; run *= 2) {
        for (int32_t apart = run / 2; apart > 0; apart /= 2) {
            for (int32_t i = threadIdx.x; i < n / 2; i += blockDim.x) {
                const int32_t low = 2 * i - (i & (apart - 1)), high = low + apart;
                const uint64_t a = keys[low], b = keys[high];
                if ((a > b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
            }
            __syncthreads();
        }
    }
}

/* The sum over the threads before; *total gets that over all. */
__device__ double sum_before(double x, double *total) {
    __shared__ double of_warp[MOST_THREADS / WARP_LANES];
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    double sum = x;
    for (int step = 1; step < WARP_LANES; step *= 2) {
        const double other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads(); /* what the call before left has been read */
    if (lane == WARP_LANES - 1) of_warp[warp] = sum;
    __syncthreads();
    double before = 0, all = 0;
    for (int w = 0; w < (int)blockDim.x / WARP_LANES; w++) {
        if (w == warp) before = all;
        all += of_warp[w];
    }
    *total = all;
    return before + (sum - x);
}

__device__ void keep(uint32_t *words, int32_t block) {
    atomicOr(&words[block / 32], 1u << block % 32);
}

__global__ void __launch_bounds__(MOST_THREADS) xattn_select(const __grid_constant__ cpa_xattn_select_args a,
                                                             int32_t room) {
    extern __shared__ uint64_t keys[]; /* [room] */
    __shared__ uint32_t words[MOST_WORDS];
    const int64_t row = blockIdx.x, head = row / a.q_blocks;
    const cpa_xattn_row of = cpa_xattn_row_of(&a, row % a.q_blocks);
    const int32_t n = of.last - of.first; /* that are not forced */
    const float *sums = a.sums + row * a.row_stride;
    int32_t padded = LEAST_THREADS;
    while (padded < n) padded *= 2; /* at most `room` */
    for (int32_t i = threadIdx.x; i < MOST_WORDS; i += blockDim.x) words[i] = 0;
    double forced = 0, kept = 0, total;
    bool is_nan = false;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < of.end; i += blockDim.x) {
        const float sum = sums[cpa_xattn_sum_at(&a, i)];
        is_nan |= isnan(sum);
        if (i >= of.first && i < of.last) {
            keys[i - of.first] = key_of(sum, i);
        } else {
            keep(words, i);
            forced += (double)sum;
        }
    }
    for (int32_t i = n + (int32_t)threadIdx.x; i < padded; i += blockDim.x) keys[i] = PADDING;
    is_nan = __syncthreads_or(is_nan);
    sum_before(forced, &forced);
    if (!is_nan) sort(keys, padded);
    const int32_t share = (n + (int32_t)blockDim.x - 1) / (int32_t)blockDim.x;
    const int32_t first = min((int32_t)threadIdx.x * share, n), end = min(first + share, n);
    double own = 0;
    for (int32_t i = first; i < end; i++) own += (double)sum_of(keys[i]);
    double before = forced + sum_before(own, &total);
    total += forced;
    const double need = (double)(a.taus ? a.taus[head] : a.tau) * total;
    int32_t count = 0;
    for (int32_t i = first; i < end && (is_nan || before < need); i++, count++) {
        const float sum = sum_of(keys[i]);
        keep(words, (int32_t)(uint32_t)keys[i]);
        before += (double)sum, kept += (double)sum;
    }
    sum_before(kept, &kept);
    const int64_t all = block_sum(count); /* with a barrier behind the bits */
    for (int64_t i = threadIdx.x; i < a.words; i += blockDim.x)
        a.bits[head * a.bits_stride + row % a.q_blocks * a.words + i] = i < MOST_WORDS ? words[i] : 0;
    if (threadIdx.x != 0) return;
    if (a.counts) a.counts[row] = (int32_t)all + of.end - n;
    if (a.kept) a.kept[row] = is_nan || !(total > 0) ? 1 : (float)((forced + kept) / total);
}

} // namespace

extern "C" cpa_status cpa_cuda_xattn_select(const cpa_xattn_select_args *args, cpa_stream *stream) {
    static uint64_t prepared;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    int32_t room = LEAST_THREADS;
    const int64_t rows = args->shape.q_heads * args->q_blocks;
    while (room < args->k_blocks) room *= 2;
    const int bytes = room * (int)sizeof(uint64_t);
    if (rows > INT32_MAX) return cpa_cuda_unsupported(stream, "xattn_select: more rows than a grid has CTAs", rows);
    if (status == CPA_OK && bytes > GIVEN_BYTES)
        status = cpa_cuda_shared_memory(stream, (const void *)xattn_select,
                                        CPA_XATTN_MOST_BLOCKS * (int)sizeof(uint64_t), &prepared);
    if (status != CPA_OK) return status;
    const int threads = room / 2 < LEAST_THREADS ? LEAST_THREADS : room / 2 > MOST_THREADS ? MOST_THREADS : room / 2;
    xattn_select<<<(unsigned)rows, threads, bytes, cpa_cuda_handle(stream)>>>(*args, room);
    return cpa_cuda_launched(stream, "xattn_select");
}
