/* Which kernels of attend a call gets on a device of compute capability 9.0, against a table of every rule, cache, block,
 * layout and width; and what is said where no tensor cores take it. Needs no device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attend/attend_choice.h"
#include "tests/fixtures/unit.h"

static const char *const RULES[] = {"none", "softcap", "temperature", "alibi", "sinks", "bits", "bias"};
static const char *const CACHES[] = {"bf16", "fp8", "int8"};
static const char *const BLOCKS[] = {"1", "8", "16", "64"};
static const char *const LAYOUTS[] = {"rows", "vllm-x"};
static const char *const WIDTHS[] = {"64", "80", "128", "192", "256"};
enum { N_RULES = 7, N_CACHES = 3, N_BLOCKS = 4, N_LAYOUTS = 2, N_WIDTHS = 5 };

/* A call; arrays that are only asked for are there at this address. */
static char memory[16] __attribute__((aligned(16)));

static cpa_cuda_attend_args args_of(int rule, int cache, int block, int layout, int width) {
    const cpa_dtype dtypes[] = {CPA_BF16, CPA_FP8_E4M3, CPA_INT8};
    const int32_t k_dim = atoi(WIDTHS[width]), v_dim = k_dim == 192 ? 128 : k_dim, heads = 8;
    const int32_t block_size = atoi(BLOCKS[block]);
    const int in_runs = layout == 1;
    cpa_cuda_attend_args a = {.q = memory,
                              .k = memory,
                              .v = memory,
                              .out = memory,
                              .q_dtype = CPA_BF16,
                              .kv_dtype = dtypes[cache],
                              .q_row_stride = (int64_t)4 * heads * k_dim,
                              .k_block_stride = (int64_t)block_size * heads * k_dim,
                              .v_block_stride = (int64_t)block_size * heads * v_dim,
                              .k_token_stride = in_runs ? 1 : (int64_t)heads * k_dim,
                              .v_token_stride = in_runs ? 1 : (int64_t)heads * v_dim,
                              .k_head_stride = in_runs ? (int64_t)block_size * k_dim : k_dim,
                              .v_head_stride = in_runs ? (int64_t)block_size * v_dim : v_dim,
                              .k_run_shift = in_runs ? 3 : 30,
                              .v_run_shift = in_runs ? 0 : 30,
                              .q_heads = 4 * heads,
                              .kv_heads = heads,
                              .group = 4,
                              .k_dim = k_dim,
                              .v_dim = v_dim,
                              .block_shift = cpa_cuda_log2(block_size),
                              .map = {.cp_size = 1},
                              .mask = {.causal = 1},
                              .scale = 0.125f};
    cpa_cuda_score *score = &a.score;
    score->pre_scale = a.scale;
    score->any = rule != 0 && rule != 4;
    score->transforms = score->any && rule != 5;
    score->softcap = rule == 1 ? 30 : 0;
    score->temperature_len = rule == 2 ? 1024 : 0;
    score->alibi_slopes = rule == 3 ? (const float *)memory : NULL;
    score->sink_logits = rule == 4 ? (const float *)memory : NULL;
    score->custom.bits = rule == 5 ? (const uint32_t *)memory : NULL;
    score->bias.values = rule == 6 ? memory : NULL;
    return a;
}

static cpa_cuda_attend_choice choice_of(const cpa_cuda_attend_args *a, int of_many, cpa_cuda_path path) {
    const int runs = a->k_run_shift<30, wide = a->k_dim> 192 || a->v_dim > 128;
    const int quantised = cpa_dtype_is_quantised(a->kv_dtype);
    const cpa_cuda_attend_spec spec = {
        .path = path,
        .wide_fits = 1,
        .has_decode = !of_many,
        .has_prefill = of_many,
        .has_widened = of_many && (quantised || runs) && !(quantised && wide), /* as a plan would reserve it */
        .has_blocks = 1,
        .knows_runs = runs,
        .tile_rows = cpa_cuda_hopper_rows(a->k_dim, a->v_dim, 1 << a->block_shift, 0),
        .rows = 4096,
    };
    return cpa_cuda_choose_attend(&spec, a);
}

/* ---- the table ---- */

typedef struct table_line {
    char rules[64], caches[32], blocks[32], layout[16], widths[32], decode[32], prefill[32];
} table_line;

enum { MOST_LINES = 64 };
static table_line lines[MOST_LINES];
static int n_lines;

static void read_table(void) {
    char text[256];
    FILE *file = fopen(CPA_TEST_KERNELS, "r");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    while (fgets(text, sizeof text, file)) {
        table_line *l = &lines[n_lines];
        if (text[0] == '#') continue;
        CU_ASSERT_EQUAL_FATAL(sscanf(text, "%63s %31s %31s %15s %31s %31s %31s", l->rules, l->caches, l->blocks,
                                     l->layout, l->widths, l->decode, l->prefill),
                              7);
        CU_ASSERT_FATAL(++n_lines < MOST_LINES);
    }
    (void)fclose(file);
}

/* Whether a list has a name. */
static int lists(const char *list, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (!strncmp(at, name, length) && (at[length] == ',' || at[length] == '\0')) return 1;
    return 0;
}

static const table_line *line_of(int rule, int cache, int block, int layout, int width, int *count) {
    const table_line *found = NULL;
    *count = 0;
    for (int i = 0; i < n_lines; i++) {
        const table_line *l = &lines[i];
        if (!lists(l->rules, RULES[rule]) || !lists(l->caches, CACHES[cache]) || !lists(l->blocks, BLOCKS[block]) ||
            !lists(l->layout, LAYOUTS[layout]) || !lists(l->widths, WIDTHS[width]))
            continue;
        found = l;
        ++*count;
    }
    return found;
}

static int is_right(const char *expected, const cpa_cuda_attend_choice *choice, cpa_cuda_attend_kernel kernel) {
    return !strcmp(expected, cpa_cuda_attend_kernel_name(kernel)) &&
           (choice->why != NULL) == (kernel == CPA_CUDA_PLAIN);
}

static void every_combination_is_a_line_of_the_table(void) {
    int combinations = 0, wrong = 0, plain = 0;
    read_table();
    for (int i = 0; i < N_RULES * N_CACHES * N_BLOCKS * N_LAYOUTS * N_WIDTHS; i++) {
        const int width = i % N_WIDTHS, layout = i / N_WIDTHS % N_LAYOUTS, block = i / N_WIDTHS / N_LAYOUTS % N_BLOCKS;
        const int cache = i / N_WIDTHS / N_LAYOUTS / N_BLOCKS % N_CACHES;
        const int rule = i / N_WIDTHS / N_LAYOUTS / N_BLOCKS / N_CACHES;
        int count;
        if (layout == 1 && (cache == 2 || block < 2)) continue; /* there is no such cache */
        const table_line *line = line_of(rule, cache, block, layout, width, &count);
        cpa_cuda_attend_args a = args_of(rule, cache, block, layout, width);
        const cpa_cuda_attend_choice few = choice_of(&a, 0, CPA_CUDA_HOPPER), many = choice_of(&a, 1, CPA_CUDA_HOPPER);
        const int ok =
            count == 1 && is_right(line->decode, &few, few.decode) && is_right(line->prefill, &many, many.prefill);
        if (!ok)
            printf("\n    %s over %s, blocks of %s, %s, heads of %s: in %d lines; %s, %s", RULES[rule], CACHES[cache],
                   BLOCKS[block], LAYOUTS[layout], WIDTHS[width], count, cpa_cuda_attend_kernel_name(few.decode),
                   cpa_cuda_attend_kernel_name(many.prefill));
        wrong += !ok;
        plain += few.why != NULL;
        combinations++;
    }
    printf("%d combinations ", combinations);
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(plain, 0); /* decode has none without tensor cores */
}

/* ---- what tensor cores do not take ---- */

static void the_reason_is_told(void) {
    static const struct {
        const char *what, *why;
    } cases[] = {{"dtype", "neither bf16 nor fp16"}, {"stride", "off 16 bytes"}, {"address", "off 16 bytes"},
                 {"scale", "not positive"},          {"path", "before 9.0"},     {"out", "fp8 before 9.0"},
                 {"simple", "instructions"},         {"slopes", "2^-100"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *what = cases[i].what;
        cpa_cuda_attend_args a =
            args_of(!strcmp(what, "slopes") ? 3 : !strcmp(what, "path"), !strcmp(what, "path"), 2, 0, 2);
        cpa_cuda_path path = CPA_CUDA_HOPPER;
        CU_ASSERT_PTR_NULL(choice_of(&a, 0, path).why);
        if (!strcmp(what, "dtype")) a.q_dtype = a.kv_dtype = CPA_F32;
        if (!strcmp(what, "stride")) a.q_row_stride += 4;
        if (!strcmp(what, "address")) a.k = memory + 2;
        if (!strcmp(what, "scale")) a.scale = -1;
        if (!strcmp(what, "out")) a.out_scale = (const float *)memory;
        if (!strcmp(what, "slopes")) a.scale = a.score.pre_scale = 0x1p-124f;
        if (!strcmp(what, "path") || !strcmp(what, "out")) path = CPA_CUDA_PORTABLE;
        if (!strcmp(what, "simple")) path = CPA_CUDA_SIMPLE;
        const cpa_cuda_attend_choice choice = choice_of(&a, 0, path);
        CU_ASSERT_PTR_NOT_NULL_FATAL(choice.why);
        CU_ASSERT(strstr(choice.why, cases[i].why) != NULL);
        CU_ASSERT_EQUAL(choice.decode, CPA_CUDA_PLAIN);
    }
}

/* Keys that rows share go by the kernel of prefill, with all rules but a bias. */
static void rows_that_share_keys(void) {
    for (int rule = 0; rule < N_RULES; rule++)
        for (int cache = 0; cache < N_CACHES; cache++)
            for (int block = 0; block < N_BLOCKS; block++) {
                const cpa_cuda_attend_args a = args_of(rule, cache, block, 0, 2);
                const cpa_cuda_attend_spec spec = {.path = CPA_CUDA_HOPPER,
                                                   .wide_fits = 1,
                                                   .has_decode = 1,
                                                   .has_shared = 1,
                                                   .has_widened = cache > 0,
                                                   .has_blocks = 1,
                                                   .tile_rows = 128,
                                                   .rows = 64};
                const cpa_cuda_attend_choice choice = cpa_cuda_choose_attend(&spec, &a);
                const cpa_cuda_attend_kernel fast = cache > 0 ? CPA_CUDA_WIDENED_BOXES : CPA_CUDA_BOXES;
                CU_ASSERT_EQUAL(choice.shared, rule == 6 ? CPA_CUDA_PLAIN : fast);
                CU_ASSERT_EQUAL(choice.why != NULL, rule == 6);
            }
}

/* CTAs that stay gain where pieces begin and end, which is little where these have many keys. */
static void long_pieces_have_ctas_of_their_own(void) {
    static const struct {
        int width, causal;
        int64_t keys;
        cpa_cuda_attend_kernel kernel;
    } cases[] = {{2, 1, 16 << 10, CPA_CUDA_PERSISTENT},
                 {2, 1, 32 << 10, CPA_CUDA_BOXES},
                 {2, 0, 8 << 10, CPA_CUDA_PERSISTENT},
                 {2, 0, 16 << 10, CPA_CUDA_BOXES},
                 {0, 1, 64 << 10, CPA_CUDA_PERSISTENT}}; /* narrow heads have three warpgroups */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_cuda_attend_args a = args_of(0, 0, 3, 0, cases[i].width);
        a.mask.causal = cases[i].causal;
        const cpa_cuda_attend_spec spec = {.path = CPA_CUDA_HOPPER,
                                           .wide_fits = 1,
                                           .has_prefill = 1,
                                           .has_blocks = 1,
                                           .tile_rows = 128,
                                           .rows = 4096,
                                           .most_keys = cases[i].keys};
        CU_ASSERT_EQUAL(cpa_cuda_choose_attend(&spec, &a).prefill, cases[i].kernel);
    }
}

static const cpa_test tests[] = {
    {"every combination is a line of the table", every_combination_is_a_line_of_the_table},
    {"rows that share keys", rows_that_share_keys},
    {"long pieces have CTAs of their own", long_pieces_have_ctas_of_their_own},
    {"the reason for the plain kernel is told", the_reason_is_told},
};
CPA_TEST_MAIN("attend_choice", tests)
