/* Replicated rows: the queries of all rows are on every rank, so that none travel. A rank attends all rows over its
 * shard, packs the states by slices of heads, sends each rank its slice, and merges those of its own heads. A row's
 * states are merged as pass-Q would on the row's owner: its own first, then those of the others in the order of the
 * rounds. So the bits are the same on the host.
 *
 * A message has rows [heads of the receiver, out_dim + 1] of one form in fp32, or those of 16 bits (cpa_packed_width),
 * those of a padded step included. */
#include "src/context/scatter_heads.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/hash.h"
#include "comm/rounds.h"
#include "kernels/graph.h"

/* ---- life ---- */

cpa_status cpa_scatter_heads_create(cpa_scatter_heads *s, cpa_context_ops *ops, const cpa_form *form,
                                    const cpa_planned_step *step) {
    const int32_t size = ops->map.cp_size, q_heads = ops->options.shape.q_heads;
    s->ops = ops;
    s->form = form;
    s->step = step;
    s->heads = (int32_t)(cpa_slice_begin(q_heads, size, ops->rank + 1) - cpa_slice_begin(q_heads, size, ops->rank));
    s->slices = calloc((size_t)size, sizeof *s->slices);
    s->parts = calloc((size_t)size, sizeof(void *));
    if (!s->slices || !s->parts) return cpa_fail(&ops->error, CPA_NO_MEMORY, "context: no memory for %d ranks", size);
    return cpa_table_plans_create(&s->plans, ops);
}

void cpa_scatter_heads_destroy(cpa_scatter_heads *s) {
    if (!s->ops) return;
    cpa_step_maps_free(&s->maps, s->ops);
    cpa_context_free(s->ops, &s->states_memory);
    cpa_context_free(s->ops, &s->projected_memory);
    cpa_context_free(s->ops, &s->packed_memory);
    cpa_context_free(s->ops, &s->received_memory);
    cpa_table_plans_destroy(&s->plans, s->ops);
    free(s->parts);
    free(s->slices);
}

/* ---- a step ---- */

/* Bytes of a row of so many heads in a message. */
static int64_t packed_bytes(const cpa_scatter_heads *s, int64_t heads) {
    const cpa_dtype dtype = s->ops->options.state_dtype;
    return heads * cpa_packed_width(s->form->out_dim, dtype) * cpa_dtype_bytes(dtype);
}

static int64_t rows_of(const cpa_scatter_heads *s) {
    return s->step->rows[s->form->index];
}

/* The heads before those of a rank. */
static int64_t heads_before(const cpa_scatter_heads *s, int32_t rank) {
    return cpa_slice_begin(s->ops->options.shape.q_heads, s->ops->map.cp_size, rank);
}

/* Whose states of a chunk's rows are merged, in order; -1: no more. */
static void merge_order(const cpa_scatter_heads *s, const cpa_planned_chunk *chunk, int32_t owner, int32_t *order) {
    const int32_t size = s->ops->map.cp_size;
    int32_t n = 0;
    order[n++] = owner;
    for (int32_t round = 1; round < size; round++) {
        const int32_t rank = cpa_round_recv_peer(size, owner, round);
        if (cpa_planned_share(s->step, chunk, rank).keys > 0) order[n++] = rank;
    }
    while (n < size) order[n++] = -1;
}

/* The maps of rows that belong to a chunk, and of those that a padded step is filled up with. */
static cpa_status plan_maps(cpa_scatter_heads *s) {
    const cpa_planned_step *step = s->step;
    const int32_t size = s->ops->map.cp_size;
    const int64_t rows = rows_of(s);
    CPA_TRY(cpa_step_maps_renew(&s->maps, s->ops, rows * (1 + size)));
    int32_t *packed = s->maps.host, *order = packed + rows;
    for (int64_t i = 0; i < rows * (1 + size); i++) s->maps.host[i] = -1;
    for (int64_t i = 0; i < step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &step->chunks[i];
        if (chunk->form != s->form->index) continue;
        const int has_keys = cpa_planned_share(step, chunk, step->rank).keys > 0;
        for (int64_t position = chunk->start; position < chunk->end; position++) {
            const int64_t row = chunk->row + position - chunk->start;
            if (has_keys) packed[row] = (int32_t)row;
            merge_order(s, chunk, cpa_owner_rank(step->map, chunk->placement, position), order + row * size);
        }
    }
    return CPA_OK;
}

/* All rows of each chunk over the keys that it has here. */
static cpa_status plan_rows(cpa_scatter_heads *s) {
    const cpa_planned_step *step = s->step;
    int64_t n = 0;
    for (int64_t i = 0; i < step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &step->chunks[i];
        const cpa_chunk_share own = cpa_planned_share(step, chunk, step->rank);
        if (own.keys == 0 || chunk->form != s->form->index) continue;
        s->ops->items[n++] = (cpa_attend_item){
            .q_row = chunk->row,
            .q_count = chunk->end - chunk->start,
            .q_first = chunk->start,
            .k_count = own.keys,
            .table = chunk->table,
            .q_set = {CPA_TOKENS_ALL, 0},
            .k_set = own.tokens,
        };
    }
    return cpa_table_plans_set(&s->plans, s->ops, s->form, step, n,
                               (cpa_attend_fusion){.padded_items = step->padded_rows});
}

cpa_status cpa_scatter_heads_plan(cpa_scatter_heads *s) {
    const int64_t rows = rows_of(s);
    const int32_t size = s->ops->map.cp_size;
    if (rows == 0) return CPA_OK;
    CPA_TRY(cpa_context_ensure_state(s->ops, &s->states_memory, rows, s->form->shape.v_dim, &s->states));
    if (s->form->has_matrix)
        CPA_TRY(cpa_context_ensure_state(s->ops, &s->projected_memory, rows, s->form->out_dim, &s->projected));
    CPA_TRY(cpa_context_ensure(s->ops, &s->packed_memory, packed_bytes(s, rows * s->ops->options.shape.q_heads)));
    CPA_TRY(cpa_context_ensure(s->ops, &s->received_memory, packed_bytes(s, rows * s->heads * size)));
    for (int32_t rank = 0; rank < size; rank++) {
        s->slices[rank] = (char *)s->packed_memory.memory + packed_bytes(s, rows * heads_before(s, rank));
        s->parts[rank] = rank == s->ops->rank
                             ? s->slices[rank]
                             : (char *)s->received_memory.memory + packed_bytes(s, rows * s->heads * rank);
    }
    CPA_TRY(plan_maps(s));
    return plan_rows(s);
}

cpa_status cpa_scatter_heads_upload(cpa_scatter_heads *s, cpa_stream *stream) {
    if (rows_of(s) == 0) return CPA_OK;
    CPA_TRY(cpa_table_plans_upload(&s->plans, s->ops, stream));
    return cpa_step_maps_upload(&s->maps, s->ops, stream);
}

uint64_t cpa_scatter_heads_shape(const cpa_scatter_heads *s) {
    if (rows_of(s) == 0) return 0;
    uint64_t shape[] = {(uintptr_t)s->maps.device.memory,      (uintptr_t)s->states_memory.memory,
                        (uintptr_t)s->projected_memory.memory, (uintptr_t)s->packed_memory.memory,
                        (uintptr_t)s->received_memory.memory,  cpa_table_plans_shape(&s->plans, s->ops)};
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}

/* ---- one layer ---- */

static cpa_status pack(cpa_scatter_heads *s, cpa_stream *stream) {
    const cpa_partial *states = s->form->has_matrix ? &s->projected : &s->states;
    const cpa_state_pack_args args = {
        .size = sizeof args,
        .rows = rows_of(s),
        .heads = s->form->shape.q_heads,
        .v_dim = s->form->out_dim,
        .o = states->o,
        .o_dtype = CPA_F32,
        .o_row_stride = states->o_row_stride,
        .lse = states->lse,
        .lse_row_stride = states->lse_row_stride,
        .row_map = s->maps.device.memory,
        .n_slices = s->ops->map.cp_size,
        .dtype = s->ops->options.state_dtype,
        .slices = s->slices,
    };
    int64_t span = cpa_spans_begin(&s->ops->spans, CPA_SPAN_MERGE, 0, stream);
    cpa_status status = s->ops->device->operators->state_pack(&args, stream);
    cpa_spans_end(&s->ops->spans, span, stream);
    return cpa_context_check(s->ops, status, stream);
}

static cpa_status exchange(cpa_scatter_heads *s, cpa_stream *stream) {
    const int64_t rows = rows_of(s);
    int32_t n = 0;
    for (int32_t round = 1; round < s->ops->map.cp_size; round++) {
        const int32_t peer = cpa_round_recv_peer(s->ops->map.cp_size, s->ops->rank, round);
        s->ops->messages[n++] = (cpa_message){
            .peer = peer,
            .send = s->slices[peer],
            .send_bytes = packed_bytes(s, rows * (heads_before(s, peer + 1) - heads_before(s, peer))),
            .recv = (void *)(uintptr_t)s->parts[peer],
            .recv_bytes = packed_bytes(s, rows * s->heads),
        };
    }
    CPA_TRY(cpa_context_start(s->ops, n, CPA_SPAN_EXCHANGE_STATES, 0, stream, &s->exchange));
    return cpa_context_finish(s->ops, stream, &s->exchange);
}

/* Rounds once. */
static cpa_status merge(cpa_scatter_heads *s, const cpa_form_rows *rows, cpa_stream *stream) {
    const float *sinks = cpa_context_sinks(s->ops);
    const cpa_state_merge_packed_args merge = {
        .size = sizeof merge,
        .rows = rows_of(s),
        .heads = s->heads,
        .v_dim = s->form->out_dim,
        .dtype = s->ops->options.state_dtype,
        .n_parts = s->ops->map.cp_size,
        .parts = s->parts,
        .out_dtype = rows->out_scale ? CPA_FP8_E4M3 : s->form->shape.dtype,
        .out = rows->out,
        .out_row_stride = (int64_t)s->heads * s->form->out_dim,
        .out_lse = rows->lse,
        .out_lse_row_stride = s->heads,
        .order = (const int32_t *)s->maps.device.memory + rows_of(s),
        .sink_logits = sinks ? sinks + heads_before(s, s->ops->rank) : NULL,
        .out_scale = rows->out_scale,
    };
    if (s->heads == 0) return CPA_OK;
    int64_t span = cpa_spans_begin(&s->ops->spans, CPA_SPAN_MERGE, 0, stream);
    cpa_status status = s->ops->device->operators->state_merge_packed(&merge, stream);
    cpa_spans_end(&s->ops->spans, span, stream);
    return cpa_context_check(s->ops, status, stream);
}

cpa_status cpa_scatter_heads_attend(cpa_scatter_heads *s, const cpa_form_layer *layer, cpa_stream *stream) {
    cpa_row_plan *plan = cpa_table_plans_now(&s->plans, s->ops);
    if (rows_of(s) == 0) return CPA_OK;
    CPA_TRY(cpa_step_maps_upload(&s->maps, s->ops, stream));
    CPA_TRY(cpa_row_plan_attend_own(plan, s->ops, s->form, layer, CPA_SCORE_OWN, s->states, NULL, stream));
    if (s->form->has_matrix)
        CPA_TRY(cpa_context_run_project(s->ops, s->form, layer, rows_of(s), s->states, s->projected, stream));
    CPA_TRY(pack(s, stream));
    CPA_TRY(exchange(s, stream));
    return merge(s, &layer->rows, stream);
}
