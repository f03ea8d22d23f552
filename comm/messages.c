#include "comm/messages.h"

#include <inttypes.h>

#include "base/check.h"

static cpa_status check_message(const cpa_control *control, const cpa_message *msgs, int32_t i, cpa_error *err) {
    const cpa_message *m = &msgs[i];
    if (m->peer < 0 || m->peer >= control->size || m->peer == control->rank) {
        return cpa_fail(err, CPA_INVALID, "message %d of rank %d: peer %d, expected another rank of 0..%d", i,
                        control->rank, m->peer, control->size - 1);
    }
    if (m->send_bytes < 0 || m->recv_bytes < 0 || (m->send_bytes && !m->send) || (m->recv_bytes && !m->recv)) {
        return cpa_fail(err, CPA_INVALID,
                        "message %d of rank %d: %" PRId64 " bytes to send from %p, %" PRId64 " to receive at %p", i,
                        control->rank, m->send_bytes, m->send, m->recv_bytes, m->recv);
    }
    for (int32_t j = 0; j < i; j++) {
        if (msgs[j].peer == m->peer) {
            return cpa_fail(err, CPA_INVALID, "messages %d and %d of rank %d both go to peer %d", j, i, control->rank,
                            m->peer);
        }
    }
    return CPA_OK;
}

cpa_status cpa_messages_check(const cpa_control *control, const cpa_message *msgs, int32_t n, cpa_error *err) {
    for (int32_t i = 0; i < n; i++) CPA_TRY(check_message(control, msgs, i, err));
    return CPA_OK;
}
