/* The head of every back end's attend plan, and what a setting of it is told beside its batch. */
#ifndef CPA_KERNELS_ATTEND_PLAN_H
#define CPA_KERNELS_ATTEND_PLAN_H

#include <cpattn/ops.h>

/* What ties a setting of a plan, and its attends, to the exchanges and graphs around them. All zero: nothing. */
typedef struct cpa_attend_fusion {
    /* For plans whose attends are captured in graphs: at most so many items of one row each are ever attended. What an
     * attend enqueues then depends on plan_shape alone, and an attend of no item is enqueued too. 0: the plan is as
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
} cpa_attend_fusion;

/* plan_set fills it by cpa_attend_plan_describe. */
struct cpa_attend_plan {
    cpa_device *device;
    cpa_attend_fusion fusion; /* of the setting; without its state_shifts */
    int64_t n_items;
    cpa_attention_shape shape;
    int32_t block_size;
    /* Of the last cpa_attend_plan_set: whether it succeeded, the end of the rows of its items, and the largest block id
     * among the entries in use, -1 without any. */
    int is_set;
    int64_t rows;
    int64_t max_block;
};

static inline void cpa_attend_plan_describe(cpa_attend_plan *plan, const cpa_attend_batch *batch,
                                            cpa_attend_fusion fusion) {
    plan->fusion = fusion;
    plan->fusion.state_shifts = NULL;
    plan->n_items = batch->n_items;
    plan->shape = batch->shape;
    plan->block_size = batch->block_size;
}

#endif
