#include "src/trace/timeline.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"

/* Spans of one rank that travel at once. */
enum { GATHER_SPANS = 8192 };

static const char ROW_COMPUTE[] = "compute", ROW_KV[] = "exchange of keys and values", ROW_Q[] = "exchange of queries",
                  ROW_HOST[] = "host", ROW_SCHEDULER[] = "scheduler", ROW_REQUESTS[] = "requests";

/* Exchanges of the two algorithms overlap, so they have a row each. */
static const struct {
    const char *row, *name;
} kinds[CPA_SPAN_KINDS] = {
    [CPA_SPAN_BEGIN_STEP] = {ROW_COMPUTE, "begin step"},
    [CPA_SPAN_LAYER_IN] = {ROW_COMPUTE, "layer in"},
    [CPA_SPAN_KV_WRITE] = {ROW_COMPUTE, "kv_write"},
    [CPA_SPAN_ESTIMATE] = {ROW_COMPUTE, "estimate"},
    [CPA_SPAN_QUERIES] = {ROW_COMPUTE, "queries"},
    [CPA_SPAN_PACK] = {ROW_COMPUTE, "pack"},
    [CPA_SPAN_ATTEND_OWN] = {ROW_COMPUTE, "attend own"},
    [CPA_SPAN_ATTEND_RECEIVED] = {ROW_COMPUTE, "attend received"},
    [CPA_SPAN_MERGE] = {ROW_COMPUTE, "merge"},
    [CPA_SPAN_WAIT] = {ROW_COMPUTE, "wait"},
    [CPA_SPAN_HASH] = {ROW_COMPUTE, "hash"},
    [CPA_SPAN_LAYER_OUT] = {ROW_COMPUTE, "layer out"},
    [CPA_SPAN_END_STEP] = {ROW_COMPUTE, "end step"},
    [CPA_SPAN_GRAPH] = {ROW_COMPUTE, "replayed step"},
    [CPA_SPAN_EXCHANGE_KV] = {ROW_KV, "exchange"},
    [CPA_SPAN_EXCHANGE_QUERIES] = {ROW_Q, "queries"},
    [CPA_SPAN_EXCHANGE_STATES] = {ROW_Q, "states"},
    [CPA_SPAN_EXCHANGE_TOKENS] = {ROW_Q, "tokens"},
    [CPA_SPAN_EXCHANGE_SLICES] = {ROW_Q, "slices"},
    [CPA_SPAN_EXCHANGE_ROWS] = {ROW_Q, "rows"},
    [CPA_SPAN_EXCHANGE_INDEX] = {ROW_Q, "index"},
    [CPA_SPAN_RECEIVE] = {ROW_HOST, "receive plan"},
    [CPA_SPAN_PLAN] = {ROW_HOST, "plan"},
    [CPA_SPAN_ENQUEUE] = {ROW_HOST, "enqueue"},
    [CPA_SPAN_DRAIN] = {ROW_HOST, "drain"},
    [CPA_SPAN_CHECK] = {ROW_HOST, "check"},
    [CPA_SPAN_SCHEDULE] = {ROW_SCHEDULER, "schedule"},
    [CPA_SPAN_REQUEST_WAITING] = {ROW_REQUESTS, "waiting"},
    [CPA_SPAN_REQUEST_PREFILL] = {ROW_REQUESTS, "prefill"},
    [CPA_SPAN_REQUEST_DECODE] = {ROW_REQUESTS, "decode"},
    [CPA_SPAN_REQUEST_PREEMPTED] = {ROW_REQUESTS, "preempted"},
};

const char *cpa_span_name(cpa_span_kind kind) {
    return kinds[kind].name;
}

static void add_entry(cpa_timeline *timeline, cpa_timeline_entry entry) {
    if (timeline->count == timeline->limit ||
        !cpa_array_reserve(&timeline->entries, &timeline->capacity, timeline->count + 1, sizeof *timeline->entries)) {
        timeline->limit = timeline->count;
        if (timeline->dropped++ == 0) {
            cpa_log(CPA_LOG_WARN,
                    "timeline: full after %" PRId64 " spans, in step %" PRId64 "; later ones are left out",
                    timeline->count, timeline->step);
        }
        return;
    }
    entry.step = timeline->step;
    timeline->entries[timeline->count++] = entry;
}

void cpa_timeline_add(cpa_timeline *timeline, cpa_span_kind kind, int32_t layer, int32_t round, double begin,
                      double seconds) {
    add_entry(
        timeline,
        (cpa_timeline_entry){
            .begin_s = begin - timeline->origin, .seconds = seconds, .kind = kind, .layer = layer, .round = round});
}

void cpa_timeline_add_request(cpa_timeline *timeline, cpa_span_kind kind, uint64_t request, double begin_s,
                              double end_s) {
    if (end_s < begin_s) return;
    add_entry(timeline,
              (cpa_timeline_entry){
                  .begin_s = begin_s, .seconds = end_s - begin_s, .kind = kind, .layer = -1, .request = request});
}

void cpa_timeline_destroy(cpa_timeline *timeline) {
    free(timeline->entries);
    *timeline = (cpa_timeline){0};
}

static void hand_over(const cpa_timeline_entry *entry, int32_t rank, cpa_span_fn on_span, void *ctx) {
    cpa_span span = {
        .rank = rank,
        .row = kinds[entry->kind].row,
        .name = kinds[entry->kind].name,
        .step = entry->step,
        .layer = entry->layer,
        .round = entry->round,
        .begin_s = entry->begin_s,
        .seconds = entry->seconds,
        .of_request = entry->kind >= CPA_SPAN_REQUEST_WAITING,
        .request = entry->request,
    };
    on_span(ctx, &span);
}

void cpa_timeline_hand_over(const cpa_timeline *timeline, int32_t rank, cpa_span_fn on_span, void *ctx) {
    for (int64_t i = 0; i < timeline->count; i++) hand_over(&timeline->entries[i], rank, on_span, ctx);
}

/* What travels: entries of one rank, padded. */
typedef struct gather_message {
    int64_t count;
    cpa_timeline_entry entries[GATHER_SPANS];
} gather_message;

cpa_status cpa_timeline_gather(const cpa_timeline *timeline, cpa_control *control, cpa_span_fn on_span, void *ctx,
                               cpa_error *err) {
    double most = (double)timeline->count;
    gather_message *mine = calloc(1, sizeof *mine), *all = NULL;
    cpa_status status = CPA_OK;
    if (control->rank == 0) all = calloc((size_t)control->size, sizeof *all);
    if (!mine || (control->rank == 0 && !all)) status = cpa_fail(err, CPA_NO_MEMORY, "timeline: no memory");
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), done);
    CPA_TRY_GOTO(cpa_control_max(control, &most, 1, err), done);
    for (int64_t first = 0; first < (int64_t)most; first += GATHER_SPANS) {
        int64_t left = timeline->count - first;
        mine->count = left < 0 ? 0 : left < GATHER_SPANS ? left : GATHER_SPANS;
        for (int64_t i = 0; i < mine->count; i++) mine->entries[i] = timeline->entries[first + i];
        CPA_TRY_GOTO(cpa_control_gather(control, mine, sizeof *mine, all, 0, err), done);
        for (int32_t rank = 0; all && rank < control->size; rank++) {
            for (int64_t i = 0; on_span && i < all[rank].count; i++)
                hand_over(&all[rank].entries[i], rank, on_span, ctx);
        }
    }
done:
    free(all);
    free(mine);
    return status;
}
