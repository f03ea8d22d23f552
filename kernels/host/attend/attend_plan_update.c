/* Reserved attend plans: an update reads the lengths and tables as an operation, and sets the plan to them. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/convert.h"
#include "kernels/host/attend/attend_plan.h"
#include "kernels/host/attend/state.h"

/* Of sequence s; those of no array are 0. */
static int64_t length_of(const cpa_attend_update *update, int64_t s) {
    if (!update->lengths) return 0;
    return update->length_bytes == 4 ? ((const int32_t *)update->lengths)[s] : ((const int64_t *)update->lengths)[s];
}

/* Copies the entries that a sequence of that length uses; whether all of them are blocks of the cache. */
static int take_table(const cpa_attend_reservation *r, const int32_t *from, int64_t length, int32_t *to) {
    for (int64_t e = 0; e * r->block_size < length; e++) {
        if (from[e] < 0 || from[e] >= r->num_blocks) return 0;
        to[e] = from[e];
    }
    return 1;
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
        const int64_t length = length_of(update, s), at = batch.n_table_entries;
        const int fits = length == 0 || (length >= r->rows && length <= r->tokens);
        if (!fits || !take_table(r, update->block_tables + s * update->table_stride, length, plan->read_tables + at)) {
            plan->refused[plan->n_refused++] = s;
            continue;
        }
        plan->read_items[batch.n_items++] = (cpa_attend_item){.q_row = s * r->rows,
                                                              .q_count = r->rows,
                                                              .q_first = length > 0 ? length - r->rows : 0,
                                                              .k_count = length,
                                                              .table = at,
                                                              .q_set = {CPA_TOKENS_ALL, 0},
                                                              .k_set = {CPA_TOKENS_ALL, 0}};
        batch.n_table_entries += (length + r->block_size - 1) / r->block_size;
    }
    CPA_TRY(cpa_host_plan_set(&plan->base, &batch, (cpa_attend_fusion){0}, err));
    plan->base.n_items = update->sequences; /* those that are refused have rows too */
    plan->base.rows = update->sequences * r->rows;
    return CPA_OK;
}

cpa_status cpa_host_plan_reserve(cpa_attend_plan *base, const cpa_attend_reservation *reservation, cpa_error *err) {
    cpa_host_plan *plan = (cpa_host_plan *)base;
    const cpa_attend_reservation *r = reservation;
    const size_t sequences = (size_t)r->sequences;
    cpa_attend_item *items = calloc(sequences, sizeof *items);
    int32_t *tables = calloc(sequences * (size_t)r->table_stride, sizeof *tables);
    int64_t *refused = calloc(sequences, sizeof *refused);
    if (!items || !tables || !refused) {
        free(items), free(tables), free(refused);
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld sequences of %lld table entries",
                        (long long)r->sequences, (long long)r->table_stride);
    }
    plan->read_items = items;
    plan->read_tables = tables;
    plan->refused = refused;
    base->reservation = *r;
    const cpa_attend_update empty = {.sequences = r->sequences, .length_bytes = 4, .block_tables = tables};
    return set_lengths(plan, &empty, err);
}

cpa_status cpa_host_plan_update(cpa_attend_plan *base, const cpa_attend_update *update, cpa_stream *stream) {
    return set_lengths((cpa_host_plan *)base, update, &stream->error);
}

void cpa_host_refuse_rows(const cpa_host_plan *plan, const cpa_attend_args *args) {
    const cpa_attend_reservation *r = &plan->base.reservation;
    const int64_t heads = r->shape.q_heads, v_dim = r->shape.v_dim;
    float nan[CPA_MAX_HEAD_DIM], none;
    cpa_state_set_nan(nan, &none, v_dim);
    for (int64_t i = 0; i < plan->n_refused * r->rows * heads; i++) {
        const int64_t row = plan->refused[i / (r->rows * heads)] * r->rows + i / heads % r->rows, head = i % heads;
        const cpa_partial *state = &args->state;
        if (state->o) memcpy(state->o + row * state->o_row_stride + head * v_dim, nan, (size_t)v_dim * sizeof *nan);
        if (state->lse) state->lse[row * state->lse_row_stride + head] = NAN;
        if (args->out) {
            const int64_t at = (row * heads + head) * v_dim * cpa_dtype_bytes(args->q_dtype);
            cpa_narrow((char *)args->out + at, nan, args->q_dtype, v_dim);
        }
    }
}
