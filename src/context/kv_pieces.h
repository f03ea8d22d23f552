/* Pieces of shards in the segments that pass-KV sends. */
#ifndef CPA_KV_PIECES_H
#define CPA_KV_PIECES_H

#include "src/context/context_ops.h"

/* A piece of a shard of one chunk in one segment. */
typedef struct cpa_kv_piece {
    int64_t segment;
    int64_t chunk;
    int64_t first, count; /* local tokens */
    int64_t block;        /* first staging block */
} cpa_kv_piece;

typedef struct cpa_kv_pieces {
    cpa_kv_piece *data;
    int64_t count, capacity;
} cpa_kv_pieces;

cpa_status cpa_kv_pieces_add(cpa_kv_pieces *pieces, cpa_context_ops *ops, cpa_kv_piece piece);
void cpa_kv_pieces_destroy(cpa_kv_pieces *pieces);

/* Where the next piece goes. */
typedef struct cpa_kv_cursor {
    int64_t segment, used; /* used: blocks */
} cpa_kv_cursor;

static inline void cpa_kv_cursor_close_segment(cpa_kv_cursor *at) {
    if (at->used > 0) *at = (cpa_kv_cursor){at->segment + 1, 0};
}

/* Blocks that `tokens` tokens take. */
static inline int64_t cpa_kv_blocks(const cpa_context_ops *ops, int64_t tokens) {
    return (tokens + ops->options.block_size - 1) / ops->options.block_size;
}

#endif
