/* Rows that ranks send each other, each as many to each as it likes, and the bytes that are counted. */
#include "src/context/row_exchange.h"

#include <stdlib.h>
#include <string.h>

#include "src/context/context.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { ROW = 48, MOST_ROWS = 256, ROUNDS = 6 };

/* How many rows one rank has for another: none to 8; in some rounds one rank has none at all. With to_all in some rounds
 * one rank gets none. */
static int64_t rows_of(int round, int32_t from, int32_t to, int to_all) {
    if (round == 2 || from == round % 4 || (to_all && to == (round + 1) % 4)) return 0;
    return (7 * from + (to_all ? 0 : 5 * to) + 3 * round) % 9;
}

/* The bytes of a row. */
static void fill(int round, int32_t from, int32_t to, int64_t index, unsigned char row[ROW]) {
    for (int i = 0; i < ROW; i++) row[i] = (unsigned char)(31 * round + 11 * from + 59 * to + 7 * index + 3 * i);
}

static void exchange(cpa_context *context, cpa_stream *stream, int round, int to_all, void *send, void *receive) {
    const cpa_row_exchange with = cpa_context_row_exchange(context);
    unsigned char out[MOST_ROWS * ROW] = {0}, want[MOST_ROWS * ROW], got[MOST_ROWS * ROW];
    int64_t to[8], from[8], sent = 0, wanted = 0;
    CU_ASSERT(with.rank == cpa_test_rank() && with.ranks == cpa_test_ranks());
    memset(want, 0xee, sizeof want); /* what lies behind the rows stays */
    for (int32_t r = 0; r < with.ranks; r++) {
        to[r] = rows_of(round, with.rank, r, to_all);
        from[r] = rows_of(round, r, with.rank, to_all);
        if (to_all) sent = 0;
        for (int64_t i = 0; i < to[r]; i++) fill(round, with.rank, to_all ? 0 : r, i, out + sent++ * ROW);
        for (int64_t i = 0; i < from[r]; i++) fill(round, r, to_all ? 0 : with.rank, i, want + wanted++ * ROW);
    }
    memset(got, 0xee, sizeof got);
    CU_ASSERT_EQUAL(stream->device->table->copy(receive, got, sizeof got, stream), CPA_OK);
    CU_ASSERT_EQUAL(stream->device->table->copy(send, out, sizeof out, stream), CPA_OK);
    CU_ASSERT_EQUAL(stream->device->table->stream_sync(stream), CPA_OK);
    const cpa_row_exchange_args args = {sizeof args, ROW, to, from, send, receive, to_all};
    CU_ASSERT_EQUAL(with.exchange(with.ctx, &args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_sync(context, stream), CPA_OK);
    cpa_test_download(stream, got, receive, sizeof got);
    CU_ASSERT_EQUAL(memcmp(got, want, sizeof got), 0);
}

static void check_exchanges(int to_all) {
    static const cpa_test_shape shape = {
        .q_heads = 1, .kv_heads = 1, .k_dim = 8, .v_dim = 8, .block_size = 8, .interleave = 8, .dtype = CPA_F32};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(2, &device, &stream);
    cpa_context *context = cpa_test_context(device, &shape, 0);
    char *poison = cpa_test_poisoned(MOST_ROWS * ROW, 1);
    void *send = cpa_test_upload(stream, poison, MOST_ROWS * ROW);
    void *receive = cpa_test_upload(stream, poison, MOST_ROWS * ROW);
    int64_t sent = 0;
    for (int round = 0; round < ROUNDS; round++) {
        exchange(context, stream, round, to_all, send, receive);
        for (int32_t r = 0; r < cpa_test_ranks(); r++)
            if (r != cpa_test_rank()) sent += rows_of(round, cpa_test_rank(), r, to_all) * ROW;
    }
    cpa_context_stats stats;
    CU_ASSERT_EQUAL(cpa_context_get_stats(context, &stats, sizeof stats), CPA_OK);
    CU_ASSERT(stats.row_bytes_sent == sent && stats.bytes_sent == sent);
    free(poison);
    cpa_test_free(stream, send);
    cpa_test_free(stream, receive);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static void every_row_arrives_in_its_place(void) {
    check_exchanges(0);
}

static void the_same_rows_go_to_each_rank_that_gets_any(void) {
    check_exchanges(1);
}

static const cpa_test TESTS[] = {
    {"every row arrives in its place", every_row_arrives_in_its_place},
    {"the same rows go to each rank that gets any", the_same_rows_go_to_each_rank_that_gets_any},
};

CPA_MPI_DEVICE_TEST_MAIN("rows that ranks send each other", TESTS)
