#include "src/worker/worker_layers.h"

#include "base/check.h"
#include "kernels/operators.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "src/worker/layer_caches.h"
#include "src/worker/worker_forms.h"
#include "src/worker/worker_selection.h"
#include "src/worker/worker_tokens.h"

/* Whether the results of all layers have a place in `out`, one behind the other: then the digest takes them at the end
 * of the step, where no layer waits for it. */
static int keeps_layers(const cpa_worker *worker) {
    return worker->rows->layer_bytes * worker->options.model.layers <= worker->out_bytes;
}

static void *out_of_layer(const cpa_worker *worker, int32_t layer) {
    return (char *)worker->out + (keeps_layers(worker) ? layer * worker->rows->layer_bytes : 0);
}

cpa_status cpa_worker_layer_done(const cpa_worker *worker, const cpa_step_plan *plan, int32_t layer,
                                 const cpa_worker_observer *observer, cpa_error *err) {
    if (!observer) return CPA_OK;
    return observer->layer_done(observer->ctx, plan, layer, worker->q, out_of_layer(worker, layer), worker->stream,
                                err);
}

/* An operation of ours that the model called says more. */
static cpa_status model_failed(cpa_stream *stream, const char *function, int32_t layer, cpa_status status) {
    if (status == CPA_OK || stream->error.message[0]) return status;
    if (layer < 0)
        return cpa_fail(&stream->error, status, "the model's %s returned %s", function, cpa_status_name(status));
    return cpa_fail(&stream->error, status, "layer %d: the model's %s returned %s", layer, function,
                    cpa_status_name(status));
}

/* The slots of the step's rows in the cache of what is precise. */
static const int64_t *precise_slots_of(const cpa_worker *worker) {
    return worker->arrays.slots + cpa_layer_groups_precise(&worker->options.groups) * worker->rows->sizes.rows;
}

/* Writes keys and values of rows by their slots. */
static cpa_status write_cache(cpa_worker *worker, int64_t rows, const int64_t *slots, const cpa_kv_view *kv,
                              uint8_t *nonfinite) {
    const cpa_kv_write_args write = {.size = sizeof write,
                                     .tokens = rows,
                                     .dtype = worker->options.model.attention.dtype,
                                     .k = worker->k,
                                     .v = worker->v,
                                     .slot_mapping = slots,
                                     .kv = *kv,
                                     .nonfinite = nonfinite};
    return worker->device->operators->kv_write(&write, worker->stream);
}

/* Queries, keys and values of a layer; the latter go to the cache, and those of first tokens that are precise to
 * another beside it. */
static cpa_status layer_in(cpa_worker *worker, int32_t layer, const cpa_model_step *step, const cpa_kv_view *kv) {
    const cpa_model *network = worker->network;
    cpa_stream *stream = worker->stream;
    cpa_spans *spans = cpa_context_spans(worker->context);
    uint8_t *nonfinite = cpa_nonfinite_marks(&worker->nonfinite, layer);
    void *k = network->writes_cache ? NULL : worker->k, *v = network->writes_cache ? NULL : worker->v;
    const cpa_kv_view precise = cpa_worker_precise(worker, layer);
    const int64_t *precise_slots = precise.k ? precise_slots_of(worker) : NULL;
    const cpa_layer_args args = {sizeof args, worker->q,    k, v, *kv, nonfinite, cpa_worker_index(worker, layer),
                                 precise,     precise_slots};
    int64_t span = cpa_spans_begin(spans, CPA_SPAN_LAYER_IN, 0, stream);
    CPA_TRY(model_failed(stream, "layer_in", layer, network->layer_in(network->ctx, layer, step, &args, stream)));
    cpa_spans_end(spans, span, stream);
    if (network->writes_cache) return CPA_OK;
    span = cpa_spans_begin(spans, CPA_SPAN_KV_WRITE, 0, stream);
    CPA_TRY(write_cache(worker, step->rows.count, step->rows.slots_device, kv, nonfinite));
    if (precise.k) CPA_TRY(write_cache(worker, step->rows.count, precise_slots, &precise, NULL));
    cpa_spans_end(spans, span, stream);
    return CPA_OK;
}

/* The results of a form in `layers` layers to the digest. */
static cpa_status add_form_to_digest(cpa_worker *worker, const cpa_form *form, int32_t layer, int32_t layers) {
    const cpa_attention_shape *shape = &form->shape;
    const cpa_step_form *at = &worker->rows->forms[form->index];
    const int32_t *listed = worker->arrays.form_rows + form->index * worker->rows->sizes.emissions;
    const int32_t ranks = worker->rows->replicated ? worker->slices.ranks : 1;
    const int32_t rank = worker->rows->replicated ? worker->rank : 0;
    const int64_t head = cpa_slice_begin(shape->q_heads, ranks, rank); /* the first that this rank has the results of */
    const int64_t heads = cpa_slice_begin(shape->q_heads, ranks, rank + 1) - head;
    const cpa_hash_rows_args hash = {
        .rows = worker->rows->sizes.yields,
        .src = (const char *)out_of_layer(worker, layer) + at->out_bytes,
        .layers = layers,
        .layer_bytes = worker->rows->layer_bytes,
        .layer_marks = worker->nonfinite.max_rows,
        .row_bytes = heads * form->out_dim * cpa_dtype_bytes(shape->dtype),
        .row_index = worker->rows->sizes.forms > 0 ? listed : worker->arrays.rows,
        .salts = worker->arrays.salts,
        .salt = (uint64_t)layer + ((uint64_t)head << 32),
        .sum = worker->digest_device,
        .sums = worker->arrays.sums,
        .nonfinite = cpa_nonfinite_marks(&worker->nonfinite, layer) + at->first,
        .dtype = shape->dtype,
    };
    return worker->device->operators->hash_rows(&hash, worker->stream);
}

/* The results of `layers` layers to the digest. */
static cpa_status add_to_digest(cpa_worker *worker, int32_t layer, int32_t layers) {
    cpa_spans *spans = cpa_context_spans(worker->context);
    const int64_t span = cpa_spans_begin(spans, CPA_SPAN_HASH, 0, worker->stream);
    for (int32_t f = 0; f < worker->forms.count; f++) {
        if (worker->forms.count > 1 && worker->rows->forms[f].rows == 0) continue;
        CPA_TRY(add_form_to_digest(worker, &worker->forms.list[f], layer, layers));
    }
    cpa_spans_end(spans, span, worker->stream);
    return CPA_OK;
}

/* The results of a layer: to the digest, and to the model. */
static cpa_status layer_out(cpa_worker *worker, int32_t layer, const cpa_model_step *step) {
    const cpa_model *network = worker->network;
    cpa_stream *stream = worker->stream;
    cpa_spans *spans = cpa_context_spans(worker->context);
    if (!keeps_layers(worker) && !step->next_tokens) CPA_TRY(add_to_digest(worker, layer, 1));
    if (!network->layer_out) return CPA_OK;
    const int64_t span = cpa_spans_begin(spans, CPA_SPAN_LAYER_OUT, 0, stream);
    const void *out = out_of_layer(worker, layer);
    CPA_TRY(model_failed(stream, "layer_out", layer, network->layer_out(network->ctx, layer, step, out, stream)));
    cpa_spans_end(spans, span, stream);
    return CPA_OK;
}

static cpa_status run_layer(cpa_worker *worker, const cpa_step_plan *plan, int32_t layer, const cpa_model_step *step,
                            const cpa_worker_observer *observer, cpa_error *err) {
    const cpa_kv_view kv = cpa_worker_kv(worker, layer);
    const int32_t group = worker->places[layer].group;
    cpa_model_step own = *step;
    own.rows.slots_device += group * worker->rows->sizes.rows;
    cpa_context_spans(worker->context)->layer = layer;
    cpa_context_use_tables(worker->context, group);
    CPA_TRY(layer_in(worker, layer, &own, &kv));
    const cpa_kv_view precise = cpa_worker_precise(worker, layer);
    cpa_context_use_precise(worker->context, &precise);
    cpa_worker_selection selection;
    CPA_TRY(cpa_worker_select(worker, layer, &own, &kv, &selection, err));
    const int selects = selection.of.bits || selection.of.indices || selection.of.blocks;
    cpa_form_rows by_form[CPA_MOST_ROW_FORMS];
    cpa_worker_form_rows(worker, layer, out_of_layer(worker, layer), by_form);
    const cpa_context_args args = {.size = sizeof args,
                                   .kv = kv,
                                   .rules = worker->score ? &worker->score[layer] : NULL,
                                   .selection = selects ? &selection.of : NULL,
                                   .rows = by_form};
    cpa_status status = cpa_context_attend(worker->context, &args, worker->stream);
    if (status != CPA_OK) return cpa_fail(err, status, "layer %d: %s", layer, cpa_context_error(worker->context));
    /* Before the model goes on, which may write over what its indexer has left. */
    worker->selection = args.selection;
    worker->chosen_by = cpa_worker_chosen_by(&selection);
    status = cpa_worker_layer_done(worker, plan, layer, observer, err);
    worker->selection = NULL;
    worker->chosen_by = NULL;
    return status == CPA_OK ? layer_out(worker, layer, &own) : status;
}

/* What the model is told of the step that is prepared. */
static cpa_model_step describe_step(const cpa_worker *worker) {
    const cpa_worker_rows *rows = worker->rows;
    const cpa_step_arrays *on_host = &rows->host, *on_device = &worker->arrays;
    return (cpa_model_step){
        .size = sizeof(cpa_model_step),
        .rows = {rows->sizes.rows, rows->requests, on_host->tokens, on_host->positions, on_device->tokens,
                 on_device->positions, on_device->slots},
        .emissions = {.count = rows->sizes.emissions,
                      .rows = on_device->rows,
                      .sample = {.temperature = on_device->temperature,
                                 .top_p = on_device->top_p,
                                 .min_p = on_device->min_p,
                                 .top_k = on_device->top_k,
                                 .repetition_penalty = on_device->repetition_penalty,
                                 .presence_penalty = on_device->presence_penalty,
                                 .seed = on_device->seeds,
                                 .position = on_device->drawn_at,
                                 .seq = on_device->seqs,
                                 .given = on_device->given},
                      .wants = rows->wants},
        .history = {rows->sizes.restarts, on_device->restarts, rows->sizes.history, on_device->history_seqs,
                    on_device->tokens + rows->sizes.rows, on_device->history_outputs},
        .slices = rows->replicated ? &worker->slices : NULL,
        /* Without drafts too: a graph serves steps with and without. */
        .paths = {rows->sizes.history > 0 ? on_device->path_ends : NULL, on_device->history_parents},
        .limits = {worker->token_masks.device, worker->token_masks.index, worker->token_masks.slots,
                   on_device->bias_tokens, on_device->bias_values, on_device->bias_first, on_device->bias_count,
                   rows->sizes.biases},
        .frequency_penalty = on_device->frequency_penalty,
        .top_logprobs = on_device->top_logprobs,
        .ranks = rows->wants & CPA_WANTS_RANKS ? cpa_worker_own_ranks(worker) : NULL,
        .forms = worker->options.model.n_forms > 0 ? rows->forms : NULL,
        .row_exchange = &worker->row_exchange,
        .rank_rows = rows->rank_rows,
    };
}

static cpa_status begin_step(cpa_worker *worker, const cpa_model_step *step) {
    const cpa_model *network = worker->network;
    cpa_spans *spans = cpa_context_spans(worker->context);
    const int64_t span = cpa_spans_begin(spans, CPA_SPAN_BEGIN_STEP, 0, worker->stream);
    CPA_TRY(cpa_worker_take_tokens(worker));
    if (network->begin_step)
        CPA_TRY(
            model_failed(worker->stream, "begin_step", -1, network->begin_step(network->ctx, step, worker->stream)));
    cpa_spans_end(spans, span, worker->stream);
    return CPA_OK;
}

/* The layers before this one give the tokens of a step; the others draft. */
static int32_t first_draft_layer(const cpa_worker *worker) {
    return worker->options.model.layers - worker->options.model.draft_layers;
}

/* Runs the layers that draft, behind what this rank has drawn. */
static cpa_status draft(cpa_worker *worker, const cpa_step_plan *plan, cpa_model_step step,
                        const cpa_worker_observer *observer, cpa_error *err) {
    const cpa_model *network = worker->network;
    uint32_t *own = cpa_worker_own_guesses(worker);
    step.next_tokens = worker->arrays.next_tokens;
    CPA_TRY(cpa_worker_take_next_tokens(worker));
    for (int32_t layer = first_draft_layer(worker); layer < worker->options.model.layers; layer++)
        CPA_TRY(run_layer(worker, plan, layer, &step, observer, err));
    cpa_context_spans(worker->context)->layer = -1;
    if (step.emissions.count == 0) return CPA_OK;
    return model_failed(worker->stream, "end_draft", -1, network->end_draft(network->ctx, &step, own, worker->stream));
}

cpa_status cpa_worker_draw(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                           cpa_error *err) {
    const cpa_model_step step = describe_step(worker);
    const cpa_model *network = worker->network;
    cpa_stream *stream = worker->stream;
    cpa_spans *spans = cpa_context_spans(worker->context);
    if (network->end_step && step.emissions.count > 0) {
        const int64_t span = cpa_spans_begin(spans, CPA_SPAN_END_STEP, 0, stream);
        cpa_drawn *own = cpa_worker_own_tokens(worker);
        CPA_TRY(model_failed(stream, "end_step", -1, network->end_step(network->ctx, &step, own, stream)));
        cpa_spans_end(spans, span, stream);
    }
    if (worker->options.model.draft_layers > 0) CPA_TRY(draft(worker, plan, step, observer, err));
    return step.emissions.count > 0 ? cpa_worker_share_tokens(worker, err) : CPA_OK;
}

cpa_status cpa_worker_run_layers(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                                 cpa_error *err) {
    const cpa_model_step step = describe_step(worker);
    const int32_t layers = first_draft_layer(worker);
    cpa_context_spans(worker->context)->layer = -1;
    CPA_TRY(begin_step(worker, &step));
    for (int32_t layer = 0; layer < layers; layer++) CPA_TRY(run_layer(worker, plan, layer, &step, observer, err));
    cpa_context_spans(worker->context)->layer = -1;
    return keeps_layers(worker) ? add_to_digest(worker, 0, layers) : CPA_OK;
}
