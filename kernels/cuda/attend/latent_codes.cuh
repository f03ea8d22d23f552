/* The warpgroup that brings tiles of latents to attend_latent.cu where the cache has codes. These wait in the very tile
 * for whose elements they stand, as no other shared memory is left: those of the values in the part of the right ones.
 * With tiles of COLUMNS, L0 .. L3 and R0 .. R3, of which codes take half of one:
 *
 *     R0: codes of L0, L1      R1: of L2, L3      R2: of R0, R1      R3: of R2, R3
 *
 * L0 .. L3 become elements first, which makes room for R0 and R1, and these make it for R2. Of R3, and of the columns
 * that keys alone have, all is read before anything is written. */
#ifndef CPA_CUDA_LATENT_CODES_CUH
#define CPA_CUDA_LATENT_CODES_CUH

#include "kernels/cuda/attend/latent_tiles.cuh"
#include "kernels/cuda/cache/quant.cuh"

namespace {

constexpr int CHUNK = 16;                       /* bytes, and codes, that are copied at once */
constexpr int COLUMNS_CHUNKS = COLUMNS / CHUNK; /* of codes, of a row */
constexpr int TILE_SCALES = 4;                  /* of a row of CPA_FP8_T128, behind its codes */
constexpr int LOADERS_ALONE = 6;                /* named barrier of the warpgroup */

/* Where a chunk of a row waits: chunks of one number lie together. Neither consecutive rows of a number nor consecutive
 * chunks of a row share banks. */
__device__ uint32_t waiting_at(int row, int chunk) {
    return chunk * 64 * CHUNK + ((row ^ (chunk & 7)) * CHUNK);
}

/* A pair of codes, widened to fp16, as elements; scale: of tiles of CPA_FP8_T128. That of all codes is left to what is
 * made of them. */
template <typename C>
__device__ uint32_t elements_of(uint32_t halves, float scale) {
    const float2 pair = __half22float2(bits_pair(halves));
    if constexpr (C::CACHE == LATENT_TILED_CODES) return pack_pair<typename C::element>(scale * pair.x, scale * pair.y);
    if constexpr (std::is_same<typename C::element, __half>::value) return halves;
    return pack_pair<typename C::element>(pair.x, pair.y);
}

/* Two chunks of a row, the first of which has an even number: what a thread widens at once. */
struct two_chunks {
    uint32_t words[2][4];

    __device__ two_chunks(uint32_t from, int row, int chunk) {
#pragma unroll
        for (int c = 0; c < 2; c++)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[c][0]), "=r"(words[c][1]), "=r"(words[c][2]), "=r"(words[c][3])
                         : "r"(from + waiting_at(row, chunk + c))
                         : "memory");
    }
    /* To a tile of COLUMNS, swizzled as bulk copies write it. */
    template <typename C>
    __device__ void store(uint32_t tile, int row, int chunk, float scale) const {
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t to[4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t low, high;
                    e4m3_codes::widen(words[c][2 * half + i], 0, low, high);
                    to[2 * i] = elements_of<C>(low, scale);
                    to[2 * i + 1] = elements_of<C>(high, scale);
                }
                const uint32_t at = tile + swizzled<COLUMNS>(row, 2 * ((chunk + c) % COLUMNS_CHUNKS) + half);
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(to[0]), "r"(to[1]), "r"(to[2]),
                             "r"(to[3])
                             : "memory");
            }
        }
    }
};

/* A warp copies and widens every fourth 16 rows of a tile; two lanes share a row, and know where that of the next tile
 * lies. */
template <typename C>
struct code_loader {
    static constexpr int WARP_ROWS = C::KEYS / (WARPGROUP / 32);
    static constexpr bool TILED = C::CACHE == LATENT_TILED_CODES;
    static constexpr int LAST_AT = C::V_DIM + (TILED ? TILE_SCALES * 4 : 0); /* bytes before the last columns */
    static constexpr int LAST_CHUNKS = (C::K_DIM - C::V_DIM) * (TILED ? 2 : 1) / CHUNK;

    const cpa_cuda_attend_args &a;
    latent_shared<C> &shared;
    int thread;
    const char *next; /* the lane's row of the next tile */

    __device__ int lane() const { return thread % 32; }
    __device__ int first_row() const { return thread / 32 * WARP_ROWS; }
    __device__ int row() const { return first_row() + lane() % WARP_ROWS; }

    /* Notes where a tile lies, and has the L2 cache fetch it. Past the last key, that key again. */
    __device__ void look_up(int tile) {
        constexpr int LINE = 128, BYTES = LAST_AT + LAST_CHUNKS * CHUNK, LINES = BYTES / LINE + 2; /* of a row */
        const cpa_cuda_piece &piece = shared.pieces[COPYING];
        const int key = min(tile * C::KEYS + row(), piece.k_end - 1);
        const int64_t block = __ldg(a.tables + piece.table + (key >> a.block_shift));
        next = a.k + block * a.k_block_stride + (key & ((1 << a.block_shift) - 1)) * a.k_token_stride;
#pragma unroll
        for (int line = 0; line < LINES; line += 2)
            prefetch_l2(next + min((line + lane() / WARP_ROWS) * LINE, BYTES - 1));
    }

    /* Copies codes to where they wait, and elements to where they belong. */
    __device__ void copy(uint32_t right, uint32_t last) const {
        constexpr int AT_ONCE = 32 / LAST_CHUNKS;
        const auto row_of_warp = [&](int i) { return (const char *)__shfl_sync(0xffffffff, (uint64_t)next, i); };
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++)
            copy_async_16(right + waiting_at(first_row() + i, lane()), row_of_warp(i) + lane() * CHUNK);
#pragma unroll
        for (int first = 0; first < WARP_ROWS; first += AT_ONCE) {
            const int i = first + lane() / LAST_CHUNKS, chunk = lane() % LAST_CHUNKS;
            const uint32_t at = TILED ? swizzled<COLUMNS>(first_row() + i, chunk) : waiting_at(first_row() + i, chunk);
            copy_async_16(last + at, row_of_warp(i) + LAST_AT + chunk * CHUNK);
        }
        copy_async_commit();
    }

    /* The i-th COLUMNS of those that wait somewhere become elements; in place: once all have been read. */
    template <bool IN_PLACE>
    __device__ void widen(uint32_t waiting, int i, uint32_t to, float scale) const {
        const int chunk = i * COLUMNS_CHUNKS + lane() / WARP_ROWS * 2;
        const two_chunks chunks(waiting, row(), chunk);
        if (IN_PLACE) named_sync(LOADERS_ALONE, WARPGROUP);
        chunks.template store<C>(to, row(), chunk, scale);
    }
    /* The warp has done its part of a part. */
    __device__ void fill(uint32_t n, int part) const {
        async_proxy_fence();
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.full_at(n, part));
    }

    /* The n-th tile of all; behind: the tile that is next, or -1. */
    __device__ void load(uint32_t n, uint32_t tile, int behind) {
        constexpr int HALF = C::V_COLUMNS / COLUMNS;
        const uint32_t right = tile + C::first_of(RIGHT_VALUES) * COLUMNS_BYTES;
        const uint32_t last = tile + C::first_of(KEYS_ALONE) * COLUMNS_BYTES;
        float4 scales = {};
        asm volatile("" : "+r"(thread)); /* nothing that follows from it is kept from tile to tile: registers are few */
        shared.wait_empty(n, KEYS_ALONE);
        shared.wait_empty(n, RIGHT_VALUES);
        copy(right, last);
        if (TILED) scales = __ldg((const float4 *)(next + C::V_DIM));
        if (behind >= 0) look_up(behind);
        shared.wait_empty(n, LEFT_VALUES);
        copy_async_wait<0>();
        __syncwarp();
        if (!TILED) widen<true>(last, 0, last, 1);
        fill(n, KEYS_ALONE);
#pragma unroll
        for (int i = 0; i < HALF; i++)
            widen<false>(right, i, tile + i * COLUMNS_BYTES, i < HALF / 2 ? scales.x : scales.y);
        fill(n, LEFT_VALUES);
#pragma unroll
        for (int i = 0; i < HALF; i++)
            widen<true>(right, HALF + i, right + i * COLUMNS_BYTES, i < HALF / 2 ? scales.z : scales.w);
        fill(n, RIGHT_VALUES);
    }
};

/* The tiles of all pieces, the last keys of each first. */
template <typename C>
__device__ void copy_codes(const cpa_cuda_attend_args &a, latent_shared<C> &shared, uint32_t tiles, int thread) {
    const cpa_cuda_piece &piece = shared.pieces[COPYING];
    const key_walk<C::KEYS> &walk = shared.walks[COPYING];
    code_loader<C> loader{a, shared, thread, nullptr};
    uint32_t n = 0;
    for (int at = blockIdx.x, next; at >= 0; at = next) {
        named_sync(LOADERS_ALONE, WARPGROUP); /* nobody needs the piece before */
        if (thread < 32) shared.take(a, COPYING, at, thread);
        named_sync(LOADERS_ALONE, WARPGROUP);
        next = piece.next;
        if (walk.count > 0) loader.look_up(walk.tile(walk.count - 1));
        for (int i = walk.count - 1; i >= 0; i--, n++)
            loader.load(n, tiles + C::STAGES_AT + n % C::STAGES * C::STAGE_BYTES, i > 0 ? walk.tile(i - 1) : -1);
    }
}

} // namespace

#endif
