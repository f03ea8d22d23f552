/* The calls that programs may make on a communicator: collective ones, and messages from rank to rank. */
#include "base/check.h"
#include "comm/comm.h"
#include "comm/communicator.h"

/* The channel of a program's own calls. */
static cpa_status open_own(cpa_comm *comm, int64_t bytes, const void *data, cpa_control *out, cpa_error *err) {
    if (!comm || bytes < 0 || (bytes > 0 && !data)) {
        return cpa_fail(err, CPA_INVALID, "communicator %p: %lld bytes at %p", (void *)comm, (long long)bytes, data);
    }
    *out = (cpa_control){.comm = comm, .rank = comm->rank, .size = comm->size, .tag = CPA_COMM_TAG_COLLECTIVE};
    return CPA_OK;
}

cpa_status cpa_comm_all_gather(cpa_comm *comm, const void *mine, int64_t bytes, void *all, cpa_error *err) {
    cpa_control control;
    CPA_TRY(open_own(comm, bytes, mine, &control, err));
    if (bytes > 0 && !all) return cpa_fail(err, CPA_INVALID, "all-gather: `all` is NULL");
    return cpa_control_all_gather(&control, mine, bytes, all, err);
}

cpa_status cpa_comm_broadcast(cpa_comm *comm, void *data, int64_t bytes, int32_t root, cpa_error *err) {
    cpa_control control;
    CPA_TRY(open_own(comm, bytes, data, &control, err));
    if (root < 0 || root >= comm->size) {
        return cpa_fail(err, CPA_INVALID, "broadcast: from rank %d of %d", root, comm->size);
    }
    return cpa_control_bcast(&control, data, bytes, root, err);
}

cpa_status cpa_comm_barrier(cpa_comm *comm, cpa_error *err) {
    return cpa_comm_agree(comm, CPA_OK, err);
}

cpa_status cpa_comm_agree(cpa_comm *comm, cpa_status mine, cpa_error *err) {
    cpa_control control;
    CPA_TRY(open_own(comm, 0, NULL, &control, err));
    return cpa_control_agree(&control, mine, err);
}

static cpa_status check_peer(const cpa_comm *comm, int32_t peer, int64_t bytes, const void *data, cpa_error *err) {
    if (!comm || peer < 0 || peer >= comm->size || peer == comm->rank || bytes < 0 || (bytes > 0 && !data)) {
        return cpa_fail(err, CPA_INVALID, "message of rank %d: %lld bytes at %p, peer %d, expected another rank of %d",
                        cpa_comm_rank(comm), (long long)bytes, data, peer, cpa_comm_size(comm));
    }
    return CPA_OK;
}

/* Waits for a message, and gives it up if that fails: its buffer is the caller's. */
static cpa_status complete(cpa_comm *comm, cpa_comm_request *request, int32_t peer, cpa_error *err) {
    cpa_status status = cpa_comm_wait(comm, &request, peer, err);
    cpa_comm_cancel(comm, &request);
    return status;
}

cpa_status cpa_comm_send(cpa_comm *comm, int32_t peer, const void *data, int64_t bytes, cpa_error *err) {
    cpa_comm_request *request;
    CPA_TRY(check_peer(comm, peer, bytes, data, err));
    CPA_TRY(cpa_comm_start_send(comm, peer, CPA_COMM_TAG_MESSAGE, data, bytes, &request, err));
    return complete(comm, request, peer, err);
}

cpa_status cpa_comm_receive(cpa_comm *comm, int32_t peer, void *data, int64_t bytes, cpa_error *err) {
    cpa_comm_request *request;
    CPA_TRY(check_peer(comm, peer, bytes, data, err));
    CPA_TRY(cpa_comm_start_receive(comm, peer, CPA_COMM_TAG_MESSAGE, data, bytes, &request, err));
    return complete(comm, request, peer, err);
}
