/* Messages from rank 0 that travel while the ranks do something else, beside the collectives of their channel. First a
 * head goes to each rank, with the length, then the bytes. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

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
    uint64_t checksum; /* of the bytes and of the length */
} post_head;

struct cpa_post {
    cpa_control *control;
    post_head head; /* of the message that is sent, or expected */
    post_pair pairs[CPA_COMM_MAX_RANKS];
    receive_state state;
    void *buffer; /* of what is received, or sent */
    int64_t buffer_capacity;
};

static uint64_t checksum_of(const void *data, int64_t length) {
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, &length, sizeof length);
    return length > 0 ? cpa_hash_bytes(hash, data, (size_t)length) : hash;
}

static cpa_status reserve_buffer(cpa_post *post, int64_t bytes, cpa_error *err) {
    if (bytes <= post->buffer_capacity) return CPA_OK;
    void *grown = realloc(post->buffer, (size_t)bytes);
    if (!grown) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a message of %lld bytes", (long long)bytes);
    post->buffer = grown;
    post->buffer_capacity = bytes;
    return CPA_OK;
}

cpa_status cpa_post_open(cpa_control *control, cpa_post **out, cpa_error *err) {
    cpa_post *post = calloc(1, sizeof *post);
    if (!post) return cpa_fail(err, CPA_NO_MEMORY, "no memory for messages of rank 0");
    post->control = control;
    *out = post;
    return CPA_OK;
}

/* The ranks that messages go to, or the one that they come from. */
static int32_t first_peer(const cpa_post *post) {
    return post->control->rank == 0 ? 1 : 0;
}

static int32_t last_peer(const cpa_post *post) {
    return post->control->rank == 0 ? post->control->size - 1 : 0;
}

/* Whether all that is under way is done; `wait`: waits for it. */
static cpa_status test(cpa_post *post, int wait, int *done, cpa_error *err) {
    cpa_comm *comm = post->control->comm;
    for (int32_t rank = first_peer(post); rank <= last_peer(post); rank++) {
        cpa_comm_request **requests[] = {&post->pairs[rank].head, &post->pairs[rank].bytes};
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
static void settle(cpa_post *post) {
    enum { SECONDS = 1 };
    int done = 0;
    for (const double begin = cpa_clock_now(); !done && cpa_clock_now() - begin < SECONDS; sched_yield()) {
        if (test(post, 0, &done, NULL) != CPA_OK) return;
    }
}

void cpa_post_close(cpa_post *post) {
    if (!post) return;
    if (post->control->rank == 0) settle(post);
    for (int32_t rank = first_peer(post); rank <= last_peer(post); rank++) {
        cpa_comm_cancel(post->control->comm, &post->pairs[rank].head);
        cpa_comm_cancel(post->control->comm, &post->pairs[rank].bytes);
    }
    free(post->buffer);
    free(post);
}

cpa_status cpa_post_flush(cpa_post *post, int wait, int *flushed, cpa_error *err) {
    return test(post, wait, flushed, err);
}

cpa_status cpa_post_send(cpa_post *post, const void *data, int64_t bytes, cpa_error *err) {
    cpa_comm *comm = post->control->comm;
    const int32_t tag = post->control->tag + CPA_CONTROL_TAG_POST;
    if (bytes > CPA_POST_MOST_BYTES) {
        return cpa_fail(err, CPA_INVALID, "a message of %lld bytes to all ranks, expected at most %lld",
                        (long long)bytes, (long long)CPA_POST_MOST_BYTES);
    }
    CPA_TRY(reserve_buffer(post, bytes, err));
    if (bytes > 0) memcpy(post->buffer, data, (size_t)bytes);
    post->head = (post_head){bytes, checksum_of(data, bytes)};
    for (int32_t rank = 1; rank < post->control->size; rank++) {
        post_pair *pair = &post->pairs[rank];
        CPA_TRY(cpa_comm_start_send(comm, rank, tag, &post->head, sizeof post->head, &pair->head, err));
        if (bytes > 0) CPA_TRY(cpa_comm_start_send(comm, rank, tag, post->buffer, bytes, &pair->bytes, err));
    }
    return CPA_OK;
}

static cpa_status expect_head(cpa_post *post, cpa_error *err) {
    CPA_TRY(cpa_comm_start_receive(post->control->comm, 0, post->control->tag + CPA_CONTROL_TAG_POST, &post->head,
                                   sizeof post->head, &post->pairs[0].head, err));
    post->state = HEAD_EXPECTED;
    return CPA_OK;
}

static cpa_status expect_bytes(cpa_post *post, cpa_error *err) {
    if (post->head.length > CPA_POST_MOST_BYTES) {
        return cpa_fail(err, CPA_COMM, "a message of rank 0 has %lld bytes, expected at most %lld",
                        (long long)post->head.length, (long long)CPA_POST_MOST_BYTES);
    }
    CPA_TRY(reserve_buffer(post, post->head.length, err));
    post->state = BYTES_EXPECTED;
    if (post->head.length <= 0) return CPA_OK;
    return cpa_comm_start_receive(post->control->comm, 0, post->control->tag + CPA_CONTROL_TAG_POST, post->buffer,
                                  post->head.length, &post->pairs[0].bytes, err);
}

cpa_status cpa_post_receive(cpa_post *post, int wait, int *arrived, const void **data, int64_t *bytes, cpa_error *err) {
    int done;
    *arrived = 0;
    *data = NULL;
    if (post->state == IDLE) CPA_TRY(expect_head(post, err));
    if (post->state == HEAD_EXPECTED) {
        CPA_TRY(test(post, wait, &done, err));
        if (!done) return CPA_OK;
        CPA_TRY(expect_bytes(post, err));
    }
    CPA_TRY(test(post, wait, &done, err));
    if (!done) return CPA_OK;
    post->state = IDLE;
    if (checksum_of(post->buffer, post->head.length) != post->head.checksum) {
        return cpa_fail(err, CPA_COMM, "a message of rank 0, of %lld bytes, has arrived damaged",
                        (long long)post->head.length);
    }
    *arrived = 1;
    *bytes = post->head.length;
    if (post->head.length > 0) *data = post->buffer;
    return CPA_OK;
}
