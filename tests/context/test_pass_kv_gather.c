/* pass-KV with all peers at once (where runs are shorter than blocks peer by peer), as on a back end that promises no
 * bits: a CUDA device's, or the host's, told to promise none. */
#include <stdlib.h>

#include "kernels/device.h"
#include "src/context/context_internal.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

static cpa_device *device;
static cpa_stream *stream;

static void open_device(void) {
    cpa_test_device_open(1, &device, &stream);
    device->caps.bit_exact = 0;
    device->caps.split_tokens = 1;
}

static void close_device(void) {
    cpa_test_device_close(device, stream);
}

static cpa_test_shape random_shape(void) {
    static const int32_t dims[3][2] = {{32, 32}, {24, 40}, {64, 16}};
    const int32_t *d = dims[cpa_test_random_below(3)];
    cpa_test_shape shape = {.q_heads = 4, .kv_heads = 2, .k_dim = d[0], .v_dim = d[1], .block_size = 16};
    shape.interleave = cpa_test_random_below(3) ? 16 << cpa_test_random_below(3) : 1 << cpa_test_random_below(4);
    shape.dtype = cpa_test_random_below(2) ? CPA_BF16 : CPA_F32;
    shape.mask.causal = cpa_test_random_below(4) > 0;
    if (shape.mask.causal && cpa_test_random_below(2)) {
        shape.mask.window = 1 + cpa_test_random_below(200);
        shape.mask.sinks = (int32_t)cpa_test_random_below(40);
    }
    return shape;
}

/* The least staging: two segments of 1024 tokens to send, and two from each peer. */
static int64_t least_staging(const cpa_test_shape *shape) {
    int64_t token = (int64_t)shape->kv_heads * (shape->k_dim + shape->v_dim) * cpa_dtype_bytes(shape->dtype);
    int32_t others = cpa_test_ranks() > 1 ? cpa_test_ranks() - 1 : 1;
    return 2 * (1 + others) * 1024 * token;
}

/* What a context did. */
typedef struct step_facts {
    cpa_context_stats stats;
    int64_t rows, one_pass_rows, open_rows, transfers;
} step_facts;

/* Nothing that was not packed, or did not come, may be read. */
static void poison_staging(cpa_context *c) {
    const cpa_kv_transfers *t = &c->kv.transfers;
    const int64_t bytes = t->memory ? t->staging.segments * t->staging.capacity * t->staging.block_bytes : 0;
    char *poison = cpa_test_poisoned(bytes, 1);
    CU_ASSERT_EQUAL(c->ops.device->table->copy(t->memory, poison, bytes, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    free(poison);
}

/* How many results are wrong. */
static int64_t run_step(const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n, int64_t staging,
                        step_facts *facts) {
    cpa_test_result result;
    cpa_context *context = cpa_test_context(device, &cache->shape, staging);
    poison_staging(context);
    CU_ASSERT_EQUAL(cpa_test_plan(context, cache, chunks, n), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_attend(context, cache, cache->shape.mask, chunks, n, stream, &result), CPA_OK);
    cpa_context_get_stats(context, &facts->stats, sizeof facts->stats);
    facts->rows = context->step.rows[0];
    facts->one_pass_rows = context->kv.now.own[0].one_pass_rows;
    facts->open_rows = cpa_pass_kv_open_rows(&context->kv, 0);
    facts->transfers = context->kv.now.end - context->kv.now.begin;
    int64_t wrong = cpa_test_count_wrong(cache, cache->shape.mask, chunks, n, &result);
    cpa_test_result_destroy(&result);
    /* Without an LSE the last pass may round the results. */
    CU_ASSERT_EQUAL(cpa_test_attend_without_lse(context, cache, cache->shape.mask, chunks, n, stream, &result), CPA_OK);
    wrong += cpa_test_count_wrong(cache, cache->shape.mask, chunks, n, &result);
    cpa_test_result_destroy(&result);
    cpa_context_destroy(context);
    return wrong;
}

static void test_random_steps_are_right_in_any_staging(void) {
    const uint64_t seeds =
        cpa_test_ranks() == 3 && cpa_test_promises_bits() ? 12 : 30; /* three on the host run daily */
    open_device();
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        cpa_test_random_seed(seed);
        cpa_test_cache cache;
        cpa_test_chunk chunks[CPA_TEST_MAX_SEQUENCES];
        int64_t lengths[CPA_TEST_MAX_SEQUENCES], n = 1 + cpa_test_random_below(5);
        cpa_placement placements[CPA_TEST_MAX_SEQUENCES];
        for (int64_t i = 0; i < n; i++) {
            int64_t count = cpa_test_random_below(3) == 0 ? 1 : 1 + cpa_test_random_below(300);
            int64_t start = cpa_test_random_below(3) == 0 ? 0 : cpa_test_random_below(i == 0 ? 5000 : 700);
            placements[i] = cpa_test_random_placement();
            lengths[i] = start + count;
            chunks[i] = (cpa_test_chunk){i, start, count, cpa_test_random_below(4) ? CPA_PASS_KV : CPA_PASS_Q};
        }
        cpa_test_shape shape = random_shape();
        cpa_test_cache_init(&cache, shape, seed, lengths, placements, n);
        cache.check_every = 2;
        int64_t least = least_staging(&shape);
        for (int64_t staging = least; staging <= 4 * least; staging *= 4) {
            step_facts facts;
            CU_ASSERT_EQUAL(run_step(&cache, chunks, n, staging, &facts), 0);
            CPA_ASSERT_ORDER(facts.stats.staging_bytes, <=, staging);
        }
        cpa_test_cache_destroy(&cache);
    }
    close_device();
}

static void test_a_shard_is_sent_once_to_each_peer_and_stays_within_staging(void) {
    open_device();
    cpa_test_shape shape = {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .block_size = 16, .interleave = 32};
    shape.mask.causal = 1;
    int64_t length = 64 * cpa_test_ranks() * 57 + 5, shard = 64 * 57 + 5;
    const cpa_placement placement = {CPA_SHARDED, 1};
    cpa_test_cache cache;
    cpa_test_cache_init(&cache, shape, 3, &length, &placement, 1);
    cpa_test_chunk chunk = {0, length - 64 * cpa_test_ranks(), 64 * cpa_test_ranks(), CPA_PASS_KV};
    step_facts tight, ample;
    CU_ASSERT_EQUAL(run_step(&cache, &chunk, 1, least_staging(&shape), &tight), 0);
    CU_ASSERT_EQUAL(run_step(&cache, &chunk, 1, 8 * least_staging(&shape), &ample), 0);
    int64_t token = (int64_t)shape.kv_heads * (shape.k_dim + shape.v_dim) * cpa_dtype_bytes(shape.dtype);
    CU_ASSERT_EQUAL(tight.stats.bytes_sent, ample.stats.bytes_sent);
    CPA_ASSERT_ORDER(tight.stats.bytes_sent, <=, (cpa_test_ranks() - 1) * (shard + shape.block_size) * token);
    CPA_ASSERT_ORDER(tight.stats.bytes_sent, >=, (cpa_test_ranks() - 1) * 64 * 57 * token);
    CPA_ASSERT_ORDER(tight.stats.staging_bytes, <=, least_staging(&shape));
    if (cpa_test_ranks() > 1) CPA_ASSERT_ORDER(ample.stats.staging_bytes, >, tight.stats.staging_bytes);
    cpa_test_cache_destroy(&cache);
    close_device();
}

static void test_a_long_sequence_between_short_ones_is_right(void) {
    open_device();
    static const cpa_mask masks[] = {{.causal = 1}, {.causal = 0}, {.causal = 1, .sinks = 20, .window = 1000}};
    for (int m = 0; m < 3; m++) {
        cpa_test_shape shape = {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .block_size = 16};
        shape.interleave = 16;
        shape.mask = masks[m];
        int64_t length = 2600 * cpa_test_ranks() + 37;
        int64_t lengths[4] = {21, length, 3, 130};
        cpa_placement placements[4] = {{CPA_SHARDED, 0}, {CPA_SHARDED, 1}, {CPA_SHARDED, 2}, {CPA_SHARDED, 0}};
        cpa_test_cache cache;
        cpa_test_cache_init(&cache, shape, 7, lengths, placements, 4);
        cpa_test_chunk chunks[4] = {{0, 5, 16, CPA_PASS_KV},
                                    {1, length - 45, 45, CPA_PASS_KV},
                                    {2, 0, 3, CPA_PASS_Q},
                                    {3, 128, 2, CPA_PASS_KV}};
        for (int64_t staging = least_staging(&shape); staging <= 4 * least_staging(&shape); staging *= 2) {
            step_facts facts;
            CU_ASSERT_EQUAL(run_step(&cache, chunks, 4, staging, &facts), 0);
        }
        cpa_test_cache_destroy(&cache);
    }
    close_device();
}

/* Many query heads share a KV head: attention over the own shard is long beside what travels. Whatever is lost on the
 * way is lost for all of them, so that a few are checked. */
static const cpa_test_shape LONG_ATTENTION = {.q_heads = 96,
                                              .kv_heads = 1,
                                              .k_dim = 8,
                                              .v_dim = 8,
                                              .block_size = 16,
                                              .interleave = 16,
                                              .dtype = CPA_BF16,
                                              .mask = {.causal = 1}};

enum { LONG_CHECK_EVERY = 16 };

static void expect_some_rows_to_join(const step_facts *facts) {
    CPA_ASSERT_ORDER(facts->one_pass_rows, >, 0);
    CPA_ASSERT_ORDER(facts->one_pass_rows, <, facts->rows);
}

static void test_rows_join_the_transfers_that_the_last_rows_hide(void) {
    open_device();
    for (int causal = 0; causal < 2; causal++) {
        cpa_test_shape shape = LONG_ATTENTION;
        shape.q_heads = 384;
        shape.mask.causal = causal;
        int64_t lengths[2] = {19, (24 * cpa_test_ranks() + 7) * cpa_test_ranks()};
        cpa_placement placements[2] = {{CPA_SHARDED, 0}, {CPA_SHARDED, 1}};
        cpa_test_cache cache;
        cpa_test_cache_init(&cache, shape, 11, lengths, placements, 2);
        cache.check_every = LONG_CHECK_EVERY;
        cpa_test_chunk chunks[2] = {{0, 3, 16, CPA_PASS_KV}, {1, 0, lengths[1], CPA_PASS_KV}};
        step_facts facts;
        CU_ASSERT_EQUAL(run_step(&cache, chunks, 2, 64 * least_staging(&shape), &facts), 0);
        if (cpa_test_ranks() > 1) expect_some_rows_to_join(&facts);
        cpa_test_cache_destroy(&cache);
    }
    close_device();
}

/* Of the rows in two segments some see keys of the first alone, which the last attend leaves to the merge. Or the first
 * keys are sinks, and beside these rows go others by pass-Q, and of one rank. */
static void test_rows_join_transfers_in_several_segments(void) {
    open_device();
    const int64_t ranks = cpa_test_ranks(), lengths[3] = {1140 * ranks, 70, 40};
    const cpa_placement placements[3] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_ON_RANK, 0}};
    const cpa_test_chunk chunks[3] = {
        {0, 1005 * ranks, 135 * ranks, CPA_PASS_KV}, {1, 20, 50, CPA_PASS_Q}, {2, 0, 40, CPA_PASS_KV}};
    for (int windowed = 0; windowed < 2; windowed++) {
        cpa_test_shape shape = LONG_ATTENTION;
        if (windowed) shape.mask = (cpa_mask){.causal = 1, .sinks = 5, .window = 400 * ranks};
        cpa_test_cache cache;
        cpa_test_cache_init(&cache, shape, 12, lengths, placements, 3);
        cache.check_every = LONG_CHECK_EVERY;
        step_facts facts;
        CU_ASSERT_EQUAL(run_step(&cache, chunks, windowed ? 3 : 1, least_staging(&shape), &facts), 0);
        if (ranks > 1) {
            expect_some_rows_to_join(&facts);
            CU_ASSERT_EQUAL(facts.transfers, 2);
            CPA_ASSERT_ORDER(facts.open_rows, >, 0);
            CU_ASSERT_EQUAL(facts.open_rows == facts.rows, windowed); /* the merge joins what came home */
        }
        cpa_test_cache_destroy(&cache);
    }
    close_device();
}

static const cpa_test tests[] = {
    {"rows join the transfers that the last rows hide", test_rows_join_the_transfers_that_the_last_rows_hide},
    {"rows join transfers in several segments", test_rows_join_transfers_in_several_segments},
    {"a long sequence between short ones is right", test_a_long_sequence_between_short_ones_is_right},
    {"random steps are right in any staging", test_random_steps_are_right_in_any_staging},
    {"a shard is sent once to each peer and stays within staging",
     test_a_shard_is_sent_once_to_each_peer_and_stays_within_staging},
};
CPA_MPI_DEVICE_TEST_MAIN("pass-KV with all peers at once", tests)
