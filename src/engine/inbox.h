/* The requests of an engine, on rank 0, from when they are submitted until their end is told.
 *
 * Any thread submits, cancels and drains. The thread that plans passes on to the scheduler what has come in, and ends
 * there what was cancelled or has expired. The thread that runs the steps notes tokens and tells ends: a record belongs
 * to it alone once the scheduler has let go of the request, and only it frees records. Times are those of the engine's
 * clock, in seconds, which stands still between runs. */
#ifndef CPA_INBOX_H
#define CPA_INBOX_H

#include <pthread.h>

#include "src/engine/deadlines.h"
#include "src/engine/request_record.h"
#include "src/schedule/scheduler.h"

/* A token that the scheduler is to hear of. */
typedef struct cpa_token_report {
    uint64_t request;
    uint32_t token;
    uint32_t guess; /* what the model expects behind the token; CPA_NO_TOKEN: nothing is told */
} cpa_token_report;

/* What a token means to its request. */
typedef enum cpa_token_meaning {
    CPA_TOKEN_UNWANTED = 0, /* nothing: the request had ended before it */
    CPA_TOKEN_GOES_ON,
    CPA_TOKEN_LAST, /* it has its length */
    CPA_TOKEN_STOPS /* it is one that ends the request */
} cpa_token_meaning;

/* What a run does when nothing is left. */
typedef enum cpa_run_mode {
    CPA_RUN_UNTIL_EMPTY = 0, /* it ends */
    CPA_RUN_SERVE,           /* it waits for more, until it is drained */
    CPA_RUN_STEPS            /* it makes steps of nothing, until it is drained */
} cpa_run_mode;

typedef struct cpa_inbox {
    const cpa_scheduler *scheduler; /* scheduler against whose options requests are checked */
    int64_t max_requests, max_tokens;
    pthread_mutex_t lock;
    pthread_cond_t news;    /* signalled to the thread that plans */
    pthread_cond_t changed; /* signalled to threads that drain */
    cpa_engine_request *by_id;
    cpa_deadlines deadlines;
    cpa_request_list arrived, ending, ended;
    cpa_token_report *reports;
    int64_t n_reports, cap_reports;
    cpa_token_report *passing; /* reports that the scheduler is being told of; otherwise room for the next ones */
    int64_t cap_passing;
    int64_t live; /* requests whose end has not been told; the one in a callback under way counts */
    int64_t queued_requests, queued_tokens;
    uint64_t *spoiled; /* requests whose blocks nobody is to find */
    int64_t n_spoiled, cap_spoiled;
    int has_news; /* not 0: something has come since news were last passed on */
    int draining;
    int running;       /* a run has begun and not ended */
    int closed;        /* not 0: the run under way takes no more requests */
    pthread_t runner;  /* the thread that drives the run, while `running` */
    double origin;     /* while `running`: cpa_clock_now at which the inbox's clock was 0 */
    double clock;      /* while not `running`: s that the inbox's clock shows */
    int64_t runs_over; /* runs that have ended */
    int64_t left;      /* requests that the run that ended last left unfinished */
} cpa_inbox;

/* The scheduler must outlive it; none of its state is read. Bounds of 0: none. */
cpa_status cpa_inbox_create(const cpa_scheduler *scheduler, int64_t max_requests, int64_t max_tokens, cpa_inbox **out,
                            cpa_error *err);
void cpa_inbox_destroy(cpa_inbox *inbox);

/* ---- any thread ---- */

/* Takes a copy of the request, whose arrival, and deadline if it is above 0, count from now, or between runs from the
 * start of the next one. CPA_INVALID, CPA_BUSY, CPA_STOPPED while draining, CPA_NO_MEMORY. */
cpa_status cpa_inbox_submit(cpa_inbox *inbox, const cpa_scheduler_request *request, const cpa_request_terms *terms,
                            cpa_error *err);
/* The request is to be ended; nothing if it is being ended already. CPA_INVALID where no unfinished request has the id.
 */
cpa_status cpa_inbox_cancel(cpa_inbox *inbox, uint64_t id, cpa_error *err);
/* Admits nothing any more until the run has ended, and waits for so long, at most, until every request is done: CPA_OK.
 * CPA_BUSY if some are left, CPA_STOPPED if a run has ended before they were done. */
cpa_status cpa_inbox_drain(cpa_inbox *inbox, double timeout_s, cpa_error *err);
/* Requests whose end has not been told. */
int64_t cpa_inbox_count(cpa_inbox *inbox);

/* ---- the thread of the run ---- */

/* A run begins, or has ended, at a time of cpa_clock_now and of the engine's clock. */
void cpa_inbox_begin_run(cpa_inbox *inbox, double origin);
void cpa_inbox_end_run(cpa_inbox *inbox, double clock);
/* This thread goes on with the run, which another one may have begun. */
void cpa_inbox_run_here(cpa_inbox *inbox);
/* The token for `position` of a request's tokens is there: what that means, and the request in *out. The scheduler
 * hears of it, unless it has planned it as the last one, before it hears of an end that comes later; one that stops the
 * request is passed on to be ended. CPA_INTERNAL if no request has the id. */
cpa_status cpa_inbox_take_token(cpa_inbox *inbox, uint64_t id, int64_t position, uint32_t token, int is_planned_last,
                                cpa_engine_request **out, cpa_token_meaning *meaning, cpa_error *err);
/* What the model expects behind the token that was taken last, where that is one of the request's and the scheduler
 * hears of it. */
void cpa_inbox_take_guess(cpa_inbox *inbox, uint64_t id, uint32_t guess);
/* The request, if it has not ended and its next token counts; NULL otherwise. */
cpa_engine_request *cpa_inbox_find_live(cpa_inbox *inbox, uint64_t id);
/* The request runs, from `now` on if it never did: it is no longer in the queue. NULL: it is not there any more. */
cpa_engine_request *cpa_inbox_note_start(cpa_inbox *inbox, uint64_t id, double now);
/* Whether it has been ended, or its last token is there. */
int cpa_inbox_has_ended(cpa_inbox *inbox, const cpa_engine_request *request);
/* Calls visit(ctx, request) for each request whose end has not been told. The inbox may not be called meanwhile. */
void cpa_inbox_visit(cpa_inbox *inbox, void (*visit)(void *ctx, cpa_engine_request *request), void *ctx);
/* The request has got its last token, and ends for that reason: nothing else ends it any more. 0 if something has
 * before that was known. */
int cpa_inbox_complete(cpa_inbox *inbox, cpa_engine_request *request, cpa_finish_reason reason);
/* The request fails by a fault of its own, also where its last token is there and that has not been told; nothing where
 * somebody has ended it, or it is not there. */
void cpa_inbox_fail(cpa_inbox *inbox, uint64_t id, const char *why);
/* What the request has computed is not finite: nobody is to find it. Before the plan after the next is made. */
cpa_status cpa_inbox_spoil(cpa_inbox *inbox, uint64_t id, cpa_error *err);
/* One that was ended and is to be told; NULL: none. */
cpa_engine_request *cpa_inbox_next_ended(cpa_inbox *inbox);
/* Before and after the end of a request is told: its id is free from the first on, and the record from the second. */
void cpa_inbox_withdraw(cpa_inbox *inbox, cpa_engine_request *request);
void cpa_inbox_release(cpa_inbox *inbox, cpa_engine_request *request);

/* ---- the thread that plans ---- */

/* Gives the scheduler what has come in, and ends there what is to be ended by `now`. *to_tell: ends wait to be told. */
cpa_status cpa_inbox_pass_on(cpa_inbox *inbox, cpa_scheduler *scheduler, double now, int *to_tell, cpa_error *err);
/* Nothing is left in the scheduler: whether the run is to end, in which case it takes nothing in any more. It goes on
 * while ends are to be told, as those who hear of them may submit more; `all_told`: all have been that ever will. */
int cpa_inbox_close(cpa_inbox *inbox, cpa_run_mode mode, int all_told);
/* When the next request expires; infinity: none does. */
double cpa_inbox_next_deadline(cpa_inbox *inbox);
/* Sleeps until something has come in, or so many seconds have passed; returns whether something has. */
int cpa_inbox_wait(cpa_inbox *inbox, double seconds);
/* Ends that sleep. */
void cpa_inbox_wake(cpa_inbox *inbox);

#endif
