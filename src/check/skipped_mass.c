#include "src/check/skipped_mass.h"

#include <math.h>

cpa_skipped_mass cpa_skipped_mass_of(double distance) {
    return (cpa_skipped_mass){.step = distance / CPA_SKIPPED_STEPS, .max = -INFINITY};
}

/* Within what an int64_t counts, however large scores are. */
static int64_t step_of(const cpa_skipped_mass *mass, double score) {
    return (int64_t)floor(fmax(-0x1p60, fmin(score / mass->step, 0x1p60)));
}

/* The largest score becomes `max` or stays; the steps end with that of it. */
static void raise_max(cpa_skipped_mass *mass, double max) {
    if (max <= mass->max) return;
    const double worth = exp(mass->max - max);
    const int64_t top = step_of(mass, max), most = CPA_SKIPPED_BINS;
    const int64_t by = mass->max == -INFINITY || top - mass->top > most ? most : top - mass->top;
    for (int64_t i = most - by; i < most; i++) mass->below += mass->bins[i];
    for (int64_t i = most - 1; i >= 0; i--) mass->bins[i] = i >= by ? mass->bins[i - by] * worth : 0;
    mass->below *= worth;
    mass->top = top;
    mass->max = max;
}

static void add_weight(cpa_skipped_mass *mass, int64_t step, double weight) {
    if (mass->top - step < CPA_SKIPPED_BINS)
        mass->bins[mass->top - step] += weight;
    else
        mass->below += weight;
}

void cpa_skipped_mass_add(cpa_skipped_mass *mass, int64_t n, const double *scores) {
    if (mass->step == 0) return;
    for (int64_t i = 0; i < n; i++) {
        raise_max(mass, scores[i]);
        add_weight(mass, step_of(mass, scores[i]), exp(scores[i] - mass->max));
    }
}

void cpa_skipped_mass_join(cpa_skipped_mass *mass, const cpa_skipped_mass *other) {
    if (mass->step == 0 || other->max == -INFINITY) return;
    raise_max(mass, other->max);
    const double worth = exp(other->max - mass->max);
    mass->below += other->below * worth;
    for (int64_t i = 0; i < CPA_SKIPPED_BINS; i++) add_weight(mass, other->top - i, other->bins[i] * worth);
}

/* A score of step top - i is at least (top - i) * step. Half a step more is for how scores are rounded. */
double cpa_skipped_mass_share(const cpa_skipped_mass *mass) {
    double missing = mass->below, kept = 0;
    if (mass->step == 0 || mass->max == -INFINITY) return 0;
    for (int64_t i = 0; i < CPA_SKIPPED_BINS; i++) {
        const double least = mass->step * (double)(mass->top - i);
        const int may_miss = least < mass->max - mass->step * (CPA_SKIPPED_STEPS - 0.5);
        *(may_miss ? &missing : &kept) += mass->bins[i];
    }
    return missing / (missing + kept);
}
