/* A step of context attention: its chunks, the block tables, and the rows of this rank against its own shard. */
#include <inttypes.h>
#include <sched.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "src/context/context_internal.h"

int64_t cpa_context_rows(const cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks) {
    int64_t rows = 0;
    for (int64_t i = 0; i < n_chunks; i++) {
        const cpa_context_chunk *chunk = &chunks[i];
        cpa_token_set own = cpa_tokens_on(context->map, chunk->placement, context->control.rank);
        rows += cpa_tokens_before(context->map, own, chunk->start + chunk->count) -
                cpa_tokens_before(context->map, own, chunk->start);
    }
    return rows;
}

static cpa_status check_chunks(cpa_context *c, const cpa_context_chunk *chunks, int64_t n) {
    int64_t total = 0;
    if (n < 0 || (n > 0 && !chunks)) return cpa_fail(&c->error, CPA_INVALID, "plan: %" PRId64 " chunks at NULL", n);
    for (int64_t i = 0; i < n; i++) {
        const cpa_context_chunk *chunk = &chunks[i];
        if (chunk->start < 0 || chunk->count < 1 || chunk->count > c->options.max_rows ||
            chunk->start > INT64_MAX - chunk->count) {
            return cpa_fail(&c->error, CPA_INVALID,
                            "plan: chunk %" PRId64 " has tokens [%" PRId64 ", +%" PRId64
                            "), expected a start >= 0 and 1..%" PRId64 " tokens",
                            i, chunk->start, chunk->count, c->options.max_rows);
        }
        if (!cpa_placement_is_valid(c->map, chunk->placement)) {
            return cpa_fail(&c->error, CPA_INVALID,
                            "plan: chunk %" PRId64
                            " has a placement of kind %d and rank %d, expected kind %d or %d and "
                            "rank 0..%d",
                            i, (int)chunk->placement.kind, chunk->placement.rank, CPA_SHARDED, CPA_ON_RANK,
                            c->map.cp_size - 1);
        }
        if (chunk->algorithm != CPA_PASS_KV && chunk->algorithm != CPA_PASS_Q) {
            return cpa_fail(&c->error, CPA_INVALID,
                            "plan: chunk %" PRId64 " has algorithm %d, expected pass-KV or pass-Q", i,
                            (int)chunk->algorithm);
        }
        total += chunk->count;
    }
    if (total > c->options.max_rows) {
        return cpa_fail(&c->error, CPA_INVALID, "plan: %" PRId64 " new tokens, the context was created for %" PRId64,
                        total, c->options.max_rows);
    }
    return CPA_OK;
}

/* Copies the entries of a chunk's block table that this rank uses. */
static cpa_status copy_table(cpa_context *c, int64_t index, const int32_t *table, int64_t entries) {
    if (entries > 0 && !table) {
        return cpa_fail(&c->error, CPA_INVALID,
                        "plan: chunk %" PRId64 " has no block table; rank %d needs %" PRId64 " entries", index,
                        c->control.rank, entries);
    }
    int32_t *tables =
        cpa_context_grow(c, c->block_tables, &c->tables_capacity, c->n_table_entries + entries, sizeof *tables);
    if (!tables) return CPA_NO_MEMORY;
    c->block_tables = tables;
    for (int64_t i = 0; i < entries; i++) {
        if (table[i] < 0) {
            return cpa_fail(&c->error, CPA_INVALID,
                            "plan: entry %" PRId64 " of the block table of chunk %" PRId64 " is %d", i, index,
                            table[i]);
        }
        if (table[i] > c->max_block) c->max_block = table[i];
        tables[c->n_table_entries + i] = table[i];
    }
    c->n_table_entries += entries;
    return CPA_OK;
}

static cpa_status copy_chunks(cpa_context *c, const cpa_context_chunk *chunks, int64_t n) {
    cpa_planned_chunk *planned = cpa_context_grow(c, c->chunks, &c->chunks_capacity, n, sizeof *planned);
    if (!planned) return CPA_NO_MEMORY;
    c->chunks = planned;
    cpa_attend_item *items = cpa_context_grow(c, c->items, &c->items_capacity, n * c->map.cp_size, sizeof *items);
    if (!items) return CPA_NO_MEMORY;
    c->items = items;

    c->n_chunks = n;
    c->n_table_entries = 0;
    c->max_block = -1;
    c->rows = 0;
    c->shared = 0;
    for (int64_t i = 0; i < n; i++) {
        int on_rank = chunks[i].placement.kind == CPA_ON_RANK;
        c->shared |= c->map.cp_size > 1 && !on_rank;
        planned[i] = (cpa_planned_chunk){
            .start = chunks[i].start,
            .end = chunks[i].start + chunks[i].count,
            .placement = chunks[i].placement,
            .algorithm = on_rank ? CPA_AUTO : chunks[i].algorithm,
            .table = c->n_table_entries,
            .row = c->rows,
        };
        cpa_chunk_share own = cpa_context_share(c, &planned[i], c->control.rank);
        int64_t entries = (own.keys + c->options.block_size - 1) / c->options.block_size;
        CPA_TRY(copy_table(c, i, chunks[i].block_table, entries));
        c->rows += own.rows;
    }
    if (c->steady_rows) c->rows = c->steady_rows;
    return CPA_OK;
}

cpa_attend_item cpa_context_own_item(const cpa_context *c, const cpa_planned_chunk *chunk, int64_t first) {
    cpa_chunk_share own = cpa_context_share(c, chunk, c->control.rank);
    return (cpa_attend_item){
        .q_row = chunk->row + first - own.first,
        .q_count = own.keys - first,
        .q_first = first,
        .k_first = 0,
        .k_count = own.keys,
        .table = chunk->table,
        .q_set = own.tokens,
        .k_set = own.tokens,
    };
}

int64_t cpa_context_own_items(cpa_context *c, int64_t n, int64_t first_row) {
    for (int64_t i = 0; i < c->n_chunks; i++) {
        cpa_chunk_share own = cpa_context_share(c, &c->chunks[i], c->control.rank);
        if (own.rows == 0 || cpa_pass_kv_takes_own(c, &c->chunks[i])) continue;
        c->items[n] = cpa_context_own_item(c, &c->chunks[i], own.first);
        c->items[n++].q_row += first_row;
    }
    return n;
}

/* Own rows over the own shard, but those that pass-KV or pass-Q takes along. */
static cpa_status plan_own(cpa_context *c) {
    const int joined = c->q.joined;
    if (c->shared && !joined) CPA_TRY(cpa_context_ensure_state(c, &c->acc_memory, c->rows, &c->states[0]));
    if (joined) return cpa_context_set_plan(c, c->own, 0, NULL, 0, (cpa_attend_fusion){0});
    return cpa_context_set_plan(c, c->own, cpa_context_own_items(c, 0, 0), c->block_tables, c->n_table_entries,
                                (cpa_attend_fusion){.steady_items = c->steady_rows});
}

/* In decode: two attends of few rows take longer than one, by more than what the first hides of the exchange. */
static int joins_own_rows(const cpa_context *c) {
    if (!c->shared) return 0;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        if (c->chunks[i].end - c->chunks[i].start > 1 || c->chunks[i].algorithm == CPA_PASS_KV) return 0;
    }
    return 1;
}

static cpa_status plan_step(cpa_context *c, const cpa_context_chunk *chunks, int64_t n_chunks, int64_t steady_rows) {
    CPA_TRY(check_chunks(c, chunks, n_chunks));
    c->steady_rows = steady_rows;
    c->layers_attended = 0;
    c->planned = 0;
    CPA_TRY(copy_chunks(c, chunks, n_chunks));
    c->q.joined = joins_own_rows(c);
    CPA_TRY(plan_own(c));
    CPA_TRY(cpa_pass_kv_plan(c));
    CPA_TRY(cpa_pass_q_plan(c));
    c->planned = 1;
    return CPA_OK;
}

void cpa_context_begin(cpa_context *c) {
    cpa_context_stats stats;
    cpa_context_get_stats(c, &stats); /* counts the step before */
    const int idle = c->device->table->event_reached(c->steps, 0) && c->device->table->event_reached(c->steps, 1);
    if (idle) c->device->table->release(c->device);
    cpa_spans_forget(&c->spans);
    c->sampled_step = c->spans.muted = 0;
}

/* Waits for the step before the last one: the plans of this step go where what that one brings to the device lies. */
static void take_turn(cpa_context *c) {
    c->turn = c->turn != 1;
    while (!c->device->table->event_reached(c->steps, c->turn)) {
        c->transport->table->poll(c->transport);
        sched_yield();
    }
}

cpa_status cpa_context_plan(cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks) {
    cpa_context_begin(context);
    take_turn(context);
    return plan_step(context, chunks, n_chunks, 0);
}

cpa_status cpa_context_plan_ahead(cpa_context *c, const cpa_context_chunk *chunks, int64_t n_chunks,
                                  int64_t steady_rows) {
    for (int64_t i = 0; i < n_chunks && steady_rows > 0; i++) {
        int local = c->map.cp_size == 1 || chunks[i].placement.kind == CPA_ON_RANK;
        if (chunks[i].count == 1 && (local || chunks[i].algorithm == CPA_PASS_Q)) continue;
        return cpa_fail(&c->error, CPA_INTERNAL,
                        "plan: chunk %" PRId64 " of a steady step has %" PRId64
                        " tokens and goes by %s, expected one by pass-q",
                        i, chunks[i].count, cpa_algorithm_name(chunks[i].algorithm));
    }
    c->turn = -1;
    return plan_step(c, chunks, n_chunks, steady_rows);
}

cpa_status cpa_context_upload_plan(cpa_context *c, cpa_stream *stream) {
    CPA_TRY(cpa_context_check(c, c->device->operators->plan_upload(c->own, stream), stream));
    if (!c->q.active) return CPA_OK;
    CPA_TRY(cpa_context_check(c, c->device->operators->plan_upload(c->q.plan, stream), stream));
    return cpa_pass_q_upload(c, stream);
}

uint64_t cpa_context_shape(const cpa_context *c) {
    const cpa_pass_q *q = &c->q;
    uint64_t shape[] = {(uint64_t)c->rows, (uint64_t)c->shared, q->joined ? 0 : c->device->graphs->plan_shape(c->own)};
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
    if (!q->active) return hash;
    uint64_t exchanged[] = {(uintptr_t)q->maps_memory.memory, (uintptr_t)q->packed_memory.memory,
                            (uintptr_t)q->got_memory.memory,  (uintptr_t)q->away_memory.memory,
                            (uintptr_t)q->home_memory.memory, c->device->graphs->plan_shape(q->plan)};
    return cpa_hash_bytes(hash, exchanged, sizeof exchanged);
}
