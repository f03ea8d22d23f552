/* A deliberate bug of the tree of equal leading blocks. */
#include "kernels/cascade.h"
#include "base/min_max.h"
#include "tests/faults/fault.h"

/* ---- deep-prefix: requests are taken to share more keys than they do ---- */

cpa_status __real_cpa_cascade_find(cpa_cascade *cascade, const cpa_attend_batch *batch, cpa_table_set tables,
                                   int64_t unit, int64_t most_rows, cpa_error *err);
cpa_status __wrap_cpa_cascade_find(cpa_cascade *cascade, const cpa_attend_batch *batch, cpa_table_set tables,
                                   int64_t unit, int64_t most_rows, cpa_error *err);

/* A unit more for the last node, which none is below, where all its items have that. */
cpa_status __wrap_cpa_cascade_find(cpa_cascade *cascade, const cpa_attend_batch *batch, cpa_table_set tables,
                                   int64_t unit, int64_t most_rows, cpa_error *err) {
    const cpa_status status = __real_cpa_cascade_find(cascade, batch, tables, unit, most_rows, err);
    if (status != CPA_OK || cascade->n_nodes == 0 || !cpa_fault_is(CPA_FAULT_DEEP_PREFIX)) return status;
    cpa_cascade_node *node = &cascade->nodes[cascade->n_nodes - 1];
    int64_t units = INT64_MAX;
    for (int64_t i = node->first; i < node->first + node->count; i++) units = cpa_min64(units, cascade->items[i].units);
    if (units * unit > node->k_end) node->k_end += unit;
    return status;
}
