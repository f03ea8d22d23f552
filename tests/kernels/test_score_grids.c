/* The shapes that other stacks test masks, windows and sinks with, against the float64 reference: those of SGLang's
 * test_triton_attention_kernels.py (extend with and without a mask given as bits, sliding windows, context attention,
 * decode), those of FlashInfer's test_attention_sink.py, and layers of gpt-oss and Gemma 2. Lengths are drawn; by
 * default there are two sequences of each and short ones, with --whole up to five of any length. */
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/min_max.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

enum { CAUSAL_BITS = 1, SINKS = 2, SOFTCAP = 4 };

/* `sequences` of up to so many tokens of prefix (from `least` on) and of queries behind them. `window` as ours: a
 * query's own key counts; 0: none. */
typedef struct grid_row {
    const char *name;
    int32_t q_heads, kv_heads;
    int64_t least, prefix, queries, window;
    int32_t full, what, sequences;
    int32_t widths[8]; /* up to a 0 */
} grid_row;

static const grid_row ROWS[] = {
    {"sglang extend", 12, 4, 1, 6165, 6165, 0, 0, 0, 19, {128, 96, 80, 13}},
    {"sglang extend, mask", 12, 4, 1, 6165, 6165, 0, 0, CAUSAL_BITS, 19, {128, 96, 80, 13}},
    {"sglang extend, window -1", 64, 8, 1, 6165, 6165, 0, 0, 0, 19, {128}},
    {"sglang extend, window 127", 64, 8, 1, 6165, 6165, 128, 0, 0, 19, {128}},
    {"sglang context", 4, 4, 0, 0, 12, 0, 0, 0, 2, {128, 96, 80, 13}},
    {"sglang context, full", 4, 4, 0, 0, 12, 0, 1, 0, 2, {128, 96, 80, 13}},
    {"sglang decode, 10", 4, 4, 9, 10, 1, 0, 0, 0, 2, {128, 96, 80, 13}},
    {"sglang grouped decode, 5", 16, 16, 4, 5, 1, 0, 0, 0, 2, {64}},
    {"sglang grouped decode, 100", 16, 1, 99, 100, 1, 0, 0, 0, 2, {64}},
    {"sglang grouped decode, 128", 64, 1, 127, 128, 1, 0, 0, 0, 2, {13}},
    {"sglang grouped decode, 500", 128, 1, 499, 500, 1, 0, 0, 0, 2, {80}},
    {"extend of 32/4 heads, tiny", 32, 4, 3, 5, 6, 0, 0, CAUSAL_BITS, 2, {16, 32, 64, 128}},
    {"flashinfer sink", 32, 8, 0, 0, 128, 0, 0, SINKS, 16, {128}},
    {"flashinfer sink, 32 kv heads", 32, 32, 0, 0, 128, 0, 0, SINKS, 16, {128}},
    {"flashinfer sink, full", 32, 8, 0, 0, 128, 0, 1, SINKS, 4, {128}},
    {"flashinfer sink, window 128", 32, 8, 1, 512, 128, 129, 0, SINKS, 16, {128}},
    {"flashinfer sink, 1 token", 32, 8, 127, 512, 1, 129, 0, SINKS, 16, {128}},
    {"gpt-oss, window 128", 64, 8, 1, 4096, 1024, 128, 0, SINKS, 8, {64}},
    {"gpt-oss, whole context", 64, 8, 1, 4096, 1024, 0, 0, SINKS, 8, {64}},
    {"gpt-oss, decode", 64, 8, 1, 8192, 2, 128, 0, SINKS, 8, {64}},
    {"gemma 2 27b", 32, 16, 1, 4096, 512, 0, 0, SOFTCAP, 4, {128}},
    {"gemma 2 9b, window", 16, 8, 1, 4096, 512, 4096, 0, SOFTCAP, 4, {256}},
    {"gemma 2 9b, decode", 16, 8, 1, 8192, 1, 0, 0, SOFTCAP, 4, {256}},
};
enum { N_ROWS = sizeof ROWS / sizeof *ROWS };

static int whole; /* else at most FEW sequences, and tokens of a prefix and queries */
enum { FEW_SEQUENCES = 2, FEW_TOKENS = 300, MOST_SEQUENCES = 5 };
static int64_t cases;

static int64_t drawn(int64_t least, int64_t end, uint64_t seed) {
    return end <= least ? least : least + (int64_t)(cpa_mix64(seed) % (uint64_t)(end - least));
}

/* What causality says of a row and a key; ctx: the index of the first row. */
static int is_causal(const void *ctx, int64_t row, int64_t key) {
    return key <= *(const int64_t *)ctx + row;
}

static int64_t wrong_rows(const grid_row *row, int32_t width, cpa_dtype dtype, uint64_t seed) {
    const int64_t most = whole ? INT64_MAX : FEW_TOKENS, least = cpa_min64(row->least, most);
    const int64_t start = drawn(least, cpa_min64(row->prefix, most), seed);
    const int64_t queries = drawn(1, cpa_min64(row->queries, most), seed + 1);
    const cpa_attend_case shape = {.q_dtype = dtype,
                                   .kv_dtype = dtype,
                                   .q_heads = row->q_heads,
                                   .kv_heads = row->kv_heads,
                                   .k_dim = width,
                                   .v_dim = width,
                                   .block_size = 16,
                                   .cp_size = 1,
                                   .interleave = 16,
                                   .start = start,
                                   .length = start + queries,
                                   .mask = {.causal = !row->full && !(row->what & CAUSAL_BITS), .window = row->window}};
    cpa_attend_fixture f;
    cpa_attend_result result;
    cpa_attend_fixture_init(&f, &shape, 1);
    cpa_attend_result_init(&result, &f);
    cpa_case_score score = {.q_heads = shape.q_heads, .rows = f.rows};
    if (row->what & CAUSAL_BITS) {
        cpa_case_score_add_bits(&score, 0, (int32_t)shape.length, NULL);
        cpa_case_score_fill_bits(&score, is_causal, &start);
    }
    if (row->what & SINKS) cpa_case_score_add_sinks(&score, NULL);
    for (int32_t h = 0; h < shape.q_heads && score.sinks; h++) score.sinks[h] *= 6; /* as large as logsumexps are */
    if (row->what & SOFTCAP) score.softcap = 50;
    f.score = &score;
    double worst = 0;
    int64_t wrong = cpa_attend_fixture_run_slot(&f, 0, &result) != CPA_OK;
    wrong += cpa_attend_fixture_check(&f, 0, 1 + queries / 9, &result, &worst);
    if (wrong)
        printf("\n    %lld wrong (%g): %s, %s, width %d, %lld + %lld tokens", (long long)wrong, worst, row->name,
               cpa_dtype_name(dtype), width, (long long)start, (long long)queries);
    cases++;
    cpa_case_score_release(&score);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&f);
    return wrong;
}

static void every_row_of_the_grids(void) {
    for (int64_t i = 0; i < N_ROWS; i++) {
        const int64_t sequences = whole ? cpa_min64(ROWS[i].sequences, MOST_SEQUENCES) : FEW_SEQUENCES;
        for (int32_t w = 0; ROWS[i].widths[w]; w++) {
            for (int32_t s = 0; s < sequences; s++) {
                const uint64_t seed = (uint64_t)((i * 64 + w) * 64 + s) * 2;
                CU_ASSERT_EQUAL(wrong_rows(&ROWS[i], ROWS[i].widths[w], CPA_BF16, seed), 0);
                if (ROWS[i].what & SINKS) CU_ASSERT_EQUAL(wrong_rows(&ROWS[i], ROWS[i].widths[w], CPA_F16, seed), 0);
            }
        }
    }
    printf("%lld cases ", (long long)cases);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {{"every row of the grids matches the reference", every_row_of_the_grids}};
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    whole = cpa_test_take_option(&argc, argv, "--whole");
    return cpa_test_main(argc, argv, "grids of rules", tests, (int)(sizeof tests / sizeof tests[0]));
}
