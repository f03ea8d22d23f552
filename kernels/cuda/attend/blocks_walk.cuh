/* The walk of attend_blocks.cu through the tiles of keys of which some row of a piece attends a key. */
#ifndef CPA_CUDA_BLOCKS_WALK_CUH
#define CPA_CUDA_BLOCKS_WALK_CUH

#include "kernels/cuda/attend/attend_blocks.h"
#include "kernels/cuda/attend/score.cuh"

/* Where the tokens of a set lie in the sequence, as cpa_token_index and cpa_tokens_before have it, for sequences of up
 * to 2^30 tokens: divisions of 64 bits take registers that nobody has. Of each `whole` tokens of the sequence the set
 * has `round`: the first `cut` of these lie at the beginning, the others `skip` further on. */
struct token_places {
    uint32_t round, whole, cut, skip;

    __device__ void fill(cpa_owner_map map, cpa_token_set set) {
        const uint32_t run = map.interleave, others = (map.cp_size - 1) * run, before = set.shard * run;
        const bool is_shard = set.kind == CPA_TOKENS_SHARD;
        round = whole = INT32_MAX, cut = skip = 0;
        if (map.cp_size == 1 || set.kind == CPA_TOKENS_ALL) return;
        round = is_shard ? run : others, whole = run + others;
        cut = is_shard ? 0 : before, skip = is_shard ? before : run;
    }
    /* The index of a token of the set, and how many lie before an index. */
    __device__ uint32_t index(uint32_t token) const {
        const uint32_t rest = token % round;
        return token / round * whole + rest + (rest >= cut ? skip : 0);
    }
    __device__ uint32_t before(uint32_t index) const {
        const uint32_t rest = index % whole, within = rest <= cut ? rest : max(rest, cut + skip) - skip;
        return index / whole * round + min(within, round);
    }
};

/* What a row of a piece is known by when it has all its scores. */
struct row_end {
    float inverse, lse; /* 1 / the sum of its probabilities */
};

/* MOST: tiles that are looked through once, before the walk; of a walk of more none is left out. */
template <int TILE, int MOST>
struct blocks_walk : key_walk<TILE> {
    static constexpr int ROWS = CPA_CUDA_BLOCKS_ROWS, RUN = 32;
    /* Of a tile in the list: the bounds of keys cut it for some row, and some row does not select all of it. */
    static constexpr uint16_t CUT = 1 << 14, MIXED = 1 << 15, FLAGS = CUT | MIXED;
    static_assert(MOST <= CUT && ROWS <= 256, "a tile and two bits; a row a byte");

    uint16_t list[MOST];        /* tiles, by their number in the whole walk */
    row_keys keys[ROWS];        /* of each row, as the mask has them; behind the last those of the last */
    const uint32_t *bits[ROWS]; /* of the blocks of each row; NULL: the row attends all keys */
    row_end ends[ROWS];         /* until its values are multiplied: registers are few */
    uint8_t first[ROWS];        /* the rows with which others bits begin */
    int32_t differing;          /* how many */
    token_places places;        /* of the keys */
    uint32_t k_first;
    bool is_listed, in_runs, in_tiles; /* 32 keys, a tile, from a multiple on are neighbours */

    /* By one warp. */
    __device__ void start_blocks(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                                 const cpa_key_blocks &blocks, int32_t head, int32_t lane) {
        if (lane == 0) {
            places.fill(a.map, piece.k_set);
            k_first = (uint32_t)piece.k_first;
            in_runs = runs_of(a, piece, RUN), in_tiles = runs_of(a, piece, TILE);
        }
        __syncwarp();
        fill_keys(a, piece, lane);
        fill_bits(piece, blocks, head, lane);
        if (lane == 0) {
            this->low = keys[0], this->high = keys[ROWS - 1];
            this->sinks = a.mask.window > 0 ? keys_before(piece, in_sequence(a.mask.sinks)) : 0;
            this->count_tiles(piece);
            is_listed = this->count <= MOST;
        }
        __syncwarp();
        if (is_listed) enlist(piece, blocks, this->count, lane);
        __syncwarp();
    }
    /* How many keys of the item lie before a position. */
    __device__ int32_t keys_before(const cpa_cuda_piece &piece, int32_t position) const {
        const uint32_t before = places.before((uint32_t)max(position, 0));
        return min((int32_t)(before - min(before, k_first)), piece.k_end);
    }
    /* As keys_of_row has them. */
    __device__ void fill_keys(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t lane) {
        const int32_t ahead = in_sequence(cpa_mask_ahead(a.mask)), window = in_sequence(a.mask.window);
        token_places of_queries;
        of_queries.fill(a.map, piece.q_set);
#pragma unroll 1
        for (int32_t i = lane; i < ROWS; i += 32) {
            const int32_t row = min(piece.row_begin + i, piece.row_end - 1);
            const int32_t position = (int32_t)of_queries.index((uint32_t)piece.q_first + row);
            keys[i].first = window > 0 ? keys_before(piece, position - window + 1) : 0;
            keys[i].end = ahead > 0 ? keys_before(piece, position + ahead) : piece.k_end;
        }
    }
    static __device__ int32_t in_sequence(int64_t tokens) { return (int32_t)min(tokens, ((int64_t)1 << 30) - 1); }
    __device__ void fill_bits(const cpa_cuda_piece &piece, const cpa_key_blocks &blocks, int32_t head, int32_t lane) {
        int32_t n = 0;
        int64_t words[ROWS / 32]; /* whose loads are under way together */
#pragma unroll
        for (int32_t i = 0; i < ROWS / 32; i++) {
            const int64_t row = piece.q_row + min(piece.row_begin + 32 * i + lane, piece.row_end - 1);
            words[i] = blocks.row_word[blocks.row_map ? blocks.row_map[row] : row];
        }
#pragma unroll
        for (int32_t i = 0; i < ROWS / 32; i++)
            bits[32 * i + lane] = words[i] < 0 ? nullptr : blocks.bits + words[i] + head * blocks.head_stride;
        __syncwarp();
#pragma unroll 1
        for (int32_t i = lane; i < ROWS; i += 32) {
            const bool begins = i == 0 || bits[i] != bits[i - 1];
            const uint32_t with = __ballot_sync(0xffffffff, begins);
            if (begins) first[n + __popc(with & low_bits(lane))] = (uint8_t)i;
            n += __popc(with);
        }
        if (lane == 0) differing = n;
        __syncwarp();
    }
    __device__ void enlist(const cpa_cuda_piece &piece, const cpa_key_blocks &blocks, int32_t whole, int32_t lane) {
        int32_t at = 0;
#pragma unroll 1
        for (int32_t i = lane; i < whole + lane; i += 32) {
            const int32_t tile = key_walk<TILE>::tile(i);
            bool any = false, every = true;
            if (i < whole) look_at(piece, blocks, tile, any, every);
            const uint32_t with = __ballot_sync(0xffffffff, any);
            if (any)
                list[at + __popc(with & low_bits(lane))] =
                    (uint16_t)(i | (every ? 0 : MIXED) | (this->masked(tile) ? CUT : 0));
            at += __popc(with);
        }
        if (lane == 0) this->count = at;
    }
    /* Whether some row selects a key of the tile, and whether all rows all. Single keys are not looked at: some may. */
    __device__ void look_at(const cpa_cuda_piece &piece, const cpa_key_blocks &blocks, int32_t tile, bool &any,
                            bool &every) const {
        const int32_t key = tile * TILE, end = min(key + TILE, piece.k_end);
        const bool in_one = in_tiles && block_of(blocks, key) == block_of(blocks, key + TILE - 1);
#pragma unroll 1
        for (int32_t at = key; at < end; at += in_one ? TILE : RUN) {
            const uint32_t block = block_of(blocks, at);
            const bool is_one = in_one || (in_runs && block == block_of(blocks, at + RUN - 1));
#pragma unroll 1
            for (int32_t d = 0; d < differing; d++) {
                const uint32_t *of = bits[first[d]];
                const bool selects = !of || has(of, blocks.width, block);
                any |= !is_one || selects, every &= is_one && selects;
            }
        }
    }
    __device__ uint32_t block_of(const cpa_key_blocks &blocks, int32_t key) const {
        return places.index(k_first + key) / (uint32_t)blocks.block;
    }
    static __device__ bool has(const uint32_t *of, int32_t width, uint32_t block) {
        return block < (uint32_t)width && of[block / 32] >> block % 32 & 1;
    }
    /* Which of 32 keys of the item, from `key` on, a multiple of 32, a row with such bits selects. */
    __device__ uint32_t select(const cpa_key_blocks &blocks, const uint32_t *of, int32_t key) const {
        if (!of) return ~0u;
        const uint32_t block = block_of(blocks, key);
        if (in_runs && block == block_of(blocks, key + RUN - 1)) return has(of, blocks.width, block) ? ~0u : 0;
        uint32_t selected = 0;
#pragma unroll 1
        for (int32_t i = 0; i < RUN; i++)
            selected |= (uint32_t)has(of, blocks.width, block_of(blocks, key + i)) << i;
        return selected;
    }
    /* The i-th tile that is left; and what cuts it. */
    __device__ int32_t tile(int32_t i) const { return key_walk<TILE>::tile(is_listed ? list[i] & ~FLAGS : i); }
    __device__ uint16_t flags(int32_t i) const { return is_listed ? list[i] & FLAGS : FLAGS; }
    /* Which of 32 keys of the i-th tile, from `key` on, a row sees. */
    __device__ uint32_t shown(const cpa_key_blocks &blocks, int32_t i, int32_t row, int32_t key) const {
        const uint32_t within = seen_within(keys[row], this->sinks, key);
        return flags(i) & MIXED ? within & select(blocks, bits[row], key) : within;
    }
};

#endif
