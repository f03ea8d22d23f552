/* The masks of a step's constrained requests: made on rank 0 when the step's layers are enqueued and the tokens before
 * are known, and sent to the ranks that draw. Masks with keys stay in their slots (src/worker/token_masks.h) until
 * others that were used later need these. */
#ifndef CPA_STEP_MASKS_H
#define CPA_STEP_MASKS_H

#include "src/engine/engine_internal.h"

typedef struct cpa_step_masks cpa_step_masks;

/* For runs of the engine, which must outlive it. */
cpa_status cpa_step_masks_create(cpa_engine *engine, cpa_step_masks **out, cpa_error *err);
void cpa_step_masks_destroy(cpa_step_masks *masks);

/* For cpa_worker_set_token_masks; ctx is the cpa_step_masks. A constraint that fails, or lets no token through, fails its
 * request. Collective. */
cpa_status cpa_step_masks_give(void *masks, cpa_error *err);

#endif
