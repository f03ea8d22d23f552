#include "src/worker/worker_selection.h"

#include "base/check.h"
#include "src/worker/layer_caches.h"
#include "src/worker/worker_sparse.h"
#include "src/worker/worker_trees.h"

void cpa_worker_count_selected(cpa_worker *worker, const cpa_step_plan *plan) {
    cpa_step_sizes *sizes = &worker->rows->sizes;
    sizes->selected_rows = 0;
    if (!worker->network->select) return;
    for (int64_t i = 0; i < plan->n_chunks; i++) sizes->selected_rows += plan->chunks[i].count;
}

void cpa_worker_list_selected(const cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_worker_rows *rows = worker->rows;
    int64_t row = 0;
    if (rows->sizes.selected_rows == 0) return;
    for (int64_t i = 0; i < plan->n_chunks; i++)
        for (int64_t at = 0; at < plan->chunks[i].count; at++)
            rows->host.selected_index[row++] = plan->chunks[i].start + at;
    for (; row < rows->sizes.selected_rows; row++) rows->host.selected_index[row] = 0;
}

/* The context's choice, and where it is noted. */
typedef struct noted_choice {
    cpa_context *context;
    cpa_worker_selection *selection;
} noted_choice;

static cpa_status choose(void *ctx, const cpa_context_select_args *args, cpa_key_indices *out, cpa_stream *stream) {
    const noted_choice *choice = ctx;
    const cpa_status status = cpa_context_select(choice->context, args, out, stream);
    if (status != CPA_OK) return cpa_fail(&stream->error, status, "%s", cpa_context_error(choice->context));
    choice->selection->asked = *args;
    choice->selection->chosen = out->indices;
    return CPA_OK;
}

cpa_status cpa_worker_select(cpa_worker *worker, int32_t layer, const cpa_model_step *step, const cpa_kv_view *kv,
                             cpa_worker_selection *out, cpa_error *err) {
    const cpa_model *network = worker->network;
    noted_choice noted = {worker->context, out};
    const cpa_key_chooser chooser = {sizeof chooser, &noted, choose};
    const cpa_select_args args = {.size = sizeof args,
                                  .q = worker->q,
                                  .kv = *kv,
                                  .index = cpa_worker_index(worker, layer),
                                  .rows = worker->rows->sizes.selected_rows,
                                  .indices = worker->arrays.selected_index,
                                  .chooser = worker->options.model.index ? &chooser : NULL};
    const cpa_key_bits *tree = cpa_worker_mask(worker, &out->tree) ? &out->tree : NULL;
    out->of = (cpa_key_selection){.bits = tree};
    out->chosen = NULL;
    CPA_TRY(cpa_worker_sparse_select(worker, layer, kv, &out->of.blocks, err));
    if (!network->select) return CPA_OK;
    const cpa_status status = network->select(network->ctx, layer, step, &args, &out->of, worker->stream);
    if (status != CPA_OK)
        return cpa_fail(err, status, "layer %d: the model's select returned %s%s%s", layer, cpa_status_name(status),
                        worker->stream->error.message[0] ? ": " : "", worker->stream->error.message);
    if (out->of.bits != tree)
        return cpa_fail(err, CPA_INVALID, "layer %d: the model's select changed the bits of the selection", layer);
    if (out->of.indices && out->of.indices->width > network->select_width)
        return cpa_fail(err, CPA_INVALID, "layer %d: the model's select gave lists of %d, expected at most %d", layer,
                        out->of.indices->width, network->select_width);
    return CPA_OK;
}
