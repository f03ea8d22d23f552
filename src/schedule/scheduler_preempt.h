/* Who gives way when blocks run out, and what becomes of its cache. */
#ifndef CPA_SCHEDULER_PREEMPT_H
#define CPA_SCHEDULER_PREEMPT_H

#include "src/schedule/scheduler_internal.h"

/* Makes room for what s->lacks says of running[index] by preempting sequences after it, and sets *made; does nothing if
 * that cannot succeed. */
cpa_status cpa_scheduler_make_room(cpa_scheduler *s, int32_t index, int *made, cpa_error *err);
/* Takes running[index] out of the running sequences. */
cpa_status cpa_scheduler_preempt(cpa_scheduler *s, int32_t index, int may_swap, cpa_error *err);
/* What a sequence has got from elsewhere is damaged: it is computed from the start, from the next plan on. */
cpa_status cpa_scheduler_start_again(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);
/* Forgets what a sequence has in host memory. */
cpa_status cpa_scheduler_drop_host(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);

#endif
