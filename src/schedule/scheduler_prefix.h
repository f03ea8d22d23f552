/* What can be found by its prefix once the plan has run, and who waits for what. */
#ifndef CPA_SCHEDULER_PREFIX_H
#define CPA_SCHEDULER_PREFIX_H

#include "src/schedule/scheduler_internal.h"

/* Whether others may find what a sequence computes. */
int cpa_scheduler_shares(const cpa_scheduler *s, const cpa_sequence *sequence);
/* The digest of tokens [first, first + n) of a sequence after a prefix of whole blocks, block by block; 0 if it could
 * not be computed. */
int cpa_scheduler_digest(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_prefix_digest *parent, int64_t first,
                         int32_t n, cpa_prefix_digest *out);
/* The running sequence that computes next what others find by `key`; NULL if none does. */
const cpa_sequence *cpa_scheduler_who_computes(const cpa_scheduler *s, const cpa_prefix_digest *key);
/* Lets others find what the sequence has computed, and know what it will compute next. */
cpa_status cpa_scheduler_link(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);
/* Others no longer wait for what the sequence would have computed next. */
void cpa_scheduler_unlink(cpa_scheduler *s, cpa_sequence *sequence);

#endif
