/* What is behind a cpa_comm, for the parts of comm/ that send messages of their own. */
#ifndef CPA_COMMUNICATOR_H
#define CPA_COMMUNICATOR_H

#include <cpattn/comm.h>

enum { CPA_COMM_MAX_RANKS = 64 };

struct cpa_comm {
    cpa_comm_ops ops;
    void *state;
    int32_t rank, size;
    double timeout_s;
    int32_t tags_taken; /* the same on every rank */
    void *remembered;   /* what is measured once for a communicator; freed with it */
};

/* Options with their defaults filled in; those of a smaller known size are zero. */
cpa_status cpa_comm_take_options(const cpa_comm_options *given, cpa_comm_options *out, cpa_error *err);

/* Takes n tags, which nobody else uses. Every rank takes the same ones in the same order, whatever fails. */
int32_t cpa_comm_take_tags(cpa_comm *comm, int32_t n);

/* Whether the request is done, which then exists no more; sets it to NULL then. NULL is done. */
cpa_status cpa_comm_test(cpa_comm *comm, cpa_comm_request **request, int *done, cpa_error *err);
/* Waits for a message from or to `peer`. */
cpa_status cpa_comm_wait(cpa_comm *comm, cpa_comm_request **request, int32_t peer, cpa_error *err);
/* Gives a request up unless it is NULL, and sets it to NULL. */
void cpa_comm_cancel(cpa_comm *comm, cpa_comm_request **request);
/* Starts a message; *request is NULL if that fails. */
cpa_status cpa_comm_start_send(cpa_comm *comm, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                               cpa_comm_request **request, cpa_error *err);
cpa_status cpa_comm_start_receive(cpa_comm *comm, int32_t peer, int32_t tag, void *data, int64_t bytes,
                                  cpa_comm_request **request, cpa_error *err);

#endif
