/* What a step adds to logits before it draws: for each emission a list of its own, or the one that it shares with others
 * of its chunk. Until a sequence has as many output tokens as it must have, its list keeps out those that end it. */
#ifndef CPA_WORKER_BIASES_H
#define CPA_WORKER_BIASES_H

#include "src/worker/worker.h"

/* Counts the entries of the step, whose emissions are listed, and notes whether there are any in what it wants. */
void cpa_worker_count_biases(cpa_worker *worker, const cpa_step_plan *plan);
/* Room for as many that few numbers of it make few shapes of steps; 0 for none. */
int64_t cpa_worker_pad_biases(int64_t biases);
/* The most that a step has, padded. */
int64_t cpa_worker_most_biases(const cpa_worker *worker);
/* Fills them in on the host, once the emissions are there. */
void cpa_worker_list_biases(const cpa_worker *worker, const cpa_step_plan *plan);

#endif
