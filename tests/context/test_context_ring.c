/* Context attention of shards that lie on the host, through a ring of segments: on one rank and several, by pass-KV, by
 * pass-Q and with replicated rows; on the host with the bits of shards on the device. */
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "src/context/context.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { BLOCK = 16, SEQUENCES = 4 };

static cpa_device *device;
static cpa_stream *stream;

static const cpa_mask MASKS[] = {{.causal = 1}, {.causal = 1, .window = 700, .sinks = 3}};
enum { N_MASKS = sizeof MASKS / sizeof MASKS[0] };

static cpa_test_shape shape_of(cpa_dtype dtype, cpa_mask mask) {
    return (cpa_test_shape){.q_heads = 4,
                            .kv_heads = 2,
                            .k_dim = 32,
                            .v_dim = 16,
                            .block_size = BLOCK,
                            .interleave = 2 * BLOCK,
                            .dtype = dtype,
                            .head_major = 1,
                            .mask = mask};
}

/* A context whose ring is the least, or with `segments` 0 one without. */
static cpa_context *open_context(const cpa_test_shape *shape, int32_t segments, cpa_row_placement rows) {
    cpa_context_options options = cpa_test_context_options(shape, 0);
    cpa_kv_ring_options ring = {
        .size = sizeof ring, .shape = options.shape, .block_size = BLOCK, .segments = segments, .bytes = 0};
    cpa_context *context;
    cpa_error err;
    options.rows = rows;
    options.ring_segments = segments;
    options.ring_bytes = segments > 0 ? cpa_kv_ring_least_bytes(device, &ring) : 0;
    if (cpa_context_create(cpa_test_comm(), device, &options, &context, &err) != CPA_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return context;
}

static void *to_host(void *pool, int64_t bytes) {
    void *host;
    if (device->table->alloc_host(device, bytes, &host, NULL) != CPA_OK) abort();
    cpa_test_download(stream, host, pool, bytes);
    return host;
}

/* One layer of a planned step over the pages on the host; twice, as copies of the second run ahead. */
static void attend(cpa_context *context, const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n,
                   cpa_test_result *result) {
    cpa_test_layer layer;
    cpa_test_layer_upload(cache, cache->shape.mask, chunks, n, 1, stream, &layer);
    const cpa_kv_view on_device = layer.args.kv;
    layer.args.kv.k = to_host(on_device.k, cache->pool.k_bytes);
    layer.args.kv.v = to_host(on_device.v, cache->pool.v_bytes);
    for (int i = 0; i < 2; i++) CU_ASSERT_EQUAL(cpa_context_attend(context, &layer.args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_sync(context, stream), CPA_OK);
    device->table->free_host(device, layer.args.kv.k);
    device->table->free_host(device, layer.args.kv.v);
    layer.args.kv = on_device;
    cpa_test_layer_download(&layer, stream);
    *result = layer.result;
}

/* The bytes of this rank's shards of the chunks' sequences. */
static int64_t shard_bytes(const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n) {
    const cpa_test_shape *s = &cache->shape;
    int64_t blocks = 0;
    for (int64_t i = 0; i < n; i++) {
        const cpa_token_set own = cpa_tokens_on(cache->map, cache->placements[chunks[i].sequence], cache->rank);
        blocks += (cpa_tokens_before(cache->map, own, chunks[i].start + chunks[i].count) + BLOCK - 1) / BLOCK;
    }
    return blocks * BLOCK * s->kv_heads * (s->k_dim + s->v_dim) * cpa_dtype_bytes(s->dtype);
}

/* The chunks by one algorithm, with a ring and without. */
static void check_step(const cpa_test_cache *cache, cpa_test_chunk *chunks, int64_t n, cpa_algorithm algorithm) {
    cpa_context *rings = open_context(&cache->shape, 3, CPA_ROWS_OWNED);
    cpa_context *plain = open_context(&cache->shape, 0, CPA_ROWS_OWNED);
    cpa_test_result got, expected;
    cpa_context_stats stats;
    for (int64_t i = 0; i < n; i++) chunks[i].algorithm = algorithm;
    CU_ASSERT_EQUAL(cpa_test_plan(rings, cache, chunks, n), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_plan(plain, cache, chunks, n), CPA_OK);
    attend(rings, cache, chunks, n, &got);
    CU_ASSERT_EQUAL(cpa_test_attend(plain, cache, cache->shape.mask, chunks, n, stream, &expected), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(cache, cache->shape.mask, chunks, n, &got), 0);
    CU_ASSERT(cpa_test_same_bits_or_right(cache, cache->shape.mask, chunks, n, &expected, &got));
    CU_ASSERT_EQUAL(cpa_context_get_stats(rings, &stats, sizeof stats), CPA_OK);
    CU_ASSERT_EQUAL(stats.keys_attended > 0, stats.ring.bytes_read > 0);
    if (cpa_test_ranks() == 1 && !cache->shape.mask.window)
        CU_ASSERT_EQUAL(stats.ring.bytes_read, 2 * shard_bytes(cache, chunks, n));
    cpa_test_result_destroy(&expected);
    cpa_test_result_destroy(&got);
    cpa_context_destroy(plain);
    cpa_context_destroy(rings);
}

/* Prompts, decode and a few rows together, sharded and on one rank, by either algorithm. */
static void shards_on_the_host_have_the_results_of_shards_on_the_device(void) {
    const int64_t round = 1000 * (int64_t)cpa_test_ranks();
    const int64_t lengths[SEQUENCES] = {3 * round + 7, 2 * round, 1900, round + 1};
    const cpa_placement placements[SEQUENCES] = {
        {CPA_SHARDED, 0}, {CPA_SHARDED, 1}, {CPA_ON_RANK, 1}, {CPA_SHARDED, 2}};
    const int64_t counts[SEQUENCES] = {150, 1, 70, 6};
    cpa_test_device_open(1, &device, &stream);
    for (int m = 0; m < N_MASKS; m++) {
        cpa_test_cache cache;
        cpa_test_chunk chunks[SEQUENCES];
        cpa_test_cache_init(&cache, shape_of(m ? CPA_BF16 : CPA_F32, MASKS[m]), 17, lengths, placements, SEQUENCES);
        for (int64_t i = 0; i < SEQUENCES; i++)
            chunks[i] = (cpa_test_chunk){i, lengths[i] - counts[i], counts[i], CPA_PASS_KV};
        check_step(&cache, chunks, SEQUENCES, CPA_PASS_KV);
        check_step(&cache, chunks, SEQUENCES, CPA_PASS_Q);
        check_step(&cache, chunks + 1, 1, CPA_PASS_Q); /* a step that decodes */
        cpa_test_cache_destroy(&cache);
    }
    cpa_test_device_close(device, stream);
}

/* Two chunks of a sequence, the second of which attends what is new of the first. */
static void chunks_of_one_sequence_see_each_other(void) {
    const int64_t length = 2500 * (int64_t)cpa_test_ranks();
    cpa_test_device_open(1, &device, &stream);
    cpa_test_cache cache;
    cpa_test_chunk chunks[] = {{0, length - 200, 150, CPA_PASS_KV}, {0, length - 50, 50, CPA_PASS_KV}};
    cpa_test_cache_init(&cache, shape_of(CPA_F32, MASKS[0]), 5, &length, NULL, 1);
    cpa_context *context = open_context(&cache.shape, 2, CPA_ROWS_OWNED);
    cpa_test_result got;
    chunks[1].algorithm = CPA_PASS_Q;
    CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, chunks, 2), CPA_OK);
    attend(context, &cache, chunks, 2, &got);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, MASKS[0], chunks, 2, &got), 0);
    cpa_test_result_destroy(&got);
    cpa_context_destroy(context);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

static void expect_refusal(cpa_context_options options, const char *line) {
    cpa_context *none = NULL;
    cpa_error err;
    CU_ASSERT_NOT_EQUAL(cpa_context_create(cpa_test_comm(), device, &options, &none, &err), CPA_OK);
    if (!strstr(err.message, line)) printf("\n    '%s', expected '%s'", err.message, line);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, line));
    CU_ASSERT_PTR_NULL(none);
}

static void options_that_do_not_go_with_a_ring_are_refused(void) {
    cpa_test_device_open(1, &device, &stream);
    const cpa_test_shape shape = shape_of(CPA_F32, MASKS[0]);
    cpa_context_options options = cpa_test_context_options(&shape, 0);
    const cpa_row_form form = {.k_dim = 16};
    options.ring_bytes = -1;
    expect_refusal(options, "context: ring_bytes: found -1, expected 0 (none) or more");
    options.ring_bytes = 1;
    expect_refusal(options, "context: ring_bytes: found 1, expected at least ");
    options.ring_segments = 9;
    expect_refusal(options, "ring: 9 segments, expected 2..8");
    options.forms = &form;
    options.n_forms = 1;
    expect_refusal(options, "context: 1 forms and an indexer of 0 heads over caches on the host, expected neither");
    cpa_context *context = open_context(&shape, 2, CPA_ROWS_OWNED);
    const cpa_context_limits limits = {.size = sizeof limits, .sequences = 1, .tokens = 100, .num_blocks = 9};
    CU_ASSERT_EQUAL(cpa_context_reserve(context, &limits), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(cpa_context_error(context), "context: a step cannot be reserved over caches on the host"));
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static const cpa_test TESTS[] = {
    {"shards on the host have the results of shards on the device",
     shards_on_the_host_have_the_results_of_shards_on_the_device},
    {"chunks of one sequence see each other", chunks_of_one_sequence_see_each_other},
    {"options that do not go with a ring are refused", options_that_do_not_go_with_a_ring_are_refused},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "context ring", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]))
