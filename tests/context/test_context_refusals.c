/* Layers that ranks refuse: all hear of it, and none waits for ever. On the host, and on devices, where a call returns
 * before the others refuse. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

static const cpa_test_shape SHAPE = {.q_heads = 4,
                                     .kv_heads = 2,
                                     .k_dim = 32,
                                     .v_dim = 32,
                                     .block_size = 16,
                                     .interleave = 16,
                                     .dtype = CPA_F32,
                                     .mask = {.causal = 1}};
static const cpa_test_chunk CHUNKS[2] = {{0, 100, 60, CPA_PASS_KV}, {1, 90, 1, CPA_PASS_Q}};

static cpa_device *device;
static cpa_stream *stream;

typedef struct site {
    cpa_test_cache cache;
    cpa_context *context;
    cpa_test_layer layer;
} site;

static void open_site(site *s) {
    static const int64_t lengths[2] = {160, 91};
    cpa_test_device_open(1, &device, &stream);
    cpa_test_cache_init(&s->cache, SHAPE, 7, lengths, NULL, 2);
    s->context = cpa_test_context(device, &SHAPE, 0);
    cpa_test_layer_upload(&s->cache, SHAPE.mask, CHUNKS, 2, 1, stream, &s->layer);
}

static void close_site(site *s) {
    cpa_context_destroy(s->context); /* first: what it has given up is not waited for */
    cpa_test_layer_download(&s->layer, stream);
    cpa_test_result_destroy(&s->layer.result);
    cpa_test_cache_destroy(&s->cache);
    cpa_test_device_close(device, stream);
}

/* Attends a layer, and waits for it where calls only enqueue. *message is the line of what failed. */
static cpa_status attend_to_the_end(const site *s, const cpa_context_args *args, const char **message) {
    cpa_status status = cpa_context_attend(s->context, args, stream);
    *message = cpa_context_error(s->context);
    if (status != CPA_OK) return status;
    *message = cpa_stream_error(stream);
    return cpa_stream_sync(stream);
}

/* The last rank gives no keys, or no queries; the others would wait for it. */
static void tensors_that_one_rank_refuses_are_refused_on_all(void) {
    for (int way = 0; way < 2; way++) {
        site s;
        open_site(&s);
        cpa_context_args args = s.layer.args;
        if (cpa_test_is_last_rank() && way == 0) args.kv.k = NULL;
        if (cpa_test_is_last_rank() && way == 1) args.q = NULL;
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, CHUNKS, 2), CPA_OK);
        const double begin = cpa_clock_now();
        const char *message;
        CU_ASSERT_EQUAL(attend_to_the_end(&s, &args, &message), CPA_INVALID);
        CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 20);
        char expected[32];
        snprintf(expected, sizeof expected, "rank %d: attend: ", cpa_test_ranks() - 1);
        if (!cpa_test_is_last_rank()) CU_ASSERT_PTR_NOT_NULL(strstr(message, expected));
        cpa_context_destroy(s.context);
        s.context = NULL;
        CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 25);
        CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK); /* nothing of the device is stuck */
        close_site(&s);
    }
}

/* The last rank refuses one layer and goes on to the next, before the first rank waits for it. */
static void messages_of_the_next_layer_are_not_taken_for_those_of_a_refused_one(void) {
    const struct timespec a_while = {.tv_nsec = 200000000};
    site s;
    open_site(&s);
    cpa_context_args args = s.layer.args;
    CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, CHUNKS, 2), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, stream), CPA_OK);
    if (cpa_test_is_last_rank()) {
        args.q = NULL;
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, stream), CPA_INVALID);
    } else {
        nanosleep(&a_while, NULL);
    }
    const char *message;
    CU_ASSERT_EQUAL(attend_to_the_end(&s, &s.layer.args, &message), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(message, cpa_test_is_last_rank() ? "no step is planned" : "q (nil) and"));
    CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, CHUNKS, 2), CPA_OK);
    CU_ASSERT_NOT_EQUAL(cpa_context_attend(s.context, &s.layer.args, stream), CPA_OK); /* old messages are there */
    close_site(&s);
}

/* Nobody has begun: after the next plan the context goes on. */
static void a_layer_that_all_ranks_refuse_harms_nothing(void) {
    site s;
    open_site(&s);
    cpa_context_args args = s.layer.args;
    args.kv.k = NULL;
    CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, CHUNKS, 2), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, stream), CPA_INVALID);
    cpa_test_result result;
    CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, CHUNKS, 2), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_attend(s.context, &s.cache, SHAPE.mask, CHUNKS, 2, stream, &result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(&s.cache, SHAPE.mask, CHUNKS, 2, &result), 0);
    cpa_test_result_destroy(&result);
    close_site(&s);
}

/* A rank without rows that has keys is asked for them. */
static void keys_that_are_missing_without_rows_are_refused(void) {
    site s;
    open_site(&s);
    const cpa_test_chunk chunk = {1, 90, 1, CPA_PASS_Q};
    CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, &chunk, 1), CPA_OK);
    cpa_context_args args = s.layer.args;
    args.kv.k = NULL;
    CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, stream), CPA_INVALID);
    close_site(&s);
}

static const cpa_test TESTS[] = {
    {"tensors that one rank refuses are refused on all", tensors_that_one_rank_refuses_are_refused_on_all},
    {"messages of the next layer are not taken for those of a refused one",
     messages_of_the_next_layer_are_not_taken_for_those_of_a_refused_one},
    {"a layer that all ranks refuse harms nothing", a_layer_that_all_ranks_refuse_harms_nothing},
    {"keys that are missing without rows are refused", keys_that_are_missing_without_rows_are_refused},
};

CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "layers that ranks refuse", TESTS,
                         (int)(sizeof TESTS / sizeof TESTS[0]))
