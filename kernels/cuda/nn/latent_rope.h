/* What latent_expand.c and its kernel share. */
#ifndef CPA_CUDA_LATENT_ROPE_H
#define CPA_CUDA_LATENT_ROPE_H

#include <cpattn/latent.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueues copies of the rotated part of each row to the keys of all heads. At most INT32_MAX tokens; the device is
 * selected. */
cpa_status cpa_cuda_latent_rope(const cpa_latent_expand_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
