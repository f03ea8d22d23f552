#include "comm/store/losses.h"

#include <string.h>

#include "base/check.h"
#include "base/clock.h"

/* How long messages of a rank that has ended may still be on their way. */
#define GRACE_S 0.5

/* A rank that refuses one call of a channel and then the next: who still waits in the first has to see that one. */
static int goes_on(const cpa_loss *l, const cpa_notice *n) {
    return l->kind == CPA_NOTICE_REFUSED && n->kind == CPA_NOTICE_REFUSED && l->refusal.channel == n->refusal.channel &&
           (l->refusal.and_later || n->refusal.call == l->last_call + 1);
}

/* What a rank has said about itself, and what it is lost for to all, explain what comes behind. */
static int explains(const cpa_loss *l, const cpa_notice *n) {
    if (l->kind == CPA_NOTICE_REFUSED) return l->refusal.channel < 0 && n->kind != CPA_NOTICE_REFUSED;
    return l->kind == CPA_NOTICE_SILENT && (n->kind != CPA_NOTICE_REFUSED || n->refusal.channel >= 0);
}

void cpa_loss_note(cpa_loss *l, const cpa_notice *n) {
    if (goes_on(l, n)) {
        l->last_call = n->refusal.call;
        l->refusal.and_later |= n->refusal.and_later;
    } else if (!explains(l, n)) {
        *l = (cpa_loss){.kind = (cpa_notice_kind)n->kind,
                        .since = cpa_clock_now(),
                        .refusal = n->refusal,
                        .last_call = n->refusal.call,
                        .status = n->status};
        memcpy(l->message, n->message, sizeof l->message);
    }
}

static int refuses(const cpa_loss *l, cpa_calls calls) {
    const cpa_call_refusal *r = &l->refusal;
    if (r->channel < 0) return 1;
    return r->channel == calls.channel && calls.last >= r->call && (r->and_later || calls.first <= l->last_call);
}

static cpa_status check_loss(const cpa_loss *l, int32_t rank, int32_t peer, cpa_calls calls, cpa_error *err) {
    const int late = cpa_clock_now() - l->since > GRACE_S;
    switch (l->kind) {
        case CPA_NOTICE_HEARTBEAT: break;
        case CPA_NOTICE_LEFT:
            if (peer != rank || !late) break;
            return cpa_fail(err, CPA_COMM, "rank %d has left", rank);
        case CPA_NOTICE_ENDED:
            if (!late) break;
            return cpa_fail(err, CPA_COMM, "rank %d has ended", rank);
        case CPA_NOTICE_SILENT: return cpa_fail(err, CPA_COMM, "rank %d %s", rank, l->message);
        case CPA_NOTICE_REFUSED:
            if (!refuses(l, calls)) break;
            return cpa_fail(err, l->status, "rank %d: %s", rank, l->message);
    }
    return CPA_OK;
}

cpa_status cpa_losses_check(const cpa_loss *losses, int32_t size, int32_t peer, cpa_calls calls, cpa_error *err) {
    for (int32_t i = 0; i < 2 * size; i++) { /* who only left, or ended, after all others */
        const cpa_loss *l = &losses[i % size];
        const int is_gone = l->kind == CPA_NOTICE_LEFT || l->kind == CPA_NOTICE_ENDED;
        if (is_gone == (i >= size)) CPA_TRY(check_loss(l, i % size, peer, calls, err));
    }
    return CPA_OK;
}

int32_t cpa_losses_who_gave_up(const cpa_loss *losses, int32_t size, cpa_error *why) {
    for (int32_t rank = 0; rank < size; rank++) {
        const cpa_loss *l = &losses[rank];
        if (l->kind != CPA_NOTICE_REFUSED || l->refusal.channel >= 0) continue;
        cpa_fail(why, l->status, "rank %d: %s", rank, l->message);
        return rank;
    }
    return -1;
}
