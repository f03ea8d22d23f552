/* Misuse of context attention and of the engine, on one rank: refused with a line, never a crash; and what older and
 * newer callers may say about sizes. */
#include <math.h>
#include <string.h>

#include <cpattn/cpattn.h>

#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { HEADS = 2, DIM = 8, BLOCK = 16, BLOCKS = 4, ROWS = 20 };

static cpa_comm *comm;
static cpa_device *device;
static cpa_stream *stream;

static cpa_context_options good_options(void) {
    return (cpa_context_options){.size = sizeof(cpa_context_options),
                                 .shape = {.q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM},
                                 .block_size = BLOCK,
                                 .max_rows = 64};
}

static cpa_context *make(void) {
    cpa_context *context = NULL;
    cpa_context_options options = good_options();
    CU_ASSERT_EQUAL_FATAL(cpa_context_create(comm, device, &options, &context, NULL), CPA_OK);
    return context;
}

static void refuse_options(const cpa_context_options *options, const char *says) {
    cpa_error err = {0};
    cpa_context *context = NULL;
    CU_ASSERT_EQUAL(cpa_context_create(comm, device, options, &context, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(context);
    if (!strstr(err.message, says)) printf("  '%s' does not say '%s'\n", err.message, says);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));
}

static void bad_options(void) {
    cpa_context *context = NULL;
    cpa_context_options o = good_options();
    CU_ASSERT_EQUAL(cpa_context_create(NULL, device, &o, &context, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_create(comm, NULL, &o, &context, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_create(comm, device, &o, NULL, NULL), CPA_INVALID);
    refuse_options(NULL, "NULL");
    o.size = offsetof(cpa_context_options, max_rows), refuse_options(&o, "struct size");
    o = good_options(), o.staging_bytes = -1, refuse_options(&o, "staging_bytes");
    o = good_options(), o.staging_bytes = (int64_t)1 << 42, refuse_options(&o, "at most");
    o = good_options(), o.staging_bytes = (int64_t)1 << 62, refuse_options(&o, "at most");
    o = good_options(), o.shape.k_scale = o.shape.v_scale = NAN, refuse_options(&o, "k_scale is nan");
    o = good_options(), o.shape.reserved[0] = 1, refuse_options(&o, "reserved");
    o = good_options(), o.has_unquantised = 1, refuse_options(&o, "has_unquantised is 1 over a cache of fp32");
    o = good_options(), o.shape.kv_dtype = CPA_INT8, o.has_unquantised = 2, refuse_options(&o, "has_unquantised is 2");
    o = good_options(), o.block_size = 1 << 30, refuse_options(&o, "block_size");
    o = good_options(), o.interleave = INT32_MAX - BLOCK + 1, refuse_options(&o, "interleave");
    o = good_options(), o.max_rows = INT64_MAX, refuse_options(&o, "max_rows");
}

static void staging(void) {
    cpa_context_options o = good_options();
    cpa_context *context = NULL;
    const int64_t least = cpa_context_least_staging(device, &o, 1);
    CPA_ASSERT_ORDER(least, >, 0);
    CPA_ASSERT_ORDER(cpa_context_least_staging(device, &o, 4), >=, least);
    o.staging_bytes = least;
    CU_ASSERT_EQUAL(cpa_context_create(comm, device, &o, &context, NULL), CPA_OK);
    cpa_context_destroy(context);
    o.staging_bytes = least - 1;
    refuse_options(&o, "expected at least");
    CU_ASSERT_EQUAL(cpa_context_least_staging(NULL, &o, 1), 0);
    CU_ASSERT_EQUAL(cpa_context_least_staging(device, NULL, 1), 0);
    CU_ASSERT_EQUAL(cpa_context_least_staging(device, &o, 0), 0);
    CU_ASSERT_EQUAL(cpa_context_least_staging(device, &o, INT32_MAX), 0);
}

static void bad_chunks(void) {
    const int32_t table[2] = {0, 1};
    const cpa_context_chunk good = {.count = ROWS, .algorithm = CPA_PASS_KV, .block_table = table};
    const int64_t starts[] = {INT64_MIN, -1, (int64_t)1 << 62, INT64_MAX};
    cpa_context *context = make();
    CU_ASSERT_EQUAL(cpa_context_plan(NULL, &good, 1), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_plan(context, NULL, 1), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_plan(context, &good, -1), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_rows(context, &good, 1), ROWS);
    CU_ASSERT_EQUAL(cpa_context_rows(NULL, &good, 1), 0);
    CU_ASSERT_EQUAL(cpa_context_rows(context, NULL, 1), 0);
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        cpa_context_chunk chunk = good;
        chunk.start = starts[i];
        CU_ASSERT_EQUAL(cpa_context_rows(context, &chunk, 1), 0);
        CU_ASSERT_EQUAL(cpa_context_plan(context, &chunk, 1), CPA_INVALID);
        chunk = good;
        chunk.count = starts[i];
        CU_ASSERT_EQUAL(cpa_context_rows(context, &chunk, 1), 0);
        CU_ASSERT_EQUAL(cpa_context_plan(context, &chunk, 1), CPA_INVALID);
    }
    cpa_context_chunk chunk = good;
    chunk.reserved[1] = 1;
    CU_ASSERT_EQUAL(cpa_context_plan(context, &chunk, 1), CPA_INVALID);
    chunk = good;
    chunk.block_table = NULL;
    CU_ASSERT_EQUAL(cpa_context_plan(context, &chunk, 1), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_plan(context, &good, 1), CPA_OK);
    cpa_context_destroy(context);
    cpa_context_destroy(NULL);
    CU_ASSERT_STRING_EQUAL(cpa_context_error(NULL), "");
}

static void refuse_attend(cpa_context *context, const cpa_context_args *args, const char *says) {
    CU_ASSERT_EQUAL(cpa_context_attend(context, args, stream), CPA_INVALID);
    if (!strstr(cpa_context_error(context), says))
        printf("  '%s' does not say '%s'\n", cpa_context_error(context), says);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(context), says));
}

static void bad_attends(void) {
    static const float zeros[BLOCKS * BLOCK * HEADS * DIM];
    const int32_t table[2] = {0, 1};
    const cpa_context_chunk chunk = {.count = ROWS, .algorithm = CPA_PASS_KV, .block_table = table};
    void *k = cpa_test_upload(stream, zeros, sizeof zeros), *v = cpa_test_upload(stream, zeros, sizeof zeros);
    void *q = cpa_test_upload(stream, zeros, sizeof zeros), *out = cpa_test_upload(stream, zeros, sizeof zeros);
    cpa_context *context = make();
    const cpa_context_args good = {
        .size = sizeof good,
        .q = q,
        .kv =
            {.k = k, .v = v, .block_size = BLOCK, .num_blocks = BLOCKS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM},
        .mask = {.causal = 1},
        .out = out};
    cpa_context_args a = good;
    refuse_attend(context, &a, "no step is planned");
    CU_ASSERT_EQUAL_FATAL(cpa_context_plan(context, &chunk, 1), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(NULL, &a, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_attend(context, &a, NULL), CPA_INVALID);
    refuse_attend(context, NULL, "NULL");
    a = good, a.q = NULL, refuse_attend(context, &a, "q");
    a = good, a.out = NULL, refuse_attend(context, &a, "out");
    a = good, a.kv.k = NULL, refuse_attend(context, &a, "the key pool is NULL");
    a = good, a.kv.v = NULL, refuse_attend(context, &a, "the value pool is NULL");
    a = good, a.q = (const char *)q + 1, refuse_attend(context, &a, "not aligned");
    a = good, a.out = (char *)out + 2, refuse_attend(context, &a, "not aligned");
    a = good, a.kv.k = (char *)k + 1, refuse_attend(context, &a, "not aligned");
    a = good, a.kv.k_token_stride = INT64_MAX, refuse_attend(context, &a, "2^60");
    a = good, a.kv.reserved[4] = 1, refuse_attend(context, &a, "reserved");
    a = good, a.mask.causal = 2, refuse_attend(context, &a, "causal is 2");
    a = good, a.mask.reserved[0] = 1, refuse_attend(context, &a, "reserved");
    a = good, a.scale = NAN, refuse_attend(context, &a, "scale is nan");
    a = good, a.size = 8, refuse_attend(context, &a, "struct size is 8");
    a = good, a.size = offsetof(cpa_context_args, lse);
    CU_ASSERT_EQUAL(cpa_context_attend(context, &a, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_context_destroy(context);
    void *const used[] = {k, v, q, out};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(stream, used[i]);
}

/* A caller that knows less of the statistics gets as much; one that knows more gets zeros. */
static void statistics(void) {
    struct {
        cpa_context_stats known;
        int64_t more;
    } stats;
    cpa_context *context = make();
    memset(&stats, 0xff, sizeof stats);
    CU_ASSERT_EQUAL(cpa_context_get_stats(context, &stats.known, sizeof stats), CPA_OK);
    CPA_ASSERT_ORDER(stats.known.staging_bound, >, 0);
    CU_ASSERT_EQUAL(stats.more, 0);
    memset(&stats, 0xff, sizeof stats);
    CU_ASSERT_EQUAL(cpa_context_get_stats(context, &stats.known, sizeof stats.known.bytes_sent), CPA_OK);
    CU_ASSERT_EQUAL(stats.known.bytes_sent, 0);
    CU_ASSERT_EQUAL(stats.known.staging_bytes, -1);
    CU_ASSERT_EQUAL(cpa_context_get_stats(context, NULL, sizeof stats), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_get_stats(NULL, &stats.known, sizeof stats), CPA_INVALID);
    cpa_context_destroy(context);
}

static void no_engine(void) {
    cpa_error err = {0};
    cpa_engine *engine = NULL;
    cpa_engine_stats stats;
    cpa_engine_options options = {.size = 8};
    cpa_request request = {.size = sizeof request};
    CU_ASSERT_EQUAL(cpa_engine_create(NULL, &options, &engine, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_create(comm, NULL, &engine, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_create(comm, &options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "struct size is 8"));
    CU_ASSERT_EQUAL(cpa_engine_create(comm, &options, NULL, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_submit(NULL, &request), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_run(NULL, NULL, NULL, NULL), CPA_INVALID);
    cpa_engine_stop(NULL);
    CU_ASSERT_EQUAL(cpa_engine_get_stats(NULL, &stats, sizeof stats), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_timeline(NULL, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_engine_bytes_between(NULL, NULL), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_engine_device(NULL), "");
    CU_ASSERT_EQUAL(cpa_engine_estimate(NULL, 1), 0);
    CU_ASSERT_STRING_EQUAL(cpa_engine_error(NULL), "");
    cpa_engine_destroy(NULL);
}

/* What CPA_AUTO means, asked of the planner: decode by pass-Q, one rank by pass-KV, else by the rates or the bytes. */
static void choice(void) {
    const cpa_algorithm_question good = {
        .size = sizeof good,
        .shape = {.q_heads = 32, .kv_heads = 4, .dtype = CPA_BF16, .kv_dtype = CPA_BF16},
        .ranks = 4,
        .new_tokens = 4096};
    cpa_algorithm_question q = good;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_PASS_KV);
    q.cached_tokens = 4096 * 3;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_PASS_KV); /* a quarter is new: 2 * 4 / 32 */
    q.cached_tokens++;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_PASS_Q);
    q.flops = 1e12, q.bandwidth = 1e9; /* from 4 * 1e12 * 4 * 2 / (2 * 32 * 1e9) = 500 tokens on the exchange hides */
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_PASS_KV);
    q.new_tokens = 1;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_PASS_Q);
    q.ranks = 1;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_PASS_KV);
    CU_ASSERT_EQUAL(cpa_algorithm_choose(NULL), CPA_AUTO);
    q = good, q.size = 8;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_AUTO);
    q = good, q.ranks = 0;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_AUTO);
    q = good, q.new_tokens = 0;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_AUTO);
    q = good, q.flops = NAN;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_AUTO);
    q = good, q.flops = 1;
    CU_ASSERT_EQUAL(cpa_algorithm_choose(&q), CPA_AUTO);
}

static cpa_status no_send(void *state, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                          cpa_comm_request **out, cpa_error *err) {
    (void)state, (void)peer, (void)tag, (void)data, (void)bytes, (void)out, (void)err;
    return CPA_COMM;
}
static cpa_status no_receive(void *state, int32_t peer, int32_t tag, void *data, int64_t bytes, cpa_comm_request **out,
                             cpa_error *err) {
    (void)state, (void)peer, (void)tag, (void)data, (void)bytes, (void)out, (void)err;
    return CPA_COMM;
}
static cpa_status no_test(void *state, cpa_comm_request *request, int *done, cpa_error *err) {
    (void)state, (void)request, (void)done, (void)err;
    return CPA_COMM;
}
static void no_cancel(void *state, cpa_comm_request *request) {
    (void)state, (void)request;
}

/* A table of functions and options that end before what has a default are taken; what is NULL is refused. */
static void communicators(void) {
    const cpa_comm_ops good = {sizeof good, "none", no_send, no_receive, no_test, no_cancel, NULL};
    cpa_comm_ops ops = good;
    cpa_comm_options options = {.size = offsetof(cpa_comm_options, join_s), .timeout_s = 1, .join_s = -7};
    cpa_comm *made = NULL;
    cpa_error err = {0};
    char byte = 0;
    ops.size = offsetof(cpa_comm_ops, close);
    CU_ASSERT_EQUAL(cpa_comm_create(&ops, NULL, 0, 1, &options, &made, &err), CPA_OK);
    cpa_comm_destroy(made);
    made = NULL;
    options.size = sizeof options;
    CU_ASSERT_EQUAL(cpa_comm_create(&ops, NULL, 0, 1, &options, &made, &err), CPA_INVALID);
    ops.size = 8;
    CU_ASSERT_EQUAL(cpa_comm_create(&ops, NULL, 0, 1, NULL, &made, &err), CPA_INVALID);
    ops = good, ops.test = NULL;
    CU_ASSERT_EQUAL(cpa_comm_create(&ops, NULL, 0, 1, NULL, &made, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_create(NULL, NULL, 0, 1, NULL, &made, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_create(&good, NULL, 0, 1, NULL, NULL, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_create(&good, NULL, 1, 1, NULL, &made, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(made);
    CU_ASSERT_EQUAL(cpa_comm_alone(NULL, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_from_store(NULL, 1, 0, 1, NULL, &made, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_rank(NULL), -1);
    CU_ASSERT_EQUAL(cpa_comm_size(NULL), 0);
    CU_ASSERT_EQUAL(cpa_comm_barrier(NULL, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_agree(NULL, CPA_OK, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_all_gather(comm, &byte, 1, NULL, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_broadcast(comm, NULL, 1, 0, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_send(comm, 0, &byte, 1, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_comm_receive(NULL, 0, &byte, 1, &err), CPA_INVALID);
    cpa_comm_abort(NULL, CPA_COMM, NULL);
    cpa_comm_destroy(NULL);
}

static const cpa_test tests[] = {
    {"bad options of a context", bad_options},
    {"the least staging can be asked for", staging},
    {"bad chunks", bad_chunks},
    {"bad arguments of a layer", bad_attends},
    {"statistics of any size", statistics},
    {"no engine", no_engine},
    {"communicators", communicators},
    {"the planner can be asked for an algorithm", choice},
};

int main(int argc, char **argv) {
    int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    cpa_test_device_open(1, &device, &stream);
    if (cpa_comm_alone(&comm, NULL) != CPA_OK) return 1;
    int failed = cpa_test_main(argc, argv, "misuse of contexts", tests, (int)(sizeof tests / sizeof *tests));
    cpa_comm_destroy(comm);
    cpa_test_device_close(device, stream);
    return failed;
}
