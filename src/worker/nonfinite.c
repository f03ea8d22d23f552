#include "src/worker/nonfinite.h"

#include <string.h>

#include <cpattn/ops.h>

#include "base/array.h"
#include "base/check.h"

static cpa_status note_request(cpa_nonfinite *nonfinite, const cpa_nonfinite_row *found, cpa_error *err) {
    for (int64_t i = 0; i < nonfinite->n_last; i++)
        if (nonfinite->last[i].request == found->request) return CPA_OK;
    if (!cpa_array_reserve(&nonfinite->last, &nonfinite->cap_last, nonfinite->n_last + 1, sizeof *nonfinite->last))
        return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory to note a row that is not finite");
    nonfinite->last[nonfinite->n_last++] = *found;
    return CPA_OK;
}

cpa_status cpa_nonfinite_collect(cpa_nonfinite *nonfinite, const cpa_step_plan *plan, int64_t rows,
                                 const uint64_t *requests, const int64_t *positions, cpa_error *err) {
    nonfinite->n_last = 0;
    for (int32_t layer = 0; layer < nonfinite->layers; layer++) {
        const uint8_t *marks = cpa_nonfinite_marks(nonfinite, layer), *at;
        while ((at = memchr(marks, 1, (size_t)rows))) {
            const int64_t row = at - marks;
            const cpa_nonfinite_row found = {plan->step, requests[row], positions[row], layer};
            if (nonfinite->rows++ == 0) nonfinite->first = found;
            for (int32_t later = layer; later < nonfinite->layers; later++)
                cpa_nonfinite_marks(nonfinite, later)[row] = 0;
            CPA_TRY(note_request(nonfinite, &found, err));
        }
    }
    return CPA_OK;
}

static int is_before(const cpa_nonfinite_row *a, const cpa_nonfinite_row *b) {
    if (a->step != b->step) return a->step < b->step;
    if (a->layer != b->layer) return a->layer < b->layer;
    if (a->request != b->request) return a->request < b->request;
    return a->position < b->position;
}

cpa_status cpa_nonfinite_join(const cpa_nonfinite *nonfinite, cpa_control *control, cpa_nonfinite *all,
                              cpa_error *err) {
    cpa_nonfinite found[CPA_MERGE_MAX_STATES];
    const cpa_nonfinite mine = {.rows = nonfinite->rows, .first = nonfinite->first};
    CPA_TRY(cpa_control_all_gather(control, &mine, sizeof mine, found, err));
    *all = (cpa_nonfinite){.rows = 0};
    for (int32_t r = 0; r < control->size; r++) {
        if (found[r].rows == 0) continue;
        if (all->rows == 0 || is_before(&found[r].first, &all->first)) all->first = found[r].first;
        all->rows += found[r].rows;
    }
    return CPA_OK;
}
