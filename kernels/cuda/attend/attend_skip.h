/* The kernels of attend that leave out tiles of keys which cannot matter (skip_tiles of cpa_attend_args). C and CUDA
 * C++. */
#ifndef CPA_CUDA_ATTEND_SKIP_H
#define CPA_CUDA_ATTEND_SKIP_H

#include "kernels/cuda/attend/attend_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cpa_cuda_attend_hopper for heads of more than 96 and up to 128 columns, over blocks that are copied in boxes, without
 * rules of scores. */
cpa_status cpa_cuda_attend_hopper_skip(const cpa_cuda_attend_args *args, const cpa_cuda_hopper_maps *maps,
                                       cpa_cuda_tile_skip skip, int32_t n_pieces, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
