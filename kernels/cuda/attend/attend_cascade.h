/* Cascade attention on a device: which nodes of the tree of equal leading blocks pay, how their keys are cut, and the
 * pieces and rows of them. The rows of a node are packed into tiles of the prefill kernels, whose pieces leave the
 * states of each row in front of those that the row's decode pieces leave; the CTA that comes last there, or over latents
 * a kernel of its own, joins all of them, in the order of the keys. What is chosen is a function of the batch and of the
 * number of multiprocessors alone. */
#ifndef CPA_CUDA_ATTEND_CASCADE_H
#define CPA_CUDA_ATTEND_CASCADE_H

#include "kernels/cascade.h"
#include "kernels/cuda/attend/attend.h"

typedef struct cpa_cuda_cascade_cut {
    int64_t split_keys; /* shared keys of a piece, at most; 0: nothing is shared */
    int64_t pieces;     /* pieces for each KV head */
    int64_t rows;       /* entries of the row list */
} cpa_cuda_cascade_cut;

/* What an item begins with: states of shared keys, and where in the work space they, and those of its own keys behind
 * them, begin; how many both are. */
typedef struct cpa_cuda_cascade_item {
    int32_t states, first_partial, all_states;
} cpa_cuda_cascade_item;

/* Scratch of plan_set; all zero at first. */
struct cpa_cuda_cascade {
    cpa_cascade tree;
    cpa_attend_item *own; /* the items, with their own keys alone */
    int64_t own_capacity;
    cpa_cuda_cascade_item *items;
    int64_t items_capacity;
    int32_t *first_states; /* [nodes] states that the node's rows have from nodes above it */
    int64_t first_states_capacity;
};

/* The row list has an entry for each token; or, where a group has more rows than a tile, for each tile of a token's, as
 * the CTAs of a team of decode have them. Entries of a token, and of a tile. */
static inline int64_t cpa_cuda_token_entries(const cpa_attend_batch *batch, int32_t tile_rows) {
    return cpa_cuda_ceil_div(batch->shape.q_heads / batch->shape.kv_heads, tile_rows);
}
static inline int64_t cpa_cuda_tile_entries(const cpa_attend_batch *batch, int32_t tile_rows) {
    const int64_t group = batch->shape.q_heads / batch->shape.kv_heads;
    return group < tile_rows ? tile_rows / group : 1;
}

/* Tokens whose rows attend a node. */
int64_t cpa_cuda_tokens_of_node(const cpa_cascade *tree, const cpa_attend_batch *batch, const cpa_cascade_node *node);
/* Keeps the nodes of a tree that pay, or all with `always`; none if the whole does not. */
cpa_cuda_cascade_cut cpa_cuda_choose_cascade(cpa_cascade *tree, const cpa_attend_batch *batch, int32_t tile_rows,
                                             int32_t multiprocessors, int always);
/* Finds the tree, chooses, and fills `own` and `items`, as far as these are known before the work space is divided. */
cpa_status cpa_cuda_cascade_plan(cpa_cuda_cascade *cascade, const cpa_attend_batch *batch, cpa_table_set tables,
                                 int32_t tile_rows, int32_t multiprocessors, cpa_cuda_cascade_cut *cut, cpa_error *err);
/* Writes the pieces and the rows of the kept nodes. Items from `first_ready` on have ready queries. */
cpa_status cpa_cuda_cascade_write(cpa_cuda_cascade *cascade, const cpa_attend_batch *batch, int32_t tile_rows,
                                  const cpa_cuda_cascade_cut *cut, int64_t first_ready, cpa_cuda_piece *pieces,
                                  cpa_cuda_listed_row *rows, cpa_error *err);
void cpa_cuda_cascade_destroy(cpa_cuda_cascade *cascade);

#endif
