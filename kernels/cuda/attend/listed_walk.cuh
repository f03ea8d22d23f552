/* The walk of the Hopper kernel through keys of which bits hide some (score.cuh). */
#ifndef CPA_CUDA_LISTED_WALK_CUH
#define CPA_CUDA_LISTED_WALK_CUH

#include "kernels/cuda/attend/score.cuh"

/* ruled_walk that leaves out the tiles of which no row sees a key, as far as bits say, and knows those of which every
 * row sees all. Those that bits concern, LISTED at most, are looked through once, before the walk. */
template <int TILE>
struct listed_walk : ruled_walk<TILE> {
    static constexpr int LISTED = 2048, TOKENS = 192, GROUPS = TILE / 32;
    static constexpr uint16_t TESTED = 1 << 15;
    static_assert(LISTED <= TESTED, "a tile and a bit");
    int32_t before, listed, first_tile; /* tiles of the walk before those; how many are left; the first of them */
    uint16_t list[LISTED];              /* tiles, counted from that one, and whether some row does not see all */

    struct token {
        row_score score; /* rules of the token, as far as seen_keys reads them */
        int32_t end;     /* end of the keys that the token sees */
    };
    /* What start needs beside, in shared memory that is not in use yet; TOKENS: most that a piece has. */
    struct scratch {
        token tokens[TOKENS];
        uint32_t some[LISTED / 32], all[LISTED / 32];
    };

    /* Called by all threads of the CTA; ends with a barrier. */
    __device__ void start(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, scratch &s) {
        ruled_walk<TILE>::start(a, piece, a.rows);
        if (threadIdx.x == 0) before = this->count, listed = 0;
        __syncthreads();
        if (!a.score.custom.bits || !runs_of(a, piece, 32)) return;
        const int32_t first = max(this->low.end / TILE, this->rest);
        const int32_t tiles = min((this->high.end + TILE - 1) / TILE - first, LISTED);
        if (tiles <= 0) return;
        const int32_t token = token_of_row(a, piece.row_begin), last = token_of_row(a, piece.row_end - 1);
        for (int i = threadIdx.x; i <= last - token; i += blockDim.x) fill(s.tokens[i], a, piece, token + i);
        for (int i = threadIdx.x; i < LISTED / 32; i += blockDim.x) s.some[i] = 0, s.all[i] = ~0u;
        __syncthreads();
        look_through(s, a, piece, first, tiles, last - token + 1);
        __syncthreads();
        if (threadIdx.x < 32) enlist(s, first, tiles, threadIdx.x);
        __syncthreads();
    }
    static __device__ void fill(token &t, const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t number) {
        fill_row_bits(t.score, a, query_row(a, piece, number), query_index(a, piece, number),
                      ruled_piece::origin_of(a, piece));
        t.end = keys_of_token(a, piece, number).keys.end;
    }
    /* A warp looks at 32 tiles of some of the tokens at once, a lane at one. */
    __device__ void look_through(scratch &s, const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t first,
                                 int32_t tiles, int32_t tokens) const {
        const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int words = (tiles + 31) / 32, shares = max(warps / words, 1);
        const int64_t origin = ruled_piece::origin_of(a, piece);
        for (int i = warp; i < words * shares; i += warps) {
            const int word = i / shares, from = (first + 32 * word + lane) * TILE;
            int32_t index[GROUPS];
            bool some = false, all = true;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) index[g] = relative(key_index(a, piece, from + 32 * g), origin);
#pragma unroll 4
            for (int j = i % shares; j < tokens; j += shares) {
                const token &t = s.tokens[j];
                uint32_t any = 0, every = ~0u;
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    uint32_t seen = low_bits(t.end - from - 32 * g);
                    if (t.score.bits) seen &= seen_keys(t.score, a.mask.causal, index[g]);
                    any |= seen, every &= seen;
                }
                some |= any != 0, all &= every == ~0u;
            }
            const uint32_t with_some = __ballot_sync(0xffffffff, some), with_all = __ballot_sync(0xffffffff, all);
            if (lane == 0) atomicOr(&s.some[word], with_some), atomicAnd(&s.all[word], with_all);
        }
    }
    __device__ void enlist(const scratch &s, int32_t first, int32_t tiles, int lane) {
        int32_t at = 0;
        for (int word = 0; word < (tiles + 31) / 32; word++) {
            const int32_t tile = first + 32 * word + lane;
            const uint32_t some = s.some[word] & low_bits(tiles - 32 * word);
            const bool cut = tile * TILE < this->high.first && (tile + 1) * TILE > this->sinks; /* by windows */
            if (some >> lane & 1)
                list[at + __popc(some & low_bits(lane))] =
                    (uint16_t)(32 * word + lane | (cut || !(s.all[word] >> lane & 1) ? TESTED : 0));
            at += __popc(some);
        }
        if (lane == 0) {
            const int32_t left = this->count; /* of the whole walk */
            before = this->sink_tiles + first - this->rest;
            listed = at;
            first_tile = first;
            this->count = left - tiles + at;
        }
        __syncwarp();
    }
    /* The i-th tile. Those behind LISTED are not left out. */
    __device__ int32_t tile(int32_t i) const {
        const int32_t in_list = i - before;
        if (in_list < 0) return ruled_walk<TILE>::tile(i);
        return first_tile + (in_list < listed ? list[in_list] & ~TESTED : LISTED + in_list - listed);
    }
    /* Whether some row does not see all of the i-th, which is not among full_steps. */
    __device__ bool tested(int32_t i) const {
        return i < before || i >= before + listed || (list[i - before] & TESTED) != 0;
    }
};

#endif
