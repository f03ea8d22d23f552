/* What linear.c and its kernels share. */
#ifndef CPA_CUDA_LINEAR_H
#define CPA_CUDA_LINEAR_H

#include "kernels/cuda/device/cuda.h"
#include "kernels/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Up to so many rows of bf16 or fp16 are a kernel's of our own, which can norm a row of up to so many inputs. */
enum { CPA_CUDA_FEW_ROWS = 16, CPA_CUDA_NORMED_INPUTS = 4096 };

/* linear of at most CPA_CUDA_FEW_ROWS rows in bf16 or fp16: linear_fused of kernels/nn.h. */
cpa_status cpa_cuda_linear_few(const cpa_linear_args *args, const cpa_linear_fusion *fusion, cpa_stream *stream);
/* Each row of out, which is fp32, becomes the bias. */
cpa_status cpa_cuda_linear_bias(const cpa_linear_args *args, cpa_stream *stream);

/* So many matrices of one shape, by which the same x is multiplied, each with an out of its own: elements from one to
 * the next. */
typedef struct cpa_cuda_matrices {
    int32_t count;
    int64_t weight_apart, out_apart;
} cpa_cuda_matrices;
/* Their products, by cuBLASLt whatever the number of rows; the first matrix and its out are those of the arguments,
 * which have no bias. The device is selected. */
cpa_status cpa_cuda_linear_many(const cpa_linear_args *args, const cpa_cuda_matrices *matrices, cpa_stream *stream);

/* Frees what the stream's products needed; the stream is idle. */
void cpa_cuda_products_destroy(cpa_cuda_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
