/* What items of the host's attend plan share: units of rows of several items, and where a row finds its states. */
#ifndef CPA_HOST_ATTEND_CASCADE_H
#define CPA_HOST_ATTEND_CASCADE_H

#include "kernels/host/attend/attend_plan.h"

/* Finds the whole splits that items of the batch share, and deals them to shared units; none where the batch says off.
 * Afterwards paths tell of each item which splits are its own. */
cpa_status cpa_host_plan_cascade(cpa_host_plan *plan, cpa_table_set tables, cpa_error *err);
void cpa_host_cascade_release(cpa_host_plan *plan);

/* Folds the shared states of a row of a unit, in the order of the keys, into its state. */
void cpa_host_fold_shared(const cpa_host_plan *plan, const cpa_host_unit *unit, int32_t row, float *o, float *lse);

#endif
