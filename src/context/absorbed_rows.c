#include "src/context/absorbed_rows.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/nn.h"
#include "src/context/latent_work.h"

/* ---- a setting ---- */

/* How many keys of an item lie in front of its first row: of the others each row sees half on average. */
static int64_t keys_before(const cpa_context_ops *ops, const cpa_attend_item *item) {
    const int64_t first = cpa_token_position(ops->map, item->q_set, item->q_first);
    const int64_t keys = cpa_tokens_before(ops->map, item->k_set, first) - item->k_first;
    return cpa_max64(0, cpa_min64(keys, item->k_count));
}

int cpa_absorbed_rows_wanted(const cpa_context_ops *ops, const cpa_form *form, int64_t n_items) {
    cpa_latent_load load = {0};
    if (form->absorbs != CPA_ABSORB_COUNTED) return form->absorbs == CPA_ABSORB_ALWAYS;
    for (int64_t i = 0; i < n_items; i++) {
        const cpa_attend_item *item = &ops->items[i];
        load.rows += (double)item->q_count;
        load.keys += (double)item->k_count;
        load.pairs += (double)item->q_count * ((double)keys_before(ops, item) + (double)item->k_count) / 2;
    }
    return cpa_latents_are_absorbed(&ops->options.shape, &form->shape, load);
}

/* Memory for the rows of a plan, which those of other plans use after it. */
typedef struct absorbed_memory {
    char *q;                            /* [rows, q_heads, k_dim of the latents] */
    cpa_partial over_latents, unfolded; /* states as wide as latents, and as wide as the form's */
} absorbed_memory;

static int64_t folded_row_bytes(const cpa_context_ops *ops) {
    return cpa_shape_q_bytes(&ops->options.shape);
}

/* Allocates only for more rows than any plan had before. */
static cpa_status take_memory(cpa_context_ops *ops, const cpa_form *form, int64_t rows, absorbed_memory *out) {
    CPA_TRY(cpa_context_ensure(ops, &ops->absorbed.q, rows * folded_row_bytes(ops)));
    CPA_TRY(
        cpa_context_ensure_state(ops, &ops->absorbed.over_latents, rows, ops->options.shape.v_dim, &out->over_latents));
    CPA_TRY(cpa_context_ensure_state(ops, &ops->absorbed.unfolded, rows, form->shape.v_dim, &out->unfolded));
    out->q = ops->absorbed.q.memory;
    return CPA_OK;
}

cpa_status cpa_absorbed_rows_set(cpa_absorbed_rows *rows, cpa_context_ops *ops, const cpa_form *form, int64_t n_items) {
    absorbed_memory memory;
    rows->n_runs = rows->end = 0;
    if (n_items == 0) return CPA_OK;
    CPA_TRY(cpa_context_ensure_array(ops, &rows->runs, &rows->runs_capacity, n_items, sizeof *rows->runs));
    for (int64_t i = 0; i < n_items; i++) {
        const cpa_attend_item *item = &ops->items[i];
        cpa_row_run *last = rows->n_runs > 0 ? &rows->runs[rows->n_runs - 1] : NULL;
        if (item->q_count == 0) continue;
        rows->end = cpa_max64(rows->end, item->q_row + item->q_count);
        if (last && last->row + last->rows == item->q_row) {
            last->rows += item->q_count;
        } else {
            rows->runs[rows->n_runs++] = (cpa_row_run){item->q_row, item->q_count};
        }
    }
    return take_memory(ops, form, rows->end, &memory);
}

void cpa_absorbed_rows_free(cpa_absorbed_rows *rows) {
    free(rows->runs);
}

/* ---- one attend ---- */

/* Queries of a run: their columns in front times W_h, those that are rotated as they are. */
static cpa_status fold(const cpa_context_ops *ops, const cpa_form *form, const cpa_form_layer *layer, cpa_row_run run,
                       const cpa_attend_args *args, char *to, cpa_stream *stream) {
    const cpa_attention_shape *latents = &ops->options.shape;
    const int32_t heads = form->shape.q_heads, rope = latents->k_dim - latents->v_dim, nope = form->shape.k_dim - rope;
    const int64_t element = cpa_dtype_bytes(form->shape.dtype);
    const char *from = (const char *)args->q + run.row * args->q_row_stride * element;
    to += run.row * folded_row_bytes(ops);
    const cpa_linear_args product = {
        .size = sizeof product,
        .rows = run.rows,
        .inputs = nope,
        .outputs = latents->v_dim,
        .dtype = form->shape.dtype,
        .out_dtype = form->shape.dtype,
        .x = from,
        .x_stride = args->q_row_stride,
        .weight = layer->rows.fold,
        .weight_stride = nope,
        .out = to,
        .out_stride = (int64_t)heads * latents->k_dim,
        .batch = heads,
        .x_batch_stride = form->shape.k_dim,
        .weight_batch_stride = (int64_t)latents->v_dim * nope,
        .out_batch_stride = latents->k_dim,
    };
    CPA_TRY(ops->device->nn->linear(&product, stream));
    if (rope == 0) return CPA_OK;
    return ops->device->table->copy_rows(to + latents->v_dim * element, latents->k_dim * element, from + nope * element,
                                         form->shape.k_dim * element, rope * element, run.rows * heads, stream);
}

/* States of a run over latents become those of the form, or join what is there. */
static cpa_status unfold(cpa_context_ops *ops, const cpa_form *form, const cpa_form_layer *layer, cpa_row_run run,
                         const absorbed_memory *memory, const cpa_attend_args *args, cpa_stream *stream) {
    cpa_partial states[] = {cpa_context_state_at(args->state, run.row),
                            cpa_context_state_at(memory->unfolded, run.row)};
    const cpa_project_states_args project = {
        .rows = run.rows,
        .heads = form->shape.q_heads,
        .v_dim = ops->options.shape.v_dim,
        .out_dim = form->shape.v_dim,
        .from = cpa_context_state_at(memory->over_latents, run.row),
        .matrix = layer->rows.unfold,
        .dtype = form->shape.dtype,
        .to = states[args->resume ? 1 : 0],
    };
    const cpa_merge_args merge = {
        .size = sizeof merge,
        .rows = run.rows,
        .heads = form->shape.q_heads,
        .v_dim = form->shape.v_dim,
        .states = states,
        .n_states = 2,
        .out_dtype = CPA_F32,
        .out = states[0].o,
        .out_row_stride = states[0].o_row_stride,
        .out_lse = states[0].lse,
        .out_lse_row_stride = states[0].lse_row_stride,
    };
    CPA_TRY(ops->device->operators->project_states(&project, stream));
    return args->resume ? ops->device->operators->merge(&merge, NULL, stream) : CPA_OK;
}

cpa_status cpa_absorbed_rows_attend(const cpa_absorbed_rows *rows, cpa_context_ops *ops, const cpa_form *form,
                                    const cpa_form_layer *layer, const cpa_attend_plan *plan,
                                    const cpa_attend_args *args, cpa_stream *stream) {
    absorbed_memory memory;
    cpa_attend_args attend = *args;
    CPA_TRY(take_memory(ops, form, rows->end, &memory));
    for (int64_t i = 0; i < rows->n_runs; i++) CPA_TRY(fold(ops, form, layer, rows->runs[i], args, memory.q, stream));
    attend.q = memory.q;
    attend.q_row_stride = (int64_t)form->shape.q_heads * ops->options.shape.k_dim;
    attend.state = memory.over_latents;
    attend.resume = 0;
    CPA_TRY(ops->device->operators->attend(plan, &attend, NULL, stream));
    for (int64_t i = 0; i < rows->n_runs; i++) CPA_TRY(unfold(ops, form, layer, rows->runs[i], &memory, args, stream));
    return CPA_OK;
}
