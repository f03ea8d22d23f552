#include "src/worker/worker.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "kernels/operators.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "src/context/row_exchange.h"
#include "src/context/tensor_slices.h"
#include "src/worker/layer_caches.h"
#include "src/worker/token_masks.h"
#include "src/worker/worker_apply.h"
#include "src/worker/worker_biases.h"
#include "src/worker/worker_disk.h"
#include "src/worker/worker_drafts.h"
#include "src/worker/worker_forms.h"
#include "src/worker/worker_layers.h"
#include "src/worker/worker_rows.h"
#include "src/worker/worker_score.h"
#include "src/worker/worker_sparse.h"
#include "src/worker/worker_tokens.h"
#include "src/worker/worker_transfer.h"
#include "src/worker/worker_trees.h"

typedef enum buffer_place { ON_HOST = 0, ON_DEVICE, PAGE_LOCKED } buffer_place;

/* Device buffers and their host twins, allocated from one list so that there is one place that frees them. */
typedef struct buffer {
    void **memory;
    int64_t bytes;
    buffer_place place;
} buffer;

enum {
    OWN_BUFFERS = 18,
    ROW_BUFFERS = 3, /* of a set */
    WORKER_BUFFERS = OWN_BUFFERS + 2 * ROW_BUFFERS
};

/* Bytes that any step fits but for its history, and any that is captured with it. */
static int64_t step_bytes(const cpa_worker *worker) {
    const cpa_worker_options *o = &worker->options;
    /* Drafts are in the history of their step, and in that of the next where they were right. */
    const int64_t history = cpa_max64(o->map.cp_size * o->max_tokens, cpa_graphs_rows(2 * o->max_tokens));
    cpa_step_sizes most = {.rows = o->max_tokens,
                           .groups = o->groups.count,
                           .emissions = o->max_tokens,
                           .history = history,
                           .restarts = o->max_seqs};
    if (worker->device->caps.has_graphs) most.biases = cpa_worker_most_biases(worker);
    if (worker->device->caps.has_graphs) cpa_worker_pad_masks(worker, o->map.cp_size * o->max_tokens, &most);
    if (worker->network->select) most.selected_rows = o->map.cp_size * o->max_tokens;
    most.forms = cpa_worker_listed_forms(worker);
    if (o->model.draft_layers > 0) most.next_tokens = o->max_tokens;
    cpa_step_arrays arrays;
    return cpa_step_arrays_lay_out(&most, NULL, &arrays);
}

static void list_row_buffers(cpa_worker_rows *set, const cpa_worker_options *o, buffer list[ROW_BUFFERS]) {
    const buffer all[ROW_BUFFERS] = {
        {&set->block, set->block_bytes, PAGE_LOCKED},
        {(void **)&set->requests, o->max_tokens * (int64_t)sizeof *set->requests, ON_HOST},
        {(void **)&set->emissions, o->max_tokens * (int64_t)sizeof *set->emissions, ON_HOST},
    };
    memcpy(list, all, sizeof all);
}

static void list_buffers(cpa_worker *worker, buffer list[WORKER_BUFFERS]) {
    const cpa_worker_options *o = &worker->options;
    const cpa_attention_shape *shape = &o->model.attention;
    const int64_t rows = o->max_tokens, drawn = o->map.cp_size * rows * (int64_t)sizeof(cpa_drawn);
    const int64_t ranks = worker->network->gives_ranks ? o->map.cp_size * rows * (int64_t)sizeof(cpa_token_ranks) : 0;
    const int64_t guesses = o->model.draft_layers > 0 ? o->map.cp_size * rows * (int64_t)sizeof(uint32_t) : 0;
    const buffer own[] = {
        {&worker->q, cpa_worker_most_q_bytes(worker, rows), ON_DEVICE},
        {&worker->k, rows * cpa_shape_k_bytes(shape), ON_DEVICE},
        {&worker->v, shape->v_in_k ? 0 : rows * cpa_shape_v_bytes(shape), ON_DEVICE},
        {&worker->out, worker->out_bytes, ON_DEVICE},
        {&worker->block, worker->block_bytes, ON_DEVICE},
        {(void **)&worker->drawn, drawn, ON_DEVICE},
        {(void **)&worker->drawn_host, drawn, PAGE_LOCKED},
        {(void **)&worker->ranks, ranks, ON_DEVICE},
        {(void **)&worker->ranks_host, ranks, PAGE_LOCKED},
        {(void **)&worker->guesses, guesses, ON_DEVICE},
        {(void **)&worker->guesses_host, guesses, PAGE_LOCKED},
        {(void **)&worker->digest_device, (int64_t)sizeof(uint64_t), ON_DEVICE},
        {(void **)&worker->sums_host, rows * (int64_t)sizeof *worker->sums_host, PAGE_LOCKED},
        {(void **)&worker->discarded, o->max_seqs * (int64_t)sizeof *worker->discarded, PAGE_LOCKED},
        {(void **)&worker->nonfinite.marks, o->model.layers * rows, PAGE_LOCKED},
        {(void **)&worker->spoiled, o->max_seqs * (int64_t)sizeof *worker->spoiled, ON_HOST},
        {(void **)&worker->seqs, o->max_seqs * (int64_t)sizeof(cpa_worker_seq), ON_HOST},
        {(void **)&worker->places, o->model.layers * (int64_t)sizeof *worker->places, ON_HOST},
    };
    _Static_assert(sizeof own == OWN_BUFFERS * sizeof *own, "as many as are listed");
    memcpy(list, own, sizeof own);
    list_row_buffers(&worker->row_sets[0], o, list + OWN_BUFFERS);
    list_row_buffers(&worker->row_sets[1], o, list + OWN_BUFFERS + ROW_BUFFERS);
}

static cpa_status allocate(cpa_worker *worker, cpa_error *err) {
    buffer list[WORKER_BUFFERS];
    worker->out_bytes = cpa_worker_most_out_bytes(worker, worker->options.max_tokens);
    worker->block_bytes = worker->row_sets[0].block_bytes = worker->row_sets[1].block_bytes = step_bytes(worker);
    list_buffers(worker, list);
    for (int i = 0; i < WORKER_BUFFERS; i++) {
        switch (list[i].place) {
            case ON_DEVICE:
                CPA_TRY(worker->device->table->alloc(worker->device, list[i].bytes, list[i].memory, err));
                break;
            case PAGE_LOCKED:
                CPA_TRY(worker->device->table->alloc_host(worker->device, list[i].bytes, list[i].memory, err));
                break;
            case ON_HOST:
                *list[i].memory = calloc(1, (size_t)list[i].bytes);
                if (*list[i].memory) break;
                return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for %lld bytes", (long long)list[i].bytes);
        }
    }
    return CPA_OK;
}

/* The digest, and the marks of what is not finite. */
static cpa_status clear_sums(cpa_worker *worker, cpa_error *err) {
    static const uint64_t zero = 0;
    const cpa_device_table *table = worker->device->table;
    cpa_status status = table->copy(worker->digest_device, &zero, sizeof zero, worker->stream);
    if (status == CPA_OK) status = table->stream_sync(worker->stream);
    memset(worker->nonfinite.marks, 0, (size_t)(worker->nonfinite.layers * worker->nonfinite.max_rows));
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "worker: %s", worker->stream->error.message);
}

/* Steps may be captured where the device, the model and the options allow it; copies through a ring are none of a graph,
 * as each step has others. */
static cpa_status make_graphs(cpa_worker *worker, cpa_control *control, cpa_error *err) {
    if (worker->options.enforce_eager || worker->options.ring_bytes > 0 || !worker->device->caps.has_graphs ||
        !worker->network->capturable)
        return CPA_OK;
    return cpa_graphs_create(control, worker->context, worker->stream, &worker->graphs, err);
}

cpa_progress *cpa_worker_progress(cpa_worker *worker) {
    return &worker->stream->progress;
}

void cpa_worker_set_token_masks(cpa_worker *worker, cpa_status (*give_masks)(void *ctx, cpa_error *err), void *ctx) {
    worker->give_masks = give_masks;
    worker->masks_ctx = ctx;
}

void cpa_worker_set_timeline(cpa_worker *worker, cpa_timeline *timeline) {
    cpa_context_spans(worker->context)->timeline = timeline;
}

static int has_unquantised(const cpa_model_shape *model) {
    int32_t layer = 0;
    while (layer < model->layers && !cpa_model_leaves_layer(model, layer)) layer++;
    return layer < model->layers;
}

cpa_context_options cpa_worker_context_options(const cpa_worker_options *o, int64_t max_rows) {
    return (cpa_context_options){
        .size = sizeof(cpa_context_options),
        .shape = o->model.attention,
        .block_size = o->block_size,
        .interleave = o->map.interleave,
        .staging_bytes = o->staging_bytes,
        .ring_bytes = o->ring_bytes,
        .ring_segments = o->ring_segments,
        .max_rows = max_rows,
        .cascade_attention = o->cascade_attention,
        .state_dtype = o->state_dtype,
        .skip_tiles = o->skip_tiles,
        .index = o->model.index ? *o->model.index : (cpa_index_form){.heads = 0},
        .has_unquantised = has_unquantised(&o->model),
    };
}

cpa_status cpa_worker_create(cpa_control *control, cpa_device *device, const cpa_model *network,
                             const cpa_worker_options *options, cpa_worker **out, cpa_error *err) {
    cpa_context_options context = cpa_worker_context_options(options, options->max_tokens);
    cpa_row_form widths[CPA_MOST_ROW_FORMS];
    cpa_worker_give_forms(&options->model, widths, &context);
    cpa_worker *worker = calloc(1, sizeof *worker);
    cpa_status status = worker ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "worker: no memory");
    if (worker) {
        worker->options = *options;
        worker->rank = control->rank;
        worker->device = device;
        worker->network = network;
        worker->rows = &worker->row_sets[0];
        worker->nonfinite.layers = options->model.layers;
        worker->nonfinite.max_rows = options->max_tokens;
        status = cpa_forms_take(device, &context, &worker->forms, err);
        if (status == CPA_OK) worker->forms_may_change = cpa_worker_forms_may_change(options, &worker->forms);
        if (status == CPA_OK) status = allocate(worker, err);
        if (status == CPA_OK) status = device->table->stream_create(device, &worker->stream, err);
        if (status == CPA_OK) status = cpa_worker_score_create(worker, err);
        if (status == CPA_OK) status = cpa_token_masks_open(worker, err);
        if (status == CPA_OK) status = cpa_layer_caches_create(worker, err);
        if (status == CPA_OK) status = cpa_worker_disk_open(worker, err);
        if (status == CPA_OK) status = cpa_block_tables_create(device, options->groups.count, &worker->tables, err);
        if (status == CPA_OK) status = cpa_worker_sparse_create(worker, err);
        if (status == CPA_OK) status = clear_sums(worker, err);
    }
    /* The context is collective: ranks that came this far must not wait for one that did not. */
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), fail);
    CPA_TRY_GOTO(cpa_context_create_over(control->comm, device, options->transport, &context, &worker->context, err),
                 fail);
    cpa_context_set_precise(worker->context, cpa_layer_groups_precise_tokens(&options->groups),
                            cpa_layer_groups_precise(&options->groups));
    worker->slices = cpa_context_slices(worker->context);
    worker->row_exchange = cpa_context_row_exchange(worker->context);
    status = make_graphs(worker, control, err);
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), fail);
    *out = worker;
    return CPA_OK;
fail:
    cpa_worker_destroy(worker);
    return status;
}

void cpa_worker_destroy(cpa_worker *worker) {
    if (!worker) return;
    cpa_worker_disk_close(worker);
    cpa_graphs_destroy(worker->graphs);
    cpa_context_destroy(worker->context);
    if (worker->stream) worker->device->table->stream_destroy(worker->stream);
    for (int32_t i = 0; worker->seqs && i < worker->options.max_seqs; i++) {
        free(worker->seqs[i].tokens);
        free(worker->seqs[i].biases);
    }
    buffer list[WORKER_BUFFERS];
    list_buffers(worker, list);
    for (int i = WORKER_BUFFERS - 1; i >= 0; i--) {
        switch (list[i].place) {
            case ON_DEVICE: worker->device->table->free(worker->device, *list[i].memory); break;
            case PAGE_LOCKED: worker->device->table->free_host(worker->device, *list[i].memory); break;
            case ON_HOST: free(*list[i].memory); break;
        }
    }
    worker->device->table->free(worker->device, worker->wide_block);
    cpa_token_masks_close(worker);
    cpa_worker_sparse_destroy(worker);
    cpa_worker_score_destroy(worker);
    cpa_layer_caches_destroy(worker);
    free(worker->damaged);
    free(worker->arrived);
    free(worker->lost);
    free(worker->nonfinite.last);
    cpa_block_tables_destroy(worker->tables);
    free(worker->table_rows);
    free(worker->chunks);
    free(worker);
}

/* Enqueues what the layers read of the step that is not in the cache. */
static cpa_status upload_step(cpa_worker *worker, cpa_error *err) {
    CPA_TRY(cpa_worker_upload_rows(worker, err));
    cpa_status status = cpa_context_upload_plan(worker->context, worker->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_context_error(worker->context));
}

static cpa_status prepare_step(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                               cpa_error *err) {
    const int32_t layers = worker->options.model.layers;
    int32_t first_seen = layers;
    worker->padded = 0;
    CPA_TRY(cpa_worker_discard_tokens(worker, plan, err));
    worker->plans += plan->n_chunks > 0;
    CPA_TRY(cpa_worker_apply(worker, plan, err));
    if (plan->n_chunks == 0) return CPA_OK;
    if (observer) CPA_TRY(observer->begin(observer->ctx, plan, &first_seen, err));
    /* What is seen of a layer that is launched by a graph is the last one's, but for what it selected. */
    const int seen = first_seen < layers - (worker->network->select ? 0 : 1);
    const int64_t rows = seen ? 0 : cpa_worker_padded_rows(worker, plan);
    worker->rows = &worker->row_sets[worker->rows == &worker->row_sets[0]];
    worker->padded = rows > 0;
    CPA_TRY(cpa_worker_list_rows(worker, plan, rows, err));
    cpa_context_set_rows(worker->context, worker->rows->replicated ? CPA_ROWS_REPLICATED : CPA_ROWS_OWNED);
    cpa_context_set_masked(worker->context, worker->rows->sizes.masked_rows > 0 ||
                                                worker->rows->sizes.selected_rows > 0 ||
                                                cpa_worker_sparse_takes(worker, plan));
    cpa_status status = cpa_context_plan_ahead(worker->context, worker->chunks, plan->n_chunks, worker->tables,
                                               worker->table_rows, rows);
    if (status != CPA_OK) return cpa_fail(err, status, "%s", cpa_context_error(worker->context));
    return upload_step(worker, err);
}

/* What a graph of the step bakes in beside its attention. */
static uint64_t shape_of(const cpa_worker_rows *rows) {
    const int64_t shape[] = {
        rows->sizes.emissions, rows->sizes.history,     rows->wants,        rows->draws,
        rows->takes,           rows->sizes.masked_rows, rows->sizes.biases, rows->sizes.selected_rows};
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}

/* The layers, and the drawing too where no mask is to be waited for. */
static cpa_status enqueue_eagerly(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                                  cpa_error *err) {
    CPA_TRY(cpa_worker_run_layers(worker, plan, observer, err));
    return worker->rows->wants & CPA_WANTS_MASKS ? CPA_OK : cpa_worker_draw(worker, plan, observer, err);
}

/* The same, or the graph of them. */
static cpa_status enqueue_layers(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                                 cpa_error *err) {
    cpa_graph_way way = CPA_GRAPH_EAGER;
    if (worker->padded) CPA_TRY(cpa_graphs_choose(worker->graphs, shape_of(worker->rows), &way, err));
    if (way == CPA_GRAPH_EAGER) {
        cpa_spans_start(cpa_context_spans(worker->context), worker->stream);
        return enqueue_eagerly(worker, plan, observer, err);
    }
    if (way == CPA_GRAPH_CAPTURE) {
        CPA_TRY(cpa_graphs_begin(worker->graphs, err));
        CPA_TRY(cpa_graphs_end(worker->graphs, enqueue_eagerly(worker, plan, NULL, err), err));
    }
    worker->graph_steps++;
    CPA_TRY(cpa_graphs_launch(worker->graphs, err));
    return cpa_worker_layer_done(worker, plan, worker->options.model.layers - 1, observer, err);
}

/* The drawing by masks, which are made while the layers run. */
static cpa_status draw_by_masks(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                                cpa_error *err) {
    if (!(worker->rows->wants & CPA_WANTS_MASKS)) return CPA_OK;
    if (!worker->give_masks) return cpa_fail(err, CPA_INTERNAL, "nobody gives the masks of constrained requests");
    CPA_TRY(worker->give_masks(worker->masks_ctx, err));
    return cpa_worker_draw(worker, plan, observer, err);
}

/* Enqueues the step: what moves before its layers, these, and what comes back from them. */
static cpa_status enqueue_step(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                               cpa_error *err) {
    CPA_TRY(cpa_worker_move(worker, plan, err));
    CPA_TRY(cpa_worker_import(worker, plan, err));
    if (plan->n_chunks == 0) return CPA_OK;
    cpa_context_begin(worker->context);
    CPA_TRY(cpa_worker_sparse_begin(worker, plan, err));
    CPA_TRY(enqueue_layers(worker, plan, observer, err));
    CPA_TRY(draw_by_masks(worker, plan, observer, err));
    return cpa_worker_fetch_tokens(worker);
}

/* Waits for the layers. Where they have run when they are enqueued, this is the only idle time of the step. */
static cpa_status drain(cpa_worker *worker, cpa_error *err) {
    cpa_progress_idle(&worker->stream->progress);
    cpa_status status = cpa_context_sync(worker->context, worker->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_context_error(worker->context));
}

/* Of sequences that are swapped out this is forgotten: their requests have failed before they come back. */
static void note_spoiled(cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_nonfinite *found = &worker->nonfinite;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        if (chunk->flags & CPA_CHUNK_FIRST) worker->spoiled[chunk->seq] = 0;
        for (int64_t j = 0; j < found->n_last; j++)
            if (found->last[j].request == chunk->request) worker->spoiled[chunk->seq] = 1;
    }
}

/* Takes what came back from a step that is done. */
static cpa_status collect_step(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    const cpa_worker_rows *ran = worker->ran;
    cpa_worker_settle_discards(worker);
    if (plan->n_chunks == 0) return CPA_OK;
    cpa_worker_keep_tokens(worker);
    cpa_worker_judge_drafts(worker, plan);
    cpa_worker_sparse_end(worker);
    CPA_TRY(cpa_nonfinite_collect(&worker->nonfinite, plan, ran->sizes.rows, ran->requests, ran->host.positions, err));
    note_spoiled(worker, plan);
    return CPA_OK;
}

static cpa_status run_step(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                           cpa_error *err) {
    cpa_spans *spans = cpa_context_spans(worker->context);
    if (plan->n_chunks > 0) worker->ran = worker->rows; /* as it runs, those of the next step become `rows` */
    cpa_host_span span = cpa_spans_host_begin(CPA_SPAN_ENQUEUE);
    cpa_status status = enqueue_step(worker, plan, observer, err);
    cpa_spans_host_end(spans, span);
    if (status != CPA_OK) return status;
    /* What swap_ins and copies read may be handed out again in the next plan. */
    span = cpa_spans_host_begin(CPA_SPAN_DRAIN);
    status = plan->n_chunks > 0 ? drain(worker, err) : worker->device->table->stream_sync(worker->stream);
    cpa_spans_host_end(spans, span);
    return status == CPA_OK ? collect_step(worker, plan, err) : status;
}

/* An operation of the table or of the model leaves its message on the stream. */
static cpa_status outcome(const cpa_worker *worker, const cpa_step_plan *plan, cpa_status status, const cpa_error *own,
                          cpa_error *err) {
    if (status == CPA_OK) return CPA_OK;
    return cpa_fail(err, status, "step %llu: %s", (unsigned long long)plan->step,
                    own->status != CPA_OK ? own->message : worker->stream->error.message);
}

cpa_status cpa_worker_prepare(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                              cpa_error *err) {
    cpa_error own = {CPA_OK, ""};
    cpa_host_span span = cpa_spans_host_begin(CPA_SPAN_PLAN);
    cpa_status status = prepare_step(worker, plan, observer, &own);
    cpa_spans_host_end(cpa_context_spans(worker->context), span);
    return outcome(worker, plan, status, &own, err);
}

cpa_status cpa_worker_run(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                          cpa_error *err) {
    cpa_error own = {CPA_OK, ""};
    return outcome(worker, plan, run_step(worker, plan, observer, &own), &own, err);
}

cpa_status cpa_worker_digest(cpa_worker *worker, uint64_t *out, cpa_error *err) {
    const cpa_device_table *table = worker->device->table;
    cpa_status status = table->copy(out, worker->digest_device, sizeof *out, worker->stream);
    if (status == CPA_OK) status = table->stream_sync(worker->stream);
    if (status != CPA_OK) return cpa_fail(err, status, "digest: %s", worker->stream->error.message);
    cpa_worker_settle_discards(worker);
    *out -= worker->digest_off;
    return CPA_OK;
}
