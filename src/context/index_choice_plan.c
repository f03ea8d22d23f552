/* Planning the choice of an indexer: which rows are scored together, and how many entries each of them sees. */
#include "src/context/index_choice_plan.h"

#include <inttypes.h>

#include "base/check.h"
#include "base/min_max.h"
#include "base/struct_size.h"
#include "kernels/indexer.h"
#include "src/ops/check_args.h"

static const int64_t DEFAULT_SCORES_BYTES = (int64_t)256 << 20;
enum {
    STRIDE_FLOATS = 64, /* rows of scores begin at multiples of 256 bytes */
    LEAST_PADDED_COLUMNS = 1024
};

cpa_status cpa_index_form_take(const cpa_context_options *options, int32_t ranks, cpa_index_form *form,
                               cpa_error *err) {
    const int32_t interleave = options->interleave;
    *form = options->index;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*form), "context: the reserved bytes of the indexer are not zero");
    if (form->heads == 0) return CPA_OK;
    if (form->unit == 0) form->unit = 1;
    if (form->tokens_per_key == 0) form->tokens_per_key = 1;
    if (form->scores_bytes == 0) form->scores_bytes = DEFAULT_SCORES_BYTES;
    REQUIRE(err, form->heads >= 1 && form->heads <= CPA_INDEX_MOST_HEADS,
            "context: the indexer has %d heads, expected 0 (none) to %d", form->heads, CPA_INDEX_MOST_HEADS);
    REQUIRE(err, form->dim >= 8 && form->dim <= CPA_INDEX_MOST_DIM && form->dim % 8 == 0,
            "context: the indexer has dim %d, expected a multiple of 8 up to %d", form->dim, CPA_INDEX_MOST_DIM);
    REQUIRE(err, form->dtype == CPA_FP8_E4M3 || form->dtype == CPA_BF16 || form->dtype == CPA_F32,
            "context: the indexer has dtype %d, expected fp8_e4m3, bf16 or fp32", (int)form->dtype);
    REQUIRE(err, form->has_weights == 1 || (form->has_weights == 0 && form->dtype != CPA_FP8_E4M3),
            "context: has_weights of the indexer is %d, expected 1, or 0 with bf16", form->has_weights);
    REQUIRE(err, form->k >= 1 && form->k <= CPA_MOST_TOPK, "context: k of the indexer is %d, expected 1..%d", form->k,
            CPA_MOST_TOPK);
    REQUIRE(
        err,
        form->forced_first >= 0 && form->forced_last >= 0 && form->forced_first <= form->k &&
            form->forced_last <= form->k - form->forced_first,
        "context: forced_first of the indexer is %d and forced_last %d, expected none negative and together at most "
        "k, %d",
        form->forced_first, form->forced_last, form->k);
    REQUIRE(err, form->unit >= 1 && form->unit <= CPA_INDEX_MOST_UNIT && (form->unit & (form->unit - 1)) == 0,
            "context: unit of the indexer is %d, expected a power of two up to %d", form->unit, CPA_INDEX_MOST_UNIT);
    REQUIRE(err, form->tokens_per_key >= 1 && form->tokens_per_key <= CPA_MOST_BLOCK_TOKENS,
            "context: tokens_per_key of the indexer is %d, expected 1..%d", form->tokens_per_key,
            CPA_MOST_BLOCK_TOKENS);
    REQUIRE(
        err, form->open_tail == 0 || (form->open_tail == 1 && form->unit == 1 && form->tokens_per_key > 1),
        "context: open_tail of the indexer is %d with unit %d and tokens_per_key %d, expected 0, or 1 with 1 and more "
        "than 1",
        form->open_tail, form->unit, form->tokens_per_key);
    REQUIRE(err, ranks == 1 || interleave % (form->unit * (int64_t)form->tokens_per_key) == 0,
            "context: an entry of the indexer is %d keys of %d tokens, and the interleave %d tokens; expected whole "
            "entries in each run",
            form->unit, form->tokens_per_key, interleave);
    REQUIRE(err, form->scores_bytes > 0, "context: scores_bytes of the indexer is %lld, expected 0 (default) or more",
            (long long)form->scores_bytes);
    return CPA_OK;
}

/* ---- rows ---- */

static int is_sharded(const cpa_planned_step *step, const cpa_planned_chunk *chunk) {
    return step->map.cp_size > 1 && chunk->placement.kind == CPA_SHARDED;
}

/* Whether ranks choose together for the rows of a chunk. */
static int is_shared(const cpa_planned_step *step, const cpa_planned_chunk *chunk) {
    return step->padded_rows > 0 ? cpa_step_exchanges(step) : is_sharded(step, chunk);
}

/* Adds the rows of a chunk that a rank has; returns how many. */
static int64_t add_group(cpa_index_choice *choice, int64_t index, int32_t rank, int64_t row, int64_t chunk_row) {
    const cpa_planned_step *step = choice->step;
    const cpa_planned_chunk *chunk = &step->chunks[index];
    cpa_choice_group group = {.chunk = index, .row = row, .rank = rank, .given_at = -1, .chunk_row = chunk_row};
    const cpa_chunk_share share = cpa_planned_share(step, chunk, rank);
    group.rows = share.rows, group.first = share.first, group.tokens = share.tokens;
    if (cpa_step_is_replicated(step)) {
        group.rows = chunk->end - chunk->start, group.first = chunk->start;
        group.tokens = (cpa_token_set){CPA_TOKENS_ALL, 0};
    }
    if (rank == step->rank) {
        group.given_at = chunk->row;
        for (int32_t f = 0; f < chunk->form; f++) group.given_at += step->rows[f];
    }
    if (group.rows > 0) choice->groups[choice->n_groups++] = group;
    return group.rows;
}

/* Adds the rows of the chunks that are shared, or not, of a rank; returns how many rows these take. */
static int64_t add_groups(cpa_index_choice *choice, int shared, int32_t rank, int64_t row) {
    const cpa_planned_step *step = choice->step;
    const int64_t begin = row;
    const int has_all = shared && cpa_step_is_replicated(step);
    int64_t chunk_row = 0;
    for (int64_t i = 0; i < step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &step->chunks[i];
        const int elsewhere = !has_all && chunk->placement.kind == CPA_ON_RANK && chunk->placement.rank != rank;
        if (is_shared(step, chunk) == shared && !elsewhere) row += add_group(choice, i, rank, row, chunk_row);
        chunk_row += chunk->end - chunk->start;
    }
    if (step->padded_rows > 0) return shared == cpa_step_exchanges(step) ? step->padded_rows : 0;
    return row - begin;
}

static cpa_status list_groups(cpa_index_choice *choice) {
    const cpa_planned_step *step = choice->step;
    const int32_t ranks = step->map.cp_size;
    CPA_TRY(cpa_context_ensure_array(choice->ops, &choice->groups, &choice->groups_capacity, step->n_chunks * ranks,
                                     sizeof *choice->groups));
    choice->n_groups = choice->rows = choice->foreign_rows = 0;
    for (int32_t rank = 0; rank < ranks; rank++)
        if (!cpa_step_is_replicated(step) || rank == step->rank)
            choice->rows += add_groups(choice, 1, rank, choice->rows);
    choice->shared = (cpa_choice_part){.rows = choice->rows};
    choice->own = (cpa_choice_part){.row = choice->rows, .rows = add_groups(choice, 0, step->rank, choice->rows)};
    choice->rows += choice->own.rows;
    for (int32_t rank = 0; rank < ranks; rank++) {
        const int64_t rows = rank == step->rank ? 0 : add_groups(choice, 0, rank, choice->rows);
        choice->foreign_rows += rows;
        choice->rows += rows;
    }
    return CPA_OK;
}

/* How many entries the first `tokens` tokens of a sequence make, of those that a set has. */
static int64_t entries_of(const cpa_index_choice *choice, cpa_token_set set, int64_t tokens) {
    const cpa_index_form *form = &choice->ops->options.index;
    const int32_t run = choice->step->map.interleave / form->tokens_per_key;
    const cpa_owner_map of_keys = {choice->step->map.cp_size, run > 0 ? run : 1};
    return (cpa_tokens_before(of_keys, set, tokens / form->tokens_per_key) + form->unit - 1) / form->unit;
}

/* The entry of tokens that are no whole key yet, of so many; -1: there are none. */
static int32_t open_entry(const cpa_index_form *form, int64_t tokens) {
    return form->open_tail && tokens % form->tokens_per_key > 0 ? (int32_t)(tokens / form->tokens_per_key) : -1;
}

static int is_foreign(const cpa_index_choice *choice, const cpa_choice_group *group) {
    return group->row >= choice->rows - choice->foreign_rows;
}

/* What the rows of a group see, and where their lists go. */
static void map_group(const cpa_index_choice *choice, const cpa_choice_group *group) {
    const cpa_planned_step *step = choice->step;
    const cpa_planned_chunk *chunk = &step->chunks[group->chunk];
    const cpa_token_set own = cpa_tokens_on(step->map, chunk->placement, step->rank), all = {CPA_TOKENS_ALL, 0};
    int32_t *ends = choice->maps.host + group->row, *shards = ends + choice->rows, *lengths = shards + choice->rows;
    int32_t *out_rows = lengths + choice->rows, *tails = out_rows + choice->rows;
    for (int64_t i = 0; i < group->rows; i++) {
        const int64_t position = cpa_token_position(step->map, group->tokens, group->first + i);
        ends[i] = (int32_t)entries_of(choice, own, position + 1);
        shards[i] = own.kind == CPA_TOKENS_SHARD ? own.shard : -1;
        lengths[i] = (int32_t)entries_of(choice, all, position + 1);
        out_rows[i] = (int32_t)(group->chunk_row + position - chunk->start);
        tails[i] = is_foreign(choice, group) ? -1 : open_entry(&choice->ops->options.index, position + 1);
    }
}

/* Rows that no group has see nothing, and their empty lists go behind those of the step. */
static void fill_up_maps(const cpa_index_choice *choice) {
    const int64_t rows = choice->rows;
    int32_t *ends = choice->maps.host, *shards = ends + rows, *lengths = shards + rows, *out_rows = lengths + rows;
    int32_t *tails = out_rows + rows;
    int64_t spare = 0;
    for (int64_t row = 0; row < rows; row++) {
        ends[row] = lengths[row] = 0;
        shards[row] = out_rows[row] = tails[row] = -1;
    }
    for (int64_t i = 0; i < choice->n_groups; i++) {
        const cpa_choice_group *group = &choice->groups[i];
        for (int64_t row = group->row; row < group->row + group->rows; row++) out_rows[row] = 0;
        spare += group->rows;
    }
    for (int64_t row = 0; row < rows; row++)
        if (out_rows[row] < 0) out_rows[row] = (int32_t)spare++;
}

static cpa_status map_rows(cpa_index_choice *choice) {
    CPA_TRY(cpa_step_maps_renew(&choice->maps, choice->ops, 5 * choice->rows));
    if (choice->step->padded_rows > 0) fill_up_maps(choice);
    for (int64_t i = 0; i < choice->n_groups; i++) map_group(choice, &choice->groups[i]);
    return CPA_OK;
}

/* ---- pieces ---- */

/* The most tokens of a sequence that a rank has, of those that are shared or not: of sharded ones the longest shard has
 * them. The same on all ranks. */
static int64_t most_tokens(const cpa_index_choice *choice, int shared) {
    const cpa_planned_step *step = choice->step;
    const int64_t run = step->map.interleave, round = run * step->map.cp_size;
    int64_t most = 0;
    for (int64_t i = 0; i < step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &step->chunks[i];
        if (is_shared(step, chunk) != shared) continue;
        most = cpa_max64(most, is_sharded(step, chunk) ? (chunk->end + round - 1) / round * run : chunk->end);
    }
    return most;
}

/* An eighth more at most, so that sequences that grow rarely change what is enqueued. */
static int64_t columns_of_padded(int64_t columns) {
    int64_t power = LEAST_PADDED_COLUMNS;
    while (2 * power <= columns) power *= 2;
    return (columns + power / 8 - 1) / (power / 8) * (power / 8);
}

/* How many columns the rows of a part have, and how many of them are scored at once where a row may have as many as the
 * longest, so that ranks cut shared rows alike. */
static void size_part(const cpa_index_choice *choice, cpa_choice_part *part, int shared) {
    const cpa_index_form *form = &choice->ops->options.index;
    const int64_t entry = (int64_t)form->unit * form->tokens_per_key;
    int64_t most = (most_tokens(choice, shared) + entry - 1) / entry;
    if (choice->step->padded_rows > 0) most = columns_of_padded(most);
    const int64_t row_bytes = (most + STRIDE_FLOATS) * (int64_t)sizeof(float) + choice->step->map.cp_size * 8 * form->k;
    part->columns = choice->step->padded_rows > 0 ? most : 1;
    for (int64_t i = part->row; i < part->row + part->rows; i++)
        part->columns = cpa_max64(part->columns, choice->maps.host[i]);
    part->stride = (part->columns + STRIDE_FLOATS - 1) / STRIDE_FLOATS * STRIDE_FLOATS;
    part->most_rows = cpa_max64(form->scores_bytes / row_bytes, 1);
}

/* Items of the rows of a piece, in ops->items; returns how many. */
static int64_t list_items(const cpa_index_choice *choice, const cpa_choice_piece *piece) {
    const cpa_planned_step *step = choice->step;
    const int32_t tokens_per_key = choice->ops->options.index.tokens_per_key;
    const cpa_owner_map of_keys = {step->map.cp_size, cpa_max64(step->map.interleave / tokens_per_key, 1)};
    int64_t n = 0;
    for (int64_t i = 0; i < choice->n_groups; i++) {
        const cpa_choice_group *group = &choice->groups[i];
        const cpa_planned_chunk *chunk = &step->chunks[group->chunk];
        const cpa_token_set own = cpa_tokens_on(step->map, chunk->placement, step->rank);
        const int64_t begin = cpa_max64(group->row, piece->row);
        const int64_t end = cpa_min64(group->row + group->rows, piece->row + piece->rows);
        const int64_t keys = cpa_tokens_before(of_keys, own, chunk->end / tokens_per_key);
        if (begin >= end || keys == 0) continue;
        choice->ops->items[n++] = (cpa_attend_item){.q_row = begin - piece->row,
                                                    .q_count = end - begin,
                                                    .q_first = group->first + begin - group->row,
                                                    .k_first = 0,
                                                    .k_count = keys,
                                                    .table = chunk->table,
                                                    .q_set = group->tokens,
                                                    .k_set = own};
    }
    return n;
}

static int64_t power_of_two_from(int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
}

/* What plans of a piece of a padded step are reserved for: what is the same on all ranks, and rarely changes. Several
 * rows of a sequence are an item for each rank that owns some of them. */
static cpa_index_limits limits_of(const cpa_index_choice *choice, const cpa_choice_piece *piece,
                                  const cpa_choice_part *part) {
    const cpa_planned_step *step = choice->step;
    int64_t most = 1;
    for (int64_t i = 0; i < step->n_chunks; i++) most = cpa_max64(most, step->chunks[i].end - step->chunks[i].start);
    const int64_t owners = cpa_min64((most - 2 + step->map.interleave) / step->map.interleave + 1, step->map.cp_size);
    const int64_t items = most > 1 ? power_of_two_from(step->n_chunks) * owners : piece->rows;
    return (cpa_index_limits){.size = sizeof(cpa_index_limits),
                              .items = cpa_min64(items, piece->rows),
                              .item_rows = cpa_min64(power_of_two_from(most), piece->rows),
                              .rows = piece->rows,
                              .keys = part->columns * choice->ops->options.index.unit};
}

/* Sets the plans of a piece, one for each set of block tables. */
static cpa_status set_plans(cpa_index_choice *choice, cpa_choice_piece *piece, const cpa_choice_part *part) {
    cpa_context_ops *ops = choice->ops;
    const cpa_index_limits limits = limits_of(choice, piece, part);
    const cpa_planned_step *step = choice->step;
    const int64_t n_items = list_items(choice, piece);
    for (int32_t set = 0; set < cpa_block_tables_sets(step->tables); set++) {
        const cpa_attend_batch batch = {
            .size = sizeof batch,
            .map = ops->map,
            .shape = ops->options.shape,
            .block_size = ops->options.block_size,
            .items = ops->items,
            .n_items = n_items,
            .block_tables = cpa_block_tables_device((cpa_table_set){step->tables, set}),
            .n_table_entries = cpa_block_tables_capacity(step->tables),
            .block_tables_on_device = 1,
        };
        if (!piece->plans[set]) CPA_TRY(cpa_index_plan_create(ops->device, &piece->plans[set], &ops->error));
        if (step->padded_rows > 0)
            CPA_TRY(ops->device->operators->index_plan_reserve(piece->plans[set], &limits, &ops->error));
        CPA_TRY(ops->device->operators->index_plan_set(piece->plans[set], &batch, ops->options.index.tokens_per_key,
                                                       &ops->error));
        piece->plans[set]->max_block = step->max_block[set];
        piece->plans[set]->is_set = 1;
    }
    return CPA_OK;
}

static cpa_status add_pieces(cpa_index_choice *choice, const cpa_choice_part *part) {
    cpa_choice_pieces *pieces = choice->of_step;
    const int64_t end = part->row + part->rows,
                  count = pieces->count + (part->rows + part->most_rows - 1) / part->most_rows;
    CPA_TRY(cpa_context_ensure_array(choice->ops, &pieces->list, &pieces->capacity, count, sizeof *pieces->list));
    for (; pieces->made < count; pieces->made++) pieces->list[pieces->made] = (cpa_choice_piece){.rows = 0};
    for (int64_t row = part->row; row < end; row += part->most_rows) {
        cpa_choice_piece *piece = &pieces->list[pieces->count++];
        piece->row = row;
        piece->rows = cpa_min64(part->most_rows, end - row);
        CPA_TRY(set_plans(choice, piece, part));
    }
    return CPA_OK;
}

/* Floats of the scores of a part. */
static int64_t scores_of(const cpa_choice_part *part) {
    return cpa_min64(part->most_rows, part->rows) * part->stride;
}

static cpa_status reserve_buffers(cpa_index_choice *choice) {
    cpa_context_ops *ops = choice->ops;
    const cpa_choice_part *shared = &choice->shared, *own = &choice->own;
    const int64_t k_bytes = (int64_t)ops->options.index.k * (int64_t)sizeof(int32_t);
    const int64_t list_bytes = cpa_index_list_width(&ops->options.index) * (int64_t)sizeof(int32_t);
    const int64_t scores = cpa_max64(cpa_max64(scores_of(shared), scores_of(own)), 1);
    const int64_t candidates = cpa_min64(shared->most_rows, shared->rows) * ops->map.cp_size;
    CPA_TRY(cpa_context_ensure(ops, &choice->queries,
                               (shared->rows + own->rows) * cpa_index_choice_row_bytes(&ops->options.index)));
    CPA_TRY(cpa_context_ensure(ops, &choice->scores, scores * (int64_t)sizeof(float)));
    CPA_TRY(cpa_context_ensure(ops, &choice->candidates, candidates * 2 * k_bytes));
    CPA_TRY(cpa_context_ensure(ops, &choice->lists, choice->rows * list_bytes));
    return cpa_context_ensure(ops, &choice->counts, choice->rows * (int64_t)sizeof(int32_t));
}

cpa_status cpa_index_choice_plan(cpa_index_choice *choice) {
    cpa_context_ops *ops = choice->ops;
    if (ops->options.index.heads == 0) return CPA_OK;
    if (cpa_planned_end(choice->step) > CPA_TOPK_MOST_COLUMNS)
        return cpa_fail(&ops->error, CPA_UNSUPPORTED,
                        "plan: a sequence has %" PRId64 " tokens, expected at most 2^30 for an indexer",
                        cpa_planned_end(choice->step));
    choice->turn = !choice->turn;
    choice->of_step = choice->step->padded_rows > 0 ? &choice->padded_pieces : &choice->pieces[choice->turn];
    choice->of_step->count = 0;
    CPA_TRY(list_groups(choice));
    CPA_TRY(map_rows(choice));
    size_part(choice, &choice->shared, 1);
    size_part(choice, &choice->own, 0);
    CPA_TRY(add_pieces(choice, &choice->shared));
    CPA_TRY(add_pieces(choice, &choice->own));
    return reserve_buffers(choice);
}
