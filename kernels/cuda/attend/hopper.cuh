/* Barriers in shared memory, bulk tensor copies, named barriers and register hand-over of compute capability 9.0. */
#ifndef CPA_CUDA_HOPPER_CUH
#define CPA_CUDA_HOPPER_CUH

#include <cuda.h>
#include <stdint.h>

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* Makes initialised barriers known to bulk copies. */
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Arrives, and expects so many bytes of bulk copies before the phase ends. */
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* At the barrier of that address in a CTA of the cluster. Not .release.cluster, which is a fence of the whole device: who
 * arrives has read, and what it wrote itself was read by products that it has waited for. */
__device__ inline void barrier_arrive_in(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(cta)
        : "memory");
}
/* Waits for the end of the phase of that parity; phases count from 0, and the one before the first has parity 1. */
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done; "
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
        "@done bra end; "
        "bra again; "
        "end: }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/* Copies the box at (dim, token, head, block) of a 4-d tensor to shared memory; its bytes arrive at the barrier. */
__device__ inline void copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int dim, int token, int head,
                                int block) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(dim), "r"(token), "r"(head), "r"(block)
        : "memory");
}
/* The same to that address in both CTAs of a cluster of two, and at the barrier of each. */
__device__ inline void copy_box_to_pair(uint32_t to, const CUtensorMap *map, uint32_t barrier, int dim, int token,
                                        int head, int block) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(dim), "r"(token), "r"(head), "r"(block), "h"((uint16_t)3)
        : "memory");
}
/* The same for bytes that lie in a row, a multiple of 16. */
__device__ inline void copy_row(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Orders this thread's writes to shared memory before later reads by wgmma and bulk copies. */
__device__ inline void async_proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Barriers 1..15 among some threads of the CTA; arrive does not wait. */
__device__ inline void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* The CTA's number in its cluster; and a barrier among all threads of the cluster. */
__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

/* All warps of a warpgroup give registers back, or take them. */
template <int N>
__device__ inline void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ inline void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
