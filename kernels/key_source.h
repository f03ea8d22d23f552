/* Keys that kernels of attend do not take as they lie are prepared in a workspace of fixed size, a pass after the other:
 * what a pass holds is prepared, attended, and makes room for the next. Whole items share a pass as long as they fit.
 * The keys of one that is longer go through passes of its own, each resumed from the states of its rows after the one
 * before. Those states lie at the end of the workspace, and where they are too many the rows take turns as well.
 *
 * Pure: which items, rows and keys are together. */
#ifndef CPA_KEY_SOURCE_H
#define CPA_KEY_SOURCE_H

#include <cpattn/ops.h>

/* Memory of the device that several plans prepare keys in; their attends are ordered on one stream. */
typedef struct cpa_key_workspace {
    char *memory;
    int64_t bytes;
} cpa_key_workspace;

/* Most that a workspace is given. Each pass over it reads and writes the states of its rows once more: 8K rows of 32
 * heads of 128, over as many keys of 8 heads as are in 1 GiB, lose less than 1% by that. */
#define CPA_KEY_WORKSPACE_BYTES ((int64_t)1 << 30)

/* What a workspace has to hold. */
typedef struct cpa_key_room {
    int64_t bytes;
    int64_t token_bytes; /* of a prepared key and value, all heads */
    int64_t row_bytes;   /* of the state of a row: O and LSE of all heads; 0: states lie elsewhere */
    int64_t least_rows;  /* the rows of an item are cut into parts of at least half as many */
    int64_t unit;        /* tokens: an item takes whole units */
    int64_t step;        /* tokens: the keys of an item are cut at multiples of it, which are whole units */
} cpa_key_room;

/* The bytes that a room has at least, so that an item may be cut. */
int64_t cpa_key_room_least(const cpa_key_room *room);

typedef struct cpa_key_item {
    int64_t rows, keys;
} cpa_key_item;

/* Whole items [item, item + n_items); or of one that is cut, the rows [row, row + rows) over the keys
 * [key, key + keys). The passes of the same rows follow each other in the order of their keys, all of them of as many
 * keys, but for the last. */
typedef struct cpa_key_pass {
    int64_t item, n_items;
    int is_cut;
    int64_t row, rows, key, keys;
} cpa_key_pass;

/* The passes of some items, in their order; `passes` NULL: how many there are. 0 if the room has less than its least,
 * or there are no items. */
int64_t cpa_key_passes(const cpa_key_room *room, const cpa_key_item *items, int64_t n_items, cpa_key_pass *passes);

/* Whether some row of an item sees some of its keys under a mask. With bits of a custom mask, which may show keys behind
 * a query, whatever lies behind counts as seen. */
int cpa_key_item_sees(cpa_owner_map map, cpa_mask mask, int has_bits, const cpa_attend_item *item);

#endif
