/* kv_gather: spans of paged sequences from any token on become rows of tensors, whatever the form of the cache; and
 * kv_swap: blocks between memory of the device and of the host keep their bytes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

enum { HEADS = 3, BLOCK = 16, TOKENS = 90, ROWS = 100 };

static cpa_device *device;
static cpa_stream *stream;

/* ---- kv_gather ---- */

typedef struct gather_case {
    cpa_dtype from, to;
    cpa_kv_layout layout;
    int32_t k_dim, v_dim;
    float scale;
    int within_heads; /* rows lie within heads, with a gap behind each row */
} gather_case;

/* A pool with one sequence, through a table of its blocks; all else is NaN. */
static cpa_kv_fixture make_pool(const gather_case *c, const int32_t *table) {
    cpa_kv_fixture pool;
    const cpa_kv_view view = {.dtype = c->from,
                              .block_size = BLOCK,
                              .num_blocks = TOKENS / BLOCK + 3,
                              .kv_heads = HEADS,
                              .k_dim = c->k_dim,
                              .v_dim = c->v_dim,
                              .k_scale = c->scale,
                              .v_scale = c->scale};
    cpa_kv_fixture_init_layout(&pool, view, c->layout);
    for (int64_t t = 0; t < TOKENS; t++)
        for (int32_t head = 0; head < HEADS; head++) {
            float k[CPA_MAX_HEAD_DIM], v[CPA_MAX_HEAD_DIM];
            for (int32_t d = 0; d < c->k_dim; d++) k[d] = sinf((float)(t * 131 + head * 17 + d)) * (d == 1 ? 20 : 1);
            for (int32_t d = 0; d < c->v_dim; d++) v[d] = cosf((float)(t * 37 + head * 11 + d)) * (t == 7 ? 9 : 1);
            cpa_kv_fixture_store(&pool, table[t / BLOCK], t % BLOCK, head, k, v);
        }
    return pool;
}

/* Whether the row of a token is in the tensor, or, token -1, that it was left alone. */
static int is_right(const gather_case *c, const cpa_kv_fixture *pool, const int32_t *table, cpa_kv_part part,
                    const char *row, int32_t head, int64_t token) {
    const int32_t dim = part == CPA_KEYS ? c->k_dim : c->v_dim;
    const int64_t bytes = dim * cpa_dtype_bytes(c->to);
    float k[CPA_MAX_HEAD_DIM], v[CPA_MAX_HEAD_DIM];
    char want[CPA_MAX_HEAD_DIM * sizeof(float)];
    memset(want, 0xff, sizeof want);
    if (token >= 0) {
        cpa_kv_fixture_load(pool, table[token / BLOCK], token % BLOCK, head, k, v);
        cpa_narrow(want, part == CPA_KEYS ? k : v, c->to, dim);
    }
    return memcmp(row, want, (size_t)bytes) == 0;
}

static void gather(const gather_case *c) {
    int32_t *table = cpa_test_block_table(TOKENS, BLOCK, 1, 2);
    cpa_kv_fixture pool = make_pool(c, table);
    cpa_kv_view view = cpa_kv_fixture_upload(&pool, stream);
    const cpa_kv_span spans[] = {{.first = 5, .count = 40, .dst_row = 3},
                                 {.table = 1, .first = 0, .count = 16, .dst_row = 60},
                                 {.first = 63, .count = 1, .dst_row = 50},
                                 {.first = 4, .count = 0, .dst_row = 3},
                                 {.first = 72, .count = TOKENS - 72, .dst_row = 80}};
    int64_t tokens[ROWS], row_stride[2], head_stride[2], bytes[2];
    char *rows[2], *memory[2];
    for (int64_t row = 0; row < ROWS; row++) tokens[row] = -1;
    for (size_t s = 0; s < sizeof spans / sizeof *spans; s++)
        for (int64_t i = 0; i < spans[s].count; i++)
            tokens[spans[s].dst_row + i] = spans[s].table * BLOCK + spans[s].first + i;
    for (int part = 0; part < 2; part++) {
        const int32_t dim = part == CPA_KEYS ? c->k_dim : c->v_dim;
        row_stride[part] = c->within_heads ? dim + 8 : HEADS * dim;
        head_stride[part] = c->within_heads ? ROWS * row_stride[part] : dim;
        bytes[part] = ROWS * HEADS * (dim + 8) * cpa_dtype_bytes(c->to);
        rows[part] = cpa_test_poisoned(bytes[part], 1);
        memory[part] = cpa_test_upload(stream, rows[part], bytes[part]);
    }
    cpa_kv_gather_args args = {.size = sizeof args,
                               .src = view,
                               .block_tables = table,
                               .n_table_entries = (TOKENS + BLOCK - 1) / BLOCK,
                               .spans = spans,
                               .n_spans = sizeof spans / sizeof *spans,
                               .k = memory[0],
                               .v = memory[1],
                               .dst_rows = ROWS,
                               .dst_dtype = c->to};
    if (c->within_heads) {
        args.k_row_stride = row_stride[0], args.k_head_stride = head_stride[0];
        args.v_row_stride = row_stride[1], args.v_head_stride = head_stride[1];
    }
    CU_ASSERT_EQUAL(cpa_kv_gather(&args, stream), CPA_OK);
    int64_t wrong = 0;
    for (int part = 0; part < 2; part++) {
        cpa_test_download(stream, rows[part], memory[part], bytes[part]);
        for (int64_t row = 0; row < ROWS; row++)
            for (int32_t head = 0; head < HEADS; head++) {
                const int64_t at = row * row_stride[part] + head * head_stride[part];
                wrong += !is_right(c, &pool, table, (cpa_kv_part)part, rows[part] + at * cpa_dtype_bytes(c->to), head,
                                   tokens[row]);
            }
        cpa_test_free(stream, memory[part]);
        free(rows[part]);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&pool);
    free(table);
}

static void spans_become_rows(void) {
    const gather_case cases[] = {
        {CPA_F32, CPA_F32, CPA_TOKEN_MAJOR, 24, 40, 0, 0},
        {CPA_BF16, CPA_BF16, CPA_HEAD_MAJOR, 64, 64, 0, 1},
        {CPA_BF16, CPA_F32, CPA_TOKEN_MAJOR, 7, 5, 0, 1},
        {CPA_F16, CPA_F16, CPA_VLLM_X, 64, 48, 0, 0},
        {CPA_INT8, CPA_BF16, CPA_TOKEN_MAJOR, 64, 128, 0, 1},
        {CPA_FP8_E4M3, CPA_F16, CPA_HEAD_MAJOR, 64, 64, 0.05f, 0},
        {CPA_FP8_E5M2, CPA_BF16, CPA_TOKEN_MAJOR, 64, 32, 0, 0},
        {CPA_FP8_E4M3, CPA_F32, CPA_VLLM_X, 128, 64, 0, 1},
        {CPA_FP8_E4M3, CPA_BF16, CPA_TOKEN_MAJOR, 192, 128, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) gather(&cases[i]);
}

static void spans_that_are_none_are_refused(void) {
    const gather_case c = {CPA_BF16, CPA_BF16, CPA_TOKEN_MAJOR, 16, 16, 0, 0};
    const int32_t table[2] = {1, 3};
    cpa_kv_fixture pool;
    const cpa_kv_view shape = {
        .dtype = c.from, .block_size = BLOCK, .num_blocks = 4, .kv_heads = HEADS, .k_dim = 16, .v_dim = 16};
    cpa_kv_fixture_init_layout(&pool, shape, c.layout);
    char *rows = cpa_test_poisoned(ROWS * HEADS * 16, 2);
    cpa_kv_span spans[2] = {{.count = 20}, {.first = 7, .count = 9, .dst_row = 20}};
    const cpa_kv_gather_args good = {.size = sizeof good,
                                     .src = pool.view,
                                     .block_tables = table,
                                     .n_table_entries = 2,
                                     .spans = spans,
                                     .n_spans = 2,
                                     .k = rows,
                                     .v = rows,
                                     .dst_rows = ROWS,
                                     .dst_dtype = CPA_BF16};
    const struct {
        cpa_kv_span span;
        const char *line;
    } bad[] = {
        {{.first = -1, .count = 2}, "has table 0, first -1, count 2"},
        {{.first = 20, .count = 13}, "reads table entry 0 + 2 of 2"},
        {{.table = 2, .count = 1}, "reads table entry 2 + 0 of 2"},
        {{.count = 20, .dst_row = 81}, "fills 20 rows from 81 on of 100"},
        {{.count = 3, .dst_row = 27}, "spans[1]"},
        {{.first = INT64_MAX, .count = 1}, "up to 2^44"},
        {{.reserved = {1}}, "reserved bytes of spans[0]"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        spans[0] = bad[i].span;
        CU_ASSERT_EQUAL(cpa_kv_gather(&good, stream), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), bad[i].line));
    }
    spans[0] = (cpa_kv_span){.count = 1};
    cpa_kv_gather_args args = good;
    args.dst_dtype = CPA_INT8;
    CU_ASSERT_EQUAL(cpa_kv_gather(&args, stream), CPA_INVALID);
    args = good, args.v = NULL;
    CU_ASSERT_EQUAL(cpa_kv_gather(&args, stream), CPA_INVALID);
    args = good, args.k_head_stride = 15;
    CU_ASSERT_EQUAL(cpa_kv_gather(&args, stream), CPA_INVALID);
    args = good, args.n_spans = 1, args.v_row_stride = 16, args.v_head_stride = 16;
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(cpa_kv_gather(&args, stream), CPA_OK); /* [heads, 1 row, dim] */
    spans[0].count = 2;
    CU_ASSERT_EQUAL(cpa_kv_gather(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "expected heads of 16 that do not overlap"));
    args = good, args.src.v_in_k = 1;
    CU_ASSERT_EQUAL(cpa_kv_gather(&args, stream), CPA_UNSUPPORTED);
    cpa_kv_fixture_destroy(&pool);
    free(rows);
}

/* ---- kv_swap ---- */

static void fill(cpa_kv_fixture *pool, int seed) {
    for (int64_t i = 0; i < pool->k_bytes; i++) ((uint8_t *)pool->view.k)[i] = (uint8_t)(i * 7 + i / 251 + seed);
    for (int64_t i = 0; i < pool->v_bytes; i++) ((uint8_t *)pool->view.v)[i] = (uint8_t)(i * 13 + i / 241 + seed);
}

static int same_block(const cpa_kv_fixture *a, int64_t i, const cpa_kv_fixture *b, int64_t j) {
    const int64_t k = a->k_bytes / a->view.num_blocks, v = a->v_bytes / a->view.num_blocks;
    return memcmp((char *)a->view.k + i * k, (char *)b->view.k + j * k, (size_t)k) == 0 &&
           memcmp((char *)a->view.v + i * v, (char *)b->view.v + j * v, (size_t)v) == 0;
}

static void swap(cpa_dtype dtype, cpa_kv_layout layout) {
    enum { BLOCKS = 8, PAIRS = 5 };
    static const int64_t in[PAIRS][2] = {{0, 3}, {1, 4}, {2, 5}, {6, 0}, {7, 2}};
    const cpa_kv_view shape = {
        .dtype = dtype, .block_size = BLOCK, .num_blocks = BLOCKS, .kv_heads = HEADS, .k_dim = 32, .v_dim = 16};
    cpa_kv_fixture host, other, before; /* what the device has before */
    cpa_kv_fixture_init_layout(&host, shape, layout);
    cpa_kv_fixture_init_layout(&other, shape, layout);
    fill(&host, 1), fill(&other, 100);
    cpa_kv_fixture_init_layout(&before, shape, layout);
    fill(&before, 100);
    cpa_kv_view on_device = cpa_kv_fixture_upload(&other, stream);
    cpa_kv_swap_args args = {.size = sizeof args, .src = host.view, .dst = on_device, .pairs = in, .n_pairs = PAIRS};
    CU_ASSERT_EQUAL(cpa_kv_swap(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&other, &on_device, stream);
    for (int i = 0; i < PAIRS; i++) CU_ASSERT(same_block(&host, in[i][0], &other, in[i][1]));
    CU_ASSERT(same_block(&before, 1, &other, 1) && same_block(&before, 6, &other, 6));
    const int64_t out[1][2] = {{5, 7}};
    args.src = on_device, args.dst = host.view, args.pairs = out, args.n_pairs = 1;
    CU_ASSERT_EQUAL(cpa_kv_swap(&args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    CU_ASSERT(same_block(&host, 7, &other, 5));
    cpa_kv_view_free(&on_device, stream);
    cpa_kv_fixture_destroy(&before);
    cpa_kv_fixture_destroy(&other);
    cpa_kv_fixture_destroy(&host);
}

static void blocks_go_to_host_memory_and_back(void) {
    swap(CPA_BF16, CPA_TOKEN_MAJOR);
    swap(CPA_F32, CPA_HEAD_MAJOR);
    swap(CPA_INT8, CPA_TOKEN_MAJOR);
    swap(CPA_FP8_E4M3, CPA_VLLM_X);
}

/* Blocks that lie closer than allocations would put them, as the caller's own strides may have it. */
static void blocks_without_scales_of_rows_end_with_their_rows(void) {
    enum { DIM = 72, BLOCKS = 4 };
    static const int64_t pairs[2][2] = {{0, 3}, {2, 0}};
    uint8_t from[2][BLOCKS * DIM], to[2][BLOCKS * DIM], want[2][BLOCKS * DIM];
    void *memory[2];
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < BLOCKS * DIM; i++) from[part][i] = (uint8_t)(i % 251 + part);
        memset(want[part], 0xff, sizeof want[part]);
        memory[part] = cpa_test_upload(stream, want[part], sizeof want[part]);
        for (int i = 0; i < 2; i++) memcpy(want[part] + pairs[i][1] * DIM, from[part] + pairs[i][0] * DIM, DIM);
    }
    cpa_kv_view src = {.k = from[0],
                       .v = from[1],
                       .dtype = CPA_FP8_E4M3,
                       .block_size = 1,
                       .num_blocks = BLOCKS,
                       .kv_heads = 1,
                       .k_dim = DIM,
                       .v_dim = DIM,
                       .k_scale = 1,
                       .v_scale = 1,
                       .k_block_stride = DIM,
                       .v_block_stride = DIM};
    cpa_kv_view dst = src;
    dst.k = memory[0], dst.v = memory[1];
    cpa_kv_swap_args args = {.size = sizeof args, .src = src, .dst = dst, .pairs = pairs, .n_pairs = 2};
    CU_ASSERT_EQUAL(cpa_kv_swap(&args, stream), CPA_OK);
    for (int part = 0; part < 2; part++) {
        cpa_test_download(stream, to[part], memory[part], sizeof to[part]);
        CU_ASSERT_EQUAL(memcmp(to[part], want[part], sizeof to[part]), 0);
        cpa_test_free(stream, memory[part]);
    }
}

static void blocks_that_differ_are_not_swapped(void) {
    const cpa_kv_view shape = {
        .dtype = CPA_BF16, .block_size = BLOCK, .num_blocks = 2, .kv_heads = HEADS, .k_dim = 32, .v_dim = 16};
    const int64_t one[1][2] = {{0, 1}}, far[1][2] = {{0, 2}};
    cpa_kv_fixture a, b;
    cpa_kv_fixture_init_layout(&a, shape, CPA_TOKEN_MAJOR);
    cpa_kv_fixture_init_layout(&b, shape, CPA_HEAD_MAJOR);
    cpa_kv_swap_args args = {.size = sizeof args, .src = a.view, .dst = b.view, .pairs = one, .n_pairs = 1};
    CU_ASSERT_EQUAL(cpa_kv_swap(&args, stream), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "expected the same, of blocks in one piece"));
    args.dst = a.view;
    CU_ASSERT_EQUAL(cpa_kv_swap(&args, stream), CPA_INVALID);
    args.dst = b.view, args.pairs = far;
    CU_ASSERT_EQUAL(cpa_kv_swap(&args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_kv_swap(&args, NULL), CPA_INVALID);
    cpa_kv_fixture_destroy(&a);
    cpa_kv_fixture_destroy(&b);
}

static const cpa_test TESTS[] = {
    {"spans become rows", spans_become_rows},
    {"spans that are none are refused", spans_that_are_none_are_refused},
    {"blocks go to host memory and back", blocks_go_to_host_memory_and_back},
    {"blocks without scales of rows end with their rows", blocks_without_scales_of_rows_end_with_their_rows},
    {"blocks that differ are not swapped", blocks_that_differ_are_not_swapped},
};

int main(int argc, char **argv) {
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    cpa_test_device_open(2, &device, &stream);
    const int failed = cpa_test_main(argc, argv, "kv_gather and kv_swap", TESTS, sizeof TESTS / sizeof TESTS[0]);
    cpa_test_device_close(device, stream);
    return failed;
}
