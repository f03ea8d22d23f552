/* Who owns a token, and where the tokens of a shard sit in the sequence.
 *
 * A sequence is dealt to the N ranks of a context-parallel group in runs of I tokens (I a multiple of the block size):
 *     owner(t) = (t / I + phase) mod N
 * With slot = (rank - phase) mod N, the i-th token of a shard sits at
 *     pos(i) = ((i / I) * N + slot) * I + i mod I
 * and the shard of a sequence of length L holds
 *     len(L) = (L / (I*N)) * I + clamp(L mod (I*N) - slot*I, 0, I)
 * tokens. Since pos is increasing, len(p) is also the number of the shard's tokens that sit before position p, so the
 * tokens [start, end) of a chunk are the shard's local indices [len(start), len(end)).
 *
 * A sequence may be kept whole on one rank instead. It has a phase as well, N + rank, so that the phase says all there
 * is to say; its rank has the slot CPA_SLOT_WHOLE, with pos(i) = i and len(L) = L, and the others CPA_SLOT_NONE.
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

enum {
    CPA_SLOT_WHOLE = -1, /* of the rank that has the whole sequence */
    CPA_SLOT_NONE = -2   /* of the ranks that have nothing of it */
};

/* The phase of a sequence that `rank` keeps whole. */
CPA_HOST_DEVICE CPA_INLINE int32_t cpa_owner_whole_phase(cpa_owner_map map, int32_t rank) {
    return map.cp_size + rank;
}

/* Whether one rank keeps the whole sequence. */
CPA_HOST_DEVICE CPA_INLINE int cpa_owner_is_whole(cpa_owner_map map, int32_t phase) {
    return phase >= map.cp_size;
}

/* The slot of a rank for a sequence of that phase, 0 <= phase < 2N. */
CPA_HOST_DEVICE CPA_INLINE int32_t cpa_owner_slot(cpa_owner_map map, int32_t rank, int32_t phase) {
    if (cpa_owner_is_whole(map, phase)) return rank == phase - map.cp_size ? CPA_SLOT_WHOLE : CPA_SLOT_NONE;
    return (int32_t)(((int64_t)rank - phase + map.cp_size) % map.cp_size);
}

/* The rank that owns the token at position t >= 0. */
CPA_HOST_DEVICE CPA_INLINE int32_t cpa_owner_rank(cpa_owner_map map, int32_t phase, int64_t t) {
    if (cpa_owner_is_whole(map, phase)) return phase - map.cp_size;
    return (int32_t)((t / map.interleave + phase) % map.cp_size);
}

/* The position of the i-th token of the shard at `slot`. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_shard_pos(cpa_owner_map map, int32_t slot, int64_t i) {
    if (slot == CPA_SLOT_WHOLE) return i;
    return ((i / map.interleave) * map.cp_size + slot) * map.interleave + i % map.interleave;
}

/* How many of the first `len` tokens of a sequence the shard at `slot` holds. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_shard_len(cpa_owner_map map, int32_t slot, int64_t len) {
    if (slot < 0) return slot == CPA_SLOT_WHOLE ? len : 0;
    int64_t round = (int64_t)map.interleave * map.cp_size;
    int64_t rest = len % round - (int64_t)slot * map.interleave;
    int64_t part = rest < 0 ? 0 : rest > map.interleave ? map.interleave : rest;
    return len / round * map.interleave + part;
}

/* The same for all shards but the one at `slot`. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_others_len(cpa_owner_map map, int32_t slot, int64_t len) {
    return len - cpa_shard_len(map, slot, len);
}

#endif
