/* The checks of a batch and of what is attended, for plans of other operators over the same items. */
#ifndef CPA_OPS_ATTEND_H
#define CPA_OPS_ATTEND_H

#include <cpattn/ops.h>

#include "kernels/attend_plan.h"

/* What a batch reads and writes, and a plan keeps of it. */
typedef struct cpa_batch_reach {
    int64_t max_block; /* -1: none */
    int on_device;     /* not 0: the tables are on the device, where they cannot be read */
    int64_t end;       /* largest end of the tokens in their sequences */
} cpa_batch_reach;

cpa_status cpa_check_batch(const cpa_device *device, const cpa_attend_batch *batch, cpa_batch_reach *reach,
                           cpa_error *err);

/* Whether a plan that is set takes the arguments. */
cpa_status cpa_check_attend_args(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_error *err);

#endif
