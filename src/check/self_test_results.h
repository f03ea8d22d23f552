/* What the self-test of kernels has of attend and merge, and what that must be. */
#ifndef CPA_SELF_TEST_RESULTS_H
#define CPA_SELF_TEST_RESULTS_H

#include "src/check/cases/score.h"
#include "src/check/self_test_internal.h"

/* The memory of both. */
cpa_status cpa_self_test_make_results(cpa_kernel_test *t, cpa_error *err);
/* What the reference on the host says of some rows and the last ones, of one head in `heads_apart`: over the keys of
 * shard 1 that a row is given, behind all of shard 0 where `both`. `score` may be NULL. */
void cpa_self_test_expect(cpa_kernel_test *t, cpa_mask mask, const cpa_case_score *score, int both,
                          int32_t heads_apart);
/* What comes to both tolerances, relative to the sizes of values, where devices round rows of CPA_TQ_ and the queries that
 * they meet: cpa_reference_rounded_score of leading elements of 1. 0: for other caches. */
double cpa_self_test_rounding(const cpa_kernel_test *t);
/* Compares a state, or the rounded result beside its LSE, with what rows must be. CPA_CHECK_FAILED names what was done,
 * the mask, and the first row that is wrong. */
cpa_status cpa_self_test_compare(cpa_kernel_test *t, const char *what, cpa_mask mask, const cpa_self_test_result *r,
                                 int rounded, cpa_error *err);

#endif
