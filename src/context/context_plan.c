/* A step of context attention: its chunks, the block tables, and the rows of this rank against its own shard. */
#include <inttypes.h>
#include <sched.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "base/struct_size.h"
#include "kernels/graph.h"
#include "src/context/context_internal.h"
#include "src/context/context_plan.h"
#include "src/context/index_choice_plan.h"
#include "src/context/pass_q_plan.h"
#include "src/ops/check_args.h"

int64_t cpa_context_rows(const cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks) {
    int64_t rows = 0;
    for (int64_t form = 0; context && form < context->ops.forms.count; form++)
        rows += cpa_context_rows_of(context, chunks, n_chunks, form);
    return rows;
}

int64_t cpa_context_rows_of(const cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks,
                            int64_t form) {
    int64_t rows = 0;
    for (int64_t i = 0; context && chunks && i < n_chunks; i++) {
        const cpa_context_chunk *chunk = &chunks[i];
        if (chunk->form != form || chunk->form < 0 || chunk->form >= context->ops.forms.count) continue;
        if (chunk->start < 0 || chunk->count < 1 || chunk->count > CPA_MOST_TOKENS ||
            chunk->start > CPA_MOST_TOKENS - chunk->count ||
            !cpa_placement_is_valid(context->ops.map, chunk->placement))
            continue;
        if (context->ops.options.rows == CPA_ROWS_REPLICATED) {
            rows += chunk->count;
            continue;
        }
        cpa_token_set own = cpa_tokens_on(context->ops.map, chunk->placement, context->control.rank);
        rows += cpa_tokens_before(context->ops.map, own, chunk->start + chunk->count) -
                cpa_tokens_before(context->ops.map, own, chunk->start);
    }
    return rows;
}

static cpa_status check_chunks(cpa_context *c, const cpa_context_chunk *chunks, int64_t n) {
    int64_t total = 0;
    if (n < 0 || (n > 0 && !chunks))
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "plan: %" PRId64 " chunks at %p, expected 0 or more, and none at NULL", n,
                        (const void *)chunks);
    for (int64_t i = 0; i < n; i++) {
        const cpa_context_chunk *chunk = &chunks[i];
        if (chunk->start < 0 || chunk->count < 1 || chunk->count > c->ops.options.max_rows ||
            chunk->start > CPA_MOST_TOKENS - chunk->count) {
            return cpa_fail(&c->ops.error, CPA_INVALID,
                            "plan: chunk %" PRId64 " has tokens [%" PRId64 ", +%" PRId64
                            "), expected a start >= 0 and 1..%" PRId64 " tokens",
                            i, chunk->start, chunk->count, c->ops.options.max_rows);
        }
        if (!CPA_RESERVED_IS_ZERO(*chunk)) {
            return cpa_fail(&c->ops.error, CPA_INVALID, "plan: the reserved bytes of chunk %" PRId64 " are not zero",
                            i);
        }
        if (!cpa_placement_is_valid(c->ops.map, chunk->placement)) {
            return cpa_fail(&c->ops.error, CPA_INVALID,
                            "plan: chunk %" PRId64
                            " has a placement of kind %d and rank %d, expected kind %d or %d and "
                            "rank 0..%d",
                            i, (int)chunk->placement.kind, chunk->placement.rank, CPA_SHARDED, CPA_ON_RANK,
                            c->ops.map.cp_size - 1);
        }
        if (chunk->algorithm != CPA_PASS_KV && chunk->algorithm != CPA_PASS_Q) {
            return cpa_fail(&c->ops.error, CPA_INVALID,
                            "plan: chunk %" PRId64 " has algorithm %d, expected pass-KV or pass-Q", i,
                            (int)chunk->algorithm);
        }
        if (chunk->form < 0 || chunk->form >= c->ops.forms.count)
            return cpa_fail(&c->ops.error, CPA_INVALID,
                            "plan: chunk %" PRId64 " has form %" PRId64 ", expected 0..%d, those of the context", i,
                            chunk->form, c->ops.forms.count - 1);
        total += chunk->count;
    }
    if (total > c->ops.options.max_rows) {
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "plan: %" PRId64 " new tokens, expected at most the %" PRId64 " of the context", total,
                        c->ops.options.max_rows);
    }
    return CPA_OK;
}

/* Where the block tables of a step are: rows that the caller keeps, or, where `tables` is NULL, those that the chunks
 * bring, which become rows of the context's own. */
typedef struct given_tables {
    cpa_block_tables *tables;
    const int64_t *rows; /* [chunks] */
} given_tables;

/* Takes the entries of a chunk's block table that this rank uses. */
static cpa_status take_table(cpa_context *c, int64_t index, const int32_t *table, int64_t entries) {
    if (entries > 0 && !table) {
        return cpa_fail(&c->ops.error, CPA_INVALID,
                        "plan: chunk %" PRId64 " has no block table, expected one of %" PRId64 " entries on rank %d",
                        index, entries, c->control.rank);
    }
    for (int64_t i = 0; i < entries; i++) {
        if (table[i] < 0) {
            return cpa_fail(&c->ops.error, CPA_INVALID,
                            "plan: entry %" PRId64 " of the block table of chunk %" PRId64 " is %d, expected 0 or more",
                            i, index, table[i]);
        }
    }
    return cpa_block_tables_give((cpa_table_set){c->tables, 0}, index, table, entries, &c->ops.error);
}

/* The rows of the chunks have their entries, of all sets. */
static cpa_status check_row(cpa_context *c, int64_t index, int64_t row, int64_t entries) {
    for (int32_t set = 0; set < cpa_block_tables_sets(c->step.tables); set++) {
        const int64_t count = cpa_block_tables_count((cpa_table_set){c->step.tables, set}, row);
        if (count < entries)
            return cpa_fail(&c->ops.error, CPA_INTERNAL,
                            "plan: the block table of chunk %" PRId64 " has %" PRId64
                            " entries in set %d, expected %" PRId64,
                            index, count, set, entries);
    }
    return CPA_OK;
}

/* Places the block tables of the chunks. */
static cpa_status place_tables(cpa_context *c, const cpa_context_chunk *chunks, int64_t n, given_tables given) {
    cpa_planned_step *step = &c->step;
    step->tables = given.tables ? given.tables : c->tables;
    for (int64_t i = 0; i < n; i++) {
        const int64_t keys = cpa_planned_share(step, &step->chunks[i], step->rank).keys;
        const int64_t entries = (keys + c->ops.options.block_size - 1) / c->ops.options.block_size;
        if (given.tables) {
            CPA_TRY(check_row(c, i, given.rows[i], entries));
        } else {
            CPA_TRY(take_table(c, i, chunks[i].block_table, entries));
        }
    }
    for (int32_t set = 0; set < cpa_block_tables_sets(step->tables); set++) {
        const cpa_table_set at = {step->tables, set};
        step->max_block[set] = -1;
        for (int64_t i = 0; i < n; i++) {
            const int32_t largest = cpa_block_tables_largest(at, given.tables ? given.rows[i] : i);
            if (largest > step->max_block[set]) step->max_block[set] = largest;
        }
    }
    for (int64_t i = 0; i < n; i++)
        step->chunks[i].table = cpa_block_tables_place(step->tables, given.tables ? given.rows[i] : i);
    return CPA_OK;
}

/* What kind of step these chunks make. */
static cpa_step_kind kind_of(const cpa_context *c, const cpa_context_chunk *chunks, int64_t n) {
    int exchanges = 0, decodes = 1;
    if (n == 0 || c->ops.map.cp_size == 1) return CPA_STEP_ALONE;
    if (c->rows == CPA_ROWS_REPLICATED) return CPA_STEP_REPLICATED;
    for (int64_t i = 0; i < n; i++) {
        const int is_sharded = chunks[i].placement.kind != CPA_ON_RANK;
        exchanges |= is_sharded;
        decodes &= chunks[i].count == 1 && chunks[i].form == chunks[0].form &&
                   !c->ops.forms.list[chunks[i].form].is_expanded &&
                   !(is_sharded && chunks[i].algorithm == CPA_PASS_KV);
    }
    return !exchanges ? CPA_STEP_ALONE : decodes ? CPA_STEP_DECODE : CPA_STEP_MIXED;
}

static cpa_status copy_chunks(cpa_context *c, const cpa_context_chunk *chunks, int64_t n, given_tables tables) {
    cpa_planned_step *step = &c->step;
    cpa_context_ops *ops = &c->ops;
    CPA_TRY(cpa_context_ensure_array(ops, &step->chunks, &step->chunks_capacity, n, sizeof *step->chunks));
    CPA_TRY(cpa_context_ensure_array(ops, &ops->items, &ops->items_capacity, n * ops->map.cp_size, sizeof *ops->items));
    step->n_chunks = n;
    memset(step->rows, 0, sizeof step->rows);
    step->kind = kind_of(c, chunks, n);
    for (int64_t i = 0; i < n; i++) {
        const int32_t form = (int32_t)chunks[i].form;
        int on_rank = chunks[i].placement.kind == CPA_ON_RANK;
        step->chunks[i] = (cpa_planned_chunk){
            .start = chunks[i].start,
            .end = chunks[i].start + chunks[i].count,
            .placement = chunks[i].placement,
            .algorithm = cpa_step_is_replicated(step) ? CPA_PASS_Q
                         : on_rank                    ? CPA_AUTO
                                                      : chunks[i].algorithm,
            .form = form,
            .row = step->rows[form],
        };
        cpa_chunk_share own = cpa_planned_share(step, &step->chunks[i], step->rank);
        step->rows[form] += cpa_step_is_replicated(step) ? chunks[i].count : own.rows;
    }
    if (step->padded_rows) step->rows[n > 0 ? chunks[0].form : 0] = step->padded_rows;
    return place_tables(c, chunks, n, tables);
}

/* Own rows of a form over the own shard, but those that pass-KV or pass-Q takes along. */
static cpa_status plan_own(cpa_context *c, cpa_form_lane *lane) {
    const cpa_planned_step *step = &c->step;
    const int64_t rows = step->rows[lane->form->index];
    if (cpa_step_joins_own(step)) return cpa_table_plans_clear(&lane->own, &c->ops, lane->form, step);
    if (cpa_step_exchanges(step) || cpa_form_lane_keeps_state(lane, &c->ops))
        CPA_TRY(cpa_form_lane_ensure(lane, &c->ops, rows));
    const int64_t n = cpa_planned_own_items(step, lane->form->index, c->ops.items, 0, 0);
    const cpa_attend_fusion fusion = {.padded_items = cpa_planned_padding(step, lane->form->index)};
    return cpa_table_plans_set(&lane->own, &c->ops, lane->form, step, n, fusion);
}

/* What is planned of the rows of a form. */
static cpa_status plan_lane(cpa_context *c, cpa_form_lane *lane) {
    lane->q.active = 0;
    if (cpa_step_is_replicated(&c->step)) return cpa_scatter_heads_plan(&lane->scatter);
    CPA_TRY(plan_own(c, lane));
    return cpa_pass_q_plan(&lane->q);
}

/* Where the first of the new tokens lies in its sequence. */
static int64_t first_new(const cpa_planned_step *step) {
    int64_t first = INT64_MAX;
    for (int64_t i = 0; i < step->n_chunks; i++) first = cpa_min64(first, step->chunks[i].start);
    return first;
}

static cpa_status plan_step(cpa_context *c, const cpa_context_chunk *chunks, int64_t n_chunks, given_tables tables,
                            int64_t padded_rows) {
    c->planned = 0;
    c->attended = &c->step;
    c->ops.table_set = 0;
    cpa_score_rows_forget(&c->score_rows);
    c->ops.keys_attended = c->ops.keys_read = 0;
    CPA_TRY(check_chunks(c, chunks, n_chunks));
    c->step.padded_rows = padded_rows;
    c->layers_attended = 0;
    CPA_TRY(copy_chunks(c, chunks, n_chunks, tables));
    c->ops.settled = first_new(&c->step);
    for (int32_t f = 0; f < c->ops.forms.count; f++) CPA_TRY(plan_lane(c, &c->lanes[f]));
    if (!cpa_step_is_replicated(&c->step)) CPA_TRY(cpa_pass_kv_plan(&c->kv));
    if (c->ops.masked) CPA_TRY(cpa_score_rows_plan(&c->score_rows, &c->ops, c->lanes));
    CPA_TRY(cpa_index_choice_plan(&c->choice));
    c->planned = 1;
    return CPA_OK;
}

void cpa_context_begin(cpa_context *c) {
    cpa_context_stats stats;
    cpa_context_get_stats(c, &stats, sizeof stats); /* counts the step before */
    const int idle =
        c->ops.device->table->event_reached(c->steps, 0) && c->ops.device->table->event_reached(c->steps, 1);
    if (idle) c->ops.device->table->release(c->ops.device);
    cpa_spans_forget(&c->ops.spans);
}

/* Waits for the step before the last one: the plans of this step go where what that one brings to the device lies. */
static void take_turn(cpa_context *c) {
    c->turn = !c->turn;
    cpa_comm_begin_wait(c->control.comm, c->exchanging);
    while (!c->ops.device->table->event_reached(c->steps, c->turn)) {
        c->ops.transport->table->poll(c->ops.transport);
        sched_yield();
    }
    cpa_comm_end_wait(c->control.comm);
}

cpa_status cpa_context_plan(cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks) {
    if (!context) return CPA_INVALID;
    cpa_context_begin(context);
    context->is_ahead = 0;
    take_turn(context);
    cpa_error *err = &context->ops.error, none;
    const cpa_status status = plan_step(context, chunks, n_chunks, (given_tables){NULL, NULL}, 0);
    cpa_status told = cpa_plan_agreement_tell(&context->agreement, chunks, n_chunks, context->layers_exchanged, status,
                                              err, status == CPA_OK ? err : &none);
    return status == CPA_OK ? told : status;
}

void cpa_context_use_tables(cpa_context *c, int32_t set) {
    c->ops.table_set = set;
}

cpa_status cpa_context_plan_ahead(cpa_context *c, const cpa_context_chunk *chunks, int64_t n_chunks,
                                  cpa_block_tables *tables, const int64_t *rows, int64_t padded_rows) {
    for (int64_t i = 0; i < n_chunks && padded_rows > 0; i++) {
        int any_algorithm =
            c->ops.map.cp_size == 1 || chunks[i].placement.kind == CPA_ON_RANK || c->rows == CPA_ROWS_REPLICATED;
        if (chunks[i].form != chunks[0].form)
            return cpa_fail(&c->ops.error, CPA_INTERNAL,
                            "plan: chunk %" PRId64 " of a padded step has form %" PRId64 ", expected %" PRId64
                            ", that of the first",
                            i, chunks[i].form, chunks[0].form);
        if (c->ops.forms.list[chunks[i].form].is_expanded)
            return cpa_fail(&c->ops.error, CPA_INTERNAL,
                            "plan: chunk %" PRId64 " of a padded step has form %" PRId64 ", whose keys are expanded", i,
                            chunks[i].form);
        if (any_algorithm || chunks[i].algorithm == CPA_PASS_Q) continue;
        return cpa_fail(&c->ops.error, CPA_INTERNAL,
                        "plan: chunk %" PRId64 " of a padded step goes by %s, expected pass-q", i,
                        cpa_algorithm_name(chunks[i].algorithm));
    }
    c->is_ahead = 1;
    return plan_step(c, chunks, n_chunks, (given_tables){tables, rows}, padded_rows);
}

cpa_status cpa_context_upload_tables(cpa_context *c, cpa_stream *stream) {
    if (cpa_context_is_reserved(c)) return CPA_OK;
    return cpa_context_check(&c->ops, cpa_block_tables_upload(c->step.tables, stream), stream);
}

cpa_status cpa_context_upload_plan(cpa_context *c, cpa_stream *stream) {
    CPA_TRY(cpa_context_upload_tables(c, stream));
    for (int32_t f = 0; f < c->ops.forms.count; f++) {
        cpa_form_lane *lane = &c->lanes[f];
        if (cpa_step_is_replicated(&c->step)) {
            CPA_TRY(cpa_scatter_heads_upload(&lane->scatter, stream));
            continue;
        }
        CPA_TRY(cpa_table_plans_upload(&lane->own, &c->ops, stream));
        CPA_TRY(cpa_pass_q_upload(&lane->q, stream));
    }
    CPA_TRY(cpa_index_choice_upload(&c->choice, stream));
    return cpa_score_rows_upload(&c->score_rows, &c->ops, stream);
}

static uint64_t lane_shape(const cpa_context *c, const cpa_form_lane *lane) {
    if (cpa_step_is_replicated(&c->step)) return cpa_scatter_heads_shape(&lane->scatter);
    const uint64_t own = cpa_step_joins_own(&c->step) ? 0 : cpa_table_plans_shape(&lane->own, &c->ops);
    const uint64_t states = cpa_form_lane_keeps_state(lane, &c->ops) ? (uintptr_t)lane->own_memory.memory : 0;
    const uint64_t shape[] = {own, cpa_pass_q_shape(&lane->q), states, (uintptr_t)lane->projected_memory.memory};
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}

uint64_t cpa_context_shape(const cpa_context *c) {
    const uint64_t slices = cpa_step_is_replicated(&c->step) ? (uintptr_t)c->slices_memory.memory : 0;
    const uint64_t shape[] = {(uint64_t)cpa_step_exchanges(&c->step), slices, cpa_score_rows_shape(&c->score_rows),
                              cpa_index_choice_shape(&c->choice)};
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
    for (int32_t f = 0; f < c->ops.forms.count; f++) {
        const uint64_t of_form[] = {(uint64_t)c->step.rows[f], lane_shape(c, &c->lanes[f])};
        hash = cpa_hash_bytes(hash, of_form, sizeof of_form);
    }
    return hash;
}
