/* Runs an engine: every rank executes plan after plan, and gets the next one while a step runs. */
#include "src/engine/engine_run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "src/check/verify_step.h"
#include "src/context/context.h"
#include "src/engine/engine_requests.h"
#include "src/engine/engine_stats.h"
#include "src/engine/run_record.h"
#include "src/engine/step_masks.h"
#include "src/worker/worker_disk.h"
#include "src/worker/worker_transfer.h"

/* While a step runs: moves the next plan along. A failure is reported when that plan is needed. */
static void look_for_plan(void *ctx) {
    cpa_run *r = ctx;
    if (r->next_error.status == CPA_OK && cpa_run_settle(r, 0, &r->next_error) == CPA_OK)
        (void)cpa_next_plan_look(&r->next, 0, &r->next_error);
}

static cpa_worker_observer observer_of(const cpa_engine *engine) {
    return engine->verify ? cpa_verify_observer(engine->verify) : (cpa_worker_observer){NULL, NULL, NULL};
}

/* Prepares this rank for the next plan, which is there. */
static cpa_status prepare_next(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const int64_t running = engine->timeline.step;
    cpa_worker_observer observer = observer_of(engine);
    engine->timeline.step = (int64_t)r->next.plan.step;
    cpa_status status = cpa_worker_prepare(engine->worker, &r->next.plan, engine->verify ? &observer : NULL, err);
    engine->timeline.step = running;
    r->prepared = 1; /* what the check has noted belongs to the next step, whatever came of it */
    return status;
}

/* While the device works off a step: the next one is prepared after it, unless what is done after the step still needs
 * the tables as they are. */
static void prepare_ahead(void *ctx) {
    cpa_run *r = ctx;
    const cpa_verify *verify = r->engine->verify;
    look_for_plan(r);
    if (!r->next.there || r->prepared || r->next_error.status != CPA_OK) return;
    if (!verify || cpa_verify_is_idle(verify)) (void)prepare_next(r, &r->next_error);
}

/* Rank 0: a step begins, with which requests start, or give way. */
static void begin_requests(cpa_run *r) {
    cpa_engine *engine = r->engine;
    const double now = cpa_clock_now() - r->start;
    cpa_request_spans_begin_step(engine->request_spans, engine->inbox, &r->plan, now);
    for (int64_t i = 0; i < r->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &r->plan.chunks[i];
        if (!(chunk->flags & CPA_CHUNK_FIRST)) continue;
        cpa_engine_request *request = cpa_inbox_note_start(engine->inbox, chunk->request, now);
        if (request) cpa_request_spans_start(engine->request_spans, request, chunk, now);
    }
}

/* Waits until the next plan is there. */
static cpa_status await_plan(cpa_run *r, cpa_error *err) {
    const double begin = cpa_clock_now();
    CPA_TRY(cpa_next_plan_look(&r->next, 1, err));
    if (r->engine->verify) cpa_verify_pause(r->engine->verify, cpa_clock_now() - begin);
    return CPA_OK;
}

/* Whether what the step draws decides which chunks the next one has: then that is planned behind it. */
static int awaits_tokens(const cpa_run *r) {
    if (r->engine->options.drafter == CPA_DRAFT_NONE) return 0;
    for (int64_t i = 0; i < r->plan.n_chunks; i++)
        if ((r->plan.chunks[i].flags & (CPA_CHUNK_EMITS | CPA_CHUNK_FINISHES)) == CPA_CHUNK_EMITS) return 1;
    return 0;
}

/* The next plan becomes that of the step to run. */
static cpa_status begin_step(cpa_run *r, cpa_error *err) {
    if (r->next_error.status != CPA_OK) return cpa_fail(err, r->next_error.status, "%s", r->next_error.message);
    CPA_TRY(cpa_next_plan_look(&r->next, 0, err));
    /* Before this rank waits for work it tells all ends: there may be more to do then. */
    if (!r->next.there) CPA_TRY(cpa_run_settle(r, 1, err));
    CPA_TRY(await_plan(r, err));
    if (!r->prepared) CPA_TRY(prepare_next(r, err));
    cpa_next_plan_advance(&r->next, &r->plan);
    r->prepared = 0;
    if (r->ahead) begin_requests(r);
    r->engine->timeline.step = (int64_t)r->plan.step;
    r->go_on_due = r->ahead && !awaits_tokens(r);
    return cpa_run_settle(r, 0, err);
}

/* The planner's prediction for the step, all layers. What is decoded by pass-Q is exchanged together. */
static double predict_step(const cpa_run *r) {
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
static cpa_status report_damage(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const cpa_step_plan *plan = &r->plan;
    if (plan->n_swap_ins == 0) return CPA_OK;
    uint64_t *damaged = engine->worker->damaged;
    CPA_TRY(cpa_control_sum_u64(&engine->control, damaged, (int32_t)plan->n_swap_ins, err));
    for (int64_t i = 0; r->ahead && i < plan->n_swap_ins; i++)
        if (damaged[i]) CPA_TRY(cpa_plan_ahead_report_damage(r->ahead, &plan->swap_ins[i], err));
    return CPA_OK;
}

/* The same of blocks that did not come from disk, and whether a rank writes no more there. Collective. */
static cpa_status report_disk(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const cpa_step_plan *plan = &r->plan;
    if (plan->n_loads + plan->n_stores == 0) return CPA_OK;
    cpa_worker_disk_finish(engine->worker, plan);
    uint64_t *lost = engine->worker->lost;
    CPA_TRY(cpa_control_sum_u64(&engine->control, lost, (int32_t)plan->n_loads + 1, err));
    for (int64_t i = 0; r->ahead && i < plan->n_loads; i++)
        if (lost[i]) CPA_TRY(cpa_plan_ahead_report_load(r->ahead, &plan->loads[i], err));
    return r->ahead && lost[plan->n_loads] ? cpa_plan_ahead_report_full(r->ahead, err) : CPA_OK;
}

/* The same of imports of which not all is there, on whatever rank. Collective. */
static cpa_status report_imports(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const cpa_step_plan *plan = &r->plan;
    for (int64_t i = 0; i < plan->n_transfers; i++) {
        if (!plan->transfers[i].imports) continue;
        double missing = (double)(plan->transfers[i].tokens - engine->worker->arrived[i]);
        CPA_TRY(cpa_control_max(&engine->control, &missing, 1, err));
        if (missing > 0 && r->ahead)
            CPA_TRY(cpa_plan_ahead_report_import(r->ahead, plan->transfers[i].request,
                                                 plan->transfers[i].tokens - (int64_t)missing, err));
    }
    return CPA_OK;
}

/* Prompts go to the store where no rank has found a row of theirs that is not finite: what others have computed of them
 * comes from that. Counted are the first tokens that every rank has put. Collective. */
static cpa_status export_prompts(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    for (int64_t i = 0; i < r->plan.n_transfers; i++) {
        const cpa_plan_transfer *of = &r->plan.transfers[i];
        if (of->imports) continue;
        uint64_t spoiled = (uint64_t)cpa_worker_is_spoiled(engine->worker, &r->plan, of);
        int64_t put;
        CPA_TRY(cpa_control_sum_u64(&engine->control, &spoiled, 1, err));
        if (spoiled > 0) continue;
        CPA_TRY(cpa_worker_export(engine->worker, &r->plan, of, &put, err));
        double missing = (double)(of->tokens - put);
        CPA_TRY(cpa_control_max(&engine->control, &missing, 1, err));
        engine->stats.exported_tokens += of->tokens - (int64_t)missing;
    }
    return CPA_OK;
}

static int64_t count_tokens(const cpa_step_plan *plan) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) tokens += plan->chunks[i].count;
    return tokens;
}

/* Computed or found in the cache, of those that are no guesses. */
static int64_t count_known(const cpa_step_plan *plan) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const int again = (chunk->flags & (CPA_CHUNK_DECODE | CPA_CHUNK_FIRST)) == CPA_CHUNK_DECODE;
        tokens += again ? 1 : cpa_plan_chunk_tokens(chunk) - chunk->drafts;
    }
    return tokens;
}

static cpa_status check_step(cpa_run *r, cpa_error *err) {
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

static cpa_status run_step(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const int64_t replayed = engine->worker->graph_steps;
    double before = attention_seconds(engine), predicted = predict_step(r);
    const double begin_s = cpa_clock_now() - r->start;
    int64_t tokens = count_tokens(&r->plan);
    r->tokens += count_known(&r->plan);
    cpa_worker_observer observer = observer_of(engine);
    CPA_TRY(cpa_worker_run(engine->worker, &r->plan, engine->verify ? &observer : NULL, err));
    CPA_TRY(report_damage(r, err));
    CPA_TRY(report_disk(r, err));
    CPA_TRY(report_imports(r, err));
    CPA_TRY(export_prompts(r, err));
    if (r->plan.n_chunks > 0) {
        engine->stats.steps++;
        engine->stats.computed_tokens += tokens;
        /* Where the next step is prepared there is nothing to check in this one. */
        if (engine->verify && !r->prepared) CPA_TRY(check_step(r, err));
        CPA_TRY(fail_on_nonfinite(engine, err));
        engine->step_begin_s = begin_s;
        engine->step_end_s = cpa_clock_now() - r->start;
        CPA_TRY(cpa_run_report(r, err));
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
        r->go_on_due |= awaits_tokens(r);
        CPA_TRY(cpa_run_record(r, err));
    }
    return CPA_OK;
}

/* The way of plans to this rank, and what looks for them while a step runs. Collective. */
static cpa_status open_plans(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    const cpa_plan_limits limits = {
        .cp_size = engine->control.size,
        .max_seqs = engine->options.max_num_seqs,
        .groups = engine->groups,
        .max_tokens = engine->options.max_num_batched_tokens,
    };
    cpa_step_plan_init(&r->plan);
    CPA_TRY(cpa_control_agree(&engine->control, cpa_step_masks_create(engine, &r->masks, err), err));
    cpa_worker_set_token_masks(engine->worker, cpa_step_masks_give, r->masks);
    cpa_status status = cpa_next_plan_open(&r->next, &engine->control, r->ahead,
                                           cpa_context_spans(engine->worker->context), &limits, err);
    if (status == CPA_OK && engine->control.size > 1) status = cpa_reports_open(&engine->control, &r->reports, err);
    CPA_TRY(cpa_control_agree(&engine->control, status, err));
    r->hook = (cpa_progress_hook){.look = look_for_plan, .idle = prepare_ahead, .ctx = r};
    cpa_progress_add(cpa_worker_progress(engine->worker), &r->hook);
    return CPA_OK;
}

/* A failed check leaves the reports of the step before unread, where they had not come yet: who has the communicator
 * next would take them for its own. */
static void drop_reports(cpa_run *r) {
    cpa_error ignored = {CPA_OK, ""};
    int arrived;
    if (r->unsettled && r->reports && r->next_error.status == CPA_OK)
        (void)cpa_reports_receive(r->reports, 1, &arrived, &ignored);
}

static cpa_status close_plans(cpa_run *r, cpa_status status, cpa_error *err) {
    cpa_engine *engine = r->engine;
    cpa_error settled = {CPA_OK, ""};
    cpa_progress_remove(&r->hook);
    cpa_worker_set_token_masks(engine->worker, NULL, NULL);
    if (status == CPA_OK) status = cpa_run_settle(r, 1, err);
    /* A failed check is known to every rank; any other failure leaves this one alone. */
    if (status == CPA_OK || status == CPA_CHECK_FAILED) {
        drop_reports(r);
        cpa_status outcome = cpa_next_plan_settle(&r->next, &settled);
        if (status == CPA_OK && outcome != CPA_OK) status = cpa_fail(err, outcome, "%s", settled.message);
    }
    cpa_reports_close(r->reports);
    free(r->found);
    free(r->report);
    cpa_step_masks_destroy(r->masks);
    cpa_next_plan_close(&r->next);
    cpa_step_plan_destroy(&r->plan);
    return status;
}

/* What is left undone makes it a run that was stopped, unless it came when the run was about to end by itself. */
static cpa_status count_unfinished(cpa_run *r, int stopped, cpa_error *err) {
    cpa_engine *engine = r->engine;
    cpa_status status = CPA_OK;
    const int64_t left = stopped && engine->inbox ? cpa_inbox_count(engine->inbox) : 0;
    if (left > 0) status = cpa_fail(err, CPA_STOPPED, "stopped with %lld requests unfinished", (long long)left);
    return cpa_control_agree(&engine->control, status, err);
}

/* Collective, as are the next three. */
static cpa_status begin_run(cpa_run *r) {
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
static cpa_status run_next_step(cpa_run *r, int *last) {
    cpa_error *err = &r->engine->error;
    CPA_TRY(begin_step(r, err));
    CPA_TRY(run_step(r, err));
    *last = (r->plan.flags & CPA_PLAN_STOP) != 0;
    return CPA_OK;
}

/* `status` is that of what has been done since begin_run. */
static cpa_status end_run(cpa_run *r, cpa_status status) {
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
    if (engine->inbox) {
        cpa_request_spans_end_run(engine->request_spans, engine->inbox, engine->stats.duration_s);
        cpa_inbox_end_run(engine->inbox, engine->stats.duration_s);
    }
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
    cpa_run r = {.engine = engine, .on_finish = on_finish, .on_progress = on_progress, .ctx = ctx, .mode = mode};
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
    cpa_run *r = calloc(1, sizeof *r);
    cpa_status status = r ? CPA_OK : cpa_fail(&engine->error, CPA_NO_MEMORY, "no memory to run the engine");
    status = cpa_control_agree(&engine->control, status, &engine->error);
    if (status != CPA_OK) {
        free(r);
        return status;
    }
    *r = (cpa_run){.engine = engine, .mode = CPA_RUN_STEPS};
    engine->stepping = r;
    return begin_run(r);
}

static cpa_status end_stepping(cpa_engine *engine, cpa_status status) {
    cpa_run *r = engine->stepping;
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
    cpa_run *r = engine->stepping;
    if (status == CPA_OK) {
        if (engine->inbox) cpa_inbox_run_here(engine->inbox);
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
    cpa_run *r = engine->stepping;
    if (!r) return;
    r->on_finish = NULL;
    r->on_progress = NULL;
    (void)end_stepping(engine, CPA_OK);
}
