/* Which kernels of attend a call gets on a device of compute capability 9.0, against a table of every rule, cache, block,
 * layout and width; and what is said where no tensor cores take it. Needs no device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attend/attend_kernels.h"
#include "tests/fixtures/unit.h"

static const char *const RULES[] = {"none", "softcap", "temperature", "alibi", "sinks", "bits", "bias", "lists"};
static const char *const CACHES[] = {"bf16", "fp8", "int8"};
static const char *const BLOCKS[] = {"1", "8", "16", "64"};
static const char *const LAYOUTS[] = {"rows", "vllm-x"};
static const char *const WIDTHS[] = {"64", "80", "128", "192", "256"};
enum { N_RULES = 7, LISTS = N_RULES, N_CACHES = 3, N_BLOCKS = 4, N_LAYOUTS = 2, N_WIDTHS = 5 };

enum { OF_DECODE = 1 << CPA_CUDA_DECODE, OF_PREFILL = 1 << CPA_CUDA_PREFILL, OF_SHARED = 1 << CPA_CUDA_SHARED };

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
                              .k_run_shift = in_runs ? 3 : CPA_KV_ONE_RUN,
                              .v_run_shift = in_runs ? 0 : CPA_KV_ONE_RUN,
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

static cpa_attention_shape shape_of(const cpa_cuda_attend_args *a) {
    return (cpa_attention_shape){.q_heads = a->q_heads,
                                 .kv_heads = a->kv_heads,
                                 .k_dim = a->k_dim,
                                 .v_dim = a->v_dim,
                                 .kv_dtype = a->kv_dtype,
                                 .layout = a->k_run_shift < CPA_KV_ONE_RUN ? CPA_VLLM_X : 0};
}

/* Of a plan of the shape with such pieces, as it would know and reserve what it has; of the rules, lists are said here. */
static cpa_cuda_attend_spec spec_of_rule(int rule, const cpa_cuda_attend_args *a, const cpa_attention_shape *shape,
                                         int32_t pieces, cpa_cuda_path path) {
    const cpa_key_indices indices = {.width = 1};
    const cpa_key_selection lists = {.indices = &indices};
    const cpa_kv_view kv = {.block_size = 1 << a->block_shift, .num_blocks = 100};
    const int codes = cpa_dtype_is_quantised(a->kv_dtype), in_runs = shape->layout == CPA_VLLM_X;
    const cpa_cuda_width width = cpa_cuda_width_of(a->k_dim, a->v_dim);
    return (cpa_cuda_attend_spec){
        .call = cpa_cuda_call_of(path, a, &kv, rule == LISTS ? &lists : NULL),
        .shape = shape,
        .block_size = kv.block_size,
        .width = width,
        .pieces = pieces,
        .prepared = pieces != OF_DECODE && (codes || in_runs) && !(codes && width == CPA_CUDA_256),
        .cp_size = 1,
        .tile_rows = cpa_cuda_hopper_rows(a->k_dim, a->v_dim, kv.block_size, 0),
        .rows = 4096,
    };
}

static cpa_cuda_attend_spec spec_of(const cpa_cuda_attend_args *a, const cpa_attention_shape *shape, int32_t pieces,
                                    cpa_cuda_path path) {
    return spec_of_rule(0, a, shape, pieces, path);
}

static cpa_cuda_attend_choice choice_of_rule(int rule, const cpa_cuda_attend_args *a, int32_t pieces,
                                             cpa_cuda_path path) {
    const cpa_attention_shape shape = shape_of(a);
    const cpa_cuda_attend_spec spec = spec_of_rule(rule, a, &shape, pieces, path);
    return cpa_cuda_choose_attend(&spec);
}

static cpa_cuda_attend_choice choice_of(const cpa_cuda_attend_args *a, int32_t pieces, cpa_cuda_path path) {
    return choice_of_rule(0, a, pieces, path);
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

static const char *name_of(const cpa_cuda_attend_choice *choice, cpa_cuda_pieces pieces) {
    return choice->of[pieces].kernel ? choice->of[pieces].kernel->name : "none";
}

static int is_right(const char *expected, const cpa_cuda_attend_choice *choice, cpa_cuda_pieces pieces) {
    return !strcmp(expected, name_of(choice, pieces)) &&
           (choice->plain != NULL) == (choice->of[pieces].kernel == &cpa_cuda_kernel_simple);
}

static void every_combination_is_a_line_of_the_table(void) {
    int combinations = 0, wrong = 0, plain = 0;
    read_table();
    for (int i = 0; i < (N_RULES + 1) * N_CACHES * N_BLOCKS * N_LAYOUTS * N_WIDTHS; i++) {
        const int width = i % N_WIDTHS, layout = i / N_WIDTHS % N_LAYOUTS, block = i / N_WIDTHS / N_LAYOUTS % N_BLOCKS;
        const int cache = i / N_WIDTHS / N_LAYOUTS / N_BLOCKS % N_CACHES;
        const int rule = i / N_WIDTHS / N_LAYOUTS / N_BLOCKS / N_CACHES;
        int count;
        if (layout == 1 && (cache == 2 || block < 2)) continue; /* there is no such cache */
        const table_line *line = line_of(rule, cache, block, layout, width, &count);
        cpa_cuda_attend_args a = args_of(rule, cache, block, layout, width);
        const cpa_cuda_attend_choice few = choice_of_rule(rule, &a, OF_DECODE, CPA_CUDA_HOPPER),
                                     many = choice_of_rule(rule, &a, OF_PREFILL, CPA_CUDA_HOPPER);
        const int ok = count == 1 && is_right(line->decode, &few, CPA_CUDA_DECODE) &&
                       is_right(line->prefill, &many, CPA_CUDA_PREFILL);
        if (!ok)
            printf("\n    %s over %s, blocks of %s, %s, heads of %s: in %d lines; %s, %s", RULES[rule], CACHES[cache],
                   BLOCKS[block], LAYOUTS[layout], WIDTHS[width], count, name_of(&few, CPA_CUDA_DECODE),
                   name_of(&many, CPA_CUDA_PREFILL));
        wrong += !ok;
        plain += rule != LISTS && few.plain != NULL;
        combinations++;
    }
    printf("%d combinations ", combinations);
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(plain, 0); /* decode has none without tensor cores, but for lists */
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
        CU_ASSERT_PTR_NULL(choice_of(&a, OF_DECODE, path).plain);
        if (!strcmp(what, "dtype")) a.q_dtype = a.kv_dtype = CPA_F32;
        if (!strcmp(what, "stride")) a.q_row_stride += 4;
        if (!strcmp(what, "address")) a.k = memory + 2;
        if (!strcmp(what, "scale")) a.scale = a.score.pre_scale = -1;
        if (!strcmp(what, "out")) a.out_scale = (const float *)memory;
        if (!strcmp(what, "slopes")) a.scale = a.score.pre_scale = 0x1p-124f;
        if (!strcmp(what, "path") || !strcmp(what, "out")) path = CPA_CUDA_PORTABLE;
        if (!strcmp(what, "simple")) path = CPA_CUDA_SIMPLE;
        const cpa_cuda_attend_choice choice = choice_of(&a, OF_DECODE, path);
        CU_ASSERT_PTR_NOT_NULL_FATAL(choice.plain);
        CU_ASSERT(strstr(choice.plain, cases[i].why) != NULL);
        CU_ASSERT_PTR_EQUAL(choice.of[CPA_CUDA_DECODE].kernel, &cpa_cuda_kernel_simple);
    }
}

/* Keys by lists and by blocks each have a kernel of their own for the whole plan, beside the mask and sinks alone; both
 * at once are the plain kernel's. */
static void keys_that_are_selected(void) {
    const cpa_key_indices indices = {.width = 1};
    const cpa_key_blocks blocks = {.block = 1};
    const cpa_key_selection lists = {.indices = &indices}, both = {.indices = &indices, .blocks = &blocks},
                            bits = {.blocks = &blocks};
    for (int rule = 0; rule < N_RULES; rule++) {
        const cpa_cuda_attend_args a = args_of(rule, 0, 2, 0, 2);
        const cpa_attention_shape shape = shape_of(&a);
        const cpa_kv_view kv = {.block_size = 1 << a.block_shift, .num_blocks = 100};
        const int alone = rule == 0 || rule == 4;
        for (int32_t pieces = OF_DECODE; pieces <= (OF_DECODE | OF_PREFILL); pieces++) {
            cpa_cuda_attend_spec spec = spec_of(&a, &shape, pieces, CPA_CUDA_HOPPER);
            spec.call = cpa_cuda_call_of(CPA_CUDA_HOPPER, &a, &kv, &lists);
            const cpa_cuda_attend_choice choice = cpa_cuda_choose_attend(&spec);
            if (!alone) CU_ASSERT_STRING_EQUAL(choice.plain, "score rules beside keys by lists");
            for (int i = 0; i < CPA_CUDA_SHARED; i++) {
                const cpa_cuda_attend_kernel *kernel = alone ? &cpa_cuda_kernel_lists : &cpa_cuda_kernel_simple;
                CU_ASSERT_PTR_EQUAL(choice.of[i].kernel, pieces >> i & 1 ? kernel : NULL);
            }
            spec.call = cpa_cuda_call_of(CPA_CUDA_HOPPER, &a, &kv, &both);
            CU_ASSERT_STRING_EQUAL(cpa_cuda_choose_attend(&spec).plain, "keys by blocks");
            spec.call = cpa_cuda_call_of(CPA_CUDA_HOPPER, &a, &kv, &bits);
            const cpa_cuda_attend_choice by_blocks = cpa_cuda_choose_attend(&spec);
            if (!alone) CU_ASSERT_STRING_EQUAL(by_blocks.plain, "score rules beside keys by blocks");
            for (int i = 0; i < CPA_CUDA_SHARED; i++) {
                const cpa_cuda_attend_kernel *kernel = alone ? &cpa_cuda_kernel_blocks : &cpa_cuda_kernel_simple;
                CU_ASSERT_PTR_EQUAL(by_blocks.of[i].kernel, pieces >> i & 1 ? kernel : NULL);
            }
            spec.reserved = 1;
            if (alone) CU_ASSERT(strstr(cpa_cuda_choose_attend(&spec).plain, "reserved") != NULL);
        }
    }
}

/* Few rows, and keys that they share, are left to other kernels where no state is gone on from, and over codes where
 * there are rows of prefill beside. */
static void few_rows_beside_blocks(void) {
    enum { FEW = OF_DECODE | OF_SHARED };
    static const struct {
        int cache;
        int32_t pieces, resume;
        const char *why;
    } cases[] = {{0, OF_DECODE | OF_PREFILL, 0, NULL},
                 {0, FEW | OF_PREFILL, 0, NULL},
                 {1, FEW | OF_PREFILL, 0, NULL},
                 {0, OF_DECODE | OF_PREFILL, 1, NULL},
                 {0, FEW | OF_PREFILL, 1, "share keys"},
                 {1, OF_DECODE | OF_PREFILL, 1, NULL},
                 {1, FEW | OF_PREFILL, 1, NULL},
                 {0, FEW, 0, NULL},
                 {0, FEW, 1, "share keys"},
                 {1, OF_DECODE, 0, NULL},
                 {1, FEW, 0, NULL},
                 {1, OF_DECODE, 1, "from a state on"}};
    const cpa_key_blocks blocks = {.block = 128};
    const cpa_key_selection selection = {.blocks = &blocks};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_cuda_attend_args a = args_of(0, cases[i].cache, 2, 0, 2);
        const cpa_attention_shape shape = shape_of(&a);
        const cpa_kv_view kv = {.block_size = 1 << a.block_shift, .num_blocks = 100};
        cpa_cuda_attend_spec spec = spec_of(&a, &shape, cases[i].pieces, CPA_CUDA_HOPPER);
        a.resume = cases[i].resume;
        spec.call = cpa_cuda_call_of(CPA_CUDA_HOPPER, &a, &kv, &selection);
        const cpa_cuda_attend_choice choice = cpa_cuda_choose_attend(&spec);
        if (!cases[i].why) CU_ASSERT_PTR_NULL(choice.plain);
        if (!cases[i].why) CU_ASSERT_PTR_EQUAL(choice.of[CPA_CUDA_DECODE].kernel, &cpa_cuda_kernel_blocks);
        if (cases[i].why) CU_ASSERT(choice.plain && strstr(choice.plain, cases[i].why));
    }
}

/* Rows of a plan that share keys are among what the plain kernel takes with lists; so are codes, groups of more than 16
 * heads, and widths off 16. */
static void lists_that_the_plain_kernel_takes(void) {
    static const struct {
        int cache;
        int32_t group, pieces, k_dim;
        const char *why;
    } cases[] = {{0, 4, OF_DECODE | OF_SHARED, 128, "share keys"},
                 {1, 4, OF_DECODE, 128, "over codes"},
                 {0, 17, OF_DECODE, 128, "more than 16 heads"},
                 {0, 4, OF_PREFILL, 72, "off 16 columns"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_cuda_attend_args a = args_of(0, cases[i].cache, 2, 0, 2);
        a.q_heads = a.kv_heads * cases[i].group, a.group = cases[i].group, a.k_dim = cases[i].k_dim;
        const cpa_cuda_attend_choice choice = choice_of_rule(LISTS, &a, cases[i].pieces, CPA_CUDA_HOPPER);
        CU_ASSERT(choice.plain && strstr(choice.plain, cases[i].why));
    }
}

/* Keys that rows share go by the kernel of prefill, with all rules but a bias. */
static void rows_that_share_keys(void) {
    for (int rule = 0; rule < N_RULES; rule++)
        for (int cache = 0; cache < N_CACHES; cache++)
            for (int block = 0; block < N_BLOCKS; block++) {
                const cpa_cuda_attend_args a = args_of(rule, cache, block, 0, 2);
                const cpa_cuda_attend_choice choice = choice_of(&a, OF_DECODE | OF_SHARED, CPA_CUDA_HOPPER);
                const cpa_cuda_attend_kernel *fast =
                    cache > 0 ? &cpa_cuda_kernel_widen_hopper : &cpa_cuda_kernel_hopper;
                CU_ASSERT_PTR_EQUAL(choice.of[CPA_CUDA_SHARED].kernel, rule == 6 ? &cpa_cuda_kernel_simple : fast);
                CU_ASSERT_EQUAL(choice.plain != NULL, rule == 6);
                CU_ASSERT_EQUAL(choice.of[CPA_CUDA_DECODE].kernel == &cpa_cuda_kernel_simple, rule == 6);
            }
}

/* CTAs that stay gain where pieces begin and end, which is little where these have many keys. */
static void long_pieces_have_ctas_of_their_own(void) {
    static const struct {
        int width, causal;
        int64_t keys;
        const cpa_cuda_attend_kernel *kernel;
    } cases[] = {{2, 1, 16 << 10, &cpa_cuda_kernel_persistent},
                 {2, 1, 32 << 10, &cpa_cuda_kernel_hopper},
                 {2, 0, 8 << 10, &cpa_cuda_kernel_persistent},
                 {2, 0, 16 << 10, &cpa_cuda_kernel_hopper},
                 {0, 1, 64 << 10, &cpa_cuda_kernel_persistent}}; /* narrow heads have three warpgroups */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_cuda_attend_args a = args_of(0, 0, 3, 0, cases[i].width);
        a.mask.causal = cases[i].causal;
        const cpa_attention_shape shape = shape_of(&a);
        cpa_cuda_attend_spec spec = spec_of(&a, &shape, OF_PREFILL, CPA_CUDA_HOPPER);
        spec.most_keys = cases[i].keys;
        const cpa_cuda_chosen chosen = cpa_cuda_choose_attend(&spec).of[CPA_CUDA_PREFILL];
        CU_ASSERT_PTR_EQUAL(chosen.kernel, cases[i].kernel);
        CU_ASSERT_PTR_EQUAL(chosen.fastest, &cpa_cuda_kernel_persistent);
        CU_ASSERT_EQUAL(chosen.why == NULL, chosen.kernel == chosen.fastest);
    }
}

/* Calls of which tiles of keys may be left out have kernels that do so where there are some; elsewhere the others, and
 * why. Other calls never have them. */
static void tiles_are_left_out_by_kernels_for_that(void) {
    for (int i = 0; i < N_CACHES * N_BLOCKS * N_WIDTHS; i++) {
        const int cache = i / N_BLOCKS / N_WIDTHS, block = i / N_WIDTHS % N_BLOCKS, width = i % N_WIDTHS;
        const cpa_cuda_attend_args a = args_of(0, cache, block, 0, width);
        const cpa_attention_shape shape = shape_of(&a);
        cpa_cuda_attend_spec spec = spec_of(&a, &shape, OF_DECODE | OF_PREFILL, CPA_CUDA_HOPPER);
        const cpa_cuda_attend_choice without = cpa_cuda_choose_attend(&spec);
        spec.call.oddities |= CPA_CUDA_TILES_SKIP;
        const cpa_cuda_attend_choice with = cpa_cuda_choose_attend(&spec);
        const int few = cache == 0 && block >= 2 && (width == 1 || width == 2),
                  many = cache == 0 && block >= 1 && width == 2;
        CU_ASSERT(strstr(name_of(&without, CPA_CUDA_DECODE), "skip") == NULL);
        CU_ASSERT(strstr(name_of(&without, CPA_CUDA_PREFILL), "skip") == NULL);
        CU_ASSERT_STRING_EQUAL(name_of(&with, CPA_CUDA_DECODE),
                               few ? "decode_skip" : name_of(&without, CPA_CUDA_DECODE));
        CU_ASSERT_STRING_EQUAL(name_of(&with, CPA_CUDA_PREFILL),
                               many ? "hopper_skip" : name_of(&without, CPA_CUDA_PREFILL));
        if (cache == 0) CU_ASSERT_EQUAL(with.of[CPA_CUDA_PREFILL].why == NULL, many);
        spec.row_tiles = 2;
        const cpa_cuda_attend_choice wide = cpa_cuda_choose_attend(&spec);
        CU_ASSERT(strstr(name_of(&wide, CPA_CUDA_DECODE), "skip") == NULL);
    }
}

/* Latents: those of DeepSeek V3 under 128 query heads. */
static cpa_attention_shape latents_of(cpa_dtype kv_dtype, float k_scale) {
    return (cpa_attention_shape){.q_heads = 128,
                                 .kv_heads = 1,
                                 .k_dim = 576,
                                 .v_dim = 512,
                                 .v_in_k = 1,
                                 .kv_dtype = kv_dtype,
                                 .k_scale = k_scale};
}

/* Codes of e5m2 become rows where keys are widened first, for many rows; kernels that take codes as they lie know none. */
static void codes_of_e5m2_are_widened(void) {
    const cpa_attention_shape shape = {.q_heads = 8, .kv_heads = 2, .k_dim = 128, .v_dim = 128};
    cpa_cuda_attend_spec spec = {
        .call = {.path = CPA_CUDA_HOPPER, .q_dtype = CPA_BF16, .kv_dtype = CPA_FP8_E5M2, .cache = CPA_CUDA_CODES},
        .shape = &shape,
        .block_size = 64,
        .width = cpa_cuda_width_of(shape.k_dim, shape.v_dim),
        .pieces = OF_PREFILL,
        .prepared = 1,
        .cp_size = 1,
    };
    const cpa_cuda_attend_choice many = cpa_cuda_choose_attend(&spec);
    CU_ASSERT_PTR_NOT_NULL(many.of[CPA_CUDA_PREFILL].kernel->over);
    CU_ASSERT_PTR_NULL(many.plain);
    spec.pieces = OF_DECODE;
    const cpa_cuda_attend_choice few = cpa_cuda_choose_attend(&spec);
    CU_ASSERT_PTR_EQUAL(few.of[CPA_CUDA_DECODE].kernel, &cpa_cuda_kernel_simple);
    CU_ASSERT(few.plain && strstr(few.plain, "codes of fp8_e5m2 that nothing widens"));
    spec.pieces = OF_PREFILL, spec.call.path = CPA_CUDA_PORTABLE;
    const cpa_cuda_attend_choice before = cpa_cuda_choose_attend(&spec);
    CU_ASSERT(before.plain && strstr(before.plain, "before 9.0"));
}

static void latents_have_a_kernel(void) {
    static const struct {
        cpa_dtype q_dtype, kv_dtype;
        float k_scale;
        cpa_cuda_path path;
        int32_t block_size;
        const char *why; /* NULL: it takes them */
    } cases[] = {{CPA_BF16, CPA_BF16, 0, CPA_CUDA_HOPPER, 64, NULL},
                 {CPA_F16, CPA_F16, 0, CPA_CUDA_HOPPER, 16, NULL},
                 {CPA_BF16, CPA_FP8_E4M3, 0.1f, CPA_CUDA_HOPPER, 1, NULL},
                 {CPA_BF16, CPA_FP8_T128, 0, CPA_CUDA_HOPPER, 64, NULL},
                 {CPA_F16, CPA_FP8_T128, 0, CPA_CUDA_HOPPER, 64, "queries in fp16"},
                 {CPA_BF16, CPA_FP8_E4M3, 0, CPA_CUDA_HOPPER, 64, "a scale each"},
                 {CPA_BF16, CPA_INT8, 0, CPA_CUDA_HOPPER, 64, "a scale each"},
                 {CPA_BF16, CPA_FP8_E5M2, 0.1f, CPA_CUDA_HOPPER, 64, "fp8_e5m2"},
                 {CPA_BF16, CPA_BF16, 0, CPA_CUDA_HOPPER, 4, "fewer than 8 tokens"},
                 {CPA_BF16, CPA_BF16, 0, CPA_CUDA_PORTABLE, 64, "before 9.0"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const cpa_attention_shape shape = latents_of(cases[i].kv_dtype, cases[i].k_scale);
        const int codes = cpa_dtype_is_quantised(cases[i].kv_dtype);
        const cpa_cuda_attend_spec spec = {
            .call = {.path = cases[i].path,
                     .q_dtype = cases[i].q_dtype,
                     .kv_dtype = cases[i].kv_dtype,
                     .cache = codes                      ? CPA_CUDA_CODES
                              : cases[i].block_size < 16 ? CPA_CUDA_ELEMENTS_APART
                                                         : CPA_CUDA_ELEMENTS,
                     .oddities =
                         cpa_kv_scale_bytes(cases[i].kv_dtype, CPA_KEYS, cases[i].k_scale) ? CPA_CUDA_ROW_SCALES : 0},
            .shape = &shape,
            .block_size = cases[i].block_size,
            .width = cpa_cuda_width_of(shape.k_dim, shape.v_dim),
            .pieces = OF_DECODE | OF_PREFILL | OF_SHARED,
            .cp_size = 1,
        };
        const cpa_cuda_attend_choice choice = cpa_cuda_choose_attend(&spec);
        for (int pieces = CPA_CUDA_DECODE; pieces <= CPA_CUDA_SHARED; pieces++) {
            const cpa_cuda_chosen *chosen = &choice.of[pieces];
            CU_ASSERT_PTR_EQUAL(chosen->fastest, &cpa_cuda_kernel_latent);
            CU_ASSERT_PTR_EQUAL(chosen->kernel, cases[i].why ? &cpa_cuda_kernel_simple : &cpa_cuda_kernel_latent);
            CU_ASSERT(cases[i].why ? chosen->why && strstr(chosen->why, cases[i].why) : !chosen->why);
        }
    }
}

/* They take the whole plan, row by row, whatever its rows share. */
static void lists_of_rows_that_share_latents(void) {
    const cpa_attention_shape shape = latents_of(CPA_BF16, 0);
    const cpa_cuda_attend_spec spec = {
        .call = {CPA_CUDA_HOPPER, CPA_BF16, CPA_BF16, CPA_CUDA_ELEMENTS, .rules = CPA_CUDA_LISTS},
        .shape = &shape,
        .block_size = 64,
        .width = cpa_cuda_width_of(shape.k_dim, shape.v_dim),
        .pieces = OF_DECODE | OF_SHARED,
        .cp_size = 1};
    const cpa_cuda_attend_choice choice = cpa_cuda_choose_attend(&spec);
    CU_ASSERT_PTR_EQUAL(choice.of[CPA_CUDA_DECODE].kernel, &cpa_cuda_kernel_lists_latent);
    CU_ASSERT_PTR_EQUAL(choice.of[CPA_CUDA_SHARED].kernel, &cpa_cuda_kernel_lists_latent);
}

static void wide_heads_have_a_kernel(void) {
    static const struct {
        int32_t k_dim, v_dim;
        cpa_cuda_cache cache;
        const cpa_cuda_attend_kernel *kernel;
        const char *why; /* NULL: it is the fastest */
    } cases[] = {{512, 512, CPA_CUDA_ELEMENTS, &cpa_cuda_kernel_wide, NULL},
                 {320, 64, CPA_CUDA_ELEMENTS_APART, &cpa_cuda_kernel_wide, NULL},
                 {64, 264, CPA_CUDA_ELEMENTS, &cpa_cuda_kernel_wide, NULL},
                 {576, 512, CPA_CUDA_ELEMENTS, &cpa_cuda_kernel_simple, "more than 512 columns"},
                 {512, 512, CPA_CUDA_CODES, &cpa_cuda_kernel_simple, "more than 128 columns"},
                 {256, 256, CPA_CUDA_ELEMENTS, &cpa_cuda_kernel_decode, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const cpa_attention_shape shape = {
            .q_heads = 8, .kv_heads = 2, .k_dim = cases[i].k_dim, .v_dim = cases[i].v_dim, .kv_dtype = CPA_BF16};
        const cpa_cuda_attend_spec spec = {
            .call = {.path = CPA_CUDA_HOPPER,
                     .q_dtype = CPA_BF16,
                     .kv_dtype = cases[i].cache == CPA_CUDA_CODES ? CPA_FP8_E4M3 : CPA_BF16,
                     .cache = cases[i].cache},
            .shape = &shape,
            .block_size = cases[i].cache == CPA_CUDA_ELEMENTS_APART ? 8 : 64,
            .width = cpa_cuda_width_of(shape.k_dim, shape.v_dim),
            .pieces = OF_DECODE,
            .cp_size = 1,
        };
        const cpa_cuda_attend_choice choice = cpa_cuda_choose_attend(&spec);
        const cpa_cuda_chosen *chosen = &choice.of[CPA_CUDA_DECODE];
        CU_ASSERT_PTR_EQUAL(chosen->kernel, cases[i].kernel);
        CU_ASSERT(cases[i].why ? chosen->why && strstr(chosen->why, cases[i].why) : !chosen->why);
    }
}

/* ---- the rows of the table ---- */

/* A call that a kernel takes, of the first of the caches that it is for. */
static cpa_cuda_attend_spec taken_by(const cpa_cuda_attend_kernel *kernel, const cpa_attention_shape *shape) {
    const int32_t cache = kernel->takes.caches & -kernel->takes.caches;
    const int codes = (cache & (CPA_CUDA_CODES | CPA_CUDA_RUN_CODES)) != 0;
    return (cpa_cuda_attend_spec){
        .call = {.path = CPA_CUDA_HOPPER,
                 .q_dtype = CPA_BF16,
                 .kv_dtype = codes ? CPA_FP8_E4M3 : CPA_BF16,
                 .cache = (cpa_cuda_cache)cache,
                 .rules = kernel == &cpa_cuda_kernel_portable_ruled_codes ? CPA_CUDA_SOFTCAP : 0},
        .shape = shape,
        .block_size = cache == CPA_CUDA_ELEMENTS_APART ? 8 : 64,
        .width = CPA_CUDA_128,
        .pieces = kernel->whole ? OF_DECODE | OF_PREFILL : kernel->takes.pieces,
        .prepared = 1,
        .cp_size = 1,
        .tile_rows = 128,
        .rows = 4096,
    };
}

/* Takes something away from a call. */
static void take_away(cpa_cuda_attend_spec *spec, cpa_attention_shape *shape, const char *what) {
    static const struct {
        const char *what;
        cpa_cuda_oddities oddity;
    } odd[] = {{"alignment", CPA_CUDA_UNALIGNED}, {"whole blocks", CPA_CUDA_PARTED_BLOCKS},
               {"blocks", CPA_CUDA_NO_BLOCKS},    {"near rows", CPA_CUDA_FAR_ROWS},
               {"scale", CPA_CUDA_SCALE_BELOW_0}, {"out alone", CPA_CUDA_STATE},
               {"one stretch", CPA_CUDA_GAP},     {"even rows", CPA_CUDA_ODD_ROWS}};
    cpa_cuda_attend_call *call = &spec->call;
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        if (!strcmp(what, odd[i].what)) call->oddities |= odd[i].oddity;
    if (!strcmp(what, "tensor cores")) call->path = CPA_CUDA_SIMPLE;
    if (!strcmp(what, "9.0")) call->path = CPA_CUDA_PORTABLE;
    if (!strcmp(what, "dtype")) call->q_dtype = CPA_F32;
    if (!strcmp(what, "shared memory")) spec->no_memory = 1;
    if (!strcmp(what, "no rules")) call->rules = CPA_CUDA_SOFTCAP;
    if (!strcmp(what, "rules")) call->rules = 0;
    if (!strcmp(what, "no bias")) call->rules = CPA_CUDA_BIAS;
    if (!strcmp(what, "width")) spec->width = CPA_CUDA_192_128;
    if (!strcmp(what, "256 columns")) spec->width = CPA_CUDA_576;
    if (!strcmp(what, "whole columns")) shape->k_dim = 120;
    if (!strcmp(what, "long blocks")) spec->block_size = 8, call->cache = CPA_CUDA_ELEMENTS_APART;
    if (!strcmp(what, "16 tokens")) spec->block_size = 8;
    if (!strcmp(what, "room")) spec->prepared = 0;
    if (!strcmp(what, "codes for scales")) {
        shape->kv_dtype = call->kv_dtype = CPA_FP8_E4M3, shape->k_dim = 256;
        call->cache = CPA_CUDA_CODES, spec->width = CPA_CUDA_256;
    }
    if (!strcmp(what, "one head")) shape->kv_heads = 2;
    if (!strcmp(what, "small tiles")) spec->tile_rows = 192;
    if (!strcmp(what, "group")) shape->q_heads = 5 * shape->kv_heads;
    if (!strcmp(what, "one rank")) spec->cp_size = 2;
    if (!strcmp(what, "few keys")) spec->most_keys = 1 << 20;
    if (!strcmp(what, "narrow codes")) {
        spec->width = CPA_CUDA_192_128;
        call->cache = CPA_CUDA_CODES, call->kv_dtype = CPA_INT8, call->rules = CPA_CUDA_SOFTCAP;
    }
}

static void a_kernel_says_what_it_misses(void) {
    static const struct {
        const cpa_cuda_attend_kernel *kernel; /* NULL: all but the plain one */
        const char *what, *why;
    } cases[] = {{NULL, "tensor cores", "without their instructions"},
                 {NULL, "dtype", "neither bf16 nor fp16"},
                 {NULL, "scale", "not positive"},
                 {NULL, "alignment", "off 16 bytes"},
                 {NULL, "shared memory", "shared memory of a CTA"},
                 {&cpa_cuda_kernel_lists_latent, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_lists_latent, "no rules", "score rules beside"},
                 {&cpa_cuda_kernel_lists_latent, "one head", "several KV heads"},
                 {&cpa_cuda_kernel_lists, "no rules", "score rules beside"},
                 {&cpa_cuda_kernel_lists, "256 columns", "more than 256 columns"},
                 {&cpa_cuda_kernel_lists, "whole columns", "off 16 columns"},
                 {&cpa_cuda_kernel_blocks, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_blocks, "no rules", "score rules beside keys by blocks"},
                 {&cpa_cuda_kernel_blocks, "256 columns", "more than 256 columns"},
                 {&cpa_cuda_kernel_blocks, "blocks", "no blocks"},
                 {&cpa_cuda_kernel_latent, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_latent, "no rules", "score rules"},
                 {&cpa_cuda_kernel_latent, "blocks", "no blocks"},
                 {&cpa_cuda_kernel_latent, "one head", "several KV heads"},
                 {&cpa_cuda_kernel_decode_blocks, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_decode_blocks, "no rules", "score rules"},
                 {&cpa_cuda_kernel_decode_blocks, "width", "more than 128 columns"},
                 {&cpa_cuda_kernel_decode_blocks, "whole columns", "off 16 columns"},
                 {&cpa_cuda_kernel_decode_blocks, "whole blocks", "blocks off 16 bytes"},
                 {&cpa_cuda_kernel_decode_packed, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_decode_packed, "no rules", "score rules"},
                 {&cpa_cuda_kernel_decode_packed, "whole columns", "other than 128 columns"},
                 {&cpa_cuda_kernel_decode_packed, "16 tokens", "fewer than 16 tokens"},
                 {&cpa_cuda_kernel_decode_packed, "even rows", "off 16 bytes"},
                 {&cpa_cuda_kernel_decode, "256 columns", "more than 256 columns"},
                 {&cpa_cuda_kernel_hopper, "256 columns", "more than 256 columns"},
                 {&cpa_cuda_kernel_portable, "256 columns", "more than 256 columns"},
                 {&cpa_cuda_kernel_decode, "no rules", "score rules"},
                 {&cpa_cuda_kernel_decode_ruled_caches, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_persistent, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_persistent, "no rules", "score rules"},
                 {&cpa_cuda_kernel_persistent, "width", "more than 128 columns"},
                 {&cpa_cuda_kernel_persistent, "long blocks", "fewer than 16 tokens"},
                 {&cpa_cuda_kernel_persistent, "group", "groups of query heads"},
                 {&cpa_cuda_kernel_persistent, "out alone", "in a state"},
                 {&cpa_cuda_kernel_persistent, "one rank", "one rank of several"},
                 {&cpa_cuda_kernel_persistent, "one stretch", "a window beside sinks"},
                 {&cpa_cuda_kernel_persistent, "near rows", "2^31"},
                 {&cpa_cuda_kernel_persistent, "few keys", "so many keys"},
                 {&cpa_cuda_kernel_hopper, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_hopper, "blocks", "no blocks"},
                 {&cpa_cuda_kernel_hopper, "no bias", "a bias of scores"},
                 {&cpa_cuda_kernel_hopper, "small tiles", "more rows"},
                 {&cpa_cuda_kernel_widen_hopper, "no bias", "a bias of scores"},
                 {&cpa_cuda_kernel_widen_hopper, "room", "no memory"},
                 {&cpa_cuda_kernel_widen_hopper, "codes for scales", "codes of heads so wide"},
                 {&cpa_cuda_kernel_widen_hopper, "narrow codes", "score rules over codes"},
                 {&cpa_cuda_kernel_portable_ruled_codes, "9.0", "before 9.0"},
                 {&cpa_cuda_kernel_portable_ruled_codes, "rules", "without rules"},
                 {&cpa_cuda_kernel_portable, "narrow codes", "score rules over codes"},
                 {&cpa_cuda_kernel_widen_portable, "room", "no memory"}};
    const cpa_attention_shape apart = {.q_heads = 32, .kv_heads = 8, .k_dim = 128, .v_dim = 128, .layout = CPA_VLLM_X};
    for (int k = 0; cpa_cuda_attend_kernels[k] != &cpa_cuda_kernel_simple; k++) {
        const cpa_cuda_attend_kernel *kernel = cpa_cuda_attend_kernels[k];
        const cpa_attention_shape usual = kernel->takes.latents ? latents_of(CPA_BF16, 0) : apart;
        const cpa_cuda_attend_spec taken = taken_by(kernel, &usual);
        CU_ASSERT_PTR_NULL(cpa_cuda_kernel_refuses(kernel, &taken));
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            cpa_attention_shape shape = usual;
            cpa_cuda_attend_spec spec = taken_by(kernel, &shape);
            if (cases[i].kernel && cases[i].kernel != kernel) continue;
            take_away(&spec, &shape, cases[i].what);
            const char *why = cpa_cuda_kernel_refuses(kernel, &spec);
            const int ok = why && strstr(why, cases[i].why);
            if (!ok) printf("\n    %s without %s: %s", kernel->name, cases[i].what, why ? why : "takes it");
            CU_ASSERT(ok);
            CU_ASSERT_PTR_NULL(cpa_cuda_kernel_refuses(&cpa_cuda_kernel_simple, &spec));
        }
    }
}

static const cpa_test tests[] = {
    {"every combination is a line of the table", every_combination_is_a_line_of_the_table},
    {"keys by lists and by blocks", keys_that_are_selected},
    {"few rows beside blocks", few_rows_beside_blocks},
    {"lists that the plain kernel takes", lists_that_the_plain_kernel_takes},
    {"rows that share keys", rows_that_share_keys},
    {"long pieces have CTAs of their own", long_pieces_have_ctas_of_their_own},
    {"tiles are left out by kernels for that", tiles_are_left_out_by_kernels_for_that},
    {"codes of e5m2 are widened for many rows", codes_of_e5m2_are_widened},
    {"latents have a kernel", latents_have_a_kernel},
    {"lists of rows that share latents", lists_of_rows_that_share_latents},
    {"wide heads have a kernel", wide_heads_have_a_kernel},
    {"the reason for the plain kernel is told", the_reason_is_told},
    {"a kernel says what it misses", a_kernel_says_what_it_misses},
};
CPA_TEST_MAIN("attend_choice", tests)
