/* attend over prefill tiles of heads of up to 128 columns that leaves out tiles of keys which cannot matter (BLASST,
 * Yuan et al., arXiv:2512.12087), on compute capability 9.0. As in attend_hopper.cu two warpgroups multiply 64 rows
 * each. A warp leaves a tile out if the scores of all its 16 rows lie so far below the largest that each has met: then
 * it takes no exponentials. What the four of a warpgroup have voted they know when they next take their turn, without
 * waiting for each other; if all have left a tile out, there is no second product. The loader hears the votes as well,
 * and copies the values that some warp wants, or, behind several tiles that were kept, those of the next at once. Where
 * none were left out, a warpgroup goes on as in attend_hopper.cu for a while, and tries again. */
#include "base/dependent.cuh"
#include "kernels/cuda/attend/hopper_skip.cuh"

namespace {

template <typename C>
__device__ void consume(const skip_args &args, skip_shared<C> &shared, int kv_group, uint32_t tiles, int consumer,
                        int thread) {
    const cpa_cuda_attend_args &a = args.pools.a;
    skip_flow<C> flow(args, shared, tiles, consumer, thread);
    if (shared.walk.count > 0) {
        load_queries<C>(a, shared.piece, kv_group, flow.first_row, tiles + consumer * C::Q_BYTES, thread);
        copy_async_wait<0>();
        async_proxy_fence();
        named_sync(1 + consumer, WARPGROUP);
        flow.attend();
    }
    store_state<C>(a, shared.piece, kv_group, flow.state, flow.row_of_thread(), thread % 32);
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attend_hopper_skip(const __grid_constant__ skip_args args) {
    extern __shared__ char memory[];
    __shared__ skip_shared<C> shared;
    const cpa_cuda_attend_args &a = args.pools.a;
    const cta_work work(a, blockIdx.x);
    const uint32_t tiles = (shared_address(memory) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    /* Shuffled, so that the compiler knows that a warp has one: descriptors then stay in uniform registers. */
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    if (threadIdx.x == 0) {
        shared.piece = a.pieces[work.piece];
        prefetch_map(&args.pools.maps.k);
        prefetch_map(&args.pools.maps.v);
        shared.start();
        barrier_init_fence();
    }
    __syncthreads();
    if (shared.piece.row_begin == shared.piece.row_end) return; /* fills a reserved plan up */
    shared.walk.start(a, shared.piece);
    if (warpgroup == 0) {
        registers_shrink<C::LOADER_REGISTERS>();
        const int warp = thread / 32, lane = thread % 32;
        if (warp == 0)
            copy_tiles<C, CPA_KEYS>(args.pools, &args.pools.maps.k, shared, shared.k, work.kv_group, tiles + C::K_AT,
                                    lane);
        if (warp == 1)
            copy_tiles<C, CPA_VALUES>(args.pools, &args.pools.maps.v, shared, shared.v, work.kv_group,
                                      tiles + C::V_AT, lane);
    } else {
        registers_grow<C::CONSUMER_REGISTERS>();
        consume<C>(args, shared, work.kv_group, tiles, warpgroup - 1, thread);
    }
}

template <typename C>
cpa_status launch(const skip_args &args, int32_t n_pieces, cpa_stream *stream) {
    static uint64_t prepared;
    const cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)attend_hopper_skip<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    attend_hopper_skip<C><<<n_pieces * args.pools.a.kv_heads, C::THREADS, C::SHARED_BYTES, cpa_cuda_handle(stream)>>>(
        args);
    return cpa_cuda_launched(stream, "attend");
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_hopper_skip(const cpa_cuda_attend_args *a, const cpa_cuda_hopper_maps *maps,
                                                  cpa_cuda_tile_skip skip, int32_t n_pieces, cpa_stream *stream) {
    const int32_t box = cpa_cuda_hopper_box(a->k_dim, a->v_dim, 1 << a->block_shift, 0);
    const skip_args args = {{*maps, *a, box, 1 << a->block_shift == CPA_TENSOR_BLOCK}, skip};
    return a->q_dtype == CPA_BF16 ? launch<skip_config<__nv_bfloat16>>(args, n_pieces, stream)
                                  : launch<skip_config<__half>>(args, n_pieces, stream);
}
