#include "src/engine/calibrate.h"

#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "kernels/block_layout.h"
#include "kernels/operators.h"
#include "src/engine/calibrate_decode.h"
#include "src/engine/calibrate_exchange.h"
#include "src/engine/calibrate_prefill.h"
#include "src/model/synthetic.h"

/* A probe grows until it takes long enough that launching it does not count. */
enum { LEAST_KEYS = 1024, MOST_KEYS = 16384, QUERIES_PART = 8, GROWTH = 4 };
static const double PROBE_SECONDS = 0.01, LONG_CALL_SECONDS = 1e-3;

/* A chunk of queries over keys that it sees all, in a cache of its own. */
typedef struct probe {
    const cpa_worker_options *options;
    cpa_device *device;
    int64_t keys, queries;
    cpa_stream *stream;
    cpa_attend_plan *plan;
    cpa_kv_view kv;
    void *q, *k, *v, *out;
    int32_t *table;
    uint32_t *tokens;
    int64_t *positions; /* positions of the tokens; also their slots, as the blocks lie in order */
} probe;

static cpa_status probe_allocate(probe *p, cpa_error *err) {
    const cpa_attention_shape *shape = &p->options->model.attention;
    const cpa_device_table *table = p->device->table;
    const cpa_operator_table *operators = p->device->operators;
    const cpa_block_layout layout = cpa_block_layout_of(shape, p->options->block_size);
    const int64_t blocks = (p->keys + layout.block_size - 1) / layout.block_size;
    const int64_t element = cpa_dtype_bytes(shape->dtype), kv_tokens = blocks * layout.block_size;
    void *memory;
    CPA_TRY(table->stream_create(p->device, &p->stream, err));
    CPA_TRY(operators->plan_create(p->device, NULL, &p->plan, err));
    CPA_TRY(table->alloc(p->device, blocks * layout.bytes, &memory, err));
    p->kv = cpa_block_layout_view(&layout, memory, blocks, 0);
    CPA_TRY(table->alloc(p->device, kv_tokens * shape->kv_heads * shape->k_dim * element, &p->k, err));
    CPA_TRY(table->alloc(p->device, kv_tokens * shape->kv_heads * shape->v_dim * element, &p->v, err));
    CPA_TRY(table->alloc(p->device, kv_tokens * shape->q_heads * shape->k_dim * element, &p->q, err));
    CPA_TRY(table->alloc(p->device, p->queries * shape->q_heads * shape->v_dim * element, &p->out, err));
    CPA_TRY(table->alloc(p->device, kv_tokens * (int64_t)sizeof *p->tokens, (void **)&p->tokens, err));
    return table->alloc(p->device, kv_tokens * (int64_t)sizeof *p->positions, (void **)&p->positions, err);
}

static void probe_free(probe *p) {
    const cpa_device_table *table = p->device->table;
    const cpa_operator_table *operators = p->device->operators;
    table->free(p->device, p->positions);
    table->free(p->device, p->tokens);
    table->free(p->device, p->out);
    table->free(p->device, p->q);
    table->free(p->device, p->v);
    table->free(p->device, p->k);
    table->free(p->device, p->kv.k);
    if (p->plan) operators->plan_destroy(p->plan);
    if (p->stream) table->stream_destroy(p->stream);
    free(p->table);
}

/* Fills queries and the cache by the synthetic model. */
static cpa_status probe_fill(probe *p) {
    const cpa_device_table *table = p->device->table;
    const cpa_operator_table *operators = p->device->operators;
    int64_t n = p->kv.num_blocks * p->kv.block_size;
    uint32_t *tokens = malloc((size_t)n * sizeof *tokens);
    int64_t *positions = malloc((size_t)n * sizeof *positions);
    cpa_status status = tokens && positions ? CPA_OK : CPA_NO_MEMORY;
    for (int64_t i = 0; status == CPA_OK && i < n; i++) {
        tokens[i] = (uint32_t)i * 2654435761u;
        positions[i] = i;
    }
    if (status == CPA_OK) {
        CPA_TRY_GOTO(table->copy(p->tokens, tokens, n * (int64_t)sizeof *tokens, p->stream), done);
        CPA_TRY_GOTO(table->copy(p->positions, positions, n * (int64_t)sizeof *positions, p->stream), done);
        cpa_synthetic synthetic = {.device = p->device, .shape = p->options->model.attention, .seed = 1};
        const cpa_model network = cpa_synthetic_model(&synthetic);
        const cpa_model_step step = {
            .size = sizeof step, .rows = {.count = n, .tokens_device = p->tokens, .positions_device = p->positions}};
        const cpa_layer_args layer = {.size = sizeof layer, .q = p->q, .k = p->k, .v = p->v, .kv = p->kv};
        CPA_TRY_GOTO(network.layer_in(network.ctx, 0, &step, &layer, p->stream), done);
        cpa_kv_write_args write = {
            sizeof write, n, p->options->model.attention.dtype, p->k, p->v, p->positions, p->kv, NULL, 0, 0, 0, 0};
        CPA_TRY_GOTO(operators->kv_write(&write, p->stream), done);
        CPA_TRY_GOTO(table->stream_sync(p->stream), done);
    }
done:
    free(positions);
    free(tokens);
    return status;
}

static cpa_status probe_plan(probe *p, cpa_error *err) {
    p->table = malloc((size_t)p->kv.num_blocks * sizeof *p->table);
    if (!p->table) return cpa_fail(err, CPA_NO_MEMORY, "no memory");
    for (int32_t b = 0; b < p->kv.num_blocks; b++) p->table[b] = b;
    cpa_attend_item item = {.q_count = p->queries, .q_first = p->keys - p->queries, .k_count = p->keys};
    cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = {1, p->kv.block_size},
        .shape = p->options->model.attention,
        .block_size = p->kv.block_size,
        .items = &item,
        .n_items = 1,
        .block_tables = p->table,
        .n_table_entries = p->kv.num_blocks,
    };
    return p->device->operators->plan_set(p->plan, &batch, (cpa_attend_fusion){0}, err);
}

/* Seconds of a call: the least of those of PROBE_SECONDS after a warm-up, as whatever else the machine does only
 * adds. */
static cpa_status probe_time(probe *p, double *seconds) {
    const cpa_operator_table *operators = p->device->operators;
    const cpa_device_table *table = p->device->table;
    cpa_attend_args args = {.size = sizeof args,
                            .q = p->q,
                            .q_dtype = p->options->model.attention.dtype,
                            .kv = p->kv,
                            .scale = 1 / sqrtf((float)p->options->model.attention.k_dim),
                            .out = p->out};
    double elapsed = 0;
    *seconds = INFINITY;
    for (int64_t call = -1; call <= 0 || elapsed < PROBE_SECONDS; call++) { /* the first is the warm-up */
        const double start = cpa_clock_now();
        CPA_TRY(operators->attend(p->plan, &args, NULL, p->stream));
        CPA_TRY(table->stream_sync(p->stream));
        if (call < 0) continue;
        const double of_call = cpa_clock_now() - start;
        elapsed += of_call;
        *seconds = fmin(*seconds, of_call);
    }
    return CPA_OK;
}

static cpa_status run_probe(cpa_device *device, const cpa_worker_options *options, int64_t keys, double *seconds,
                            cpa_error *err) {
    probe p = {.options = options, .device = device, .keys = keys, .queries = keys / QUERIES_PART};
    cpa_error own = {CPA_OK, ""};
    cpa_status status;
    CPA_TRY_GOTO(probe_allocate(&p, &own), done);
    CPA_TRY_GOTO(probe_plan(&p, &own), done);
    CPA_TRY_GOTO(probe_fill(&p), done);
    CPA_TRY_GOTO(probe_time(&p, seconds), done);
done:
    if (status != CPA_OK) {
        cpa_fail(err, status, "calibration: %s", own.message[0] || !p.stream ? own.message : p.stream->error.message);
    }
    probe_free(&p);
    return status;
}

/* FLOP/s: 2 flops for each product of Q K^T and of P V, all keys visible. */
static cpa_status measure_flops(cpa_device *device, const cpa_worker_options *options, double *flops, cpa_error *err) {
    const cpa_attention_shape *shape = &options->model.attention;
    double seconds = 0;
    int64_t keys = LEAST_KEYS / GROWTH;
    do {
        keys *= GROWTH;
        CPA_TRY(run_probe(device, options, keys, &seconds, err));
    } while (seconds < LONG_CALL_SECONDS && keys < MOST_KEYS);
    *flops =
        2.0 * (double)(keys / QUERIES_PART) * (double)keys * shape->q_heads * (shape->k_dim + shape->v_dim) / seconds;
    return CPA_OK;
}

cpa_status cpa_calibrate(cpa_control *control, cpa_device *device, const cpa_worker_options *options,
                         cpa_planner *planner, cpa_link *links, cpa_error *err) {
    double sums[2] = {0, INFINITY};
    CPA_TRY(cpa_control_agree(control, measure_flops(device, options, &sums[0], err), err));
    if (control->size > 1) {
        CPA_TRY(cpa_calibrate_exchange(control, device, options->transport, &sums[1], links, err));
        CPA_TRY(cpa_control_sum(control, sums, 2, err));
    }
    planner->flops = sums[0] / control->size;
    planner->bandwidth = sums[1] / control->size;
    if (control->size == 1 || !device->caps.has_graphs) return CPA_OK;
    CPA_TRY(cpa_calibrate_decode(control, device, options, &planner->memory_bandwidth, &planner->exchange_s, err));
    return cpa_calibrate_prefill(control, device, options, planner, err);
}
