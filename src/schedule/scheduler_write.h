/* The entries of a plan. */
#ifndef CPA_SCHEDULER_WRITE_H
#define CPA_SCHEDULER_WRITE_H

#include "src/schedule/scheduler_internal.h"

/* Writes the chunks of all that were given tokens and were not withdrawn, and what comes with them. */
cpa_status cpa_scheduler_write(cpa_scheduler *s, cpa_error *err);
/* Gives back the blocks of running sequences that no query sees any more. */
cpa_status cpa_scheduler_null_unseen(cpa_scheduler *s, cpa_error *err);

#endif
