#include "src/schedule/scheduler_preempt.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/schedule/fair_share.h"
#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/scheduler_prefix.h"

/* How many blocks of rank r would be free of owners if those of running[index + 1 ..] were preempted that
 * running[index] may take from; counts no further than `enough`. A block with several owners is free when the last of
 * them goes. */
static int64_t freed_by(cpa_scheduler *s, int32_t index, int32_t r, int64_t enough) {
    int64_t freed = 0;
    int32_t last = s->n_running;
    while (last > index + 1 && freed < enough) {
        const cpa_sequence *victim = s->running[--last];
        if (!cpa_fair_may_take(s, index, last)) continue;
        for (int64_t i = 0; i < victim->shards[r].held; i++) {
            int32_t block = victim->blocks[r * victim->stride + i];
            if (block >= 0 && ++s->marks[block] == cpa_block_pool_owners(s->pools[r], block)) freed++;
        }
    }
    for (int32_t v = last; v < s->n_running; v++) {
        const cpa_sequence *victim = s->running[v];
        for (int64_t i = 0; i < victim->shards[r].held; i++) {
            int32_t block = victim->blocks[r * victim->stride + i];
            if (block >= 0) s->marks[block] = 0;
        }
    }
    return freed;
}

/* What the tenant of running[index] has beyond its quota on rank r, with what that sequence lacks. */
static int64_t beyond_quota(const cpa_scheduler *s, int32_t index, int32_t r) {
    if (s->options.tenant_block_quota == 0 || s->lacks[r] <= 0) return 0;
    return s->running[index]->tenant->held[r] + s->lacks[r] - s->options.tenant_block_quota;
}

static int64_t in_use(const cpa_sequence *sequence, int32_t r) {
    return sequence->shards[r].held - sequence->shards[r].voided;
}

/* Whether preempting the sequences after running[index] gives it what it lacks, on every rank. */
static int younger_hold_enough(cpa_scheduler *s, int32_t index) {
    const cpa_tenant *tenant = s->running[index]->tenant;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        int64_t missing = s->lacks[r] - cpa_block_pool_free_count(s->pools[r]), beyond = beyond_quota(s, index, r);
        int64_t held = 0;
        for (int32_t i = s->n_running - 1; i > index && (held < missing || beyond > 0); i--) {
            if (cpa_fair_may_take(s, index, i)) held += in_use(s->running[i], r);
            if (s->running[i]->tenant == tenant) beyond -= in_use(s->running[i], r);
        }
        if (held < missing || beyond > 0) return 0;
        if (missing > 0 && freed_by(s, index, r, missing) < missing) return 0;
    }
    return 1;
}

cpa_status cpa_scheduler_make_room(cpa_scheduler *s, int32_t index, int *made, cpa_error *err) {
    const cpa_tenant *tenant = s->running[index]->tenant;
    cpa_fair_note_blocks(s, index);
    *made = younger_hold_enough(s, index);
    if (!*made) return CPA_OK;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        for (int32_t i = s->n_running - 1; i > index && beyond_quota(s, index, r) > 0; i--)
            if (s->running[i]->tenant == tenant && in_use(s->running[i], r) > 0)
                CPA_TRY(cpa_scheduler_preempt(s, i, 1, err));
        for (int32_t i = s->n_running - 1; i > index && s->lacks[r] > cpa_block_pool_free_count(s->pools[r]); i--)
            if (in_use(s->running[i], r) > 0 && cpa_fair_may_take(s, index, i))
                CPA_TRY(cpa_scheduler_preempt(s, i, 1, err));
    }
    return CPA_OK;
}

/* Blocks of rank r with tokens that are computed; a chunk that is withdrawn leaves later ones without content. */
static int64_t filled(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t r) {
    return cpa_sequence_needs(sequence, &s->options, r, sequence->computed);
}

/* Computing the tokens again takes about as long as the planner predicts for one chunk of them; moving them takes
 * their bytes over the link between host and device, out and in, on the rank that has most. */
static int swap_is_cheaper(const cpa_scheduler *s, const cpa_sequence *victim) {
    const cpa_planner planner = cpa_scheduler_planner(s, victim);
    int64_t most = 0;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        int64_t blocks = filled(s, victim, r) - victim->shards[r].voided;
        if (blocks > most) most = blocks;
    }
    cpa_algorithm algorithm = cpa_planner_choose(&planner, victim->computed, 0, 0).algorithm;
    double compute_s = s->options.layers * cpa_planner_predict(&planner, algorithm, victim->computed, 0);
    double move_s = 2.0 * (double)most * (double)s->options.block_bytes / s->options.host_bandwidth;
    return move_s < compute_s;
}

static int has_host_room(const cpa_scheduler *s, const cpa_sequence *victim) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++)
        if (filled(s, victim, r) - victim->shards[r].voided > cpa_block_pool_free_count(s->host_pools[r])) return 0;
    return 1;
}

static int should_swap(const cpa_scheduler *s, const cpa_sequence *victim) {
    if (!s->host_pools || victim->computed == 0 || s->options.preemption == CPA_PREEMPT_RECOMPUTE) return 0;
    if (s->options.preemption == CPA_PREEMPT_AUTO && !swap_is_cheaper(s, victim)) return 0;
    return has_host_room(s, victim);
}

/* Plans the move of a victim's filled blocks to host memory. */
static cpa_status swap_out(cpa_scheduler *s, cpa_sequence *victim, cpa_error *err) {
    int32_t ranks = s->options.map.cp_size;
    victim->host = malloc((size_t)ranks * (size_t)victim->stride * sizeof *victim->host);
    if (!victim->host) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory to swap a sequence out");
    for (int32_t r = 0; r < ranks; r++) {
        int64_t n = filled(s, victim, r);
        for (int64_t i = 0; i < n; i++) {
            int32_t block = victim->blocks[r * victim->stride + i], *host = &victim->host[r * victim->stride + i];
            *host = -1;
            if (block < 0) continue;
            cpa_block_move *move = cpa_step_plan_add_swap_out(s->plan);
            if (!move) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
            cpa_block_pool_take(s->host_pools[r], 1, host);
            *move = (cpa_block_move){victim->request.id, r, block, *host};
            s->stats.swapped_out++;
        }
        victim->shards[r].swapped = n;
    }
    return CPA_OK;
}

cpa_status cpa_scheduler_drop_host(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    for (int32_t r = 0; r < s->options.map.cp_size && sequence->host; r++) {
        for (int64_t i = 0; i < sequence->shards[r].swapped; i++) {
            int32_t host = sequence->host[r * sequence->stride + i];
            if (host >= 0) CPA_TRY(cpa_block_pool_release(s->host_pools[r], host, err));
        }
        sequence->shards[r].swapped = 0;
    }
    free(sequence->host);
    sequence->host = NULL;
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
    cpa_scheduler_charge(victim, s->options.map.cp_size, -1);
    int32_t *release = cpa_step_plan_add_release(s->plan);
    if (!release) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    *release = victim->index;
    s->free_indices[s->n_free_indices++] = victim->index;
    cpa_waiting_push(&s->waiting, victim);
    s->stats.preemptions++;
    return cpa_sequence_close(victim, s->pools, s->options.map.cp_size, err);
}
