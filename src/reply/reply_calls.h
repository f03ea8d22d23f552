/* The forms of calls, step by step: a step reads the held text from `at` on, as far as it is there. */
#ifndef CPA_REPLY_CALLS_H
#define CPA_REPLY_CALLS_H

#include "src/reply/reply_state.h"

/* Reads on in a call, from CPA_REPLY_OPEN on. */
cpa_reply_step cpa_reply_step_call(cpa_reply *reply);

/* Lets go of what is known of the call that was read. */
void cpa_reply_clear_call(cpa_reply *reply);

#endif
