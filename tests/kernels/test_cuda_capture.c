/* Graphs of the caller's: what is enqueued on a stream of its own while that is captured, and launched again for other
 * lengths and tables. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/attend_plan.h"
#include "tests/fixtures/decode_fixture.h"
#include "tests/fixtures/unit.h"

enum { SEQUENCES = 6 };
static const cpa_decode_case CASE = {.dtype = CPA_BF16,
                                     .kv_dtype = CPA_BF16,
                                     .q_heads = 16,
                                     .kv_heads = 4,
                                     .dim = 128,
                                     .block_size = 16,
                                     .rows = 1,
                                     .sequences = SEQUENCES,
                                     .tokens = 5000,
                                     .length_bytes = 4,
                                     .mask = {.causal = 1},
                                     .threads = 1};
/* What does not fit is among them. */
static const int64_t STEPS[][SEQUENCES] = {{1, 17, 300, 5000, 64, 65},
                                           {5000, 5000, 4999, 4990, 5000, 5000},
                                           {0, 0, 3, 0, 5001, -1},
                                           {0, 0, 0, 0, 0, 0},
                                           {900, 1, 2, 3, 4, 5}};

/* A stream of the caller's, over which the library's lies. */
typedef struct capture {
    cudaStream_t handle;
    cpa_stream *stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
} capture;

static void open_stream(capture *c, const cpa_decode_fixture *f) {
    *c = (capture){0};
    CU_ASSERT_EQUAL_FATAL(cudaStreamCreateWithFlags(&c->handle, cudaStreamNonBlocking), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cpa_stream_wrap(f->device, c->handle, &c->stream, NULL), CPA_OK);
}

static void close_stream(capture *c) {
    if (c->executable) (void)cudaGraphExecDestroy(c->executable);
    if (c->graph) (void)cudaGraphDestroy(c->graph);
    cpa_stream_destroy(c->stream);
    (void)cudaStreamDestroy(c->handle);
}

static void update(cpa_decode_fixture *f, cpa_stream *stream) {
    const cpa_attend_update_args args = cpa_decode_fixture_update(f);
    CU_ASSERT_EQUAL(cpa_attend_plan_update(f->plan, &args, stream), CPA_OK);
}

static void attend(cpa_decode_fixture *f, cpa_stream *stream) {
    const cpa_attend_args args = cpa_decode_fixture_attend(f);
    CU_ASSERT_EQUAL(cpa_attend(f->plan, &args, stream), CPA_OK);
}

/* Captures the attend, and the update before it if `updates`, as the strictest callers do. */
static void capture_step(capture *c, cpa_decode_fixture *f, int updates) {
    update(f, c->stream);
    attend(f, c->stream);
    CU_ASSERT_EQUAL_FATAL(cudaStreamSynchronize(c->handle), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cudaStreamBeginCapture(c->handle, cudaStreamCaptureModeGlobal), cudaSuccess);
    if (updates) update(f, c->stream);
    attend(f, c->stream);
    CU_ASSERT_EQUAL_FATAL(cudaStreamEndCapture(c->handle, &c->graph), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cudaGraphInstantiate(&c->executable, c->graph, 0), cudaSuccess);
}

static void launch_steps(const cpa_decode_case *shape, int updates) {
    cpa_decode_fixture f;
    capture c;
    cpa_decode_fixture_init(&f, shape);
    open_stream(&c, &f);
    cpa_decode_fixture_put(&f, (int64_t[]){10, 20, 30, 40, 50, 60}, SEQUENCES);
    capture_step(&c, &f, updates);
    for (size_t i = 0; i < 2 * sizeof STEPS / sizeof *STEPS; i++) {
        cpa_decode_fixture_put(&f, STEPS[i % (sizeof STEPS / sizeof *STEPS)], SEQUENCES);
        if (!updates) update(&f, c.stream);
        CU_ASSERT_EQUAL(cudaGraphLaunch(c.executable, c.handle), cudaSuccess);
        CU_ASSERT_EQUAL(cudaStreamSynchronize(c.handle), cudaSuccess);
        CU_ASSERT_EQUAL(cpa_decode_fixture_check(&f), 0);
    }
    close_stream(&c);
    cpa_decode_fixture_destroy(&f);
}

static void update_and_attend(void) {
    launch_steps(&CASE, 1);
}

static void attend_alone(void) {
    launch_steps(&CASE, 0);
}

/* Frameworks capture on a stream that they make for it. */
static void streams_are_wrapped_in_their_capture(void) {
    cpa_decode_fixture f;
    capture before, c = {0};
    cpa_decode_fixture_init(&f, &CASE);
    open_stream(&before, &f);
    cpa_decode_fixture_put(&f, STEPS[0], SEQUENCES);
    update(&f, before.stream);
    attend(&f, before.stream);
    CU_ASSERT_EQUAL(cudaStreamSynchronize(before.handle), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cudaStreamCreateWithFlags(&c.handle, cudaStreamNonBlocking), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cudaStreamBeginCapture(c.handle, cudaStreamCaptureModeGlobal), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cpa_stream_wrap(f.device, c.handle, &c.stream, NULL), CPA_OK);
    update(&f, c.stream);
    attend(&f, c.stream);
    CU_ASSERT_EQUAL_FATAL(cudaStreamEndCapture(c.handle, &c.graph), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cudaGraphInstantiate(&c.executable, c.graph, 0), cudaSuccess);
    cpa_decode_fixture_put(&f, STEPS[1], SEQUENCES);
    CU_ASSERT_EQUAL(cudaGraphLaunch(c.executable, c.handle), cudaSuccess);
    CU_ASSERT_EQUAL(cudaStreamSynchronize(c.handle), cudaSuccess);
    CU_ASSERT_EQUAL(cpa_decode_fixture_check(&f), 0);
    close_stream(&c);
    close_stream(&before);
    cpa_decode_fixture_destroy(&f);
}

static void other_kernels(void) {
    cpa_decode_case other = CASE;
    other.kv_dtype = CPA_FP8_E4M3;
    other.length_bytes = 8;
    launch_steps(&other, 1);
    other = CASE;
    other.dtype = other.kv_dtype = CPA_F32;
    launch_steps(&other, 1);
    other = CASE;
    other.kv_heads = 16;
    other.dim = 64;
    other.rows = 2;
    other.mask.window = 300;
    launch_steps(&other, 1);
}

/* ---- prefill and decode together ---- */

/* Of 4 heads a KV head a CTA of decode takes 8 rows: sequences of more have tiles, whose keys are cut as those of a plan
 * that is set, with the same bits. */
static const cpa_decode_case MIXED = {.dtype = CPA_BF16,
                                      .kv_dtype = CPA_BF16,
                                      .q_heads = 16,
                                      .kv_heads = 4,
                                      .dim = 128,
                                      .block_size = 16,
                                      .rows = 700,
                                      .total_rows = 900,
                                      .exact_rows = 9,
                                      .sequences = SEQUENCES,
                                      .tokens = 5000,
                                      .length_bytes = 4,
                                      .mask = {.causal = 1},
                                      .threads = 1};
typedef struct mixed_step {
    int32_t indptr[SEQUENCES + 1];
    int64_t lengths[SEQUENCES];
} mixed_step;
static const mixed_step MIXED_STEPS[] = {
    {{0, 1, 2, 3, 4, 5, 6}, {1, 17, 300, 5000, 64, 65}},                   /* decode alone */
    {{0, 700, 701, 702, 800, 801, 900}, {700, 5000, 17, 4000, 300, 99}},   /* a prompt, later chunks, decode */
    {{0, 9, 18, 27, 36, 45, 54}, {5000, 4999, 4900, 5000, 1024, 1025}},    /* few tiles over many keys */
    {{0, 300, 300, 600, 600, 900, 900}, {5000, 0, 300, -1, 4999, 0}},      /* no rows of some */
    {{0, 0, 0, 0, 0, 0, 0}, {1, 2, 3, 4, 5, 6}},                           /* none of all */
    {{0, 701, 702, 703, 704, 705, 805}, {800, 40, 50, 60, 70, 3000}},      /* too many rows of one */
    {{0, 300, 600, 899, 910, 911, 912}, {300, 5000, 299, 2000, 7, 8}},     /* and of all together */
    {{0, 100, 200, 150, 300, 400, 401}, {100, 5001, 400, 99, 500, 0}},     /* lengths that do not fit, and a descent */
    {{-5, 20, 120, 121, 122, 123, 124}, {30, 100, 200, 0, 0x7fffffff, 1}}, /* a beginning below 0 */
};

/* The second step is the one that is captured. */
static void launch_steps_of(const cpa_decode_case *shape, const mixed_step *steps, size_t n) {
    cpa_decode_fixture f;
    capture c;
    cpa_decode_fixture_init(&f, shape);
    open_stream(&c, &f);
    f.ragged = 1;
    memcpy(f.qo_indptr, steps[1].indptr, sizeof steps[1].indptr);
    cpa_decode_fixture_put(&f, steps[1].lengths, SEQUENCES);
    capture_step(&c, &f, 1);
    for (size_t i = 0; i < 2 * n; i++) {
        memcpy(f.qo_indptr, steps[i % n].indptr, sizeof steps[i % n].indptr);
        cpa_decode_fixture_put(&f, steps[i % n].lengths, SEQUENCES);
        CU_ASSERT_EQUAL(cudaGraphLaunch(c.executable, c.handle), cudaSuccess);
        CU_ASSERT_EQUAL(cudaStreamSynchronize(c.handle), cudaSuccess);
        const int64_t wrong = cpa_decode_fixture_check(&f);
        if (wrong > 0) fprintf(stderr, "step %zu: %lld wrong\n", i % n, (long long)wrong);
        CU_ASSERT_EQUAL(wrong, 0);
    }
    close_stream(&c);
    cpa_decode_fixture_destroy(&f);
}

static void launch_mixed_steps(const cpa_decode_case *shape) {
    launch_steps_of(shape, MIXED_STEPS, sizeof MIXED_STEPS / sizeof *MIXED_STEPS);
}

static void prefill_and_decode(void) {
    launch_mixed_steps(&MIXED);
}

/* Of 16 heads, of which decode takes 32 tokens. */
static void latents(void) {
    static const mixed_step steps[] = {
        {{0, 1, 2, 3, 4, 5, 6}, {1, 17, 300, 600, 64, 65}},
        {{0, 100, 101, 140, 141, 149, 150}, {100, 600, 300, 17, 64, 5}},
        {{0, 33, 66, 99, 100, 101, 102}, {600, 599, 500, 1, 2, 3}},
        {{0, 101, 102, 103, 104, 105, 150}, {300, 601, 4, 5, 6, 400}},
    };
    cpa_decode_case latent = MIXED;
    latent.kv_heads = 1, latent.dim = 512, latent.v_in_k = 1, latent.block_size = 64;
    latent.rows = 100, latent.total_rows = 150, latent.tokens = 600, latent.exact_rows = 33;
    launch_steps_of(&latent, steps, sizeof steps / sizeof *steps);
}

/* Other widths, window and sinks, blocks that go row by row; groups that no CTA of decode holds; and what other kernels
 * take than in a plan that is set. */
static void prefill_by_other_kernels(void) {
    cpa_decode_case other = MIXED;
    other.dim = 64, other.kv_heads = 8, other.exact_rows = 9; /* 2 heads a KV head: 8 rows are 16 packed ones */
    other.mask = (cpa_mask){.causal = 1, .window = 300, .sinks = 4};
    launch_mixed_steps(&other);
    other = MIXED;
    other.block_size = 1, other.exact_rows = 5; /* 16 packed rows: 4 tokens */
    launch_mixed_steps(&other);
    other = MIXED;
    other.q_heads = 80, other.kv_heads = 2, other.exact_rows = 0; /* where the set plan has a tile of no keys */
    launch_mixed_steps(&other);
    other = MIXED;
    other.kv_dtype = CPA_FP8_E4M3, other.exact_rows = 0;
    launch_mixed_steps(&other);
    other.kv_dtype = CPA_INT8;
    launch_mixed_steps(&other);
    other.dtype = other.kv_dtype = CPA_F32;
    launch_mixed_steps(&other);
}

/* More tiles than fill the device three times, whose last are cut in a plan that is set. */
static void many_tiles(void) {
    static const struct {
        int32_t indptr[4];
        int64_t lengths[3];
    } steps[] = {{{0, 3000, 3001, 3002}, {3000, 3400, 17}}, {{0, 1500, 3000, 3400}, {3500, 2000, 400}}};
    cpa_decode_case many = MIXED;
    cpa_decode_fixture f;
    many.q_heads = 32, many.kv_heads = 8, many.dim = 64;
    many.rows = 3000, many.total_rows = 3400, many.tokens = 3500, many.sequences = 3, many.exact_rows = 0;
    cpa_decode_fixture_init(&f, &many);
    f.ragged = 1;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        memcpy(f.qo_indptr, steps[i].indptr, sizeof steps[i].indptr);
        cpa_decode_fixture_put(&f, steps[i].lengths, 3);
        update(&f, f.stream);
        attend(&f, f.stream);
        CU_ASSERT_EQUAL(cpa_decode_fixture_check(&f), 0);
    }
    cpa_decode_fixture_destroy(&f);
}

/* Kernels of attend are placed early and read the plan before they wait: none may read that of the update before, or of
 * the one behind it. */
static void updates_in_a_row(void) {
    enum { TURNS = 300, FLOATS = SEQUENCES * 16 * 128 };
    const int64_t steps[2][SEQUENCES] = {{5000, 1, 5000, 2000, 5000, 900}, {40, 5000, 3, 5000, 0, 5000}};
    cpa_decode_fixture f;
    float *wanted[2], *got = malloc(FLOATS * sizeof *got), *o[2];
    int32_t lengths[2][SEQUENCES];
    void *device_lengths[2];
    int64_t wrong = 0;
    cpa_decode_fixture_init(&f, &CASE);
    cpa_decode_fixture_put(&f, (int64_t[]){5000, 5000, 5000, 5000, 5000, 5000}, SEQUENCES);
    for (int i = 0; i < 2; i++) {
        for (int s = 0; s < SEQUENCES; s++) lengths[i][s] = (int32_t)steps[i][s];
        wanted[i] = malloc(FLOATS * sizeof *wanted[i]);
        device_lengths[i] = cpa_test_upload(f.stream, lengths[i], sizeof lengths[i]);
        o[i] = cpa_test_upload(f.stream, got, FLOATS * sizeof *got);
    }
    for (int turn = 0; turn < TURNS + 1; turn++) {
        for (int i = 0; i < 2; i++) {
            cpa_attend_update_args args = cpa_decode_fixture_update(&f);
            cpa_attend_args attend = cpa_decode_fixture_attend(&f);
            args.lengths = device_lengths[i];
            attend.state.o = o[i];
            attend.out = NULL;
            if (turn == 0) CU_ASSERT_EQUAL(cpa_stream_sync(f.stream), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_plan_update(f.plan, &args, f.stream), CPA_OK);
            if (turn == 0) CU_ASSERT_EQUAL(cpa_stream_sync(f.stream), CPA_OK);
            for (int layer = 0; layer < 3; layer++) CU_ASSERT_EQUAL(cpa_attend(f.plan, &attend, f.stream), CPA_OK);
            if (turn == 0) cpa_test_download(f.stream, wanted[i], o[i], FLOATS * sizeof *got);
        }
        if (turn % 30 != 29) continue;
        for (int i = 0; i < 2; i++) {
            cpa_test_download(f.stream, got, o[i], FLOATS * sizeof *got);
            wrong += memcmp(got, wanted[i], FLOATS * sizeof *got) != 0;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    for (int i = 0; i < 2; i++) {
        cpa_test_free(f.stream, o[i]);
        cpa_test_free(f.stream, device_lengths[i]);
        free(wanted[i]);
    }
    free(got);
    cpa_decode_fixture_destroy(&f);
}

/* On a stream of the caller's and on one of the library's; the graph stays as it was. */
static void refuse_in_capture(cpa_decode_fixture *f, cpa_attend_plan *plan, cpa_stream *stream) {
    const cpa_attend_args args = cpa_decode_fixture_attend(f);
    cudaStream_t handle = cpa_stream_native(stream);
    cudaGraph_t graph = NULL;
    size_t nodes = 1;
    CU_ASSERT_EQUAL_FATAL(cudaStreamBeginCapture(handle, cudaStreamCaptureModeGlobal), cudaSuccess);
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "in a capture of the caller's, and the plan is not"));
    CU_ASSERT_EQUAL(cudaStreamEndCapture(handle, &graph), cudaSuccess);
    CU_ASSERT_EQUAL(cudaGraphGetNodes(graph, NULL, &nodes), cudaSuccess);
    CU_ASSERT_EQUAL(nodes, 0);
    if (graph) (void)cudaGraphDestroy(graph);
}

static void a_plan_that_is_not_reserved(void) {
    cpa_decode_fixture f;
    capture c;
    cpa_attend_plan *plan = NULL;
    cpa_decode_fixture_init(&f, &CASE);
    open_stream(&c, &f);
    cpa_decode_fixture_put(&f, (int64_t[]){10, 20, 30, 40, 50, 60}, SEQUENCES);
    const cpa_attend_item item = {.q_count = 1, .q_first = 9, .k_count = 10};
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {1, CASE.block_size},
                                    .shape = f.limits.shape,
                                    .block_size = CASE.block_size,
                                    .items = &item,
                                    .n_items = 1,
                                    .block_tables = f.tables,
                                    .n_table_entries = f.entries};
    CU_ASSERT_EQUAL(cpa_attend_plan_create(f.device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &batch, NULL), CPA_OK);
    refuse_in_capture(&f, plan, c.stream);
    refuse_in_capture(&f, plan, f.stream);
    cpa_attend_plan_destroy(plan);
    close_stream(&c);
    cpa_decode_fixture_destroy(&f);
}

static const cpa_test tests[] = {
    {"update and attend are captured once", update_and_attend},
    {"attend alone is captured", attend_alone},
    {"streams are wrapped in their capture", streams_are_wrapped_in_their_capture},
    {"other kernels", other_kernels},
    {"prefill and decode together", prefill_and_decode},
    {"prefill by other kernels", prefill_by_other_kernels},
    {"prefill over latents", latents},
    {"more tiles than are cut", many_tiles},
    {"updates and attends in a row", updates_in_a_row},
    {"a plan that is not reserved is refused", a_plan_that_is_not_reserved},
};

int main(int argc, char **argv) {
    int missing = cpa_test_cuda_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    return cpa_test_main(argc, argv, "graphs of the caller's", tests, (int)(sizeof tests / sizeof *tests));
}
