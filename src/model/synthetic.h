/* The synthetic model: peaky queries, keys and values derived from (seed, layer, head, token, position) alone, so that
 * every rank, any N and a later check give the same bits. Over a cache of latents it gives these, and no values. */
#ifndef CPA_SYNTHETIC_H
#define CPA_SYNTHETIC_H

#include <cpattn/engine.h>

#include "src/model/synthetic_expansion.h"

typedef struct cpa_synthetic {
    cpa_device *device;
    cpa_attention_shape shape;
    uint64_t seed;
    int32_t n_forms; /* forms of the rows; 0: all have that of `shape` */
    /* Shape of the queries of each form; those of a form share directions as all heads of its KV heads do. */
    cpa_attention_shape forms[CPA_MOST_ROW_FORMS];
    cpa_synthetic_expansion expansion; /* matrices of the forms that are expanded */
} cpa_synthetic;

/* A model over `synthetic`, which must outlive it. It draws nothing: output tokens have to be given. */
cpa_model cpa_synthetic_model(cpa_synthetic *synthetic);

/* Takes the forms of *model, and makes them those of the engine: matrices that keys are expanded by are the synthetic
 * model's own. cpa_synthetic_free after a failure too; the device is open until then. */
cpa_status cpa_synthetic_take_forms(cpa_synthetic *synthetic, cpa_model_shape *model, cpa_error *err);
void cpa_synthetic_free(cpa_synthetic *synthetic);

/* The token at a position of a request when the caller names none: a mix of the two and the seed (ctx is a uint64_t *).
 */
uint32_t cpa_synthetic_token(void *seed, uint64_t request, int64_t position);

#endif
