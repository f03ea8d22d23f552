#include "src/context/row_plan.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "base/name_list.h"
#include "kernels/graph.h"

cpa_status cpa_row_plan_create(cpa_context_ops *ops, cpa_row_plan **out) {
    cpa_row_plan *plan = calloc(1, sizeof *plan);
    if (!plan) return cpa_fail(&ops->error, CPA_NO_MEMORY, "context: no memory for a plan");
    cpa_status status = ops->device->operators->plan_create(ops->device, &ops->workspace, &plan->attend, &ops->error);
    if (status != CPA_OK) {
        free(plan);
        return status;
    }
    plan->has_single = 1; /* if it is not set but reserved, whose sequences have a row each */
    *out = plan;
    return CPA_OK;
}

void cpa_row_plan_destroy(cpa_row_plan *plan, const cpa_context_ops *ops) {
    if (!plan) return;
    cpa_absorbed_rows_free(&plan->absorbed);
    cpa_expanded_keys_free(&plan->expanded, ops);
    cpa_ring_plan_destroy(plan->ring);
    if (plan->precise) ops->device->operators->plan_destroy(plan->precise);
    ops->device->operators->plan_destroy(plan->attend);
    free(plan);
}

/* Rows whose keys an indexer lists share none that are worth it. */
static int shares_keys(const cpa_context_ops *ops) {
    return ops->options.index.heads == 0;
}

/* The same of the own shard, where that lies on the host. */
static cpa_status set_ring(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_attend_batch *batch,
                           cpa_attend_fusion fusion) {
    if (!plan->ring) CPA_TRY(cpa_ring_plan_create_within(ops->ring, &ops->workspace, &plan->ring, &ops->error));
    CPA_TRY(cpa_ring_plan_set_within(plan->ring, batch, fusion, ops->settled, &ops->error));
    ops->keys_attended += plan->ring->head.keys_attended;
    ops->keys_read += plan->ring->head.keys_read;
    return CPA_OK;
}

/* The first tokens of an item's keys that are precise, on this rank. */
static int64_t precise_keys(const cpa_context_ops *ops, const cpa_attend_item *item) {
    const int64_t kept = cpa_tokens_before(ops->map, item->k_set, ops->precise.tokens);
    return cpa_min64(kept, item->k_count);
}

/* Plans the precise keys of the items, once their queries are all in one place, and leaves the others, from the first
 * block on that has none, to what is planned next. */
static cpa_status set_precise(cpa_row_plan *plan, cpa_context_ops *ops, cpa_attend_batch batch,
                              cpa_attend_fusion fusion) {
    const cpa_operator_table *operators = ops->device->operators;
    cpa_attend_item *items = ops->items;
    if (!plan->precise) CPA_TRY(operators->plan_create(ops->device, &ops->workspace, &plan->precise, &ops->error));
    fusion.tables.set = ops->precise.table_set;
    batch.block_tables = cpa_block_tables_host(fusion.tables);
    batch.shape = cpa_shape_unquantised(&batch.shape);
    CPA_TRY(cpa_context_ensure_array(ops, &ops->counts, &ops->counts_capacity, batch.n_items, sizeof *ops->counts));
    for (int64_t i = 0; i < batch.n_items; i++) {
        ops->counts[i] = items[i].k_count;
        items[i].k_count = precise_keys(ops, &items[i]);
    }
    CPA_TRY(operators->plan_set(plan->precise, &batch, fusion, &ops->error));
    for (int64_t i = 0; i < batch.n_items; i++) {
        const int64_t n = items[i].k_count, blocks = n / batch.block_size;
        const int has_more = n < ops->counts[i];
        items[i].k_first = has_more ? n : 0;
        items[i].table += has_more ? blocks : 0;
        items[i].k_count = has_more ? ops->counts[i] - n : 0;
    }
    return CPA_OK;
}

/* The items as they were. */
static void restore_items(const cpa_context_ops *ops, int64_t n_items) {
    for (int64_t i = 0; i < n_items; i++) {
        cpa_attend_item *item = &ops->items[i];
        item->table -= item->k_first / ops->options.block_size;
        item->k_first = 0;
        item->k_count = ops->counts[i];
    }
}

cpa_status cpa_row_plan_set(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_form *form, int64_t n_items,
                            const int32_t *block_tables, int64_t n_table_entries, cpa_attend_fusion fusion) {
    const int absorbs = n_items > 0 && cpa_absorbed_rows_wanted(ops, form, n_items);
    const int expands = form->is_expanded && !absorbs;
    cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = ops->map,
        .shape = absorbs ? ops->options.shape : form->shape,
        .block_size = ops->options.block_size,
        .items = ops->items,
        .n_items = expands ? 0 : n_items,
        .block_tables = block_tables,
        .n_table_entries = n_table_entries,
        .cascade_attention = shares_keys(ops) ? ops->options.cascade_attention : CPA_CASCADE_OFF,
    };
    if (fusion.tables.tables) {
        batch.block_tables = cpa_block_tables_host(fusion.tables);
        batch.n_table_entries = cpa_block_tables_capacity(fusion.tables.tables);
    }
    fusion.masked = ops->masked;
    plan->is_precise = ops->precise.tokens > 0 && fusion.tables.tables;
    if (plan->is_precise) {
        plan->ready = (cpa_row_run){fusion.ready_row, fusion.ready_rows};
        fusion.ready_items = fusion.ready_rows = 0; /* the second attend reads states of the first */
        CPA_TRY(set_precise(plan, ops, batch, fusion));
        ops->keys_attended += plan->precise->keys_attended;
        ops->keys_read += plan->precise->keys_read;
    }
    plan->through_ring = ops->ring && fusion.tables.tables;
    if (plan->through_ring) {
        CPA_TRY(set_ring(plan, ops, &batch, fusion));
        batch.n_items = 0;
        fusion = (cpa_attend_fusion){0};
    }
    plan->is_told = plan->has_single = plan->has_several = 0;
    for (int64_t i = 0; i < n_items; i++) *(ops->items[i].q_count == 1 ? &plan->has_single : &plan->has_several) = 1;
    CPA_TRY(ops->device->operators->plan_set(plan->attend, &batch, fusion, &ops->error));
    if (plan->is_precise) restore_items(ops, n_items);
    ops->keys_attended += plan->attend->keys_attended;
    ops->keys_read += plan->attend->keys_read;
    CPA_TRY(cpa_absorbed_rows_set(&plan->absorbed, ops, form, absorbs ? n_items : 0));
    return cpa_expanded_keys_set(&plan->expanded, ops, form, expands ? n_items : 0, batch.block_tables);
}

cpa_status cpa_row_plan_upload(const cpa_row_plan *plan, cpa_context_ops *ops, cpa_stream *stream) {
    const cpa_operator_table *operators = ops->device->operators;
    if (plan->is_precise) CPA_TRY(cpa_context_check(ops, operators->plan_upload(plan->precise, stream), stream));
    return cpa_context_check(ops, operators->plan_upload(plan->attend, stream), stream);
}

uint64_t cpa_row_plan_shape(const cpa_row_plan *plan, const cpa_context_ops *ops) {
    const uint64_t shape = ops->device->graphs->plan_shape(plan->attend);
    if (!plan->is_precise) return shape;
    const uint64_t both[] = {shape, ops->device->graphs->plan_shape(plan->precise)};
    return cpa_hash_bytes(CPA_HASH_START, both, sizeof both);
}

static void add_kernel(char list[CPA_KERNEL_NAMES], const cpa_attend_kernel *kernel) {
    if (kernel->name) cpa_name_list_add(list, CPA_KERNEL_NAMES, kernel->name);
}

/* Adds the kernels of an attend of a plan to those that the context tells of. Where items of one row lie beside others,
 * the kernels of few rows take them, unless rows of many heads count as more. */
static void tell_kernels(const cpa_row_plan *plan, cpa_context_ops *ops, const cpa_attend_plan *attend,
                         const cpa_attend_args *args) {
    cpa_attend_kernels kernels;
    ops->device->operators->attend_kernels(attend, args, &kernels);
    if (plan->has_single) {
        add_kernel(ops->decode_kernels, &kernels.decode);
        add_kernel(ops->decode_kernels, &kernels.shared);
        if (!plan->has_several || !kernels.decode.name) add_kernel(ops->decode_kernels, &kernels.prefill);
    }
    if (plan->has_several) {
        add_kernel(ops->prefill_kernels, &kernels.prefill);
        if (!plan->has_single) add_kernel(ops->prefill_kernels, &kernels.decode);
        if (!plan->has_single) add_kernel(ops->prefill_kernels, &kernels.shared);
    }
}

/* Once for each setting. */
static void tell_first_attend(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_attend_args *args) {
    if (plan->is_told) return;
    plan->is_told = 1;
    if (plan->through_ring) {
        tell_kernels(plan, ops, plan->ring->plans[0], args);
        return;
    }
    if (plan->expanded.n_passes == 0) tell_kernels(plan, ops, plan->attend, plan->absorbed.end > 0 ? NULL : args);
    for (int64_t i = 0; i < plan->expanded.n_passes; i++) tell_kernels(plan, ops, plan->expanded.passes[i].plan, NULL);
}

/* The precise keys, then the others from the states of these. */
static cpa_status attend_precise(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_attend_args *args,
                                 const void *ready_q, cpa_stream *stream) {
    const cpa_operator_table *operators = ops->device->operators;
    const int64_t row_bytes = cpa_shape_q_bytes(&plan->attend->shape);
    cpa_attend_args of = *args;
    if (ready_q && plan->ready.rows > 0)
        CPA_TRY(stream->device->table->copy((char *)(uintptr_t)args->q + plan->ready.row * row_bytes, ready_q,
                                            plan->ready.rows * row_bytes, stream));
    of.kv = ops->precise.kv;
    of.out = NULL;
    of.out_scale = NULL;
    CPA_TRY(operators->attend(plan->precise, &of, NULL, stream));
    of = *args;
    of.resume = 1;
    return operators->attend(plan->attend, &of, NULL, stream);
}

/* What the plan enqueues. */
static cpa_status enqueue(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_form *form, const cpa_form_layer *layer,
                          const cpa_attend_args *args, const void *ready_q, cpa_stream *stream) {
    if (plan->through_ring) return cpa_ring_plan_attend(plan->ring, args, ready_q, stream);
    if (plan->is_precise) return attend_precise(plan, ops, args, ready_q, stream);
    if (plan->absorbed.end > 0)
        return cpa_absorbed_rows_attend(&plan->absorbed, ops, form, layer, plan->attend, args, stream);
    if (form->is_expanded) return cpa_expanded_keys_attend(&plan->expanded, ops, form, layer, args, stream);
    return ops->device->operators->attend(plan->attend, args, ready_q, stream);
}

cpa_status cpa_row_plan_attend(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_form *form,
                               const cpa_form_layer *layer, const cpa_attend_args *args, const void *ready_q,
                               cpa_span_kind kind, int32_t round, cpa_stream *stream) {
    const int64_t passes = plan->through_ring ? plan->ring->passes.n : plan->expanded.n_passes;
    if (plan->attend->n_items == 0 && passes == 0) return CPA_OK;
    tell_first_attend(plan, ops, args);
    int64_t span = cpa_spans_begin(&ops->spans, kind, round, stream);
    const int64_t plain_rows = stream->plain_rows;
    cpa_status status = enqueue(plan, ops, form, layer, args, ready_q, stream);
    ops->stats.plain_rows += stream->plain_rows - plain_rows;
    cpa_spans_end(&ops->spans, span, stream);
    return cpa_context_check(ops, status, stream);
}

cpa_status cpa_row_plan_attend_own(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_form *form,
                                   const cpa_form_layer *layer, cpa_score_side side, cpa_partial state, void *out,
                                   cpa_stream *stream) {
    cpa_attend_args attend = cpa_context_attend_args(ops, form, layer, side);
    attend.state = state;
    attend.out = out;
    attend.out_scale = out ? layer->rows.out_scale : NULL;
    return cpa_row_plan_attend(plan, ops, form, layer, &attend, NULL, CPA_SPAN_ATTEND_OWN, 0, stream);
}
