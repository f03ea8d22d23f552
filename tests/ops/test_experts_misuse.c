/* Misuse of the operators of mixtures of experts, as test_misuse.c has it. */
#include <math.h>

#include "tests/fixtures/misuse.h"

enum { ROWS = 3, EXPERTS = 8, TOP_K = 2, WIDTH = 8, PLACES = ROWS * TOP_K, BYTES = 4096 };

/* Zeros for each pointer of a call. */
enum { POINTERS = 8 };
static void *memory[POINTERS];

RUN(expert_route)

static void route_refuses(cpa_expert_route_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_expert_route(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), line);
}

static void expert_route(void) {
    typedef cpa_expert_route_args T;
    static const member members[] = {M(T, rows, INT64),         M(T, experts, INT32),   M(T, top_k, INT32),
                                     M(T, logits, POINTER),     M(T, scores, INT32),    M(T, logits_stride, INT64),
                                     M(T, group_scores, INT32), M(T, n_group, INT32),   M(T, bias, OPTIONAL),
                                     M(T, topk_group, INT32),   M(T, normalise, INT32), M(T, scale, INT32),
                                     M(T, ids, POINTER),        M(T, weights, POINTER)};
    T args = {.size = sizeof args,
              .rows = ROWS,
              .experts = EXPERTS,
              .top_k = TOP_K,
              .logits = memory[0],
              .n_group = 4,
              .topk_group = 2,
              .bias = memory[1],
              .scale = 1,
              .ids = memory[2],
              .weights = memory[3]};
    misuse_all(&(call){"expert_route", run_expert_route, &args, sizeof args, MEMBERS(members), sizeof args});
    T bad = args;
    bad.n_group = 3;
    route_refuses(bad, "expert_route: n_group is 3, expected a number that divides experts, 8");
    bad = args, bad.topk_group = 5;
    route_refuses(bad, "expert_route: topk_group is 5, expected 1 to n_group, 4");
    bad = args, bad.topk_group = 0;
    route_refuses(bad, "expert_route: topk_group is 0, expected 1 to n_group, 4");
    bad = args, bad.top_k = 5;
    route_refuses(bad, "expert_route: top_k is 5, expected at most the 4 experts of 2 groups");
    bad = args, bad.top_k = 9;
    route_refuses(bad, "expert_route: top_k is 9, expected at most experts, 8");
    bad = args, bad.scale = 0;
    route_refuses(bad, "expert_route: scale is 0, expected a number above 0");
    bad = args, bad.scale = NAN;
    route_refuses(bad, "expert_route: scale is nan, expected a number above 0");
    args.n_group = args.topk_group = 0;
    CU_ASSERT_EQUAL(cpa_expert_route(&args, stream), CPA_OK);
}

RUN(expert_permute)

static void expert_permute(void) {
    typedef cpa_expert_permute_args T;
    static const member members[] = {M(T, rows, INT64),     M(T, top_k, INT32),   M(T, first_expert, INT32),
                                     M(T, experts, INT32),  M(T, ids, POINTER),   M(T, offsets, POINTER),
                                     M(T, tokens, POINTER), M(T, places, POINTER)};
    T args = {sizeof args, ROWS, TOP_K, 0, EXPERTS, memory[0], memory[1], memory[2], memory[3]};
    misuse_all(&(call){"expert_permute", run_expert_permute, &args, sizeof args, MEMBERS(members), sizeof args});
    args.rows = INT32_MAX;
    CU_ASSERT_EQUAL(cpa_expert_permute(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "expert_permute: rows is 2147483647, expected 0 to 1073741823");
}

RUN(expert_linear)

static void expert_linear(void) {
    typedef cpa_expert_linear_args T;
    static const member members[] = {
        M(T, experts, INT32),        M(T, rows, INT64),          M(T, inputs, INT32),     M(T, outputs, INT32),
        M(T, dtype, INT32),          M(T, out_dtype, INT32),     M(T, offsets, POINTER),  M(T, x, POINTER),
        M(T, x_rows, INT64),         M(T, x_stride, INT64),      M(T, weight, POINTER),   M(T, weight_stride, INT64),
        M(T, out, POINTER),          M(T, expert_stride, INT64), M(T, out_stride, INT64), M(T, tokens, OPTIONAL),
        M(T, weight_scale, OPTIONAL)};
    T args = {.size = sizeof args,
              .experts = EXPERTS,
              .rows = PLACES,
              .inputs = WIDTH,
              .outputs = WIDTH,
              .offsets = memory[0],
              .x = memory[1],
              .x_rows = ROWS,
              .weight = memory[2],
              .out = memory[3],
              .tokens = memory[4]};
    misuse_all(
        &(call){"expert_linear", run_expert_linear, &args, sizeof args, MEMBERS(members), offsetof(T, out_stride)});
    args.weight_scale = memory[5], args.weight_scale_rows = 1, args.weight_scale_columns = 2;
    CU_ASSERT_EQUAL(cpa_expert_linear(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "expert_linear: scales are [1, 2], expected [1, 1] or [8, 1] for weights [8, 8]");
    args.weight_scale_columns = 1;
    CU_ASSERT_EQUAL(cpa_expert_linear(&args, stream), CPA_OK);
    args.out_dtype = CPA_BF16;
    CU_ASSERT_EQUAL(cpa_expert_linear(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "expert_linear: out_dtype is 1, expected fp32 or fp32");
}

RUN(expert_combine)

static void expert_combine(void) {
    typedef cpa_expert_combine_args T;
    static const member members[] = {M(T, rows, INT64),      M(T, top_k, INT32),    M(T, width, INT32),
                                     M(T, dtype, INT32),     M(T, y_dtype, INT32),  M(T, y, POINTER),
                                     M(T, y_rows, INT64),    M(T, y_stride, INT64), M(T, places, POINTER),
                                     M(T, weights, POINTER), M(T, out, POINTER),    M(T, shared, OPTIONAL)};
    T args = {.size = sizeof args,
              .rows = ROWS,
              .top_k = TOP_K,
              .width = WIDTH,
              .y = memory[0],
              .y_rows = PLACES,
              .places = memory[1],
              .weights = memory[2],
              .out = memory[3],
              .shared = memory[4]};
    misuse_all(
        &(call){"expert_combine", run_expert_combine, &args, sizeof args, MEMBERS(members), offsetof(T, shared)});
}

/* Whoever loads weights hears of scales that are none. */
static void scales_that_are_none_are_named(void) {
    cpa_error err = {0};
    float scales[] = {1, 2, 3, 4, 5, 6};
    CU_ASSERT_EQUAL(cpa_weight_scale_check("q.weight_scale_inv", 256, 300, scales, 2, 3, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_weight_scale_check("q.weight_scale_inv", 6, 300, scales, 6, 1, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_weight_scale_check("q.weight_scale_inv", 257, 300, scales, 2, 3, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message,
                           "q.weight_scale_inv: scales are [2, 3], expected [3, 3] or [257, 1] for "
                           "weights [257, 300]");
    const float bad[] = {0, NAN, INFINITY, -1};
    for (int i = 0; i < 4; i++) {
        scales[4] = bad[i];
        CU_ASSERT_EQUAL(cpa_weight_scale_check("q.weight_scale_inv", 256, 300, scales, 2, 3, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "q.weight_scale_inv: scale [1, 1] is "));
    }
    CU_ASSERT_EQUAL(cpa_weight_scale_check("w", 256, 300, NULL, 2, 3, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_weight_scale_check("w", 0, 300, scales, 2, 3, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_weight_scale_check(NULL, 256, 300, scales, 2, 3, &err), CPA_INVALID);
}

static const cpa_test tests[] = {
    {"expert_route", expert_route},
    {"expert_permute", expert_permute},
    {"expert_linear", expert_linear},
    {"expert_combine", expert_combine},
    {"scales that are none are named", scales_that_are_none_are_named},
};

static void take_memory(void) {
    for (int i = 0; i < POINTERS; i++) memory[i] = zeros(BYTES);
}

static void free_memory(void) {
    for (int i = 0; i < POINTERS; i++) cpa_test_free(stream, memory[i]);
}

int main(int argc, char **argv) {
    return misuse_main(argc, argv, "misuse of operators of experts", tests, (int)(sizeof tests / sizeof *tests),
                       take_memory, free_memory);
}
