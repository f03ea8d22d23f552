/* A transport for device memory, beyond what tests/comm/test_transport.c holds every transport to: streams, graphs, the
 * choice, rooms. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "kernels/operators.h"
#include "tests/fixtures/device_traffic.h"

/* Produced, exchanged and consumed on one stream. */
static void exchange_and_check(cpa_site *s, cpa_traffic *t) {
    cpa_traffic_produce(t, s->producer, NULL);
    cpa_traffic_start(s->transport, t, s->producer);
    cpa_traffic_consume(s->transport, t, s->producer);
    cpa_site_drain(s, s->producer);
    cpa_traffic_check(t);
}

/* Each rank is the late one in turn. */
static void sleep_a_while(void *unused) {
    (void)unused;
    usleep(30000);
}

static void late_producers(cpa_site *s) {
    cpa_traffic t;
    cpa_traffic_create(&t);
    for (int i = 0; i < 2 * cpa_world_size + 4; i++) {
        int late = i % cpa_world_size;
        cpa_traffic_fill(&t, 100 + (uint64_t)i);
        cpa_traffic_produce(&t, s->producer, cpa_world_rank == late ? sleep_a_while : NULL);
        MPI_Barrier(MPI_COMM_WORLD); /* copies wait on the host for the receiver to start */
        double begin = cpa_clock_now();
        cpa_traffic_start(s->transport, &t, s->producer);
        cpa_traffic_consume(s->transport, &t, s->consumer);
        CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 0.025); /* the host did not wait for the device */
        cpa_site_drain(s, s->consumer);
        cpa_traffic_check(&t);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    cpa_traffic_destroy(&t);
}

static void test_streams_order_producer_exchange_and_consumer(void) {
    cpa_with_transport(late_producers);
}

/* Hundreds of exchanges are enqueued before the host looks; buffers are used again at once, in stream order. Fewer
 * where ranks share a device, which then turns from one to the other for each step of an exchange. */
static void far_ahead(cpa_site *s) {
    cpa_traffic t;
    cpa_traffic_create(&t);
    cpa_traffic_fill(&t, 7);
    int n = cpa_gpus_suffice ? 600 : 40;
    for (int i = 0; i < n; i++) cpa_site_exchange(s, t.msgs, t.n);
    exchange_and_check(s, &t);
    cpa_traffic_destroy(&t);
}

static void test_the_host_may_run_far_ahead(void) {
    cpa_with_transport(far_ahead);
}

/* More allocations than are remembered, some at the addresses of freed ones, and of sizes that share a page. */
static void changing_buffers_of(cpa_site *s, int64_t bytes, int times) {
    uint8_t *host = malloc((size_t)bytes);
    int peer = cpa_world_rank ^ 1;
    for (int i = 0; i < times && peer < cpa_world_size; i++) {
        uint8_t *buffer = NULL, *other = NULL;
        CUDA(cudaMalloc((void **)&buffer, (size_t)(2 * bytes) << (i % 3 * 2)));
        if (i % 4 == 0) CUDA(cudaMalloc((void **)&other, 512)); /* kept for a while, so that addresses change */
        for (int64_t at = 0; at < bytes; at++) host[at] = cpa_test_pattern(cpa_world_rank, peer, (uint64_t)i, at);
        CUDA(cudaMemcpyAsync(buffer, host, (size_t)bytes, cudaMemcpyHostToDevice, s->producer));
        cpa_message m = {peer, buffer, bytes, buffer + bytes, bytes};
        cpa_exchange *exchange = NULL;
        OK(s->transport->table->start(s->transport, &m, 1, s->producer, &exchange, NULL));
        OK(s->transport->table->finish(s->transport, exchange, s->producer, NULL, NULL));
        cpa_site_drain(s, s->producer);
        CUDA(cudaMemcpy(host, buffer + bytes, (size_t)bytes, cudaMemcpyDeviceToHost));
        int64_t wrong = 0;
        for (int64_t at = 0; at < bytes; at++)
            wrong += host[at] != cpa_test_pattern(peer, cpa_world_rank, (uint64_t)i, at);
        CU_ASSERT_EQUAL(wrong, 0);
        CUDA(cudaFree(buffer));
        CUDA(cudaFree(other));
    }
    free(host);
}

static void changing_buffers(cpa_site *s) {
    changing_buffers_of(s, 3000, 20);
    changing_buffers_of(s, CPA_TRAFFIC_SMALL + 3000, 40);
}

static void test_buffers_may_be_freed_and_others_take_their_place(void) {
    cpa_with_transport(changing_buffers);
}

static void launch_with(cpa_traffic *t, cudaGraphExec_t executable, uint64_t content, cudaStream_t stream) {
    cpa_traffic_fill_with(t, t->id, content);
    CUDA(cudaGraphLaunch(executable, stream));
}

/* More exchanges than may be in flight, so that what one uses is used again within a launch. */
static void captured_exchanges(cpa_site *s, uint64_t id) {
    cpa_traffic t;
    cpa_traffic_create(&t);
    cpa_traffic_fill(&t, id);
    cpa_site_exchange(s, t.msgs, t.n); /* every buffer has met its peer */
    cpa_site_drain(s, s->producer);

    cpa_site_begin_capture(s);
    cpa_traffic_produce(&t, s->producer, NULL);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT + 1; i++) cpa_site_exchange(s, t.msgs, t.n);
    cpa_traffic_start(s->transport, &t, s->producer);
    cpa_traffic_consume(s->transport, &t, s->producer);
    cudaGraphExec_t executable = cpa_site_end_capture(s);
    for (uint64_t launch = 0; launch < 5; launch++) {
        launch_with(&t, executable, 1000 + launch, s->producer);
        cpa_site_drain(s, s->producer);
        cpa_traffic_check(&t);
        if (launch != 2) continue;
        cpa_traffic_fill_with(&t, id, 2000); /* an exchange between the graphs */
        exchange_and_check(s, &t);
    }
    CUDA(cudaGraphExecDestroy(executable));
    cpa_traffic_destroy(&t);
}

static void a_captured_exchange(cpa_site *s) {
    for (uint64_t id = 31; id < 35; id++) captured_exchanges(s, id);
}

static void test_exchanges_in_a_graph_arrive_with_every_launch(void) {
    cpa_with_transport(a_captured_exchange);
}

/* As many as may be, finished in another order; and one that stays open while many others come and go. */
static void many_in_flight(cpa_site *s) {
    cpa_traffic t[CPA_TRANSPORT_MAX_IN_FLIGHT];
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        cpa_traffic_create(&t[i]);
        cpa_traffic_fill(&t[i], 300 + (uint64_t)i);
        cpa_traffic_produce(&t[i], s->producer, NULL);
    }
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) cpa_traffic_start(s->transport, &t[i], s->producer);
    for (int i = CPA_TRANSPORT_MAX_IN_FLIGHT - 1; i >= 0; i--) cpa_traffic_consume(s->transport, &t[i], s->consumer);
    cpa_site_drain(s, s->consumer);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) cpa_traffic_check(&t[i]);

    for (int i = 0; i < 2; i++) {
        cpa_traffic_fill(&t[i], 320 + (uint64_t)i);
        cpa_traffic_produce(&t[i], s->producer, NULL);
    }
    cpa_traffic_start(s->transport, &t[0], s->producer);
    for (int i = 0; i < 3 * CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        cpa_traffic_start(s->transport, &t[1], s->producer);
        OK(s->transport->table->finish(s->transport, t[1].exchange, s->producer, NULL, NULL));
    }
    cpa_traffic_start(s->transport, &t[1], s->producer);
    cpa_traffic_consume(s->transport, &t[1], s->consumer);
    cpa_traffic_consume(s->transport, &t[0], s->consumer);
    cpa_site_drain(s, s->consumer);
    for (int i = 0; i < 2; i++) cpa_traffic_check(&t[i]);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) cpa_traffic_destroy(&t[i]);
}

static void test_exchanges_in_flight_may_be_finished_in_any_order(void) {
    cpa_with_transport(many_in_flight);
}

/* An allocator that counts, and gives back all it gave. */
static void *take_memory(void *count, int64_t bytes) {
    void *memory = NULL;
    CUDA(cudaMalloc(&memory, (size_t)bytes));
    ++*(int64_t *)count;
    return memory;
}

static void give_back_memory(void *count, void *memory) {
    CPA_ASSERT_ORDER(*(int64_t *)count, >, 0);
    CUDA(cudaFree(memory));
}

/* All ranks choose the same. */
static void test_the_faster_transport_is_chosen(void) {
    cpa_control control;
    const cpa_allocator none = {.ctx = NULL};
    cpa_transport_choice choice = {.table = NULL};
    cpa_error err = {.message = ""};
    OK(cpa_control_open(cpa_test_comm(), &control, NULL));
    OK(cpa_transport_choose(&control, &none, &choice, &err));
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT(choice.table == &cpa_transport_nccl || choice.table == &cpa_transport_peer);
    double is_peer[2] = {choice.table == &cpa_transport_peer, choice.table != &cpa_transport_peer};
    OK(cpa_control_max(&control, is_peer, 2, NULL));
    CU_ASSERT_EQUAL(is_peer[0] + is_peer[1], 1);
    for (int i = 0; i < CPA_CHOICE_SIZES && cpa_world_size > 1; i++) {
        for (int t = 0; t < CPA_TRANSPORTS; t++) {
            const cpa_transport_row *row = &cpa_transport_rows[t];
            if (row->memory != CPA_BACKEND_CUDA) continue;
            CPA_ASSERT_ORDER(choice.seconds[t][i], >, 0);
            if (cpa_world_rank > 0) continue;
            printf("%lld bytes: %s %.1f us; ", (long long)choice.bytes[i], row->name, choice.seconds[t][i] * 1e6);
            if (i == 0) printf("%s ", choice.why_not[t]);
        }
    }
    cpa_transport_choice again; /* stays with the communicator: to measure again would give other times */
    OK(cpa_transport_choose(&control, &none, &again, &err));
    CU_ASSERT_EQUAL(again.table, choice.table);
    CU_ASSERT_EQUAL(memcmp(again.seconds, choice.seconds, sizeof again.seconds), 0);

    int64_t taken = 0; /* with memory of the caller it is measured anew, in that */
    const cpa_allocator callers = {take_memory, give_back_memory, &taken};
    OK(cpa_transport_choose(&control, &callers, &again, &err));
    CU_ASSERT_EQUAL(taken, cpa_world_size > 1 ? 1 : 0);
    cpa_control_close(&control);
}

/* Exchanges without a message bring the next one to the slot of the last, whose kernels may still run. */
static void the_same_slot(cpa_site *s) {
    cpa_traffic t;
    cpa_traffic_create(&t);
    for (uint64_t id = 60; id < 64; id++) {
        cpa_traffic_fill(&t, id);
        for (int i = 0; i < (cpa_gpus_suffice ? 20 : 5); i++) {
            cpa_site_exchange(s, t.msgs, t.n);
            for (int empty = 1; empty < CPA_TRANSPORT_MAX_IN_FLIGHT; empty++) cpa_site_exchange(s, NULL, 0);
        }
        exchange_and_check(s, &t);
    }
    cpa_traffic_destroy(&t);
}

static void test_a_slot_may_be_used_again_at_once(void) {
    cpa_with_transport(the_same_slot);
}

/* ---- rooms ---- */

enum { ROOM_ROUNDS = 2 * CPA_TRANSPORT_MAX_IN_FLIGHT + 3 };

/* What travels through rooms in some rounds, and the messages of the ordinary kind before each, which tell a peer that
 * its peer-mapped buffer may be written to. */
typedef struct room_traffic {
    uint8_t *host, *result; /* pinned, [ROOM_ROUNDS, ranks, CPA_TRAFFIC_SMALL] */
    uint8_t *device;        /* [ranks, 32]: of leave, what is sent and what is received */
} room_traffic;

static int64_t slice_at(int round, int peer) {
    return ((int64_t)round * cpa_world_size + peer) * CPA_TRAFFIC_SMALL;
}

static int64_t stored_bytes(int from, int to, uint64_t exchange) {
    return 1 + (int64_t)(cpa_test_mixed(exchange * 4096 + (uint64_t)from * 64 + (uint64_t)to) % CPA_TRAFFIC_SMALL);
}

static void give_leave(cpa_site *s, const room_traffic *t) {
    cpa_message leave[CPA_TRAFFIC_MAX_RANKS];
    int32_t n = 0;
    for (int peer = 0; peer < cpa_world_size; peer++) {
        uint8_t *mine = t->device + 32 * peer;
        if (peer != cpa_world_rank) leave[n++] = (cpa_message){peer, mine, 16, mine + 16, 16};
    }
    cpa_site_exchange(s, leave, n);
}

/* A round, in which each rank in turn is late to store its messages. */
static void enqueue_round(cpa_site *s, const room_traffic *t, int round) {
    cpa_message stored[CPA_TRAFFIC_MAX_RANKS];
    int32_t n = 0;
    give_leave(s, t);
    if (round % cpa_world_size == cpa_world_rank) CUDA(cudaLaunchHostFunc(s->producer, sleep_a_while, NULL));
    for (int peer = 0; peer < cpa_world_size; peer++) {
        void *theirs, *own;
        int64_t buffer_bytes, bytes = stored_bytes(cpa_world_rank, peer, (uint64_t)round);
        if (peer == cpa_world_rank) continue;
        s->transport->table->peer_buffer(s->transport, peer, &theirs, &own, &buffer_bytes);
        CU_ASSERT_EQUAL(buffer_bytes, CPA_TRAFFIC_SMALL);
        CUDA(cudaMemcpyAsync(theirs, t->host + slice_at(round, peer), (size_t)bytes, cudaMemcpyHostToDevice,
                             s->producer));
        stored[n++] = (cpa_message){peer, theirs, bytes, own, stored_bytes(peer, cpa_world_rank, (uint64_t)round)};
    }
    cpa_site_exchange(s, stored, n);
    for (int32_t i = 0; i < n; i++)
        CUDA(cudaMemcpyAsync(t->result + slice_at(round, stored[i].peer), stored[i].recv, (size_t)stored[i].recv_bytes,
                             cudaMemcpyDeviceToHost, s->producer));
}

static uint64_t content_of(uint64_t launch, int round) {
    return launch * 100 + (uint64_t)round;
}

static void fill_rounds(room_traffic *t, uint64_t launch) {
    memset(t->result, CPA_TRAFFIC_POISON, (size_t)slice_at(ROOM_ROUNDS, 0));
    for (int round = 0; round < ROOM_ROUNDS; round++) {
        for (int peer = 0; peer < cpa_world_size; peer++) {
            uint8_t *slice = t->host + slice_at(round, peer);
            for (int64_t i = 0; i < stored_bytes(cpa_world_rank, peer, (uint64_t)round); i++)
                slice[i] = cpa_test_pattern(cpa_world_rank, peer, content_of(launch, round), i);
        }
    }
}

static void check_rounds(const room_traffic *t, uint64_t launch) {
    int64_t wrong = 0;
    for (int round = 0; round < ROOM_ROUNDS; round++) {
        for (int peer = 0; peer < cpa_world_size; peer++) {
            const uint8_t *slice = t->result + slice_at(round, peer);
            int64_t bytes = peer == cpa_world_rank ? 0 : stored_bytes(peer, cpa_world_rank, (uint64_t)round);
            for (int64_t i = 0; i < bytes; i++)
                wrong += slice[i] != cpa_test_pattern(peer, cpa_world_rank, content_of(launch, round), i);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void rooms_in_a_graph(cpa_site *s, room_traffic *t) {
    cpa_site_begin_capture(s);
    for (int round = 0; round < ROOM_ROUNDS; round++) enqueue_round(s, t, round);
    cudaGraphExec_t executable = cpa_site_end_capture(s);
    for (uint64_t launch = 1; launch < 4; launch++) {
        fill_rounds(t, launch);
        CUDA(cudaGraphLaunch(executable, s->producer));
        cpa_site_drain(s, s->producer);
        check_rounds(t, launch);
    }
    CUDA(cudaGraphExecDestroy(executable));
}

static void stored_messages(cpa_site *s) {
    const size_t bytes = (size_t)slice_at(ROOM_ROUNDS, 0);
    room_traffic t;
    CUDA(cudaHostAlloc((void **)&t.host, bytes, cudaHostAllocDefault));
    CUDA(cudaHostAlloc((void **)&t.result, bytes, cudaHostAllocDefault));
    CUDA(cudaMalloc((void **)&t.device, 32 * (size_t)cpa_world_size));
    fill_rounds(&t, 0);
    for (int round = 0; round < ROOM_ROUNDS; round++) enqueue_round(s, &t, round);
    cpa_site_drain(s, s->producer);
    check_rounds(&t, 0);
    rooms_in_a_graph(s, &t);
    cudaFreeHost(t.host);
    cudaFreeHost(t.result);
    cudaFree(t.device);
}

static void test_messages_may_be_stored_where_they_belong(void) {
    cpa_with_transport(stored_messages);
}

/* States of rows * heads of the peers, which a merge of several CTAs waits for. */
enum { STATE_ROWS = 48, STATE_HEADS = 8, STATE_DIM = 16, STATE_WIDTH = STATE_HEADS * STATE_DIM };
static const int64_t state_bytes = STATE_ROWS * STATE_HEADS * (STATE_DIM + 1) * (int64_t)sizeof(float);

typedef struct merge_traffic {
    room_traffic leave;
    cpa_stream *stream;
    float *host,
        *result; /* pinned, [ROOM_ROUNDS]: states that are sent, of state_bytes, and [STATE_ROWS, STATE_WIDTH] */
    float *out;  /* device */
} merge_traffic;

static float *sent_state(const merge_traffic *t, int round) {
    return t->host + round * (state_bytes / (int64_t)sizeof(float));
}

/* A round in which the merge of what the peers store waits for it: of states with the same LSE their mean. */
static void enqueue_merged_round(cpa_site *s, const merge_traffic *t, int round) {
    cpa_message stored[CPA_TRAFFIC_MAX_RANKS];
    cpa_partial states[CPA_TRAFFIC_MAX_RANKS];
    cpa_exchange *exchange;
    cpa_store_batch awaited;
    cpa_error err;
    int32_t n = 0;
    give_leave(s, &t->leave);
    if (round % cpa_world_size == cpa_world_rank) CUDA(cudaLaunchHostFunc(s->producer, sleep_a_while, NULL));
    for (int peer = 0; peer < cpa_world_size; peer++) {
        void *theirs, *own;
        int64_t buffer_bytes;
        if (peer == cpa_world_rank) continue;
        s->transport->table->peer_buffer(s->transport, peer, &theirs, &own, &buffer_bytes);
        CUDA(cudaMemcpyAsync(theirs, sent_state(t, round), (size_t)state_bytes, cudaMemcpyHostToDevice, s->producer));
        states[n] = (cpa_partial){.o = own, .lse = (float *)own + STATE_ROWS * STATE_WIDTH};
        stored[n++] = (cpa_message){peer, theirs, state_bytes, own, state_bytes};
    }
    const cpa_merge_args args = {.size = sizeof args,
                                 .rows = STATE_ROWS,
                                 .heads = STATE_HEADS,
                                 .v_dim = STATE_DIM,
                                 .states = states,
                                 .n_states = n,
                                 .out_dtype = CPA_F32,
                                 .out = t->out};
    OK(s->transport->table->start(s->transport, stored, n, s->producer, &exchange, &err));
    CU_ASSERT_EQUAL(s->transport->table->defer_wait(s->transport, exchange, &awaited), 1);
    OK(t->stream->device->operators->merge(&args, &awaited, t->stream));
    CUDA(cudaMemcpyAsync(t->result + round * STATE_ROWS * STATE_WIDTH, t->out, STATE_ROWS * STATE_WIDTH * sizeof(float),
                         cudaMemcpyDeviceToHost, s->producer));
}

static float state_value(int launch, int round, int rank, int element) {
    return (float)(launch * 1000 + round * 16 + rank * 4 + element % 64);
}

static void fill_states(merge_traffic *t, int launch) {
    for (int round = 0; round < ROOM_ROUNDS; round++) {
        float *state = sent_state(t, round);
        for (int i = 0; i < STATE_ROWS * STATE_WIDTH; i++) state[i] = state_value(launch, round, cpa_world_rank, i);
        for (int i = 0; i < STATE_ROWS * STATE_HEADS; i++) state[STATE_ROWS * STATE_WIDTH + i] = 1;
    }
}

static void check_means(const merge_traffic *t, int launch) {
    int64_t wrong = 0;
    for (int round = 0; round < ROOM_ROUNDS; round++) {
        for (int i = 0; i < STATE_ROWS * STATE_WIDTH; i++) {
            float sum = 0;
            for (int peer = 0; peer < cpa_world_size; peer++)
                if (peer != cpa_world_rank) sum += state_value(launch, round, peer, i);
            const float got = t->result[round * STATE_ROWS * STATE_WIDTH + i];
            wrong += !(fabsf(got - sum / (float)(cpa_world_size - 1)) < 0.01F);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void launch_merged_rounds(cpa_site *s, merge_traffic *t) {
    cpa_site_begin_capture(s);
    for (int round = 0; round < ROOM_ROUNDS; round++) enqueue_merged_round(s, t, round);
    cudaGraphExec_t executable = cpa_site_end_capture(s);
    for (int launch = 1; launch < 4; launch++) {
        fill_states(t, launch);
        memset(t->result, 0xff, ROOM_ROUNDS * STATE_ROWS * STATE_WIDTH * sizeof(float)); /* NaN */
        CUDA(cudaGraphLaunch(executable, s->producer));
        cpa_site_drain(s, s->producer);
        check_means(t, launch);
        give_leave(s, &t->leave); /* outside of the graph, over slots that the merges have left */
        cpa_site_drain(s, s->producer);
    }
    CUDA(cudaGraphExecDestroy(executable));
}

static void merged_messages(cpa_site *s) {
    const cpa_device_options options = {.size = sizeof options,
                                        .backend = CPA_BACKEND_CUDA,
                                        .ordinal = cpa_world_rank % cpa_device_count(CPA_BACKEND_CUDA)};
    cpa_site site = *s;
    cpa_device *device;
    merge_traffic t;
    if (cpa_world_size == 1) return;
    OK(cpa_device_open(&options, &device, NULL));
    OK(cpa_stream_create(device, &t.stream, NULL));
    site.producer = t.stream->native;
    CUDA(cudaHostAlloc((void **)&t.host, ROOM_ROUNDS * (size_t)state_bytes, cudaHostAllocDefault));
    CUDA(cudaHostAlloc((void **)&t.result, ROOM_ROUNDS * (size_t)state_bytes, cudaHostAllocDefault));
    CUDA(cudaMalloc((void **)&t.out, (size_t)state_bytes));
    CUDA(cudaMalloc((void **)&t.leave.device, 32 * (size_t)cpa_world_size));
    launch_merged_rounds(&site, &t);
    cudaFree(t.leave.device);
    cudaFree(t.out);
    cudaFreeHost(t.result);
    cudaFreeHost(t.host);
    cpa_stream_destroy(t.stream);
    cpa_device_close(device);
}

static void test_a_merge_may_wait_for_what_is_stored(void) {
    cpa_with_transport(merged_messages);
}

static const cpa_test TESTS[] = {
    {"streams order producer, exchange and consumer", test_streams_order_producer_exchange_and_consumer},
    {"the host may run far ahead", test_the_host_may_run_far_ahead},
    {"buffers may be freed and others take their place", test_buffers_may_be_freed_and_others_take_their_place},
    {"exchanges in a graph arrive with every launch", test_exchanges_in_a_graph_arrive_with_every_launch},
    {"exchanges in flight may be finished in any order", test_exchanges_in_flight_may_be_finished_in_any_order},
    {"a slot may be used again at once", test_a_slot_may_be_used_again_at_once},
    {"the faster transport is chosen", test_the_faster_transport_is_chosen},
    /* Where the transport has rooms. */
    {"messages may be stored where they belong", test_messages_may_be_stored_where_they_belong},
    {"a merge may wait for what is stored", test_a_merge_may_wait_for_what_is_stored},
};
enum { N_TESTS = sizeof TESTS / sizeof TESTS[0], OF_PEER_BUFFERS = 2 };

CPA_MPI_TEST_MAIN_UNLESS(cpa_traffic_missing(), "device transports", TESTS,
                         cpa_test_transport()->peer_buffer ? N_TESTS : N_TESTS - OF_PEER_BUFFERS)
