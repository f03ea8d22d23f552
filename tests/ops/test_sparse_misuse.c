/* sparse_attend with arguments that are wrong: each is refused with one line. */
#include "base/struct_size.h"
#include "tests/fixtures/misuse.h"

enum { HEADS = 2, DIM = 8, ROW = HEADS * DIM };

RUN(sparse_attend)

/* A scope with one of its members replaced is refused, with a line that names it. */
static void scope_is_refused(cpa_sparse_attend_args *args, cpa_sparse_scope scope, const char *said_of) {
    const cpa_sparse_scope *good = args->scopes;
    args->scopes = &scope;
    CU_ASSERT_EQUAL(cpa_sparse_attend(args, stream), CPA_INVALID);
    if (!strstr(said(), said_of)) printf("  %s\n", said());
    CU_ASSERT_PTR_NOT_NULL(strstr(said(), said_of));
    args->scopes = good;
}

static void sparse_attend(void) {
    typedef cpa_sparse_attend_args T;
    static const member members[] = {M(T, rows, INT64),
                                     M(T, q_heads, INT32),
                                     M(T, q_dtype, INT32),
                                     M(T, q, POINTER),
                                     M(T, q_row_stride, INT64),
                                     M(T, scopes, POINTER),
                                     M(T, n_scopes, INT32),
                                     M(T, state.o, POINTER),
                                     M(T, state.lse, POINTER),
                                     M(T, state.o_row_stride, INT64),
                                     M(T, state.lse_row_stride, INT64),
                                     M(T, state.reserved[1], RESERVED),
                                     M(T, out, OPTIONAL),
                                     M(T, out_row_stride, INT64),
                                     M(T, resume, INT32),
                                     M(T, sink_logits, OPTIONAL),
                                     M(T, max_logits, OPTIONAL)};
    void *pool = zeros(4 * 16 * ROW * (int64_t)sizeof(float)), *o = zeros(3 * ROW * (int64_t)sizeof(float));
    void *lists = zeros(3 * 5 * (int64_t)sizeof(int32_t));
    const cpa_sparse_scope scope = {
        .kv = {.k = pool, .v = pool, .block_size = 16, .num_blocks = 4, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM},
        .slots = lists,
        .row_stride = 5,
        .width = 5};
    T args = {.size = sizeof args,
              .rows = 3,
              .q_heads = HEADS,
              .q = pool,
              .scopes = &scope,
              .n_scopes = 1,
              .state = {.o = o, .lse = zeros(3 * HEADS * (int64_t)sizeof(float))}};
    misuse_all(&(call){"sparse_attend", run_sparse_attend, &args, sizeof args, MEMBERS(members),
                       CPA_STRUCT_THROUGH(T, state)});
    const struct {
        cpa_sparse_scope scope;
        const char *said;
    } wrong[] = {{{.kv = scope.kv, .slots = lists, .width = -1}, "lists of -1 slots"},
                 {{.kv = scope.kv, .width = 5}, "not NULL"},
                 {{.kv = scope.kv, .slots = lists, .width = 5, .unit = 3}, "unit is 3"},
                 {{.kv = scope.kv, .slots = lists, .width = 5, .unit = 32}, "unit is 32"},
                 {{.kv = scope.kv, .slots = lists, .width = INT32_MAX, .unit = 16}, "at most 2^30 tokens"},
                 {{.kv = scope.kv, .slots = lists, .width = 5, .head_stride = -1}, "head_stride -1"},
                 {{.kv = scope.kv, .slots = lists, .width = 5, .reserved = {1}}, "reserved"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) scope_is_refused(&args, wrong[i].scope, wrong[i].said);
    args.sink_logits = o;
    CU_ASSERT_EQUAL(cpa_sparse_attend(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(said(), "sink_logits is set and out is NULL"));
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_test_free(stream, args.state.lse);
    cpa_test_free(stream, lists);
    cpa_test_free(stream, o);
    cpa_test_free(stream, pool);
}

static const cpa_test tests[] = {{"sparse_attend", sparse_attend}};

int main(int argc, char **argv) {
    return misuse_main(argc, argv, "misuse of sparse_attend", tests, 1, NULL, NULL);
}
