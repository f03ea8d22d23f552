/* Context attention with replicated rows: every rank gives all rows and ends with its heads of each, which are held
 * against float64 and, bit for bit on the host, against what the owners of the rows compute. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/graph.h"
#include "kernels/host/cache/quantise.h"
#include "src/check/reference.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { MOST_ROWS = 512 };
static const cpa_mask CAUSAL = {.causal = 1}, WINDOW = {.causal = 1, .window = 40, .sinks = 3}, FULL = {0};

/* What a layer reads and writes on the device stays where it is, as in a graph. */
typedef struct site {
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_cache cache;
    cpa_context *context;
    int32_t first_head, heads; /* of this rank */
    cpa_context_args args;
    cpa_graph *graph; /* launched in the place of an attend, if there is one */
} site;

static int64_t q_bytes(const site *s) {
    return (int64_t)s->cache.shape.q_heads * s->cache.shape.k_dim * cpa_dtype_bytes(s->cache.shape.dtype);
}

static int64_t out_bytes(const site *s) {
    return (int64_t)s->heads * s->cache.shape.v_dim * cpa_dtype_bytes(s->cache.shape.dtype);
}

static cpa_context *make_context(const site *s, cpa_row_placement rows) {
    cpa_context_options options = cpa_test_context_options(&s->cache.shape, 0);
    const cpa_transport_table *over = cpa_test_transport_kind() == CPA_TRANSPORT_AUTO ? NULL : cpa_test_transport();
    cpa_context *context = NULL;
    options.rows = rows;
    CU_ASSERT_EQUAL_FATAL(cpa_context_create_over(cpa_test_comm(), s->device, over, &options, &context, NULL), CPA_OK);
    return context;
}

static void site_init(site *s, cpa_test_shape shape, const int64_t *lengths, const cpa_placement *placements, int64_t n,
                      cpa_row_placement rows) {
    *s = (site){.graph = NULL};
    cpa_test_device_open(2, &s->device, &s->stream);
    cpa_test_cache_init(&s->cache, shape, 31, lengths, placements, n);
    s->first_head = (int32_t)((int64_t)shape.q_heads * s->cache.rank / cpa_test_ranks());
    s->heads = (int32_t)((int64_t)shape.q_heads * (s->cache.rank + 1) / cpa_test_ranks()) - s->first_head;
    s->context = make_context(s, rows);
    char *poison = cpa_test_poisoned(MOST_ROWS * (q_bytes(s) + out_bytes(s)), 1);
    s->args = (cpa_context_args){.size = sizeof s->args,
                                 .q = cpa_test_upload(s->stream, poison, MOST_ROWS * q_bytes(s)),
                                 .kv = cpa_kv_fixture_upload(&s->cache.pool, s->stream),
                                 .out = cpa_test_upload(s->stream, poison, MOST_ROWS * out_bytes(s)),
                                 .lse = cpa_test_upload(s->stream, poison, MOST_ROWS * s->heads * 4)};
    free(poison);
}

static void site_destroy(site *s) {
    if (s->graph) s->device->graphs->destroy(s->graph);
    cpa_context_destroy(s->context);
    cpa_test_free(s->stream, s->args.lse);
    cpa_test_free(s->stream, s->args.out);
    cpa_test_free(s->stream, (void *)(uintptr_t)s->args.q);
    cpa_kv_view_free(&s->args.kv, s->stream);
    cpa_test_cache_destroy(&s->cache);
    cpa_test_device_close(s->device, s->stream);
}

/* ---- a step ---- */

/* The queries of all rows; the rest of q, and the results, are poisoned. Returns how many rows there are. */
static int64_t put(const site *s, const cpa_test_chunk *chunks, int64_t n) {
    const int64_t width = (int64_t)s->cache.shape.q_heads * s->cache.shape.k_dim;
    char *q = cpa_test_poisoned(MOST_ROWS * q_bytes(s), 1),
         *poison = cpa_test_poisoned(MOST_ROWS * out_bytes(s) + 1, 1);
    int64_t row = 0;
    for (int64_t i = 0; i < n; i++) {
        const float *from = s->cache.sequences[chunks[i].sequence].q + chunks[i].start * width;
        cpa_narrow(q + row * q_bytes(s), from, s->cache.shape.dtype, chunks[i].count * width);
        row += chunks[i].count;
    }
    const cpa_device_table *table = s->device->table;
    CU_ASSERT_EQUAL(table->copy((void *)(uintptr_t)s->args.q, q, MOST_ROWS * q_bytes(s), s->stream), CPA_OK);
    CU_ASSERT_EQUAL(table->copy(s->args.out, poison, MOST_ROWS * out_bytes(s), s->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
    free(poison);
    free(q);
    return row;
}

/* The results of the rows, in floats. */
typedef struct results {
    int64_t rows;
    float *out, *lse; /* [rows, heads, v_dim] and [rows, heads] */
} results;

static results get(const site *s, int64_t rows) {
    const int64_t heads = rows * s->heads, n = heads * s->cache.shape.v_dim;
    results r = {rows, cpa_test_poisoned(n, sizeof *r.out), cpa_test_poisoned(heads, sizeof *r.lse)};
    void *narrow = cpa_test_poisoned(n, cpa_dtype_bytes(s->cache.shape.dtype));
    cpa_test_download(s->stream, narrow, s->args.out, rows * out_bytes(s));
    cpa_test_download(s->stream, r.lse, s->args.lse, heads * (int64_t)sizeof *r.lse);
    cpa_widen(r.out, narrow, s->cache.shape.dtype, n);
    free(narrow);
    return r;
}

static void results_free(results r) {
    free(r.out);
    free(r.lse);
}

static int64_t count_wrong(const site *s, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n, results r) {
    int64_t row = 0, wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t t = chunks[i].start; t < chunks[i].start + chunks[i].count; t++, row++) {
            for (int32_t h = 0; h < s->heads; h++) {
                const int64_t at = row * s->heads + h;
                wrong += !cpa_test_is_right(&s->cache, mask, &chunks[i], t, s->first_head + h,
                                            r.out + at * s->cache.shape.v_dim, r.lse + at);
            }
        }
    }
    return wrong;
}

/* Rows that a rank owns, against what it gave for them, in place of the own result. */
static int64_t differ_from(const site *s, int32_t owner, const cpa_test_chunk *chunks, int64_t n, results r,
                           const float *out, const float *lse) {
    const int32_t heads = s->cache.shape.q_heads, v_dim = s->cache.shape.v_dim;
    int64_t row = 0, at = 0, differ = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t t = chunks[i].start; t < chunks[i].start + chunks[i].count; t++, row++) {
            if (cpa_owner_rank(s->cache.map, s->cache.placements[chunks[i].sequence], t) != owner) continue;
            const int64_t own = row * s->heads, theirs = at++ * heads + s->first_head;
            differ += memcmp(r.out + own * v_dim, out + theirs * v_dim, (size_t)(s->heads * v_dim) * 4) != 0;
            differ += memcmp(r.lse + own, lse + theirs, (size_t)s->heads * 4) != 0;
        }
    }
    return differ;
}

/* Against the rows of all ranks as a context gives them that leaves rows to their owners. */
static int64_t count_differing(const site *s, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n, results r) {
    const int64_t heads = s->cache.shape.q_heads, v_dim = s->cache.shape.v_dim;
    cpa_context *owned = make_context(s, CPA_ROWS_OWNED);
    cpa_test_result result;
    int64_t differ = 0;
    CU_ASSERT_EQUAL(cpa_test_plan(owned, &s->cache, chunks, n), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_attend(owned, &s->cache, mask, chunks, n, s->stream, &result), CPA_OK);
    for (int32_t owner = 0; owner < cpa_test_ranks(); owner++) {
        int64_t rows = result.rows;
        MPI_Bcast(&rows, 1, MPI_INT64_T, owner, MPI_COMM_WORLD);
        float *out = cpa_test_poisoned(rows * heads * v_dim, 4), *lse = cpa_test_poisoned(rows * heads, 4);
        if (owner == s->cache.rank) {
            cpa_widen(out, result.out, s->cache.shape.dtype, rows * heads * v_dim);
            memcpy(lse, result.lse, (size_t)result.lse_bytes);
        }
        MPI_Bcast(out, (int)(rows * heads * v_dim), MPI_FLOAT, owner, MPI_COMM_WORLD);
        MPI_Bcast(lse, (int)(rows * heads), MPI_FLOAT, owner, MPI_COMM_WORLD);
        differ += differ_from(s, owner, chunks, n, r, out, lse);
        free(lse);
        free(out);
    }
    cpa_test_result_destroy(&result);
    cpa_context_destroy(owned);
    return differ;
}

/* ---- tests ---- */

/* Prefill and decode, sharded and on one rank, with heads that the ranks divide, heads that they do not, and fewer
 * heads than ranks. */
static void heads_of_all_rows_are_right(void) {
    static const cpa_test_shape shapes[] = {{8, 2, 64, 64, 16, 16, CPA_BF16, 0, {0}, 0, 0},
                                            {5, 1, 32, 32, 16, 32, CPA_F32, 1, {0}, 0, 0},
                                            {7, 7, 64, 64, 8, 2, CPA_F16, 0, {0}, 0, 0},
                                            {2, 1, 64, 32, 16, 1, CPA_F32, 0, {0}, 0, 0},
                                            {1, 1, 128, 128, 16, 16, CPA_BF16, 0, {0}, 0, 0}};
    static const cpa_mask *const masks[] = {&CAUSAL, &WINDOW, &FULL};
    const int64_t lengths[] = {300, 5, 130, 64, 47};
    const cpa_test_chunk steps[2][5] = {{{0, 200, 100, CPA_PASS_KV},
                                         {1, 4, 1, CPA_PASS_Q},
                                         {2, 129, 1, CPA_PASS_Q},
                                         {3, 30, 20, CPA_PASS_Q},
                                         {4, 46, 1, CPA_PASS_KV}},
                                        {{0, 299, 1, CPA_PASS_Q},
                                         {1, 0, 5, CPA_PASS_Q},
                                         {2, 128, 1, CPA_PASS_Q},
                                         {3, 63, 1, CPA_PASS_Q},
                                         {4, 45, 1, CPA_PASS_Q}}};
    const cpa_placement placements[] = {
        {CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_ON_RANK, 1}, {CPA_SHARDED, 2}, {CPA_SHARDED, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        site s;
        site_init(&s, shapes[i], lengths, placements, 5, CPA_ROWS_REPLICATED);
        for (int step = 0; step < 2; step++) {
            const int64_t rows = put(&s, steps[step], 5);
            s.args.mask = *masks[(i + (size_t)step) % 3];
            CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, steps[step], 5), CPA_OK);
            CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.args, s.stream), CPA_OK);
            CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
            const results r = get(&s, rows);
            CU_ASSERT_EQUAL(count_wrong(&s, s.args.mask, steps[step], 5, r), 0);
            const int64_t differing = count_differing(&s, s.args.mask, steps[step], 5, r);
            if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(differing, 0);
            results_free(r);
        }
        site_destroy(&s);
    }
}

/* Plans and attends as the engine does; `captured`: what is enqueued becomes the graph. Returns the shape. */
static uint64_t run_padded(site *s, const cpa_test_chunk *chunks, int64_t n, int64_t padded, int captured) {
    cpa_context_chunk planned[CPA_TEST_MAX_SEQUENCES] = {{0}};
    for (int64_t i = 0; i < n; i++) {
        planned[i].start = chunks[i].start;
        planned[i].count = chunks[i].count;
        planned[i].placement = s->cache.placements[chunks[i].sequence];
        planned[i].algorithm = chunks[i].algorithm;
        planned[i].block_table = s->cache.tables[chunks[i].sequence];
    }
    CU_ASSERT_EQUAL(cpa_context_plan_ahead(s->context, planned, n, NULL, NULL, padded), CPA_OK);
    cpa_context_begin(s->context);
    CU_ASSERT_EQUAL(cpa_context_upload_plan(s->context, s->stream), CPA_OK);
    if (captured) {
        cpa_context_capture(s->context, 1);
        CU_ASSERT_EQUAL_FATAL(s->device->graphs->begin(s->stream), CPA_OK);
    }
    if (!s->graph) CU_ASSERT_EQUAL(cpa_context_attend(s->context, &s->args, s->stream), CPA_OK);
    if (captured) {
        CU_ASSERT_EQUAL_FATAL(s->device->graphs->end(s->stream, &s->graph), CPA_OK);
        cpa_context_capture(s->context, 0);
    }
    if (s->graph) CU_ASSERT_EQUAL(s->device->graphs->launch(s->graph, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_sync(s->context, s->stream), CPA_OK);
    return s->device->caps.has_graphs ? cpa_context_shape(s->context) : 0;
}

/* Decode in steps of fixed shape: the first eagerly, the second captured where the device has graphs, the others are
 * launches of that. In between, another context's rows lie with their owners. */
static void decode_runs_in_steps_of_fixed_shape(void) {
    const cpa_test_shape shape = {
        .q_heads = 8, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .block_size = 16, .interleave = 16, .dtype = CPA_BF16};
    const int64_t lengths[] = {300, 33, 130, 64, 17, 200};
    enum { SEQUENCES = 6, STEPS = 4, PADDED = 8 };
    site s;
    uint64_t shapes[STEPS];
    const cpa_placement placements[] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_ON_RANK, 1},
                                        {CPA_SHARDED, 2}, {CPA_SHARDED, 0}, {CPA_SHARDED, 3}};
    site_init(&s, shape, lengths, placements, SEQUENCES, CPA_ROWS_OWNED);
    s.args.mask = CAUSAL;
    cpa_context_set_rows(s.context, CPA_ROWS_REPLICATED);
    for (int step = 0; step < STEPS; step++) {
        cpa_test_chunk chunks[SEQUENCES];
        const int64_t n = step == 2 ? 3 : SEQUENCES; /* fewer, and shorter ones */
        for (int64_t i = 0; i < n; i++)
            chunks[i] = (cpa_test_chunk){i, (step == 2 ? 9 : lengths[i] - STEPS) + step, 1, CPA_PASS_Q};
        put(&s, chunks, n);
        shapes[step] = run_padded(&s, chunks, n, PADDED, step == 1 && s.device->caps.has_graphs);
        if (step > 1) CU_ASSERT_EQUAL(shapes[step], shapes[1]);
        const results r = get(&s, PADDED);
        CU_ASSERT_EQUAL(count_wrong(&s, CAUSAL, chunks, n, r), 0);
        /* What nobody attends is empty, whatever its query holds. */
        for (int64_t row = n; row < PADDED && cpa_test_ranks() > 1; row++) {
            for (int64_t h = row * s.heads; h < (row + 1) * s.heads; h++)
                CU_ASSERT(r.lse[h] == -INFINITY && r.out[h * shape.v_dim] == 0);
        }
        results_free(r);
    }
    site_destroy(&s);
}

/* One context, with steps of either kind in turn. */
static void steps_of_both_kinds_take_turns(void) {
    const cpa_test_shape shape = {
        .q_heads = 6, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .block_size = 16, .interleave = 4, .dtype = CPA_F16};
    const int64_t lengths[] = {150, 90};
    const cpa_test_chunk decode[] = {{0, 149, 1, CPA_PASS_Q}, {1, 89, 1, CPA_PASS_Q}};
    const cpa_test_chunk prefill[] = {{0, 100, 50, CPA_PASS_KV}, {1, 80, 10, CPA_PASS_Q}};
    site s;
    site_init(&s, shape, lengths, NULL, 2, CPA_ROWS_REPLICATED);
    for (int turn = 0; turn < 4; turn++) {
        const cpa_test_chunk *chunks = turn / 2 ? decode : prefill;
        cpa_context_set_rows(s.context, turn % 2 ? CPA_ROWS_REPLICATED : CPA_ROWS_OWNED);
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, chunks, 2), CPA_OK);
        if (turn % 2) {
            const int64_t rows = put(&s, chunks, 2);
            s.args.mask = CAUSAL;
            CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.args, s.stream), CPA_OK);
            CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
            const results r = get(&s, rows);
            CU_ASSERT_EQUAL(count_wrong(&s, CAUSAL, chunks, 2, r), 0);
            results_free(r);
        } else {
            cpa_test_result result;
            CU_ASSERT_EQUAL(cpa_test_attend(s.context, &s.cache, CAUSAL, chunks, 2, s.stream, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_test_count_wrong(&s.cache, CAUSAL, chunks, 2, &result), 0);
            cpa_test_result_destroy(&result);
        }
    }
    site_destroy(&s);
}

/* The codes of the results that the same step has in the dtype of the model, divided by the scale once, behind the last
 * merge. */
static void results_may_be_in_fp8(void) {
    enum { N = 2 };
    const float scale = 0.017f;
    const int64_t lengths[N] = {70, 33};
    const cpa_test_chunk steps[2][N] = {{{0, 0, 70, CPA_PASS_Q}, {1, 20, 13, CPA_PASS_Q}},
                                        {{0, 69, 1, CPA_PASS_Q}, {1, 32, 1, CPA_PASS_Q}}};
    for (int run = 0; run < 4; run++) {
        const cpa_test_shape shape = {.q_heads = 10,
                                      .kv_heads = 2,
                                      .k_dim = 64,
                                      .v_dim = 48,
                                      .block_size = 16,
                                      .interleave = 16,
                                      .dtype = run / 2 ? CPA_BF16 : CPA_F32};
        const cpa_test_chunk *chunks = steps[run % 2];
        const int exact = shape.dtype == CPA_F32 && cpa_test_promises_bits();
        const float least = scale / 256 + (shape.dtype == CPA_F32 ? 0 : 0x1p-8f);
        site s;
        site_init(&s, shape, lengths, NULL, N, CPA_ROWS_REPLICATED);
        void *device_scale = cpa_test_upload(s.stream, &scale, sizeof scale);
        s.args.mask = CAUSAL;
        CU_ASSERT_EQUAL(cpa_test_plan(s.context, &s.cache, chunks, N), CPA_OK);
        const int64_t rows = put(&s, chunks, N), n = rows * s.heads * shape.v_dim;
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.args, s.stream), CPA_OK);
        const results want = get(&s, rows);
        put(&s, chunks, N);
        s.args.out_scale = device_scale;
        CU_ASSERT_EQUAL(cpa_context_attend(s.context, &s.args, s.stream), CPA_OK);
        uint8_t *codes = cpa_test_poisoned(n + 1, 1);
        cpa_test_download(s.stream, codes, s.args.out, n + 1);
        int64_t wrong = codes[n] != UINT8_MAX; /* nothing lies behind */
        for (int64_t i = 0; i < n && exact; i++) wrong += codes[i] != cpa_to_e4m3(want.out[i] * (1 / scale));
        for (int64_t i = 0; i < n && !exact; i++)
            wrong += !(fabsf(cpa_from_e4m3(codes[i]) * scale - want.out[i]) <= fabsf(want.out[i]) / 12 + least);
        CU_ASSERT_EQUAL(wrong, 0);
        free(codes);
        results_free(want);
        cpa_test_free(s.stream, device_scale);
        site_destroy(&s);
    }
}

static void what_rows_cannot_be_is_refused(void) {
    const cpa_test_shape shape = {
        .q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .block_size = 16, .interleave = 16, .dtype = CPA_F32};
    const int64_t lengths[] = {20};
    site s;
    cpa_context *context = NULL;
    cpa_error err = {0};
    site_init(&s, shape, lengths, NULL, 1, CPA_ROWS_REPLICATED);
    cpa_context_options options = cpa_test_context_options(&shape, 0);
    options.rows = (cpa_row_placement)2;
    CU_ASSERT_EQUAL(cpa_context_create(cpa_test_comm(), s.device, &options, &context, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "context: rows is 2, expected owned, 0, or replicated, 1"));
    const cpa_context_limits limits = {sizeof limits, 1, 20, 8, 0, 1};
    CU_ASSERT_EQUAL(cpa_context_reserve(s.context, &limits), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), "a step of replicated rows cannot be reserved"));
    const cpa_context_chunk chunk = {.start = 10, .count = 10, .algorithm = CPA_PASS_Q};
    CU_ASSERT_EQUAL(cpa_context_rows(s.context, &chunk, 1), 10);
    site_destroy(&s);
}

static const cpa_test TESTS[] = {
    {"heads of all rows are right", heads_of_all_rows_are_right},
    {"decode runs in steps of fixed shape", decode_runs_in_steps_of_fixed_shape},
    {"steps of both kinds take turns", steps_of_both_kinds_take_turns},
    {"results may be in fp8", results_may_be_in_fp8},
    {"what rows cannot be is refused", what_rows_cannot_be_is_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("a context of replicated rows", TESTS)
