/* The reserved step: planned once for its limits, and updated from arrays on the device. */
#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context_internal.h"
#include "src/context/pass_q_plan.h"
#include "src/ops/attend_reserve.h"
#include "src/ops/check_args.h"

/* What this rank finds out by itself. */
static cpa_status check_limits(cpa_context *c, const cpa_context_limits *given, cpa_attend_reservation *out) {
    cpa_context_limits limits;
    const cpa_context_options *o = &c->ops.options;
    cpa_error *err = &c->ops.error;
    CPA_TRY(CPA_STRUCT_TAKE("context", given, cpa_context_limits, num_blocks, &limits, err));
    REQUIRE(err, limits.form >= 0 && limits.form < c->ops.forms.count,
            "context: reserved for rows of form %lld, expected 0..%d, those of the context", (long long)limits.form,
            c->ops.forms.count - 1);
    REQUIRE(
        err, !c->ops.forms.list[limits.form].is_expanded,
        "context: reserved for rows of form %lld, whose keys are expanded, expected one that attends them as they lie",
        (long long)limits.form);
    c->reserved.form = &c->ops.forms.list[limits.form];
    *out = (cpa_attend_reservation){
        .shape = c->reserved.form->shape,
        .block_size = o->block_size,
        .rows = limits.rows ? limits.rows : 1,
        .fixed_rows = 1,
        .sequences = limits.sequences,
        .tokens = limits.tokens,
        .num_blocks = limits.num_blocks,
        .map = c->ops.map,
        .rank = c->ops.rank,
    };
    REQUIRE(err, o->rows == CPA_ROWS_OWNED, "context: a step of replicated rows cannot be reserved");
    CPA_TRY(cpa_check_reservation("context", out, err));
    REQUIRE(err, out->total_rows <= o->max_rows,
            "context: reserved for %lld sequences of %d rows, expected at most max_rows, %lld, in all",
            (long long)limits.sequences, out->rows, (long long)o->max_rows);
    REQUIRE(err, !c->reserved.q.ops, "context: a step is reserved already");
    if (c->ops.ring)
        return cpa_fail(err, CPA_UNSUPPORTED, "context: a step cannot be reserved over caches on the host");
    return CPA_OK;
}

static cpa_status reserve_step(cpa_context *c, const cpa_attend_reservation *r) {
    c->reserved_step = (cpa_planned_step){
        .map = c->ops.map,
        .rank = c->ops.rank,
        .kind = CPA_STEP_RESERVED,
        .padded_rows = r->total_rows,
        .max_block = {(int32_t)(r->num_blocks - 1)},
    };
    c->reserved_step.rows[c->reserved.form->index] = r->total_rows;
    CPA_TRY(cpa_pass_q_create(&c->reserved.q, &c->ops, c->reserved.form, &c->reserved_step));
    if (cpa_step_exchanges(&c->reserved_step)) return cpa_pass_q_reserve(&c->reserved.q, *r);
    if (c->reserved.form->has_matrix) CPA_TRY(cpa_form_lane_ensure(&c->reserved, &c->ops, r->total_rows));
    return c->ops.device->operators->plan_reserve(cpa_context_reserved_plan(c), r, &c->ops.error);
}

cpa_status cpa_context_reserve(cpa_context *c, const cpa_context_limits *limits) {
    cpa_attend_reservation r = {.rows = 0};
    if (!c) return CPA_INVALID;
    cpa_error *err = &c->ops.error;
    CPA_TRY(cpa_control_agree(&c->control, check_limits(c, limits, &r), err));
    const cpa_named_value values[] = {{"sequences", (double)r.sequences},
                                      {"tokens", (double)r.tokens},
                                      {"form", c->reserved.form->index},
                                      {"rows", r.rows}};
    CPA_TRY(cpa_control_same(&c->control, "context: reserve", values, sizeof values / sizeof values[0], err));
    cpa_status status = cpa_control_agree(&c->control, reserve_step(c, &r), err);
    if (status == CPA_OK) return CPA_OK;
    cpa_form_lane_destroy(&c->reserved, &c->ops);
    c->reserved = (cpa_form_lane){0};
    return status;
}

cpa_status cpa_context_update(cpa_context *c, const cpa_attend_update_args *args, cpa_stream *stream) {
    cpa_attend_update update;
    if (!c) return CPA_INVALID;
    cpa_error *err = &c->ops.error;
    REQUIRE(err, c->reserved.q.ops, "context: an update of what is not reserved");
    REQUIRE(err, stream && stream->device == c->ops.device,
            "context: the stream of an update is %s, expected one of the context's device",
            stream ? "of another device" : "NULL");
    cpa_attend_plan *plan = cpa_context_reserved_plan(c);
    CPA_TRY(cpa_take_attend_update("context", &plan->reservation, args, &update, err));
    REQUIRE(err, !update.kv_indptr, "context: kv_indptr counts the pages of one rank, expected lengths of sequences");
    c->attended = &c->reserved_step;
    c->ops.table_set = 0;
    c->planned = 0;
    CPA_TRY(cpa_context_check(&c->ops, c->ops.device->operators->plan_update(plan, &update, stream), stream));
    c->planned = 1;
    return CPA_OK;
}

cpa_status cpa_context_refused(cpa_context *c) {
    if (!c) return CPA_INVALID;
    REQUIRE(&c->ops.error, c->reserved.q.ops, "context: no step is reserved, and has no updates");
    return cpa_tell_refused("context", cpa_context_reserved_plan(c), &c->ops.error);
}
