#include "src/context/context_ops.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "kernels/key_workspace.h"

static cpa_status create_tile_counts(cpa_context_ops *ops) {
    const int64_t none[2] = {0, 0};
    void *memory;
    CPA_TRY(ops->device->table->alloc(ops->device, sizeof none, &memory, &ops->error));
    ops->tile_counts = memory;
    return cpa_context_upload(ops, memory, none, sizeof none);
}

cpa_status cpa_context_read_tiles(cpa_context_ops *ops) {
    int64_t counts[2];
    if (!ops->tile_counts) return CPA_OK;
    CPA_TRY(cpa_context_upload(ops, counts, ops->tile_counts, sizeof counts)); /* the other way */
    ops->stats.tiles_seen = counts[0];
    ops->stats.tiles_skipped = counts[1];
    return CPA_OK;
}

cpa_status cpa_context_ops_create(cpa_context_ops *ops) {
    ops->messages = calloc((size_t)ops->map.cp_size, sizeof *ops->messages);
    if (!ops->messages)
        return cpa_fail(&ops->error, CPA_NO_MEMORY, "context: no memory for %d ranks", ops->map.cp_size);
    CPA_TRY(cpa_spans_create(&ops->spans, ops->device, &ops->error));
    CPA_TRY(ops->device->table->stream_create(ops->device, &ops->upload, &ops->error));
    return ops->options.skip_tiles > 0 ? create_tile_counts(ops) : CPA_OK;
}

void cpa_context_ops_destroy(cpa_context_ops *ops) {
    if (ops->device) {
        cpa_spans_destroy(&ops->spans);
        if (ops->upload) ops->device->table->stream_destroy(ops->upload);
        cpa_kv_ring_destroy(ops->ring);
        ops->device->table->free(ops->device, ops->workspace.memory);
        ops->device->table->free(ops->device, ops->tile_counts);
        cpa_context_free(ops, &ops->absorbed.q);
        cpa_context_free(ops, &ops->absorbed.over_latents);
        cpa_context_free(ops, &ops->absorbed.unfolded);
    }
    free(ops->items);
    free(ops->counts);
    free(ops->messages);
}

/* ---- memory ---- */

cpa_status cpa_context_ensure(cpa_context_ops *ops, cpa_context_buffer *buffer, int64_t bytes) {
    if (bytes <= buffer->bytes && buffer->memory) return CPA_OK;
    int64_t grown = bytes < 2 * buffer->bytes ? 2 * buffer->bytes : bytes > 0 ? bytes : 1;
    void *memory;
    CPA_TRY(ops->device->table->alloc(ops->device, grown, &memory, &ops->error));
    ops->device->table->retire(ops->device, buffer->memory);
    *buffer = (cpa_context_buffer){memory, grown};
    return CPA_OK;
}

void cpa_context_free(cpa_context_ops *ops, cpa_context_buffer *buffer) {
    if (ops->device) ops->device->table->free(ops->device, buffer->memory);
}

cpa_status cpa_context_ensure_array(cpa_context_ops *ops, void *array, int64_t *capacity, int64_t n, size_t element) {
    if (cpa_array_reserve(array, capacity, n, element)) return CPA_OK;
    return cpa_fail(&ops->error, CPA_NO_MEMORY, "no memory for %" PRId64 " entries of a plan", n);
}

void cpa_context_open_workspace(cpa_context_ops *ops, int64_t bytes, int64_t least) {
    if (bytes == 0) return;
    ops->workspace = cpa_key_workspace_open(ops->device, bytes, least);
    ops->stats.staging_bytes = ops->workspace.bytes;
    if (ops->workspace.bytes < bytes)
        cpa_log(CPA_LOG_WARN, "context: no memory for %" PRId64 " bytes to prepare keys in, there are %" PRId64, bytes,
                ops->workspace.bytes);
}

cpa_status cpa_context_upload(cpa_context_ops *ops, void *dst, const void *src, int64_t bytes) {
    CPA_TRY(cpa_context_check(ops, ops->device->table->copy(dst, src, bytes, ops->upload), ops->upload));
    return cpa_context_check(ops, ops->device->table->stream_sync(ops->upload), ops->upload);
}

cpa_status cpa_context_ensure_state(cpa_context_ops *ops, cpa_context_buffer *buffer, int64_t rows, int32_t v_dim,
                                    cpa_partial *out) {
    int64_t heads = ops->options.shape.q_heads, width = heads * v_dim;
    CPA_TRY(cpa_context_ensure(ops, buffer, rows * (width + heads) * (int64_t)sizeof(float)));
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

cpa_status cpa_context_check(cpa_context_ops *ops, cpa_status status, const cpa_stream *stream) {
    return status == CPA_OK ? CPA_OK : cpa_fail(&ops->error, status, "%s", stream->error.message);
}

cpa_attend_args cpa_context_attend_args(const cpa_context_ops *ops, const cpa_form *form, const cpa_form_layer *layer,
                                        cpa_score_side side) {
    return (cpa_attend_args){
        .size = sizeof(cpa_attend_args),
        .q = layer->rows.q,
        .q_dtype = form->shape.dtype,
        .q_row_stride = (int64_t)form->shape.q_heads * form->shape.k_dim,
        .kv = layer->kv,
        .mask = layer->rows.mask,
        .scale = layer->rows.scale,
        .rules = ops->score.rules,
        .selection = ops->score.has_selection ? &ops->score.selection[form->index][side] : NULL,
        .bias = ops->score.has_bias ? &ops->score.bias[form->index][side] : NULL,
        .skip_tiles = ops->options.skip_tiles,
        .tile_counts = ops->tile_counts,
    };
}

cpa_status cpa_context_run_merge(cpa_context_ops *ops, const cpa_merge_args *args, const cpa_store_batch *awaited,
                                 cpa_stream *stream) {
    if (args->rows == 0) return CPA_OK;
    int64_t span = cpa_spans_begin(&ops->spans, CPA_SPAN_MERGE, 0, stream);
    cpa_status status = ops->device->operators->merge(args, awaited, stream);
    cpa_spans_end(&ops->spans, span, stream);
    return cpa_context_check(ops, status, stream);
}

cpa_status cpa_context_start(cpa_context_ops *ops, int32_t n_messages, cpa_span_kind kind, int32_t round,
                             cpa_stream *stream, cpa_context_exchange *out) {
    out->span = cpa_spans_begin(&ops->spans, kind, round, stream);
    out->round = round;
    CPA_TRY(ops->transport->table->start(ops->transport, ops->messages, n_messages, stream->native, &out->handle,
                                         &ops->error));
    for (int32_t i = 0; i < n_messages; i++) {
        ops->stats.bytes_sent += ops->messages[i].send_bytes;
        ops->bytes_to[ops->messages[i].peer] += ops->messages[i].send_bytes;
    }
    return CPA_OK;
}

cpa_status cpa_context_finish(cpa_context_ops *ops, cpa_stream *stream, cpa_context_exchange *exchange) {
    double waited;
    cpa_exchange *ending = exchange->handle;
    exchange->handle = NULL;
    int64_t span = cpa_spans_begin(&ops->spans, CPA_SPAN_WAIT, exchange->round, stream);
    cpa_status status = ops->transport->table->finish(ops->transport, ending, stream->native, &waited, &ops->error);
    cpa_spans_end(&ops->spans, span, stream);
    cpa_spans_end(&ops->spans, exchange->span, stream);
    return status;
}

cpa_status cpa_context_run_project(cpa_context_ops *ops, const cpa_form *form, const cpa_form_layer *layer,
                                   int64_t rows, cpa_partial from, cpa_partial to, cpa_stream *stream) {
    const cpa_project_states_args args = {
        .rows = rows,
        .heads = form->shape.q_heads,
        .v_dim = form->shape.v_dim,
        .out_dim = form->out_dim,
        .from = from,
        .matrix = layer->rows.matrix,
        .dtype = form->shape.dtype,
        .to = to,
    };
    if (rows == 0) return CPA_OK;
    int64_t span = cpa_spans_begin(&ops->spans, CPA_SPAN_MERGE, 0, stream);
    cpa_status status = ops->device->operators->project_states(&args, stream);
    cpa_spans_end(&ops->spans, span, stream);
    return cpa_context_check(ops, status, stream);
}

static void poll_transport(void *ctx) {
    cpa_transport *transport = ctx;
    transport->table->poll(transport);
}

cpa_progress_hook cpa_context_hook(cpa_context_ops *ops) {
    return (cpa_progress_hook){.look = poll_transport, .ctx = ops->transport};
}
