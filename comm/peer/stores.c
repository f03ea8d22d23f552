#include "comm/peer/stores.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

struct cpa_store_host {
    uint32_t abort;
    cpa_store_mismatch mismatch;
    uint32_t stalled[]; /* [CPA_STORE_SLOTS, size, 2]: of push and of pull, which may run at once */
};

/* ---- memory ---- */

static int64_t cells_bytes(int32_t size) {
    const int64_t align = 256, bytes = (int64_t)CPA_STORE_SLOTS * size * (int64_t)sizeof(cpa_store_cell);
    return (bytes + align - 1) / align * align;
}

/* Room for a message in lines, then for one as it is: what lies in lines may not look like one by chance. */
enum { INBOX_LINES_BYTES = 2 * CPA_STORE_LINE_BYTES, INBOX_BYTES = INBOX_LINES_BYTES + CPA_STORE_BYTES };

int64_t cpa_stores_bytes(int32_t size) {
    return cells_bytes(size) + (int64_t)(size - 1) * (CPA_STORE_SLOTS * INBOX_BYTES + CPA_STORE_BYTES);
}

/* In the memory of a rank: its cell for another. */
static cpa_store_cell *cell_of(char *memory, int32_t size, int32_t slot, int32_t other) {
    return (cpa_store_cell *)(void *)memory + (int64_t)slot * size + other;
}

/* In the memory of `rank`: where messages of `from` come in that have so many bytes. */
static char *inbox_of(char *memory, int32_t size, int32_t slot, int32_t rank, int32_t from, int64_t bytes) {
    int64_t column = cpa_other_index(rank, from), at = bytes <= CPA_STORE_LINE_BYTES ? 0 : INBOX_LINES_BYTES;
    return memory + cells_bytes(size) + ((int64_t)slot * (size - 1) + column) * INBOX_BYTES + at;
}

/* In the memory of `rank`: the peer-mapped buffer of `from`. */
static char *peer_buffer_of(char *memory, int32_t size, int32_t rank, int32_t from) {
    char *buffers = memory + cells_bytes(size) + (int64_t)CPA_STORE_SLOTS * (size - 1) * INBOX_BYTES;
    return buffers + (int64_t)cpa_other_index(rank, from) * CPA_STORE_BYTES;
}

void cpa_stores_peer_buffers(const cpa_stores *s, int32_t peer, void **theirs, void **own) {
    *theirs = peer_buffer_of(s->theirs[peer], s->size, peer, s->rank);
    *own = peer_buffer_of(s->own, s->size, s->rank, peer);
}

/* ---- life ---- */

static cpa_status open_slot(cpa_store_slot *slot, int32_t size, cpa_error *err) {
    slot->parts = calloc((size_t)size, sizeof *slot->parts);
    slot->flags = calloc((size_t)size, sizeof *slot->flags);
    if (!slot->parts || !slot->flags)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the messages of %d ranks", size);
    return cpa_runtime_check(cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming), "cudaEventCreateWithFlags",
                             err);
}

cpa_status cpa_stores_open(cpa_stores *s, const cpa_control *control, void *own, cpa_error *err) {
    const size_t size = (size_t)control->size, flags = CPA_STORE_SLOTS * size * 2;
    s->rank = control->rank;
    s->size = control->size;
    s->own = own;
    s->theirs = calloc(size, sizeof *s->theirs);
    s->waits = calloc(flags, sizeof *s->waits);
    if (!s->theirs || !s->waits) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the inboxes of %zu ranks", size);
    const size_t bytes = sizeof *s->host + flags * sizeof s->host->stalled[0];
    CPA_TRY(cpa_runtime_check(cudaHostAlloc((void **)&s->host, bytes, cudaHostAllocDefault), "cudaHostAlloc", err));
    memset(s->host, 0, bytes);
    int device = 0, major = 0;
    CPA_TRY(cpa_runtime_check(cudaGetDevice(&device), "cudaGetDevice", err));
    CPA_TRY(cpa_runtime_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                              "cudaDeviceGetAttribute", err));
    s->starts_early = major == 9; /* later devices run code for 8.0, whose pull does not wait */
    CPA_TRY(cpa_runtime_check(cpa_store_load_kernels(), "cudaFuncGetAttributes", err));
    for (int i = 0; i < CPA_STORE_SLOTS; i++) CPA_TRY(open_slot(&s->slots[i], control->size, err));
    return CPA_OK;
}

void cpa_stores_connect(cpa_stores *s, int32_t peer, void *theirs) {
    s->theirs[peer] = theirs;
}

void cpa_stores_close(cpa_stores *s) {
    for (int i = 0; i < CPA_STORE_SLOTS; i++) {
        if (s->slots[i].done) cudaEventDestroy(s->slots[i].done);
        free(s->slots[i].flags);
        free(s->slots[i].parts);
    }
    cudaFreeHost(s->host);
    free(s->waits);
    free(s->theirs);
}

/* ---- one exchange ---- */

int cpa_stores_carry(int64_t bytes) {
    return bytes > 0 && bytes <= CPA_STORE_BYTES;
}

typedef cudaError_t (*launch_fn)(const cpa_store_batch *batch, cudaStream_t stream);

static cpa_store_batch batch_of(const cpa_stores *s, const cpa_store_part *parts, int32_t n, int early) {
    cpa_store_batch batch = {.n_parts = n,
                             .starts_early = early && s->starts_early,
                             .abort = &s->host->abort,
                             .mismatch = &s->host->mismatch};
    memcpy(batch.parts, parts, (size_t)n * sizeof *parts);
    return batch;
}

static cpa_status launch_parts(const cpa_stores *s, const cpa_store_part *parts, int32_t n, int early, launch_fn launch,
                               cudaStream_t stream, cpa_error *err) {
    for (int32_t at = 0; at < n; at += CPA_STORE_PARTS) {
        cpa_store_batch batch = batch_of(s, parts + at, n - at < CPA_STORE_PARTS ? n - at : CPA_STORE_PARTS, early);
        CPA_TRY(cpa_runtime_check(launch(&batch, stream), "a kernel that stores messages", err));
    }
    return CPA_OK;
}

static cpa_status record_done(cpa_store_slot *slot, cudaStream_t stream, cpa_error *err) {
    CPA_TRY(cpa_runtime_check(cudaEventRecord(slot->done, stream), "cudaEventRecord", err));
    slot->recorded = 1;
    slot->done_captured = slot->captured;
    slot->last = stream;
    return CPA_OK;
}

/* Makes a stream wait for another's work so far, which `slot->done` then stands for. */
static cpa_status order(cpa_store_slot *slot, cudaStream_t stream, cudaStream_t behind, cpa_error *err) {
    if (stream == behind) return CPA_OK;
    CPA_TRY(record_done(slot, behind, err));
    return cpa_runtime_check(cudaStreamWaitEvent(stream, slot->done, 0), "cudaStreamWaitEvent", err);
}

/* Notes that kernels of the slot are the newest. */
static void note_kernels(cpa_stores *s, const cpa_store_slot *slot, cudaStream_t stream) {
    s->newest = slot;
    s->newest_stream = stream;
}

/* Whether kernels that start an exchange may read the counts of the slot before the kernel in front of them is over: if
 * that is one of another slot, as it lets others be placed only behind all that was before it. */
static int counts_are_settled(const cpa_stores *s, const cpa_store_slot *slot, cudaStream_t stream) {
    return s->newest && s->newest != slot && s->newest_stream == stream;
}

/* Takes out the messages of the exchange in the slot. Where it sent none, the kernel before may be one that took out
 * the last messages of the same slot, whose counts this one has to see. */
static cpa_status take_out(cpa_stores *s, cpa_store_slot *slot, cudaStream_t stream, cpa_error *err) {
    CPA_TRY(order(slot, stream, slot->ready, err));
    if (slot->n_parts + slot->n_flags > 0) note_kernels(s, slot, stream);
    CPA_TRY(launch_parts(s, slot->parts, slot->n_parts, slot->pushed, cpa_store_launch_pull, stream, err));
    CPA_TRY(launch_parts(s, slot->flags, slot->n_flags, slot->pushed, cpa_store_launch_take, stream, err));
    slot->open = 0;
    return record_done(slot, stream, err);
}

/* Makes the slot ready for another exchange, on the stream that starts it. In a graph the streams of the caller order
 * all uses of a slot. */
static cpa_status take_over(cpa_stores *s, cpa_store_slot *slot, const cpa_exchange *exchange, cpa_error *err) {
    if (slot->open) {
        if (slot->captured != exchange->captured) {
            return cpa_fail(err, CPA_INVALID,
                            "exchange %" PRId64 " %s a graph, but exchange %" PRId64 " %s it is not finished",
                            exchange->number, exchange->captured ? "belongs to" : "is outside of", slot->number,
                            exchange->captured ? "outside of" : "in");
        }
        return take_out(s, slot, exchange->stream, err);
    }
    if (!slot->recorded || slot->done_captured || exchange->captured || slot->last == exchange->stream) return CPA_OK;
    return cpa_runtime_check(cudaStreamWaitEvent(exchange->stream, slot->done, 0), "cudaStreamWaitEvent", err);
}

/* What the start of an exchange sends: messages to push, and flags of those that lie in peer-mapped buffers. */
typedef struct part_lists {
    cpa_store_part pushes[CPA_DEVICE_MAX_RANKS];
    cpa_store_part flags[CPA_DEVICE_MAX_RANKS];
    int32_t n_pushes, n_flags;
} part_lists;

static cpa_store_part part_of(const cpa_stores *s, int32_t index, int32_t peer, int64_t bytes, int receives) {
    return (cpa_store_part){
        .own = cell_of(s->own, s->size, index, peer),
        .theirs = cell_of(s->theirs[peer], s->size, index, s->rank),
        .stalled = &s->host->stalled[(index * s->size + peer) * 2 + receives],
        .bytes = (uint32_t)bytes,
        .peer = (uint32_t)peer,
    };
}

static void list_sent(const cpa_stores *s, int32_t index, const cpa_message *m, part_lists *lists) {
    if (!cpa_stores_carry(m->send_bytes)) return;
    cpa_store_part part = part_of(s, index, m->peer, m->send_bytes, 0);
    if (m->send == peer_buffer_of(s->theirs[m->peer], s->size, m->peer, s->rank)) {
        lists->flags[lists->n_flags++] = part;
        return;
    }
    part.from = m->send;
    part.to = inbox_of(s->theirs[m->peer], s->size, index, m->peer, s->rank, m->send_bytes);
    lists->pushes[lists->n_pushes++] = part;
}

static void list_received(const cpa_stores *s, int32_t index, const cpa_message *m, cpa_store_slot *slot) {
    if (!cpa_stores_carry(m->recv_bytes)) return;
    cpa_store_part part = part_of(s, index, m->peer, m->recv_bytes, 1);
    if (m->recv == peer_buffer_of(s->own, s->size, s->rank, m->peer)) {
        slot->flags[slot->n_flags++] = part;
        return;
    }
    part.from = inbox_of(s->own, s->size, index, s->rank, m->peer, m->recv_bytes);
    part.to = m->recv;
    slot->parts[slot->n_parts++] = part;
}

static int has_messages(const cpa_message *msgs, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (cpa_stores_carry(msgs[i].send_bytes) || cpa_stores_carry(msgs[i].recv_bytes)) return 1;
    }
    return 0;
}

cpa_status cpa_stores_start(cpa_stores *s, const cpa_exchange *exchange, const cpa_message *msgs, int32_t n_msgs,
                            cpa_error *err) {
    const int32_t index = (int32_t)(exchange->number % CPA_STORE_SLOTS);
    cpa_store_slot *slot = &s->slots[index];
    part_lists lists;
    lists.n_pushes = lists.n_flags = 0;
    if (!has_messages(msgs, n_msgs)) return CPA_OK;
    CPA_TRY(take_over(s, slot, exchange, err));
    slot->n_parts = slot->n_flags = 0;
    for (int32_t i = 0; i < n_msgs; i++) list_sent(s, index, &msgs[i], &lists);
    for (int32_t i = 0; i < n_msgs; i++) list_received(s, index, &msgs[i], slot);
    slot->number = exchange->number;
    slot->captured = exchange->captured;
    slot->ready = exchange->stream;
    slot->open = 1;
    slot->pushed = lists.n_pushes + lists.n_flags > 0;
    const int early = counts_are_settled(s, slot, exchange->stream);
    if (lists.n_pushes + lists.n_flags > 0) note_kernels(s, slot, exchange->stream);
    CPA_TRY(launch_parts(s, lists.pushes, lists.n_pushes, early, cpa_store_launch_push, exchange->stream, err));
    return launch_parts(s, lists.flags, lists.n_flags, early, cpa_store_launch_tell, exchange->stream, err);
}

cpa_status cpa_stores_finish(cpa_stores *s, const cpa_exchange *exchange, cudaStream_t waiter, cpa_error *err) {
    cpa_store_slot *slot = &s->slots[exchange->number % CPA_STORE_SLOTS];
    if (slot->number == exchange->number && slot->open) return take_out(s, slot, waiter, err);
    /* Nothing went this way, or another exchange took the slot over, and this one's messages out. */
    if (!slot->recorded || slot->done_captured != exchange->captured || slot->last == waiter) return CPA_OK;
    return cpa_runtime_check(cudaStreamWaitEvent(waiter, slot->done, 0), "cudaStreamWaitEvent", err);
}

int cpa_stores_defer_wait(cpa_stores *s, const cpa_exchange *exchange, cpa_store_batch *out) {
    cpa_store_slot *slot = &s->slots[exchange->number % CPA_STORE_SLOTS];
    const int is_open = slot->number == exchange->number && slot->open && exchange->captured;
    if (!is_open || !slot->pushed || slot->n_parts > 0 || slot->n_flags > CPA_STORE_PARTS) return 0;
    *out = batch_of(s, slot->flags, slot->n_flags, 0);
    note_kernels(s, slot, exchange->stream);
    slot->open = 0;
    return 1;
}

/* ---- failure and end ---- */

/* The ranks that a slot waits for, if for longer than timeout_s; 0 if it does not. */
static uint64_t awaited(cpa_stores *s, int32_t index, double timeout_s, double *longest) {
    uint64_t ranks = 0;
    *longest = 0;
    for (int32_t i = 0; i < 2 * s->size; i++) {
        cpa_store_wait *wait = &s->waits[index * s->size * 2 + i];
        uint32_t mark = *(volatile uint32_t *)&s->host->stalled[index * s->size * 2 + i];
        if (mark == 0) {
            wait->mark = 0;
            continue;
        }
        double now = cpa_clock_now();
        if (mark != wait->mark) *wait = (cpa_store_wait){mark, now};
        if (now - wait->since > *longest) *longest = now - wait->since;
        ranks |= (uint64_t)1 << (i / 2);
    }
    return *longest > timeout_s ? ranks : 0;
}

static cpa_status check_waits(cpa_stores *s, double timeout_s, cpa_error *err) {
    for (int32_t index = 0; index < CPA_STORE_SLOTS; index++) {
        double longest;
        uint64_t ranks = awaited(s, index, timeout_s, &longest);
        if (!ranks) continue;
        char names[CPA_RANK_NAMES], what[40];
        const cpa_store_slot *slot = &s->slots[index];
        snprintf(what, sizeof what, "exchange %" PRId64, slot->number);
        return cpa_fail(err, CPA_COMM, "rank %d: %s has waited %.1f s for %s", s->rank,
                        slot->captured ? "a graph with exchanges" : what, longest, cpa_rank_names(ranks, names));
    }
    return CPA_OK;
}

cpa_status cpa_stores_check(cpa_stores *s, double timeout_s, cpa_error *err) {
    const volatile cpa_store_mismatch *mismatch = &s->host->mismatch;
    if (mismatch->peer != 0) {
        return cpa_fail(err, CPA_COMM, "rank %u sends %u bytes to rank %d, which expects %u", mismatch->peer - 1,
                        mismatch->arrived, s->rank, mismatch->expected);
    }
    return check_waits(s, timeout_s, err);
}

void cpa_stores_abort(cpa_stores *s) {
    *(volatile uint32_t *)&s->host->abort = 1;
}

int cpa_stores_are_idle(cpa_stores *s) {
    for (int i = 0; i < CPA_STORE_SLOTS; i++) {
        cpa_store_slot *slot = &s->slots[i];
        if (slot->open && !slot->captured) record_done(slot, slot->ready, NULL); /* it is never finished */
        slot->open = 0;
        if (slot->recorded && !slot->done_captured && cudaEventQuery(slot->done) == cudaErrorNotReady) return 0;
    }
    return 1;
}

int cpa_stores_are_acked(const cpa_stores *s, cudaStream_t stream) {
    const int64_t n = (int64_t)CPA_STORE_SLOTS * s->size;
    cpa_store_cell *cells = malloc((size_t)n * sizeof *cells);
    if (!cells) return 1; /* no way to know */
    int acked = 1;
    cudaError_t error = cudaMemcpyAsync(cells, s->own, (size_t)n * sizeof *cells, cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    for (int64_t i = 0; error == cudaSuccess && i < n; i++) acked &= cells[i].acked == cells[i].pushed;
    free(cells);
    return acked;
}
