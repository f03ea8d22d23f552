/* Kernels that attend keys which lists name: by their slots in a cache (sparse_attend), or by their indices in the
 * sequences of a plan's items (a selection of attend). C and CUDA C++. */
#ifndef CPA_CUDA_SPARSE_H
#define CPA_CUDA_SPARSE_H

#include <cpattn/sparse.h>

#include "kernels/cuda/attend/attend_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The lists of a scope: as in cpattn/sparse.h, or in cpattn/selection.h where slots is 0. */
typedef struct cpa_cuda_lists {
    const int32_t *entries, *counts, *row_map;
    int64_t row_stride, head_stride;
    int64_t slots; /* of the pool; 0: entries are indices in sequences */
    int32_t width, unit;
} cpa_cuda_lists;

typedef struct cpa_cuda_sparse_args {
    /* Of each scope: its cache, and what is alike in all. Where entries are indices there are the items of a plan. */
    cpa_cuda_attend_args a[CPA_SPARSE_MOST_SCOPES];
    cpa_cuda_lists lists[CPA_SPARSE_MOST_SCOPES];
    int32_t n_scopes;
    int64_t rows;
    float *max_logits; /* [rows, q_heads]; NULL: not wanted */
} cpa_cuda_sparse_args;

/* Latents whose values are up to 512 of 576 columns, in q_dtype, CPA_FP8_T128, CPA_FP8_E4M3 of one scale, or, by the
 * second, CPA_FP8_T64; scopes are alike in that. Compute capability 9.0. */
cpa_status cpa_cuda_sparse_latent(const cpa_cuda_sparse_args *args, cpa_stream *stream);
cpa_status cpa_cuda_sparse_entries(const cpa_cuda_sparse_args *args, cpa_stream *stream);
/* Ordinary heads of up to 256 columns, multiples of 16, in q_dtype, groups of up to 16; one scope. Compute capability 8.0;
 * whether the device has the shared memory for that. */
cpa_status cpa_cuda_sparse_heads(const cpa_cuda_sparse_args *args, cpa_stream *stream);
int cpa_cuda_sparse_heads_fit(const cpa_attention_shape *shape, cpa_stream *stream);
cpa_status cpa_cuda_sparse_simple(const cpa_cuda_sparse_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
