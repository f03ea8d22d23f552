/* Who owns a token, and where the tokens of a shard sit in the sequence.
 *
 * A sequence is sharded over the N ranks of a context-parallel group in runs of I tokens (I a multiple of the block
 * size, or a divisor of it). With `first` the rank that owns position 0,
 *     owner(t) = (t / I + first) mod N
 * With shard = (rank - first) mod N, the i-th token of a shard sits at
 *     pos(i) = ((i / I) * N + shard) * I + i mod I
 * and the shard of a sequence of length L holds
 *     len(L) = (L / (I*N)) * I + clamp(L mod (I*N) - shard*I, 0, I)
 * tokens. Since pos is increasing, len(p) is also the number of the shard's tokens that sit before position p, so the
 * tokens [start, end) of a chunk are the shard's local indices [len(start), len(end)).
 *
 * A sequence may lie on one rank instead, which then holds all its tokens: pos(i) = i and len(L) = L. A cpa_placement
 * says which of the two it is, and cpa_tokens_on what that gives a rank.
 *
 * Pure integer functions; thread-safe. */
#ifndef CPATTN_OWNER_MAP_H
#define CPATTN_OWNER_MAP_H

#include <stdint.h>

#include <cpattn/api.h>

typedef struct cpa_owner_map {
    int32_t cp_size;    /* N >= 1 */
    int32_t interleave; /* I >= 1 */
} cpa_owner_map;

/* Where the tokens of a sequence lie. */
typedef enum cpa_placement_kind {
    CPA_SHARDED = 0, /* on all ranks in turn */
    CPA_ON_RANK      /* on one rank */
} cpa_placement_kind;

typedef struct cpa_placement {
    cpa_placement_kind kind;
    int32_t rank; /* sharded: the owner of position 0; on one rank: that rank */
} cpa_placement;

/* Which tokens of a sequence. A set numbers its tokens from 0 on in the order of their positions: their local indices.
 */
typedef enum cpa_token_set_kind {
    CPA_TOKENS_SHARD = 0, /* those of one shard */
    CPA_TOKENS_OTHERS,    /* those of all shards but one */
    CPA_TOKENS_ALL,
    CPA_TOKENS_NONE
} cpa_token_set_kind;

typedef struct cpa_token_set {
    cpa_token_set_kind kind;
    int32_t shard; /* the one that is meant, or left out: 0..N-1; 0 for all and none */
} cpa_token_set;

/* Whether the kind is known and the rank one of the map. */
CPA_HOST_DEVICE CPA_INLINE int cpa_placement_is_valid(cpa_owner_map map, cpa_placement placement) {
    return (placement.kind == CPA_SHARDED || placement.kind == CPA_ON_RANK) && placement.rank >= 0 &&
           placement.rank < map.cp_size;
}

/* Whether runs and blocks of these lengths fit each other: runs are whole blocks, or blocks whole runs. What takes,
 * shares and frees blocks of all ranks needs that; attention over given block tables does not. */
CPA_HOST_DEVICE CPA_INLINE int cpa_interleave_fits(int32_t interleave, int32_t block_size) {
    return interleave >= 1 && block_size >= 1 && (interleave % block_size == 0 || block_size % interleave == 0);
}

/* The rank that owns the token at position t >= 0. */
CPA_HOST_DEVICE CPA_INLINE int32_t cpa_owner_rank(cpa_owner_map map, cpa_placement placement, int64_t t) {
    if (placement.kind == CPA_ON_RANK) return placement.rank;
    return (int32_t)((t / map.interleave + placement.rank) % map.cp_size);
}

/* The tokens that a rank holds: a shard, or all, or none. */
CPA_HOST_DEVICE CPA_INLINE cpa_token_set cpa_tokens_on(cpa_owner_map map, cpa_placement placement, int32_t rank) {
    cpa_token_set set = {CPA_TOKENS_SHARD, 0};
    if (placement.kind == CPA_ON_RANK) {
        set.kind = rank == placement.rank ? CPA_TOKENS_ALL : CPA_TOKENS_NONE;
    } else {
        set.shard = (int32_t)(((int64_t)rank - placement.rank + map.cp_size) % map.cp_size);
    }
    return set;
}

/* The position of the i-th token of a shard. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_shard_pos(cpa_owner_map map, int32_t shard, int64_t i) {
    return ((i / map.interleave) * map.cp_size + shard) * map.interleave + i % map.interleave;
}

/* How many of the first `len` tokens of a sequence a shard holds. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_shard_len(cpa_owner_map map, int32_t shard, int64_t len) {
    int64_t round = (int64_t)map.interleave * map.cp_size;
    int64_t rest = len % round - (int64_t)shard * map.interleave;
    int64_t part = rest < 0 ? 0 : rest > map.interleave ? map.interleave : rest;
    return len / round * map.interleave + part;
}

/* The position of the i-th token of a set, which is one shard or all. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_token_position(cpa_owner_map map, cpa_token_set set, int64_t i) {
    return set.kind == CPA_TOKENS_SHARD ? cpa_shard_pos(map, set.shard, i) : i;
}

/* The same of a set of any kind that has tokens. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_token_index(cpa_owner_map map, cpa_token_set set, int64_t i) {
    if (set.kind != CPA_TOKENS_OTHERS) return cpa_token_position(map, set, i);
    const int64_t run = map.interleave, round = run * (map.cp_size - 1), rest = i % round;
    return i / round * run * map.cp_size + rest + (rest >= set.shard * run ? run : 0);
}

/* How many tokens of a set sit before position p >= 0. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_tokens_before(cpa_owner_map map, cpa_token_set set, int64_t p) {
    if (set.kind == CPA_TOKENS_ALL) return p;
    if (set.kind == CPA_TOKENS_NONE) return 0;
    int64_t in_shard = cpa_shard_len(map, set.shard, p);
    return set.kind == CPA_TOKENS_SHARD ? in_shard : p - in_shard;
}

#endif
