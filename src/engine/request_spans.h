/* The timeline of requests, on rank 0: from when each waited, computed its prompt, gave tokens, or had given way to
 * others. Of the thread that runs the steps; times are those of the engine's clock. Where no timeline is kept all
 * functions do nothing, for NULL. */
#ifndef CPA_REQUEST_SPANS_H
#define CPA_REQUEST_SPANS_H

#include "src/engine/inbox.h"
#include "src/trace/timeline.h"

typedef struct cpa_request_spans {
    cpa_timeline timeline;
    cpa_engine_request *
        *of_seq; /* [max_seqs] who runs under an index of the plans; NULL: nobody, or it has been told */
} cpa_request_spans;

/* Keeps `limit` spans. CPA_NO_MEMORY is possible. */
cpa_status cpa_request_spans_create(int64_t limit, int32_t max_seqs, cpa_request_spans **out, cpa_error *err);
void cpa_request_spans_destroy(cpa_request_spans *spans);

/* A step begins: who gives its index back, and has not ended, is preempted. */
void cpa_request_spans_begin_step(cpa_request_spans *spans, cpa_inbox *inbox, const cpa_step_plan *plan, double now);
/* A request runs, or does so again, with its first chunk. */
void cpa_request_spans_start(cpa_request_spans *spans, cpa_engine_request *request, const cpa_plan_chunk *chunk,
                             double now);
/* It has got a token. */
void cpa_request_spans_token(cpa_request_spans *spans, cpa_engine_request *request, double now);
/* It has ended; before its record is released. */
void cpa_request_spans_end(cpa_request_spans *spans, cpa_engine_request *request, double end_s);
/* A run ends: what requests do that go on in the next one is told up to here. */
void cpa_request_spans_end_run(cpa_request_spans *spans, cpa_inbox *inbox, double now);

#endif
