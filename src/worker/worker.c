#include "src/worker/worker.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/operators.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "src/worker/worker_apply.h"

static cpa_status create_cache(cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    const cpa_kv_cache_options cache = {o->model.attention, o->model.layers, o->block_size, o->num_blocks,
                                        o->host_blocks};
    return cpa_kv_cache_create(&cache, worker->stream, &worker->cache, err);
}

typedef enum buffer_place { ON_HOST = 0, ON_DEVICE, PAGE_LOCKED } buffer_place;

/* Device buffers and their host twins, allocated from one list so that there is one place that frees them. */
typedef struct buffer {
    void **memory;
    int64_t bytes;
    buffer_place place;
} buffer;

enum {
    OWN_BUFFERS = 12,
    ROW_BUFFERS = 6, /* of a set */
    WORKER_BUFFERS = OWN_BUFFERS + 2 * ROW_BUFFERS
};

static void list_row_buffers(cpa_worker_rows *set, int64_t rows, buffer list[ROW_BUFFERS]) {
    const buffer all[ROW_BUFFERS] = {
        {(void **)&set->requests, rows * (int64_t)sizeof *set->requests, PAGE_LOCKED},
        {(void **)&set->tokens, rows * (int64_t)sizeof *set->tokens, PAGE_LOCKED},
        {(void **)&set->positions, rows * (int64_t)sizeof *set->positions, PAGE_LOCKED},
        {(void **)&set->slots, rows * (int64_t)sizeof *set->slots, PAGE_LOCKED},
        {(void **)&set->digest_rows, rows * (int64_t)sizeof *set->digest_rows, PAGE_LOCKED},
        {(void **)&set->digest_salts, rows * (int64_t)sizeof *set->digest_salts, PAGE_LOCKED},
    };
    memcpy(list, all, sizeof all);
}

static void list_buffers(cpa_worker *worker, buffer list[WORKER_BUFFERS]) {
    const cpa_worker_options *o = &worker->options;
    const cpa_attention_shape *shape = &o->model.attention;
    int64_t rows = o->max_tokens;
    const buffer own[] = {
        {&worker->q, rows * cpa_shape_q_bytes(shape), ON_DEVICE},
        {&worker->k, rows * cpa_shape_k_bytes(shape), ON_DEVICE},
        {&worker->v, rows * cpa_shape_v_bytes(shape), ON_DEVICE},
        {&worker->out, rows * cpa_shape_out_bytes(shape), ON_DEVICE},
        {(void **)&worker->tokens_device, rows * (int64_t)sizeof(uint32_t), ON_DEVICE},
        {(void **)&worker->positions_device, rows * (int64_t)sizeof(int64_t), ON_DEVICE},
        {(void **)&worker->slots_device, rows * (int64_t)sizeof(int64_t), ON_DEVICE},
        {(void **)&worker->digest_rows_device, rows * (int64_t)sizeof(int32_t), ON_DEVICE},
        {(void **)&worker->digest_salts_device, rows * (int64_t)sizeof(uint64_t), ON_DEVICE},
        {(void **)&worker->digest_device, (int64_t)sizeof(uint64_t), ON_DEVICE},
        {(void **)&worker->nonfinite.marks, o->model.layers * rows, PAGE_LOCKED},
        {(void **)&worker->seqs, o->max_seqs * (int64_t)sizeof(cpa_worker_seq), ON_HOST},
    };
    _Static_assert(sizeof own == OWN_BUFFERS * sizeof *own, "as many as are listed");
    memcpy(list, own, sizeof own);
    list_row_buffers(&worker->row_sets[0], rows, list + OWN_BUFFERS);
    list_row_buffers(&worker->row_sets[1], rows, list + OWN_BUFFERS + ROW_BUFFERS);
}

static cpa_status allocate(cpa_worker *worker, cpa_error *err) {
    buffer list[WORKER_BUFFERS];
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

/* Steps may be captured where the device, the model and the options allow it. */
static cpa_status make_graphs(cpa_worker *worker, cpa_control *control, cpa_error *err) {
    if (worker->options.enforce_eager || !worker->device->caps.has_graphs || !worker->network->capturable)
        return CPA_OK;
    return cpa_graphs_create(control, worker->context, worker->stream, &worker->graphs, err);
}

void cpa_worker_set_meanwhile(cpa_worker *worker, void (*meanwhile)(void *ctx), void *ctx) {
    worker->meanwhile = meanwhile;
    worker->meanwhile_ctx = ctx;
}

void cpa_worker_set_timeline(cpa_worker *worker, cpa_timeline *timeline) {
    cpa_context_spans(worker->context)->timeline = timeline;
}

cpa_context_options cpa_worker_context_options(const cpa_worker_options *o, int64_t max_rows) {
    return (cpa_context_options){
        .size = sizeof(cpa_context_options),
        .shape = o->model.attention,
        .block_size = o->block_size,
        .interleave = o->map.interleave,
        .staging_bytes = o->staging_bytes,
        .max_rows = max_rows,
    };
}

cpa_status cpa_worker_create(cpa_control *control, cpa_device *device, const cpa_model *network,
                             const cpa_worker_options *options, cpa_worker **out, cpa_error *err) {
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
        status = allocate(worker, err);
        if (status == CPA_OK) status = device->table->stream_create(device, &worker->stream, err);
        if (status == CPA_OK) status = create_cache(worker, err);
        if (status == CPA_OK) status = clear_sums(worker, err);
    }
    /* The context is collective: ranks that came this far must not wait for one that did not. */
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), fail);
    const cpa_context_options context = cpa_worker_context_options(options, options->max_tokens);
    CPA_TRY_GOTO(cpa_context_create_over(control->comm, device, options->transport, &context, &worker->context, err),
                 fail);
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
    cpa_graphs_destroy(worker->graphs);
    cpa_context_destroy(worker->context);
    if (worker->stream) worker->device->table->stream_destroy(worker->stream);
    for (int32_t i = 0; worker->seqs && i < worker->options.max_seqs; i++) {
        free(worker->seqs[i].tokens);
        free(worker->seqs[i].blocks);
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
    cpa_kv_cache_destroy(worker->cache);
    free(worker->damaged);
    free(worker->chunks);
    free(worker);
}

/* The rows that every rank plans for if the step may be captured, 0 if it may not: the same on every rank. */
static int64_t padded_rows(const cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_owner_map map = worker->options.map;
    int64_t counts[CPA_MERGE_MAX_STATES] = {0}, most = 0;
    if (!worker->graphs) return 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        int local = map.cp_size == 1 || chunk->placement.kind == CPA_ON_RANK;
        if (chunk->count != 1 || (!local && chunk->algorithm != CPA_PASS_Q)) return 0;
        int64_t rows = ++counts[cpa_owner_rank(map, chunk->placement, chunk->start)];
        if (rows > most) most = rows;
    }
    int64_t rows = cpa_graphs_rows(most);
    return rows <= worker->options.max_tokens ? rows : 0;
}

/* Fills the step up with rows that go nowhere. */
static void fill_rows_up(cpa_worker_rows *rows, int64_t count) {
    for (int64_t row = rows->count; row < count; row++) {
        rows->requests[row] = 0;
        rows->tokens[row] = 0;
        rows->positions[row] = 0;
        rows->slots[row] = -1;
    }
    for (int64_t row = rows->n_digest; row < count; row++) {
        rows->digest_rows[row] = -1;
        rows->digest_salts[row] = 0;
    }
    rows->count = rows->n_digest = count;
}

static cpa_status upload_rows(cpa_worker *worker) {
    const cpa_device_table *table = worker->device->table;
    const cpa_worker_rows *rows = worker->rows;
    int64_t n = rows->count, digest = rows->n_digest;
    cpa_stream *stream = worker->stream;
    CPA_TRY(table->copy(worker->tokens_device, rows->tokens, n * (int64_t)sizeof *rows->tokens, stream));
    CPA_TRY(table->copy(worker->positions_device, rows->positions, n * (int64_t)sizeof *rows->positions, stream));
    CPA_TRY(table->copy(worker->slots_device, rows->slots, n * (int64_t)sizeof *rows->slots, stream));
    CPA_TRY(table->copy(worker->digest_rows_device, rows->digest_rows, digest * (int64_t)sizeof *rows->digest_rows,
                        stream));
    return table->copy(worker->digest_salts_device, rows->digest_salts, digest * (int64_t)sizeof *rows->digest_salts,
                       stream);
}

static cpa_status layer_done(const cpa_worker *worker, const cpa_step_plan *plan, int32_t layer,
                             const cpa_worker_observer *observer, cpa_error *err) {
    if (!observer) return CPA_OK;
    return observer->layer_done(observer->ctx, plan, layer, worker->q, worker->out, worker->stream, err);
}

/* An operation of ours that the model called says more. */
static cpa_status model_failed(cpa_stream *stream, const char *function, int32_t layer, cpa_status status) {
    if (status == CPA_OK || stream->error.message[0]) return status;
    if (layer < 0)
        return cpa_fail(&stream->error, status, "the model's %s returned %s", function, cpa_status_name(status));
    return cpa_fail(&stream->error, status, "layer %d: the model's %s returned %s", layer, function,
                    cpa_status_name(status));
}

/* Queries, keys and values of a layer; the latter go to the cache. */
static cpa_status layer_in(cpa_worker *worker, int32_t layer, const cpa_model_step *step, const cpa_kv_view *kv) {
    const cpa_model *network = worker->network;
    cpa_stream *stream = worker->stream;
    cpa_spans *spans = cpa_context_spans(worker->context);
    uint8_t *nonfinite = cpa_nonfinite_marks(&worker->nonfinite, layer);
    void *k = network->writes_cache ? NULL : worker->k, *v = network->writes_cache ? NULL : worker->v;
    const cpa_layer_args args = {sizeof args, worker->q, k, v, *kv, nonfinite};
    int64_t span = cpa_spans_begin(spans, CPA_SPAN_LAYER_IN, 0, stream);
    CPA_TRY(model_failed(stream, "layer_in", layer, network->layer_in(network->ctx, layer, step, &args, stream)));
    cpa_spans_end(spans, span, stream);
    if (network->writes_cache) return CPA_OK;
    const cpa_kv_write_args write = {
        sizeof write, step->rows.count, worker->options.model.attention.dtype, k, v, worker->slots_device,
        *kv,          nonfinite};
    span = cpa_spans_begin(spans, CPA_SPAN_KV_WRITE, 0, stream);
    CPA_TRY(worker->device->operators->kv_write(&write, stream));
    cpa_spans_end(spans, span, stream);
    return CPA_OK;
}

/* The results of a layer: to the digest, and to the model. */
static cpa_status layer_out(cpa_worker *worker, int32_t layer, const cpa_model_step *step) {
    const cpa_model *network = worker->network;
    const cpa_attention_shape *shape = &worker->options.model.attention;
    cpa_stream *stream = worker->stream;
    cpa_spans *spans = cpa_context_spans(worker->context);
    const cpa_hash_rows_args hash = {
        .rows = worker->rows->n_digest,
        .src = worker->out,
        .row_bytes = cpa_shape_out_bytes(shape),
        .row_index = worker->digest_rows_device,
        .salts = worker->digest_salts_device,
        .salt = (uint64_t)layer,
        .sum = worker->digest_device,
        .nonfinite = cpa_nonfinite_marks(&worker->nonfinite, layer),
        .dtype = shape->dtype,
    };
    int64_t span = cpa_spans_begin(spans, CPA_SPAN_HASH, 0, stream);
    CPA_TRY(worker->device->operators->hash_rows(&hash, stream));
    cpa_spans_end(spans, span, stream);
    if (!network->layer_out) return CPA_OK;
    span = cpa_spans_begin(spans, CPA_SPAN_LAYER_OUT, 0, stream);
    CPA_TRY(
        model_failed(stream, "layer_out", layer, network->layer_out(network->ctx, layer, step, worker->out, stream)));
    cpa_spans_end(spans, span, stream);
    return CPA_OK;
}

static cpa_status run_layer(cpa_worker *worker, const cpa_step_plan *plan, int32_t layer, const cpa_model_step *step,
                            const cpa_worker_observer *observer, cpa_error *err) {
    const cpa_kv_view kv = cpa_kv_cache_view(worker->cache, layer);
    cpa_context_spans(worker->context)->layer = layer;
    CPA_TRY(layer_in(worker, layer, step, &kv));
    cpa_context_args args = {.size = sizeof args,
                             .q = worker->q,
                             .kv = kv,
                             .mask = cpa_model_mask(&worker->options.model, layer),
                             .out = worker->out};
    cpa_status status = cpa_context_attend(worker->context, &args, worker->stream);
    if (status != CPA_OK) return cpa_fail(err, status, "layer %d: %s", layer, cpa_context_error(worker->context));
    CPA_TRY(layer_out(worker, layer, step));
    return layer_done(worker, plan, layer, observer, err);
}

/* What the model is told of the step that is prepared. */
static cpa_model_step describe_step(const cpa_worker *worker) {
    const cpa_worker_rows *host = worker->rows;
    return (cpa_model_step){
        .size = sizeof(cpa_model_step),
        .rows = {host->count, host->requests, host->tokens, host->positions, worker->tokens_device,
                 worker->positions_device, worker->slots_device},
    };
}

static cpa_status run_layers(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                             cpa_error *err) {
    const cpa_model *network = worker->network;
    const cpa_model_step step = describe_step(worker);
    cpa_spans *spans = cpa_context_spans(worker->context);
    if (network->begin_step) {
        const int64_t span = cpa_spans_begin(spans, CPA_SPAN_BEGIN_STEP, 0, worker->stream);
        CPA_TRY(
            model_failed(worker->stream, "begin_step", -1, network->begin_step(network->ctx, &step, worker->stream)));
        cpa_spans_end(spans, span, worker->stream);
    }
    for (int32_t layer = 0; layer < worker->options.model.layers; layer++)
        CPA_TRY(run_layer(worker, plan, layer, &step, observer, err));
    return CPA_OK;
}

/* Enqueues what the layers read of the step that is not in the cache. */
static cpa_status upload_step(cpa_worker *worker, cpa_error *err) {
    CPA_TRY(upload_rows(worker));
    cpa_status status = cpa_context_upload_plan(worker->context, worker->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_context_error(worker->context));
}

static cpa_status prepare_step(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                               cpa_error *err) {
    const int32_t layers = worker->options.model.layers;
    int32_t first_seen = layers;
    worker->rows = &worker->row_sets[worker->rows == &worker->row_sets[0]];
    worker->padded = 0;
    CPA_TRY(cpa_worker_apply(worker, plan, err));
    if (plan->n_chunks == 0) return CPA_OK;
    if (observer) CPA_TRY(observer->begin(observer->ctx, plan, &first_seen, err));
    int64_t rows = first_seen < layers - 1 ? 0 : padded_rows(worker, plan);
    if (rows > 0) fill_rows_up(worker->rows, rows);
    worker->padded = rows > 0;
    cpa_status status = cpa_context_plan_ahead(worker->context, worker->chunks, plan->n_chunks, rows);
    if (status != CPA_OK) return cpa_fail(err, status, "%s", cpa_context_error(worker->context));
    return upload_step(worker, err);
}

/* Enqueues the step: what moves before its layers, and these, or the graph of them. */
static cpa_status enqueue_step(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                               cpa_error *err) {
    cpa_graph_way way = CPA_GRAPH_EAGER;
    CPA_TRY(cpa_worker_move(worker, plan, err));
    if (plan->n_chunks == 0) return CPA_OK;
    cpa_context_begin(worker->context);
    if (worker->padded) CPA_TRY(cpa_graphs_choose(worker->graphs, &way, err));
    if (way == CPA_GRAPH_EAGER) {
        cpa_spans_start(cpa_context_spans(worker->context), worker->stream);
        return run_layers(worker, plan, observer, err);
    }
    if (way == CPA_GRAPH_CAPTURE) {
        CPA_TRY(cpa_graphs_begin(worker->graphs, err));
        CPA_TRY(cpa_graphs_end(worker->graphs, run_layers(worker, plan, NULL, err), err));
    }
    worker->graph_steps++;
    CPA_TRY(cpa_graphs_launch(worker->graphs, err));
    return layer_done(worker, plan, worker->options.model.layers - 1, observer, err);
}

/* Waits for the layers. Where they have run when they are enqueued, `meanwhile` has its one call before that. */
static cpa_status drain(cpa_worker *worker, cpa_error *err) {
    if (worker->meanwhile) worker->meanwhile(worker->meanwhile_ctx);
    cpa_status status = cpa_context_sync(worker->context, worker->stream, worker->meanwhile, worker->meanwhile_ctx);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_context_error(worker->context));
}

static cpa_status run_step(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                           cpa_error *err) {
    cpa_spans *spans = cpa_context_spans(worker->context);
    const cpa_worker_rows *rows = worker->rows; /* while the layers run, those of the next step become `rows` */
    cpa_host_span span = cpa_spans_host_begin(CPA_SPAN_ENQUEUE);
    cpa_status status = enqueue_step(worker, plan, observer, err);
    cpa_spans_host_end(spans, span);
    if (status != CPA_OK) return status;
    /* What swap_ins and copies read may be handed out again in the next plan. */
    if (plan->n_chunks == 0) return worker->device->table->stream_sync(worker->stream);
    span = cpa_spans_host_begin(CPA_SPAN_DRAIN);
    status = drain(worker, err);
    cpa_spans_host_end(spans, span);
    if (status == CPA_OK) cpa_nonfinite_collect(&worker->nonfinite, plan, rows->count, rows->requests, rows->positions);
    return status;
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
    return status == CPA_OK ? status : cpa_fail(err, status, "digest: %s", worker->stream->error.message);
}
