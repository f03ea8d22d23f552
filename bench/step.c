/* bench step: what the host does of a decode step of context attention before its layers: each sequence gets a token,
 * those whose blocks are full get another, the step is planned, and what the device reads of it is enqueued. No layer
 * runs. The block tables on the device are compared with what they were made of. */
#include <stdlib.h>

#include <cpattn/context.h>

#include "base/check.h"
#include "base/min_max.h"
#include "bench/benchmark.h"
#include "bench/memory.h"
#include "kernels/block_tables.h"
#include "kernels/device.h"
#include "src/context/context_plan.h"
#include "src/worker/graphs.h"

/* After so many steps sequences are as long as at first again. */
enum { ROUND_STEPS = 1024 };

typedef struct step_state {
    cpa_bench_site *site;
    cpa_owner_map map;
    int64_t sequences, context, shared; /* tokens */
    cpa_context *attention;
    cpa_block_tables *tables;
    cpa_context_chunk *chunks; /* [sequences] */
    int64_t *rows;             /* [sequences] */
    cpa_events *turns;         /* 0 and 1: what the last two steps enqueued */
} step_state;

static cpa_placement placement_of(const step_state *s, int64_t sequence) {
    return (cpa_placement){CPA_SHARDED, (int32_t)(sequence % s->map.cp_size)};
}

/* Tokens of a sequence after the step of a call. They do not fill their blocks at once. */
static int64_t length_of(const step_state *s, int64_t sequence, int64_t call) {
    return s->context + sequence % s->site->options.block_size + call % ROUND_STEPS;
}

/* Entries of this rank for so many tokens. */
static int64_t entries_of(const step_state *s, int64_t sequence, int64_t tokens) {
    const cpa_token_set own = cpa_tokens_on(s->map, placement_of(s, sequence), s->site->control.rank);
    const int64_t block = s->site->options.block_size;
    return (cpa_tokens_before(s->map, own, tokens) + block - 1) / block;
}

/* Blocks of the shared tokens come first, then those of sequence after sequence. */
static int32_t block_of(const step_state *s, int64_t sequence, int64_t entry) {
    const int64_t block = s->site->options.block_size, shared = s->shared / block / s->map.cp_size;
    const int64_t own = (s->context + ROUND_STEPS) / block + 2;
    return (int32_t)(entry < shared ? entry : shared + sequence * own + entry - shared);
}

/* Brings the row of a sequence to the entries of so many tokens. */
static cpa_status take_blocks(step_state *s, int64_t sequence, int64_t tokens, cpa_error *err) {
    const cpa_table_set at = {s->tables, 0};
    const int64_t entries = entries_of(s, sequence, tokens);
    int64_t held = cpa_block_tables_count(at, sequence);
    if (entries < held) cpa_block_tables_cut(at, sequence, entries);
    for (; held < entries; held++) {
        const int32_t id = block_of(s, sequence, held);
        CPA_TRY(cpa_block_tables_append(at, sequence, &id, 1, -1, err));
    }
    return CPA_OK;
}

static cpa_status open_context(step_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const cpa_context_options options = {
        .size = sizeof options,
        .shape = cpa_bench_shape(o),
        .block_size = (int32_t)o->block_size,
        .interleave = (int32_t)o->interleave,
        .staging_bytes = o->staging_bytes,
        .max_rows = cpa_max64(s->sequences, cpa_graphs_rows(s->sequences)),
        .cascade_attention = (cpa_cascade_attention)o->cascade,
    };
    return cpa_context_create(s->site->control.comm, s->site->device, &options, &s->attention, err);
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    step_state *s = calloc(1, sizeof *s);
    (void)row;
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench step: no memory");
    *state = s;
    s->site = site;
    s->map = (cpa_owner_map){site->control.size, (int32_t)site->options.interleave};
    s->sequences = shape[0];
    s->context = shape[1];
    s->shared = cpa_min64(site->options.shared, s->context);
    CPA_TRY(open_context(s, err));
    s->chunks = calloc((size_t)s->sequences, sizeof *s->chunks);
    s->rows = calloc((size_t)s->sequences, sizeof *s->rows);
    if (!s->chunks || !s->rows) return cpa_fail(err, CPA_NO_MEMORY, "bench step: no memory for the sequences");
    CPA_TRY(cpa_block_tables_create(site->device, 1, &s->tables, err));
    for (int64_t i = 0; i < s->sequences; i++) {
        s->rows[i] = i;
        CPA_TRY(take_blocks(s, i, length_of(s, i, 0), err));
    }
    return site->device->table->events_create(site->device, &s->turns, err);
}

/* The rows that a step is planned with where it may become a graph, as in the program. */
static int64_t padded_rows(const step_state *s, int64_t call) {
    int64_t rows[CPA_MERGE_MAX_STATES] = {0}, most = 0;
    if (!s->site->device->caps.has_graphs) return 0;
    for (int64_t i = 0; i < s->sequences; i++)
        most = cpa_max64(most, ++rows[cpa_owner_rank(s->map, placement_of(s, i), length_of(s, i, call) - 1)]);
    return cpa_graphs_rows(most);
}

static cpa_status context_status(const step_state *s, cpa_status status, cpa_error *err) {
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_context_error(s->attention));
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    step_state *s = state;
    const cpa_device_table *table = s->site->device->table;
    const int32_t turn = call % 2;
    while (!table->event_reached(s->turns, turn)) continue; /* the step before the last is over, as for layers */
    for (int64_t i = 0; i < s->sequences; i++) {
        const int64_t tokens = length_of(s, i, call);
        CPA_TRY(take_blocks(s, i, tokens, err));
        s->chunks[i] = (cpa_context_chunk){
            .start = tokens - 1, .count = 1, .placement = placement_of(s, i), .algorithm = CPA_PASS_Q};
    }
    CPA_TRY(context_status(
        s, cpa_context_plan_ahead(s->attention, s->chunks, s->sequences, s->tables, s->rows, padded_rows(s, call)),
        err));
    CPA_TRY(context_status(s, cpa_context_upload_plan(s->attention, s->site->stream), err));
    return cpa_bench_enqueued(s->site, table->event_record(s->turns, turn, s->site->stream), err);
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    step_state *s = state;
    const cpa_table_set at = {s->tables, 0};
    for (int64_t i = 0; i < s->sequences; i++) {
        const int64_t n = cpa_block_tables_count(at, i);
        int32_t *found = malloc((size_t)(n + 1) * sizeof *found);
        if (!found) return cpa_fail(err, CPA_NO_MEMORY, "bench step: no memory for a block table");
        const cpa_status status =
            cpa_bench_copy(s->site, found, cpa_block_tables_device(at) + cpa_block_tables_place(s->tables, i),
                           n * (int64_t)sizeof *found, err);
        for (int64_t e = 0; status == CPA_OK && e < n; e++) row->wrong += found[e] != block_of(s, i, e);
        free(found);
        CPA_TRY(status);
        row->checked += n;
    }
    return CPA_OK;
}

static void release(void *state) {
    step_state *s = state;
    if (!s) return;
    if (s->turns) s->site->device->table->events_destroy(s->turns);
    cpa_context_destroy(s->attention);
    cpa_block_tables_destroy(s->tables);
    free(s->rows);
    free(s->chunks);
    free(s);
}

#define STEPS                                                                                                          \
    "64x8K:block-size=16,64x32K:block-size=16,64x128K:block-size=16,256x8K:block-size=16,256x32K:block-size=16,"       \
    "256x128K:block-size=16,64x128K:block-size=16:shared=64K"

const cpa_bench cpa_bench_step = {
    .name = "step",
    .dims = "sequences x context",
    .n_dims = 2,
    .shapes_host = STEPS,
    .shapes_cuda = STEPS,
    .checked = "table entries",
    .min_ranks = 1,
    .floor = CPA_BENCH_NO_FLOOR,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
