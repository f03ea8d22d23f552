/* attend with score rules, additive bias and masks of bits against the float64 reference, which applies what
 * cpattn/score.h says to one score after the other. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

/* With --whole, and on devices, every case of a grid, and prefill of many rows; the host, whose code is the same for
 * many, else takes every pair of a form and a base with one number of ranks, and fewer rows. */
static int whole;

/* Prefill of a whole sequence, of its end, and decode; dtypes, and a quantised cache. */
static void every_form_in_every_base(void) {
    for (int i = 0; i < CPA_TEST_N_FORMS; i++) {
        for (int base = 0; base < CPA_ATTEND_BASES; base++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_FORMS[i], 13), 0);
            shape.start = shape.length - 45;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_FORMS[i], 7), 0);
            shape.start = shape.length - 1;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_FORMS[i], 1), 0);
        }
    }
}

/* Keys and queries of every shard: rules go by the index in the sequence, wherever a key lies. */
static void every_form_over_shards(void) {
    for (int i = 0; i < CPA_TEST_N_FORMS; i++) {
        for (int32_t n = 2; n <= 4; n++) {
            for (int base = 0; base < 2; base++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                if (!whole && n != 2 + (i + base) % 3) continue;
                shape.cp_size = n;
                shape.length = 333;
                shape.interleave = n == 3 ? 48 : 16;
                CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_FORMS[i], 17), 0);
                shape.start = shape.length - 6;
                CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_FORMS[i], 1), 0);
            }
        }
    }
}

/* Windows stay beside bits, and sinks of the mask; without causality the bits are all that bounds a row. */
static void windows_beside_bits(void) {
    static const cpa_mask masks[] = {
        {.causal = 1, .window = 64}, {.causal = 1, .window = 100, .sinks = 5}, {.causal = 0}};
    for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
        for (int base = 0; base < 2; base++) {
            for (int what = CPA_TEST_WHOLE_MASK; what <= CPA_TEST_TREE; what *= 2) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.mask = masks[m];
                shape.length = 700;
                shape.start = 650;
                CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, what, 3), 0);
                shape.start = 694;
                CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, what | CPA_TEST_ALIBI, 1), 0);
            }
        }
    }
}

/* All widths for which there are kernels, as prefill and as decode. */
static void every_width(void) {
    static const int32_t widths[][2] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {192, 128}, {256, 256}, {13, 13}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        for (int dtype = CPA_BF16; dtype <= CPA_F16; dtype++) {
            for (int late = 0; late < 2; late++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[1];
                shape.q_dtype = shape.kv_dtype = (cpa_dtype)dtype;
                shape.k_dim = widths[i][0], shape.v_dim = widths[i][1];
                shape.start = late ? shape.length - 2 : 0;
                CU_ASSERT_EQUAL(
                    cpa_test_wrong_rows(&shape, CPA_TEST_SOFTCAP | CPA_TEST_ALIBI | CPA_TEST_SINKS | CPA_TEST_TREE, 31),
                    0);
            }
        }
    }
}

/* Many keys, which a device splits over its multiprocessors, for one and two tiles of few rows and for one of
 * prefill. */
static void few_queries_over_many_keys(void) {
    for (int64_t queries = 1; queries <= 40; queries += queries < 7 ? 6 : 33) {
        for (int base = 0; base < 2; base++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            shape.block_size = shape.interleave = 64;
            shape.length = cpa_test_promises_bits() ? 3001 : 9001; /* on the host three splits */
            shape.start = shape.length - queries;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_SOFTCAP | CPA_TEST_TEMPERATURE | CPA_TEST_SINKS, 7),
                            0);
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_ALIBI | CPA_TEST_SINKS | CPA_TEST_TREE, 7), 0);
        }
    }
}

static int is_causal(const void *ctx, int64_t row, int64_t key) {
    (void)ctx;
    return key <= row;
}

/* Bits that say what causality says give its result, to the bit. */
static void a_causal_mask_of_bits_is_causality(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[base];
        cpa_attend_fixture f;
        cpa_attend_result plain, masked;
        cpa_attend_fixture_init(&f, &shape, 1);
        cpa_attend_result_init(&plain, &f);
        cpa_attend_result_init(&masked, &f);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &plain), CPA_OK);
        cpa_case_score score = {.q_heads = shape.q_heads, .rows = f.rows};
        cpa_case_score_add_bits(&score, 0, (int32_t)shape.length, NULL);
        cpa_case_score_fill_bits(&score, is_causal, NULL);
        f.score = &score;
        f.shape.mask.causal = 0;
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &masked), CPA_OK);
        if (f.device->caps.bit_exact) {
            CU_ASSERT(cpa_attend_result_same(&plain, &masked));
        } else {
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 7, &masked, NULL), 0);
        }
        cpa_case_score_release(&score);
        cpa_attend_result_destroy(&masked);
        cpa_attend_result_destroy(&plain);
        cpa_attend_fixture_destroy(&f);
    }
}

/* Bits in stretches of keys and of rows, so that tiles are shown whole, in part and not at all; some rows see
 * nothing. */
static void bits_in_stretches(void) {
    enum { LENGTH = 1500, KEYS = 170, ROWS = 100, PERIOD = 4 };
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int32_t n = 1; n <= 2; n++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_fixture f;
            shape.length = LENGTH;
            shape.cp_size = n;
            shape.interleave = 64;
            shape.block_size = 32;
            cpa_attend_fixture_init(&f, &shape, 1);
            cpa_case_score score = cpa_test_score_of(&f, CPA_TEST_WHOLE_MASK);
            const int64_t width = score.width[0], words = cpa_mask_words(width);
            for (int64_t row = 0; row < f.rows && n == 1; row++) score.row_word[row] = row * words;
            for (int64_t i = 0; i < f.rows * words * 32; i++) {
                const int64_t row = i / (words * 32), key = i % (words * 32);
                const uint32_t bit = (uint32_t)1 << (key % 32);
                uint32_t *word = &score.bits[row * words + key / 32];
                const int seen = (key / KEYS + row / ROWS) % PERIOD == 1 && row / ROWS != 3;
                *word = seen && key < width ? *word | bit : *word & ~bit;
            }
            f.score = &score;
            for (int32_t slot = 0; slot < n; slot++) {
                cpa_attend_result result;
                cpa_attend_result_init(&result, &f);
                CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, slot, &result), CPA_OK);
                CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, slot, 23, &result, NULL), 0);
                cpa_attend_result_destroy(&result);
            }
            cpa_case_score_release(&score);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* Adds 0 to the scores of some stretches of keys, other ones every 100 rows, and to that of the row's own; `lowest` to
 * the rest, or to all. */
static void hide_by(cpa_case_score *score, const cpa_attend_case *shape, cpa_dtype dtype, float lowest, int all) {
    enum { KEYS = 170, ROWS = 100, PERIOD = 4 };
    const float zero = 0;
    cpa_case_score_add_bias(score, dtype, 0, 0, shape->length, NULL);
    for (int64_t row = 0; row < score->rows; row++) {
        char *values = (char *)score->bias + score->row_map[row] * shape->length * cpa_dtype_bytes(dtype);
        for (int64_t key = 0; key < shape->length; key++) {
            const int seen = (key / KEYS + row / ROWS) % PERIOD == 1 || key == shape->start + row;
            cpa_narrow(values + key * cpa_dtype_bytes(dtype), seen && !all ? &zero : &lowest, dtype, 1);
        }
    }
}

/* Models often hide keys by adding the lowest number of the dtype: whole tiles, pieces and splits of keys have such
 * scores alone, then others come, or none. */
static void keys_hidden_by_the_lowest_number(void) {
    static const struct {
        cpa_dtype dtype;
        float lowest;
        int all;
    } cases[] = {{CPA_F32, -FLT_MAX, 0}, {CPA_F32, -FLT_MAX, 1}, {CPA_BF16, -0x1.fep127f, 0}, {CPA_F16, -65504, 0}};
    const int64_t length = 1500, rows[] = {whole ? length : 450, 45, 1};
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int i = whole ? 0 : base % 2; i < 4 * 3; i += whole ? 1 : 2) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_fixture f;
            cpa_attend_result result;
            shape.length = length;
            shape.start = shape.length - rows[i % 3];
            shape.mask = (cpa_mask){.causal = 1};
            cpa_attend_fixture_init(&f, &shape, 1);
            cpa_case_score score = {.q_heads = shape.q_heads, .rows = f.rows};
            hide_by(&score, &shape, cases[i / 3].dtype, cases[i / 3].lowest, cases[i / 3].all);
            f.score = &score;
            cpa_attend_result_init(&result, &f);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, f.rows > 100 ? 23 : 1, &result, NULL), 0);
            CU_ASSERT_EQUAL(result.lse[0] == -INFINITY, cases[i / 3].all);
            cpa_attend_result_destroy(&result);
            cpa_case_score_release(&score);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* A key of NaN makes the row NaN that sees it, its own, and none of those before, however their scores are computed. */
static void unseen_keys_need_not_be_finite(void) {
    for (int base = 0; base < 2; base++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_fixture f;
            cpa_attend_result result;
            const int64_t last = shape.length - 1, k_row = last * shape.kv_heads;
            shape.start = late ? shape.length - 2 : shape.length - 45;
            cpa_attend_fixture_init(&f, &shape, 1);
            for (int32_t head = 0; head < shape.kv_heads; head++) {
                float *k = f.sequence.k + (k_row + head) * shape.k_dim;
                k[0] = NAN;
                cpa_kv_fixture_store(&f.kv, f.tables[f.table[0] + last / shape.block_size], last % shape.block_size,
                                     head, k, f.sequence.v + (k_row + head) * shape.v_dim);
            }
            cpa_kv_view_free(&f.device_kv, f.stream);
            f.device_kv = cpa_kv_fixture_upload(&f.kv, f.stream);
            cpa_attend_result_init(&result, &f);
            cpa_case_score score = cpa_test_score_of(&f, CPA_TEST_SOFTCAP | CPA_TEST_ALIBI);
            f.score = &score;
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
            CU_ASSERT(isnan(result.lse[(f.rows - 1) * shape.q_heads]));
            cpa_case_score_release(&score);
            cpa_attend_result_destroy(&result);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* A row whose bits are all 0 is empty, with and without a sink. */
static void a_row_without_any_key(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_fixture f;
            cpa_attend_result result;
            shape.start = late ? shape.length - 2 : 0;
            cpa_attend_fixture_init(&f, &shape, 1);
            cpa_attend_result_init(&result, &f);
            cpa_case_score score = cpa_test_score_of(&f, CPA_TEST_WHOLE_MASK | CPA_TEST_SINKS | CPA_TEST_SOFTCAP);
            memset(score.bits, 0, (size_t)score.n_words * sizeof *score.bits);
            f.score = &score;
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
            CU_ASSERT_EQUAL(score.row_map[1] >= 0 && score.row_word[score.row_map[1]] >= 0, 1);
            CU_ASSERT_EQUAL(result.lse[(f.rows - 1) * shape.q_heads], -INFINITY);
            cpa_case_score_release(&score);
            cpa_attend_result_destroy(&result);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* The keys in two calls, the second of which finishes the rows: sinks count once, in its result. */
static void sinks_of_a_resumed_row(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_fixture f;
            cpa_attend_result result;
            shape.mask = (cpa_mask){.causal = 1};
            shape.start = late ? shape.length - 2 : 128;
            cpa_attend_fixture_init(&f, &shape, 1);
            cpa_attend_result_init(&result, &f);
            cpa_case_score score = cpa_test_score_of(&f, CPA_TEST_SINKS);
            f.score = &score;
            f.resumed_out = 1;
            cpa_attend_item first = cpa_attend_fixture_item(&f, 0, 0, f.q_count[0], 0, 0, 128);
            cpa_attend_item second = cpa_attend_fixture_item(&f, 0, 0, f.q_count[0], 0, 128, shape.length);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, &first, 1, 0, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, &second, 1, 1, &result), CPA_OK);
            /* What the state's O holds is not said where `out` is written on a resumed call. */
            for (int64_t i = 0; i < f.rows * shape.q_heads; i++) {
                const float sink = score.sinks[i % shape.q_heads];
                const double factor = 1 / (1 + exp((double)(sink - result.lse[i])));
                for (int32_t d = 0; d < shape.v_dim; d++) {
                    float out;
                    const int64_t at = i * shape.v_dim + d;
                    cpa_widen(&out, (char *)result.out + at * cpa_dtype_bytes(shape.q_dtype), shape.q_dtype, 1);
                    result.o[at] = (float)((double)out / factor);
                }
            }
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
            cpa_case_score_release(&score);
            cpa_attend_result_destroy(&result);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

static void masks_are_packed(void) {
    enum { ROWS = 3, WIDTH = 37, STRIDE = 41 };
    uint8_t bytes[ROWS * STRIDE] = {0};
    uint32_t bits[ROWS * 2 + 1] = {0};
    for (int i = 0; i < ROWS * STRIDE; i++) bytes[i] = (uint8_t)(i % 3 ? 0 : i % 200 + 1);
    bits[ROWS * 2] = 77;
    CU_ASSERT_EQUAL(cpa_mask_pack(bytes, ROWS, WIDTH, STRIDE, bits), CPA_OK);
    int wrong = 0;
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < 64; i++) {
            const int want = i < WIDTH && bytes[row * STRIDE + i] != 0;
            wrong += (int)(bits[row * 2 + i / 32] >> (i % 32) & 1) != want;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(bits[ROWS * 2], 77);
    CU_ASSERT_EQUAL(cpa_mask_pack(bytes, ROWS, WIDTH, WIDTH - 1, bits), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_mask_pack(NULL, ROWS, WIDTH, 0, bits), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_mask_pack(bytes, -1, WIDTH, 0, bits), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_mask_pack(NULL, 0, WIDTH, 0, NULL), CPA_OK);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"masks of bytes are packed into bits", masks_are_packed},
        {"every form matches the reference in every base", every_form_in_every_base},
        {"every form matches the reference over shards", every_form_over_shards},
        {"windows stay beside bits", windows_beside_bits},
        {"bits that say what causality says give its result", a_causal_mask_of_bits_is_causality},
        {"bits in stretches match the reference", bits_in_stretches},
        {"keys are hidden by the lowest number", keys_hidden_by_the_lowest_number},
        {"unseen keys need not be finite", unseen_keys_need_not_be_finite},
        {"a row whose bits hide every key is empty", a_row_without_any_key},
        {"sinks count once in a resumed row", sinks_of_a_resumed_row},
        {"every width matches the reference", every_width},
        {"few queries over many keys match the reference", few_queries_over_many_keys},
    };
    int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    whole = cpa_test_take_option(&argc, argv, "--whole") || !cpa_test_promises_bits();
    return cpa_test_main(argc, argv, "attend_score", tests, (int)(sizeof tests / sizeof tests[0]));
}
