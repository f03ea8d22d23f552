/* The two warpgroups of sparse_entries.cu that multiply probabilities and values, half of the columns each, and store
 * what comes of a unit. */
#ifndef CPA_CUDA_ENTRY_VALUES_CUH
#define CPA_CUDA_ENTRY_VALUES_CUH

#include "kernels/cuda/attend/entry_tiles.cuh"
#include "kernels/cuda/attend/wgmma_shared.cuh"

namespace {

template <typename C>
struct entry_values {
    entry_shared<C> &shared;
    const uint32_t tiles;
    const int consumer, thread; /* which half of the columns */
    thread_state<C> &state;     /* O alone */

    __device__ int lane() const { return thread % 32; }
    __device__ int own_half() const { return consumer * HALF_PARTS; }

    /* O of this warp's rows becomes what it is worth beside tile n. */
    __device__ void rescale_rows(int stage) {
        if (!__any_sync(0xffffffff, shared.grown[stage][thread / 32])) return;
        const int row = thread / 32 * 16 + lane() / 4;
        const float keep[2] = {shared.keep[stage][row], shared.keep[stage][row + 8]};
        rescale<C>(state, keep);
    }

    /* O += P V of tile n, part by part, so that there is room for what comes next as early as may be. */
    __device__ void add_tile(uint32_t n) {
        const int stage = same_in_warp(n % C::STAGES);
        const uint32_t tile = tiles + C::STAGES_AT + stage * C::STAGE_BYTES;
        const uint64_t p = wgmma_descriptor(tiles + stage * C::TILE_BYTES, 0);
        const uint64_t v = wgmma_descriptor(tile + consumer * (C::V_COLUMNS / COLUMNS) * C::TILE_BYTES, C::TILE_BYTES);
        barrier_wait(shared.at(shared.softened[stage]), shared.phase(n));
        rescale_rows(stage);
        wgmma_fence(); /* what the tile has, those who softened its scores have waited for, and fenced */
#pragma unroll
        for (int part = 0; part < C::PARTS; part++) {
#pragma unroll
            for (int step = 0; step < C::KEYS / 16; step++)
                wgmma_of_shared(state.o[part], wgmma_advance(p, step * 32),
                                wgmma_advance(v, part * C::PART_TILES * C::TILE_BYTES + step * 16 * COLUMNS * 2));
            wgmma_commit();
        }
        wgmma_wait<C::PARTS - 1>();
        shared.release(n, own_half(), lane());
        wgmma_wait<0>();
        hold_values<C>(state);
        shared.release(n, own_half() + 1, lane());
        if (lane() == 0) barrier_arrive(shared.at(shared.added[stage]));
    }
};

/* A warpgroup's columns of a unit's rows. */
template <typename C>
__device__ void store_unit(const cpa_cuda_attend_args &a, entry_shared<C> &shared, const cpa_cuda_piece &piece,
                           const thread_state<C> &state, int consumer, int thread) {
    asm volatile("" : "+r"(thread)); /* what follows from it is not kept from unit to unit: registers are few */
    const int lane = thread % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = thread / 32 * 16 + lane / 4 + 8 * half;
        if (piece.row_begin + row >= piece.row_end) continue;
        const ended_row ended = shared.rows[row];
#pragma unroll
        for (int n = 0; n < C::V_COLUMNS / 8; n++) {
            const int column = consumer * C::V_COLUMNS + 8 * n + 2 * (lane % 4);
            const float *from = &state.o[8 * n / C::PART][4 * (n % (C::PART / 8)) + 2 * half];
            const float pair[2] = {from[0], from[1]};
            if (column < a.v_dim) ended.template store<typename C::element>(a, column, pair);
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.at(shared.stored));
}

/* ---- the CTAs of a cluster that share a row's keys ---- */

/* O, where a CTA leaves it for its cluster, in the place of all tiles: rows begin in different banks. */
constexpr int LEFT_PITCH = 512 + 8;

template <typename C>
__device__ void leave_columns(const thread_state<C> &state, uint32_t tiles, int consumer, int thread) {
    const int lane = thread % 32, first_row = thread / 32 * 16 + lane / 4;
    static_assert(GROUP_ROWS * LEFT_PITCH * 4 <= C::STAGES_AT + C::STAGES * C::STAGE_BYTES, "room");
    named_sync(VALUES_ALONE, VALUES_THREADS); /* both are done with the last tile */
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < C::V_COLUMNS / 8; n++) {
            const float *from = &state.o[8 * n / C::PART][4 * (n % (C::PART / 8)) + 2 * half];
            const int at = (first_row + 8 * half) * LEFT_PITCH + consumer * C::V_COLUMNS + 8 * n + 2 * (lane % 4);
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(tiles + at * 4), "f"(from[0]), "f"(from[1])
                         : "memory");
        }
}

/* What the rows of the cluster that are this CTA's to store are worth in each, by as many threads. */
template <typename C>
__device__ void join_ends(const cpa_cuda_sparse_args &args, entry_shared<C> &shared, const cpa_cuda_piece &piece,
                          int of_both) {
    const int shares = cluster_ctas(), cta = of_both % shares, of_share = of_both / shares;
    const int row = cluster_cta() * (GROUP_ROWS / shares) + of_share;
    if (of_both >= GROUP_ROWS) return;
    const float own_max = read_in(shared_address(&shared.ends.max[row]), cta);
    float sum = read_in(shared_address(&shared.ends.sum[row]), cta), max = own_max;
    float top = read_in(shared_address(&shared.ends.top[row]), cta);
    for (int other = 1; other < shares; other *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, other));
    const float worth = worth_of(own_max, max, args.a[0].scale_log2);
    sum *= worth;
    for (int other = 1; other < shares; other *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, other);
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, other));
    }
    shared.worth[of_both] = worth;
    if (cta == 0 && piece.row_begin + row < piece.row_end)
        shared.rows[of_share] = ended_row(args, piece, row, max, sum, top);
}

/* Those rows: half of the threads have one, four columns each. */
template <typename C>
__device__ void store_joined(const cpa_cuda_sparse_args &args, entry_shared<C> &shared, const listed_row &of,
                             uint32_t tiles, int of_both) {
    constexpr int THREADS_OF_ROW = C::V_DIM / 4, AT_ONCE = VALUES_THREADS / THREADS_OF_ROW;
    const cpa_cuda_piece &piece = of.piece;
    const int shares = cluster_ctas(), rows = GROUP_ROWS / shares, first = cluster_cta() * rows;
    const int column = of_both % THREADS_OF_ROW * 4;
    if (!of.any) return;
    join_ends<C>(args, shared, piece, of_both);
    named_sync(VALUES_ALONE, VALUES_THREADS);
    for (int i = of_both / THREADS_OF_ROW; i < min(rows, piece.row_end - piece.row_begin - first); i += AT_ONCE) {
        float added[4] = {};
        float4 left[MOST_SHARES]; /* all are asked for before one is needed */
#pragma unroll
        for (int cta = 0; cta < MOST_SHARES; cta++)
            left[cta] = read_four_in(tiles + ((first + i) * LEFT_PITCH + column) * 4, min(cta, shares - 1));
#pragma unroll
        for (int cta = 0; cta < MOST_SHARES; cta++) {
            const float worth = cta < shares ? shared.worth[i * shares + cta] : 0;
            if (worth == 0) continue;
            added[0] += worth * left[cta].x, added[1] += worth * left[cta].y;
            added[2] += worth * left[cta].z, added[3] += worth * left[cta].w;
        }
        if (column < args.a[0].v_dim) shared.rows[i].template store<typename C::element>(args.a[0], column, added);
    }
}

/* ---- units ---- */

/* All units of the CTA, by one of the two warpgroups. */
template <typename C>
__device__ void add_units(const cpa_cuda_sparse_args &args, entry_shared<C> &shared, uint32_t tiles, int consumer,
                          int thread) {
    thread_state<C> state;
    entry_values<C> values{shared, tiles, consumer, thread, state};
    uint32_t n = 0, units = 0;
    const bool first = consumer == 0 && thread == 0;
    for_units<C>(args, shared, ADDING, VALUES_ALONE, VALUES_THREADS, first, [&](const listed_work &work) {
        const uint32_t end = same_in_warp(n + work.count);
        clear_values<C>(state);
        hold_values<C>(state);
#pragma unroll 1
        for (; n < end; n++) values.add_tile(n);
        if (C::SPLIT) {
            leave_columns<C>(state, tiles, consumer, thread);
        } else if (same_in_warp(work.row.any)) {
            barrier_wait(shared.at(shared.ended), units++ & 1);
            store_unit<C>(args.a[0], shared, work.row.piece, state, consumer, thread);
        }
    });
}

} // namespace

#endif
