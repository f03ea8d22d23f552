/* The head of every back end's attend plan, what a setting of it is told beside its batch, and what a reservation
 * holds.
 */
#ifndef CPA_KERNELS_ATTEND_PLAN_H
#define CPA_KERNELS_ATTEND_PLAN_H

#include <cpattn/ops.h>

#include "kernels/block_tables.h"

/* What ties a setting of a plan, and its attends, to the exchanges and graphs around them. All zero: nothing. */
typedef struct cpa_attend_fusion {
    /* For plans whose attends are captured in graphs: at most so many rows are ever attended, in items of few. What
     * an attend enqueues then depends on plan_shape alone, and an attend of no item is enqueued too. 0: the plan is as
     * small as its batch allows. */
    int64_t padded_items;
    /* For devices with memory of their own: by how many floats the rows of an item lie further on in the state than
     * their index says, O and LSE alike. So a kernel can store them into the memory of another device. NULL: none does.
     * Read by plan_set alone. */
    const int64_t *state_shifts; /* [n_items of the batch] */
    /* The last so many items have rows among [ready_row, ready_row + ready_rows), whose queries are not in the q of an
     * attend but at its ready_q. The attend may write them into q, which has room for them. And it may take these items
     * before the work enqueued right in front of it is over: that work writes nothing of ready_q and of the cache, and
     * touches neither the state nor what the plan has on the device. */
    int64_t ready_items, ready_row, ready_rows;
    /* 1: rows see all keys of their item, not those up to their own position: how long each takes, which is how the
     * work is dealt. The result does not depend on it. */
    int full;
    /* 1: attends come with a selection. A device whose kernels know none over shared keys then shares none. */
    int masked;
    /* The block tables of the batch are this set of tables that stay, and its block_tables are what the host has of them:
     * the plan takes no copy. What changes in them is uploaded before the plan, and the plan is set anew when they do. */
    cpa_table_set tables;
} cpa_attend_fusion;

/* Keys and values in tensors, without pages, are a cache of one-token steps whose blocks overlap: block b begins at row
 * b and reaches as far as any segment does. A view says so by this block_size, with block strides that are its token
 * strides and with num_blocks rows; no other has so large a one. */
enum { CPA_TENSOR_BLOCK = 1 << 30 };

/* Where the rows that a rank asks for lie: row s * rows is the first of sequence s behind first_row, and state_shift is
 * as in a fusion. */
typedef struct cpa_attend_place {
    int64_t first_row, state_shift;
} cpa_attend_place;

/* A plan whose lengths and tables are read on the device: the limits of cpa_attend_plan_reserve, and in context
 * attention what of it lies on which rank. Sequences are sharded. Each rank asks for those of the last `rows` tokens of
 * a sequence that it owns; this rank attends them over its own shard (attend_update.h). */
typedef struct cpa_attend_reservation {
    cpa_attention_shape shape;
    int32_t block_size;
    int32_t rows;         /* most rows of a sequence */
    int64_t sequences;    /* 0: the plan is not reserved */
    int64_t tokens;       /* most tokens of a sequence */
    int64_t table_stride; /* most table entries of a sequence on this rank */
    int64_t num_blocks;   /* each table entry names a block below this number */
    cpa_owner_map map;
    int32_t rank;
    const cpa_attend_place *places; /* [cp_size], read by plan_reserve alone; NULL: one rank, with zeros */
    int64_t ready_row, ready_rows;  /* the rows that this rank asks for, if they are ready as in a fusion */
    /* NULL; or device [cp_size, sequences * rows]: an update makes entry (r, row) the row where this rank asks for it
     * and rank r has keys of its sequence, else -1. A sequence that is refused is attended by all ranks for
     * themselves. */
    int32_t *row_maps;
    /* NULL; or device, for each row that is attended: an update makes it the row of the whole step that it is, in which
     * row s * rows + j is the j-th of the new tokens of sequence s, whoever owns it. */
    int32_t *step_rows;
    int64_t total_rows; /* most rows of all sequences together */
    /* 1: rows of sequence s begin at s * rows whatever qo_indptr says, which then counts the new tokens alone. */
    int32_t fixed_rows;
} cpa_attend_reservation;

/* Why an update refuses a sequence. */
typedef enum cpa_attend_why {
    CPA_REFUSED_LENGTH = 1,
    CPA_REFUSED_ROWS,
    CPA_REFUSED_RANK,
    CPA_REFUSED_TABLE
} cpa_attend_why;

/* What the last update that is done tells the host: the first sequence whose rows it has refused; -1: none. */
typedef struct cpa_attend_refusal {
    int64_t sequence;
    int32_t why;
} cpa_attend_refusal;

/* What an update reads, as cpa_attend_update_args says. */
typedef struct cpa_attend_update {
    int64_t sequences;
    const void *lengths;
    int32_t length_bytes;
    const int32_t *block_tables;
    int64_t table_stride;
    const int32_t *first_ranks; /* [sequences], device: the rank that owns position 0 of each; NULL: rank 0 */
    /* Tables one behind the other, in place of `lengths` and `table_stride`; NULL: not given that way. */
    const int32_t *kv_indptr, *last_page_len;
    int64_t n_indices;
    const int32_t *qo_indptr; /* NULL: all sequences have the rows that are reserved */
} cpa_attend_update;

/* plan_set fills it by cpa_attend_plan_describe. */
struct cpa_attend_plan {
    cpa_device *device;
    cpa_attend_reservation reservation;
    cpa_attend_fusion fusion; /* the fusion that plan_set was given, without state_shifts */
    int64_t n_items;
    cpa_attention_shape shape;
    int32_t block_size;
    /* The end of the rows of the items whose queries lie in the q of an attend: what q and the results hold. */
    int64_t rows;
    /* Of the last cpa_attend_plan_set, or of the reservation and the last update: whether it succeeded, and the largest
     * block id among the entries in use, -1 without any. */
    int is_set;
    int64_t max_block;
    int64_t end; /* largest end, in its sequence, of the tokens of queries and keys; 0 of a reserved plan */
    /* Of the setting: keys of all items, and of these how many are read, as what items share is read once. */
    int64_t keys_attended, keys_read;
    /* Rows of all items; of a reserved plan their largest number, as the actual one is on the device. */
    int64_t rows_attended;
    int64_t k_rows;                    /* block_size CPA_TENSOR_BLOCK: of the tensors of keys and of values */
    const cpa_attend_refusal *refusal; /* of a reserved plan; memory of the host that its updates write */
};

static inline void cpa_attend_plan_describe(cpa_attend_plan *plan, const cpa_attend_batch *batch,
                                            cpa_attend_fusion fusion) {
    plan->fusion = fusion;
    plan->fusion.state_shifts = NULL;
    plan->n_items = batch->n_items;
    plan->shape = batch->shape;
    plan->block_size = batch->block_size;
    plan->rows = plan->keys_attended = plan->rows_attended = 0;
    for (int64_t i = 0; i < batch->n_items; i++) {
        const cpa_attend_item *item = &batch->items[i];
        const int64_t end =
            i < batch->n_items - fusion.ready_items && item->q_count > 0 ? item->q_row + item->q_count : 0;
        plan->keys_attended += item->k_count;
        plan->rows_attended += item->q_count;
        if (end > plan->rows) plan->rows = end;
    }
    plan->keys_read = plan->keys_attended;
}

#endif
