/* What comes of a step: the tokens that it has emitted, the requests that have ended, and those that are not finite. */
#ifndef CPA_RUN_RECORD_H
#define CPA_RUN_RECORD_H

#include "src/engine/engine_internal.h"
#include "src/engine/next_plan.h"

/* A run: one call of cpa_engine_run or cpa_engine_serve, or calls of cpa_engine_step until the last. */
typedef struct cpa_run {
    cpa_engine *engine;
    cpa_finish_fn on_finish;
    cpa_progress_fn on_progress;
    void *ctx;
    cpa_run_mode mode;
    double start;
    cpa_plan_ahead *ahead; /* rank 0 */
    int has_plans;         /* what follows is in use */
    cpa_step_plan plan;    /* plan of the step that runs */
    cpa_next_plan next;
    struct cpa_step_masks *masks;
    int prepared;           /* not 0: the next plan is prepared, or has failed to be */
    cpa_error next_error;   /* what happened to the next plan while the step ran */
    cpa_progress_hook hook; /* looks for the next plan, and prepares for it, while a step runs */
    int64_t tokens;         /* tokens computed or found in the cache */
    /* Rank 0: the last step waits for the reports of the other ranks, and its ends for what these say. */
    cpa_reports *reports; /* every rank of several */
    int unsettled;
    int go_on_due; /* not 0: the step behind the unsettled one has begun: then the next plan may be made */
    cpa_request_list finished;
    cpa_nonfinite_row *found; /* rows that are not finite, one of each request and rank */
    int64_t n_found, cap_found;
    char *report; /* report of another rank, while it is made */
    int64_t cap_report;
} cpa_run;

/* After a step: what this rank has added up so far, and what is not finite on it, is on its way to rank 0. */
cpa_status cpa_run_report(cpa_run *run, cpa_error *err);
/* Rank 0: notes the tokens that a finished step emitted, and tells which requests have ended. */
cpa_status cpa_run_record(cpa_run *run, cpa_error *err);
/* Rank 0: once all ranks have told which requests are not finite in the last step, ends are told and the next plan may
 * be made. `wait`: waits for them. */
cpa_status cpa_run_settle(cpa_run *run, int wait, cpa_error *err);

#endif
