/* Context attention with score rules, a bias and selections of keys: by pass-KV, by pass-Q, with rows on one rank and with
 * replicated rows, against the float64 reference of whole sequences. Sinks count once, whoever finishes a row. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/check/cases/selection.h"
#include "src/check/reference.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum {
    SOFTCAP = 1,
    TEMPERATURE = 2,
    ALIBI = 4,
    SINKS = 8,
    BIAS = 16,
    WHOLE = 32,
    TREES = 64,
    LISTS = 128,
    BLOCKS = 256,
    LENGTH = 420
};

static const cpa_test_shape SHAPES[] = {
    {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .block_size = 16, .interleave = 16, .mask = {.causal = 1}},
    {.q_heads = 4,
     .kv_heads = 2,
     .k_dim = 64,
     .v_dim = 64,
     .block_size = 16,
     .interleave = 32,
     .dtype = CPA_BF16,
     .mask = {.causal = 1}}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

static const cpa_placement PLACEMENTS[] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_ON_RANK, 1}, {CPA_SHARDED, 2}};
static const int64_t LENGTHS[] = {LENGTH, 230, 90, 333};
enum { N_SEQUENCES = sizeof LENGTHS / sizeof *LENGTHS };

/* Prefill, the end of a prompt, all of one on a rank, and the drafts of a tree; then decode alone. */
static const cpa_test_chunk PREFILL[] = {
    {0, 100, 320, CPA_PASS_KV}, {1, 190, 40, CPA_PASS_Q}, {2, 0, 90, CPA_PASS_KV}, {3, 327, 6, CPA_PASS_Q}};
static const cpa_test_chunk DECODE[] = {
    {0, 419, 1, CPA_PASS_Q}, {1, 229, 1, CPA_PASS_Q}, {2, 89, 1, CPA_PASS_Q}, {3, 332, 1, CPA_PASS_Q}};

static cpa_case_score score_of(const cpa_test_shape *shape, int what, const cpa_test_chunk *chunks, int64_t n) {
    cpa_case_score score = {.q_heads = shape->q_heads};
    for (int64_t i = 0; i < n; i++) score.rows += chunks[i].count;
    if (what & SOFTCAP) score.softcap = 1.5f;
    if (what & TEMPERATURE) score.temperature_len = 50;
    if (what & ALIBI) cpa_case_score_add_slopes(&score, NULL);
    if (what & SINKS) cpa_case_score_add_sinks(&score, NULL);
    if (what & BIAS) cpa_case_score_add_bias(&score, CPA_F32, 1, 20, LENGTH - 100, NULL);
    if (what & LISTS) cpa_case_score_add_lists(&score, shape->kv_heads, 4, LENGTH, NULL);
    if (what & BLOCKS) cpa_case_score_add_blocks(&score, 32, LENGTH, NULL);
    if (what & (WHOLE | TREES)) cpa_case_score_add_bits(&score, 0, LENGTH, NULL);
    for (int64_t i = 0, row = 0; what & WHOLE && i < n; i++) {
        for (int64_t j = 0; j < chunks[i].count; j++, row++) {
            score.first[row] = 0;
            score.width[row] = (int32_t)(chunks[i].start + chunks[i].count);
        }
    }
    if (what & TREES) cpa_test_score_trees(&score, chunks, n);
    cpa_test_score_unmap(&score);
    return score;
}

/* Plans the chunks and attends them with what is asked of scores, with and without the LSE. */
static void attend_chunks(cpa_context *context, cpa_test_cache *cache, int what, const cpa_test_chunk *chunks,
                          int64_t n, cpa_stream *stream) {
    cpa_case_score score = score_of(&cache->shape, what, chunks, n);
    cache->score = &score;
    CU_ASSERT_EQUAL(cpa_test_plan(context, cache, chunks, n), CPA_OK);
    for (int want_lse = 0; want_lse < 2; want_lse++) {
        cpa_test_result result;
        const cpa_mask mask = cache->shape.mask;
        const cpa_status status = want_lse
                                      ? cpa_test_attend(context, cache, mask, chunks, n, stream, &result)
                                      : cpa_test_attend_without_lse(context, cache, mask, chunks, n, stream, &result);
        CU_ASSERT_EQUAL_FATAL(status, CPA_OK);
        const int64_t wrong = cpa_test_count_wrong(cache, mask, chunks, n, &result);
        if (wrong)
            printf("\n    rank %d: %lld wrong: what %d, dtype %d, lse %d", cache->rank, (long long)wrong, what,
                   (int)cache->shape.dtype, want_lse);
        CU_ASSERT_EQUAL(wrong, 0);
        cpa_test_result_destroy(&result);
    }
    cache->score = NULL;
    cpa_case_score_release(&score);
}

static const int FORMS[] = {SOFTCAP | TEMPERATURE,
                            ALIBI,
                            SINKS,
                            BIAS,
                            WHOLE,
                            TREES,
                            LISTS,
                            BLOCKS | SINKS,
                            LISTS | BLOCKS,
                            LISTS | TREES,
                            SOFTCAP | TEMPERATURE | ALIBI | SINKS | BIAS | TREES};
enum { N_FORMS = sizeof FORMS / sizeof *FORMS };

static void every_form_by_both_algorithms(void) {
    for (int s = 0; s < N_SHAPES; s++) {
        cpa_device *device;
        cpa_stream *stream;
        cpa_test_cache cache;
        cpa_test_device_open(1, &device, &stream);
        cpa_test_cache_init(&cache, SHAPES[s], 17, LENGTHS, PLACEMENTS, N_SEQUENCES);
        cpa_context *context = cpa_test_context(device, &SHAPES[s], 0);
        for (int i = 0; i < N_FORMS; i++) {
            attend_chunks(context, &cache, FORMS[i], PREFILL, sizeof PREFILL / sizeof *PREFILL, stream);
            attend_chunks(context, &cache, FORMS[i], DECODE, sizeof DECODE / sizeof *DECODE, stream);
        }
        cache.shape.mask = (cpa_mask){.causal = 1, .window = 70, .sinks = 3};
        attend_chunks(context, &cache, ALIBI | SINKS | TREES, PREFILL, sizeof PREFILL / sizeof *PREFILL, stream);
        cpa_context_destroy(context);
        cpa_test_cache_destroy(&cache);
        cpa_test_device_close(device, stream);
    }
}

/* Every rank has the queries of all rows, and ends with its heads of each. */
static void replicated_rows(void) {
    for (int s = 0; s < N_SHAPES; s++) {
        const cpa_test_shape *shape = &SHAPES[s];
        const int64_t element = cpa_dtype_bytes(shape->dtype), rows = N_SEQUENCES;
        const int32_t ranks = cpa_test_ranks();
        cpa_device *device;
        cpa_stream *stream;
        cpa_test_cache cache;
        cpa_test_device_open(1, &device, &stream);
        cpa_test_cache_init(&cache, *shape, 17, LENGTHS, PLACEMENTS, N_SEQUENCES);
        cpa_context_options options = cpa_test_context_options(shape, 0);
        cpa_context *context = NULL;
        options.rows = CPA_ROWS_REPLICATED;
        CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), device, &options, &context, NULL), CPA_OK);
        const int beside_lists = s % 2 ? BLOCKS : TREES; /* a selection has one of them */
        cpa_case_score score = score_of(shape, SOFTCAP | ALIBI | SINKS | BIAS | LISTS | beside_lists, DECODE, rows);
        cache.score = &score;
        CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, DECODE, rows), CPA_OK);
        const int64_t width = (int64_t)shape->q_heads * shape->k_dim;
        char *q = cpa_test_poisoned(rows * width, element);
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t d = 0; d < width; d++) {
                const float x = cache.sequences[i].q[DECODE[i].start * width + d];
                if (shape->dtype == CPA_F32) ((float *)(void *)q)[i * width + d] = x;
                uint32_t bits;
                memcpy(&bits, &x, sizeof bits);
                if (shape->dtype == CPA_BF16) ((uint16_t *)(void *)q)[i * width + d] = (uint16_t)(bits >> 16);
            }
        }
        const int32_t first = (int32_t)cpa_slice_begin(shape->q_heads, ranks, cache.rank);
        const int32_t heads = (int32_t)cpa_slice_begin(shape->q_heads, ranks, cache.rank + 1) - first;
        const int64_t out_bytes = rows * heads * shape->v_dim * element;
        char *out = cpa_test_poisoned(out_bytes + 1, 1);
        cpa_case_score_on_device on_device;
        CU_ASSERT_EQUAL(cpa_case_score_upload(&score, stream, &on_device, NULL), CPA_OK);
        cpa_context_args args = {.size = sizeof args,
                                 .q = cpa_test_upload(stream, q, rows * width * element),
                                 .kv = cpa_kv_fixture_upload(&cache.pool, stream),
                                 .mask = shape->mask,
                                 .out = cpa_test_upload(stream, out, out_bytes + 1),
                                 .rules = &on_device.rules,
                                 .selection = cpa_case_score_selection(&on_device),
                                 .bias = &on_device.bias};
        CU_ASSERT_EQUAL(cpa_context_attend(context, &args, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
        cpa_test_download(stream, out, args.out, out_bytes);
        int64_t wrong = 0;
        for (int64_t row = 0; row < rows; row++) {
            for (int32_t h = 0; h < heads; h++) {
                float wide[CPA_MAX_HEAD_DIM];
                cpa_reference_widen(out + (row * heads + h) * shape->v_dim * element, shape->dtype, shape->v_dim, wide);
                wrong += !cpa_test_is_right_row(&cache, shape->mask, &DECODE[row], row, DECODE[row].start, first + h,
                                                wide, NULL);
            }
        }
        CU_ASSERT_EQUAL(wrong, 0);
        cpa_case_score_free(&on_device, device);
        cpa_case_score_release(&score);
        cpa_test_free(stream, args.out);
        cpa_test_free(stream, (void *)(uintptr_t)args.q);
        cpa_kv_view_free(&args.kv, stream);
        free(out);
        free(q);
        cpa_context_destroy(context);
        cpa_test_cache_destroy(&cache);
        cpa_test_device_close(device, stream);
    }
}

static const cpa_test TESTS[] = {
    {"every form by pass-KV, by pass-Q and on one rank", every_form_by_both_algorithms},
    {"every form with replicated rows", replicated_rows},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "context_score", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]))
