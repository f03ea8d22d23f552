/* The decimal numbers between two bounds, as automata. */
#ifndef CPA_GRAMMAR_NUMBER_RANGE_H
#define CPA_GRAMMAR_NUMBER_RANGE_H

#include "src/grammar/dfa.h"

typedef struct cpa_number_range {
    double min, max;          /* -INFINITY, INFINITY: none */
    int above_min, below_max; /* the bound itself is out */
    int64_t multiple_of;      /* 0: of nothing */
} cpa_number_range;

enum { CPA_NUMBER_MOST_MULTIPLE = 10000 };

/* Written without an exponent, in 15 digits at most, so that a double tells all of them apart. CPA_UNSUPPORTED for a
 * bound that has more, CPA_NO_MEMORY. */
cpa_status cpa_number_range_dfa(const cpa_number_range *range, int integers_alone, cpa_effort *effort, cpa_dfa *out,
                                cpa_error *err);

/* Whether a number is in the range. */
int cpa_number_range_has(const cpa_number_range *range, double number);

#endif
