/* What every rank must be given alike. */
#include <string.h>

#include "base/check.h"
#include "comm/comm.h"

cpa_status cpa_control_same(cpa_control *control, const char *what, const cpa_named_value *values, int32_t n,
                            cpa_error *err) {
    double mine[CPA_SAME_MOST] = {0}, all[CPA_COMM_MAX_RANKS][CPA_SAME_MOST];
    for (int32_t i = 0; i < n; i++) mine[i] = values[i].value;
    CPA_TRY(cpa_control_all_gather(control, mine, sizeof mine, all, err));
    for (int32_t i = 0; i < n; i++) {
        for (int32_t rank = 1; rank < control->size; rank++) {
            if (memcmp(&all[rank][i], &all[0][i], sizeof all[0][i]) == 0) continue;
            return cpa_fail(err, CPA_INVALID, "%s: %s: found %.15g on rank %d and %.15g on rank 0, expected the same",
                            what, values[i].name, all[rank][i], rank, all[0][i]);
        }
    }
    return CPA_OK;
}
