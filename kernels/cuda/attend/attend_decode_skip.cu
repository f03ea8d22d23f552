/* attend over few rows that leaves out runs of keys which cannot matter (BLASST, Yuan et al., arXiv:2512.12087): rows of
 * elements that lie together, heads of up to 128 columns without rules of scores. As the kernels of decode_kernel.cuh,
 * which are bound by memory; so what counts is that the values of a run that is left out are not read. A warp has keys
 * of several runs under way. When it has the scores of a run it knows whether its rows need the values, and only then
 * asks for them; the scores wait in registers until these are there, while the warp goes on with the keys that follow. */
#include <float.h>

#include "kernels/cuda/attend/decode_kernel.cuh"

namespace {

/* A warp has stages of keys and stages of values. */
template <typename Element, int Warps>
struct skip_config : config<Element, void, 128, 128, 3, Warps, 1, false> {
    using base = config<Element, void, 128, 128, 3, Warps, 1, false>;
    static constexpr int KEY_STAGES = 4, VALUE_STAGES = 2, VALUES_AT = KEY_STAGES * base::K_BYTES;
    static constexpr int V_BYTES = KEYS * base::V_DIM * 2, WARP_BYTES = VALUES_AT + VALUE_STAGES * V_BYTES;
    static_assert(WARP_BYTES == base::WARP_BYTES, "as much as where keys and values come together");
};

/* The scores of a run for the rows lane / 4 and lane / 4 + 8, raw. */
struct run_scores {
    float s[2][4];
};

/* A warp on its way through its runs of a piece. */
template <typename C>
struct skip_walk {
    const cpa_cuda_attend_args &a;
    const cpa_cuda_piece &piece;
    const key_walk<KEYS> &walk;
    const uint32_t shared; /* of the warp's stages */
    const int kv_group, lane;
    const stage_loader<C> loader;
    const query_rows rows;
    query_operands<C> q;
    row_keys bounds[2];
    float top[2];     /* the largest raw score of each row so far */
    run_scores held[2]; /* of runs whose values are under way, the oldest first */
    int n_held = 0, n_kept = 0;
    uint32_t skipped = 0;

    __device__ skip_walk(const cpa_cuda_attend_args &args, const cpa_cuda_piece &of, const key_walk<KEYS> &keys,
                         int kv_head, uint32_t stages, int in_warp)
        : a(args), piece(of), walk(keys), shared(stages), kv_group(kv_head), lane(in_warp),
          loader(args, kv_head, 0, in_warp), rows(args, of, of.row_begin, kv_head, in_warp) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bounds[half] = walk.keys_of(a, piece, piece.row_begin + 8 * half + lane / 4);
            top[half] = half == 1 && rows.few ? INFINITY : -FLT_MAX; /* rows that are none are never in the way */
        }
    }
    __device__ int block_of(int i) const {
        return i < walk.count ? __ldg(a.tables + piece.table + (walk.tile(i) * KEYS >> a.block_shift)) : 0;
    }
    __device__ lane_run run_of(int i, int block) const {
        if (i >= walk.count) return lane_run{};
        const int key = walk.tile(i) * KEYS;
        return loader.run(a, kv_group, block, key, piece.k_end - key, lane);
    }
    __device__ void load_keys(const lane_run &run, int stage) const {
        const uint32_t to = shared + stage * C::K_BYTES;
        const int64_t token_bytes = a.k_token_stride * 2;
        if (run.keys >= KEYS && a.k_dim == C::K_DIM) {
            loader.k.template load<true>(run.k, token_bytes, run.keys, to);
        } else if (run.keys > 0) {
            loader.k.template load<false>(run.k, token_bytes, run.keys, to);
        }
    }
    __device__ void load_values(const lane_run &run, int stage) const {
        const uint32_t to = shared + C::VALUES_AT + stage * C::V_BYTES;
        const int64_t token_bytes = a.v_token_stride * 2;
        if (run.keys >= KEYS && a.v_dim == C::V_DIM) {
            loader.v.template load<true>(run.v, token_bytes, run.keys, to);
        } else {
            loader.v.template load<false>(run.v, token_bytes, run.keys, to);
        }
    }

    /* S = Q K^T, less what is hidden. */
    __device__ run_scores score(int stage, int tile) const {
        using product = typename C::element;
        run_scores run = {};
        const uint32_t keys_at = keys_base<C::K_DIM>(shared + stage * C::K_BYTES, lane);
#pragma unroll
        for (int k = 0; k < C::K_DIM / 16; k++) {
            uint32_t keys[4];
            load_matrices(keys, at_pair<C::K_DIM>(keys_at, k));
            mma<product>(run.s[0], q.part[k], keys[0], keys[1]);
            mma<product>(run.s[1], q.part[k], keys[2], keys[3]);
        }
        if (walk.masked(tile)) {
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!sees(bounds[e / 2], walk.sinks, tile * KEYS + 8 * n + 2 * (lane % 4) + e % 2))
                        run.s[n][e] = -INFINITY;
        }
        return run;
    }
    /* Whether the run cannot matter to any row; if it can, its scores count. */
    __device__ bool is_below(const run_scores &run, float below) {
        float largest[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            largest[half] = fmaxf(fmaxf(run.s[0][2 * half], run.s[0][2 * half + 1]),
                                  fmaxf(run.s[1][2 * half], run.s[1][2 * half + 1]));
        if (__all_sync(0xffffffff, largest[0] < top[0] - below && largest[1] < top[1] - below)) return true;
#pragma unroll
        for (int half = 0; half < 2; half++) top[half] = fmaxf(top[half], quad_max(largest[half]));
        return false;
    }
    /* One step of the online softmax, whose maximum goes as far as the runs that are held, and O += P V. */
    __device__ void weigh(warp_state<C> &state, run_scores run, int stage) {
        using product = typename C::element;
        uint32_t p[4];
        float keep[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float max = fmaxf(fmaxf(run.s[0][2 * half], run.s[0][2 * half + 1]),
                              fmaxf(run.s[1][2 * half], run.s[1][2 * half + 1]));
            max = fmaxf(state.max[half], quad_max(max));
            keep[half] = worth_of(state.max[half], max, a.scale_log2);
            state.max[half] = max;
            const float base = max * a.scale_log2;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float low = exp2_fast(run.s[n][2 * half] * a.scale_log2 - base);
                const float high = exp2_fast(run.s[n][2 * half + 1] * a.scale_log2 - base);
                sum += low + high;
                p[2 * n + half] = pack_pair<product>(low, high);
            }
            state.sum[half] = state.sum[half] * keep[half] + sum;
        }
        state.rescale(keep);
        weigh_elements<C>(state.o, p, shared + C::VALUES_AT + stage * C::V_BYTES, lane);
    }
    /* Makes room for one more run. What is under way beside the oldest values came after them, but for the last group of
     * copies they are there. */
    __device__ void weigh_oldest(warp_state<C> &state) {
        copy_async_wait<1>();
        __syncwarp();
        weigh(state, held[0], n_kept % C::VALUE_STAGES);
        held[0] = held[1];
        n_held--;
        __syncwarp(); /* all are done with the stage */
    }

    /* Every C::GANGS-th run from `gang` on. Groups of copies are those of steps: the keys of the run KEY_STAGES - 1 on,
     * and the values of this one, if it is kept. */
    __device__ void attend(warp_state<C> &state, bool prefetches, float below, int gang) {
        int blocks[C::KEY_STAGES], stage = 0;
#pragma unroll
        for (int ahead = 0; ahead < C::KEY_STAGES; ahead++) {
            blocks[ahead] = block_of(gang + ahead * C::GANGS);
            if (prefetches && ahead < C::KEY_STAGES - 1) /* while the kernel before this one ends */
                loader.prefetch(a, run_of(gang + ahead * C::GANGS, blocks[ahead]), lane);
        }
        if (!piece.ready && !a.beside_shared) { /* only the plan, and what is ready, has been read so far */
            dependent_wait();
            dependent_allow();
        }
#pragma unroll
        for (int ahead = 0; ahead < C::KEY_STAGES - 1; ahead++) {
            load_keys(run_of(gang + ahead * C::GANGS, blocks[ahead]), ahead);
            copy_async_commit();
        }
        take_queries<C, false>(q, state, a, piece, rows, kv_group, walk.count > 0, 0, gang, lane);
        for (int i = gang; i < walk.count; i += C::GANGS) {
            copy_async_wait<C::KEY_STAGES - 2>();
            __syncwarp(); /* the keys are there for all lanes, and all are done with the stage that is loaded next */
            const int next = i + (C::KEY_STAGES - 1) * C::GANGS;
            load_keys(run_of(next, blocks[C::KEY_STAGES - 1]), stage == 0 ? C::KEY_STAGES - 1 : stage - 1);
            const run_scores run = score(stage, walk.tile(i));
            if (is_below(run, below)) {
                skipped++;
            } else {
                if (n_held == C::VALUE_STAGES) weigh_oldest(state);
                load_values(run_of(i, blocks[0]), n_kept % C::VALUE_STAGES);
                if (n_held == 0) {
                    held[0] = run;
                } else {
                    held[1] = run;
                }
                n_held++;
                n_kept++;
            }
            copy_async_commit();
#pragma unroll
            for (int ahead = 0; ahead + 1 < C::KEY_STAGES; ahead++) blocks[ahead] = blocks[ahead + 1];
            blocks[C::KEY_STAGES - 1] = block_of(next + C::GANGS);
            stage = stage + 1 == C::KEY_STAGES ? 0 : stage + 1;
        }
        copy_async_wait<0>();
        __syncwarp();
        for (; n_held > 0; n_held--) {
            weigh(state, held[0], (n_kept - n_held) % C::VALUE_STAGES);
            held[0] = held[1];
        }
        __syncwarp();
    }
};

/* Adds what the warps looked at and left out to the caller's counts. Called by all threads. */
__device__ inline void add_counts(uint32_t (&tiles)[2], uint32_t looked, uint32_t skipped, unsigned long long *counts,
                                  int lane) {
    if (!counts) return;
    if (threadIdx.x < 2) tiles[threadIdx.x] = 0;
    __syncthreads();
    if (lane == 0) atomicAdd(&tiles[0], looked), atomicAdd(&tiles[1], skipped);
    __syncthreads();
    if (threadIdx.x < 2) atomicAdd(&counts[threadIdx.x], (unsigned long long)tiles[threadIdx.x]);
}

struct skip_args {
    cpa_cuda_attend_args a;
    cpa_cuda_tile_skip skip;
};

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS) attend_decode_skip(const __grid_constant__ skip_args args) {
    extern __shared__ __align__(128) char shared[];
    __shared__ cpa_cuda_piece pieces[C::WARPS]; /* a copy for each warp, which waits for no other at the start */
    __shared__ key_walk<KEYS> walks[C::WARPS];
    __shared__ warp_states<C> states;
    __shared__ uint32_t tiles[2];
    const cpa_cuda_attend_args &a = args.a;
    const int kv_group = blockIdx.x, warp = kept<C::CTAS == 2>((int)threadIdx.x / 32),
              lane = kept<C::CTAS == 2>((int)threadIdx.x % 32);
    const cpa_cuda_piece &piece = pieces[warp];
    key_walk<KEYS> &walk = walks[warp];
    uint32_t looked = 0, skipped = 0;
    bool waited = false;
    for (int at = blockIdx.y; at >= 0; at = piece.next) {
        copy_piece(pieces[warp], a.pieces[at], lane);
        walk.start_warp(a, piece, lane);
        warp_state<C> state;
        state.clear(a.scale_log2);
        skip_walk<C> keys(a, piece, walk, kv_group, shared_address(shared) + warp * C::WARP_BYTES, lane);
        keys.attend(state, a.early && !waited && !piece.ready && !a.beside_shared, args.skip.below, warp);
        looked += keys.n_kept + keys.skipped;
        skipped += keys.skipped;
        waited |= !piece.ready;
        leave_state<C>(state, piece.row_end - piece.row_begin, 1, states, (float *)shared, warp, lane);
        store_rows<C>(a, piece, kv_group, states, (const float *)shared, warp, lane);
    }
    dependent_wait(); /* what comes behind takes this kernel's end for that of the one before it */
    dependent_allow();
    add_counts(tiles, looked, skipped, args.skip.counts, lane);
}

/* As launch_decode. */
template <typename C>
cpa_status launch_skip(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    static uint64_t prepared;
    const void *kernel = (const void *)attend_decode_skip<C>;
    if (l->count == 0) return cpa_cuda_fits(stream, kernel, C::SHARED_BYTES) ? CPA_OK : CPA_UNSUPPORTED;
    const cpa_status status = cpa_cuda_shared_memory(stream, kernel, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    skip_args args = {*l->args, l->skip};
    const dim3 grid(args.a.kv_heads, l->count);
    const int multiprocessors = cpa_cuda_device_of(stream)->multiprocessors;
    const bool few = 2 * (int64_t)grid.x * grid.y <= C::CTAS * multiprocessors;
    args.a.early = args.a.early && (args.a.alone || few || args.a.beside_shared);
    return cpa_cuda_check(&stream->error,
                          launch_dependent(attend_decode_skip<C>, grid, C::THREADS, args, args.a.early,
                                           cpa_cuda_handle(stream), C::SHARED_BYTES),
                          "attend");
}

template <typename Element>
cpa_status launch_warps(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->plan->decode_wide ? launch_skip<skip_config<Element, 8>>(l, stream)
                                : launch_skip<skip_config<Element, 4>>(l, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode_skip(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_warps<__nv_bfloat16>(l, stream)
                                             : launch_warps<__half>(l, stream);
}
