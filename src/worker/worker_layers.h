/* What a step enqueues: its model, and the cache, attention and digest of each layer. */
#ifndef CPA_WORKER_LAYERS_H
#define CPA_WORKER_LAYERS_H

#include "src/worker/worker.h"

/* Enqueues the step that is prepared, from the tokens that it goes on with to the results of its last layer in front of
 * those that draft. */
cpa_status cpa_worker_run_layers(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                                 cpa_error *err);
/* Enqueues what follows: each rank draws its tokens, runs the layers that draft, and gets what the others have. */
cpa_status cpa_worker_draw(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                           cpa_error *err);
/* Shows the observer, if there is one, the tensors of a layer. */
cpa_status cpa_worker_layer_done(const cpa_worker *worker, const cpa_step_plan *plan, int32_t layer,
                                 const cpa_worker_observer *observer, cpa_error *err);

#endif
