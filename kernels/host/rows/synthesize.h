/* synthesize for one head, on the host, whatever the device: what the sampled check compares the cache with. */
#ifndef CPA_HOST_SYNTHESIZE_H
#define CPA_HOST_SYNTHESIZE_H

#include "kernels/operators.h"

/* Rows of one head of the tensor, [rows, dim]; the pointers of `args` are on the host. */
void cpa_synthesize_head(const cpa_synth_args *args, int32_t head);

#endif
