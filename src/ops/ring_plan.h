/* Plans of attends through a ring, for those who plan what is checked already. */
#ifndef CPA_OPS_RING_PLAN_H
#define CPA_OPS_RING_PLAN_H

#include "kernels/operators.h"
#include "src/ops/ring_blocks.h"

/* A pass that an attend runs, and its part in the states of its rows. */
typedef struct cpa_ring_turn {
    int64_t pass;
    int is_resumed;
    int is_split; /* not 0: one of several over the same rows */
    int is_last;  /* of these */
} cpa_ring_turn;

struct cpa_ring_plan {
    struct cpa_attend_plan head; /* what is set, as if one plan had it all */
    cpa_owner_map map;
    cpa_kv_ring *ring;
    const cpa_key_workspace *workspace; /* in which the plans of passes prepare keys */
    cpa_ring_passes passes;
    cpa_ring_blocks blocks;  /* of the attend that is enqueued last */
    cpa_attend_plan **plans; /* two of each pass, the second of blind rows; those that a setting does not need stay */
    int64_t n_plans, plans_capacity;
    cpa_ring_turn *turns;
    int64_t turns_capacity;
    float *state; /* device: of the rows of an item, where the caller has none */
    int64_t state_bytes;
    int is_begun; /* not 0: an attend of the setting is enqueued */
};

/* A plan whose keys are prepared in a workspace of the caller's. */
cpa_status cpa_ring_plan_create_within(cpa_kv_ring *ring, const cpa_key_workspace *workspace, cpa_ring_plan **out,
                                       cpa_error *err);
/* Sets a plan of a batch that is checked, whose tables are on the host. Of the fusion `full`, `masked` and the ready rows
 * count. Keys at positions below `settled` are not written from the first attend of the setting to the last. */
cpa_status cpa_ring_plan_set_within(cpa_ring_plan *plan, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                                    int64_t settled, cpa_error *err);
/* Enqueues an attend whose arguments are checked. */
cpa_status cpa_ring_plan_attend(cpa_ring_plan *plan, const cpa_attend_args *args, const void *ready_q,
                                cpa_stream *stream);

#endif
