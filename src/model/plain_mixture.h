/* The mixtures of experts of a plain forward: for each token the experts that it chooses, one after the other. */
#ifndef CPA_MODEL_PLAIN_MIXTURE_H
#define CPA_MODEL_PLAIN_MIXTURE_H

#include "src/model/plain_rows.h"

/* f->x = what the experts of the layer give for it. */
cpa_status cpa_plain_mixture(cpa_plain *f, int32_t layer);

#endif
