#include "src/engine/inbox.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "src/schedule/scheduler_tokens.h"
#include "src/schedule/unconfirmed.h"

cpa_status cpa_inbox_create(const cpa_scheduler *scheduler, int64_t max_requests, int64_t max_tokens, cpa_inbox **out,
                            cpa_error *err) {
    cpa_inbox *inbox = calloc(1, sizeof *inbox);
    if (!inbox) return cpa_fail(err, CPA_NO_MEMORY, "engine: no memory for its queue");
    inbox->scheduler = scheduler;
    inbox->max_requests = max_requests;
    inbox->max_tokens = max_tokens;
    pthread_mutex_init(&inbox->lock, NULL);
    pthread_cond_init(&inbox->news, NULL);
    pthread_cond_init(&inbox->changed, NULL);
    *out = inbox;
    return CPA_OK;
}

void cpa_inbox_destroy(cpa_inbox *inbox) {
    if (!inbox) return;
    cpa_engine_request *request, *next;
    HASH_ITER(hh, inbox->by_id, request, next) {
        HASH_DEL(inbox->by_id, request);
        cpa_request_free(request);
    }
    free(inbox->reports);
    free(inbox->passing);
    free(inbox->spoiled);
    free(inbox->deadlines.heap);
    pthread_cond_destroy(&inbox->changed);
    pthread_cond_destroy(&inbox->news);
    pthread_mutex_destroy(&inbox->lock);
    free(inbox);
}

/* ---- behind the lock ---- */

static void tell_planner(cpa_inbox *inbox) {
    inbox->has_news = 1;
    pthread_cond_signal(&inbox->news);
}

static void leave_queue(cpa_inbox *inbox, cpa_engine_request *request) {
    if (!request->is_queued) return;
    request->is_queued = 0;
    inbox->queued_requests--;
    inbox->queued_tokens -= request->scheduled.prompt_tokens;
}

static cpa_engine_request *find(cpa_inbox *inbox, uint64_t id) {
    cpa_engine_request *request;
    HASH_FIND(hh, inbox->by_id, &id, sizeof id, request);
    return request;
}

static void begin_ending(cpa_inbox *inbox, cpa_engine_request *request, cpa_finish_reason reason) {
    if (request->is_ending || request->state == CPA_REQUEST_ENDED) return;
    request->is_ending = 1;
    request->reason = reason;
    /* One that is new is in the list of those until the scheduler has got it, and is ended there, right after. */
    if (request->state == CPA_REQUEST_SCHEDULED) cpa_request_append(&inbox->ending, request);
}

/* ---- any thread ---- */

static cpa_status check_admission(cpa_inbox *inbox, const cpa_scheduler_request *request, cpa_error *err) {
    if (inbox->draining) {
        return cpa_fail(err, CPA_STOPPED, "request %" PRIu64 ": the engine is being drained", request->id);
    }
    if (find(inbox, request->id)) {
        return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": another request has this id", request->id);
    }
    const int64_t requests = inbox->queued_requests, tokens = inbox->queued_tokens;
    /* Alone any request may wait. */
    if ((inbox->max_requests > 0 && requests + 1 > inbox->max_requests) ||
        (inbox->max_tokens > 0 && requests > 0 && request->prompt_tokens > inbox->max_tokens - tokens)) {
        return cpa_fail(err, CPA_BUSY,
                        "request %" PRIu64 ": %" PRId64 " requests of %" PRId64
                        " prompt tokens wait already; with its %" PRId64
                        " that is beyond max_queued_requests or max_queued_tokens (%" PRId64 ", %" PRId64 ")",
                        request->id, requests, tokens, request->prompt_tokens, inbox->max_requests, inbox->max_tokens);
    }
    return CPA_OK;
}

/* The clock of the engine. */
static double clock_of(const cpa_inbox *inbox) {
    return inbox->running && !inbox->closed ? cpa_clock_now() - inbox->origin : inbox->clock;
}

static cpa_status insert(cpa_inbox *inbox, cpa_engine_request *request, double deadline_s, cpa_error *err) {
    CPA_TRY(check_admission(inbox, &request->scheduled, err));
    request->scheduled.arrival += clock_of(inbox);
    request->deadline.at = request->scheduled.arrival + deadline_s;
    request->phase_s = request->scheduled.arrival;
    HASH_ADD(hh, inbox->by_id, scheduled.id, sizeof request->scheduled.id, request);
    int added = request->hh.tbl != NULL;
    if (added && deadline_s > 0 && !cpa_deadlines_add(&inbox->deadlines, &request->deadline)) {
        HASH_DEL(inbox->by_id, request);
        added = 0;
    }
    if (!added)
        return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory to queue it", request->scheduled.id);
    inbox->live++;
    request->is_queued = 1;
    inbox->queued_requests++;
    inbox->queued_tokens += request->scheduled.prompt_tokens;
    cpa_request_append(&inbox->arrived, request);
    tell_planner(inbox);
    return CPA_OK;
}

cpa_status cpa_inbox_submit(cpa_inbox *inbox, const cpa_scheduler_request *given, const cpa_request_terms *terms,
                            cpa_error *err) {
    CPA_TRY(cpa_scheduler_check(inbox->scheduler, given, err));
    cpa_engine_request *request = cpa_request_create(given, terms);
    if (!request) return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory to queue it", given->id);
    pthread_mutex_lock(&inbox->lock);
    cpa_status status = insert(inbox, request, terms->deadline_s, err);
    if (status == CPA_OK && terms->constraint) {
        request->constraint = *terms->constraint;
        request->constraint_ctx = terms->constraint_ctx;
    }
    pthread_mutex_unlock(&inbox->lock);
    if (status != CPA_OK) cpa_request_free(request);
    return status;
}

cpa_status cpa_inbox_cancel(cpa_inbox *inbox, uint64_t id, cpa_error *err) {
    cpa_status status = CPA_OK;
    pthread_mutex_lock(&inbox->lock);
    cpa_engine_request *request = find(inbox, id);
    if (!request) {
        status = cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": no unfinished request has this id", id);
    } else if (!request->is_ending && request->state != CPA_REQUEST_ENDED) {
        begin_ending(inbox, request, CPA_FINISH_CANCELLED);
        tell_planner(inbox);
    }
    pthread_mutex_unlock(&inbox->lock);
    return status;
}

cpa_status cpa_inbox_drain(cpa_inbox *inbox, double timeout_s, cpa_error *err) {
    const double most_s = 1e9; /* a moment that a timespec holds */
    const struct timespec until = cpa_clock_after(fmin(fmax(timeout_s, 0), most_s));
    int timed_out = 0;
    pthread_mutex_lock(&inbox->lock);
    const int64_t runs_over = inbox->runs_over;
    inbox->draining = 1;
    tell_planner(inbox);
    /* The thread of the run would wait for itself. */
    if (inbox->running && pthread_equal(inbox->runner, pthread_self())) timed_out = 1;
    while (inbox->live > 0 && inbox->runs_over == runs_over && !timed_out) {
        timed_out = pthread_cond_clockwait(&inbox->changed, &inbox->lock, CLOCK_MONOTONIC, &until) != 0;
    }
    const int over = inbox->runs_over != runs_over;
    const int64_t left = over ? inbox->left : inbox->live; /* what has come since is for the next run */
    pthread_mutex_unlock(&inbox->lock);
    if (left == 0) return CPA_OK;
    if (over) return cpa_fail(err, CPA_STOPPED, "the run has ended with %" PRId64 " requests unfinished", left);
    return cpa_fail(err, CPA_BUSY, "%" PRId64 " requests are unfinished", left);
}

int64_t cpa_inbox_count(cpa_inbox *inbox) {
    pthread_mutex_lock(&inbox->lock);
    const int64_t live = inbox->live;
    pthread_mutex_unlock(&inbox->lock);
    return live;
}

/* ---- the thread of the run ---- */

void cpa_inbox_begin_run(cpa_inbox *inbox, double origin) {
    pthread_mutex_lock(&inbox->lock);
    inbox->running = 1;
    inbox->closed = 0;
    inbox->origin = origin;
    pthread_mutex_unlock(&inbox->lock);
    cpa_inbox_run_here(inbox);
}

void cpa_inbox_run_here(cpa_inbox *inbox) {
    pthread_mutex_lock(&inbox->lock);
    inbox->runner = pthread_self();
    pthread_mutex_unlock(&inbox->lock);
}

void cpa_inbox_end_run(cpa_inbox *inbox, double clock) {
    pthread_mutex_lock(&inbox->lock);
    inbox->running = inbox->draining = 0;
    inbox->clock = clock;
    inbox->runs_over++;
    inbox->left = inbox->live;
    pthread_cond_broadcast(&inbox->changed);
    pthread_mutex_unlock(&inbox->lock);
}

/* A token that counts, of a request that goes on. */
static cpa_status report(cpa_inbox *inbox, uint64_t id, uint32_t token, cpa_error *err) {
    if (!cpa_array_reserve(&inbox->reports, &inbox->cap_reports, inbox->n_reports + 1, sizeof *inbox->reports))
        return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory to report its tokens", id);
    inbox->reports[inbox->n_reports++] = (cpa_token_report){id, token, CPA_NO_TOKEN};
    return CPA_OK;
}

cpa_status cpa_inbox_take_token(cpa_inbox *inbox, uint64_t id, int64_t position, uint32_t token, int is_planned_last,
                                cpa_engine_request **out, cpa_token_meaning *meaning, cpa_error *err) {
    cpa_status status = CPA_OK;
    pthread_mutex_lock(&inbox->lock);
    cpa_engine_request *request = *out = find(inbox, id);
    *meaning = CPA_TOKEN_UNWANTED;
    if (!request) {
        status = cpa_fail(err, CPA_INTERNAL, "a token of request %" PRIu64 ", which is not there", id);
    } else if (request->state != CPA_REQUEST_ENDED && !request->is_stopped) {
        const int is_last = cpa_request_ends_with(request, position);
        request->is_stopped = cpa_request_stops_at(request, token);
        *meaning = request->is_stopped ? CPA_TOKEN_STOPS : is_last ? CPA_TOKEN_LAST : CPA_TOKEN_GOES_ON;
        if (!is_planned_last) status = report(inbox, id, token, err);
        if (request->is_stopped && !is_last) {
            begin_ending(inbox, request, CPA_FINISH_STOP);
            tell_planner(inbox);
        }
    }
    pthread_mutex_unlock(&inbox->lock);
    return status;
}

void cpa_inbox_take_guess(cpa_inbox *inbox, uint64_t id, uint32_t guess) {
    pthread_mutex_lock(&inbox->lock);
    cpa_token_report *last = inbox->n_reports > 0 ? &inbox->reports[inbox->n_reports - 1] : NULL;
    if (last && last->request == id) last->guess = guess;
    pthread_mutex_unlock(&inbox->lock);
}

cpa_engine_request *cpa_inbox_find_live(cpa_inbox *inbox, uint64_t id) {
    pthread_mutex_lock(&inbox->lock);
    cpa_engine_request *request = find(inbox, id);
    if (request && (request->state == CPA_REQUEST_ENDED || request->is_stopped)) request = NULL;
    pthread_mutex_unlock(&inbox->lock);
    return request;
}

cpa_engine_request *cpa_inbox_note_start(cpa_inbox *inbox, uint64_t id, double now) {
    pthread_mutex_lock(&inbox->lock);
    cpa_engine_request *request = find(inbox, id);
    if (request && !request->has_run) {
        leave_queue(inbox, request);
        request->has_run = 1;
        request->scheduled_s = now;
    }
    pthread_mutex_unlock(&inbox->lock);
    return request;
}

int cpa_inbox_has_ended(cpa_inbox *inbox, const cpa_engine_request *request) {
    pthread_mutex_lock(&inbox->lock);
    const int ended = request->state == CPA_REQUEST_ENDED;
    pthread_mutex_unlock(&inbox->lock);
    return ended;
}

void cpa_inbox_visit(cpa_inbox *inbox, void (*visit)(void *ctx, cpa_engine_request *request), void *ctx) {
    cpa_engine_request *request, *next;
    pthread_mutex_lock(&inbox->lock);
    HASH_ITER(hh, inbox->by_id, request, next) visit(ctx, request);
    pthread_mutex_unlock(&inbox->lock);
}

int cpa_inbox_complete(cpa_inbox *inbox, cpa_engine_request *request, cpa_finish_reason reason) {
    pthread_mutex_lock(&inbox->lock);
    const int is_first = request->state != CPA_REQUEST_ENDED;
    if (is_first && request->is_ending) { /* the planning thread has not seen that yet */
        cpa_request_list kept = {NULL, NULL};
        for (cpa_engine_request *r = cpa_request_take(&inbox->ending); r; r = cpa_request_take(&inbox->ending))
            if (r != request) cpa_request_append(&kept, r);
        inbox->ending = kept;
    }
    if (is_first) request->reason = reason;
    request->state = CPA_REQUEST_ENDED;
    cpa_deadlines_remove(&inbox->deadlines, &request->deadline);
    pthread_mutex_unlock(&inbox->lock);
    return is_first;
}

void cpa_inbox_fail(cpa_inbox *inbox, uint64_t id, const char *why) {
    pthread_mutex_lock(&inbox->lock);
    cpa_engine_request *request = find(inbox, id);
    const int ends = request && (request->is_ending || request->state == CPA_REQUEST_ENDED);
    if (request && (!ends || request->reason == CPA_FINISH_LENGTH || request->reason == CPA_FINISH_STOP)) {
        snprintf(request->error, sizeof request->error, "%s", why);
        request->reason = CPA_FINISH_FAILED;
        begin_ending(inbox, request, CPA_FINISH_FAILED);
        tell_planner(inbox);
    }
    pthread_mutex_unlock(&inbox->lock);
}

cpa_status cpa_inbox_spoil(cpa_inbox *inbox, uint64_t id, cpa_error *err) {
    cpa_status status = CPA_OK;
    pthread_mutex_lock(&inbox->lock);
    if (cpa_array_reserve(&inbox->spoiled, &inbox->cap_spoiled, inbox->n_spoiled + 1, sizeof *inbox->spoiled)) {
        inbox->spoiled[inbox->n_spoiled++] = id;
    } else {
        status = cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory to end it", id);
    }
    pthread_mutex_unlock(&inbox->lock);
    return status;
}

cpa_engine_request *cpa_inbox_next_ended(cpa_inbox *inbox) {
    pthread_mutex_lock(&inbox->lock);
    cpa_engine_request *request = cpa_request_take(&inbox->ended);
    pthread_mutex_unlock(&inbox->lock);
    return request;
}

void cpa_inbox_withdraw(cpa_inbox *inbox, cpa_engine_request *request) {
    pthread_mutex_lock(&inbox->lock);
    leave_queue(inbox, request);
    cpa_deadlines_remove(&inbox->deadlines, &request->deadline);
    HASH_DEL(inbox->by_id, request);
    pthread_mutex_unlock(&inbox->lock);
}

void cpa_inbox_release(cpa_inbox *inbox, cpa_engine_request *request) {
    cpa_request_free(request);
    pthread_mutex_lock(&inbox->lock);
    if (--inbox->live == 0) pthread_cond_broadcast(&inbox->changed);
    pthread_mutex_unlock(&inbox->lock);
}

/* ---- the thread that plans ---- */

/* One that the scheduler cannot take fails alone. The lock is open while the scheduler asks token_at. */
static void schedule(cpa_inbox *inbox, cpa_scheduler *scheduler, cpa_engine_request *request) {
    cpa_error why = {CPA_OK, ""};
    pthread_mutex_unlock(&inbox->lock);
    const cpa_status status = cpa_scheduler_add(scheduler, &request->scheduled, &why);
    pthread_mutex_lock(&inbox->lock);
    if (status == CPA_OK) {
        request->state = CPA_REQUEST_SCHEDULED;
        if (request->is_ending) cpa_request_append(&inbox->ending, request);
    } else {
        request->state = CPA_REQUEST_ENDED;
        request->reason = CPA_FINISH_FAILED;
        snprintf(request->error, sizeof request->error, "%.255s", why.message);
        cpa_request_append(&inbox->ended, request);
    }
    free(request->salt);
    free(request->tenant);
    request->salt = request->tenant = NULL;
    request->scheduled.salt = request->scheduled.tenant = NULL;
}

/* Tells the scheduler of the tokens that are there; the lock is open meanwhile, as in `schedule`. */
static cpa_status pass_reports_on(cpa_inbox *inbox, cpa_scheduler *scheduler, cpa_error *err) {
    cpa_token_report *reports = inbox->reports;
    const int64_t n = inbox->n_reports, capacity = inbox->cap_reports;
    cpa_status status = CPA_OK;
    inbox->reports = inbox->passing;
    inbox->cap_reports = inbox->cap_passing;
    inbox->n_reports = 0;
    inbox->passing = reports;
    inbox->cap_passing = capacity;
    pthread_mutex_unlock(&inbox->lock);
    for (int64_t i = 0; i < n && status == CPA_OK; i++) {
        status = cpa_scheduler_report(scheduler, reports[i].request, reports[i].token, err);
        if (reports[i].guess != CPA_NO_TOKEN) cpa_scheduler_guess(scheduler, reports[i].request, reports[i].guess);
    }
    pthread_mutex_lock(&inbox->lock);
    return status;
}

/* Those that expire by `now`, and, while the engine is drained, those that arrive later. */
static void find_overdue(cpa_inbox *inbox, double now) {
    for (cpa_deadline *first = cpa_deadlines_first(&inbox->deadlines); first && first->at <= now;
         first = cpa_deadlines_first(&inbox->deadlines)) {
        cpa_deadlines_remove(&inbox->deadlines, first);
        begin_ending(inbox, (cpa_engine_request *)(void *)first, CPA_FINISH_EXPIRED);
    }
    if (!inbox->draining || !inbox->has_news) return;
    cpa_engine_request *request, *next;
    HASH_ITER(hh, inbox->by_id, request, next) {
        if (request->scheduled.arrival > now) begin_ending(inbox, request, CPA_FINISH_CANCELLED);
    }
}

cpa_status cpa_inbox_pass_on(cpa_inbox *inbox, cpa_scheduler *scheduler, double now, int *to_tell, cpa_error *err) {
    cpa_engine_request *request;
    cpa_status status = CPA_OK;
    pthread_mutex_lock(&inbox->lock);
    /* Of what comes in meanwhile too: an end that is found below comes after every token before it. */
    while (status == CPA_OK && (inbox->n_reports > 0 || inbox->arrived.first)) {
        status = pass_reports_on(inbox, scheduler, err);
        if ((request = cpa_request_take(&inbox->arrived))) schedule(inbox, scheduler, request);
    }
    while (inbox->n_spoiled > 0) cpa_scheduler_forget_blocks(scheduler, inbox->spoiled[--inbox->n_spoiled]);
    find_overdue(inbox, now);
    inbox->has_news = 0;
    while (status == CPA_OK && (request = cpa_request_take(&inbox->ending))) {
        int ended = 0;
        status = cpa_scheduler_end(scheduler, request->scheduled.id, &ended, err);
        if (!ended) {
            request->is_ending = 0; /* its last token is planned: it ends by itself */
            continue;
        }
        request->state = CPA_REQUEST_ENDED;
        cpa_request_append(&inbox->ended, request);
    }
    *to_tell = inbox->ended.first != NULL;
    pthread_mutex_unlock(&inbox->lock);
    return status;
}

int cpa_inbox_close(cpa_inbox *inbox, cpa_run_mode mode, int all_told) {
    pthread_mutex_lock(&inbox->lock);
    inbox->closed =
        !inbox->has_news && (inbox->live == 0 || all_told) && (mode == CPA_RUN_UNTIL_EMPTY || inbox->draining);
    /* What comes in from now on counts from the start of the next run. */
    if (inbox->closed) inbox->clock = cpa_clock_now() - inbox->origin;
    const int closed = inbox->closed;
    pthread_mutex_unlock(&inbox->lock);
    return closed;
}

double cpa_inbox_next_deadline(cpa_inbox *inbox) {
    pthread_mutex_lock(&inbox->lock);
    const cpa_deadline *first = cpa_deadlines_first(&inbox->deadlines);
    const double at = first ? first->at : INFINITY;
    pthread_mutex_unlock(&inbox->lock);
    return at;
}

int cpa_inbox_wait(cpa_inbox *inbox, double seconds) {
    const struct timespec until = cpa_clock_after(seconds);
    pthread_mutex_lock(&inbox->lock);
    if (!inbox->has_news) pthread_cond_clockwait(&inbox->news, &inbox->lock, CLOCK_MONOTONIC, &until);
    const int has_news = inbox->has_news;
    pthread_mutex_unlock(&inbox->lock);
    return has_news;
}

void cpa_inbox_wake(cpa_inbox *inbox) {
    pthread_mutex_lock(&inbox->lock);
    tell_planner(inbox);
    pthread_mutex_unlock(&inbox->lock);
}
