/* The choice of an indexer in one layer: queries to all ranks, then piece by piece scores, the best of this rank, the
 * best of all ranks to all, and of these the best. */
#include "src/context/index_choice.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/hash.h"
#include "kernels/graph.h"

void cpa_index_choice_create(cpa_index_choice *choice, cpa_context_ops *ops, const cpa_planned_step *step) {
    choice->ops = ops;
    choice->step = step;
}

void cpa_index_choice_destroy(cpa_index_choice *choice) {
    cpa_context_ops *ops = choice->ops;
    if (!ops) return;
    cpa_choice_pieces *const all[] = {&choice->pieces[0], &choice->pieces[1], &choice->padded_pieces};
    for (size_t p = 0; p < sizeof all / sizeof *all; p++) {
        cpa_choice_pieces *pieces = all[p];
        for (int64_t i = 0; i < pieces->made; i++)
            for (int32_t set = 0; set < CPA_MOST_TABLE_SETS; set++) cpa_index_plan_destroy(pieces->list[i].plans[set]);
        free(pieces->list);
    }
    free(choice->groups);
    cpa_step_maps_free(&choice->maps, ops);
    cpa_context_buffer *const buffers[] = {&choice->queries, &choice->scores, &choice->candidates, &choice->lists,
                                           &choice->counts};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) cpa_context_free(ops, buffers[i]);
}

int64_t cpa_index_choice_given_rows(const cpa_index_choice *choice) {
    int64_t rows = 0;
    for (int32_t f = 0; f < choice->ops->forms.count; f++) rows += choice->step->rows[f];
    return rows;
}

int cpa_index_choice_exchanges(const cpa_index_choice *choice) {
    return choice->shared.rows > 0;
}

cpa_status cpa_index_choice_upload(cpa_index_choice *choice, cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    const cpa_choice_pieces *pieces = choice->of_step;
    if (ops->options.index.heads == 0 || choice->maps.uploaded == stream) return CPA_OK;
    for (int64_t i = 0; choice->step->padded_rows && i < pieces->count; i++)
        for (int32_t set = 0; set < cpa_block_tables_sets(choice->step->tables); set++)
            CPA_TRY(cpa_context_check(
                ops, ops->device->operators->index_plan_upload(pieces->list[i].plans[set], stream), stream));
    return cpa_step_maps_upload(&choice->maps, ops, stream);
}

uint64_t cpa_index_choice_shape(const cpa_index_choice *choice) {
    const cpa_context_ops *ops = choice->ops;
    const cpa_choice_part *shared = &choice->shared, *own = &choice->own;
    if (ops->options.index.heads == 0) return 0;
    const uint64_t shape[] = {
        (uint64_t)shared->rows,
        (uint64_t)shared->most_rows,
        (uint64_t)shared->columns,
        (uint64_t)own->rows,
        (uint64_t)own->most_rows,
        (uint64_t)own->columns,
        (uint64_t)choice->foreign_rows,
        (uintptr_t)choice->maps.device.memory,
        (uintptr_t)choice->queries.memory,
        (uintptr_t)choice->scores.memory,
        (uintptr_t)choice->candidates.memory,
        (uintptr_t)choice->lists.memory,
        (uintptr_t)choice->counts.memory,
    };
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
    for (int64_t i = 0; i < choice->of_step->count; i++) {
        for (int32_t set = 0; set < cpa_block_tables_sets(choice->step->tables); set++) {
            const uint64_t of_plan = ops->device->graphs->index_plan_shape(choice->of_step->list[i].plans[set]);
            hash = cpa_hash_bytes(hash, &of_plan, sizeof of_plan);
        }
    }
    return hash;
}

/* Counts what is sent. */
static cpa_status exchange(cpa_index_choice *choice, int32_t n_messages, cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    cpa_context_exchange exchange;
    for (int32_t i = 0; i < n_messages; i++) ops->stats.index_bytes_sent += ops->messages[i].send_bytes;
    CPA_TRY(cpa_context_start(ops, n_messages, CPA_SPAN_EXCHANGE_INDEX, 0, stream, &exchange));
    return cpa_context_finish(ops, stream, &exchange);
}

/* ---- queries ---- */

static char *queries_at(const cpa_index_choice *choice, int64_t row) {
    return (char *)choice->queries.memory + row * cpa_index_choice_row_bytes(&choice->ops->options.index);
}

/* Copies `rows` rows of so many bytes, that lie one behind the other, into rows of queries, `at` bytes from their
 * beginning. */
static cpa_status pack_rows(cpa_index_choice *choice, int64_t row, int64_t at, const void *from, int64_t bytes,
                            int64_t rows, cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    return cpa_context_check(
        ops,
        ops->device->table->copy_rows(queries_at(choice, row) + at, cpa_index_choice_row_bytes(&ops->options.index),
                                      from, bytes, bytes, rows, stream),
        stream);
}

/* Own queries from a row of the caller's on, and their weights, to rows from `row` on. */
static cpa_status pack_run(cpa_index_choice *choice, const cpa_context_select_args *args, int64_t row, int64_t given_at,
                           int64_t rows, cpa_stream *stream) {
    const cpa_index_form *form = &choice->ops->options.index;
    const int64_t q_bytes = (int64_t)form->heads * form->dim * cpa_dtype_bytes(form->dtype);
    const int64_t weight_bytes = form->heads * (int64_t)sizeof(float);
    CPA_TRY(pack_rows(choice, row, 0, (const char *)args->q + given_at * q_bytes, q_bytes, rows, stream));
    if (!form->has_weights) return CPA_OK;
    return pack_rows(choice, row, q_bytes, args->weights + given_at * form->heads, weight_bytes, rows, stream);
}

/* What lies side by side in both goes at once; of a padded step all rows, whatever they are. */
static cpa_status pack_queries(cpa_index_choice *choice, const cpa_context_select_args *args, cpa_stream *stream) {
    const int64_t padded_rows = choice->step->padded_rows;
    if (padded_rows > 0) {
        const int64_t own = choice->shared.rows > padded_rows ? choice->ops->rank * padded_rows : 0;
        return pack_run(choice, args, own, 0, padded_rows, stream);
    }
    for (int64_t i = 0; i < choice->n_groups;) {
        const cpa_choice_group *first = &choice->groups[i++];
        int64_t rows = first->rows;
        if (first->given_at < 0) continue;
        for (; i < choice->n_groups && choice->groups[i].given_at == first->given_at + rows &&
               choice->groups[i].row == first->row + rows;
             i++)
            rows += choice->groups[i].rows;
        CPA_TRY(pack_run(choice, args, first->row, first->given_at, rows, stream));
    }
    return CPA_OK;
}

/* The shared rows of a rank. */
static cpa_row_run rows_of_rank(const cpa_index_choice *choice, int32_t rank) {
    const int64_t padded_rows = choice->step->padded_rows;
    cpa_row_run run = {choice->shared.rows, 0};
    if (padded_rows > 0) return (cpa_row_run){rank * padded_rows, padded_rows};
    for (int64_t i = 0; i < choice->n_groups; i++) {
        const cpa_choice_group *group = &choice->groups[i];
        if (group->rank != rank || group->row >= choice->shared.rows) continue;
        if (run.rows == 0) run.row = group->row;
        run.rows += group->rows;
    }
    return run;
}

/* Each rank's shared rows to all others. */
static cpa_status share_queries(cpa_index_choice *choice, cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    const int64_t row_bytes = cpa_index_choice_row_bytes(&ops->options.index);
    const cpa_row_run own = rows_of_rank(choice, ops->rank);
    int32_t n = 0;
    if (choice->shared.rows == 0 || cpa_step_is_replicated(choice->step)) return CPA_OK;
    for (int32_t peer = 0; peer < ops->map.cp_size; peer++) {
        const cpa_row_run theirs = rows_of_rank(choice, peer);
        if (peer == ops->rank) continue;
        ops->messages[n++] = (cpa_message){peer, queries_at(choice, own.row), own.rows * row_bytes,
                                           queries_at(choice, theirs.row), theirs.rows * row_bytes};
    }
    return exchange(choice, n, stream);
}

/* ---- one piece ---- */

static cpa_status score_piece(cpa_index_choice *choice, const cpa_choice_piece *piece, const cpa_choice_part *part,
                              const cpa_index_cache *cache, cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    const cpa_index_form *form = &ops->options.index;
    const int64_t row_bytes = cpa_index_choice_row_bytes(form), element = cpa_dtype_bytes(form->dtype);
    const char *queries = queries_at(choice, piece->row);
    const cpa_index_logits_args args = {
        .size = sizeof args,
        .heads = form->heads,
        .q = queries,
        .q_row_stride = row_bytes / element,
        .weights =
            form->has_weights ? (const float *)(const void *)(queries + form->heads * form->dim * element) : NULL,
        .weight_row_stride = row_bytes / (int64_t)sizeof(float),
        .hadamard = cache->hadamard,
        .cache = *cache,
        .logits = choice->scores.memory,
        .width = part->columns,
        .row_stride = part->stride,
        .unit = form->unit,
    };
    return cpa_context_check(ops, cpa_index_logits(piece->plans[ops->table_set], &args, stream), stream);
}

/* What topk and topk_merge are told of rows from `row` on. */
static const int32_t *ends_at(const cpa_index_choice *choice, int64_t row) {
    return (const int32_t *)choice->maps.device.memory + row;
}
static const int32_t *shards_at(const cpa_index_choice *choice, int64_t row) {
    return ends_at(choice, row) + choice->rows;
}
static const int32_t *lengths_at(const cpa_index_choice *choice, int64_t row) {
    return ends_at(choice, row) + 2 * choice->rows;
}
static const int32_t *tails_at(const cpa_index_choice *choice, int64_t row) {
    return choice->ops->options.index.open_tail ? ends_at(choice, row) + 4 * choice->rows : NULL;
}
static const int32_t *out_rows_at(const cpa_index_choice *choice, int64_t row) {
    return ends_at(choice, row) + 3 * choice->rows;
}

/* The best of rows [row, row + rows) on this rank, as lists, or as candidates of that many rows. */
static cpa_status choose_own(cpa_index_choice *choice, int64_t row, int64_t rows, const cpa_choice_part *part,
                             float *candidates, cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    const cpa_index_form *form = &ops->options.index;
    const cpa_owner_map entries = {ops->map.cp_size, ops->map.interleave / (form->unit * form->tokens_per_key)};
    const int is_one = ops->map.cp_size == 1;
    cpa_topk_args args = {
        .size = sizeof args,
        .rows = rows,
        .width = part->columns,
        .logits = choice->scores.memory,
        .logits_stride = part->stride,
        .end = ends_at(choice, row),
        .k = form->k,
        .indices = choice->lists.memory,
        .counts = choice->counts.memory,
        .forced_first = form->forced_first,
        .forced_last = form->forced_last,
        .shards = is_one ? NULL : shards_at(choice, row),
        .lengths = is_one ? NULL : lengths_at(choice, row),
        .map = entries,
        .out_rows = out_rows_at(choice, row),
        .tails = tails_at(choice, row),
    };
    if (candidates) {
        args.scores = candidates;
        args.indices = (int32_t *)(void *)(candidates + form->k);
        args.scores_stride = args.indices_stride = 2 * form->k;
        args.counts = NULL;
        args.out_rows = NULL;
        args.tails = NULL;
    }
    return cpa_context_check(ops, cpa_topk(&args, stream), stream);
}

/* The candidates of all ranks to all, and the best of these. */
static cpa_status choose_shared(cpa_index_choice *choice, const cpa_choice_piece *piece, cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    const cpa_index_form *form = &ops->options.index;
    const int64_t floats = piece->rows * 2 * form->k, bytes = floats * (int64_t)sizeof(float);
    float *candidates = choice->candidates.memory, *own = candidates + ops->rank * floats;
    int32_t n = 0;
    CPA_TRY(choose_own(choice, piece->row, piece->rows, &choice->shared, own, stream));
    for (int32_t peer = 0; peer < ops->map.cp_size; peer++)
        if (peer != ops->rank) ops->messages[n++] = (cpa_message){peer, own, bytes, candidates + peer * floats, bytes};
    CPA_TRY(exchange(choice, n, stream));
    const cpa_topk_merge_args args = {
        .size = sizeof args,
        .rows = piece->rows,
        .n = ops->map.cp_size,
        .width = form->k,
        .scores = candidates,
        .indices = (const int32_t *)(const void *)(candidates + form->k),
        .list_stride = floats,
        .row_stride = 2 * form->k,
        .k = form->k,
        .out = choice->lists.memory,
        .counts = choice->counts.memory,
        .forced_first = form->forced_first,
        .forced_last = form->forced_last,
        .lengths = lengths_at(choice, piece->row),
        .out_rows = out_rows_at(choice, piece->row),
        .tails = tails_at(choice, piece->row),
    };
    return cpa_context_check(ops, cpa_topk_merge(&args, stream), stream);
}

/* ---- all of it ---- */

/* Rows that lie elsewhere get empty lists. */
static cpa_status clear_foreign(cpa_index_choice *choice, cpa_stream *stream) {
    const cpa_choice_part none = {.columns = 1, .stride = 1};
    if (choice->foreign_rows == 0) return CPA_OK;
    return choose_own(choice, choice->rows - choice->foreign_rows, choice->foreign_rows, &none, NULL, stream);
}

cpa_status cpa_index_choice_run(cpa_index_choice *choice, const cpa_context_select_args *args, cpa_key_indices *out,
                                cpa_stream *stream) {
    cpa_context_ops *ops = choice->ops;
    const cpa_index_form *form = &ops->options.index;
    const cpa_choice_pieces *pieces = choice->of_step;
    CPA_TRY(cpa_index_choice_upload(choice, stream));
    CPA_TRY(pack_queries(choice, args, stream));
    CPA_TRY(share_queries(choice, stream));
    for (int64_t i = 0; i < pieces->count; i++) {
        const cpa_choice_piece *piece = &pieces->list[i];
        const int is_shared = piece->row < choice->shared.rows;
        const cpa_choice_part *part = is_shared ? &choice->shared : &choice->own;
        CPA_TRY(score_piece(choice, piece, part, &args->cache, stream));
        CPA_TRY(is_shared ? choose_shared(choice, piece, stream)
                          : choose_own(choice, piece->row, piece->rows, part, NULL, stream));
    }
    CPA_TRY(clear_foreign(choice, stream));
    ops->chosen_lists = choice->lists.memory;
    *out = (cpa_key_indices){.indices = choice->lists.memory,
                             .counts = choice->counts.memory,
                             .row_stride = cpa_index_list_width(form),
                             .width = cpa_index_list_width(form),
                             .unit = form->unit * form->tokens_per_key};
    return CPA_OK;
}
