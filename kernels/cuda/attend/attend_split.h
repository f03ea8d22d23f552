/* How rows become decode units, how these are assigned to CTAs, and how many pieces prefill tiles come to when their
 * keys are split: functions of the batch and of the number of multiprocessors alone. What follows from the lengths of
 * decode units is computed on the device too, for plans that are reserved. */
#ifndef CPA_CUDA_ATTEND_SPLIT_H
#define CPA_CUDA_ATTEND_SPLIT_H

#include <cpattn/ops.h>

enum {
    CPA_CUDA_DECODE_OVERHEAD = 2,    /* cost of beginning and ending a decode piece, in CPA_CUDA_DECODE_KEYS */
    CPA_CUDA_LEAST_DECODE_TILES = 2, /* of a piece, of all heads of the CTA */
    CPA_CUDA_MOST_DECODE_SLACK = 4,  /* a team may load so much more, or a 16th, rather than leave little to the next */
    CPA_CUDA_DECODE_SLACK_PART = 16
};

CPA_HOST_DEVICE static inline int64_t cpa_cuda_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Rows of a KV head: those of all its query heads. */
static inline int64_t cpa_cuda_packed_rows(const cpa_attend_batch *batch, const cpa_attend_item *item) {
    return item->q_count * (batch->shape.q_heads / batch->shape.kv_heads);
}

/* How many KV heads a CTA of decode takes. Rows of 128 bytes are too short for the memory to read them at its full rate
 * where the next row of the head lies elsewhere: those of two heads, which lie side by side, are not. */
static inline int32_t cpa_cuda_decode_heads(const cpa_attention_shape *shape, int64_t element_bytes) {
    const int narrow = shape->k_dim * element_bytes <= 128 && shape->v_dim * element_bytes <= 128;
    return shape->kv_heads % 2 == 0 && narrow && !cpa_dtype_is_turboquant(shape->kv_dtype) ? 2 : 1;
}

/* The rows of an item become units: so many as a CTA takes; or, where a group has more, a token each, whose rows are
 * dealt to a team of CTAs that stand side by side and walk through the same keys at once, so that the L2 cache serves
 * all but one of them. */
typedef struct cpa_cuda_team {
    int32_t ctas; /* 1: a unit is what a CTA takes */
    int32_t tile; /* packed rows of a CTA, the last of a team may have fewer */
    int32_t rows; /* rows of a unit; the last of an item may have fewer where a team is a CTA */
} cpa_cuda_team;
cpa_cuda_team cpa_cuda_team_of(const cpa_attention_shape *shape, int32_t block_size);

CPA_HOST_DEVICE static inline int64_t cpa_cuda_decode_units(cpa_cuda_team team, int64_t packed_rows) {
    return cpa_cuda_ceil_div(packed_rows, team.rows);
}
/* The rows [begin, end) of an item that a CTA of the team takes of its unit. */
typedef struct cpa_cuda_row_tile {
    int32_t begin, end;
} cpa_cuda_row_tile;
CPA_HOST_DEVICE static inline cpa_cuda_row_tile cpa_cuda_row_tile_of(cpa_cuda_team team, int32_t packed_rows,
                                                                     int32_t unit, int32_t cta) {
    const int32_t end_of_unit = (unit + 1) * team.rows, most = end_of_unit < packed_rows ? end_of_unit : packed_rows;
    cpa_cuda_row_tile tile = {unit * team.rows + cta * team.tile, most};
    if (tile.begin + team.tile < most) tile.end = tile.begin + team.tile;
    return tile;
}

/* Decode units and who takes them. Their keys count in tiles of CPA_CUDA_DECODE_KEYS. */
typedef struct cpa_cuda_decode_shares {
    int64_t teams;     /* teams of CTAs for each KV head, or for each two of them where a CTA takes two */
    int64_t cap;       /* most that a team takes: tiles, and the overhead of each piece */
    int64_t longest;   /* longest piece */
    int apart;         /* units share no team, and are cut into equal pieces */
    int wide;          /* CTAs have a multiprocessor each, or whole tokens (attend_tokens.h) */
    int32_t row_tiles; /* tiles of CPA_CUDA_DECODE_ROWS rows of the CTA with the most rows */
} cpa_cuda_decode_shares;

/* Of the items of at most `decode_rows` packed rows. wide_fits: the device has CPA_CUDA_WIDE_BYTES of shared memory for
 * a CTA. */
cpa_cuda_decode_shares cpa_cuda_share_decode(const cpa_attend_batch *batch, int64_t decode_rows,
                                             int32_t multiprocessors, int wide_fits);
/* The cap of so many teams, of `heads` heads each, which load `load`: tiles and the overhead of each unit. */
CPA_HOST_DEVICE static inline int64_t cpa_cuda_decode_cap(int64_t load, int64_t teams, int64_t heads) {
    const int64_t least = CPA_CUDA_DECODE_OVERHEAD + CPA_CUDA_LEAST_DECODE_TILES / heads;
    const int64_t even = cpa_cuda_ceil_div(load, teams) + CPA_CUDA_DECODE_OVERHEAD;
    return even > least ? even : least;
}
/* Pieces of a unit of so many tiles that shares no team; at least one. */
CPA_HOST_DEVICE static inline int64_t cpa_cuda_decode_pieces(int64_t tiles, int64_t cap) {
    return tiles > 0 ? cpa_cuda_ceil_div(tiles, cap - CPA_CUDA_DECODE_OVERHEAD) : 1;
}

/* A unit that is assigned: the tiles that are left of it; and where units share no team, the pieces of even + 1 tiles,
 * whose number is left in `larger`, come before those of `even`. */
typedef struct cpa_cuda_decode_unit {
    int64_t left, even, larger;
} cpa_cuda_decode_unit;

CPA_HOST_DEVICE static inline cpa_cuda_decode_unit cpa_cuda_decode_unit_of(const cpa_cuda_decode_shares *shares,
                                                                           int64_t tiles) {
    cpa_cuda_decode_unit unit = {tiles, 0, 0};
    if (shares->apart) {
        const int64_t pieces = cpa_cuda_decode_pieces(tiles, shares->cap);
        unit.even = tiles / pieces;
        unit.larger = tiles % pieces;
    }
    return unit;
}

/* The team that takes pieces now, and what it has. All zero at first. */
typedef struct cpa_cuda_decode_turn {
    int64_t team, load;
} cpa_cuda_decode_turn;

/* The tiles of the next piece of the unit, which goes to turn->team: a team takes pieces until its load reaches the
 * cap. */
CPA_HOST_DEVICE static inline int64_t cpa_cuda_assign_piece(const cpa_cuda_decode_shares *shares,
                                                            cpa_cuda_decode_turn *turn, cpa_cuda_decode_unit *unit) {
    const int full = turn->load + CPA_CUDA_DECODE_OVERHEAD >= shares->cap || (shares->apart && turn->load > 0);
    if (full && turn->team + 1 < shares->teams) {
        turn->team++;
        turn->load = 0;
    }
    int64_t take = unit->left;
    if (shares->apart) {
        take = unit->even + (unit->larger > 0);
        unit->larger -= unit->larger > 0;
    } else if (turn->team + 1 < shares->teams) {
        const int64_t part = shares->cap / CPA_CUDA_DECODE_SLACK_PART;
        const int64_t slack = part < CPA_CUDA_MOST_DECODE_SLACK ? part : CPA_CUDA_MOST_DECODE_SLACK;
        const int64_t room = shares->cap - turn->load - CPA_CUDA_DECODE_OVERHEAD;
        if (unit->left > room + slack) take = room;
    }
    unit->left -= take;
    turn->load += take + CPA_CUDA_DECODE_OVERHEAD;
    return take;
}

/* Where prefill tiles fill the device less than so many times, their keys are cut, for each number of such waves as
 * evenly as can be, and the number that is done first is taken. Keys count in CPA_CUDA_PREFILL_KEYS. */
enum { CPA_CUDA_PREFILL_WAVES = 3 };
/* The shortest pieces that are looked at for so many places, those of the waves: `tile_keys` are the keys of all tiles. */
CPA_HOST_DEVICE static inline int64_t cpa_cuda_shortest_split(int64_t tile_keys, int64_t heads, int64_t places) {
    enum { LEAST = 8 }; /* 1024 keys */
    const int64_t even = cpa_cuda_ceil_div(tile_keys * heads, places);
    return even > LEAST ? even : LEAST;
}
/* How long so many pieces of at most `keys` take. */
CPA_HOST_DEVICE static inline int64_t cpa_cuda_split_cost(int64_t pieces, int64_t heads, int64_t multiprocessors,
                                                          int64_t keys) {
    enum { OVERHEAD = 2 }; /* beginning and ending a piece */
    return cpa_cuda_ceil_div(pieces * heads, multiprocessors) * (keys + OVERHEAD);
}

/* Tiles of `tile_rows` packed rows; 0: the item has no rows, or goes to the decode kernel. */
int64_t cpa_cuda_prefill_tiles(const cpa_attend_batch *batch, const cpa_attend_item *item, int32_t tile_rows);
/* Pieces of all prefill tiles that are cut after every `split_keys` keys. */
int64_t cpa_cuda_prefill_pieces(const cpa_attend_batch *batch, int32_t tile_rows, int64_t split_keys);
/* The least n from `least` on such that a split of n * CPA_CUDA_PREFILL_KEYS keys makes at most `most_pieces`; the
 * search ends at `most`, or at `least` if that is more. */
int64_t cpa_cuda_least_split(const cpa_attend_batch *batch, int32_t tile_rows, int64_t least, int64_t most,
                             int64_t most_pieces);

#endif
