/* The synthetic model: peaky queries, keys and values derived from (seed, layer, head, token, position) alone, so that
 * every rank, any N and a later check give the same bits. */
#ifndef CPA_SYNTHETIC_H
#define CPA_SYNTHETIC_H

#include <cpattn/engine.h>

typedef struct cpa_synthetic {
    cpa_device *device;
    cpa_attention_shape shape;
    uint64_t seed;
} cpa_synthetic;

/* A model over `synthetic`, which must outlive it. It draws nothing: output tokens have to be given. */
cpa_model cpa_synthetic_model(cpa_synthetic *synthetic);

/* The token at a position of a request when the caller names none: a mix of the two and the seed (ctx is a uint64_t *).
 */
uint32_t cpa_synthetic_token(void *seed, uint64_t request, int64_t position);

#endif
