/* Checks of arguments that operators, context attention and the engine share. `where` begins the line that says what
 * is wrong. */
#ifndef CPA_OPS_CHECK_ARGS_H
#define CPA_OPS_CHECK_ARGS_H

#include <cpattn/ops.h>

#include "base/check.h"
#include "kernels/attend_plan.h"

/* Fails with CPA_INVALID and a formatted line unless the condition holds. */
#define REQUIRE(err, condition, ...)                                                                                   \
    do {                                                                                                               \
        if (!(condition)) return cpa_fail(err, CPA_INVALID, __VA_ARGS__);                                              \
    } while (0)

/* Bounds that keep every product of counts, strides and positions within 64 bits. */
#define CPA_MOST_BYTES ((int64_t)1 << 60)  /* from the first to the last byte of a tensor */
#define CPA_MOST_TOKENS ((int64_t)1 << 44) /* of a sequence, and rows of a tensor */
enum { CPA_MOST_HEADS = 1 << 16, CPA_MOST_BLOCK_TOKENS = 1 << 16, CPA_MOST_RANKS = 1 << 14 };

cpa_status cpa_check_heads(const char *where, int32_t q_heads, int32_t kv_heads, cpa_error *err);
cpa_status cpa_check_dim(const char *where, const char *name, int32_t dim, cpa_error *err);
/* A dtype of queries and results. */
cpa_status cpa_check_dtype(const char *where, const char *name, cpa_dtype dtype, cpa_error *err);
cpa_status cpa_check_block_size(const char *where, int32_t block_size, cpa_error *err);
cpa_status cpa_check_map(const char *where, cpa_owner_map map, cpa_error *err);
cpa_status cpa_check_mask(const char *where, const cpa_mask *mask, cpa_error *err);
/* The same of a layer of a context or a model, whose queries have no window that ends ahead of them. */
cpa_status cpa_check_layer_mask(const char *where, const cpa_mask *mask, cpa_error *err);

/* A pointer to elements of so many bytes. NULL is aligned. */
cpa_status cpa_check_aligned(const char *where, const char *name, const void *pointer, int64_t bytes, cpa_error *err);

/* A distance of scores from which tiles of keys are left out: a finite number, 0 or more. */
cpa_status cpa_check_skip_tiles(const char *where, float skip_tiles, cpa_error *err);

/* A scale of codes is there where results are codes, and nowhere else. */
cpa_status cpa_check_out_scale(const char *where, cpa_dtype out_dtype, const float *out_scale, cpa_error *err);

/* Rows of `least` elements of so many bytes that lie `stride` elements apart, 0 for `least`. */
cpa_status cpa_check_rows(const char *where, const char *name, int64_t rows, int64_t stride, int64_t least,
                          int64_t bytes, cpa_error *err);

/* Rows of heads of `dim` elements of so many bytes, and what the line calls their strides: head_stride 0: those of a row
 * are dense, row_stride 0: rows are as long as dense heads. */
typedef struct cpa_checked_heads {
    const char *row_name, *head_name;
    int64_t rows, row_stride, head_stride, bytes;
    int32_t heads, dim;
} cpa_checked_heads;
cpa_status cpa_check_heads_of_rows(const char *where, const cpa_checked_heads *of, cpa_error *err);

/* The same of rows that are written, of which `follow` says whether some follow each other at row_stride: then rows lie
 * within heads, or heads within rows, so that none overlap. (Rows that do not follow each other, as those of sequences
 * of one token in [sequences, heads, tokens, dim], may have any strides.) */
cpa_status cpa_check_written_heads(const char *where, const cpa_checked_heads *of, int follow, cpa_error *err);

/* Whether an item of a plan must have rows that follow each other; of a reserved plan only the device knows its rows. */
static inline int cpa_rows_follow(const cpa_attend_plan *plan) {
    return plan->reservation.sequences == 0 && plan->rows_attended > plan->n_items;
}

/* LSEs of rows, [rows, heads], or [heads, rows] with a stride of heads that is not 0. */
cpa_status cpa_check_lse_strides(const char *where, int64_t rows, int32_t heads, int64_t row_stride,
                                 int64_t head_stride, cpa_error *err);

/* What a shape says of its cache: KV heads, widths, dtype, layout and scales. */
cpa_status cpa_check_cache_shape(const char *where, const cpa_attention_shape *shape, cpa_error *err);
cpa_status cpa_check_view(const char *where, const cpa_kv_view *kv, cpa_error *err);

/* A cache that is compared with another one: what the line calls it, its shape, and the tokens of a block. */
typedef struct cpa_cache_form {
    const char *name;
    cpa_attention_shape shape;
    int32_t block_size;
} cpa_cache_form;
cpa_cache_form cpa_cache_form_of(const char *name, const cpa_kv_view *kv);
/* Whether blocks, heads and widths are the same in both and, unless those alone matter, dtype and scales. */
cpa_status cpa_check_same_cache(const char *where, const cpa_cache_form *a, const cpa_cache_form *b, int widths_alone,
                                cpa_error *err);
/* Whether rows have the same bytes in two views, and lie in one piece in both or in neither. */
cpa_status cpa_check_same_shape(const char *where, const cpa_kv_view *a, const cpa_kv_view *b, cpa_error *err);

/* A partial state of `rows` rows; its pointers may be NULL. lse_head_stride: as for cpa_check_lse_strides. */
cpa_status cpa_check_state(const char *where, const cpa_partial *state, int64_t rows, int32_t heads, int32_t v_dim,
                           int64_t lse_head_stride, cpa_error *err);

/* A range [begin, end) that belongs to entry `index` of an array. */
typedef struct cpa_checked_range {
    int64_t begin, end, index;
} cpa_checked_range;

/* No two of the ranges have anything in common; leaves them in ascending order. `what` names the array and `units`
 * what is in it. */
cpa_status cpa_check_disjoint(const char *where, const char *what, const char *units, cpa_checked_range *ranges,
                              int64_t n, cpa_error *err);

#endif
