/* Sets of code points, as ranges. */
#ifndef CPA_GRAMMAR_CODE_SET_H
#define CPA_GRAMMAR_CODE_SET_H

#include "src/grammar/graph.h"

enum { CPA_LAST_CODE = 0x10ffff };

/* One of zeros is empty. */
typedef struct cpa_code_set {
    struct cpa_code_range {
        uint32_t lo, hi;
    } * ranges;
    int64_t count, capacity;
} cpa_code_set;

/* Each returns 0 without memory, else 1. */
int cpa_code_set_add(cpa_code_set *set, uint32_t lo, uint32_t hi);
int cpa_code_set_add_set(cpa_code_set *set, const cpa_code_set *other);
/* All code points of a general category of Unicode ("L", "Lu", "Letter"); *is_known is 0 if there is none. Looks at every
 * code point. */
int cpa_code_set_add_category(cpa_code_set *set, const char *name, int *is_known);
/* All that are not in it. */
int cpa_code_set_invert(cpa_code_set *set);

/* One character of the set. */
void cpa_code_set_build(cpa_code_set *set, cpa_graph *graph, uint32_t from, uint32_t to);

void cpa_code_set_release(cpa_code_set *set);

#endif
