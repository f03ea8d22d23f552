/* By which way attention over latents is less work. */
#include "src/context/latent_work.h"
#include "tests/fixtures/unit.h"

enum { LONG = 1 << 22 };

/* Those of DeepSeek V3: 128 heads of 128 + 64 and 128 over latents of 512 + 64. */
static const cpa_attention_shape cache = {
    .q_heads = 128, .kv_heads = 1, .k_dim = 576, .v_dim = 512, .v_in_k = 1, .dtype = CPA_BF16, .kv_dtype = CPA_BF16};
static const cpa_attention_shape heads = {
    .q_heads = 128, .kv_heads = 128, .k_dim = 192, .v_dim = 128, .dtype = CPA_BF16, .kv_dtype = CPA_BF16};

static int absorbs(int64_t tokens, int64_t cached, int32_t row_ranks, int32_t key_ranks) {
    return cpa_latents_are_absorbed(&cache, &heads, cpa_latent_load_of(tokens, cached, row_ranks, key_ranks));
}

static void a_load_is_that_of_the_rank_with_the_most(void) {
    const cpa_latent_load all = cpa_latent_load_of(100, 900, 1, 1), part = cpa_latent_load_of(100, 900, 4, 1),
                          keys = cpa_latent_load_of(100, 900, 1, 5);
    CU_ASSERT_DOUBLE_EQUAL(all.rows, 100, 0);
    CU_ASSERT_DOUBLE_EQUAL(all.keys, 1000, 0);
    CU_ASSERT_DOUBLE_EQUAL(all.pairs, 100 * 900 + 100 * 101 / 2, 0);
    CU_ASSERT_DOUBLE_EQUAL(part.rows, 25, 0);
    CU_ASSERT_DOUBLE_EQUAL(part.keys, 1000, 0);
    CU_ASSERT_DOUBLE_EQUAL(part.pairs, all.pairs / 4, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(keys.rows, 100, 0);
    CU_ASSERT_DOUBLE_EQUAL(keys.keys, 200, 0);
    CU_ASSERT_DOUBLE_EQUAL(keys.pairs, all.pairs / 5, 1e-9);
}

/* Of each key 2 * 128 * 256 * 512 = 33,554,432 products' FLOPs expand it, and 128 * 320 * 2 bytes of it are read again,
 * which counts as 20,889,600 FLOPs; absorbed it takes 2 * 128 * 1088 = 278,528 FLOPs a row: as much for 195.5 rows. */
static void few_rows_over_a_long_context_absorb(void) {
    CU_ASSERT(absorbs(1, LONG, 1, 1));
    CU_ASSERT(absorbs(195, LONG, 1, 1));
    CU_ASSERT(!absorbs(196, LONG, 1, 1));
    CU_ASSERT(!absorbs(8192, LONG, 1, 1));
}

/* By pass-KV a rank has a part of the rows, by pass-Q all of them over a part of the keys. */
static void rows_count_on_the_rank_that_meets_the_keys(void) {
    CU_ASSERT(absorbs(4 * 195, LONG, 4, 1));
    CU_ASSERT(!absorbs(4 * 196, LONG, 4, 1));
    CU_ASSERT(absorbs(195, LONG, 1, 4));
    CU_ASSERT(!absorbs(196, LONG, 1, 4));
}

/* Where all keys are new, half of them meet a row, and each row folds as many products as its key expands: as much for
 * 2 * 20,889,600 / 278,528 = 150 rows, but one that meets itself. */
static void short_prompts_without_a_context_absorb_too(void) {
    CU_ASSERT(absorbs(148, 0, 1, 1));
    CU_ASSERT(!absorbs(150, 0, 1, 1));
}

/* Attention over them takes 2 * 128 + 80 columns of a pair, over heads 192 + 256. */
static void narrow_latents_are_always_absorbed(void) {
    cpa_attention_shape narrow = cache, wide = heads;
    narrow.k_dim = 192 + 16, narrow.v_dim = 192 - 64;
    wide.v_dim = 256;
    CU_ASSERT(cpa_latents_are_absorbed(&narrow, &wide, cpa_latent_load_of(LONG, LONG, 1, 1)));
}

static const cpa_test tests[] = {
    {"a load is that of the rank with the most", a_load_is_that_of_the_rank_with_the_most},
    {"few rows over a long context absorb", few_rows_over_a_long_context_absorb},
    {"rows count on the rank that meets the keys", rows_count_on_the_rank_that_meets_the_keys},
    {"short prompts without a context absorb too", short_prompts_without_a_context_absorb_too},
    {"narrow latents are always absorbed", narrow_latents_are_always_absorbed},
};

CPA_TEST_MAIN("latent work", tests)
