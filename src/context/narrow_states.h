/* Partial states that travel in 16 bits (cpa_context_options.state_dtype): O rounded to nearest even, and the LSE in fp32.
 * A row of a message is O [q_heads, out_dim] of a form, filled up to a float, then LSE [q_heads], filled up to 16 bytes. */
#ifndef CPA_NARROW_STATES_H
#define CPA_NARROW_STATES_H

#include "src/context/context_ops.h"

/* Whether they do. */
static inline int cpa_states_are_narrow(const cpa_context_ops *ops) {
    return ops->options.state_dtype != CPA_F32;
}

int64_t cpa_narrow_row_bytes(const cpa_context_ops *ops, const cpa_form *form);

/* The first `rows` states become rows of a message, and back. */
cpa_status cpa_narrow_states(cpa_context_ops *ops, const cpa_form *form, cpa_partial from, int64_t rows, void *to,
                             cpa_stream *stream);
cpa_status cpa_widen_states(cpa_context_ops *ops, const cpa_form *form, void *from, int64_t rows, cpa_partial to,
                            cpa_stream *stream);

#endif
