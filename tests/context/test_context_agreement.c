/* Ranks that are not given the same options or chunks: all hear of it, and none waits for ever. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cpattn/mpi.h>

#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/mpi_unit.h"

static const cpa_test_shape SHAPE = {.q_heads = 4,
                                     .kv_heads = 2,
                                     .k_dim = 8,
                                     .v_dim = 8,
                                     .block_size = 16,
                                     .interleave = 16,
                                     .dtype = CPA_F32,
                                     .mask = {.causal = 1}};
static const cpa_test_chunk CHUNKS[2] = {{0, 100, 60, CPA_PASS_KV}, {1, 90, 1, CPA_PASS_Q}};

static cpa_device *device;
static cpa_stream *stream;

/* The last rank's options differ in one field. */
static void expect_refused(cpa_context_options options, const char *field) {
    cpa_context *context = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_context_create(cpa_test_comm(), device, &options, &context, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(context);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, field));
    cpa_context_destroy(context);
}

static void options_that_differ_are_refused_on_all_ranks(void) {
    cpa_test_device_open(1, &device, &stream);
    const cpa_context_options same = cpa_test_context_options(&SHAPE, 0);
    cpa_context_options o;
#define EXPECT_REFUSED(field, value)                                                                                   \
    o = same;                                                                                                          \
    if (cpa_test_is_last_rank()) o.field = value;                                                                      \
    expect_refused(o, strrchr("." #field, '.') + 1)
    EXPECT_REFUSED(shape.q_heads, 8);
    EXPECT_REFUSED(shape.kv_heads, 1);
    EXPECT_REFUSED(shape.k_dim, 16);
    EXPECT_REFUSED(shape.v_dim, 16);
    EXPECT_REFUSED(shape.dtype, CPA_BF16);
    EXPECT_REFUSED(shape.kv_dtype, CPA_BF16);
    EXPECT_REFUSED(shape.layout, CPA_HEAD_MAJOR);
    EXPECT_REFUSED(block_size, 8);
    EXPECT_REFUSED(interleave, 32);
    EXPECT_REFUSED(max_rows, 17);
    EXPECT_REFUSED(staging_bytes, (int64_t)128 << 20);
    EXPECT_REFUSED(rows, CPA_ROWS_REPLICATED);
    EXPECT_REFUSED(cascade_attention, CPA_CASCADE_OFF);
#undef EXPECT_REFUSED
    cpa_test_device_close(device, stream);
}

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
    cpa_test_layer_download(&s->layer, stream);
    cpa_test_result_destroy(&s->layer.result);
    cpa_context_destroy(s->context);
    cpa_test_cache_destroy(&s->cache);
    cpa_test_device_close(device, stream);
}

static void chunks_that_differ_are_refused_and_harm_nothing(void) {
    site s;
    open_site(&s);
    for (int way = 0; way < 5; way++) {
        cpa_test_chunk chunks[2] = {CHUNKS[0], CHUNKS[1]};
        if (cpa_test_is_last_rank() && way == 0) chunks[0].start++;
        if (cpa_test_is_last_rank() && way == 1) chunks[0].count--;
        if (cpa_test_is_last_rank() && way == 2) chunks[0].algorithm = CPA_PASS_Q;
        if (cpa_test_is_last_rank() && way == 3) chunks[1].algorithm = CPA_PASS_KV;
        if (cpa_test_is_last_rank() && way == 4) chunks[0].count = -1; /* refused there by itself */
        cpa_status planned = cpa_test_plan(s.context, &s.cache, chunks, 2);
        CU_ASSERT_EQUAL(planned, cpa_test_is_last_rank() && way == 4 ? CPA_INVALID : CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.layer.args, stream), CPA_INVALID);
        char expected[64];
        snprintf(expected, sizeof expected, way == 4 ? "plan: rank %d: " : "chunks of rank %d", cpa_test_ranks() - 1);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), expected));
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.layer.args, stream), CPA_INVALID); /* and the next layer */

        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, CHUNKS, 2), CPA_OK);
        cpa_test_result result;
        CU_ASSERT_EQUAL(cpa_test_attend(s.context, &s.cache, SHAPE.mask, CHUNKS, 2, stream, &result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_count_wrong(&s.cache, SHAPE.mask, CHUNKS, 2, &result), 0);
        cpa_test_result_destroy(&result);
    }
    close_site(&s);
}

/* The last rank attends a layer by another scale or mask; the messages are the same, and the results wrong. */
static void layers_that_are_attended_differently_are_found_out(void) {
    const cpa_test_chunk decode = {1, 90, 1, CPA_PASS_Q};
    site s;
    open_site(&s);
    for (int way = 0; way < 4; way++) {
        cpa_context_args args = s.layer.args;
        if (cpa_test_is_last_rank() && way == 0) args.scale = 0.5f;
        if (cpa_test_is_last_rank() && way == 1) args.mask.causal = 0;
        if (cpa_test_is_last_rank() && way == 2) args.mask.window = 8;
        if (cpa_test_is_last_rank() && way == 3) args.mask = (cpa_mask){.causal = 1, .window = 8, .sinks = 1};
        if (!cpa_test_is_last_rank() && way == 3) args.mask = (cpa_mask){.causal = 1, .window = 8};
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, &decode, 1), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.layer.args, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, &decode, 1), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.layer.args, stream), CPA_INVALID);
        char expected[64];
        snprintf(expected, sizeof expected, "masks, scales or score rules by which rank %d attended",
                 cpa_test_ranks() - 1);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), expected));
    }
    /* The default scale in words is the default scale. */
    cpa_context_args args = s.layer.args;
    if (cpa_test_is_last_rank()) args.scale = 1.0f / sqrtf((float)SHAPE.k_dim);
    for (int step = 0; step < 2; step++) {
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, &decode, 1), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, stream), CPA_OK);
    }
    close_site(&s);
}

/* The last rank has another value in what the rules point to, and the first in what follows nothing from: a word's bits
 * behind the last key. */
static void change_score(cpa_case_score *score, int way) {
    const uint32_t one = 1;
    if (!cpa_test_is_last_rank()) {
        if (way == 3) score->bits[1] ^= one << 31;
        return;
    }
    if (way == 0) score->slopes[2] *= 2;
    if (way == 1) score->sinks[1] += 0.5f;
    if (way == 2) ((float *)score->bias)[17] += 1;
    if (way == 3) score->bits[1] ^= one << 26;
    if (way == 4) score->first[0]--;
}

/* On the host, where ranks read what they are given: whatever the rules point to has to be the same. */
static void scores_that_differ_are_found_out(void) {
    const cpa_test_chunk decode = {1, 90, 1, CPA_PASS_Q};
    site s;
    open_site(&s);
    for (int way = 0; way < 6; way++) {
        cpa_case_score score = {.q_heads = SHAPE.q_heads, .rows = 1};
        cpa_case_score_add_slopes(&score, NULL);
        cpa_case_score_add_sinks(&score, NULL);
        cpa_case_score_add_bias(&score, CPA_F32, 0, 30, 61, NULL);
        cpa_case_score_add_bits(&score, 30, 61, NULL);
        cpa_test_score_unmap(&score);
        change_score(&score, way);
        cpa_test_layer layer;
        s.cache.score = &score;
        cpa_test_layer_upload(&s.cache, SHAPE.mask, &decode, 1, 1, stream, &layer);
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, &decode, 1), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &layer.args, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, &decode, 1), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &layer.args, stream), way < 5 ? CPA_INVALID : CPA_OK);
        char expected[96];
        snprintf(expected, sizeof expected, "score rules by which rank %d attended", cpa_test_ranks() - 1);
        if (way < 5) CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), expected));
        cpa_test_layer_download(&layer, stream);
        cpa_test_result_destroy(&layer.result);
        s.cache.score = NULL;
        cpa_case_score_release(&score);
    }
    close_site(&s);
}

/* By pass-KV the last rank's window asks for fewer segments than the others send, and all wait. The line tells that the
 * time-out has ended that: what finds a deadlock of another cause comes later, and says something else. */
static void waits_of_masks_that_differ_end_after_a_time_out(void) {
    const int64_t length = 4 * 1024 * cpa_test_ranks(); /* whole segments, so that messages are of one size */
    const cpa_comm_options options = {.size = sizeof options, .timeout_s = 2};
    const cpa_test_chunk chunk = {0, length - 60, 60, CPA_PASS_KV};
    cpa_test_cache cache;
    cpa_test_layer layer;
    cpa_comm *comm = NULL;
    cpa_context *context = NULL;
    cpa_test_device_open(1, &device, &stream);
    cpa_test_cache_init(&cache, SHAPE, 7, &length, NULL, 1);
    cpa_test_layer_upload(&cache, SHAPE.mask, &chunk, 1, 0, stream, &layer);
    CU_ASSERT_EQUAL(cpa_comm_from_mpi(MPI_COMM_WORLD, &options, &comm, NULL), CPA_OK);
    cpa_context_options small = cpa_test_context_options(&SHAPE, 0);
    small.staging_bytes = cpa_context_least_staging(device, &small, cpa_test_ranks());
    CU_ASSERT_EQUAL(cpa_context_create(comm, device, &small, &context, NULL), CPA_OK);
    if (cpa_test_is_last_rank()) layer.args.mask.window = 64;
    cpa_status status = CPA_OK;
    for (int step = 0; step < 3 && status == CPA_OK; step++) {
        CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, &chunk, 1), CPA_OK);
        status = cpa_context_attend(context, &layer.args, stream);
    }
    CU_ASSERT_EQUAL(status, CPA_COMM);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(cpa_context_error(context), "attends by another mask, scale or score rule than rank"));
    cpa_context_destroy(context);
    cpa_comm_destroy(comm);
    cpa_test_layer_download(&layer, stream);
    cpa_test_result_destroy(&layer.result);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

/* The last rank gives bad options, or no place for the communicator; the others would wait for it. */
static void communicators_that_one_rank_refuses_are_refused_on_all(void) {
    for (int way = 0; way < 2; way++) {
        const cpa_comm_options options = {.size = sizeof options,
                                          .timeout_s = cpa_test_is_last_rank() && way == 0 ? -1 : 0};
        cpa_comm *comm = NULL;
        cpa_error err = {CPA_OK, ""};
        cpa_comm **out = cpa_test_is_last_rank() && way == 1 ? NULL : &comm;
        CU_ASSERT_EQUAL(cpa_comm_from_mpi(MPI_COMM_WORLD, &options, out, &err), CPA_INVALID);
        CU_ASSERT_PTR_NULL(comm);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, way == 0 ? "time-outs of -1 s" : "out is NULL"));
    }
}

static void time_outs_below_the_heartbeat_lose_nobody(void) {
    const cpa_comm_options options = {.size = sizeof options, .timeout_s = 0.05};
    const struct timespec several_heartbeats = {.tv_sec = 1, .tv_nsec = 300000000};
    cpa_comm *comm = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_comm_from_mpi(MPI_COMM_WORLD, &options, &comm, NULL), CPA_OK);
    nanosleep(&several_heartbeats, NULL);
    CU_ASSERT_EQUAL(cpa_comm_agree(comm, CPA_OK, NULL), CPA_OK);
    cpa_comm_destroy(comm);
}

static const cpa_test tests[] = {
    {"communicators that one rank refuses are refused on all", communicators_that_one_rank_refuses_are_refused_on_all},
    {"time-outs below the heartbeat lose nobody", time_outs_below_the_heartbeat_lose_nobody},
    {"options that differ are refused on all ranks", options_that_differ_are_refused_on_all_ranks},
    {"layers that are attended differently are found out", layers_that_are_attended_differently_are_found_out},
    {"scores that differ are found out", scores_that_differ_are_found_out},
    {"waits of masks that differ end after a time-out", waits_of_masks_that_differ_end_after_a_time_out},
    {"chunks that differ are refused and harm nothing", chunks_that_differ_are_refused_and_harm_nothing},
};

CPA_MPI_TEST_MAIN("agreement of ranks", tests)
