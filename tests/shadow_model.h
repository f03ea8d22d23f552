/* The memory of all ranks as a schedule leaves it, kept the plain way: every token of every block, on the device and on
 * the host. Plan after plan is carried out in the order that step_plan.h gives, and whatever a query would see is
 * compared with what it should. */
#ifndef CPA_TESTS_SHADOW_MODEL_H
#define CPA_TESTS_SHADOW_MODEL_H

#include <stdint.h>

typedef struct shadow_result {
    int64_t steps;
    int64_t hits, copies, swaps, evictions, preemptions, voids, failures; /* what happened, so that tests see it did */
    char violation[160];                                                  /* the first one; empty: none */
} shadow_result;

/* Runs one random schedule of that seed to its end, or to the first violation, and adds to *result. */
void shadow_run(uint64_t seed, shadow_result *result);

#endif
