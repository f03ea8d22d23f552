/* How much work the making of a grammar may be, however small its text is. */
#ifndef CPA_GRAMMAR_EFFORT_H
#define CPA_GRAMMAR_EFFORT_H

#include <stdint.h>

#include "base/check.h"

/* Counted in visits of a node, an edge or a value: some nanoseconds each. */
typedef struct cpa_effort {
    int64_t left;
} cpa_effort;

enum { CPA_EFFORT_MOST = 50000000 };

/* Takes off `visits`; 0 once there is nothing left. */
static inline int cpa_effort_spend(cpa_effort *effort, int64_t visits) {
    effort->left = visits < effort->left ? effort->left - visits : 0;
    return effort->left > 0;
}

static inline cpa_status cpa_effort_fail(cpa_error *err) {
    return cpa_fail(err, CPA_UNSUPPORTED, "too much work to make a grammar of it");
}

#endif
