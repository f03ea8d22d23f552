/* Ranks that meet over TCP while strangers knock: silent ones, impostors, garbage. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cpattn/comm.h>

#include "base/clock.h"
#include "base/hash.h"
#include "comm/store/mesh.h"
#include "comm/store/watch.h"
#include "tests/fixtures/free_port.h"
#include "tests/fixtures/unit.h"

enum { RANKS = 3, MOST_S = 10 };

static const char secret[] = "sixteen letters or more";

/* ---- a job, a thread a rank ---- */

typedef struct rank_of_job {
    pthread_t thread;
    int32_t rank, size, port;
    const char *secret;
    double join_s;
    int talks; /* how often they talk before the job ends */
    cpa_status status;
    cpa_error err;
    double took_s;
    int is_right; /* what its collective calls gave */
} rank_of_job;

/* Every rank hears the numbers of all. */
static int talk(cpa_comm *comm) {
    int32_t mine = 100 + cpa_comm_rank(comm), all[64] = {0}, right = 1;
    if (cpa_comm_all_gather(comm, &mine, sizeof mine, all, NULL) != CPA_OK) return 0;
    for (int32_t r = 0; r < cpa_comm_size(comm); r++) right &= all[r] == 100 + r;
    return right;
}

static void *run_rank(void *arg) {
    rank_of_job *r = arg;
    cpa_comm *comm = NULL;
    const cpa_comm_options options = {.size = sizeof options, .secret = r->secret, .join_s = r->join_s};
    const double begin = cpa_clock_now();
    r->status = cpa_comm_from_store("127.0.0.1", r->port, r->rank, r->size, &options, &comm, &r->err);
    r->took_s = cpa_clock_now() - begin;
    if (r->status != CPA_OK) return NULL;
    r->is_right = talk(comm);
    for (int i = 1; i < r->talks; i++) r->is_right &= talk(comm);
    cpa_comm_destroy(comm);
    return NULL;
}

static void start_rank(rank_of_job *r) {
    CU_ASSERT_EQUAL_FATAL(pthread_create(&r->thread, NULL, run_rank, r), 0);
}

/* Ranks 0 to n - 1, which are to be started and to be waited for. */
static void name_ranks(rank_of_job *ranks, int32_t n) {
    const int32_t port = cpa_test_free_port();
    for (int32_t r = 0; r < n; r++) {
        ranks[r] = (rank_of_job){.rank = r, .size = n, .port = port, .secret = secret, .join_s = 2 * MOST_S};
    }
}

static void expect_job(rank_of_job *ranks, int32_t n) {
    for (int32_t r = 0; r < n; r++) {
        pthread_join(ranks[r].thread, NULL);
        if (ranks[r].status != CPA_OK) printf("rank %d: %s\n", r, ranks[r].err.message);
        CU_ASSERT_EQUAL(ranks[r].status, CPA_OK);
        CU_ASSERT(ranks[r].is_right);
        CPA_ASSERT_ORDER(ranks[r].took_s, <, MOST_S);
    }
}

/* ---- strangers ---- */

static int call(int32_t port) {
    const struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&to, sizeof to) == 0) return fd;
    close(fd);
    return -1;
}

static int call_until_answered(int32_t port) {
    const double end = cpa_clock_now() + MOST_S;
    int fd = call(port);
    while (fd < 0 && cpa_clock_now() < end) {
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        fd = call(port);
    }
    return fd;
}

/* A process that holds as many silent connections to a port as it may. Returns once they are there. */
static pid_t start_silent(int32_t port, int n) {
    int ready[2];
    CU_ASSERT_EQUAL_FATAL(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
        struct rlimit files;
        getrlimit(RLIMIT_NOFILE, &files);
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
        int held = call_until_answered(port) >= 0;
        while (held < n && call(port) >= 0) held++;
        (void)!write(ready[1], &held, sizeof held);
        pause();
        _exit(0);
    }
    int held = 0;
    CU_ASSERT_EQUAL(read(ready[0], &held, sizeof held), (ssize_t)sizeof held);
    CPA_ASSERT_ORDER(held, >=, n);
    close(ready[0]);
    close(ready[1]);
    return child;
}

static void end_process(pid_t child) {
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* ---- tests ---- */

static void a_job_starts_among_silent_strangers(void) {
    enum { STRANGERS = 3000 };
    rank_of_job ranks[RANKS];
    name_ranks(ranks, RANKS);
    start_rank(&ranks[0]);
    const pid_t strangers = start_silent(ranks[0].port, STRANGERS);
    for (int32_t r = 1; r < RANKS; r++) start_rank(&ranks[r]);
    expect_job(ranks, RANKS);
    end_process(strangers);
}

/* What an impostor says as rank 1, with a proof that is none, or not of this connection. */
static int pretend(int32_t port, const cpa_proof *proof) {
    cpa_hello hello = {.magic = CPA_HANDSHAKE_MAGIC, .purpose = CPA_PURPOSE_MEET, .rank = 1, .size = RANKS};
    cpa_reply reply = {.verdict = 0};
    cpa_challenge challenge;
    const double deadline = cpa_clock_now() + MOST_S;
    int fd = call_until_answered(port), is_in = 0;
    if (fd >= 0 && cpa_socket_send(fd, &hello, sizeof hello, deadline, NULL) == CPA_OK &&
        cpa_socket_receive(fd, &challenge, sizeof challenge, deadline, NULL) == CPA_OK &&
        cpa_socket_send(fd, proof, sizeof *proof, deadline, NULL) == CPA_OK &&
        cpa_socket_receive(fd, &reply, sizeof reply, deadline, NULL) == CPA_OK)
        is_in = reply.verdict == CPA_VERDICT_WELCOME;
    if (fd >= 0) close(fd);
    return is_in;
}

static void an_impostor_takes_no_place(void) {
    rank_of_job ranks[RANKS];
    cpa_proof proof = {{0}};
    cpa_job_key guess;
    const cpa_hello hello = {.magic = CPA_HANDSHAKE_MAGIC, .purpose = CPA_PURPOSE_MEET, .rank = 1, .size = RANKS};
    const cpa_challenge challenge = {.magic = CPA_HANDSHAKE_MAGIC};
    name_ranks(ranks, RANKS);
    start_rank(&ranks[0]);
    CU_ASSERT(!pretend(ranks[0].port, &proof));
    /* The right key, for another connection. */
    CU_ASSERT_EQUAL(cpa_job_key_derive(NULL, secret, (int64_t)strlen(secret), &guess, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_proof_make(&guess, 0, &hello, &challenge, &proof, NULL), CPA_OK);
    CU_ASSERT(!pretend(ranks[0].port, &proof));
    for (int32_t r = 1; r < RANKS; r++) start_rank(&ranks[r]);
    expect_job(ranks, RANKS);
}

/* A proof is of one rank, one purpose and one side. */
static void a_proof_holds_for_what_was_said_alone(void) {
    cpa_job_key key, other;
    cpa_proof proof, wrong;
    const cpa_hello hello = {.magic = CPA_HANDSHAKE_MAGIC, .purpose = CPA_PURPOSE_MEET, .rank = 1, .to = 0, .size = 3};
    cpa_challenge challenge = {.magic = CPA_HANDSHAKE_MAGIC};
    CU_ASSERT_EQUAL(cpa_job_key_derive(NULL, "a", 1, &key, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_job_key_derive(&key, "b", 1, &other, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_proof_make(&key, 0, &hello, &challenge, &proof, NULL), CPA_OK);
    for (int change = 0; change < 7; change++) {
        cpa_hello said = hello;
        if (change == 0) said.rank = 2;
        if (change == 1) said.purpose = CPA_PURPOSE_WATCH;
        if (change == 2) said.to = 2;
        if (change == 3) said.size = 4;
        if (change == 4) challenge.nonce[31] ^= 1;
        CU_ASSERT_EQUAL(cpa_proof_make(change == 5 ? &other : &key, change == 6, &said, &challenge, &wrong, NULL),
                        CPA_OK);
        CU_ASSERT(!cpa_proof_is_equal(&proof, &wrong));
        if (change == 4) challenge.nonce[31] ^= 1;
    }
    CU_ASSERT_EQUAL(cpa_proof_make(&key, 0, &hello, &challenge, &wrong, NULL), CPA_OK);
    CU_ASSERT(cpa_proof_is_equal(&proof, &wrong));
}

static atomic_int attack_is_over, attacked;

/* Where this process listens: a port, or 0. */
static int32_t listens_at(int fd) {
    int listens = 0;
    socklen_t length = sizeof listens;
    struct sockaddr_in at;
    socklen_t at_bytes = sizeof at;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || !listens) return 0;
    return getsockname(fd, (struct sockaddr *)&at, &at_bytes) == 0 ? ntohs(at.sin_port) : 0;
}

/* Garbage to every port at which this process listens: of the store, of the mesh and of the watch, as they come. */
static void *attack(void *unused) {
    enum { FILES = 256, HELD = 64 };
    int held[HELD];
    uint64_t random = 1;
    (void)unused;
    for (int i = 0; i < HELD; i++) held[i] = -1;
    for (int n = 0; !atomic_load(&attack_is_over); n++) {
        const int32_t port = listens_at(3 + n % FILES);
        if (!port) continue;
        const int fd = call(port);
        if (fd < 0) continue;
        unsigned char garbage[200];
        const uint64_t magic = CPA_HANDSHAKE_MAGIC;
        for (size_t i = 0; i < sizeof garbage; i++)
            garbage[i] = (unsigned char)(random = cpa_mix64(random + CPA_GOLDEN));
        if (random & 1) memcpy(garbage, &magic, sizeof magic);
        (void)!send(fd, garbage, random % sizeof garbage, MSG_NOSIGNAL);
        atomic_fetch_add(&attacked, 1);
        int *place = &held[atomic_load(&attacked) % HELD];
        if (*place >= 0) close(*place);
        *place = fd;
    }
    for (int i = 0; i < HELD; i++) {
        if (held[i] >= 0) close(held[i]);
    }
    return NULL;
}

static void garbage_at_every_port_stops_no_job(void) {
    rank_of_job ranks[RANKS];
    pthread_t attacker;
    name_ranks(ranks, RANKS);
    atomic_store(&attack_is_over, 0);
    CU_ASSERT_EQUAL_FATAL(pthread_create(&attacker, NULL, attack, NULL), 0);
    start_rank(&ranks[0]);
    while (atomic_load(&attacked) < 200) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    for (int32_t r = 0; r < RANKS; r++) ranks[r].talks = 400;
    for (int32_t r = 1; r < RANKS; r++) start_rank(&ranks[r]);
    expect_job(ranks, RANKS);
    atomic_store(&attack_is_over, 1);
    pthread_join(attacker, NULL);
}

static void nobody_listens_in_a_run(void) {
    rank_of_job ranks[RANKS];
    cpa_comm *comm = NULL;
    name_ranks(ranks, RANKS);
    for (int32_t r = 1; r < RANKS; r++) start_rank(&ranks[r]);
    const cpa_comm_options options = {.size = sizeof options, .secret = secret};
    CU_ASSERT_EQUAL(cpa_comm_from_store("127.0.0.1", ranks[0].port, 0, RANKS, &options, &comm, NULL), CPA_OK);
    CU_ASSERT(talk(comm));
    for (int fd = 3; fd < 256; fd++) CU_ASSERT_EQUAL(listens_at(fd), 0);
    cpa_comm_destroy(comm);
    expect_job(ranks + 1, RANKS - 1);
}

static void expect_failure(const rank_of_job *r, cpa_status status, const char *text) {
    CU_ASSERT_EQUAL(r->status, status);
    CU_ASSERT_PTR_NOT_NULL(strstr(r->err.message, text));
    if (r->status != status || !strstr(r->err.message, text))
        printf("rank %d, '%s': %d %s\n", r->rank, text, r->status, r->err.message);
}

static void a_rank_of_another_secret_is_refused_and_the_missing_are_named(void) {
    rank_of_job ranks[4];
    name_ranks(ranks, 4);
    for (int32_t r = 0; r < 4; r++) ranks[r].join_s = 3;
    ranks[2].secret = "another secret altogether";
    for (int32_t r = 0; r < 3; r++) start_rank(&ranks[r]); /* rank 3 does not come */
    for (int32_t r = 0; r < 3; r++) pthread_join(ranks[r].thread, NULL);
    for (int32_t r = 0; r < 2; r++) {
        expect_failure(&ranks[r], CPA_COMM, "rank 0: ranks 2, 3 of 4 have not come in 3 s");
        expect_failure(&ranks[r], CPA_COMM, "1 strangers were turned away, the last 127.0.0.1, who has another secret");
        CPA_ASSERT_ORDER(ranks[r].took_s, <, 20);
    }
    expect_failure(&ranks[2], CPA_INVALID, "rank 2: rank 0 at 127.0.0.1 port ");
    expect_failure(&ranks[2], CPA_INVALID, "the secret there is another one than here");
    CPA_ASSERT_ORDER(ranks[2].took_s, <, 3);
}

/* What listens where rank 0 should is no rank: what it says is neither believed nor printed. */
static void *serve_garbage(void *listener) {
    static const char text[] = "\033[31mHTTP/1.1 400 Bad Request\r\nserver: somebody else entirely\r\n\r\n";
    const int fd = accept(*(const int *)listener, NULL, NULL);
    (void)!send(fd, text, sizeof text, MSG_NOSIGNAL);
    char answer[64];
    while (recv(fd, answer, sizeof answer, 0) > 0) continue;
    close(fd);
    return NULL;
}

static void a_master_that_is_no_rank_is_named(void) {
    cpa_endpoint at;
    rank_of_job rank = {.rank = 1, .size = 2, .secret = secret, .join_s = 40};
    pthread_t server;
    int listener = -1;
    CU_ASSERT_EQUAL(cpa_socket_listen("127.0.0.1", 0, &listener, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_endpoint_of(listener, &at, NULL), CPA_OK);
    CU_ASSERT_STRING_EQUAL(at.addresses[0], "127.0.0.1"); /* and at no other */
    CU_ASSERT_EQUAL(at.n_addresses, 1);
    fcntl(listener, F_SETFL, fcntl(listener, F_GETFL) & ~O_NONBLOCK);
    rank.port = at.port;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&server, NULL, serve_garbage, &listener), 0);
    start_rank(&rank);
    pthread_join(rank.thread, NULL);
    pthread_join(server, NULL);
    expect_failure(&rank, CPA_COMM, "what answers is no rank of a job");
    CU_ASSERT_PTR_NULL(strchr(rank.err.message, '\033'));
    CPA_ASSERT_ORDER(rank.took_s, <, 20);
    close(listener);
}

/* One that has come, and then does nothing more, before anybody watches it. */
static void a_rank_that_stops_while_ranks_join_ends_the_wait(void) {
    rank_of_job ranks[2];
    cpa_job_key key;
    cpa_mesh mesh;
    name_ranks(ranks, 2);
    ranks[0].join_s = 1;
    start_rank(&ranks[0]);
    cpa_endpoint meeting = {.addresses = {"127.0.0.1"}, .n_addresses = 1, .port = ranks[0].port};
    CU_ASSERT_EQUAL(cpa_job_key_derive(NULL, secret, (int64_t)strlen(secret), &key, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_mesh_join(&meeting, -1, 1, 2, &key, MOST_S, &mesh, NULL), CPA_OK);
    pthread_join(ranks[0].thread, NULL);
    expect_failure(&ranks[0], CPA_COMM, "rank 1 has not joined in time");
    CPA_ASSERT_ORDER(ranks[0].took_s, <, 20);
    cpa_mesh_close(&mesh);
}

/* ---- the door of the watch, which alone opens where ranks meet over MPI ---- */

typedef struct door {
    cpa_watch *watch;
    cpa_watch_meeting meeting;
    cpa_job_key key;
    int listener;
} door;

static void *keep_door(void *arg) {
    door *d = arg;
    cpa_watch_join(d->watch, &d->meeting.endpoint, &d->key, d->listener);
    return NULL;
}

/* Lines of the log, of which the last is kept. */
typedef struct log_lines {
    char last[300];
    int n;
} log_lines;

static void note_line(void *ctx, cpa_log_level level, const char *line) {
    log_lines *lines = ctx;
    (void)level;
    snprintf(lines->last, sizeof lines->last, "%s", line);
    lines->n++;
}

static void send_garbage(int32_t port) {
    char answer[64];
    const struct timeval most = {.tv_sec = MOST_S};
    const int fd = call(port);
    (void)!setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
    (void)!send(fd, "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
    while (recv(fd, answer, sizeof answer, 0) > 0) continue; /* until it is hung up */
    close(fd);
}

/* The token of the job is of random bytes that went over MPI: who has another, or the bytes of another job, is no rank. */
static void the_door_of_the_watch_is_shut_to_strangers(void) {
    door d = {.watch = cpa_watch_create(0, 2, MOST_S)};
    cpa_watch *second = cpa_watch_create(1, 2, MOST_S);
    cpa_job_key stranger;
    pthread_t keeper;
    log_lines lines = {.n = 0};
    cpa_error why = {CPA_OK, ""};
    int fd = -1;
    cpa_log_set(note_line, &lines, CPA_LOG_WARN);
    CU_ASSERT_EQUAL(cpa_random_fill(d.meeting.nonce, sizeof d.meeting.nonce, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_job_key_derive(NULL, d.meeting.nonce, sizeof d.meeting.nonce, &d.key, NULL), CPA_OK);
    d.meeting.nonce[0] ^= 1;
    CU_ASSERT_EQUAL(cpa_job_key_derive(NULL, d.meeting.nonce, sizeof d.meeting.nonce, &stranger, NULL), CPA_OK);
    cpa_watch_listen("127.0.0.1", &d.meeting.endpoint, &d.listener);
    CU_ASSERT_EQUAL_FATAL(pthread_create(&keeper, NULL, keep_door, &d), 0);
    const cpa_caller caller = {.hello = {.purpose = CPA_PURPOSE_WATCH, .rank = 1, .to = 0, .size = 2},
                               .key = &stranger};
    CU_ASSERT_EQUAL(cpa_handshake_connect(&caller, &d.meeting.endpoint, cpa_clock_now() + MOST_S, &fd, &why),
                    CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(why.message, "the secret there is another one than here"));
    send_garbage(d.meeting.endpoint.port);
    cpa_watch_join(second, &d.meeting.endpoint, &d.key, -1);
    pthread_join(keeper, NULL);
    cpa_log_set(NULL, NULL, CPA_LOG_WARN);
    CU_ASSERT_EQUAL(lines.n, 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(lines.last, "rank 0: 2 connections of strangers were turned away; the last from"));
    CU_ASSERT_PTR_NOT_NULL(strstr(lines.last, "no rank of a job"));

    /* The rank itself is in: it is heard to leave. */
    const cpa_calls any = {.channel = -1};
    CU_ASSERT_EQUAL(cpa_watch_start(d.watch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_watch_start(second, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_watch_check(d.watch, 1, any, NULL), CPA_OK);
    cpa_watch_stop(second);
    const double until = cpa_clock_now() + MOST_S;
    while (cpa_watch_check(d.watch, 1, any, &why) == CPA_OK && cpa_clock_now() < until) sched_yield();
    CU_ASSERT_PTR_NOT_NULL(strstr(why.message, "rank 1"));
    CPA_ASSERT_ORDER(cpa_clock_now(), <, until);
    cpa_watch_stop(d.watch);
    cpa_socket_close(&d.listener);
}

static void a_short_secret_is_refused(void) {
    cpa_comm *comm = NULL;
    cpa_error err = {CPA_OK, ""};
    const cpa_comm_options options = {.size = sizeof options, .secret = "fifteen letters"};
    CU_ASSERT_EQUAL(cpa_comm_from_store("127.0.0.1", 29000, 0, 2, &options, &comm, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "a secret of 15 letters, expected at least 16"));
}

static const cpa_test tests[] = {
    {"a job starts among 3,000 silent strangers", a_job_starts_among_silent_strangers},
    {"an impostor takes no place", an_impostor_takes_no_place},
    {"a proof holds for what was said alone", a_proof_holds_for_what_was_said_alone},
    {"garbage at every port stops no job", garbage_at_every_port_stops_no_job},
    {"nobody listens in a run", nobody_listens_in_a_run},
    {"a rank of another secret is refused, and the missing are named",
     a_rank_of_another_secret_is_refused_and_the_missing_are_named},
    {"a master that is no rank is named", a_master_that_is_no_rank_is_named},
    {"a rank that stops while ranks join ends the wait", a_rank_that_stops_while_ranks_join_ends_the_wait},
    {"the door of the watch is shut to strangers", the_door_of_the_watch_is_shut_to_strangers},
    {"a short secret is refused", a_short_secret_is_refused},
};

CPA_TEST_MAIN("strangers at the ports of a job", tests)
