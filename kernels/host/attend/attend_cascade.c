/* Cascade attention on the host: decode is bound by memory, so rows of items that share whole splits go through them
 * together, whose keys are read and packed once. A row's states of these splits are folded in the order of the keys,
 * and those of its own splits after them: as if it had gone alone, to the bit. */
#include "kernels/host/attend/attend_cascade.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/host/attend/state.h"

/* More tokens share little more by sharing keys: they have many rows to a packed tile of their own. */
enum { MOST_ROWS = 16 };
/* Most floats that the states of shared splits take: 64 MiB. */
static const int64_t MOST_FLOATS = (int64_t)16 << 20;

static cpa_status reserve(void *array, int64_t *capacity, int64_t n, size_t element, cpa_error *err) {
    if (cpa_array_reserve(array, capacity, n, element)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld entries", (long long)n);
}

static int64_t group_of(const cpa_host_plan *plan) {
    return plan->batch.shape.q_heads / plan->batch.shape.kv_heads;
}

/* Floats of the states of all heads and splits of a node's rows. */
static int64_t floats_of(const cpa_host_plan *plan, int64_t rows, int64_t splits) {
    return splits * rows * plan->batch.shape.kv_heads * ((int64_t)plan->batch.shape.v_dim + 1);
}

/* Whether there is room left for the states of a node. */
typedef struct cascade_room {
    const cpa_host_plan *plan;
    int64_t *left;
} cascade_room;

static int fits(const void *ctx, const cpa_cascade_node *node) {
    const cascade_room *room = ctx;
    const cpa_host_plan *plan = room->plan;
    int64_t rows = 0;
    for (int64_t i = node->first; i < node->first + node->count; i++)
        rows += plan->items[plan->cascade.items[i].index].q_count * group_of(plan);
    const int64_t floats = floats_of(plan, rows, (node->k_end - node->k_begin) / CPA_HOST_SPLIT_TOKENS);
    if (floats > *room->left) return 0;
    *room->left -= floats;
    return 1;
}

static cpa_status add_members(cpa_host_plan *plan, const cpa_cascade_node *node, int64_t *n, cpa_error *err) {
    CPA_TRY(cpa_cascade_list_rows(&plan->cascade, &plan->batch, node, n, err));
    CPA_TRY(reserve(&plan->members, &plan->members_capacity, plan->n_members + *n, sizeof *plan->members, err));
    for (int64_t i = 0; i < *n; i++)
        plan->members[plan->n_members + i] = (cpa_host_member){plan->cascade.rows[i].item, plan->cascade.rows[i].token};
    plan->n_members += *n;
    return CPA_OK;
}

/* The units of a node, whose states lie one behind the other. */
static cpa_status add_units(cpa_host_plan *plan, const cpa_cascade_node *node, cpa_host_shared *shared,
                            cpa_error *err) {
    const int64_t kv_heads = plan->batch.shape.kv_heads, splits = shared->split_end - shared->split_begin;
    for (int64_t head = 0; head < kv_heads; head += shared->heads) {
        for (int64_t row = 0; row < shared->rows; row += CPA_HOST_UNIT_ROWS) {
            const cpa_host_unit unit = {
                .item = plan->cascade.items[node->first].index,
                .members = shared->members,
                .row = row,
                .rows = (int32_t)cpa_min64(CPA_HOST_UNIT_ROWS, shared->rows - row),
                .kv_head = (int32_t)head,
                .kv_heads = (int32_t)cpa_min64(shared->heads, kv_heads - head),
                .split_begin = shared->split_begin,
                .split_end = shared->split_end,
                .partial = plan->n_partials,
            };
            CPA_TRY(reserve(&plan->shared_units, &plan->shared_units_capacity, plan->n_shared_units + 1,
                            sizeof *plan->shared_units, err));
            cpa_host_unit *added = &plan->shared_units[plan->n_shared_units++];
            *added = unit;
            added->cost = cpa_host_unit_rows(&unit) * splits * CPA_HOST_SPLIT_TOKENS;
            plan->n_partials += splits * cpa_host_partial_floats(plan, &unit);
        }
    }
    return CPA_OK;
}

static cpa_status add_node(cpa_host_plan *plan, const cpa_cascade_node *node, cpa_error *err) {
    const int64_t k_first = plan->items[plan->cascade.items[node->first].index].k_first;
    int64_t tokens;
    CPA_TRY(reserve(&plan->shared, &plan->shared_capacity, plan->n_shared + 1, sizeof *plan->shared, err));
    cpa_host_shared *shared = &plan->shared[plan->n_shared];
    *shared = (cpa_host_shared){.split_begin = (k_first + node->k_begin) / CPA_HOST_SPLIT_TOKENS,
                                .split_end = (k_first + node->k_end) / CPA_HOST_SPLIT_TOKENS,
                                .members = plan->n_members,
                                .partial = plan->n_partials};
    CPA_TRY(add_members(plan, node, &tokens, err));
    shared->rows = tokens * group_of(plan);
    shared->heads = cpa_host_unit_heads(plan, shared->rows);
    CPA_TRY(add_units(plan, node, shared, err));
    for (int64_t i = node->first; i < node->first + node->count; i++) {
        cpa_host_path *path = &plan->paths[plan->cascade.items[i].index];
        path->levels++;
        path->split_begin = shared->split_end;
    }
    plan->n_shared++;
    return CPA_OK;
}

/* Tells each token of each item where its shared states are. Parents come before children, so levels ascend. */
static cpa_status list_shared_rows(cpa_host_plan *plan, cpa_error *err) {
    for (int64_t i = 0; i < plan->batch.n_items; i++) {
        cpa_host_path *path = &plan->paths[i];
        path->shared_rows = plan->n_shared_rows;
        plan->n_shared_rows += path->levels * plan->items[i].q_count;
        path->levels = 0;
    }
    CPA_TRY(
        reserve(&plan->shared_rows, &plan->shared_rows_capacity, plan->n_shared_rows, sizeof *plan->shared_rows, err));
    for (int64_t s = 0; s < plan->n_shared; s++) {
        const cpa_host_shared *shared = &plan->shared[s];
        const int64_t tokens = shared->rows / group_of(plan);
        for (int64_t i = 0; i < tokens; i++) {
            const cpa_host_member member = plan->members[shared->members + i];
            cpa_host_path *path = &plan->paths[member.item];
            const int64_t count = plan->items[member.item].q_count;
            plan->shared_rows[path->shared_rows + path->levels * count + member.token] = (cpa_host_shared_row){s, i};
        }
        for (int64_t i = 0; i < tokens; i++) { /* an item's last token ends its level */
            const cpa_host_member member = plan->members[shared->members + i];
            plan->paths[member.item].levels += member.token == plan->items[member.item].q_count - 1;
        }
    }
    return CPA_OK;
}

cpa_status cpa_host_plan_cascade(cpa_host_plan *plan, cpa_table_set tables, cpa_error *err) {
    const cpa_attend_batch *batch = &plan->batch;
    int64_t left = MOST_FLOATS;
    plan->n_shared = plan->n_shared_units = plan->n_members = plan->n_shared_rows = 0;
    CPA_TRY(reserve(&plan->paths, &plan->paths_capacity, batch->n_items, sizeof *plan->paths, err));
    for (int64_t i = 0; i < batch->n_items; i++)
        plan->paths[i] = (cpa_host_path){.split_begin = plan->items[i].k_first / CPA_HOST_SPLIT_TOKENS};
    if (batch->cascade_attention == CPA_CASCADE_OFF) return CPA_OK;
    CPA_TRY(cpa_cascade_find(&plan->cascade, batch, tables, CPA_HOST_SPLIT_TOKENS, MOST_ROWS, err));
    const cascade_room room = {plan, &left};
    cpa_cascade_keep(&plan->cascade, fits, &room);
    for (int64_t i = 0; i < plan->cascade.n_nodes; i++) CPA_TRY(add_node(plan, &plan->cascade.nodes[i], err));
    return list_shared_rows(plan, err);
}

/* Folds the states of the splits of `shared` of packed row `row` there and a KV head. */
static void fold_states(const cpa_host_plan *plan, const cpa_host_shared *shared, int64_t row, int64_t head, float *o,
                        float *lse) {
    const int64_t v_dim = plan->batch.shape.v_dim, kv_heads = plan->batch.shape.kv_heads;
    const int64_t splits = shared->split_end - shared->split_begin;
    const int64_t first_head = head / shared->heads * shared->heads,
                  first_row = row / CPA_HOST_UNIT_ROWS * CPA_HOST_UNIT_ROWS;
    const int64_t heads = cpa_min64(shared->heads, kv_heads - first_head),
                  rows = cpa_min64(CPA_HOST_UNIT_ROWS, shared->rows - first_row);
    const int64_t at = (head - first_head) * rows + row - first_row, count = heads * rows;
    /* Units before this one: of the heads before, and of the same heads. */
    const float *states =
        plan->partials + shared->partial + splits * (v_dim + 1) * (first_head * shared->rows + heads * first_row);
    for (int64_t split = 0; split < splits; split++, states += count * (v_dim + 1))
        cpa_state_fold(o, lse, states + at * v_dim, states[count * v_dim + at], v_dim);
}

void cpa_host_fold_shared(const cpa_host_plan *plan, const cpa_host_unit *unit, int32_t row, float *o, float *lse) {
    const cpa_host_path *path = &plan->paths[unit->item];
    const int64_t group = group_of(plan), count = plan->items[unit->item].q_count;
    const int64_t in_item = unit->row + row % unit->rows, head = unit->kv_head + row / unit->rows;
    for (int64_t level = 0; level < path->levels; level++) {
        const cpa_host_shared_row *at = &plan->shared_rows[path->shared_rows + level * count + in_item / group];
        fold_states(plan, &plan->shared[at->shared], at->member * group + in_item % group, head, o, lse);
    }
}

void cpa_host_cascade_release(cpa_host_plan *plan) {
    cpa_cascade_release(&plan->cascade);
    free(plan->shared);
    free(plan->shared_units);
    free(plan->members);
    free(plan->paths);
    free(plan->shared_rows);
}
