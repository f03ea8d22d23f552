/* What the products with experts' weights share. C and CUDA C++. */
#ifndef CPA_CUDA_EXPERT_LINEAR_H
#define CPA_CUDA_EXPERT_LINEAR_H

#include "kernels/cuda/device/cuda.h"
#include "kernels/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CPA_CUDA_SCALE_BLOCK = 128 }; /* outputs, and inputs, that share a scale of FP8 weights */

/* A product, and what linear has beside: a bias of the outputs, or NULL. offsets NULL: there is one expert, which has
 * all places. */
typedef struct cpa_cuda_expert_product {
    cpa_expert_linear_args args;
    const void *bias; /* [outputs] in dtype */
} cpa_cuda_expert_product;

/* Whether rows of x and weights are vectors of 16 bytes at multiples of 16. */
static inline int cpa_cuda_expert_in_vectors(const cpa_expert_linear_args *a) {
    const int64_t vector = 16, bytes = cpa_dtype_bytes(a->dtype), weight_bytes = a->weight_scale ? 1 : bytes;
    const int64_t places = (int64_t)(uintptr_t)a->x | (int64_t)(uintptr_t)a->weight | a->x_stride * bytes |
                           a->inputs * bytes | a->weight_stride * weight_bytes | a->expert_stride * weight_bytes |
                           a->inputs * weight_bytes;
    return places % vector == 0;
}

/* By whichever kernel can. */
cpa_status cpa_cuda_expert_multiply(const cpa_cuda_expert_product *product, cpa_stream *stream);
/* 16-bit elements of x, and vectors of 16 bytes: by tensor cores of compute capability 8.0. */
cpa_status cpa_cuda_expert_multiply_tiles(const cpa_cuda_expert_product *product, cpa_stream *stream);
/* The same of few places, of weights in x's dtype, without a bias. */
int cpa_cuda_expert_is_few(const cpa_expert_linear_args *args);
cpa_status cpa_cuda_expert_multiply_few(const cpa_expert_linear_args *args, const cpa_expert_fusion *fusion,
                                        cpa_stream *stream);
/* The same on devices of CPA_CUDA_HOPPER, for experts with many places: weights of x's dtype; codes, and x in bf16. */
cpa_status cpa_cuda_expert_multiply_hopper(const cpa_cuda_expert_product *product, cpa_stream *stream);
cpa_status cpa_cuda_expert_multiply_hopper_codes(const cpa_cuda_expert_product *product, cpa_stream *stream);
/* Any widths, dtypes and strides, without tensor cores. */
cpa_status cpa_cuda_expert_multiply_simple(const cpa_cuda_expert_product *product, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
