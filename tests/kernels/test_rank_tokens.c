/* rank_tokens: log-probabilities, ranks and the most probable tokens of rows of logits, beside float64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/hash.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* Rows in host memory with a stride of vocabulary + PAD logits, the rest of which is NaN; tokens lie two words apart,
 * and the other word gets the log-probability. */
enum { PAD = 3 };
typedef struct batch {
    int64_t rows, vocabulary;
    float *logits;
    uint32_t *tokens;
    int32_t *top; /* NULL: not given */
    cpa_token_ranks *ranks;
} batch;

static void *allocate(int64_t n, size_t bytes) {
    void *memory = calloc((size_t)n + 1, bytes);
    if (!memory) abort();
    return memory;
}

static float *row_of(const batch *b, int64_t row) {
    return b->logits + row * (b->vocabulary + PAD);
}

/* Uniform in [-1, 1). */
static float noise(uint64_t i) {
    return (float)(int32_t)(cpa_mix64(i * CPA_GOLDEN) >> 40) * 0x1p-23f - 1;
}

/* Random logits; row i has the token that follows from i, and wants i modulo 22 of the most probable. */
static batch batch_of(int64_t rows, int64_t vocabulary) {
    batch b = {.rows = rows, .vocabulary = vocabulary};
    b.logits = allocate(rows * (vocabulary + PAD), sizeof *b.logits);
    b.tokens = allocate(2 * rows, sizeof *b.tokens);
    b.top = allocate(rows, sizeof *b.top);
    b.ranks = allocate(rows, sizeof *b.ranks);
    memset(b.logits, 0xff, (size_t)(rows * (vocabulary + PAD)) * sizeof *b.logits);
    memset(b.ranks, 0x77, (size_t)rows * sizeof *b.ranks);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t t = 0; t < vocabulary; t++) row_of(&b, row)[t] = 9 * noise((uint64_t)(row * vocabulary + t) + 1);
        b.tokens[2 * row] = (uint32_t)(cpa_mix64((uint64_t)row) % (uint64_t)vocabulary);
        b.top[row] = (int32_t)(row % 22) - 1;
    }
    return b;
}

static void batch_free(batch *b) {
    free(b->logits);
    free(b->tokens);
    free(b->top);
    free(b->ranks);
}

static void run(batch *b) {
    cpa_test_device_open(2, &device, &stream);
    float *logits = cpa_test_upload(stream, b->logits, b->rows * (b->vocabulary + PAD) * 4);
    uint32_t *tokens = cpa_test_upload(stream, b->tokens, 8 * b->rows);
    int32_t *top = b->top ? cpa_test_upload(stream, b->top, 4 * b->rows) : NULL;
    cpa_token_ranks *ranks = cpa_test_upload(stream, b->ranks, b->rows * (int64_t)sizeof *b->ranks);
    const cpa_rank_tokens_args args = {
        .size = sizeof args,
        .rows = b->rows,
        .vocabulary = b->vocabulary,
        .logits = logits,
        .logits_stride = b->vocabulary + PAD,
        .tokens = tokens,
        .tokens_stride = 2,
        .top = top,
        .ranks = ranks,
        .logprobs = (float *)(void *)(tokens + 1),
        .logprobs_stride = 2,
    };
    CU_ASSERT_EQUAL(cpa_rank_tokens(&args, stream), CPA_OK);
    cpa_test_download(stream, b->ranks, ranks, b->rows * (int64_t)sizeof *b->ranks);
    cpa_test_download(stream, b->tokens, tokens, 8 * b->rows);
    void *const used[] = {logits, tokens, ranks, top};
    for (int i = 0; i < 3 + (top != NULL); i++) cpa_test_free(stream, used[i]);
    cpa_test_device_close(device, stream);
}

static int is_near(float found, double expected) {
    return isinf(expected) ? isinf(found) && found < 0 : fabs((double)found - expected) <= 1e-5 * (1 + fabs(expected));
}

/* Whether a row is what float64 says; `top` is what it was asked for. */
static int is_right(const batch *b, int64_t row, int32_t top) {
    const float *l = row_of(b, row);
    const cpa_token_ranks *found = &b->ranks[row];
    const uint32_t token = b->tokens[2 * row];
    double sum = 0;
    int64_t larger = 0;
    float written;
    for (int64_t t = 0; t < b->vocabulary; t++) {
        sum += exp((double)l[t]);
        larger += l[t] > l[token];
    }
    memcpy(&written, &b->tokens[2 * row + 1], sizeof written);
    int right = is_near(found->logprob, (double)l[token] - log(sum)) && found->rank == larger + 1 &&
                memcmp(&written, &found->logprob, sizeof written) == 0;
    for (int32_t i = 0; i < CPA_MOST_TOP_LOGPROBS; i++) {
        const cpa_token_logprob *next = &found->top[i];
        if (i >= top || i >= b->vocabulary) {
            right &= next->token == CPA_NO_TOKEN && isnan(next->logprob);
            continue;
        }
        int64_t before = 0; /* it is the i-th by logit, then by id */
        right &= next->token < b->vocabulary && is_near(next->logprob, (double)l[next->token] - log(sum));
        for (int64_t t = 0; right && t < b->vocabulary; t++)
            before += l[t] > l[next->token] || (l[t] == l[next->token] && t < next->token);
        right &= before == i;
    }
    return right;
}

static int count_wrong(const batch *b) {
    int wrong = 0;
    for (int64_t row = 0; row < b->rows; row++) wrong += !is_right(b, row, b->top ? b->top[row] : 0);
    return wrong;
}

static void ranks_are_those_of_float64(void) {
    const int64_t vocabularies[] = {1, 7, 20, 511, 512, 513, 5137, 128256};
    for (size_t v = 0; v < sizeof vocabularies / sizeof *vocabularies; v++) {
        batch b = batch_of(v < 7 ? 45 : 3, vocabularies[v]);
        if (v == 7) b.top[0] = b.top[1] = 20;
        run(&b);
        CU_ASSERT_EQUAL(count_wrong(&b), 0);
        batch_free(&b);
    }
}

/* Equal logits, those of -infinity and -0 among them, come in the order of their tokens. All that one thread of a
 * device looks at may be the best of all. */
static void equal_logits_come_in_order(void) {
    enum { ROWS = 5, VOCABULARY = 16384 };
    batch b = batch_of(ROWS, VOCABULARY);
    for (int64_t t = 0; t < VOCABULARY; t++) {
        row_of(&b, 0)[t] = 2;
        row_of(&b, 1)[t] = t % 3 ? -INFINITY : t < 9 ? 1 : -INFINITY;
        row_of(&b, 2)[t] = t % 2 ? -0.0f : 0.0f;
        if (t % 512 == 7) row_of(&b, 3)[t] = 20 + (float)(t / 512);
        row_of(&b, 4)[t] = (float)(t % 4);
    }
    for (int row = 0; row < ROWS; row++) b.top[row] = 20;
    b.tokens[2 * 1] = 1; /* whose logit is -infinity */
    run(&b);
    CU_ASSERT_EQUAL(count_wrong(&b), 0);
    CU_ASSERT_EQUAL(b.ranks[1].rank, 4);
    CU_ASSERT_EQUAL(b.ranks[3].top[19].token, 512 * (31 - 19) + 7);
    batch_free(&b);
}

static void rows_without_a_distribution_have_no_ranks(void) {
    enum { ROWS = 6, VOCABULARY = 700 };
    batch b = batch_of(ROWS, VOCABULARY);
    for (int row = 0; row < ROWS; row++) b.top[row] = 20, b.tokens[2 * row] = 5;
    row_of(&b, 0)[699] = NAN;
    row_of(&b, 1)[0] = -NAN;
    row_of(&b, 2)[80] = INFINITY;
    for (int t = 0; t < VOCABULARY; t++) row_of(&b, 3)[t] = -INFINITY;
    b.tokens[2 * 4] = VOCABULARY;
    b.tokens[2 * 5] = CPA_NO_TOKEN;
    run(&b);
    for (int row = 0; row < ROWS; row++) {
        CU_ASSERT(isnan(b.ranks[row].logprob) && b.ranks[row].rank == 0);
        for (int i = 0; i < 20; i++)
            CU_ASSERT((b.ranks[row].top[i].token == CPA_NO_TOKEN) == (row < 4) &&
                      isnan(b.ranks[row].top[i].logprob) == (row < 4));
    }
    batch_free(&b);
}

static void no_top_is_none(void) {
    batch b = batch_of(9, 300);
    free(b.top);
    b.top = NULL;
    run(&b);
    CU_ASSERT_EQUAL(count_wrong(&b), 0);
    batch_free(&b);
}

static const cpa_test tests[] = {
    {"ranks are those of float64", ranks_are_those_of_float64},
    {"equal logits come in order", equal_logits_come_in_order},
    {"rows without a distribution have no ranks", rows_without_a_distribution_have_no_ranks},
    {"no top is none", no_top_is_none},
};
CPA_DEVICE_TEST_MAIN("rank_tokens", tests)
