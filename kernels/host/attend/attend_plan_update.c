/* Reserved attend plans: an update reads the lengths and tables as an operation, and sets the plan to them. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "kernels/host/attend/attend_out.h"
#include "kernels/host/attend/attend_plan.h"
#include "kernels/host/attend/state.h"

/* Of sequence s; those of no array are 0. */
static cpa_attend_extent extent_of(const cpa_attend_update *update, int32_t block_size, int64_t s) {
    if (update->kv_indptr) return cpa_attend_extent_of(update, block_size, s);
    cpa_attend_extent extent = {.table = s * update->table_stride};
    if (!update->lengths) return extent;
    extent.length =
        update->length_bytes == 4 ? ((const int32_t *)update->lengths)[s] : ((const int64_t *)update->lengths)[s];
    return extent;
}

/* What an update says of a sequence. */
typedef struct sequence {
    int64_t table, length;
    cpa_attend_rows rows;
    cpa_placement placement;
    int refused;
    int32_t asker; /* the rank of its rows; of a sequence that is empty or refused, this one */
} sequence;

static sequence read_sequence(const cpa_attend_reservation *r, const cpa_attend_update *update, int64_t s) {
    const cpa_attend_extent extent = extent_of(update, r->block_size, s);
    sequence found = {.table = extent.table,
                      .length = extent.length,
                      .rows = cpa_attend_rows_of(update, r->rows, s),
                      .placement = {CPA_SHARDED, update->first_ranks ? update->first_ranks[s] : 0},
                      .asker = r->rank};
    found.refused = !cpa_placement_is_valid(r->map, found.placement) || !found.rows.fits ||
                    (found.length != 0 && (found.length < found.rows.count || found.length > r->tokens));
    if (found.refused) found.placement.rank = 0, found.length = 0;
    if (found.length > 0) found.asker = cpa_owner_rank(r->map, found.placement, found.length - 1);
    return found;
}

static int64_t keys_on(const cpa_attend_reservation *r, const sequence *found, int32_t rank) {
    return cpa_tokens_before(r->map, cpa_tokens_on(r->map, found->placement, rank), found->length);
}

/* Copies the entries of so many keys; whether all of them are blocks of the cache. */
static int take_table(const cpa_attend_reservation *r, const int32_t *from, int64_t keys, int32_t *to) {
    for (int64_t e = 0; e * r->block_size < keys; e++) {
        if (from[e] < 0 || from[e] >= r->num_blocks) return 0;
        to[e] = from[e];
    }
    return 1;
}

/* Where the rows of a sequence lie. */
static cpa_attend_rows rows_of(const cpa_host_plan *plan, const sequence *found) {
    cpa_attend_rows rows = found->rows;
    rows.first += plan->places[found->asker].first_row;
    return rows;
}

/* The item of a sequence, behind those of the batch; or it is refused. */
static void add_sequence(cpa_host_plan *plan, cpa_attend_batch *batch, const cpa_attend_update *update,
                         const sequence *found) {
    const cpa_attend_reservation *r = &plan->base.reservation;
    const int64_t keys = keys_on(r, found, r->rank), at = batch->n_table_entries;
    /* An empty sequence has rows where results are those of the attend, and not of a merge by row maps. */
    const int has_rows = found->length > 0 ? found->asker == r->rank : !r->row_maps;
    const cpa_attend_rows rows = rows_of(plan, found);
    if (found->refused || !take_table(r, update->block_tables + found->table, keys, plan->read_tables + at)) {
        plan->refused_rows[plan->n_refused++] = rows;
        return;
    }
    if (keys == 0 && !has_rows) return;
    cpa_attend_item *item = &plan->read_items[batch->n_items++];
    *item = (cpa_attend_item){.q_row = rows.first,
                              .q_count = rows.count,
                              .k_count = keys,
                              .table = at,
                              .q_set = cpa_tokens_on(r->map, found->placement, found->asker),
                              .k_set = cpa_tokens_on(r->map, found->placement, r->rank)};
    if (found->length > 0) item->q_first = cpa_tokens_before(r->map, item->q_set, found->length - rows.count);
    batch->n_table_entries += (keys + r->block_size - 1) / r->block_size;
}

static void map_sequence(const cpa_attend_reservation *r, int64_t s, const sequence *found) {
    for (int32_t rank = 0; rank < r->map.cp_size; rank++) {
        const int own = rank == r->rank && (found->refused || found->length > 0);
        const int asks = found->asker == r->rank && (own || keys_on(r, found, rank) > 0);
        r->row_maps[rank * r->sequences + s] = asks ? (int32_t)s : -1;
    }
}

static cpa_status set_lengths(cpa_host_plan *plan, const cpa_attend_update *update, cpa_error *err) {
    const cpa_attend_reservation *r = &plan->base.reservation;
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = r->map,
                              .shape = r->shape,
                              .block_size = r->block_size,
                              .items = plan->read_items,
                              .block_tables = plan->read_tables};
    plan->n_refused = 0;
    for (int64_t s = 0; s < update->sequences; s++) {
        const sequence found = read_sequence(r, update, s);
        add_sequence(plan, &batch, update, &found);
        if (r->row_maps) map_sequence(r, s, &found);
    }
    for (int64_t s = update->sequences; s < r->sequences && r->row_maps; s++) {
        for (int32_t rank = 0; rank < r->map.cp_size; rank++) r->row_maps[rank * r->sequences + s] = -1;
    }
    const cpa_attend_fusion fusion = {.ready_row = r->ready_row, .ready_rows = r->ready_rows};
    CPA_TRY(cpa_host_plan_set(&plan->base, &batch, fusion, err));
    plan->base.n_items = r->sequences; /* those that are refused have rows too */
    return CPA_OK;
}

cpa_status cpa_host_plan_reserve(cpa_attend_plan *base, const cpa_attend_reservation *reservation, cpa_error *err) {
    cpa_host_plan *plan = (cpa_host_plan *)base;
    const cpa_attend_reservation *r = reservation;
    const size_t sequences = (size_t)r->sequences;
    cpa_attend_item *items = calloc(sequences, sizeof *items);
    int32_t *tables = calloc(sequences * (size_t)r->table_stride, sizeof *tables);
    cpa_attend_rows *refused = calloc(sequences, sizeof *refused);
    cpa_attend_place *places = calloc((size_t)r->map.cp_size, sizeof *places);
    if (!items || !tables || !refused || !places) {
        free(items), free(tables), free(refused), free(places);
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld sequences of %lld table entries",
                        (long long)r->sequences, (long long)r->table_stride);
    }
    if (r->places) memcpy(places, r->places, (size_t)r->map.cp_size * sizeof *places);
    plan->read_items = items;
    plan->read_tables = tables;
    plan->refused_rows = refused;
    plan->places = places;
    base->reservation = *r;
    base->reservation.places = NULL;
    const cpa_attend_update empty = {.sequences = r->sequences, .length_bytes = 4, .block_tables = tables};
    return set_lengths(plan, &empty, err);
}

cpa_status cpa_host_plan_update(cpa_attend_plan *base, const cpa_attend_update *update, cpa_stream *stream) {
    return set_lengths((cpa_host_plan *)base, update, &stream->error);
}

/* A head of a row becomes NaN. */
static void refuse_row(const cpa_attention_shape *shape, int64_t row, int64_t head, const cpa_attend_args *args) {
    const int64_t v_dim = shape->v_dim;
    const int64_t at = (row * args->out_row_stride + head * args->out_head_stride) * cpa_host_out_bytes(args);
    const cpa_partial *state = &args->state;
    float nan[CPA_MAX_HEAD_DIM], none;
    cpa_state_set_nan(nan, &none, v_dim);
    if (state->o) memcpy(state->o + row * state->o_row_stride + head * v_dim, nan, (size_t)v_dim * sizeof *nan);
    if (state->lse) state->lse[row * state->lse_row_stride + head * args->lse_head_stride] = NAN;
    if (args->out) cpa_host_store_out(args, (char *)args->out + at, nan, v_dim);
}

void cpa_host_refuse_rows(const cpa_host_plan *plan, const cpa_attend_args *args) {
    const cpa_attention_shape *shape = &plan->base.reservation.shape;
    for (int64_t i = 0; i < plan->n_refused; i++) {
        const cpa_attend_rows *rows = &plan->refused_rows[i];
        for (int64_t at = 0; at < rows->count * shape->q_heads; at++)
            refuse_row(shape, rows->first + at / shape->q_heads, at % shape->q_heads, args);
    }
}
