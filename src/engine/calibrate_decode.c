/* What an exchange costs a decode step, and how fast a rank reads its cache. */
#include "src/engine/calibrate_decode.h"

#include <math.h>

#include "base/check.h"
#include "base/clock.h"
#include "kernels/device.h"
#include "kernels/graph.h"
#include "src/context/context_plan.h"
#include "src/engine/calibrate_probe.h"

enum {
    LAYERS = 32, /* of a probe step */
    STEPS = 8,
    COPIES = 4,
    COPY_BYTES = 128 << 20 /* more than a cache of the device holds */
};

/* One row of one sequence, which every rank has a run of the interleave of. */
typedef struct decode_probe {
    cpa_calibrate_probe base;
    cpa_graph *graph;
} decode_probe;

static void destroy(decode_probe *p) {
    if (p->graph) p->base.device->graphs->destroy(p->graph);
    cpa_calibrate_probe_close(&p->base);
}

/* As decode steps run: the first one eagerly, then a graph of it. */
static cpa_status capture(decode_probe *p, cpa_error *err) {
    cpa_calibrate_probe *base = &p->base;
    const cpa_graph_table *graphs = base->device->graphs;
    CPA_TRY(cpa_calibrate_probe_attend(base, LAYERS, err));
    CPA_TRY(cpa_calibrate_context_failed(base, cpa_context_sync(base->context, base->stream), err));
    if (p->graph) graphs->destroy(p->graph);
    p->graph = NULL;
    CPA_TRY(cpa_calibrate_stream_failed(base, graphs->begin(base->stream), err));
    cpa_context_capture(base->context, 1);
    cpa_status status = cpa_calibrate_probe_attend(base, LAYERS, err);
    cpa_context_capture(base->context, 0);
    if (status != CPA_OK) {
        graphs->end(base->stream, NULL);
        return status;
    }
    return cpa_calibrate_stream_failed(base, graphs->end(base->stream, &p->graph), err);
}

static cpa_status plan_layer(decode_probe *p, const cpa_context_chunk *chunk, cpa_error *err) {
    cpa_calibrate_probe *base = &p->base;
    cpa_context_begin(base->context);
    CPA_TRY(cpa_calibrate_context_failed(base, cpa_context_plan_ahead(base->context, chunk, 1, NULL, NULL, 1), err));
    CPA_TRY(cpa_calibrate_context_failed(base, cpa_context_upload_plan(base->context, base->stream), err));
    return capture(p, err);
}

/* Launches the graph; seconds of one of its layers. */
static cpa_status time_graph(decode_probe *p, double *seconds, cpa_error *err) {
    cpa_calibrate_probe *base = &p->base;
    double start = 0;
    for (int step = -1; step < STEPS; step++) { /* the first is the warm-up */
        CPA_TRY(cpa_calibrate_stream_failed(base, base->device->graphs->launch(p->graph, base->stream), err));
        if (step >= 0) continue;
        CPA_TRY(cpa_calibrate_context_failed(base, cpa_context_sync(base->context, base->stream), err));
        start = cpa_clock_now();
    }
    CPA_TRY(cpa_calibrate_context_failed(base, cpa_context_sync(base->context, base->stream), err));
    *seconds = (cpa_clock_now() - start) / (STEPS * LAYERS);
    return CPA_OK;
}

/* Seconds of a layer of a step with one row of a sequence of that placement, which ends at `end`. The last rank has
 * it. */
static cpa_status time_layer(decode_probe *p, cpa_placement placement, int64_t end, double *seconds, cpa_error *err) {
    cpa_control *control = p->base.control;
    cpa_context_chunk chunk = {
        .start = end - 1, .count = 1, .placement = placement, .algorithm = CPA_PASS_Q, .block_table = p->base.table};
    CPA_TRY(cpa_control_agree(control, plan_layer(p, &chunk, err), err));
    CPA_TRY(cpa_control_agree(control, time_graph(p, seconds, err), err));
    return cpa_control_max(control, seconds, 1, err);
}

static cpa_status time_exchange(decode_probe *p, cpa_control *control, cpa_device *device, const cpa_worker_options *o,
                                double *exchange_s, cpa_error *err) {
    const cpa_owner_map map = o->map;
    CPA_TRY(cpa_calibrate_probe_open(&p->base, control, device, o, map.cp_size, 1, map.interleave, err));
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
    cpa_calibrate_probe p = {.device = device};
    char *memory = NULL;
    double start = 0;
    cpa_status status = table->alloc(device, 2 * (int64_t)COPY_BYTES, (void **)&memory, err);
    if (status == CPA_OK) status = table->stream_create(device, &p.stream, err);
    for (int i = -1; i < COPIES && status == CPA_OK; i++) {
        status = cpa_calibrate_stream_failed(&p, table->copy(memory + COPY_BYTES, memory, COPY_BYTES, p.stream), err);
        if (status == CPA_OK && i < 0) status = cpa_calibrate_stream_failed(&p, table->stream_sync(p.stream), err);
        if (i < 0) start = cpa_clock_now();
    }
    if (status == CPA_OK) status = cpa_calibrate_stream_failed(&p, table->stream_sync(p.stream), err);
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
    decode_probe p = {0};
    cpa_status status = time_exchange(&p, control, device, options, &seconds, err);
    destroy(&p);
    CPA_TRY(status);
    *memory_bandwidth = bandwidth / control->size;
    *exchange_s = seconds;
    return CPA_OK;
}
