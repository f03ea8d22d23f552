#include "src/engine/next_plan.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/range.h"
#include "src/schedule/step_plan_wire.h"

cpa_status cpa_next_plan_open(cpa_next_plan *next, cpa_control *control, cpa_plan_ahead *ahead, cpa_spans *spans,
                              const cpa_plan_limits *limits, cpa_error *err) {
    *next = (cpa_next_plan){.control = control, .ahead = ahead, .spans = spans, .limits = *limits};
    cpa_step_plan_init(&next->plan);
    return cpa_mailbox_open(control, &next->mailbox, err);
}

void cpa_next_plan_close(cpa_next_plan *next) {
    cpa_mailbox_close(next->mailbox);
    cpa_step_plan_destroy(&next->plan);
}

/* Rank 0: takes the plan and sends it; *bytes stays NULL while it is not made, or the one before is still under way. */
static cpa_status take_and_send(cpa_next_plan *next, int wait, const uint8_t **bytes, int64_t *n_bytes,
                                cpa_error *err) {
    int flushed;
    CPA_TRY(cpa_mailbox_flush(next->mailbox, wait, &flushed, err));
    if (!flushed) return CPA_OK;
    cpa_status planned = cpa_plan_ahead_take(next->ahead, wait, bytes, n_bytes, err);
    /* While there is nothing to do, other ranks may be lost. */
    while (planned == CPA_OK && wait && !*bytes) {
        CPA_TRY(cpa_comm_check(next->control->comm, -1, err));
        planned = cpa_plan_ahead_take(next->ahead, wait, bytes, n_bytes, err);
    }
    if (planned != CPA_OK) CPA_TRY(cpa_mailbox_send(next->mailbox, NULL, -1, NULL)); /* so that nobody waits for it */
    if (planned != CPA_OK || !*bytes) return planned;
    return cpa_mailbox_send(next->mailbox, *bytes, *n_bytes, err);
}

static cpa_status receive(cpa_next_plan *next, int wait, const uint8_t **bytes, int64_t *n_bytes, cpa_error *err) {
    int arrived;
    const void *data;
    CPA_TRY(cpa_mailbox_receive(next->mailbox, wait, &arrived, &data, n_bytes, err));
    if (arrived && *n_bytes < 0) return cpa_fail(err, CPA_INTERNAL, "rank 0 could not plan the next step");
    *bytes = data;
    return CPA_OK;
}

static cpa_status get(cpa_next_plan *next, int wait, cpa_error *err) {
    const uint8_t *bytes = NULL;
    int64_t n_bytes = 0;
    CPA_TRY((next->ahead ? take_and_send : receive)(next, wait, &bytes, &n_bytes, err));
    if (!bytes) return CPA_OK;
    CPA_TRY(cpa_step_plan_decode(bytes, n_bytes, &next->limits, &next->plan, err));
    next->there = 1;
    next->last = (next->plan.flags & CPA_PLAN_STOP) != 0;
    return CPA_OK;
}

/* How the plan came here since `begin`, and on rank 0 how it was made. */
static void add_spans(const cpa_next_plan *next, double begin) {
    cpa_timeline *timeline = next->spans->timeline;
    if (!timeline) return;
    const int64_t running = timeline->step;
    timeline->step = (int64_t)next->plan.step;
    cpa_timeline_add(timeline, CPA_SPAN_RECEIVE, -1, 0, begin, cpa_clock_now() - begin);
    if (next->ahead) {
        double seconds;
        cpa_plan_ahead_times(next->ahead, &begin, &seconds);
        cpa_timeline_add(timeline, CPA_SPAN_SCHEDULE, -1, 0, begin, seconds);
    }
    timeline->step = running;
}

cpa_status cpa_next_plan_look(cpa_next_plan *next, int wait, cpa_error *err) {
    int flushed;
    if (next->there || next->last) return next->ahead ? cpa_mailbox_flush(next->mailbox, wait, &flushed, err) : CPA_OK;
    const double begin = cpa_clock_now();
    const uint64_t range = wait ? cpa_range_begin(cpa_span_name(CPA_SPAN_RECEIVE)) : 0;
    cpa_status status = get(next, wait, err);
    if (status == CPA_OK && wait && next->ahead) status = cpa_mailbox_flush(next->mailbox, 1, &flushed, err);
    if (wait) cpa_range_end(range);
    if (status == CPA_OK && next->there) add_spans(next, begin);
    return status;
}

void cpa_next_plan_advance(cpa_next_plan *next, cpa_step_plan *plan) {
    cpa_step_plan done = *plan;
    *plan = next->plan;
    next->plan = done;
    next->there = 0;
}

cpa_status cpa_next_plan_settle(cpa_next_plan *next, cpa_error *err) {
    int flushed, arrived;
    int64_t n_bytes;
    const void *data;
    const int under_way = !next->there && !next->last;
    if (!next->ahead) return under_way ? cpa_mailbox_receive(next->mailbox, 1, &arrived, &data, &n_bytes, err) : CPA_OK;
    CPA_TRY(cpa_mailbox_flush(next->mailbox, 1, &flushed, err));
    if (!under_way) return CPA_OK;
    CPA_TRY(cpa_mailbox_send(next->mailbox, NULL, -1, err));
    return cpa_mailbox_flush(next->mailbox, 1, &flushed, err);
}
