/* A layer of experts that are spread over ranks, in both ways, against float64: ranks that do not divide the experts,
 * ranks without experts or without rows, and pieces of which some ranks have none. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "src/context/context.h"
#include "src/context/row_exchange.h"
#include "src/model/feed_forward.h"
#include "src/model/transformer.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/nn_fixture.h"

enum { HIDDEN = 40, INNER = 24, MOST_RANKS = 4, MOST_ROWS = 20, MOST_EXPERTS = 12 };

typedef struct layer_case {
    int32_t experts, top_k;
    int64_t piece;
    int64_t rows[MOST_RANKS]; /* of each rank */
} layer_case;

static const layer_case cases[] = {
    {7, 3, 4, {9, 0, 5, 14}},   /* experts that ranks do not divide, and pieces */
    {12, 2, 32, {1, 20, 0, 3}}, /* more than one piece's worth of experts for few rows */
    {5, 5, 3, {4, 4, 4, 4}},    /* every row has every expert: more than a rank has */
    {2, 1, 32, {6, 7, 8, 0}},   /* ranks without experts, of which one has no rows either */
    {1, 1, 2, {0, 3, 0, 0}},
};
enum { CASES = sizeof cases / sizeof *cases };

static cpa_device *device;
static cpa_stream *stream;
static cpa_context *context;
static cpa_model_config *config;

/* Of the case at hand. Those of `held` have NaN for the experts of other ranks. */
typedef struct layer_weights {
    cpa_test_tensor router, gate_up, down, held_gate_up, held_down;
} layer_weights;
typedef struct layer_rows {
    cpa_test_tensor x, added;
} layer_rows;

/* Small enough that no expert has all of a row's weight. */
static cpa_test_tensor make_router(cpa_dtype dtype, int32_t experts) {
    cpa_test_tensor router = cpa_test_tensor_make(stream, dtype, experts, HIDDEN, 0, 3);
    for (int64_t i = 0; i < experts * router.stride; i++) router.values[i] *= 1.0f / 64;
    cpa_test_tensor_send(&router, stream);
    return router;
}

/* The same tensor where only the experts of this rank, of so many rows each, are numbers. */
static cpa_test_tensor make_held(cpa_dtype dtype, cpa_slice own, int32_t experts, int64_t rows, int64_t width,
                                 uint64_t seed) {
    cpa_test_tensor held = cpa_test_tensor_make(stream, dtype, experts * rows, width, 0, seed);
    for (int64_t row = 0; row < experts * rows; row++) {
        if (row / rows >= own.begin && row / rows < own.begin + own.count) continue;
        for (int64_t i = 0; i < width; i++) cpa_test_row(&held, row)[i] = NAN;
    }
    cpa_test_tensor_send(&held, stream);
    return held;
}

static layer_weights make_weights(cpa_dtype dtype, int32_t experts) {
    const cpa_slice own = cpa_own_experts(experts, cpa_test_ranks(), cpa_test_rank());
    return (layer_weights){.router = make_router(dtype, experts),
                           .gate_up = cpa_test_tensor_make(stream, dtype, experts * 2 * INNER, HIDDEN, 0, 1),
                           .down = cpa_test_tensor_make(stream, dtype, experts * HIDDEN, INNER, 0, 2),
                           .held_gate_up = make_held(dtype, own, experts, 2 * INNER, HIDDEN, 1),
                           .held_down = make_held(dtype, own, experts, HIDDEN, INNER, 2)};
}

static void free_weights(layer_weights *w) {
    cpa_test_tensor *const all[] = {&w->router, &w->gate_up, &w->down, &w->held_gate_up, &w->held_down};
    for (int i = 0; i < 5; i++) cpa_test_tensor_free(all[i], stream);
}

/* ---- against float64 ---- */

static double dot(const float *a, const double *b, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

static void add_expert(const layer_weights *w, int32_t expert, const double *x, double weight, double *out) {
    double inner[INNER];
    for (int32_t i = 0; i < INNER; i++) {
        const double gate = dot(cpa_test_row(&w->gate_up, expert * 2 * INNER + i), x, HIDDEN);
        const double up = dot(cpa_test_row(&w->gate_up, expert * 2 * INNER + INNER + i), x, HIDDEN);
        inner[i] = gate / (1 + exp(-gate)) * up;
    }
    for (int32_t o = 0; o < HIDDEN; o++)
        out[o] += weight * dot(cpa_test_row(&w->down, (int64_t)expert * HIDDEN + o), inner, INNER);
}

/* A row by the top_k experts with the largest logits, weighted by a softmax over these. */
static void expect_row(const layer_case *c, const layer_weights *w, const float *row, const float *added, double *out) {
    double x[HIDDEN], logits[MOST_EXPERTS], weights[MOST_EXPERTS], sum = 0;
    int32_t chosen[MOST_EXPERTS];
    for (int32_t i = 0; i < HIDDEN; i++) x[i] = (double)row[i];
    for (int32_t e = 0; e < c->experts; e++) logits[e] = dot(cpa_test_row(&w->router, e), x, HIDDEN);
    for (int32_t k = 0; k < c->top_k; k++) {
        int32_t best = -1;
        for (int32_t e = 0; e < c->experts; e++)
            if (!isnan(logits[e]) && (best < 0 || logits[e] > logits[best])) best = e;
        chosen[k] = best;
        weights[k] = logits[best];
        logits[best] = NAN;
    }
    for (int32_t k = c->top_k - 1; k >= 0; k--) sum += weights[k] = exp(weights[k] - weights[0]);
    for (int32_t i = 0; i < HIDDEN; i++) out[i] = (double)added[i];
    for (int32_t k = 0; k < c->top_k; k++) add_expert(w, chosen[k], x, weights[k] / sum, out);
}

/* How many rows of `out` are not what float64 says, but for the roundings of the dtype. */
static int64_t wrong_rows(const layer_case *c, const layer_weights *w, const layer_rows *rows, const float *out) {
    const double tolerance = rows->x.dtype == CPA_F32 ? 1e-5 : 0x1p-6;
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows->x.rows; i++) {
        double want[HIDDEN], largest = 0, worst = 0;
        expect_row(c, w, cpa_test_row(&rows->x, i), cpa_test_row(&rows->added, i), want);
        for (int32_t o = 0; o < HIDDEN; o++) {
            const double error = fabs((double)out[i * HIDDEN + o] - want[o]);
            largest = fmax(largest, fabs(want[o]));
            if (!(error <= worst)) worst = error;
        }
        wrong += !(worst <= tolerance * largest);
    }
    return wrong;
}

/* ---- runs ---- */

static void configure(const layer_case *c) {
    memset(config, 0, sizeof *config);
    config->hidden = HIDDEN;
    config->moe =
        (cpa_moe_config){.experts = c->experts, .top_k = c->top_k, .intermediate = INNER, .renormalise = 1, .scale = 1};
}

/* The layer over the rows of this rank, which it adds to what they are added to; `out` as floats [rows, HIDDEN]. */
static void run(const layer_case *c, const layer_weights *w, const layer_rows *rows, cpa_experts_over_ranks experts,
                int64_t piece, float *out) {
    const int32_t over = experts == CPA_EXPERTS_REPLICATED ? 1 : cpa_test_ranks();
    const cpa_dtype dtype = rows->x.dtype;
    const cpa_weights_part part = {0, 1, over > 1 ? cpa_test_rank() : 0, over};
    const int64_t bytes = cpa_dtype_bytes(dtype), begin = cpa_own_experts(c->experts, over, part.expert_rank).begin;
    const cpa_test_tensor *gate_up = over > 1 ? &w->held_gate_up : &w->gate_up;
    const cpa_test_tensor *down = over > 1 ? &w->held_down : &w->down;
    const cpa_feed_forward_weights weights = {
        .router = w->router.device,
        .expert_gate_up = (char *)gate_up->device + begin * 2 * INNER * HIDDEN * bytes,
        .expert_down = (char *)down->device + begin * HIDDEN * INNER * bytes};
    const cpa_row_exchange with = cpa_context_row_exchange(context);
    const cpa_model_step step = {
        .size = sizeof step, .rows = {.count = rows->x.rows}, .row_exchange = &with, .rank_rows = c->rows};
    cpa_feed_forward f = {.config = config,
                          .dtype = dtype,
                          .mixture = cpa_mixture_of(config, dtype, part, over, experts == CPA_EXPERTS_GATHERED, piece)};
    const int64_t room = cpa_mixture_place(&f.mixture, NULL);
    char *poison = cpa_test_poisoned(room, 1);
    void *memory = cpa_test_upload(stream, poison, room);
    cpa_test_tensor result = cpa_test_tensor_make(stream, dtype, rows->x.rows, HIDDEN, 0, 5); /* `added` */
    const cpa_mixture_rows at = {.step = &step, .x = rows->x.device, .out = result.device, .added = result.device};
    cpa_mixture_place(&f.mixture, memory);
    CU_ASSERT_EQUAL(cpa_feed_forward_mix(&f, &weights, &at, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_sync(context, stream), CPA_OK);
    cpa_test_tensor_fetch(&result, stream);
    for (int64_t i = 0; i < rows->x.rows; i++) memcpy(out + i * HIDDEN, cpa_test_row(&result, i), HIDDEN * sizeof *out);
    cpa_test_tensor_free(&result, stream);
    cpa_test_free(stream, memory);
    free(poison);
}

static void open_ranks(void) {
    static const cpa_test_shape shape = {
        .q_heads = 1, .kv_heads = 1, .k_dim = 8, .v_dim = 8, .block_size = 8, .interleave = 8, .dtype = CPA_F32};
    cpa_test_device_open(1, &device, &stream);
    context = cpa_test_context(device, &shape, 0);
    config = malloc(sizeof *config);
    if (!config) abort();
}

static void close_ranks(void) {
    free(config);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static layer_rows make_rows(const layer_case *c, cpa_dtype dtype) {
    const int64_t n = c->rows[cpa_test_rank()];
    return (layer_rows){cpa_test_tensor_make(stream, dtype, n, HIDDEN, 0, (uint64_t)(10 + cpa_test_rank())),
                        cpa_test_tensor_make(stream, dtype, n, HIDDEN, 0, 5)};
}

static void check_case(const layer_case *c, cpa_dtype dtype) {
    float whole[MOST_ROWS * HIDDEN], sent[MOST_ROWS * HIDDEN], gathered[MOST_ROWS * HIDDEN], again[MOST_ROWS * HIDDEN];
    configure(c);
    layer_weights w = make_weights(dtype, c->experts);
    layer_rows rows = make_rows(c, dtype);
    const size_t bytes = (size_t)rows.x.rows * HIDDEN * sizeof *whole;
    run(c, &w, &rows, CPA_EXPERTS_REPLICATED, c->piece, whole);
    run(c, &w, &rows, CPA_EXPERTS_GATHERED, c->piece, gathered);
    CU_ASSERT_EQUAL(wrong_rows(c, &w, &rows, whole), 0);
    CU_ASSERT_EQUAL(wrong_rows(c, &w, &rows, gathered), 0);
    if (cpa_test_promises_bits()) {
        run(c, &w, &rows, CPA_EXPERTS_GATHERED, c->piece + 1, again);
        CU_ASSERT_EQUAL(memcmp(again, gathered, bytes), 0);
        run(c, &w, &rows, CPA_EXPERTS_SENT, c->piece, sent);
        CU_ASSERT_EQUAL(memcmp(sent, whole, bytes), 0);
    }
    cpa_test_tensor_free(&rows.x, stream);
    cpa_test_tensor_free(&rows.added, stream);
    free_weights(&w);
}

static void rows_get_what_their_experts_give(void) {
    open_ranks();
    for (int i = 0; i < CASES; i++) check_case(&cases[i], CPA_F32);
    close_ranks();
}

static void the_same_in_bf16(void) {
    open_ranks();
    for (int i = 0; i < CASES; i++) check_case(&cases[i], CPA_BF16);
    close_ranks();
}

/* What is sent follows from how many rows ranks have, whatever experts these choose. */
static void messages_have_the_rows_of_ranks(void) {
    const layer_case *c = &cases[0];
    const int32_t ranks = cpa_test_ranks(), rank = cpa_test_rank();
    float out[MOST_ROWS * HIDDEN];
    int64_t others = 0;
    cpa_context_stats stats;
    open_ranks();
    configure(c);
    layer_weights w = make_weights(CPA_BF16, c->experts);
    layer_rows rows = make_rows(c, CPA_BF16);
    run(c, &w, &rows, CPA_EXPERTS_GATHERED, c->piece, out);
    for (int32_t r = 0; r < ranks; r++) others += r == rank ? 0 : c->rows[r];
    CU_ASSERT_EQUAL(cpa_context_get_stats(context, &stats, sizeof stats), CPA_OK);
    CU_ASSERT_EQUAL(stats.row_bytes_sent, ((ranks - 1) * c->rows[rank] * 2 + others * 4) * HIDDEN);
    cpa_test_tensor_free(&rows.x, stream);
    cpa_test_tensor_free(&rows.added, stream);
    free_weights(&w);
    close_ranks();
}

static const cpa_test TESTS[] = {
    {"rows get what their experts give", rows_get_what_their_experts_give},
    {"the same in bf16", the_same_in_bf16},
    {"messages have the rows of ranks", messages_have_the_rows_of_ranks},
};

CPA_MPI_DEVICE_TEST_MAIN("experts spread over ranks", TESTS)
