/* Context attention over all ranks of the job, against float64 and against itself. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "kernels/host/cache/quantise.h"
#include "src/context/context_internal.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

static const cpa_mask CAUSAL = {.causal = 1};
static const cpa_mask FULL = {.causal = 0};

static const cpa_test_shape SMALL = {
    .q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .block_size = 16, .interleave = 16, .mask = {.causal = 1}};

/* Local tokens that no least segment exceeds. */
static const int64_t LONG_TOKENS = 1024;

static cpa_device *device;
static cpa_stream *stream;

/* The least staging that a context of this shape accepts: two segments to send, and two from the peer, or from each
 * where all peers come at once. */
static int64_t least_staging(const cpa_test_shape *shape) {
    int64_t token = (int64_t)shape->kv_heads * (shape->k_dim + shape->v_dim) * cpa_dtype_bytes(shape->dtype);
    int64_t split = cpa_attend_split_tokens(device), peers = cpa_test_ranks() > 1 ? cpa_test_ranks() - 1 : 1;
    return split > 1 ? 4 * split * token : 2 * (1 + peers) * 1024 * token;
}

static void force(cpa_test_chunk *chunks, int64_t n, cpa_algorithm algorithm) {
    for (int64_t i = 0; i < n; i++) chunks[i].algorithm = algorithm;
}

/* One step and layer. */
static cpa_test_result run_on(cpa_context *context, const cpa_test_cache *cache, const cpa_test_chunk *chunks,
                              int64_t n) {
    cpa_test_result result;
    CU_ASSERT_EQUAL(cpa_test_plan(context, cache, chunks, n), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_attend(context, cache, cache->shape.mask, chunks, n, stream, &result), CPA_OK);
    return result;
}

/* The same on a context of its own. */
static cpa_test_result run_step(const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n, int64_t staging,
                                cpa_context_stats *stats) {
    cpa_context *context = cpa_test_context(device, &cache->shape, staging);
    cpa_test_result result = run_on(context, cache, chunks, n);
    if (stats) cpa_context_get_stats(context, stats, sizeof *stats);
    cpa_context_destroy(context);
    return result;
}

/* Runs the chunks as they are, all by pass-KV and all by pass-Q: right against float64, and the same bits where the
 * back end promises them. */
static void check_step(const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n, int64_t staging) {
    cpa_context *context = cpa_test_context(device, &cache->shape, staging);
    cpa_test_chunk forced[CPA_TEST_MAX_SEQUENCES];
    memcpy(forced, chunks, (size_t)n * sizeof *chunks);
    cpa_test_result mixed = run_on(context, cache, chunks, n);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(cache, cache->shape.mask, chunks, n, &mixed), 0);
    for (cpa_algorithm algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        force(forced, n, algorithm);
        cpa_test_result result = run_on(context, cache, forced, n);
        CU_ASSERT(cpa_test_same_bits_or_right(cache, cache->shape.mask, forced, n, &result, &mixed));
        cpa_test_result_destroy(&result);
    }
    cpa_test_result_destroy(&mixed);
    cpa_context_destroy(context);
}

static cpa_mask random_mask(void) {
    switch (cpa_test_random_below(4)) {
        case 0: return FULL;
        case 1:
            return (cpa_mask){
                .causal = 1, .sinks = (int32_t)cpa_test_random_below(6), .window = 1 + cpa_test_random_below(150)};
        default: return CAUSAL;
    }
}

static cpa_test_shape random_shape(void) {
    static const int32_t heads[4][2] = {{4, 2}, {4, 4}, {3, 1}, {8, 2}};
    static const int32_t dims[4][2] = {{32, 32}, {24, 40}, {64, 16}, {16, 64}};
    const int32_t *h = heads[cpa_test_random_below(4)], *d = dims[cpa_test_random_below(4)];
    cpa_test_shape shape = {.q_heads = h[0], .kv_heads = h[1], .k_dim = d[0], .v_dim = d[1]};
    shape.block_size = 1 << cpa_test_random_below(5);
    shape.interleave = 1 << cpa_test_random_below(7);
    shape.dtype = cpa_test_random_below(2) ? CPA_BF16 : CPA_F32;
    shape.head_major = (int)cpa_test_random_below(2);
    shape.mask = random_mask();
    return shape;
}

/* Decode tokens, short prompts of fewer blocks than ranks, and chunks of longer sequences that start anywhere; sharded
 * over the ranks, or on one. */
static int64_t random_chunks(cpa_test_chunk *chunks, int64_t *lengths, cpa_placement *placements) {
    int64_t n = 1 + cpa_test_random_below(5);
    for (int64_t i = 0; i < n; i++) {
        int64_t count = cpa_test_random_below(3) == 0 ? 1 : 1 + cpa_test_random_below(70);
        int64_t start = cpa_test_random_below(3) == 0 ? 0 : cpa_test_random_below(500);
        placements[i] = cpa_test_random_placement();
        lengths[i] = start + count;
        chunks[i] = (cpa_test_chunk){i, start, count, cpa_test_random_below(2) ? CPA_PASS_KV : CPA_PASS_Q};
    }
    return n;
}

static void test_random_steps_are_right_and_the_same_bits_by_both_algorithms(void) {
    cpa_test_device_open(1, &device, &stream);
    for (uint64_t seed = 1; seed <= 24; seed++) {
        cpa_test_random_seed(seed);
        cpa_test_cache cache;
        cpa_test_chunk chunks[CPA_TEST_MAX_SEQUENCES];
        int64_t lengths[CPA_TEST_MAX_SEQUENCES];
        cpa_placement placements[CPA_TEST_MAX_SEQUENCES];
        cpa_test_shape shape = random_shape();
        int64_t n = random_chunks(chunks, lengths, placements);
        cpa_test_cache_init(&cache, shape, seed, lengths, placements, n);
        check_step(&cache, chunks, n, least_staging(&shape));
        cpa_test_cache_destroy(&cache);
    }
    cpa_test_device_close(device, stream);
}

/* So many rows a rank that their states go back in parts: of a chunk, and of chunks of which the first is odd, beside a
 * decode token and a sequence of which some ranks have no key. */
static void test_states_of_long_chunks_come_back_in_parts(void) {
    enum { N = 4 };
    const int64_t most = 256 * cpa_test_ranks();
    const int64_t lengths[N] = {most + 75, most + 16, 90, 20}, start = cpa_test_ranks() > 1 ? 333 : 33;
    const cpa_test_chunk chunks[N] = {{0, 70, most + 5, CPA_PASS_Q},
                                      {1, start, lengths[1] - start, CPA_PASS_Q},
                                      {2, 89, 1, CPA_PASS_Q},
                                      {3, 0, 20, CPA_PASS_KV}};
    cpa_test_cache cache;
    cpa_test_device_open(1, &device, &stream);
    cpa_test_cache_init(&cache, SMALL, 77, lengths, NULL, N);
    check_step(&cache, chunks, 1, least_staging(&SMALL));
    check_step(&cache, chunks, N, least_staging(&SMALL));
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

/* NaN in a query and in keys, an infinite key, and values of the last token, which only that one sees (where tensor
 * cores need finite ones, none): in a prefill, a chunk over a prefix, two decode tokens and whole sequences. */
static void test_what_is_not_finite_reaches_the_rows_that_see_it_alone(void) {
    enum { N = 5 };
    static const int64_t lengths[N] = {300, 700, 650, 90, 400};
    static const cpa_placement placements[N] = {
        {CPA_SHARDED, 0}, {CPA_SHARDED, 1}, {CPA_SHARDED, 2}, {CPA_SHARDED, 0}, {CPA_ON_RANK, 0}};
    static const cpa_test_chunk chunks[N] = {{0, 0, 300, CPA_PASS_KV},
                                             {1, 640, 60, CPA_PASS_Q},
                                             {2, 649, 1, CPA_PASS_Q},
                                             {3, 89, 1, CPA_PASS_Q},
                                             {4, 350, 50, CPA_PASS_KV}};
    cpa_test_device_open(1, &device, &stream);
    for (int dtype = CPA_F32; dtype <= CPA_BF16; dtype++) {
        cpa_test_cache cache;
        cpa_test_shape shape = SMALL;
        shape.dtype = (cpa_dtype)dtype;
        cpa_test_cache_init(&cache, shape, 5, lengths, placements, N);
        for (int64_t i = 0; i < N; i++) {
            cpa_case_sequence *s = &cache.sequences[i];
            const int64_t k_row = (int64_t)shape.kv_heads * shape.k_dim, last = lengths[i] - 1;
            if (i != 3) s->k[lengths[i] / 2 * k_row + 1] = i % 2 ? INFINITY : NAN;
            s->q[(last - (i == 2 ? 0 : 5)) * shape.q_heads * shape.k_dim] = NAN;
            if (dtype == CPA_F32 && i != 3) s->v[last * shape.kv_heads * shape.v_dim] = NAN;
            cpa_test_store_shard(&cache.pool, s, cache.map, cpa_tokens_on(cache.map, cache.placements[i], cache.rank),
                                 lengths[i], cache.tables[i]);
        }
        check_step(&cache, chunks, N, least_staging(&shape));
        cpa_test_cache_destroy(&cache);
    }
    cpa_test_device_close(device, stream);
}

/* A long sequence between short ones, so that its shards are cut into several segments: where all peers come at once,
 * into more of them than there are peers, however much fits. */
typedef struct long_step {
    cpa_test_cache cache;
    cpa_test_chunk chunks[4];
} long_step;

static void long_step_init(long_step *step, cpa_test_shape shape) {
    int64_t shards = cpa_attend_split_tokens(device) > 1 || cpa_test_ranks() < 3 ? 2 : cpa_test_ranks();
    int64_t length = LONG_TOKENS * cpa_test_ranks() * (2 * shards + 1) / 2 + 37;
    int64_t lengths[4] = {21, length, 3, 130};
    cpa_placement placements[4] = {{CPA_SHARDED, 0}, {CPA_SHARDED, 1}, {CPA_SHARDED, 2}, {CPA_SHARDED, 0}};
    cpa_test_cache_init(&step->cache, shape, 7, lengths, placements, 4);
    step->chunks[0] = (cpa_test_chunk){0, 5, 16, CPA_PASS_KV};
    step->chunks[1] = (cpa_test_chunk){1, length - 45, 45, CPA_PASS_KV};
    step->chunks[2] = (cpa_test_chunk){2, 0, 3, CPA_PASS_Q};
    step->chunks[3] = (cpa_test_chunk){3, 128, 2, CPA_PASS_KV};
}

static void test_long_shards_travel_in_segments_of_bounded_staging(void) {
    cpa_test_device_open(1, &device, &stream);
    static const cpa_mask masks[] = {{.causal = 1}, {.causal = 0}, {.causal = 1, .sinks = 20, .window = 1000}};
    for (int m = 0; m < 3; m++) {
        cpa_test_shape shape = SMALL;
        shape.mask = masks[m];
        shape.dtype = m == 1 ? CPA_BF16 : CPA_F32;
        long_step step;
        long_step_init(&step, shape);
        int64_t least = least_staging(&shape);
        check_step(&step.cache, step.chunks, 4, least);

        cpa_context_stats tight, ample;
        cpa_test_result by_tight = run_step(&step.cache, step.chunks, 4, least, &tight);
        cpa_test_result by_ample = run_step(&step.cache, step.chunks, 4, 16 * least, &ample);
        CU_ASSERT(cpa_test_same_bits_or_right(&step.cache, shape.mask, step.chunks, 4, &by_tight, &by_ample));
        CPA_ASSERT_ORDER(tight.staging_bytes, <=, least);
        int64_t most[2] = {tight.staging_bytes, ample.staging_bytes}; /* a rank without rows only sends */
        MPI_Allreduce(MPI_IN_PLACE, most, 2, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
        if (cpa_test_ranks() > 1 && masks[m].window == 0) {
            CPA_ASSERT_ORDER(most[0], >, least / 2);
            CPA_ASSERT_ORDER(most[1], >, most[0]);
        }
        cpa_test_result_destroy(&by_tight);
        cpa_test_result_destroy(&by_ample);
        cpa_test_cache_destroy(&step.cache);
    }
    cpa_test_device_close(device, stream);
}

static void test_a_window_leaves_what_nobody_sees_where_it_is(void) {
    cpa_test_device_open(1, &device, &stream);
    int64_t length = LONG_TOKENS * cpa_test_ranks() * 3;
    cpa_test_chunk chunk = {0, length - 16 * cpa_test_ranks(), 16 * cpa_test_ranks(), CPA_PASS_KV};
    cpa_test_cache cache;
    cpa_context_stats full, window;
    cpa_test_cache_init(&cache, SMALL, 3, &length, NULL, 1);
    cpa_test_result result = run_step(&cache, &chunk, 1, 0, &full);
    cpa_test_result_destroy(&result);
    cache.shape.mask = (cpa_mask){.causal = 1, .sinks = 4, .window = 64};
    result = run_step(&cache, &chunk, 1, 0, &window);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, cache.shape.mask, &chunk, 1, &result), 0);
    CU_ASSERT(cpa_test_ranks() == 1 ? window.bytes_sent == 0 : window.bytes_sent * 2 < full.bytes_sent);
    cpa_test_result_destroy(&result);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

/* Prefill of one sequence cut at `cuts`, on one context; the rows in the order of one shot. */
static void check_chunked(cpa_test_cache *cache, const cpa_test_result *whole, const int64_t *cuts, int n_cuts,
                          cpa_algorithm algorithm) {
    cpa_context *context = cpa_test_context(device, &cache->shape, 0);
    int64_t row_bytes = (int64_t)cache->shape.q_heads * cache->shape.v_dim * cpa_dtype_bytes(cache->shape.dtype);
    int64_t at = 0;
    for (int i = 0; i + 1 < n_cuts; i++) {
        cpa_test_chunk chunk = {0, cuts[i], cuts[i + 1] - cuts[i], algorithm};
        cpa_test_result part;
        CU_ASSERT_EQUAL(cpa_test_plan(context, cache, &chunk, 1), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_attend(context, cache, cache->shape.mask, &chunk, 1, stream, &part), CPA_OK);
        CPA_ASSERT_ORDER(at + part.rows, <=, whole->rows);
        cpa_test_result same_rows = {.rows = part.rows,
                                     .out_bytes = part.out_bytes,
                                     .lse_bytes = part.lse_bytes,
                                     .out = (char *)whole->out + at * row_bytes,
                                     .lse = whole->lse + at * cache->shape.q_heads};
        CU_ASSERT(cpa_test_same_bits_or_right(cache, cache->shape.mask, &chunk, 1, &part, &same_rows));
        at += part.rows;
        cpa_test_result_destroy(&part);
    }
    CU_ASSERT_EQUAL(at, whole->rows);
    cpa_context_destroy(context);
}

static void test_chunked_prefill_gives_the_bits_of_one_shot(void) {
    cpa_test_device_open(1, &device, &stream);
    const int64_t length = 333, cuts[] = {0, 1, 40, 47, 128, 129, 300, 333};
    const int n_cuts = sizeof cuts / sizeof *cuts;
    static const cpa_mask masks[] = {{.causal = 1}, {.causal = 1, .sinks = 4, .window = 90}};
    for (int m = 0; m < 2; m++) {
        cpa_test_shape shape = SMALL;
        shape.mask = masks[m];
        shape.interleave = 32;
        cpa_test_cache cache;
        cpa_test_cache_init(&cache, shape, 11, &length, NULL, 1);
        cpa_test_chunk all = {0, 0, length, CPA_PASS_KV};
        cpa_test_result whole = run_step(&cache, &all, 1, 0, NULL);
        CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, shape.mask, &all, 1, &whole), 0);
        check_chunked(&cache, &whole, cuts, n_cuts, CPA_PASS_KV);
        check_chunked(&cache, &whole, cuts, n_cuts, CPA_PASS_Q);
        cpa_test_result_destroy(&whole);
        cpa_test_cache_destroy(&cache);
    }
    cpa_test_device_close(device, stream);
}

/* A chunk that goes part by one algorithm and part by the other, whichever comes first, beside a decode token: the bits
 * that it has by one. */
static void test_parts_of_a_chunk_may_go_each_its_way(void) {
    enum { PARTS = 3, N = PARTS + 1 };
    const int64_t lengths[2] = {700, 90}, start = 401, cuts[PARTS + 1] = {start, 470, 643, 700};
    cpa_test_device_open(1, &device, &stream);
    for (int m = 0; m < 2; m++) {
        cpa_test_shape shape = SMALL;
        cpa_test_cache cache;
        cpa_test_chunk whole[2] = {{0, start, lengths[0] - start, CPA_PASS_KV}, {1, 89, 1, CPA_PASS_Q}}, parts[N];
        shape.mask = m ? (cpa_mask){.causal = 1, .sinks = 4, .window = 90} : CAUSAL;
        cpa_test_cache_init(&cache, shape, 21, lengths, NULL, 2);
        cpa_test_result one = run_step(&cache, whole, 2, 0, NULL);
        for (int first = CPA_PASS_KV; first <= CPA_PASS_Q; first++) {
            for (int p = 0; p < PARTS; p++)
                parts[p] =
                    (cpa_test_chunk){0, cuts[p], cuts[p + 1] - cuts[p], (first + p) % 2 ? CPA_PASS_Q : CPA_PASS_KV};
            parts[PARTS] = whole[1];
            cpa_test_result both = run_step(&cache, parts, N, 0, NULL);
            CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, shape.mask, parts, N, &both), 0);
            CU_ASSERT(cpa_test_same_bits_or_right(&cache, shape.mask, whole, 2, &one, &both));
            cpa_test_result_destroy(&both);
        }
        cpa_test_result_destroy(&one);
        cpa_test_cache_destroy(&cache);
    }
    cpa_test_device_close(device, stream);
}

/* What is wrong with the codes of a layer, beside the result in the dtype of the queries; behind them nothing may be
 * written. Another kernel may have given that one on a device, with probabilities that are rounded beside other maxima. */
static int64_t wrong_codes(const cpa_test_shape *shape, const cpa_test_result *plain, const cpa_test_result *codes,
                           float scale) {
    const int64_t n = plain->rows * shape->q_heads * shape->v_dim;
    const int exact = shape->dtype == CPA_F32 && cpa_test_promises_bits();
    const float least = scale / 256 + (shape->dtype == CPA_F32 ? 0 : 0x1p-8f);
    float *want = cpa_test_poisoned(n, sizeof *want);
    int64_t wrong = 0;
    cpa_widen(want, plain->out, shape->dtype, n);
    for (int64_t i = 0; i < codes->out_bytes; i++) {
        const uint8_t code = ((const uint8_t *)codes->out)[i];
        if (i >= n)
            wrong += code != 0xff;
        else if (exact)
            wrong += code != cpa_to_e4m3(want[i] * (1 / scale));
        else
            wrong += !(fabsf(cpa_from_e4m3(code) * scale - want[i]) <= fabsf(want[i]) / 12 + least);
    }
    free(want);
    return wrong;
}

/* A prefill, a chunk over a prefix and a decode token, by both algorithms, and a step of decode alone. */
static void test_results_may_be_in_fp8(void) {
    enum { N = 3 };
    const int64_t lengths[N] = {300, 411, 90};
    const float scale = 0.013f;
    cpa_test_device_open(1, &device, &stream);
    for (int run = 0; run < 6; run++) {
        const cpa_algorithm algorithm = run % 3 == 0 ? CPA_PASS_KV : CPA_PASS_Q;
        const int64_t starts[N] = {run % 3 == 2 ? 299 : 0, run % 3 == 2 ? 410 : 340, 89};
        cpa_test_shape shape = SMALL;
        cpa_test_cache cache;
        cpa_test_chunk chunks[N];
        cpa_test_layer layer;
        shape.dtype = run < 3 ? CPA_F32 : CPA_BF16;
        for (int i = 0; i < N; i++) chunks[i] = (cpa_test_chunk){i, starts[i], lengths[i] - starts[i], algorithm};
        cpa_test_cache_init(&cache, shape, 31, lengths, NULL, N);
        cpa_context *context = cpa_test_context(device, &shape, 0);
        cpa_test_result plain = run_on(context, &cache, chunks, N);
        float *device_scale = cpa_test_upload(stream, &scale, sizeof scale);
        cpa_test_layer_upload(&cache, shape.mask, chunks, N, run % 2, stream, &layer);
        layer.args.out_scale = device_scale;
        CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, chunks, N), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_attend(context, &layer.args, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
        cpa_test_layer_download(&layer, stream);
        CU_ASSERT_EQUAL(wrong_codes(&shape, &plain, &layer.result, scale), 0);
        cpa_test_free(stream, device_scale);
        cpa_test_result_destroy(&layer.result);
        cpa_test_result_destroy(&plain);
        cpa_context_destroy(context);
        cpa_test_cache_destroy(&cache);
    }
    cpa_test_device_close(device, stream);
}

static void test_rank_local_sequences_exchange_nothing(void) {
    cpa_test_device_open(1, &device, &stream);
    const int64_t lengths[3] = {400, 18, 77};
    const cpa_placement placements[3] = {{CPA_ON_RANK, 0}, {CPA_ON_RANK, 1}, {CPA_ON_RANK, 1}};
    const cpa_test_chunk chunks[3] = {{0, 399, 1, CPA_PASS_Q}, {1, 0, 18, CPA_PASS_KV}, {2, 40, 37, CPA_PASS_Q}};
    const cpa_mask masks[] = {{.causal = 1}, {.causal = 1, .window = 30, .sinks = 5}};
    cpa_context *context = cpa_test_context(device, &SMALL, 0);
    cpa_test_cache cache;
    cpa_test_cache_init(&cache, SMALL, 3, lengths, placements, 3);
    CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, chunks, 3), CPA_OK);
    for (int i = 0; i < 2; i++) {
        cpa_test_result result;
        CU_ASSERT_EQUAL(cpa_test_attend(context, &cache, masks[i], chunks, 3, stream, &result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, masks[i], chunks, 3, &result), 0);
        cpa_test_result_destroy(&result);
    }
    cpa_context_stats stats;
    cpa_context_get_stats(context, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.bytes_sent, 0);
    CU_ASSERT_EQUAL(stats.exposed_comm_s, 0);
    CU_ASSERT_EQUAL(stats.chunks_pass_kv + stats.chunks_pass_q, 0);
    cpa_test_cache_destroy(&cache);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static void test_layers_of_one_plan_may_differ_in_cache_and_mask(void) {
    cpa_test_device_open(1, &device, &stream);
    const int64_t lengths[3] = {400, 18, 77};
    const cpa_placement placements[3] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_SHARDED, 2}};
    const cpa_test_chunk chunks[3] = {{0, 310, 90, CPA_PASS_KV}, {1, 17, 1, CPA_PASS_Q}, {2, 0, 77, CPA_PASS_KV}};
    static const cpa_mask masks[] = {{.causal = 1}, {.causal = 1}, {.causal = 1, .window = 50}, {.causal = 0}};
    cpa_context *context = cpa_test_context(device, &SMALL, 0);
    cpa_test_cache caches[4];
    for (int layer = 0; layer < 4; layer++) {
        cpa_test_cache_init(&caches[layer], SMALL, 20 + (uint64_t)layer, lengths, placements, 3);
    }
    CU_ASSERT_EQUAL(cpa_test_plan(context, &caches[0], chunks, 3), CPA_OK);
    for (int layer = 0; layer < 4; layer++) {
        cpa_test_result result;
        CU_ASSERT_EQUAL(cpa_test_attend(context, &caches[layer], masks[layer], chunks, 3, stream, &result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_count_wrong(&caches[layer], masks[layer], chunks, 3, &result), 0);
        cpa_test_result_destroy(&result);
    }
    cpa_context_stats stats;
    cpa_context_get_stats(context, &stats, sizeof stats);
    CU_ASSERT_EQUAL(stats.chunks_pass_kv, 8);
    CU_ASSERT_EQUAL(stats.chunks_pass_q, 4);
    CU_ASSERT(stats.attend_s > 0 && stats.exposed_comm_s >= 0);
    for (int layer = 0; layer < 4; layer++) cpa_test_cache_destroy(&caches[layer]);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

/* A large step, an empty one, a single decode token, and the large one again. */
static void test_a_context_goes_from_step_to_step(void) {
    cpa_test_device_open(1, &device, &stream);
    const int64_t lengths[2] = {260, 5};
    const cpa_test_chunk large[2] = {{0, 100, 160, CPA_PASS_KV}, {1, 0, 5, CPA_PASS_Q}}, decode = {1, 4, 1, CPA_PASS_Q};
    cpa_context *context = cpa_test_context(device, &SMALL, 0);
    cpa_test_cache cache;
    cpa_test_cache_init(&cache, SMALL, 5, lengths, NULL, 2);
    const struct {
        const cpa_test_chunk *chunks;
        int64_t n;
    } steps[4] = {{large, 2}, {NULL, 0}, {&decode, 1}, {large, 2}};
    cpa_test_result results[4];
    for (int i = 0; i < 4; i++) {
        CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, steps[i].chunks, steps[i].n), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_attend(context, &cache, CAUSAL, steps[i].chunks, steps[i].n, stream, &results[i]),
                        CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, CAUSAL, steps[i].chunks, steps[i].n, &results[i]), 0);
    }
    CU_ASSERT(cpa_test_same_bits_or_right(&cache, CAUSAL, large, 2, &results[0], &results[3]));
    CU_ASSERT_EQUAL(results[1].rows, 0);
    for (int i = 0; i < 4; i++) cpa_test_result_destroy(&results[i]);
    cpa_test_cache_destroy(&cache);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

/* Decode steps whose states are too long for the rooms of a transport, and others that are not, in turn. Items of 32
 * rows, which are no decode to the kernels. */
static void test_decode_steps_alternate_between_stored_and_sent_states(void) {
    enum { MANY = 12, FEW = 3 };
    static const cpa_test_shape wide = {.q_heads = 128,
                                        .kv_heads = 4,
                                        .k_dim = 256,
                                        .v_dim = 256,
                                        .block_size = 16,
                                        .interleave = 16,
                                        .dtype = CPA_BF16,
                                        .mask = {.causal = 1}};
    static const int64_t steps[] = {MANY, FEW, MANY, FEW, FEW};
    int64_t lengths[MANY];
    cpa_placement placements[MANY] = {{CPA_SHARDED, 0}}; /* one rank has the last token of all */
    cpa_test_chunk chunks[MANY];
    for (int i = 0; i < MANY; i++) {
        lengths[i] = 70;
        chunks[i] = (cpa_test_chunk){i, lengths[i] - 1, 1, CPA_PASS_Q};
    }
    cpa_test_device_open(1, &device, &stream);
    cpa_context *context = cpa_test_context(device, &wide, 0);
    cpa_test_cache cache;
    cpa_test_cache_init(&cache, wide, 6, lengths, placements, MANY);
    const int has_peer_buffers = cpa_test_ranks() > 1 && context->ops.transport->table->peer_buffer;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        cpa_test_result result;
        CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, chunks, steps[i]), CPA_OK);
        CU_ASSERT_EQUAL(context->lanes[0].q.direct, has_peer_buffers && steps[i] == FEW);
        CU_ASSERT_EQUAL(cpa_test_attend(context, &cache, CAUSAL, chunks, steps[i], stream, &result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, CAUSAL, chunks, steps[i], &result), 0);
        cpa_test_result_destroy(&result);
    }
    cpa_test_cache_destroy(&cache);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static void expect_create_refusal(cpa_context_options options, const char *expected) {
    cpa_context *context = NULL;
    cpa_error err = {.message = ""};
    CU_ASSERT_EQUAL(cpa_context_create(cpa_test_comm(), device, &options, &context, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(context);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
    if (!strstr(err.message, expected)) printf("got: %s\n", err.message);
}

static void test_impossible_options_are_refused_on_all_ranks(void) {
    cpa_test_device_open(1, &device, &stream);
    const cpa_context_options good = cpa_test_context_options(&SMALL, 0);
    cpa_context_options bad = good;
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);

    bad.shape.k_scale = 0.5f;
    expect_create_refusal(bad, "k_scale is 0.5 and v_scale is 0 for a cache of fp32, expected none");
    bad = good;
    char numbers[96];
    bad.staging_bytes = least_staging(&SMALL) - 1;
    snprintf(numbers, sizeof numbers, "staging_bytes: found %lld, expected at least %lld", (long long)bad.staging_bytes,
             (long long)bad.staging_bytes + 1);
    expect_create_refusal(bad, numbers);
    bad = good;
    if (rank == cpa_test_ranks() - 1) bad.shape.q_heads = 5; /* one rank is enough */
    snprintf(numbers, sizeof numbers, "rank %d: context: q_heads is 5, expected a positive multiple",
             cpa_test_ranks() - 1);
    expect_create_refusal(bad, numbers);
    bad = good;
    bad.interleave = 24;
    expect_create_refusal(bad, "interleave 24");
    bad = good;
    bad.shape.k_dim = 0;
    expect_create_refusal(bad, "k_dim is 0");
    bad = good;
    bad.block_size = 24;
    expect_create_refusal(bad, "block_size is 24");
    bad = good;
    bad.size = 8;
    expect_create_refusal(bad, "struct size is 8");
    cpa_test_device_close(device, stream);
}

static void expect_plan_refusal(cpa_context *context, cpa_context_chunk chunk, const char *expected) {
    CU_ASSERT_EQUAL(cpa_context_plan(context, &chunk, 1), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(context), expected));
}

/* Stands for a back end that has no kernel for the mask of an attend. */
static cpa_status attend_nothing(const cpa_device *of, const char *where, const cpa_attention_shape *shape,
                                 const cpa_mask *mask, cpa_error *err) {
    (void)of, (void)shape;
    return mask ? cpa_fail(err, CPA_UNSUPPORTED, "%s: no kernel for this mask", where) : CPA_OK;
}

static void test_impossible_chunks_and_tensors_are_refused(void) {
    cpa_test_device_open(1, &device, &stream);
    int32_t table[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const cpa_context_chunk good = {
        .start = 0, .count = 16 * cpa_test_ranks(), .algorithm = CPA_PASS_KV, .block_table = table};
    cpa_context *context = cpa_test_context(device, &SMALL, 0);
    cpa_context_args args = {.size = sizeof args, .mask = CAUSAL};
    CU_ASSERT_EQUAL(cpa_context_attend(context, &args, stream), CPA_INVALID); /* nothing planned */

    cpa_context_chunk bad = good;
    bad.start = -5;
    expect_plan_refusal(context, bad, "[-5, +");
    bad = good;
    bad.count = 0;
    expect_plan_refusal(context, bad, "[0, +0)");
    bad = good;
    bad.count = 5000;
    expect_plan_refusal(context, bad, "1..4096");
    bad = good;
    bad.placement.rank = cpa_test_ranks();
    expect_plan_refusal(context, bad, "has a placement of kind 0");
    bad = good;
    bad.algorithm = CPA_AUTO;
    expect_plan_refusal(context, bad, "has algorithm 0");
    bad = good;
    bad.block_table = NULL;
    expect_plan_refusal(context, bad, "no block table");
    cpa_context_chunk many[2] = {good, good};
    many[0].count = many[1].count = 2049;
    CU_ASSERT_EQUAL(cpa_context_plan(context, many, 2), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(context), "4098 new tokens"));

    CU_ASSERT_EQUAL(cpa_context_plan(context, &good, 1), CPA_OK);
    cpa_kv_fixture pool;
    cpa_kv_fixture_init(&pool, CPA_F32, 8, 16, 2, 32, 32, 0);
    cpa_kv_view view = cpa_kv_fixture_upload(&pool, stream);
    args.kv = view;
    args.kv.kv_heads = 1;
    CU_ASSERT_EQUAL(cpa_context_attend(context, &args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(context), "the cache has kv_heads 1, but the context has"));
    CU_ASSERT_EQUAL(cpa_context_plan(context, &good, 1), CPA_OK);
    args.kv = view;
    args.kv.num_blocks = 0;
    CU_ASSERT_EQUAL(cpa_context_attend(context, &args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(context), "block 0 of a cache of 0"));

    cpa_operator_table table_without_attend = *device->operators;
    const cpa_operator_table *own_table = device->operators;
    table_without_attend.attend_supported = attend_nothing;
    device->operators = &table_without_attend;
    args.kv = view;
    CU_ASSERT_EQUAL(cpa_context_plan(context, &good, 1), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(context, &args, stream), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(context), "attend: no kernel for this mask"));
    device->operators = own_table;
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&pool);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static const cpa_test TESTS[] = {
    {"random steps are right, and the same by both algorithms",
     test_random_steps_are_right_and_the_same_bits_by_both_algorithms},
    {"states of long chunks come back in parts", test_states_of_long_chunks_come_back_in_parts},
    {"what is not finite reaches the rows that see it alone",
     test_what_is_not_finite_reaches_the_rows_that_see_it_alone},
    {"long shards travel in segments of bounded staging", test_long_shards_travel_in_segments_of_bounded_staging},
    {"a window leaves what nobody sees where it is", test_a_window_leaves_what_nobody_sees_where_it_is},
    {"chunked prefill gives the result of one shot", test_chunked_prefill_gives_the_bits_of_one_shot},
    {"parts of a chunk may go each its way", test_parts_of_a_chunk_may_go_each_its_way},
    {"results may be in fp8", test_results_may_be_in_fp8},
    {"rank-local sequences exchange nothing", test_rank_local_sequences_exchange_nothing},
    {"layers of one plan may differ in cache and mask", test_layers_of_one_plan_may_differ_in_cache_and_mask},
    {"a context goes from step to step", test_a_context_goes_from_step_to_step},
    {"decode steps alternate between stored and sent states",
     test_decode_steps_alternate_between_stored_and_sent_states},
    {"impossible options are refused on all ranks", test_impossible_options_are_refused_on_all_ranks},
    {"impossible chunks and tensors are refused", test_impossible_chunks_and_tensors_are_refused},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "context attention", TESTS,
                         (int)(sizeof TESTS / sizeof TESTS[0]))
