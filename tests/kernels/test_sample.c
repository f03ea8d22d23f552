/* sample and mark_tokens: which tokens stay, how often each is drawn, and that a draw depends on its logits, seed and
 * position alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/hash.h"
#include "kernels/draw.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* A batch in host memory; what is NULL is not given. All rows have a stride of vocabulary + PAD logits. */
enum { PAD = 3 };
typedef struct batch {
    int64_t rows, vocabulary;
    float *logits;
    float *temperature, *top_p, *min_p, *repetition, *presence, *frequency;
    int32_t *top_k;
    uint64_t *seed;
    int64_t *position, *given;
    int64_t sequences;
    uint32_t *in_prompt, *in_output, *output_counts; /* one sequence more than there are */
    int32_t *sequence;
    uint32_t *path_tokens;
    int32_t *path_parents, *path_ends;
    int64_t path_entries;
    uint32_t *tokens; /* results */
    float *logprobs;
} batch;

static void *allocate(int64_t n, size_t bytes) {
    void *memory = calloc((size_t)n + 1, bytes);
    if (!memory) abort();
    return memory;
}

/* Logits of NaN, temperature 1, position i. */
static batch batch_of(int64_t rows, int64_t vocabulary) {
    batch b = {.rows = rows, .vocabulary = vocabulary};
    b.logits = allocate(rows * (vocabulary + PAD), sizeof *b.logits);
    memset(b.logits, 0xff, (size_t)(rows * (vocabulary + PAD)) * sizeof *b.logits);
    b.temperature = allocate(rows, sizeof *b.temperature);
    b.position = allocate(rows, sizeof *b.position);
    b.tokens = allocate(rows, sizeof *b.tokens);
    b.logprobs = allocate(rows, sizeof *b.logprobs);
    for (int64_t i = 0; i < rows; i++) b.temperature[i] = 1, b.position[i] = i;
    return b;
}

static void batch_free(batch *b) {
    void *const arrays[] = {b->logits,      b->temperature,  b->top_p,     b->min_p,     b->repetition,
                            b->presence,    b->top_k,        b->seed,      b->position,  b->given,
                            b->tokens,      b->logprobs,     b->in_prompt, b->in_output, b->sequence,
                            b->path_tokens, b->path_parents, b->path_ends, b->frequency, b->output_counts};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
}

static float *row_of(const batch *b, int64_t row) {
    return b->logits + row * (b->vocabulary + PAD);
}

static void fill_rows(batch *b, const float *logits) {
    for (int64_t row = 0; row < b->rows; row++) memcpy(row_of(b, row), logits, (size_t)b->vocabulary * sizeof *logits);
}

/* Uniform in [-1, 1). */
static float noise(uint64_t seed, uint64_t i) {
    return (float)(int32_t)(cpa_mix64(cpa_mix64(seed) + i * CPA_GOLDEN) >> 40) * 0x1p-23f - 1;
}

static void *send(cpa_stream *on, const void *host, int64_t bytes, void **memory, int *used) {
    return host ? memory[(*used)++] = cpa_test_upload(on, host, bytes) : NULL;
}

/* Samples on the stream's device. Tokens and log-probabilities come interleaved. */
static void run_on(cpa_stream *on, batch *b) {
    void *memory[22];
    int used = 0;
    const int64_t n = b->rows, words = (b->vocabulary + 31) / 32;
    uint32_t *drawn = allocate(2 * n, sizeof *drawn);
    uint32_t *out = send(on, drawn, 8 * n, memory, &used);
    cpa_sample_args args = {
        .size = sizeof args,
        .rows = n,
        .vocabulary = b->vocabulary,
        .logits = send(on, b->logits, n * (b->vocabulary + PAD) * 4, memory, &used),
        .logits_stride = b->vocabulary + PAD,
        .temperature = send(on, b->temperature, n * 4, memory, &used),
        .top_k = send(on, b->top_k, n * 4, memory, &used),
        .top_p = send(on, b->top_p, n * 4, memory, &used),
        .min_p = send(on, b->min_p, n * 4, memory, &used),
        .repetition = send(on, b->repetition, n * 4, memory, &used),
        .presence = send(on, b->presence, n * 4, memory, &used),
        .seed = send(on, b->seed, n * 8, memory, &used),
        .position = send(on, b->position, n * 8, memory, &used),
        .given = send(on, b->given, n * 8, memory, &used),
        .in_prompt = send(on, b->in_prompt, (b->sequences + 1) * words * 4, memory, &used),
        .in_output = send(on, b->in_output, (b->sequences + 1) * words * 4, memory, &used),
        .sequence = send(on, b->sequence, n * 4, memory, &used),
        .sequences = b->sequences,
        .path_tokens = send(on, b->path_tokens, b->path_entries * 4, memory, &used),
        .path_parents = send(on, b->path_parents, b->path_entries * 4, memory, &used),
        .path_ends = send(on, b->path_ends, n * 4, memory, &used),
        .path_entries = b->path_entries,
        .frequency = send(on, b->frequency, n * 4, memory, &used),
        .output_counts = send(on, b->output_counts, (b->sequences + 1) * b->vocabulary * 4, memory, &used),
        .tokens = out,
        .logprobs = (float *)(void *)(out + 1),
        .tokens_stride = 2,
        .logprobs_stride = 2,
    };
    CU_ASSERT_EQUAL(cpa_sample(&args, on), CPA_OK);
    cpa_test_download(on, drawn, out, 8 * n);
    for (int64_t i = 0; i < n; i++) {
        b->tokens[i] = drawn[2 * i];
        memcpy(&b->logprobs[i], &drawn[2 * i + 1], sizeof *b->logprobs);
    }
    while (used > 0) cpa_test_free(on, memory[--used]);
    free(drawn);
}

static void run(batch *b) {
    cpa_test_device_open(2, &device, &stream);
    run_on(stream, b);
    cpa_test_device_close(device, stream);
}

/* ---- frequencies ---- */

/* What all rows of a batch ask for. */
typedef struct rules {
    float temperature, top_p, min_p;
    int32_t top_k;
} rules;

static void set_rules(batch *b, rules r) {
    b->top_p = allocate(b->rows, sizeof *b->top_p);
    b->min_p = allocate(b->rows, sizeof *b->min_p);
    b->top_k = allocate(b->rows, sizeof *b->top_k);
    for (int64_t i = 0; i < b->rows; i++) {
        b->temperature[i] = r.temperature;
        b->top_p[i] = r.top_p;
        b->min_p[i] = r.min_p;
        b->top_k[i] = r.top_k;
    }
}

/* The probability of each token in float64: 0 for those that go. */
static void expect(const float *logits, int n, rules r, double *p) {
    double largest = -INFINITY, total = 0, kept = 0;
    for (int i = 0; i < n; i++) largest = fmax(largest, (double)logits[i]);
    for (int i = 0; i < n; i++) {
        int larger = 0;
        for (int j = 0; j < n; j++) larger += logits[j] > logits[i];
        p[i] = r.top_k && larger >= r.top_k ? 0 : exp(((double)logits[i] - largest) / (double)r.temperature);
        total += p[i];
    }
    for (int i = 0; i < n; i++) {
        double larger = 0; /* that the larger ones have together */
        for (int j = 0; j < n; j++) larger += logits[j] > logits[i] ? fabs(p[j]) : 0;
        const int goes = (r.top_p > 0 && larger >= (double)r.top_p * total) || p[i] < (double)r.min_p;
        kept += goes ? 0 : p[i];
        if (goes) p[i] = -p[i]; /* its size still counts above */
    }
    for (int i = 0; i < n; i++) p[i] = p[i] > 0 ? p[i] / kept : 0;
}

/* Pearson's statistic of counts that should be p * draws, less its mean, in its standard deviations; infinity where
 * something was counted that cannot be. */
static double surprise(const int64_t *counts, const double *p, int n, int64_t draws) {
    double chi = 0, freedom = -1;
    for (int i = 0; i < n; i++) {
        const double want = p[i] * (double)draws, off = (double)counts[i] - want;
        if (p[i] == 0 && counts[i]) return INFINITY;
        if (p[i] == 0) continue;
        chi += off * off / want;
        freedom++;
    }
    return freedom > 0 ? (chi - freedom) / sqrt(2 * freedom) : 0;
}

enum { TOKENS = 24, DRAWS = 100000 };

static void tokens_are_drawn_as_often_as_the_softmax_says(void) {
    static const rules RULES[] = {{1, 0, 0, 0},    {1, 0, 1, 0},       {0.5f, 0, 0, 0}, {1.3f, 0.8f, 0, 0},
                                  {1, 0, 0.1f, 0}, {0.8f, 0.9f, 0, 5}, {1, 1, 0, 7},    {2, 0.6f, 0.5f, 12}};
    float logits[TOKENS];
    double p[TOKENS];
    for (int i = 0; i < TOKENS; i++) logits[i] = 2 * noise(7, (uint64_t)i);
    logits[5] = logits[6]; /* equal ones stay or go together */
    for (size_t r = 0; r < sizeof RULES / sizeof *RULES; r++) {
        int64_t counts[TOKENS] = {0};
        batch b = batch_of(DRAWS, TOKENS);
        fill_rows(&b, logits);
        set_rules(&b, RULES[r]);
        expect(logits, TOKENS, RULES[r], p);
        run(&b);
        for (int64_t i = 0; i < DRAWS; i++) counts[b.tokens[i] < TOKENS ? b.tokens[i] : 0]++;
        CPA_ASSERT_ORDER(surprise(counts, p, TOKENS, DRAWS), <, 4);
        batch_free(&b);
    }
}

/* Neighbouring positions, and neighbouring seeds, draw as if they knew nothing of each other. */
static void draws_are_independent(void) {
    enum { N = 6 };
    for (int by_seed = 0; by_seed < 2; by_seed++) {
        int64_t counts[N * N] = {0};
        double p[N * N];
        batch b = batch_of(DRAWS, N);
        for (int64_t i = 0; i < DRAWS; i++) memset(row_of(&b, i), 0, N * sizeof(float));
        b.seed = allocate(DRAWS, sizeof *b.seed);
        for (int64_t i = 0; i < DRAWS && by_seed; i++) b.seed[i] = (uint64_t)i, b.position[i] = 0;
        run(&b);
        for (int i = 0; i < N * N; i++) p[i] = 1.0 / (N * N);
        for (int64_t i = 1; i < DRAWS; i++) counts[b.tokens[i - 1] % N * N + b.tokens[i] % N]++;
        CPA_ASSERT_ORDER(surprise(counts, p, N * N, DRAWS - 1), <, 4);
        batch_free(&b);
    }
}

/* ---- sets ---- */

/* Draws from nearly equal logits: whatever may be drawn is drawn. */
static void check_set(int64_t vocabulary, rules r) {
    enum { ROWS = 1500 };
    batch b = batch_of(ROWS, vocabulary);
    float *logits = allocate(vocabulary, sizeof *logits);
    double *p = allocate(vocabulary, sizeof *p);
    int *seen = allocate(vocabulary, sizeof *seen), wrong = 0;
    for (int64_t i = 0; i < vocabulary; i++) logits[i] = i < 60 ? 0.2f * noise(3, (uint64_t)i) : -200;
    logits[10] = logits[11] = logits[12] = logits[13]; /* ties */
    fill_rows(&b, logits);
    set_rules(&b, r);
    expect(logits, (int)vocabulary, r, p);
    run(&b);
    for (int64_t i = 0; i < ROWS; i++) seen[b.tokens[i] < vocabulary ? b.tokens[i] : 0] = 1;
    for (int64_t i = 0; i < vocabulary; i++) wrong += seen[i] != (p[i] > 1e-30);
    CU_ASSERT_EQUAL(wrong, 0);
    free(seen);
    free(p);
    free(logits);
    batch_free(&b);
}

static void what_stays_is_exact(void) {
    for (int32_t k = 1; k <= 61; k += 4) check_set(80, (rules){1, 0, 0, k});
    for (int i = 1; i < 20; i += 2) check_set(100, (rules){1, (float)i / 20, 0, 0});
    check_set(1025, (rules){1, 0.501f, 0, 33});
    check_set(5137, (rules){1, 0, 0.9f, 0});
    check_set(5137, (rules){0.7f, 0.77f, 0.85f, 40});
    check_set(64, (rules){1, 1e-20f, 0, 0});
    check_set(64, (rules){1, 0, 0, INT32_MAX});
}

/* ---- penalties ---- */

static void penalties_lower_what_was_there(void) {
    enum { VOCABULARY = 70, ROWS = 8, WORDS = 3, SEQUENCES = 2 };
    const int32_t sequence[ROWS] = {0, 1, -1, SEQUENCES, 0, 0, INT32_MIN, 1};
    const float repetition[ROWS] = {2, 2, 2, 2, 0, 1, 2, 0.5f}, presence[ROWS] = {0, 0, 3, 3, 1.25f, 1.25f, 0, -4};
    batch b = batch_of(ROWS, VOCABULARY);
    b.sequences = SEQUENCES;
    b.sequence = allocate(ROWS, sizeof *b.sequence);
    b.repetition = allocate(ROWS, sizeof *b.repetition);
    b.presence = allocate(ROWS, sizeof *b.presence);
    b.in_prompt = allocate((SEQUENCES + 1) * WORDS, sizeof *b.in_prompt);
    b.in_output = allocate((SEQUENCES + 1) * WORDS, sizeof *b.in_output);
    memcpy(b.sequence, sequence, sizeof sequence);
    memcpy(b.repetition, repetition, sizeof repetition);
    memcpy(b.presence, presence, sizeof presence);
    b.in_prompt[0] = 1u << 3, b.in_prompt[2] = 1u << 2;                        /* sequence 0: tokens 3 and 66 */
    b.in_output[1] = 1u << 31;                                                 /* token 63 */
    b.in_prompt[WORDS] = b.in_output[WORDS] = 1u << 5;                         /* sequence 1: token 5, in both */
    b.in_prompt[SEQUENCES * WORDS] = b.in_output[SEQUENCES * WORDS] = 1u << 3; /* of none */
    for (int row = 0; row < ROWS; row++) {
        float *logits = row_of(&b, row);
        for (int t = 0; t < VOCABULARY; t++) logits[t] = -3;
        logits[3] = 4, logits[66] = 3.5f, logits[63] = 3, logits[5] = 2.5f, logits[20] = 1.8f;
        b.temperature[row] = 0;
    }
    row_of(&b, 7)[5] = -1; /* halved and lifted: 3.5 of sequence 1 */
    row_of(&b, 7)[3] = row_of(&b, 7)[66] = 3;
    run(&b);
    /* Row 0: 4, 3.5 and 3 become 2, 1.75 and 1.5. Row 1: 2.5 becomes 1.25. Rows 4 and 5: 3 becomes 1.75. */
    const uint32_t want[ROWS] = {5, 3, 3, 3, 3, 3, 3, 5};
    for (int row = 0; row < ROWS; row++) CU_ASSERT_EQUAL(b.tokens[row], want[row]);
    for (int row = 0; row < ROWS; row++) row_of(&b, row)[3] = row_of(&b, row)[66] = -5;
    for (int row = 0; row < ROWS; row++) b.repetition[row] = 0.25f; /* raises 3 to 12, and lowers -5 to -1.25 */
    b.presence[4] = 10.5f;
    run(&b);
    const uint32_t raised[ROWS] = {63, 5, 63, 63, 5, 63, 63, 5};
    for (int row = 0; row < 7; row++) CU_ASSERT_EQUAL(b.tokens[row], raised[row]);
    batch_free(&b);
}

/* Row i is of sequence i % SEQUENCES, with penalties of all signs; tokens of its output are there up to 9 times, and
 * once more on the path of every third row. */
static batch counted_batch(void) {
    enum { ROWS = 60, VOCABULARY = 1025, SEQUENCES = 3, WORDS = (VOCABULARY + 31) / 32, ENTRIES = 5 };
    const uint32_t path_tokens[ENTRIES] = {5, 9, 5, 700, 5};
    const int32_t path_parents[ENTRIES] = {-1, 0, 1, 2, 3};
    batch b = batch_of(ROWS, VOCABULARY);
    b.sequences = SEQUENCES;
    b.sequence = allocate(ROWS, sizeof *b.sequence);
    b.presence = allocate(ROWS, sizeof *b.presence);
    b.frequency = allocate(ROWS, sizeof *b.frequency);
    b.in_output = allocate((SEQUENCES + 1) * WORDS, sizeof *b.in_output);
    b.output_counts = allocate((SEQUENCES + 1) * VOCABULARY, sizeof *b.output_counts);
    b.path_tokens = allocate(ENTRIES, sizeof *b.path_tokens);
    b.path_parents = allocate(ENTRIES, sizeof *b.path_parents);
    b.path_ends = allocate(ROWS, sizeof *b.path_ends);
    b.path_entries = ENTRIES;
    memcpy(b.path_tokens, path_tokens, sizeof path_tokens);
    memcpy(b.path_parents, path_parents, sizeof path_parents);
    for (int s = 0; s < SEQUENCES; s++) {
        for (int t = 0; t < VOCABULARY; t++) {
            const uint32_t times = (uint32_t)(cpa_mix64((uint64_t)(s * VOCABULARY + t)) % 10);
            b.output_counts[s * VOCABULARY + t] = times;
            if (times) b.in_output[s * WORDS + t / 32] |= 1u << t % 32;
        }
    }
    for (int row = 0; row < ROWS; row++) {
        for (int t = 0; t < VOCABULARY; t++) row_of(&b, row)[t] = 4 * noise(50 + (uint64_t)row, (uint64_t)t);
        row_of(&b, row)[5] = row_of(&b, row)[9] = row_of(&b, row)[700] = 6 + (float)(row % 7);
        b.sequence[row] = row % SEQUENCES;
        b.temperature[row] = 0;
        b.presence[row] = 0.25f * (float)(row % 5 - 2);
        b.frequency[row] = 0.125f * (float)(row % 9 - 4);
        b.path_ends[row] = row % 3 ? -1 : row % 5;
    }
    return b;
}

/* The largest logit of a row in float64. */
static uint32_t best_of_counted(const batch *b, int64_t row) {
    uint32_t best = 0;
    double largest = -INFINITY;
    for (int64_t t = 0; t < b->vocabulary; t++) {
        int64_t times = b->output_counts[b->sequence[row] * b->vocabulary + t];
        for (int32_t at = b->path_ends[row]; at >= 0; at = b->path_parents[at]) times += b->path_tokens[at] == t;
        const double l = (double)row_of(b, row)[t] - (double)b->frequency[row] * (double)times -
                         (times > 0 ? (double)b->presence[row] : 0);
        if (l > largest) largest = l, best = (uint32_t)t;
    }
    return best;
}

static void frequency_counts_the_tokens_of_the_output(void) {
    batch b = counted_batch();
    int on_paths = 0;
    run(&b);
    for (int64_t row = 0; row < b.rows; row++) {
        CU_ASSERT_EQUAL(b.tokens[row], best_of_counted(&b, row));
        on_paths += b.path_ends[row] >= 0 && (b.tokens[row] == 5 || b.tokens[row] == 9);
    }
    CPA_ASSERT_ORDER(on_paths, >, 0);
    batch_free(&b);
}

/* A path through entries 4, 3 and 0; what is no path, or leads nowhere, is passed over. */
static void tokens_of_a_path_count_as_output(void) {
    enum { VOCABULARY = 40, ROWS = 7, ENTRIES = 6 };
    const uint32_t path_tokens[ENTRIES] = {7, 9, 9, 8, 6, UINT32_MAX};
    const int32_t path_parents[ENTRIES] = {-1, 0, 2, 0, 3, 5}, ends[ROWS] = {4, 3, 0, -1, ENTRIES, 2, 5};
    const uint32_t want[ROWS] = {9, 6, 6, 6, 6, 6, 6};
    batch b = batch_of(ROWS, VOCABULARY);
    b.presence = allocate(ROWS, sizeof *b.presence);
    b.path_tokens = allocate(ENTRIES, sizeof *b.path_tokens);
    b.path_parents = allocate(ENTRIES, sizeof *b.path_parents);
    b.path_ends = allocate(ROWS, sizeof *b.path_ends);
    b.path_entries = ENTRIES;
    memcpy(b.path_tokens, path_tokens, sizeof path_tokens);
    memcpy(b.path_parents, path_parents, sizeof path_parents);
    memcpy(b.path_ends, ends, sizeof ends);
    for (int row = 0; row < ROWS; row++) {
        for (int t = 0; t < VOCABULARY; t++) row_of(&b, row)[t] = -3;
        for (int t = 6; t < 10; t++) row_of(&b, row)[t] = (float)(10 - t);
        b.presence[row] = 3.5f;
        b.temperature[row] = 0;
    }
    run(&b);
    for (int row = 0; row < ROWS; row++) CU_ASSERT_EQUAL(b.tokens[row], want[row]);
    for (int row = 0; row < ROWS; row++) row_of(&b, row)[6] = -3;
    run(&b);
    const uint32_t without[ROWS] = {9, 9, 8, 7, 7, 7, 7};
    for (int row = 0; row < ROWS; row++) CU_ASSERT_EQUAL(b.tokens[row], without[row]);
    batch_free(&b);
}

static void mark_tokens_keeps_the_bitmaps(void) {
    enum { VOCABULARY = 70, WORDS = 3, SEQUENCES = 3, COUNT = 11, RESTARTS = 3 };
    const int32_t sequence[COUNT] = {0, 0, 2, 2, -1, SEQUENCES, 0, 0, 2, 2, 2}, restarts[RESTARTS] = {0, -1, SEQUENCES};
    const uint32_t tokens[COUNT] = {0, 69, 31, 32, 1, 1, VOCABULARY, UINT32_MAX, 33, 33, 33};
    const int32_t outputs[COUNT] = {0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    uint32_t prompt[SEQUENCES * WORDS], output[SEQUENCES * WORDS], counts[SEQUENCES * VOCABULARY];
    int wrong = 0;
    memset(counts, 0x33, sizeof counts);
    memset(prompt, 0x11, sizeof prompt);
    memset(output, 0x22, sizeof output);
    cpa_test_device_open(1, &device, &stream);
    cpa_mark_tokens_args args = {.size = sizeof args,
                                 .vocabulary = VOCABULARY,
                                 .sequences = SEQUENCES,
                                 .in_prompt = cpa_test_upload(stream, prompt, sizeof prompt),
                                 .in_output = cpa_test_upload(stream, output, sizeof output),
                                 .n_restarts = RESTARTS,
                                 .restarts = cpa_test_upload(stream, restarts, sizeof restarts),
                                 .count = COUNT,
                                 .sequence = cpa_test_upload(stream, sequence, sizeof sequence),
                                 .tokens = cpa_test_upload(stream, tokens, sizeof tokens),
                                 .outputs = cpa_test_upload(stream, outputs, sizeof outputs),
                                 .output_counts = cpa_test_upload(stream, counts, sizeof counts)};
    CU_ASSERT_EQUAL(cpa_mark_tokens(&args, stream), CPA_OK);
    cpa_test_download(stream, counts, args.output_counts, sizeof counts);
    for (int i = 0; i < SEQUENCES * VOCABULARY; i++) { /* 0's are cleared, and its token 69 counts again; 2's go on */
        const uint32_t is_more = i == 69 || i == 2 * VOCABULARY + 32 ? 1 : i == 2 * VOCABULARY + 33 ? 3 : 0;
        wrong += counts[i] != (i < VOCABULARY ? 0 : 0x33333333) + is_more;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_download(stream, prompt, args.in_prompt, sizeof prompt);
    cpa_test_download(stream, output, args.in_output, sizeof output);
    const uint32_t want_prompt[] = {1, 0, 0, 0x11111111, 0x11111111, 0x11111111, 0x91111111, 0x11111111, 0x11111111};
    const uint32_t want_output[] = {0, 0, 32, 0x22222222, 0x22222222, 0x22222222, 0x22222222, 0x22222223, 0x22222222};
    CU_ASSERT_EQUAL(memcmp(prompt, want_prompt, sizeof prompt), 0);
    CU_ASSERT_EQUAL(memcmp(output, want_output, sizeof output), 0); /* bit 33 % 32 = 1 was set */
    const void *const used[] = {args.in_prompt, args.in_output, args.restarts,     args.sequence,
                                args.tokens,    args.outputs,   args.output_counts};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(stream, (void *)(uintptr_t)used[i]);
    cpa_test_device_close(device, stream);
}

/* ---- what a draw depends on ---- */

/* Rows of all kinds, those of `first` on of a longer list. */
static batch mixed_batch(int64_t rows, int64_t first, int64_t vocabulary) {
    enum { SEQUENCES = 3 };
    const int64_t words = (vocabulary + 31) / 32;
    batch b = batch_of(rows, vocabulary);
    b.top_p = allocate(rows, sizeof *b.top_p);
    b.min_p = allocate(rows, sizeof *b.min_p);
    b.top_k = allocate(rows, sizeof *b.top_k);
    b.repetition = allocate(rows, sizeof *b.repetition);
    b.presence = allocate(rows, sizeof *b.presence);
    b.seed = allocate(rows, sizeof *b.seed);
    b.sequence = allocate(rows, sizeof *b.sequence);
    b.sequences = SEQUENCES;
    b.in_prompt = allocate((SEQUENCES + 1) * words, sizeof *b.in_prompt);
    b.in_output = allocate((SEQUENCES + 1) * words, sizeof *b.in_output);
    for (int64_t i = 0; i < SEQUENCES * words; i++) {
        b.in_prompt[i] = (uint32_t)cpa_mix64((uint64_t)i);
        b.in_output[i] = (uint32_t)cpa_mix64((uint64_t)(i + 1000));
    }
    for (int64_t i = 0; i < rows; i++) {
        const uint64_t n = (uint64_t)(first + i);
        for (int64_t t = 0; t < vocabulary; t++) row_of(&b, i)[t] = 4 * noise(n, (uint64_t)t);
        b.temperature[i] = (float)(n % 5) * 0.4f;
        b.top_p[i] = n % 3 == 0 ? 0.9f : 0;
        b.min_p[i] = n % 4 == 1 ? 0.05f : 0;
        b.top_k[i] = n % 7 == 2 ? 50 : 0;
        b.repetition[i] = n % 6 == 3 ? 1.1f : 0;
        b.presence[i] = n % 6 == 4 ? 0.5f : 0;
        b.seed[i] = n * n;
        b.position[i] = (int64_t)(n % 100) << 33;
        b.sequence[i] = (int32_t)(n % 4) - 1;
    }
    return b;
}

static void a_draw_is_the_same_in_any_batch(void) {
    enum { ROWS = 60, FIRST = 23, PART = 20, VOCABULARY = 1025 };
    batch whole = mixed_batch(ROWS, 0, VOCABULARY), part = mixed_batch(PART, FIRST, VOCABULARY);
    run(&whole);
    run(&part);
    CU_ASSERT_EQUAL(memcmp(whole.tokens + FIRST, part.tokens, PART * sizeof *part.tokens), 0);
    batch_free(&part);
    batch_free(&whole);
}

/* Draws are part of what a seed promises: this is the hash of those below, since the first version. */
#define KNOWN_DRAWS 0x8e1ddb6ff867b1a3u

static void every_back_end_draws_the_same(void) {
    enum { ROWS = 400, VOCABULARY = 1500 };
    const cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST, .threads = 2};
    cpa_device *host;
    cpa_stream *on_host;
    CU_ASSERT_EQUAL_FATAL(cpa_device_open(&options, &host, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_stream_create(host, &on_host, NULL), CPA_OK);
    batch here = mixed_batch(ROWS, 0, VOCABULARY), there = mixed_batch(ROWS, 0, VOCABULARY);
    uint64_t hash = CPA_HASH_START;
    run(&here);
    run_on(on_host, &there);
    CU_ASSERT_EQUAL(memcmp(here.tokens, there.tokens, ROWS * sizeof *here.tokens), 0);
    for (int i = 0; i < ROWS; i++) hash = cpa_hash_bytes(hash, &here.tokens[i], sizeof *here.tokens);
    CU_ASSERT_EQUAL(hash, KNOWN_DRAWS);
    batch_free(&there);
    batch_free(&here);
    here = counted_batch(), there = counted_batch();
    for (int i = 0; i < here.rows; i++) here.temperature[i] = there.temperature[i] = (float)(i % 3);
    run(&here);
    run_on(on_host, &there);
    CU_ASSERT_EQUAL(memcmp(here.tokens, there.tokens, (size_t)here.rows * sizeof *here.tokens), 0);
    batch_free(&there);
    batch_free(&here);
    cpa_stream_destroy(on_host);
    cpa_device_close(host);
}

static void exp_and_log_are_those_of_fp64(void) {
    int wrong = 0;
    for (int i = 0; i < 200000; i++) {
        const double x = -699.0 * pow(((double)i + 0.5) / 200000, 4),
                     y = ldexp(1 + ((double)i + 0.5) / 200000, i % 60 - 54);
        wrong += fabs(cpa_draw_exp(x) / exp(x) - 1) > 1e-15;
        wrong += fabs(cpa_draw_log(y) / log(y) - 1) > 1e-15;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(cpa_draw_exp(0), 1);
    CU_ASSERT_EQUAL(cpa_draw_exp(-INFINITY), 0);
    CU_ASSERT(cpa_draw_log(0x1p-53) < 0 && cpa_draw_log(1 - 0x1p-53) < 0);
    CPA_ASSERT_ORDER(fabs(cpa_draw_log(1 - 0x1p-53) + 0x1p-53), <, 1e-31);
}

/* ---- rows of their own ---- */

static void given_tokens_are_taken(void) {
    enum { ROWS = 4, VOCABULARY = 50 };
    batch b = batch_of(ROWS, VOCABULARY);
    b.given = allocate(ROWS, sizeof *b.given);
    const int64_t given[ROWS] = {17, VOCABULARY + 5, -1, 0};
    memcpy(b.given, given, sizeof given);
    for (int row = 0; row < 3; row++) {
        for (int t = 0; t < VOCABULARY; t++) row_of(&b, row)[t] = noise((uint64_t)row, (uint64_t)t);
    }
    b.temperature[2] = 0;
    run(&b); /* the logits of row 3 are NaN */
    uint32_t best = 0;
    double sum = 0;
    for (uint32_t t = 0; t < VOCABULARY; t++) {
        if (row_of(&b, 2)[t] > row_of(&b, 2)[best]) best = t;
        sum += exp((double)row_of(&b, 0)[t]);
    }
    CU_ASSERT_EQUAL(b.tokens[0], 17);
    CU_ASSERT_EQUAL(b.tokens[1], VOCABULARY + 5);
    CU_ASSERT_EQUAL(b.tokens[2], best);
    CU_ASSERT_EQUAL(b.tokens[3], 0);
    CU_ASSERT_DOUBLE_EQUAL(b.logprobs[0], (double)row_of(&b, 0)[17] - log(sum), 1e-5);
    CU_ASSERT(isnan(b.logprobs[1]) && isnan(b.logprobs[3]) && !isnan(b.logprobs[2]));
    batch_free(&b);
}

static void rows_without_a_distribution_have_no_token(void) {
    enum { ROWS = 8, VOCABULARY = 300 };
    batch b = batch_of(ROWS, VOCABULARY);
    for (int row = 0; row < ROWS; row++) {
        for (int t = 0; t < VOCABULARY; t++) row_of(&b, row)[t] = row == 3 ? -INFINITY : noise(1, (uint64_t)t);
    }
    row_of(&b, 0)[299] = NAN;
    row_of(&b, 1)[7] = INFINITY;
    row_of(&b, 2)[7] = NAN, row_of(&b, 2)[8] = INFINITY;
    for (int t = 1; t < VOCABULARY; t++) row_of(&b, 4)[t] = -INFINITY; /* one token is left */
    row_of(&b, 5)[9] = 3e38f, row_of(&b, 5)[10] = -3e38f;
    b.temperature[0] = b.temperature[1] = 0;
    run(&b);
    for (int row = 0; row < 4; row++) CU_ASSERT_EQUAL(b.tokens[row], CPA_NO_TOKEN);
    for (int row = 0; row < 4; row++) CU_ASSERT_TRUE(isnan(b.logprobs[row]));
    CU_ASSERT_EQUAL(b.tokens[4], 0);
    CU_ASSERT_EQUAL(b.logprobs[4], 0);
    CU_ASSERT_EQUAL(b.tokens[5], 9);
    CU_ASSERT(b.tokens[6] < VOCABULARY && b.tokens[7] < VOCABULARY);
    batch_free(&b);
}

static void numbers_out_of_range_change_nothing(void) {
    enum { ROWS = 64, VOCABULARY = 200 };
    const float strange[] = {NAN, -1, INFINITY, -INFINITY, 7, 0};
    batch plain = batch_of(ROWS, VOCABULARY), odd = batch_of(ROWS, VOCABULARY);
    float logits[VOCABULARY];
    for (int t = 0; t < VOCABULARY; t++) logits[t] = noise(2, (uint64_t)t);
    set_rules(&odd, (rules){1, 0, 0, INT32_MIN});
    odd.repetition = allocate(ROWS, sizeof *odd.repetition);
    odd.presence = allocate(ROWS, sizeof *odd.presence);
    odd.frequency = allocate(ROWS, sizeof *odd.frequency);
    for (int row = 0; row < ROWS; row++) {
        const float value = strange[row % 6];
        odd.top_p[row] = odd.min_p[row] = odd.repetition[row] = odd.presence[row] = odd.frequency[row] = value;
        plain.temperature[row] = row % 8 == 1 ? 0 : row % 8 == 2 ? 1e-30f : row % 8 == 3 ? 1e30f : 1;
        odd.temperature[row] = row % 8 == 1 ? strange[row % 5 % 4] : plain.temperature[row];
    }
    fill_rows(&plain, logits);
    fill_rows(&odd, logits);
    run(&plain);
    run(&odd);
    CU_ASSERT_EQUAL(memcmp(plain.tokens, odd.tokens, ROWS * sizeof *odd.tokens), 0);
    for (int row = 10; row < ROWS; row += 8) CU_ASSERT_EQUAL(plain.tokens[row], plain.tokens[1]); /* 1e-30: the best */
    batch_free(&odd);
    batch_free(&plain);
}

static const cpa_test tests[] = {
    {"tokens are drawn as often as the softmax says", tokens_are_drawn_as_often_as_the_softmax_says},
    {"draws are independent", draws_are_independent},
    {"what stays is exact", what_stays_is_exact},
    {"penalties lower what was there", penalties_lower_what_was_there},
    {"frequency counts the tokens of the output", frequency_counts_the_tokens_of_the_output},
    {"tokens of a path count as output", tokens_of_a_path_count_as_output},
    {"mark_tokens keeps the bitmaps", mark_tokens_keeps_the_bitmaps},
    {"a draw is the same in any batch", a_draw_is_the_same_in_any_batch},
    {"every back end draws the same", every_back_end_draws_the_same},
    {"exp and log are those of fp64", exp_and_log_are_those_of_fp64},
    {"given tokens are taken", given_tokens_are_taken},
    {"rows without a distribution have no token", rows_without_a_distribution_have_no_token},
    {"numbers out of range change nothing", numbers_out_of_range_change_nothing},
};
CPA_DEVICE_TEST_MAIN("sample", tests)
