/* Planning pass-Q: whose rows are attended where, and what travels for that. */
#ifndef CPA_PASS_Q_PLAN_H
#define CPA_PASS_Q_PLAN_H

#include "src/context/pass_q.h"

/* Forgets the last step and prepares for the planned chunks. */
cpa_status cpa_pass_q_plan(cpa_pass_q *q);
/* In the place of cpa_pass_q_plan, once: for the steps of a plan that is reserved. The step has padded_rows, those of
 * all sequences, and no chunks. Sets what of the reservation lies here. */
cpa_status cpa_pass_q_reserve(cpa_pass_q *q, cpa_attend_reservation reservation);
/* The rows that cpa_pass_q_attend_remote attends, of a planned step; and which row of the whole step each is. */
int64_t cpa_pass_q_attended_rows(const cpa_pass_q *q);
void cpa_pass_q_map_attended(const cpa_pass_q *q, int32_t *map);

#endif
