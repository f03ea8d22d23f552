/* How a kernel waits for messages that those of other devices store here; see comm/peer/stores.h. */
#ifndef CPA_BASE_STORED_CUH
#define CPA_BASE_STORED_CUH

#include "base/dependent.cuh"
#include "base/stored.h"

constexpr uint32_t STORED_POLLS = 256; /* of device memory, between two of host memory */

__device__ inline uint64_t load_acquire(const uint64_t *flag) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

__device__ inline uint32_t load_acquire(const uint32_t *flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

/* A number that is not 0 and differs from that of any recent wait. */
__device__ inline uint32_t now_mark() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return (uint32_t)(ns >> 10) | 1;
}

/* What this thread has stored, or has seen stored, is before what it stores next. */
__device__ inline void fence() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ inline void store_relaxed(uint64_t *flag, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ inline void store_relaxed(uint32_t *flag, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

/* Whether the condition came true before the transport gave up. One thread of each message reports to the host. */
template <typename Condition>
__device__ bool await(Condition is_true, const uint32_t *abort, uint32_t *stalled, bool reports) {
    bool reported = false;
    for (uint32_t polls = 1; !is_true(); polls++) {
        if (polls % STORED_POLLS != 0) continue;
        if (*(const volatile uint32_t *)abort) return false;
        if (reports && !reported) *(volatile uint32_t *)stalled = now_mark();
        reported = reports;
    }
    if (reported) *(volatile uint32_t *)stalled = 0;
    return true;
}

__device__ inline void report_mismatch(const cpa_store_part &part, uint32_t arrived, cpa_store_mismatch *mismatch) {
    *(volatile uint32_t *)&mismatch->expected = part.bytes;
    *(volatile uint32_t *)&mismatch->arrived = arrived;
    fence();
    *(volatile uint32_t *)&mismatch->peer = part.peer + 1;
}

/* Of the message that is taken out next. Past the first-level cache: this may be read before the kernel in front is
 * over. */
__device__ inline uint32_t number_of_next(const cpa_store_part &part) {
    return *(const volatile uint32_t *)&part.own->pulled + 1;
}

/* Waits for the flag of message number `next`, or of a later one where another CTA has told the peer already that this
 * one is seen; whether it is of the size expected. */
__device__ inline bool await_arrival(const cpa_store_part &part, uint32_t next, const cpa_store_batch &batch) {
    const bool reports = blockIdx.x == 0;
    uint64_t arrived;
    bool is_there = await(
        [&] {
            arrived = load_acquire(&part.own->arrived);
            return (int32_t)((uint32_t)(arrived >> 32) - next) >= 0;
        },
        batch.abort, part.stalled, reports);
    const bool is_later = (uint32_t)(arrived >> 32) != next;
    if (!is_there || is_later || (uint32_t)arrived == part.bytes) return is_there;
    if (reports) report_mismatch(part, (uint32_t)arrived, batch.mismatch);
    return false;
}

/* Waits for messages that peers store here, tells them that they are seen, and then waits for the kernel in front,
 * which may not take messages out of the same slot. All threads of a grid of one dimension come to it, at least as many
 * a CTA as there are messages, and may read them if it is true; else the transport has given up. */
__device__ inline bool await_stored(const cpa_store_batch &batch) {
    const int at = (int)threadIdx.x;
    bool is_there = true;
    if (at < batch.n_parts) {
        const cpa_store_part &part = batch.parts[at];
        const uint32_t next = number_of_next(part);
        __threadfence(); /* the number is read before it counts as read */
        const bool is_last = atomicAdd(&part.own->pull_tickets, 1u) == gridDim.x - 1;
        is_there = await_arrival(part, next, batch);
        if (is_there && is_last) {
            part.own->pull_tickets = 0;
            part.own->pulled = next;
            store_relaxed(&part.theirs->acked, next);
        }
    }
    is_there = __syncthreads_and(is_there);
    dependent_wait();
    dependent_allow();
    return is_there;
}

#endif
