/* What the sampled check learns of a row that attends a list of keys, beside its attention: what an indexer should have
 * chosen (verify_choice.h), and how much of its softmax lies on keys that are not on the list. */
#ifndef CPA_VERIFY_SELECTED_H
#define CPA_VERIFY_SELECTED_H

#include "src/check/verify_choice.h"

typedef struct cpa_verify_selected {
    double max,
        sum; /* of the keys that the mask shows but the list lacks: the highest score, and sum exp(score - max) */
    cpa_verify_choice choice;
} cpa_verify_selected;

void cpa_verify_selected_begin(cpa_verify_selected *selected);
/* Adds n keys, at most CPA_VERIFY_KEYS_AT_ONCE, that are left out, of these indices in the sequence. `row` has the query
 * and the rules. */
void cpa_verify_selected_leave(cpa_verify_selected *selected, const cpa_reference_row *row, int64_t n, const float *k,
                               const int64_t *indices);
void cpa_verify_selected_join(cpa_verify_selected *selected, const cpa_verify_selected *other);

/* The share of the softmax over all keys that the mask shows, sinks aside, which is on those left out; `row` has the
 * others. Negative where it is not known: a score is no finite number, or there are no keys. */
double cpa_verify_selected_mass(const cpa_verify_selected *selected, const cpa_reference_row *row);

#endif
