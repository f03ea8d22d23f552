/* The control channel; and a transport of the back end: MPI on the host, peer memory or NCCL on a device. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/clock.h"
#include "comm/communicator.h"
#include "comm/transports.h"
#include "kernels/device.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

static const cpa_transport_table *TABLE; /* the one under test */
static cpa_device *device;
static cpa_stream *stream;

/* Everything that one rank sends to and receives from all others in one exchange. */
typedef struct traffic {
    cpa_message *msgs;
    int32_t n;
    cpa_exchange *exchange;
} traffic;

typedef int64_t (*size_fn)(int from, int to, uint64_t exchange);

static traffic traffic_start(cpa_control *control, cpa_transport *transport, uint64_t id, size_fn size) {
    traffic all = {calloc((size_t)control->size, sizeof(cpa_message)), 0, NULL};
    for (int32_t peer = 0; peer < control->size; peer++) {
        if (peer == control->rank) continue;
        cpa_message *m = &all.msgs[all.n++];
        *m = (cpa_message){
            .peer = peer, .send_bytes = size(control->rank, peer, id), .recv_bytes = size(peer, control->rank, id)};
        uint8_t *send = malloc((size_t)m->send_bytes + 1), *zeros = calloc((size_t)m->recv_bytes + 1, 1);
        for (int64_t i = 0; i < m->send_bytes; i++) send[i] = cpa_test_pattern(control->rank, peer, id, i);
        m->send = cpa_test_upload(stream, send, m->send_bytes + 1);
        m->recv = cpa_test_upload(stream, zeros, m->recv_bytes + 1);
        free(zeros);
        free(send);
    }
    CU_ASSERT_EQUAL(TABLE->start(transport, all.msgs, all.n, stream->native, &all.exchange, NULL), CPA_OK);
    return all;
}

static void traffic_finish(cpa_control *control, cpa_transport *transport, uint64_t id, traffic *all) {
    double waited = -1;
    cpa_error err = {.message = ""};
    CU_ASSERT_EQUAL(TABLE->finish(transport, all->exchange, stream->native, &waited, &err), CPA_OK);
    if (TABLE->drain) CU_ASSERT_EQUAL(TABLE->drain(transport, stream->native, NULL, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CPA_ASSERT_ORDER(waited, >=, 0);
    for (int32_t m = 0; m < all->n; m++) {
        int64_t wrong = 0;
        uint8_t *got = malloc((size_t)all->msgs[m].recv_bytes + 1);
        cpa_test_download(stream, got, all->msgs[m].recv, all->msgs[m].recv_bytes + 1);
        for (int64_t i = 0; i < all->msgs[m].recv_bytes; i++) {
            wrong += got[i] != cpa_test_pattern(all->msgs[m].peer, control->rank, id, i);
        }
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_EQUAL(got[all->msgs[m].recv_bytes], 0); /* nothing past the end */
        free(got);
        cpa_test_free(stream, (void *)(uintptr_t)all->msgs[m].send);
        cpa_test_free(stream, all->msgs[m].recv);
    }
    free(all->msgs);
}

static void with_transport(void (*body)(cpa_control *, cpa_transport *)) {
    cpa_control control;
    cpa_transport *transport = NULL;
    TABLE = cpa_test_transport();
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    cpa_test_device_open(1, &device, &stream);
    CU_ASSERT_EQUAL(TABLE->open(&control, &transport, NULL), CPA_OK);
    if (transport) {
        transport->timeout_s = 20;
        body(&control, transport);
        TABLE->close(transport);
    }
    cpa_test_device_close(device, stream);
    cpa_control_close(&control);
}

static int64_t random_size(int from, int to, uint64_t exchange) {
    uint64_t r = cpa_test_mixed(exchange * 4096 + (uint64_t)from * 64 + (uint64_t)to);
    switch (r % 4) {
        case 0: return 0;
        case 1: return (int64_t)(r >> 8) % 16;
        case 2: return (int64_t)(r >> 8) % 5000;
        default: return (int64_t)(r >> 8) % 200000;
    }
}

static void exchanges_of_random_sizes(cpa_control *control, cpa_transport *transport) {
    for (uint64_t id = 0; id < 30; id++) {
        traffic t = traffic_start(control, transport, id, random_size);
        traffic_finish(control, transport, id, &t);
    }
}

static void test_messages_of_any_size_arrive_intact(void) {
    with_transport(exchanges_of_random_sizes);
}

/* All in flight at once, finished in an order that differs from rank to rank. */
static void a_full_pool(cpa_control *control, cpa_transport *transport) {
    for (uint64_t round = 0; round < 5; round++) {
        traffic all[CPA_TRANSPORT_MAX_IN_FLIGHT];
        uint64_t first = 1000 + round * CPA_TRANSPORT_MAX_IN_FLIGHT;
        for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
            all[i] = traffic_start(control, transport, first + (uint64_t)i, random_size);
        }
        for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
            TABLE->poll(transport);
            int at = (i * 3 + control->rank) % CPA_TRANSPORT_MAX_IN_FLIGHT;
            traffic_finish(control, transport, first + (uint64_t)at, &all[at]);
        }
    }
}

static void test_exchanges_in_flight_do_not_mix(void) {
    with_transport(a_full_pool);
}

/* More than one MPI call's worth (64 MiB) from rank 0 to rank 1, little elsewhere. */
static int64_t long_size(int from, int to, uint64_t exchange) {
    (void)exchange;
    return from == 0 && to == 1 ? ((int64_t)64 << 20) + 12345 : from == 1 && to == 0 ? (int64_t)4 << 20 : 3;
}

static void a_long_exchange(cpa_control *control, cpa_transport *transport) {
    traffic t = traffic_start(control, transport, 77, long_size);
    for (int i = 0; i < 10; i++) TABLE->poll(transport);
    traffic_finish(control, transport, 77, &t);
}

static void test_a_message_longer_than_one_mpi_call_arrives_intact(void) {
    with_transport(a_long_exchange);
}

static void empty_exchanges(cpa_control *control, cpa_transport *transport) {
    (void)control;
    for (int i = 0; i < 40000; i++) { /* past the largest tag */
        cpa_exchange *exchange = NULL;
        cpa_status status = TABLE->start(transport, NULL, 0, stream->native, &exchange, NULL);
        if (status == CPA_OK) status = TABLE->finish(transport, exchange, stream->native, NULL, NULL);
        if (status != CPA_OK) {
            CU_FAIL("an empty exchange failed");
            break;
        }
    }
    traffic t = traffic_start(control, transport, 5, random_size);
    traffic_finish(control, transport, 5, &t);
}

static void test_tags_may_wrap_around(void) {
    with_transport(empty_exchanges);
}

static void expect_refusal(cpa_transport *transport, const cpa_message *msgs, int32_t n, const char *expected) {
    cpa_exchange *untouched = (cpa_exchange *)&untouched;
    cpa_exchange *exchange = untouched;
    cpa_error err = {.message = ""};
    CU_ASSERT_EQUAL(TABLE->start(transport, msgs, n, stream->native, &exchange, &err), CPA_INVALID);
    CU_ASSERT_PTR_EQUAL(exchange, untouched);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
}

static void wrong_calls(cpa_control *control, cpa_transport *transport) {
    char byte[1] = {0};
    int32_t other = (control->rank + 1) % control->size;
    cpa_message self = {.peer = control->rank, .send = byte, .send_bytes = 1};
    expect_refusal(transport, &self, 1, "expected another rank");
    cpa_message beyond = {.peer = control->size, .send = byte, .send_bytes = 1};
    expect_refusal(transport, &beyond, 1, "expected another rank");
    if (control->size > 1) {
        cpa_message negative = {.peer = other, .send = byte, .send_bytes = -1};
        expect_refusal(transport, &negative, 1, "-1 bytes");
        cpa_message nowhere = {.peer = other, .recv = NULL, .recv_bytes = 9};
        expect_refusal(transport, &nowhere, 1, "9 to receive");
        cpa_message twice[2] = {{.peer = other}, {.peer = other}};
        expect_refusal(transport, twice, 2, "both go to peer");
    }

    cpa_exchange *pool[CPA_TRANSPORT_MAX_IN_FLIGHT];
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        CU_ASSERT_EQUAL(TABLE->start(transport, NULL, 0, stream->native, &pool[i], NULL), CPA_OK);
    }
    expect_refusal(transport, NULL, 0, "in flight already");
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        CU_ASSERT_EQUAL(TABLE->finish(transport, pool[i], stream->native, NULL, NULL), CPA_OK);
    }
    CU_ASSERT_EQUAL(TABLE->finish(transport, pool[0], stream->native, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(TABLE->finish(transport, NULL, stream->native, NULL, NULL), CPA_INVALID);
    traffic t = traffic_start(control, transport, 99, random_size); /* a refused call has broken nothing */
    traffic_finish(control, transport, 99, &t);
}

static void test_wrong_use_is_refused_with_the_numbers(void) {
    with_transport(wrong_calls);
}

/* Rank 1 expects fewer (long) or more (short) bytes than rank 0 sends. */
static void mismatched_sizes(cpa_control *control, cpa_transport *transport) {
    for (int expected = 5; expected <= 11; expected += 6) {
        char buffer[16] = {0};
        cpa_message m = {.peer = 1 - control->rank};
        if (control->rank == 0) m.send = buffer, m.send_bytes = 8;
        if (control->rank == 1) m.recv = buffer, m.recv_bytes = expected;
        cpa_exchange *exchange = NULL;
        CU_ASSERT_EQUAL(TABLE->start(transport, &m, control->rank < 2 ? 1 : 0, NULL, &exchange, NULL), CPA_OK);
        cpa_status status = TABLE->finish(transport, exchange, NULL, NULL, NULL);
        CU_ASSERT_EQUAL(status, control->rank == 1 ? CPA_COMM : CPA_OK);
    }
}

static void test_a_message_of_the_wrong_size_is_an_error_of_finish(void) {
    with_transport(mismatched_sizes);
}

static void test_control_moves_bytes_and_reduces(void) {
    cpa_control control;
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    int32_t n = control.size, rank = control.rank, root = n - 1;

    int64_t bytes = ((int64_t)64 << 20) + 7; /* two MPI calls */
    uint8_t *data = malloc((size_t)bytes);
    memset(data, rank == root ? 0xa5 : 0, (size_t)bytes);
    if (rank == root) data[bytes - 1] = 3;
    CU_ASSERT_EQUAL(cpa_control_bcast(&control, data, bytes, root, NULL), CPA_OK);
    CU_ASSERT(data[0] == 0xa5 && data[bytes / 2] == 0xa5 && data[bytes - 2] == 0xa5 && data[bytes - 1] == 3);
    free(data);

    double values[2] = {rank, -rank};
    CU_ASSERT_EQUAL(cpa_control_max(&control, values, 2, NULL), CPA_OK);
    CU_ASSERT(values[0] == n - 1 && values[1] == 0);
    double sums[2] = {1, rank};
    CU_ASSERT_EQUAL(cpa_control_sum(&control, sums, 2, NULL), CPA_OK);
    CU_ASSERT(sums[0] == n && sums[1] == n * (n - 1) / 2);
    uint64_t wide = UINT64_MAX;
    CU_ASSERT_EQUAL(cpa_control_sum_u64(&control, &wide, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(wide, (uint64_t)0 - (uint64_t)n);

    int64_t mine[2] = {rank, 100 + rank};
    int64_t *all = calloc((size_t)n, sizeof mine);
    CU_ASSERT_EQUAL(cpa_control_gather(&control, mine, sizeof mine, all, root, NULL), CPA_OK);
    for (int32_t r = 0; r < n && rank == root; r++) CU_ASSERT(all[2 * r] == r && all[2 * r + 1] == 100 + r);
    free(all);
    cpa_control_close(&control);
}

/* Rank a sends a + 2b + 1 bytes to rank b, itself included, but none from rank 0 to the last. */
static int64_t exchange_bytes(int32_t from, int32_t to, int32_t size) {
    return from == 0 && to == size - 1 ? 0 : from + 2 * to + 1;
}

static void test_control_exchanges_blocks_of_any_size(void) {
    cpa_control control;
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    uint8_t send[1024], recv[1024];
    int64_t send_bytes[16], recv_bytes[16], at = 0;
    for (int32_t r = 0; r < control.size; r++) {
        send_bytes[r] = exchange_bytes(control.rank, r, control.size);
        recv_bytes[r] = exchange_bytes(r, control.rank, control.size);
        for (int64_t i = 0; i < send_bytes[r]; i++) send[at++] = cpa_test_pattern(control.rank, r, 0, i);
    }
    CU_ASSERT_EQUAL(cpa_control_exchange(&control, send, send_bytes, recv, recv_bytes, NULL), CPA_OK);
    int64_t wrong = 0;
    at = 0;
    for (int32_t r = 0; r < control.size; r++) {
        for (int64_t i = 0; i < recv_bytes[r]; i++) wrong += recv[at++] != cpa_test_pattern(r, control.rank, 0, i);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    send_bytes[0] = (int64_t)1 << 31;
    CU_ASSERT_EQUAL(cpa_control_exchange(&control, send, send_bytes, recv, recv_bytes, NULL), CPA_INVALID);
    cpa_control_close(&control);
}

static void test_agree_tells_all_ranks_what_the_lowest_failing_one_says(void) {
    cpa_control control;
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    cpa_error err = {.status = CPA_OK, .message = "kept"};
    CU_ASSERT_EQUAL(cpa_control_agree(&control, CPA_OK, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "kept");

    int32_t first = control.size / 2; /* the ranks from the middle up fail, each in its own way */
    cpa_status mine = control.rank < first ? CPA_OK : control.rank == first ? CPA_IO : CPA_INTERNAL;
    snprintf(err.message, sizeof err.message, "%s", control.rank == first ? "disk on fire" : "something else");
    CU_ASSERT_EQUAL(cpa_control_agree(&control, mine, &err), CPA_IO);
    char expected[64];
    snprintf(expected, sizeof expected, "rank %d: disk on fire", first);
    CU_ASSERT_STRING_EQUAL(err.message, expected);
    CU_ASSERT_EQUAL(err.status, CPA_IO);
    CU_ASSERT_EQUAL(cpa_control_agree(&control, mine, NULL), CPA_IO);
    cpa_control_close(&control);
}

/* Over TCP, where other messages follow on the same connection; its buffer can be freed at once. */
static void test_a_send_that_is_given_up_harms_no_other(void) {
    enum { BYTES = 32 << 20 }; /* more than a socket takes at once */
    cpa_comm *comm = cpa_test_comm();
    cpa_comm_request *send;
    if (comm->size == 1 || strcmp(comm->ops.name, "tcp") != 0) return;
    const int32_t next = (comm->rank + 1) % comm->size;
    int32_t tag;
    CU_ASSERT_EQUAL(cpa_comm_take_tags(comm, 1, &tag, NULL), CPA_OK);
    void *data = calloc(1, BYTES);
    CU_ASSERT_EQUAL(cpa_comm_start_send(comm, next, tag, data, BYTES, &send, NULL), CPA_OK);
    cpa_comm_cancel(comm, &send);
    free(data);
    CU_ASSERT_EQUAL(cpa_comm_barrier(comm, NULL), CPA_OK);
    cpa_comm_give_back_tags(comm, tag, 1);
}

/* Looks after a message for so long, unless it is done before. */
static int is_done_within(cpa_comm *comm, cpa_comm_request **request, double seconds) {
    const double end = cpa_clock_now() + seconds;
    int done = 0;
    while (!done && cpa_clock_now() < end) CU_ASSERT_EQUAL_FATAL(cpa_comm_test(comm, request, &done, NULL), CPA_OK);
    return done;
}

/* The first rank gives a message up that the last has begun to take, and has no memory there any more: it arrives whole. */
static void test_a_send_that_is_given_up_while_it_is_taken_arrives(void) {
    enum { BYTES = 1 << 20 };
    const struct timespec a_while = {.tv_nsec = 200000000};
    cpa_comm *comm = cpa_test_comm();
    cpa_comm_request *request = NULL;
    const int32_t last = comm->size - 1;
    int32_t tag;
    if (last == 0 || strcmp(comm->ops.name, "mpi") != 0) return;
    CU_ASSERT_EQUAL(cpa_comm_take_tags(comm, 1, &tag, NULL), CPA_OK);
    char *data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CU_ASSERT_FATAL(data != MAP_FAILED);
    memset(data, comm->rank == 0 ? 7 : 0, BYTES);
    if (comm->rank == last) CU_ASSERT_EQUAL(cpa_comm_start_receive(comm, 0, tag, data, BYTES, &request, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_comm_barrier(comm, NULL), CPA_OK);
    if (comm->rank == 0) {
        CU_ASSERT_EQUAL(cpa_comm_start_send(comm, last, tag, data, BYTES, &request, NULL), CPA_OK);
        nanosleep(&a_while, NULL); /* the last rank takes it, and hears no more */
        cpa_comm_cancel(comm, &request);
        munmap(data, BYTES);
    }
    if (comm->rank == last) {
        int64_t wrong = 0;
        CU_ASSERT(is_done_within(comm, &request, 20));
        for (int i = 0; i < BYTES; i++) wrong += data[i] != 7;
        CU_ASSERT_EQUAL(wrong, 0);
    }
    CU_ASSERT_EQUAL(cpa_comm_barrier(comm, NULL), CPA_OK);
    if (comm->rank > 0) munmap(data, BYTES);
    cpa_comm_give_back_tags(comm, tag, 1);
}

/* A kind is the place of its row and of its name; a transport is found for the memory that it carries alone. */
static void test_every_kind_has_a_row_and_a_name(void) {
    CU_ASSERT_STRING_EQUAL(cpa_transport_names[CPA_TRANSPORT_AUTO], "auto");
    CU_ASSERT_PTR_NULL(cpa_transport_names[CPA_TRANSPORTS + 1]);
    for (int i = 0; i < CPA_TRANSPORTS; i++) {
        const cpa_transport_row *row = &cpa_transport_rows[i];
        const cpa_transport_table *found = NULL;
        cpa_error err = {.message = ""};
        CU_ASSERT_EQUAL((int)row->kind, i + 1);
        CU_ASSERT_STRING_EQUAL(cpa_transport_names[row->kind], row->name);
        CU_ASSERT_EQUAL(cpa_transport_find(row->kind, row->memory, &found, &err),
                        row->table ? CPA_OK : CPA_UNSUPPORTED);
        CU_ASSERT_EQUAL(found, row->table);
        if (found) CU_ASSERT_STRING_EQUAL(found->name, row->name);
        const cpa_backend other = row->memory == CPA_BACKEND_CUDA ? CPA_BACKEND_HOST : CPA_BACKEND_CUDA;
        CU_ASSERT_EQUAL(cpa_transport_find(row->kind, other, &found, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, row->name));
    }
}

/* Far more channels than there are tags, one after another, beside one that stays. */
static void test_tags_of_what_is_closed_are_taken_again(void) {
    cpa_comm *comm = cpa_test_comm();
    cpa_control stays, control;
    double sum = 1;
    CU_ASSERT_EQUAL(cpa_control_open(comm, &stays, NULL), CPA_OK);
    for (int32_t opened = 0; opened < 2 * CPA_COMM_TAGS / CPA_CONTROL_TAGS; opened++) {
        CU_ASSERT_EQUAL(cpa_control_open(comm, &control, NULL), CPA_OK);
        CU_ASSERT(control.tag + CPA_CONTROL_TAGS <= stays.tag || control.tag >= stays.tag + CPA_CONTROL_TAGS);
        CU_ASSERT_NOT_EQUAL(control.channel, stays.channel);
        cpa_control_close(&control);
    }
    CU_ASSERT_EQUAL(cpa_control_sum(&stays, &sum, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(sum, cpa_comm_size(comm));
    cpa_control_close(&stays);
}

static void test_tags_that_are_all_in_use_are_refused(void) {
    cpa_comm *comm = cpa_test_comm();
    cpa_error err = {CPA_OK, ""};
    int32_t first, more;
    const int32_t all = CPA_COMM_TAGS - CPA_COMM_TAG_FIRST_FREE;
    cpa_control control;
    CU_ASSERT_EQUAL(cpa_comm_take_tags(comm, all, &first, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_comm_take_tags(comm, 1, &more, &err), CPA_NO_MEMORY);
    CU_ASSERT_EQUAL(more, -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "32768 tags are in use"));
    CU_ASSERT_EQUAL(cpa_control_open(comm, &control, NULL), CPA_NO_MEMORY);
    cpa_comm_give_back_tags(comm, first, all);
    CU_ASSERT_EQUAL(cpa_control_open(comm, &control, NULL), CPA_OK);
    cpa_control_close(&control);
}

static const cpa_test TESTS[] = {
    {"every kind has a row and a name", test_every_kind_has_a_row_and_a_name},
    {"messages of any size arrive intact", test_messages_of_any_size_arrive_intact},
    {"exchanges in flight do not mix", test_exchanges_in_flight_do_not_mix},
    {"a message longer than one MPI call arrives intact", test_a_message_longer_than_one_mpi_call_arrives_intact},
    {"tags may wrap around", test_tags_may_wrap_around},
    {"tags of what is closed are taken again", test_tags_of_what_is_closed_are_taken_again},
    {"tags that are all in use are refused", test_tags_that_are_all_in_use_are_refused},
    {"wrong use is refused with the numbers and breaks nothing", test_wrong_use_is_refused_with_the_numbers},
    {"control moves bytes and reduces", test_control_moves_bytes_and_reduces},
    {"control exchanges blocks of any size", test_control_exchanges_blocks_of_any_size},
    {"agree tells all ranks what the lowest failing one says",
     test_agree_tells_all_ranks_what_the_lowest_failing_one_says},
    {"a send that is given up harms no other", test_a_send_that_is_given_up_harms_no_other},
    {"a send that is given up while it is taken arrives", test_a_send_that_is_given_up_while_it_is_taken_arrives},
    /* Of MPI between two ranks: a device transport relies on the sizes of both sides. */
    {"a message of the wrong size is an error of finish", test_a_message_of_the_wrong_size_is_an_error_of_finish},
};

static int n_tests(void) {
    int ranks, n = (int)(sizeof TESTS / sizeof TESTS[0]);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    return ranks > 1 && cpa_test_transport() == &cpa_transport_host ? n : n - 1;
}

CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "transport", TESTS, n_tests())
