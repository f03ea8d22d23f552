/* The timeline: what a rank did when, kept in bounded memory and handed to rank 0 at the end.
 *
 * A span belongs to a row: what the compute stream did, the exchanges between their start and their end, what the host
 * did, the planning thread of rank 0. Times are seconds since `origin`, which every rank takes behind a barrier. */
#ifndef CPA_TIMELINE_H
#define CPA_TIMELINE_H

#include <cpattn/engine.h>

#include "comm/comm.h"

typedef enum cpa_span_kind {
    CPA_SPAN_BEGIN_STEP = 0,
    CPA_SPAN_LAYER_IN,
    CPA_SPAN_KV_WRITE,
    CPA_SPAN_ESTIMATE, /* of the blocks of keys that prompts attend, with its exchanges */
    CPA_SPAN_QUERIES,  /* gathering those that other ranks attend */
    CPA_SPAN_PACK,
    CPA_SPAN_ATTEND_OWN,
    CPA_SPAN_ATTEND_RECEIVED,
    CPA_SPAN_MERGE,
    CPA_SPAN_WAIT, /* for an exchange */
    CPA_SPAN_HASH,
    CPA_SPAN_LAYER_OUT,
    CPA_SPAN_END_STEP,
    CPA_SPAN_GRAPH,
    CPA_SPAN_EXCHANGE_KV, /* round: of the all-to-all */
    CPA_SPAN_EXCHANGE_QUERIES,
    CPA_SPAN_EXCHANGE_STATES,
    CPA_SPAN_EXCHANGE_TOKENS,
    CPA_SPAN_EXCHANGE_SLICES,
    CPA_SPAN_EXCHANGE_ROWS,
    CPA_SPAN_EXCHANGE_INDEX,
    CPA_SPAN_RECEIVE, /* the plan of the step; while the one before runs, from when it was seen to be there */
    CPA_SPAN_PLAN,
    CPA_SPAN_ENQUEUE,
    CPA_SPAN_DRAIN,
    CPA_SPAN_CHECK,
    CPA_SPAN_SCHEDULE,
    CPA_SPAN_REQUEST_WAITING, /* what becomes of a request; from here on */
    CPA_SPAN_REQUEST_PREFILL,
    CPA_SPAN_REQUEST_DECODE,
    CPA_SPAN_REQUEST_PREEMPTED,
    CPA_SPAN_KINDS
} cpa_span_kind;

const char *cpa_span_name(cpa_span_kind kind);

typedef struct cpa_timeline_entry {
    double begin_s, seconds;
    int64_t step;
    int32_t kind;
    int32_t layer;    /* -1: none */
    int32_t round;    /* 0: none */
    uint64_t request; /* request of a request's span */
} cpa_timeline_entry;

typedef struct cpa_timeline {
    double origin; /* cpa_clock_now at which the timeline begins */
    int64_t step;  /* step of the spans that are added */
    cpa_timeline_entry *entries;
    int64_t count, capacity;
    int64_t limit;   /* spans that are kept; 0: none is */
    int64_t dropped; /* spans beyond `limit`, which were not kept */
} cpa_timeline;

/* Adds a span that began at a time of cpa_clock_now. The first that does not fit is logged. */
void cpa_timeline_add(cpa_timeline *timeline, cpa_span_kind kind, int32_t layer, int32_t round, double begin,
                      double seconds);
/* The same for a span of a request, from `begin_s` to `end_s` after the origin; none that has not begun by its end. */
void cpa_timeline_add_request(cpa_timeline *timeline, cpa_span_kind kind, uint64_t request, double begin_s,
                              double end_s);
void cpa_timeline_destroy(cpa_timeline *timeline);

/* Hands the spans of a rank to on_span. */
void cpa_timeline_hand_over(const cpa_timeline *timeline, int32_t rank, cpa_span_fn on_span, void *ctx);

/* Hands the spans of all ranks to on_span on rank 0. Collective. */
cpa_status cpa_timeline_gather(const cpa_timeline *timeline, cpa_control *control, cpa_span_fn on_span, void *ctx,
                               cpa_error *err);

#endif
