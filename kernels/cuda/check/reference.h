/* What reference.c and its kernels share. */
#ifndef CPA_CUDA_REFERENCE_H
#define CPA_CUDA_REFERENCE_H

#include "kernels/cuda/device/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* scores [q_heads, rows, keys] become probabilities; args->lse is set. */
cpa_status cpa_cuda_reference_softmax(const cpa_reference_attend_args *args, float *scores, cpa_stream *stream);
/* dst = |src|, n elements. */
cpa_status cpa_cuda_reference_magnitude(float *dst, const float *src, int64_t n, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
