/* What is done to the scores of a unit's rows beside the mask of the layer; see cpattn/score.h. */
#ifndef CPA_HOST_ATTEND_SCORE_H
#define CPA_HOST_ATTEND_SCORE_H

#include <cpattn/ops.h>

#include "kernels/host/attend/attend_selection.h"

/* Of one call. What is not asked for is zero. */
typedef struct cpa_attend_score_job {
    int transforms; /* scores change: tiles give them in their natural scale */
    int has_bits;   /* some rows */
    int indices;    /* the indices of keys count */
    cpa_score_rules rules;
    cpa_key_bits bits;
    cpa_score_bias bias;
    cpa_attend_selects selects;
    int32_t group; /* query heads of a KV head */
} cpa_attend_score_job;

cpa_attend_score_job cpa_attend_score_of(const cpa_attend_args *args, int32_t group);

/* The rules of a row of q whose query has index `index`, for a query head. */
cpa_attend_row_score cpa_attend_row_score_of(const cpa_attend_score_job *job, int64_t row, int32_t head, int64_t index);

/* The indices of the keys of a tile's lanes, local index `key` first, as cpa_attend_tile_score has them. */
void cpa_attend_index_keys(cpa_owner_map map, cpa_token_set set, int64_t key, int64_t *key_index, int32_t *key_after);

/* 1 / (1 + exp(sink - lse)): what a sink leaves of a row's result. 1 where the row is empty, as its O is 0. */
float cpa_attend_sink_factor(float lse, float sink);

#endif
