/* Context attention: life of a context, and one layer from start to end. */
#include <cpattn/context.h>

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context.h"
#include "src/context/context_internal.h"
#include "src/context/transport_choice.h"
#include "src/ops/check_args.h"
#include "src/ops/check_score.h"
#include "src/ops/check_shape.h"

const char *cpa_algorithm_name(cpa_algorithm algorithm) {
    switch (algorithm) {
        case CPA_AUTO: return "auto";
        case CPA_PASS_KV: return "pass-kv";
        case CPA_PASS_Q: return "pass-q";
    }
    return "unknown";
}

/* Adds the spans of a step, whose stream is idle, to the statistics. */
static cpa_status read_spans(cpa_context *c) {
    cpa_span_totals totals;
    CPA_TRY(cpa_spans_read(&c->ops.spans, &totals, &c->ops.error));
    double attend_s =
        totals.seconds[CPA_SPAN_ATTEND_OWN] + totals.seconds[CPA_SPAN_ATTEND_RECEIVED] + totals.seconds[CPA_SPAN_MERGE];
    double exposed_s = totals.seconds[CPA_SPAN_WAIT];
    c->ops.stats.attend_s += attend_s;
    c->ops.stats.exposed_comm_s += exposed_s;
    c->replayed_s += totals.seconds[CPA_SPAN_GRAPH];
    return CPA_OK;
}

cpa_spans *cpa_context_spans(cpa_context *c) {
    return &c->ops.spans;
}

void cpa_context_set_rows(cpa_context *c, cpa_row_placement rows) {
    c->rows = rows;
}

void cpa_context_set_masked(cpa_context *c, int masked) {
    c->ops.masked = masked;
}

void cpa_context_capture(cpa_context *c, int capturing) {
    c->ops.spans.disabled = capturing;
}

double cpa_context_replayed_seconds(const cpa_context *c) {
    return c->replayed_s;
}

/* ---- life ---- */

enum { MOST_INTERLEAVE = 1 << 20 };
/* More than any device has; a number beyond it is a mistake. */
static const int64_t MOST_STAGING_BYTES = (int64_t)1 << 40;

static cpa_status check_options(const cpa_context_options *o, const cpa_device *device, cpa_error *err) {
    CPA_TRY(cpa_check_attend("context", device, &o->shape, NULL, err));
    CPA_TRY(cpa_check_block_size("context", o->block_size, err));
    if ((o->interleave != 0 && !cpa_interleave_fits(o->interleave, o->block_size)) || o->interleave > MOST_INTERLEAVE) {
        return cpa_fail(err, CPA_INVALID,
                        "context: interleave %d, expected a divisor or a multiple of the block size %d up to %d",
                        o->interleave, o->block_size, MOST_INTERLEAVE);
    }
    if (o->staging_bytes < 0 || o->staging_bytes > MOST_STAGING_BYTES) {
        return cpa_fail(err, CPA_INVALID,
                        "context: staging_bytes: found %" PRId64 ", expected 0 (default) or more, at most %" PRId64,
                        o->staging_bytes, MOST_STAGING_BYTES);
    }
    if (o->rows != CPA_ROWS_OWNED && o->rows != CPA_ROWS_REPLICATED) {
        return cpa_fail(err, CPA_INVALID, "context: rows is %d, expected owned, %d, or replicated, %d", (int)o->rows,
                        CPA_ROWS_OWNED, CPA_ROWS_REPLICATED);
    }
    if (o->cascade_attention < CPA_CASCADE_AUTO || o->cascade_attention > CPA_CASCADE_ALWAYS) {
        return cpa_fail(err, CPA_INVALID, "context: cascade_attention is %d, expected auto (0), off (1) or always (2)",
                        (int)o->cascade_attention);
    }
    if (o->max_rows < 1 || o->max_rows > INT32_MAX) {
        return cpa_fail(err, CPA_INVALID, "context: max_rows %" PRId64 ", expected 1..%d", o->max_rows, INT32_MAX);
    }
    return CPA_OK;
}

/* The options with their defaults filled in. */
static cpa_status take_options(const cpa_context_options *given, const cpa_device *device, cpa_context_options *out,
                               cpa_error *err) {
    if (!device) return cpa_fail(err, CPA_INVALID, "context: no device");
    CPA_TRY(CPA_STRUCT_TAKE("context", given, cpa_context_options, max_rows, out, err));
    CPA_TRY(check_options(out, device, err));
    if (!out->interleave) out->interleave = out->block_size;
    return CPA_OK;
}

int64_t cpa_context_least_staging(const cpa_device *device, const cpa_context_options *options, int32_t size) {
    cpa_context_options taken;
    if (size < 1 || size > CPA_MERGE_MAX_STATES || take_options(options, device, &taken, NULL) != CPA_OK) return 0;
    return cpa_pass_kv_least_staging(&device->caps, &taken, size);
}

/* Everything that needs no other rank. */
static cpa_status create_local(cpa_context *c) {
    if (c->ops.map.cp_size > CPA_MERGE_MAX_STATES) {
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED, "context: %d ranks, at most %d", c->ops.map.cp_size,
                        CPA_MERGE_MAX_STATES);
    }
    CPA_TRY(cpa_context_ops_create(&c->ops));
    CPA_TRY(c->ops.device->table->events_create(c->ops.device, &c->steps, &c->ops.error));
    CPA_TRY(c->ops.device->operators->plan_create(c->ops.device, &c->own, &c->ops.error));
    CPA_TRY(cpa_pass_kv_create(&c->kv, &c->ops, &c->step));
    c->step.own_in_pass_kv = c->kv.gather;
    c->rows = c->ops.options.rows;
    CPA_TRY(cpa_scatter_heads_create(&c->scatter, &c->ops, &c->step));
    return cpa_pass_q_create(&c->q, &c->ops, &c->step);
}

/* Every rank derives the same exchanges from these. */
static cpa_status agree_on_options(cpa_context *c) {
    const cpa_context_options *o = &c->ops.options;
    const cpa_attention_shape *s = &o->shape;
    const cpa_named_value values[] = {
        {"q_heads", s->q_heads},
        {"kv_heads", s->kv_heads},
        {"k_dim", s->k_dim},
        {"v_dim", s->v_dim},
        {"dtype", s->dtype},
        {"kv_dtype", s->kv_dtype},
        {"k_scale", s->k_scale},
        {"v_scale", s->v_scale},
        {"n_scales", s->n_scales},
        {"block_size", o->block_size},
        {"interleave", o->interleave},
        {"max_rows", o->max_rows},
        {"staging_bytes", (double)o->staging_bytes},
        {"rows", o->rows},
    };
    return cpa_control_same(&c->control, "context", values, sizeof values / sizeof values[0], &c->ops.error);
}

static void destroy(cpa_context *c) {
    cpa_stream_detach(&c->awaiting);
    cpa_plan_agreement_close(&c->agreement);
    /* The transport first: what is still in flight (after a failure) uses the buffers. */
    if (c->ops.transport) {
        cpa_comm_begin_wait(c->control.comm, c->exchanging);
        c->ops.transport->table->close(c->ops.transport);
        cpa_comm_end_wait(c->control.comm);
    }
    cpa_control_close(&c->control);
    cpa_pass_q_destroy(&c->reserved_q);
    cpa_scatter_heads_destroy(&c->scatter);
    cpa_score_rows_free(&c->score_rows, &c->ops);
    cpa_pass_q_destroy(&c->q);
    cpa_pass_kv_destroy(&c->kv);
    if (c->ops.device) {
        if (c->steps) c->ops.device->table->events_destroy(c->steps);
        if (c->own) c->ops.device->operators->plan_destroy(c->own);
        cpa_context_free(&c->ops, &c->own_memory);
        cpa_context_free(&c->ops, &c->slices_memory);
    }
    cpa_planned_step_destroy(&c->step);
    cpa_context_ops_destroy(&c->ops);
    free(c);
}

/* Waits for the exchanges of a device's stream, if its transport watches them. */
static cpa_status drain(cpa_context *c, cpa_stream *stream, void (*meanwhile)(void *ctx), void *ctx) {
    cpa_transport *transport = c->ops.transport;
    if (!transport->table->drain) return CPA_OK;
    transport->meanwhile = meanwhile;
    transport->meanwhile_ctx = ctx;
    cpa_comm_begin_wait(c->control.comm, c->exchanging);
    cpa_status status = transport->table->drain(transport, stream->native, &c->ops.error);
    cpa_comm_end_wait(c->control.comm);
    transport->meanwhile = NULL;
    if (status != CPA_OK) c->broken = 1;
    return status;
}

/* For cpa_stream_sync. */
static cpa_status drain_stream(void *context, cpa_stream *stream) {
    cpa_context *c = context;
    cpa_status status = drain(c, stream, NULL, NULL);
    return status == CPA_OK ? CPA_OK : cpa_fail(&stream->error, status, "%s", c->ops.error.message);
}

static const cpa_calls NO_CALLS = {.channel = -1};

cpa_status cpa_context_create_over(cpa_comm *comm, cpa_device *device, const cpa_transport_table *transport,
                                   const cpa_context_options *options, cpa_context **out, cpa_error *err) {
    cpa_control control;
    cpa_error none;
    CPA_TRY(cpa_control_open(comm, &control, err));
    cpa_context *c = calloc(1, sizeof *c);
    cpa_status status = c ? CPA_OK : cpa_fail(&none, CPA_NO_MEMORY, "no memory for a context");
    if (!c) {
        status = cpa_control_agree(&control, status, &none);
        cpa_control_close(&control);
        return cpa_fail(err, status, "%s", none.message);
    }
    c->control = control;
    c->exchanging = NO_CALLS;
    c->awaiting = (cpa_stream_drain){.drain = drain_stream, .ctx = c};
    cpa_plan_agreement_open(&c->agreement, &c->control);

    status = out ? take_options(options, device, &c->ops.options, &c->ops.error)
                 : cpa_fail(&c->ops.error, CPA_INVALID, "context: out is NULL");
    if (status == CPA_OK) {
        c->ops.map = c->step.map = (cpa_owner_map){c->control.size, c->ops.options.interleave};
        c->ops.rank = c->step.rank = c->control.rank;
        c->ops.device = device;
        status = create_local(c);
    }
    CPA_TRY_GOTO(cpa_control_agree(&c->control, status, &c->ops.error), failed);
    CPA_TRY_GOTO(agree_on_options(c), failed);
    if (!transport)
        CPA_TRY_GOTO(cpa_transport_for(&c->control, device, CPA_TRANSPORT_AUTO, &transport, &c->ops.error), failed);
    status = transport->open(&c->control, &c->ops.transport, &c->ops.error);
    CPA_TRY_GOTO(cpa_control_agree(&c->control, status, &c->ops.error), failed);
    *out = c;
    return CPA_OK;

failed:
    cpa_fail(err, status, "%s", c->ops.error.message);
    destroy(c);
    return status;
}

cpa_status cpa_context_create(cpa_comm *comm, cpa_device *device, const cpa_context_options *options, cpa_context **out,
                              cpa_error *err) {
    return cpa_context_create_over(comm, device, NULL, options, out, err);
}

void cpa_context_destroy(cpa_context *context) {
    if (context) destroy(context);
}

cpa_status cpa_context_sync(cpa_context *c, cpa_stream *stream, void (*meanwhile)(void *ctx), void *ctx) {
    CPA_TRY(drain(c, stream, meanwhile, ctx));
    CPA_TRY(cpa_context_check(&c->ops, c->ops.device->table->stream_sync(stream), stream));
    return read_spans(c);
}

cpa_status cpa_context_get_stats(cpa_context *context, cpa_context_stats *out, size_t size) {
    if (!context) return CPA_INVALID;
    cpa_error error = context->ops.error;
    if (read_spans(context) != CPA_OK) context->ops.error = error; /* a step is under way */
    return cpa_struct_give(&context->ops.stats, sizeof context->ops.stats, out, size);
}

const char *cpa_context_error(const cpa_context *context) {
    return context ? context->ops.error.message : "";
}

/* Counts the planned chunks, and their keys, for so many layers. */
static void count_chunks(cpa_context *c, int32_t layers) {
    for (int64_t i = 0; i < c->step.n_chunks; i++) {
        if (c->step.chunks[i].algorithm == CPA_PASS_KV) c->ops.stats.chunks_pass_kv += layers;
        if (c->step.chunks[i].algorithm == CPA_PASS_Q) c->ops.stats.chunks_pass_q += layers;
    }
    c->ops.stats.keys_attended += layers * c->ops.keys_attended;
    c->ops.stats.keys_read += layers * c->ops.keys_read;
}

void cpa_context_account_begin(cpa_context *c, cpa_context_account *account) {
    *account = (cpa_context_account){.before = c->ops.stats};
    c->layers_attended = 0;
}

void cpa_context_account_end(cpa_context *c, cpa_context_account *account) {
    account->bytes_sent = c->ops.stats.bytes_sent - account->before.bytes_sent;
    account->layers = c->layers_attended;
    c->ops.stats = account->before;
}

void cpa_context_account_add(cpa_context *c, const cpa_context_account *account) {
    c->ops.stats.bytes_sent += account->bytes_sent;
    count_chunks(c, account->layers);
}

/* ---- between layers ---- */

cpa_status cpa_context_check_whole(cpa_context *c) {
    if (!c->broken) return CPA_OK;
    return cpa_fail(&c->ops.error, CPA_COMM, "the context failed in an earlier layer and cannot go on");
}

cpa_status cpa_context_exchange_between(cpa_context *c, int32_t n_messages, cpa_span_kind kind, cpa_stream *stream) {
    cpa_context_exchange exchange;
    cpa_status status = cpa_context_start(&c->ops, n_messages, kind, 0, stream, &exchange);
    if (status == CPA_OK) status = cpa_context_finish(&c->ops, stream, &exchange);
    c->broken = status != CPA_OK;
    return status;
}

cpa_status cpa_context_share(cpa_context *c, void *parts, int64_t bytes, cpa_stream *stream) {
    cpa_context_ops *ops = &c->ops;
    int32_t n = 0;
    CPA_TRY(cpa_context_check_whole(c));
    for (int32_t peer = 0; peer < ops->map.cp_size; peer++) {
        if (peer == ops->rank) continue;
        ops->messages[n++] =
            (cpa_message){peer, (char *)parts + ops->rank * bytes, bytes, (char *)parts + peer * bytes, bytes};
    }
    return cpa_context_exchange_between(c, n, CPA_SPAN_EXCHANGE_TOKENS, stream);
}

/* ---- one layer ---- */

static cpa_status check_score(cpa_context *c, const cpa_context_args *args) {
    CPA_TRY(cpa_check_score("attend", args->rules, args->custom, args->bias, &c->ops.error));
    if ((args->custom && args->custom->row_map) || (args->bias && args->bias->row_map))
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: the row_map of the custom mask or of the bias is set, expected NULL in a context");
    if (c->attends_reserved && c->ops.map.cp_size > 1 && (args->custom || args->bias))
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED,
                        "attend: a custom mask or a bias in a reserved step of %d ranks, expected none",
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
    if (kv->dtype != o->shape.kv_dtype || kv->block_size != o->block_size || kv->kv_heads != o->shape.kv_heads ||
        kv->k_dim != o->shape.k_dim || kv->v_dim != o->shape.v_dim) {
        return cpa_fail(
            &c->ops.error, CPA_INVALID,
            "attend: cache of dtype %d, block size %d, %d heads of %d and %d, expected what the context was "
            "created for: %d, %d, %d, %d and %d",
            (int)kv->dtype, kv->block_size, kv->kv_heads, kv->k_dim, kv->v_dim, (int)o->shape.kv_dtype, o->block_size,
            o->shape.kv_heads, o->shape.k_dim, o->shape.v_dim);
    }
    if (kv->k_scale != o->shape.k_scale || kv->v_scale != o->shape.v_scale) {
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: cache with the scales %g and %g, expected those of the context, %g and %g",
                        (double)kv->k_scale, (double)kv->v_scale, (double)o->shape.k_scale, (double)o->shape.v_scale);
    }
    if (kv->n_scales != o->shape.n_scales) {
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: cache with %d scales of heads, expected as many as the context has, %d", kv->n_scales,
                        o->shape.n_scales);
    }
    const cpa_planned_step *step = cpa_context_step(c);
    if (step->max_block >= kv->num_blocks) {
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "attend: a block table names block %d of a cache of %" PRId64 ", expected 0..%" PRId64,
                        step->max_block, kv->num_blocks, kv->num_blocks - 1);
    }
    CPA_TRY(cpa_check_attend("attend", c->ops.device, &o->shape, &args->mask, &c->ops.error));
    CPA_TRY(cpa_check_layer_mask("attend", &args->mask, &c->ops.error));
    if (args->scale - args->scale != 0) {
        return cpa_fail(&c->ops.error, CPA_INVALID, "attend: scale is %g, expected a finite number",
                        (double)args->scale);
    }
    CPA_TRY(check_score(c, args));
    if (step->rows > 0 && (!args->q || (!args->out && !(step->replicated && c->scatter.heads == 0)))) {
        return cpa_fail(&c->ops.error, CPA_INVALID, "attend: %" PRId64 " rows, but q %p and out %p, expected both",
                        step->rows, args->q, args->out);
    }
    if (args->out_scale && step->replicated)
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED, "attend: out_scale with replicated rows, expected NULL");
    if (!c->attends_reserved && stream->device->table->stream_is_captured(stream)) {
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
    const cpa_attend_plan *plan = c->attends_reserved ? c->reserved_q.plan : c->own;
    return cpa_context_attend_own(&c->ops, plan, args, state, args->out, stream);
}

static cpa_status attend_shared(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_kv_layer layer = {args, c->q.attends_own ? cpa_pass_q_own_state(&c->q) : c->own_state, c->step.rows};
    if (!c->q.active && !args->lse) layer.open_rows = cpa_pass_kv_open_rows(&c->kv);
    CPA_TRY(cpa_pass_q_start(&c->q, args, stream));
    CPA_TRY(cpa_pass_kv_start(&c->kv, &layer, stream));
    CPA_TRY(cpa_context_attend_own(&c->ops, c->own, args, layer.own, NULL, stream));
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
        c->exchanging = NO_CALLS; /* what was begun before was begun on all ranks */
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
    CPA_TRY(cpa_score_rows_begin(&c->score_rows, &c->ops, c->attends_reserved ? NULL : &c->q, layer));
    if (c->attends_reserved || c->step.replicated) return CPA_OK;
    cpa_mask sent = layer->mask;
    if (layer->custom) sent.causal = 0; /* bits may show what lies behind a query */
    return cpa_pass_kv_select(&c->kv, sent);
}

static cpa_status attend_exchanging(cpa_context *c, const cpa_context_args *layer, cpa_stream *stream, int64_t call) {
    cpa_context_poll poll;
    c->layers_exchanged++;
    c->exchanging = (cpa_calls){c->control.channel, c->exchanging.channel < 0 ? call : c->exchanging.first, call};
    cpa_comm_begin_wait(c->control.comm, c->exchanging);
    if (c->turn >= 0 && !c->attends_reserved) cpa_plan_agreement_attend(&c->agreement, layer);
    if (c->turn >= 0 || c->attends_reserved) cpa_stream_attach(&c->awaiting, stream);
    cpa_context_poll_begin(&c->ops, stream, &poll);
    cpa_status status = c->attends_reserved  ? attend_reserved(c, layer, stream)
                        : c->step.replicated ? cpa_scatter_heads_attend(&c->scatter, layer, stream)
                                             : attend_shared(c, layer, stream);
    cpa_context_poll_end(&poll);
    c->broken = status != CPA_OK;
    return status;
}

/* Others that have begun the layer exchange by the order of their messages: where this rank refuses it, the rest of the
 * step is refused too, and the next plan finds out whether all ranks have refused the same. */
static cpa_status attend_layer(cpa_context *c, const cpa_context_args *args, cpa_stream *stream, int64_t call) {
    cpa_context_args layer;
    const int exchanges = cpa_context_step(c)->exchanges;
    cpa_status status = agree_on_plan(c);
    if (status != CPA_OK && !c->broken) return status; /* on all ranks alike */
    if (status == CPA_OK) status = check_layer(c, args, stream, &layer);
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
    c->ops.spans.disabled |= c->attends_reserved; /* whose events a graph of the caller's would hold */
    cpa_status status = attend_layer(c, args, stream, call);
    c->ops.spans.disabled = disabled;
    cpa_comm_end_wait(c->control.comm);
    if (status != CPA_OK || c->attends_reserved) return status;
    count_chunks(c, 1);
    c->layers_attended++;
    if (c->turn < 0) return CPA_OK;
    return cpa_context_check(&c->ops, c->ops.device->table->event_record(c->steps, c->turn, stream), stream);
}
