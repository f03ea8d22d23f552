/* Context attention: life of a context, and one layer from start to end. */
#include <cpattn/context.h>

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/fault.h"
#include "src/context/context_internal.h"
#include "src/context/transport_choice.h"
#include "src/ops/check_args.h"

const char *cpa_algorithm_name(cpa_algorithm algorithm) {
    switch (algorithm) {
        case CPA_AUTO: return "auto";
        case CPA_PASS_KV: return "pass-kv";
        case CPA_PASS_Q: return "pass-q";
    }
    return "unknown";
}

/* ---- memory ---- */

cpa_status cpa_context_ensure(cpa_context *c, cpa_context_buffer *buffer, int64_t bytes) {
    if (bytes <= buffer->bytes && buffer->memory) return CPA_OK;
    int64_t grown = bytes < 2 * buffer->bytes ? 2 * buffer->bytes : bytes > 0 ? bytes : 1;
    void *memory;
    CPA_TRY(c->device->table->alloc(c->device, grown, &memory, &c->error));
    c->device->table->retire(c->device, buffer->memory);
    *buffer = (cpa_context_buffer){memory, grown};
    return CPA_OK;
}

void *cpa_context_grow(cpa_context *c, void *array, int64_t *capacity, int64_t n, size_t element) {
    if (n <= *capacity && array) return array;
    int64_t grown = n < 2 * *capacity ? 2 * *capacity : n > 0 ? n : 1;
    void *moved = realloc(array, (size_t)grown * element);
    if (moved) {
        *capacity = grown;
    } else {
        cpa_fail(&c->error, CPA_NO_MEMORY, "no memory for %" PRId64 " entries of a plan", grown);
    }
    return moved;
}

cpa_status cpa_context_upload(cpa_context *c, void *dst, const void *src, int64_t bytes) {
    CPA_TRY(cpa_context_check(c, c->device->table->copy(dst, src, bytes, c->upload), c->upload));
    return cpa_context_check(c, c->device->table->stream_sync(c->upload), c->upload);
}

cpa_status cpa_context_ensure_state(cpa_context *c, cpa_context_buffer *buffer, int64_t rows, cpa_partial *out) {
    int64_t heads = c->options.shape.q_heads, width = heads * c->options.shape.v_dim;
    CPA_TRY(cpa_context_ensure(c, buffer, rows * (width + heads) * (int64_t)sizeof(float)));
    float *o = buffer->memory;
    *out = (cpa_partial){.o = o, .o_row_stride = width, .lse = o + rows * width, .lse_row_stride = heads};
    return CPA_OK;
}

cpa_partial cpa_context_state_at(cpa_partial state, int64_t row) {
    state.o += row * state.o_row_stride;
    state.lse += row * state.lse_row_stride;
    return state;
}

/* ---- operations and messages ---- */

cpa_status cpa_context_check(cpa_context *c, cpa_status status, const cpa_stream *stream) {
    return status == CPA_OK ? CPA_OK : cpa_fail(&c->error, status, "%s", stream->error.message);
}

cpa_status cpa_context_set_plan(cpa_context *c, cpa_attend_plan *plan, int64_t n_items, const int32_t *block_tables,
                                int64_t n_table_entries, cpa_attend_fusion fusion) {
    cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = c->map,
        .shape = c->options.shape,
        .block_size = c->options.block_size,
        .items = c->items,
        .n_items = n_items,
        .block_tables = block_tables,
        .n_table_entries = n_table_entries,
    };
    return c->device->operators->plan_set(plan, &batch, fusion, &c->error);
}

cpa_status cpa_context_run_attend(cpa_context *c, const cpa_attend_plan *plan, const cpa_attend_args *args,
                                  const void *ready_q, cpa_span_kind kind, int32_t round, cpa_stream *stream) {
    if (plan->n_items == 0) return CPA_OK;
    int64_t span = cpa_spans_begin(&c->spans, kind, round, stream);
    cpa_status status = c->device->operators->attend(plan, args, ready_q, stream);
    cpa_spans_end(&c->spans, span, stream);
    return cpa_context_check(c, status, stream);
}

cpa_status cpa_context_run_merge(cpa_context *c, const cpa_merge_args *args, const cpa_store_batch *awaited,
                                 cpa_stream *stream) {
    if (args->rows == 0) return CPA_OK;
    int64_t span = cpa_spans_begin(&c->spans, CPA_SPAN_MERGE, 0, stream);
    cpa_status status = c->device->operators->merge(args, awaited, stream);
    cpa_spans_end(&c->spans, span, stream);
    return cpa_context_check(c, status, stream);
}

cpa_status cpa_context_start(cpa_context *c, int32_t n_messages, cpa_span_kind kind, int32_t round, cpa_stream *stream,
                             cpa_context_exchange *out) {
    out->span = cpa_spans_begin(&c->spans, kind, round, stream);
    out->round = round;
    CPA_TRY(c->transport->table->start(c->transport, c->messages, n_messages, stream->native, &out->handle, &c->error));
    for (int32_t i = 0; i < n_messages; i++) c->stats.bytes_sent += c->messages[i].send_bytes;
    return CPA_OK;
}

cpa_status cpa_context_finish(cpa_context *c, cpa_stream *stream, cpa_context_exchange *exchange) {
    double waited;
    cpa_exchange *ending = exchange->handle;
    exchange->handle = NULL;
    int64_t span = cpa_spans_begin(&c->spans, CPA_SPAN_WAIT, exchange->round, stream);
    cpa_status status = c->transport->table->finish(c->transport, ending, stream->native, &waited, &c->error);
    cpa_spans_end(&c->spans, span, stream);
    cpa_spans_end(&c->spans, exchange->span, stream);
    return status;
}

/* Adds the spans of a step, whose stream is idle, to the statistics. */
static cpa_status read_spans(cpa_context *c) {
    cpa_span_totals totals;
    CPA_TRY(cpa_spans_read(&c->spans, &totals, &c->error));
    double attend_s =
        totals.seconds[CPA_SPAN_ATTEND_OWN] + totals.seconds[CPA_SPAN_ATTEND_RECEIVED] + totals.seconds[CPA_SPAN_MERGE];
    double exposed_s = totals.seconds[CPA_SPAN_WAIT];
    if (c->sampled_step) {
        if (!c->spans.muted) {
            c->sampled_attend_s = attend_s;
            c->sampled_exposed_s = exposed_s;
        }
        attend_s = c->sampled_attend_s;
        exposed_s = c->sampled_exposed_s;
        c->sampled_step = 0;
    }
    c->stats.attend_s += attend_s;
    c->stats.exposed_comm_s += exposed_s;
    return CPA_OK;
}

void cpa_context_mute(cpa_context *c, int muted) {
    c->sampled_step = 1;
    c->spans.muted = muted;
}

cpa_status cpa_context_spoil_lse(cpa_context *c, cpa_partial state, int64_t rows, cpa_stream *stream) {
    const float log2_e = 1.44269504f;
    const int64_t width = c->options.shape.q_heads * (int64_t)sizeof(float);
    const int64_t pitch = state.lse_row_stride * (int64_t)sizeof(float);
    float *lse = malloc((size_t)(rows * width) + 1);
    if (!lse) return cpa_fail(&c->error, CPA_NO_MEMORY, "context: no memory for %" PRId64 " rows", rows);
    cpa_status status;
    CPA_TRY_GOTO(c->device->table->copy_rows(lse, width, state.lse, pitch, width, rows, stream), done);
    CPA_TRY_GOTO(c->device->table->stream_sync(stream), done);
    for (int64_t i = 0; i < rows * c->options.shape.q_heads; i++)
        lse[i] = cpa_fault_is(CPA_FAULT_BASE2_LSE) ? lse[i] * log2_e : -INFINITY;
    CPA_TRY_GOTO(c->device->table->copy_rows(state.lse, pitch, lse, width, width, rows, stream), done);
    status = c->device->table->stream_sync(stream);
done:
    free(lse);
    return cpa_context_check(c, status, stream);
}

/* ---- life ---- */

static cpa_status check_options(const cpa_context_options *o, const cpa_device *device, cpa_error *err) {
    if (!device) return cpa_fail(err, CPA_INVALID, "context: no device");
    if (o->size != sizeof *o) {
        return cpa_fail(err, CPA_INVALID, "context: options of %zu bytes, expected %zu", o->size, sizeof *o);
    }
    CPA_TRY(cpa_check_shape("context", &o->shape, err));
    if (o->block_size < 1 || (o->block_size & (o->block_size - 1)) != 0) {
        return cpa_fail(err, CPA_INVALID, "context: block size %d, expected a power of two", o->block_size);
    }
    if (o->interleave < 0 || o->interleave % o->block_size != 0) {
        return cpa_fail(err, CPA_INVALID, "context: interleave %d, expected a multiple of the block size %d",
                        o->interleave, o->block_size);
    }
    if (o->staging_bytes < 0) {
        return cpa_fail(err, CPA_INVALID, "context: staging_bytes: found %" PRId64 ", expected 0 (default) or more",
                        o->staging_bytes);
    }
    if (o->max_rows < 1 || o->max_rows > INT32_MAX) {
        return cpa_fail(err, CPA_INVALID, "context: max_rows %" PRId64 ", expected 1..%d", o->max_rows, INT32_MAX);
    }
    return CPA_OK;
}

/* Everything that needs no other rank. */
static cpa_status create_local(cpa_context *c) {
    if (c->map.cp_size > CPA_MERGE_MAX_STATES) {
        return cpa_fail(&c->error, CPA_UNSUPPORTED, "context: %d ranks, at most %d", c->map.cp_size,
                        CPA_MERGE_MAX_STATES);
    }
    size_t size = (size_t)c->map.cp_size;
    c->messages = calloc(size, sizeof *c->messages);
    c->states = calloc(size, sizeof *c->states);
    c->row_maps = calloc(size, sizeof *c->row_maps);
    if (!c->messages || !c->states || !c->row_maps) {
        return cpa_fail(&c->error, CPA_NO_MEMORY, "context: no memory for %zu ranks", size);
    }
    CPA_TRY(cpa_spans_create(&c->spans, c->device, &c->error));
    CPA_TRY(c->device->table->events_create(c->device, &c->steps, &c->error));
    CPA_TRY(c->device->table->stream_create(c->device, &c->upload, &c->error));
    CPA_TRY(c->device->operators->plan_create(c->device, &c->own, &c->error));
    CPA_TRY(cpa_pass_kv_create(c));
    return cpa_pass_q_create(c);
}

static void destroy(cpa_context *c) {
    /* The transport first: what is still in flight (after a failure) uses the buffers. */
    if (c->transport) c->transport->table->close(c->transport);
    cpa_control_close(&c->control);
    cpa_pass_q_destroy(c);
    cpa_pass_kv_destroy(c);
    if (c->device) {
        cpa_spans_destroy(&c->spans);
        if (c->steps) c->device->table->events_destroy(c->steps);
        c->device->table->free(c->device, c->acc_memory.memory);
        if (c->own) c->device->operators->plan_destroy(c->own);
        if (c->upload) c->device->table->stream_destroy(c->upload);
    }
    free(c->items);
    free(c->block_tables);
    free(c->chunks);
    free(c->row_maps);
    free(c->states);
    free(c->messages);
    free(c);
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

    status = check_options(options, device, &c->error);
    if (status == CPA_OK) {
        c->options = *options;
        if (!c->options.interleave) c->options.interleave = c->options.block_size;
        c->map = (cpa_owner_map){c->control.size, c->options.interleave};
        c->device = device;
        status = create_local(c);
    }
    CPA_TRY_GOTO(cpa_control_agree(&c->control, status, &c->error), failed);
    if (!transport)
        CPA_TRY_GOTO(cpa_transport_for(&c->control, device, CPA_TRANSPORT_AUTO, &transport, &c->error), failed);
    status = transport->open(&c->control, &c->transport, &c->error);
    CPA_TRY_GOTO(cpa_control_agree(&c->control, status, &c->error), failed);
    *out = c;
    return CPA_OK;

failed:
    cpa_fail(err, status, "%s", c->error.message);
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
    const cpa_transport_table *table = c->transport->table;
    if (table->drain) CPA_TRY(table->drain(c->transport, stream->native, &c->error));
    CPA_TRY(cpa_context_check(c, c->device->table->stream_sync(stream), stream));
    return read_spans(c);
}

void cpa_context_get_stats(cpa_context *context, cpa_context_stats *out) {
    cpa_error error = context->error;
    if (read_spans(context) != CPA_OK) context->error = error; /* a step is under way */
    *out = context->stats;
}

const char *cpa_context_error(const cpa_context *context) {
    return context->error.message;
}

/* ---- one layer ---- */

static cpa_status check_args(cpa_context *c, const cpa_context_args *args, const cpa_stream *stream) {
    const cpa_context_options *o = &c->options;
    const cpa_kv_view *kv = &args->kv;
    if (c->broken) return cpa_fail(&c->error, CPA_COMM, "the context failed in an earlier layer and cannot go on");
    if (!c->planned) return cpa_fail(&c->error, CPA_INVALID, "attend: no step is planned");
    if (args->size != sizeof *args || !stream) {
        return cpa_fail(&c->error, CPA_INVALID, "attend: arguments of %zu bytes (expected %zu), stream %p", args->size,
                        sizeof *args, (const void *)stream);
    }
    if (kv->dtype != o->shape.kv_dtype || kv->block_size != o->block_size || kv->kv_heads != o->shape.kv_heads ||
        kv->k_dim != o->shape.k_dim || kv->v_dim != o->shape.v_dim) {
        return cpa_fail(&c->error, CPA_INVALID,
                        "attend: cache of dtype %d, block size %d, %d heads of %d and %d; the context was created for "
                        "%d, %d, %d, %d and %d",
                        (int)kv->dtype, kv->block_size, kv->kv_heads, kv->k_dim, kv->v_dim, (int)o->shape.kv_dtype,
                        o->block_size, o->shape.kv_heads, o->shape.k_dim, o->shape.v_dim);
    }
    if (kv->k_scale != o->shape.k_scale || kv->v_scale != o->shape.v_scale) {
        return cpa_fail(&c->error, CPA_INVALID,
                        "attend: cache with the scales %g and %g; the context was created for %g and %g",
                        (double)kv->k_scale, (double)kv->v_scale, (double)o->shape.k_scale, (double)o->shape.v_scale);
    }
    if (c->max_block >= kv->num_blocks) {
        return cpa_fail(&c->error, CPA_INVALID, "attend: a block table names block %d of a cache of %" PRId64,
                        c->max_block, kv->num_blocks);
    }
    if (args->mask.window < 0 || args->mask.sinks < 0) {
        return cpa_fail(&c->error, CPA_INVALID, "attend: window %" PRId64 " and %d sinks, expected 0 or more",
                        args->mask.window, args->mask.sinks);
    }
    if (c->rows > 0 && (!args->q || !args->out || !kv->k || !kv->v)) {
        return cpa_fail(&c->error, CPA_INVALID, "attend: %" PRId64 " rows, but q %p, out %p, k %p, v %p", c->rows,
                        args->q, args->out, kv->k, kv->v);
    }
    return CPA_OK;
}

cpa_status cpa_context_attend_own(cpa_context *c, const cpa_attend_plan *plan, const cpa_context_args *args,
                                  cpa_partial state, void *out, cpa_stream *stream) {
    cpa_attend_args attend = {
        .size = sizeof attend,
        .q = args->q,
        .q_dtype = c->options.shape.dtype,
        .q_row_stride = (int64_t)c->options.shape.q_heads * c->options.shape.k_dim,
        .kv = args->kv,
        .mask = args->mask,
        .scale = args->scale,
        .state = state,
        .out = out,
    };
    return cpa_context_run_attend(c, plan, &attend, NULL, CPA_SPAN_ATTEND_OWN, 0, stream);
}

/* The last merge, of the first `rows` rows: the own shard with what pass-KV added to it, and what came home in pass-Q.
 * Rounds once. */
static cpa_status merge_states(cpa_context *c, const cpa_context_args *args, int64_t rows, cpa_stream *stream) {
    cpa_merge_args merge = {
        .size = sizeof merge,
        .rows = rows,
        .heads = c->options.shape.q_heads,
        .v_dim = c->options.shape.v_dim,
        .states = c->states,
        .row_maps = c->row_maps,
        .n_states = c->n_states,
        .out_dtype = c->options.shape.dtype,
        .out = args->out,
        .out_row_stride = (int64_t)c->options.shape.q_heads * c->options.shape.v_dim,
        .out_lse = args->lse,
        .out_lse_row_stride = c->options.shape.q_heads,
    };
    return cpa_context_run_merge(c, &merge, &c->q.awaited, stream);
}

static cpa_status attend_alone(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_partial state = {.lse = args->lse, .lse_row_stride = c->options.shape.q_heads};
    return cpa_context_attend_own(c, c->own, args, state, args->out, stream);
}

static cpa_status attend_shared(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    CPA_TRY(cpa_pass_q_start(c, args, stream));
    CPA_TRY(cpa_pass_kv_start(c, args, stream));
    CPA_TRY(cpa_context_attend_own(c, c->own, args, c->states[0], NULL, stream));
    CPA_TRY(cpa_pass_kv_attend_own(c, args, stream));
    CPA_TRY(cpa_pass_q_serve(c, args, stream));
    CPA_TRY(cpa_pass_kv_run(c, args, stream));
    const int64_t rows = cpa_pass_kv_open_rows(c, args);
    CPA_TRY(cpa_pass_q_finish(c, rows, stream));
    return merge_states(c, args, rows, stream);
}

/* What a stream polls during a layer: the transport, and what it polled before. */
typedef struct layer_poll {
    cpa_transport *transport;
    void (*outer)(void *ctx);
    void *outer_ctx;
} layer_poll;

static void poll_layer(void *ctx) {
    const layer_poll *poll = ctx;
    poll->transport->table->poll(poll->transport);
    if (poll->outer) poll->outer(poll->outer_ctx);
}

void cpa_context_count_chunks(cpa_context *c, int32_t layers) {
    for (int64_t i = 0; i < c->n_chunks; i++) {
        if (c->chunks[i].algorithm == CPA_PASS_KV) c->stats.chunks_pass_kv += layers;
        if (c->chunks[i].algorithm == CPA_PASS_Q) c->stats.chunks_pass_q += layers;
    }
}

cpa_status cpa_context_attend(cpa_context *context, const cpa_context_args *args, cpa_stream *stream) {
    cpa_context *c = context;
    CPA_TRY(check_args(c, args, stream));
    CPA_TRY(cpa_pass_kv_select(c, args->mask));
    cpa_context_args layer = *args;
    if (layer.scale == 0) layer.scale = 1.0f / sqrtf((float)c->options.shape.k_dim);

    cpa_status status;
    if (!c->shared) {
        status = attend_alone(c, &layer, stream);
    } else {
        layer_poll poll = {c->transport, stream->poll, stream->poll_ctx};
        stream->poll = poll_layer;
        stream->poll_ctx = &poll;
        status = attend_shared(c, &layer, stream);
        stream->poll = poll.outer;
        stream->poll_ctx = poll.outer_ctx;
        c->broken = status != CPA_OK;
    }
    if (status == CPA_OK) cpa_context_count_chunks(c, 1);
    c->layers_attended++;
    if (status == CPA_OK && c->turn >= 0)
        status = cpa_context_check(c, c->device->table->event_record(c->steps, c->turn, stream), stream);
    return status;
}
