/* Cascade attention: items of a batch whose leading table entries are equal attend the keys behind these together, and
 * join the result with that of their own keys (Juravsky et al., Hydragen, arXiv:2402.05099; Yao et al., DeFT,
 * arXiv:2404.00242; Ye et al., FlashInfer, arXiv:2501.01005). What is equal is a tree: here it is found. */
#ifndef CPA_KERNELS_CASCADE_H
#define CPA_KERNELS_CASCADE_H

#include <cpattn/ops.h>

#include "kernels/block_tables.h"

/* Keys [k_begin, k_end) of its items, counted from their k_first, which their tables place alike. Every row of theirs
 * sees these keys unless a window hides them. */
typedef struct cpa_cascade_node {
    int64_t parent; /* the node with all items of this one, whose keys end at k_begin; -1: this one begins at key 0 */
    int64_t k_begin, k_end;
    int64_t first, count; /* the node's items in `items`; at least two */
} cpa_cascade_node;

typedef struct cpa_cascade_item {
    int64_t index;          /* index of the item in the batch */
    const int32_t *entries; /* the item's block table */
    int64_t row;            /* row of `entries` among tables that stay; -1: they are of none */
    int64_t units;          /* leading units of keys that all rows of the item see */
    int64_t common, alike;  /* scratch: in units and in entries */
    uint64_t key;           /* scratch */
} cpa_cascade_item;

/* A token of a node: its item, its number there, and its position in the sequence. */
typedef struct cpa_cascade_row {
    int64_t item, token, position;
} cpa_cascade_row;

/* The tree of a batch. It keeps its memory from one batch to the next; all zero at first. */
typedef struct cpa_cascade {
    cpa_cascade_node *nodes; /* parents before children */
    int64_t n_nodes, nodes_capacity;
    cpa_cascade_item *items; /* items that may share keys, so that the items of a node stand side by side */
    int64_t n_items, items_capacity;
    cpa_cascade_row *rows; /* what cpa_cascade_list_rows has listed */
    int64_t rows_capacity;
    cpa_cascade_item *sorted; /* scratch */
    int64_t sorted_capacity;
    int64_t *counts;
    int64_t counts_capacity;
} cpa_cascade;

/* Nodes begin and end at multiples of `unit` keys, itself a multiple of the block. Items of no rows, of more than
 * `most_rows` tokens, or whose k_first is no multiple of the unit share nothing. Reads each table entry that is shared
 * about once; where the block_tables of the batch are a set of tables that stay, those alone that have changed since
 * they were read last. */
cpa_status cpa_cascade_find(cpa_cascade *cascade, const cpa_attend_batch *batch, cpa_table_set tables, int64_t unit,
                            int64_t most_rows, cpa_error *err);
/* Keeps the nodes for which pays(ctx, node) is not 0, asked from parents to children: the keys of a node that is left
 * out become those of its children, and are its items' own where it has none. */
void cpa_cascade_keep(cpa_cascade *cascade, int (*pays)(const void *ctx, const cpa_cascade_node *node),
                      const void *ctx);
/* The tokens of all items of a node, by ascending position, into cascade->rows, until the next call; their number. */
cpa_status cpa_cascade_list_rows(cpa_cascade *cascade, const cpa_attend_batch *batch, const cpa_cascade_node *node,
                                 int64_t *n, cpa_error *err);
/* Keys of all items that are read once less for each item but one of a node. */
int64_t cpa_cascade_keys_saved(const cpa_cascade *cascade);
void cpa_cascade_release(cpa_cascade *cascade);

#endif
