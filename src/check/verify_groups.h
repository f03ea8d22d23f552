/* Which of the samples of a step are checked together. */
#ifndef CPA_VERIFY_GROUPS_H
#define CPA_VERIFY_GROUPS_H

#include "src/check/verify_gather.h"

/* Sorts the samples, says which of them judge what an indexer chose for their row, and groups them, the same way on every
 * rank. *out [*n] is the caller's to free, also on failure. */
cpa_status cpa_verify_group_samples(cpa_verify *verify, const cpa_step_plan *plan, cpa_verify_group **out, int64_t *n,
                                    cpa_error *err);

#endif
