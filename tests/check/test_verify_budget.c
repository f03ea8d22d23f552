/* The budget of the sampled check: rates follow from the measured cost, and the bound holds. */
#include "src/check/verify_budget.h"
#include "tests/fixtures/unit.h"

static void a_given_rate_is_not_bounded(void) {
    cpa_verify_budget budget;
    cpa_verify_budget_begin(&budget, 0.25);
    CU_ASSERT_EQUAL(budget.rate, 0.25);
    CU_ASSERT(cpa_verify_budget_spend(&budget, (int64_t)1 << 40, 0));
    cpa_verify_budget_attend(&budget, 100, 4, 1000);
    cpa_verify_budget_agree(&budget, 1, 100);
    CU_ASSERT_EQUAL(budget.rate, 0.25);
}

static void nothing_but_the_first_row_is_checked_before_a_measurement(void) {
    cpa_verify_budget budget;
    cpa_verify_budget_begin(&budget, -1);
    CU_ASSERT_EQUAL(budget.rate, 0);
    CU_ASSERT_FALSE(cpa_verify_budget_spend(&budget, 1, 0));
    CU_ASSERT(cpa_verify_budget_spend(&budget, 1, 1));
}

/* A device that attends ten thousand row-keys while the check walks one key, as a GPU does. */
static void the_check_takes_its_share_of_the_time_and_no_more(void) {
    const double attend_s = 1e-10, key_s = 1e-6;
    cpa_verify_budget budget;
    cpa_verify_budget_begin(&budget, -1);
    double run_s = 0, check_s = 0;
    for (int64_t step = 0; step < 2000; step++) {
        const int64_t rows = 64, context = 1000 + 500 * step;
        const int32_t heads = 32;
        cpa_verify_budget_attend(&budget, rows, heads, context);
        run_s += attend_s * (double)rows * heads * (double)context;
        double wanted = budget.rate * (double)rows * heads;
        for (int64_t n = 0; n < (int64_t)wanted + 1; n++) {
            if (!cpa_verify_budget_spend(&budget, context, step == 0 && n == 0)) continue;
            check_s += key_s * (double)context;
            run_s += key_s * (double)context;
        }
        cpa_verify_budget_agree(&budget, run_s, check_s);
        CPA_ASSERT_ORDER(budget.rate, <=, CPA_VERIFY_MOST);
    }
    CPA_ASSERT_ORDER(check_s, >, 0.5 * CPA_VERIFY_SHARE * run_s);
    CPA_ASSERT_ORDER(check_s, <=, CPA_VERIFY_SHARE * run_s + key_s * 1e6);
}

/* 5 ms a check, whatever it checks, and short rows: the rate alone would find no second row. */
static void what_the_time_pays_for_is_checked_where_rows_are_short(void) {
    cpa_verify_budget budget;
    cpa_verify_budget_begin(&budget, -1);
    double run_s = 0, check_s = 0;
    int64_t checks = 0;
    for (int64_t step = 0; step < 1000; step++) {
        cpa_verify_budget_attend(&budget, 100, 8, 1000);
        run_s += 0.01;
        if (step == 0 || budget.due) {
            CU_ASSERT(cpa_verify_budget_spend(&budget, 100, 1));
            check_s += 0.005;
            run_s += 0.005;
            checks++;
        }
        cpa_verify_budget_agree(&budget, run_s, check_s);
    }
    CPA_ASSERT_ORDER(checks, >=, 35); /* 2% of 10 s */
    CPA_ASSERT_ORDER(check_s, <=, CPA_VERIFY_SHARE * run_s);
}

static void a_cheap_check_takes_the_highest_rate(void) {
    cpa_verify_budget budget;
    cpa_verify_budget_begin(&budget, -1);
    cpa_verify_budget_attend(&budget, 1000, 8, 1);
    CU_ASSERT(cpa_verify_budget_spend(&budget, 500, 1));
    cpa_verify_budget_agree(&budget, 1000, 1e-6);
    CU_ASSERT_EQUAL(budget.rate, CPA_VERIFY_MOST);
    CU_ASSERT(cpa_verify_budget_spend(&budget, 1000, 0));
}

static const cpa_test TESTS[] = {
    {"a given rate is not bounded", a_given_rate_is_not_bounded},
    {"nothing but the first row is checked before a measurement",
     nothing_but_the_first_row_is_checked_before_a_measurement},
    {"the check takes its share of the time and no more", the_check_takes_its_share_of_the_time_and_no_more},
    {"what the time pays for is checked where rows are short", what_the_time_pays_for_is_checked_where_rows_are_short},
    {"a cheap check takes the highest rate", a_cheap_check_takes_the_highest_rate},
};
CPA_TEST_MAIN("budget of the check", TESTS)
