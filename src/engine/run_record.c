#include "src/engine/run_record.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "src/engine/engine_stats.h"
#include "src/worker/worker_drafts.h"
#include "src/worker/worker_tokens.h"

/* Tells the end of a request, and forgets it. */
static void tell_end(cpa_run *r, cpa_engine_request *request) {
    cpa_engine *engine = r->engine;
    const cpa_finish_reason reason = request->reason;
    const double now = request->end_s;
    const double last = request->emitted > 0 ? request->token_s[request->emitted - 1] : now;
    const double finish_s = reason == CPA_FINISH_LENGTH || reason == CPA_FINISH_STOP ? last : now;
    const cpa_request_result result = {
        .id = request->scheduled.id,
        .prompt_tokens = request->scheduled.prompt_tokens,
        .output_tokens = request->emitted,
        .arrival_s = request->scheduled.arrival,
        .first_token_s = request->emitted > 0 ? request->token_s[0] : now,
        .finish_s = finish_s,
        .scheduled_s = request->has_run ? request->scheduled_s : finish_s,
        .token_s = request->token_s,
        .tokens = request->tokens,
        .logprobs = request->logprobs,
        .ranks = request->ranks,
        .prompt_ranks = request->ranked == request->scheduled.prompt_tokens ? request->prompt_ranks : NULL,
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
    cpa_request_spans_end(engine->request_spans, request, finish_s);
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
    if (request->scheduled.sampling.top_logprobs > 0) request->ranks = malloc(n * sizeof *request->ranks);
    if (request->tokens && request->logprobs && (request->ranks || request->scheduled.sampling.top_logprobs == 0))
        request->token_s = malloc(n * sizeof *request->token_s);
    if (request->token_s) return 1;
    free(request->ranks);
    free(request->logprobs);
    free(request->tokens);
    request->ranks = NULL;
    request->logprobs = NULL;
    request->tokens = NULL;
    return 0;
}

/* What the logits say of an output token, where the request asks for that. */
static void record_ranks(cpa_run *r, const cpa_engine_request *request, int64_t index, const cpa_token_ranks *ranks) {
    if (!request->ranks) return;
    request->ranks[index] = *ranks;
    if (r->engine->options.on_ranks)
        r->engine->options.on_ranks(r->ctx, request->scheduled.id, request->scheduled.prompt_tokens + index, ranks);
}

/* Rank 0: what a scored row of a finished step, entry `at` of what it yields, says of the next token of the prompt.
 * Computed again after a preemption, it is told once. */
static void record_scored(cpa_run *r, int64_t at) {
    cpa_engine *engine = r->engine;
    const cpa_worker_emission *e = &engine->worker->ran->emissions[at];
    const cpa_token_ranks *ranks = cpa_worker_ranks(engine->worker, at);
    cpa_engine_request *request = cpa_inbox_find_live(engine->inbox, e->request);
    if (!request || e->position < request->ranked) return;
    if (!request->prompt_ranks) {
        const size_t n = (size_t)request->scheduled.prompt_tokens;
        request->prompt_ranks = calloc(n, sizeof *request->prompt_ranks);
        request->ranked = 1;
    }
    if (!request->prompt_ranks || ranks->logprob != ranks->logprob) {
        cpa_inbox_fail(engine->inbox, e->request,
                       request->prompt_ranks ? "not finite: the logits of its prompt have a NaN or an infinity"
                                             : "no memory for the log-probabilities of its prompt");
        return;
    }
    request->prompt_ranks[request->ranked++] = *ranks;
    if (engine->options.on_ranks) engine->options.on_ranks(r->ctx, e->request, e->position, ranks);
}

/* The last token of a request is there: its end is to be told. */
static void complete_request(cpa_run *r, cpa_engine_request *request, cpa_finish_reason reason, double now) {
    if (!cpa_inbox_complete(r->engine->inbox, request, reason)) return;
    request->end_s = now;
    cpa_request_append(&r->finished, request);
}

/* Rank 0: a token that a finished step emitted, its emission `emission`, for `position` of the request's. */
static cpa_status record_token(cpa_run *r, const cpa_plan_chunk *chunk, int64_t position, int64_t emission, double now,
                               cpa_error *err) {
    cpa_engine *engine = r->engine;
    const int is_planned_last = (chunk->flags & CPA_CHUNK_FINISHES) != 0;
    const cpa_drawn drawn = cpa_worker_drawn(engine->worker, emission);
    cpa_engine_request *request;
    cpa_token_meaning meaning;
    CPA_TRY(cpa_inbox_take_token(engine->inbox, chunk->request, position, drawn.id, is_planned_last, &request, &meaning,
                                 err));
    if (meaning == CPA_TOKEN_UNWANTED) return CPA_OK;
    const int is_last = cpa_request_ends_with(request, position);
    if (request->is_broken) {
        if (is_last) complete_request(r, request, CPA_FINISH_FAILED, now);
        return CPA_OK;
    }
    const int is_nothing = request->scheduled.draws && drawn.id == CPA_NO_TOKEN;
    if (is_nothing || !open_tokens(request)) { /* its own fault */
        if (is_last) complete_request(r, request, CPA_FINISH_LENGTH, now);
        cpa_inbox_fail(engine->inbox, chunk->request,
                       is_nothing ? "not finite: the logits of its next token have a NaN or an infinity"
                                  : "no memory for its tokens");
        return CPA_OK;
    }
    const int64_t index = request->emitted++;
    request->token_s[index] = now;
    request->tokens[index] = drawn.id;
    request->logprobs[index] = request->scheduled.sampling.logprobs ? drawn.logprob : 0; /* others may have asked */
    cpa_request_spans_token(engine->request_spans, request, now);
    engine->stats.output_tokens++;
    if (index == 0) engine->stats.prefilled_tokens += request->scheduled.prompt_tokens;
    record_ranks(r, request, index, cpa_worker_ranks(engine->worker, emission));
    if (engine->options.on_token)
        engine->options.on_token(r->ctx, chunk->request, index, drawn.id, request->logprobs[index]);
    if (is_last) complete_request(r, request, meaning == CPA_TOKEN_STOPS ? CPA_FINISH_STOP : CPA_FINISH_LENGTH, now);
    return CPA_OK;
}

/* Rank 0: what a chunk of a finished step has emitted, from `emission` on; of a chunk with drafts what counts of it. */
static cpa_status record_chunk(cpa_run *r, const cpa_plan_chunk *chunk, int64_t emission, double now, cpa_error *err) {
    cpa_engine *engine = r->engine;
    int64_t position = cpa_plan_first_draft(chunk), last = 0;
    engine->stats.drafted_chunks += chunk->drafts > 0;
    engine->stats.draft_tokens += chunk->drafts;
    for (int64_t at = 0; at >= 0; at = cpa_worker_next_accepted(engine->worker, &r->plan, chunk, emission, at)) {
        engine->stats.accepted_tokens += at > 0;
        r->tokens += at > 0;
        CPA_TRY(record_token(r, chunk, position++, emission + at, now, err));
        last = at;
    }
    if (engine->options.model.draft_layers > 0)
        cpa_inbox_take_guess(engine->inbox, chunk->request, cpa_worker_guess(engine->worker, emission + last));
    return CPA_OK;
}

/* Rank 0: a request with a row that is not finite fails, and what it has computed is found by nobody. */
static cpa_status fail_request(cpa_run *r, const cpa_nonfinite_row *row, cpa_error *err) {
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

static cpa_status add_found(cpa_run *r, const void *rows, int64_t n, cpa_error *err) {
    if (!cpa_array_reserve(&r->found, &r->cap_found, r->n_found + n, sizeof *r->found))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for what is not finite in a step");
    if (n > 0) memcpy(r->found + r->n_found, rows, (size_t)n * sizeof *r->found);
    r->n_found += n;
    return CPA_OK;
}

/* Another rank: the totals of this rank, and the rows that it has found in the step. */
static cpa_status send_report(cpa_run *r, const cpa_nonfinite *found, cpa_error *err) {
    const cpa_rank_totals totals = cpa_engine_own_totals(r->engine);
    const int64_t rows = found->n_last * (int64_t)sizeof *found->last, bytes = (int64_t)sizeof totals + rows;
    if (!cpa_array_reserve(&r->report, &r->cap_report, bytes, 1))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for what is not finite in a step");
    memcpy(r->report, &totals, sizeof totals);
    if (rows > 0) memcpy(r->report + sizeof totals, found->last, (size_t)rows);
    return cpa_reports_send(r->reports, r->report, bytes, err);
}

/* Rank 0: takes the totals of the other ranks, and adds what they have found in the step to what this one has. */
static cpa_status take_reports(cpa_run *r, cpa_error *err) {
    for (int32_t rank = 1; rank < r->engine->control.size; rank++) {
        int64_t bytes;
        const char *report = cpa_reports_of(r->reports, rank, &bytes);
        cpa_rank_totals *totals = &r->engine->totals[rank];
        const int64_t rows = (bytes - (int64_t)sizeof *totals) / (int64_t)sizeof *r->found;
        if (rows < 0 || bytes != (int64_t)sizeof *totals + rows * (int64_t)sizeof *r->found) {
            return cpa_fail(err, CPA_COMM, "a report of rank %d has %lld bytes, expected %zu and %zu for each row",
                            rank, (long long)bytes, sizeof *totals, sizeof *r->found);
        }
        memcpy(totals, report, sizeof *totals);
        CPA_TRY(add_found(r, report + sizeof *totals, rows, err));
    }
    if (r->n_found > 1) qsort(r->found, (size_t)r->n_found, sizeof *r->found, compare_rows);
    return CPA_OK;
}

cpa_status cpa_run_settle(cpa_run *r, int wait, cpa_error *err) {
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

cpa_status cpa_run_report(cpa_run *r, cpa_error *err) {
    const cpa_nonfinite *found = &r->engine->worker->nonfinite;
    if (!r->ahead) return send_report(r, found, err);
    CPA_TRY(cpa_run_settle(r, 1, err)); /* the step before, if nobody has looked in the meantime */
    r->engine->totals[0] = cpa_engine_own_totals(r->engine);
    r->n_found = 0;
    r->unsettled = 1;
    return add_found(r, found->last, found->n_last, err);
}

cpa_status cpa_run_record(cpa_run *r, cpa_error *err) {
    cpa_engine *engine = r->engine;
    cpa_engine_request *ended;
    double now = cpa_clock_now() - r->start;
    const cpa_worker_rows *ran = engine->worker->ran;
    for (int64_t i = 0; r->plan.n_chunks > 0 && i < ran->n_scored; i++) record_scored(r, ran->n_emissions + i);
    for (int64_t i = 0, emission = 0; i < r->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &r->plan.chunks[i];
        if (chunk->flags & CPA_CHUNK_EMITS) CPA_TRY(record_chunk(r, chunk, emission, now, err));
        emission += cpa_plan_chunk_emissions(chunk);
    }
    while ((ended = cpa_inbox_next_ended(engine->inbox))) {
        ended->end_s = now;
        cpa_request_append(&r->finished, ended);
    }
    if (!r->unsettled || !r->reports) CPA_TRY(cpa_run_settle(r, 0, err));
    cpa_scheduler_stats scheduled;
    cpa_plan_ahead_stats(r->ahead, &scheduled);
    engine->stats.duration_s = now;
    cpa_engine_join_totals(engine);
    cpa_engine_publish_stats(engine, &scheduled);
    if (r->on_progress) r->on_progress(r->ctx, r->tokens, engine->stats.requests_finished, now);
    return CPA_OK;
}
