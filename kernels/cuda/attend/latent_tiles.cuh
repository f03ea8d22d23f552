/* The tiles of attend_latent.cu, the parts in which they come and go, and the warp that copies them where they lie as
 * they are needed. */
#ifndef CPA_CUDA_LATENT_TILES_CUH
#define CPA_CUDA_LATENT_TILES_CUH

#include "kernels/cuda/attend/hopper_loads.cuh"

namespace {

/* The columns of a tile by who is done with them last, and when: of the values two parts of each half by the warpgroup
 * that has these columns of O, one after the other; the rest, which keys alone have, by the warpgroup that multiplies
 * the scores. */
enum latent_part { LEFT_VALUES, RIGHT_VALUES = 2, KEYS_ALONE = 4, LATENT_PARTS };
constexpr int HALF_PARTS = 2;

/* What the cache has: latents as elements of the queries' dtype; as codes of e4m3, all with one scale; or as those of
 * CPA_FP8_T128, with scales in the row and elements behind them; or keys and values apart, as elements. */
enum latent_cache { LATENT_ELEMENTS, LATENT_CODES, LATENT_TILED_CODES, VALUES_APART };

/* Paired: two CTAs of a cluster have the same keys for different rows. Each copies half of every tile to both. */
template <typename Element, latent_cache Cache, bool Paired = false>
struct latent_config {
    using element = Element;
    using call = cpa_cuda_attend_args; /* what its kernel is told */
    static constexpr latent_cache CACHE = Cache;
    static constexpr bool PAIRED = Paired;
    static constexpr int SHARERS = Paired ? 2 : 1; /* CTAs to which a tile is copied */
    static constexpr bool APART = Cache == VALUES_APART, CODES = Cache == LATENT_CODES || Cache == LATENT_TILED_CODES;
    static constexpr int K_DIM = APART ? 512 : 576, V_DIM = 512, KEYS = 64;
    static constexpr int CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
    static constexpr int LOADER_REGISTERS = CODES ? 56 : 40, CONSUMER_REGISTERS = CODES ? 224 : 232;
    /* What a CTA of so many threads is launched with, by eights. */
    static constexpr int LAUNCH_REGISTERS = (64 << 10) / THREADS / 8 * 8;
    static_assert(LOADER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (1 + CONSUMERS) * LAUNCH_REGISTERS, "a CTA's");
    static constexpr int LOADERS = CODES ? WARPGROUP / 32 : 1; /* warps that say when a part is full */
    static constexpr int V_COLUMNS = V_DIM / CONSUMERS, PART = 128, PARTS = V_COLUMNS / PART; /* of O of a warpgroup */
    static constexpr int REGISTER_STEPS = CODES ? 0 : APART ? 2 : 1; /* of Q K^T, whose queries are in registers */
    static constexpr bool RULED = false, LISTED = false;
    static constexpr int NOTERS = 0; /* who arrive beside them where keys alone are full */
    static constexpr int TAIL = 0, K_WHOLE = K_DIM, V_TAIL = 0, V_WHOLE = V_COLUMNS;
    /* A stage has a tile. Of keys and values apart there is room for one: either is copied while the other is read. */
    static constexpr int STAGES = APART ? 1 : 2, STAGE_BYTES = KEYS * (APART ? K_DIM + V_DIM : K_DIM) * 2;
    static constexpr int Q_BYTES = GROUP_ROWS * K_DIM * 2;
    /* What one warpgroup hands to the other: probabilities, 16 bytes of each thread behind those of the thread before
     * it; and the maxima of each thread's two rows. */
    static constexpr int P_BYTES = GROUP_ROWS * KEYS * 2, MAX_BYTES = WARPGROUP * 8;
    static constexpr int STAGES_AT = Q_BYTES, P_AT = STAGES_AT + STAGES * STAGE_BYTES, MAX_AT = P_AT + P_BYTES;
    static constexpr int SHARED_BYTES = MAX_AT + MAX_BYTES + TILE_ALIGNMENT;

    /* A part in tiles of COLUMNS; where those of keys begin. */
    __device__ static constexpr int first_of(int part) { return part * (PART / COLUMNS); }
    __device__ static constexpr int count_of(int part) {
        return (part < KEYS_ALONE ? PART : APART ? K_DIM : K_DIM - V_DIM) / COLUMNS;
    }
    static constexpr int FIRST_OF_KEYS = APART ? V_DIM / COLUMNS : 0;
    static_assert(PARTS == HALF_PARTS && KEYS_ALONE == CONSUMERS * PARTS, "parts of O and of tiles are the same columns");
};
constexpr int COLUMNS_BYTES = 64 * COLUMNS * 2; /* of 64 rows of COLUMNS elements */

/* Those who copy go through the pieces by themselves, ahead of the warpgroups that multiply: of boxes, a warp for
 * either half of the values and one for the rest, none of which waits for room that another one needs. */
enum latent_reader { MULTIPLYING, COPYING, LATENT_READERS = COPYING + 3 };

/* Barriers of the parts of each stage: full when the bytes are there, empty when the last readers are done. Tiles are
 * counted from 0, over all pieces. */
template <typename C>
struct latent_stages {
    uint64_t full[C::STAGES][LATENT_PARTS], empty[C::STAGES][LATENT_PARTS];

    __device__ void start() {
        for (int stage = 0; stage < C::STAGES; stage++)
            for (int part = 0; part < LATENT_PARTS; part++) {
                barrier_init(shared_address(&full[stage][part]), C::LOADERS + (part == KEYS_ALONE ? C::NOTERS : 0));
                barrier_init(shared_address(&empty[stage][part]), C::SHARERS * WARPGROUP / 32);
            }
        barrier_init_fence();
    }
    __device__ uint32_t full_at(uint32_t n, int part) { return shared_address(&full[n % C::STAGES][part]); }
    __device__ void wait_full(uint32_t n, int part) {
        barrier_wait(full_at(n, part), phase_of<C::STAGES>(n));
        if (C::NOTERS > 0) async_proxy_fence(); /* what cp.async wrote, which nobody has fenced */
    }
    __device__ void wait_empty(uint32_t n, int part) {
        barrier_wait(shared_address(&empty[n % C::STAGES][part]), phase_of<C::STAGES>(n) ^ 1);
    }
    /* By the last readers of either CTA of a pair, in both, since either copies to both. */
    __device__ void release(uint32_t n, int part, int lane) {
        const uint32_t barrier = shared_address(&empty[n % C::STAGES][part]);
        if constexpr (C::PAIRED) {
            if (lane < C::SHARERS) barrier_arrive_in(barrier, lane);
        } else {
            if (lane == 0) barrier_arrive(barrier);
        }
    }
};

/* key_walk::start_warp of a piece whose rows may be listed ones. */
template <int TILE>
__device__ void start_walk(key_walk<TILE> &walk, const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int lane) {
    if (lane < 2)
        (lane == 0 ? walk.low : walk.high) =
            keys_of_row(a, piece, lane == 0 ? piece.row_begin : piece.row_end - 1, a.rows);
    if (lane == 2) walk.sinks = walk.sink_keys(a, piece);
    __syncwarp();
    if (lane == 0) walk.count_tiles(piece);
    __syncwarp();
}

template <typename C>
struct latent_shared : latent_stages<C> {
    cpa_cuda_piece pieces[LATENT_READERS];
    key_walk<C::KEYS> walks[LATENT_READERS];

    /* The reader's copy of a piece, by one of its warps. */
    __device__ void take(const cpa_cuda_attend_args &a, int reader, int at, int lane) {
        copy_piece(pieces[reader], a.pieces[at], lane);
        start_walk(walks[reader], a, pieces[reader], lane);
    }
};

template <typename C>
struct listed_shared; /* sparse_latent.cuh */
template <typename C>
using latent_shared_of = typename std::conditional<C::LISTED, listed_shared<C>, latent_shared<C>>::type;

/* The parts from FIRST on of the tiles of all pieces, the last keys of each first, by one warp: a lane copies the box of
 * tokens from `row` on. */
template <typename C, int FIRST, int PARTS>
__device__ void copy_boxes(const hopper_args &args, latent_shared<C> &shared, uint32_t tiles, int kv_head, int lane) {
    constexpr int READER = COPYING + FIRST / HALF_PARTS, ROWS = C::KEYS / C::SHARERS; /* that are this CTA's to copy */
    constexpr bool VALUES = C::APART && FIRST != KEYS_ALONE;
    const cpa_cuda_piece &piece = shared.pieces[READER];
    const key_walk<C::KEYS> &walk = shared.walks[READER];
    const CUtensorMap *map = VALUES ? &args.maps.v : &args.maps.k;
    const int row = (C::PAIRED ? (int)cluster_rank() * ROWS : 0) + lane * args.box;
    uint32_t n = 0;
    for (int at = blockIdx.x; at >= 0; at = piece.next) {
        shared.take(args.a, READER, at, lane);
        box_place next = {};
        if (walk.count > 0) next = place_of<C>(args, piece, piece.k_end, walk.tile(walk.count - 1), row);
        for (int i = walk.count - 1; i >= 0; i--, n++) {
            const box_place place = next;
            if (i > 0) next = place_of<C>(args, piece, piece.k_end, walk.tile(i - 1), row); /* before the waiting */
            const uint32_t tile = tiles + C::STAGES_AT + n % C::STAGES * C::STAGE_BYTES;
#pragma unroll
            for (int part = FIRST; part < FIRST + PARTS; part++) {
                const uint32_t barrier = shared.full_at(n, part);
                shared.wait_empty(n, part);
                if (lane == 0) barrier_expect(barrier, C::count_of(part) * COLUMNS_BYTES);
                __syncwarp();
                if (lane * args.box < ROWS) {
#pragma unroll
                    for (int j = C::first_of(part); j < C::first_of(part) + C::count_of(part); j++) {
                        const uint32_t to = tile + j * COLUMNS_BYTES + row * COLUMNS * 2;
                        const int column = (VALUES ? j : j - C::FIRST_OF_KEYS) * COLUMNS;
                        if constexpr (C::PAIRED) {
                            copy_box_to_pair(to, map, barrier, column, place.token, kv_head, place.block);
                        } else {
                            copy_box(to, map, barrier, column, place.token, kv_head, place.block);
                        }
                    }
                }
                __syncwarp();
            }
        }
    }
}

} // namespace

#endif
