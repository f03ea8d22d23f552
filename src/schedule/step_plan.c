#include "src/schedule/step_plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

void cpa_step_plan_init(cpa_step_plan *plan) {
    memset(plan, 0, sizeof *plan);
}

void cpa_step_plan_destroy(cpa_step_plan *plan) {
    free(plan->transfer_blocks);
    free(plan->transfers);
    free(plan->parents);
    free(plan->token_ids);
    free(plan->block_ids);
    free(plan->biases);
    free(plan->samplings);
    free(plan->cuts);
    free(plan->discards);
    free(plan->nulled);
    free(plan->appends);
    free(plan->loads);
    free(plan->stores);
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
    plan->n_swap_outs = plan->n_swap_ins = plan->n_copies = plan->n_nulled = 0;
    plan->n_stores = plan->n_loads = 0;
    plan->n_discards = plan->n_cuts = plan->n_samplings = plan->n_biases = plan->n_parents = 0;
    plan->n_transfers = plan->n_transfer_blocks = 0;
}

#define RESERVE(plan, array, capacity, n)                                                                              \
    cpa_array_reserve(&(plan)->array, &(plan)->capacity, (n), sizeof *(plan)->array)

int cpa_step_plan_reserve(cpa_step_plan *plan, int64_t chunks, int64_t releases, int64_t appends, int64_t block_ids,
                          int64_t token_ids) {
    if (!RESERVE(plan, chunks, cap_chunks, chunks)) return 0;
    if (!RESERVE(plan, releases, cap_releases, releases)) return 0;
    if (!RESERVE(plan, appends, cap_appends, appends)) return 0;
    if (!RESERVE(plan, block_ids, cap_block_ids, block_ids)) return 0;
    if (!RESERVE(plan, token_ids, cap_token_ids, token_ids)) return 0;
    return 1;
}

int cpa_step_plan_reserve_moves(cpa_step_plan *plan, int64_t swap_outs, int64_t swap_ins, int64_t copies,
                                int64_t nulled) {
    if (!RESERVE(plan, swap_outs, cap_swap_outs, swap_outs)) return 0;
    if (!RESERVE(plan, swap_ins, cap_swap_ins, swap_ins)) return 0;
    if (!RESERVE(plan, copies, cap_copies, copies)) return 0;
    if (!RESERVE(plan, nulled, cap_nulled, nulled)) return 0;
    return 1;
}

int cpa_step_plan_reserve_disk(cpa_step_plan *plan, int64_t stores, int64_t loads) {
    if (!RESERVE(plan, stores, cap_stores, stores)) return 0;
    if (!RESERVE(plan, loads, cap_loads, loads)) return 0;
    return 1;
}

int cpa_step_plan_reserve_drawing(cpa_step_plan *plan, int64_t discards, int64_t cuts, int64_t samplings,
                                  int64_t biases, int64_t parents) {
    if (!RESERVE(plan, discards, cap_discards, discards)) return 0;
    if (!RESERVE(plan, cuts, cap_cuts, cuts)) return 0;
    if (!RESERVE(plan, samplings, cap_samplings, samplings)) return 0;
    if (!RESERVE(plan, biases, cap_biases, biases)) return 0;
    if (!RESERVE(plan, parents, cap_parents, parents)) return 0;
    return 1;
}

int cpa_step_plan_reserve_transfers(cpa_step_plan *plan, int64_t transfers, int64_t transfer_blocks) {
    if (!RESERVE(plan, transfers, cap_transfers, transfers)) return 0;
    if (!RESERVE(plan, transfer_blocks, cap_transfer_blocks, transfer_blocks)) return 0;
    return 1;
}

cpa_plan_chunk *cpa_step_plan_add_chunk(cpa_step_plan *plan) {
    if (!RESERVE(plan, chunks, cap_chunks, plan->n_chunks + 1)) return NULL;
    return memset(&plan->chunks[plan->n_chunks++], 0, sizeof *plan->chunks);
}

cpa_plan_append *cpa_step_plan_add_append(cpa_step_plan *plan) {
    if (!RESERVE(plan, appends, cap_appends, plan->n_appends + 1)) return NULL;
    return memset(&plan->appends[plan->n_appends++], 0, sizeof *plan->appends);
}

int32_t *cpa_step_plan_add_release(cpa_step_plan *plan) {
    if (!RESERVE(plan, releases, cap_releases, plan->n_releases + 1)) return NULL;
    return memset(&plan->releases[plan->n_releases++], 0, sizeof *plan->releases);
}

cpa_block_move *cpa_step_plan_add_swap_out(cpa_step_plan *plan) {
    if (!RESERVE(plan, swap_outs, cap_swap_outs, plan->n_swap_outs + 1)) return NULL;
    return memset(&plan->swap_outs[plan->n_swap_outs++], 0, sizeof *plan->swap_outs);
}

cpa_block_move *cpa_step_plan_add_swap_in(cpa_step_plan *plan) {
    if (!RESERVE(plan, swap_ins, cap_swap_ins, plan->n_swap_ins + 1)) return NULL;
    return memset(&plan->swap_ins[plan->n_swap_ins++], 0, sizeof *plan->swap_ins);
}

cpa_block_move *cpa_step_plan_add_copy(cpa_step_plan *plan) {
    if (!RESERVE(plan, copies, cap_copies, plan->n_copies + 1)) return NULL;
    return memset(&plan->copies[plan->n_copies++], 0, sizeof *plan->copies);
}

cpa_disk_move *cpa_step_plan_add_store(cpa_step_plan *plan) {
    if (!RESERVE(plan, stores, cap_stores, plan->n_stores + 1)) return NULL;
    return memset(&plan->stores[plan->n_stores++], 0, sizeof *plan->stores);
}

cpa_disk_move *cpa_step_plan_add_load(cpa_step_plan *plan) {
    if (!RESERVE(plan, loads, cap_loads, plan->n_loads + 1)) return NULL;
    return memset(&plan->loads[plan->n_loads++], 0, sizeof *plan->loads);
}

cpa_plan_nulled *cpa_step_plan_add_nulled(cpa_step_plan *plan) {
    if (!RESERVE(plan, nulled, cap_nulled, plan->n_nulled + 1)) return NULL;
    return memset(&plan->nulled[plan->n_nulled++], 0, sizeof *plan->nulled);
}

cpa_plan_discard *cpa_step_plan_add_discard(cpa_step_plan *plan) {
    if (!RESERVE(plan, discards, cap_discards, plan->n_discards + 1)) return NULL;
    return memset(&plan->discards[plan->n_discards++], 0, sizeof *plan->discards);
}

cpa_plan_cut *cpa_step_plan_add_cut(cpa_step_plan *plan) {
    if (!RESERVE(plan, cuts, cap_cuts, plan->n_cuts + 1)) return NULL;
    return memset(&plan->cuts[plan->n_cuts++], 0, sizeof *plan->cuts);
}

cpa_plan_sampling *cpa_step_plan_add_sampling(cpa_step_plan *plan) {
    if (!RESERVE(plan, samplings, cap_samplings, plan->n_samplings + 1)) return NULL;
    return memset(&plan->samplings[plan->n_samplings++], 0, sizeof *plan->samplings);
}

cpa_plan_bias *cpa_step_plan_add_biases(cpa_step_plan *plan, int64_t n) {
    if (!RESERVE(plan, biases, cap_biases, plan->n_biases + n)) return NULL;
    plan->n_biases += n;
    return plan->biases + plan->n_biases - n;
}

int32_t *cpa_step_plan_add_blocks(cpa_step_plan *plan, int64_t n) {
    if (!RESERVE(plan, block_ids, cap_block_ids, plan->n_block_ids + n)) return NULL;
    plan->n_block_ids += n;
    return memset(&plan->block_ids[plan->n_block_ids - n], 0, (size_t)n * sizeof *plan->block_ids);
}

uint32_t *cpa_step_plan_add_tokens(cpa_step_plan *plan, int64_t n) {
    if (!RESERVE(plan, token_ids, cap_token_ids, plan->n_token_ids + n)) return NULL;
    plan->n_token_ids += n;
    return memset(&plan->token_ids[plan->n_token_ids - n], 0, (size_t)n * sizeof *plan->token_ids);
}

int32_t *cpa_step_plan_add_parents(cpa_step_plan *plan, int64_t n) {
    if (!RESERVE(plan, parents, cap_parents, plan->n_parents + n)) return NULL;
    plan->n_parents += n;
    return memset(&plan->parents[plan->n_parents - n], 0, (size_t)n * sizeof *plan->parents);
}

cpa_plan_transfer *cpa_step_plan_add_transfer(cpa_step_plan *plan) {
    if (!RESERVE(plan, transfers, cap_transfers, plan->n_transfers + 1)) return NULL;
    return memset(&plan->transfers[plan->n_transfers++], 0, sizeof *plan->transfers);
}

cpa_plan_transfer_block *cpa_step_plan_add_transfer_block(cpa_step_plan *plan) {
    if (!RESERVE(plan, transfer_blocks, cap_transfer_blocks, plan->n_transfer_blocks + 1)) return NULL;
    return memset(&plan->transfer_blocks[plan->n_transfer_blocks++], 0, sizeof *plan->transfer_blocks);
}

int64_t cpa_plan_position(const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t cached_at) {
    const int64_t first = cpa_plan_first_draft(chunk);
    int64_t position = first;
    if (cached_at < first || chunk->parents < 0) return cached_at;
    for (int64_t i = cached_at - first; (i = cpa_plan_parent(plan, chunk, i)) >= 0;) position++;
    return position;
}

int cpa_plan_draft_sees(const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t cached_at, int64_t other) {
    const int64_t first = cpa_plan_first_draft(chunk);
    int64_t i = cached_at - first;
    while (i > other - first) i = cpa_plan_parent(plan, chunk, i);
    return i == other - first;
}
