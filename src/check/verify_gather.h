/* Brings the keys and values of sampled rows to the ranks that check them.
 *
 * A group is the samples of one (chunk, layer, KV head); one rank checks it. The keys and values of a group travel in
 * parts: part p holds the local tokens [p * T, (p + 1) * T) of every rank's shard, T = CPA_PART_TOKENS or a block if
 * that is more, up to the last that a sample of the group sees, and the first part also the queries and results; first
 * tokens that are precise go in parts of their own, in front, and the others are counted from there on. All ranks
 * derive the same parts and exchange them in rounds of bounded size. A rank's pages go to page-locked host memory by
 * one kv_pack a part, all parts of a round under way together. */
#ifndef CPA_VERIFY_GATHER_H
#define CPA_VERIFY_GATHER_H

#include "src/check/verify_internal.h"

enum { CPA_PART_TOKENS = 1024 };

typedef struct cpa_verify_group {
    int64_t first, count;  /* range of the sorted samples of cpa_verify */
    int64_t last_position; /* largest position of a key that one of the group's samples sees */
    int32_t kv_head;
    int32_t checker;
    int32_t judges; /* not 0: index keys travel too, as a sample judges its choice */
} cpa_verify_group;

/* What one rank contributed to a part. */
typedef struct cpa_verify_piece {
    const char *samples; /* [its samples of the group], as in cpa_verify.data; the first part only */
    const char *k;       /* [tokens, k_dim], dtype of the cache; then [tokens] scale words where rows have them */
    const char *v;       /* [tokens, v_dim], dtype of the cache; then [tokens] scale words where rows have them */
    const char *index;   /* of groups that judge: [tokens, dim] index keys; of codes [tokens] scales then */
    int64_t first;       /* local index of the first token */
    int64_t tokens;
} cpa_verify_piece;

typedef struct cpa_verify_part {
    const cpa_verify_group *group;
    int64_t index;                  /* among those that are precise, or that are not */
    int32_t is_precise;             /* not 0: keys and values are those of first tokens, in the model's dtype */
    int32_t is_first, last;         /* not 0: the first, the last part of its group */
    const cpa_verify_piece *pieces; /* [ranks] */
} cpa_verify_part;

/* The shape of the layer and the cache that a part is of. */
static inline cpa_attention_shape cpa_verify_part_shape(const cpa_verify *verify, const cpa_verify_part *part) {
    const cpa_attention_shape layer = cpa_verify_shape(verify, &verify->samples[part->group->first]);
    return part->is_precise ? cpa_shape_unquantised(&layer) : layer;
}

/* Receives, on the checking rank, the parts of its groups in order, those of one round at a time. */
typedef cpa_status (*cpa_verify_parts_fn)(void *ctx, const cpa_verify_part *parts, int64_t n_parts, cpa_error *err);

/* Collective; the groups are the same on every rank. */
cpa_status cpa_verify_gather(cpa_verify *verify, const cpa_step_plan *plan, const cpa_verify_group *groups,
                             int64_t n_groups, cpa_verify_parts_fn fn, void *ctx, cpa_error *err);

#endif
