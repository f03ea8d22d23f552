#include "src/schedule/fair_share.h"

#include "base/min_max.h"

cpa_fair_share cpa_fair_share_of(const cpa_scheduler *s) {
    const int64_t tenants = s->waiting.is_fair ? cpa_max64(cpa_tenants_active(&s->tenants), 1) : 1;
    return (cpa_fair_share){.tenants = tenants, .running = cpa_max64(s->options.max_num_seqs / tenants, 1)};
}

int64_t cpa_fair_share_blocks(const cpa_scheduler *s, const cpa_fair_share *share, int32_t pool) {
    return cpa_pool_group(&s->options, pool)->num_blocks / share->tenants;
}

int cpa_fair_is_below(const cpa_scheduler *s, const cpa_tenant *tenant) {
    const cpa_fair_share share = cpa_fair_share_of(s);
    if (share.tenants == 1 || tenant->running >= share.running) return 0;
    for (int32_t p = 0; p < s->n_pools; p++)
        if (tenant->held[p] >= cpa_fair_share_blocks(s, &share, p)) return 0;
    return 1;
}

void cpa_fair_note_blocks(cpa_scheduler *s, int32_t taker) {
    const cpa_fair_share share = cpa_fair_share_of(s);
    for (cpa_tenant *tenant = s->tenants.by_name; tenant; tenant = tenant->hh.next) {
        const int takes = tenant == s->running[taker]->tenant;
        tenant->is_above_share = 0;
        for (int32_t p = 0; p < s->n_pools; p++)
            tenant->is_above_share |= tenant->held[p] + (takes ? s->lacks[p] : 0) > cpa_fair_share_blocks(s, &share, p);
    }
}

int cpa_fair_may_take(const cpa_scheduler *s, int32_t taker, int32_t victim) {
    const cpa_tenant *to = s->running[taker]->tenant, *from = s->running[victim]->tenant;
    return taker == 0 || to == from || !to->is_above_share || from->is_above_share;
}
