/* index_q and index_write of rows of 128 elements of bf16, rotated, transformed and in codes, which four lanes make
 * each (index_quad.cuh): which calls are such, and these. */
#ifndef CPA_CUDA_INDEX_QUADS_H
#define CPA_CUDA_INDEX_QUADS_H

#include <cpattn/indexer.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of calls whose strides and scales are filled in; the device is current. */
int cpa_cuda_index_q_by_quads(const cpa_index_q_args *args);
cpa_status cpa_cuda_index_q_quads(const cpa_index_q_args *args, cpa_stream *stream);
int cpa_cuda_index_write_by_quads(const cpa_index_write_args *args);
cpa_status cpa_cuda_index_write_quads(const cpa_index_write_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
