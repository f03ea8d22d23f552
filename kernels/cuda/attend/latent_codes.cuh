/* The warpgroup that brings tiles of latents to attend_latent.cu where the cache has codes: it reads codes to registers
 * and writes the elements for which these stand to the tile. What a thread reads next is on its way while it widens what
 * it read before. */
#ifndef CPA_CUDA_LATENT_CODES_CUH
#define CPA_CUDA_LATENT_CODES_CUH

#include "kernels/cuda/attend/latent_tiles.cuh"
#include "kernels/cuda/cache/quant.cuh"

namespace {

constexpr int CHUNK = 16;        /* bytes, and codes, that a thread reads at once */
constexpr int ROW_THREADS = 2;   /* that share a row of a tile */
constexpr int TILE_SCALES = 4;   /* of a row of CPA_FP8_T128, behind its codes */
constexpr int LOADERS_ALONE = 6; /* named barrier of the warpgroup */

/* Zeros in the place of a key that a list does not name. */
__device__ uint4 no_key[48];

/* A pair of codes, widened to fp16, as elements; scale: of tiles of CPA_FP8_T128. That of all codes is left to what is
 * made of them. */
template <typename C>
__device__ uint32_t elements_of(uint32_t halves, float scale) {
    const float2 pair = __half22float2(bits_pair(halves));
    if constexpr (C::CACHE == LATENT_TILED_CODES) return pack_pair<typename C::element>(scale * pair.x, scale * pair.y);
    return pack_pair<typename C::element>(pair.x, pair.y);
}

/* What a thread does with its row of each tile: of COLUMNS codes it has two chunks, in such an order that the threads
 * which store together use different banks. */
template <typename C>
struct code_loader {
    static constexpr bool TILED = C::CACHE == LATENT_TILED_CODES;
    static constexpr int VALUES = C::V_DIM / COLUMNS, AHEAD = C::PART / COLUMNS; /* COLUMNS; those read ahead, a part */
    static constexpr int LAST_AT = C::V_DIM + (TILED ? TILE_SCALES * 4 : 0); /* bytes before the last columns */
    static constexpr int LAST_BYTES = (C::K_DIM - C::V_DIM) * (TILED ? 2 : 1);

    struct two_chunks {
        uint4 first, second;
    };

    const typename C::call &a;
    latent_shared_of<C> &shared;
    int row, chunk;           /* of the tile; the first of the two, of four: the other one is two from it */
    const char *next;         /* the row of the next tile */
    two_chunks codes[AHEAD];  /* that are widened next */
    two_chunks last;          /* what keys alone have, where it is codes */
    float4 scales;            /* of the tile, of CPA_FP8_T128 */

    __device__ code_loader(const typename C::call &args, latent_shared_of<C> &of, int thread)
        : a(args), shared(of), row(thread / ROW_THREADS), chunk(thread % ROW_THREADS + (row & 2)), next(nullptr) {}

    /* Notes where the thread's row of a tile, the n-th of all, lies, and has the L2 cache fetch it. Past the last key,
     * that key again. */
    __device__ void look_up(int tile, uint32_t n) {
        constexpr int LINE = 128, BYTES = LAST_AT + LAST_BYTES, LINES = BYTES / LINE + 2; /* of a row */
        if constexpr (C::LISTED) {
            next = shared.key_at(a, tile, row);
            shared.note_shown(rows_shown(next != nullptr), n, threadIdx.x);
            if (!next) next = (const char *)no_key;
        } else {
            const cpa_cuda_piece &piece = shared.pieces[COPYING];
            const int key = min(tile * C::KEYS + row, piece.k_end - 1);
            const int64_t block = __ldg(a.tables + piece.table + (key >> a.block_shift));
            next = a.k + block * a.k_block_stride + (key & ((1 << a.block_shift) - 1)) * a.k_token_stride;
        }
#pragma unroll
        for (int line = 0; line < LINES; line += ROW_THREADS)
            prefetch_l2(next + min((line + (chunk & 1)) * LINE, BYTES - 1));
    }
    /* Of a warp's 16 rows those that there are, of listed keys; a pair of threads has one. */
    __device__ static uint32_t rows_shown(bool is) {
        const int lane = threadIdx.x % 32;
        const bool of_row = __shfl_sync(0xffffffff, is, 2 * (lane & 15));
        return __ballot_sync(0xffffffff, of_row) & 0xffff;
    }
    /* In this order among the stores: the compiler would read earlier, for which there are no registers. */
    __device__ static uint4 read_chunk(const char *from) {
        uint4 to;
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                     : "l"(from)
                     : "memory");
        return to;
    }
    __device__ two_chunks read(const char *from) const {
        return {read_chunk(from + chunk * CHUNK), read_chunk(from + (chunk ^ 2) * CHUNK)};
    }
    /* What a tile begins with. */
    __device__ void read_beginning() {
        if constexpr (TILED)
            scales = __ldg((const float4 *)(next + C::V_DIM));
        else if constexpr (!C::LISTED)
            last = read(next + LAST_AT);
    }
    /* What load() finds read. */
    __device__ void read_first() {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) codes[i] = read(next + i * COLUMNS);
        read_beginning();
    }

    /* A chunk of codes to a tile of COLUMNS, swizzled as bulk copies write it. */
    __device__ void widen_chunk(uint32_t tile, const uint4 &from, int at, float scale) const {
        const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t halves[4];
#pragma unroll
            for (int i = 0; i < 2; i++) e4m3_codes::widen(words[2 * half + i], 0, halves[2 * i], halves[2 * i + 1]);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + swizzled<COLUMNS>(row, 2 * at + half)),
                         "r"(elements_of<C>(halves[0], scale)), "r"(elements_of<C>(halves[1], scale)),
                         "r"(elements_of<C>(halves[2], scale)), "r"(elements_of<C>(halves[3], scale))
                         : "memory");
        }
    }
    __device__ void widen(uint32_t tile, const two_chunks &from, float scale) const {
        widen_chunk(tile, from.first, chunk, scale);
        widen_chunk(tile, from.second, chunk ^ 2, scale);
    }
    /* The last columns of CPA_FP8_T128, which are elements already. */
    __device__ void copy_last(const char *from, uint32_t tile) const {
#pragma unroll
        for (int i = 0; i < LAST_BYTES / CHUNK / ROW_THREADS; i++) {
            const int at = ROW_THREADS * i + (chunk & 1);
            copy_async_16(tile + swizzled<COLUMNS>(row, at), from + LAST_AT + at * CHUNK);
        }
        copy_async_commit();
    }
    /* The warp has done its part of a part. */
    __device__ void fill(uint32_t n, int part) const {
        int lane;
        async_proxy_fence();
        __syncwarp();
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); /* read again each time: registers are few */
        if (lane == 0) barrier_arrive(shared.full_at(n, part));
    }

    /* The n-th tile of all, of which the first has been read; behind: the tile that is next, of which
     * the first is read in turn. */
    __device__ void load(uint32_t n, uint32_t tile, int behind) {
        asm volatile("" : "+r"(row), "+r"(chunk)); /* no address is kept from tile to tile: registers are few */
        const char *own = next;
        const uint32_t last_tile = tile + C::first_of(KEYS_ALONE) * COLUMNS_BYTES;
        look_up(behind, n + 1);
        if constexpr (C::LISTED && !TILED) last = read(own + LAST_AT); /* not before: registers are few */
        shared.wait_empty(n, KEYS_ALONE);
        if constexpr (C::LISTED) shared.store_shown(n, threadIdx.x);
        if constexpr (TILED) {
            copy_last(own, last_tile);
        } else {
            widen(last_tile, last, 1);
            fill(n, KEYS_ALONE);
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const float of_two[] = {scales.x, scales.y, scales.z, scales.w};
            if (i % AHEAD == 0) shared.wait_empty(n, LEFT_VALUES + i / AHEAD);
            widen(tile + i * COLUMNS_BYTES, codes[i % AHEAD], TILED ? of_two[i / 2] : 1);
            if (i + AHEAD < VALUES)
                codes[i % AHEAD] = read(own + (i + AHEAD) * COLUMNS);
            else
                codes[i % AHEAD] = read(next + (i + AHEAD - VALUES) * COLUMNS);
            if (TILED && i == AHEAD - 1) {
                copy_async_wait<0>();
                fill(n, KEYS_ALONE);
            }
            if (i % AHEAD == AHEAD - 1) fill(n, LEFT_VALUES + i / AHEAD);
        }
        read_beginning();
    }
};

/* The tiles of all pieces, the last keys of each first. */
template <typename C>
__device__ void copy_codes(const cpa_cuda_attend_args &a, latent_shared<C> &shared, uint32_t tiles, int thread) {
    const cpa_cuda_piece &piece = shared.pieces[COPYING];
    const key_walk<C::KEYS> &walk = shared.walks[COPYING];
    code_loader<C> loader(a, shared, thread);
    uint32_t n = 0;
    for (int at = blockIdx.x; at >= 0; at = piece.next) {
        named_sync(LOADERS_ALONE, WARPGROUP); /* nobody needs the piece before */
        int lane = thread;
        asm volatile("" : "+r"(lane)); /* what follows from it is not kept from piece to piece */
        if (lane < 32) shared.take(a, COPYING, at, lane);
        named_sync(LOADERS_ALONE, WARPGROUP);
        if (walk.count > 0) {
            loader.look_up(walk.tile(walk.count - 1), n);
            loader.read_first();
        }
        for (int i = walk.count - 1; i >= 0; i--, n++)
            loader.load(n, tiles + C::STAGES_AT + n % C::STAGES * C::STAGE_BYTES, walk.tile(max(i - 1, 0)));
    }
}

} // namespace

#endif
