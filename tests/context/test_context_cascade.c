/* Cascade attention under context parallelism: decode of sequences that begin alike, whose rows the ranks own in turn,
 * one or several a sequence, beside a prefill, against float64; on the host with the bits that they have alone. And
 * what a context counts of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/operators.h"
#include "src/context/context.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { SEQUENCES = 7, STEP = 1024 }; /* STEP: tokens of a rank that the host attends together */

static const cpa_mask CAUSAL = {.causal = 1}, WINDOW = {.causal = 1, .window = 1500, .sinks = 5};

/* Two levels: all but the last begin alike, and every other one of these goes on alike. */
static void make_cache(cpa_test_cache *cache, cpa_test_shape shape) {
    const int64_t step = (int64_t)STEP * cpa_test_ranks();
    int64_t lengths[SEQUENCES];
    for (int64_t i = 0; i < SEQUENCES; i++) lengths[i] = (i % 2 ? 2 : 1) * step + 40 + 57 * i;
    lengths[SEQUENCES - 1] = 300; /* a prefill, of a sequence that shares nothing */
    cpa_test_cache_init(cache, shape, 41, lengths, NULL, SEQUENCES);
    for (int64_t i = 0; i < SEQUENCES - 1; i++) {
        if (i != 1) cpa_test_cache_share(cache, i, 1, i % 2 ? 2 * step : step);
    }
}

static cpa_test_result attend(cpa_device *device, cpa_stream *stream, const cpa_test_cache *cache,
                              cpa_cascade_attention cascade, const cpa_test_chunk *chunks, cpa_context_stats *stats) {
    cpa_context_options options = cpa_test_context_options(&cache->shape, 0);
    const cpa_transport_table *over = cpa_test_transport_kind() == CPA_TRANSPORT_AUTO ? NULL : cpa_test_transport();
    cpa_context *context = NULL;
    cpa_test_result result;
    options.cascade_attention = cascade;
    CU_ASSERT_EQUAL_FATAL(cpa_context_create_over(cpa_test_comm(), device, over, &options, &context, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_plan(context, cache, chunks, SEQUENCES), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_attend(context, cache, cache->shape.mask, chunks, SEQUENCES, stream, &result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_get_stats(context, stats, sizeof *stats), CPA_OK);
    cpa_context_destroy(context);
    return result;
}

/* A step of `rows` rows of each sequence but the last, and all rows of that one. */
static void check_step(cpa_test_shape shape, int64_t rows) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_cache cache;
    cpa_test_chunk chunks[SEQUENCES];
    cpa_context_stats alone_stats, stats;
    cpa_test_device_open(2, &device, &stream);
    make_cache(&cache, shape);
    for (int64_t i = 0; i < SEQUENCES; i++) {
        const int64_t length = cache.sequences[i].length, count = i == SEQUENCES - 1 && rows > 1 ? length : rows;
        chunks[i] = (cpa_test_chunk){i, length - count, count, count > rows ? CPA_PASS_KV : CPA_PASS_Q};
    }
    cpa_test_result alone = attend(device, stream, &cache, CPA_CASCADE_OFF, chunks, &alone_stats);
    cpa_test_result together = attend(device, stream, &cache, CPA_CASCADE_ALWAYS, chunks, &stats);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, shape.mask, chunks, SEQUENCES, &together), 0);
    CU_ASSERT(cpa_test_same_bits_or_right(&cache, shape.mask, chunks, SEQUENCES, &alone, &together));
    CU_ASSERT_EQUAL(alone_stats.keys_read, alone_stats.keys_attended);
    CU_ASSERT_EQUAL(stats.keys_attended, alone_stats.keys_attended);
    if (cpa_test_promises_bits()) {
        CPA_ASSERT_ORDER(stats.keys_read, <, stats.keys_attended);
        CU_ASSERT_EQUAL(stats.plain_rows, 0); /* the host has no plain kernel */
    }
    cpa_test_result_destroy(&together);
    cpa_test_result_destroy(&alone);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

static cpa_test_shape shape_of(cpa_dtype dtype, int32_t dim, int32_t block_size, int32_t interleave, cpa_mask mask) {
    return (cpa_test_shape){.q_heads = 4,
                            .kv_heads = 2,
                            .k_dim = dim,
                            .v_dim = dim,
                            .block_size = block_size,
                            .interleave = interleave,
                            .dtype = dtype,
                            .mask = mask};
}

static void decode_of_sequences_that_begin_alike(void) {
    check_step(shape_of(CPA_F32, 16, 16, 16, CAUSAL), 1);
    check_step(shape_of(CPA_BF16, 64, 64, 128, CAUSAL), 1);
    check_step(shape_of(CPA_F16, 128, 16, 4, WINDOW), 1);
}

static void several_rows_of_each_beside_a_prefill(void) {
    check_step(shape_of(CPA_BF16, 64, 16, 16, CAUSAL), 3);
    check_step(shape_of(CPA_F32, 16, 32, 32, WINDOW), 4);
}

/* Of few heads, of which rows of several sequences make a tile, and of more. */
static void latents_that_begin_alike(void) {
    cpa_test_shape shape = shape_of(CPA_BF16, 96, 16, 32, CAUSAL);
    shape.kv_heads = 1, shape.v_dim = 64, shape.v_in_k = 1;
    shape.q_heads = 16;
    check_step(shape, 1);
    shape.q_heads = 40, shape.mask = WINDOW;
    check_step(shape, 1);
    shape.q_heads = 5, shape.dtype = CPA_F16;
    check_step(shape, 3);
    shape.q_heads = 2, shape.k_dim = 576, shape.v_dim = 512, shape.mask = CAUSAL;
    check_step(shape, 2);
}

/* A device whose attends are all plain: what it tells, and has told in all. */
static const cpa_operator_table *of_device;
static int64_t told_rows;

static cpa_status attend_plainly(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                                 cpa_stream *stream) {
    stream->plain_rows += plan->rows_attended;
    told_rows += plan->rows_attended;
    return of_device->attend(plan, args, ready_q, stream);
}

static void rows_of_plain_kernels_are_counted(void) {
    const cpa_test_shape shape = shape_of(CPA_F32, 16, 16, 16, CAUSAL);
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_cache cache;
    cpa_test_chunk chunks[SEQUENCES];
    cpa_context_stats stats;
    if (!cpa_test_promises_bits()) return; /* a device counts those that are so */
    cpa_test_device_open(1, &device, &stream);
    make_cache(&cache, shape);
    for (int64_t i = 0; i < SEQUENCES; i++)
        chunks[i] = (cpa_test_chunk){i, cache.sequences[i].length - 1, 1, CPA_PASS_Q};
    cpa_operator_table operators = *(of_device = device->operators);
    operators.attend = attend_plainly;
    device->operators = &operators;
    told_rows = 0;
    cpa_test_result result = attend(device, stream, &cache, CPA_CASCADE_OFF, chunks, &stats);
    CU_ASSERT(stats.plain_rows > 0 || cpa_test_ranks() > 1); /* a rank may have none */
    CU_ASSERT_EQUAL(stats.plain_rows, told_rows);
    device->operators = of_device;
    cpa_test_result_destroy(&result);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

static const cpa_test TESTS[] = {
    {"decode of sequences that begin alike", decode_of_sequences_that_begin_alike},
    {"several rows of each beside a prefill", several_rows_of_each_beside_a_prefill},
    {"latents that begin alike", latents_that_begin_alike},
    {"rows of plain kernels are counted", rows_of_plain_kernels_are_counted},
};

CPA_MPI_DEVICE_TEST_MAIN("cascade attention of a context", TESTS)
