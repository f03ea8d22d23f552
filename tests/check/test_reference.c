/* The reference itself: rows small enough to be computed by hand, and rounding against the definition of the dtypes. */
#include <math.h>
#include <string.h>

#include "src/check/reference.h"
#include "src/check/reference_rows.h"
#include "tests/fixtures/unit.h"

static void two_keys_give_the_softmax_by_hand(void) {
    cpa_reference_row row;
    float q[2] = {1, 2}, k0[2] = {1, 0}, k1[2] = {0, 1}, v0[1] = {10}, v1[1] = {20};
    double out[1], lse, tolerance;
    cpa_reference_begin(&row, q, 2, 1, CPA_F32, 0.5);
    cpa_reference_add(&row, k0, v0);
    cpa_reference_add(&row, k1, v1);
    cpa_reference_end(&row, out, &lse, &tolerance);
    double a = exp(0.5), b = exp(1.0);
    CU_ASSERT_DOUBLE_EQUAL(out[0], (10 * a + 20 * b) / (a + b), 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(lse, log(a + b), 1e-12);
    CU_ASSERT(tolerance >= 1e-5 && tolerance < 1e-4);
}

static void a_row_without_keys_is_zero_and_minus_infinity(void) {
    cpa_reference_row row;
    float q[1] = {3};
    double out[1] = {5}, lse, tolerance;
    cpa_reference_begin(&row, q, 1, 1, CPA_BF16, 0);
    cpa_reference_end(&row, out, &lse, &tolerance);
    CU_ASSERT_EQUAL(out[0], 0);
    CU_ASSERT(isinf(lse) && lse < 0);
}

static void tolerances_grow_with_the_lse_and_the_size_of_scores(void) {
    CU_ASSERT_DOUBLE_EQUAL(cpa_reference_lse_tolerance(CPA_F32, 0), 1e-5, 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(cpa_reference_lse_tolerance(CPA_F32, -99), 1e-3, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(cpa_reference_lse_tolerance(CPA_BF16, 100), 3e-3, 1e-9);
    CU_ASSERT_EQUAL(cpa_reference_lse_tolerance(CPA_F32, -INFINITY), 0);
    CU_ASSERT_EQUAL(cpa_reference_lse_tolerance(CPA_F32, NAN), 0);
    /* An LSE of 17.6 may be off by a rounding of its own. */
    CPA_ASSERT_ORDER((double)(nextafterf(17.6f, 18) - 17.6f), <, cpa_reference_lse_tolerance(CPA_F32, 17.6) / 50);

    const double quiet = cpa_reference_tolerance(CPA_F32, 256, 0, 1, 0);
    CU_ASSERT_DOUBLE_EQUAL(quiet, 2 * 0x1p-24 + 1e-5, 1e-12);
    /* Scores of 16 terms' random walk: 8 * 2^-24 of their size. */
    CU_ASSERT_DOUBLE_EQUAL(cpa_reference_tolerance(CPA_F32, 256, 0, 1, 100) - quiet, 2 * 800 * 0x1p-24, 1e-12);
    CU_ASSERT_EQUAL(cpa_reference_tolerance(CPA_BF16, 256, 0, 1, 100), 2 * 0x1p-8 + 1e-5);
    CU_ASSERT_EQUAL(cpa_reference_tolerance(CPA_F32, 256, 0.5, 1, 100), 1 + 1e-5);
}

/* The row over one key after the other, alone and joined from a row each: all the same. */
static cpa_reference_row row_over(const float *q, int keys, const float *k, const float *v) {
    cpa_reference_row at_once, joined;
    double out[2][1], lse[2], tolerance[2];
    cpa_reference_begin(&at_once, q, 2, 1, CPA_F32, 1);
    cpa_reference_begin(&joined, q, 2, 1, CPA_F32, 1);
    cpa_reference_add_keys(&at_once, keys, k, v);
    for (int i = keys - 1; i >= 0; i--) {
        cpa_reference_row one;
        cpa_reference_begin(&one, q, 2, 1, CPA_F32, 1);
        cpa_reference_add(&one, k + 2 * i, v + i);
        cpa_reference_join(&joined, &one);
    }
    cpa_reference_end(&at_once, out[0], &lse[0], &tolerance[0]);
    cpa_reference_end(&joined, out[1], &lse[1], &tolerance[1]);
    CU_ASSERT(isnan(lse[0]) ? isnan(lse[1]) && isnan(out[0][0]) && isnan(out[1][0])
                            : lse[0] == lse[1] && out[0][0] == out[1][0]);
    CU_ASSERT_EQUAL(at_once.not_finite, joined.not_finite);
    CU_ASSERT_EQUAL(at_once.undecided, joined.undecided);
    return at_once;
}

static void scores_that_are_not_finite_make_the_row_nan_or_weigh_nothing(void) {
    const float q[2] = {100, 1}, v[3] = {7, 7, NAN};
    const float bad[] = {NAN, INFINITY, 3e38f};
    for (int i = 0; i < 3; i++) {
        const float k[6] = {0, 0, bad[i], 0, 0, 0};
        CU_ASSERT_EQUAL(row_over(q, 2, k, v).not_finite, 1);
        CU_ASSERT_EQUAL(row_over(q, 1, k, v).not_finite, 0);
    }
    const float low[6] = {0, 0, 0, 0, -INFINITY, 0}, lowest[2] = {-3e38f, 0}, both[2] = {3e38f, -3e38f};
    const cpa_reference_row row = row_over(q, 3, low, v);
    CU_ASSERT(row.o[0] == 14 && row.sum == 2 && !row.not_finite && !row.undecided);
    CU_ASSERT(row_over(q, 1, lowest, v).sum == 0 && !row_over(q, 1, lowest, v).undecided);
    const float large[] = {1e8f / 100, 0}, small[] = {1e7f / 100, 0};
    CU_ASSERT(row_over(q, 1, large, v).undecided && row_over(q, 1, large, v).o[0] == 7);
    CU_ASSERT(!row_over(q, 1, small, v).undecided);
    const float lower[] = {0, 0, -1e8f / 100, 0};
    CU_ASSERT_EQUAL(row_over(q, 2, lower, v).o[0], 7);
    CU_ASSERT_EQUAL(row_over(q, 1, lower + 2, v).sum, 0);
    const float sides[2] = {100, 100};
    CU_ASSERT(row_over(sides, 1, both, v).undecided);
}

static void a_cache_holds_nan_where_it_was_given_nan(void) {
    const float nan[1] = {NAN}, one[1] = {1}, infinite[1] = {INFINITY};
    for (int dtype = CPA_F32; dtype < CPA_DTYPE_COUNT; dtype++) {
        CU_ASSERT(cpa_reference_may_hold(nan, nan, (cpa_dtype)dtype, CPA_KEYS, 0, 1));
        CU_ASSERT(cpa_reference_may_hold(infinite, infinite, (cpa_dtype)dtype, CPA_KEYS, 0, 1));
        CU_ASSERT(!cpa_reference_may_hold(nan, one, (cpa_dtype)dtype, CPA_KEYS, 0, 1));
        CU_ASSERT(!cpa_reference_may_hold(one, nan, (cpa_dtype)dtype, CPA_KEYS, 0, 1));
    }
}

static void rounding_is_to_nearest_even(void) {
    CU_ASSERT_EQUAL(cpa_reference_round(1.0f + 0x1p-8f, CPA_BF16), 1.0f);
    CU_ASSERT_EQUAL(cpa_reference_round(1.0f + 3 * 0x1p-8f, CPA_BF16), 1.0f + 0x1p-6f);
    CU_ASSERT_EQUAL(cpa_reference_round(1.0f + 0x1p-11f, CPA_F16), 1.0f);
    CU_ASSERT_EQUAL(cpa_reference_round(0x1p-24f * 1.5f, CPA_F16), 0x1p-23f);
    CU_ASSERT(isinf(cpa_reference_round(65520.0f, CPA_F16)));
    CU_ASSERT_EQUAL(cpa_reference_round(1.1f, CPA_F32), 1.1f);
}

static void widening_reads_every_kind_of_number(void) {
    uint16_t bf16[3] = {0x3f80, 0xc000, 0x7f80}, f16[4] = {0x3c00, 0x0001, 0xfbff, 0x7e00};
    float out[4];
    cpa_reference_widen(bf16, CPA_BF16, 3, out);
    CU_ASSERT(out[0] == 1 && out[1] == -2 && isinf(out[2]));
    cpa_reference_widen(f16, CPA_F16, 4, out);
    CU_ASSERT(out[0] == 1 && out[1] == 0x1p-24f && out[2] == -65504 && isnan(out[3]));
}

/* Many keys, their maximum late, in blocks; and the same in two rows that are joined. */
static void keys_in_blocks_and_joined_rows_give_the_same_row(void) {
    enum { KEYS = 150, DIM = 40, CUT = 67 };
    static float k[KEYS * DIM], v[KEYS * DIM];
    float q[DIM];
    for (int i = 0; i < KEYS * DIM; i++) {
        k[i] = (float)((i * 37) % 101 - 50) / 50 * (float)(1 + i / DIM / 30);
        v[i] = (float)((i * 53) % 97 - 48) / 24;
    }
    for (int d = 0; d < DIM; d++) q[d] = (float)((d * 29) % 23 - 11) / 4;
    cpa_reference_row one, many, left, right, empty;
    cpa_reference_row *all[] = {&one, &many, &left, &right, &empty};
    for (int i = 0; i < 5; i++) cpa_reference_begin(all[i], q, DIM, DIM, CPA_BF16, 0);
    for (int i = 0; i < KEYS; i++) cpa_reference_add(&one, k + i * DIM, v + i * DIM);
    cpa_reference_add_keys(&many, KEYS, k, v);
    cpa_reference_add_keys(&left, CUT, k, v);
    cpa_reference_add_keys(&right, KEYS - CUT, k + CUT * DIM, v + CUT * DIM);
    cpa_reference_join(&empty, &left);
    cpa_reference_join(&empty, &right);
    cpa_reference_join(&left, &right);
    double want[DIM], out[DIM], want_lse, lse, want_tolerance, tolerance;
    cpa_reference_end(&one, want, &want_lse, &want_tolerance);
    cpa_reference_row *others[] = {&many, &left, &empty};
    for (int i = 0; i < 3; i++) {
        cpa_reference_end(others[i], out, &lse, &tolerance);
        CU_ASSERT_DOUBLE_EQUAL(lse, want_lse, 1e-12);
        CU_ASSERT_DOUBLE_EQUAL(tolerance, want_tolerance, 0.2 * want_tolerance);
        for (int d = 0; d < DIM; d++) CU_ASSERT_DOUBLE_EQUAL(out[d], want[d], 1e-12);
    }
}

static void errors_count_nan_as_infinite(void) {
    float got[3] = {1, NAN, 2};
    double want[3] = {1, 0, 2.5};
    CU_ASSERT(isinf(cpa_reference_error(got, want, 3)));
    got[1] = 0;
    CU_ASSERT_EQUAL(cpa_reference_error(got, want, 3), 0.5);
}

static void masks_see_what_their_definition_says(void) {
    cpa_mask causal = {.causal = 1}, window = {.causal = 1, .window = 3, .sinks = 2}, full = {0};
    CU_ASSERT(cpa_reference_sees(causal, 5, 5) && !cpa_reference_sees(causal, 5, 6));
    CU_ASSERT(cpa_reference_sees(window, 9, 7) && !cpa_reference_sees(window, 9, 6));
    CU_ASSERT(cpa_reference_sees(window, 9, 1) && !cpa_reference_sees(window, 9, 2));
    CU_ASSERT(cpa_reference_sees(full, 0, 100));
}

/* The share of the weights of scores that lie more than a distance below the largest. */
static double share_below(const double *scores, int n, double distance) {
    double max = -INFINITY, below = 0, all = 0;
    for (int i = 0; i < n; i++) max = fmax(max, scores[i]);
    for (int i = 0; i < n; i++) {
        all += exp(scores[i] - max);
        if (scores[i] < max - distance) below += exp(scores[i] - max);
    }
    return below / all;
}

static void what_may_be_skipped_is_told_from_above(void) {
    enum { N = 1000 };
    static double scores[N];
    for (int kind = 0; kind < 12; kind++) {
        const double distance = 0.5 + 3 * (kind % 3), spread = 0.2 * distance * (1 + kind / 3);
        cpa_skipped_mass at_once = cpa_skipped_mass_of(distance), joined = at_once, parts[3];
        for (int i = 0; i < N; i++)
            scores[i] = spread * (sin(i * 12.9898) * 4 + (kind % 2 ? i / 300.0 : -i / 300.0)) - 7;
        for (int part = 0; part < 3; part++) parts[part] = at_once;
        cpa_skipped_mass_add(&at_once, N, scores);
        for (int i = 0; i < N; i++) cpa_skipped_mass_add(&parts[i % 3], 1, &scores[i]);
        for (int part = 0; part < 3; part++) cpa_skipped_mass_join(&joined, &parts[part]);
        const double share = cpa_skipped_mass_share(&at_once);
        CPA_ASSERT_ORDER(share, >=, share_below(scores, N, distance));
        CPA_ASSERT_ORDER(share, <=, share_below(scores, N, distance * (1 - 1.5 / CPA_SKIPPED_STEPS)) + 1e-12);
        CPA_ASSERT_ORDER(share, <, 1);
        CU_ASSERT_DOUBLE_EQUAL(cpa_skipped_mass_share(&joined), share, 1e-12);
    }
    const cpa_skipped_mass none = cpa_skipped_mass_of(0), empty = cpa_skipped_mass_of(1);
    CU_ASSERT(cpa_skipped_mass_share(&none) == 0 && cpa_skipped_mass_share(&empty) == 0);
}

static const cpa_test tests[] = {
    {"what may be skipped is told from above", what_may_be_skipped_is_told_from_above},
    {"keys in blocks and joined rows give the same row", keys_in_blocks_and_joined_rows_give_the_same_row},
    {"two keys give the softmax by hand", two_keys_give_the_softmax_by_hand},
    {"tolerances grow with the LSE and the size of scores", tolerances_grow_with_the_lse_and_the_size_of_scores},
    {"a row without keys is zero and minus infinity", a_row_without_keys_is_zero_and_minus_infinity},
    {"scores that are not finite make the row NaN or weigh nothing",
     scores_that_are_not_finite_make_the_row_nan_or_weigh_nothing},
    {"a cache holds NaN where it was given NaN", a_cache_holds_nan_where_it_was_given_nan},
    {"rounding is to nearest even", rounding_is_to_nearest_even},
    {"widening reads every kind of number", widening_reads_every_kind_of_number},
    {"errors count NaN as infinite", errors_count_nan_as_infinite},
    {"masks see what their definition says", masks_see_what_their_definition_says},
};
CPA_TEST_MAIN("reference", tests)
