/* Context attention on a team of ranks, through the public functions of cpattn/context.h: a shard of every sequence is
 * filled, then each step is planned and its one layer attended again and again: decode on a device as the program does
 * it, in graphs of many layers. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/min_max.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/noise.h"
#include "bench/scaling_team.h"
#include "src/check/reference.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "src/worker/graphs.h"

enum { MAX_CALLS_PER_BATCH = 512, SAMPLED_ROWS = 2, SAMPLED_HEADS = 4 };
enum { PIECE_TOKENS = 8192, LAYERS_PER_GRAPH = 32 };
_Static_assert(CPA_BENCH_MARKED_LAYERS % LAYERS_PER_GRAPH == 0, "whole graphs");
static const double batch_s = 20e-3;

/* A row of this rank in the step. */
typedef struct team_row {
    int64_t sequence, position;
} team_row;

typedef struct team {
    cpa_bench_site *site;
    const cpa_bench_work *work;
    cpa_control control;
    cpa_context *context;
    cpa_graphs *graphs; /* graphs of decode on a device; else NULL */
    bool captured;      /* a call is a part of a graph of LAYERS_PER_GRAPH */
    cpa_owner_map map;
    cpa_kv_view kv;
    int32_t *blocks;            /* block ids of all sequences, one after another */
    cpa_context_chunk *chunks;  /* [sequences] */
    cpa_context_chunk *planned; /* [2 * sequences] chunks of the step: two of a sequence that goes both ways */
    team_row *rows;             /* rows of the step, on this rank */
    int64_t n_rows;
    void *q, *out;
} team;

static cpa_placement placement_of(const team *t, int64_t sequence) {
    return (cpa_placement){CPA_SHARDED, (int32_t)(sequence % t->map.cp_size)};
}

static int32_t shard_of(const team *t, int64_t sequence) {
    return cpa_tokens_on(t->map, placement_of(t, sequence), t->control.rank).shard;
}

/* ---- inputs ---- */

/* Positions of the local tokens [first, end) of a sequence. */
static int64_t *shard_positions(const team *t, int64_t sequence, int64_t first, int64_t end) {
    int64_t *positions = malloc((size_t)(end - first + 1) * sizeof *positions);
    for (int64_t i = first; positions && i < end; i++) {
        positions[i - first] = cpa_shard_pos(t->map, shard_of(t, sequence), i);
    }
    return positions;
}

static cpa_status fill_shards(team *t, cpa_error *err) {
    const cpa_bench_options *o = &t->site->options;
    int64_t blocks = 0;
    for (int64_t i = 0; i < t->work->sequences; i++) {
        blocks += (cpa_shard_len(t->map, shard_of(t, i), t->work->context) + o->block_size - 1) / o->block_size;
    }
    CPA_TRY(cpa_bench_block_order(o, blocks, &t->blocks, err));
    CPA_TRY(cpa_bench_make_cache(t->site, blocks > 0 ? blocks : 1, &t->kv, err));
    int64_t first_block = 0;
    cpa_status status = CPA_OK;
    for (int64_t i = 0; status == CPA_OK && i < t->work->sequences; i++) {
        int64_t tokens = cpa_shard_len(t->map, shard_of(t, i), t->work->context);
        int64_t *positions = shard_positions(t, i, 0, tokens);
        t->chunks[i] = (cpa_context_chunk){
            .placement = placement_of(t, i), .algorithm = t->work->algorithm, .block_table = t->blocks + first_block};
        status = positions ? cpa_bench_fill_cache(t->site, i, positions, tokens, t->blocks + first_block, &t->kv, err)
                           : cpa_fail(err, CPA_NO_MEMORY, "bench scaling: no memory for positions");
        free(positions);
        first_block += (tokens + o->block_size - 1) / o->block_size;
    }
    return status;
}

/* The rows of this rank in a step of the new tokens [start, start + count), and their queries. */
static cpa_status fill_queries(team *t, int64_t start, int64_t count, cpa_error *err) {
    const cpa_bench_options *o = &t->site->options;
    const cpa_attention_shape shape = cpa_bench_shape(o);
    const int64_t row_bytes = cpa_shape_q_bytes(&shape);
    cpa_status status = CPA_OK;
    t->n_rows = 0;
    for (int64_t i = 0; status == CPA_OK && i < t->work->sequences; i++) {
        int64_t first = cpa_shard_len(t->map, shard_of(t, i), start);
        int64_t end = cpa_shard_len(t->map, shard_of(t, i), start + count);
        int64_t *positions = shard_positions(t, i, first, end);
        if (!positions) return cpa_fail(err, CPA_NO_MEMORY, "bench scaling: no memory for positions");
        for (int64_t j = 0; j < end - first; j++) t->rows[t->n_rows + j] = (team_row){i, positions[j]};
        char *q = (char *)t->q + t->n_rows * row_bytes;
        status = cpa_bench_synthesize(t->site, CPA_SYNTH_Q, i, positions, end - first, q, err);
        free(positions);
        t->n_rows += end - first;
    }
    return status;
}

static cpa_status open_team(team *t, cpa_comm *comm, cpa_error *err) {
    const cpa_bench_options *o = &t->site->options;
    CPA_TRY(cpa_control_open(comm, &t->control, err));
    t->map = (cpa_owner_map){t->control.size, (int32_t)o->interleave};
    int64_t step_tokens = t->work->sequences * t->work->chunk;
    cpa_context_options options = {
        .size = sizeof options,
        .shape = cpa_bench_shape(o),
        .block_size = (int32_t)o->block_size,
        .interleave = (int32_t)o->interleave,
        .staging_bytes = o->staging_bytes,
        .max_rows = cpa_max64(step_tokens, cpa_graphs_rows(step_tokens)),
    };
    CPA_TRY(cpa_context_create(t->control.comm, t->site->device, &options, &t->context, err));
    if (t->work->new_tokens == 1 && t->site->device->caps.has_graphs) {
        CPA_TRY(cpa_graphs_create(&t->control, t->context, t->site->stream, &t->graphs, err));
    }
    int64_t most_rows = t->work->sequences * (step_tokens / t->work->sequences / t->map.cp_size + t->map.interleave);
    t->chunks = calloc((size_t)t->work->sequences, sizeof *t->chunks);
    t->planned = calloc(2 * (size_t)t->work->sequences, sizeof *t->planned);
    t->rows = malloc((size_t)most_rows * sizeof *t->rows);
    cpa_status status =
        t->chunks && t->planned && t->rows ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench scaling: no memory for rows");
    if (status == CPA_OK) {
        status = cpa_device_alloc(t->site->device, most_rows * cpa_shape_q_bytes(&options.shape), &t->q, err);
    }
    if (status == CPA_OK) {
        status = cpa_device_alloc(t->site->device, most_rows * cpa_shape_out_bytes(&options.shape), &t->out, err);
    }
    if (status == CPA_OK) status = fill_shards(t, err);
    return cpa_control_agree(&t->control, status, err);
}

static void close_team(team *t) {
    cpa_graphs_destroy(t->graphs);
    cpa_context_destroy(t->context);
    cpa_device_free(t->site->device, t->out);
    cpa_device_free(t->site->device, t->q);
    cpa_device_free(t->site->device, t->kv.v);
    cpa_device_free(t->site->device, t->kv.k);
    free(t->rows);
    free(t->planned);
    free(t->chunks);
    free(t->blocks);
    cpa_control_close(&t->control);
}

/* ---- time ---- */

static cpa_status context_status(const team *t, cpa_status status, cpa_error *err) {
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_context_error(t->context));
}

/* One call of a batch, on the rank with the most of each. */
typedef struct call_time {
    double time_s, enqueue_s, exposed_s;
} call_time;

/* marks: events 0 .. n around and between the layers, or NULL. */
static cpa_status attend_layers(team *t, int64_t n, cpa_events *marks) {
    const cpa_device_table *table = t->site->device->table;
    cpa_context_args args = {.size = sizeof args, .q = t->q, .kv = t->kv, .mask = {.causal = 1}, .out = t->out};
    cpa_status status = CPA_OK;
    for (int64_t i = 0; status == CPA_OK && i < n; i++) {
        if (marks) CPA_TRY(table->event_record(marks, (int32_t)i, t->site->stream));
        status = cpa_context_attend(t->context, &args, t->site->stream);
    }
    return status == CPA_OK && marks ? table->event_record(marks, (int32_t)n, t->site->stream) : status;
}

/* Runs n layers to their end; *enqueue_s is what starting them took. Between graphs it waits, as the program does
 * between steps. */
static cpa_status run_layers(team *t, int64_t n, double *enqueue_s, cpa_error *err) {
    *enqueue_s = 0;
    for (int64_t done = 0; done < n; done += t->captured ? LAYERS_PER_GRAPH : n) {
        double start = cpa_clock_now();
        if (t->captured) {
            CPA_TRY(cpa_graphs_launch(t->graphs, err));
        } else {
            CPA_TRY(context_status(t, attend_layers(t, n, NULL), err));
        }
        *enqueue_s += cpa_clock_now() - start;
        CPA_TRY(context_status(t, cpa_context_sync(t->context, t->site->stream), err));
    }
    return CPA_OK;
}

static cpa_status time_calls(team *t, int64_t n, call_time *out, cpa_error *err) {
    cpa_context_stats before, after;
    double ready = 0, enqueue_s;
    cpa_context_get_stats(t->context, &before, sizeof before);
    CPA_TRY(cpa_control_max(&t->control, &ready, 1, err)); /* ranks begin together */
    double start = cpa_clock_now();
    cpa_status status = run_layers(t, n, &enqueue_s, err);
    double end = cpa_clock_now();
    cpa_context_get_stats(t->context, &after, sizeof after);
    CPA_TRY(cpa_control_agree(&t->control, status, err));
    double most[3] = {end - start, enqueue_s, after.exposed_comm_s - before.exposed_comm_s};
    CPA_TRY(cpa_control_max(&t->control, most, 3, err));
    *out = (call_time){most[0] / (double)n, most[1] / (double)n, most[2] / (double)n};
    return CPA_OK;
}

static int compare_times(const void *a, const void *b) {
    double x = ((const call_time *)a)->time_s, y = ((const call_time *)b)->time_s;
    return (x > y) - (x < y);
}

/* Bytes that all ranks have sent so far. */
static cpa_status sent_so_far(team *t, double *out, cpa_error *err) {
    cpa_context_stats stats;
    cpa_context_get_stats(t->context, &stats, sizeof stats);
    *out = (double)stats.bytes_sent;
    return cpa_control_sum(&t->control, out, 1, err);
}

/* The chunks of a step; how many. */
static int64_t fill_chunks(team *t, int64_t start, int64_t count) {
    const int64_t by_q = cpa_min64(t->work->pass_q_tokens, count);
    int64_t n = 0;
    for (int64_t i = 0; i < t->work->sequences; i++) {
        cpa_context_chunk chunk = t->chunks[i];
        chunk.start = start;
        chunk.count = count - by_q;
        if (chunk.count > 0) t->planned[n++] = chunk;
        chunk.start += chunk.count;
        chunk.count = by_q;
        chunk.algorithm = CPA_PASS_Q;
        if (chunk.count > 0) t->planned[n++] = chunk;
    }
    return n;
}

static cpa_status plan_step(team *t, int64_t start, int64_t count, cpa_error *err) {
    double most_rows;
    const int64_t n = fill_chunks(t, start, count);
    CPA_TRY(cpa_control_agree(&t->control, fill_queries(t, start, count, err), err));
    most_rows = (double)t->n_rows;
    CPA_TRY(cpa_control_max(&t->control, &most_rows, 1, err));
    int64_t padded_rows = t->graphs ? cpa_graphs_rows((int64_t)most_rows) : 0;
    cpa_context_begin(t->context);
    cpa_status status = cpa_context_plan_ahead(t->context, t->planned, n, NULL, NULL, padded_rows);
    if (status == CPA_OK) status = cpa_context_upload_plan(t->context, t->site->stream);
    return cpa_control_agree(&t->control, context_status(t, status, err), err);
}

/* Captures the layers of the step, whose shape has run before; later calls are launches of the graph. With marks it is
 * another graph than without. */
static cpa_status capture_step(team *t, cpa_events *marks, cpa_error *err) {
    cpa_graph_way way;
    for (int run = 0; run < 2; run++) CPA_TRY(cpa_graphs_choose(t->graphs, marks != NULL, &way, err));
    CPA_TRY(cpa_graphs_begin(t->graphs, err));
    cpa_status status = context_status(t, attend_layers(t, LAYERS_PER_GRAPH, marks), err);
    CPA_TRY(cpa_control_agree(&t->control, cpa_graphs_end(t->graphs, status, err), err));
    t->captured = true;
    return CPA_OK;
}

/* Calls of a batch from the time of one. */
static int64_t calls_per_batch(const team *t, double call_s) {
    if (t->site->backend != CPA_BACKEND_CUDA) return 1;
    int64_t calls = (int64_t)fmin(batch_s / call_s + 1, MAX_CALLS_PER_BATCH);
    return t->captured ? (calls + LAYERS_PER_GRAPH - 1) / LAYERS_PER_GRAPH * LAYERS_PER_GRAPH : calls;
}

/* Times batches of the planned step, for `seconds` or as many as the options ask for; *median is one of them, *n how
 * many there were. */
static cpa_status time_batches(team *t, int64_t calls, double seconds, call_time *median, int64_t *n, cpa_error *err) {
    call_time *times = malloc(CPA_BENCH_MAX_ITERATIONS * sizeof *times);
    cpa_status status = times ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench scaling: no memory for times");
    double total = 0;
    *n = 0;
    CPA_TRY_GOTO(cpa_control_agree(&t->control, status, err), done);
    while (!cpa_bench_is_timed(&t->site->options, *n, total, seconds)) {
        CPA_TRY_GOTO(time_calls(t, calls, &times[*n], err), done);
        total += times[(*n)++].time_s * (double)calls;
    }
    qsort(times, (size_t)*n, sizeof *times, compare_times);
    *median = times[*n / 2];
done:
    free(times);
    return status;
}

/* How long single layers of the step take: those of a graph with marks between them, which had to be set once
 * before. */
static cpa_status time_layers(team *t, cpa_events *marks, cpa_bench_team_result *result, cpa_error *err) {
    const cpa_device_table *table = t->site->device->table;
    double enqueue_s;
    CPA_TRY(context_status(t, attend_layers(t, LAYERS_PER_GRAPH, marks), err));
    CPA_TRY(context_status(t, cpa_context_sync(t->context, t->site->stream), err));
    CPA_TRY(capture_step(t, marks, err));
    CPA_TRY(run_layers(t, LAYERS_PER_GRAPH, &enqueue_s, err)); /* the first launch brings the graph to the device */
    while (result->n_layers < CPA_BENCH_MARKED_LAYERS) {
        CPA_TRY(run_layers(t, LAYERS_PER_GRAPH, &enqueue_s, err));
        for (int32_t i = 0; i < LAYERS_PER_GRAPH; i++)
            CPA_TRY(table->event_seconds(marks, i, i + 1, &result->layer_s[result->n_layers++], err));
    }
    return CPA_OK;
}

static cpa_status mark_layers(team *t, cpa_bench_team_result *result, cpa_error *err) {
    const cpa_device_table *table = t->site->device->table;
    cpa_events *marks;
    CPA_TRY(table->events_create(t->site->device, &marks, err));
    cpa_status status = time_layers(t, marks, result, err);
    table->events_destroy(marks);
    return status;
}

/* Plans and times one step, and adds its median batch to the result. Of graphs, waiting is measured in
 * layers of their own, run one by one: nothing is measured inside a graph. */
static cpa_status run_step(team *t, int64_t start, int64_t count, cpa_bench_team_result *result, cpa_error *err) {
    const double step_s = t->site->options.min_time_s * (double)count / (double)t->work->new_tokens;
    call_time median, warm, eager = {0};
    double before, after;
    int64_t n;
    CPA_TRY(plan_step(t, start, count, err));
    CPA_TRY(sent_so_far(t, &before, err));
    CPA_TRY(time_calls(t, 1, &warm, err));
    CPA_TRY(sent_so_far(t, &after, err));
    if (t->graphs) {
        CPA_TRY(time_calls(t, LAYERS_PER_GRAPH, &eager, err));
        CPA_TRY(capture_step(t, NULL, err));
    }
    if (t->captured || warm.time_s < step_s) CPA_TRY(time_calls(t, t->captured ? LAYERS_PER_GRAPH : 1, &warm, err));
    int64_t calls = calls_per_batch(t, warm.time_s);
    CPA_TRY(time_batches(t, calls, step_s, &median, &n, err));
    result->iterations += n * calls;
    result->time_s += median.time_s;
    result->enqueue_s += median.enqueue_s;
    result->exposed_s += t->captured ? eager.exposed_s : median.exposed_s;
    result->bytes_sent += after - before;
    return t->captured && t->work->marks_layers ? mark_layers(t, result, err) : CPA_OK;
}

/* ---- right? ---- */

/* Adds the keys of a row to the references of its sampled heads, piece by piece. */
static cpa_status add_keys(team *t, const team_row *row, const int64_t *heads, cpa_reference_row *refs,
                           cpa_error *err) {
    const cpa_bench_options *o = &t->site->options;
    for (int64_t first = 0; first <= row->position; first += PIECE_TOKENS) {
        int64_t n = cpa_min64(row->position + 1 - first, PIECE_TOKENS);
        cpa_kv_view kv;
        CPA_TRY(cpa_bench_recall(t->site, row->sequence, first, n, &kv, err));
        for (int64_t i = 0; i < n * SAMPLED_HEADS; i++) {
            float k[CPA_MAX_HEAD_DIM], v[CPA_MAX_HEAD_DIM];
            int64_t kv_head = heads[i % SAMPLED_HEADS] * o->kv_heads / o->q_heads;
            cpa_bench_recalled_row(&kv, CPA_SYNTH_K, i / SAMPLED_HEADS, kv_head, k);
            cpa_bench_recalled_row(&kv, CPA_SYNTH_V, i / SAMPLED_HEADS, kv_head, v);
            cpa_reference_add(&refs[i % SAMPLED_HEADS], k, v);
        }
        free(kv.v);
        free(kv.k);
    }
    return CPA_OK;
}

/* One head of a row of a tensor [rows, q_heads, dim] on the device, as floats. */
static cpa_status read_head(team *t, const void *tensor, int64_t row, int64_t head, int64_t dim, float *out,
                            cpa_error *err) {
    const cpa_bench_options *o = &t->site->options;
    cpa_dtype dtype = (cpa_dtype)o->dtype;
    char bytes[CPA_MAX_HEAD_DIM * sizeof(float)];
    const char *at = (const char *)tensor + (row * o->q_heads + head) * dim * cpa_dtype_bytes(dtype);
    CPA_TRY(cpa_bench_copy(t->site, bytes, at, dim * cpa_dtype_bytes(dtype), err));
    cpa_reference_widen(bytes, dtype, dim, out);
    return CPA_OK;
}

/* Checks some heads of one row of the last step. */
static cpa_status check_row(team *t, int64_t row, cpa_reference_row *refs, cpa_bench_team_result *result,
                            cpa_error *err) {
    const cpa_bench_options *o = &t->site->options;
    int64_t heads[SAMPLED_HEADS];
    for (int i = 0; i < SAMPLED_HEADS; i++) {
        float q[CPA_MAX_HEAD_DIM];
        heads[i] = (int64_t)(cpa_bench_hash((uint64_t)(row * SAMPLED_HEADS + i)) % (uint64_t)o->q_heads);
        CPA_TRY(read_head(t, t->q, row, heads[i], o->k_dim, q, err));
        cpa_reference_begin(&refs[i], q, (int32_t)o->k_dim, (int32_t)o->v_dim, (cpa_dtype)o->dtype, 0);
    }
    CPA_TRY(add_keys(t, &t->rows[row], heads, refs, err));
    for (int i = 0; i < SAMPLED_HEADS; i++) {
        float got[CPA_MAX_HEAD_DIM];
        double want[CPA_MAX_HEAD_DIM], lse, tolerance;
        CPA_TRY(read_head(t, t->out, row, heads[i], o->v_dim, got, err));
        cpa_reference_end(&refs[i], want, &lse, &tolerance);
        result->checked++;
        result->wrong += !(cpa_reference_error(got, want, (int32_t)o->v_dim) <= tolerance);
    }
    return CPA_OK;
}

static cpa_status check_rows(team *t, cpa_bench_team_result *result, cpa_error *err) {
    cpa_reference_row *refs = malloc(SAMPLED_HEADS * sizeof *refs);
    cpa_status status = refs ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench scaling: no memory for the reference");
    int64_t samples = cpa_min64(t->n_rows, SAMPLED_ROWS); /* evenly spaced, the last one included */
    for (int64_t i = 0; status == CPA_OK && i < samples; i++) {
        status = check_row(t, (i + 1) * t->n_rows / samples - 1, refs, result, err);
    }
    free(refs);
    CPA_TRY(cpa_control_agree(&t->control, status, err));
    double counts[2] = {result->checked, result->wrong};
    CPA_TRY(cpa_control_sum(&t->control, counts, 2, err));
    result->checked = counts[0];
    result->wrong = counts[1];
    return CPA_OK;
}

/* Multiply-adds over the visible pairs; keys and values read once, queries read and results written. */
static void count_work(const team *t, cpa_bench_team_result *result) {
    const cpa_bench_options *o = &t->site->options;
    double n = (double)t->work->new_tokens, context = (double)t->work->context, widths = (double)(o->k_dim + o->v_dim);
    double pairs = n * (context - n) + 0.5 * n * (n + 1);
    result->flops = (double)t->work->sequences * 2.0 * widths * (double)o->q_heads * pairs;
    result->bytes = (double)t->work->sequences * widths *
                    (context * (double)(o->kv_heads * cpa_dtype_bytes((cpa_dtype)o->kv_dtype)) +
                     n * (double)(o->q_heads * cpa_dtype_bytes((cpa_dtype)o->dtype)));
}

cpa_status cpa_bench_team_run(cpa_bench_site *site, cpa_comm *comm, const cpa_bench_work *work,
                              cpa_bench_team_result *out, cpa_error *err) {
    team t = {.site = site, .work = work, .control = {.comm = NULL}};
    cpa_bench_team_result result = {0};
    int64_t end = work->context;
    cpa_status status;
    CPA_TRY_GOTO(open_team(&t, comm, err), done);
    for (int64_t start = end - work->new_tokens; start < end; start += work->chunk) {
        int64_t count = end - start < work->chunk ? end - start : work->chunk;
        CPA_TRY_GOTO(run_step(&t, start, count, &result, err), done);
    }
    CPA_TRY_GOTO(check_rows(&t, &result, err), done);
    count_work(&t, &result);
    result.ranks = t.control.size;
    *out = result;
done:
    close_team(&t);
    return status;
}
