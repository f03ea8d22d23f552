/* Runs of tokens that are shorter than a block, as long, and longer: context attention by either algorithm and by both
 * in a step, against float64, whatever the ranks, and chunks of a few rows around every end of a run and of a block. On
 * the host also as on a back end that promises no bits. */
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "src/context/context_internal.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { BLOCK = 16, MOST_VERIFIED = 8, N_RUNS = 6 };

static const int32_t RUNS[N_RUNS] = {1, 2, 4, BLOCK / 2, BLOCK, 2 * BLOCK};
static const cpa_mask MASKS[] = {{.causal = 1}, {.causal = 0}, {.causal = 1, .window = 45, .sinks = 7}};
enum { N_MASKS = sizeof MASKS / sizeof MASKS[0] };

static cpa_device *device;
static cpa_stream *stream;
static int64_t n_cases;

static void open_device(int promises_bits) {
    cpa_test_device_open(1, &device, &stream);
    if (promises_bits) return;
    device->caps.bit_exact = 0;
    device->caps.split_tokens = 1;
}

static void close_device(void) {
    cpa_test_device_close(device, stream);
}

static cpa_test_shape shape_of(int32_t run, cpa_dtype dtype, cpa_mask mask) {
    return (cpa_test_shape){.q_heads = 4,
                            .kv_heads = 2,
                            .k_dim = 32,
                            .v_dim = 16,
                            .block_size = BLOCK,
                            .interleave = run,
                            .dtype = dtype,
                            .mask = mask};
}

/* Runs the chunks by pass-KV, by pass-Q and by both in turn: right, and the same bits where they are promised. */
static void check_step(const cpa_test_cache *cache, const cpa_test_chunk *given, int64_t n) {
    cpa_context *context = cpa_test_context(device, &cache->shape, 0);
    cpa_test_chunk chunks[CPA_TEST_MAX_SEQUENCES];
    cpa_test_result first = {0};
    memcpy(chunks, given, (size_t)n * sizeof *chunks);
    CU_ASSERT_EQUAL(context->step.gathers, !device->caps.bit_exact && cache->shape.interleave >= BLOCK);
    for (int way = 0; way < 3; way++) {
        cpa_test_result result;
        for (int64_t i = 0; i < n; i++)
            chunks[i].algorithm = way == 0 || (way == 2 && i % 2) ? CPA_PASS_KV : CPA_PASS_Q;
        CU_ASSERT_EQUAL(cpa_test_plan(context, cache, chunks, n), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_attend(context, cache, cache->shape.mask, chunks, n, stream, &result), CPA_OK);
        if (way == 0) {
            CU_ASSERT_EQUAL(cpa_test_count_wrong(cache, cache->shape.mask, chunks, n, &result), 0);
            first = result;
            continue;
        }
        if (device->caps.bit_exact) {
            CU_ASSERT(cpa_test_same_bits_or_right(cache, cache->shape.mask, chunks, n, &first, &result));
        } else {
            CU_ASSERT_EQUAL(cpa_test_count_wrong(cache, cache->shape.mask, chunks, n, &result), 0);
        }
        cpa_test_result_destroy(&result);
    }
    cpa_test_result_destroy(&first);
    cpa_context_destroy(context);
    n_cases += n;
}

/* Chunks that begin and end anywhere: within a run, at its end, beyond one round of all ranks; sharded from any rank
 * on, or on one rank. */
static void check_ragged(int32_t run, cpa_dtype dtype, cpa_mask mask) {
    const int64_t round = (int64_t)run * cpa_test_ranks(), unit = (int64_t)BLOCK * cpa_test_ranks();
    const struct {
        int64_t start, end;
        cpa_placement placement;
    } cases[] = {{0, 1, {CPA_SHARDED, 1}},
                 {0, unit + 1, {CPA_SHARDED, 0}},
                 {unit - 1, unit + 3, {CPA_SHARDED, 2}},
                 {round + run / 2, round + 2 * unit + 5, {CPA_SHARDED, 1}},
                 {3 * unit - 1, 3 * unit, {CPA_SHARDED, 0}},
                 {7, 90, {CPA_ON_RANK, 1}},
                 {unit + BLOCK, 3 * unit + run, {CPA_SHARDED, 3}}};
    enum { N = sizeof cases / sizeof cases[0] };
    int64_t lengths[N];
    cpa_placement placements[N];
    cpa_test_chunk chunks[N];
    for (int64_t i = 0; i < N; i++) {
        lengths[i] = cases[i].end;
        placements[i] = cases[i].placement;
        chunks[i] = (cpa_test_chunk){i, cases[i].start, cases[i].end - cases[i].start, CPA_PASS_KV};
    }
    cpa_test_cache cache;
    cpa_test_cache_init(&cache, shape_of(run, dtype, mask), 40 + (uint64_t)run, lengths, placements, N);
    check_step(&cache, chunks, N);
    cpa_test_cache_destroy(&cache);
}

static void check_grid(int promises_bits) {
    open_device(promises_bits);
    n_cases = 0;
    for (int64_t i = 0; i < N_RUNS * N_MASKS; i++) {
        const int64_t run = i / N_MASKS, mask = i % N_MASKS;
        check_ragged(RUNS[run], (run + mask) % 2 ? CPA_BF16 : CPA_F32, MASKS[mask]);
    }
    close_device();
    printf("%lld chunks ... ", (long long)n_cases);
}

static void chunks_at_odd_places_are_right_at_any_length_of_runs(void) {
    check_grid(1);
}

static void the_same_where_no_bits_are_promised(void) {
    check_grid(0);
}

/* A shard that pass-KV sends in several segments. */
static void short_runs_travel_in_segments(void) {
    for (int promises_bits = 0; promises_bits < 2; promises_bits++) {
        open_device(promises_bits);
        const int64_t length = 2300 * cpa_test_ranks() + 5, start = length - 40;
        const cpa_placement placement = {CPA_SHARDED, 1};
        for (int m = 0; m < N_MASKS; m++) {
            cpa_test_shape shape = shape_of(m == 1 ? 4 : 1, CPA_F32, MASKS[m]);
            if (m == 2) shape.mask.window = 1100 * cpa_test_ranks();
            const cpa_context_options options = cpa_test_context_options(&shape, 0);
            const int64_t least = cpa_context_least_staging(device, &options, cpa_test_ranks());
            const cpa_test_chunk chunk = {0, start, length - start, CPA_PASS_KV};
            cpa_test_cache cache;
            cpa_test_result result;
            cpa_context_stats stats;
            cpa_test_cache_init(&cache, shape, 9, &length, &placement, 1);
            cpa_context *context = cpa_test_context(device, &shape, least);
            CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, &chunk, 1), CPA_OK);
            CU_ASSERT_EQUAL(cpa_test_attend(context, &cache, shape.mask, &chunk, 1, stream, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, shape.mask, &chunk, 1, &result), 0);
            cpa_context_get_stats(context, &stats, sizeof stats);
            CPA_ASSERT_ORDER(stats.staging_bytes, <=, least);
            const int64_t transfers = context->kv.now.end - context->kv.now.begin;
            if (cpa_test_ranks() > 1) CPA_ASSERT_ORDER(transfers, >=, (m == 2 ? 2 : 3) * (cpa_test_ranks() - 1));
            cpa_test_result_destroy(&result);
            cpa_context_destroy(context);
            cpa_test_cache_destroy(&cache);
        }
        close_device();
    }
}

/* ---- several rows of a sequence, as when drafts are verified ---- */

/* Positions around the ends of runs, of rounds over all ranks, and of units, without an order; how many. */
static int64_t verified_starts(int32_t run, int64_t *starts) {
    const int64_t ranks = cpa_test_ranks(), round = run * ranks, unit = BLOCK * ranks;
    const int64_t ends[] = {1, run, round, 2 * round + run, BLOCK, unit, unit + BLOCK, 2 * unit};
    int64_t n = 0;
    for (size_t e = 0; e < sizeof ends / sizeof ends[0]; e++)
        for (int64_t at = ends[e] - 1; at <= ends[e] + 1; at++) starts[n++] = at;
    return n;
}

/* The rows [start, start + rows) of sequences whose keys are all there: each sees its own prefix and no draft behind
 * it; the shards' lengths follow from the positions alone. */
static void check_verified(int32_t run, int64_t rows) {
    int64_t starts[32], n = verified_starts(run, starts);
    for (int64_t first = 0; first < n; first += CPA_TEST_MAX_SEQUENCES) {
        int64_t lengths[CPA_TEST_MAX_SEQUENCES], count = 0;
        cpa_placement placements[CPA_TEST_MAX_SEQUENCES];
        cpa_test_chunk chunks[CPA_TEST_MAX_SEQUENCES];
        for (; count < CPA_TEST_MAX_SEQUENCES && first + count < n; count++) {
            const int64_t start = starts[first + count];
            lengths[count] = start + rows;
            placements[count] = (cpa_placement){CPA_SHARDED, (int32_t)(count + rows)};
            chunks[count] = (cpa_test_chunk){count, start, rows, CPA_PASS_Q};
        }
        cpa_test_cache cache;
        cpa_test_cache_init(&cache, shape_of(run, CPA_F32, MASKS[rows % 2 ? 0 : 2]), 60 + (uint64_t)rows, lengths,
                            placements, count);
        check_step(&cache, chunks, count);
        cpa_test_cache_destroy(&cache);
    }
}

static void several_rows_of_a_sequence_see_their_own_prefixes(void) {
    open_device(1);
    n_cases = 0;
    for (int64_t i = 0; i < N_RUNS * MOST_VERIFIED; i++) {
        const int64_t run = i / MOST_VERIFIED, rows = i % MOST_VERIFIED + 1;
        check_verified(RUNS[run], rows);
    }
    close_device();
    printf("%lld chunks ... ", (long long)n_cases);
}

static const cpa_test TESTS[] = {
    {"chunks at odd places are right at any length of runs", chunks_at_odd_places_are_right_at_any_length_of_runs},
    {"the same where no bits are promised", the_same_where_no_bits_are_promised},
    {"short runs travel in segments", short_runs_travel_in_segments},
    {"several rows of a sequence see their own prefixes", several_rows_of_a_sequence_see_their_own_prefixes},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "lengths of runs", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]))
