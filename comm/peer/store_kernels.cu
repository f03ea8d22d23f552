/* push and pull: a row of CTAs for each message. Thread 0 of each CTA waits for the peer's word, the CTA moves its share
 * of the message, and the CTA that is the last to be done tells the peer.
 *
 * Few CTAs, because they spin: eight such kernels at once still leave room for what they wait for. */
#include "comm/peer/store_kernels.h"

namespace {

constexpr int THREADS = 256;
constexpr int MOST_CTAS = 64;       /* of a launch */
constexpr int64_t SHARE = 16 << 10; /* bytes that are worth a CTA */
constexpr int64_t UNIT = 16;        /* shares begin at multiples of it */
constexpr uint32_t POLLS = 256;     /* of device memory, between two of host memory */

__device__ uint64_t load_acquire(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ uint32_t load_acquire(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ void store_release(uint64_t *word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ void store_release(uint32_t *word, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/* A number that is not 0 and differs from that of any recent wait. */
__device__ uint32_t now_mark() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return (uint32_t)(ns >> 10) | 1;
}

/* Whether the condition came true before the transport gave up. One CTA of each message reports to the host. */
template <typename Condition>
__device__ bool await(Condition is_true, const uint32_t *abort, uint32_t *stalled) {
    bool reports = blockIdx.x == 0, reported = false;
    for (uint32_t polls = 1; !is_true(); polls++) {
        if (polls % POLLS != 0) continue;
        if (*(const volatile uint32_t *)abort) return false;
        if (reports && !reported) *(volatile uint32_t *)stalled = now_mark();
        reported = reports;
    }
    if (reported) *(volatile uint32_t *)stalled = 0;
    return true;
}

/* Past the first-level cache: the inbox is written by others. */
template <typename Unit>
__device__ void move_units(char *to, const char *from, int64_t bytes) {
    constexpr int DEPTH = 4;
    const int64_t units = bytes / (int64_t)sizeof(Unit);
    const Unit *src = (const Unit *)from;
    Unit *dst = (Unit *)to;
    int64_t i = threadIdx.x;
    for (; i + (DEPTH - 1) * THREADS < units; i += DEPTH * THREADS) {
        Unit held[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) held[d] = __ldcg(src + i + d * THREADS);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) dst[i + d * THREADS] = held[d];
    }
    for (; i < units; i += THREADS) dst[i] = __ldcg(src + i);
    for (int64_t at = units * (int64_t)sizeof(Unit) + threadIdx.x; at < bytes; at += THREADS) {
        to[at] = (char)__ldcg((const unsigned char *)from + at);
    }
}

/* This CTA's share of a message. */
__device__ void move_share(const cpa_store_part &part, int64_t bytes) {
    const int64_t units = (bytes + UNIT - 1) / UNIT, share = (units + gridDim.x - 1) / gridDim.x * UNIT;
    const int64_t begin = blockIdx.x * share, left = bytes - begin;
    if (left <= 0) return;
    const uintptr_t bits = (uintptr_t)part.from | (uintptr_t)part.to;
    const char *from = part.from + begin;
    char *to = part.to + begin;
    const int64_t n = left < share ? left : share;
    if (bits % sizeof(uint4) == 0) {
        move_units<uint4>(to, from, n);
    } else if (bits % sizeof(unsigned) == 0) {
        move_units<unsigned>(to, from, n);
    } else {
        move_units<unsigned char>(to, from, n);
    }
}

/* Whether this is thread 0 of the last CTA of the message: what all its CTAs have read and written is then behind it. */
__device__ bool is_last(cpa_store_cell *cell) {
    __syncthreads();
    if (threadIdx.x != 0) return false;
    if (gridDim.x == 1) return true;
    __threadfence_system();
    if (atomicAdd(&cell->tickets, 1u) != gridDim.x - 1) return false;
    cell->tickets = 0;
    __threadfence_system();
    return true;
}

__global__ void __launch_bounds__(THREADS) push(const __grid_constant__ cpa_store_batch batch) {
    const cpa_store_part &part = batch.parts[blockIdx.y];
    __shared__ bool is_free;
    if (threadIdx.x == 0) {
        const uint32_t pushed = part.own->pushed;
        is_free = await([&] { return load_acquire(&part.own->acked) == pushed; }, batch.abort, part.stalled);
    }
    __syncthreads();
    if (!is_free) return;
    move_share(part, part.bytes);
    if (!is_last(part.own)) return;
    const uint32_t pushed = part.own->pushed + 1;
    part.own->pushed = pushed;
    store_release(&part.theirs->arrived, (uint64_t)pushed << 32 | part.bytes);
}

__device__ void report_mismatch(const cpa_store_part &part, uint32_t arrived, cpa_store_mismatch *mismatch) {
    *(volatile uint32_t *)&mismatch->expected = part.bytes;
    *(volatile uint32_t *)&mismatch->arrived = arrived;
    __threadfence_system();
    *(volatile uint32_t *)&mismatch->peer = part.peer + 1;
}

__global__ void __launch_bounds__(THREADS) pull(const __grid_constant__ cpa_store_batch batch) {
    const cpa_store_part &part = batch.parts[blockIdx.y];
    __shared__ bool is_there;
    if (threadIdx.x == 0) {
        const uint32_t next = part.own->pulled + 1;
        uint64_t arrived;
        is_there = await(
            [&] {
                arrived = load_acquire(&part.own->arrived);
                return (uint32_t)(arrived >> 32) == next;
            },
            batch.abort, part.stalled);
        if (is_there && (uint32_t)arrived != part.bytes) {
            if (blockIdx.x == 0) report_mismatch(part, (uint32_t)arrived, batch.mismatch);
            is_there = false;
        }
    }
    __syncthreads();
    if (!is_there) return;
    move_share(part, part.bytes);
    if (!is_last(part.own)) return;
    const uint32_t pulled = part.own->pulled + 1;
    part.own->pulled = pulled;
    store_release(&part.theirs->acked, pulled);
}

/* CTAs a message: as many as the largest one is worth. */
dim3 grid_of(const cpa_store_batch *batch) {
    int64_t ctas = 1;
    for (int32_t i = 0; i < batch->n_parts; i++) {
        int64_t worth = (batch->parts[i].bytes + SHARE - 1) / SHARE;
        if (worth > ctas) ctas = worth;
    }
    const int64_t most = MOST_CTAS / batch->n_parts;
    return dim3((unsigned)(ctas < most ? ctas : most), (unsigned)batch->n_parts);
}

} // namespace

extern "C" cudaError_t cpa_store_load_kernels(void) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, push);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, pull) : error;
}

extern "C" cudaError_t cpa_store_launch_push(const cpa_store_batch *batch, cudaStream_t stream) {
    push<<<grid_of(batch), THREADS, 0, stream>>>(*batch);
    return cudaGetLastError();
}

extern "C" cudaError_t cpa_store_launch_pull(const cpa_store_batch *batch, cudaStream_t stream) {
    pull<<<grid_of(batch), THREADS, 0, stream>>>(*batch);
    return cudaGetLastError();
}
