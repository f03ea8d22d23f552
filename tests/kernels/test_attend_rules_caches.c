/* attend with every rule of scores over every cache, block, layout and width of heads, as prefill, as the end of one, as
 * decode and as a few drafts, against the float64 reference. The host takes every ninth case. */
#include <stdio.h>

#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

/* Of a cache: its dtype, and how its codes are scaled. */
enum { OF_ROWS, OF_TENSOR, OF_HEADS };
static const struct {
    cpa_dtype dtype;
    int scales;
} CACHES[] = {{CPA_BF16, OF_ROWS},       {CPA_F16, OF_ROWS},       {CPA_FP8_E4M3, OF_ROWS},
              {CPA_FP8_E4M3, OF_TENSOR}, {CPA_FP8_E4M3, OF_HEADS}, {CPA_INT8, OF_ROWS}};
static const int32_t WIDTHS[][2] = {{64, 64}, {80, 80}, {128, 128}, {192, 128}, {256, 256}};
static const int32_t BLOCKS[] = {1, 8, 16, 64};
static const int32_t HEADS[][2] = {{8, 2}, {4, 4}, {6, 1}};
static const int64_t NEW_TOKENS[] = {1, 3, 45, 300}; /* of 300 keys and some */
enum {
    N_CACHES = sizeof CACHES / sizeof *CACHES,
    N_WIDTHS = sizeof WIDTHS / sizeof *WIDTHS,
    N_BLOCKS = sizeof BLOCKS / sizeof *BLOCKS,
    N_HEADS = sizeof HEADS / sizeof *HEADS,
    N_NEW = sizeof NEW_TOKENS / sizeof *NEW_TOKENS
};

static cpa_attend_case case_of(int cache, int width, int block, cpa_kv_layout layout, int number) {
    const cpa_dtype dtype = CACHES[cache].dtype;
    const int quantised = cpa_dtype_is_quantised(dtype);
    const uint32_t turn = (uint32_t)number * 2654435761u >> 8; /* so that heads and rows go with every rule */
    const int64_t new_tokens = NEW_TOKENS[turn / 7 % N_NEW];
    cpa_attend_case shape = {.q_dtype = quantised ? (turn % 2 ? CPA_F16 : CPA_BF16) : dtype,
                             .kv_dtype = dtype,
                             .q_heads = HEADS[turn % N_HEADS][0],
                             .kv_heads = HEADS[turn % N_HEADS][1],
                             .k_dim = WIDTHS[width][0],
                             .v_dim = WIDTHS[width][1],
                             .block_size = BLOCKS[block],
                             .cp_size = 1 + (int32_t)(turn % 5 / 4), /* mostly one rank */
                             .interleave = BLOCKS[block],
                             .length = 300 + turn % 7,
                             .mask = {.causal = 1},
                             .layout = layout};
    if (CACHES[cache].scales == OF_TENSOR) shape.k_scale = 0.03f, shape.v_scale = 0.02f;
    if (CACHES[cache].scales == OF_HEADS) shape.n_scales = shape.kv_heads;
    shape.start = new_tokens < 300 ? shape.length - new_tokens : 0;
    return shape;
}

/* Whether there is such a cache. */
static int exists(int cache, int width, int block, cpa_kv_layout layout) {
    if (layout != CPA_VLLM_X) return 1;
    return CACHES[cache].dtype != CPA_INT8 && BLOCKS[block] >= 16 && WIDTHS[width][0] % 16 == 0;
}

static void every_rule_over_every_cache(void) {
    static const cpa_kv_layout layouts[] = {CPA_TOKEN_MAJOR, CPA_HEAD_MAJOR, CPA_VLLM_X};
    const int thin = cpa_test_promises_bits() ? 9 : 1;
    int64_t cases = 0, wrong = 0;
    int turn = 0;
    for (int cache = 0; cache < N_CACHES; cache++)
        for (int width = 0; width < N_WIDTHS; width++)
            for (int block = 0; block < N_BLOCKS; block++)
                for (int layout = 0; layout < 3; layout++)
                    for (int form = 0; form < CPA_TEST_N_FORMS; form++) {
                        if (!exists(cache, width, block, layouts[layout]) || turn++ % thin) continue;
                        const cpa_attend_case shape = case_of(cache, width, block, layouts[layout], turn);
                        wrong += cpa_test_wrong_rows(&shape, CPA_TEST_FORMS[form], shape.start ? 1 : 41);
                        cases++;
                    }
    printf("%lld cases ", (long long)cases);
    CU_ASSERT_EQUAL(wrong, 0);
    CPA_ASSERT_ORDER(cases, >=, 300);
}

/* Scores far below the cap, at it and beyond it, which devices compute in different ways. */
static void softcaps_of_every_height(void) {
    static const float scales[] = {1e-4f, 0.02f, 0.125f, 1, 30, 0x1p27f};
    int64_t wrong = 0;
    for (int base = 1; base < 3; base++)
        for (int i = 0; i < 6; i++)
            for (int late = 0; late < 2; late++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.scale = scales[i];
                shape.start = late ? shape.length - 2 : 0;
                wrong += cpa_test_wrong_rows(&shape, CPA_TEST_SOFTCAP, 7);
            }
    CU_ASSERT_EQUAL(wrong, 0);
}

static const cpa_test tests[] = {
    {"every rule over every cache, block, layout and width", every_rule_over_every_cache},
    {"softcaps of every height", softcaps_of_every_height},
};

int main(int argc, char **argv) {
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    return cpa_test_main(argc, argv, "attend_rules_caches", tests, (int)(sizeof tests / sizeof *tests));
}
