/* Runs an engine: every rank executes plan after plan, and gets the next one while a step runs. */
#include "src/engine/engine_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "src/check/verify_step.h"
#include "src/context/context.h"
#include "src/engine/engine_requests.h"
#include "src/engine/engine_stats.h"
#include "src/engine/next_plan.h"
#include "src/worker/worker_tokens.h"

/* A run: one call of cpa_engine_run or cpa_engine_serve, or calls of cpa_engine_step until the last. */
typedef struct cpa_engine_steps {
    cpa_engine *engine;
    cpa_finish_fn on_finish;
    cpa_progress_fn on_progress;
    void *ctx;
    cpa_run_mode mode;
    double start;
    cpa_plan_ahead *ahead; /* rank 0 */
    int has_plans;         /* what follows is in use */
    cpa_step_plan plan;    /* of the step that runs */
    cpa_next_plan next;
    int prepared;         /* the next plan is, or has failed to be */
    cpa_error next_error; /* what happened to the next plan while the step ran */
    int64_t tokens;       /* computed or found in the cache */
    /* Rank 0: the last step waits for the reports of the other ranks, and its ends for what these say. */
    cpa_reports *reports; /* every rank of several */
    int unsettled;
    int go_on_due; /* the step behind it has begun: then the next plan may be made */
    cpa_request_list finished;
    cpa_nonfinite_row *found; /* rows that are not finite, one of each request and rank */
    int64_t n_found, cap_found;
} run;

static cpa_status settle_step(run *r, int wait, cpa_error *err);

/* While a step runs: moves the next plan along. A failure is reported when that plan is needed. */
static void poll_next_plan(void *ctx) {
    run *r = ctx;
    if (r->next_error.status == CPA_OK && settle_step(r, 0, &r->next_error) == CPA_OK)
        (void)cpa_next_plan_look(&r->next, 0, &r->next_error);
}

static cpa_worker_observer observer_of(const cpa_engine *engine) {
    return engine->verify ? cpa_verify_observer(engine->verify) : (cpa_worker_observer){NULL, NULL, NULL};
}

/* Prepares this rank for the next plan, which is there. */
static cpa_status prepare_next(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const int64_t running = engine->timeline.step;
    cpa_worker_observer observer = observer_of(engine);
    engine->timeline.step = (int64_t)r->next.plan.step;
    cpa_status status = cpa_worker_prepare(engine->worker, &r->next.plan, engine->verify ? &observer : NULL, err);
    engine->timeline.step = running;
    r->prepared = 1; /* what the check has noted belongs to the next step, whatever came of it */
    return status;
}

/* While the step that runs is enqueued: the next one is prepared behind it, unless what is done after the step still
 * needs the tables as they are. */
static void prepare_meanwhile(void *ctx) {
    run *r = ctx;
    const cpa_verify *verify = r->engine->verify;
    poll_next_plan(r);
    if (!r->next.there || r->prepared || r->next_error.status != CPA_OK) return;
    if (!verify || cpa_verify_is_idle(verify, &r->plan)) (void)prepare_next(r, &r->next_error);
}

/* The next plan becomes that of the step to run. */
static cpa_status begin_step(run *r, cpa_error *err) {
    if (r->next_error.status != CPA_OK) return cpa_fail(err, r->next_error.status, "%s", r->next_error.message);
    CPA_TRY(cpa_next_plan_look(&r->next, 0, err));
    /* Before this rank waits for work it tells all ends: there may be more to do then. */
    if (!r->next.there) CPA_TRY(settle_step(r, 1, err));
    CPA_TRY(cpa_next_plan_look(&r->next, 1, err));
    if (!r->prepared) CPA_TRY(prepare_next(r, err));
    cpa_next_plan_advance(&r->next, &r->plan);
    r->prepared = 0;
    for (int64_t i = 0; r->ahead && i < r->plan.n_chunks; i++)
        if (r->plan.chunks[i].flags & CPA_CHUNK_FIRST)
            cpa_inbox_note_start(r->engine->inbox, r->plan.chunks[i].request);
    r->engine->timeline.step = (int64_t)r->plan.step;
    r->go_on_due = r->ahead != NULL;
    return settle_step(r, 0, err);
}

/* Tells the end of a request, and forgets it. */
static void tell_end(run *r, cpa_engine_request *request) {
    cpa_engine *engine = r->engine;
    const cpa_finish_reason reason = request->reason;
    const double now = request->end_s;
    const double last = request->emitted > 0 ? request->token_s[request->emitted - 1] : now;
    const cpa_request_result result = {
        .id = request->scheduled.id,
        .prompt_tokens = request->scheduled.prompt_tokens,
        .output_tokens = request->emitted,
        .arrival_s = request->scheduled.arrival,
        .first_token_s = request->emitted > 0 ? request->token_s[0] : now,
        .finish_s = reason == CPA_FINISH_LENGTH || reason == CPA_FINISH_STOP ? last : now,
        .token_s = request->token_s,
        .tokens = request->tokens,
        .logprobs = request->logprobs,
        .reason = reason,
        .error = reason == CPA_FINISH_FAILED ? request->error : "",
    };
    switch (reason) {
        case CPA_FINISH_LENGTH:
        case CPA_FINISH_STOP:
            engine->stats.requests_finished++;
            engine->stats.prompt_tokens += result.prompt_tokens;
            break;
        case CPA_FINISH_CANCELLED: engine->stats.requests_cancelled++; break;
        case CPA_FINISH_EXPIRED: engine->stats.requests_expired++; break;
        case CPA_FINISH_FAILED: engine->stats.requests_failed++; break;
    }
    cpa_inbox_withdraw(engine->inbox, request);
    if (r->on_finish) r->on_finish(r->ctx, &result);
    cpa_inbox_release(engine->inbox, request);
}

/* Room for the tokens of a request, from its first one on; 0 without memory. */
static int open_tokens(cpa_engine_request *request) {
    const size_t n = (size_t)request->scheduled.output_tokens;
    if (request->token_s) return 1;
    request->tokens = malloc(n * sizeof *request->tokens);
    request->logprobs = malloc(n * sizeof *request->logprobs);
    if (request->tokens && request->logprobs) request->token_s = malloc(n * sizeof *request->token_s);
    if (request->token_s) return 1;
    free(request->logprobs);
    free(request->tokens);
    request->logprobs = NULL;
    request->tokens = NULL;
    return 0;
}

/* The last token of a request is there: its end is to be told. */
static void complete_request(run *r, cpa_engine_request *request, cpa_finish_reason reason, double now) {
    if (!cpa_inbox_complete(r->engine->inbox, request, reason)) return;
    request->end_s = now;
    cpa_request_append(&r->finished, request);
}

/* Rank 0: a token that a finished step emitted. */
static cpa_status record_token(run *r, const cpa_plan_chunk *chunk, cpa_drawn drawn, double now, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const int is_last = (chunk->flags & CPA_CHUNK_FINISHES) != 0;
    cpa_engine_request *request;
    cpa_token_meaning meaning;
    CPA_TRY(cpa_inbox_take_token(engine->inbox, chunk->request, drawn.id, is_last, &request, &meaning, err));
    if (meaning == CPA_TOKEN_UNWANTED) return CPA_OK;
    if (!open_tokens(request)) { /* its own fault */
        if (is_last) complete_request(r, request, CPA_FINISH_LENGTH, now);
        cpa_inbox_fail(engine->inbox, chunk->request, "no memory for its tokens");
        return CPA_OK;
    }
    const int64_t index = request->emitted++;
    request->token_s[index] = now;
    request->tokens[index] = drawn.id;
    request->logprobs[index] = drawn.logprob;
    engine->stats.output_tokens++;
    if (engine->options.on_token) engine->options.on_token(r->ctx, chunk->request, index, drawn.id, drawn.logprob);
    if (is_last) complete_request(r, request, meaning == CPA_TOKEN_STOPS ? CPA_FINISH_STOP : CPA_FINISH_LENGTH, now);
    return CPA_OK;
}

/* Rank 0: a request with a row that is not finite fails, and what it has computed is found by nobody. */
static cpa_status fail_request(run *r, const cpa_nonfinite_row *row, cpa_error *err) {
    char why[128];
    snprintf(why, sizeof why, "not finite: token %lld, layer %lld: its key, value or result has a NaN or an infinity",
             (long long)row->position, (long long)row->layer);
    CPA_TRY(cpa_inbox_spoil(r->engine->inbox, row->request, err));
    cpa_inbox_fail(r->engine->inbox, row->request, why);
    return CPA_OK;
}

/* The first layer goes first, and there the first token. */
static int compare_rows(const void *a, const void *b) {
    const cpa_nonfinite_row *x = a, *y = b;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

static cpa_status add_found(run *r, const cpa_nonfinite_row *rows, int64_t n, cpa_error *err) {
    if (!cpa_array_reserve(&r->found, &r->cap_found, r->n_found + n, sizeof *r->found))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for what is not finite in a step");
    if (n > 0) memcpy(r->found + r->n_found, rows, (size_t)n * sizeof *rows);
    r->n_found += n;
    return CPA_OK;
}

/* Rank 0: adds what the other ranks have found in the step to what this one has. */
static cpa_status take_reports(run *r, cpa_error *err) {
    for (int32_t rank = 1; rank < r->engine->control.size; rank++) {
        int64_t bytes;
        const void *rows = cpa_reports_of(r->reports, rank, &bytes);
        CPA_TRY(add_found(r, rows, bytes / (int64_t)sizeof *r->found, err));
    }
    if (r->n_found > 1) qsort(r->found, (size_t)r->n_found, sizeof *r->found, compare_rows);
    return CPA_OK;
}

/* Rank 0: once all ranks have told which requests are not finite in the last step, ends are told and the next plan may be
 * made. `wait`: waits for them. */
static cpa_status settle_step(run *r, int wait, cpa_error *err) {
    cpa_engine_request *request;
    int arrived = 1;
    if (r->unsettled) {
        if (r->reports) CPA_TRY(cpa_reports_receive(r->reports, wait, &arrived, err));
        if (!arrived) return CPA_OK;
        CPA_TRY(take_reports(r, err));
        for (int64_t i = 0; i < r->n_found; i++) CPA_TRY(fail_request(r, &r->found[i], err));
        r->unsettled = 0;
    }
    while ((request = cpa_request_take(&r->finished))) tell_end(r, request);
    if (r->go_on_due) cpa_plan_ahead_go_on(r->ahead);
    r->go_on_due = 0;
    return CPA_OK;
}

/* After a step: what is not finite on this rank is on its way to rank 0. */
static cpa_status report_step(run *r, cpa_error *err) {
    const cpa_nonfinite *found = &r->engine->worker->nonfinite;
    const int64_t n = found->n_last;
    if (!r->ahead) return cpa_reports_send(r->reports, found->last, n * (int64_t)sizeof *found->last, err);
    CPA_TRY(settle_step(r, 1, err)); /* the step before, if nobody has looked in the meantime */
    r->n_found = 0;
    r->unsettled = 1;
    return add_found(r, found->last, n, err);
}

/* Rank 0: notes the tokens that a finished step emitted, and tells which requests have ended. */
static cpa_status record_step(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    cpa_engine_request *ended;
    double now = cpa_clock_now() - r->start;
    for (int64_t i = 0, emission = 0; i < r->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &r->plan.chunks[i];
        if (!(chunk->flags & CPA_CHUNK_EMITS)) continue;
        CPA_TRY(record_token(r, chunk, cpa_worker_drawn(engine->worker, emission++), now, err));
    }
    while ((ended = cpa_inbox_next_ended(engine->inbox))) {
        ended->end_s = now;
        cpa_request_append(&r->finished, ended);
    }
    if (!r->unsettled || !r->reports) CPA_TRY(settle_step(r, 0, err));
    cpa_scheduler_stats scheduled;
    cpa_plan_ahead_stats(r->ahead, &scheduled);
    engine->stats.duration_s = now;
    cpa_engine_publish_stats(engine, &scheduled);
    if (r->on_progress) r->on_progress(r->ctx, r->tokens, engine->stats.requests_finished, now);
    return CPA_OK;
}

/* The planner's prediction for the step, all layers. What is decoded by pass-Q is exchanged together. */
static double predict_step(const run *r) {
    double seconds = 0, exchange = 0;
    for (int64_t i = 0; i < r->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &r->plan.chunks[i];
        int local = chunk->placement.kind == CPA_ON_RANK;
        const cpa_planner planner = local ? cpa_planner_on_rank(&r->engine->planner) : r->engine->planner;
        int decoded = chunk->flags & CPA_CHUNK_DECODE && chunk->algorithm == CPA_PASS_Q && planner.exchange_s > 0;
        seconds += decoded ? cpa_planner_predict_decode(&planner, chunk->start)
                           : cpa_planner_predict(&planner, chunk->algorithm, chunk->count, chunk->start);
        if (decoded) exchange = planner.exchange_s;
    }
    return (seconds + exchange) * r->engine->options.model.layers;
}

static double attention_seconds(const cpa_engine *engine) {
    cpa_context_stats stats;
    cpa_context_get_stats(engine->worker->context, &stats, sizeof stats);
    return stats.attend_s + stats.exposed_comm_s;
}

/* Rank 0 hears of blocks that came back damaged, in time for the plan after the next, which is not made before.
 * Collective. */
static cpa_status report_damage(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const cpa_step_plan *plan = &r->plan;
    if (plan->n_swap_ins == 0) return CPA_OK;
    uint64_t *damaged = engine->worker->damaged;
    CPA_TRY(cpa_control_sum_u64(&engine->control, damaged, (int32_t)plan->n_swap_ins, err));
    uint64_t last = 0;
    int reported = 0;
    for (int64_t i = 0; engine->control.rank == 0 && i < plan->n_swap_ins; i++) {
        /* The moves of a request are neighbours. */
        if (!damaged[i] || (reported && last == plan->swap_ins[i].request)) continue;
        last = plan->swap_ins[i].request;
        reported = 1;
        CPA_TRY(cpa_plan_ahead_report_damage(r->ahead, last, err));
    }
    return CPA_OK;
}

static int64_t count_tokens(const cpa_step_plan *plan) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) tokens += plan->chunks[i].count;
    return tokens;
}

static cpa_status check_step(run *r, cpa_error *err) {
    cpa_host_span span = cpa_spans_host_begin(CPA_SPAN_CHECK);
    cpa_status status = cpa_verify_step(r->engine->verify, &r->plan, err);
    cpa_spans_host_end(cpa_context_spans(r->engine->worker->context), span);
    return status;
}

/* Ends the run, where that was asked for, once a row of this step or of one before is not finite. Collective. */
static cpa_status fail_on_nonfinite(cpa_engine *engine, cpa_error *err) {
    const cpa_nonfinite *found = &engine->worker->nonfinite;
    cpa_status status = CPA_OK;
    if (!engine->options.fail_on_nonfinite) return CPA_OK;
    if (found->rows > 0)
        status = cpa_fail(err, CPA_CHECK_FAILED,
                          "not finite: request %llu, token %lld, layer %lld: its key, value or result has a NaN or an "
                          "infinity",
                          (unsigned long long)found->first.request, (long long)found->first.position,
                          (long long)found->first.layer);
    return cpa_control_agree(&engine->control, status, err);
}

static cpa_status run_step(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const int64_t replayed = engine->worker->graph_steps;
    double before = attention_seconds(engine), predicted = predict_step(r);
    int64_t tokens = count_tokens(&r->plan);
    r->tokens += r->plan.n_token_ids;
    cpa_worker_observer observer = observer_of(engine);
    CPA_TRY(cpa_worker_run(engine->worker, &r->plan, engine->verify ? &observer : NULL, err));
    CPA_TRY(report_damage(r, err));
    if (r->plan.n_chunks > 0) {
        engine->stats.steps++;
        engine->stats.computed_tokens += tokens;
        /* Where the next step is prepared there is nothing to check in this one. */
        if (engine->verify && !r->prepared) CPA_TRY(check_step(r, err));
        CPA_TRY(fail_on_nonfinite(engine, err));
        CPA_TRY(report_step(r, err));
    }
    double actual = attention_seconds(engine) - before;
    /* Of a replayed step nobody knows what of it was attention. */
    if (engine->worker->graph_steps > replayed) predicted = 0;
    engine->stats.predicted_attend_s += predicted;
    engine->stats.actual_attend_s += actual;
    if (engine->control.rank == 0) {
        cpa_log(CPA_LOG_DEBUG, "step %llu: %lld chunks, %lld tokens, attention predicted %.3f ms, took %.3f ms",
                (unsigned long long)r->plan.step, (long long)r->plan.n_chunks, (long long)tokens, predicted * 1e3,
                actual * 1e3);
        CPA_TRY(record_step(r, err));
    }
    return CPA_OK;
}

/* The way of plans to this rank, and what looks for them while a step runs. Collective. */
static cpa_status open_plans(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const cpa_plan_limits limits = {
        .cp_size = engine->control.size,
        .max_seqs = engine->options.max_num_seqs,
        .num_blocks = engine->options.num_blocks,
        .host_blocks = engine->host_blocks,
        .max_tokens = engine->options.max_num_batched_tokens,
    };
    cpa_step_plan_init(&r->plan);
    cpa_status status = cpa_next_plan_open(&r->next, &engine->control, r->ahead,
                                           cpa_context_spans(engine->worker->context), &limits, err);
    if (status == CPA_OK && engine->control.size > 1) status = cpa_reports_open(&engine->control, &r->reports, err);
    CPA_TRY(cpa_control_agree(&engine->control, status, err));
    engine->worker->stream->poll = poll_next_plan;
    engine->worker->stream->poll_ctx = r;
    cpa_worker_set_meanwhile(engine->worker, prepare_meanwhile, r);
    return CPA_OK;
}

static cpa_status close_plans(run *r, cpa_status status, cpa_error *err) {
    cpa_engine *engine = r->engine;
    cpa_error settled = {CPA_OK, ""};
    cpa_worker_set_meanwhile(engine->worker, NULL, NULL);
    engine->worker->stream->poll = NULL;
    if (status == CPA_OK) status = settle_step(r, 1, err);
    /* A failed check is known to every rank; any other failure leaves this one alone. */
    if (status == CPA_OK || status == CPA_CHECK_FAILED) {
        cpa_status outcome = cpa_next_plan_settle(&r->next, &settled);
        if (status == CPA_OK && outcome != CPA_OK) status = cpa_fail(err, outcome, "%s", settled.message);
    }
    cpa_reports_close(r->reports);
    free(r->found);
    cpa_next_plan_close(&r->next);
    cpa_step_plan_destroy(&r->plan);
    return status;
}

/* What is left undone makes it a run that was stopped, unless it came when the run was about to end by itself. */
static cpa_status count_unfinished(run *r, int stopped, cpa_error *err) {
    cpa_engine *engine = r->engine;
    cpa_status status = CPA_OK;
    const int64_t left = stopped && engine->inbox ? cpa_inbox_count(engine->inbox) : 0;
    if (left > 0) status = cpa_fail(err, CPA_STOPPED, "stopped with %lld requests unfinished", (long long)left);
    return cpa_control_agree(&engine->control, status, err);
}

/* Collective, as are the next three. */
static cpa_status begin_run(run *r) {
    cpa_engine *engine = r->engine;
    cpa_error *err = &engine->error;
    CPA_TRY(cpa_control_agree(&engine->control, CPA_OK, err));
    /* The same moment on every rank, whatever their clocks say; the clock of the engine goes on from run to run. */
    r->start = cpa_clock_now() - engine->stats.duration_s;
    engine->timeline.origin = r->start;
    cpa_status status = CPA_OK;
    if (engine->inbox) {
        cpa_inbox_begin_run(engine->inbox, r->start);
        status =
            cpa_plan_ahead_begin(engine->scheduler, engine->inbox, r->mode, r->start, &engine->stop, &r->ahead, err);
    }
    CPA_TRY(cpa_control_agree(&engine->control, status, err));
    r->has_plans = 1;
    return open_plans(r, err);
}

/* Sets *last after the last step. */
static cpa_status run_next_step(run *r, int *last) {
    cpa_error *err = &r->engine->error;
    CPA_TRY(begin_step(r, err));
    CPA_TRY(run_step(r, err));
    *last = (r->plan.flags & CPA_PLAN_STOP) != 0;
    return CPA_OK;
}

/* `status` is that of what has been done since begin_run. */
static cpa_status end_run(run *r, cpa_status status) {
    cpa_engine *engine = r->engine;
    cpa_error *err = &engine->error;
    if (r->has_plans) status = close_plans(r, status, err);
    if (status != CPA_OK && status != CPA_CHECK_FAILED && r->has_plans)
        cpa_comm_abort(engine->control.comm, status, err->message);
    cpa_plan_ahead_end(r->ahead);
    const int stopped = atomic_exchange(&engine->stop, 0);
    if (r->start > 0) engine->stats.duration_s = cpa_clock_now() - r->start;
    cpa_error collected = {CPA_OK, ""};
    cpa_status totals = CPA_OK;
    if (status == CPA_OK || status == CPA_CHECK_FAILED) totals = cpa_engine_collect_stats(engine, &collected);
    cpa_engine_publish_stats(engine, NULL);
    if (totals != CPA_OK && status == CPA_OK) {
        *err = collected;
        status = totals;
    }
    if (status == CPA_OK) status = count_unfinished(r, stopped, err);
    if (engine->inbox) cpa_inbox_end_run(engine->inbox, engine->stats.duration_s);
    return status;
}

/* Whether this thread may run the engine now; it must leave it after. */
static cpa_status enter(cpa_engine *engine) {
    if (!engine || atomic_exchange(&engine->running, 1)) return CPA_INVALID;
    return CPA_OK;
}

static cpa_status leave(cpa_engine *engine, cpa_status status) {
    status = cpa_engine_outcome(engine, status, &engine->error);
    atomic_store(&engine->running, 0);
    return status;
}

static cpa_status run_until(cpa_engine *engine, cpa_run_mode mode, cpa_finish_fn on_finish, cpa_progress_fn on_progress,
                            void *ctx) {
    CPA_TRY(enter(engine));
    if (engine->stepping)
        return leave(engine, cpa_fail(&engine->error, CPA_INVALID, "a run by cpa_engine_step has not ended"));
    run r = {.engine = engine, .on_finish = on_finish, .on_progress = on_progress, .ctx = ctx, .mode = mode};
    int last = 0;
    cpa_status status = begin_run(&r);
    while (status == CPA_OK && !last) status = run_next_step(&r, &last);
    return leave(engine, end_run(&r, status));
}

cpa_status cpa_engine_run(cpa_engine *engine, cpa_finish_fn on_finish, cpa_progress_fn on_progress, void *ctx) {
    return run_until(engine, CPA_RUN_UNTIL_EMPTY, on_finish, on_progress, ctx);
}

cpa_status cpa_engine_serve(cpa_engine *engine, cpa_finish_fn on_finish, cpa_progress_fn on_progress, void *ctx) {
    return run_until(engine, CPA_RUN_SERVE, on_finish, on_progress, ctx);
}

static cpa_status begin_stepping(cpa_engine *engine) {
    run *r = calloc(1, sizeof *r);
    cpa_status status = r ? CPA_OK : cpa_fail(&engine->error, CPA_NO_MEMORY, "no memory to run the engine");
    status = cpa_control_agree(&engine->control, status, &engine->error);
    if (status != CPA_OK) {
        free(r);
        return status;
    }
    *r = (run){.engine = engine, .mode = CPA_RUN_STEPS};
    engine->stepping = r;
    return begin_run(r);
}

static cpa_status end_stepping(cpa_engine *engine, cpa_status status) {
    run *r = engine->stepping;
    if (r) status = end_run(r, status);
    engine->stepping = NULL;
    free(r);
    return status;
}

cpa_status cpa_engine_step(cpa_engine *engine, cpa_finish_fn on_finish, cpa_progress_fn on_progress, void *ctx,
                           cpa_step_result *result) {
    if (!result) return CPA_INVALID;
    CPA_TRY(enter(engine));
    int last = 0;
    cpa_status status = engine->stepping ? CPA_OK : begin_stepping(engine);
    run *r = engine->stepping;
    if (status == CPA_OK) {
        r->on_finish = on_finish;
        r->on_progress = on_progress;
        r->ctx = ctx;
        status = run_next_step(r, &last);
    }
    if (status == CPA_OK) *result = last ? CPA_STEP_LAST : r->plan.n_chunks > 0 ? CPA_STEP_RAN : CPA_STEP_IDLE;
    if (status != CPA_OK || last) status = end_stepping(engine, status);
    return leave(engine, status);
}

void cpa_engine_end_steps(cpa_engine *engine) {
    run *r = engine->stepping;
    if (!r) return;
    r->on_finish = NULL;
    r->on_progress = NULL;
    (void)end_stepping(engine, CPA_OK);
}
