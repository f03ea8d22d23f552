/* Plans from the arrays of FlashInfer and SGLang: the rows of sequences as the reference has them, and what is
 * refused. */
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

enum { SEQUENCES = 6 };
/* The sequences are the beginnings of one, up to these; each has the rows from the end of the one before on. */
static const int32_t ENDS[SEQUENCES + 1] = {0, 40, 57, 57, 186, 187, 300};

typedef struct given {
    cpa_attend_fixture f;
    cpa_attend_indices indices;
    int32_t kv_indptr[SEQUENCES + 1], last_page_len[SEQUENCES], *kv_indices;
    void *device_indices;
} given;

static void begin(given *g, const cpa_attend_case *base, int32_t block_size, int on_device) {
    cpa_attend_case shape = *base;
    shape.block_size = shape.interleave = block_size;
    *g = (given){.kv_indices = NULL};
    cpa_attend_fixture_init(&g->f, &shape, 1);
    g->kv_indices = calloc((size_t)g->f.n_table_entries * SEQUENCES, sizeof *g->kv_indices);
    for (int s = 0; s < SEQUENCES; s++) {
        const int32_t pages = ENDS[s + 1] == ENDS[s] ? 0 : (ENDS[s + 1] + block_size - 1) / block_size;
        memcpy(g->kv_indices + g->kv_indptr[s], g->f.tables, (size_t)pages * sizeof *g->kv_indices);
        g->kv_indptr[s + 1] = g->kv_indptr[s] + pages;
        g->last_page_len[s] = ENDS[s + 1] - (pages - 1) * block_size;
    }
    g->device_indices = cpa_test_upload(g->f.stream, g->kv_indices, g->kv_indptr[SEQUENCES] * (int64_t)sizeof(int32_t));
    g->indices = (cpa_attend_indices){.size = sizeof g->indices,
                                      .shape = {.q_heads = shape.q_heads,
                                                .kv_heads = shape.kv_heads,
                                                .k_dim = shape.k_dim,
                                                .v_dim = shape.v_dim,
                                                .kv_dtype = shape.kv_dtype},
                                      .block_size = block_size,
                                      .sequences = SEQUENCES,
                                      .qo_indptr = ENDS,
                                      .kv_indptr = g->kv_indptr,
                                      .last_page_len = block_size == 1 ? NULL : g->last_page_len,
                                      .kv_indices = on_device ? g->device_indices : g->kv_indices,
                                      .indices_on_device = on_device,
                                      .num_blocks = on_device ? g->f.device_kv.num_blocks : 0};
}

static void end(given *g) {
    cpa_test_free(g->f.stream, g->device_indices);
    free(g->kv_indices);
    cpa_attend_fixture_destroy(&g->f);
}

/* Attends by the plan that is set, from and to the result; how many rows are wrong. */
static int64_t wrong_rows_from(given *g, int resume, cpa_attend_result *result) {
    cpa_stream *stream = g->f.stream;
    float *o = cpa_test_upload(stream, result->o, result->o_bytes);
    float *lse = cpa_test_upload(stream, result->lse, result->lse_bytes);
    void *out = cpa_test_upload(stream, result->out, result->out_bytes);
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = g->f.device_q,
                                  .q_dtype = g->f.shape.q_dtype,
                                  .kv = g->f.device_kv,
                                  .mask = g->f.shape.mask,
                                  .resume = resume,
                                  .state = {.o = o, .lse = lse},
                                  .out = resume ? NULL : out};
    CU_ASSERT_EQUAL(cpa_attend(g->f.plan, &args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_test_download(stream, result->o, o, result->o_bytes);
    cpa_test_download(stream, result->lse, lse, result->lse_bytes);
    cpa_test_download(stream, result->out, out, result->out_bytes);
    const int64_t at = g->f.rows * g->f.shape.q_heads * g->f.shape.v_dim;
    if (resume) cpa_narrow(result->out, result->o, g->f.shape.q_dtype, at); /* which a resumed call leaves to others */
    const int64_t wrong = cpa_attend_fixture_check(&g->f, 0, 1, result, NULL);
    cpa_test_free(stream, out);
    cpa_test_free(stream, lse);
    cpa_test_free(stream, o);
    return wrong;
}

static int64_t wrong_rows(given *g) {
    cpa_attend_result result;
    cpa_attend_result_init(&result, &g->f);
    const int64_t wrong = wrong_rows_from(g, 0, &result);
    cpa_attend_result_destroy(&result);
    return wrong;
}

static void extend(int on_device) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++)
        for (int32_t block = 1; block <= 64; block *= 4) {
            given g;
            begin(&g, &CPA_ATTEND_BASE[base], block, on_device);
            CU_ASSERT_EQUAL(cpa_attend_plan_set_indices(g.f.plan, &g.indices, NULL), CPA_OK);
            CU_ASSERT_EQUAL(wrong_rows(&g), 0);
            end(&g);
        }
}

static void indices_on_the_host(void) {
    extend(0);
}

static void indices_on_the_device(void) {
    extend(1);
}

/* One row each, that of the last token, where qo_indptr is NULL. */
static void decode(void) {
    given g;
    cpa_attend_case shape = CPA_ATTEND_BASE[1];
    shape.start = shape.length - 1;
    begin(&g, &shape, 1, 0);
    const int32_t indptr[2] = {0, (int32_t)shape.length};
    g.indices.qo_indptr = NULL;
    g.indices.kv_indptr = indptr;
    g.indices.kv_indices = g.f.tables;
    g.indices.sequences = 1;
    CU_ASSERT_EQUAL(cpa_attend_plan_set_indices(g.f.plan, &g.indices, NULL), CPA_OK);
    CU_ASSERT_EQUAL(wrong_rows(&g), 0);
    end(&g);
}

/* The tokens before a page are elsewhere, where the first of them are attended as sinks; those behind are numbered on. */
static void pages_before_a_window_are_gone(void) {
    enum { BLOCK = 16, GONE = 9 };
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        given g;
        cpa_attend_result result;
        cpa_attend_case shape = CPA_ATTEND_BASE[base];
        shape.start = 250;
        shape.mask = (cpa_mask){.causal = 1, .window = 100, .sinks = GONE * BLOCK + 6};
        begin(&g, &shape, BLOCK, 0);
        const int32_t rows[2] = {0, (int32_t)(shape.length - shape.start)};
        const int32_t pages[2] = {0, (int32_t)((shape.length + BLOCK - 1) / BLOCK) - GONE};
        const int32_t last = (int32_t)((shape.length - 1) % BLOCK + 1);
        const int64_t first = GONE * BLOCK;
        g.indices.qo_indptr = rows, g.indices.kv_indptr = pages, g.indices.last_page_len = &last;
        g.indices.kv_indices = g.f.tables + GONE;
        g.indices.sequences = 1;
        g.indices.k_first = &first;
        cpa_attend_result_init(&result, &g.f);
        const cpa_attend_item before = cpa_attend_fixture_item(&g.f, 0, 0, g.f.q_count[0], 0, 0, first);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&g.f, &before, 1, 0, &result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_plan_set_indices(g.f.plan, &g.indices, NULL), CPA_OK);
        CU_ASSERT_EQUAL(wrong_rows_from(&g, 1, &result), 0);
        cpa_attend_result_destroy(&result);
        end(&g);
    }
}

/* The change to g.indices is refused with a line that holds `says`. */
#define REFUSE(says, ...)                                                                                              \
    do {                                                                                                               \
        given g;                                                                                                       \
        cpa_error err = {.message = ""};                                                                               \
        begin(&g, &CPA_ATTEND_BASE[0], 16, 0);                                                                         \
        __VA_ARGS__;                                                                                                   \
        CU_ASSERT_EQUAL(cpa_attend_plan_set_indices(g.f.plan, &g.indices, &err), CPA_INVALID);                         \
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));                                                             \
        end(&g);                                                                                                       \
    } while (0)

static void bad_indices(void) {
    const int32_t down[SEQUENCES + 1] = {0, 40, 39, 57, 186, 187, 300}, late[SEQUENCES + 1] = {0, 0, 0, 0, 0, 0, 301};
    REFUSE("sequences, expected 0..", g.indices.sequences = -1);
    REFUSE("kv_indptr is NULL", g.indices.kv_indptr = NULL);
    REFUSE("block_size is 3", g.indices.block_size = 3);
    REFUSE("qo_indptr[1] is 40 and the next 39", g.indices.qo_indptr = down);
    REFUSE("sequence 5 has 301 rows and 300 tokens", g.indices.qo_indptr = late);
    REFUSE("kv_indptr[0] is -1", g.kv_indptr[0] = -1);
    REFUSE("kv_indptr[1] is 9 and the next 7", g.kv_indptr[1] = 9);
    REFUSE("last_page_len[3] is 17, expected 1..16", g.last_page_len[3] = 17);
    REFUSE("last_page_len[0] is 0", g.last_page_len[0] = 0);
    REFUSE("block_tables is NULL", g.indices.kv_indices = NULL);
    REFUSE("is -7", g.kv_indices[3] = -7);
    REFUSE("num_blocks is 0", g.indices.indices_on_device = 1);
    REFUSE("block_tables_on_device is 2", g.indices.indices_on_device = 2);
    REFUSE("size", g.indices.size = 8);
    const int64_t odd[SEQUENCES] = {0, 16, 8}, far[SEQUENCES] = {INT64_MAX - 15}, below[SEQUENCES] = {-16};
    REFUSE("k_first[2] is 8, expected a multiple of block_size, 16", g.indices.k_first = odd);
    REFUSE("k_first[0] is 9223372036854775792", g.indices.k_first = far);
    REFUSE("k_first[0] is -16", g.indices.k_first = below);
    cpa_error err = {.message = ""};
    const cpa_attend_indices none = {.size = sizeof none};
    CU_ASSERT_EQUAL(cpa_attend_plan_set_indices(NULL, &none, &err), CPA_INVALID);
}

static const cpa_test tests[] = {
    {"rows of sequences by indices on the host", indices_on_the_host},
    {"rows of sequences by indices on the device", indices_on_the_device},
    {"one row each without qo_indptr", decode},
    {"pages before a window are gone", pages_before_a_window_are_gone},
    {"bad indices", bad_indices},
};

CPA_DEVICE_TEST_MAIN("plans of attend from indices", tests)
