/* What the files of index_logits share: the work of a launch, and its kernels. C and CUDA C++. */
#ifndef CPA_CUDA_INDEX_LOGITS_H
#define CPA_CUDA_INDEX_LOGITS_H

#include "kernels/cuda/device/cuda.h"
#include "kernels/indexer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A CTA takes up to 1, 2, 4 or 8 rows of one item. */
enum { CPA_CUDA_INDEX_TILINGS = 4, CPA_CUDA_INDEX_MOST_ROWS = 1 << (CPA_CUDA_INDEX_TILINGS - 1) };

typedef struct cpa_cuda_index_work {
    cpa_index_items items; /* on the device */
    const int32_t *starts; /* [items + 1], device: tiles of `rows` rows in front of each item */
    int32_t first_item, end_item, first_tile;
    int32_t tiles, rows; /* of the items [first_item, end_item) */
    int32_t split;       /* Hopper: the warpgroups of a CTA share its rows and take keys in turn */
    const int32_t *tables;
    int32_t heads, dim;
    cpa_dtype dtype;
    const char *q;
    int64_t q_row_stride; /* bytes */
    const float *weights; /* NULL: all are 1 */
    int64_t weight_row_stride;
    cpa_index_keys keys;
    int32_t block_shift, unit_shift;
    int32_t most_keys; /* of an item of the launch */
    int32_t chunk;     /* keys of a CTA, which a kernel's launch decides */
    float *logits;
    int64_t row_stride, width;
} cpa_cuda_index_work;

/* Any form; without tensor cores. */
cpa_status cpa_cuda_index_logits_simple(const cpa_cuda_index_work *work, cpa_stream *stream);
/* Widths of 64 and 128, aligned to vectors of 16 bytes. */
cpa_status cpa_cuda_index_logits_tiles(const cpa_cuda_index_work *work, cpa_stream *stream);
/* Widths of 32, 64 and 128, aligned alike, on compute capability 9.0. columns: 64 or 128, those of products, which hold
 * the heads of `rows` rows, or with `split` 0 of half of them. */
cpa_status cpa_cuda_index_logits_hopper(const cpa_cuda_index_work *work, int32_t columns, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
