/* Several tokens of a sequence in a step: a decode chunk is the last token and drafts of those behind it. What is drawn
 * for each of them is reported (scheduler_tokens.h): a token more than the one that is certain accepts a draft. What no
 * report has accepted by the next plan was rejected. */
#ifndef CPA_SCHEDULER_DRAFTS_H
#define CPA_SCHEDULER_DRAFTS_H

#include "src/schedule/scheduler_internal.h"

/* At the start of a plan: drafts that nobody has accepted are forgotten, here and on the ranks, and blocks wholly
 * behind what is left are given back. */
cpa_status cpa_scheduler_settle_drafts(cpa_scheduler *s, cpa_error *err);
/* Adds drafts to the decode chunks of the plan, as far as budget and blocks go that nobody else has a claim on yet. No
 * sequence gives way to a draft. */
void cpa_scheduler_add_drafts(cpa_scheduler *s);
/* Who drafts for the sequence is shown its tokens up to `end`, as far as they can be named. */
void cpa_scheduler_teach_drafter(cpa_scheduler *s, cpa_sequence *sequence, int64_t end);

#endif
