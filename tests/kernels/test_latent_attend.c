/* Attention over latents, values in keys, and ordinary heads as wide, against the float64 reference: every format of
 * cache, masks, rules, shards, and the grids of FlashMLA's and FlashInfer's own tests, of which --whole takes all. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/check/cases/judge.h"
#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

/* With --whole every case of a grid; else those that are cheap, and on the host a few of these. */
static int whole;

/* (128 + 64)^-1/2: that of the heads of DeepSeek V3, which a latent of 512 + 64 stands for. */
static const float SCALE = 0.0721687824f;

static const cpa_attend_case LATENT = {.q_dtype = CPA_BF16,
                                       .kv_dtype = CPA_BF16,
                                       .q_heads = 16,
                                       .kv_heads = 1,
                                       .k_dim = 576,
                                       .v_dim = 512,
                                       .v_in_k = 1,
                                       .scale = SCALE,
                                       .block_size = 64,
                                       .cp_size = 1,
                                       .interleave = 64,
                                       .start = 290,
                                       .length = 300,
                                       .mask = {.causal = 1},
                                       .padding = 8};

static int64_t wrong_rows(const cpa_attend_case *shape, int what) {
    return cpa_test_wrong_rows(shape, what, 3);
}

/* ---- every format ---- */

static void every_format(void) {
    static const struct {
        cpa_dtype q, kv;
        float scale;
        int32_t n_scales;
    } formats[] = {{CPA_BF16, CPA_BF16, 0, 0},        {CPA_F16, CPA_F16, 0, 0},      {CPA_F32, CPA_F32, 0, 0},
                   {CPA_BF16, CPA_FP8_E4M3, 0.1f, 0}, {CPA_F16, CPA_FP8_E4M3, 0, 0}, {CPA_BF16, CPA_FP8_E4M3, 0, 1},
                   {CPA_BF16, CPA_FP8_T128, 0, 0},    {CPA_F32, CPA_FP8_T128, 0, 0}, {CPA_BF16, CPA_INT8, 0, 0},
                   {CPA_BF16, CPA_FP8_T64, 0, 0},     {CPA_F16, CPA_FP8_T64, 0, 0}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        for (int prefill = 0; prefill < 2; prefill++) {
            cpa_attend_case shape = LATENT;
            shape.q_dtype = formats[i].q;
            shape.kv_dtype = formats[i].kv;
            shape.k_scale = formats[i].scale;
            shape.n_scales = formats[i].n_scales;
            shape.head_major = i % 2;
            if (shape.kv_dtype == CPA_FP8_T64) shape.k_dim = shape.v_dim = 512;
            if (prefill) shape.start = 0, shape.length = 40, shape.q_heads = 5;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
        }
    }
}

/* Latents of other widths; keys that are all value, as those of 448 + 64 are; several KV heads. */
static void every_width_of_latents(void) {
    static const int32_t widths[][3] = {{576, 512, 1}, {512, 512, 1}, {320, 256, 1}, {48, 32, 1},
                                        {17, 5, 2},    {96, 64, 3},   {1, 1, 1},     {575, 511, 1}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        cpa_attend_case shape = LATENT;
        shape.k_dim = widths[i][0], shape.v_dim = widths[i][1], shape.kv_heads = widths[i][2];
        shape.q_heads = 4 * shape.kv_heads;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
        shape.kv_dtype = CPA_FP8_E4M3;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
    }
    for (int32_t k_dim = 192; k_dim <= 576; k_dim += 128) {
        cpa_attend_case shape = LATENT;
        shape.k_dim = k_dim, shape.v_dim = k_dim - 96, shape.kv_dtype = CPA_FP8_T128;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
    }
}

/* Heads of 257 and more columns, keys and values apart. */
static void ordinary_heads_as_wide(void) {
    static const int32_t widths[][2] = {{257, 257}, {320, 320}, {512, 512}, {576, 512},
                                        {576, 576}, {64, 512},  {513, 7}};
    static const cpa_dtype dtypes[] = {CPA_BF16, CPA_F32, CPA_FP8_E4M3, CPA_INT8};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = LATENT;
            shape.v_in_k = 0, shape.kv_heads = 2, shape.q_heads = 6, shape.scale = 0;
            shape.k_dim = widths[i][0], shape.v_dim = widths[i][1];
            shape.kv_dtype = dtypes[(i + (size_t)late) % 4];
            shape.q_dtype = shape.kv_dtype == CPA_F32 ? CPA_F32 : CPA_BF16;
            if (!late) shape.start = 0, shape.length = 70;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
        }
    }
}

/* Those of 16 bits that have tensor cores, over so many keys that tiles follow one another. */
static void wide_heads_of_many_keys(void) {
    static const int32_t widths[][2] = {{512, 512}, {257, 320}, {384, 512}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        for (int rows = 1; rows <= 40; rows += 39) {
            cpa_attend_case shape = LATENT;
            shape.v_in_k = 0, shape.kv_heads = 2, shape.q_heads = 8, shape.scale = 0;
            shape.k_dim = widths[i][0], shape.v_dim = widths[i][1];
            shape.q_dtype = shape.kv_dtype = i % 2 ? CPA_F16 : CPA_BF16;
            shape.length = 900, shape.start = shape.length - rows;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
        }
    }
}

static void every_count_of_heads(void) {
    static const int32_t heads[] = {1, 3, 6, 7, 12, 13, 33, 65, 128};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        cpa_attend_case shape = LATENT;
        shape.q_heads = heads[i];
        shape.start = shape.length - 1 - (int64_t)(i % 3);
        CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
    }
}

/* Tokens times heads being 16 at most, which is what a rank has that shares heads with others: every format, with
 * lengths on both sides of those of tiles, and masks that leave out some of one. */
static void few_rows(void) {
    static const struct {
        cpa_dtype q, kv;
        float scale;
    } formats[] = {{CPA_BF16, CPA_BF16, 0},
                   {CPA_F16, CPA_F16, 0},
                   {CPA_BF16, CPA_FP8_E4M3, 0.1f},
                   {CPA_F16, CPA_FP8_E4M3, 3},
                   {CPA_BF16, CPA_FP8_T128, 0}};
    static const int32_t rows[][2] = {{1, 16}, {2, 8}, {3, 5}, {16, 1}, {1, 1}};
    static const int64_t lengths[] = {16, 63, 64, 65, 300, 1100};
    static const cpa_mask masks[] = {
        {.causal = 1}, {.causal = 0}, {.causal = 1, .window = 70}, {.causal = 1, .window = 50, .sinks = 5}};
    for (int i = 0; i < 5 * 6; i++) {
        cpa_attend_case shape = LATENT;
        shape.q_dtype = formats[i % 5].q, shape.kv_dtype = formats[i % 5].kv, shape.k_scale = formats[i % 5].scale;
        shape.q_heads = rows[(i + i / 5) % 5][1], shape.length = lengths[i % 6];
        shape.start = shape.length - rows[(i + i / 5) % 5][0];
        shape.mask = masks[i % 4], shape.block_size = i % 3 ? 64 : 16, shape.cp_size = 1 + i / 4 % 2;
        CU_ASSERT_EQUAL(wrong_rows(&shape, i % 7 ? 0 : CPA_TEST_FORMS[i % CPA_TEST_N_FORMS]), 0);
    }
}

static void shards_masks_and_rules(void) {
    static const cpa_mask masks[] = {
        {.causal = 1}, {.causal = 0}, {.causal = 1, .window = 70}, {.causal = 1, .window = 50, .sinks = 5}};
    for (int i = 0; i < CPA_TEST_N_FORMS + CPA_TEST_N_SELECTIONS; i++) {
        cpa_attend_case shape = LATENT;
        const int what = i < CPA_TEST_N_FORMS ? CPA_TEST_FORMS[i] : CPA_TEST_SELECTIONS[i - CPA_TEST_N_FORMS];
        shape.mask = masks[i % 4];
        shape.cp_size = 1 + i % 3, shape.interleave = i % 2 ? 64 : 16, shape.block_size = 16;
        if (i % 4 == 1) shape.k_dim = 48, shape.v_dim = 32, shape.scale = 0.2f;
        if (i % 4 == 3) shape.kv_dtype = CPA_FP8_T128;
        if (i % 8 == 6) shape.kv_dtype = CPA_FP8_T64, shape.k_dim = shape.v_dim = 512;
        CU_ASSERT_EQUAL(wrong_rows(&shape, what), 0);
    }
}

/* ---- grids ---- */

/* A batch of sequences, whose pages are the first of one table: sequence i has counts[i] keys, and the last q_count of
 * its tokens are the rows from i * q_count on. */
typedef struct grid_case {
    int32_t batch, q_count, heads, block_size;
    int64_t most_keys;
    int varlen, causal, with_empty;
} grid_case;

static int64_t keys_of(const grid_case *c, int64_t i) {
    if (c->with_empty && i % 3 == 1) return 0;
    const int64_t keys = c->varlen ? c->most_keys - (i * 37) % (c->most_keys / 2 + 1) : c->most_keys;
    return keys > c->q_count ? keys : c->q_count;
}

static int64_t row_of(const cpa_attend_fixture *f, const grid_case *c, int64_t i, int64_t j) {
    return f->q_row[0] + i * c->q_count + j;
}

/* Whether row j of sequence i and a head are what the reference makes of the keys of the sequence. */
static int is_right(const cpa_attend_fixture *f, const grid_case *c, int64_t i, int64_t j, int32_t head,
                    const cpa_attend_result *result) {
    const int64_t keys = keys_of(c, i), at = row_of(f, c, i, j) * c->heads + head;
    cpa_case_row row = cpa_case_row_of(&f->sequence, keys > 0 ? keys - c->q_count + j : j, head, f->shape.q_dtype);
    cpa_case_expected expected;
    row.q = (const char *)f->q + at * f->shape.k_dim * cpa_dtype_bytes(f->shape.q_dtype);
    row.q_dtype = f->shape.q_dtype;
    row.scale = (double)SCALE;
    row.mask.causal = c->causal;
    row.n_keys = keys;
    cpa_case_expect(&row, &expected);
    const cpa_case_result got = {.o = result->o + at * f->shape.v_dim,
                                 .lse = &result->lse[at],
                                 .out = (const char *)result->out + at * f->shape.v_dim * 2,
                                 .out_dtype = f->shape.q_dtype};
    return cpa_case_is_right(&expected, &got, NULL);
}

/* Rows of some sequences and of the first, the last and one other head that are wrong. */
static int64_t count_wrong(const cpa_attend_fixture *f, const grid_case *c, const cpa_attend_result *result) {
    const int64_t step = c->batch / 3 + 1;
    int64_t wrong = 0;
    for (int64_t i = 0; i < c->batch; i += step)
        for (int64_t j = 0; j < c->q_count; j += 1 + c->q_count / 3) {
            const int32_t other = (int32_t)((i * 31 + j * 17) % c->heads);
            wrong += !is_right(f, c, i, j, other, result);
            if (i > 0 || j > 0) continue;
            wrong += !is_right(f, c, i, j, 0, result) + !is_right(f, c, i, j, c->heads - 1, result);
        }
    return wrong;
}

static int64_t wrong_of_grid(const grid_case *c) {
    const int64_t rows = (int64_t)c->batch * c->q_count;
    cpa_attend_case shape = LATENT;
    cpa_attend_fixture f;
    cpa_attend_result result;
    cpa_attend_item *items = calloc((size_t)c->batch, sizeof *items);
    shape.q_heads = c->heads, shape.block_size = c->block_size;
    shape.length = rows > c->most_keys ? rows : c->most_keys;
    if (shape.length < c->q_count) shape.length = c->q_count;
    shape.start = shape.length - rows;
    shape.mask.causal = c->causal;
    cpa_attend_fixture_init(&f, &shape, 2);
    cpa_attend_result_init(&result, &f);
    for (int64_t i = 0; i < c->batch; i++) {
        const int64_t keys = keys_of(c, i);
        items[i] = cpa_attend_fixture_item(&f, 0, i * c->q_count, c->q_count, 0, 0, keys);
        items[i].q_first = keys > 0 ? keys - c->q_count : 0;
    }
    int64_t wrong = cpa_attend_fixture_run(&f, items, c->batch, 0, &result) != CPA_OK;
    wrong += count_wrong(&f, c, &result);
    if (wrong)
        printf("\n    %lld wrong: batch %d, %d rows, %d heads, blocks of %d, %lld keys, varlen %d, causal %d\n",
               (long long)wrong, c->batch, c->q_count, c->heads, c->block_size, (long long)c->most_keys, c->varlen,
               c->causal);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&f);
    free(items);
    return wrong;
}

/* Whether case i is taken: by its query-key pairs, which are what it costs. */
static int is_taken(const grid_case *c, int i, int one_in) {
    const double pairs = (double)c->batch * c->q_count * c->heads * (double)c->most_keys;
    if (whole) return 1;
    return cpa_test_promises_bits() ? pairs < 3e5 && i % one_in == 0 : pairs < 2e7;
}

/* FlashMLA, tests/test_flash_mla_dense_decoding.py: 1,008 cases; with lengths of zero in some of those of varlen. */
static void grid_of_flash_mla(void) {
    static const int32_t batches[] = {1, 2, 6, 64}, counts[] = {1, 2, 4}, heads[] = {1, 3, 9, 63, 64, 126, 128};
    static const int64_t keys[] = {20, 140, 4096};
    int taken = 0;
    for (int i = 0; i < 4 * 3 * 7 * 3 * 4; i++) {
        const grid_case c = {.batch = batches[i % 4],
                             .q_count = counts[i / 4 % 3],
                             .heads = heads[i / 12 % 7],
                             .most_keys = keys[i / 84 % 3],
                             .varlen = i / 252 % 2,
                             .causal = i / 504,
                             .with_empty = i / 252 % 2 && i % 5 == 0,
                             .block_size = 64};
        if (!is_taken(&c, i, 31)) continue;
        CU_ASSERT_EQUAL(wrong_of_grid(&c), 0);
        taken++;
    }
    printf(" %d cases ", taken);
}

/* FlashInfer, tests/attention/test_deepseek_mla.py: 8 lengths of keys, 1 to 17 rows, causal or not, pages of 1 and 16
 * tokens, 544 cases. */
static void grid_of_flash_infer(void) {
    static const int64_t keys[] = {0, 17, 33, 96, 97, 114, 514, 1024};
    int taken = 0;
    for (int i = 0; i < 8 * 17 * 4; i++) {
        const grid_case c = {.batch = 1 + i % 3,
                             .q_count = 1 + i / 8 % 17,
                             .heads = 16,
                             .most_keys = keys[i % 8],
                             .causal = i / 136 % 2,
                             .with_empty = keys[i % 8] == 0,
                             .block_size = i / 272 ? 16 : 1};
        if (!is_taken(&c, i, 23)) continue;
        CU_ASSERT_EQUAL(wrong_of_grid(&c), 0);
        taken++;
    }
    printf(" %d cases ", taken);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"every format of latents matches the reference", every_format},
        {"every width of latents matches the reference", every_width_of_latents},
        {"ordinary heads of up to 576 columns match the reference", ordinary_heads_as_wide},
        {"wide heads of many keys", wide_heads_of_many_keys},
        {"1 to 128 query heads over latents match the reference", every_count_of_heads},
        {"16 rows and fewer of every format match the reference", few_rows},
        {"shards, masks, rules and selections over latents match the reference", shards_masks_and_rules},
        {"the grid of FlashMLA matches the reference", grid_of_flash_mla},
        {"the grid of FlashInfer matches the reference", grid_of_flash_infer},
    };
    int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    if (argc == 3 && strcmp(argv[1], "--case") == 0) return cpa_attend_case_main(argv[2]);
    whole = cpa_test_take_option(&argc, argv, "--whole");
    return cpa_test_main(argc, argv, "attend over latents", tests, (int)(sizeof tests / sizeof tests[0]));
}
