/* Groups of more query heads than a CTA of decode has rows, in plans for graphs: the rows of 1 to 4 tokens of a
 * sequence go to decode all the same, whatever else is asked of them; and so do those over latents, be they few or many.
 * Against the float64 reference. */
#include <stdlib.h>

#include "base/convert.h"
#include "kernels/attend_plan.h"
#include "kernels/graph.h"
#include "kernels/operators.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/rules_fixture.h"
#include "tests/fixtures/unit.h"

enum { ITEMS = 4, ROWS = 10, READY = 4, PADDED = 16 };
static const int64_t COUNTS[ITEMS] = {1, 2, 3, 4};

enum { LATENT = 576 }; /* the width of keys that hold their values, 512 */

typedef struct wide_case {
    int32_t group, kv_heads, dim, block_size;
    cpa_dtype kv_dtype;
    cpa_kv_layout layout;
    int64_t length;
} wide_case;

static const wide_case CASES[] = {{17, 1, 64, 16, CPA_BF16, 0, 500},
                                  {32, 2, 64, 64, CPA_FP8_E4M3, 0, 300},
                                  {33, 1, 128, 64, CPA_BF16, 0, 700},
                                  {64, 1, 128, 16, CPA_FP8_E4M3, 0, 500},
                                  {64, 2, 64, 16, CPA_BF16, 0, 300},
                                  {96, 1, 128, 64, CPA_BF16, 0, 400},
                                  {96, 1, 64, 16, CPA_INT8, 0, 333},
                                  {128, 1, 128, 16, CPA_BF16, 0, 700},
                                  {128, 1, 128, 64, CPA_FP8_E4M3, 0, 128},
                                  {128, 2, 64, 64, CPA_FP8_E4M3, 0, 200},
                                  {64, 1, 256, 64, CPA_BF16, 0, 300},
                                  {33, 1, 256, 16, CPA_FP8_E4M3, 0, 300},
                                  {48, 1, 128, 8, CPA_BF16, 0, 300},
                                  {128, 1, 128, 16, CPA_BF16, CPA_VLLM_X, 400},
                                  {40, 1, 128, 64, CPA_FP8_E4M3, CPA_VLLM_X, 300},
                                  {16, 1, LATENT, 16, CPA_BF16, 0, 140},
                                  {33, 1, LATENT, 64, CPA_FP8_T128, 0, 130},
                                  {128, 1, LATENT, 64, CPA_BF16, 0, 128}};
enum { N_CASES = sizeof CASES / sizeof *CASES };

/* From a case to the next: the host, which has one way for all groups, takes a third of them. */
static int apart(int on_devices) {
    return cpa_test_promises_bits() ? 3 * on_devices : on_devices;
}

static cpa_attend_case shape_of(const wide_case *c) {
    cpa_attend_case shape = CPA_ATTEND_BASE[1];
    shape.q_dtype = CPA_BF16;
    shape.kv_dtype = c->kv_dtype;
    shape.q_heads = c->group * c->kv_heads;
    shape.kv_heads = c->kv_heads;
    shape.k_dim = shape.v_dim = c->dim;
    if (c->dim == LATENT) shape.v_in_k = 1, shape.v_dim = 512, shape.scale = 0.0625f;
    shape.block_size = c->block_size;
    shape.layout = c->layout;
    shape.length = c->length;
    shape.start = c->length - ROWS;
    return shape;
}

/* Items of 1 to 4 rows over the keys [k_begin, k_end) of the sequence. */
static void list_items(const cpa_attend_fixture *f, int64_t k_begin, int64_t k_end, cpa_attend_item items[ITEMS]) {
    int64_t row = 0;
    for (int i = 0; i < ITEMS; row += COUNTS[i++])
        items[i] = cpa_attend_fixture_item(f, 0, row, COUNTS[i], 0, k_begin, k_end);
}

static void open_case(cpa_attend_fixture *f, const cpa_attend_case *shape) {
    cpa_attend_fixture_init(f, shape, 1);
    f->fusion.padded_items = PADDED;
    f->padding = 8;
    f->again = 1;
}

/* All rows are those of decode. */
static void expect_decode(const cpa_attend_fixture *f) {
    cpa_attend_kernels kernels;
    if (cpa_test_promises_bits()) return; /* the host has one kernel */
    f->device->operators->attend_kernels(f->plan, NULL, &kernels);
    CU_ASSERT(kernels.decode.name != NULL && kernels.prefill.name == NULL);
}

/* Attends, and counts rows that disagree with the reference. */
static int64_t count_wrong(cpa_attend_fixture *f) {
    cpa_attend_item items[ITEMS];
    cpa_attend_result result;
    list_items(f, 0, f->shape.length, items);
    cpa_attend_result_init(&result, f);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(f, items, ITEMS, 0, &result), CPA_OK);
    const int64_t wrong = cpa_attend_fixture_check(f, 0, 1, &result, NULL);
    expect_decode(f);
    cpa_attend_result_destroy(&result);
    return wrong;
}

static void groups_of_all_caches(void) {
    for (int i = 0; i < N_CASES; i += apart(1)) {
        const cpa_attend_case shape = shape_of(&CASES[i]);
        cpa_attend_fixture f;
        open_case(&f, &shape);
        CU_ASSERT_EQUAL(count_wrong(&f), 0);
        cpa_attend_fixture_destroy(&f);
    }
}

static void windows_and_sinks(void) {
    static const cpa_mask masks[] = {
        {.causal = 1, .window = 90}, {.causal = 1, .window = 70, .sinks = 5}, {.causal = 0}};
    for (int i = 0; i < N_CASES; i += apart(2)) {
        for (int m = 0; m < 3; m++) {
            cpa_attend_case shape = shape_of(&CASES[i]);
            cpa_attend_fixture f;
            shape.mask = masks[m];
            open_case(&f, &shape);
            CU_ASSERT_EQUAL(count_wrong(&f), 0);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* A form of rules after the other, over one cache after the other. */
static void rules_of_scores(void) {
    for (int i = 0; i < N_CASES; i += apart(1)) {
        const cpa_attend_case shape = shape_of(&CASES[i]);
        for (int form = i % 3; form < CPA_TEST_N_FORMS; form += 3) {
            cpa_attend_fixture f;
            open_case(&f, &shape);
            cpa_case_score score = cpa_test_score_of(&f, CPA_TEST_FORMS[form]);
            f.score = &score;
            CU_ASSERT_EQUAL(count_wrong(&f), 0);
            cpa_case_score_release(&score);
            cpa_attend_fixture_destroy(&f);
        }
    }
}

/* The queries of the last item lie elsewhere, and NaN where the others are. */
static void queries_that_are_ready(void) {
    for (int i = 0; i < N_CASES; i += apart(3)) {
        const cpa_attend_case shape = shape_of(&CASES[i]);
        cpa_attend_fixture f;
        open_case(&f, &shape);
        const int64_t row_bytes = (int64_t)shape.q_heads * shape.k_dim * cpa_dtype_bytes(shape.q_dtype);
        const int64_t others = (ROWS - READY) * row_bytes, bytes = READY * row_bytes;
        char *poison = cpa_test_poisoned(bytes, 1);
        CU_ASSERT_EQUAL(f.device->table->copy((char *)f.device_q + others, poison, bytes, f.stream), CPA_OK);
        void *elsewhere = cpa_test_upload(f.stream, (char *)f.q + others, bytes);
        f.fusion.ready_items = 1;
        f.fusion.ready_row = ROWS - READY;
        f.fusion.ready_rows = READY;
        f.ready_q = elsewhere;
        CU_ASSERT_EQUAL(count_wrong(&f), 0);
        cpa_test_free(f.stream, elsewhere);
        free(poison);
        cpa_attend_fixture_destroy(&f);
    }
}

/* The keys in three calls. */
static void resumed_calls(void) {
    for (int i = 0; i < N_CASES; i += apart(2)) {
        const cpa_attend_case shape = shape_of(&CASES[i]);
        const int64_t cuts[] = {0, 64, shape.length / 128 * 64, shape.length};
        cpa_attend_fixture f;
        cpa_attend_result result;
        cpa_attend_item items[ITEMS];
        open_case(&f, &shape);
        f.again = 0;
        cpa_attend_result_init(&result, &f);
        for (int cut = 0; cut < 3; cut++) {
            list_items(&f, cuts[cut], cuts[cut + 1], items);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, items, ITEMS, cut > 0, &result), CPA_OK);
        }
        cpa_narrow(result.out, result.o, shape.q_dtype, result.o_bytes / (int64_t)sizeof *result.o);
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
        cpa_attend_result_destroy(&result);
        cpa_attend_fixture_destroy(&f);
    }
}

static void results_in_fp8(void) {
    for (int i = 1; i < N_CASES; i += apart(4)) {
        const cpa_attend_case shape = shape_of(&CASES[i]);
        cpa_attend_fixture f;
        open_case(&f, &shape);
        f.out_scale = 0.0625f;
        CU_ASSERT_EQUAL(count_wrong(&f), 0);
        cpa_attend_fixture_destroy(&f);
    }
}

/* As many sequences as share CTAs, and one whose keys many take; what is launched is the same for all of them. */
static void launches_stay_the_same_of(int32_t dim) {
    enum { MANY = 60 };
    static const int64_t steps[][2] = {{MANY, 250}, {MANY, 1}, {1, 250}, {7, 240}, {0, 0}, {MANY, 250}};
    const wide_case many = {128, 1, dim, 16, CPA_BF16, 0, 250};
    cpa_attend_case shape = shape_of(&many);
    cpa_attend_fixture f;
    uint64_t first = 0;
    shape.start = shape.length - MANY;
    open_case(&f, &shape);
    f.fusion.padded_items = MANY;
    for (size_t s = 0; s < sizeof steps / sizeof *steps; s++) {
        cpa_attend_item items[MANY];
        cpa_attend_result result;
        cpa_attend_result_init(&result, &f);
        for (int64_t i = 0; i < steps[s][0]; i++)
            items[i] = cpa_attend_fixture_item(&f, 0, i, 1, 0, 0, s == 3 && i % 2 ? 17 : steps[s][1]);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, items, steps[s][0], 0, &result), CPA_OK);
        if (steps[s][0] == MANY && steps[s][1] == shape.length)
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 7, &result, NULL), 0);
        cpa_attend_result_destroy(&result);
        if (!f.device->graphs) continue;
        const uint64_t now = f.device->graphs->plan_shape(f.plan);
        if (s == 0) first = now;
        CU_ASSERT_EQUAL(now, first);
    }
    cpa_attend_fixture_destroy(&f);
}

static void launches_stay_the_same(void) {
    launches_stay_the_same_of(64);
    launches_stay_the_same_of(128);
    if (!cpa_test_promises_bits()) launches_stay_the_same_of(LATENT); /* the host has no launches */
}

/* Each row tile of a group reads the keys again, so that of many keys prefill tiles are faster. */
static void many_keys_are_not_padded(void) {
    enum { MANY = 60 };
    const wide_case many = {128, 1, 64, 16, CPA_BF16, 0, 300};
    cpa_attend_case shape = shape_of(&many);
    cpa_attend_fixture f;
    cpa_attend_item items[MANY];
    cpa_attend_result result;
    cpa_attend_kernels kernels;
    shape.start = shape.length - MANY;
    open_case(&f, &shape);
    f.fusion.padded_items = MANY;
    cpa_attend_result_init(&result, &f);
    for (int64_t i = 0; i < MANY; i++) items[i] = cpa_attend_fixture_item(&f, 0, i, 1, 0, 0, shape.length);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, items, MANY, 0, &result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 7, &result, NULL), 0);
    f.device->operators->attend_kernels(f.plan, NULL, &kernels);
    CU_ASSERT(cpa_test_promises_bits() || (kernels.decode.name == NULL && kernels.prefill.name != NULL));
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&f);
}

static const cpa_test tests[] = {
    {"groups of all caches", groups_of_all_caches},
    {"windows and sinks", windows_and_sinks},
    {"rules of scores", rules_of_scores},
    {"queries that are ready", queries_that_are_ready},
    {"resumed calls", resumed_calls},
    {"results in fp8", results_in_fp8},
    {"launches stay the same", launches_stay_the_same},
    {"many keys are not padded", many_keys_are_not_padded},
};

CPA_DEVICE_TEST_MAIN("attend of wide groups", tests)
