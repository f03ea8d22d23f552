/* The generator behind synthesize, on the host whatever the device: what the host back end runs, and what the sampled
 * check compares the cache with. */
#ifndef CPA_KERNELS_SYNTHESIZE_H
#define CPA_KERNELS_SYNTHESIZE_H

#include "kernels/operators.h"

/* Rows [begin, end) of one head of the tensor, a row of args->dim elements at every row_stride elements of `out`; the
 * tokens and positions of `args` are on the host, its own `out` is not looked at. */
void cpa_synthesize_rows(const cpa_synth_args *args, int32_t head, int64_t begin, int64_t end, void *out,
                         int64_t row_stride);

#endif
