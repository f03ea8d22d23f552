/* The persistent kernel: a CTA of every multiprocessor takes one piece after the other. Of its first warpgroup a warp
 * fetches pieces, and three copy queries, keys and values, as far ahead as there is room (persistent_loads.cuh). The
 * others multiply 64 rows each: two of them go from piece to piece without a break (persistent_flow.cuh), three go at
 * their own pace (persistent_apart.cuh). */
#ifndef CPA_CUDA_PERSISTENT_KERNEL_CUH
#define CPA_CUDA_PERSISTENT_KERNEL_CUH

#include "kernels/cuda/attend/persistent_apart.cuh"
#include "kernels/cuda/attend/persistent_flow.cuh"

namespace {

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attend_persistent(const __grid_constant__ typename C::args args) {
    extern __shared__ char memory[];
    __shared__ persistent_shared<C> shared;
    const uint32_t tiles = (shared_address(memory) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    /* Shuffled, so that the compiler knows that a warp has one: descriptors then stay in uniform registers. */
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32;
    if (threadIdx.x == 0) {
        shared.fetched.start(3 + C::CONSUMER_WARPS);
        for (int i = 0; i < C::CONSUMERS; i++) shared.q[i].start(WARPGROUP / 32);
        shared.k.start(C::CONSUMER_WARPS);
        shared.v.start(C::CONSUMER_WARPS);
        barrier_init(shared_address(&shared.copied), 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_shrink<C::LOADER_REGISTERS>();
        const int warp = thread / 32;
        if (warp == 0) {
            C::work::fetch(args, shared, lane);
        } else if (warp == 1) {
            copy_queries<C>(args, shared, tiles, lane);
        } else if (warp == 2) {
            copy_tiles<C, CPA_KEYS>(args.pools, &args.pools.maps.k, &args.pools.maps.k_tail, shared, shared.k,
                                    tiles + C::K_AT, lane);
        } else {
            copy_tiles<C, CPA_VALUES>(args.pools, &args.pools.maps.v, &args.pools.maps.v_tail, shared, shared.v,
                                      tiles + C::V_AT, lane);
        }
    } else {
        registers_grow<C::CONSUMER_REGISTERS>();
        if constexpr (C::CONSUMERS == 2) {
            take_pieces<C>(args, shared, tiles, warpgroup - 1, thread);
        } else {
            take_pieces_apart<C>(args, shared, tiles, warpgroup - 1, thread);
        }
    }
}

template <typename C>
cpa_status launch_persistent(const typename C::args &args, cpa_stream *stream) {
    static uint64_t prepared;
    const int multiprocessors = cpa_cuda_device_of(stream)->multiprocessors;
    const cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)attend_persistent<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    const int ctas = args.total < multiprocessors ? args.total : multiprocessors;
    attend_persistent<C><<<ctas, C::THREADS, C::SHARED_BYTES, cpa_cuda_handle(stream)>>>(args);
    return cpa_cuda_launched(stream, "attend");
}

} // namespace

#endif
