/* A transport for device memory, beyond what tests/test_transport.c holds every transport to: streams, graphs, the
 * choice, time-outs. Rank r takes device r, modulo the number of devices: two ranks may share one, which peer memory
 * allows and NCCL refuses. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/device_transport.h"
#include "tests/mpi_unit.h"
#include "tests/transport_fixture.h"

#define OK(call) CU_ASSERT_EQUAL((call), CPA_OK)
#define CUDA(call) CU_ASSERT_EQUAL((call), cudaSuccess)

/* SMALL is the longest message that peer memory stores by a kernel, LINES the longest of which it does so in lines. */
enum { POISON = 0xa5, MAX_RANKS = 8, LINES = 192 << 10, SMALL = 1 << 20, MAX_BYTES = 3 << 20, MARGIN = 64 };

static int world_size, world_rank;
static int gpus_suffice; /* one for each rank */

/* ---- what travels ---- */

static int64_t random_size(int from, int to, uint64_t exchange) {
    uint64_t r = cpa_test_mixed(exchange * 4096 + (uint64_t)from * 64 + (uint64_t)to);
    switch (r % 8) {
        case 0: return 0;
        case 1: return (int64_t)(r >> 8) % 16;
        case 2: return (int64_t)(r >> 8) % 5000;
        case 3: return SMALL - 1 + (int64_t)(r >> 8) % 3;
        case 4: return (int64_t)(r >> 8) % SMALL;
        case 5: return LINES - 1 + (int64_t)(r >> 8) % 3;
        case 6: return (int64_t)(r >> 8) % LINES;
        default: return (int64_t)(r >> 8) % (MAX_BYTES - MARGIN);
    }
}

/* ---- one rank's side of an exchange with all others ---- */

typedef struct traffic {
    uint64_t id;      /* stands for the sizes */
    uint64_t content; /* and this for what is sent */
    int shift;        /* of all buffers, in bytes from a multiple of 16 */
    cpa_message msgs[MAX_RANKS];
    int32_t n;
    uint8_t *device; /* send and receive buffers of MAX_BYTES for each rank */
    uint8_t *before; /* device, [ranks, MAX_BYTES]: what the receive buffers held when they became ready */
    uint8_t *host;   /* pinned, the same as `device` */
    uint8_t *result; /* pinned, [ranks, MAX_BYTES]: what was received */
    cpa_exchange *exchange;
} traffic;

static int64_t send_at(const traffic *t, int peer) {
    return (int64_t)peer * MAX_BYTES + t->shift;
}

static int64_t recv_at(const traffic *t, int peer) {
    return (int64_t)(world_size + peer) * MAX_BYTES + 16 + t->shift;
}

static void traffic_create(traffic *t) {
    size_t bytes = (size_t)world_size * MAX_BYTES;
    memset(t, 0, sizeof *t);
    CUDA(cudaMalloc((void **)&t->device, 2 * bytes));
    CUDA(cudaMalloc((void **)&t->before, bytes));
    CUDA(cudaHostAlloc((void **)&t->host, 2 * bytes, cudaHostAllocDefault));
    CUDA(cudaHostAlloc((void **)&t->result, bytes, cudaHostAllocDefault));
}

static void traffic_destroy(traffic *t) {
    cudaFree(t->device);
    cudaFree(t->before);
    cudaFreeHost(t->host);
    cudaFreeHost(t->result);
}

/* Sizes, and the contents of all buffers on the host; the same ids on all ranks. */
static void traffic_fill_with(traffic *t, uint64_t id, uint64_t content) {
    const int shifts[] = {0, 1, 4, 0};
    t->id = id;
    t->content = content;
    t->shift = shifts[id % 4];
    t->n = 0;
    memset(t->host, POISON, 2 * (size_t)world_size * MAX_BYTES);
    for (int peer = 0; peer < world_size; peer++) {
        if (peer == world_rank) continue;
        int64_t sends = random_size(world_rank, peer, id), receives = random_size(peer, world_rank, id);
        for (int64_t i = 0; i < sends; i++)
            t->host[send_at(t, peer) + i] = cpa_test_pattern(world_rank, peer, content, i);
        t->msgs[t->n++] =
            (cpa_message){peer, t->device + send_at(t, peer), sends, t->device + recv_at(t, peer), receives};
    }
}

static void traffic_fill(traffic *t, uint64_t id) {
    traffic_fill_with(t, id, id);
}

/* The producer: after `delay` the send buffers get their contents, and the receive buffers, poisoned, are read. */
static void traffic_produce(traffic *t, cudaStream_t stream, cudaHostFn_t delay) {
    size_t bytes = (size_t)world_size * MAX_BYTES;
    CUDA(cudaMemcpyAsync(t->device + bytes, t->host + bytes, bytes, cudaMemcpyHostToDevice, stream));
    if (delay) CUDA(cudaLaunchHostFunc(stream, delay, NULL));
    CUDA(cudaMemcpyAsync(t->before, t->device + bytes, bytes, cudaMemcpyDeviceToDevice, stream));
    CUDA(cudaMemcpyAsync(t->device, t->host, bytes, cudaMemcpyHostToDevice, stream));
}

static void traffic_start(cpa_transport *transport, traffic *t, cudaStream_t stream) {
    cpa_error err = {.message = ""};
    OK(transport->table->start(transport, t->msgs, t->n, stream, &t->exchange, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
}

/* The consumer: reads what was received and at once spoils all buffers. */
static void traffic_consume(cpa_transport *transport, traffic *t, cudaStream_t stream) {
    size_t bytes = (size_t)world_size * MAX_BYTES;
    double waited = -1;
    OK(transport->table->finish(transport, t->exchange, stream, &waited, NULL));
    CU_ASSERT(waited == 0);
    CUDA(cudaMemcpyAsync(t->result, t->device + bytes, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaMemcpyAsync(t->host + bytes, t->before, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaMemsetAsync(t->device, 0, 2 * bytes, stream));
}

/* After the consumer's stream was drained. */
static void traffic_check(const traffic *t) {
    size_t bytes = (size_t)world_size * MAX_BYTES;
    int64_t wrong = 0, early = 0, beyond = 0;
    for (int32_t m = 0; m < t->n; m++) {
        int peer = t->msgs[m].peer;
        const uint8_t *got = t->result + recv_at(t, peer) - bytes;
        for (int64_t i = 0; i < t->msgs[m].recv_bytes; i++)
            wrong += got[i] != cpa_test_pattern(peer, world_rank, t->content, i);
        beyond += got[-1] != POISON || got[t->msgs[m].recv_bytes] != POISON;
    }
    /* Without a message the consumer waits for no one, the producer included. */
    for (size_t i = 0; t->n > 0 && i < bytes; i++) early += t->host[bytes + i] != POISON;
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(beyond, 0);
    CU_ASSERT_EQUAL(early, 0);
}

/* ---- the frame ---- */

typedef struct site {
    cpa_control control;
    cpa_transport *transport;
    cudaStream_t producer, consumer;
} site;

static void with_transport(void (*body)(site *)) {
    const cpa_transport_table *table = cpa_test_transport();
    site s = {.transport = NULL};
    cpa_error err = {.message = ""};
    OK(cpa_control_open(MPI_COMM_WORLD, &s.control, NULL));
    CUDA(cudaStreamCreateWithFlags(&s.producer, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&s.consumer, cudaStreamNonBlocking));
    OK(table->open(&s.control, &s.transport, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
    if (s.transport) {
        s.transport->timeout_s = 20;
        body(&s);
        table->close(s.transport);
    }
    CUDA(cudaStreamDestroy(s.producer));
    CUDA(cudaStreamDestroy(s.consumer));
    cpa_control_close(&s.control);
}

static void drain(site *s, cudaStream_t stream) {
    cpa_error err = {.message = ""};
    OK(s->transport->table->drain(s->transport, stream, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
}

/* ---- tests ---- */

/* Each rank is the late one in turn. */
static void sleep_a_while(void *unused) {
    (void)unused;
    usleep(30000);
}

static void late_producers(site *s) {
    traffic t;
    traffic_create(&t);
    for (int i = 0; i < 2 * world_size + 4; i++) {
        int late = i % world_size;
        traffic_fill(&t, 100 + (uint64_t)i);
        traffic_produce(&t, s->producer, world_rank == late ? sleep_a_while : NULL);
        MPI_Barrier(MPI_COMM_WORLD); /* copies wait on the host for the receiver to start */
        double begin = cpa_clock_now();
        traffic_start(s->transport, &t, s->producer);
        traffic_consume(s->transport, &t, s->consumer);
        CU_ASSERT(cpa_clock_now() - begin < 0.025); /* the host did not wait for the device */
        drain(s, s->consumer);
        traffic_check(&t);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    traffic_destroy(&t);
}

static void test_streams_order_producer_exchange_and_consumer(void) {
    with_transport(late_producers);
}

/* Hundreds of exchanges are enqueued before the host looks; buffers are used again at once, in stream order. Fewer
 * where ranks share a device, which then turns from one to the other for each step of an exchange. */
static void far_ahead(site *s) {
    traffic t;
    traffic_create(&t);
    traffic_fill(&t, 7);
    int n = gpus_suffice ? 600 : 40;
    for (int i = 0; i < n; i++) {
        traffic_start(s->transport, &t, s->producer);
        OK(s->transport->table->finish(s->transport, t.exchange, s->producer, NULL, NULL));
    }
    traffic_produce(&t, s->producer, NULL);
    traffic_start(s->transport, &t, s->producer);
    traffic_consume(s->transport, &t, s->producer);
    drain(s, s->producer);
    traffic_check(&t);
    traffic_destroy(&t);
}

static void test_the_host_may_run_far_ahead(void) {
    with_transport(far_ahead);
}

/* More allocations than are remembered, some at the addresses of freed ones, and of sizes that share a page. */
static void changing_buffers_of(site *s, int64_t bytes, int times) {
    uint8_t *host = malloc((size_t)bytes);
    int peer = world_rank ^ 1;
    for (int i = 0; i < times && peer < world_size; i++) {
        uint8_t *buffer = NULL, *other = NULL;
        CUDA(cudaMalloc((void **)&buffer, (size_t)(2 * bytes) << (i % 3 * 2)));
        if (i % 4 == 0) CUDA(cudaMalloc((void **)&other, 512)); /* kept for a while, so that addresses change */
        for (int64_t at = 0; at < bytes; at++) host[at] = cpa_test_pattern(world_rank, peer, (uint64_t)i, at);
        CUDA(cudaMemcpyAsync(buffer, host, (size_t)bytes, cudaMemcpyHostToDevice, s->producer));
        cpa_message m = {peer, buffer, bytes, buffer + bytes, bytes};
        cpa_exchange *exchange = NULL;
        OK(s->transport->table->start(s->transport, &m, 1, s->producer, &exchange, NULL));
        OK(s->transport->table->finish(s->transport, exchange, s->producer, NULL, NULL));
        drain(s, s->producer);
        CUDA(cudaMemcpy(host, buffer + bytes, (size_t)bytes, cudaMemcpyDeviceToHost));
        int64_t wrong = 0;
        for (int64_t at = 0; at < bytes; at++) wrong += host[at] != cpa_test_pattern(peer, world_rank, (uint64_t)i, at);
        CU_ASSERT_EQUAL(wrong, 0);
        CUDA(cudaFree(buffer));
        CUDA(cudaFree(other));
    }
    free(host);
}

static void changing_buffers(site *s) {
    changing_buffers_of(s, 3000, 20);
    changing_buffers_of(s, SMALL + 3000, 40);
}

static void test_buffers_may_be_freed_and_others_take_their_place(void) {
    with_transport(changing_buffers);
}

static void launch_with(traffic *t, cudaGraphExec_t executable, uint64_t content, cudaStream_t stream) {
    traffic_fill_with(t, t->id, content);
    CUDA(cudaGraphLaunch(executable, stream));
}

/* More exchanges than may be in flight, so that what one uses is used again within a launch. */
static void captured_exchanges(site *s, uint64_t id) {
    traffic t;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    traffic_create(&t);
    traffic_fill(&t, id);
    traffic_start(s->transport, &t, s->producer); /* every buffer has met its peer */
    OK(s->transport->table->finish(s->transport, t.exchange, s->producer, NULL, NULL));
    drain(s, s->producer);

    CUDA(cudaStreamBeginCapture(s->producer, cudaStreamCaptureModeThreadLocal));
    traffic_produce(&t, s->producer, NULL);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT + 1; i++) {
        traffic_start(s->transport, &t, s->producer);
        OK(s->transport->table->finish(s->transport, t.exchange, s->producer, NULL, NULL));
    }
    traffic_start(s->transport, &t, s->producer);
    traffic_consume(s->transport, &t, s->producer);
    CUDA(cudaStreamEndCapture(s->producer, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    for (uint64_t launch = 0; launch < 5; launch++) {
        launch_with(&t, executable, 1000 + launch, s->producer);
        drain(s, s->producer);
        traffic_check(&t);
        if (launch != 2) continue;
        traffic_fill_with(&t, id, 2000); /* an exchange between the graphs */
        traffic_produce(&t, s->producer, NULL);
        traffic_start(s->transport, &t, s->producer);
        traffic_consume(s->transport, &t, s->producer);
        drain(s, s->producer);
        traffic_check(&t);
    }
    CUDA(cudaGraphExecDestroy(executable));
    CUDA(cudaGraphDestroy(graph));
    traffic_destroy(&t);
}

static void a_captured_exchange(site *s) {
    for (uint64_t id = 31; id < 35; id++) captured_exchanges(s, id);
}

static void test_exchanges_in_a_graph_arrive_with_every_launch(void) {
    with_transport(a_captured_exchange);
}

/* As many as may be, finished in another order; and one that stays open while many others come and go. */
static void many_in_flight(site *s) {
    traffic t[CPA_TRANSPORT_MAX_IN_FLIGHT];
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        traffic_create(&t[i]);
        traffic_fill(&t[i], 300 + (uint64_t)i);
        traffic_produce(&t[i], s->producer, NULL);
    }
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) traffic_start(s->transport, &t[i], s->producer);
    for (int i = CPA_TRANSPORT_MAX_IN_FLIGHT - 1; i >= 0; i--) traffic_consume(s->transport, &t[i], s->consumer);
    drain(s, s->consumer);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) traffic_check(&t[i]);

    for (int i = 0; i < 2; i++) {
        traffic_fill(&t[i], 320 + (uint64_t)i);
        traffic_produce(&t[i], s->producer, NULL);
    }
    traffic_start(s->transport, &t[0], s->producer);
    for (int i = 0; i < 3 * CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        traffic_start(s->transport, &t[1], s->producer);
        OK(s->transport->table->finish(s->transport, t[1].exchange, s->producer, NULL, NULL));
    }
    traffic_start(s->transport, &t[1], s->producer);
    traffic_consume(s->transport, &t[1], s->consumer);
    traffic_consume(s->transport, &t[0], s->consumer);
    drain(s, s->consumer);
    for (int i = 0; i < 2; i++) traffic_check(&t[i]);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) traffic_destroy(&t[i]);
}

static void test_exchanges_in_flight_may_be_finished_in_any_order(void) {
    with_transport(many_in_flight);
}

/* Rank 0 sends the last rank more than that expects, which is then told the two sizes; the others do nothing. */
static void differing_sizes(site *s) {
    int last = world_size - 1;
    uint8_t *buffer = NULL;
    cpa_exchange *exchange = NULL;
    cpa_error err = {.message = ""};
    CUDA(cudaMalloc((void **)&buffer, 4096));
    cpa_message m = {.peer = last, .send = buffer, .send_bytes = 1001};
    if (world_rank == last) m = (cpa_message){.peer = 0, .recv = buffer, .recv_bytes = 1000};
    OK(s->transport->table->start(s->transport, &m, world_rank == 0 || world_rank == last, s->producer, &exchange,
                                  NULL));
    OK(s->transport->table->finish(s->transport, exchange, s->producer, NULL, NULL));
    if (world_rank == last) {
        cpa_status status;
        double begin = cpa_clock_now();
        do { /* the report may come just behind the end of the stream */
            status = s->transport->table->drain(s->transport, s->producer, &err);
        } while (status == CPA_OK && cpa_clock_now() - begin < 5);
        CU_ASSERT_EQUAL(status, CPA_COMM);
        CU_ASSERT(strstr(err.message, "rank 0 sends 1001 bytes") && strstr(err.message, "expects 1000"));
    } else {
        drain(s, s->producer);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    cudaFree(buffer);
}

static void test_sizes_that_differ_are_reported(void) {
    with_transport(differing_sizes);
}

/* All ranks choose the same. */
static void test_the_faster_transport_is_chosen(void) {
    cpa_control control;
    cpa_transport_choice choice = {.table = NULL};
    cpa_error err = {.message = ""};
    OK(cpa_control_open(MPI_COMM_WORLD, &control, NULL));
    OK(cpa_transport_choose(&control, &choice, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT(choice.table == &cpa_transport_nccl || choice.table == &cpa_transport_peer);
    double is_peer[2] = {choice.table == &cpa_transport_peer, choice.table != &cpa_transport_peer};
    OK(cpa_control_max(&control, is_peer, 2, NULL));
    CU_ASSERT(is_peer[0] + is_peer[1] == 1);
    for (int i = 0; i < CPA_CHOICE_SIZES && world_size > 1; i++) {
        CU_ASSERT(choice.peer_s[i] > 0);
        CU_ASSERT(choice.nccl_s[i] > 0);
        if (world_rank > 0) continue;
        printf("%lld bytes: nccl %.1f us, peer %.1f us; ", (long long)choice.bytes[i], choice.nccl_s[i] * 1e6,
               choice.peer_s[i] * 1e6);
    }
    if (world_rank == 0) printf("%s %s ", choice.why_no_nccl, choice.why_no_peer);
    cpa_transport_choice again; /* stays with the communicator: to measure again would give other times */
    OK(cpa_transport_choose(&control, &again, &err));
    CU_ASSERT(again.table == choice.table);
    CU_ASSERT_EQUAL(memcmp(again.peer_s, choice.peer_s, sizeof again.peer_s), 0);
    cpa_control_close(&control);
}

/* A peer's name at the end of a message. */
static int names_rank(const char *message, int rank) {
    char name[16];
    snprintf(name, sizeof name, "%d", rank);
    const char *names = strstr(message, " s for rank");
    return names && strstr(names, name);
}

/* What the others see when the last rank does not take part in an exchange with all. */
static void wait_in_vain(site *s, traffic *t) {
    const cpa_transport_table *table = s->transport->table;
    cpa_error err = {.message = ""};
    cpa_exchange *exchange = NULL;
    double begin = cpa_clock_now();
    cpa_status status = table->start(s->transport, t->msgs, t->n, s->producer, &exchange, &err);
    if (status == CPA_OK) status = table->finish(s->transport, exchange, s->producer, NULL, &err);
    if (status == CPA_OK) status = table->drain(s->transport, s->producer, &err);
    double waited = cpa_clock_now() - begin;
    CU_ASSERT_EQUAL(status, CPA_COMM);
    CU_ASSERT(waited > 1 && waited < 4);
    CU_ASSERT(names_rank(err.message, world_size - 1));
    if (!names_rank(err.message, world_size - 1)) printf("rank %d, %s: %s\n", world_rank, table->name, err.message);

    char first[sizeof err.message];
    strcpy(first, err.message);
    CU_ASSERT_EQUAL(table->start(s->transport, t->msgs, t->n, s->producer, &exchange, &err), CPA_COMM);
    CU_ASSERT_STRING_EQUAL(err.message, first);
    CUDA(cudaStreamSynchronize(s->producer)); /* nothing of the device is stuck */
}

static void last_rank_fails(site *s, void (*failing)(site *, traffic *)) {
    traffic t;
    traffic_create(&t);
    traffic_fill(&t, 55);
    for (int32_t m = 0; m < t.n; m++) t.msgs[m].send_bytes = t.msgs[m].recv_bytes = 1000;
    traffic_start(s->transport, &t, s->producer);
    OK(s->transport->table->finish(s->transport, t.exchange, s->producer, NULL, NULL));
    drain(s, s->producer);
    s->transport->timeout_s = 1.5;
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank == world_size - 1) {
        failing(s, &t);
    } else {
        wait_in_vain(s, &t);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = cpa_clock_now();
    traffic_destroy(&t);
    CU_ASSERT(cpa_clock_now() - begin < 4);
}

static void never_start(site *s, traffic *t) {
    (void)s;
    (void)t;
}

static void a_silent_rank(site *s) {
    last_rank_fails(s, never_start);
}

static void test_a_rank_that_stops_answering_is_named(void) {
    with_transport(a_silent_rank);
}

static void sleep_long(void *unused) {
    (void)unused;
    usleep(4000000);
}

/* The host starts the exchange, but the device does not come to it; afterwards it may work or fail. */
static void start_late(site *s, traffic *t) {
    s->transport->timeout_s = 6;
    CUDA(cudaLaunchHostFunc(s->producer, sleep_long, NULL));
    traffic_start(s->transport, t, s->producer);
    OK(s->transport->table->finish(s->transport, t->exchange, s->producer, NULL, NULL));
    s->transport->table->drain(s->transport, s->producer, NULL);
}

static void a_stuck_device(site *s) {
    last_rank_fails(s, start_late);
}

static void test_a_rank_whose_device_is_stuck_is_named(void) {
    with_transport(a_stuck_device);
}

/* The last rank does not launch a graph with an exchange. */
static void a_silent_rank_in_a_graph(site *s) {
    traffic t;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cpa_error err = {.message = ""};
    traffic_create(&t);
    traffic_fill(&t, 56);
    for (int32_t m = 0; m < t.n; m++) t.msgs[m].send_bytes = t.msgs[m].recv_bytes = 1000;
    traffic_start(s->transport, &t, s->producer);
    OK(s->transport->table->finish(s->transport, t.exchange, s->producer, NULL, NULL));
    drain(s, s->producer);
    CUDA(cudaStreamBeginCapture(s->producer, cudaStreamCaptureModeThreadLocal));
    traffic_start(s->transport, &t, s->producer);
    OK(s->transport->table->finish(s->transport, t.exchange, s->producer, NULL, NULL));
    CUDA(cudaStreamEndCapture(s->producer, &graph));
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    s->transport->timeout_s = 1.5;
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank != world_size - 1) {
        double begin = cpa_clock_now();
        CUDA(cudaGraphLaunch(executable, s->producer));
        CU_ASSERT_EQUAL(s->transport->table->drain(s->transport, s->producer, &err), CPA_COMM);
        CU_ASSERT(names_rank(err.message, world_size - 1));
        CU_ASSERT(cpa_clock_now() - begin < 4);
    }
    CUDA(cudaGraphExecDestroy(executable));
    CUDA(cudaGraphDestroy(graph));
    MPI_Barrier(MPI_COMM_WORLD);
    traffic_destroy(&t);
}

static void test_a_rank_that_does_not_launch_a_graph_is_named(void) {
    with_transport(a_silent_rank_in_a_graph);
}

static const cpa_test TESTS[] = {
    {"streams order producer, exchange and consumer", test_streams_order_producer_exchange_and_consumer},
    {"the host may run far ahead", test_the_host_may_run_far_ahead},
    {"buffers may be freed and others take their place", test_buffers_may_be_freed_and_others_take_their_place},
    {"exchanges in a graph arrive with every launch", test_exchanges_in_a_graph_arrive_with_every_launch},
    {"exchanges in flight may be finished in any order", test_exchanges_in_flight_may_be_finished_in_any_order},
    {"the faster transport is chosen", test_the_faster_transport_is_chosen},
    /* Of several ranks. */
    {"a rank that stops answering is named", test_a_rank_that_stops_answering_is_named},
    {"a rank whose device is stuck is named", test_a_rank_whose_device_is_stuck_is_named},
    {"a rank that does not launch a graph is named", test_a_rank_that_does_not_launch_a_graph_is_named},
    /* Of several ranks and peer memory. */
    {"sizes that differ are reported", test_sizes_that_differ_are_reported},
};
enum { N_TESTS = sizeof TESTS / sizeof TESTS[0], OF_SEVERAL_RANKS = 4 };

static int n_tests(void) {
    if (world_size == 1) return N_TESTS - OF_SEVERAL_RANKS;
    return cpa_test_transport() == &cpa_transport_peer ? N_TESTS : N_TESTS - 1;
}

static int missing_device(void) {
    int none = cpa_test_cuda_missing();
    if (!none) none = cpa_test_transport_missing();
    if (none) return none;
    int devices = cpa_device_count(CPA_BACKEND_CUDA);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    gpus_suffice = devices >= world_size;
    cudaSetDevice(world_rank % devices);
    return 0;
}

CPA_MPI_TEST_MAIN_UNLESS(missing_device(), "device transports", TESTS, n_tests())
