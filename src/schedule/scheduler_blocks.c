#include "src/schedule/scheduler_blocks.h"

#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/block_events.h"
#include "src/schedule/fair_step.h"

int cpa_scheduler_reserve_pins(cpa_scheduler *s, int64_t n) {
    return cpa_array_reserve(&s->pins, &s->pins_capacity, s->n_pins + n, sizeof *s->pins);
}

cpa_status cpa_scheduler_pin(cpa_scheduler *s, cpa_block_pool *pool, int32_t block, cpa_error *err) {
    if (!cpa_scheduler_reserve_pins(s, 1)) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    s->pins[s->n_pins++] = (cpa_pin){pool, block};
    return CPA_OK;
}

cpa_status cpa_scheduler_unpin_all(cpa_scheduler *s, cpa_error *err) {
    for (int64_t i = 0; i < s->n_pins; i++) CPA_TRY(cpa_block_pool_release(s->pins[i].pool, s->pins[i].block, err));
    s->n_pins = 0;
    return CPA_OK;
}

int64_t cpa_scheduler_unfind(cpa_scheduler *s, int32_t pool, int32_t block) {
    const int32_t size = s->options.map.cp_size, rank = pool % size, first = pool - rank;
    cpa_prefix_cache *cache = s->caches[pool / size];
    const int32_t *unit = cpa_prefix_cache_unit(cache, rank, block);
    int64_t found = 0;
    if (!unit) return 0;
    memcpy(s->unit, unit, (size_t)size * sizeof *s->unit);
    for (int32_t r = 0; r < size; r++) {
        if (s->unit[r] < 0) continue;
        cpa_block_events_removed(s, pool / size, cpa_prefix_cache_digest(cache, r, s->unit[r]));
        cpa_prefix_cache_drop(cache, r, s->unit[r]);
        cpa_block_pool_forget(s->pools[first + r], s->unit[r]);
        found++;
    }
    return found;
}

void cpa_scheduler_charge(const cpa_sequence *sequence, int32_t n_pools, int sign) {
    for (int32_t p = 0; p < n_pools; p++)
        sequence->tenant->held[p] += sign * (sequence->shards[p].held - sequence->shards[p].voided);
}

int64_t cpa_scheduler_next_tokens(const cpa_scheduler *s, const cpa_sequence *sequence) {
    int64_t rest = cpa_sequence_known(sequence) - sequence->computed, threshold = s->options.long_prefill_threshold;
    if (threshold > 0 && rest > threshold) rest = threshold;
    if (!cpa_sequence_decodes(sequence)) {
        const int is_first = s->n_running > 0 && sequence == s->running[0]; /* which always advances */
        const int64_t most = cpa_fair_step_prompt_tokens(s, sequence->tenant);
        rest = cpa_min64(rest, is_first ? cpa_max64(most, s->options.block_size) : most);
    }
    return rest < s->budget ? rest : s->budget;
}

int cpa_scheduler_has_room(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    int room = 1;
    for (int32_t p = 0; p < s->n_pools; p++) {
        s->lacks[p] = cpa_sequence_lacks(sequence, &s->options, p, tokens);
        if (s->lacks[p] > cpa_block_pool_free_count(s->pools[p])) room = 0;
    }
    return room;
}

cpa_planner cpa_scheduler_planner(const cpa_scheduler *s, const cpa_sequence *sequence) {
    const cpa_planner *planner = &s->options.planner;
    return sequence->placement.kind == CPA_ON_RANK ? cpa_planner_on_rank(planner) : *planner;
}

int cpa_scheduler_within_quota(const cpa_scheduler *s, const cpa_sequence *sequence) {
    int64_t quota = s->options.tenant_block_quota;
    for (int32_t p = 0; quota > 0 && p < s->n_pools; p++)
        if (s->lacks[p] > 0 && sequence->tenant->held[p] + s->lacks[p] > quota) return 0;
    return 1;
}

void cpa_scheduler_take_lacking(cpa_scheduler *s, cpa_sequence *sequence) {
    for (int32_t p = 0; p < s->n_pools; p++) {
        if (s->lacks[p] <= 0) continue;
        cpa_sequence_take(sequence, p, s->pools[p], s->lacks[p]);
        sequence->tenant->held[p] += s->lacks[p];
    }
}

/* What a preempted sequence computes again has counted already. */
static void count_service(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens) {
    const int64_t end = sequence->computed + tokens;
    const int64_t first = cpa_max64(sequence->served, sequence->computed);
    const int64_t last = cpa_min64(end, sequence->request.prompt_tokens);
    cpa_tenant_serve(sequence->tenant, cpa_max64(last - first, 0), end == cpa_sequence_known(sequence));
    sequence->served = cpa_max64(sequence->served, last);
    cpa_waiting_reorder(&s->waiting, sequence->tenant);
}

void cpa_scheduler_place(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens) {
    cpa_scheduler_take_lacking(s, sequence);
    count_service(s, sequence, tokens);
    cpa_fair_step_take(s, sequence, tokens);
    sequence->planned = tokens;
    s->budget -= tokens;
    s->scheduled[s->n_scheduled++] = sequence;
}
