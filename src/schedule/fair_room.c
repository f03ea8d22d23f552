#include "src/schedule/fair_room.h"

#include "base/check.h"
#include "src/schedule/fair_share.h"
#include "src/schedule/scheduler_preempt.h"

/* What a waiting sequence asks of the others. */
typedef struct demand {
    const cpa_sequence *sequence;
    const int64_t *lacks;
    cpa_fair_share share;
} demand;

static int has_free_index(const cpa_scheduler *s) {
    return s->n_free_indices > 0;
}

static int has_blocks(const cpa_scheduler *s, const demand *d, int32_t pool) {
    return d->lacks[pool] <= cpa_block_pool_free_count(s->pools[pool]);
}

static int is_met(const cpa_scheduler *s, const demand *d) {
    for (int32_t p = 0; p < s->n_pools; p++)
        if (!has_blocks(s, d, p)) return 0;
    return has_free_index(s);
}

static int is_within_share(const cpa_scheduler *s, const demand *d) {
    const cpa_tenant *tenant = d->sequence->tenant;
    for (int32_t p = 0; p < s->n_pools; p++)
        if (tenant->held[p] + d->lacks[p] > cpa_fair_share_blocks(s, &d->share, p)) return 0;
    return tenant->running < d->share.running;
}

/* Whether a running sequence has something that is asked for and is not its tenant's share. What this plan has admitted
 * stays, and so does the first, which always advances. */
static int gives_way(const cpa_scheduler *s, const demand *d, int32_t index) {
    const cpa_sequence *victim = s->running[index];
    const cpa_tenant *tenant = victim->tenant;
    if (index == 0 || !victim->introduced || tenant == d->sequence->tenant ||
        victim->request.priority < d->sequence->request.priority)
        return 0;
    if (!has_free_index(s) && tenant->running > d->share.running) return 1;
    for (int32_t p = 0; p < s->n_pools; p++)
        if (!has_blocks(s, d, p) && tenant->held[p] > cpa_fair_share_blocks(s, &d->share, p) &&
            victim->shards[p].held > 0)
            return 1;
    return 0;
}

/* Whether those who would give way hold enough. Of a block that several share only the last one's end frees it: then
 * more give way than this says, or the demand is not met in this plan. */
static int can_be_met(const cpa_scheduler *s, const demand *d) {
    int frees_index = has_free_index(s);
    for (int32_t i = 0; i < s->n_running; i++)
        frees_index |= gives_way(s, d, i) && s->running[i]->tenant->running > d->share.running;
    for (int32_t p = 0; p < s->n_pools; p++) {
        int64_t blocks = cpa_block_pool_free_count(s->pools[p]);
        for (int32_t i = 0; i < s->n_running; i++)
            if (gives_way(s, d, i)) blocks += s->running[i]->shards[p].held - s->running[i]->shards[p].voided;
        if (blocks < d->lacks[p]) return 0;
    }
    return frees_index;
}

cpa_status cpa_fair_make_room(cpa_scheduler *s, const cpa_sequence *sequence, const int64_t *lacks, int *made,
                              cpa_error *err) {
    const demand d = {.sequence = sequence, .lacks = lacks, .share = cpa_fair_share_of(s)};
    *made = is_met(s, &d);
    if (*made || d.share.tenants == 1 || !is_within_share(s, &d) || !can_be_met(s, &d)) return CPA_OK;
    for (int32_t i = s->n_running - 1; i > 0 && !is_met(s, &d); i--)
        if (gives_way(s, &d, i)) CPA_TRY(cpa_scheduler_preempt(s, i, 1, err));
    *made = is_met(s, &d);
    return CPA_OK;
}
