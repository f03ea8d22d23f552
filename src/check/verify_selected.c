#include "src/check/verify_selected.h"

#include <math.h>

#include "src/check/verify_keys.h"

void cpa_verify_selected_begin(cpa_verify_selected *selected) {
    selected->max = -INFINITY;
    selected->sum = 0;
    cpa_verify_choice_begin(&selected->choice);
}

/* Adds `sum` times exp(max). */
static void add_mass(cpa_verify_selected *selected, double max, double sum) {
    const double highest = max > selected->max ? max : selected->max;
    if (!(sum > 0) || isnan(selected->sum)) return;
    selected->sum = sum * exp(max - highest) + (selected->sum > 0 ? selected->sum * exp(selected->max - highest) : 0);
    selected->max = highest;
}

void cpa_verify_selected_leave(cpa_verify_selected *selected, const cpa_reference_row *row, int64_t n, const float *k,
                               const int64_t *indices) {
    double scores[CPA_VERIFY_KEYS_AT_ONCE], max = -INFINITY, sum = 0;
    cpa_reference_score_keys(row, n, k, indices, scores);
    for (int64_t t = 0; t < n; t++) max = scores[t] > max ? scores[t] : max;
    for (int64_t t = 0; t < n; t++) sum += max > -INFINITY ? exp(scores[t] - max) : isnan(scores[t]) ? NAN : 0;
    if (isnan(sum)) selected->sum = NAN;
    add_mass(selected, max, sum);
}

void cpa_verify_selected_join(cpa_verify_selected *selected, const cpa_verify_selected *other) {
    if (isnan(other->sum)) selected->sum = NAN;
    add_mass(selected, other->max, other->sum);
    cpa_verify_choice_join(&selected->choice, &other->choice);
}

double cpa_verify_selected_mass(const cpa_verify_selected *selected, const cpa_reference_row *row) {
    if (row->not_finite || row->undecided || !isfinite(selected->sum)) return -1;
    cpa_verify_selected all = *selected;
    add_mass(&all, row->max, row->sum);
    if (!(all.sum > 0)) return -1;
    return selected->sum > 0 ? selected->sum * exp(selected->max - all.max) / all.sum : 0;
}
