/* attend over keys that blocks select (cpattn/selection.h), by the kernel of attend_blocks.cu. C and CUDA C++. */
#ifndef CPA_CUDA_ATTEND_BLOCKS_H
#define CPA_CUDA_ATTEND_BLOCKS_H

#include "kernels/cuda/attend/attend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a tile, neighbours of one query head. */
enum { CPA_CUDA_BLOCKS_ROWS = 128 };

/* Neighbouring items of the arguments' and their rows; or a part of one, a cut. */
typedef struct cpa_cuda_block_items {
    int64_t first, n, rows;
    int32_t is_cut;
    cpa_cuda_item cut;
    /* Items of so many rows and fewer are left out, all of them or those alone of which no row selects blocks. */
    int32_t few, leaves_all;
} cpa_cuda_block_items;

/* The arguments are those of a plan. The maps have boxes of cpa_cuda_blocks_box tokens, and of 64 rows of a query head.
 * `tickets`: a word that is 0, and is again when the kernel is done. */
cpa_status cpa_cuda_attend_blocks(const cpa_cuda_attend_args *args, const cpa_cuda_persistent_maps *maps,
                                  const cpa_key_blocks *blocks, const cpa_cuda_block_items *items, uint32_t *tickets,
                                  cpa_stream *stream);
/* Rows of the items of so many rows and fewer: all of them, or those that select blocks. */
typedef struct cpa_cuda_few_by_blocks {
    int32_t rows, all;
} cpa_cuda_few_by_blocks;
/* They are attended as the plain kernel attends them (attend_simple.cu). */
cpa_status cpa_cuda_attend_few_by_blocks(const cpa_cuda_attend_args *args, const cpa_key_blocks *blocks,
                                         cpa_cuda_few_by_blocks few, cpa_stream *stream);
/* Keys of a tile of such heads, and tokens in a box of the maps. */
int32_t cpa_cuda_blocks_keys(int32_t k_dim, int32_t v_dim);
int32_t cpa_cuda_blocks_box(int32_t k_dim, int32_t v_dim, int32_t block_size);

#ifdef __cplusplus
}
#endif
#endif
