/* The spans of a step on a stream: what runs between two events of the device's clock.
 *
 * Spans are begun and ended as their work is enqueued; their times are read when the stream is idle, at the end of the
 * step. Attention, its estimates and waiting are always measured, the rest only for a timeline. No memory is allocated
 * once a step has had as many spans before. */
#ifndef CPA_SPANS_H
#define CPA_SPANS_H

#include "kernels/device.h"
#include "src/trace/timeline.h"

typedef struct cpa_span_record {
    int32_t kind, layer, round;
    int32_t begin, end; /* events; end -1: it has not ended */
    uint64_t range;
} cpa_span_record;

typedef struct cpa_spans {
    cpa_device *device;
    cpa_events *events;
    cpa_span_record *records;
    int64_t count, capacity;
    int32_t n_events;       /* in use; event 0 is the base, at the start of the step */
    double base_s;          /* when event 0 was, of cpa_clock_now */
    int32_t layer;          /* layer of the spans that are begun */
    cpa_timeline *timeline; /* NULL: none is kept */
    int disabled;           /* nothing is measured: the work is being captured */
    cpa_error failure;      /* failure of an event, reported when the spans are read */
} cpa_spans;

/* Seconds of a step by kind. */
typedef struct cpa_span_totals {
    double seconds[CPA_SPAN_KINDS];
} cpa_span_totals;

cpa_status cpa_spans_create(cpa_spans *spans, cpa_device *device, cpa_error *err);
void cpa_spans_destroy(cpa_spans *spans);

/* Forgets the spans that were not read. */
void cpa_spans_forget(cpa_spans *spans);
/* Begins a step on an idle stream; without a call the first span does. Forgets too. */
void cpa_spans_start(cpa_spans *spans, cpa_stream *stream);
/* The same for a step that is one span. Returns what cpa_spans_end takes. */
int64_t cpa_spans_start_as(cpa_spans *spans, cpa_span_kind kind, cpa_stream *stream);

/* Begins a span with what is enqueued next. Returns what cpa_spans_end takes; -1 if it is not measured. */
int64_t cpa_spans_begin(cpa_spans *spans, cpa_span_kind kind, int32_t round, cpa_stream *stream);
void cpa_spans_end(cpa_spans *spans, int64_t span, cpa_stream *stream);

/* Reads the spans, whose stream must be idle, into the totals, and the timeline if there is one, and forgets them. A
 * failure leaves them. */
cpa_status cpa_spans_read(cpa_spans *spans, cpa_span_totals *totals, cpa_error *err);

/* A span of the host, from now on; only for the timeline and profilers. Returns what cpa_spans_host_end takes. */
typedef struct cpa_host_span {
    double begin;
    uint64_t range;
    cpa_span_kind kind;
} cpa_host_span;
cpa_host_span cpa_spans_host_begin(cpa_span_kind kind);
void cpa_spans_host_end(cpa_spans *spans, cpa_host_span span);

#endif
