#include "src/trace/spans.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/range.h"

cpa_status cpa_spans_create(cpa_spans *spans, cpa_device *device, cpa_error *err) {
    *spans = (cpa_spans){.device = device, .layer = -1};
    return device->table->events_create(device, &spans->events, err);
}

void cpa_spans_destroy(cpa_spans *spans) {
    if (spans->events) spans->device->table->events_destroy(spans->events);
    free(spans->records);
    *spans = (cpa_spans){0};
}

/* Records the next event; the first failure stays. */
static int32_t record(cpa_spans *spans, cpa_stream *stream) {
    int32_t index = spans->n_events++;
    cpa_status status = spans->device->table->event_record(spans->events, index, stream);
    if (status != CPA_OK && spans->failure.status == CPA_OK) spans->failure = stream->error;
    return index;
}

void cpa_spans_forget(cpa_spans *spans) {
    spans->count = 0;
    spans->n_events = 0;
    spans->failure.status = CPA_OK;
}

void cpa_spans_start(cpa_spans *spans, cpa_stream *stream) {
    cpa_spans_forget(spans);
    spans->base_s = cpa_clock_now();
    if (!spans->disabled) record(spans, stream);
}

/* Whether a span is measured without a timeline. */
static int is_always_measured(cpa_span_kind kind) {
    return kind == CPA_SPAN_ATTEND_OWN || kind == CPA_SPAN_ATTEND_RECEIVED || kind == CPA_SPAN_MERGE ||
           kind == CPA_SPAN_WAIT || kind == CPA_SPAN_ESTIMATE;
}

/* Room for so many spans. */
static cpa_status reserve(cpa_spans *spans, int64_t count, cpa_error *err) {
    if (cpa_array_reserve(&spans->records, &spans->capacity, count, sizeof *spans->records)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld spans", (long long)count);
}

/* Begins a span at an event. */
static int64_t add(cpa_spans *spans, cpa_span_kind kind, int32_t layer, int32_t round, int32_t event) {
    if (reserve(spans, spans->count + 1, &spans->failure) != CPA_OK) return -1;
    spans->records[spans->count] = (cpa_span_record){
        .kind = kind,
        .layer = layer,
        .round = round,
        .begin = event,
        .end = -1,
        .range = cpa_range_begin(cpa_span_name(kind)),
    };
    return spans->count++;
}

int64_t cpa_spans_start_as(cpa_spans *spans, cpa_span_kind kind, cpa_stream *stream) {
    cpa_spans_start(spans, stream);
    return add(spans, kind, -1, 0, 0);
}

int64_t cpa_spans_begin(cpa_spans *spans, cpa_span_kind kind, int32_t round, cpa_stream *stream) {
    if (spans->disabled || (!spans->timeline && !is_always_measured(kind))) return -1;
    if (spans->n_events == 0) cpa_spans_start(spans, stream);
    return add(spans, kind, spans->layer, round, record(spans, stream));
}

void cpa_spans_end(cpa_spans *spans, int64_t span, cpa_stream *stream) {
    if (span < 0) return;
    spans->records[span].end = record(spans, stream);
    cpa_range_end(spans->records[span].range);
}

cpa_status cpa_spans_read(cpa_spans *spans, cpa_span_totals *totals, cpa_error *err) {
    const cpa_device_table *table = spans->device->table;
    *totals = (cpa_span_totals){{0}};
    if (spans->failure.status != CPA_OK) return cpa_fail(err, spans->failure.status, "%s", spans->failure.message);
    for (int64_t i = 0; i < spans->count; i++) {
        const cpa_span_record *r = &spans->records[i];
        double seconds, from_base;
        if (r->end < 0) continue;
        CPA_TRY(table->event_seconds(spans->events, r->begin, r->end, &seconds, err));
        totals->seconds[r->kind] += seconds;
        if (!spans->timeline) continue;
        CPA_TRY(table->event_seconds(spans->events, 0, r->begin, &from_base, err));
        cpa_timeline_add(spans->timeline, (cpa_span_kind)r->kind, r->layer, r->round, spans->base_s + from_base,
                         seconds);
    }
    cpa_spans_forget(spans);
    return CPA_OK;
}

cpa_host_span cpa_spans_host_begin(cpa_span_kind kind) {
    return (cpa_host_span){cpa_clock_now(), cpa_range_begin(cpa_span_name(kind)), kind};
}

void cpa_spans_host_end(cpa_spans *spans, cpa_host_span span) {
    cpa_range_end(span.range);
    if (spans->timeline) {
        cpa_timeline_add(spans->timeline, span.kind, -1, 0, span.begin, cpa_clock_now() - span.begin);
    }
}
