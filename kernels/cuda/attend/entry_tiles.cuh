/* What the warpgroups of sparse_entries.cu share: shapes of tiles, where they lie, the barriers by which they come and
 * go, and which of them a CTA has. */
#ifndef CPA_CUDA_ENTRY_TILES_CUH
#define CPA_CUDA_ENTRY_TILES_CUH

#include "kernels/cuda/attend/hopper_scores.cuh"
#include "kernels/cuda/attend/listed_units.cuh"

namespace {

/* The columns of a tile by who is done with them last, and when: two parts of each half, by the warpgroup that has
 * these columns of O. */
enum entry_part { LEFT_VALUES, RIGHT_VALUES = 2, ENTRY_PARTS = 4 };
constexpr int HALF_PARTS = 2;

/* Split: the CTAs of a cluster share a row's keys. Paired: two CTAs of a cluster have the heads of a row; each widens
 * half of the keys of every tile for both. */
template <bool Split, bool Paired>
struct entry_config {
    using element = __nv_bfloat16;
    static constexpr bool SPLIT = Split, PAIRED = Paired, RULED = false;
    static constexpr int K_DIM = 512, V_DIM = 512, KEYS = 64, SHARERS = Paired ? 2 : 1;
    static constexpr int VALUE_GROUPS = 2, WARPGROUPS = 2 + VALUE_GROUPS, THREADS = WARPGROUPS * WARPGROUP;
    static constexpr int LOADER_REGISTERS = 72, VALUES_REGISTERS = 160;
    static constexpr int SCORES_REGISTERS = 512 - LOADER_REGISTERS - VALUE_GROUPS * VALUES_REGISTERS; /* of 64K */
    /* Of O of a warpgroup; and of one product. */
    static constexpr int V_COLUMNS = V_DIM / VALUE_GROUPS, PART = 128, PARTS = V_COLUMNS / PART;
    static_assert(PARTS == HALF_PARTS, "parts of O and of tiles are the same columns");
    static constexpr int TAIL = 0, K_WHOLE = K_DIM, V_TAIL = 0, V_WHOLE = V_COLUMNS;
    /* Tiles of COLUMNS of queries that are kept in registers: from shared memory, a product of 64 rows by 64 keys reads
     * as much of queries as of keys, and both are all that it gives. Where they lay, probabilities lie. */
    static constexpr int QUERY_TILES = 2;
    static constexpr int STAGES = 2, STAGE_BYTES = KEYS * K_DIM * 2, TILE_BYTES = GROUP_ROWS * COLUMNS * 2;
    static constexpr int STAGES_AT = GROUP_ROWS * K_DIM * 2;
    static constexpr int SHARED_BYTES = STAGES_AT + STAGES * STAGE_BYTES + TILE_ALIGNMENT;
    static_assert(STAGES <= QUERY_TILES && KEYS == COLUMNS && GROUP_ROWS == KEYS, "room for probabilities");

    /* Parts in the order in which they come, and are multiplied: of either half the first. */
    __device__ static constexpr int part_at(int i) { return i % HALF_PARTS * HALF_PARTS + i / HALF_PARTS; }
    /* A part in tiles of COLUMNS. */
    static constexpr int PART_TILES = PART / COLUMNS;
};

/* Named barriers: of those who load, those who score, and those who add values. */
enum entry_barrier { LOADERS_ALONE = 1, SCORES_ALONE, VALUES_ALONE };
constexpr int VALUES_THREADS = 2 * WARPGROUP;

/* Each goes through the units by itself. */
enum entry_reader { LOADING, SCORING, ADDING, ENTRY_READERS };

/* Of each row of a unit the maximum, the sum relative to it, and the largest score. */
struct entry_ends {
    float max[GROUP_ROWS], sum[GROUP_ROWS], top[GROUP_ROWS];
};

/* Where a row goes that has all its keys; what the O that has been added is to be multiplied with, that which is there,
 * and both in `out`. The one who makes it reads and stores the LSE, and the largest score. */
struct ended_row {
    float *o;
    char *out;
    float fresh, old, kept;

    __device__ ended_row() {}
    __device__ ended_row(const cpa_cuda_sparse_args &args, const cpa_cuda_piece &piece, int row, float max, float sum,
                         float top) {
        const cpa_cuda_attend_args &a = args.a[0];
        sum = counted_sum(sum, max, a.scale_log2);
        const row_sink sink(a, piece, piece.row_begin + row, 0,
                            piece.refused ? NAN : lse_of(sum, max * a.scale + logf(sum)));
        o = sink.o, out = sink.out, kept = sink.kept;
        fresh = sink.weights.b != 0 ? sink.weights.b * inverse_of_sum(sum) : 0;
        old = sink.adds_to_old() ? sink.weights.a : 0;
        sink.store_lse();
        if (args.max_logits)
            args.max_logits[piece.q_row * a.q_heads + piece.row_begin + row] = top * a.scale;
    }

    /* N columns of what has been added. */
    template <typename Element, int N>
    __device__ void store(const cpa_cuda_attend_args &a, int column, const float (&added)[N]) const {
        float result[N];
#pragma unroll
        for (int i = 0; i < N; i++) result[i] = fresh != 0 ? fresh * added[i] : 0;
        if (old > 0) {
            float there[N];
            load_floats(o + column, there);
#pragma unroll
            for (int i = 0; i < N; i++) result[i] += old * there[i];
        }
        if (o && !(a.resume && out)) store_floats(o + column, result);
        if (!out) return;
#pragma unroll
        for (int i = 0; i < N; i++) result[i] *= kept;
        if (a.out_scale) {
            store_codes(out, column, result, __frcp_rn(__ldg(a.out_scale)));
        } else {
            store_elements<Element>(out, column, result);
        }
    }
};

/* Parts of a stage are full when the bytes are there, and empty when the last readers are done; so are the
 * probabilities of a tile and the ends of a unit. Tiles are counted from 0, over all units. */
template <typename C>
struct entry_shared {
    uint64_t full[C::STAGES][ENTRY_PARTS], empty[C::STAGES][ENTRY_PARTS];
    uint64_t softened[C::STAGES], added[C::STAGES], ended, stored;
    listed_work works[ENTRY_READERS];
    uint64_t shown[C::STAGES];         /* a bit a row of the tile: there is such a key */
    float keep[C::STAGES][GROUP_ROWS]; /* what older O is worth, where it is not 1 for all rows of a warp */
    int32_t grown[C::STAGES][WARPGROUP / 32];
    entry_ends ends;
    ended_row rows[GROUP_ROWS]; /* of a cluster that shares keys, from this CTA's first on */
    float worth[GROUP_ROWS];    /* of such a row's O in each CTA */
    bool wants_top;

    __device__ void start() {
        constexpr int WARPS = WARPGROUP / 32, VALUE_WARPS = VALUES_THREADS / 32;
        for (int stage = 0; stage < C::STAGES; stage++) {
            for (int part = 0; part < ENTRY_PARTS; part++) {
                barrier_init(at(full[stage][part]), WARPS);
                barrier_init(at(empty[stage][part]), C::SHARERS * WARPS);
            }
            barrier_init(at(softened[stage]), WARPS);
            barrier_init(at(added[stage]), VALUE_WARPS);
        }
        barrier_init(at(ended), WARPS);
        barrier_init(at(stored), VALUE_WARPS);
        barrier_init_fence();
    }
    static __device__ uint32_t at(const uint64_t &barrier) { return shared_address(&barrier); }
    static __device__ uint32_t phase(uint32_t n) { return phase_of<C::STAGES>((int)n); }
    __device__ uint32_t full_at(uint32_t n, int part) { return at(full[n % C::STAGES][part]); }
    __device__ void wait_full(uint32_t n, int part) { barrier_wait(full_at(n, part), phase(n)); }
    __device__ void wait_empty(uint32_t n, int part) {
        barrier_wait(at(empty[n % C::STAGES][part]), phase(n) ^ 1);
    }
    /* By the last readers of either CTA of a pair, in both, since either writes to both. */
    __device__ void release(uint32_t n, int part, int lane) {
        const uint32_t barrier = at(empty[n % C::STAGES][part]);
        if constexpr (C::PAIRED) {
            if (lane < C::SHARERS) barrier_arrive_in(barrier, lane);
        } else {
            if (lane == 0) barrier_arrive(barrier);
        }
    }
    /* Until the values of tile n - STAGES have been added: there is room for the probabilities of n. */
    __device__ void wait_added(uint32_t n) { barrier_wait(at(added[n % C::STAGES]), phase(n) ^ 1); }

};

/* Has each unit of the CTA done by one of its readers, `threads` of them: run(work) what is to be done of one. */
template <typename C, typename Run>
__device__ void for_units(const cpa_cuda_sparse_args &args, entry_shared<C> &shared, entry_reader reader, int barrier,
                          int threads, bool first, Run run) {
    const listed_work &work = shared.works[reader];
    for (int32_t unit = first_unit<C>(); unit >= 0; unit = same_in_warp(work.next)) {
        named_sync(barrier, threads); /* nobody needs the one before */
        if (first) take_unit<C>(args, shared.works[reader], unit);
        named_sync(barrier, threads);
        run(work);
    }
}

} // namespace

#endif
