/* The passes in which the keys of a batch go through the segments of a ring: which items, which of their keys, and which
 * blocks come to a segment. Pure, but for memory that grows. */
#ifndef CPA_OPS_RING_PASSES_H
#define CPA_OPS_RING_PASSES_H

#include "kernels/key_source.h"
#include "src/ops/kv_ring.h"

/* One pass: some items of the list, their tables, which name blocks of the segment, and the runs that fill it. A cut one
 * has an item's rows over a part of its keys, as two items: the rows that see some of these under a causal mask, and,
 * if there are any, those that see none, which few masks and no other pass than the first and the last have to do with. */
typedef struct cpa_ring_pass {
    int64_t first_item, n_items, first_entry, n_entries, first_run, n_runs;
    int64_t given; /* number in the batch of the first item */
    int is_cut;
    int ends;     /* of a cut one, not 0: these are the last */
    int is_fresh; /* not 0: some key of it is among those of the step that attends */
} cpa_ring_pass;

typedef struct cpa_ring_passes {
    cpa_ring_pass *list;
    int64_t n, capacity;
    cpa_attend_item *items; /* of all passes */
    int64_t n_items, items_capacity;
    int32_t *tables; /* of all passes, each counted from its first entry */
    int64_t n_entries, tables_capacity;
    cpa_ring_run *runs;
    int64_t n_runs, runs_capacity;
    int64_t most_state_rows; /* of an item that has several passes; 0: none has */
    /* Scratch. */
    cpa_key_item *keys;
    cpa_key_pass *cut;
    int32_t *blocks;
    int64_t keys_capacity, cut_capacity, blocks_capacity;
} cpa_ring_passes;

/* Cuts the items of a checked batch, whose tables are on the host, into passes. Keys at positions below `settled` have
 * been in the cache since before the step. */
cpa_status cpa_ring_passes_cut(cpa_ring_passes *passes, const cpa_kv_ring *ring, const cpa_attend_batch *batch,
                               int64_t settled, cpa_error *err);
void cpa_ring_passes_free(cpa_ring_passes *passes);

#endif
