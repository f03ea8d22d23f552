/* How much of the weight of a row may be missing where tiles of keys are left out, those whose scores all lie more than
 * a distance T below the largest that the row has met (skip_tiles of cpattn/ops.h).
 *
 * That one is at most m, the largest score of the row, so a key of score s can be missing only if s < m - T: of n such
 * keys each weighs at most exp(-T) of what the key of m does. What they weigh together is added up, score by score. With
 *
 *     w = sum of exp(s) over s < m - T  /  sum of exp(s)                 <= n exp(-T) / (1 + n exp(-T))
 *
 * and O = (1 - a) O_kept + a O_missing for the share a <= w that is missing, O_kept is off by a |O_kept - O_missing| <= 2
 * w max |v|, and LSE by -ln(1 - a) <= -ln(1 - w). A sink that leaves the share 1 / (1 + exp(sink - LSE)) of a row, which
 * changes by at most a quarter of what LSE does, adds a quarter of that times max |v|. Pure; used by one thread. */
#ifndef CPA_SKIPPED_MASS_H
#define CPA_SKIPPED_MASS_H

#include <stdint.h>

/* Scores are counted in steps of T / 16, of which the last that counts is the one in the middle of which m - T may lie. */
enum { CPA_SKIPPED_STEPS = 16, CPA_SKIPPED_BINS = CPA_SKIPPED_STEPS + 2 };

typedef struct cpa_skipped_mass {
    double step;                   /* 0: nothing is left out, and nothing counted */
    double max;                    /* the largest score; -inf: there is none */
    int64_t top;                   /* the step that it lies in */
    double bins[CPA_SKIPPED_BINS]; /* weights of the scores of step top - i, relative to exp(max) */
    double below;                  /* of those below */
} cpa_skipped_mass;

/* Of no score yet. distance: T; 0: nothing is left out. */
cpa_skipped_mass cpa_skipped_mass_of(double distance);
void cpa_skipped_mass_add(cpa_skipped_mass *mass, int64_t n, const double *scores);
/* Adds the scores of another of the same distance. */
void cpa_skipped_mass_join(cpa_skipped_mass *mass, const cpa_skipped_mass *other);
/* w, or a little more: that of a distance which is less by up to one step and a half. */
double cpa_skipped_mass_share(const cpa_skipped_mass *mass);

#endif
