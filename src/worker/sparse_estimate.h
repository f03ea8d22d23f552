/* The estimate of XAttention in a layer of a step (sparse_step.h): which blocks of keys a chunk's rows attend. */
#ifndef CPA_SPARSE_ESTIMATE_H
#define CPA_SPARSE_ESTIMATE_H

#include "src/worker/sparse_step.h"

/* Enqueues the choice of a chunk: its bits, and how many blocks each block row keeps. Every rank asks for the same
 * chunks in the same order. A failure is the stream's. */
cpa_status cpa_sparse_select_chunk(cpa_worker *worker, const cpa_sparse_chunk *c, int32_t layer, const cpa_kv_view *kv);

#endif
