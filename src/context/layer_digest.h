/* What a rank attends a layer by, as a number that ranks compare: mask, scale and score rules, and what these point to
 * where the host can read it. */
#ifndef CPA_LAYER_DIGEST_H
#define CPA_LAYER_DIGEST_H

#include "src/context/context_ops.h"
#include "src/context/planned_step.h"

/* The digest of what `digest` stands for, followed by a layer of the step. Of a bias and of a selection at most some
 * thousand values and words count, evenly spaced: a layer must not wait for them. */
uint64_t cpa_layer_digest(uint64_t digest, const cpa_context_ops *ops, const cpa_planned_step *step,
                          const cpa_layer *layer);

#endif
