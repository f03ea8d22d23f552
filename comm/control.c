/* The control channel: blocking collectives, made of messages. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "comm/comm.h"

/* Values of small collectives lie on the stack. */
enum { SMALL_BYTES = 4096 };

cpa_status cpa_control_open(cpa_comm *comm, cpa_control *out, cpa_error *err) {
    if (!comm) return cpa_fail(err, CPA_INVALID, "no communicator");
    int32_t tag;
    CPA_TRY(cpa_comm_take_tags(comm, CPA_CONTROL_TAGS, &tag, err));
    *out = (cpa_control){.comm = comm, .rank = comm->rank, .size = comm->size, .tag = tag, .channel = comm->channels++};
    return CPA_OK;
}

void cpa_control_close(cpa_control *control) {
    if (!control->comm) return;
    for (int32_t rank = 0; rank < control->size; rank++) {
        cpa_comm_cancel(control->comm, &control->present[rank]);
        cpa_comm_cancel(control->comm, &control->notified[rank]);
    }
    cpa_comm_give_back_tags(control->comm, control->tag, CPA_CONTROL_TAGS);
    control->comm = NULL;
}

/* Sends to one rank while receiving from another; either may have nothing, -1 bytes. */
static cpa_status send_receive(cpa_control *control, int32_t to, const void *send, int64_t send_bytes, int32_t from,
                               void *recv, int64_t recv_bytes, cpa_error *err) {
    cpa_comm *comm = control->comm;
    cpa_comm_request *sent = NULL, *received = NULL;
    cpa_status status = CPA_OK;
    if (recv_bytes >= 0) {
        status = cpa_comm_start_receive(comm, from, control->tag, recv, recv_bytes, &received, err);
    }
    if (status == CPA_OK && send_bytes >= 0) {
        status = cpa_comm_start_send(comm, to, control->tag, send, send_bytes, &sent, err);
    }
    if (status == CPA_OK) status = cpa_comm_wait(comm, &received, from, err);
    if (status == CPA_OK) status = cpa_comm_wait(comm, &sent, to, err);
    cpa_comm_cancel(comm, &received);
    cpa_comm_cancel(comm, &sent);
    return status;
}

/* A tree: in the order that begins at root, rank r hears from r without its highest bit, and tells r + 2^i above. */
cpa_status cpa_control_bcast(cpa_control *control, void *data, int64_t bytes, int32_t root, cpa_error *err) {
    const int32_t size = control->size, mine = (control->rank - root + size) % size;
    for (int32_t reach = 1; reach < size; reach *= 2) {
        if (mine >= reach && mine < 2 * reach) {
            int32_t from = (mine - reach + root) % size;
            CPA_TRY(send_receive(control, -1, NULL, -1, from, data, bytes, err));
        } else if (mine < reach && mine + reach < size) {
            int32_t to = (mine + reach + root) % size;
            CPA_TRY(send_receive(control, to, data, bytes, -1, NULL, -1, err));
        }
    }
    return CPA_OK;
}

/* Bruck's algorithm: after round i a rank has what 2^i ranks from its own on gave, in that order. */
static cpa_status gather_rotated(cpa_control *control, const void *mine, int64_t bytes, char *rotated, cpa_error *err) {
    const int32_t size = control->size, rank = control->rank;
    if (bytes > 0) memcpy(rotated, mine, (size_t)bytes);
    for (int32_t have = 1; have < size;) {
        int32_t n = have < size - have ? have : size - have;
        CPA_TRY(send_receive(control, (rank - have + size) % size, rotated, n * bytes, (rank + have) % size,
                             rotated + have * bytes, n * bytes, err));
        have += n;
    }
    return CPA_OK;
}

cpa_status cpa_control_all_gather(cpa_control *control, const void *mine, int64_t bytes, void *all, cpa_error *err) {
    char small[SMALL_BYTES];
    const int64_t total = bytes * control->size;
    char *rotated = total <= SMALL_BYTES ? small : malloc((size_t)total);
    if (!rotated) return cpa_fail(err, CPA_NO_MEMORY, "no memory to gather %lld bytes", (long long)total);
    cpa_status status = gather_rotated(control, mine, bytes, rotated, err);
    for (int32_t i = 0; status == CPA_OK && bytes > 0 && i < control->size; i++) {
        memcpy((char *)all + (control->rank + i) % control->size * bytes, rotated + i * bytes, (size_t)bytes);
    }
    if (rotated != small) free(rotated);
    return status;
}

typedef enum fold { FOLD_MAX, FOLD_SUM, FOLD_SUM_U64 } fold;

/* All values are folded in the order of the ranks: every rank has the same bits. */
static void fold_value(fold how, const char *all, int64_t stride, int32_t size, char *out) {
    double value, result = 0;
    uint64_t word, sum = 0;
    for (int32_t rank = 0; rank < size; rank++) {
        memcpy(&value, all + rank * stride, sizeof value);
        memcpy(&word, all + rank * stride, sizeof word);
        sum += word;
        result = rank == 0 ? value : how == FOLD_SUM ? result + value : result >= value ? result : value;
    }
    if (how == FOLD_SUM_U64) {
        memcpy(out, &sum, sizeof sum);
    } else {
        memcpy(out, &result, sizeof result);
    }
}

static cpa_status reduce(cpa_control *control, void *values, int32_t n, fold how, cpa_error *err) {
    _Static_assert(sizeof(double) == sizeof(uint64_t), "values of 8 bytes");
    char small[SMALL_BYTES];
    const int64_t bytes = n * (int64_t)sizeof(uint64_t);
    char *all = bytes * control->size <= SMALL_BYTES ? small : malloc((size_t)(bytes * control->size));
    if (!all) return cpa_fail(err, CPA_NO_MEMORY, "no memory to reduce %d values", n);
    cpa_status status = cpa_control_all_gather(control, values, bytes, all, err);
    for (int32_t i = 0; status == CPA_OK && i < n; i++) {
        fold_value(how, all + i * sizeof(uint64_t), bytes, control->size, (char *)values + i * sizeof(uint64_t));
    }
    if (all != small) free(all);
    return status;
}

cpa_status cpa_control_max(cpa_control *control, double *values, int32_t n, cpa_error *err) {
    return reduce(control, values, n, FOLD_MAX, err);
}

cpa_status cpa_control_sum(cpa_control *control, double *values, int32_t n, cpa_error *err) {
    return reduce(control, values, n, FOLD_SUM, err);
}

cpa_status cpa_control_sum_u64(cpa_control *control, uint64_t *values, int32_t n, cpa_error *err) {
    return reduce(control, values, n, FOLD_SUM_U64, err);
}

cpa_status cpa_control_gather(cpa_control *control, const void *mine, int64_t bytes, void *all, int32_t root,
                              cpa_error *err) {
    if (control->rank != root) return send_receive(control, root, mine, bytes, -1, NULL, -1, err);
    for (int32_t rank = 0; rank < control->size; rank++) {
        char *at = (char *)all + rank * bytes;
        if (rank != root) {
            CPA_TRY(send_receive(control, -1, NULL, -1, rank, at, bytes, err));
        } else if (bytes > 0) {
            memcpy(at, mine, (size_t)bytes);
        }
    }
    return CPA_OK;
}

/* Where the bytes for or of each rank begin; 0 if there are too many. */
static int to_offsets(const int64_t *bytes, int32_t size, int64_t *offsets) {
    int64_t total = 0;
    for (int32_t r = 0; r < size; r++) {
        offsets[r] = total;
        if (bytes[r] < 0 || bytes[r] > INT_MAX - total) return 0;
        total += bytes[r];
    }
    return 1;
}

cpa_status cpa_control_exchange(cpa_control *control, const void *send, const int64_t *send_bytes, void *recv,
                                const int64_t *recv_bytes, cpa_error *err) {
    int64_t from[CPA_COMM_MAX_RANKS], to[CPA_COMM_MAX_RANKS];
    const int32_t size = control->size, rank = control->rank;
    if (!to_offsets(send_bytes, size, from) || !to_offsets(recv_bytes, size, to)) {
        return cpa_fail(err, CPA_INVALID, "exchange: more than %d bytes in one direction", INT_MAX);
    }
    if (send_bytes[rank] > 0)
        memcpy((char *)recv + to[rank], (const char *)send + from[rank], (size_t)send_bytes[rank]);
    for (int32_t away = 1; away < size; away++) {
        int32_t next = (rank + away) % size, last = (rank - away + size) % size;
        CPA_TRY(send_receive(control, next, (const char *)send + from[next], send_bytes[next], last,
                             (char *)recv + to[last], recv_bytes[last], err));
    }
    return CPA_OK;
}

cpa_status cpa_control_agree(cpa_control *control, cpa_status mine, cpa_error *err) {
    int32_t all[CPA_COMM_MAX_RANKS], own = mine, lowest = 0;
    CPA_TRY(cpa_control_all_gather(control, &own, sizeof own, all, err));
    while (lowest < control->size && all[lowest] == CPA_OK) lowest++;
    if (lowest == control->size) return CPA_OK;

    cpa_error failure = {.status = mine};
    if (lowest == control->rank) {
        const char *message = err && err->message[0] ? err->message : cpa_status_name(mine);
        cpa_fail(&failure, mine, "rank %d: %s", lowest, message);
    }
    CPA_TRY(cpa_control_bcast(control, &failure, sizeof failure, lowest, err));
    const int length = (int)strnlen(failure.message, sizeof failure.message);
    const cpa_status status = cpa_status_from((int64_t)failure.status);
    return cpa_fail(err, status == CPA_OK ? CPA_COMM : status, "%.*s", length, failure.message);
}
