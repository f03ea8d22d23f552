/* The host's attend plan: a copy of the batch, and the units of work that it splits into. */
#ifndef CPA_HOST_ATTEND_PLAN_H
#define CPA_HOST_ATTEND_PLAN_H

#include "kernels/host/host.h"

enum { CPA_UNIT_ROWS = 240 }; /* a multiple of every instruction set's group */

/* Rows [row, row + rows) of one KV head of an item, counted in (token, head of the group) order, over the splits
 * [split_begin, split_end). If `partial` is -1, these are all splits that the rows see. Else the unit is one of several
 * that share the rows: split s of the rows leaves its state at partial state `partial + s - split_begin`. */
typedef struct cpa_host_unit {
    int64_t item;
    int32_t kv_head;
    int32_t rows;
    int64_t row;
    int64_t split_begin, split_end;
    int64_t partial;
    int64_t cost;
} cpa_host_unit;

typedef struct cpa_host_plan {
    cpa_attend_plan base;
    cpa_attend_batch batch; /* items and block_tables point at the copies below */
    cpa_attend_item *items;
    int64_t items_capacity;
    int32_t *tables;
    int64_t tables_capacity;
    cpa_host_unit *units; /* longest first */
    int64_t n_units, units_capacity;
    cpa_host_unit *folds; /* the shared rows, with the range of all their splits */
    int64_t n_folds, folds_capacity;
    float *partials; /* n_partials states: O [CPA_UNIT_ROWS, v_dim], then LSE [CPA_UNIT_ROWS] */
    int64_t n_partials, partials_capacity;
} cpa_host_plan;

/* Floats of one partial state. */
static inline int64_t cpa_host_partial_floats(const cpa_host_plan *plan) {
    return CPA_UNIT_ROWS * ((int64_t)plan->batch.v_dim + 1);
}

#endif
