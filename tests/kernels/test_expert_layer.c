/* A whole layer of experts, as the head of cpattn/experts.h makes it of operators: against float64, and with its experts
 * spread over ranks, which play in one process, against a single one. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/experts.h>
#include <cpattn/nn.h>

#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

enum { EXPERTS = 7, TOP_K = 3, HIDDEN = 40, INNER = 24, MOST_RANKS = 4, MOST_TOKENS = 20 };
enum { MOST_PLACES = MOST_RANKS * MOST_TOKENS * TOP_K };

static cpa_device *device;
static cpa_stream *stream;

static const int64_t tokens_of[MOST_RANKS] = {20, 0, 3, 9}; /* of a rank */
static cpa_test_tensor gate_up, down;                       /* weights of all experts */

static void *take(const void *host, int64_t bytes) {
    return cpa_test_upload(stream, host, bytes);
}

/* Memory of the device that holds NaN, or -1. */
static void *blank(int64_t bytes) {
    void *host = malloc((size_t)bytes + 1);
    if (!host) abort();
    memset(host, 0xff, (size_t)bytes);
    void *memory = take(host, bytes);
    free(host);
    return memory;
}

static void done(cpa_status status) {
    CU_ASSERT_EQUAL(status, CPA_OK);
}

/* The rows `tokens` of x, each of HIDDEN elements. */
static void *gather(const void *x, int64_t x_rows, const void *tokens, int64_t rows) {
    void *out = blank(rows * HIDDEN * 4);
    const cpa_embed_args args = {sizeof args, rows, HIDDEN, CPA_F32, x_rows, x, tokens, out};
    if (rows > 0 && x_rows > 0) done(cpa_embed(&args, stream));
    return out;
}

static void multiply(const cpa_test_tensor *weights, int32_t first_expert, int32_t experts, const int32_t *offsets,
                     int64_t rows, const void *x, int64_t x_rows, const uint32_t *tokens, void *out) {
    const int32_t outputs = (int32_t)(weights->rows / EXPERTS), inputs = (int32_t)weights->width;
    const cpa_expert_linear_args args = {
        .size = sizeof args,
        .experts = experts,
        .rows = rows,
        .inputs = inputs,
        .outputs = outputs,
        .offsets = offsets,
        .x = x,
        .x_rows = x_rows,
        .weight = (const float *)weights->device + (int64_t)first_expert * outputs * inputs,
        .out = out,
        .tokens = tokens};
    done(cpa_expert_linear(&args, stream));
}

/* What experts [first, first + n) make of the rows of x that `offsets` and `tokens` give them: a row for each place. */
static void *run_experts(int32_t first, int32_t n, const int32_t *offsets, int64_t rows, const void *x, int64_t x_rows,
                         const uint32_t *tokens) {
    void *wide = blank(rows * 2 * INNER * 4), *inner = blank(rows * INNER * 4), *y = blank(rows * HIDDEN * 4);
    const cpa_swiglu_args act = {sizeof act, rows, INNER, CPA_F32, wide, inner};
    multiply(&gate_up, first, n, offsets, rows, x, x_rows, tokens, wide);
    done(cpa_swiglu(&act, stream));
    multiply(&down, first, n, offsets, rows, inner, rows, NULL, y);
    cpa_test_free(stream, inner);
    cpa_test_free(stream, wide);
    return y;
}

/* The choices of a rank's tokens, sorted. */
typedef struct choices {
    int64_t rows;
    int32_t *ids, *offsets, *places; /* device */
    uint32_t *tokens;                /* device */
    float *weights;                  /* device */
    int32_t of_host[EXPERTS + 1];    /* offsets */
    int32_t host_ids[MOST_TOKENS * TOP_K], host_places[MOST_TOKENS * TOP_K];
} choices;

static void permute(int64_t rows, int32_t top_k, int32_t first, int32_t n, const int32_t *ids, int32_t *offsets,
                    uint32_t *tokens, int32_t *places) {
    const cpa_expert_permute_args args = {sizeof args, rows, top_k, first, n, ids, offsets, tokens, places};
    done(cpa_expert_permute(&args, stream));
}

static choices choose(int64_t rows, const cpa_test_tensor *logits) {
    const int64_t n = rows * TOP_K * 4;
    choices c = {rows, blank(n), blank((EXPERTS + 1) * 4), blank(n), blank(n), blank(n), {0}, {0}, {0}};
    const cpa_expert_route_args route = {.size = sizeof route,
                                         .rows = rows,
                                         .experts = EXPERTS,
                                         .top_k = TOP_K,
                                         .logits = logits->device,
                                         .normalise = 1,
                                         .scale = 1,
                                         .ids = c.ids,
                                         .weights = c.weights};
    done(cpa_expert_route(&route, stream));
    permute(rows, TOP_K, 0, EXPERTS, c.ids, c.offsets, c.tokens, c.places);
    cpa_test_download(stream, c.of_host, c.offsets, sizeof c.of_host);
    cpa_test_download(stream, c.host_ids, c.ids, n);
    cpa_test_download(stream, c.host_places, c.places, n);
    return c;
}

static void free_choices(choices *c) {
    void *const memory[] = {c->ids, c->offsets, c->tokens, c->places, c->weights};
    for (int i = 0; i < 5; i++) cpa_test_free(stream, memory[i]);
}

/* Results of a rank's tokens from y by place, to the host. */
static void combine(const choices *c, const void *y, float *out) {
    void *on_device = blank(c->rows * HIDDEN * 4);
    const cpa_expert_combine_args args = {.size = sizeof args,
                                          .rows = c->rows,
                                          .top_k = TOP_K,
                                          .width = HIDDEN,
                                          .y = y,
                                          .y_rows = c->rows * TOP_K,
                                          .places = c->places,
                                          .weights = c->weights,
                                          .out = on_device};
    done(cpa_expert_combine(&args, stream));
    cpa_test_download(stream, out, on_device, c->rows * HIDDEN * 4);
    cpa_test_free(stream, on_device);
}

/* A rank with all experts. */
static void run_alone(const choices *c, const cpa_test_tensor *x, float *out) {
    void *y = run_experts(0, EXPERTS, c->offsets, c->rows * TOP_K, x->device, c->rows, c->tokens);
    combine(c, y, out);
    cpa_test_free(stream, y);
}

static void make_inputs(int rank, cpa_test_tensor *x, cpa_test_tensor *logits) {
    *x = cpa_test_tensor_make(stream, CPA_F32, tokens_of[rank], HIDDEN, 0, (uint64_t)(10 + rank));
    *logits = cpa_test_tensor_make(stream, CPA_F32, tokens_of[rank], EXPERTS, 0, (uint64_t)(20 + rank));
}

static void open_layer(void) {
    cpa_test_device_open(2, &device, &stream);
    gate_up = cpa_test_tensor_make(stream, CPA_F32, EXPERTS * 2 * INNER, HIDDEN, 0, 1);
    down = cpa_test_tensor_make(stream, CPA_F32, EXPERTS * HIDDEN, INNER, 0, 2);
}

static void close_layer(void) {
    cpa_test_tensor_free(&down, stream);
    cpa_test_tensor_free(&gate_up, stream);
    cpa_test_device_close(device, stream);
}

/* ---- against float64 ---- */

static double dot(const float *a, const double *b, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

/* Adds what an expert makes of a row, times the weight. */
static void add_expert(int32_t expert, const float *x, double weight, double *out) {
    double wide_x[HIDDEN], inner[INNER];
    for (int32_t i = 0; i < HIDDEN; i++) wide_x[i] = (double)x[i];
    for (int32_t i = 0; i < INNER; i++) {
        const double gate = dot(cpa_test_row(&gate_up, expert * 2 * INNER + i), wide_x, HIDDEN);
        const double up = dot(cpa_test_row(&gate_up, expert * 2 * INNER + INNER + i), wide_x, HIDDEN);
        inner[i] = gate / (1 + exp(-gate)) * up;
    }
    for (int32_t o = 0; o < HIDDEN; o++)
        out[o] += weight * dot(cpa_test_row(&down, (int64_t)expert * HIDDEN + o), inner, INNER);
}

static void a_layer_is_that_of_float64(void) {
    cpa_test_tensor x, logits;
    float out[MOST_TOKENS * HIDDEN], weights[MOST_TOKENS * TOP_K];
    open_layer();
    make_inputs(0, &x, &logits);
    choices c = choose(tokens_of[0], &logits);
    cpa_test_download(stream, weights, c.weights, tokens_of[0] * TOP_K * 4);
    run_alone(&c, &x, out);
    for (int64_t t = 0; t < tokens_of[0]; t++) {
        double want[HIDDEN] = {0}, largest = 0;
        for (int32_t k = 0; k < TOP_K; k++)
            add_expert(c.host_ids[t * TOP_K + k], cpa_test_row(&x, t), (double)weights[t * TOP_K + k], want);
        for (int32_t o = 0; o < HIDDEN; o++) largest = fmax(largest, fabs(want[o]));
        for (int32_t o = 0; o < HIDDEN; o++)
            CU_ASSERT_TRUE(fabs((double)out[t * HIDDEN + o] - want[o]) <= 1e-5 * largest);
    }
    free_choices(&c);
    cpa_test_tensor_free(&logits, stream);
    cpa_test_tensor_free(&x, stream);
    close_layer();
}

/* ---- spread over ranks ---- */

/* A rank, and what it keeps for each place of its own until the rows are home again. */
typedef struct player {
    cpa_test_tensor x, logits;
    choices c;
    float sent[MOST_TOKENS * TOP_K * HIDDEN], home[MOST_TOKENS * TOP_K * HIDDEN]; /* rows in the order of places */
} player;

static void begin_player(player *p, int rank) {
    make_inputs(rank, &p->x, &p->logits);
    p->c = choose(tokens_of[rank], &p->logits);
    const int64_t places = tokens_of[rank] * TOP_K;
    void *rows = gather(p->x.device, tokens_of[rank], p->c.tokens, places);
    cpa_test_download(stream, p->sent, rows, places * HIDDEN * 4);
    memset(p->home, 0xff, sizeof p->home);
    cpa_test_free(stream, rows);
}

/* Where the rows that a rank sends to another begin, and those that it sends to the next one. */
static int32_t first_place(const player *p, int ranks, int rank) {
    return p->c.of_host[cpa_first_expert(EXPERTS, ranks, rank)];
}

/* Rank `rank` of the players receives, multiplies, and sends back. */
static void serve(player *players, int ranks, int rank) {
    const int32_t first = cpa_first_expert(EXPERTS, ranks, rank), end = cpa_first_expert(EXPERTS, ranks, rank + 1);
    static float rows[MOST_PLACES * HIDDEN];
    static int32_t ids[MOST_PLACES];
    int64_t n = 0;
    for (int from = 0; from < ranks; from++) {
        const player *p = &players[from];
        for (int32_t e = first; e < end; e++) {
            for (int32_t place = p->c.of_host[e]; place < p->c.of_host[e + 1]; place++, n++) {
                memcpy(rows + n * HIDDEN, p->sent + (int64_t)place * HIDDEN, HIDDEN * 4);
                ids[n] = e;
            }
        }
    }
    int32_t *device_ids = take(ids, n * 4), *offsets = blank((end - first + 1) * 4), *places = blank(n * 4);
    uint32_t *tokens = blank(n * 4);
    void *x = take(rows, n * HIDDEN * 4);
    permute(n, 1, first, end - first, device_ids, offsets, tokens, places);
    void *y = run_experts(first, end - first, offsets, n, x, n, tokens), *back = gather(y, n, places, n);
    cpa_test_download(stream, rows, back, n * HIDDEN * 4);
    n = 0;
    for (int to = 0; to < ranks; to++) {
        player *p = &players[to];
        const int32_t begin = first_place(p, ranks, rank), count = first_place(p, ranks, rank + 1) - begin;
        memcpy(p->home + (int64_t)begin * HIDDEN, rows + n * HIDDEN, (size_t)count * HIDDEN * 4);
        n += count;
    }
    void *const memory[] = {device_ids, offsets, places, tokens, x, y, back};
    for (int i = 0; i < 7; i++) cpa_test_free(stream, memory[i]);
}

/* Whether a rank has what it makes alone: the same bits where these are promised. */
static void finish_player(player *p) {
    const int64_t n = p->c.rows * HIDDEN;
    float out[MOST_TOKENS * HIDDEN], want[MOST_TOKENS * HIDDEN];
    void *y = take(p->home, p->c.rows * TOP_K * HIDDEN * 4);
    combine(&p->c, y, out);
    run_alone(&p->c, &p->x, want);
    for (int64_t i = 0; i < n; i++) {
        const float slack = cpa_test_promises_bits() ? 0 : 1e-4f * (1 + fabsf(want[i]));
        CU_ASSERT_TRUE(fabsf(out[i] - want[i]) <= slack);
    }
    cpa_test_free(stream, y);
    free_choices(&p->c);
    cpa_test_tensor_free(&p->logits, stream);
    cpa_test_tensor_free(&p->x, stream);
}

static void experts_of_other_ranks_give_the_same(void) {
    static player players[MOST_RANKS];
    open_layer();
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        for (int r = 0; r < ranks; r++) begin_player(&players[r], r);
        for (int r = 0; r < ranks; r++) serve(players, ranks, r);
        for (int r = 0; r < ranks; r++) finish_player(&players[r]);
    }
    close_layer();
}

static const cpa_test tests[] = {
    {"a layer is that of float64", a_layer_is_that_of_float64},
    {"experts of other ranks give the same", experts_of_other_ranks_give_the_same},
};
CPA_DEVICE_TEST_MAIN("layer of experts", tests)
