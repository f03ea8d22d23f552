/* What ranks exchange whose products are sliced. */
#ifndef CPA_TENSOR_SLICES_H
#define CPA_TENSOR_SLICES_H

#include <cpattn/model.h>

/* Sums and gathers over the ranks of a context, in the order of its layers; valid as long as it is. The first step of a
 * shape is not captured: memory grows there. Steps of replicated rows have another shape once it has grown. */
cpa_slices cpa_context_slices(cpa_context *c);

#endif
