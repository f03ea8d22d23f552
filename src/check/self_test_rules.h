/* The part of the self-test of operations that attends with score rules and masks of bits. */
#ifndef CPA_SELF_TEST_RULES_H
#define CPA_SELF_TEST_RULES_H

#include "src/check/self_test_internal.h"

/* Every path of attend over shard 1, once with each of a few rules (cpattn/score.h), against float64 in some rows. */
cpa_status cpa_self_test_check_rules(cpa_kernel_test *t, cpa_error *err);

#endif
