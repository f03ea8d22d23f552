/* The planner: which algorithm a chunk uses, why, and what it should cost. */
#include <math.h>
#include <string.h>

#include "src/schedule/planner.h"
#include "tests/fixtures/unit.h"

/* Four ranks of a shape with 32 query and 8 key heads, bf16; the first threshold is at 4*4e14*8*2/(64*4e11) = 1000. */
static const cpa_planner example = {
    .cp_size = 4,
    .shape.q_heads = 32,
    .shape.kv_heads = 8,
    .shape.k_dim = 128,
    .shape.v_dim = 128,
    .shape.kv_dtype = CPA_BF16,
    .flops = 4e14,
    .bandwidth = 4e11,
};

static void check_choice(const cpa_planner *planner, int64_t new_tokens, int64_t cached, int decode,
                         cpa_algorithm algorithm, cpa_planner_reason reason) {
    cpa_planner_choice choice = cpa_planner_choose(planner, new_tokens, cached, decode);
    CU_ASSERT_EQUAL(choice.algorithm, algorithm);
    CU_ASSERT_EQUAL(choice.reason, reason);
}

static void long_chunks_pass_kv_because_the_exchange_hides(void) {
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_overlap_tokens(&example), 1000, 1e-9);
    check_choice(&example, 1000, 1000000, 0, CPA_PASS_KV, CPA_REASON_OVERLAP);
    check_choice(&example, 999, 10000000, 0, CPA_PASS_Q, CPA_REASON_PREFIX);
}

/* At T = 500 the second threshold is 2*8/32 - 4*500*4e11/(4*4e14*2) = 0.25, so P = 1500 is the longest prefix. */
static void short_chunks_pass_kv_while_they_are_most_of_the_bytes(void) {
    check_choice(&example, 500, 0, 0, CPA_PASS_KV, CPA_REASON_BYTES);
    check_choice(&example, 500, 1500, 0, CPA_PASS_KV, CPA_REASON_BYTES);
    check_choice(&example, 500, 1501, 0, CPA_PASS_Q, CPA_REASON_PREFIX);
}

static void decode_passes_q(void) {
    check_choice(&example, 1, 0, 1, CPA_PASS_Q, CPA_REASON_DECODE);
    check_choice(&example, 5000, 100, 1, CPA_PASS_Q, CPA_REASON_DECODE);
}

static void a_forced_algorithm_holds_for_every_chunk(void) {
    for (cpa_algorithm forced = CPA_PASS_KV; forced <= CPA_PASS_Q; forced++) {
        for (int32_t n = 1; n <= 4; n++) {
            cpa_planner planner = example;
            planner.forced = forced;
            planner.cp_size = n;
            check_choice(&planner, 1, 100000, 1, forced, CPA_REASON_FORCED);
            check_choice(&planner, 1, 100000, 0, forced, CPA_REASON_FORCED);
            check_choice(&planner, 100000, 0, 0, forced, CPA_REASON_FORCED);
        }
    }
}

static void one_rank_has_nothing_to_exchange(void) {
    cpa_planner planner = example;
    planner.cp_size = 1;
    check_choice(&planner, 1, 100, 1, CPA_PASS_KV, CPA_REASON_LOCAL);
    check_choice(&planner, 100, 100000, 0, CPA_PASS_KV, CPA_REASON_LOCAL);
    for (cpa_algorithm algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++)
        CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, algorithm, 100, 0), 2.0 * 100 * 50 * 32 * 256 / 4e14,
                               1e-18);
}

static void a_faster_link_or_a_slower_device_favours_pass_kv(void) {
    cpa_planner planner = example;
    planner.bandwidth *= 10;
    check_choice(&planner, 100, 1000000, 0, CPA_PASS_KV, CPA_REASON_OVERLAP);
    planner = example;
    planner.flops /= 10;
    check_choice(&planner, 100, 1000000, 0, CPA_PASS_KV, CPA_REASON_OVERLAP);
}

/* Chunks of 1K and 2K are timed: pass-KV takes 1 and 2 ms over 16K and 1 and 3 ns more for each token beyond, pass-Q
 * 2 and 3 ms and 0.5 and 1. */
static cpa_planner timed_example(void) {
    cpa_planner planner = example;
    planner.n_probes = 2;
    planner.probes[0] = (cpa_planner_probe){1024, {1e-3, 1e-9}, {2e-3, 0.5e-9}};
    planner.probes[1] = (cpa_planner_probe){2048, {2e-3, 3e-9}, {3e-3, 1e-9}};
    return planner;
}

static void what_was_timed_decides(void) {
    const cpa_planner planner = timed_example();
    check_choice(&planner, 2048, 16384, 0, CPA_PASS_KV, CPA_REASON_MEASURED);
    check_choice(&planner, 2048, 16384 + 499999, 0, CPA_PASS_KV, CPA_REASON_MEASURED);
    check_choice(&planner, 2048, 16384 + 500001, 0, CPA_PASS_Q, CPA_REASON_MEASURED);
    check_choice(&planner, 1024, 16384 + 1999999, 0, CPA_PASS_KV, CPA_REASON_MEASURED);
    check_choice(&planner, 1024, 16384 + 2000001, 0, CPA_PASS_Q, CPA_REASON_MEASURED);
    /* Half way: 1.5 ms + 2 ns a token, and 2.5 ms + 0.75 ns. */
    check_choice(&planner, 1536, 16384 + 799999, 0, CPA_PASS_KV, CPA_REASON_MEASURED);
    check_choice(&planner, 1536, 16384 + 800001, 0, CPA_PASS_Q, CPA_REASON_MEASURED);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_KV, 1536, 16384 + 100000), 1.7e-3, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_Q, 1536, 16384 + 100000), 2.575e-3, 1e-9);
}

static void where_nothing_was_timed_the_formulas_decide(void) {
    const cpa_planner planner = timed_example();
    check_choice(&planner, 2049, 10000000, 0, CPA_PASS_KV, CPA_REASON_OVERLAP);
    check_choice(&planner, 999, 10000000, 0, CPA_PASS_Q, CPA_REASON_PREFIX);
    check_choice(&planner, 1024, 16383, 0, CPA_PASS_KV, CPA_REASON_OVERLAP);
    check_choice(&planner, 1024, 100000, 1, CPA_PASS_Q, CPA_REASON_DECODE);
    const cpa_planner local = cpa_planner_on_rank(&planner);
    check_choice(&local, 1024, 100000, 0, CPA_PASS_KV, CPA_REASON_LOCAL);
}

/* T = 1000, P = 9000: attention 2*1000*9500*32*256/(4*4e14) s; keys and values 3/4*10000*8*256*2/4e11 s; queries and
 * states 3/4*1000*32*(128*2+4*129)/4e11 s. */
static void predicted_times_follow_the_formulas(void) {
    double attention = 97.28e-6, pass_q_exchange = 46.32e-6;
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&example, CPA_PASS_KV, 1000, 9000), attention, 1e-11);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&example, CPA_PASS_Q, 1000, 9000), attention + pass_q_exchange, 1e-11);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&example, CPA_PASS_KV, 10, 9990), 76.8e-6, 1e-11);
}

/* 1e6 tokens of 8*256*2 bytes, a quarter on each rank, take 250 us at 4.096e12 bytes/s; the products of one row with
 * them 10 us, those of 1000 rows 10 ms. */
static void few_rows_take_as_long_as_reading_the_cache(void) {
    cpa_planner planner = example;
    planner.memory_bandwidth = 4.096e12;
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict_decode(&planner, 999999), 250e-6, 1e-11);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict_decode(&example, 999999), 10.24e-6, 1e-10);
    planner.bandwidth = INFINITY;
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_Q, 1, 999999), 250e-6, 1e-11);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_KV, 1000, 999000), 10.23488e-3, 1e-9);
}

static void beyond_the_first_threshold_the_exchange_is_predicted_to_hide(void) {
    for (int64_t cached = 10000; cached <= 10000000; cached *= 10) {
        cpa_planner instant = example;
        instant.bandwidth = INFINITY;
        CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&example, CPA_PASS_KV, 1000, cached),
                               cpa_planner_predict(&instant, CPA_PASS_KV, 1000, cached), 1e-15);
    }
}

static void every_reason_has_its_own_phrase(void) {
    for (int a = 0; a < CPA_REASON_COUNT; a++) {
        CPA_ASSERT_ORDER(strlen(cpa_planner_reason_name((cpa_planner_reason)a)), >, 0);
        for (int b = 0; b <= CPA_REASON_COUNT; b++)
            CU_ASSERT_EQUAL(strcmp(cpa_planner_reason_name((cpa_planner_reason)a),
                                   cpa_planner_reason_name((cpa_planner_reason)b)) == 0,
                            a == b);
    }
}

/* Reading 1000 cached tokens, 4096 bytes each, takes 1 us at 4.096e12 bytes/s; the 8192 tokens of a prompt take
 * 2 * 8192 * 4096 * 32 * 256 / 4e14 = 1374 us on one rank, and a quarter on four. */
static void short_sequences_are_local_where_their_exchanges_would_take_longer(void) {
    cpa_planner planner = example;
    CU_ASSERT_EQUAL(cpa_planner_local_tokens(&planner), 0); /* nothing known of exchanges */
    planner.memory_bandwidth = 4.096e12;
    planner.exchange_s = 20e-6;
    CU_ASSERT_EQUAL(cpa_planner_local_tokens(&planner), CPA_PLANNER_LOCAL_TOKENS);
    /* A token saves 20 - 3/4 * 8.2 us, the prompt costs 1031 us more: from 75 tokens on it pays. */
    CU_ASSERT(!cpa_planner_prefers_local(&planner, 8192, 70, 0, 0, 0));
    CU_ASSERT(cpa_planner_prefers_local(&planner, 8192, 80, 0, 0, 0));
    /* A prefix that is found on its rank costs nothing again, one that is found on all is lost. */
    CU_ASSERT(cpa_planner_prefers_local(&planner, 8192, 20, 8000, 0, 0));
    CU_ASSERT(!cpa_planner_prefers_local(&planner, 8192, 80, 0, 8000, 0));
    /* An exchange serves all sequences of a step; reading is spread anyway. */
    CU_ASSERT(!cpa_planner_prefers_local(&planner, 8192, 1000, 0, 0, 4));
    CU_ASSERT(cpa_planner_prefers_local(&planner, 512, 1000, 0, 0, 4));
    /* Reading three quarters of 30000 tokens more takes longer than any exchange. */
    CU_ASSERT(!cpa_planner_prefers_local(&planner, 30000, 100000, 29999, 0, 0));
    planner.forced = CPA_PASS_Q;
    CU_ASSERT_EQUAL(cpa_planner_local_tokens(&planner), 0);
    planner.forced = CPA_AUTO;
    planner.cp_size = 1;
    CU_ASSERT_EQUAL(cpa_planner_local_tokens(&planner), 0);
}

/* Latents have 1,152 bytes a token for 1,088 columns of keys and values: three quarters of a thousand of them travel in
 * that many bytes, where a device takes no time; and as codes in 656. */
static void latents_travel_as_they_are_kept(void) {
    cpa_planner planner = example;
    planner.shape = (cpa_attention_shape){.q_heads = 128,
                                          .kv_heads = 1,
                                          .k_dim = 576,
                                          .v_dim = 512,
                                          .v_in_k = 1,
                                          .dtype = CPA_BF16,
                                          .kv_dtype = CPA_BF16};
    planner.flops = 1e30;
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_KV, 400, 600), 0.75 * 1000 * 1152 / 4e11, 1e-15);
    const double row = 128 * (576 * 2 + 512 * 4 + 4);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_Q, 400, 600), 0.75 * 400 * row / 4e11, 1e-12);
    planner.shape.kv_dtype = CPA_FP8_T128;
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_KV, 400, 600), 0.75 * 1000 * 656 / 4e11, 1e-15);
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_Q, 400, 600), 0.75 * 400 * row / 4e11, 1e-12);
    planner.state_dtype = CPA_BF16;
    CU_ASSERT_DOUBLE_EQUAL(cpa_planner_predict(&planner, CPA_PASS_Q, 400, 600),
                           0.75 * 400 * (row - 128 * 512 * 2) / 4e11, 1e-12);
}

static const cpa_test tests[] = {
    {"long chunks pass KV because the exchange hides", long_chunks_pass_kv_because_the_exchange_hides},
    {"short chunks pass KV while they are most of the bytes", short_chunks_pass_kv_while_they_are_most_of_the_bytes},
    {"decode passes Q", decode_passes_q},
    {"a forced algorithm holds for every chunk", a_forced_algorithm_holds_for_every_chunk},
    {"one rank has nothing to exchange", one_rank_has_nothing_to_exchange},
    {"a faster link or a slower device favours pass-KV", a_faster_link_or_a_slower_device_favours_pass_kv},
    {"what was timed decides", what_was_timed_decides},
    {"where nothing was timed the formulas decide", where_nothing_was_timed_the_formulas_decide},
    {"predicted times follow the formulas", predicted_times_follow_the_formulas},
    {"latents travel as they are kept", latents_travel_as_they_are_kept},
    {"few rows take as long as reading the cache", few_rows_take_as_long_as_reading_the_cache},
    {"beyond the first threshold the exchange is predicted to hide",
     beyond_the_first_threshold_the_exchange_is_predicted_to_hide},
    {"short sequences are rank-local where their exchanges would take longer",
     short_sequences_are_local_where_their_exchanges_would_take_longer},
    {"every reason has its own phrase", every_reason_has_its_own_phrase},
};

CPA_TEST_MAIN("planner", tests)
