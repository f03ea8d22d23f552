/* Columns that ranks have computed are gathered, and parts of sums added up: the same bits on every rank, and on
 * devices in a graph too. */
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/graph.h"
#include "src/context/context.h"
#include "src/context/tensor_slices.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { MOST_ROWS = 40, MOST_WIDTH = 512, ROUNDS = 3 };

/* `rows` of a product whose columns, or sums, are sliced. */
typedef struct slice_case {
    int64_t rows, width, unit;
    cpa_dtype dtype;
} slice_case;
static const slice_case CASES[] = {
    {1, 96, 16, CPA_BF16}, {5, 96, 16, CPA_BF16}, {40, 512, 8, CPA_F16}, {3, 35, 5, CPA_F32},
    {7, 3, 1, CPA_BF16},   {1, 16, 16, CPA_F32},  {9, 32, 16, CPA_F16},
};
enum { N_CASES = sizeof CASES / sizeof *CASES };

typedef struct site {
    cpa_device *device;
    cpa_stream *stream;
    cpa_context *context;
    cpa_slices slices;
    /* On the device, for every case: what this rank has, and the outcome. */
    void *columns[N_CASES], *gathered[N_CASES], *partial[N_CASES], *bias[N_CASES], *summed[N_CASES];
} site;

/* The number at a place of a case, of a rank's part of a sum; rank 0 and -1 also stand for columns and bias. */
static float number(int round, int of, int32_t rank, int64_t i) {
    uint64_t x = ((uint64_t)round * 64 + (uint64_t)of) * 1000003u + (uint64_t)(rank + 2) * 7919u + (uint64_t)i;
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
    return (float)((double)(x >> 40) / 0x1p23 - 1) * (rank == 1 ? 1e4f : 1);
}

static int64_t begin_of(const slice_case *c, int32_t rank) {
    return c->width / c->unit * rank / cpa_test_ranks() * c->unit;
}

static void *narrowed(const float *wide, cpa_dtype dtype, int64_t n) {
    void *narrow = cpa_test_poisoned(n, cpa_dtype_bytes(dtype));
    cpa_narrow(narrow, wide, dtype, n);
    return narrow;
}

/* All columns of a case, as a rank would compute them. */
static float *columns_of(int round, int of) {
    const int64_t n = CASES[of].rows * CASES[of].width;
    float *wide = cpa_test_poisoned(n, sizeof *wide);
    for (int64_t i = 0; i < n; i++) wide[i] = number(round, of, 0, i);
    return wide;
}

static void replace(const site *s, void *on_device, void *host, int64_t bytes) {
    CU_ASSERT_EQUAL(s->device->table->copy(on_device, host, bytes, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(s->device->table->stream_sync(s->stream), CPA_OK);
    free(host);
}

/* What this rank has of a case in a round. */
static void put(const site *s, int round, int of) {
    const slice_case *c = &CASES[of];
    const int64_t begin = begin_of(c, s->slices.rank), own = begin_of(c, s->slices.rank + 1) - begin;
    const int64_t bytes = cpa_dtype_bytes(c->dtype);
    float *wide = columns_of(round, of), *part = cpa_test_poisoned(c->rows * c->width, sizeof *part);
    for (int64_t row = 0; row < c->rows; row++)
        for (int64_t i = 0; i < own; i++) part[row * own + i] = wide[row * c->width + begin + i];
    replace(s, s->columns[of], narrowed(part, c->dtype, c->rows * own), c->rows * own * bytes);
    for (int64_t i = 0; i < c->rows * c->width; i++) part[i] = number(round, of, s->slices.rank, i);
    replace(s, s->partial[of], part, c->rows * c->width * (int64_t)sizeof *part);
    for (int64_t i = 0; i < c->width; i++) wide[i] = number(round, of, -1, i);
    replace(s, s->bias[of], narrowed(wide, c->dtype, c->width), c->width * bytes);
    free(wide);
}

static void check_case(const site *s, int round, int of) {
    const slice_case *c = &CASES[of];
    const int64_t n = c->rows * c->width, bytes = n * cpa_dtype_bytes(c->dtype);
    float *wide = columns_of(round, of), *bias = cpa_test_poisoned(c->width, sizeof *bias);
    void *got = cpa_test_poisoned(bytes, 1), *want = narrowed(wide, c->dtype, n);
    cpa_test_download(s->stream, got, s->gathered[of], bytes);
    CU_ASSERT_EQUAL(memcmp(got, want, (size_t)bytes), 0);
    free(want);
    for (int64_t i = 0; i < c->width; i++) wide[i] = number(round, of, -1, i);
    want = narrowed(wide, c->dtype, c->width);
    cpa_widen(bias, want, c->dtype, c->width);
    free(want);
    for (int64_t i = 0; i < n; i++) {
        wide[i] = number(round, of, 0, i);
        for (int32_t r = 1; r < s->slices.ranks; r++) wide[i] += number(round, of, r, i);
        if (of % 2) wide[i] += bias[i % c->width];
    }
    want = narrowed(wide, c->dtype, n);
    cpa_test_download(s->stream, got, s->summed[of], bytes);
    CU_ASSERT_EQUAL(memcmp(got, want, (size_t)bytes), 0);
    free(want);
    free(got);
    free(bias);
    free(wide);
}

/* One case after another, without waiting in between. */
static void enqueue(const site *s) {
    for (int of = 0; of < N_CASES; of++) {
        const slice_case *c = &CASES[of];
        const cpa_slice_gather gather = {sizeof gather, c->rows,        c->width,       c->unit,
                                         c->dtype,      s->columns[of], s->gathered[of]};
        CU_ASSERT_EQUAL(s->slices.gather(s->slices.ctx, &gather, s->stream), CPA_OK);
        if (c->rows == 1) { /* again, in place */
            cpa_slice_gather in_place = gather;
            in_place.part = (char *)s->gathered[of] + begin_of(c, s->slices.rank) * cpa_dtype_bytes(c->dtype);
            CU_ASSERT_EQUAL(s->slices.gather(s->slices.ctx, &in_place, s->stream), CPA_OK);
        }
        const cpa_slice_sum sum = {sizeof sum,   c->rows,        (int32_t)c->width,
                                   c->dtype,     s->partial[of], of % 2 ? s->bias[of] : NULL,
                                   s->summed[of]};
        CU_ASSERT_EQUAL(s->slices.sum(s->slices.ctx, &sum, s->stream), CPA_OK);
    }
}

static void begin(site *s) {
    static const cpa_test_shape shape = {
        .q_heads = 1, .kv_heads = 1, .k_dim = 8, .v_dim = 8, .block_size = 8, .interleave = 8, .dtype = CPA_F32};
    *s = (site){.device = NULL};
    cpa_test_device_open(2, &s->device, &s->stream);
    s->context = cpa_test_context(s->device, &shape, 0);
    s->slices = cpa_context_slices(s->context);
    char *poison = cpa_test_poisoned(MOST_ROWS * MOST_WIDTH, 4);
    void **const all[] = {s->columns, s->gathered, s->partial, s->bias, s->summed};
    for (size_t kind = 0; kind < sizeof all / sizeof *all; kind++)
        for (int of = 0; of < N_CASES; of++)
            all[kind][of] = cpa_test_upload(s->stream, poison, MOST_ROWS * MOST_WIDTH * 4);
    free(poison);
}

static void end(site *s) {
    void **const all[] = {s->columns, s->gathered, s->partial, s->bias, s->summed};
    cpa_context_destroy(s->context);
    for (size_t kind = 0; kind < sizeof all / sizeof *all; kind++)
        for (int of = 0; of < N_CASES; of++) cpa_test_free(s->stream, all[kind][of]);
    cpa_test_device_close(s->device, s->stream);
}

static void every_rank_has_the_same_bits(void) {
    site s;
    begin(&s);
    CU_ASSERT_EQUAL(s.slices.ranks, cpa_test_ranks());
    for (int round = 0; round < ROUNDS; round++) {
        for (int of = 0; of < N_CASES; of++) put(&s, round, of);
        enqueue(&s);
        CU_ASSERT_EQUAL(cpa_context_sync(s.context, s.stream), CPA_OK);
        for (int of = 0; of < N_CASES; of++) check_case(&s, round, of);
    }
    end(&s);
}

/* Eagerly first, then captured, then launched for other numbers. */
static void a_graph_does_it_again(void) {
    site s;
    cpa_graph *graph = NULL;
    begin(&s);
    if (s.device->caps.has_graphs) {
        const cpa_graph_table *graphs = s.device->graphs;
        enqueue(&s);
        CU_ASSERT_EQUAL(cpa_context_sync(s.context, s.stream), CPA_OK);
        cpa_context_capture(s.context, 1);
        CU_ASSERT_EQUAL_FATAL(graphs->begin(s.stream), CPA_OK);
        enqueue(&s);
        CU_ASSERT_EQUAL_FATAL(graphs->end(s.stream, &graph), CPA_OK);
        cpa_context_capture(s.context, 0);
        for (int round = 0; round < ROUNDS; round++) {
            for (int of = 0; of < N_CASES; of++) put(&s, round, of);
            CU_ASSERT_EQUAL(graphs->launch(graph, s.stream), CPA_OK);
            CU_ASSERT_EQUAL(cpa_context_sync(s.context, s.stream), CPA_OK);
            for (int of = 0; of < N_CASES; of++) check_case(&s, round, of);
        }
        graphs->destroy(graph);
    }
    end(&s);
}

static const cpa_test TESTS[] = {{"every rank has the same bits", every_rank_has_the_same_bits},
                                 {"a graph does it again", a_graph_does_it_again}};

CPA_MPI_DEVICE_TEST_MAIN("slices of products over ranks", TESTS)
