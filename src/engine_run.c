/* Runs an engine: rank 0 takes plan after plan from the planning thread and broadcasts it; every rank executes it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "src/context_internal.h"
#include "src/engine_internal.h"
#include "src/plan_ahead.h"

/* One call of cpa_engine_run. */
typedef struct run {
    cpa_engine *engine;
    cpa_finish_fn on_finish;
    cpa_progress_fn on_progress;
    void *ctx;
    double start;
    cpa_plan_ahead *ahead; /* rank 0 */
    cpa_step_plan plan;
    int64_t tokens;  /* computed or found in the cache */
    uint8_t *buffer; /* ranks > 0: the encoded plan */
    int64_t capacity;
} run;

/* Every rank gets the next plan in run->plan. The length travels first; -1 says that rank 0 failed to plan. */
static cpa_status receive_plan(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    cpa_control *control = &engine->control;
    const uint8_t *bytes = NULL;
    int64_t n_bytes = -1;
    cpa_spans *spans = &engine->worker->context->spans;
    cpa_host_span span = cpa_spans_host_begin(CPA_SPAN_RECEIVE);
    cpa_status planned = control->rank == 0 ? cpa_plan_ahead_take(r->ahead, &bytes, &n_bytes, err) : CPA_OK;
    CPA_TRY(cpa_control_bcast(control, &n_bytes, sizeof n_bytes, 0, err));
    if (planned != CPA_OK) return planned;
    if (n_bytes < 0) return cpa_fail(err, CPA_INTERNAL, "rank 0 could not plan the next step");
    if (control->rank != 0) {
        if (n_bytes > r->capacity) {
            uint8_t *grown = realloc(r->buffer, (size_t)n_bytes);
            if (!grown) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a plan of %lld bytes", (long long)n_bytes);
            r->buffer = grown;
            r->capacity = n_bytes;
        }
        bytes = r->buffer;
    }
    void *data = control->rank == 0 ? (void *)(uintptr_t)bytes : r->buffer;
    CPA_TRY(cpa_control_bcast(control, data, n_bytes, 0, err));
    cpa_plan_limits limits = {
        .cp_size = control->size,
        .max_seqs = engine->options.max_num_seqs,
        .num_blocks = engine->options.num_blocks,
        .host_blocks = engine->host_blocks,
        .max_tokens = engine->options.max_num_batched_tokens,
    };
    CPA_TRY(cpa_step_plan_decode(bytes, n_bytes, &limits, &r->plan, err));
    engine->timeline.step = (int64_t)r->plan.step;
    cpa_spans_host_end(spans, span);
    if (spans->timeline && r->ahead) {
        double begin, seconds;
        cpa_plan_ahead_times(r->ahead, &begin, &seconds);
        cpa_timeline_add(spans->timeline, CPA_SPAN_SCHEDULE, -1, 0, begin, seconds);
    }
    return CPA_OK;
}

static void finish_request(run *r, cpa_engine_request *request) {
    cpa_engine *engine = r->engine;
    cpa_request_result result = {
        .id = request->id,
        .prompt_tokens = request->prompt_tokens,
        .output_tokens = request->output_tokens,
        .arrival_s = request->arrival_s,
        .first_token_s = request->token_s[0],
        .finish_s = request->token_s[request->output_tokens - 1],
        .token_s = request->token_s,
    };
    engine->stats.requests_finished++;
    engine->stats.prompt_tokens += request->prompt_tokens;
    if (r->on_finish) r->on_finish(r->ctx, &result);
    HASH_DEL(engine->requests, request);
    free(request->token_s);
    free(request);
}

/* Rank 0: notes the tokens that a finished step emitted. */
static cpa_status record_step(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    double now = cpa_clock_now() - r->start;
    for (int64_t i = 0; i < r->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &r->plan.chunks[i];
        if (!(chunk->flags & CPA_CHUNK_EMITS)) continue;
        cpa_engine_request *request = NULL;
        HASH_FIND(hh, engine->requests, &chunk->request, sizeof chunk->request, request);
        if (!request || request->emitted == request->output_tokens) {
            return cpa_fail(err, CPA_INTERNAL, "step %llu emits a token of request %llu, which expects none",
                            (unsigned long long)r->plan.step, (unsigned long long)chunk->request);
        }
        if (!request->token_s) request->token_s = malloc((size_t)request->output_tokens * sizeof *request->token_s);
        if (!request->token_s) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the times of a request");
        request->token_s[request->emitted++] = now;
        engine->stats.output_tokens++;
        if (chunk->flags & CPA_CHUNK_FINISHES) finish_request(r, request);
    }
    if (r->on_progress) {
        r->on_progress(r->ctx, r->tokens, engine->stats.requests_finished, now);
    }
    return CPA_OK;
}

/* The planner's prediction for the step, all layers. */
static double predict_step(const run *r) {
    double seconds = 0;
    for (int64_t i = 0; i < r->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &r->plan.chunks[i];
        int whole = cpa_owner_is_whole(r->engine->worker->options.map, chunk->phase);
        const cpa_planner planner = whole ? cpa_planner_of_whole(&r->engine->planner) : r->engine->planner;
        seconds += cpa_planner_predict(&planner, chunk->algorithm, chunk->count, chunk->start);
    }
    return seconds * r->engine->options.model.layers;
}

static double attention_seconds(const cpa_engine *engine) {
    cpa_context_stats stats;
    cpa_context_get_stats(engine->worker->context, &stats);
    return stats.attend_s + stats.exposed_comm_s;
}

/* Rank 0 hears of blocks that came back damaged, in time for the plan after the next. Collective. */
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
    cpa_spans_host_end(&r->engine->worker->context->spans, span);
    return status;
}

static cpa_status run_step(run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    double before = attention_seconds(engine), predicted = predict_step(r);
    int64_t tokens = count_tokens(&r->plan);
    r->tokens += r->plan.n_token_ids;
    cpa_worker_observer observer = {NULL, NULL, NULL};
    if (engine->verify) observer = cpa_verify_observer(engine->verify);
    CPA_TRY(cpa_worker_run(engine->worker, &r->plan, engine->verify ? &observer : NULL, err));
    CPA_TRY(report_damage(r, err));
    if (r->plan.n_chunks > 0) {
        engine->stats.steps++;
        engine->stats.computed_tokens += tokens;
        if (engine->verify) CPA_TRY(check_step(r, err));
    }
    double actual = attention_seconds(engine) - before;
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

static cpa_status run_steps(run *r, cpa_error *err) {
    do {
        CPA_TRY(receive_plan(r, err));
        CPA_TRY(run_step(r, err));
    } while (!(r->plan.flags & CPA_PLAN_STOP));
    return CPA_OK;
}

void cpa_engine_take_stats(const cpa_scheduler_stats *scheduled, cpa_engine_stats *s) {
    s->kv_peak = scheduled->peak_blocks;
    s->preemptions = scheduled->preemptions;
    s->prefix_queries = scheduled->prefix_queries;
    s->prefix_hits = scheduled->prefix_hits;
    s->evictions = scheduled->evictions;
    s->swapped_out = scheduled->swapped_out;
    s->swapped_in = scheduled->swapped_in;
    s->swap_failures = scheduled->swap_failures;
    s->cow_copies = scheduled->cow_copies;
    s->whole = scheduled->whole;
}

/* What the scheduler knows, on rank 0. */
static void collect_scheduler_stats(cpa_engine *engine) {
    cpa_engine_stats *s = &engine->stats;
    cpa_scheduler_stats scheduled;
    cpa_scheduler_get_stats(engine->scheduler, &scheduled);
    cpa_engine_take_stats(&scheduled, s);
    size_t used = 0;
    s->choices[0] = 0;
    for (int algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        for (int reason = 0; reason < CPA_REASON_COUNT; reason++) {
            int64_t chunks = scheduled.chunks[algorithm][reason];
            if (chunks == 0 || used >= sizeof s->choices) continue;
            used += (size_t)snprintf(s->choices + used, sizeof s->choices - used, "%s%s %lld (%s)", used ? ", " : "",
                                     cpa_algorithm_name((cpa_algorithm)algorithm), (long long)chunks,
                                     cpa_planner_reason_name((cpa_planner_reason)reason));
        }
    }
}

/* Totals over the ranks; collective. */
static cpa_status collect_stats(cpa_engine *engine, cpa_error *err) {
    cpa_control *control = &engine->control;
    cpa_context_stats context;
    cpa_context_get_stats(engine->worker->context, &context);
    cpa_verify_stats verify = {0};
    if (engine->verify) cpa_verify_get_stats(engine->verify, &verify);
    cpa_engine_stats *s = &engine->stats;
    double most[] = {context.exposed_comm_s, context.attend_s,   (double)context.staging_bytes,
                     verify.max_error,       s->actual_attend_s, verify.seconds};
    double attend_sum = context.attend_s;
    uint64_t sums[] = {(uint64_t)context.bytes_sent, verify.rows, verify.violations, 0};
    CPA_TRY(cpa_worker_digest(engine->worker, &sums[3], err));
    CPA_TRY(cpa_control_max(control, most, sizeof most / sizeof most[0], err));
    CPA_TRY(cpa_control_sum(control, &attend_sum, 1, err));
    CPA_TRY(cpa_control_sum_u64(control, sums, 4, err));
    s->graph_steps = engine->worker->graph_steps;
    s->chunks_pass_kv = context.chunks_pass_kv;
    s->chunks_pass_q = context.chunks_pass_q;
    s->exposed_comm_s = most[0];
    s->imbalance = attend_sum > 0 ? most[1] * control->size / attend_sum : 1;
    s->staging_bytes = (int64_t)most[2];
    s->staging_bound = context.staging_bound;
    s->verify_max_error = most[3];
    s->actual_attend_s = most[4];
    s->verify_s = most[5];
    s->bytes_sent = (int64_t)sums[0];
    s->verify_rows = (int64_t)sums[1];
    s->verify_violations = (int64_t)sums[2];
    s->output_digest = sums[3];
    s->planner_flops = engine->planner.flops;
    s->planner_bandwidth = engine->planner.bandwidth;
    s->planner_memory_bandwidth = engine->planner.memory_bandwidth;
    s->planner_exchange_s = engine->planner.exchange_s;
    s->overlap_tokens = cpa_planner_overlap_tokens(&engine->planner);
    s->kv_blocks = engine->options.num_blocks;
    if (engine->scheduler) collect_scheduler_stats(engine);
    return cpa_control_bcast(control, s, sizeof *s, 0, err);
}

cpa_status cpa_engine_run(cpa_engine *engine, cpa_finish_fn on_finish, cpa_progress_fn on_progress, void *ctx) {
    cpa_error *err = &engine->error;
    run r = {.engine = engine, .on_finish = on_finish, .on_progress = on_progress, .ctx = ctx};
    cpa_step_plan_init(&r.plan);
    cpa_status status = cpa_control_agree(&engine->control, CPA_OK, err);
    r.start = cpa_clock_now(); /* the same moment on every rank, whatever their clocks say */
    engine->timeline.origin = r.start;
    if (status == CPA_OK && engine->control.rank == 0) {
        status = cpa_plan_ahead_begin(engine->scheduler, r.start, &engine->stop, &r.ahead, err);
    }
    status = cpa_control_agree(&engine->control, status, err);
    if (status == CPA_OK) status = run_steps(&r, err);
    cpa_plan_ahead_end(r.ahead);
    engine->stats.duration_s = cpa_clock_now() - r.start;
    free(r.buffer);
    cpa_step_plan_destroy(&r.plan);
    /* A failed check is known to every rank; any other failure leaves this one alone. */
    if (status != CPA_OK && status != CPA_CHECK_FAILED) return status;
    cpa_error collected = {CPA_OK, ""};
    cpa_status totals = collect_stats(engine, &collected);
    if (totals != CPA_OK && status == CPA_OK) {
        *err = collected;
        return totals;
    }
    if (status != CPA_OK) return status;
    if (engine->control.rank == 0 && HASH_COUNT(engine->requests) > 0) {
        status = cpa_fail(err, CPA_STOPPED, "stopped with %u requests unfinished", HASH_COUNT(engine->requests));
    }
    return cpa_control_agree(&engine->control, status, err);
}
