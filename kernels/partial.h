/* Partial states and rows of attend with the strides that their zeros stand for. */
#ifndef CPA_KERNELS_PARTIAL_H
#define CPA_KERNELS_PARTIAL_H

#include <cpattn/ops.h>

/* A partial state whose zero strides are replaced by those of contiguous rows. */
static inline cpa_partial cpa_partial_resolve(cpa_partial state, int32_t heads, int32_t v_dim) {
    if (!state.o_row_stride) state.o_row_stride = (int64_t)heads * v_dim;
    if (!state.lse_row_stride) state.lse_row_stride = heads;
    return state;
}

/* The same of all strides of an attend but those of its cache. */
static inline void cpa_attend_resolve_rows(cpa_attend_args *args, const cpa_attention_shape *shape) {
    if (!args->q_row_stride) args->q_row_stride = (int64_t)shape->q_heads * shape->k_dim;
    if (!args->q_head_stride) args->q_head_stride = shape->k_dim;
    if (!args->out_row_stride) args->out_row_stride = (int64_t)shape->q_heads * shape->v_dim;
    if (!args->out_head_stride) args->out_head_stride = shape->v_dim;
    if (args->lse_head_stride)
        args->state.lse_row_stride = 1;
    else
        args->lse_head_stride = 1;
    args->state = cpa_partial_resolve(args->state, shape->q_heads, shape->v_dim);
}

#endif
