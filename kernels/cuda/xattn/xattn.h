/* What the kernels of XAttention (cpattn/xattn.h) are told. C and CUDA C++. */
#ifndef CPA_CUDA_XATTN_H
#define CPA_CUDA_XATTN_H

#include "kernels/cuda/device/cuda.h"
#include "kernels/xattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is made of the scores of a chunk of queries and one of keys. */
typedef enum cpa_cuda_xattn_kind {
    CPA_CUDA_XATTN_STATS,
    CPA_CUDA_XATTN_SUMS,
    CPA_CUDA_XATTN_SCORES
} cpa_cuda_xattn_kind;

typedef struct cpa_cuda_xattn_pass {
    cpa_cuda_xattn_kind kind;
    cpa_xattn_shape shape;
    cpa_xattn_chunks chunks;
    int32_t of_block, group; /* groups of a block; query heads of a KV head */
    int32_t q_groups, k_groups, q_blocks, k_blocks;
    int32_t width;    /* elements of a group */
    float *max, *sum; /* SUMS reads them */
    int32_t resume;
    float *out; /* sums, or scores */
    int64_t row_stride;
} cpa_cuda_xattn_pass;

/* On tensor cores of compute capability 9.0; whether they take it; and plainly, anywhere. There are groups of queries,
 * and of keys unless statistics are asked for. */
cpa_status cpa_cuda_xattn_hopper(const cpa_cuda_xattn_pass *pass, cpa_stream *stream);
int cpa_cuda_xattn_hopper_takes(const cpa_cuda_xattn_pass *pass, const cpa_stream *stream);
cpa_status cpa_cuda_xattn_simple(const cpa_cuda_xattn_pass *pass, cpa_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
