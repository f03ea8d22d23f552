/* Says what is wrong with a result: compares the first wrong row with what known mistakes would have given. */
#ifndef CPA_VERIFY_DIAGNOSE_H
#define CPA_VERIFY_DIAGNOSE_H

#include "src/check/verify_choice.h"

/* The first wrong row that a rank found, as it stood beside the reference. */
typedef struct cpa_verify_wrong_row {
    int64_t sample; /* an index of the sorted samples; -1: there is none */
    double error, tolerance, reference[CPA_MAX_HEAD_DIM];
    int32_t is_choice; /* not 0: what is wrong is the list of the row, as far as `choice` tells */
    cpa_verify_choice choice;
} cpa_verify_wrong_row;

/* Collective, after every rank agreed that a check failed; `verdict` is the agreed message. The wrong row of the lowest rank that has one is
 * computed again, in float64, without each rank's shard, with the LSE of the own or of the other shards in base 2, without score
 * rules, with
 * the causal mask off by one either way, and with each other KV head; what explains the result, and where what
 * the row had is kept, is added to the message on every rank. Returns CPA_CHECK_FAILED, or another status if the diagnosis itself failed. */
cpa_status cpa_verify_diagnose(cpa_verify *verify, const cpa_step_plan *plan, const cpa_verify_wrong_row *wrong,
                               cpa_error *verdict);

#endif
