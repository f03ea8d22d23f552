#include "src/schedule/fair_share.h"

#include "base/min_max.h"

cpa_fair_share cpa_fair_share_of(const cpa_scheduler *s) {
    const int64_t tenants = s->waiting.is_fair ? cpa_max64(cpa_tenants_active(&s->tenants), 1) : 1;
    return (cpa_fair_share){.tenants = tenants,
                            .places = cpa_max64(s->options.max_num_seqs / tenants, 1),
                            .blocks = s->options.num_blocks / tenants};
}

int cpa_fair_is_below(const cpa_scheduler *s, const cpa_tenant *tenant) {
    const cpa_fair_share share = cpa_fair_share_of(s);
    if (share.tenants == 1 || tenant->running >= share.places) return 0;
    for (int32_t r = 0; r < s->options.map.cp_size; r++)
        if (tenant->held[r] >= share.blocks) return 0;
    return 1;
}

void cpa_fair_note_blocks(cpa_scheduler *s, int32_t taker) {
    const cpa_fair_share share = cpa_fair_share_of(s);
    for (cpa_tenant *tenant = s->tenants.by_name; tenant; tenant = tenant->hh.next) {
        const int takes = tenant == s->running[taker]->tenant;
        tenant->is_above_share = 0;
        for (int32_t r = 0; r < s->options.map.cp_size; r++)
            tenant->is_above_share |= tenant->held[r] + (takes ? s->lacks[r] : 0) > share.blocks;
    }
}

int cpa_fair_may_take(const cpa_scheduler *s, int32_t taker, int32_t victim) {
    const cpa_tenant *to = s->running[taker]->tenant, *from = s->running[victim]->tenant;
    return taker == 0 || to == from || !to->is_above_share || from->is_above_share;
}
