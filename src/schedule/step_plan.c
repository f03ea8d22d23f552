#include "src/schedule/step_plan.h"

#include <stdlib.h>
#include <string.h>

void cpa_step_plan_init(cpa_step_plan *plan) {
    memset(plan, 0, sizeof *plan);
}

void cpa_step_plan_destroy(cpa_step_plan *plan) {
    free(plan->token_ids);
    free(plan->block_ids);
    free(plan->voids);
    free(plan->appends);
    free(plan->copies);
    free(plan->swap_ins);
    free(plan->swap_outs);
    free(plan->releases);
    free(plan->chunks);
    cpa_step_plan_init(plan);
}

void cpa_step_plan_clear(cpa_step_plan *plan) {
    plan->step = 0;
    plan->flags = 0;
    plan->n_chunks = plan->n_releases = plan->n_appends = plan->n_block_ids = plan->n_token_ids = 0;
    plan->n_swap_outs = plan->n_swap_ins = plan->n_copies = plan->n_voids = 0;
}

/* Room for n entries of `size` bytes: the array, moved if it had to grow, or NULL without memory and with nothing
 * changed. Grows by half, so that adding entries one by one costs constant time each. */
static void *reserve(void *array, int64_t *capacity, int64_t n, size_t size) {
    if (array && n <= *capacity) return array;
    int64_t grown = *capacity + *capacity / 2 + 16;
    if (grown < n) grown = n;
    if ((uint64_t)grown > SIZE_MAX / size) return NULL;
    void *moved = realloc(array, (size_t)grown * size);
    if (moved) *capacity = grown;
    return moved;
}

#define RESERVE(plan, array, capacity, n) reserve((plan)->array, &(plan)->capacity, (n), sizeof *(plan)->array)

int cpa_step_plan_reserve(cpa_step_plan *plan, int64_t chunks, int64_t releases, int64_t appends, int64_t block_ids,
                          int64_t token_ids) {
    void *moved;
    if (!(moved = RESERVE(plan, chunks, cap_chunks, chunks))) return 0;
    plan->chunks = moved;
    if (!(moved = RESERVE(plan, releases, cap_releases, releases))) return 0;
    plan->releases = moved;
    if (!(moved = RESERVE(plan, appends, cap_appends, appends))) return 0;
    plan->appends = moved;
    if (!(moved = RESERVE(plan, block_ids, cap_block_ids, block_ids))) return 0;
    plan->block_ids = moved;
    if (!(moved = RESERVE(plan, token_ids, cap_token_ids, token_ids))) return 0;
    plan->token_ids = moved;
    return 1;
}

int cpa_step_plan_reserve_moves(cpa_step_plan *plan, int64_t swap_outs, int64_t swap_ins, int64_t copies,
                                int64_t voids) {
    void *moved;
    if (!(moved = RESERVE(plan, swap_outs, cap_swap_outs, swap_outs))) return 0;
    plan->swap_outs = moved;
    if (!(moved = RESERVE(plan, swap_ins, cap_swap_ins, swap_ins))) return 0;
    plan->swap_ins = moved;
    if (!(moved = RESERVE(plan, copies, cap_copies, copies))) return 0;
    plan->copies = moved;
    if (!(moved = RESERVE(plan, voids, cap_voids, voids))) return 0;
    plan->voids = moved;
    return 1;
}

cpa_plan_chunk *cpa_step_plan_add_chunk(cpa_step_plan *plan) {
    cpa_plan_chunk *moved = RESERVE(plan, chunks, cap_chunks, plan->n_chunks + 1);
    if (!moved) return NULL;
    plan->chunks = moved;
    return memset(&plan->chunks[plan->n_chunks++], 0, sizeof *plan->chunks);
}

cpa_plan_append *cpa_step_plan_add_append(cpa_step_plan *plan) {
    cpa_plan_append *moved = RESERVE(plan, appends, cap_appends, plan->n_appends + 1);
    if (!moved) return NULL;
    plan->appends = moved;
    return memset(&plan->appends[plan->n_appends++], 0, sizeof *plan->appends);
}

int32_t *cpa_step_plan_add_release(cpa_step_plan *plan) {
    int32_t *moved = RESERVE(plan, releases, cap_releases, plan->n_releases + 1);
    if (!moved) return NULL;
    plan->releases = moved;
    return memset(&plan->releases[plan->n_releases++], 0, sizeof *plan->releases);
}

cpa_block_move *cpa_step_plan_add_swap_out(cpa_step_plan *plan) {
    cpa_block_move *moved = RESERVE(plan, swap_outs, cap_swap_outs, plan->n_swap_outs + 1);
    if (!moved) return NULL;
    plan->swap_outs = moved;
    return memset(&plan->swap_outs[plan->n_swap_outs++], 0, sizeof *plan->swap_outs);
}

cpa_block_move *cpa_step_plan_add_swap_in(cpa_step_plan *plan) {
    cpa_block_move *moved = RESERVE(plan, swap_ins, cap_swap_ins, plan->n_swap_ins + 1);
    if (!moved) return NULL;
    plan->swap_ins = moved;
    return memset(&plan->swap_ins[plan->n_swap_ins++], 0, sizeof *plan->swap_ins);
}

cpa_block_move *cpa_step_plan_add_copy(cpa_step_plan *plan) {
    cpa_block_move *moved = RESERVE(plan, copies, cap_copies, plan->n_copies + 1);
    if (!moved) return NULL;
    plan->copies = moved;
    return memset(&plan->copies[plan->n_copies++], 0, sizeof *plan->copies);
}

cpa_plan_void *cpa_step_plan_add_void(cpa_step_plan *plan) {
    cpa_plan_void *moved = RESERVE(plan, voids, cap_voids, plan->n_voids + 1);
    if (!moved) return NULL;
    plan->voids = moved;
    return memset(&plan->voids[plan->n_voids++], 0, sizeof *plan->voids);
}

int32_t *cpa_step_plan_add_blocks(cpa_step_plan *plan, int64_t n) {
    int32_t *moved = RESERVE(plan, block_ids, cap_block_ids, plan->n_block_ids + n);
    if (!moved) return NULL;
    plan->block_ids = moved;
    plan->n_block_ids += n;
    return memset(&plan->block_ids[plan->n_block_ids - n], 0, (size_t)n * sizeof *plan->block_ids);
}

uint32_t *cpa_step_plan_add_tokens(cpa_step_plan *plan, int64_t n) {
    uint32_t *moved = RESERVE(plan, token_ids, cap_token_ids, plan->n_token_ids + n);
    if (!moved) return NULL;
    plan->token_ids = moved;
    plan->n_token_ids += n;
    return memset(&plan->token_ids[plan->n_token_ids - n], 0, (size_t)n * sizeof *plan->token_ids);
}
