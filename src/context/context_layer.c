/* Context attention: one layer from start to end. */
#include <inttypes.h>
#include <stdio.h>

#include <cpattn/context.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context.h"
#include "src/context/context_internal.h"
#include "src/context/context_plan.h"
#include "src/ops/check_args.h"
#include "src/ops/check_score.h"
#include "src/ops/check_shape.h"

static cpa_status check_score(cpa_context *c, const cpa_context_args *args) {
    const int64_t end =
        cpa_context_is_reserved(c) ? cpa_context_reserved_plan(c)->reservation.tokens : cpa_planned_end(&c->step);
    CPA_TRY(cpa_check_score("attend", args->rules, args->selection, args->bias, &c->ops.error));
    CPA_TRY(
        cpa_check_score_reach("attend", c->ops.device, end, args->rules, args->selection, args->bias, &c->ops.error));
    if (cpa_selection_maps_rows(args->selection) || (args->bias && args->bias->row_map))
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: the row_map of the selection or of the bias is set, expected NULL in a context");
    return CPA_OK;
}

/* What the rows of a form are given. */
static cpa_status check_rows(cpa_context *c, const cpa_form *form, const cpa_form_rows *rows, const char *where) {
    const cpa_planned_step *step = c->attended;
    cpa_error *err = &c->ops.error;
    CPA_TRY(cpa_check_attend(where, c->ops.device, &form->shape, &rows->mask, err));
    CPA_TRY(cpa_check_layer_mask(where, &rows->mask, err));
    if (rows->scale - rows->scale != 0)
        return cpa_fail(err, CPA_INVALID, "%s: scale is %g, expected a finite number", where, (double)rows->scale);
    if (rows->scale == 0 && form->shape.v_in_k)
        return cpa_fail(err, CPA_INVALID,
                        "%s: scale is 0 over latents, expected that of the heads whose projections are folded into q",
                        where);
    const int has_results = !cpa_step_is_replicated(step) || c->lanes[0].scatter.heads > 0;
    if (step->rows[form->index] > 0 && (!rows->q || (has_results && !rows->out)))
        return cpa_fail(err, CPA_INVALID, "%s: %" PRId64 " rows, but q %p and out %p, expected both", where,
                        step->rows[form->index], rows->q, rows->out);
    if (form->has_matrix != (rows->matrix != NULL))
        return cpa_fail(err, CPA_INVALID, "%s: the matrix is %p, expected %s", where, rows->matrix,
                        form->has_matrix ? "one, as the form has an out_dim" : "NULL, as the form has no out_dim");
    if (form->is_expanded != (rows->expansion != NULL))
        return cpa_fail(err, CPA_INVALID, "%s: the expansion is %p, expected %s", where, rows->expansion,
                        form->is_expanded ? "one, as the form is expanded" : "NULL, as the form is not expanded");
    if ((form->absorbs != CPA_ABSORB_NEVER) != (rows->fold != NULL) || !rows->fold != !rows->unfold)
        return cpa_fail(err, CPA_INVALID, "%s: fold is %p and unfold %p, expected %s", where, rows->fold, rows->unfold,
                        form->absorbs ? "both, as the form absorbs" : "NULL, as the form does not absorb");
    if (!CPA_RESERVED_IS_ZERO(*rows))
        return cpa_fail(err, CPA_INVALID, "%s: the reserved bytes of the rows are not zero", where);
    const int64_t element = cpa_dtype_bytes(form->shape.dtype);
    CPA_TRY(cpa_check_aligned(where, "q", rows->q, element, err));
    CPA_TRY(cpa_check_aligned(where, "out", rows->out, rows->out_scale ? 1 : element, err));
    CPA_TRY(cpa_check_aligned(where, "out_scale", rows->out_scale, sizeof *rows->out_scale, err));
    CPA_TRY(cpa_check_aligned(where, "matrix", rows->matrix, element, err));
    CPA_TRY(cpa_check_aligned(where, "expansion", rows->expansion, CPA_SECTION_ALIGNMENT, err));
    CPA_TRY(cpa_check_aligned(where, "fold", rows->fold, CPA_SECTION_ALIGNMENT, err));
    CPA_TRY(cpa_check_aligned(where, "unfold", rows->unfold, CPA_SECTION_ALIGNMENT, err));
    return cpa_check_aligned(where, "lse", rows->lse, sizeof *rows->lse, err);
}

/* The rows of all forms that the step has; `layer` is what the arguments say. */
static cpa_status check_forms(cpa_context *c, const cpa_context_args *args, const cpa_layer *layer) {
    for (int32_t i = 0; i < c->ops.forms.count; i++) {
        char where[32] = "attend";
        if (args->rows) snprintf(where, sizeof where, "attend: form %d", i);
        if (c->ops.forms.count > 1 && !cpa_planned_has_form(c->attended, i)) continue;
        if (!args->rows && i > 0)
            return cpa_fail(&c->ops.error, CPA_INVALID,
                            "attend: the step has rows of form %d, but rows is NULL, expected those of each form", i);
        CPA_TRY(check_rows(c, &c->ops.forms.list[i], &layer->forms[i].rows, where));
    }
    return CPA_OK;
}

static cpa_status check_args(cpa_context *c, const cpa_context_args *args, const cpa_stream *stream) {
    const cpa_context_options *o = &c->ops.options;
    const cpa_kv_view *kv = &args->kv;
    CPA_TRY(cpa_context_check_whole(c));
    if (!c->planned)
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: no step is planned, expected a call of cpa_context_plan before");
    if (!stream || stream->device != c->ops.device) {
        return cpa_fail(&c->ops.error, CPA_INVALID, "attend: the stream is %s, expected one of the context's device",
                        stream ? "of another device" : "NULL");
    }
    CPA_TRY(cpa_check_view("attend", kv, &c->ops.error));
    const int unquantised = o->has_unquantised && kv->dtype == o->shape.dtype;
    const cpa_attention_shape shape = unquantised ? cpa_shape_unquantised(&o->shape) : o->shape;
    const cpa_cache_form cache = cpa_cache_form_of("the cache", kv), own = {"the context", shape, o->block_size};
    CPA_TRY(cpa_check_same_cache("attend", &cache, &own, 0, &c->ops.error));
    if (c->ops.ring) CPA_TRY(cpa_kv_ring_check_view(c->ops.ring, kv, &c->ops.error));
    const int32_t max_block = c->attended->max_block[c->ops.table_set];
    if (max_block >= kv->num_blocks) {
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: a block table names block %d of a cache of %" PRId64 ", expected 0..%" PRId64,
                        max_block, kv->num_blocks, kv->num_blocks - 1);
    }
    CPA_TRY(check_score(c, args));
    if (!cpa_context_is_reserved(c) && stream->device->table->stream_is_captured(stream)) {
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED,
                        "attend: the stream is in a capture of the caller's, and the step is not the reserved one");
    }
    return CPA_OK;
}

/* The last merge, of the first `rows` rows of a form: the own shard with what pass-KV added to it, and what came back in
 * pass-Q. Rounds once. */
static cpa_status merge_states(cpa_form_lane *lane, const cpa_form_layer *layer, cpa_partial own, int64_t rows,
                               cpa_stream *stream) {
    const cpa_form *form = lane->form;
    cpa_merge_args merge = {
        .size = sizeof merge,
        .rows = rows,
        .heads = form->shape.q_heads,
        .v_dim = form->out_dim,
        .out_dtype = layer->rows.out_scale ? CPA_FP8_E4M3 : form->shape.dtype,
        .out_scale = layer->rows.out_scale,
        .out = layer->rows.out,
        .out_row_stride = (int64_t)form->shape.q_heads * form->out_dim,
        .out_lse = layer->rows.lse,
        .out_lse_row_stride = form->shape.q_heads,
        .sink_logits = cpa_context_sinks(lane->q.ops),
    };
    return cpa_pass_q_merge(&lane->q, own, &merge, stream);
}

/* The states of own rows that are not among those of pass-Q, multiplied by the matrix of the form, if it has one, and
 * merged. */
static cpa_status finish_own(cpa_form_lane *lane, const cpa_form_layer *layer, int64_t rows, cpa_stream *stream) {
    if (!lane->form->has_matrix) return merge_states(lane, layer, lane->own_state, rows, stream);
    CPA_TRY(cpa_context_run_project(lane->q.ops, lane->form, layer, rows, lane->own_state, lane->projected, stream));
    return merge_states(lane, layer, lane->projected, rows, stream);
}

/* Rows that meet no key of another rank. */
static cpa_status attend_lane_alone(cpa_context *c, cpa_form_lane *lane, const cpa_form_layer *layer,
                                    cpa_stream *stream) {
    const cpa_table_plans *plans = cpa_context_is_reserved(c) ? &lane->q.plans : &lane->own;
    cpa_row_plan *plan = cpa_table_plans_now(plans, &c->ops);
    if (cpa_form_ends_in_merge(lane->form)) {
        CPA_TRY(
            cpa_row_plan_attend_own(plan, &c->ops, lane->form, layer, CPA_SCORE_KEPT, lane->own_state, NULL, stream));
        return finish_own(lane, layer, c->attended->rows[lane->form->index], stream);
    }
    const cpa_partial own = {.lse = layer->rows.lse, .lse_row_stride = lane->form->shape.q_heads};
    cpa_partial state = own;
    if (c->ops.precise.tokens > 0) {
        state = lane->own_state;
        if (own.lse) state.lse = own.lse, state.lse_row_stride = own.lse_row_stride;
    }
    return cpa_row_plan_attend_own(plan, &c->ops, lane->form, layer, CPA_SCORE_KEPT, state, layer->rows.out, stream);
}

static cpa_status attend_alone(cpa_context *c, const cpa_layer *layer, cpa_stream *stream) {
    if (cpa_context_is_reserved(c))
        return attend_lane_alone(c, &c->reserved, &layer->forms[c->reserved.form->index], stream);
    for (int32_t f = 0; f < c->ops.forms.count; f++)
        CPA_TRY(attend_lane_alone(c, &c->lanes[f], &layer->forms[f], stream));
    return CPA_OK;
}

/* Where own states gather, and how many rows are merged at the end. */
static cpa_kv_layer begin_states(cpa_context *c, const cpa_layer *layer) {
    cpa_kv_layer states = {.layer = layer};
    for (int32_t f = 0; f < c->ops.forms.count; f++) {
        const cpa_form_lane *lane = &c->lanes[f];
        const int is_merged = lane->q.active || cpa_form_ends_in_merge(lane->form) || layer->forms[f].rows.lse;
        states.own[f] = cpa_step_joins_own(&c->step) ? cpa_pass_q_own_state(&lane->q) : lane->own_state;
        states.open_rows[f] = is_merged ? c->step.rows[f] : cpa_pass_kv_open_rows(&c->kv, f);
    }
    return states;
}

static cpa_status attend_shared(cpa_context *c, const cpa_layer *layer, cpa_stream *stream) {
    const cpa_kv_layer states = begin_states(c, layer);
    const int32_t n = c->ops.forms.count;
    CPA_TRY(cpa_pass_kv_find_wanted(&c->kv, layer, stream));
    for (int32_t f = 0; f < n; f++) CPA_TRY(cpa_pass_q_start(&c->lanes[f].q, &layer->forms[f], stream));
    CPA_TRY(cpa_pass_kv_start(&c->kv, &states, stream));
    for (int32_t f = 0; f < n; f++)
        CPA_TRY(cpa_row_plan_attend_own(cpa_table_plans_now(&c->lanes[f].own, &c->ops), &c->ops, c->lanes[f].form,
                                        &layer->forms[f], CPA_SCORE_KEPT, states.own[f], NULL, stream));
    CPA_TRY(cpa_pass_kv_attend_own(&c->kv, &states, stream));
    for (int32_t f = 0; f < n; f++) CPA_TRY(cpa_pass_q_attend_remote(&c->lanes[f].q, &layer->forms[f], stream));
    CPA_TRY(cpa_pass_kv_run(&c->kv, &states, stream));
    for (int32_t f = 0; f < n; f++) {
        cpa_form_lane *lane = &c->lanes[f];
        CPA_TRY(cpa_pass_q_finish(&lane->q, states.open_rows[f], stream));
        CPA_TRY(cpa_step_joins_own(&c->step)
                    ? merge_states(lane, &layer->forms[f], states.own[f], states.open_rows[f], stream)
                    : finish_own(lane, &layer->forms[f], states.open_rows[f], stream));
    }
    return CPA_OK;
}

/* A layer of the reserved step, if ranks exchange. */
static cpa_status attend_reserved(cpa_context *c, const cpa_layer *layer, cpa_stream *stream) {
    cpa_pass_q *q = &c->reserved.q;
    const int64_t rows = c->reserved_step.rows[q->form->index];
    const cpa_form_layer *of = &layer->forms[q->form->index];
    CPA_TRY(cpa_pass_q_start(q, of, stream));
    CPA_TRY(cpa_pass_q_attend_remote(q, of, stream));
    CPA_TRY(cpa_pass_q_finish(q, rows, stream));
    return merge_states(&c->reserved, of, cpa_pass_q_own_state(q), rows, stream);
}

static cpa_status attend_replicated(cpa_context *c, const cpa_layer *layer, cpa_stream *stream) {
    for (int32_t f = 0; f < c->ops.forms.count; f++)
        CPA_TRY(cpa_scatter_heads_attend(&c->lanes[f].scatter, &layer->forms[f], stream));
    return CPA_OK;
}

/* What this rank finds out by itself before it begins; the arguments in *layer. */
static cpa_status check_layer(cpa_context *c, const cpa_context_args *given, const cpa_stream *stream,
                              cpa_layer *layer) {
    cpa_context_args args;
    cpa_mask sent[CPA_MOST_ROW_FORMS];
    CPA_TRY(CPA_STRUCT_TAKE("attend", given, cpa_context_args, out, &args, &c->ops.error));
    CPA_TRY(check_args(c, &args, stream));
    cpa_forms_layer(&c->ops.forms, &args, layer);
    CPA_TRY(check_forms(c, &args, layer));
    const int is_reserved = cpa_context_is_reserved(c);
    CPA_TRY(cpa_score_rows_begin(&c->score_rows, &c->ops, is_reserved ? NULL : c->lanes,
                                 is_reserved ? cpa_context_reserved_plan(c)->reservation.step_rows : NULL, layer));
    if (is_reserved || cpa_step_is_replicated(&c->step)) return CPA_OK;
    for (int32_t f = 0; f < c->ops.forms.count; f++) {
        sent[f] = layer->forms[f].rows.mask;
        if (layer->selection && layer->selection->bits) sent[f].causal = 0; /* bits may show what lies behind a query */
    }
    return cpa_pass_kv_select(&c->kv, sent, layer->selection);
}

static cpa_status attend_by_kind(cpa_context *c, const cpa_layer *layer, cpa_stream *stream) {
    switch (c->attended->kind) {
        case CPA_STEP_RESERVED: return attend_reserved(c, layer, stream);
        case CPA_STEP_REPLICATED: return attend_replicated(c, layer, stream);
        case CPA_STEP_ALONE:
        case CPA_STEP_MIXED:
        case CPA_STEP_DECODE: break;
    }
    return attend_shared(c, layer, stream);
}

static cpa_status attend_exchanging(cpa_context *c, const cpa_layer *layer, cpa_stream *stream, int64_t call) {
    cpa_progress_hook messages;
    cpa_context_begin_exchanging(c, call, stream, &messages);
    if (!c->is_ahead && !cpa_context_is_reserved(c))
        cpa_plan_agreement_attend(&c->agreement, &c->ops, &c->step, layer, call);
    const cpa_status status = attend_by_kind(c, layer, stream);
    cpa_context_end_exchanging(c, status, &messages);
    return status;
}

/* Others that have begun the layer exchange by the order of their messages: where this rank refuses it, the rest of the
 * step is refused too, and the next plan finds out whether all ranks have refused the same. */
static cpa_status attend_layer(cpa_context *c, const cpa_context_args *args, cpa_stream *stream, int64_t call) {
    cpa_layer layer;
    const int exchanges = cpa_step_exchanges(c->attended);
    cpa_status status = cpa_context_agree_on_plan(c);
    if (status != CPA_OK && !c->broken) return status; /* on all ranks alike */
    if (status == CPA_OK) status = check_layer(c, args, stream, &layer);
    if (status == CPA_OK) status = cpa_context_upload_tables(c, stream);
    if (status == CPA_OK) status = cpa_score_rows_upload(&c->score_rows, &c->ops, stream);
    if (status != CPA_OK) {
        if (exchanges) c->planned = 0;
    } else {
        if (!exchanges) return attend_alone(c, &layer, stream);
        status = attend_exchanging(c, &layer, stream, call);
    }
    if (status != CPA_OK && (c->broken || exchanges))
        cpa_comm_refuse(c->control.comm, c->control.channel, call, c->broken, &c->ops.error);
    return status;
}

cpa_status cpa_context_attend(cpa_context *context, const cpa_context_args *args, cpa_stream *stream) {
    cpa_context *c = context;
    if (!c) return CPA_INVALID;
    const int64_t call = c->calls++;
    cpa_comm_begin_wait(c->control.comm, (cpa_calls){c->control.channel, call, call});
    const int disabled = c->ops.spans.disabled;
    c->ops.spans.disabled |= cpa_context_is_reserved(c); /* whose events a graph of the caller's would hold */
    cpa_status status = attend_layer(c, args, stream, call);
    c->ops.spans.disabled = disabled;
    cpa_comm_end_wait(c->control.comm);
    if (status != CPA_OK || cpa_context_is_reserved(c)) return status;
    cpa_context_count_chunks(c, 1);
    c->layers_attended++;
    if (c->is_ahead) return CPA_OK;
    return cpa_context_check(&c->ops, c->ops.device->table->event_record(c->steps, c->turn, stream), stream);
}
