/* What a transport for device memory says when a rank fails: who did not answer, and what did not fit. */
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/fixtures/device_traffic.h"

/* Rank 0 sends the last rank more than that expects, which is then told the two sizes; the others do nothing. */
static void differing_sizes(cpa_site *s) {
    int last = cpa_world_size - 1;
    uint8_t *buffer = NULL;
    cpa_exchange *exchange = NULL;
    cpa_error err = {.message = ""};
    CUDA(cudaMalloc((void **)&buffer, 4096));
    cpa_message m = {.peer = last, .send = buffer, .send_bytes = 1001};
    if (cpa_world_rank == last) m = (cpa_message){.peer = 0, .recv = buffer, .recv_bytes = 1000};
    OK(s->transport->table->start(s->transport, &m, cpa_world_rank == 0 || cpa_world_rank == last, s->producer,
                                  &exchange, NULL));
    OK(s->transport->table->finish(s->transport, exchange, s->producer, NULL, NULL));
    if (cpa_world_rank == last) {
        cpa_status status;
        double begin = cpa_clock_now();
        do { /* the report may come just behind the end of the stream */
            status = s->transport->table->drain(s->transport, s->producer, NULL, &err);
        } while (status == CPA_OK && cpa_clock_now() - begin < 5);
        CU_ASSERT_EQUAL(status, CPA_COMM);
        CU_ASSERT(strstr(err.message, "rank 0 sends 1001 bytes") && strstr(err.message, "expects 1000"));
    } else {
        cpa_site_drain(s, s->producer);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    cudaFree(buffer);
}

static void test_sizes_that_differ_are_reported(void) {
    cpa_with_transport(differing_sizes);
}

/* Whether a message ends with the name of this rank, and of no other. */
static int names_rank(const char *message, int rank) {
    char name[32];
    snprintf(name, sizeof name, " s for rank %d", rank);
    const char *names = strstr(message, " s for rank");
    return names && strcmp(names, name) == 0;
}

/* What the others see when the last rank does not take part in an exchange with all. */
static void wait_in_vain(cpa_site *s, cpa_traffic *t) {
    const cpa_transport_table *table = s->transport->table;
    cpa_error err = {.message = ""};
    cpa_exchange *exchange = NULL;
    double begin = cpa_clock_now();
    cpa_status status = table->start(s->transport, t->msgs, t->n, s->producer, &exchange, &err);
    if (status == CPA_OK) status = table->finish(s->transport, exchange, s->producer, NULL, &err);
    if (status == CPA_OK) status = table->drain(s->transport, s->producer, NULL, &err);
    double waited = cpa_clock_now() - begin;
    CU_ASSERT_EQUAL(status, CPA_COMM);
    CU_ASSERT(waited > 1 && waited < 4);
    CU_ASSERT(names_rank(err.message, cpa_world_size - 1));
    if (!names_rank(err.message, cpa_world_size - 1))
        printf("rank %d, %s: %s\n", cpa_world_rank, table->name, err.message);

    char first[sizeof err.message];
    strcpy(first, err.message);
    CU_ASSERT_EQUAL(table->start(s->transport, t->msgs, t->n, s->producer, &exchange, &err), CPA_COMM);
    CU_ASSERT_STRING_EQUAL(err.message, first);
    CUDA(cudaStreamSynchronize(s->producer)); /* nothing of the device is stuck */
}

/* An exchange of 1000 bytes with each, so that every buffer has met its peer. */
static void meet_all(cpa_site *s, cpa_traffic *t, uint64_t id) {
    cpa_traffic_fill(t, id);
    for (int32_t m = 0; m < t->n; m++) t->msgs[m].send_bytes = t->msgs[m].recv_bytes = 1000;
    cpa_site_exchange(s, t->msgs, t->n);
    cpa_site_drain(s, s->producer);
}

static void last_rank_fails(cpa_site *s, void (*failing)(cpa_site *, cpa_traffic *)) {
    cpa_traffic t;
    cpa_traffic_create(&t);
    meet_all(s, &t, 55);
    s->transport->timeout_s = 1.5;
    MPI_Barrier(MPI_COMM_WORLD);
    if (cpa_world_rank == cpa_world_size - 1) {
        failing(s, &t);
    } else {
        wait_in_vain(s, &t);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = cpa_clock_now();
    cpa_traffic_destroy(&t);
    CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 4);
}

static void never_start(cpa_site *s, cpa_traffic *t) {
    (void)s;
    (void)t;
}

static void a_silent_rank(cpa_site *s) {
    last_rank_fails(s, never_start);
}

static void test_a_rank_that_stops_answering_is_named(void) {
    cpa_with_transport(a_silent_rank);
}

static void sleep_long(void *unused) {
    (void)unused;
    usleep(4000000);
}

/* The host starts the exchange, but the device does not come to it; afterwards it may work or fail. */
static void start_late(cpa_site *s, cpa_traffic *t) {
    s->transport->timeout_s = 6;
    CUDA(cudaLaunchHostFunc(s->producer, sleep_long, NULL));
    cpa_site_exchange(s, t->msgs, t->n);
    s->transport->table->drain(s->transport, s->producer, NULL, NULL);
}

static void a_stuck_device(cpa_site *s) {
    last_rank_fails(s, start_late);
}

static void test_a_rank_whose_device_is_stuck_is_named(void) {
    cpa_with_transport(a_stuck_device);
}

/* The last rank does not launch a graph with an exchange. */
static void a_silent_rank_in_a_graph(cpa_site *s) {
    cpa_traffic t;
    cpa_error err = {.message = ""};
    cpa_traffic_create(&t);
    meet_all(s, &t, 56);
    cpa_site_begin_capture(s);
    cpa_site_exchange(s, t.msgs, t.n);
    cudaGraphExec_t executable = cpa_site_end_capture(s);
    s->transport->timeout_s = 1.5;
    MPI_Barrier(MPI_COMM_WORLD);
    if (cpa_world_rank != cpa_world_size - 1) {
        double begin = cpa_clock_now();
        CUDA(cudaGraphLaunch(executable, s->producer));
        CU_ASSERT_EQUAL(s->transport->table->drain(s->transport, s->producer, NULL, &err), CPA_COMM);
        CU_ASSERT(names_rank(err.message, cpa_world_size - 1));
        CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 4);
    }
    CUDA(cudaGraphExecDestroy(executable));
    MPI_Barrier(MPI_COMM_WORLD);
    cpa_traffic_destroy(&t);
}

static void test_a_rank_that_does_not_launch_a_graph_is_named(void) {
    cpa_with_transport(a_silent_rank_in_a_graph);
}

static void sleep_shortly(void *unused) {
    (void)unused;
    usleep(600000);
}

/* Messages that are too long to be stored by a kernel. */
static void make_long(cpa_traffic *t) {
    cpa_traffic_fill(t, 57);
    for (int32_t m = 0; m < t->n; m++) t->msgs[m].send_bytes = t->msgs[m].recv_bytes = 2 * CPA_TRAFFIC_SMALL;
}

/* After a graph with exchanges, others that take longer than the time-out all in all. */
static void slow_exchanges_after_a_graph(cpa_site *s) {
    cpa_traffic t;
    cpa_traffic_create(&t);
    make_long(&t);
    cpa_site_exchange(s, t.msgs, t.n);
    cpa_site_drain(s, s->producer);
    cpa_site_begin_capture(s);
    cpa_site_exchange(s, t.msgs, t.n);
    cudaGraphExec_t executable = cpa_site_end_capture(s);
    CUDA(cudaGraphLaunch(executable, s->producer));
    cpa_site_drain(s, s->producer);
    s->transport->timeout_s = 1.2;
    for (int i = 0; i < 4; i++) {
        CUDA(cudaLaunchHostFunc(s->producer, sleep_shortly, NULL));
        cpa_site_exchange(s, t.msgs, t.n);
    }
    cpa_site_drain(s, s->producer);
    CUDA(cudaGraphExecDestroy(executable));
    cpa_traffic_destroy(&t);
}

static void test_exchanges_that_move_are_not_given_up(void) {
    cpa_with_transport(slow_exchanges_after_a_graph);
}

/* The last rank does not say that it has stored its messages. */
static void a_silent_rank_with_rooms(cpa_site *s) {
    cpa_message msgs[CPA_TRAFFIC_MAX_RANKS];
    cpa_error err = {.message = ""};
    int32_t n = 0;
    s->transport->timeout_s = 1.5;
    for (int peer = 0; peer < cpa_world_size; peer++) {
        void *theirs, *own;
        int64_t buffer_bytes;
        if (peer == cpa_world_rank) continue;
        s->transport->table->peer_buffer(s->transport, peer, &theirs, &own, &buffer_bytes);
        msgs[n++] = (cpa_message){peer, theirs, 64, own, 64};
    }
    if (cpa_world_rank != cpa_world_size - 1) {
        cpa_site_exchange(s, msgs, n);
        CU_ASSERT_EQUAL(s->transport->table->drain(s->transport, s->producer, NULL, &err), CPA_COMM);
        CU_ASSERT(names_rank(err.message, cpa_world_size - 1));
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

static void test_a_rank_that_does_not_fill_a_peer_buffer_is_named(void) {
    cpa_with_transport(a_silent_rank_with_rooms);
}

static const cpa_test TESTS[] = {
    {"a rank that stops answering is named", test_a_rank_that_stops_answering_is_named},
    {"a rank whose device is stuck is named", test_a_rank_whose_device_is_stuck_is_named},
    {"a rank that does not launch a graph is named", test_a_rank_that_does_not_launch_a_graph_is_named},
    {"exchanges that move are not given up", test_exchanges_that_move_are_not_given_up},
    /* Of peer memory. */
    {"sizes that differ are reported", test_sizes_that_differ_are_reported},
    {"a rank that does not fill a peer-mapped buffer is named", test_a_rank_that_does_not_fill_a_peer_buffer_is_named},
};
enum { N_TESTS = sizeof TESTS / sizeof TESTS[0], OF_PEER_MEMORY = 2 };

CPA_MPI_TEST_MAIN_UNLESS(cpa_traffic_missing(), "failures of device transports", TESTS,
                         cpa_test_transport() == &cpa_transport_peer ? N_TESTS : N_TESTS - OF_PEER_MEMORY)
