/* Context attention: life of a context, what it tells, and exchanges between layers. */
#include <cpattn/context.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context.h"
#include "src/context/context_internal.h"
#include "src/context/expanded_keys.h"
#include "src/context/index_choice_plan.h"
#include "src/context/transport_choice.h"
#include "src/ops/check_args.h"
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
    c->estimate_s += totals.seconds[CPA_SPAN_ESTIMATE];
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

void cpa_context_set_precise(cpa_context *c, int64_t tokens, int32_t table_set) {
    c->ops.precise = (cpa_precise_keys){.tokens = tokens, .table_set = table_set};
}

void cpa_context_set_least_blocks(cpa_context *c, int64_t tokens) {
    c->ops.least_blocks = tokens;
}

void cpa_context_use_precise(cpa_context *c, const cpa_kv_view *kv) {
    c->ops.precise.kv = *kv;
}

void cpa_context_capture(cpa_context *c, int capturing) {
    c->ops.spans.disabled = capturing;
}

double cpa_context_replayed_seconds(const cpa_context *c) {
    return c->replayed_s;
}

double cpa_context_estimate_seconds(const cpa_context *c) {
    return c->estimate_s;
}

/* ---- life ---- */

enum { MOST_INTERLEAVE = 1 << 20 };
/* More than any device has; a number beyond it is a mistake. */
static const int64_t MOST_STAGING_BYTES = (int64_t)1 << 40;

static cpa_status check_unquantised(const cpa_context_options *o, cpa_error *err) {
    if (o->has_unquantised == 0) return CPA_OK;
    if (o->has_unquantised == 1 && cpa_dtype_is_quantised(o->shape.kv_dtype) && !o->shape.v_in_k) return CPA_OK;
    return cpa_fail(
        err, CPA_INVALID,
        "context: has_unquantised is %d over a cache of %s with v_in_k %d, expected 0, or 1 over a quantised "
        "one with v_in_k 0",
        o->has_unquantised, cpa_dtype_name(o->shape.kv_dtype), o->shape.v_in_k);
}

static cpa_status check_options(const cpa_context_options *o, cpa_error *err) {
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
    CPA_TRY(cpa_check_dtype("context", "state_dtype", o->state_dtype, err));
    if (o->ring_bytes < 0 || o->ring_bytes > MOST_STAGING_BYTES) {
        return cpa_fail(err, CPA_INVALID,
                        "context: ring_bytes: found %" PRId64 ", expected 0 (none) or more, at most %" PRId64,
                        o->ring_bytes, MOST_STAGING_BYTES);
    }
    if (o->ring_bytes > 0 && (o->n_forms > 0 || o->index.heads > 0)) {
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "context: %d forms and an indexer of %d heads over caches on the host, expected neither",
                        o->n_forms, o->index.heads);
    }
    if (o->ring_bytes > 0 && o->has_unquantised)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "context: caches of several dtypes (has_unquantised) on the host, expected one for all layers");
    CPA_TRY(check_unquantised(o, err));
    CPA_TRY(cpa_check_skip_tiles("context", o->skip_tiles, err));
    if (o->max_rows < 1 || o->max_rows > INT32_MAX) {
        return cpa_fail(err, CPA_INVALID, "context: max_rows %" PRId64 ", expected 1..%d", o->max_rows, INT32_MAX);
    }
    return CPA_OK;
}

/* The options with their defaults filled in. */
static cpa_status take_options(const cpa_context_options *given, const cpa_device *device, int32_t ranks,
                               cpa_context_options *out, cpa_forms *forms, cpa_error *err) {
    if (!device) return cpa_fail(err, CPA_INVALID, "context: no device");
    CPA_TRY(CPA_STRUCT_TAKE("context", given, cpa_context_options, max_rows, out, err));
    CPA_TRY(cpa_forms_take(device, out, forms, err));
    CPA_TRY(check_options(out, err));
    out->forms = NULL;
    if (!out->interleave) out->interleave = out->block_size;
    return cpa_index_form_take(out, ranks, &out->index, err);
}

int64_t cpa_context_least_staging(const cpa_device *device, const cpa_context_options *options, int32_t size) {
    cpa_context_options taken;
    cpa_forms forms;
    if (size < 1 || size > CPA_MERGE_MAX_STATES || take_options(options, device, size, &taken, &forms, NULL) != CPA_OK)
        return 0;
    return cpa_pass_kv_least_staging(device, &taken, &forms, size);
}

/* The ring through which an own shard comes that lies on the host. */
static cpa_status open_ring(cpa_context *c) {
    const cpa_context_options *o = &c->ops.options;
    const cpa_kv_ring_options ring = {.size = sizeof ring,
                                      .shape = o->shape,
                                      .block_size = o->block_size,
                                      .segments = o->ring_segments,
                                      .bytes = o->ring_bytes};
    const int64_t least = cpa_kv_ring_least_bytes(c->ops.device, &ring);
    if (o->ring_bytes == 0) return CPA_OK;
    if (o->ring_bytes < least)
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "context: ring_bytes: found %" PRId64 ", expected at least %" PRId64, o->ring_bytes, least);
    return cpa_kv_ring_open(c->ops.device, &ring, 0, &c->ops.ring, &c->ops.error);
}

/* Everything that needs no other rank. */
static cpa_status create_local(cpa_context *c) {
    if (c->ops.map.cp_size > CPA_MERGE_MAX_STATES) {
        return cpa_fail(&c->ops.error, CPA_UNSUPPORTED, "context: %d ranks, at most %d", c->ops.map.cp_size,
                        CPA_MERGE_MAX_STATES);
    }
    CPA_TRY(cpa_context_ops_create(&c->ops));
    CPA_TRY(open_ring(c));
    CPA_TRY(c->ops.device->table->events_create(c->ops.device, &c->steps, &c->ops.error));
    CPA_TRY(cpa_block_tables_create(c->ops.device, 1, &c->tables, &c->ops.error));
    c->step.tables = c->tables;
    c->attended = &c->step;
    c->step.gathers = cpa_pass_kv_gathers(&c->ops.device->caps, &c->ops.options);
    CPA_TRY(cpa_pass_kv_create(&c->kv, &c->ops, &c->step));
    cpa_index_choice_create(&c->choice, &c->ops, &c->step);
    c->rows = c->ops.options.rows;
    for (int32_t f = 0; f < c->ops.forms.count; f++)
        CPA_TRY(cpa_form_lane_create(&c->lanes[f], &c->ops, &c->ops.forms.list[f], &c->step));
    for (int32_t f = 0; f < c->ops.forms.count; f++)
        if (c->ops.forms.list[f].is_expanded) CPA_TRY(cpa_expanded_keys_warm_up(&c->ops, &c->ops.forms.list[f]));
    return CPA_OK;
}

static cpa_status agree_on_form(cpa_context *c, int32_t index) {
    const cpa_form *form = &c->ops.forms.list[index];
    char where[32];
    snprintf(where, sizeof where, "context: form %d", index);
    const cpa_named_value values[] = {{"k_dim", form->shape.k_dim},    {"v_dim", form->shape.v_dim},
                                      {"out_dim", form->out_dim},      {"matrix", form->has_matrix},
                                      {"expanded", form->is_expanded}, {"absorbs", form->absorbs}};
    return cpa_control_same(&c->control, where, values, sizeof values / sizeof values[0], &c->ops.error);
}

static cpa_status agree_on_indexer(cpa_context *c) {
    const cpa_index_form *form = &c->ops.options.index;
    const cpa_named_value values[] = {
        {"scores_bytes", (double)form->scores_bytes},
        {"heads", form->heads},
        {"dim", form->dim},
        {"dtype", form->dtype},
        {"has_weights", form->has_weights},
        {"k", form->k},
        {"unit", form->unit},
        {"tokens_per_key", form->tokens_per_key},
        {"forced_first", form->forced_first},
        {"forced_last", form->forced_last},
    };
    return cpa_control_same(&c->control, "context: indexer", values, sizeof values / sizeof values[0], &c->ops.error);
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
        {"v_in_k", s->v_in_k},
        {"dtype", s->dtype},
        {"kv_dtype", s->kv_dtype},
        {"layout", s->layout},
        {"k_scale", s->k_scale},
        {"v_scale", s->v_scale},
        {"n_scales", s->n_scales},
        {"block_size", o->block_size},
        {"interleave", o->interleave},
        {"max_rows", o->max_rows},
        {"staging_bytes", (double)o->staging_bytes},
        {"rows", o->rows},
        {"cascade_attention", o->cascade_attention},
        {"n_forms", o->n_forms},
        {"state_dtype", o->state_dtype},
        {"ring_bytes", (double)o->ring_bytes},
        {"ring_segments", o->ring_segments},
        {"has_unquantised", o->has_unquantised},
        {"skip_tiles", (double)o->skip_tiles},
    };
    CPA_TRY(cpa_control_same(&c->control, "context", values, sizeof values / sizeof values[0], &c->ops.error));
    for (int32_t f = 0; f < o->n_forms; f++) CPA_TRY(agree_on_form(c, f));
    return agree_on_indexer(c);
}

static void destroy(cpa_context *c) {
    cpa_progress_remove(&c->awaiting);
    cpa_plan_agreement_close(&c->agreement);
    /* The transport first: what is still in flight (after a failure) uses the buffers. */
    if (c->ops.transport) {
        cpa_comm_begin_wait(c->control.comm, c->exchanging);
        c->ops.transport->table->close(c->ops.transport);
        cpa_comm_end_wait(c->control.comm);
    }
    cpa_control_close(&c->control);
    cpa_form_lane_destroy(&c->reserved, &c->ops);
    for (int32_t f = 0; f < CPA_MOST_ROW_FORMS; f++) cpa_form_lane_destroy(&c->lanes[f], &c->ops);
    cpa_score_rows_free(&c->score_rows, &c->ops);
    cpa_index_choice_destroy(&c->choice);
    cpa_pass_kv_destroy(&c->kv);
    if (c->ops.device) {
        if (c->steps) c->ops.device->table->events_destroy(c->steps);
        cpa_block_tables_destroy(c->tables);
        cpa_context_free(&c->ops, &c->slices_memory);
    }
    cpa_planned_step_destroy(&c->step);
    cpa_context_ops_destroy(&c->ops);
    free(c);
}

/* Waits for the exchanges of a device's stream, if its transport watches them; meanwhile `beside` moves. */
static cpa_status drain(cpa_context *c, cpa_stream *stream, const cpa_progress *beside) {
    cpa_transport *transport = c->ops.transport;
    if (!transport->table->drain) return CPA_OK;
    const cpa_calls outer = cpa_comm_begin_wait(c->control.comm, c->exchanging); /* a layer may wait in its middle */
    cpa_status status = transport->table->drain(transport, stream->native, beside, &c->ops.error);
    cpa_comm_begin_wait(c->control.comm, outer);
    if (status != CPA_OK) c->broken = 1;
    return status;
}

/* For cpa_stream_sync. More of a step may be enqueued behind it: what idle times are for, such as the next step, waits. */
static cpa_status drain_stream(void *context, cpa_stream *stream) {
    cpa_context *c = context;
    cpa_status status = drain(c, stream, NULL);
    return status == CPA_OK ? CPA_OK : cpa_fail(&stream->error, status, "%s", c->ops.error.message);
}

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
    c->exchanging = cpa_context_no_calls();
    c->awaiting = (cpa_progress_hook){.drain = drain_stream, .ctx = c};
    cpa_plan_agreement_open(&c->agreement, &c->control);

    status = out ? take_options(options, device, c->control.size, &c->ops.options, &c->ops.forms, &c->ops.error)
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

cpa_status cpa_context_sync(cpa_context *c, cpa_stream *stream) {
    CPA_TRY(drain(c, stream, &stream->progress));
    CPA_TRY(cpa_context_check(&c->ops, c->ops.device->table->stream_sync(stream), stream));
    return read_spans(c);
}

cpa_status cpa_context_get_stats(cpa_context *context, cpa_context_stats *out, size_t size) {
    if (!context) return CPA_INVALID;
    cpa_error error = context->ops.error;
    if (read_spans(context) != CPA_OK) context->ops.error = error; /* a step is under way */
    if (cpa_context_read_tiles(&context->ops) != CPA_OK) context->ops.error = error;
    cpa_context_stats stats = context->ops.stats;
    if (context->ops.ring) cpa_kv_ring_get_stats(context->ops.ring, &stats.ring, sizeof stats.ring);
    memcpy(stats.decode_kernels, context->ops.decode_kernels, sizeof stats.decode_kernels);
    memcpy(stats.prefill_kernels, context->ops.prefill_kernels, sizeof stats.prefill_kernels);
    return cpa_struct_give(&stats, sizeof stats, out, size);
}

const char *cpa_context_error(const cpa_context *context) {
    return context ? context->ops.error.message : "";
}

void cpa_context_count_chunks(cpa_context *c, int32_t layers) {
    for (int64_t i = 0; i < c->step.n_chunks; i++) {
        if (c->step.chunks[i].algorithm == CPA_PASS_KV) c->ops.stats.chunks_pass_kv += layers;
        if (c->step.chunks[i].algorithm == CPA_PASS_Q) c->ops.stats.chunks_pass_q += layers;
    }
    c->ops.stats.keys_attended += layers * c->ops.keys_attended;
    c->ops.stats.keys_read += layers * c->ops.keys_read;
}

const int64_t *cpa_context_bytes_to(const cpa_context *c) {
    return c->ops.bytes_to;
}

void cpa_context_account_begin(cpa_context *c, cpa_context_account *account) {
    *account = (cpa_context_account){.before = c->ops.stats};
    memcpy(account->bytes_to, c->ops.bytes_to, sizeof account->bytes_to);
    c->layers_attended = 0;
}

void cpa_context_account_end(cpa_context *c, cpa_context_account *account) {
    account->bytes_sent = c->ops.stats.bytes_sent - account->before.bytes_sent;
    account->row_bytes_sent = c->ops.stats.row_bytes_sent - account->before.row_bytes_sent;
    account->index_bytes_sent = c->ops.stats.index_bytes_sent - account->before.index_bytes_sent;
    account->plain_rows = c->ops.stats.plain_rows - account->before.plain_rows;
    account->layers = c->layers_attended;
    c->ops.stats = account->before;
    for (int32_t peer = 0; peer < c->control.size; peer++) {
        const int64_t before = account->bytes_to[peer];
        account->bytes_to[peer] = c->ops.bytes_to[peer] - before;
        c->ops.bytes_to[peer] = before;
    }
}

void cpa_context_account_add(cpa_context *c, const cpa_context_account *account) {
    c->ops.stats.bytes_sent += account->bytes_sent;
    c->ops.stats.row_bytes_sent += account->row_bytes_sent;
    c->ops.stats.index_bytes_sent += account->index_bytes_sent;
    c->ops.stats.plain_rows += account->plain_rows;
    for (int32_t peer = 0; peer < c->control.size; peer++) c->ops.bytes_to[peer] += account->bytes_to[peer];
    cpa_context_count_chunks(c, account->layers);
}

/* ---- between layers ---- */

cpa_status cpa_context_check_whole(cpa_context *c) {
    if (!c->broken) return CPA_OK;
    return cpa_fail(&c->ops.error, CPA_COMM, "the context failed in an earlier layer and cannot go on");
}

cpa_status cpa_context_agree_on_plan(cpa_context *c) {
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

void cpa_context_begin_exchanging(cpa_context *c, int64_t call, cpa_stream *stream, cpa_progress_hook *messages) {
    *messages = cpa_context_hook(&c->ops);
    c->layers_exchanged++;
    c->exchanging = (cpa_calls){c->control.channel, c->exchanging.channel < 0 ? call : c->exchanging.first, call};
    cpa_comm_begin_wait(c->control.comm, c->exchanging);
    cpa_progress_add(&stream->progress, &c->awaiting);
    cpa_progress_add(&stream->progress, messages);
}

void cpa_context_end_exchanging(cpa_context *c, cpa_status status, cpa_progress_hook *messages) {
    cpa_progress_remove(messages);
    c->broken = status != CPA_OK;
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
