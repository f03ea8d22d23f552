/* The record of a request of an engine, from when it is submitted until its end is told; and lists of them. */
#ifndef CPA_REQUEST_RECORD_H
#define CPA_REQUEST_RECORD_H

#include <cpattn/constraint.h>

#include "base/hash_table.h"
#include "src/engine/deadlines.h"
#include "src/schedule/scheduler.h"

/* Where a request stands. */
typedef enum cpa_request_state {
    CPA_REQUEST_NEW = 0,   /* the scheduler does not know it yet */
    CPA_REQUEST_SCHEDULED, /* the scheduler has it, or has planned its last token */
    CPA_REQUEST_ENDED      /* it has been ended, or its last token is there; that is to be told */
} cpa_request_state;

/* What a request does. */
typedef enum cpa_request_phase {
    CPA_PHASE_WAITING = 0,
    CPA_PHASE_PREFILL,
    CPA_PHASE_DECODE,
    CPA_PHASE_PREEMPTED
} cpa_request_phase;

/* A request that was submitted and whose end has not been told. */
typedef struct cpa_engine_request {
    cpa_deadline deadline; /* first: entries of the heap are records */
    cpa_scheduler_request scheduled;
    char *salt, *tenant; /* salt and tenant, until the scheduler has them; a tenant may be NULL */
    uint32_t *stop_ids;  /* [n_stop_ids] tokens that end the request */
    int64_t n_stop_ids;
    cpa_plan_bias *biases;         /* biases that `scheduled` points to */
    cpa_constraint_ops constraint; /* constraint of the answer; size 0: none */
    void *constraint_ctx;
    UT_hash_handle hh;
    struct cpa_engine_request *next; /* next in whichever list has the request */
    /* Guarded by the lock. */
    cpa_request_state state;
    int is_queued;            /* counts against the bounds of the queue */
    int is_ending;            /* is to be ended, with `reason` */
    cpa_finish_reason reason; /* why the request ended, or is to end */
    char error[256];          /* why the request failed */
    int is_stopped;           /* has got a token that ends it */
    /* Of the thread that runs the steps. */
    int64_t emitted;
    int64_t accepted; /* tokens of `emitted` that the constraint has taken */
    int is_broken;    /* the constraint has failed: no more tokens are drawn */
    int has_run;
    double scheduled_s, end_s; /* s: when the request first ran, if it has, and when it ended */
    cpa_request_phase phase;   /* phase on the timeline (request_spans.h) */
    double phase_s;            /* when the phase began, seconds */
    int32_t seq;               /* index of the request in its last plan */
    double *token_s;           /* [output_tokens] seconds, from the first token on */
    uint32_t *tokens;
    float *logprobs;
    cpa_token_ranks *ranks;        /* [output_tokens]; NULL: the request does not ask for ranks */
    cpa_token_ranks *prompt_ranks; /* [prompt_tokens], of which the first `ranked` are filled */
    int64_t ranked;                /* entries of prompt_ranks that have come, from the first on */
} cpa_engine_request;

/* Records one after another; the first in is the first out. */
typedef struct cpa_request_list {
    cpa_engine_request *first, *last;
} cpa_request_list;

/* What comes with a request beside what the scheduler is told of it. */
typedef struct cpa_request_terms {
    double deadline_s;
    const uint32_t *stop_ids; /* [n_stop_ids] */
    int64_t n_stop_ids;
    const cpa_constraint_ops *constraint; /* NULL: none */
    void *constraint_ctx;                 /* the inbox closes it, once it has taken the request */
} cpa_request_terms;

/* A copy of a request, without its constraint, which is its own only if it is taken. NULL without memory. */
cpa_engine_request *cpa_request_create(const cpa_scheduler_request *given, const cpa_request_terms *terms);
/* With its constraint, which is closed. */
void cpa_request_free(cpa_engine_request *request);

void cpa_request_append(cpa_request_list *list, cpa_engine_request *request);
/* Takes the first out of the list; NULL: it is empty. */
cpa_engine_request *cpa_request_take(cpa_request_list *list);

/* Whether the token for that position is the last one of the request's length. */
int cpa_request_ends_with(const cpa_engine_request *request, int64_t position);
/* Whether that token ends the request. */
int cpa_request_stops_at(const cpa_engine_request *request, uint32_t token);

#endif
