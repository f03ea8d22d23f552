/* A communicator of some ranks of another: its messages are those of the other, with tags behind its own. */
#include <stdlib.h>

#include "base/check.h"
#include "comm/communicator.h"

enum { TAGS = 2048 };

typedef struct first_ranks {
    cpa_comm *whole;
    int32_t first_tag;
} first_ranks;

static cpa_status send_message(void *state, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                               cpa_comm_request **out, cpa_error *err) {
    const first_ranks *ranks = state;
    return ranks->whole->ops.send(ranks->whole->state, peer, ranks->first_tag + tag, data, bytes, out, err);
}

static cpa_status receive_message(void *state, int32_t peer, int32_t tag, void *data, int64_t bytes,
                                  cpa_comm_request **out, cpa_error *err) {
    const first_ranks *ranks = state;
    return ranks->whole->ops.receive(ranks->whole->state, peer, ranks->first_tag + tag, data, bytes, out, err);
}

static cpa_status test_message(void *state, cpa_comm_request *request, int *done, cpa_error *err) {
    const first_ranks *ranks = state;
    return ranks->whole->ops.test(ranks->whole->state, request, done, err);
}

static void cancel_message(void *state, cpa_comm_request *request) {
    const first_ranks *ranks = state;
    ranks->whole->ops.cancel(ranks->whole->state, request);
}

cpa_status cpa_comm_first_ranks(cpa_comm *whole, int32_t n, cpa_comm **out, cpa_error *err) {
    const cpa_comm_ops ops = {.size = sizeof ops,
                              .name = whole->ops.name,
                              .send = send_message,
                              .receive = receive_message,
                              .test = test_message,
                              .cancel = cancel_message,
                              .close = free};
    cpa_comm *made = NULL;
    first_ranks *state = malloc(sizeof *state);
    cpa_status status = state ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for a communicator of %d ranks", n);
    status = cpa_comm_agree(whole, status, err);
    if (status == CPA_OK) status = cpa_comm_take_tags(whole, TAGS, &state->first_tag, err); /* the same everywhere */
    if (status != CPA_OK) {
        free(state);
        return status;
    }
    state->whole = whole;
    if (whole->rank < n) status = cpa_comm_create(&ops, state, whole->rank, n, NULL, &made, err);
    if (!made) free(state);
    status = cpa_comm_agree(whole, status, err);
    if (status != CPA_OK) {
        cpa_comm_destroy(made);
        return status;
    }
    if (made) made->n_tags = TAGS;
    *out = made;
    return CPA_OK;
}
