/* attend over latents (multi-head latent attention with absorbed queries, DeepSeek-V2, arXiv:2405.04434) on compute
 * capability 9.0: one KV head for all query heads, whose keys have up to 576 columns, of which the first, 512 at most,
 * are the values. A tile of 64 keys is copied once for both products. And over ordinary heads of 257 to 512 columns,
 * whose values are copied by themselves.
 *
 * A CTA takes 64 packed rows, piece by piece. The sums of 512 columns are more than a warpgroup has registers for: two
 * have a half each, of the same rows, and a thread of one has the rows of that thread of the other. They take turns
 * with the scores of a tile and their softmax, and the one whose turn it is hands probabilities and maxima on, thread
 * to thread; while it multiplies them with its half of the values, the other has the scores of the next tile multiplied
 * (as FlashMLA, DeepSeek-AI, has two tiles under way in two warpgroups). Where the rows of a token are those of a team
 * of two CTAs, these are a cluster, which reads a tile once. */
#include "base/check.h"
#include "base/dependent.cuh"
#include "kernels/cuda/attend/latent_codes.cuh"
#include "kernels/cuda/attend/latent_rows.cuh"

namespace {

/* All pieces of the CTA, by one of the two warpgroups. */
template <typename C>
__device__ void take_pieces(const cpa_cuda_attend_args &a, latent_shared<C> &shared, uint32_t tiles, int consumer,
                            int thread) {
    const cpa_cuda_piece &piece = shared.pieces[MULTIPLYING];
    const key_walk<C::KEYS> &walk = shared.walks[MULTIPLYING];
    const int lane = thread % 32, kv_head = blockIdx.y;
    const float code_scale =
        C::CACHE == LATENT_CODES ? head_scale(a.k_scale, a.k_head_scales, a.head_scale_step, 0) : 1;
    const float scale_log2 = a.scale_log2 * code_scale;
    uint32_t n = 0;
    for (int at = blockIdx.x; at >= 0; at = piece.next) {
        named_sync(BOTH, BOTH_THREADS); /* nobody needs the one before */
        if (consumer == 0 && thread < 32) shared.take(a, MULTIPLYING, at, lane);
        named_sync(BOTH, BOTH_THREADS);
        int of_both = threadIdx.x - WARPGROUP;
        asm volatile("" : "+r"(of_both)); /* what follows from it is not kept from piece to piece: registers are few */
        if (walk.count > 0) load_packed_queries<C>(a, piece, kv_head, tiles, of_both);
        thread_state<C> state;
        const int row = piece.row_begin + thread / 32 * 16 + lane / 4;
#pragma unroll 1 /* registers are few */
        for (int half = 0; half < 2; half++) {
            const row_keys keys = walk.keys_of(a, piece, row + 8 * half, a.rows);
            if (half == 0)
                state.keys[0] = keys;
            else
                state.keys[1] = keys;
        }
        clear_state<C>(state, scale_log2);
        named_sync(BOTH, BOTH_THREADS);
        latent_rows<C> rows{shared, tiles, consumer, thread, (uint32_t)same_in_warp(n), scale_log2, state};
        rows.attend_tiles(walk.count);
        join_sums<C>(state, tiles, consumer, thread);
        store_columns<C>(a, piece, state, code_scale, kv_head, consumer, thread);
        n += walk.count;
    }
}

/* What a CTA does. */
template <typename C>
__device__ void attend_rows(const hopper_args &args) {
    extern __shared__ char memory[];
    __shared__ latent_shared<C> shared;
    static_assert(sizeof shared + C::SHARED_BYTES <= 227 << 10, "of a CTA");
    const uint32_t tiles = (shared_address(memory) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    /* Shuffled, so that the compiler knows that a warp has one: descriptors then stay in uniform registers. */
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    if (threadIdx.x == 0) {
        if (!C::CODES) prefetch_map(&args.maps.k);
        if (C::APART) prefetch_map(&args.maps.v);
        shared.start();
    }
    __syncthreads();
    if constexpr (C::PAIRED) cluster_sync(); /* both have their barriers */
    dependent_wait();
    dependent_allow();
    if (warpgroup == 0) {
        registers_shrink<C::LOADER_REGISTERS>();
        if constexpr (C::CODES) {
            copy_codes<C>(args.a, shared, tiles, threadIdx.x);
        } else {
            const int warp = thread / 32, lane = thread % 32;
            if (warp == 0) copy_boxes<C, LEFT_VALUES, HALF_PARTS>(args, shared, tiles, blockIdx.y, lane);
            if (warp == 1) copy_boxes<C, RIGHT_VALUES, HALF_PARTS>(args, shared, tiles, blockIdx.y, lane);
            if (warp == 2) copy_boxes<C, KEYS_ALONE, 1>(args, shared, tiles, blockIdx.y, lane);
        }
    } else {
        registers_grow<C::CONSUMER_REGISTERS>();
        take_pieces<C>(args.a, shared, tiles, warpgroup - 1, thread);
    }
    if constexpr (C::PAIRED) cluster_sync(); /* the other is done with what is this one's */
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attend_latent(const __grid_constant__ hopper_args args) {
    attend_rows<C>(args);
}
template <typename C>
__global__ void __cluster_dims__(C::SHARERS, 1, 1) __launch_bounds__(C::THREADS, 1)
    attend_latent_pair(const __grid_constant__ hopper_args args) {
    attend_rows<C>(args);
}

template <typename C>
auto kernel_of() {
    if constexpr (C::PAIRED)
        return attend_latent_pair<C>;
    else
        return attend_latent<C>;
}

template <typename C>
cpa_status launch(const hopper_args &args, int32_t ctas, cpa_stream *stream) {
    static uint64_t prepared;
    const auto kernel = kernel_of<C>();
    CPA_TRY(cpa_cuda_shared_memory(stream, (const void *)kernel, C::SHARED_BYTES, &prepared));
    return cpa_cuda_check(&stream->error,
                          launch_dependent(kernel, dim3(ctas, args.a.kv_heads), C::THREADS, args, args.a.early,
                                           cpa_cuda_handle(stream), C::SHARED_BYTES),
                          "attend");
}

template <typename Element>
cpa_status launch_cache(const hopper_args &args, cpa_cuda_latent_form form, int32_t ctas, cpa_stream *stream) {
    if (!form.v_in_k) return launch<latent_config<Element, VALUES_APART>>(args, ctas, stream);
    if (args.a.kv_dtype == CPA_FP8_E4M3) return launch<latent_config<Element, LATENT_CODES>>(args, ctas, stream);
    if (form.paired) return launch<latent_config<Element, LATENT_ELEMENTS, true>>(args, ctas, stream);
    return launch<latent_config<Element, LATENT_ELEMENTS>>(args, ctas, stream);
}

} // namespace

extern "C" int32_t cpa_cuda_latent_box(cpa_cuda_latent_form form, int32_t block_size) {
    constexpr int32_t KEYS = latent_config<__half, LATENT_ELEMENTS>::KEYS;
    const int32_t most = form.paired ? KEYS / 2 : KEYS;
    return block_size < most ? block_size : most;
}

extern "C" cpa_status cpa_cuda_attend_latent(const cpa_cuda_attend_args *a, const cpa_cuda_hopper_maps *maps,
                                             cpa_cuda_latent_form form, int32_t ctas, cpa_stream *stream) {
    const int32_t block_size = 1 << a->block_shift;
    const hopper_args args = {*maps, *a, cpa_cuda_latent_box(form, block_size), block_size == CPA_TENSOR_BLOCK};
    if (a->kv_dtype == CPA_FP8_T128)
        return launch<latent_config<__nv_bfloat16, LATENT_TILED_CODES>>(args, ctas, stream);
    return a->q_dtype == CPA_BF16 ? launch_cache<__nv_bfloat16>(args, form, ctas, stream)
                                  : launch_cache<__half>(args, form, ctas, stream);
}
