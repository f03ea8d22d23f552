/* What the layers of a model do to scores, with its arrays on the device. */
#ifndef CPA_WORKER_SCORE_H
#define CPA_WORKER_SCORE_H

#include "kernels/device.h"
#include "src/worker/worker.h"

/* Copies the arrays of the layers; nothing where they have no rules. Destroying cleans up after a failure too. */
cpa_status cpa_worker_score_create(cpa_worker *worker, cpa_error *err);
void cpa_worker_score_destroy(cpa_worker *worker);

#endif
