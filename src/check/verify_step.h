/* The check of a step whose layers have run. */
#ifndef CPA_VERIFY_STEP_H
#define CPA_VERIFY_STEP_H

#include "src/check/verify.h"

/* Whether cpa_verify_step has nothing to do for the plan that was prepared last. The next one may then be prepared
 * while that runs, and cpa_verify_step is not called. The same on every rank. */
int cpa_verify_is_idle(const cpa_verify *verify);
/* This rank had nothing to do for so long: that is no time of the run, which would pay for checks when work comes. */
void cpa_verify_pause(cpa_verify *verify, double seconds);

/* Collective. Checks the samples of the step. A violation on any rank makes every rank return CPA_CHECK_FAILED with a
 * message that names request, token, layer, head, algorithm and error of the first one. */
cpa_status cpa_verify_step(cpa_verify *verify, const cpa_step_plan *plan, cpa_error *err);

#endif
