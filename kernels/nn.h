/* The table of operators beside attention. The argument structs are those of the public header cpattn/nn.h, checked: no
 * stride is 0 any more, and there is at least one row (of mark_tokens: a restart or a token). CPA_UNSUPPORTED says that
 * there is no kernel for a shape. */
#ifndef CPA_KERNELS_NN_H
#define CPA_KERNELS_NN_H

#include <cpattn/nn.h>

#include "kernels/device.h"

/* The operators, for what a back end says of each alike: X(name) with cpa_<name>_args. The random numbers, exponentials
 * and thresholds of sample are those of kernels/draw.h. */
#define CPA_NN_OPERATORS(X) X(rmsnorm) X(qk_norm_rope) X(swiglu) X(embed) X(linear) X(sample) X(mark_tokens)

struct cpa_nn_table {
#define CPA_NN_ENTRY(name) cpa_status (*name)(const cpa_##name##_args *args, cpa_stream *stream);
    CPA_NN_OPERATORS(CPA_NN_ENTRY)
#undef CPA_NN_ENTRY
};

#endif
