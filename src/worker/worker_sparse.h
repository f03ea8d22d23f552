/* Prompts that attend by blocks which XAttention selects (cpattn/xattn.h), layer by layer. A chunk of a prompt takes part
 * from its first whole block on, where the keys are enough; other rows attend all keys, as do layers with a window, whose
 * keys are few.
 *
 * Of several ranks each estimates all queries of a chunk over its own keys: groups of queries, statistics and sums go to
 * all, three exchanges a layer and chunk, and all select the same. */
#ifndef CPA_WORKER_SPARSE_H
#define CPA_WORKER_SPARSE_H

#include "src/worker/worker.h"

typedef struct cpa_worker_sparse cpa_worker_sparse;

/* CPA_UNSUPPORTED, and a line, for what is not estimated: latents, rules that change scores, keys that the model selects.
 * CPA_INVALID for an interleave that cuts blocks. Nothing is made where the options ask for none. */
cpa_status cpa_worker_sparse_create(cpa_worker *worker, cpa_error *err);
void cpa_worker_sparse_destroy(cpa_worker *worker);

/* Whether a chunk of the plan takes part. Pure. */
int cpa_worker_sparse_takes(const cpa_worker *worker, const cpa_step_plan *plan);

/* Lists the chunks of the step that runs next, and makes room for them. */
cpa_status cpa_worker_sparse_begin(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
/* The blocks that the rows of the step attend in a layer, whose queries and keys are there; NULL: all. The selection
 * holds until that of the next layer. */
cpa_status cpa_worker_sparse_select(cpa_worker *worker, int32_t layer, const cpa_kv_view *kv,
                                    const cpa_key_blocks **out, cpa_error *err);
/* Counts what the step, which is done, has kept. */
void cpa_worker_sparse_end(cpa_worker *worker);

/* Of a row of the step that is listed: the word of its bits, -1 where it attends all keys. */
int64_t cpa_worker_sparse_word(const cpa_worker *worker, int64_t row);

/* Blocks that rows of blocks have kept, and of how many, over all layers and heads so far; in each layer, those that the
 * rank has kept whose rows kept most; bytes of the device. Of own keys that lie on the host, the bytes that estimates
 * have read. */
typedef struct cpa_worker_sparse_stats {
    int64_t kept, seen, busiest;
    int64_t bytes;
    int64_t host_bytes;
} cpa_worker_sparse_stats;
cpa_worker_sparse_stats cpa_worker_sparse_totals(const cpa_worker *worker);

#endif
