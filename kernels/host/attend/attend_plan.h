/* The host's attend plan: a copy of the batch, and the units of work that it splits into. */
#ifndef CPA_HOST_ATTEND_PLAN_H
#define CPA_HOST_ATTEND_PLAN_H

#include "kernels/attend_update.h"
#include "kernels/cascade.h"
#include "kernels/host/device/host.h"

/* Rows [row, row + rows) of each of the KV heads [kv_head, kv_head + kv_heads) of an item, counted in (token, head of
 * the group) order, over the splits [split_begin, split_end). Heads are taken together only if each fits one group:
 * their keys lie side by side in memory. A unit with partial = -1 covers every split of its rows. Otherwise several
 * units share the rows, and each leaves the states of its splits in the plan's partials: that of split_begin at float
 * `partial`, the next cpa_host_partial_floats further, and so on.
 *
 * Rows of several items that share the keys of these splits are those of the members from `members` on, counted in
 * (member, head of the group) order; `item` is then one of these items. */
typedef struct cpa_host_unit {
    int64_t item;
    int64_t members; /* -1: the rows are the item's */
    int64_t row;
    int32_t rows;
    int32_t kv_head, kv_heads;
    int64_t split_begin, split_end;
    int64_t partial;
    int64_t cost; /* query-key pairs, if the mask is causal */
} cpa_host_unit;

/* A token of an item, counted from its first. */
typedef struct cpa_host_member {
    int64_t item, token;
} cpa_host_member;

/* What items share over the splits [split_begin, split_end): `rows` packed rows, in units of `heads` KV heads and of
 * CPA_HOST_UNIT_ROWS, whose states lie in the plan's partials from `partial` on, unit after unit. */
typedef struct cpa_host_shared {
    int64_t split_begin, split_end;
    int64_t members;
    int64_t rows, heads;
    int64_t partial;
} cpa_host_shared;

/* An item's way down the tree: at each of `levels` levels, from the first keys on, a shared_row for each of its tokens.
 */
typedef struct cpa_host_path {
    int64_t levels, shared_rows;
    int64_t split_begin; /* of the keys that are its own */
} cpa_host_path;

/* What a token has in common with others, and which of the members there it is. */
typedef struct cpa_host_shared_row {
    int64_t shared, member;
} cpa_host_shared_row;

typedef struct cpa_host_plan {
    cpa_attend_plan base;
    cpa_attend_batch batch; /* items and block_tables point at the copies below; of tables that stay there is none */
    cpa_attend_item *items;
    int64_t items_capacity;
    int32_t *tables;
    int64_t tables_capacity;
    cpa_host_unit *units; /* costliest first */
    int64_t n_units, units_capacity;
    cpa_host_unit *shared_units; /* units that several items share, which come before all others */
    int64_t n_shared_units, shared_units_capacity;
    cpa_host_unit *folds; /* the rows that units share, with all their splits */
    int64_t n_folds, folds_capacity;
    float *partials;
    int64_t n_partials, partials_capacity; /* floats */
    /* attend_cascade.c: what items share, if n_shared is not 0. */
    cpa_cascade cascade;
    cpa_host_shared *shared;
    int64_t n_shared, shared_capacity;
    cpa_host_member *members;
    int64_t n_members, members_capacity;
    cpa_host_path *paths; /* [items] */
    int64_t paths_capacity;
    cpa_host_shared_row *shared_rows;
    int64_t n_shared_rows, shared_rows_capacity;
    /* Reserved: what an update reads, and the rows of the sequences that it refuses, with room for all that the
     * reservation has; and its places. */
    cpa_attend_item *read_items;
    int32_t *read_tables;
    cpa_attend_rows *refused_rows;
    int64_t n_refused;
    cpa_attend_refusal refusal; /* of the last update */
    cpa_attend_place *places;
} cpa_host_plan;

/* Rows of all heads of a unit, head after head. */
static inline int32_t cpa_host_unit_rows(const cpa_host_unit *unit) {
    return unit->rows * unit->kv_heads;
}

/* Floats of the partial state of a unit's rows: O [rows of the unit, v_dim], then LSE [rows of the unit]. */
static inline int64_t cpa_host_partial_floats(const cpa_host_plan *plan, const cpa_host_unit *unit) {
    return cpa_host_unit_rows(unit) * ((int64_t)plan->batch.shape.v_dim + 1);
}

/* Whose token a row of the unit is. */
static inline cpa_host_member cpa_host_member_of(const cpa_host_plan *plan, const cpa_host_unit *unit, int32_t group,
                                                 int32_t row) {
    const int64_t token = (unit->row + row % unit->rows) / group;
    return unit->members < 0 ? (cpa_host_member){unit->item, token} : plan->members[unit->members + token];
}

/* KV heads of a unit of so many rows: where there are only a few, those that their keys lie beside go together. */
static inline int64_t cpa_host_unit_heads(const cpa_host_plan *plan, int64_t rows) {
    const cpa_attend_isa *isa = ((const cpa_host_device *)plan->base.device)->isa;
    return rows > 0 && rows <= isa->rows ? CPA_ATTEND_GROUP_ROWS / rows : 1;
}

/* Makes the rows of refused sequences NaN. */
void cpa_host_refuse_rows(const cpa_host_plan *plan, const cpa_attend_args *args);

#endif
