/* Which keys pass-KV need not send: those of blocks that no row of another rank attends, in a layer whose selection has
 * blocks (cpa_key_blocks). The bits of a selection are on every rank those of all rows of the step, so that sender and
 * receiver find the same without a message. They lie on the device: finding waits for it.
 *
 * Of N ranks one gets what any of the others needs: so one packed copy serves them all. */
#ifndef CPA_KV_WANTED_H
#define CPA_KV_WANTED_H

#include "src/context/context_ops.h"
#include "src/context/planned_step.h"

typedef struct cpa_kv_wanted {
    cpa_context_ops *ops;
    const cpa_planned_step *step;
    int listed; /* not 0: `sets` are those of the planned step */
    int64_t rows;
    int32_t *sets; /* [rows of the step]: number of the chunk times ranks plus the owner of the row; -1: no pass-KV */
    int64_t sets_capacity;
    cpa_context_buffer device_sets, device_bits;
    uint32_t *by_rank; /* page-locked [chunks, ranks, words]: what the rows of a rank attend */
    int64_t by_rank_bytes;
    uint32_t *bits; /* [chunks, ranks, words]: what the rows of all ranks but one attend */
    int64_t bits_capacity;
    int64_t words;
    int32_t width, block; /* of the selection of the layer at hand */
} cpa_kv_wanted;

void cpa_kv_wanted_create(cpa_kv_wanted *wanted, cpa_context_ops *ops, const cpa_planned_step *step);
void cpa_kv_wanted_destroy(cpa_kv_wanted *wanted);
/* Another step has been planned. */
static inline void cpa_kv_wanted_forget(cpa_kv_wanted *wanted) {
    wanted->listed = 0;
}
/* Whether keys can be left out under a selection, NULL: none: blocks of it are whole blocks of the cache that lie on one
 * rank, and no key of those that nobody attends is read. */
int cpa_kv_wanted_by(const cpa_context_ops *ops, const cpa_key_selection *selection);
/* What a layer wants whose selection is such. Waits for the stream. */
cpa_status cpa_kv_wanted_find(cpa_kv_wanted *wanted, const cpa_key_selection *selection, cpa_stream *stream);
/* Whether a rank other than `owner` has rows of the chunk that attend the key of that index, which the owner has. */
int cpa_kv_wanted_has(const cpa_kv_wanted *wanted, int64_t chunk, int32_t owner, int64_t key);

#endif
