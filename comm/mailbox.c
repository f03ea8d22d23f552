/* Messages from rank 0 that travel while the ranks do something else, beside the collectives of their channel. First a
 * head goes to each rank, with the length, then the bytes. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/hash.h"
#include "comm/comm.h"

typedef enum receive_state { IDLE = 0, HEAD_EXPECTED, BYTES_EXPECTED } receive_state;

/* What is on its way to or from one rank. */
typedef struct post_pair {
    cpa_comm_request *head, *bytes;
} post_pair;

/* What goes ahead of a message. */
typedef struct post_head {
    int64_t length;
    uint64_t checksum; /* checksum of the bytes and of the length */
} post_head;

struct cpa_mailbox {
    cpa_control *control;
    post_head head; /* head of the message that is sent or expected */
    post_pair pairs[CPA_COMM_MAX_RANKS];
    receive_state state;
    void *buffer; /* bytes of the message that is received or sent */
    int64_t buffer_capacity;
};

static uint64_t checksum_of(const void *data, int64_t length) {
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, &length, sizeof length);
    return length > 0 ? cpa_hash_bytes(hash, data, (size_t)length) : hash;
}

static cpa_status reserve_buffer(cpa_mailbox *mailbox, int64_t bytes, cpa_error *err) {
    if (cpa_array_reserve(&mailbox->buffer, &mailbox->buffer_capacity, bytes, 1)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "no memory for a message of %lld bytes", (long long)bytes);
}

cpa_status cpa_mailbox_open(cpa_control *control, cpa_mailbox **out, cpa_error *err) {
    cpa_mailbox *mailbox = calloc(1, sizeof *mailbox);
    if (!mailbox) return cpa_fail(err, CPA_NO_MEMORY, "no memory for messages of rank 0");
    mailbox->control = control;
    *out = mailbox;
    return CPA_OK;
}

/* The ranks that messages go to, or the one that they come from. */
static int32_t first_peer(const cpa_mailbox *mailbox) {
    return mailbox->control->rank == 0 ? 1 : 0;
}

static int32_t last_peer(const cpa_mailbox *mailbox) {
    return mailbox->control->rank == 0 ? mailbox->control->size - 1 : 0;
}

/* Whether all that is under way is done; `wait`: waits for it. */
static cpa_status test(cpa_mailbox *mailbox, int wait, int *done, cpa_error *err) {
    cpa_comm *comm = mailbox->control->comm;
    for (int32_t rank = first_peer(mailbox); rank <= last_peer(mailbox); rank++) {
        cpa_comm_request **requests[] = {&mailbox->pairs[rank].head, &mailbox->pairs[rank].bytes};
        for (int i = 0; i < 2; i++) {
            if (wait) CPA_TRY(cpa_comm_wait(comm, requests[i], rank, err));
            CPA_TRY(cpa_comm_test(comm, requests[i], done, err));
            if (!*done) return CPA_OK;
        }
    }
    *done = 1;
    return CPA_OK;
}

/* What is sent is let go for a second: a rank that failed may take no part in it any more. */
static void settle(cpa_mailbox *mailbox) {
    enum { SECONDS = 1 };
    int done = 0;
    for (const double begin = cpa_clock_now(); !done && cpa_clock_now() - begin < SECONDS; sched_yield()) {
        if (test(mailbox, 0, &done, NULL) != CPA_OK) return;
    }
}

void cpa_mailbox_close(cpa_mailbox *mailbox) {
    if (!mailbox) return;
    if (mailbox->control->rank == 0) settle(mailbox);
    for (int32_t rank = first_peer(mailbox); rank <= last_peer(mailbox); rank++) {
        cpa_comm_cancel(mailbox->control->comm, &mailbox->pairs[rank].head);
        cpa_comm_cancel(mailbox->control->comm, &mailbox->pairs[rank].bytes);
    }
    free(mailbox->buffer);
    free(mailbox);
}

cpa_status cpa_mailbox_flush(cpa_mailbox *mailbox, int wait, int *flushed, cpa_error *err) {
    return test(mailbox, wait, flushed, err);
}

cpa_status cpa_mailbox_send(cpa_mailbox *mailbox, const void *data, int64_t bytes, cpa_error *err) {
    cpa_comm *comm = mailbox->control->comm;
    const int32_t tag = mailbox->control->tag + CPA_CONTROL_TAG_MAILBOX;
    if (bytes > CPA_MAILBOX_MOST_BYTES) {
        return cpa_fail(err, CPA_INVALID, "a message of %lld bytes to all ranks, expected at most %lld",
                        (long long)bytes, (long long)CPA_MAILBOX_MOST_BYTES);
    }
    CPA_TRY(reserve_buffer(mailbox, bytes, err));
    if (bytes > 0) memcpy(mailbox->buffer, data, (size_t)bytes);
    mailbox->head = (post_head){bytes, checksum_of(data, bytes)};
    for (int32_t rank = 1; rank < mailbox->control->size; rank++) {
        post_pair *pair = &mailbox->pairs[rank];
        CPA_TRY(cpa_comm_start_send(comm, rank, tag, &mailbox->head, sizeof mailbox->head, &pair->head, err));
        if (bytes > 0) CPA_TRY(cpa_comm_start_send(comm, rank, tag, mailbox->buffer, bytes, &pair->bytes, err));
    }
    return CPA_OK;
}

static cpa_status expect_head(cpa_mailbox *mailbox, cpa_error *err) {
    CPA_TRY(cpa_comm_start_receive(mailbox->control->comm, 0, mailbox->control->tag + CPA_CONTROL_TAG_MAILBOX,
                                   &mailbox->head, sizeof mailbox->head, &mailbox->pairs[0].head, err));
    mailbox->state = HEAD_EXPECTED;
    return CPA_OK;
}

static cpa_status expect_bytes(cpa_mailbox *mailbox, cpa_error *err) {
    if (mailbox->head.length > CPA_MAILBOX_MOST_BYTES) {
        return cpa_fail(err, CPA_COMM, "a message of rank 0 has %lld bytes, expected at most %lld",
                        (long long)mailbox->head.length, (long long)CPA_MAILBOX_MOST_BYTES);
    }
    CPA_TRY(reserve_buffer(mailbox, mailbox->head.length, err));
    mailbox->state = BYTES_EXPECTED;
    if (mailbox->head.length <= 0) return CPA_OK;
    return cpa_comm_start_receive(mailbox->control->comm, 0, mailbox->control->tag + CPA_CONTROL_TAG_MAILBOX,
                                  mailbox->buffer, mailbox->head.length, &mailbox->pairs[0].bytes, err);
}

cpa_status cpa_mailbox_receive(cpa_mailbox *mailbox, int wait, int *arrived, const void **data, int64_t *bytes,
                               cpa_error *err) {
    int done;
    *arrived = 0;
    *data = NULL;
    if (mailbox->state == IDLE) CPA_TRY(expect_head(mailbox, err));
    if (mailbox->state == HEAD_EXPECTED) {
        if (wait) CPA_TRY(cpa_comm_wait_idly(mailbox->control->comm, &mailbox->pairs[0].head, 0, err));
        CPA_TRY(test(mailbox, wait, &done, err));
        if (!done) return CPA_OK;
        CPA_TRY(expect_bytes(mailbox, err));
    }
    CPA_TRY(test(mailbox, wait, &done, err));
    if (!done) return CPA_OK;
    mailbox->state = IDLE;
    if (checksum_of(mailbox->buffer, mailbox->head.length) != mailbox->head.checksum) {
        return cpa_fail(err, CPA_COMM, "a message of rank 0, of %lld bytes, has arrived damaged",
                        (long long)mailbox->head.length);
    }
    *arrived = 1;
    *bytes = mailbox->head.length;
    if (mailbox->head.length > 0) *data = mailbox->buffer;
    return CPA_OK;
}
