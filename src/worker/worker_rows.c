#include "src/worker/worker_rows.h"

#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "kernels/device.h"
#include "kernels/graph.h"
#include "src/worker/worker_biases.h"
#include "src/worker/worker_forms.h"
#include "src/worker/worker_selection.h"
#include "src/worker/worker_trees.h"

/* ---- how many there are of each ---- */

int cpa_worker_replicates(const cpa_worker *worker, const cpa_step_plan *plan) {
    if (worker->network->slices == CPA_SLICES_NONE || worker->options.map.cp_size == 1) return 0;
    if (worker->network->slices == CPA_SLICES_ALL) return 1;
    for (int64_t i = 0; i < plan->n_chunks; i++)
        if (plan->chunks[i].count != 1 && !(plan->chunks[i].flags & CPA_CHUNK_DECODE)) return 0;
    return 1;
}

/* Whether attention of a chunk can be captured: a token of a sequence, or a few that are decoded together. */
static int may_pad(const cpa_worker *worker, const cpa_plan_chunk *chunk) {
    const cpa_form *form = &worker->forms.list[cpa_worker_form_of(worker, chunk)];
    const cpa_attention_shape *shape = &form->shape;
    const int64_t packed = chunk->count * (shape->q_heads / shape->kv_heads);
    if (form->is_expanded) return 0;
    if (chunk->count == 1) return 1;
    return chunk->flags & CPA_CHUNK_DECODE &&
           packed <= worker->device->graphs->padded_rows(shape, worker->options.block_size);
}

int64_t cpa_worker_padded_rows(const cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_owner_map map = worker->options.map;
    const int replicated = cpa_worker_replicates(worker, plan);
    int64_t counts[CPA_MERGE_MAX_STATES] = {0}, most = 0;
    if (!worker->graphs) return 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        int any_algorithm = map.cp_size == 1 || chunk->placement.kind == CPA_ON_RANK || replicated;
        if (cpa_worker_form_of(worker, chunk) != cpa_worker_form_of(worker, &plan->chunks[0])) return 0;
        if (!may_pad(worker, chunk) || (!any_algorithm && chunk->algorithm != CPA_PASS_Q)) return 0;
        const cpa_plan_sampling *sampling = &worker->seqs[chunk->seq].sampling;
        /* A history of any length comes with it. */
        if (chunk->flags & CPA_CHUNK_FIRST && cpa_plan_has_penalties(sampling)) return 0;
        /* Masks come after the graph, and layers that draft after these. */
        if (sampling->constrained && worker->options.model.draft_layers > 0) return 0;
        if (cpa_plan_scored_rows(chunk, sampling) > 0) return 0;
        for (int64_t position = chunk->start; position < chunk->start + chunk->count; position++) {
            const int64_t rows = ++counts[replicated ? 0 : cpa_owner_rank(map, chunk->placement, position)];
            most = cpa_max64(most, rows);
        }
    }
    int64_t rows = cpa_graphs_rows(most);
    return rows <= worker->options.max_tokens ? rows : 0;
}

static uint32_t wants_of(const cpa_plan_sampling *sampling, int64_t given) {
    uint32_t wants = 0;
    if (sampling->logprobs) wants |= CPA_WANTS_LOGITS | CPA_WANTS_LOGPROBS;
    if (sampling->top_logprobs > 0) wants |= CPA_WANTS_RANKS;
    if (given >= 0) return wants;
    wants |= CPA_WANTS_LOGITS;
    if (sampling->constrained) wants |= CPA_WANTS_MASKS;
    if (cpa_plan_has_penalties(sampling)) wants |= CPA_WANTS_PENALTIES;
    if (!(sampling->temperature > 0)) return wants;
    wants |= CPA_WANTS_TEMPERATURE;
    if (sampling->top_k > 0 || sampling->top_p < 1 || sampling->min_p > 0) wants |= CPA_WANTS_FILTERS;
    return wants;
}

cpa_token_set cpa_worker_listed(const cpa_worker *worker, int replicated, cpa_placement placement, int32_t rank) {
    const cpa_token_set all = {CPA_TOKENS_ALL, 0};
    return replicated ? all : cpa_tokens_on(worker->options.map, placement, rank);
}

/* Lists what a chunk yields; `yields` counts that by ranks. */
static void list_emissions(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk,
                           int64_t yields[CPA_MERGE_MAX_STATES]) {
    cpa_worker_rows *rows = worker->rows;
    const cpa_worker_seq *seq = &worker->seqs[chunk->seq];
    const uint32_t *more_given = plan->token_ids + chunk->tokens + cpa_plan_chunk_tokens(chunk);
    const int64_t n = cpa_plan_chunk_emissions(chunk), end = chunk->start + chunk->count;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = end - n + i;
        const int32_t rank = rows->replicated ? 0 : cpa_owner_rank(worker->options.map, seq->placement, at);
        rows->emissions[rows->n_emissions++] = (cpa_worker_emission){
            .request = seq->request,
            .seq = chunk->seq,
            .began = seq->began,
            .rank = rank,
            .index = yields[rank]++,
            .cached_at = at,
            .position = cpa_plan_position(plan, chunk, at) + 1,
            .given = i == 0 || chunk->given < 0 ? chunk->given : more_given[i - 1],
            .is_constrained = seq->sampling.constrained && chunk->given<0, .is_judged = chunk->drafts> 0,
        };
        rows->sizes.yields = cpa_max64(rows->sizes.yields, yields[rank]);
    }
    if (n > 0) rows->wants |= wants_of(&seq->sampling, chunk->given);
    rows->drafts += chunk->drafts;
}

/* Lists the rows of prompts whose next tokens are scored, behind what the step yields. */
static void list_scored(cpa_worker *worker, const cpa_step_plan *plan) {
    cpa_worker_rows *rows = worker->rows;
    int64_t counts[CPA_MERGE_MAX_STATES] = {0}, most = 0;
    rows->n_scored = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const cpa_worker_seq *seq = &worker->seqs[chunk->seq];
        const int64_t end = chunk->start + chunk->count, n = cpa_plan_scored_rows(chunk, &seq->sampling);
        for (int64_t at = chunk->start; at < chunk->start + n; at++) {
            const int32_t rank = rows->replicated ? 0 : cpa_owner_rank(worker->options.map, seq->placement, at);
            rows->emissions[rows->n_emissions + rows->n_scored++] = (cpa_worker_emission){
                .request = seq->request,
                .seq = chunk->seq,
                .began = seq->began,
                .rank = rank,
                .index = rows->sizes.yields + counts[rank]++,
                .cached_at = at,
                .position = at + 1,
                .given = at + 1 < end ? seq->tokens[at + 1] : chunk->given,
            };
            most = cpa_max64(most, counts[rank]);
        }
        if (n > 0) rows->wants |= CPA_WANTS_LOGITS | CPA_WANTS_RANKS;
    }
    rows->sizes.emissions = rows->sizes.yields + most;
}

/* The rows of a chunk on a rank. */
static int64_t rows_on(const cpa_worker *worker, const cpa_plan_chunk *chunk, int32_t rank) {
    const cpa_owner_map map = worker->options.map;
    const cpa_token_set listed = cpa_worker_listed(worker, worker->rows->replicated, chunk->placement, rank);
    return cpa_tokens_before(map, listed, chunk->start + chunk->count) - cpa_tokens_before(map, listed, chunk->start);
}

/* Lists what the step yields on all ranks, and counts rows and entries; a rank has as many emissions as the one with
 * the most, so that parts of one size are exchanged. */
static void count_entries(cpa_worker *worker, const cpa_step_plan *plan, int64_t padded_rows) {
    const cpa_owner_map map = worker->options.map;
    cpa_worker_rows *rows = worker->rows;
    int64_t yields[CPA_MERGE_MAX_STATES] = {0};
    rows->replicated = cpa_worker_replicates(worker, plan);
    rows->sizes = (cpa_step_sizes){.groups = worker->options.groups.count, .forms = cpa_worker_listed_forms(worker)};
    memset(rows->forms, 0, sizeof rows->forms);
    memset(rows->rank_rows, 0, sizeof rows->rank_rows);
    rows->n_emissions = rows->drafts = 0;
    rows->wants = 0;
    rows->takes = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const cpa_worker_seq *seq = &worker->seqs[chunk->seq];
        for (int32_t r = 0; padded_rows == 0 && r < map.cp_size; r++) rows->rank_rows[r] += rows_on(worker, chunk, r);
        rows->forms[cpa_worker_form_of(worker, chunk)].rows += rows_on(worker, chunk, worker->rank);
        rows->takes |= (chunk->flags & CPA_CHUNK_DRAWN) != 0;
        if (cpa_plan_has_penalties(&seq->sampling)) {
            rows->sizes.history += chunk->start + chunk->count - seq->in_history;
            rows->sizes.restarts += (chunk->flags & CPA_CHUNK_FIRST) != 0;
        }
        list_emissions(worker, plan, chunk, yields);
    }
    rows->sizes.rows = rows->rank_rows[worker->rank];
    list_scored(worker, plan);
    rows->draws = worker->network->end_step && rows->wants & CPA_WANTS_LOGITS;
    cpa_worker_count_masks(worker, plan);
    cpa_worker_count_selected(worker, plan);
    cpa_worker_count_biases(worker, plan);
    if (padded_rows == 0) return;
    const int64_t all_rows = (rows->replicated ? 1 : map.cp_size) * padded_rows;
    rows->sizes.rows = rows->sizes.yields = rows->sizes.emissions = padded_rows;
    for (int32_t r = 0; r < map.cp_size; r++) rows->rank_rows[r] = padded_rows;
    rows->forms[cpa_worker_form_of(worker, &plan->chunks[0])].rows = padded_rows;
    if (rows->sizes.masked_rows > 0) cpa_worker_pad_masks(worker, all_rows, &rows->sizes);
    if (rows->sizes.selected_rows > 0) rows->sizes.selected_rows = all_rows;
    rows->sizes.biases = cpa_worker_pad_biases(rows->sizes.biases);
    if (rows->sizes.history > 0) /* drafts of the step before come too */
        rows->sizes.history = cpa_max64(all_rows, cpa_graphs_rows(rows->sizes.history));
}

/* ---- entries ---- */

/* The slots of a token, that of each group for a row; -1: another rank has it, or nobody. */
static void set_slots(const cpa_worker *worker, const cpa_worker_seq *seq, int64_t position, int64_t row) {
    const cpa_owner_map map = worker->options.map;
    const int32_t block_size = worker->options.block_size;
    const cpa_step_sizes *sizes = &worker->rows->sizes;
    const int32_t number = (int32_t)(seq - worker->seqs);
    const int is_own = cpa_owner_rank(map, seq->placement, position) == worker->rank;
    const int64_t i = cpa_tokens_before(map, cpa_tokens_on(map, seq->placement, worker->rank), position);
    for (int64_t g = 0; g < sizes->groups; g++)
        worker->rows->host.slots[g * sizes->rows + row] =
            is_own && cpa_layer_group_keeps(&worker->options.groups.list[g], position)
                ? cpa_worker_blocks(worker, (int32_t)g, number)[i / block_size] * (int64_t)block_size + i % block_size
                : -1;
}

/* The token behind one of a chunk, as far as it is known; what the step draws takes its place later. */
static void set_next_token(const cpa_worker_seq *seq, const cpa_plan_chunk *chunk, int64_t at, uint32_t *out) {
    const int is_last = at + 1 == chunk->start + chunk->count;
    *out = !is_last ? seq->tokens[at + 1] : chunk->given >= 0 ? (uint32_t)chunk->given : 0;
}

/* Adds the rows of a chunk that this rank has. */
static void add_rows(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t source,
                     int64_t *row) {
    const cpa_owner_map map = worker->options.map;
    const cpa_worker_seq *seq = &worker->seqs[chunk->seq];
    const cpa_step_arrays *to = &worker->rows->host;
    const cpa_token_set listed = cpa_worker_listed(worker, worker->rows->replicated, seq->placement, worker->rank);
    int64_t end = cpa_tokens_before(map, listed, chunk->start + chunk->count);
    for (int64_t i = cpa_tokens_before(map, listed, chunk->start); i < end; i++, ++*row) {
        const int64_t at = cpa_token_position(map, listed, i);
        worker->rows->requests[*row] = seq->request;
        to->tokens[*row] = source < 0 ? seq->tokens[at] : 0;
        to->sources[*row] = (int32_t)source;
        to->positions[*row] = cpa_plan_position(plan, chunk, at);
        set_slots(worker, seq, at, *row);
        if (worker->rows->sizes.next_tokens > 0) set_next_token(seq, chunk, at, &to->next_tokens[*row]);
    }
}

/* The row that yields a token of this rank. */
static void add_emission(const cpa_worker *worker, const cpa_worker_emission *emission, int64_t row) {
    const cpa_step_arrays *to = &worker->rows->host;
    const cpa_plan_sampling *sampling = &worker->seqs[emission->seq].sampling;
    const int64_t at = emission->index;
    to->salts[at] = emission->request * CPA_GOLDEN + (uint64_t)(emission->position - 1);
    to->rows[at] = (int32_t)row;
    if (worker->rows->sizes.next_tokens > 0) to->next_sources[row] = (int32_t)at;
    to->seqs[at] = emission->seq;
    to->given[at] = emission->given;
    to->drawn_at[at] = emission->position;
    to->seeds[at] = sampling->seed;
    to->top_logprobs[at] = sampling->top_logprobs;
#define DRAWING(type, field, least, most, none) to->field[at] = sampling->field;
    CPA_DRAWING_FIELDS(DRAWING)
#undef DRAWING
}

/* The tokens that a sequence with penalties goes on with, on whatever rank, and behind them its drafts, which are no
 * tokens of it yet. */
static void add_history(const cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk,
                        int64_t source, int64_t *entry, int64_t *restart) {
    const cpa_worker_rows *rows = worker->rows;
    cpa_worker_seq *seq = &worker->seqs[chunk->seq];
    if (!cpa_plan_has_penalties(&seq->sampling)) return;
    if (chunk->flags & CPA_CHUNK_FIRST) rows->host.restarts[(*restart)++] = chunk->seq;
    const int64_t end = chunk->start + chunk->count, drafts = cpa_plan_first_draft(chunk);
    const int64_t first_draft = *entry + drafts - seq->in_history;
    for (int64_t position = seq->in_history; position < end; position++, ++*entry) {
        const int64_t token = rows->sizes.rows + *entry;
        rows->host.tokens[token] = source < 0 ? seq->tokens[position] : 0;
        rows->host.sources[token] = (int32_t)source;
        rows->host.history_seqs[*entry] = position < drafts ? chunk->seq : -1;
        rows->host.history_outputs[*entry] = position >= seq->sampling.prompt_tokens;
        const int64_t parent = position < drafts ? -1 : cpa_plan_parent(plan, chunk, position - drafts);
        rows->host.history_parents[*entry] = parent < 0 ? -1 : (int32_t)(first_draft + parent);
    }
    seq->in_history = drafts;
}

/* Entries that go nowhere, from those on that the step has. */
static void fill_up(cpa_worker_rows *rows, int64_t row, int64_t entry) {
    const cpa_step_arrays *to = &rows->host;
    for (; row < rows->sizes.rows; row++) {
        rows->requests[row] = 0;
        to->tokens[row] = 0;
        to->sources[row] = -1;
        to->positions[row] = 0;
        for (int64_t g = 0; g < rows->sizes.groups; g++) to->slots[g * rows->sizes.rows + row] = -1;
        if (rows->sizes.next_tokens > 0) to->next_tokens[row] = 0;
    }
    for (; entry < rows->sizes.history; entry++) {
        to->tokens[rows->sizes.rows + entry] = 0;
        to->sources[rows->sizes.rows + entry] = -1;
        to->history_seqs[entry] = to->history_parents[entry] = -1;
        to->history_outputs[entry] = 0;
    }
}

/* Emissions that yield nothing: all, before those that yield something are put in their places. */
static void clear_emissions(const cpa_worker_rows *rows) {
    const cpa_step_arrays *to = &rows->host;
    for (int64_t at = 0; at < rows->sizes.emissions; at++) {
        to->salts[at] = to->sums[at] = to->seeds[at] = 0;
        to->given[at] = to->drawn_at[at] = 0;
        to->rows[at] = to->path_ends[at] = -1;
        to->seqs[at] = to->top_logprobs[at] = to->bias_first[at] = to->bias_count[at] = 0;
#define DRAWING(type, field, least, most, none) to->field[at] = none;
        CPA_DRAWING_FIELDS(DRAWING)
#undef DRAWING
    }
}

/* The place, among those that the step before has drawn, of the token that a chunk goes on with; -1: it is known. */
static cpa_status source_of(const cpa_worker *worker, const cpa_plan_chunk *chunk, int64_t *out, cpa_error *err) {
    const cpa_worker_seq *seq = &worker->seqs[chunk->seq];
    *out = -1;
    if (!(chunk->flags & CPA_CHUNK_DRAWN)) return CPA_OK;
    if (seq->emitted == 0 || seq->emitted + 1 != worker->plans)
        return cpa_fail(err, CPA_INTERNAL,
                        "request %llu goes on with a token that the step before does not draw, at %lld",
                        (unsigned long long)chunk->request, (long long)chunk->start);
    *out = seq->drawn;
    return CPA_OK;
}

/* What a chunk yields on this rank, whose rows of it begin at first_row, and whose drafts the history has from entry
 * first_draft on; *emission is the next in the list of all. */
static void add_emissions(cpa_worker *worker, const cpa_plan_chunk *chunk, int64_t first_row, int64_t first_draft,
                          int64_t *emission) {
    const cpa_worker_rows *rows = worker->rows;
    const cpa_owner_map map = worker->options.map;
    const cpa_token_set listed = cpa_worker_listed(worker, rows->replicated, chunk->placement, worker->rank);
    const int64_t before = cpa_tokens_before(map, listed, chunk->start);
    const int penalties = cpa_plan_has_penalties(&worker->seqs[chunk->seq].sampling);
    for (int64_t i = 0; i < cpa_plan_chunk_emissions(chunk); i++) {
        const cpa_worker_emission *e = &rows->emissions[(*emission)++];
        if (e->rank == worker->rank || rows->replicated) {
            add_emission(worker, e, first_row + cpa_tokens_before(map, listed, e->cached_at) - before);
            if (penalties && i > 0) rows->host.path_ends[e->index] = (int32_t)(first_draft + i - 1);
        }
        worker->seqs[e->seq].emitted = worker->plans;
        worker->seqs[e->seq].drawn = e->rank * rows->sizes.emissions + e->index;
    }
}

/* The rows of a chunk on this rank whose next tokens are scored; *scored is the next in the list of all. */
static void add_scored(const cpa_worker *worker, const cpa_plan_chunk *chunk, int64_t first_row, int64_t *scored) {
    const cpa_worker_rows *rows = worker->rows;
    const cpa_owner_map map = worker->options.map;
    const cpa_plan_sampling *sampling = &worker->seqs[chunk->seq].sampling;
    const cpa_token_set listed = cpa_worker_listed(worker, rows->replicated, chunk->placement, worker->rank);
    const int64_t before = cpa_tokens_before(map, listed, chunk->start);
    for (int64_t i = cpa_plan_scored_rows(chunk, sampling); i > 0; i--) {
        const cpa_worker_emission *e = &rows->emissions[(*scored)++];
        if (e->rank != worker->rank && !rows->replicated) continue;
        rows->host.rows[e->index] = (int32_t)(first_row + cpa_tokens_before(map, listed, e->cached_at) - before);
        rows->host.given[e->index] = e->given;
        rows->host.drawn_at[e->index] = e->position;
        rows->host.top_logprobs[e->index] = sampling->top_prompt_logprobs;
    }
}

/* ---- memory ---- */

/* Room for the step in page-locked memory. It grows for histories alone. */
static cpa_status reserve(cpa_worker *worker, cpa_error *err) {
    const cpa_device_table *table = worker->device->table;
    cpa_worker_rows *rows = worker->rows;
    const int64_t bytes = cpa_step_arrays_lay_out(&rows->sizes, NULL, &rows->host);
    if (bytes > rows->block_bytes) {
        void *grown;
        CPA_TRY(table->alloc_host(worker->device, 2 * bytes, &grown, err));
        table->free_host(worker->device, rows->block);
        rows->block = grown;
        rows->block_bytes = 2 * bytes;
    }
    cpa_step_arrays_lay_out(&rows->sizes, rows->block, &rows->host);
    return CPA_OK;
}

/* The same on the device, where graphs know the addresses of the block that does not grow. */
static cpa_status device_block(cpa_worker *worker, int64_t bytes, void **out, cpa_error *err) {
    const cpa_device_table *table = worker->device->table;
    *out = worker->block;
    if (bytes <= worker->block_bytes) return CPA_OK;
    if (bytes > worker->wide_bytes) {
        void *grown;
        CPA_TRY(table->alloc(worker->device, 2 * bytes, &grown, err));
        table->retire(worker->device, worker->wide_block);
        worker->wide_block = grown;
        worker->wide_bytes = 2 * bytes;
    }
    *out = worker->wide_block;
    return CPA_OK;
}

cpa_status cpa_worker_list_rows(cpa_worker *worker, const cpa_step_plan *plan, int64_t padded_rows, cpa_error *err) {
    cpa_worker_rows *rows = worker->rows;
    int64_t next[CPA_MOST_ROW_FORMS], listed = 0, entry = 0, restart = 0, emission = 0;
    count_entries(worker, plan, padded_rows);
    if (worker->options.model.draft_layers > 0) rows->sizes.next_tokens = rows->sizes.rows;
    cpa_worker_place_forms(worker);
    for (int32_t f = 0; f < CPA_MOST_ROW_FORMS; f++) next[f] = rows->forms[f].first;
    int64_t scored = rows->n_emissions;
    CPA_TRY(reserve(worker, err));
    clear_emissions(rows);
    for (int64_t i = 0; i < rows->sizes.next_tokens; i++) rows->host.next_sources[i] = -1;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        int64_t *row = &next[cpa_worker_form_of(worker, chunk)], source;
        const int64_t first_row = *row;
        CPA_TRY(source_of(worker, chunk, &source, err));
        add_rows(worker, plan, chunk, source, row);
        listed += *row - first_row;
        add_history(worker, plan, chunk, source, &entry, &restart);
        add_emissions(worker, chunk, first_row, entry - chunk->drafts, &emission);
        add_scored(worker, chunk, first_row, &scored);
    }
    fill_up(rows, listed, entry);
    cpa_worker_list_forms(worker);
    cpa_worker_list_masks(worker, plan);
    cpa_worker_list_selected(worker, plan);
    cpa_worker_list_biases(worker, plan);
    return CPA_OK;
}

cpa_status cpa_worker_upload_rows(cpa_worker *worker, cpa_error *err) {
    const cpa_worker_rows *rows = worker->rows;
    void *base;
    const int64_t bytes = cpa_step_arrays_lay_out(&rows->sizes, NULL, &worker->arrays);
    CPA_TRY(device_block(worker, bytes, &base, err));
    cpa_step_arrays_lay_out(&rows->sizes, base, &worker->arrays);
    return bytes > 0 ? worker->device->table->copy(base, rows->block, bytes, worker->stream) : CPA_OK;
}
