#include "src/schedule/scheduler_preempt.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/schedule/fair_share.h"
#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/scheduler_prefix.h"

/* How many blocks of pool p would be free of owners if those of running[index + 1 ..] were preempted that
 * running[index] may take from; counts no further than `enough`. A block with several owners is free when the last of
 * them goes. */
static int64_t freed_by(cpa_scheduler *s, int32_t index, int32_t p, int64_t enough) {
    int64_t freed = 0;
    int32_t last = s->n_running;
    while (last > index + 1 && freed < enough) {
        const cpa_sequence *victim = s->running[--last];
        if (!cpa_fair_may_take(s, index, last)) continue;
        for (int64_t i = 0; i < victim->shards[p].held; i++) {
            int32_t block = victim->blocks[p * victim->stride + i];
            if (block >= 0 && ++s->marks[block] == cpa_block_pool_owners(s->pools[p], block)) freed++;
        }
    }
    for (int32_t v = last; v < s->n_running; v++) {
        const cpa_sequence *victim = s->running[v];
        for (int64_t i = 0; i < victim->shards[p].held; i++) {
            int32_t block = victim->blocks[p * victim->stride + i];
            if (block >= 0) s->marks[block] = 0;
        }
    }
    return freed;
}

/* What the tenant of running[index] has beyond its quota in pool p, with what that sequence lacks. */
static int64_t beyond_quota(const cpa_scheduler *s, int32_t index, int32_t p) {
    if (s->options.tenant_block_quota == 0 || s->lacks[p] <= 0) return 0;
    return s->running[index]->tenant->held[p] + s->lacks[p] - s->options.tenant_block_quota;
}

static int64_t in_use(const cpa_sequence *sequence, int32_t p) {
    return sequence->shards[p].held - sequence->shards[p].voided;
}

/* Whether preempting the sequences after running[index] gives it what it lacks, in every pool. */
static int younger_hold_enough(cpa_scheduler *s, int32_t index) {
    const cpa_tenant *tenant = s->running[index]->tenant;
    for (int32_t p = 0; p < s->n_pools; p++) {
        int64_t missing = s->lacks[p] - cpa_block_pool_free_count(s->pools[p]), beyond = beyond_quota(s, index, p);
        int64_t held = 0;
        for (int32_t i = s->n_running - 1; i > index && (held < missing || beyond > 0); i--) {
            if (cpa_fair_may_take(s, index, i)) held += in_use(s->running[i], p);
            if (s->running[i]->tenant == tenant) beyond -= in_use(s->running[i], p);
        }
        if (held < missing || beyond > 0) return 0;
        if (missing > 0 && freed_by(s, index, p, missing) < missing) return 0;
    }
    return 1;
}

cpa_status cpa_scheduler_make_room(cpa_scheduler *s, int32_t index, int *made, cpa_error *err) {
    const cpa_tenant *tenant = s->running[index]->tenant;
    cpa_fair_note_blocks(s, index);
    *made = younger_hold_enough(s, index);
    if (!*made) return CPA_OK;
    for (int32_t p = 0; p < s->n_pools; p++) {
        for (int32_t i = s->n_running - 1; i > index && beyond_quota(s, index, p) > 0; i--)
            if (s->running[i]->tenant == tenant && in_use(s->running[i], p) > 0)
                CPA_TRY(cpa_scheduler_preempt(s, i, 1, err));
        for (int32_t i = s->n_running - 1; i > index && s->lacks[p] > cpa_block_pool_free_count(s->pools[p]); i--)
            if (in_use(s->running[i], p) > 0 && cpa_fair_may_take(s, index, i))
                CPA_TRY(cpa_scheduler_preempt(s, i, 1, err));
    }
    return CPA_OK;
}

/* Entries of pool p with tokens that are computed; a chunk that is withdrawn leaves later ones without content. */
static int64_t filled(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t p) {
    return cpa_sequence_needs(sequence, &s->options, cpa_pool_rank(&s->options, p), sequence->computed);
}

/* Blocks that move when it is swapped out. */
static int64_t moved(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t p) {
    return filled(s, sequence, p) - sequence->shards[p].voided;
}

/* Computing the tokens again takes about as long as the planner predicts for one chunk of them; moving them takes
 * their bytes over the link between host and device, out and in, on the rank that has most. */
static int swap_is_cheaper(const cpa_scheduler *s, const cpa_sequence *victim) {
    const cpa_planner planner = cpa_scheduler_planner(s, victim);
    const cpa_layer_groups *groups = &s->options.groups;
    const int32_t ranks = s->options.map.cp_size;
    int64_t most = 0, layers = 0;
    for (int32_t r = 0; r < ranks; r++) {
        int64_t bytes = 0;
        for (int32_t g = 0; g < groups->count; g++)
            bytes += moved(s, victim, g * ranks + r) * groups->list[g].block_bytes;
        if (bytes > most) most = bytes;
    }
    for (int32_t g = 0; g < groups->count; g++) layers += groups->list[g].layers;
    cpa_algorithm algorithm = cpa_planner_choose(&planner, victim->computed, 0, 0).algorithm;
    double compute_s = (double)layers * cpa_planner_predict(&planner, algorithm, victim->computed, 0);
    double move_s = 2.0 * (double)most / s->options.host_bandwidth;
    return move_s < compute_s;
}

static int has_host_room(const cpa_scheduler *s, const cpa_sequence *victim) {
    for (int32_t p = 0; p < s->n_pools; p++)
        if (moved(s, victim, p) > cpa_block_pool_free_count(s->host_pools[p])) return 0;
    return 1;
}

static int should_swap(const cpa_scheduler *s, const cpa_sequence *victim) {
    if (!s->host_pools || victim->computed == 0 || s->options.preemption == CPA_PREEMPT_RECOMPUTE) return 0;
    if (s->options.preemption == CPA_PREEMPT_AUTO && !swap_is_cheaper(s, victim)) return 0;
    return has_host_room(s, victim);
}

/* Plans the move of a victim's filled blocks to host memory. */
static cpa_status swap_out(cpa_scheduler *s, cpa_sequence *victim, cpa_error *err) {
    const int32_t size = s->options.map.cp_size;
    victim->host = malloc((size_t)s->n_pools * (size_t)victim->stride * sizeof *victim->host);
    if (!victim->host) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory to swap a sequence out");
    for (int32_t p = 0; p < s->n_pools; p++) {
        int64_t n = filled(s, victim, p);
        for (int64_t i = 0; i < n; i++) {
            int32_t block = victim->blocks[p * victim->stride + i], *host = &victim->host[p * victim->stride + i];
            *host = -1;
            if (block < 0) continue;
            cpa_block_move *move = cpa_step_plan_add_swap_out(s->plan);
            if (!move) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
            cpa_block_pool_take(s->host_pools[p], 1, host);
            *move = (cpa_block_move){victim->request.id, p / size, p % size, block, *host};
            s->stats.swapped_out++;
        }
        victim->shards[p].swapped = n;
    }
    return CPA_OK;
}

cpa_status cpa_scheduler_drop_host(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    for (int32_t p = 0; p < s->n_pools && sequence->host; p++) {
        for (int64_t i = 0; i < sequence->shards[p].swapped; i++) {
            int32_t host = sequence->host[p * sequence->stride + i];
            if (host >= 0) CPA_TRY(cpa_block_pool_release(s->host_pools[p], host, err));
        }
        sequence->shards[p].swapped = 0;
    }
    free(sequence->host);
    sequence->host = NULL;
    return CPA_OK;
}

cpa_status cpa_scheduler_start_again(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    sequence->restart = sequence->blocks != NULL;
    if (sequence->blocks) return CPA_OK;
    CPA_TRY(cpa_scheduler_drop_host(s, sequence, err));
    sequence->computed = sequence->misplaced = 0;
    return CPA_OK;
}

/* The sequence keeps what it has emitted; a chunk that it was given in this plan is withdrawn. */
cpa_status cpa_scheduler_preempt(cpa_scheduler *s, int32_t index, int may_swap, cpa_error *err) {
    cpa_sequence *victim = s->running[index];
    s->n_running--;
    victim->tenant->running--;
    memmove(&s->running[index], &s->running[index + 1], (size_t)(s->n_running - index) * sizeof *s->running);
    victim->planned = victim->n_drafts = 0;
    victim->ready = s->step + 1; /* by then its last token is known */
    if (may_swap && should_swap(s, victim)) {
        CPA_TRY(swap_out(s, victim, err));
    } else {
        victim->computed = victim->misplaced = 0;
        victim->n_probe = 0;
    }
    cpa_scheduler_unlink(s, victim);
    victim->introduced = victim->restart = 0;
    cpa_scheduler_charge(victim, s->n_pools, -1);
    int32_t *release = cpa_step_plan_add_release(s->plan);
    if (!release) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    *release = victim->index;
    s->free_indices[s->n_free_indices++] = victim->index;
    cpa_waiting_push(&s->waiting, victim);
    s->stats.preemptions++;
    return cpa_sequence_close(victim, s->pools, s->n_pools, err);
}
