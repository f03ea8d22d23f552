/* sparse_attend against float64 over the keys that lists name: every format of cache, both scopes, units, lists with
 * entries that are none, and the grids of FlashMLA's own tests, of which --whole takes all on a device. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/sparse.h>

#include "base/convert.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/rules_fixture.h"
#include "tests/fixtures/sparse_fixture.h"
#include "tests/fixtures/unit.h"

static int whole;

static const cpa_sparse_case LATENT = {.rows = 3,
                                       .q_heads = 64,
                                       .kv_heads = 1,
                                       .k_dim = 576,
                                       .v_dim = 512,
                                       .v_in_k = 1,
                                       .q_dtype = CPA_BF16,
                                       .kv_dtype = CPA_BF16,
                                       .scale = 0.0721687824f,
                                       .scopes = {{.keys = 300, .block_size = 64, .width = 200, .unit = 1}}};
static const cpa_sparse_case HEADS = {.rows = 4,
                                      .q_heads = 8,
                                      .kv_heads = 2,
                                      .k_dim = 128,
                                      .v_dim = 128,
                                      .q_dtype = CPA_BF16,
                                      .kv_dtype = CPA_BF16,
                                      .scopes = {{.keys = 400, .block_size = 16, .width = 150, .unit = 1}}};

static void every_format_of_latents(void) {
    static const struct {
        cpa_dtype q, kv;
        float scale;
    } formats[] = {{CPA_BF16, CPA_BF16, 0},        {CPA_F16, CPA_F16, 0},      {CPA_F32, CPA_F32, 0},
                   {CPA_BF16, CPA_FP8_E4M3, 0.1f}, {CPA_F16, CPA_FP8_E4M3, 2}, {CPA_BF16, CPA_FP8_T128, 0},
                   {CPA_F32, CPA_FP8_T128, 0},     {CPA_BF16, CPA_FP8_T64, 0}};
    static const int whats[] = {0, CPA_TEST_SPARSE_SINKS, CPA_TEST_SPARSE_TWO_CALLS | CPA_TEST_SPARSE_SINKS,
                                CPA_TEST_SPARSE_NO_COUNTS, CPA_TEST_SPARSE_ONE_LIST};
    for (int i = 0; i < 8 * 5; i++) {
        cpa_sparse_case c = LATENT;
        c.q_dtype = formats[i % 8].q, c.kv_dtype = formats[i % 8].kv, c.k_scale = formats[i % 8].scale;
        c.what = whats[i % 5];
        if (c.kv_dtype == CPA_FP8_T64) c.k_dim = 512;
        c.q_heads = i % 3 ? 64 : 5, c.rows = 1 + i % 7;
        if (i % 2 || c.what & CPA_TEST_SPARSE_TWO_CALLS)
            c.scopes[1] = (cpa_sparse_case_scope){.keys = 130, .block_size = 16, .width = 70, .unit = 1, .gap = 2};
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
    }
}

static void every_count_of_heads(void) {
    static const int32_t heads[] = {1, 3, 16, 33, 63, 65, 126, 128};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        cpa_sparse_case c = LATENT;
        c.q_heads = heads[i], c.rows = 2;
        if (i % 2) c.kv_dtype = CPA_FP8_T128;
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
    }
}

/* More units of a row and 64 heads than a device has multiprocessors, lists of one tile and of two. */
static void many_rows_of_latents(void) {
    static const cpa_dtype dtypes[] = {CPA_FP8_T64, CPA_FP8_T128, CPA_BF16};
    for (int i = 0; i < 3 * 2; i++) {
        cpa_sparse_case c = LATENT;
        c.kv_dtype = dtypes[i % 3];
        if (c.kv_dtype == CPA_FP8_T64) c.k_dim = 512;
        c.q_heads = i / 3 ? 64 : 128, c.rows = i / 3 ? 141 : 71;
        c.scopes[0].width = 70;
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
    }
}

/* Latents of other widths, of which tensor cores know no more than 512 of 512. */
static void every_width_of_latents(void) {
    static const int32_t widths[][3] = {{512, 512, 1}, {320, 256, 1}, {48, 32, 2}, {17, 5, 1}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        cpa_sparse_case c = LATENT;
        c.k_dim = widths[i][0], c.v_dim = widths[i][1], c.kv_heads = widths[i][2], c.q_heads = 6;
        c.what = c.kv_heads > 1 ? CPA_TEST_SPARSE_HEAD_LISTS : 0;
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
    }
}

/* Groups of 1 to 16 heads and wider ones, heads of 64 to 256, single keys and neighbours of four. */
static void grouped_heads(void) {
    static const int32_t heads[][2] = {{8, 2}, {3, 3}, {24, 2}, {16, 1}, {34, 2}, {6, 1}};
    static const int32_t widths[][2] = {{128, 128}, {64, 64}, {256, 256}, {192, 128}, {80, 80}, {72, 40}};
    static const cpa_dtype dtypes[][2] = {{CPA_BF16, CPA_BF16},     {CPA_F16, CPA_F16},  {CPA_BF16, CPA_FP8_E4M3},
                                          {CPA_BF16, CPA_FP8_E5M2}, {CPA_F32, CPA_BF16}, {CPA_F16, CPA_INT8}};
    static const int whats[] = {CPA_TEST_SPARSE_HEAD_LISTS, 0, CPA_TEST_SPARSE_HEAD_LISTS | CPA_TEST_SPARSE_SINKS,
                                CPA_TEST_SPARSE_NO_COUNTS | CPA_TEST_SPARSE_HEAD_LISTS,
                                CPA_TEST_SPARSE_TWO_CALLS | CPA_TEST_SPARSE_HEAD_LISTS};
    for (int i = 0; i < 6 * 6 * 5; i += cpa_test_promises_bits() ? 7 : 1) {
        cpa_sparse_case c = HEADS;
        c.q_heads = heads[i % 6][0], c.kv_heads = heads[i % 6][1];
        c.k_dim = widths[i / 6 % 6][0], c.v_dim = widths[i / 6 % 6][1];
        const int dtype = i % 4 ? i / 4 % 2 : i / 4 % 6;
        c.q_dtype = dtypes[dtype][0], c.kv_dtype = dtypes[dtype][1];
        c.what = whats[i / 7 % 5];
        c.rows = 1 + i % 9;
        if (i % 2) c.scopes[0].unit = 4, c.scopes[0].width = 60;
        if (i % 3 == 1) c.scopes[0].block_size = 4;
        if (c.what & CPA_TEST_SPARSE_TWO_CALLS)
            c.scopes[1] = (cpa_sparse_case_scope){.keys = 96, .block_size = 8, .width = 40, .unit = 1};
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
    }
}

static void rows_without_keys(void) {
    static const int whats[] = {CPA_TEST_SPARSE_NO_KEYS, CPA_TEST_SPARSE_NO_LISTS,
                                CPA_TEST_SPARSE_NO_KEYS | CPA_TEST_SPARSE_SINKS | CPA_TEST_SPARSE_NO_COUNTS};
    for (int i = 0; i < 6; i++) {
        cpa_sparse_case c = i % 2 ? LATENT : HEADS;
        cpa_sparse_fixture d;
        c.what = whats[i / 2];
        c.scopes[0].unit = 1;
        cpa_sparse_fixture_init(&d, &c);
        CU_ASSERT_EQUAL(cpa_sparse_fixture_run(&d, 0, c.rows, 0, 1), CPA_OK);
        cpa_sparse_fixture_download(&d);
        for (int64_t at = 0; at < c.rows * c.q_heads; at++) {
            CU_ASSERT_EQUAL(d.lse[at], -INFINITY);
            CU_ASSERT(d.o[at * c.v_dim] == 0 && d.max_logits[at] == -INFINITY);
        }
        cpa_sparse_fixture_destroy(&d);
    }
}

/* Lists longer than there are keys, in which each occurs several times, and such as need many tiles. */
static void long_lists(void) {
    for (int i = 0; i < 4; i++) {
        cpa_sparse_case c = i % 2 ? LATENT : HEADS;
        c.rows = 1 + i / 2, c.q_heads = c.kv_heads * 4;
        c.scopes[0].keys = 64, c.scopes[0].width = 2500 + 13 * i;
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
    }
}

/* A few of a grid on the host, with --whole those that take a second at most; twice as many on a device, or all: their
 * inputs take longer to make than results. */
static int is_taken(const cpa_sparse_case *c, int i, int one_in) {
    const double pairs = (double)c->rows * c->q_heads * (double)(c->scopes[0].width + c->scopes[1].width);
    if (cpa_test_promises_bits()) return whole ? pairs < 1e6 : pairs < 3e5 && i % one_in == 0;
    return whole || (pairs < 1e7 && i % (one_in / 2 + 1) == 0);
}

/* A block that is no power of two is one of single tokens. */
static cpa_sparse_case_scope scope_of(int32_t keys, int32_t width, int32_t block_size) {
    const int power = (block_size & (block_size - 1)) == 0;
    return (cpa_sparse_case_scope){keys, power ? block_size : 1, width, 1, power ? 1 : 0};
}

/* FlashMLA, tests/test_flash_mla_sparse_decoding.py: keys, entries of a list and blocks of either scope, batches of
 * sequences of 1 and 3 rows. */
static void grid_of_decode(void) {
    static const int32_t shapes[][3] = {{512, 64, 2},    {512, 64, 64},   {512, 64, 69},    {1024, 576, 2},
                                        {1024, 576, 61}, {2046, 2048, 2}, {2046, 2048, 64}, {2046, 2048, 576}};
    static const int32_t batches[] = {4, 74, 321};
    int taken = 0;
    for (int i = 0; i < 8 * 9 * 3 * 2 * 2 * 2; i++) {
        cpa_sparse_case c = LATENT;
        const int32_t *first = shapes[i % 8], *second = shapes[i / 8 % 9 % 8];
        c.rows = (int64_t)batches[i / 72 % 3] * (i / 216 % 2 ? 3 : 1);
        c.q_heads = i / 432 % 2 ? 128 : 64;
        c.k_dim = i / 864 ? 512 : 576;
        c.kv_dtype = c.k_dim == 576 && i % 3 ? CPA_FP8_T128 : CPA_BF16;
        c.scopes[0] = scope_of(first[0], first[1], first[2]);
        if (i / 8 % 9 < 8) c.scopes[1] = scope_of(second[0], second[1], second[2]);
        c.what = (i % 5 ? 0 : CPA_TEST_SPARSE_SINKS) | (i % 11 ? 0 : CPA_TEST_SPARSE_NO_LISTS);
        if (!is_taken(&c, i, 17)) continue;
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
        taken++;
    }
    printf(" %d cases ", taken);
}

/* FlashMLA, tests/test_flash_mla_sparse_prefill.py. */
static void grid_of_prefill(void) {
    static const int32_t shapes[][2] = {{128, 128},  {256, 256},  {512, 512}, {592, 128}, {1840, 256},
                                        {1592, 384}, {1521, 512}, {95, 128},  {153, 256}, {114, 384}};
    static const int32_t rows[] = {1, 62, 213};
    int taken = 0;
    for (int i = 0; i < 10 * 3 * 2 * 2; i++) {
        cpa_sparse_case c = LATENT;
        c.rows = rows[i / 10 % 3];
        c.q_heads = i / 30 % 2 ? 128 : 64;
        c.k_dim = i / 60 ? 512 : 576;
        c.scopes[0] = (cpa_sparse_case_scope){shapes[i % 10][0], 1, shapes[i % 10][1], 1, 0};
        c.what = i % 3 ? 0 : CPA_TEST_SPARSE_SINKS;
        if (!is_taken(&c, i, 7)) continue;
        CU_ASSERT_EQUAL(cpa_sparse_wrong_rows(&c), 0);
        taken++;
    }
    printf(" %d cases ", taken);
}

/* Rows by themselves, in one batch, and again. */
static void bits_do_not_depend_on_the_batch(void) {
    for (int i = 0; i < 2; i++) {
        cpa_sparse_case c = i ? LATENT : HEADS;
        cpa_sparse_fixture d;
        c.rows = 7;
        cpa_sparse_fixture_init(&d, &c);
        const int64_t n = c.rows * c.q_heads, bytes = n * c.v_dim * (int64_t)sizeof(float);
        float *o = malloc((size_t)bytes), *lse = malloc((size_t)n * sizeof *lse);
        CU_ASSERT_EQUAL(cpa_sparse_fixture_run(&d, 0, c.rows, 0, 1), CPA_OK);
        cpa_sparse_fixture_download(&d);
        memcpy(o, d.o, (size_t)bytes);
        memcpy(lse, d.lse, (size_t)n * sizeof *lse);
        for (int64_t row = 0; row < c.rows; row += 3)
            CU_ASSERT_EQUAL(cpa_sparse_fixture_run(&d, row, row + 3 < c.rows ? 3 : c.rows - row, 0, 1), CPA_OK);
        cpa_sparse_fixture_download(&d);
        if (d.device->caps.bit_exact)
            CU_ASSERT(memcmp(o, d.o, (size_t)bytes) == 0 && memcmp(lse, d.lse, (size_t)n * sizeof *lse) == 0);
        CU_ASSERT_EQUAL(cpa_sparse_fixture_wrong(&d, 1), 0);
        CU_ASSERT_EQUAL(cpa_sparse_fixture_run(&d, 0, c.rows, 0, 1), CPA_OK);
        cpa_sparse_fixture_download(&d);
        memcpy(o, d.o, (size_t)bytes);
        CU_ASSERT_EQUAL(cpa_sparse_fixture_run(&d, 0, c.rows, 0, 1), CPA_OK);
        cpa_sparse_fixture_download(&d);
        CU_ASSERT_EQUAL(memcmp(o, d.o, (size_t)bytes), 0);
        free(o);
        free(lse);
        cpa_sparse_fixture_destroy(&d);
    }
}

/* The slots of a row's list that its mask shows, through the block table. */
static void map_row(const cpa_attend_fixture *f, int64_t row, int32_t *slots) {
    const cpa_case_score *score = f->score;
    const int64_t entry = score->row_map ? score->row_map[row] : row;
    const int32_t *list = score->lists + entry * score->list_width;
    const int64_t query = f->shape.start + row;
    for (int32_t i = 0; i < score->list_width; i++) {
        const int64_t key = list[i];
        const int seen = i < score->counts[entry] && key >= 0 && key < f->shape.length && key <= query;
        slots[i] = seen ? f->tables[f->table[0] + key / f->shape.block_size] * f->shape.block_size +
                              (int32_t)(key % f->shape.block_size)
                        : -1;
    }
}

/* What attend makes of lists of indices is what this makes of their slots. */
static void slots_are_what_indices_become(void) {
    cpa_attend_case shape = CPA_ATTEND_BASE[1];
    cpa_attend_fixture f;
    cpa_attend_result result;
    shape.kv_heads = 1, shape.q_heads = 4, shape.start = shape.length - 9;
    cpa_attend_fixture_init(&f, &shape, 2);
    cpa_attend_result_init(&result, &f);
    cpa_case_score score = cpa_test_score_of(&f, CPA_TEST_LISTS);
    f.score = &score;
    for (int64_t i = 0; i < score.rows; i++)
        if (score.counts[i] < 0) score.counts[i] = 0; /* those that attend all keys */
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
    int32_t *slots = malloc((size_t)(score.rows * score.list_width) * sizeof *slots);
    for (int64_t row = 0; row < score.rows; row++) map_row(&f, row, slots + row * score.list_width);
    const int64_t n = f.rows * shape.q_heads;
    void *device_slots = cpa_test_upload(f.stream, slots, score.rows * score.list_width * 4);
    void *o = cpa_test_upload(f.stream, result.o, result.o_bytes), *lse = cpa_test_upload(f.stream, result.lse, n * 4);
    void *out = cpa_test_upload(f.stream, result.out, result.out_bytes);
    const cpa_sparse_scope scope = {
        .kv = f.device_kv, .slots = device_slots, .row_stride = score.list_width, .width = score.list_width, .unit = 1};
    const cpa_sparse_attend_args args = {.size = sizeof args,
                                         .rows = f.rows,
                                         .q_heads = shape.q_heads,
                                         .q_dtype = shape.q_dtype,
                                         .q = f.device_q,
                                         .scopes = &scope,
                                         .n_scopes = 1,
                                         .scale = shape.scale,
                                         .state = {.o = o, .lse = lse},
                                         .out = out};
    CU_ASSERT_EQUAL(cpa_sparse_attend(&args, f.stream), CPA_OK);
    cpa_test_download(f.stream, result.o, o, result.o_bytes);
    cpa_test_download(f.stream, result.lse, lse, n * 4);
    cpa_test_download(f.stream, result.out, out, result.out_bytes);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
    void *used[] = {device_slots, o, lse, out};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(f.stream, used[i]);
    free(slots);
    cpa_case_score_release(&score);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&f);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"every format of latents, one scope and two", every_format_of_latents},
        {"1 to 128 query heads over latents", every_count_of_heads},
        {"many rows of latents", many_rows_of_latents},
        {"every width of latents", every_width_of_latents},
        {"grouped heads, single keys and units of four", grouped_heads},
        {"rows without keys", rows_without_keys},
        {"long lists, in which keys occur several times", long_lists},
        {"the grid of decode of FlashMLA", grid_of_decode},
        {"the grid of prefill of FlashMLA", grid_of_prefill},
        {"bits do not depend on the batch", bits_do_not_depend_on_the_batch},
        {"slots are what indices become", slots_are_what_indices_become},
    };
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    whole = cpa_test_take_option(&argc, argv, "--whole");
    return cpa_test_main(argc, argv, "sparse attend", tests, (int)(sizeof tests / sizeof tests[0]));
}
