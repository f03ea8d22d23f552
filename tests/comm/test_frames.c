/* What arrives over TCP and is no message, or not the one that was expected: it ends the connection, or the call, with a
 * line. Bytes are made up, or those of messages, changed here and there; whatever they say, no memory is taken for more
 * than has arrived. */
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/hash.h"
#include "comm/communicator.h"
#include "comm/store/mesh.h"
#include "comm/store/reception.h"
#include "tests/fixtures/unit.h"

/* How long made-up bytes are tried; CPATTN_TEST_FUZZ_S for longer. */
static double fuzz_seconds(void) {
    const char *given = getenv("CPATTN_TEST_FUZZ_S");
    return given ? atof(given) : 0.5;
}

static uint64_t counter;

static uint64_t draw(uint64_t below) {
    return cpa_mix64(counter += CPA_GOLDEN) % below;
}

/* Rank 0 of two, whose peer is the other end of a pair of sockets. */
typedef struct endpoint {
    cpa_comm_ops ops;
    void *state;
    int peer;
} endpoint;

static void open_endpoint(endpoint *out) {
    int pair[2];
    CU_ASSERT_EQUAL_FATAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
    const cpa_mesh mesh = {.rank = 0, .size = 2, .peers = {-1, pair[0]}};
    CU_ASSERT_EQUAL_FATAL(cpa_mesh_messages(&mesh, &out->ops, &out->state, NULL), CPA_OK);
    out->peer = pair[1];
}

static void close_endpoint(endpoint *e) {
    if (e->peer >= 0) close(e->peer);
    e->ops.close(e->state);
}

/* As messages.c sends it. */
typedef struct frame_head {
    int64_t bytes;
    int32_t tag;
    uint32_t magic;
} frame_head;

enum { FRAME_MAGIC = 0x63706631, TAG = 7, MESSAGE = 1000 };

static void send_head(const endpoint *e, int64_t bytes, int32_t tag) {
    const frame_head head = {bytes, tag, FRAME_MAGIC};
    CU_ASSERT_EQUAL(send(e->peer, &head, sizeof head, MSG_NOSIGNAL), (ssize_t)sizeof head);
}

/* What becomes of a message of MESSAGE bytes that is expected. */
static cpa_status receive(endpoint *e, char *data, cpa_error *err) {
    cpa_comm_request *request = NULL;
    int done = 0;
    cpa_status status = e->ops.receive(e->state, 1, TAG, data, MESSAGE, &request, err);
    for (int i = 0; status == CPA_OK && !done && i < 100; i++) status = e->ops.test(e->state, request, &done, err);
    if (status == CPA_OK && !done) e->ops.cancel(e->state, request);
    return status;
}

static void heads_that_no_message_has_end_the_connection(void) {
    static const frame_head heads[] = {
        {INT64_C(1) << 62, 3, FRAME_MAGIC},
        {INT64_MAX, 3, FRAME_MAGIC},
        {-1, 3, FRAME_MAGIC},
        {INT64_MIN, 3, FRAME_MAGIC},
        {8, -1, FRAME_MAGIC},
        {8, CPA_COMM_TAGS, FRAME_MAGIC},
        {8, 3, FRAME_MAGIC + 1},
        {0, 0, 0},
    };
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        endpoint e;
        char data[MESSAGE];
        cpa_error err = {CPA_OK, ""};
        open_endpoint(&e);
        CU_ASSERT_EQUAL(send(e.peer, &heads[i], sizeof heads[i], MSG_NOSIGNAL), (ssize_t)sizeof heads[i]);
        CU_ASSERT_EQUAL(receive(&e, data, &err), CPA_COMM);
        CU_ASSERT_STRING_EQUAL(err.message, "the connection to rank 1: what arrived is no message");
        close_endpoint(&e);
    }
}

/* The longest message that is one, of which a little has come. */
static void a_message_takes_the_memory_of_what_has_arrived(void) {
    endpoint e;
    char data[MESSAGE] = {0};
    cpa_error err = {CPA_OK, ""};
    open_endpoint(&e);
    const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    send_head(&e, INT64_C(1) << 40, TAG + 1);
    CU_ASSERT_EQUAL(send(e.peer, data, sizeof data, MSG_NOSIGNAL), (ssize_t)sizeof data);
    CU_ASSERT_EQUAL(receive(&e, data, &err), CPA_OK); /* and nothing has come */
    CPA_ASSERT_ORDER(mallinfo2().uordblks + mallinfo2().hblkhd, <, before + (1 << 20));
    close_endpoint(&e);
}

static void a_message_of_another_length_is_named(void) {
    endpoint e;
    char data[MESSAGE] = {0};
    cpa_error err = {CPA_OK, ""};
    open_endpoint(&e);
    send_head(&e, MESSAGE - 1, TAG);
    CU_ASSERT_EQUAL(receive(&e, data, &err), CPA_COMM);
    CU_ASSERT_STRING_EQUAL(err.message, "rank 0: received 999 bytes from rank 1, expected 1000");
    close_endpoint(&e);
}

/* Messages of any length, in pieces, some expected before they come and some not: they arrive as they were sent. */
static void messages_in_pieces_arrive_whole(void) {
    enum { MESSAGES = 40, MOST = 300000 };
    endpoint e;
    open_endpoint(&e);
    char *sent = malloc(MOST), *got = malloc(MOST);
    CU_ASSERT_FATAL(sent && got);
    for (int n = 0; n < MESSAGES; n++) {
        const int64_t bytes = n == 0 ? 0 : (int64_t)draw(n % 2 ? 100 : MOST);
        const int is_early = n % 3 == 0;
        cpa_comm_request *request = NULL, *other = NULL;
        cpa_error err = {CPA_OK, ""};
        int done = 0;
        for (int64_t i = 0; i < bytes; i++) sent[i] = (char)draw(256);
        if (is_early) CU_ASSERT_EQUAL(e.ops.receive(e.state, 1, TAG, got, bytes, &request, &err), CPA_OK);
        CU_ASSERT_EQUAL(e.ops.receive(e.state, 1, TAG + 1, got, 1, &other, &err), CPA_OK); /* moves bytes along */
        send_head(&e, bytes, TAG);
        for (int64_t at = 0; at < bytes;) {
            const ssize_t moved = send(e.peer, sent + at, (size_t)(1 + draw((uint64_t)(bytes - at))), MSG_NOSIGNAL);
            if (moved > 0) at += moved;
            CU_ASSERT_EQUAL(e.ops.test(e.state, other, &done, &err), CPA_OK);
        }
        e.ops.cancel(e.state, other);
        if (!is_early) CU_ASSERT_EQUAL(e.ops.receive(e.state, 1, TAG, got, bytes, &request, &err), CPA_OK);
        for (int i = 0; !done && i < 1000; i++)
            CU_ASSERT_EQUAL_FATAL(e.ops.test(e.state, request, &done, &err), CPA_OK);
        CU_ASSERT(done && (bytes == 0 || memcmp(sent, got, (size_t)bytes) == 0));
    }
    free(sent);
    free(got);
    close_endpoint(&e);
}

/* ---- made-up bytes ---- */

/* Numbers that lengths and tags go wrong at, or any. */
static uint64_t odd_number(void) {
    static const uint64_t odd[] = {
        0, 1, 7, 8, 999, 1000, 1001, 65536, 1u << 31, UINT64_C(1) << 40, UINT64_C(1) << 62, UINT64_MAX};
    return draw(2) ? odd[draw(sizeof odd / sizeof odd[0])] : cpa_mix64(draw(UINT64_MAX));
}

/* Frames with some of their bytes changed; how many bytes. */
static size_t make_stream(unsigned char *out, size_t room) {
    size_t used = 0;
    while (used + sizeof(frame_head) + 2 * MESSAGE < room && draw(8) != 0) {
        const frame_head head = {(int64_t)draw(2 * MESSAGE), (int32_t)(TAG + draw(3)), FRAME_MAGIC};
        memcpy(out + used, &head, sizeof head);
        used += sizeof head + (size_t)head.bytes;
    }
    for (uint64_t changes = draw(4); changes > 0 && used > 8; changes--) {
        const uint64_t number = odd_number();
        memcpy(out + draw(used - 8), &number, 1 + draw(8));
    }
    return used;
}

/* Whatever arrives, every receive is done, or fails as communication does. */
static void feed(endpoint *e, const unsigned char *stream, size_t bytes) {
    enum { EXPECTED = 4 };
    static char data[EXPECTED][2 * MESSAGE];
    cpa_comm_request *expected[EXPECTED] = {NULL};
    cpa_error err;
    size_t at = 0;
    for (int n = 0; n < 200 && (at < bytes || n < 20); n++) {
        const size_t i = draw(EXPECTED);
        int done = 0;
        if (at < bytes) {
            const ssize_t moved = send(e->peer, stream + at, 1 + draw(bytes - at), MSG_NOSIGNAL);
            if (moved < 0) at = bytes;
            if (moved > 0) at += (size_t)moved;
        }
        if (!expected[i]) {
            const int64_t length = (int64_t)draw(2 * MESSAGE);
            CU_ASSERT_EQUAL_FATAL(
                e->ops.receive(e->state, 1, (int32_t)(TAG + draw(3)), data[i], length, &expected[i], &err), CPA_OK);
        } else if (draw(8) == 0) {
            e->ops.cancel(e->state, expected[i]);
            expected[i] = NULL;
        } else {
            const cpa_status status = e->ops.test(e->state, expected[i], &done, &err);
            CU_ASSERT(status == CPA_OK || status == CPA_COMM);
            if (done || status != CPA_OK) expected[i] = NULL;
        }
    }
    for (int i = 0; i < EXPECTED; i++) {
        if (expected[i]) e->ops.cancel(e->state, expected[i]);
    }
}

static void made_up_frames_do_no_harm(void) {
    enum { ROOM = 20000 };
    static unsigned char stream[ROOM];
    enum { LEAST_RUNS = 128 };
    const double end = cpa_clock_now() + fuzz_seconds();
    int64_t runs = 0;
    for (; cpa_clock_now() < end || runs < LEAST_RUNS; runs++) {
        endpoint e;
        open_endpoint(&e);
        feed(&e, stream, make_stream(stream, ROOM));
        close_endpoint(&e);
    }
    printf("%lld streams ... ", (long long)runs);
}

/* One who says made-up things where ranks are expected; whoever is let in has proved it. */
static int64_t visit(const cpa_endpoint *at, const cpa_job_key *key, cpa_reception *reception, int32_t rank) {
    cpa_hello hello = {.magic = CPA_HANDSHAKE_MAGIC, .purpose = CPA_PURPOSE_MEET, .rank = rank, .size = 3}, who;
    cpa_challenge challenge;
    struct {
        cpa_hello hello;
        cpa_proof proof;
    } said = {.hello = hello};
    int fd = -1, taken = -1;
    const double deadline = cpa_clock_now() + 5;
    CU_ASSERT_EQUAL_FATAL(cpa_socket_connect(at, deadline, &fd, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_reception_next(reception, cpa_clock_now() + 0.001, &taken, &who, NULL), CPA_OK);
    CPA_ASSERT_ORDER(taken, <, 0);
    if (cpa_socket_receive(fd, &challenge, sizeof challenge, deadline, NULL) == CPA_OK)
        CU_ASSERT_EQUAL(cpa_proof_make(key, 0, &said.hello, &challenge, &said.proof, NULL), CPA_OK);
    const int is_changed = draw(4) != 0;
    if (is_changed) ((unsigned char *)&said)[draw(sizeof said)] ^= (unsigned char)(1 + draw(255));
    const size_t bytes = draw(4) ? sizeof said : draw(sizeof said);
    (void)!send(fd, &said, bytes, MSG_NOSIGNAL);
    CU_ASSERT_EQUAL(cpa_reception_next(reception, cpa_clock_now() + 0.005, &taken, &who, NULL), CPA_OK);
    CU_ASSERT_EQUAL(taken >= 0, !is_changed && bytes == sizeof said);
    if (taken >= 0) close(taken);
    close(fd);
    return taken >= 0;
}

static void made_up_visitors_are_turned_away(void) {
    enum { LEAST_VISITS = 64 };
    cpa_reception reception;
    cpa_endpoint at;
    cpa_job_key key;
    int listener = -1;
    int64_t visits = 0, let_in = 0;
    const double end = cpa_clock_now() + fuzz_seconds();
    CU_ASSERT_EQUAL_FATAL(cpa_socket_listen("127.0.0.1", 0, &listener, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_endpoint_of(listener, &at, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_job_key_derive(NULL, "a", 1, &key, NULL), CPA_OK);
    cpa_reception_open(listener, CPA_PURPOSE_MEET, 0, 3, &key, &reception);
    for (; cpa_clock_now() < end || visits < LEAST_VISITS; visits++)
        let_in += visit(&at, &key, &reception, (int32_t)draw(3));
    CU_ASSERT_EQUAL(reception.turned_away + let_in + reception.n, visits);
    printf("%lld of %lld ... ", (long long)(visits - let_in), (long long)visits);
    CU_ASSERT(let_in > 0 && let_in < visits);
    cpa_reception_close(&reception);
    close(listener);
}

typedef struct joining {
    cpa_watch *watch;
    cpa_endpoint at;
    cpa_job_key key;
    int listener;
} joining;

static void *join_watch(void *arg) {
    const joining *j = arg;
    cpa_watch_join(j->watch, &j->at, &j->key, j->listener);
    return NULL;
}

/* The watch of rank 0, and the connection of the other rank to it. */
static int open_watch(joining *j) {
    const cpa_caller caller = {.hello = {.purpose = CPA_PURPOSE_WATCH, .rank = 1, .to = 0, .size = 2}, .key = &j->key};
    pthread_t thread;
    int fd = -1;
    CU_ASSERT_EQUAL_FATAL(cpa_job_key_derive(NULL, "a", 1, &j->key, NULL), CPA_OK);
    j->watch = cpa_watch_create(0, 2, 10);
    CU_ASSERT_PTR_NOT_NULL_FATAL(j->watch);
    cpa_watch_listen("127.0.0.1", &j->at, &j->listener);
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, join_watch, j), 0);
    CU_ASSERT_EQUAL_FATAL(cpa_handshake_connect(&caller, &j->at, cpa_clock_now() + 5, &fd, NULL), CPA_OK);
    pthread_join(thread, NULL);
    close(j->listener);
    CU_ASSERT_EQUAL_FATAL(cpa_watch_start(j->watch, NULL), CPA_OK);
    return fd;
}

/* Words of notices, small and odd ones: none is taken for one of another rank, and what is told of them is a line. */
static void made_up_notices_do_no_harm(void) {
    enum { WORDS = 500, LEAST_RUNS = 8 };
    const cpa_calls calls = {.channel = 1, .first = 1, .last = 2};
    const double end = cpa_clock_now() + fuzz_seconds();
    int64_t runs = 0;
    for (; cpa_clock_now() < end || runs < LEAST_RUNS; runs++) {
        joining j;
        uint32_t words[WORDS];
        cpa_error err = {CPA_OK, ""};
        const int fd = open_watch(&j);
        for (int i = 0; i < WORDS; i++) words[i] = draw(4) ? (uint32_t)draw(5) : (uint32_t)odd_number();
        for (int n = 0; n < 4; n++) (void)!send(fd, words, sizeof words, MSG_NOSIGNAL);
        close(fd);
        const double late = cpa_clock_now() + 0.1;
        while (!cpa_watch_has_notice(j.watch) && cpa_clock_now() < late) continue;
        const cpa_status status = cpa_watch_check(j.watch, 1, calls, &err);
        CU_ASSERT(status == CPA_OK || strncmp(err.message, "rank 1", 6) == 0);
        for (const char *c = err.message; *c; c++) CU_ASSERT((unsigned char)*c >= 0x20 && *c != 0x7f);
        cpa_watch_stop(j.watch);
    }
    printf("%lld watches ... ", (long long)runs);
}

static const cpa_test tests[] = {
    {"heads that no message has end the connection", heads_that_no_message_has_end_the_connection},
    {"a message takes the memory of what has arrived", a_message_takes_the_memory_of_what_has_arrived},
    {"a message of another length is named", a_message_of_another_length_is_named},
    {"messages in pieces arrive whole", messages_in_pieces_arrive_whole},
    {"made-up frames do no harm", made_up_frames_do_no_harm},
    {"made-up notices do no harm", made_up_notices_do_no_harm},
    {"made-up visitors are turned away", made_up_visitors_are_turned_away},
};

int main(int argc, char **argv) {
    mallopt(M_PERTURB, 0xa5); /* what is used before it is set shows */
    return cpa_test_main(argc, argv, "frames", tests, (int)(sizeof tests / sizeof tests[0]));
}
