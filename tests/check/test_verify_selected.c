/* The share of a row's softmax that a list leaves out, beside float64 in plain loops. */
#include <math.h>

#include "base/hash.h"
#include "src/check/verify_selected.h"
#include "tests/fixtures/unit.h"

enum { KEYS = 90, DIM = 24, PARTS = 3 };

static float q[DIM], k[KEYS * DIM], v[KEYS];

static float value(int64_t i) {
    return (float)(cpa_mix64((uint64_t)i + 5) >> 40) / 0x1p23f - 1;
}

/* Key 7 is far above the others. */
static void make(void) {
    for (int d = 0; d < DIM; d++) q[d] = value(d);
    for (int i = 0; i < KEYS * DIM; i++) k[i] = value(1000 + i) * (i / DIM == 7 ? 0 : 2);
    for (int d = 0; d < DIM; d++) k[7 * DIM + d] += 3 * q[d];
}

static int is_listed(int64_t key, int64_t modulus) {
    return key % modulus == 0;
}

static double score_of(int64_t key, const cpa_reference_rules *rules) {
    double sum = 0;
    for (int d = 0; d < DIM; d++) sum += (double)q[d] * (double)k[key * DIM + d];
    sum /= sqrt(DIM);
    if (rules->softcap > 0) sum = rules->softcap * tanh(sum / rules->softcap);
    return sum + rules->slope * (double)(key - rules->index);
}

static double expected(int64_t modulus, const cpa_reference_rules *rules) {
    double all = 0, left_out = 0;
    for (int64_t key = 0; key < KEYS; key++) {
        const double weight = exp(score_of(key, rules));
        all += weight;
        left_out += is_listed(key, modulus) ? 0 : weight;
    }
    return left_out / all;
}

/* The keys of each part to rows of their own, which are joined. */
static double measured(int64_t modulus, const cpa_reference_rules *rules) {
    cpa_reference_row row, of_part;
    cpa_verify_selected selected, selected_of_part;
    cpa_reference_begin(&row, q, DIM, 1, CPA_F32, 0);
    cpa_reference_set_rules(&row, rules);
    cpa_verify_selected_begin(&selected);
    for (int part = 0; part < PARTS; part++) {
        cpa_reference_begin(&of_part, q, DIM, 1, CPA_F32, 0);
        cpa_reference_set_rules(&of_part, rules);
        cpa_verify_selected_begin(&selected_of_part);
        for (int64_t key = part; key < KEYS; key += PARTS) {
            if (is_listed(key, modulus))
                cpa_reference_add_ruled(&of_part, 1, k + key * DIM, v + key, &key, NULL);
            else
                cpa_verify_selected_leave(&selected_of_part, &of_part, 1, k + key * DIM, &key);
        }
        cpa_reference_join(&row, &of_part);
        cpa_verify_selected_join(&selected, &selected_of_part);
    }
    return cpa_verify_selected_mass(&selected, &row);
}

static void the_share_is_that_of_float64(void) {
    static const cpa_reference_rules rules[] = {{.index = KEYS}, {.softcap = 2, .slope = 0.02, .index = KEYS}};
    make();
    for (int i = 0; i < 2; i++) {
        for (int64_t modulus = 2; modulus < 9; modulus++) {
            const double want = expected(modulus, &rules[i]);
            CPA_ASSERT_ORDER(fabs(measured(modulus, &rules[i]) - want), <, 1e-12);
            CU_ASSERT(want > 0.01 && want < 1);
        }
        CPA_ASSERT_ORDER(measured(1, &rules[i]), ==, 0.0);       /* all keys are listed */
        CPA_ASSERT_ORDER(measured(2 * KEYS, &rules[i]), <, 1.0); /* key 0 alone */
    }
}

/* Scores may be far below and above what exp can take. */
static void large_scores_do_not_overflow(void) {
    static const cpa_reference_rules rules = {.index = KEYS};
    make();
    for (int d = 0; d < DIM; d++) q[d] *= 4000;
    const double left_out = measured(7, &rules); /* 7 is listed, and has it all */
    CU_ASSERT(left_out >= 0 && left_out < 1e-9);
    CPA_ASSERT_ORDER(measured(2, &rules), >, 1 - 1e-9);
}

static void what_is_no_number_is_not_counted(void) {
    static const cpa_reference_rules rules = {.index = KEYS};
    make();
    k[5 * DIM] = NAN;
    CPA_ASSERT_ORDER(measured(2, &rules), <, 0.0); /* left out */
    CPA_ASSERT_ORDER(measured(5, &rules), <, 0.0); /* listed */
}

static const cpa_test tests[] = {
    {"the share is that of float64", the_share_is_that_of_float64},
    {"large scores do not overflow", large_scores_do_not_overflow},
    {"what is no number is not counted", what_is_no_number_is_not_counted},
};
CPA_TEST_MAIN("verify selected", tests)
