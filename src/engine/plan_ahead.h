/* Planning ahead (rank 0): a thread that plans and encodes the next step while the current one executes.
 *
 * One plan is made ahead. It can be taken as soon as it is made, also while that step still executes; the one after it
 * waits until the step is done and what it reports is known. Before each plan the scheduler hears what has come into
 * the inbox. Where nothing can run yet, the thread sleeps until something comes in, arrives or expires; when nothing is
 * left for a run that ends then, or a stop was asked for, the last plan carries CPA_PLAN_STOP. A plan without entries
 * has ends of requests to tell, or belongs to a run of CPA_RUN_STEPS. */
#ifndef CPA_PLAN_AHEAD_H
#define CPA_PLAN_AHEAD_H

#include <stdatomic.h>

#include "src/engine/inbox.h"
#include "src/schedule/scheduler.h"

typedef struct cpa_plan_ahead cpa_plan_ahead;

/* Starts the thread; from now on until cpa_plan_ahead_end the scheduler belongs to it. Arrivals count from `start`, a
 * time of cpa_clock_now. *stop may be set at any time, also by a signal handler; it is seen within 50 ms. */
cpa_status cpa_plan_ahead_begin(cpa_scheduler *scheduler, cpa_inbox *inbox, cpa_run_mode mode, double start,
                                atomic_int *stop, cpa_plan_ahead **out, cpa_error *err);

/* The next encoded plan; *bytes is NULL if it is not made yet. `wait`: waits for it, for a quarter of a second at most,
 * so that the caller can look after other things. The bytes stay valid until the
 * second call of cpa_plan_ahead_go_on after. After a plan with CPA_PLAN_STOP none follows. */
cpa_status cpa_plan_ahead_take(cpa_plan_ahead *ahead, int wait, const uint8_t **bytes, int64_t *n_bytes,
                               cpa_error *err);

/* The plan taken last begins to execute: the steps before it are done and have reported what was damaged. The plan that
 * follows it is made from now on. */
void cpa_plan_ahead_go_on(cpa_plan_ahead *ahead);

/* Tells the scheduler that a swap_in of the step that is done has brought a damaged block back, for its request
 * (cpa_scheduler_swap_failed) or for others too (cpa_evicted_fetch_failed); before the next cpa_plan_ahead_go_on.
 * CPA_NO_MEMORY is possible. */
cpa_status cpa_plan_ahead_report_damage(cpa_plan_ahead *ahead, const cpa_block_move *move, cpa_error *err);

/* The same of a load that has brought nothing (cpa_evicted_load_failed), and of a rank that stores no more
 * (cpa_evicted_stop_stores). */
cpa_status cpa_plan_ahead_report_load(cpa_plan_ahead *ahead, const cpa_disk_move *load, cpa_error *err);
cpa_status cpa_plan_ahead_report_full(cpa_plan_ahead *ahead, cpa_error *err);

/* The same of an import that has brought the first tokens of a prompt alone (cpa_scheduler_import_failed). */
cpa_status cpa_plan_ahead_report_import(cpa_plan_ahead *ahead, uint64_t request, int64_t tokens, cpa_error *err);

/* When the plan that was taken last was made: a time of cpa_clock_now, and how long that took. */
void cpa_plan_ahead_times(const cpa_plan_ahead *ahead, double *begin, double *seconds);

/* What the scheduler had counted when it had made the plan that is there, or was there last. */
void cpa_plan_ahead_stats(cpa_plan_ahead *ahead, cpa_scheduler_stats *out);

/* Ends the thread, whatever it is doing. */
void cpa_plan_ahead_end(cpa_plan_ahead *ahead);

#endif
