/* A step of prompts that attend by blocks (worker_sparse.h): which chunks take part, what each rank has of them, and
 * the memory where their queries, statistics, sums and bits lie. */
#ifndef CPA_SPARSE_STEP_H
#define CPA_SPARSE_STEP_H

#include <cpattn/xattn.h>

#include "src/worker/worker_sparse.h"

/* Tokens of a block. */
enum { CPA_SPARSE_BLOCK = CPA_XATTN_MOST_BLOCK };
/* Keys whose groups lie packed at once. */
#define CPA_SPARSE_KEYS_AT_ONCE INT64_C(32768)

/* The rows of a chunk on a rank, from its first whole block on: of the tokens that the rank holds. */
typedef struct cpa_sparse_part {
    int64_t first, tokens; /* local index of the first, a multiple of a block, and how many */
    int64_t groups, q_blocks;
    int64_t group;       /* groups of the parts before, times heads */
    int64_t block;       /* block rows of the parts before, times heads */
    int64_t word, count; /* where its bits, and the counts of a layer, begin */
} cpa_sparse_part;

/* A chunk that takes part. */
typedef struct cpa_sparse_chunk {
    int32_t seq;
    cpa_placement placement;
    int64_t row;                 /* of worker->q, of the first of own rows */
    int64_t keys, k_blocks;      /* of the sequence, up to the end of the chunk */
    int64_t own_keys, most_keys; /* of this rank, and of the rank with the most */
    int64_t groups, q_blocks;    /* of all parts, times heads */
    int64_t part;                /* the first of its parts, one a rank */
} cpa_sparse_chunk;

typedef struct cpa_sparse_buffer {
    void *memory;
    int64_t bytes;
} cpa_sparse_buffer;

/* On the device. Of statistics the maxima of all parts lie before the sums. STATS and SUMS are those over own keys,
 * ALL_... those of each rank, which a rank alone has not. */
enum {
    CPA_SPARSE_PACKED_OWN,
    CPA_SPARSE_PACKED_Q,
    CPA_SPARSE_PACKED_K,
    CPA_SPARSE_STATS,
    CPA_SPARSE_ALL_STATS,
    CPA_SPARSE_MERGED,
    CPA_SPARSE_SUMS,
    CPA_SPARSE_ALL_SUMS,
    CPA_SPARSE_BITS,
    CPA_SPARSE_ROW_WORD,
    CPA_SPARSE_COUNTS,
    CPA_SPARSE_BUFFERS
};

struct cpa_worker_sparse {
    cpa_xattn_shape shape;
    cpa_sparse_chunk *chunks;
    cpa_sparse_part *parts;
    int64_t n_chunks, cap_chunks, cap_parts;
    int64_t rows, words, head_words, layer_counts; /* of the step; of a block row, of a head; counts of a layer */
    int64_t seen;                                  /* blocks that the block rows of the step see, in a layer */
    int32_t layers;                                /* of the step that have selected so far */
    int64_t k_blocks;
    cpa_sparse_buffer buffers[CPA_SPARSE_BUFFERS];
    int64_t *row_word; /* page-locked, [cap_rows] */
    int32_t *counts;   /* page-locked, [layers, layer_counts] */
    int64_t cap_rows, cap_counts;
    cpa_key_blocks blocks;
    cpa_worker_sparse_stats totals;
};

static inline int32_t cpa_sparse_ranks(const cpa_worker *worker) {
    return worker->options.map.cp_size;
}
/* So many floats as are whole vectors of 16 bytes, of which messages are. */
static inline int64_t cpa_sparse_in_vectors(int64_t floats) {
    return (floats + 3) / 4 * 4;
}

/* Prompts of fewer keys than stride blocks attend all, as do sequences that lie on one rank of several, which are
 * short, and what of a chunk is no whole block. */
int cpa_sparse_takes_chunk(const cpa_worker *worker, const cpa_plan_chunk *chunk);
/* The tokens of a chunk's sequence that a rank has. */
cpa_token_set cpa_sparse_chunk_set(const cpa_worker *worker, cpa_placement placement, int32_t rank);

/* The chunks of the step, and their parts; then room for them on the device, and for the rows' words on the host. */
cpa_status cpa_sparse_list_chunks(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
cpa_status cpa_sparse_make_room(cpa_worker *worker, cpa_error *err);
/* The words of all rows of the step, chunk after chunk. */
void cpa_sparse_list_words(cpa_worker *worker, const cpa_step_plan *plan);

#endif
