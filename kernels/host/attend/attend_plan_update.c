/* Reserved attend plans: an update reads the lengths and tables as an operation, and sets the plan to them. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/host/attend/attend_out.h"
#include "kernels/host/attend/attend_plan.h"
#include "kernels/host/attend/state.h"

/* Copies the entries of so many keys; whether all of them are blocks of the cache. */
static int take_table(const cpa_attend_reservation *r, const int32_t *from, int64_t keys, int32_t *to) {
    for (int64_t e = 0; e * r->block_size < keys; e++) {
        if (from[e] < 0 || from[e] >= r->num_blocks) return 0;
        to[e] = from[e];
    }
    return 1;
}

/* The items of a sequence, behind those of the batch; or its rows are refused. */
static void add_sequence(cpa_host_plan *plan, cpa_attend_batch *batch, const cpa_attend_update *update, int64_t s,
                         const cpa_attend_sequence *found) {
    const cpa_attend_reservation *r = &plan->base.reservation;
    const int64_t keys = cpa_attend_keys_on(r, found, r->rank), at = batch->n_table_entries;
    int32_t refused = found->refused;
    if (!refused && !take_table(r, update->block_tables + found->table, keys, plan->read_tables + at))
        refused = CPA_REFUSED_TABLE;
    for (int32_t i = 0; i < cpa_attend_askers(r); i++) {
        const int32_t asker = cpa_attend_asker(r, found, i);
        const cpa_attend_item item = cpa_attend_item_of(r, found, asker, plan->places[asker], keys, at, refused);
        if (item.q_count == 0) continue;
        if (refused && plan->refusal.sequence < 0) plan->refusal = (cpa_attend_refusal){s, refused};
        if (refused)
            plan->refused_rows[plan->n_refused++] = (cpa_attend_rows){item.q_row, (int32_t)item.q_count, 0};
        else
            plan->read_items[batch->n_items++] = item;
    }
    if (!refused) batch->n_table_entries += (keys + r->block_size - 1) / r->block_size;
}

static void map_sequence(const cpa_host_plan *plan, int64_t s, const cpa_attend_sequence *found) {
    const cpa_attend_reservation *r = &plan->base.reservation;
    for (int32_t rank = 0; rank < r->map.cp_size; rank++) {
        for (int32_t i = 0; i < r->rows; i++) {
            const int64_t row = s * r->rows + i;
            r->row_maps[rank * r->sequences * r->rows + row] = cpa_attend_map_row(r, found, rank, i);
            r->step_rows[plan->places[rank].first_row + row] = cpa_attend_step_row(r, found, rank, i);
        }
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
    int64_t before = 0;
    plan->n_refused = 0;
    plan->refusal.sequence = -1;
    for (int64_t s = 0; s < update->sequences; s++) {
        if (update->qo_indptr) before = cpa_max64(before, s > 0 ? update->qo_indptr[s - 1] : 0);
        const cpa_attend_sequence found = cpa_attend_sequence_of(r, update, s, before);
        add_sequence(plan, &batch, update, s, &found);
        if (r->row_maps) map_sequence(plan, s, &found);
    }
    for (int64_t s = update->sequences; s < r->sequences && r->row_maps; s++) {
        const cpa_attend_sequence none = {.rows = {.first = s * r->rows}, .first_asker = r->rank};
        map_sequence(plan, s, &none);
    }
    const cpa_attend_fusion fusion = {.ready_row = r->ready_row, .ready_rows = r->ready_rows};
    CPA_TRY(cpa_host_plan_set(&plan->base, &batch, fusion, err));
    plan->base.n_items = r->sequences; /* those that are refused have rows too */
    return CPA_OK;
}

cpa_status cpa_host_plan_reserve(cpa_attend_plan *base, const cpa_attend_reservation *reservation, cpa_error *err) {
    cpa_host_plan *plan = (cpa_host_plan *)base;
    const cpa_attend_reservation *r = reservation;
    const size_t sequences = (size_t)r->sequences, most_items = sequences * (size_t)cpa_attend_askers(r);
    cpa_attend_item *items = calloc(most_items, sizeof *items);
    int32_t *tables = calloc(sequences * (size_t)r->table_stride, sizeof *tables);
    cpa_attend_rows *refused = calloc(most_items, sizeof *refused);
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
    base->refusal = &plan->refusal;
    const cpa_attend_update empty = {.sequences = r->total_rows / r->rows, .length_bytes = 4, .block_tables = tables};
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
