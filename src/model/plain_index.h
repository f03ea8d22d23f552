/* Which keys the tokens of a plain forward attend in a layer with an indexer (index_config.h), whose queries and keys are
 * compared in fp32, or else in bf16. */
#ifndef CPA_MODEL_PLAIN_INDEX_H
#define CPA_MODEL_PLAIN_INDEX_H

#include "src/model/plain_rows.h"

/* Floats of the room that scores of so many keys take. */
int64_t cpa_plain_index_room(int64_t keys);

/* Keys, queries and weights of all tokens, from f->x, the normed rows, and f->q_latent. */
cpa_status cpa_plain_index(cpa_plain *f, int32_t layer);

/* Fills chosen [position + 1]: 1 for the keys that the token at that position attends, else 0. Of keys with one score
 * those that come first are better. */
void cpa_plain_index_choose(const cpa_plain *f, int64_t position, float *chosen);

#endif
