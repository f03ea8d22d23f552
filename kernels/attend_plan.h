/* The head of every back end's attend plan. */
#ifndef CPA_KERNELS_ATTEND_PLAN_H
#define CPA_KERNELS_ATTEND_PLAN_H

#include <cpattn/ops.h>

/* plan_set fills it by cpa_attend_plan_describe. */
struct cpa_attend_plan {
    cpa_device *device;
    /* Set by the owner before plan_set, for plans whose attends are captured in graphs: at most so many items of one
     * row each are ever attended. What an attend enqueues then depends on plan_shape alone, and an attend of no item is
     * enqueued too. 0: the plan is as small as its batch allows. */
    int64_t steady_items;
    /* Set by the owner before plan_set and valid in it, for device back ends: by how many floats the rows of an item
     * lie further on in the state than their index says, O and LSE alike. So a kernel can store them into the memory
     * of another device. NULL: none does. */
    const int64_t *state_shifts; /* [n_items of the batch] */
    /* Set by the owner, ready_q before an attend and the others before plan_set: the last so many items have rows among
     * [ready_row, ready_row + ready_rows), whose queries are not in the q of the attend but at ready_q. The attend may
     * write them into q, which has room for them. And it may take these items before the work enqueued right in front
     * of it is over: that work writes nothing of ready_q and of the cache, and touches neither the state nor what the
     * plan has on the device. */
    int64_t ready_items, ready_row, ready_rows;
    const void *ready_q;
    int64_t n_items;
    cpa_attention_shape shape;
    int32_t block_size;
    /* Of the last cpa_attend_plan_set: whether it succeeded, the end of the rows of its items, and the largest block id
     * among the entries in use, -1 without any. */
    int is_set;
    int64_t rows;
    int64_t max_block;
};

static inline void cpa_attend_plan_describe(cpa_attend_plan *plan, const cpa_attend_batch *batch) {
    plan->n_items = batch->n_items;
    plan->shape = batch->shape;
    plan->block_size = batch->block_size;
}

#endif
