/* What an exchange costs a decode step, and how fast a rank reads its cache. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "kernels/device.h"
#include "kernels/graph.h"
#include "kernels/kv_view.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "src/engine/calibrate_decode.h"

enum {
    LAYERS = 32, /* of a probe step */
    STEPS = 8,
    COPIES = 4,
    COPY_BYTES = 128 << 20 /* more than a cache of the device holds */
};

/* One row of one sequence, which every rank has a run of the interleave of; one layer, attended again and again. */
typedef struct probe {
    cpa_control *control;
    cpa_device *device;
    cpa_context *context;
    cpa_stream *stream;
    cpa_graph *graph;
    cpa_kv_view kv;
    void *q, *out;
    int32_t *table;
} probe;

static cpa_status stream_failed(const probe *p, cpa_status status, cpa_error *err) {
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "calibration: %s", p->stream->error.message);
}

static cpa_status context_failed(const probe *p, cpa_status status, cpa_error *err) {
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "calibration: %s", cpa_context_error(p->context));
}

static cpa_status zeros(probe *p, int64_t bytes, void **out, cpa_error *err) {
    const cpa_device_table *table = p->device->table;
    CPA_TRY(table->alloc(p->device, bytes, out, err));
    void *from = calloc(1, (size_t)bytes);
    if (!from) return cpa_fail(err, CPA_NO_MEMORY, "calibration: no memory for %lld bytes", (long long)bytes);
    cpa_status status = table->copy(*out, from, bytes, p->stream);
    if (status == CPA_OK) status = table->stream_sync(p->stream);
    free(from);
    return stream_failed(p, status, err);
}

/* The sequence needs a block alone: its table names it again and again. */
static cpa_status make_memory(probe *p, const cpa_worker_options *o, cpa_error *err) {
    const cpa_attention_shape *shape = &o->model.attention;
    const int64_t element = cpa_dtype_bytes(shape->dtype), kv_element = cpa_dtype_bytes(shape->kv_dtype);
    p->kv = cpa_kv_view_of(shape, o->block_size, 1);
    p->table = calloc((size_t)(o->map.interleave / o->block_size), sizeof *p->table);
    if (!p->table) return cpa_fail(err, CPA_NO_MEMORY, "calibration: no memory");
    CPA_TRY(p->device->table->stream_create(p->device, &p->stream, err));
    CPA_TRY(zeros(p, p->kv.k_block_stride * kv_element, &p->kv.k, err));
    CPA_TRY(zeros(p, p->kv.v_block_stride * kv_element, &p->kv.v, err));
    CPA_TRY(zeros(p, shape->q_heads * shape->k_dim * element, &p->q, err));
    return zeros(p, shape->q_heads * shape->v_dim * element, &p->out, err);
}

static void destroy(probe *p) {
    const cpa_graph_table *graphs = p->device->graphs;
    const cpa_device_table *table = p->device->table;
    if (p->graph) graphs->destroy(p->graph);
    cpa_context_destroy(p->context);
    table->free(p->device, p->out);
    table->free(p->device, p->q);
    table->free(p->device, p->kv.v);
    table->free(p->device, p->kv.k);
    if (p->stream) table->stream_destroy(p->stream);
    free(p->table);
}

static cpa_status attend_layers(probe *p, cpa_error *err) {
    cpa_context_args args = {.size = sizeof args, .q = p->q, .kv = p->kv, .mask = {.causal = 1}, .out = p->out};
    for (int layer = 0; layer < LAYERS; layer++)
        CPA_TRY(context_failed(p, cpa_context_attend(p->context, &args, p->stream), err));
    return CPA_OK;
}

/* As decode steps run: the first one eagerly, then a graph of it. */
static cpa_status capture(probe *p, cpa_error *err) {
    const cpa_graph_table *graphs = p->device->graphs;
    CPA_TRY(attend_layers(p, err));
    CPA_TRY(context_failed(p, cpa_context_sync(p->context, p->stream, NULL, NULL), err));
    if (p->graph) graphs->destroy(p->graph);
    p->graph = NULL;
    CPA_TRY(stream_failed(p, graphs->begin(p->stream), err));
    cpa_context_capture(p->context, 1);
    cpa_status status = attend_layers(p, err);
    cpa_context_capture(p->context, 0);
    if (status != CPA_OK) {
        graphs->end(p->stream, NULL);
        return status;
    }
    return stream_failed(p, graphs->end(p->stream, &p->graph), err);
}

static cpa_status plan_layer(probe *p, const cpa_context_chunk *chunk, cpa_error *err) {
    cpa_context_begin(p->context);
    CPA_TRY(context_failed(p, cpa_context_plan_ahead(p->context, chunk, 1, 1), err));
    CPA_TRY(context_failed(p, cpa_context_upload_plan(p->context, p->stream), err));
    return capture(p, err);
}

/* Launches the graph; seconds of one of its layers. */
static cpa_status time_graph(probe *p, double *seconds, cpa_error *err) {
    double start = 0;
    for (int step = -1; step < STEPS; step++) { /* the first is the warm-up */
        CPA_TRY(stream_failed(p, p->device->graphs->launch(p->graph, p->stream), err));
        if (step < 0) CPA_TRY(context_failed(p, cpa_context_sync(p->context, p->stream, NULL, NULL), err));
        if (step < 0) start = cpa_clock_now();
    }
    CPA_TRY(context_failed(p, cpa_context_sync(p->context, p->stream, NULL, NULL), err));
    *seconds = (cpa_clock_now() - start) / (STEPS * LAYERS);
    return CPA_OK;
}

/* Seconds of a layer of a step with one row of a sequence of that placement, which ends at `end`. The last rank has
 * it. */
static cpa_status time_layer(probe *p, cpa_placement placement, int64_t end, double *seconds, cpa_error *err) {
    cpa_context_chunk chunk = {
        .start = end - 1, .count = 1, .placement = placement, .algorithm = CPA_PASS_Q, .block_table = p->table};
    CPA_TRY(cpa_control_agree(p->control, plan_layer(p, &chunk, err), err));
    CPA_TRY(cpa_control_agree(p->control, time_graph(p, seconds, err), err));
    return cpa_control_max(p->control, seconds, 1, err);
}

static cpa_status time_exchange(probe *p, const cpa_worker_options *o, double *exchange_s, cpa_error *err) {
    const cpa_owner_map map = o->map;
    const cpa_context_options options = cpa_worker_context_options(o, map.cp_size);
    CPA_TRY(cpa_control_agree(p->control, make_memory(p, o, err), err));
    CPA_TRY(cpa_context_create_over(p->control->comm, p->device, o->transport, &options, &p->context, err));
    const cpa_placement all_ranks = {CPA_SHARDED, 0}, last_rank = {CPA_ON_RANK, map.cp_size - 1};
    double sharded_s, local_s;
    CPA_TRY(time_layer(p, all_ranks, (int64_t)map.cp_size * map.interleave, &sharded_s, err));
    CPA_TRY(time_layer(p, last_rank, map.interleave, &local_s, err));
    *exchange_s = fmax(sharded_s - local_s, 0);
    return CPA_OK;
}

/* A copy reads and writes, and decode reads, at about the same rate. */
static cpa_status time_copy(cpa_device *device, double *bandwidth, cpa_error *err) {
    const cpa_device_table *table = device->table;
    probe p = {.device = device};
    char *memory = NULL;
    double start = 0;
    cpa_status status = table->alloc(device, 2 * (int64_t)COPY_BYTES, (void **)&memory, err);
    if (status == CPA_OK) status = table->stream_create(device, &p.stream, err);
    for (int i = -1; i < COPIES && status == CPA_OK; i++) {
        status = stream_failed(&p, table->copy(memory + COPY_BYTES, memory, COPY_BYTES, p.stream), err);
        if (status == CPA_OK && i < 0) status = stream_failed(&p, table->stream_sync(p.stream), err);
        if (i < 0) start = cpa_clock_now();
    }
    if (status == CPA_OK) status = stream_failed(&p, table->stream_sync(p.stream), err);
    *bandwidth = 2.0 * COPY_BYTES * COPIES / (cpa_clock_now() - start);
    if (p.stream) table->stream_destroy(p.stream);
    table->free(device, memory);
    return status;
}

cpa_status cpa_calibrate_decode(cpa_control *control, cpa_device *device, const cpa_worker_options *options,
                                double *memory_bandwidth, double *exchange_s, cpa_error *err) {
    double bandwidth = 0, seconds = 0;
    CPA_TRY(cpa_control_agree(control, time_copy(device, &bandwidth, err), err));
    CPA_TRY(cpa_control_sum(control, &bandwidth, 1, err));
    probe p = {.control = control, .device = device};
    cpa_status status = time_exchange(&p, options, &seconds, err);
    destroy(&p);
    CPA_TRY(status);
    *memory_bandwidth = bandwidth / control->size;
    *exchange_s = seconds;
    return CPA_OK;
}
