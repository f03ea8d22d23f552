/* The ranks' side of a schedule, kept the plain way: it applies plan after plan as ranks would and checks each against
 * what a schedule must be. */
#ifndef CPA_TESTS_SCHEDULER_MODEL_H
#define CPA_TESTS_SCHEDULER_MODEL_H

#include "src/scheduler.h"

typedef struct model_request {
    cpa_scheduler_request request;
    int64_t prefix; /* requests of one prefix begin alike */
    int32_t slot;   /* -1 = not running */
    int32_t phase;  /* -1 = not known yet */
    int64_t computed;
    int64_t emitted;
    int64_t preempted_at; /* step of its last preemption, counted from 1; 0 = never */
    int done;
} model_request;

typedef struct scheduler_model {
    cpa_scheduler_options options;
    cpa_scheduler *scheduler;
    cpa_step_plan plan;
    model_request *requests; /* [n_requests], by id */
    int64_t n_requests;
    int64_t prefix;        /* of the requests added next */
    int64_t *slot_request; /* [max_num_seqs]; -1 = empty */
    int64_t *slot_blocks;  /* [max_num_seqs, cp_size] blocks held */
    int32_t *block_owner;  /* [cp_size, num_blocks] slot; -1 = free */
    double now;            /* of the last step */
    double next_arrival;
    int64_t steps, preemptions, peak_blocks;
} scheduler_model;

/* Starts a scheduler with these options; the model is its source of tokens. */
void scheduler_model_start(scheduler_model *model, const cpa_scheduler_options *options);
void scheduler_model_end(scheduler_model *model);

/* Adds a request; its id is its index in `requests`, which is returned. */
int64_t scheduler_model_add(scheduler_model *model, int64_t prompt, int64_t output, double arrival, int32_t priority);

/* Plans the step at `now` and checks and applies it. Returns the number of its chunks. */
int64_t scheduler_model_step(scheduler_model *model, double now);

/* Steps, `dt` seconds each, until every request is done; waits for the next arrival when a plan is empty. */
void scheduler_model_finish(scheduler_model *model, double dt);

#endif
