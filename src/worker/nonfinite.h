/* The rows of a worker's steps that are not finite: tokens whose keys, values or results, in some layer, have a NaN or
 * an infinity. kv_write and hash_rows mark them as they pass by; here the marks are read once a step. A row that
 * is replicated is counted, and is among the last, on each rank that sees it so: as a rule all of them. */
#ifndef CPA_NONFINITE_H
#define CPA_NONFINITE_H

#include "comm/comm.h"
#include "src/schedule/step_plan.h"

/* A row, and the first layer in which it was so. */
typedef struct cpa_nonfinite_row {
    uint64_t step, request;
    int64_t position;
    int64_t layer;
} cpa_nonfinite_row;

typedef struct cpa_nonfinite {
    uint8_t *marks; /* [layers][max_rows], page-locked, the worker's; all 0 between steps */
    int64_t layers, max_rows;
    int64_t rows;            /* rows found so far, in all steps */
    cpa_nonfinite_row first; /* first row of the first layer that has any, in the first step that has any */
    cpa_nonfinite_row *last; /* [n_last] rows of the step that was collected last, one of each request */
    int64_t n_last, cap_last;
} cpa_nonfinite;

/* The marks of the rows in a layer. */
static inline uint8_t *cpa_nonfinite_marks(const cpa_nonfinite *nonfinite, int32_t layer) {
    return nonfinite->marks + layer * nonfinite->max_rows;
}

/* Reads and clears the marks of a step that is done, which had these rows. CPA_NO_MEMORY is possible. */
cpa_status cpa_nonfinite_collect(cpa_nonfinite *nonfinite, const cpa_step_plan *plan, int64_t rows,
                                 const uint64_t *requests, const int64_t *positions, cpa_error *err);

/* Collective. Rows of all ranks and the first of them all; without marks. */
cpa_status cpa_nonfinite_join(const cpa_nonfinite *nonfinite, cpa_control *control, cpa_nonfinite *all, cpa_error *err);

#endif
