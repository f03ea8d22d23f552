/* Results of attend in fp8: the codes that the result has before it is rounded to anything else, by every way to it:
 * few rows and many, keys in one piece and cut, resumed, of every dtype and layout of cache, with sinks, of rows that
 * see nothing. */
#include <math.h>
#include <stdio.h>

#include "kernels/host/cache/quantise.h"
#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

static const cpa_mask WINDOW = {.causal = 1, .window = 70, .sinks = 3};

static cpa_attend_case case_of(int i) {
    cpa_attend_case c = CPA_ATTEND_BASE[i % CPA_ATTEND_BASES];
    c.cp_size = 1;
    return c;
}

static void codes_are_those_of_the_result(void) {
    enum { KINDS = 8 };
    for (int i = 0; i < KINDS * CPA_ATTEND_BASES; i++) {
        cpa_attend_case c = case_of(i);
        const int kind = i / CPA_ATTEND_BASES, plain = !cpa_dtype_is_quantised(c.kv_dtype);
        if (kind == 1) c.start = c.length - 2;                   /* few rows, */
        if (kind == 2) c.start = (c.length = 5000) - 3;          /* whose keys are cut; */
        if (kind == 3) c.start = (c.length = 4200) - 40;         /* and more of them */
        if (kind == 4) c.mask = WINDOW, c.k_dim = c.v_dim = 112; /* a width that tiles do not have */
        if (kind == 5) c.layout = CPA_VLLM_X, c.start = c.length - 30;
        if (kind == 6) c.cp_size = 2; /* queries that see nothing of what the first rank has */
        const int rules = kind < 7 ? 0 : plain ? CPA_TEST_SINKS | CPA_TEST_TREE : CPA_TEST_SINKS;
        c.out_scale = 0.01f * (float)(1 + i % 3);
        CU_ASSERT_EQUAL(cpa_test_wrong_rows(&c, rules, (c.length - c.start) / 20 + 1), 0);
    }
    printf("  %d cases\n", KINDS * CPA_ATTEND_BASES);
}

/* Attends the keys of the case by two calls, the second of which writes `out` or the state alone. */
static void resume(const cpa_attend_case *shape, int64_t cut, int with_out, float out_scale,
                   cpa_attend_result *result) {
    cpa_attend_fixture f;
    cpa_attend_fixture_init(&f, shape, 1);
    f.out_scale = out_scale;
    f.resumed_out = with_out;
    cpa_attend_result_init(result, &f);
    const cpa_attend_item first = cpa_attend_fixture_item(&f, 0, 0, f.q_count[0], 0, 0, cut);
    const cpa_attend_item rest = cpa_attend_fixture_item(&f, 0, 0, f.q_count[0], 0, cut, f.k_tokens[0]);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, &first, 1, 0, result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, &rest, 1, 1, result), CPA_OK);
    cpa_attend_fixture_destroy(&f);
}

/* A device may take another kernel for codes than for a state, of other roundings. */
static int is_code_of(uint8_t code, float x, float scale) {
    if (cpa_test_promises_bits()) return code == cpa_to_e4m3(x * (1 / scale));
    return fabsf(cpa_from_e4m3(code) * scale - x) <= fabsf(x) / 12 + 0.03f;
}

static void a_resumed_call_gives_the_codes_of_its_state(void) {
    const float scale = 0.02f;
    for (int i = 0; i < 2 * CPA_ATTEND_BASES; i++) {
        cpa_attend_case c = case_of(i);
        cpa_attend_result state, codes;
        if (i >= CPA_ATTEND_BASES) c.start = c.length - 1;
        resume(&c, 128, 0, 0, &state);
        resume(&c, 128, 1, scale, &codes);
        int64_t wrong = 0;
        for (int64_t at = 0; at < codes.out_bytes; at++)
            wrong += !is_code_of(((const uint8_t *)codes.out)[at], state.o[at], scale);
        CU_ASSERT_EQUAL(wrong, 0);
        cpa_attend_result_destroy(&codes);
        cpa_attend_result_destroy(&state);
    }
}

static const cpa_test TESTS[] = {
    {"codes are those of the result", codes_are_those_of_the_result},
    {"a resumed call gives the codes of its state", a_resumed_call_gives_the_codes_of_its_state},
};

CPA_DEVICE_TEST_MAIN("attend with results in fp8", TESTS)
