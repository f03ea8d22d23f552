/* Keys and queries of an indexer, byte for byte against fp32 that does what cpattn/indexer.h says in its order; and
 * what the operators refuse. test_index_logits.c has the logits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/cpattn.h>

#include "base/convert.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/entry_oracle.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

enum {
    TOKENS = 11,
    POSITIONS = 50,
    BLOCK = 8,
    BLOCKS = 4,
    POISON = 0xff,
    NAN_TOKEN = 3,
    ZERO_TOKEN = 5,
    EDGE_TOKEN = 6
};
static const int64_t SLOTS[TOKENS] = {7, BLOCK *BLOCKS - 1, 0, 13, -1, 14, 15, -5, 16, 9, 1};
static const int64_t AT[TOKENS] = {0, 1, POSITIONS - 1, 20, 17, 17, 3, 9, POSITIONS, 30, 2}; /* one is outside */

typedef struct form {
    int32_t heads, dim; /* heads of queries */
    int32_t rotated, first, interleaved;
    int norm, hadamard, pow2;
    cpa_dtype dtype;
    cpa_index_format to;
    cpa_dtype weight_dtype;
    float floor;
    int pad; /* elements between rows */
} form;

static const form FORMS[] = {
    {64, 128, 64, 0, 0, 1, 1, 1, CPA_BF16, CPA_INDEX_FP8, CPA_F32, 0, 0},        /* DeepSeek V3.2 */
    {64, 128, 64, 64, 1, 1, 0, 0, CPA_BF16, CPA_INDEX_FP8, CPA_BF16, 1e-10f, 0}, /* V4, and vLLM's floor */
    {20, 128, 64, 64, 1, 1, 0, 1, CPA_BF16, CPA_INDEX_FP8, CPA_BF16, 0, 8},
    {33, 128, 64, 0, 0, 0, 0, 1, CPA_BF16, CPA_INDEX_FP8, CPA_F32, 0, 0},
    {6, 128, 64, 0, 0, 1, 1, 1, CPA_BF16, CPA_INDEX_FP8, CPA_F32, 0, 4},   /* not aligned to 16 bytes */
    {4, 128, 128, 0, 0, 1, 0, 0, CPA_BF16, CPA_INDEX_BF16, CPA_F32, 0, 8}, /* four heads, keys in bf16 */
    {3, 64, 32, 32, 0, 0, 1, 1, CPA_F32, CPA_INDEX_FP8, CPA_F32, 0, 16},
    {5, 32, 0, 0, 0, 1, 1, 0, CPA_F16, CPA_INDEX_FP8, CPA_F16, 0, 1},
    {2, 40, 6, 3, 1, 1, 0, 1, CPA_F32, CPA_INDEX_FP8, CPA_F32, 0, 3}, /* nothing is aligned */
    {7, 256, 64, 100, 0, 1, 1, 1, CPA_BF16, CPA_INDEX_FP8, CPA_F32, 0, 0},
    {1, 8, 8, 0, 0, 0, 0, 0, CPA_BF16, CPA_INDEX_BF16, CPA_F32, 0, 0},
    {64, 128, 64, 0, 0, 0, 1, 0, CPA_BF16, CPA_INDEX_MXFP4, CPA_BF16, 0, 0}, /* queries alone */
    {3, 256, 32, 32, 1, 0, 0, 0, CPA_F32, CPA_INDEX_MXFP4, CPA_F32, 0, 1},
    {5, 96, 0, 0, 0, 0, 0, 0, CPA_F16, CPA_INDEX_MXFP4, CPA_F32, 0, 0},
    {2, 32, 32, 0, 0, 0, 1, 0, CPA_BF16, CPA_INDEX_MXFP4, CPA_F32, 0, 0},
};
enum { FORM_COUNT = sizeof FORMS / sizeof *FORMS, MOST_DIM = 256 };

/* ---- the oracle ---- */

static float to_bf16(float x) {
    return cpa_from_bf16(cpa_to_bf16(x));
}

/* The second half onto the first, of n elements of x from `at` on in steps. */
static float fold(const float *x, int at, int step) {
    return step == MOST_DIM ? x[at] : fold(x, at, 2 * step) + fold(x, at + step, 2 * step);
}

static void norm(float *x, int n, const float *gamma, const float *beta, float eps) {
    float sums[MOST_DIM] = {0}, squares[MOST_DIM] = {0};
    memcpy(sums, x, (size_t)n * sizeof *x);
    const float mean = fold(sums, 0, 1) / (float)n;
    for (int i = 0; i < n; i++) {
        const float apart = x[i] - mean;
        squares[i] = apart * apart;
    }
    const float variance = fold(squares, 0, 1) / (float)n, inverse = 1.0f / sqrtf(variance + eps);
    for (int i = 0; i < n; i++) {
        const float apart = x[i] - mean, scaled = apart * inverse, weighed = scaled * gamma[i];
        x[i] = weighed + beta[i];
    }
}

static void rotate(const form *f, float *x, const float *table, int64_t position) {
    const int half = f->rotated / 2;
    for (int i = 0; i < f->dim && (position < 0 || position >= POSITIONS); i++) x[i] = NAN;
    for (int i = 0; i < half && position >= 0 && position < POSITIONS; i++) {
        const int a = f->first + (f->interleaved ? 2 * i : i), b = f->interleaved ? a + 1 : a + half;
        const float c = table[position * f->rotated + i], s = table[position * f->rotated + half + i];
        const float ac = x[a] * c, bs = x[b] * s, bc = x[b] * c, as = x[a] * s;
        x[a] = ac - bs;
        x[b] = bc + as;
    }
}

/* H_2n (a, b) = (H_n a + H_n b, H_n a - H_n b). */
static void sylvester(float *x, int n) {
    if (n == 1) return;
    sylvester(x, n / 2);
    sylvester(x + n / 2, n / 2);
    for (int i = 0; i < n / 2; i++) {
        const float a = x[i], b = x[i + n / 2];
        x[i] = a + b, x[i + n / 2] = a - b;
    }
}

static void finish(const form *f, float *x, const float *table, int64_t position) {
    if (f->rotated) rotate(f, x, table, position);
    for (int i = 0; i < f->dim; i++) x[i] = to_bf16(x[i]);
    if (!f->hadamard) return;
    const float scale = (float)(1 / sqrt((double)f->dim));
    sylvester(x, f->dim);
    for (int i = 0; i < f->dim; i++) x[i] = to_bf16(x[i] * scale);
}

/* The nearest of all codes, the even one of two. */
static uint8_t nearest_code(float x) {
    int best = 0;
    double distance = INFINITY;
    if (isnan(x)) return 0;
    for (int code = 0; code < 0x7f; code++) {
        const double value = code < 8 ? ldexp(code, -9) : ldexp(8 + code % 8, code / 8 - 10);
        const double apart = fabs(fabs((double)x) - value);
        if (apart < distance || (apart == distance && code % 2 == 0)) best = code, distance = apart;
    }
    return (uint8_t)(best | (signbit(x) ? 0x80 : 0));
}

static float codes_of(const form *f, const float *x, uint8_t *codes, int pow2) {
    float largest = f->floor == 0 ? 1e-4f : f->floor;
    for (int i = 0; i < f->dim; i++)
        if (isfinite(x[i]) && fabsf(x[i]) > largest) largest = fabsf(x[i]);
    float scale = largest / 448.0f;
    if (pow2) {
        int exponent;
        const float fraction = frexpf(scale, &exponent);
        scale = ldexpf(1, fraction == 0.5f ? exponent - 1 : exponent);
    }
    for (int i = 0; i < f->dim; i++) codes[i] = isinf(x[i]) ? (x[i] > 0 ? 0x7e : 0xfe) : nearest_code(x[i] / scale);
    return scale;
}

/* ---- inputs ---- */

static float *make_table(int32_t rotated) {
    const cpa_rope_config config = {.size = sizeof config, .dim = rotated, .theta = 1e4, .max_position = POSITIONS};
    float *table = malloc((size_t)(POSITIONS * rotated) * sizeof *table);
    CU_ASSERT_EQUAL_FATAL(cpa_rope_table(&config, table, NULL), CPA_OK);
    return table;
}

/* Peaky rows; one of zeros, one with no numbers in it, and one whose largest element is 448 times a power of two. */
static float *make_rows(const form *f, int64_t width, int64_t stride, void **on_device) {
    const int64_t bytes = cpa_dtype_bytes(f->dtype);
    float *x = malloc((size_t)(TOKENS * stride) * sizeof *x);
    char *rows = malloc((size_t)(TOKENS * stride * bytes));
    for (int64_t i = 0; i < TOKENS * stride; i++) {
        const int64_t token = i / stride, column = i % stride;
        x[i] = sinf((float)(i * 37 % 1009)) * (column % 23 == token ? 40.0f : 1.0f);
        if (token == ZERO_TOKEN) x[i] = 0;
        if (token == EDGE_TOKEN) x[i] = column % f->dim == 1 ? 7 : sinf((float)i);
        if (token == NAN_TOKEN && column == 2) x[i] = NAN;
        if (token == NAN_TOKEN && column == width - 1 && f->rotated == 0) x[i] = INFINITY;
        if (column >= width) x[i] = NAN;
    }
    cpa_narrow(rows, x, f->dtype, TOKENS * stride);
    cpa_widen(x, rows, f->dtype, TOKENS * stride);
    *on_device = cpa_test_upload(stream, rows, TOKENS * stride * bytes);
    free(rows);
    return x;
}

static cpa_rope rope_of(const form *f, const float *table) {
    return (cpa_rope){.table = f->rotated ? table : NULL,
                      .max_position = POSITIONS,
                      .dim = f->rotated,
                      .first = f->first,
                      .interleaved = f->interleaved};
}

static cpa_index_cache cache_of(const form *f, void *pool) {
    return (cpa_index_cache){.kv = {.k = pool,
                                    .dtype = f->to == CPA_INDEX_BF16 ? CPA_BF16 : CPA_FP8_E4M3,
                                    .block_size = BLOCK,
                                    .num_blocks = BLOCKS,
                                    .kv_heads = 1,
                                    .k_dim = f->dim,
                                    .v_dim = f->dim,
                                    .v_in_k = 1},
                             .hadamard = f->hadamard};
}

/* Bytes, but of bf16 any NaN for a NaN. */
static void check_bytes(const form *f, const void *want, const void *got, int64_t bytes) {
    const uint16_t *a = want, *b = got;
    if (f->to != CPA_INDEX_BF16) {
        CU_ASSERT_EQUAL(memcmp(want, got, (size_t)bytes), 0);
        return;
    }
    int wrong = 0;
    for (int64_t i = 0; i < bytes / 2; i++)
        wrong += a[i] != b[i] && !(isnan(cpa_from_bf16(a[i])) && isnan(cpa_from_bf16(b[i])));
    CU_ASSERT_EQUAL(wrong, 0);
}

/* ---- keys ---- */

static void expect_keys(const form *f, const float *k, int64_t stride, const float *gamma, const float *beta,
                        const float *table, char *pool) {
    const int64_t row = f->dim * (f->to == CPA_INDEX_BF16 ? 2 : 1), behind = f->to == CPA_INDEX_BF16 ? 0 : BLOCK * 4;
    for (int token = 0; token < TOKENS; token++) {
        float x[MOST_DIM];
        uint8_t codes[2 * MOST_DIM];
        if (SLOTS[token] < 0) continue;
        char *block = pool + SLOTS[token] / BLOCK * (BLOCK * row + behind);
        memcpy(x, k + token * stride, (size_t)f->dim * sizeof *x);
        if (f->norm) norm(x, f->dim, gamma, beta, 1e-6f);
        finish(f, x, table, AT[token]);
        if (f->to == CPA_INDEX_BF16) {
            cpa_narrow(codes, x, CPA_BF16, f->dim);
        } else {
            const float scale = codes_of(f, x, codes, f->pow2);
            memcpy(block + BLOCK * row + SLOTS[token] % BLOCK * 4, &scale, sizeof scale);
        }
        memcpy(block + SLOTS[token] % BLOCK * row, codes, (size_t)row);
    }
}

static void write_form(const form *f) {
    const int64_t stride = f->dim + f->pad;
    const int64_t bytes =
        BLOCKS * cpa_kv_block_bytes(f->to == CPA_INDEX_BF16 ? CPA_BF16 : CPA_FP8_E4M3, CPA_KEYS, 0, BLOCK, 1, f->dim);
    float gamma[MOST_DIM], beta[MOST_DIM];
    for (int i = 0; i < f->dim; i++) gamma[i] = 1 + 0.3f * cosf((float)i), beta[i] = 0.1f * sinf((float)(3 * i));
    void *k_device, *table_device = NULL;
    float *k = make_rows(f, f->dim, stride, &k_device), *table = f->rotated ? make_table(f->rotated) : NULL;
    char *want = malloc((size_t)bytes), *got = malloc((size_t)bytes);
    memset(want, POISON, (size_t)bytes);
    void *pool = cpa_test_upload(stream, want, bytes);
    void *gammas = cpa_test_upload(stream, gamma, (int64_t)sizeof *gamma * f->dim),
         *betas = cpa_test_upload(stream, beta, (int64_t)sizeof *beta * f->dim),
         *positions = cpa_test_upload(stream, AT, sizeof AT), *slots = cpa_test_upload(stream, SLOTS, sizeof SLOTS);
    if (table) table_device = cpa_test_upload(stream, table, POSITIONS * f->rotated * (int64_t)sizeof *table);
    const cpa_index_write_args args = {.size = sizeof args,
                                       .tokens = TOKENS,
                                       .dtype = f->dtype,
                                       .k = k_device,
                                       .k_row_stride = stride,
                                       .gamma = f->norm ? gammas : NULL,
                                       .beta = f->norm ? betas : NULL,
                                       .eps = 1e-6f,
                                       .rope = rope_of(f, table_device),
                                       .positions = positions,
                                       .slot_mapping = slots,
                                       .cache = cache_of(f, pool),
                                       .floor = f->floor,
                                       .scales_pow2 = f->pow2};
    expect_keys(f, k, stride, gamma, beta, table, want);
    CU_ASSERT_EQUAL(cpa_index_write(&args, stream), CPA_OK);
    cpa_test_download(stream, got, pool, bytes);
    check_bytes(f, want, got, bytes);
    void *const memory[] = {k_device, table_device, pool, gammas, betas, positions, slots};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
    free(got);
    free(want);
    free(table);
    free(k);
}

static void keys_have_the_bytes_of_the_definition(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < FORM_COUNT; i++)
        if (FORMS[i].to != CPA_INDEX_MXFP4) write_form(&FORMS[i]);
    cpa_test_device_close(device, stream);
}

/* Of so many tokens that whatever makes them makes several, one after another: rows, positions and so keys repeat. */
static void many_keys_are_as_few(void) {
    enum { MANY = 25013, PERIOD = 61 };
    const form *f = &FORMS[0];
    const int64_t bytes = (MANY + BLOCK - 1) / BLOCK * cpa_kv_block_bytes(CPA_FP8_E4M3, CPA_KEYS, 0, BLOCK, 1, f->dim);
    const int64_t elements = MANY * (int64_t)f->dim, block = BLOCK * (f->dim + 4);
    uint16_t *k = malloc((size_t)elements * sizeof *k);
    int64_t *positions = malloc(MANY * sizeof *positions), *slots = malloc(MANY * sizeof *slots);
    char *pool = malloc((size_t)bytes);
    float gamma[MOST_DIM], *table = make_table(f->rotated);
    for (int64_t i = 0; i < elements; i++)
        k[i] = cpa_to_bf16(sinf((float)(i % (PERIOD * f->dim))) * (i % f->dim == i / f->dim % PERIOD ? 40.0f : 1.0f));
    for (int64_t i = 0; i < MANY; i++) positions[i] = i % PERIOD % POSITIONS, slots[i] = MANY - 1 - i;
    for (int i = 0; i < f->dim; i++) gamma[i] = 1 + 0.3f * cosf((float)i);
    memset(pool, POISON, (size_t)bytes);
    cpa_test_device_open(2, &device, &stream);
    void *const memory[] = {cpa_test_upload(stream, k, elements * 2),
                            cpa_test_upload(stream, positions, MANY * (int64_t)sizeof *positions),
                            cpa_test_upload(stream, slots, MANY * (int64_t)sizeof *slots),
                            cpa_test_upload(stream, gamma, f->dim * (int64_t)sizeof *gamma),
                            cpa_test_upload(stream, table, POSITIONS * f->rotated * (int64_t)sizeof *table),
                            cpa_test_upload(stream, pool, bytes)};
    cpa_index_write_args args = {.size = sizeof args,
                                 .tokens = MANY,
                                 .dtype = CPA_BF16,
                                 .k = memory[0],
                                 .gamma = memory[3],
                                 .beta = memory[3],
                                 .eps = 1e-6f,
                                 .rope = rope_of(f, memory[4]),
                                 .positions = memory[1],
                                 .slot_mapping = memory[2],
                                 .cache = cache_of(f, memory[5]),
                                 .scales_pow2 = 1};
    args.cache.kv.num_blocks = (MANY + BLOCK - 1) / BLOCK;
    CU_ASSERT_EQUAL(cpa_index_write(&args, stream), CPA_OK);
    cpa_test_download(stream, pool, memory[5], bytes);
    int64_t wrong = 0;
    for (int64_t i = PERIOD; i < MANY; i++) {
        const int64_t a = slots[i], b = slots[i % PERIOD];
        const char *of_a = pool + a / BLOCK * block, *of_b = pool + b / BLOCK * block;
        wrong += memcmp(of_a + a % BLOCK * f->dim, of_b + b % BLOCK * f->dim, (size_t)f->dim) != 0;
        wrong += memcmp(of_a + BLOCK * f->dim + a % BLOCK * 4, of_b + BLOCK * f->dim + b % BLOCK * 4, 4) != 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_NOT_EQUAL(memcmp(pool, pool + f->dim, (size_t)f->dim), 0);
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
    cpa_test_device_close(device, stream);
    free(table);
    free(pool);
    free(slots);
    free(positions);
    free(k);
}

/* A cache of index keys is one like any other: its blocks are copied with their scales. */
static void blocks_are_copied_as_of_any_cache(void) {
    const form *f = &FORMS[0];
    const int64_t block = cpa_kv_block_bytes(CPA_FP8_E4M3, CPA_KEYS, 0, BLOCK, 1, f->dim);
    const int64_t pairs[][2] = {{0, 3}, {2, 1}};
    char *bytes = malloc((size_t)(BLOCKS * block)), *got = malloc((size_t)(BLOCKS * block));
    cpa_test_device_open(1, &device, &stream);
    for (int64_t i = 0; i < BLOCKS * block; i++) bytes[i] = (char)(i * 31 % 251);
    void *from = cpa_test_upload(stream, bytes, BLOCKS * block), *to = cpa_test_upload(stream, bytes, BLOCKS * block);
    const cpa_kv_copy_args copy = {
        .size = sizeof copy, .src = cache_of(f, from).kv, .dst = cache_of(f, to).kv, .pairs = pairs, .n_pairs = 2};
    CU_ASSERT_EQUAL(cpa_kv_copy(&copy, stream), CPA_OK);
    cpa_test_download(stream, got, to, BLOCKS * block);
    for (int i = 0; i < 2; i++) memcpy(bytes + pairs[i][1] * block, bytes + pairs[i][0] * block, (size_t)block);
    CU_ASSERT_EQUAL(memcmp(got, bytes, (size_t)(BLOCKS * block)), 0);
    cpa_test_free(stream, to);
    cpa_test_free(stream, from);
    cpa_test_device_close(device, stream);
    free(got);
    free(bytes);
}

/* ---- queries ---- */

static float weight_of(const form *f, int64_t i) {
    float weight = sinf((float)(i * 7)) * (i % 5 == 0 ? 9.0f : 1.0f);
    char narrow[4];
    cpa_narrow(narrow, &weight, f->weight_dtype, 1);
    cpa_widen(&weight, narrow, f->weight_dtype, 1);
    return weight;
}

static int64_t row_bytes(const form *f) {
    return f->to == CPA_INDEX_MXFP4 ? f->dim / 2 : f->to == CPA_INDEX_BF16 ? 2 * f->dim : f->dim;
}

static void expect_queries(const form *f, const float *q, int64_t stride, const float *table, uint8_t *out,
                           float *weights, uint8_t *scales) {
    const float of_dim = (float)(1 / sqrt((double)f->dim)), of_heads = (float)(1 / sqrt((double)f->heads));
    const int64_t row = row_bytes(f);
    for (int64_t i = 0; i < TOKENS * f->heads; i++) {
        float x[MOST_DIM], scale = 1;
        memcpy(x, q + i / f->heads * stride + i % f->heads * f->dim, (size_t)f->dim * sizeof *x);
        finish(f, x, table, AT[i / f->heads]);
        if (f->to == CPA_INDEX_BF16)
            cpa_narrow(out + i * row, x, CPA_BF16, f->dim);
        else if (f->to == CPA_INDEX_MXFP4)
            cpa_test_mxfp4(x, out + i * row, scales + i * (f->dim / 32), f->dim);
        else
            scale = codes_of(f, x, out + i * row, 1);
        const float scaled = weight_of(f, i) * scale, twice = scaled * of_dim;
        weights[i] = twice * of_heads;
    }
}

static void make_queries(const form *f) {
    const int64_t width = (int64_t)f->heads * f->dim, stride = width + f->pad, heads = TOKENS * f->heads;
    const int64_t bytes = heads * row_bytes(f), weight_bytes = cpa_dtype_bytes(f->weight_dtype);
    void *q_device, *table_device = NULL;
    float *q = make_rows(f, width, stride, &q_device), *table = f->rotated ? make_table(f->rotated) : NULL;
    uint8_t *want = malloc((size_t)bytes), *got = malloc((size_t)bytes);
    float *weights = malloc((size_t)heads * sizeof *weights), *want_weights = malloc((size_t)heads * sizeof *weights);
    char *given = malloc((size_t)(heads * weight_bytes));
    const int64_t n_scales = f->to == CPA_INDEX_MXFP4 ? heads * (f->dim / 32) : 1;
    uint8_t *scales = calloc(1, (size_t)n_scales), *want_scales = calloc(1, (size_t)n_scales);
    for (int64_t i = 0; i < heads; i++) weights[i] = weight_of(f, i);
    cpa_narrow(given, weights, f->weight_dtype, heads);
    if (table) table_device = cpa_test_upload(stream, table, POSITIONS * f->rotated * (int64_t)sizeof *table);
    void *positions = cpa_test_upload(stream, AT, sizeof AT),
         *weights_in = cpa_test_upload(stream, given, heads * weight_bytes), *out = cpa_test_upload(stream, got, bytes),
         *weights_out = cpa_test_upload(stream, weights, heads * (int64_t)sizeof *weights),
         *scales_out = cpa_test_upload(stream, scales, n_scales);
    const cpa_index_q_args args = {.size = sizeof args,
                                   .tokens = TOKENS,
                                   .heads = f->heads,
                                   .dim = f->dim,
                                   .dtype = f->dtype,
                                   .q = q_device,
                                   .q_row_stride = stride,
                                   .rope = rope_of(f, table_device),
                                   .positions = positions,
                                   .hadamard = f->hadamard,
                                   .format = f->to,
                                   .out = out,
                                   .weights = weights_in,
                                   .weight_dtype = f->weight_dtype,
                                   .weights_out = weights_out,
                                   .floor = f->floor,
                                   .scales = f->to == CPA_INDEX_MXFP4 ? scales_out : NULL};
    expect_queries(f, q, stride, table, want, want_weights, want_scales);
    CU_ASSERT_EQUAL(cpa_index_q(&args, stream), CPA_OK);
    cpa_test_download(stream, got, out, bytes);
    cpa_test_download(stream, weights, weights_out, heads * (int64_t)sizeof *weights);
    cpa_test_download(stream, scales, scales_out, n_scales);
    check_bytes(f, want, got, bytes);
    CU_ASSERT_EQUAL(memcmp(scales, want_scales, (size_t)n_scales), 0);
    CU_ASSERT_EQUAL(memcmp(weights, want_weights, (size_t)heads * sizeof *weights), 0);
    void *const memory[] = {q_device, table_device, positions, weights_in, out, weights_out, scales_out};
    void *const host[] = {q, table, want, got, weights, want_weights, given, scales, want_scales};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
}

static void queries_have_the_bytes_of_the_definition(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < FORM_COUNT; i++) make_queries(&FORMS[i]);
    cpa_test_device_close(device, stream);
}

/* ---- misuse ---- */

static void expect_line(cpa_status status, const char *line) {
    CU_ASSERT_EQUAL(status, CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), line);
}

static void bad_rows_are_refused_in_one_line(void) {
    cpa_test_device_open(1, &device, &stream);
    void *memory = cpa_test_upload(stream, (char[65536]){0}, 65536);
    const cpa_index_write_args good = {.size = sizeof good,
                                       .tokens = 2,
                                       .dtype = CPA_BF16,
                                       .k = memory,
                                       .slot_mapping = memory,
                                       .cache = cache_of(&FORMS[0], memory)};
    cpa_index_write_args w = good;
    w.cache.kv.k = NULL;
    expect_line(cpa_index_write(&w, stream), "index_write: the cache of index keys is NULL");
    w = good, w.cache.kv.k_dim = w.cache.kv.v_dim = 96;
    expect_line(cpa_index_write(&w, stream),
                "index_write: k_dim is 96, expected a power of two for a Hadamard transform");
    w = good, w.cache.kv.v_dim = 64;
    expect_line(cpa_index_write(&w, stream),
                "index_write: the cache has 1 KV heads, v_in_k 1, k_dim 128 and v_dim 64; expected one head of keys "
                "alone, with v_in_k 1 and v_dim equal to k_dim");
    w = good, w.cache.kv.k_scale = 2;
    expect_line(cpa_index_write(&w, stream),
                "index_write: k_scale of the cache is 2, expected 0: each row gets its own scale");
    w = good, w.k_row_stride = 127;
    CU_ASSERT_EQUAL(cpa_index_write(&w, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "k_row_stride is 127"));
    w = good, w.gamma = memory;
    expect_line(cpa_index_write(&w, stream), "index_write: beta is NULL and gamma is not; expected both or neither");
    const cpa_index_q_args queries = {.size = sizeof queries,
                                      .tokens = 2,
                                      .heads = 4,
                                      .dim = 32,
                                      .dtype = CPA_BF16,
                                      .q = memory,
                                      .format = CPA_INDEX_FP8,
                                      .out = memory,
                                      .weights = memory,
                                      .weights_out = memory};
    cpa_index_q_args q = queries;
    q.weights = NULL, q.weights_out = NULL;
    expect_line(cpa_index_q(&q, stream),
                "index_q: weights is NULL, expected weights for queries in codes, whose scales go into them");
    q = queries, q.format = CPA_INDEX_MXFP4;
    expect_line(cpa_index_q(&q, stream), "index_q: scales is NULL, expected it for MXFP4 and for no other");
    q = queries, q.dim = 0;
    expect_line(cpa_index_q(&q, stream), "index_q: dim is 0, expected a multiple of 8 up to 256");
    q = queries, q.heads = 0;
    expect_line(cpa_index_q(&q, stream), "index_q: heads is 0, expected 1 to 128");
    cpa_test_free(stream, memory);
    cpa_test_device_close(device, stream);
}

static void a_slot_past_the_end_is_refused(void) {
    const int64_t slot = BLOCK * BLOCKS;
    const form *f = &FORMS[0];
    cpa_test_device_open(1, &device, &stream);
    void *pool = cpa_test_upload(stream, (char[65536]){0}, 65536), *slots = cpa_test_upload(stream, &slot, sizeof slot);
    const cpa_index_write_args args = {.size = sizeof args,
                                       .tokens = 1,
                                       .dtype = CPA_BF16,
                                       .k = pool,
                                       .slot_mapping = slots,
                                       .cache = cache_of(f, pool)};
    cpa_status status = cpa_index_write(&args, stream);
    if (status == CPA_OK) status = cpa_stream_sync(stream);
    CU_ASSERT_EQUAL(status, CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "slot_mapping[0] is 32, "));
    cpa_test_free(stream, slots);
    cpa_test_free(stream, pool);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"keys have the bytes of the definition", keys_have_the_bytes_of_the_definition},
    {"many keys are as few", many_keys_are_as_few},
    {"blocks are copied as of any cache", blocks_are_copied_as_of_any_cache},
    {"queries have the bytes of the definition", queries_have_the_bytes_of_the_definition},
    {"bad rows are refused in one line", bad_rows_are_refused_in_one_line},
    {"a slot past the end is refused", a_slot_past_the_end_is_refused},
};
CPA_DEVICE_TEST_MAIN("indexer", tests)
