#include "src/engine/request_spans.h"

#include <stdlib.h>

#include "base/check.h"

cpa_status cpa_request_spans_create(int64_t limit, int32_t max_seqs, cpa_request_spans **out, cpa_error *err) {
    cpa_request_spans *spans = calloc(1, sizeof *spans);
    if (spans) spans->of_seq = calloc((size_t)max_seqs, sizeof *spans->of_seq);
    if (!spans || !spans->of_seq) {
        free(spans);
        return cpa_fail(err, CPA_NO_MEMORY, "timeline: no memory for requests");
    }
    spans->timeline.limit = limit;
    *out = spans;
    return CPA_OK;
}

void cpa_request_spans_destroy(cpa_request_spans *spans) {
    if (!spans) return;
    cpa_timeline_destroy(&spans->timeline);
    free(spans->of_seq);
    free(spans);
}

/* Ends what the request does, if it has begun. */
static void end_phase(cpa_request_spans *spans, cpa_engine_request *request, double now) {
    static const cpa_span_kind kinds[] = {
        [CPA_PHASE_WAITING] = CPA_SPAN_REQUEST_WAITING,
        [CPA_PHASE_PREFILL] = CPA_SPAN_REQUEST_PREFILL,
        [CPA_PHASE_DECODE] = CPA_SPAN_REQUEST_DECODE,
        [CPA_PHASE_PREEMPTED] = CPA_SPAN_REQUEST_PREEMPTED,
    };
    if (now < request->phase_s) return;
    cpa_timeline_add_request(&spans->timeline, kinds[request->phase], request->scheduled.id, request->phase_s, now);
    request->phase_s = now;
}

static void change_phase(cpa_request_spans *spans, cpa_engine_request *request, cpa_request_phase phase, double now) {
    end_phase(spans, request, now);
    request->phase = phase;
}

void cpa_request_spans_begin_step(cpa_request_spans *spans, cpa_inbox *inbox, const cpa_step_plan *plan, double now) {
    if (!spans) return;
    spans->timeline.step = (int64_t)plan->step;
    for (int64_t i = 0; i < plan->n_releases; i++) {
        cpa_engine_request **of_seq = &spans->of_seq[plan->releases[i]];
        if (*of_seq && !cpa_inbox_has_ended(inbox, *of_seq)) change_phase(spans, *of_seq, CPA_PHASE_PREEMPTED, now);
        *of_seq = NULL;
    }
}

void cpa_request_spans_start(cpa_request_spans *spans, cpa_engine_request *request, const cpa_plan_chunk *chunk,
                             double now) {
    if (!spans) return;
    change_phase(spans, request, chunk->flags & CPA_CHUNK_DECODE ? CPA_PHASE_DECODE : CPA_PHASE_PREFILL, now);
    request->seq = chunk->seq;
    spans->of_seq[chunk->seq] = request;
}

void cpa_request_spans_token(cpa_request_spans *spans, cpa_engine_request *request, double now) {
    if (spans && request->phase == CPA_PHASE_PREFILL) change_phase(spans, request, CPA_PHASE_DECODE, now);
}

void cpa_request_spans_end(cpa_request_spans *spans, cpa_engine_request *request, double end_s) {
    if (!spans) return;
    end_phase(spans, request, end_s);
    if (spans->of_seq[request->seq] == request) spans->of_seq[request->seq] = NULL;
}

typedef struct pause {
    cpa_request_spans *spans;
    double now;
} pause;

static void end_phase_of(void *ctx, cpa_engine_request *request) {
    const pause *p = ctx;
    end_phase(p->spans, request, p->now);
}

void cpa_request_spans_end_run(cpa_request_spans *spans, cpa_inbox *inbox, double now) {
    pause p = {spans, now};
    if (spans) cpa_inbox_visit(inbox, end_phase_of, &p);
}
