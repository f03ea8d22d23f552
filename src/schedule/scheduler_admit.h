/* Who is admitted next, and which blocks it shares with others. */
#ifndef CPA_SCHEDULER_ADMIT_H
#define CPA_SCHEDULER_ADMIT_H

#include "src/schedule/scheduler_internal.h"

/* Admits waiting sequences, in their order, as far as budget, blocks and quotas go. */
cpa_status cpa_scheduler_admit(cpa_scheduler *s, cpa_error *err);

#endif
