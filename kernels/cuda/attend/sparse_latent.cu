/* sparse_attend over latents (multi-head latent attention with absorbed queries over the keys that an indexer chose,
 * DeepSeek-V3.2, arXiv:2512.02556) on compute capability 9.0: the tiles of attend_latent.cu, gathered row by row.
 *
 * A CTA takes a row and 64 of its heads. Where there are few rows, the CTAs of a cluster share the keys of one; in the
 * end each joins the states of all for some of the heads, through the shared memory of the others. */
#include "base/check.h"
#include "kernels/cuda/attend/latent_rows.cuh"
#include "kernels/cuda/attend/sparse_latent.cuh"

namespace {


/* What a CTA leaves for its cluster, in the places of tiles and probabilities: O, whose rows begin in different banks,
 * and of each row the maximum, the sum and the largest score. */
constexpr int LEFT_PITCH = 512 + 8;
struct left_rows {
    float max[GROUP_ROWS], sum[GROUP_ROWS], top[GROUP_ROWS];
};

/* Leaves the state of this CTA's rows; the sums of both warpgroups have been joined. */
template <typename C>
__device__ void leave_state(const thread_state<C> &state, uint32_t tiles, int consumer, int thread) {
    const int lane = thread % 32, first_row = thread / 32 * 16 + lane / 4;
    const uint32_t o = tiles + C::STAGES_AT, rows = tiles + C::P_AT;
    static_assert(GROUP_ROWS * LEFT_PITCH * 4 <= C::STAGES * C::STAGE_BYTES && sizeof(left_rows) <= C::P_BYTES, "room");
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first_row + 8 * half;
        const float sum = quad_sum(state.sum[half]), top = quad_max(state.top[half]);
#pragma unroll
        for (int n = 0; n < C::V_COLUMNS / 8; n++) {
            const float *from = &state.o[8 * n / C::PART][4 * (n % (C::PART / 8)) + 2 * half];
            const uint32_t to = o + (row * LEFT_PITCH + consumer * C::V_COLUMNS + 8 * n + 2 * (lane % 4)) * 4;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(from[0]), "f"(from[1]) : "memory");
        }
        if (consumer > 0 || lane % 4 > 0) continue;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(rows + row * 4), "f"(state.max[half]) : "memory");
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(rows + (GROUP_ROWS + row) * 4), "f"(sum) : "memory");
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(rows + (2 * GROUP_ROWS + row) * 4), "f"(top) : "memory");
    }
}

/* A row of all CTAs of the cluster: the largest maximum, the sum relative to it, and the largest score. */
struct joined_row {
    float max, sum, top;

    __device__ joined_row(uint32_t rows, int row, int shares, float scale_log2)
        : max(-FLT_MAX), sum(0), top(-INFINITY) {
        for (int cta = 0; cta < shares; cta++) max = fmaxf(max, max_of(rows, row, cta));
        for (int cta = 0; cta < shares; cta++) {
            sum += worth(rows, row, cta, scale_log2) * read_in(rows + (GROUP_ROWS + row) * 4, cta);
            top = fmaxf(top, read_in(rows + (2 * GROUP_ROWS + row) * 4, cta));
        }
        sum = counted_sum(sum, max, scale_log2);
    }
    static __device__ float max_of(uint32_t rows, int row, int cta) {
        return read_in(rows + row * 4, cta);
    }
    /* What the sum and O of a CTA are worth. */
    __device__ float worth(uint32_t rows, int row, int cta, float scale_log2) const {
        return worth_of(max_of(rows, row, cta), max, scale_log2);
    }
};

/* The rows of the cluster that are this CTA's to store, by both warpgroups: half of their threads have a row, four
 * columns each. */
template <typename C>
__device__ void store_joined(const cpa_cuda_sparse_args &args, const cpa_cuda_piece &piece, float code_scale,
                             uint32_t tiles, int share, int shares, int of_both) {
    constexpr int THREADS_OF_ROW = C::V_DIM / 4, AT_ONCE = BOTH_THREADS / THREADS_OF_ROW;
    const cpa_cuda_attend_args &a = args.a[0];
    const uint32_t o = tiles + C::STAGES_AT, rows = tiles + C::P_AT;
    const int rows_of_share = GROUP_ROWS / shares, first = share * rows_of_share, column = of_both % THREADS_OF_ROW * 4;
    const int most = piece.row_end - piece.row_begin;
    const float scale = a.scale * code_scale, scale_log2 = a.scale_log2 * code_scale;
    const auto sink_of = [&](const joined_row &joined, int row) {
        const float lse = piece.refused ? NAN : lse_of(joined.sum, joined.max * scale + logf(joined.sum));
        return row_sink(a, piece, piece.row_begin + row, 0, lse);
    };
    for (int row = first + of_both / THREADS_OF_ROW; row < min(first + rows_of_share, most); row += AT_ONCE) {
        if (column >= a.v_dim) break;
        const joined_row joined(rows, row, shares, scale_log2);
        float value[4] = {}, old[4];
        for (int cta = 0; cta < shares; cta++) {
            const float worth = joined.worth(rows, row, cta, scale_log2);
            if (worth == 0) continue;
            const float4 four = read_four_in(o + (row * LEFT_PITCH + column) * 4, cta);
            value[0] += worth * four.x, value[1] += worth * four.y;
            value[2] += worth * four.z, value[3] += worth * four.w;
        }
        const float inverse = inverse_of_sum(joined.sum) * code_scale;
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] *= inverse;
        const row_sink sink = sink_of(joined, row);
        sink.load_old(column, old);
        sink.template store<typename C::element>(column, value, old);
    }
    named_sync(BOTH, BOTH_THREADS); /* all have read the LSEs that are there */
    const int row = first + of_both;
    if (of_both >= rows_of_share || row >= most) return;
    const joined_row joined(rows, row, shares, scale_log2);
    sink_of(joined, row).store_lse();
    if (args.max_logits) args.max_logits[piece.q_row * a.q_heads + piece.row_begin + row] = joined.top * scale;
}

/* Has each warpgroup's largest scores be those of both; where the sums of both have been. */
template <typename C>
__device__ void join_tops(thread_state<C> &state, uint32_t tile, int consumer, int thread) {
    const auto place_of = [&](int warpgroup) { return tile + ((2 + warpgroup) * WARPGROUP + thread) * 8; };
    float top[2];
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place_of(consumer)), "f"(state.top[0]), "f"(state.top[1])
                 : "memory");
    named_sync(BOTH, BOTH_THREADS);
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(top[0]), "=f"(top[1])
                 : "r"(place_of(1 - consumer))
                 : "memory");
    state.top[0] = fmaxf(state.top[0], top[0]), state.top[1] = fmaxf(state.top[1], top[1]);
}

template <typename C>
__device__ void store_tops(const cpa_cuda_sparse_args &args, const cpa_cuda_piece &piece, const thread_state<C> &state,
                           float scale, int thread) {
    const int lane = thread % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int head = piece.row_begin + thread / 32 * 16 + lane / 4 + 8 * half;
        const float top = quad_max(state.top[half]);
        if (lane % 4 == 0 && head < piece.row_end)
            args.max_logits[piece.q_row * args.a[0].q_heads + head] = top * scale;
    }
}

/* All units of the CTA, by one of the two warpgroups that multiply. */
template <typename C>
__device__ void attend_units(const cpa_cuda_sparse_args &args, listed_shared<C> &shared, uint32_t tiles, int consumer,
                             int thread) {
    const cpa_cuda_attend_args &a = args.a[0];
    const listed_work &work = shared.works[MULTIPLYING];
    const cpa_cuda_piece &piece = work.row.piece;
    const float code_scale =
        C::CACHE == LATENT_CODES ? head_scale(a.k_scale, a.k_head_scales, a.head_scale_step, 0) : 1;
    uint32_t n = 0;
    for (int32_t unit = first_unit<C>(); unit >= 0; unit = work.next) {
        named_sync(BOTH, BOTH_THREADS); /* nobody needs the one before */
        if (consumer == 0 && thread == 0) take_unit<C>(args, shared.works[MULTIPLYING], unit);
        named_sync(BOTH, BOTH_THREADS);
        int of_both = threadIdx.x - WARPGROUP;
        asm volatile("" : "+r"(of_both)); /* what follows from it is not kept from unit to unit: registers are few */
        if (!work.row.any) {
            if (C::SPLIT) join_cluster();
            continue;
        }
        if (work.count > 0) load_packed_queries<C>(a, piece, 0, tiles, of_both);
        thread_state<C> state;
        clear_state<C>(state, a.scale_log2 * code_scale);
        state.top[0] = state.top[1] = -INFINITY;
        named_sync(BOTH, BOTH_THREADS);
        latent_rows<C> rows{
            shared, tiles, consumer, thread, (uint32_t)same_in_warp(n), a.scale_log2 * code_scale, state};
        rows.attend_tiles(work.count);
        n += work.count;
        join_sums<C>(state, tiles, consumer, thread);
        if (shared.wants_top) join_tops<C>(state, tiles, consumer, thread);
        if constexpr (C::SPLIT) {
            leave_state<C>(state, tiles, consumer, thread);
            join_cluster();
            store_joined<C>(args, piece, code_scale, tiles, cluster_cta(), cluster_ctas(), of_both);
        } else {
            store_columns<C>(a, piece, state, code_scale, 0, consumer, thread);
            if (shared.wants_top && consumer == 0) store_tops<C>(args, piece, state, a.scale * code_scale, thread);
        }
    }
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) sparse_latent(const __grid_constant__ cpa_cuda_sparse_args args) {
    extern __shared__ char memory[];
    __shared__ listed_shared<C> shared;
    static_assert(sizeof shared + C::SHARED_BYTES <= 227 << 10, "of a CTA");
    const uint32_t tiles = (shared_address(memory) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    if (threadIdx.x == 0) {
        shared.wants_top = args.max_logits != nullptr;
        shared.start();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_shrink<C::LOADER_REGISTERS>();
        if constexpr (C::CODES) {
            copy_listed_codes<C>(args, shared, tiles, thread);
        } else {
            copy_listed<C>(args, shared, tiles, thread);
        }
        if (C::SPLIT) join_cluster(); /* as those who multiply do before they join */
    } else {
        registers_grow<C::CONSUMER_REGISTERS>();
        attend_units<C>(args, shared, tiles, warpgroup - 1, thread);
    }
    if (C::SPLIT) join_cluster(); /* nobody reads what is this CTA's any more */
}

template <typename C>
cpa_status launch(const cpa_cuda_sparse_args &args, int64_t units, int cluster, cpa_stream *stream) {
    static uint64_t prepared;
    return launch_units<C>(sparse_latent<C>, &prepared, args, units, cluster, stream);
}

template <typename Element, latent_cache Cache>
cpa_status launch_cache(const cpa_cuda_sparse_args &args, cpa_stream *stream) {
    const int64_t units = args.rows * ((args.a[0].group + GROUP_ROWS - 1) / GROUP_ROWS);
    const int shares = shares_of(args, units, cpa_cuda_device_of(stream)->multiprocessors);
    return shares > 1 ? launch<listed_config<Element, Cache, true>>(args, units, shares, stream)
                      : launch<listed_config<Element, Cache, false>>(args, units, shares, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_sparse_latent(const cpa_cuda_sparse_args *args, cpa_stream *stream) {
    const cpa_cuda_attend_args &a = args->a[0];
    const bool bf16 = a.q_dtype == CPA_BF16;
    if (a.kv_dtype == CPA_FP8_T64) return cpa_cuda_sparse_entries(args, stream);
    if (a.kv_dtype == CPA_FP8_T128) return launch_cache<__nv_bfloat16, LATENT_TILED_CODES>(*args, stream);
    if (a.kv_dtype == CPA_FP8_E4M3)
        return bf16 ? launch_cache<__nv_bfloat16, LATENT_CODES>(*args, stream)
                    : launch_cache<__half, LATENT_CODES>(*args, stream);
    return bf16 ? launch_cache<__nv_bfloat16, LATENT_ELEMENTS>(*args, stream)
                : launch_cache<__half, LATENT_ELEMENTS>(*args, stream);
}
