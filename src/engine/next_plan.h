/* The plan of the step to come on every rank: rank 0 takes it from the planning thread and sends it, the others receive
 * it, all while the step before runs.
 *
 * The rank that runs a step looks for the plan of the next one again and again: from within the operations of the host
 * back end, which poll, and while it waits for a device. */
#ifndef CPA_NEXT_PLAN_H
#define CPA_NEXT_PLAN_H

#include "comm/comm.h"
#include "src/engine/plan_ahead.h"
#include "src/trace/spans.h"

typedef struct cpa_next_plan {
    cpa_control *control;
    cpa_plan_ahead *ahead; /* rank 0 */
    cpa_mailbox *mailbox;
    cpa_spans *spans;
    cpa_plan_limits limits;
    cpa_step_plan plan; /* if it is `there` */
    int there;
    int last; /* a plan with CPA_PLAN_STOP was there */
} cpa_next_plan;

/* `control`, `spans` and, on rank 0, `ahead` must outlive it. */
cpa_status cpa_next_plan_open(cpa_next_plan *next, cpa_control *control, cpa_plan_ahead *ahead, cpa_spans *spans,
                              const cpa_plan_limits *limits, cpa_error *err);
void cpa_next_plan_close(cpa_next_plan *next);

/* Moves the plan along; sets next->there once it has arrived and is decoded. Once it is there, rank 0 moves on what it
 * sends; after the last plan nothing comes. `wait`: waits for it, rank 0 until all ranks have received it as well: it
 * sends nothing while it enqueues a step, which may have to wait for what the other ranks enqueue. */
cpa_status cpa_next_plan_look(cpa_next_plan *next, int wait, cpa_error *err);

/* The plan that is there becomes *plan: its step begins. The one after it is made from cpa_plan_ahead_go_on on. */
void cpa_next_plan_advance(cpa_next_plan *next, cpa_step_plan *plan);

/* Collective, when no step follows: nothing is under way afterwards. */
cpa_status cpa_next_plan_settle(cpa_next_plan *next, cpa_error *err);

#endif
