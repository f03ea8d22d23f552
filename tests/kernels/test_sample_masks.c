/* sample with masks and biases: what a mask leaves out is never drawn and the rest as often as it should be, by a
 * reference in float64; and the back ends draw the same. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/hash.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { MASKS = 3, BIASES = 8 };

/* What one row asks for. */
typedef struct rules {
    float temperature, top_p, min_p, presence;
    int32_t top_k, mask, first_bias, biases;
} rules;

/* Rows of one vocabulary; all of it in host memory. */
typedef struct batch {
    int64_t rows, vocabulary, words;
    float *logits;
    rules *rules;
    uint32_t *masks, *in_output; /* [MASKS, words], [words] */
    uint32_t bias_tokens[BIASES];
    float bias_values[BIASES];
    uint32_t *tokens; /* results */
    float *logprobs;
} batch;

static void *allocate(int64_t n, size_t bytes) {
    void *memory = calloc((size_t)n + 1, bytes);
    if (!memory) abort();
    return memory;
}

/* Uniform in [-1, 1). */
static float noise(uint64_t seed, uint64_t i) {
    return (float)(int32_t)(cpa_mix64(cpa_mix64(seed) + i * CPA_GOLDEN) >> 40) * 0x1p-23f - 1;
}

/* Mask 0 has two tokens of three, mask 1 every 17th, mask 2 none; no token has more than one bias. */
static batch batch_of(int64_t rows, int64_t vocabulary) {
    batch b = {.rows = rows, .vocabulary = vocabulary, .words = (vocabulary + 31) / 32};
    b.logits = allocate(rows * vocabulary, sizeof *b.logits);
    b.rules = allocate(rows, sizeof *b.rules);
    b.masks = allocate(MASKS * b.words, sizeof *b.masks);
    b.in_output = allocate(b.words, sizeof *b.in_output);
    b.tokens = allocate(rows, sizeof *b.tokens);
    b.logprobs = allocate(rows, sizeof *b.logprobs);
    for (int64_t t = 0; t < vocabulary; t++) {
        if (t % 3) b.masks[t / 32] |= 1u << (t % 32);
        if (t % 17 == 4) b.masks[b.words + t / 32] |= 1u << (t % 32);
        if (t % 5 == 2) b.in_output[t / 32] |= 1u << (t % 32);
    }
    for (int i = 0; i < BIASES; i++) {
        b.bias_tokens[i] = (uint32_t)(1 + i * (vocabulary - 2) / (BIASES - 1));
        b.bias_values[i] = i % 3 == 2 ? -INFINITY : i % 2 ? 1.5f : -2;
    }
    return b;
}

static void batch_free(batch *b) {
    void *const arrays[] = {b->logits, b->rules, b->masks, b->in_output, b->tokens, b->logprobs};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
}

/* A member of the rules of all rows, on the device. */
static void *member(cpa_stream *on, const batch *b, size_t offset, void **memory, int *used) {
    uint32_t *values = allocate(b->rows, sizeof *values);
    for (int64_t i = 0; i < b->rows; i++) memcpy(&values[i], (char *)&b->rules[i] + offset, sizeof *values);
    void *sent = memory[(*used)++] = cpa_test_upload(on, values, b->rows * 4);
    free(values);
    return sent;
}
#define MEMBER(name) member(on, b, offsetof(rules, name), memory, &used)

static void *send(cpa_stream *on, const void *host, int64_t bytes, void **memory, int *used) {
    return memory[(*used)++] = cpa_test_upload(on, host, bytes);
}

static void run_on(cpa_stream *on, batch *b) {
    void *memory[24];
    int used = 0;
    int64_t *position = allocate(b->rows, sizeof *position);
    int32_t *sequence = allocate(b->rows, sizeof *sequence);
    for (int64_t i = 0; i < b->rows; i++) position[i] = i;
    cpa_sample_args args = {
        .size = sizeof args,
        .rows = b->rows,
        .vocabulary = b->vocabulary,
        .logits = send(on, b->logits, b->rows * b->vocabulary * 4, memory, &used),
        .temperature = MEMBER(temperature),
        .top_k = MEMBER(top_k),
        .top_p = MEMBER(top_p),
        .min_p = MEMBER(min_p),
        .presence = MEMBER(presence),
        .position = send(on, position, b->rows * 8, memory, &used),
        .in_output = send(on, b->in_output, b->words * 4, memory, &used),
        .sequence = send(on, sequence, b->rows * 4, memory, &used),
        .sequences = 1,
        .tokens = send(on, b->tokens, b->rows * 4, memory, &used),
        .logprobs = send(on, b->logprobs, b->rows * 4, memory, &used),
        .masks = send(on, b->masks, MASKS * b->words * 4, memory, &used),
        .mask_index = MEMBER(mask),
        .n_masks = MASKS,
        .bias_tokens = send(on, b->bias_tokens, sizeof b->bias_tokens, memory, &used),
        .bias_values = send(on, b->bias_values, sizeof b->bias_values, memory, &used),
        .bias_first = MEMBER(first_bias),
        .bias_count = MEMBER(biases),
        .bias_entries = BIASES,
    };
    CU_ASSERT_EQUAL(cpa_sample(&args, on), CPA_OK);
    cpa_test_download(on, b->tokens, args.tokens, b->rows * 4);
    cpa_test_download(on, b->logprobs, args.logprobs, b->rows * 4);
    while (used > 0) cpa_test_free(on, memory[--used]);
    free(sequence);
    free(position);
}

static void run(batch *b) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(2, &device, &stream);
    run_on(stream, b);
    cpa_test_device_close(device, stream);
}

/* ---- the reference, in float64 ---- */

static int has_bit(const uint32_t *bits, int64_t i) {
    return bits[i / 32] >> i % 32 & 1;
}

/* The logit of a token by the rules of a row; -infinity where it may not be drawn. */
static double adjusted(const batch *b, int64_t row, int64_t token) {
    const rules *r = &b->rules[row];
    double l = (double)b->logits[row * b->vocabulary + token];
    for (int32_t i = r->first_bias; i < r->first_bias + r->biases; i++)
        if ((int64_t)b->bias_tokens[i] == token) l += (double)b->bias_values[i];
    if (has_bit(b->in_output, token)) l -= (double)r->presence;
    return r->mask >= 0 && !has_bit(b->masks + r->mask * b->words, token) ? -INFINITY : l;
}

/* The probability of each token. Logits are far enough apart that top_k, top_p and min_p are clear. */
static void expect(const batch *b, int64_t row, double *p) {
    const rules *r = &b->rules[row];
    const int64_t n = b->vocabulary;
    double *l = allocate(n, sizeof *l), largest = -INFINITY, total = 0, kept = 0;
    for (int64_t i = 0; i < n; i++) {
        l[i] = adjusted(b, row, i);
        largest = fmax(largest, l[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t larger = 0;
        for (int64_t j = 0; j < n; j++) larger += l[j] > l[i];
        const int goes = r->temperature > 0 ? r->top_k > 0 && larger >= r->top_k : larger > 0;
        p[i] = goes ? 0 : r->temperature > 0 ? exp((l[i] - largest) / (double)r->temperature) : 1;
        total += p[i];
    }
    for (int64_t i = 0; i < n; i++) {
        double larger = 0;
        for (int64_t j = 0; j < n; j++) larger += l[j] > l[i] ? fabs(p[j]) : 0;
        const int goes =
            r->temperature > 0 && ((r->top_p > 0 && larger >= (double)r->top_p * total) || p[i] < (double)r->min_p);
        kept += goes ? 0 : p[i];
        if (goes) p[i] = -p[i]; /* its size still counts above */
    }
    for (int64_t i = 0; i < n; i++) p[i] = p[i] > 0 ? p[i] / kept : 0;
    free(l);
}

static double log_softmax(const batch *b, int64_t row, uint32_t token) {
    const float *l = b->logits + row * b->vocabulary;
    double sum = 0;
    for (int64_t t = 0; t < b->vocabulary; t++) sum += exp((double)l[t]);
    return (double)l[token] - log(sum);
}

/* Pearson's statistic of counts that should be p * draws, less its mean, in its standard deviations; infinity where
 * something was drawn that cannot be. */
static double surprise(const int64_t *counts, const double *p, int64_t n, int64_t draws) {
    double chi = 0, freedom = -1;
    for (int64_t i = 0; i < n; i++) {
        const double want = p[i] * (double)draws, off = (double)counts[i] - want;
        if (p[i] == 0 && counts[i]) return INFINITY;
        if (p[i] == 0) continue;
        chi += off * off / want;
        freedom++;
    }
    return freedom > 0 ? (chi - freedom) / sqrt(2 * freedom) : 0;
}

/* ---- tests ---- */

static void masked_tokens_have_probability_0_and_the_rest_is_drawn_by_the_softmax(void) {
    enum { TOKENS = 45, DRAWS = 15000 };
    static const rules RULES[] = {
        {1, 0, 0, 0, 0, 0, 0, 0},       {0.7f, 0, 0, 0, 0, 1, 0, 0},    {1, 0, 0, 0, 5, 0, 0, 0},
        {1, 0.6f, 0, 0, 0, 0, 0, 0},    {1, 0, 0.2f, 0, 0, 0, 0, 0},    {0.8f, 0.8f, 0.05f, 0, 9, 0, 0, 0},
        {1, 0, 0, 0, 0, -1, 0, BIASES}, {1.2f, 0.9f, 0, 0, 0, 0, 2, 5}, {1, 0, 0, 1.25f, 12, 0, 0, BIASES},
        {0, 0, 0, 0, 0, 0, 0, 0},       {0, 0, 0, 1.25f, 0, 1, 1, 7},   {1, 0, 0, 0, 40, 1, 0, 0},
        {1, 0, 0, 0, 0, MASKS, 0, 0},   {1, 0, 0, 0, 0, 0, -1, 4},      {1, 0, 0, 0, 0, 0, 4, BIASES},
    };
    for (size_t r = 0; r < sizeof RULES / sizeof *RULES; r++) {
        int64_t counts[TOKENS] = {0};
        double p[TOKENS];
        batch b = batch_of(DRAWS, TOKENS);
        for (int64_t i = 0; i < DRAWS * TOKENS; i++) b.logits[i] = 2 * noise(7, (uint64_t)(i % TOKENS));
        for (int64_t i = 0; i < DRAWS; i++) b.rules[i] = RULES[r];
        run(&b);
        /* Of masks and biases that are not there, none counts. */
        if (b.rules[0].mask >= MASKS) b.rules[0].mask = -1;
        if (b.rules[0].first_bias < 0 || b.rules[0].first_bias + b.rules[0].biases > BIASES) b.rules[0].biases = 0;
        expect(&b, 0, p);
        for (int64_t i = 0; i < DRAWS; i++) counts[b.tokens[i] < TOKENS ? b.tokens[i] : 0]++;
        CPA_ASSERT_ORDER(surprise(counts, p, TOKENS, DRAWS), <, 4);
        /* Of the logits as they are, over all tokens. */
        for (int64_t i = 0; i < 100; i++)
            CPA_ASSERT_ORDER(fabs((double)b.logprobs[i] - log_softmax(&b, i, b.tokens[i])), <, 1e-5);
        batch_free(&b);
    }
}

/* Rows of all kinds over a vocabulary that is no multiple of anything. */
static batch mixed_batch(int64_t rows, int64_t vocabulary) {
    batch b = batch_of(rows, vocabulary);
    for (int64_t i = 0; i < rows; i++) {
        const uint64_t n = (uint64_t)i;
        for (int64_t t = 0; t < vocabulary; t++) b.logits[i * vocabulary + t] = 4 * noise(n, (uint64_t)t);
        b.rules[i] = (rules){.temperature = (float)(n % 5) * 0.4f,
                             .top_p = n % 3 == 0 ? 0.9f : 0,
                             .min_p = n % 4 == 1 ? 0.05f : 0,
                             .presence = n % 6 == 4 ? 0.5f : 0,
                             .top_k = n % 7 == 2 ? 50 : 0,
                             .mask = (int32_t)(n % 3) - 1,
                             .first_bias = (int32_t)(n % 4),
                             .biases = (int32_t)(n % 5)};
    }
    return b;
}

static void every_back_end_draws_the_same(void) {
    enum { ROWS = 300, VOCABULARY = 9133 };
    const cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST, .threads = 2};
    cpa_device *host;
    cpa_stream *on_host;
    CU_ASSERT_EQUAL_FATAL(cpa_device_open(&options, &host, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_stream_create(host, &on_host, NULL), CPA_OK);
    batch here = mixed_batch(ROWS, VOCABULARY), there = mixed_batch(ROWS, VOCABULARY);
    run(&here);
    run_on(on_host, &there);
    CU_ASSERT_EQUAL(memcmp(here.tokens, there.tokens, ROWS * sizeof *here.tokens), 0);
    for (int64_t i = 0; i < ROWS; i++) CU_ASSERT(isfinite(adjusted(&here, i, here.tokens[i])));
    batch_free(&there);
    batch_free(&here);
    cpa_stream_destroy(on_host);
    cpa_device_close(host);
}

static void a_mask_of_none_gives_no_token_and_a_nan_shows_through_it(void) {
    enum { ROWS = 6, VOCABULARY = 300 };
    batch b = batch_of(ROWS, VOCABULARY);
    for (int64_t i = 0; i < ROWS * VOCABULARY; i++) b.logits[i] = noise(1, (uint64_t)i);
    for (int64_t i = 0; i < ROWS; i++) b.rules[i] = (rules){.temperature = i % 2 ? 1 : 0, .mask = i < 2 ? 2 : 0};
    for (int64_t i = 2; i < 4; i++) b.logits[i * VOCABULARY + 3] = NAN; /* which mask 0 leaves out */
    for (int64_t i = 4; i < 6; i++) b.logits[i * VOCABULARY + 3] = INFINITY;
    run(&b);
    for (int64_t i = 0; i < 4; i++) CU_ASSERT_EQUAL(b.tokens[i], CPA_NO_TOKEN);
    for (int64_t i = 4; i < 6; i++) CU_ASSERT(b.tokens[i] < VOCABULARY && has_bit(b.masks, b.tokens[i]));
    batch_free(&b);
}

static const cpa_test tests[] = {
    {"masked tokens have probability 0, and the rest is drawn by the softmax",
     masked_tokens_have_probability_0_and_the_rest_is_drawn_by_the_softmax},
    {"every back end draws the same", every_back_end_draws_the_same},
    {"a mask of none gives no token, and a NaN shows through it",
     a_mask_of_none_gives_no_token_and_a_nan_shows_through_it},
};
CPA_DEVICE_TEST_MAIN("sample by masks", tests)
