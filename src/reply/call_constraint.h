/* Answers that must call a tool, as constraints of src/grammar/constraint_text.h: in the form that the model's template
 * writes calls in, so that what was cached of an answer counts in the next request. */
#ifndef CPA_REPLY_CALL_CONSTRAINT_H
#define CPA_REPLY_CALL_CONSTRAINT_H

#include <jansson.h>

#include "src/reply/reply_forms.h"

/* Calls of the tools, as requests have them, or of the one of that name (NULL: any); one call, or with `may_repeat` one or
 * more where the form has that. NULL without memory. The caller calls json_decref. */
json_t *cpa_call_constraint(cpa_tool_form form, const json_t *tools, const char *name, int may_repeat);

/* The rest of thoughts, which have begun, and behind them what is bound: takes the constraint, also if it is NULL. */
json_t *cpa_constraint_behind_thoughts(cpa_thought_form form, json_t *constraint);

#endif
