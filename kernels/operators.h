/* The table of operators: enqueued on a stream, they allocate nothing and do not synchronise.
 *
 * The argument structs, their shapes, dtypes, units and aliasing rules are those of the public header cpattn/ops.h; those
 * that are not public are here. CPA_UNSUPPORTED says that there is no kernel for a shape. */
#ifndef CPA_KERNELS_OPERATORS_H
#define CPA_KERNELS_OPERATORS_H

#include <cpattn/indexer.h>
#include <cpattn/latent.h>
#include <cpattn/ops.h>
#include <cpattn/sparse.h>

#include "base/stored.h"
#include "kernels/attend_plan.h"
#include "kernels/device.h"
#include "kernels/key_source.h"
#include "kernels/kv_view.h"
#include "kernels/partial.h"

/* synthesize: rows of queries, keys or values from a counter-based generator, the same bits on every back end, rank and
 * N. The formula is documented in kernels/synthesize.c. */
typedef enum cpa_synth_tensor { CPA_SYNTH_Q = 0, CPA_SYNTH_K, CPA_SYNTH_V } cpa_synth_tensor;
typedef struct cpa_synth_args {
    cpa_synth_tensor tensor;
    uint64_t seed;
    int32_t layer;
    int32_t heads;    /* heads of this tensor */
    int32_t kv_heads; /* query head h follows the directions of KV head h / (heads / kv_heads) */
    int32_t dim;
    int64_t rows;
    const uint32_t *tokens;   /* [rows], device */
    const int64_t *positions; /* [rows], device */
    cpa_dtype dtype;
    void *out; /* [rows, heads, dim], contiguous */
} cpa_synth_args;

/* The arguments for one tensor of an attention; seed, layer and rows are left to the caller. */
static inline cpa_synth_args cpa_synth_of(const cpa_attention_shape *shape, cpa_synth_tensor tensor) {
    cpa_synth_args args = {CPA_SYNTH_Q, 0, 0, 0, 0, 0, 0, NULL, NULL, CPA_F32, NULL};
    args.tensor = tensor;
    args.heads = tensor == CPA_SYNTH_Q ? shape->q_heads : shape->kv_heads;
    args.kv_heads = shape->kv_heads;
    args.dim = tensor == CPA_SYNTH_V ? shape->v_dim : shape->k_dim;
    args.dtype = shape->dtype;
    return args;
}

/* hash_rows: adds to *sum, modulo 2^64, a hash of each listed row of src, of one layer or of several, salted so that
 * equal rows of different places differ. The same value on every back end: see kernels/host/rows/hash_rows.c. */
typedef struct cpa_hash_rows_args {
    int64_t rows;
    const void *src;
    int32_t layers;           /* layers of which rows are hashed; at least 1 */
    int64_t layer_bytes;      /* bytes in src from a row of a layer to that of the next */
    int64_t layer_marks;      /* marks in `nonfinite` from a layer to the next */
    int64_t row_bytes;        /* a multiple of 2 */
    const int32_t *row_index; /* [rows], device: rows of src; -1: none */
    const uint64_t *salts;    /* [rows], device */
    uint64_t salt;            /* salt of all rows of the first layer; each further layer has one more */
    uint64_t *sum;            /* device */
    uint64_t *sums;           /* NULL; or [rows], device: the hash of each listed row is also added to its entry */
    /* NULL; or [rows of src], page-locked or the device's: becomes 1 where a listed row of this dtype has a NaN or an
     * infinity, and is left as it was elsewhere. */
    uint8_t *nonfinite;
    cpa_dtype dtype;
} cpa_hash_rows_args;

/* project_states: partial states times a matrix of their head: O summed over v_dim in fp32, on the host in ascending
 * order, on devices in one that v_dim decides; the LSE keeps its bits. O of an empty state is not read, and becomes 0. */
typedef struct cpa_project_states_args {
    int64_t rows;
    int32_t heads, v_dim, out_dim;
    cpa_partial from;   /* [rows, heads, v_dim]; strides are not 0 */
    const void *matrix; /* [heads, v_dim, out_dim], dtype */
    cpa_dtype dtype;
    cpa_partial to; /* [rows, heads, out_dim]; strides are not 0, and its memory is not that of `from` */
} cpa_project_states_args;

/* copy_blocks: whole blocks as bytes, whatever their sections: in each of `layers` layers, block pairs[i][0] of src to
 * block pairs[i][1] of dst. Either may be page-locked host memory. No block is both read and written, or written twice.
 * Places, strides and lengths are in bytes, and multiples of CPA_SECTION_ALIGNMENT (kernels/block_layout.h). */
typedef struct cpa_block_place {
    char *first;          /* block 0 of the first layer */
    int64_t stride;       /* from block to block */
    int64_t layer_stride; /* from layer to layer */
} cpa_block_place;
typedef struct cpa_copy_blocks_args {
    cpa_block_place src, dst;
    int64_t bytes; /* bytes of a block in one layer */
    int32_t layers;
    const int64_t (*pairs)[2]; /* [n_pairs], host; may go when the call returns */
    int64_t n_pairs;
} cpa_copy_blocks_args;

/* What ranks have computed parts of, at most CPA_MERGE_MAX_STATES. join_columns: row i of out is row i of each part,
 * one behind the other, to the bit. sum_parts: out = ((part 0 + part 1) + ...) + bias, in fp32, rounded once. There are
 * rows; `parts` are arrays on the host, what they point to and the rest is on the device, contiguous. */
typedef struct cpa_join_columns_args {
    int64_t rows;
    int32_t n_parts;
    const void *const *parts; /* [n_parts], host: each [rows, begins[i + 1] - begins[i] bytes], device */
    /* [n_parts + 1], host: byte in a row of out where each part begins, and where the last ends. */
    const int64_t *begins;
    void *out;
} cpa_join_columns_args;
typedef struct cpa_sum_parts_args {
    int64_t rows;
    int32_t width;
    int32_t n_parts;
    const float *const *parts; /* [n_parts] of [rows, width] */
    const void *bias;          /* [width], dtype; or NULL */
    cpa_dtype dtype;
    void *out; /* [rows, width], dtype */
} cpa_sum_parts_args;

/* take_tokens: the tokens that have been drawn on the device take their places among those that came from the host. */
typedef struct cpa_take_tokens_args {
    int64_t rows;
    const int32_t *sources; /* [rows], device: which id a row takes; -1: none, its token stays */
    const uint32_t *ids;    /* device: id i lies at i * id_stride */
    int32_t id_stride;
    uint32_t *tokens; /* [rows], device */
} cpa_take_tokens_args;

/* block_union: which blocks of keys (cpa_key_blocks of cpattn/selection.h) some row of a set and some query head of a KV
 * head attends: the OR of their bits. A row that attends all keys (row_word < 0) brings all bits. Bits behind `width` are
 * 0. There are sets. */
typedef struct cpa_block_union_args {
    cpa_key_blocks blocks;
    int32_t q_heads, kv_heads;
    int64_t rows;
    const int32_t *set; /* [rows], device: the set that a row belongs to; -1: none */
    int64_t sets;
    uint32_t *out; /* [sets, kv_heads, cpa_mask_words(width)], device; overwritten */
} cpa_block_union_args;

/* The bits of word `word` that stand for blocks. */
CPA_HOST_DEVICE static inline uint32_t cpa_block_union_all(int32_t width, int64_t word) {
    const int64_t bits = width - 32 * word;
    return bits >= 32 ? ~0u : ~(~0u << bits);
}

/* The word of a row's bits. */
CPA_HOST_DEVICE static inline int64_t cpa_block_union_word(const cpa_block_union_args *a, int64_t row) {
    return a->blocks.row_word[a->blocks.row_map ? a->blocks.row_map[row] : row];
}

/* Whether a row brings what the row before it does not: neighbours mostly have the same words. */
CPA_HOST_DEVICE static inline int cpa_block_union_is_new(const cpa_block_union_args *a, int64_t row) {
    return row == 0 || a->set[row] != a->set[row - 1] ||
           cpa_block_union_word(a, row) != cpa_block_union_word(a, row - 1);
}

/* Whether the 16-bit letter i of a row of that dtype is, or is the upper half of, a NaN or an infinity. */
CPA_HOST_DEVICE static inline int cpa_letter_is_nonfinite(cpa_dtype dtype, int64_t i, uint16_t letter) {
    const uint16_t exponent = dtype == CPA_F16 ? 0x7c00 : 0x7f80;
    return (letter & exponent) == exponent && (dtype != CPA_F32 || i % 2);
}

struct cpa_operator_table {
    /* The bytes that a workspace has at least in which plans over caches of this shape prepare keys (key_source.h); 0:
     * they attend all keys as they lie. Pure. */
    int64_t (*least_workspace)(const cpa_attention_shape *shape, int32_t block_size);
    /* `workspace`: that of all plans of a context, which outlives them. NULL: the plan has one of its own where it needs
     * it, of at most CPA_KEY_WORKSPACE_BYTES. */
    cpa_status (*plan_create)(cpa_device *device, const cpa_key_workspace *workspace, cpa_attend_plan **out,
                              cpa_error *err);
    /* A plan is the work of attend, split once a step; plan_set allocates only when the plan grows. A plan may be set
     * while attends of its last setting are enqueued, once those of the setting before that are done. plan_upload
     * enqueues what brings the setting to the device, behind all attends of the plan so far; otherwise the first attend
     * on a stream does. A graph holds no upload of a plan that its stream has uploaded before the capture: upload each
     * setting before a launch. */
    cpa_status (*plan_set)(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                           cpa_error *err);
    cpa_status (*plan_upload)(const cpa_attend_plan *plan, cpa_stream *stream);
    /* Reserves a plan that has not been set, for good: all its attends then enqueue the same on the same addresses,
     * whatever an update enqueues before them, and each sequence is empty until one does. Allocates; on a device it
     * waits for what it enqueues. CPA_UNSUPPORTED where rows or keys are more than the kernels take. */
    cpa_status (*plan_reserve)(cpa_attend_plan *plan, const cpa_attend_reservation *reservation, cpa_error *err);
    /* Enqueues what makes the lengths and tables of a reserved plan those that the arrays hold by then. */
    cpa_status (*plan_update)(cpa_attend_plan *plan, const cpa_attend_update *update, cpa_stream *stream);
    void (*plan_destroy)(cpa_attend_plan *plan);
    /* Whether attend has a kernel for a shape under the rules of a mask, both of which are valid; mask NULL: whatever
     * they are. If not, CPA_UNSUPPORTED and a line that begins with `where`. */
    cpa_status (*attend_supported)(const cpa_device *device, const char *where, const cpa_attention_shape *shape,
                                   const cpa_mask *mask, cpa_error *err);
    /* Names the kernels that an attend of the plan with these arguments runs; args NULL: an attend that asks for
     * nothing beside what the plan was told. A plan that was never set has none. */
    void (*attend_kernels)(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_attend_kernels *out);
    /* `ready_q`: queries of the rows that the fusion of the setting calls ready; NULL where there are none. */
    cpa_status (*attend)(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                         cpa_stream *stream);
    /* Strides of q, state and out are not 0, nor are scale and units; there are rows; views are resolved. */
    cpa_status (*sparse_attend)(const cpa_sparse_attend_args *args, cpa_stream *stream);
    /* `awaited`: the messages that bring states, which the merge waits for (await_stored, base/stored.cuh), where a
     * transport of the back end's hands exchanges over; if they do not come it writes nothing. NULL or none: all states
     * are there. There are rows, or nobody would wait. */
    cpa_status (*merge)(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream);
    /* Strides are not 0; there are rows, and merge_packed has heads. */
    cpa_status (*state_pack)(const cpa_state_pack_args *args, cpa_stream *stream);
    cpa_status (*state_merge_packed)(const cpa_state_merge_packed_args *args, cpa_stream *stream);
    cpa_status (*project_states)(const cpa_project_states_args *args, cpa_stream *stream); /* args->rows is not 0 */

    /* The plan of an indexer; index_plan_set may wait for the device, but of a reserved plan. index_plan_reserve is
     * told of limits that are valid, and notes them in the plan when it has room; index_plan_upload is of a reserved
     * plan that is set. index_logits: strides and the unit are not 0, and there are rows and columns. */
    cpa_status (*index_plan_create)(cpa_device *device, cpa_index_plan **out, cpa_error *err);
    cpa_status (*index_plan_set)(cpa_index_plan *plan, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                 cpa_error *err);
    cpa_status (*index_plan_reserve)(cpa_index_plan *plan, const cpa_index_limits *limits, cpa_error *err);
    cpa_status (*index_plan_upload)(const cpa_index_plan *plan, cpa_stream *stream);
    void (*index_plan_destroy)(cpa_index_plan *plan);
    cpa_status (*index_logits)(const cpa_index_plan *plan, const cpa_index_logits_args *args, cpa_stream *stream);

    /* kv_copy and kv_pack may have CPA_VLLM_X on one side and rows in one piece on the other. kv_gather: `rows` are
     * its tensors as a cache whose block b, as long as those of src, begins at row b. */
    cpa_status (*kv_write)(const cpa_kv_write_args *args, cpa_stream *stream);
    cpa_status (*kv_copy)(const cpa_kv_copy_args *args, cpa_stream *stream);
    cpa_status (*kv_move)(const cpa_kv_move_args *args, cpa_stream *stream);
    cpa_status (*kv_convert)(const cpa_kv_convert_args *args, cpa_stream *stream);
    cpa_status (*kv_pack)(const cpa_kv_pack_args *args, cpa_stream *stream);
    cpa_status (*kv_gather)(const cpa_kv_gather_args *args, const cpa_kv_view *rows, cpa_stream *stream);
    /* Strides are not 0; there are tokens to expand. */
    cpa_status (*latent_gather)(const cpa_latent_gather_args *args, cpa_stream *stream);
    cpa_status (*latent_expand)(const cpa_latent_expand_args *args, cpa_stream *stream);
    cpa_status (*copy_blocks)(const cpa_copy_blocks_args *args, cpa_stream *stream);

    /* Copies row map[i] of src to row i of dst, row_bytes each (gather). map is on the device; NULL: row i. */
    cpa_status (*gather_rows)(void *dst, const void *src, const int32_t *map, int64_t rows, int64_t row_bytes,
                              cpa_stream *stream);
    cpa_status (*synthesize)(const cpa_synth_args *args, cpa_stream *stream);
    cpa_status (*hash_rows)(const cpa_hash_rows_args *args, cpa_stream *stream);
    cpa_status (*join_columns)(const cpa_join_columns_args *args, cpa_stream *stream);
    cpa_status (*sum_parts)(const cpa_sum_parts_args *args, cpa_stream *stream);
    cpa_status (*take_tokens)(const cpa_take_tokens_args *args, cpa_stream *stream);
    cpa_status (*block_union)(const cpa_block_union_args *args, cpa_stream *stream);
};

#endif
