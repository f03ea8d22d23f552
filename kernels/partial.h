/* Partial states with the strides that their zeros stand for. */
#ifndef CPA_KERNELS_PARTIAL_H
#define CPA_KERNELS_PARTIAL_H

#include <cpattn/types.h>

/* A partial state whose zero strides are replaced by those of contiguous rows. */
static inline cpa_partial cpa_partial_resolve(cpa_partial state, int32_t heads, int32_t v_dim) {
    if (!state.o_row_stride) state.o_row_stride = (int64_t)heads * v_dim;
    if (!state.lse_row_stride) state.lse_row_stride = heads;
    return state;
}

#endif
