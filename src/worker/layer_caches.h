/* The caches of a worker's groups of layers, and which of their blocks a layer has. */
#ifndef CPA_LAYER_CACHES_H
#define CPA_LAYER_CACHES_H

#include "src/worker/worker.h"

/* A cache for each group, which has its layers in their order, and the places of the layers. cpa_layer_caches_destroy
 * cleans up after a failure too. */
cpa_status cpa_layer_caches_create(cpa_worker *worker, cpa_error *err);
void cpa_layer_caches_destroy(cpa_worker *worker);

/* The blocks of a layer on this rank. */
cpa_kv_view cpa_worker_kv(const cpa_worker *worker, int32_t layer);
/* Its keys and values of first tokens that are precise; all zero where none are. */
cpa_kv_view cpa_worker_precise(const cpa_worker *worker, int32_t layer);
/* The keys of its indexer there; all zero without any. */
cpa_kv_view cpa_worker_index(const cpa_worker *worker, int32_t layer);

#endif
