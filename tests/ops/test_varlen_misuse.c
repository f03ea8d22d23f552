/* Misuse of attention without a cache: as test_misuse.c has it for the other operators. */
#include "tests/fixtures/misuse.h"

enum { HEADS = 2, DIM = 8, SEGMENTS = 3, ROWS = 7, WIDTH = HEADS * DIM };

static int64_t starts[SEGMENTS + 1] = {0, 3, 3, ROWS};
static cpa_attend_plan *plan;

static cpa_varlen_batch batch_of_rows(void) {
    return (cpa_varlen_batch){.size = sizeof(cpa_varlen_batch),
                              .q_heads = HEADS,
                              .kv_heads = HEADS,
                              .k_dim = DIM,
                              .v_dim = DIM,
                              .n_segments = SEGMENTS,
                              .q_starts = starts,
                              .k_starts = starts};
}

static cpa_status run_plan_set(const void *batch, cpa_stream *on) {
    return on ? cpa_varlen_plan_set(plan, batch, &plan_error) : CPA_INVALID;
}

static void batch(void) {
    typedef cpa_varlen_batch T;
    static const member members[] = {M(T, q_heads, INT32), M(T, kv_heads, INT32), M(T, k_dim, INT32),
                                     M(T, v_dim, INT32), M(T, causal, INT32)};
    T good = batch_of_rows(), bad;
    misuse_all(&(call){"varlen_plan", run_plan_set, &good, sizeof good, MEMBERS(members), offsetof(T, k_starts)});
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(NULL, &good, NULL), CPA_INVALID);
    const int64_t counts[] = {INT64_MIN, -1, INT32_MAX, INT64_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        bad = good;
        bad.n_segments = counts[i];
        CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &bad, NULL), CPA_INVALID);
    }
    bad = good;
    bad.q_starts = NULL;
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &bad, NULL), CPA_INVALID);
    bad.n_segments = 0;
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &bad, NULL), CPA_OK);
}

static void starts_of_segments(void) {
    cpa_varlen_batch b = batch_of_rows();
    cpa_error err = {0};
    int64_t descending[SEGMENTS + 1] = {0, 4, 3, ROWS}, negative[SEGMENTS + 1] = {-1, 3, 3, ROWS};
    int64_t many[SEGMENTS + 1] = {0, 3, 3, ((int64_t)1 << 30) + 1};
    b.k_starts = descending;
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "varlen plan: k_starts[1] is 4 and k_starts[2] is 3, expected no less");
    b.k_starts = many;
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "varlen plan: k_starts[3] is 1073741825, expected at most 1073741824 rows");
    b.k_starts = starts;
    const int64_t counts[SEGMENTS] = {3, 0, 4}, over[SEGMENTS] = {3, 1, 4}, below[SEGMENTS] = {2, 0, -1};
    b.q_counts = counts, b.k_counts = over;
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message,
                           "varlen plan: k_counts[1] is 1, expected 0 to the 0 rows before the next start");
    b.q_counts = below, b.k_counts = counts;
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message,
                           "varlen plan: q_counts[2] is -1, expected 0 to the 4 rows before the next start");
    b.q_counts = b.k_counts = NULL;
    b.q_starts = (const int64_t *)(const void *)((const char *)negative + 4);
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "is not aligned to its elements of 8 bytes"));
    b.q_starts = negative;
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "varlen plan: q_starts[0] is -1, expected at least 0");
}

static cpa_status run_attend(const void *args, cpa_stream *on) {
    return cpa_varlen_attend(plan, args, on);
}

static void attend(void) {
    typedef cpa_varlen_attend_args T;
    static const member members[] = {M(T, dtype, INT32),
                                     M(T, q, POINTER),
                                     M(T, k, POINTER),
                                     M(T, v, POINTER),
                                     M(T, q_row_stride, INT64),
                                     M(T, k_row_stride, INT64),
                                     M(T, v_row_stride, INT64),
                                     M(T, causal, INT32),
                                     M(T, left, INT64),
                                     M(T, right, INT64),
                                     M(T, scale, INT32),
                                     M(T, softcap, INT32),
                                     M(T, resume, INT32),
                                     M(T, state.o, POINTER),
                                     M(T, state.lse, POINTER),
                                     M(T, state.o_row_stride, INT64),
                                     M(T, state.lse_row_stride, INT64),
                                     M(T, state.reserved[0], RESERVED),
                                     M(T, out, OPTIONAL)};
    const int64_t bytes = ROWS * WIDTH * (int64_t)sizeof(float);
    void *q = zeros(bytes), *o = zeros(bytes), *lse = zeros(bytes), *out = zeros(bytes);
    const cpa_varlen_batch b = batch_of_rows();
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, NULL), CPA_OK);
    T args = {.size = sizeof args, .q = q, .k = q, .v = q, .state = {.o = o, .lse = lse}};
    misuse_all(&(call){"varlen", run_attend, &args, sizeof args, MEMBERS(members), offsetof(T, state.lse_row_stride)});
    CU_ASSERT_EQUAL(cpa_varlen_attend(NULL, &args, stream), CPA_INVALID);
    args.state.o = NULL;
    CU_ASSERT_EQUAL(cpa_varlen_attend(plan, &args, stream), CPA_INVALID);
    args.out = out;
    CU_ASSERT_EQUAL(cpa_varlen_attend(plan, &args, stream), CPA_OK);
    args.resume = 1;
    CU_ASSERT_EQUAL(cpa_varlen_attend(plan, &args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    void *const used[] = {q, o, lse, out};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(stream, used[i]);
}

/* A plan is of pages, or of tensors, as it was last set. */
static void the_other_kind_of_plan(void) {
    const cpa_varlen_batch b = batch_of_rows();
    const cpa_attend_batch pages = {.size = sizeof pages,
                                    .map = {1, 4},
                                    .shape = {.q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM},
                                    .block_size = 4};
    const cpa_attend_args over_pages = {.size = sizeof over_pages};
    const cpa_varlen_attend_args over_rows = {.size = sizeof over_rows};
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &b, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend(plan, &over_pages, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "attend: the plan was set by cpa_varlen_plan_set");
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &pages, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_varlen_attend(plan, &over_rows, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "varlen: the plan has not been set by cpa_varlen_plan_set");
    CU_ASSERT_EQUAL(cpa_attend(plan, &over_pages, stream), CPA_OK);
}

static const cpa_test tests[] = {{"a batch", batch},
                                 {"starts of segments", starts_of_segments},
                                 {"attend", attend},
                                 {"the other kind of plan", the_other_kind_of_plan}};

static void create_plan(void) {
    if (cpa_attend_plan_create(device, &plan, NULL) != CPA_OK) abort();
}

static void destroy_plan(void) {
    cpa_attend_plan_destroy(plan);
}

int main(int argc, char **argv) {
    return misuse_main(argc, argv, "misuse of attention without a cache", tests, (int)(sizeof tests / sizeof *tests),
                       create_plan, destroy_plan);
}
