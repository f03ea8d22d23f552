/* push and pull: a row of CTAs for each message. Thread 0 of each CTA waits for the peer's flag, the CTA moves its
 * share of the message, and the CTA that is the last to be done tells the peer. A message in lines needs no flag of its
 * arrival: every thread waits for its lines. Of messages that lie where they belong only the flag travels: tell_stored
 * sends it, take_stored waits for it.
 *
 * Few CTAs, because they spin: eight such kernels at once, each on a stream of its own, still fit on a device of 108
 * multiprocessors.
 *
 * On compute capability 9.0 a pull may start while the push of its exchange, which comes right before it, runs: it
 * writes only when that is over, and so ends behind it. What comes behind the pull may be placed while the pull waits.
 * A push, or tell_stored, may be placed beside the kernel before it as well, and until that is over only sees to it
 * that the peer has taken out the message before; it lets what comes behind it start only then. take_stored, or the
 * kernel of the caller in its place, waits for messages beside the tell_stored in front, and lets what comes behind it
 * start when both are over. So when one of them reads the counts of its slot, of all that came before only the kernel
 * in front may still run: that must be of another slot, see counts_are_settled in stores.c. */
#include "comm/peer/store_kernels.h"

#include "base/dependent.cuh"
#include "base/stored.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int MOST_CTAS = 51;       /* of a launch; divides well among 3 peers */
constexpr int64_t SHARE = 16 << 10; /* bytes that are worth a CTA */
constexpr int64_t UNIT = 16;        /* shares begin at multiples of it */
constexpr int LINES = 4;            /* that a thread has under way at once */
constexpr int CHUNK = 8;            /* bytes of the message in a line */
constexpr int64_t LINES_SHARE = LINES * CHUNK * THREADS;

__device__ uint4 load_line(const uint4 *line) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(line)
                 : "memory");
    return v;
}

__device__ void store_line(uint4 *line, uint2 chunk, uint32_t number) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(line), "r"(chunk.x), "r"(number),
                 "r"(chunk.y), "r"(number)
                 : "memory");
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

/* Whether this is thread 0 of the last CTA of the message. `Writes`: a fence of this thread then covers what all its
 * CTAs have stored: with the ticket it takes over what the others' fences have released, which their threads stored
 * before the barrier. */
template <bool Writes>
__device__ bool is_last(uint32_t *tickets) {
    __syncthreads();
    if (threadIdx.x != 0) return false;
    if (gridDim.x == 1) return true;
    if (Writes) fence();
    if (atomicAdd(tickets, 1u) != gridDim.x - 1) return false;
    *tickets = 0;
    return true;
}

/* ---- in lines ---- */

/* Chunks `at` to `end` of a message; a thread takes every THREADS-th of those of its CTA. */
struct chunk_range {
    int at, end;

    __device__ int of(int d) const {
        return at + d * THREADS + (int)threadIdx.x;
    }
};

__device__ chunk_range chunks_of(const cpa_store_part &part) {
    const int chunks = ((int)part.bytes + CHUNK - 1) / CHUNK, ctas = (int)gridDim.x;
    const int share = (chunks + ctas - 1) / ctas, begin = (int)blockIdx.x * share;
    return {begin, min(begin + share, chunks)};
}

__device__ uint2 load_chunk(const char *from, int64_t at, int64_t bytes) {
    if (at + CHUNK <= bytes && (uintptr_t)from % CHUNK == 0) return __ldcg((const uint2 *)(from + at));
    uint64_t value = 0;
    for (int i = 0; i < CHUNK && at + i < bytes; i++) {
        value |= (uint64_t)__ldcg((const unsigned char *)from + at + i) << (8 * i);
    }
    return make_uint2((unsigned)value, (unsigned)(value >> 32));
}

__device__ void store_chunk(char *to, int64_t at, int64_t bytes, uint2 chunk) {
    if (at + CHUNK <= bytes && (uintptr_t)to % CHUNK == 0) {
        *(uint2 *)(to + at) = chunk;
        return;
    }
    const uint64_t value = (uint64_t)chunk.y << 32 | chunk.x;
    for (int i = 0; i < CHUNK && at + i < bytes; i++) to[at + i] = (char)(value >> (8 * i));
}

/* Waits until the peer has taken out the last message of the slot, number `pushed`. What it reads only the peer writes:
 * it need not wait for the kernel before. */
__device__ bool await_free(const cpa_store_part &part, uint32_t pushed, const uint32_t *abort) {
    __shared__ bool is_free;
    if (threadIdx.x == 0) {
        is_free = await([&] { return load_acquire(&part.own->acked) == pushed; }, abort, part.stalled, blockIdx.x == 0);
    }
    __syncthreads();
    return is_free;
}

__device__ void push_lines(const cpa_store_part &part, uint32_t pushed) {
    chunk_range chunks = chunks_of(part);
    uint2 held[LINES];
    const auto load = [&] {
#pragma unroll
        for (int d = 0; d < LINES; d++)
            if (chunks.of(d) < chunks.end) held[d] = load_chunk(part.from, (int64_t)chunks.of(d) * CHUNK, part.bytes);
    };
    load();
    while (chunks.at < chunks.end) {
#pragma unroll
        for (int d = 0; d < LINES; d++)
            if (chunks.of(d) < chunks.end) store_line((uint4 *)part.to + chunks.of(d), held[d], pushed + 1);
        chunks.at += LINES * THREADS;
        load();
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        store_relaxed(&part.theirs->arrived, (uint64_t)(pushed + 1) << 32 | part.bytes);
    }
    if (is_last<false>(&part.own->push_tickets)) part.own->pushed = pushed + 1;
}

/* Waits for the lines of this thread, some at a time, and takes their chunks out. */
__device__ bool take_lines(const cpa_store_part &part, uint32_t next, const uint32_t *abort) {
    chunk_range chunks = chunks_of(part);
    do {
        uint4 held[LINES];
        bool is_there = await(
            [&] {
                bool all = true;
#pragma unroll
                for (int d = 0; d < LINES; d++) {
                    if (chunks.of(d) >= chunks.end) continue;
                    held[d] = load_line((const uint4 *)part.from + chunks.of(d));
                    all &= held[d].y == next && held[d].w == next;
                }
                return all;
            },
            abort, part.stalled, blockIdx.x == 0 && threadIdx.x == 0);
        dependent_wait(); /* all threads come to it; from the second time on it is over */
        if (!is_there) return false;
#pragma unroll
        for (int d = 0; d < LINES; d++) {
            const int at = chunks.of(d);
            const uint2 chunk = make_uint2(held[d].x, held[d].z);
            if (at < chunks.end) store_chunk(part.to, (int64_t)at * CHUNK, part.bytes, chunk);
        }
        chunks.at += LINES * THREADS;
    } while (chunks.at < chunks.end);
    return true;
}

/* The acknowledgement needs no fence, as nothing that was stored goes with it. What it lets the peer overwrite has been
 * read: each thread has stored, or looked at, what it loaded before it came to the barrier. */
__device__ void acknowledge(const cpa_store_part &part, uint32_t pulled) {
    if (!is_last<false>(&part.own->pull_tickets)) return;
    part.own->pulled = pulled;
    store_relaxed(&part.theirs->acked, pulled);
}

__device__ void pull_lines(const cpa_store_part &part, const cpa_store_batch &batch) {
    const uint32_t next = number_of_next(part);
    bool taken = take_lines(part, next, batch.abort);
    if (taken && blockIdx.x == 0 && threadIdx.x == 0) taken = await_arrival(part, next, batch);
    if (__syncthreads_and(taken)) acknowledge(part, next);
}

/* ---- as they are ---- */

/* What was stored of the message, seen by this thread, is there before the peer learns of it. */
__device__ void tell(const cpa_store_part &part, uint32_t pushed) {
    part.own->pushed = pushed + 1;
    fence();
    store_relaxed(&part.theirs->arrived, (uint64_t)(pushed + 1) << 32 | part.bytes);
}

__device__ void push_bytes(const cpa_store_part &part, uint32_t pushed) {
    move_share(part, part.bytes);
    if (is_last<true>(&part.own->push_tickets)) tell(part, pushed);
}

__device__ void pull_bytes(const cpa_store_part &part, const cpa_store_batch &batch) {
    __shared__ bool is_there;
    const uint32_t next = number_of_next(part);
    if (threadIdx.x == 0) is_there = await_arrival(part, next, batch);
    dependent_wait();
    __syncthreads();
    if (!is_there) return;
    move_share(part, part.bytes);
    acknowledge(part, next);
}

/* ---- the kernels ---- */

/* The number of the last message that went through the slot. Past the first-level cache: as number_of_next. */
__device__ uint32_t number_of_last(const cpa_store_part &part) {
    return *(const volatile uint32_t *)&part.own->pushed;
}

__global__ void __launch_bounds__(THREADS, 1) push(const __grid_constant__ cpa_store_batch batch) {
    const cpa_store_part &part = batch.parts[blockIdx.y];
    const uint32_t pushed = number_of_last(part);
    const bool is_free = await_free(part, pushed, batch.abort);
    dependent_wait();
    dependent_allow(); /* the pull: all that came before the push is done, pulls of the same cells too */
    if (!is_free) return;
    if (part.bytes <= CPA_STORE_LINE_BYTES) {
        push_lines(part, pushed);
    } else {
        push_bytes(part, pushed);
    }
}

__global__ void __launch_bounds__(THREADS) pull(const __grid_constant__ cpa_store_batch batch) {
    const cpa_store_part &part = batch.parts[blockIdx.y];
    dependent_allow();
    if (part.bytes <= CPA_STORE_LINE_BYTES) {
        pull_lines(part, batch);
    } else {
        pull_bytes(part, batch);
    }
}

/* A thread for each message that this rank has stored. */
__global__ void tell_stored(const __grid_constant__ cpa_store_batch batch) {
    const cpa_store_part &part = batch.parts[blockIdx.y];
    const uint32_t pushed = number_of_last(part);
    const bool is_free = await_free(part, pushed, batch.abort);
    dependent_wait();
    dependent_allow();
    if (is_free) tell(part, pushed);
}

/* A thread for each message that is stored here. */
__global__ void take_stored(const __grid_constant__ cpa_store_batch batch) {
    await_stored(batch);
}

/* CTAs a message: as many as the largest one is worth. */
dim3 grid_of(const cpa_store_batch *batch) {
    int64_t ctas = 1;
    for (int32_t i = 0; i < batch->n_parts; i++) {
        const int64_t bytes = batch->parts[i].bytes, share = bytes <= CPA_STORE_LINE_BYTES ? LINES_SHARE : SHARE;
        int64_t worth = (bytes + share - 1) / share;
        if (worth > ctas) ctas = worth;
    }
    const int64_t most = MOST_CTAS / batch->n_parts;
    return dim3((unsigned)(ctas < most ? ctas : most), (unsigned)batch->n_parts);
}

} // namespace

extern "C" cudaError_t cpa_store_load_kernels(void) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, push);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, pull);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, tell_stored);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, take_stored) : error;
}

extern "C" cudaError_t cpa_store_launch_push(const cpa_store_batch *batch, cudaStream_t stream) {
    return launch_dependent(push, grid_of(batch), THREADS, *batch, batch->starts_early != 0, stream);
}

extern "C" cudaError_t cpa_store_launch_pull(const cpa_store_batch *batch, cudaStream_t stream) {
    return launch_dependent(pull, grid_of(batch), THREADS, *batch, batch->starts_early != 0, stream);
}

extern "C" cudaError_t cpa_store_launch_tell(const cpa_store_batch *batch, cudaStream_t stream) {
    const dim3 grid(1, (unsigned)batch->n_parts);
    return launch_dependent(tell_stored, grid, 1, *batch, batch->starts_early != 0, stream);
}

extern "C" cudaError_t cpa_store_launch_take(const cpa_store_batch *batch, cudaStream_t stream) {
    return launch_dependent(take_stored, dim3(1), batch->n_parts, *batch, batch->starts_early != 0, stream);
}
