/* The transport through peer memory. Short messages go by kernels that store them into an inbox of the receiver: see
 * comm/peer/stores.h. Of all others the sender's copy engine writes into the receiver's buffer.
 *
 * Two things must be known before a copy. Where to write: the receiver tells the sender, in a message, when it starts
 * the exchange; the sender's start waits for that on the host. When to write: the receiver's device tells the sender's,
 * through flags of device memory that each rank keeps for every other. There is a lane for each other rank, and an
 * exchange is on it:
 *
 *     wait for the caller's `ready`
 *     receiving: set the peer's flag `writable`
 *     sending:   wait until the own flag `writable` is set; copy; clear `writable`; set the peer's flag `arrived`
 *     receiving: wait until the own flag `arrived` is set
 *     record `done`; clear `arrived`
 *
 * The flags never need to count. A rank sets the peer's `writable` again only in its next exchange with that peer,
 * which its lane does behind the arrival of this one, and so behind the peer's clearing of the flag. The peer sets
 * `arrived` again only when it was told `writable` again, which is behind the clearing of `arrived`. Words without a
 * count let a captured exchange be launched again and again. Setting a flag takes effect after everything before it on
 * its stream, the copy included.
 *
 * No deadlock, even if the device runs all streams as one, in the order of the calls: an exchange sets all `writable`
 * before it waits for any, and all `arrived` before it waits for any, and what it waits for its peers have set in the
 * same exchange. To save calls, the first wait of each kind goes with the last setting before it. */
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>

#include "base/clock.h"
#include "comm/device/exchange.h"
#include "comm/device_transport.h"
#include "comm/peer/memory.h"
#include "comm/peer/stores.h"

/* The flags of one rank for one other. */
typedef struct peer_flags {
    uint32_t writable;
    uint32_t arrived;
} peer_flags;

/* What a rank holds for one other. */
typedef struct peer_link {
    peer_flags *theirs; /* flags that the peer keeps for this rank, mapped */
    char *theirs_base;
    cpa_peer_imports imports;
} peer_link;

/* Addresses on their way to the senders of one exchange. */
typedef struct address_box {
    cpa_peer_address *addresses; /* [size] */
    cpa_comm_request **requests; /* [size] */
} address_box;

typedef struct peer_transport {
    cpa_device_transport head;
    int32_t tag;       /* tag of the messages that carry addresses */
    peer_flags *flags; /* device, [size]: each written by the rank of its index */
    peer_link *links;  /* [size] */
    cudaStream_t rescue;
    cpa_stores stores; /* stored messages; their memory lies behind the flags */
    cpa_peer_exports exports;
    address_box boxes[CPA_TRANSPORT_MAX_IN_FLIGHT];
} peer_transport;

static int32_t lane_of(const peer_transport *t, int32_t peer) {
    return cpa_other_index(t->head.control->rank, peer);
}

/* ---- where to write ---- */

/* Waits for a request; the peer may take long to reach its own start. */
static cpa_status await(const peer_transport *t, cpa_comm_request **request, int32_t peer, int64_t exchange,
                        cpa_error *err) {
    double begin = cpa_clock_now();
    int done = 0;
    for (;;) {
        CPA_TRY(cpa_comm_test(t->head.control->comm, request, &done, err));
        if (done) return CPA_OK;
        CPA_TRY(cpa_comm_check(t->head.control->comm, peer, err));
        double waited = cpa_clock_now() - begin;
        if (waited > t->head.base.timeout_s) {
            return cpa_fail(err, CPA_COMM, "rank %d: exchange %" PRId64 " has waited %.0f s for rank %d to start it",
                            t->head.control->rank, exchange, waited, peer);
        }
        sched_yield();
    }
}

static cpa_status tell_addresses(peer_transport *t, const cpa_exchange *exchange, const cpa_message *msgs,
                                 int32_t n_msgs, cpa_error *err) {
    address_box *box = &t->boxes[exchange - t->head.exchanges];
    for (int32_t i = 0; i < n_msgs; i++) {
        const cpa_message *m = &msgs[i];
        if (m->recv_bytes == 0) continue;
        cpa_peer_address *address = &box->addresses[m->peer];
        CPA_TRY(await(t, &box->requests[m->peer], m->peer, exchange->number, err)); /* of an earlier exchange */
        CPA_TRY(cpa_peer_export(&t->exports, &t->head.driver, m->recv, m->recv_bytes, address, err));
        CPA_TRY(cpa_comm_start_send(t->head.control->comm, m->peer, t->tag, address, sizeof *address,
                                    &box->requests[m->peer], err));
    }
    return CPA_OK;
}

/* Where the message goes, in this process's addresses. */
static cpa_status learn_address(peer_transport *t, const cpa_exchange *exchange, const cpa_message *m, void **out,
                                cpa_error *err) {
    cpa_peer_address address;
    cpa_comm_request *request;
    cpa_comm *comm = t->head.control->comm;
    CPA_TRY(cpa_comm_start_receive(comm, m->peer, t->tag, &address, sizeof address, &request, err));
    cpa_status status = await(t, &request, m->peer, exchange->number, err);
    cpa_comm_cancel(comm, &request);
    CPA_TRY(status);
    if (address.bytes != m->send_bytes) {
        return cpa_fail(err, CPA_COMM, "rank %d sends %" PRId64 " bytes to rank %d, which expects %" PRId64,
                        t->head.control->rank, m->send_bytes, m->peer, address.bytes);
    }
    peer_link *link = &t->links[m->peer];
    *out = cpa_peer_find(&link->imports, &address);
    if (*out) return CPA_OK;
    CPA_TRY(cpa_device_transport_drain(&t->head.base, t->head.lanes[lane_of(t, m->peer)], NULL, err));
    return cpa_peer_map(&link->imports, &address, out, err);
}

/* ---- one exchange ---- */

/* A message with something to move. */
typedef struct transfer {
    const cpa_message *m;
    int32_t lane;
    void *to; /* destination of the message, in the peer's memory */
} transfer;

static cpa_status enqueue_ops(peer_transport *t, const transfer *x, cpa_mem_op *ops, int n, cpa_error *err) {
    return n > 0 ? cpa_driver_enqueue(&t->head.driver, t->head.lanes[x->lane], ops, n, err) : CPA_OK;
}

static int add_set_writable(const peer_transport *t, const transfer *x, cpa_mem_op *ops) {
    if (x->m->recv_bytes == 0) return 0;
    ops[0] = cpa_mem_op_write(&t->links[x->m->peer].theirs->writable, 1);
    return 1;
}

/* In a graph every batch of operations is a node, which costs microseconds, and nothing follows `done`: the flag is
 * cleared in the same batch. */
static int add_wait_arrived(const peer_transport *t, const cpa_exchange *exchange, const transfer *x, cpa_mem_op *ops) {
    if (x->m->recv_bytes == 0) return 0;
    ops[0] = cpa_mem_op_wait(&t->flags[x->m->peer].arrived, 1);
    if (!exchange->captured) return 1;
    ops[1] = cpa_mem_op_write(&t->flags[x->m->peer].arrived, 0);
    return 2;
}

/* The copy of one transfer. The first to be enqueued sets its own `writable`, the last waits for its own arrival. */
static cpa_status enqueue_copy(peer_transport *t, const cpa_exchange *exchange, const transfer *x, int is_first,
                               int is_last, cpa_error *err) {
    const cpa_message *m = x->m;
    cpa_mem_op ops[4];
    int n = is_first ? add_set_writable(t, x, ops) : 0;
    if (m->send_bytes > 0) {
        ops[n++] = cpa_mem_op_wait(&t->flags[m->peer].writable, 1);
        CPA_TRY(enqueue_ops(t, x, ops, n, err));
        cudaError_t error =
            cudaMemcpyAsync(x->to, m->send, (size_t)m->send_bytes, cudaMemcpyDeviceToDevice, t->head.lanes[x->lane]);
        CPA_TRY(cpa_runtime_check(error, "cudaMemcpyAsync", err));
        ops[0] = cpa_mem_op_write(&t->flags[m->peer].writable, 0);
        ops[1] = cpa_mem_op_write(&t->links[m->peer].theirs->arrived, 1);
        n = 2;
    }
    if (is_last) n += add_wait_arrived(t, exchange, x, ops + n);
    return enqueue_ops(t, x, ops, n, err);
}

static cpa_status enqueue_end(peer_transport *t, cpa_exchange *exchange, const transfer *x, cpa_error *err) {
    cpa_mem_op clear[2];
    int n = 0;
    if (x->m->recv_bytes > 0 && !exchange->captured) clear[n++] = cpa_mem_op_write(&t->flags[x->m->peer].arrived, 0);
    return cpa_lane_end(&t->head, exchange, x->lane, (uint64_t)1 << x->m->peer, clear, n, err);
}

static cpa_status enqueue_transfers(peer_transport *t, cpa_exchange *exchange, const transfer *transfers, int32_t n,
                                    cpa_error *err) {
    cpa_mem_op op, wait[2];
    for (int32_t i = 0; i < n; i++) {
        CPA_TRY(cpa_lane_begin(&t->head, exchange, transfers[i].lane, err));
        if (i + 1 < n) {
            CPA_TRY(enqueue_ops(t, &transfers[i], &op, add_set_writable(t, &transfers[i], &op), err));
        }
    }
    for (int32_t i = n - 1; i >= 0; i--) CPA_TRY(enqueue_copy(t, exchange, &transfers[i], i == n - 1, i == 0, err));
    for (int32_t i = 0; i < n; i++) {
        if (i > 0) {
            CPA_TRY(enqueue_ops(t, &transfers[i], wait, add_wait_arrived(t, exchange, &transfers[i], wait), err));
        }
        CPA_TRY(enqueue_end(t, exchange, &transfers[i], err));
    }
    return CPA_OK;
}

static cpa_status enqueue_copies(peer_transport *t, cpa_exchange *exchange, const cpa_message *msgs, int32_t n_msgs,
                                 cpa_error *err) {
    transfer transfers[CPA_DEVICE_MAX_RANKS];
    int32_t n = 0;
    CPA_TRY(tell_addresses(t, exchange, msgs, n_msgs, err));
    for (int32_t i = 0; i < n_msgs; i++) {
        const cpa_message *m = &msgs[i];
        if (m->send_bytes == 0 && m->recv_bytes == 0) continue;
        transfers[n] = (transfer){.m = m, .lane = lane_of(t, m->peer)};
        if (m->send_bytes > 0) CPA_TRY(learn_address(t, exchange, m, &transfers[n].to, err));
        n++;
    }
    return enqueue_transfers(t, exchange, transfers, n, err);
}

static cpa_status enqueue(cpa_device_transport *head, cpa_exchange *exchange, const cpa_message *msgs, int32_t n_msgs,
                          cpa_error *err) {
    peer_transport *t = (peer_transport *)head;
    cpa_message copied[CPA_DEVICE_MAX_RANKS];
    for (int32_t i = 0; i < n_msgs; i++) {
        copied[i] = msgs[i];
        if (cpa_stores_carry(msgs[i].send_bytes)) copied[i].send_bytes = 0;
        if (cpa_stores_carry(msgs[i].recv_bytes)) copied[i].recv_bytes = 0;
    }
    CPA_TRY(enqueue_copies(t, exchange, copied, n_msgs, err));
    return cpa_stores_start(&t->stores, exchange, msgs, n_msgs, err);
}

static cpa_status finish(cpa_device_transport *head, const cpa_exchange *exchange, cudaStream_t waiter,
                         cpa_error *err) {
    return cpa_stores_finish(&((peer_transport *)head)->stores, exchange, waiter, err);
}

static cpa_status check(cpa_device_transport *head, cpa_error *err) {
    return cpa_stores_check(&((peer_transport *)head)->stores, head->base.timeout_s, err);
}

/* Plays the part of the ranks that do not answer: sets every flag, on a stream that waits for nothing. What is copied
 * and received from here on is garbage; the transport has failed and says so. */
static void release(cpa_device_transport *head) {
    peer_transport *t = (peer_transport *)head;
    cpa_stores_abort(&t->stores);
    if (cudaStreamQuery(t->rescue) == cudaErrorNotReady) return;
    for (int32_t peer = 0; peer < head->control->size; peer++) {
        cpa_mem_op set[2] = {cpa_mem_op_write(&t->flags[peer].writable, 1),
                             cpa_mem_op_write(&t->flags[peer].arrived, 1)};
        cpa_driver_enqueue(&head->driver, t->rescue, set, 2, NULL);
    }
}

static const cpa_device_ops OPS = {.enqueue = enqueue, .finish = finish, .check = check, .abort = release};

/* ---- life ---- */

static cpa_status check_one_host(cpa_control *control, cpa_error *err) {
    CPA_TRY(cpa_control_find_host(control, err));
    if (control->ranks_here == control->size) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "peer memory: %d of %d ranks are on the host of rank %d, expected all",
                    control->ranks_here, control->size, control->rank);
}

static cpa_status alloc_tables(peer_transport *t, cpa_error *err) {
    size_t size = (size_t)t->head.control->size;
    t->links = calloc(size, sizeof *t->links);
    int failed = !t->links;
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        address_box *box = &t->boxes[i];
        box->addresses = calloc(size, sizeof *box->addresses);
        box->requests = calloc(size, sizeof *box->requests);
        failed |= !box->addresses || !box->requests;
    }
    return failed ? cpa_fail(err, CPA_NO_MEMORY, "no memory for the links of %zu ranks", size) : CPA_OK;
}

/* A stream of a priority of its own: it must not share a hardware queue with those that wait. */
static cpa_status create_rescue(peer_transport *t, cpa_error *err) {
    int least, greatest;
    CPA_TRY(cpa_runtime_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange",
                              err));
    int priority = greatest < least ? greatest + 1 : least; /* lanes have the greatest; a smaller number goes first */
    return cpa_runtime_check(cudaStreamCreateWithPriority(&t->rescue, cudaStreamNonBlocking, priority),
                             "cudaStreamCreateWithPriority", err);
}

/* Where the memory of the stores begins behind the flags. */
static size_t words_bytes(const cpa_control *control) {
    const size_t align = 256, bytes = (size_t)control->size * sizeof(peer_flags);
    return (bytes + align - 1) / align * align;
}

/* Everything that needs no other rank. */
static cpa_status open_local(peer_transport *t, cpa_peer_address *flags, cpa_error *err) {
    const cpa_control *control = t->head.control;
    size_t at = words_bytes(control), bytes = at + (size_t)cpa_stores_bytes(control->size);
    CPA_TRY(alloc_tables(t, err));
    CPA_TRY(create_rescue(t, err));
    CPA_TRY(cpa_runtime_check(cudaMalloc((void **)&t->flags, bytes), "cudaMalloc", err));
    CPA_TRY(cpa_runtime_check(cudaMemset(t->flags, 0, bytes), "cudaMemset", err));
    CPA_TRY(cpa_runtime_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", err));
    CPA_TRY(cpa_stores_open(&t->stores, control, (char *)t->flags + at, err));
    return cpa_peer_export(&t->exports, &t->head.driver, t->flags, (int64_t)bytes, flags, err);
}

/* Maps the flags of every other rank; the first use of peer access. */
static cpa_status map_words(peer_transport *t, const cpa_peer_address *all, cpa_error *err) {
    const cpa_control *control = t->head.control;
    for (int32_t peer = 0; peer < control->size; peer++) {
        if (peer == control->rank) continue;
        void *mapped = NULL;
        cudaError_t error = cudaIpcOpenMemHandle(&mapped, all[peer].handle, cudaIpcMemLazyEnablePeerAccess);
        if (error != cudaSuccess) {
            cudaGetLastError();
            return cpa_fail(err, CPA_UNSUPPORTED, "peer memory: the GPU of rank %d cannot reach that of rank %d: %s",
                            control->rank, peer, cudaGetErrorString(error));
        }
        t->links[peer].theirs_base = mapped;
        char *theirs = (char *)mapped + all[peer].offset;
        t->links[peer].theirs = (peer_flags *)(void *)theirs + control->rank;
        cpa_stores_connect(&t->stores, peer, theirs + words_bytes(control));
    }
    return CPA_OK;
}

static cpa_status exchange_words(peer_transport *t, const cpa_peer_address *mine, cpa_error *err) {
    const cpa_control *control = t->head.control;
    cpa_peer_address *all = calloc((size_t)control->size, sizeof *all);
    cpa_status status = all ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for %d addresses", control->size);
    CPA_TRY_GOTO(cpa_control_agree(t->head.control, status, err), done);
    CPA_TRY_GOTO(cpa_control_all_gather(t->head.control, mine, sizeof *mine, all, err), done);
    status = cpa_control_agree(t->head.control, map_words(t, all, err), err);
done:
    free(all);
    return status;
}

/* Frees what open_local and the calls after it made. */
static void close_local(peer_transport *t) {
    cpa_stores_close(&t->stores);
    for (int32_t peer = 0; t->links && peer < t->head.control->size; peer++) {
        cpa_peer_unmap_all(&t->links[peer].imports);
        if (t->links[peer].theirs_base) cudaIpcCloseMemHandle(t->links[peer].theirs_base);
    }
    cudaFree(t->flags);
    if (t->rescue) cudaStreamDestroy(t->rescue);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        address_box *box = &t->boxes[i];
        for (int32_t peer = 0; box->requests && peer < t->head.control->size; peer++) {
            cpa_comm_cancel(t->head.control->comm, &box->requests[peer]);
        }
        free(box->requests);
        free(box->addresses);
    }
    free(t->links);
    cpa_device_transport_close(&t->head);
}

/* Waits until no kernel uses the inboxes, here or there; not for long, as a rank may have failed. */
static void settle_stores(peer_transport *t) {
    enum { SETTLE_S = 2 };
    double failed_at = 0;
    while (!cpa_stores_are_idle(&t->stores)) {
        cpa_device_transport_poll(&t->head.base);
        double now = cpa_clock_now();
        if (t->head.failure.status != CPA_OK && failed_at == 0) failed_at = now;
        if (failed_at > 0 && now - failed_at > SETTLE_S) return;
        sched_yield();
    }
    double begin = cpa_clock_now();
    while (t->head.failure.status == CPA_OK && cpa_clock_now() - begin < SETTLE_S) {
        if (cpa_stores_are_acked(&t->stores, t->rescue)) return;
        sched_yield();
    }
}

static void transport_peer_buffer(cpa_transport *transport, int32_t peer, void **theirs, void **own, int64_t *bytes) {
    *bytes = CPA_STORE_BYTES;
    cpa_stores_peer_buffers(&((peer_transport *)transport)->stores, peer, theirs, own);
}

static int transport_defer_wait(cpa_transport *transport, cpa_exchange *exchange, cpa_store_batch *out) {
    peer_transport *t = (peer_transport *)transport;
    if (exchange->lanes || t->head.failure.status != CPA_OK) return 0;
    if (!cpa_stores_defer_wait(&t->stores, exchange, out)) return 0;
    exchange->in_flight = 0;
    return 1;
}

static void transport_close(cpa_transport *transport) {
    peer_transport *t = (peer_transport *)transport;
    if (!t) return;
    cudaSetDevice(t->head.device);
    cpa_device_transport_settle(&t->head);
    settle_stores(t);
    close_local(t);
    cpa_comm_give_back_tags(t->head.control->comm, t->tag, 1);
    free(t);
}

static cpa_status transport_open(cpa_control *control, cpa_transport **out, cpa_error *err) {
    int32_t tag;
    CPA_TRY(cpa_comm_take_tags(control->comm, 1, &tag, err)); /* on every rank, whatever fails */
    peer_transport *t = calloc(1, sizeof *t);
    cpa_peer_address flags = {0};
    cpa_status status = t ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for a transport");
    if (t) {
        t->tag = tag;
        status = cpa_device_transport_open(&t->head, &cpa_transport_peer, &OPS, control, control->size - 1, err);
    }
    int opened = t && status == CPA_OK;
    if (opened) status = open_local(t, &flags, err);
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), failed);
    CPA_TRY_GOTO(cpa_control_agree(control, check_one_host(control, err), err), failed);
    CPA_TRY_GOTO(exchange_words(t, &flags, err), failed);
    *out = &t->head.base;
    return CPA_OK;

failed:
    if (opened) close_local(t);
    cpa_comm_give_back_tags(control->comm, tag, 1);
    free(t);
    return status;
}

const cpa_transport_table cpa_transport_peer = {
    .name = "peer",
    .open = transport_open,
    .close = transport_close,
    .start = cpa_device_transport_start,
    .poll = cpa_device_transport_poll,
    .finish = cpa_device_transport_finish,
    .peer_buffer = transport_peer_buffer,
    .defer_wait = transport_defer_wait,
    .drain = cpa_device_transport_drain,
};
