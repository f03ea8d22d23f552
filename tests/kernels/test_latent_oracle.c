/* Writes, gathers, attention and expansion of latents against the vectors of tests/data/oracle, which were computed from
 * definitions alone. */
#include <cpattn/latent.h>
#include <cpattn/ops.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "src/check/reference.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/oracle_fixture.h"
#include "tests/fixtures/unit.h"

enum { PLAIN, FP8, T128 };

static cpa_device *device;
static cpa_stream *stream;

/* The oracle numbers dtypes as 0 fp32, 1 fp16, 2 bf16. */
static cpa_dtype dtype_of(int32_t number) {
    return number == 0 ? CPA_F32 : number == 1 ? CPA_F16 : CPA_BF16;
}

static cpa_kv_view cache_of(int32_t format, cpa_dtype plain, int32_t latent, int32_t rope, double scale,
                            int64_t blocks) {
    return (cpa_kv_view){.dtype = format == PLAIN ? plain
                                  : format == FP8 ? CPA_FP8_E4M3
                                                  : CPA_FP8_T128,
                         .block_size = 16,
                         .num_blocks = blocks,
                         .kv_heads = 1,
                         .k_dim = latent + rope,
                         .v_dim = latent,
                         .k_scale = format == FP8 ? (float)scale : 0,
                         .v_in_k = 1};
}

/* Elements of a dtype that differ, where any NaN is as good as any other. */
static int64_t differing(const void *got, const void *want, cpa_dtype dtype, int64_t n) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t bytes = cpa_dtype_bytes(dtype);
        const char *a = (const char *)got + i * bytes, *b = (const char *)want + i * bytes;
        float x, y;
        cpa_widen(&x, a, dtype, 1);
        cpa_widen(&y, b, dtype, 1);
        wrong += memcmp(a, b, (size_t)bytes) != 0 && !(isnan(x) && isnan(y));
    }
    return wrong;
}

/* ---- latent_write ---- */

enum { W_FORMAT, W_INPUT, W_CACHE, W_TOKENS, W_LATENT, W_ROPE, W_COLUMNS };

/* Bytes of entries that differ; those of elements that may be NaN as elements. */
static int64_t wrong_entry(const cpa_kv_view *kv, const char *got, const char *want, int64_t bytes) {
    if (cpa_dtype_is_plain(kv->dtype)) return differing(got, want, kv->dtype, kv->k_dim);
    const int64_t tail = kv->dtype == CPA_FP8_T128 ? 64 * 2 : 0;
    return (memcmp(got, want, (size_t)(bytes - tail)) != 0) +
           differing(got + bytes - tail, want + bytes - tail, CPA_BF16, tail / 2);
}

static void write_case(const cpa_test_oracle *oracle, int64_t number) {
    int32_t c[W_COLUMNS];
    double scale;
    cpa_test_oracle_ints(oracle, number, W_COLUMNS, c);
    cpa_test_oracle_floats(oracle, number, 1, &scale);
    const cpa_dtype input = dtype_of(c[W_INPUT]);
    const int64_t element = cpa_dtype_bytes(input), tokens = c[W_TOKENS], dim = c[W_LATENT] + c[W_ROPE];
    char *latent = cpa_test_oracle_copy(oracle, number, "latent"), *rope = cpa_test_oracle_copy(oracle, number, "rope");
    char *rows = malloc((size_t)(tokens * dim * element)), *want = cpa_test_oracle_copy(oracle, number, "entries");
    int64_t *slots = cpa_test_oracle_copy(oracle, number, "slots"), most = 0, wrong = 0;
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(rows + t * dim * element, latent + t * c[W_LATENT] * element, (size_t)(c[W_LATENT] * element));
        memcpy(rows + (t * dim + c[W_LATENT]) * element, rope + t * c[W_ROPE] * element, (size_t)(c[W_ROPE] * element));
        most = slots[t] > most ? slots[t] : most;
    }
    cpa_kv_fixture f;
    cpa_kv_fixture_init_view(
        &f, cache_of(c[W_FORMAT], dtype_of(c[W_CACHE]), c[W_LATENT], c[W_ROPE], scale, most / 16 + 1), 0);
    const cpa_kv_view view = cpa_kv_fixture_upload(&f, stream);
    void *k = cpa_test_upload(stream, rows, tokens * dim * element),
         *mapping = cpa_test_upload(stream, slots, tokens * 8);
    const cpa_kv_write_args args = {
        .size = sizeof args, .tokens = tokens, .dtype = input, .k = k, .slot_mapping = mapping, .kv = view};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&f, &view, stream);
    const int64_t bytes = cpa_kv_row_bytes(view.dtype, CPA_KEYS, view.k_dim);
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= 0) wrong += wrong_entry(&view, (char *)f.view.k + slots[t] * bytes, want + t * bytes, bytes);
    if (cpa_test_oracle_find(oracle, number, "gathered")) {
        float *gathered = cpa_test_oracle_copy(oracle, number, "gathered"), *got = malloc((size_t)dim * sizeof *got);
        int32_t *table = malloc((size_t)view.num_blocks * sizeof *table);
        void *dst = cpa_test_upload(stream, gathered, dim * (int64_t)sizeof *got);
        for (int64_t b = 0; b < view.num_blocks; b++) table[b] = (int32_t)b;
        for (int64_t t = 0; t < tokens; t++) {
            const cpa_kv_span span = {.first = slots[t], .count = 1};
            const cpa_latent_gather_args gather = {.size = sizeof gather,
                                                   .src = view,
                                                   .block_tables = table,
                                                   .n_table_entries = view.num_blocks,
                                                   .spans = &span,
                                                   .n_spans = 1,
                                                   .dst = dst,
                                                   .dst_rows = 1};
            if (slots[t] < 0) continue;
            CU_ASSERT_EQUAL(cpa_latent_gather(&gather, stream), CPA_OK);
            cpa_test_download(stream, got, dst, dim * (int64_t)sizeof *got);
            /* The oracle's are products in fp32; what attend reads of tiles, and gathering gives, is rounded to bf16. */
            for (int64_t d = 0; view.dtype == CPA_FP8_T128 && d < dim; d++)
                gathered[t * dim + d] = cpa_reference_round(gathered[t * dim + d], CPA_BF16);
            wrong += differing(got, gathered + t * dim, CPA_F32, dim);
        }
        cpa_test_free(stream, dst);
        free(table), free(got), free(gathered);
    }
    if (wrong) printf("\n    case %lld: %lld wrong", (long long)number, (long long)wrong);
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_free(stream, mapping), cpa_test_free(stream, k);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&f);
    free(slots), free(want), free(rows), free(rope), free(latent);
}

static void entries_are_the_oracles(void) {
    cpa_test_oracle oracle = cpa_test_oracle_open("latent_write.safetensors");
    cpa_test_device_open(1, &device, &stream);
    CPA_ASSERT_ORDER(oracle.cases, >, 5);
    for (int64_t i = 0; i < oracle.cases; i++) write_case(&oracle, i);
    cpa_test_device_close(device, stream);
    cpa_test_oracle_close(&oracle);
}

/* ---- latent_attend ---- */

enum {
    A_FORMAT,
    A_DTYPE,
    A_HEADS,
    A_LATENT,
    A_ROPE,
    A_SEQUENCES,
    A_ROWS,
    A_WINDOW,
    A_CAUSAL,
    A_BLOCKS,
    A_STEP,
    A_COLUMNS
};
enum { ROW_SEQUENCE, ROW_INDEX, ROW_BEGIN, ROW_END, ROW_NUMBERS };

/* The entries of all sequences in the blocks that their tables name. */
static void place_entries(const cpa_test_oracle *oracle, int64_t number, const int32_t *c, const int32_t *lengths,
                          const int32_t *tables, int64_t width, cpa_kv_fixture *f) {
    char *entries = cpa_test_oracle_copy(oracle, number, "entries"), *from = entries;
    const int64_t bytes = cpa_kv_row_bytes(f->view.dtype, CPA_KEYS, f->view.k_dim);
    for (int32_t s = 0; s < c[A_SEQUENCES]; s++)
        for (int32_t t = 0; t < lengths[s]; t++, from += bytes)
            memcpy((char *)f->view.k + (tables[s * width + t / 16] * 16 + t % 16) * bytes, from, (size_t)bytes);
    free(entries);
}

/* What a row may be off by: that of a result rounded to the dtype, of values no larger than `size`. */
static double allowed_of(cpa_dtype dtype, double size) {
    return 4 * cpa_reference_unit_roundoff(dtype) * size + 1e-5;
}

static void attend_case(const cpa_test_oracle *oracle, int64_t number) {
    int32_t c[A_COLUMNS];
    double scales[2];
    cpa_test_oracle_ints(oracle, number, A_COLUMNS, c);
    cpa_test_oracle_floats(oracle, number, 2, scales);
    const cpa_dtype dtype = dtype_of(c[A_DTYPE]);
    const int64_t rows = c[A_ROWS], heads = c[A_HEADS], v_dim = c[A_LATENT], k_dim = v_dim + c[A_ROPE];
    const int64_t width = cpa_test_oracle_find(oracle, number, "tables")->shape[1],
                  kept = (v_dim + c[A_STEP] - 1) / c[A_STEP];
    int32_t *lengths = cpa_test_oracle_copy(oracle, number, "lengths");
    int32_t *tables = cpa_test_oracle_copy(oracle, number, "tables"),
            *of = cpa_test_oracle_copy(oracle, number, "rows");
    char *q = cpa_test_oracle_copy(oracle, number, "q");
    float *want = cpa_test_oracle_copy(oracle, number, "out");
    double *want_lse = cpa_test_oracle_copy(oracle, number, "lse");
    cpa_kv_fixture f;
    cpa_kv_fixture_init_view(&f, cache_of(c[A_FORMAT], dtype, c[A_LATENT], c[A_ROPE], scales[1], c[A_BLOCKS]), 0);
    place_entries(oracle, number, c, lengths, tables, width, &f);
    const cpa_kv_view view = cpa_kv_fixture_upload(&f, stream);
    cpa_attend_item *items = calloc((size_t)rows, sizeof *items);
    for (int64_t i = 0; i < rows; i++) {
        const int32_t *row = of + i * ROW_NUMBERS;
        items[i] =
            (cpa_attend_item){.q_row = i,
                              .q_count = 1,
                              .q_first = row[ROW_INDEX] < 0 ? 0 : row[ROW_INDEX], /* of a sequence without tokens */
                              .k_count = lengths[row[ROW_SEQUENCE]],
                              .table = row[ROW_SEQUENCE] * width};
    }
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {1, 16},
                                    .shape = {.q_heads = c[A_HEADS],
                                              .kv_heads = 1,
                                              .k_dim = (int32_t)k_dim,
                                              .v_dim = (int32_t)v_dim,
                                              .v_in_k = 1,
                                              .dtype = dtype,
                                              .kv_dtype = view.dtype},
                                    .block_size = 16,
                                    .items = items,
                                    .n_items = rows,
                                    .block_tables = tables,
                                    .n_table_entries = c[A_SEQUENCES] * width};
    float *o = cpa_test_poisoned(rows * heads * v_dim, sizeof *o), *lse = cpa_test_poisoned(rows * heads, sizeof *lse);
    float *device_o = cpa_test_upload(stream, o, rows * heads * v_dim * 4);
    float *device_lse = cpa_test_upload(stream, lse, rows * heads * 4);
    void *device_q = cpa_test_upload(stream, q, rows * heads * k_dim * cpa_dtype_bytes(dtype));
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = device_q,
                                  .q_dtype = dtype,
                                  .kv = view,
                                  .mask = {.causal = c[A_CAUSAL], .window = c[A_WINDOW]},
                                  .scale = (float)scales[0],
                                  .state = {.o = device_o, .lse = device_lse}};
    cpa_attend_plan *plan;
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &batch, &err), CPA_OK);
    if (err.status != CPA_OK) printf("\n    %s", err.message);
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_OK);
    cpa_test_download(stream, o, device_o, rows * heads * v_dim * 4);
    cpa_test_download(stream, lse, device_lse, rows * heads * 4);
    int64_t wrong = 0;
    for (int64_t at = 0; at < rows * heads; at++) {
        const double lse_allowed = cpa_reference_lse_tolerance(dtype, want_lse[at]);
        double size = 0;
        wrong += !((double)lse[at] == want_lse[at] || fabs((double)lse[at] - want_lse[at]) <= lse_allowed);
        for (int64_t d = 0; d < kept; d++) size = fmax(size, fabs((double)want[at * kept + d]));
        for (int64_t d = 0; d < kept; d++) {
            const double off = fabs((double)o[at * v_dim + d * c[A_STEP]] - (double)want[at * kept + d]);
            wrong += !(off <= (isinf(want_lse[at]) ? 0 : allowed_of(dtype, size)));
        }
    }
    if (wrong) printf("\n    case %lld: %lld wrong", (long long)number, (long long)wrong);
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_attend_plan_destroy(plan);
    cpa_test_free(stream, device_q), cpa_test_free(stream, device_lse), cpa_test_free(stream, device_o);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&f);
    free(lse), free(o), free(items), free(want_lse), free(want), free(q), free(of), free(tables), free(lengths);
}

static void rows_are_the_oracles(void) {
    cpa_test_oracle oracle = cpa_test_oracle_open("latent_attend.safetensors");
    cpa_test_device_open(2, &device, &stream);
    CPA_ASSERT_ORDER(oracle.cases, >, 5);
    for (int64_t i = 0; i < oracle.cases; i++) attend_case(&oracle, i);
    cpa_test_device_close(device, stream);
    cpa_test_oracle_close(&oracle);
}

/* ---- expand ---- */

enum { E_TOKENS, E_HEADS, E_LATENT, E_ROPE, E_NOPE, E_V, E_ROWS, E_SEED, E_COLUMNS };

static float weight_of(uint32_t i, uint32_t seed) {
    uint32_t x = i + seed;
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return (float)((int32_t)(x >> 24) - 128) / 1024;
}

/* Elements that are farther off than a rounding to bf16 and one of a sum in fp32. */
static int64_t count_far(const char *got, const float *want, int64_t n) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        float x;
        cpa_widen(&x, got + i * 2, CPA_BF16, 1);
        wrong += !(fabsf(x - want[i]) <= 0x1p-8f * fabsf(want[i]) + 1e-5f);
    }
    return wrong;
}

static void expand_case(const cpa_test_oracle *oracle, int64_t number) {
    int32_t c[E_COLUMNS];
    cpa_test_oracle_ints(oracle, number, E_COLUMNS, c);
    const int64_t tokens = c[E_TOKENS], heads = c[E_HEADS], k_dim = c[E_NOPE] + c[E_ROPE];
    const int64_t weights = heads * (c[E_NOPE] + c[E_V]) * c[E_LATENT];
    const int64_t k_elements = tokens * heads * k_dim, v_elements = tokens * heads * c[E_V];
    char *latent = cpa_test_oracle_copy(oracle, number, "latent"), *w = malloc((size_t)weights * 2);
    float *want_k = cpa_test_oracle_copy(oracle, number, "k"), *want_v = cpa_test_oracle_copy(oracle, number, "v");
    for (int64_t i = 0; i < weights; i++) {
        const float x = weight_of((uint32_t)i, (uint32_t)c[E_SEED]);
        cpa_narrow(w + i * 2, &x, CPA_BF16, 1);
    }
    char *k = cpa_test_poisoned(k_elements, 2), *v = cpa_test_poisoned(v_elements, 2);
    void *device_latent = cpa_test_upload(stream, latent, tokens * (c[E_LATENT] + c[E_ROPE]) * 2);
    void *device_w = cpa_test_upload(stream, w, weights * 2);
    void *device_k = cpa_test_upload(stream, k, k_elements * 2), *device_v = cpa_test_upload(stream, v, v_elements * 2);
    const cpa_latent_expand_args args = {.size = sizeof args,
                                         .tokens = tokens,
                                         .dtype = CPA_BF16,
                                         .latent_dim = c[E_LATENT],
                                         .rope_dim = c[E_ROPE],
                                         .heads = c[E_HEADS],
                                         .nope_dim = c[E_NOPE],
                                         .v_dim = c[E_V],
                                         .latents = device_latent,
                                         .w_kv_b = device_w,
                                         .k = device_k,
                                         .v = device_v};
    CU_ASSERT_EQUAL(cpa_latent_expand(&args, stream), CPA_OK);
    cpa_test_download(stream, k, device_k, k_elements * 2);
    cpa_test_download(stream, v, device_v, v_elements * 2);
    CU_ASSERT_EQUAL(count_far(k, want_k, k_elements), 0);
    CU_ASSERT_EQUAL(count_far(v, want_v, v_elements), 0);
    cpa_test_free(stream, device_v), cpa_test_free(stream, device_k);
    cpa_test_free(stream, device_w), cpa_test_free(stream, device_latent);
    free(v), free(k), free(want_v), free(want_k), free(w), free(latent);
}

static void expanded_heads_are_the_oracles(void) {
    cpa_test_oracle oracle = cpa_test_oracle_open("expand.safetensors");
    cpa_test_device_open(2, &device, &stream);
    CPA_ASSERT_ORDER(oracle.cases, >, 0);
    for (int64_t i = 0; i < oracle.cases; i++) expand_case(&oracle, i);
    cpa_test_device_close(device, stream);
    cpa_test_oracle_close(&oracle);
}

static const cpa_test tests[] = {
    {"entries have the oracle's bytes, and are gathered as it says", entries_are_the_oracles},
    {"rows are what the oracle says", rows_are_the_oracles},
    {"expanded heads are what the oracle says", expanded_heads_are_the_oracles},
};
CPA_DEVICE_TEST_MAIN("latents against the oracle", tests)
