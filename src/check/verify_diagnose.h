/* Says what is wrong with a result: compares the first wrong row with what known mistakes would have given. */
#ifndef CPA_VERIFY_DIAGNOSE_H
#define CPA_VERIFY_DIAGNOSE_H

#include "src/check/verify.h"

/* Collective, after every rank agreed that a check failed; `verdict` is the agreed message. `wrong_sample` is this
 * rank's first wrong row (an index of the sorted samples) or -1. The wrong row of the lowest rank that has one is
 * computed again, in float64, without each rank's shard, with the LSE of the own or of the other shards in base 2, with
 * the causal mask off by one either way, and with each other KV head; what explains the result is added to the message
 * on every rank. Returns CPA_CHECK_FAILED, or another status if the diagnosis itself failed. */
cpa_status cpa_verify_diagnose(cpa_verify *verify, const cpa_step_plan *plan, int64_t wrong_sample, cpa_error *verdict);

#endif
