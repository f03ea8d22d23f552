/* Masks by which a worker draws the tokens of constrained sequences. They lie in slots, the same on every rank, so that a
 * mask that is needed again is there already. A step's come when its layers are enqueued: the host hears of the tokens
 * that they follow from when the step before is done, and makes them while the layers run. */
#ifndef CPA_TOKEN_MASKS_H
#define CPA_TOKEN_MASKS_H

#include "src/worker/worker.h"

/* Memory for the slots, where the model draws by masks. Closing cleans up after a failure too. */
cpa_status cpa_token_masks_open(cpa_worker *worker, cpa_error *err);
void cpa_token_masks_close(cpa_worker *worker);

/* How many emissions of the step are constrained. */
int64_t cpa_token_masks_wanted(const cpa_worker *worker);
/* The words of a slot on the host, to be filled before the slot is given as a fresh one. */
uint32_t *cpa_token_masks_words(const cpa_worker *worker, int64_t slot);

/* Which slot each constrained emission of the step draws by, in their order, -1 for none; `fresh` are those whose words
 * are new, and are slots. Enqueues what the drawing reads. CPA_INTERNAL where an emission has a slot that is none. */
cpa_status cpa_token_masks_take(cpa_worker *worker, const int32_t *slots, const int32_t *fresh, int64_t n_fresh,
                                cpa_error *err);

#endif
