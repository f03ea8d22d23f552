/* The table of operators beside attention. The argument structs are those of the public header cpattn/nn.h, checked: no
 * stride is 0 any more, and there is at least one row. CPA_UNSUPPORTED says that there is no kernel for a shape. */
#ifndef CPA_KERNELS_NN_H
#define CPA_KERNELS_NN_H

#include <cpattn/nn.h>

#include "kernels/device.h"

struct cpa_nn_table {
    cpa_status (*rmsnorm)(const cpa_rmsnorm_args *args, cpa_stream *stream);
    cpa_status (*qk_norm_rope)(const cpa_qk_norm_rope_args *args, cpa_stream *stream);
    cpa_status (*swiglu)(const cpa_swiglu_args *args, cpa_stream *stream);
    cpa_status (*embed)(const cpa_embed_args *args, cpa_stream *stream);
    cpa_status (*linear)(const cpa_linear_args *args, cpa_stream *stream);
    /* The random numbers, exponentials and thresholds are those of kernels/draw.h. */
    cpa_status (*sample)(const cpa_sample_args *args, cpa_stream *stream);
    cpa_status (*mark_tokens)(const cpa_mark_tokens_args *args, cpa_stream *stream); /* n_restarts or count may be 0 */
};

#endif
