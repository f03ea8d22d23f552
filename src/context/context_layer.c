/* Context attention: one layer from start to end. */
#include <inttypes.h>
#include <math.h>

#include <cpattn/context.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context.h"
#include "src/context/context_internal.h"
#include "src/ops/check_args.h"
#include "src/ops/check_score.h"
#include "src/ops/check_shape.h"

static cpa_status check_score(cpa_context *c, const cpa_context_args *args) {
    const int64_t end = cpa_context_is_reserved(c) ? 0 : cpa_planned_end(&c->step);
    CPA_TRY(cpa_check_score("attend", args->rules, args->selection, args->bias, &c->ops.error));
    CPA_TRY(
        cpa_check_score_reach("attend", c->ops.device, end, args->rules, args->selection, args->bias, &c->ops.error));
    if (cpa_selection_maps_rows(args->selection) || (args->bias && args->bias->row_map))
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: the row_map of the selection or of the bias is set, expected NULL in a context");
    if (cpa_context_is_reserved(c) && c->ops.map.cp_size > 1 && (args->selection || args->bias))
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED,
                        "attend: a selection or a bias in a reserved step of %d ranks, expected none",
                        c->ops.map.cp_size);
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
    const cpa_cache_form cache = cpa_cache_form_of("the cache", kv), own = {"the context", o->shape, o->block_size};
    CPA_TRY(cpa_check_same_cache("attend", &cache, &own, 0, &c->ops.error));
    const cpa_planned_step *step = c->attended;
    const int32_t max_block = step->max_block[c->ops.table_set];
    if (max_block >= kv->num_blocks) {
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: a block table names block %d of a cache of %" PRId64 ", expected 0..%" PRId64,
                        max_block, kv->num_blocks, kv->num_blocks - 1);
    }
    CPA_TRY(cpa_check_attend("attend", c->ops.device, &o->shape, &args->mask, &c->ops.error));
    CPA_TRY(cpa_check_layer_mask("attend", &args->mask, &c->ops.error));
    if (args->scale - args->scale != 0) {
        return cpa_fail(&c->ops.error, CPA_INVALID, "attend: scale is %g, expected a finite number",
                        (double)args->scale);
    }
    CPA_TRY(check_score(c, args));
    if (step->rows > 0 && (!args->q || (!args->out && !(cpa_step_is_replicated(step) && c->scatter.heads == 0)))) {
        return cpa_fail(&c->ops.error, CPA_INVALID, "attend: %" PRId64 " rows, but q %p and out %p, expected both",
                        step->rows, args->q, args->out);
    }
    if (args->out_scale && cpa_step_is_replicated(step))
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED, "attend: out_scale with replicated rows, expected NULL");
    if (!cpa_context_is_reserved(c) && stream->device->table->stream_is_captured(stream)) {
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED,
                        "attend: the stream is in a capture of the caller's, and the step is not the reserved one");
    }
    const int64_t element = cpa_dtype_bytes(o->shape.dtype);
    CPA_TRY(cpa_check_aligned("attend", "q", args->q, element, &c->ops.error));
    CPA_TRY(cpa_check_aligned("attend", "out", args->out, args->out_scale ? 1 : element, &c->ops.error));
    CPA_TRY(cpa_check_aligned("attend", "out_scale", args->out_scale, sizeof *args->out_scale, &c->ops.error));
    return cpa_check_aligned("attend", "lse", args->lse, sizeof *args->lse, &c->ops.error);
}

/* The last merge, of the first `rows` rows: the own shard with what pass-KV added to it, and what came back in pass-Q.
 * Rounds once. */
static cpa_status merge_states(cpa_context *c, cpa_pass_q *q, const cpa_context_args *args, cpa_partial own,
                               int64_t rows, cpa_stream *stream) {
    const cpa_context_options *o = &c->ops.options;
    cpa_merge_args merge = {
        .size = sizeof merge,
        .rows = rows,
        .heads = o->shape.q_heads,
        .v_dim = o->shape.v_dim,
        .out_dtype = args->out_scale ? CPA_FP8_E4M3 : o->shape.dtype,
        .out_scale = args->out_scale,
        .out = args->out,
        .out_row_stride = (int64_t)o->shape.q_heads * o->shape.v_dim,
        .out_lse = args->lse,
        .out_lse_row_stride = o->shape.q_heads,
        .sink_logits = cpa_context_sinks(&c->ops),
    };
    return cpa_pass_q_merge(q, own, &merge, stream);
}

static cpa_status attend_alone(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_partial state = {.lse = args->lse, .lse_row_stride = c->ops.options.shape.q_heads};
    const cpa_table_plans *plans = cpa_context_is_reserved(c) ? &c->reserved_q.plans : &c->own;
    return cpa_context_attend_own(&c->ops, cpa_table_plans_now(plans, &c->ops), args, state, args->out, stream);
}

static cpa_status attend_shared(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_kv_layer layer = {args, cpa_step_joins_own(&c->step) ? cpa_pass_q_own_state(&c->q) : c->own_state,
                          c->step.rows};
    if (!c->q.active && !args->lse) layer.open_rows = cpa_pass_kv_open_rows(&c->kv);
    CPA_TRY(cpa_pass_q_start(&c->q, args, stream));
    CPA_TRY(cpa_pass_kv_start(&c->kv, &layer, stream));
    CPA_TRY(cpa_context_attend_own(&c->ops, cpa_table_plans_now(&c->own, &c->ops), args, layer.own, NULL, stream));
    CPA_TRY(cpa_pass_kv_attend_own(&c->kv, &layer, stream));
    CPA_TRY(cpa_pass_q_attend_remote(&c->q, args, stream));
    CPA_TRY(cpa_pass_kv_run(&c->kv, &layer, stream));
    CPA_TRY(cpa_pass_q_finish(&c->q, layer.open_rows, stream));
    return merge_states(c, &c->q, args, layer.own, layer.open_rows, stream);
}

/* A layer of the reserved step, if ranks exchange. */
static cpa_status attend_reserved(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_pass_q *q = &c->reserved_q;
    const int64_t rows = c->reserved_step.rows;
    CPA_TRY(cpa_pass_q_start(q, args, stream));
    CPA_TRY(cpa_pass_q_attend_remote(q, args, stream));
    CPA_TRY(cpa_pass_q_finish(q, rows, stream));
    return merge_states(c, q, args, cpa_pass_q_own_state(q), rows, stream);
}

/* Whether all ranks have planned the same, before the first layer. */
static cpa_status agree_on_plan(cpa_context *c) {
    if (c->broken || c->agreement.open == 0) return CPA_OK; /* check_args says that it is broken */
    cpa_status status = cpa_plan_agreement_compare(&c->agreement, &c->ops.error);
    if (status == CPA_OK) {
        c->exchanging = cpa_context_no_calls(); /* what was begun before was begun on all ranks */
        return CPA_OK;
    }
    c->planned = 0;
    c->broken = status != CPA_INVALID || c->agreement.open > 0;
    return status;
}

/* What this rank finds out by itself before it begins; the arguments in *layer. */
static cpa_status check_layer(cpa_context *c, const cpa_context_args *args, const cpa_stream *stream,
                              cpa_context_args *layer) {
    CPA_TRY(CPA_STRUCT_TAKE("attend", args, cpa_context_args, out, layer, &c->ops.error));
    CPA_TRY(check_args(c, layer, stream));
    CPA_TRY(cpa_score_rows_begin(&c->score_rows, &c->ops, cpa_context_is_reserved(c) ? NULL : &c->q, layer));
    if (cpa_context_is_reserved(c) || cpa_step_is_replicated(&c->step)) return CPA_OK;
    cpa_mask sent = layer->mask;
    if (layer->selection && layer->selection->bits) sent.causal = 0; /* bits may show what lies behind a query */
    return cpa_pass_kv_select(&c->kv, sent);
}

static cpa_status attend_by_kind(cpa_context *c, const cpa_context_args *layer, cpa_stream *stream) {
    switch (c->attended->kind) {
        case CPA_STEP_RESERVED: return attend_reserved(c, layer, stream);
        case CPA_STEP_REPLICATED: return cpa_scatter_heads_attend(&c->scatter, layer, stream);
        case CPA_STEP_ALONE:
        case CPA_STEP_MIXED:
        case CPA_STEP_DECODE: break;
    }
    return attend_shared(c, layer, stream);
}

static cpa_status attend_exchanging(cpa_context *c, const cpa_context_args *layer, cpa_stream *stream, int64_t call) {
    cpa_progress_hook messages = cpa_context_hook(&c->ops);
    c->layers_exchanged++;
    c->exchanging = (cpa_calls){c->control.channel, c->exchanging.channel < 0 ? call : c->exchanging.first, call};
    cpa_comm_begin_wait(c->control.comm, c->exchanging);
    if (!c->is_ahead && !cpa_context_is_reserved(c))
        cpa_plan_agreement_attend(&c->agreement, &c->ops, &c->step, layer, call);
    if (!c->is_ahead || cpa_context_is_reserved(c)) cpa_progress_add(&stream->progress, &c->awaiting);
    cpa_progress_add(&stream->progress, &messages);
    const cpa_status status = attend_by_kind(c, layer, stream);
    cpa_progress_remove(&messages);
    c->broken = status != CPA_OK;
    return status;
}

/* Others that have begun the layer exchange by the order of their messages: where this rank refuses it, the rest of the
 * step is refused too, and the next plan finds out whether all ranks have refused the same. */
static cpa_status attend_layer(cpa_context *c, const cpa_context_args *args, cpa_stream *stream, int64_t call) {
    cpa_context_args layer;
    const int exchanges = cpa_step_exchanges(c->attended);
    cpa_status status = agree_on_plan(c);
    if (status != CPA_OK && !c->broken) return status; /* on all ranks alike */
    if (status == CPA_OK) status = check_layer(c, args, stream, &layer);
    if (status == CPA_OK) status = cpa_context_upload_tables(c, stream);
    if (status == CPA_OK) status = cpa_score_rows_upload(&c->score_rows, &c->ops, stream);
    if (status != CPA_OK) {
        if (exchanges) c->planned = 0;
    } else {
        if (layer.scale == 0) layer.scale = 1.0f / sqrtf((float)c->ops.options.shape.k_dim);
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
