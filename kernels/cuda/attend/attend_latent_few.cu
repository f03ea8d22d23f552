/* attend over latents, as attend_latent.cu, where CTAs have 16 rows or fewer: those of a token of a model, or of a rank's
 * share of its heads. wgmma would multiply 64 rows, and read keys from shared memory alone, as elements. mma.sync has
 * them from registers, where codes become elements: they are written nowhere but as they came.
 *
 * A CTA takes its pieces tile by tile of 64 keys, in rows that bulk copies bring. Two teams of 8 warps take
 * turns. In a team a warp multiplies half of the keys by a quarter of the columns, then sums up the scores of 8 keys,
 * whose probabilities it makes; and multiplies the values of all keys by 64 of the columns. In the end one team adds to
 * its own what the other has. */
#include "base/check.h"
#include "base/dependent.cuh"
#include "kernels/cuda/attend/latent_few.cuh"

namespace {

/* Named barriers: of a team; and of both, when one has handed on what it has, and when that has been taken. */
__device__ int team_barrier(int team) {
    return 1 + team;
}
constexpr int HANDED_ON = 3, TAKEN = 4;

/* Who goes through the pieces by itself: the teams, and who copies. */
constexpr int FEW_COPYING = TEAMS, FEW_READERS = FEW_COPYING + WARPGROUP / 32;

template <typename C>
struct few_shared {
    cpa_cuda_piece pieces[FEW_READERS];
    key_walk<C::KEYS> walks[FEW_READERS];
    uint64_t full[C::STAGES], empty[C::STAGES];
    row_keys keys[TEAMS][ROWS];
    /* Of the rows, that of the keys of each warp of a team. */
    __align__(16) float maxima[TEAMS][ROWS][MEMBERS];
    __align__(16) float sums[TEAMS][ROWS][MEMBERS];
    float handed_max[ROWS]; /* that of the team which hands on */

    __device__ void start() {
        for (int stage = 0; stage < C::STAGES; stage++) {
            barrier_init(shared_address(&full[stage]), C::LOADERS);
            barrier_init(shared_address(&empty[stage]), MEMBERS);
        }
        barrier_init_fence();
    }
    __device__ void take(const cpa_cuda_attend_args &a, int reader, int at, int lane) {
        copy_piece(pieces[reader], a.pieces[at], lane);
        walks[reader].start_warp(a, pieces[reader], lane);
    }
};

/* The tiles of all pieces, the last keys of each first, by one of LOADERS warps, whose lanes copy a row each of its share
 * of a tile. Of rows past the last key nothing is copied. */
template <typename C>
__device__ void copy_rows(const cpa_cuda_attend_args &a, few_shared<C> &shared, uint32_t tiles, int warp, int lane) {
    constexpr int ELEMENT = C::CODES ? 1 : 2, SHARE = C::KEYS / C::LOADERS;
    const int reader = FEW_COPYING + warp, in_block = (1 << a.block_shift) - 1;
    const cpa_cuda_piece &piece = shared.pieces[reader];
    const key_walk<C::KEYS> &walk = shared.walks[reader];
    uint32_t n = 0;
    for (int at = blockIdx.x; at >= 0; at = piece.next) {
        shared.take(a, reader, at, lane);
        for (int i = walk.count - 1; i >= 0; i--, n++) {
            const int first = walk.tile(i) * C::KEYS + SHARE * warp, rows = min(max(piece.k_end - first, 0), SHARE);
            const int key = min(first + lane, piece.k_end - 1), stage = n % C::STAGES;
            const int64_t block = __ldg(a.tables + piece.table + (key >> a.block_shift));
            const char *from = a.k + (block * a.k_block_stride + (key & in_block) * a.k_token_stride) * ELEMENT;
            const uint32_t barrier = shared_address(&shared.full[stage]);
            barrier_wait(shared_address(&shared.empty[stage]), phase_of<C::STAGES>(n) ^ 1);
            if (lane == 0) barrier_expect(barrier, rows * C::ROW_BYTES);
            __syncwarp();
            if (lane < rows)
                copy_row(tiles + stage * C::STAGE_BYTES + (SHARE * warp + lane) * C::PITCH, from, C::ROW_BYTES, barrier);
            __syncwarp();
        }
    }
}

/* What a warp of a team does with the tiles of a piece, of which `first` is the number of the first. */
template <typename C>
struct few_team {
    few_shared<C> &shared;
    const uint32_t tiles;
    const few_place at;
    const float scale_log2;
    few_queries<C> q;
    float o[LANE_COLUMNS][4], max[2], sum[2];

    __device__ const cpa_cuda_piece &piece() const { return shared.pieces[at.team]; }
    __device__ const key_walk<C::KEYS> &walk() const { return shared.walks[at.team]; }
    __device__ void sync() const { named_sync(team_barrier(at.team), TEAM); }
    __device__ uint32_t probabilities() const { return tiles + C::P_AT + at.team * C::P_BYTES; }
    /* Where the scores of 8 keys lie, as far as a quarter of the columns goes. */
    __device__ uint32_t quarter_at(int key_tile, int quarter) const {
        const int number = (at.team * (C::KEYS / 8) + key_tile) * QUARTERS + quarter;
        return tiles + C::QUARTERS_AT + (number * 32 + at.lane) * 16;
    }

    __device__ void begin(const cpa_cuda_attend_args &a, int kv_head) {
        if (at.thread() < ROWS) /* others read it behind a barrier that comes before any score */
            shared.keys[at.team][at.thread()] = walk().keys_of(a, piece(), piece().row_begin + at.thread());
        q.load(a, piece(), kv_head, at);
#pragma unroll
        for (int half = 0; half < 2; half++) max[half] = lowest_max(scale_log2), sum[half] = 0;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][e] = 0;
    }

    /* Rows past the last key are zeros: whatever lies there, 0 * NaN must not appear. */
    __device__ void clear_rest(uint32_t tile, int rows) const {
        for (int i = rows * C::PITCH / 16 + at.thread(); i < C::STAGE_BYTES / 16; i += TEAM)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + i * 16), "r"(0) : "memory");
        async_proxy_fence();
        sync();
    }

    /* The scores of this warp's 8 keys: of C, so that a lane has those of two keys for two rows. */
    __device__ void scores_of(float (&s)[4], uint32_t tile) {
        constexpr int AT_ONCE = 2;
        const int first = at.half() * KEY_TILES;
#pragma unroll
        for (int i = 0; i < KEY_TILES; i += AT_ONCE) {
            float part[AT_ONCE][4];
            q.multiply(part, tile + ((first + i) * 8 + at.row()) * C::PITCH, at);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) write_floats(quarter_at(first + i + j, at.quarter()), part[j]);
        }
        sync();
        s[0] = s[1] = s[2] = s[3] = 0;
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            const float4 part = read_floats(quarter_at(at.member, quarter));
            s[0] += part.x, s[1] += part.y, s[2] += part.z, s[3] += part.w;
        }
    }

    /* The maxima become those of all keys so far, of the team's tiles. */
    __device__ void raise_maxima(const float (&s)[4]) {
        bool grown = false;
        float keep[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float of_eight = quad_max(fmaxf(s[2 * half], s[2 * half + 1]));
            if (at.quad() == 0) shared.maxima[at.team][at.row() + 8 * half][at.member] = of_eight;
        }
        sync();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t from = shared_address(shared.maxima[at.team][at.row() + 8 * half]);
            const float4 a = read_floats(from), b = read_floats(from + 16);
            const float of_tile = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
            const float higher = fmaxf(max[half], of_tile);
            grown |= higher > max[half];
            keep[half] = worth_of(max[half], higher, scale_log2);
            max[half] = higher;
            sum[half] *= keep[half];
        }
        if (!__any_sync(0xffffffff, grown)) return;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][e] *= keep[e / 2];
    }

    __device__ void write_probabilities(const float (&s)[4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float base = max[half] * scale_log2 - C::SHIFT;
            const float low = exp2_fast(s[2 * half] * scale_log2 - base), high = exp2_fast(s[2 * half + 1] * scale_log2 - base);
            const uint32_t to =
                probabilities() + (at.row() + 8 * half) * C::P_PITCH + (at.member * 8 + 2 * at.quad()) * 2;
            sum[half] += low + high;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack_pair<typename C::key>(low, high)) : "memory");
        }
        sync();
    }

    /* Of a tile, scores of keys that a row does not see. */
    __device__ void mask(float (&s)[4], int first) const {
        const int key = first + at.member * 8 + 2 * at.quad();
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!sees(shared.keys[at.team][at.row() + e / 2 * 8], walk().sinks, key + e % 2)) s[e] = -INFINITY;
    }
    __device__ void attend_tile(int n, int tile_of_keys) {
        const int stage = n % C::STAGES, first = tile_of_keys * C::KEYS;
        const uint32_t tile = tiles + stage * C::STAGE_BYTES;
        float s[4];
        barrier_wait(shared_address(&shared.full[stage]), phase_of<C::STAGES>(n));
        if (piece().k_end - first < C::KEYS) clear_rest(tile, piece().k_end - first);
        scores_of(s, tile);
        if (walk().masked(tile_of_keys)) mask(s, first);
        raise_maxima(s);
        write_probabilities(s);
        add_values<C>(o, tile, probabilities(), at);
        __syncwarp();
        if (at.lane == 0) barrier_arrive(shared_address(&shared.empty[stage]));
    }
    /* Those of the piece that are this team's. */
    __device__ void attend_tiles(int first) {
        const int count = walk().count;
#pragma unroll 1
        for (int i = (first + at.team) % TEAMS; i < count; i += TEAMS)
            attend_tile(first + i, walk().tile(count - 1 - i));
    }

    /* ---- the end of a piece ---- */

    __device__ uint32_t handed_at(int i) const { return tiles + C::HANDED_AT + (i * TEAM + at.thread()) * 16; }
    __device__ void write_sums() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float of_keys = quad_sum(sum[half]);
            if (at.quad() == 0) shared.sums[at.team][at.row() + 8 * half][at.member] = of_keys;
        }
    }
    __device__ float sum_of(int team, int row) const {
        const uint32_t from = shared_address(shared.sums[team][row]);
        const float4 a = read_floats(from), b = read_floats(from + 16);
        return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    }
    /* By the team that hands on. */
    __device__ void hand_on() {
        write_sums();
        if (at.member == 0 && at.quad() == 0)
            shared.handed_max[at.row()] = max[0], shared.handed_max[at.row() + 8] = max[1];
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) write_floats(handed_at(i), o[i]);
        named_arrive(HANDED_ON, TEAMS * TEAM);
    }
    /* By the other one, which has all of the piece then. */
    __device__ void take_over() {
        float own[2], other[2];
        write_sums();
        named_sync(HANDED_ON, TEAMS * TEAM);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = at.row() + 8 * half;
            const float handed = shared.handed_max[row], higher = fmaxf(max[half], handed);
            own[half] = worth_of(max[half], higher, scale_log2);
            other[half] = worth_of(handed, higher, scale_log2);
            max[half] = higher;
            sum[half] = sum_of(0, row) * own[half] + sum_of(1, row) * other[half];
        }
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) {
            const float4 part = read_floats(handed_at(i));
            const float handed[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][e] = o[i][e] * own[e / 2] + handed[e] * other[e / 2];
        }
        named_arrive(TAKEN, TEAMS * TEAM);
    }

    /* O and the LSEs of the rows; code_scale: that of codes, 1 where they have none that all have. */
    __device__ void store(const cpa_cuda_attend_args &a, float code_scale, int kv_head) {
        constexpr int UNIT = 4;
        float *lse_at[2] = {}, lses[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = piece().row_begin + at.row() + 8 * half;
            const float all = counted_sum(sum[half], max[half], scale_log2), inverse = inverse_of_sum(all) * code_scale;
            const float lse = lse_of(all, max[half] * (a.scale * code_scale) + logf(all) - C::SHIFT * (float)M_LN2);
            if (row >= piece().row_end) continue;
            const row_sink sink(a, piece(), row, kv_head, piece().refused ? NAN : lse);
            lse_at[half] = sink.lse, lses[half] = sink.weights.lse;
#pragma unroll
            for (int column = 0; column < 2 * LANE_COLUMNS; column += UNIT) {
                const int to = at.member * (LATENT_COLUMNS / MEMBERS) + at.quad() * 2 * LANE_COLUMNS + column;
                float value[UNIT];
#pragma unroll
                for (int e = 0; e < UNIT; e++)
                    value[e] = o[(column + e) % LANE_COLUMNS][2 * half + column / LANE_COLUMNS] * inverse;
                sink.template store<typename C::element>(to, value);
            }
        }
        sync(); /* all have read the LSEs that are there */
        if (at.member > 0 || at.quad() > 0) return;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (lse_at[half]) *lse_at[half] = lses[half];
    }
};

/* All pieces of the CTA, by a warp of a team. */
template <typename C>
__device__ void take_pieces(const cpa_cuda_attend_args &a, few_shared<C> &shared, uint32_t tiles, const few_place &at) {
    const cpa_cuda_piece &piece = shared.pieces[at.team];
    const int kv_head = blockIdx.y;
    const float code_scale =
        C::CACHE == LATENT_CODES ? head_scale(a.k_scale, a.k_head_scales, a.head_scale_step, 0) : 1;
    int n = 0;
    bool again = false;
    for (int next = blockIdx.x; next >= 0; next = piece.next, again = true) {
        few_team<C> team{shared, tiles, at, a.scale_log2 * code_scale};
        if (at.team > 0 && again) named_sync(TAKEN, TEAMS * TEAM);
        team.sync(); /* nobody needs the one before */
        if (at.member == 0) shared.take(a, at.team, next, at.lane);
        team.sync();
        team.begin(a, kv_head);
        team.attend_tiles(n);
        n += team.walk().count;
        if (at.team > 0) {
            team.hand_on();
        } else {
            team.take_over();
            team.store(a, code_scale, kv_head);
        }
    }
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attend_latent_few(const __grid_constant__ cpa_cuda_attend_args a) {
    extern __shared__ __align__(16) char memory[];
    __shared__ few_shared<C> shared;
    static_assert(sizeof shared + C::SHARED_BYTES <= 227 << 10, "of a CTA");
    const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) shared.start();
    __syncthreads();
    dependent_wait();
    dependent_allow();
    if (warp >= TEAMS * MEMBERS) {
        registers_shrink<C::LOADER_REGISTERS>();
        copy_rows<C>(a, shared, shared_address(memory), warp - TEAMS * MEMBERS, lane);
    } else {
        registers_grow<C::TEAM_REGISTERS>();
        take_pieces<C>(a, shared, shared_address(memory), {warp / MEMBERS, warp % MEMBERS, lane});
    }
}

template <typename C>
cpa_status launch(const cpa_cuda_attend_args &a, int32_t ctas, cpa_stream *stream) {
    static uint64_t prepared;
    CPA_TRY(cpa_cuda_shared_memory(stream, (const void *)attend_latent_few<C>, C::SHARED_BYTES, &prepared));
    return cpa_cuda_check(&stream->error,
                          launch_dependent(attend_latent_few<C>, dim3(ctas, a.kv_heads), C::THREADS, a, a.early,
                                           cpa_cuda_handle(stream), C::SHARED_BYTES),
                          "attend");
}

template <typename Element>
cpa_status launch_cache(const cpa_cuda_attend_args &a, int32_t ctas, cpa_stream *stream) {
    if (a.kv_dtype == CPA_FP8_E4M3) return launch<few_config<Element, LATENT_CODES>>(a, ctas, stream);
    return launch<few_config<Element, LATENT_ELEMENTS>>(a, ctas, stream);
}

} // namespace

extern "C" int cpa_cuda_latent_few_takes(const cpa_cuda_attend_args *a) {
    return a->k_dim == LATENT_COLUMNS + QUARTERS * LAST_COLUMNS && a->v_dim == LATENT_COLUMNS &&
           1 << a->block_shift != CPA_TENSOR_BLOCK;
}

extern "C" cpa_status cpa_cuda_attend_latent_few(const cpa_cuda_attend_args *a, int32_t ctas, cpa_stream *stream) {
    if (a->kv_dtype == CPA_FP8_T128)
        return launch<few_config<__nv_bfloat16, LATENT_TILED_CODES>>(*a, ctas, stream);
    return a->q_dtype == CPA_BF16 ? launch_cache<__nv_bfloat16>(*a, ctas, stream)
                                  : launch_cache<__half>(*a, ctas, stream);
}
