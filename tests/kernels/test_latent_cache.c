/* Caches of latents: kv_write byte for byte against fp32 oracles that do what cpattn/shape.h says in its order, what
 * moves blocks and tokens, and latent_gather. The grids of vLLM's own tests,
 * tests/kernels/attention/test_cache.py: 42 tokens, 8 blocks of 16, latents of 256 and 512 and 64 rotated elements; and
 * entries of 320, 512 and 576 in 1,024 blocks of 16, of which 8 sequences of 512 tokens are gathered. */
#include <cpattn/latent.h>
#include <cpattn/ops.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "src/check/reference.h"
#include "tests/fixtures/entry_oracle.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* Rows whose tiles differ by powers of two, with zeros, one-sided tiles, subnormals, and an outlier. */
static float element(int64_t row, int32_t d) {
    const int64_t mixed = row * 7919 + d * 104729 + (d * row) % 31;
    const float x = (float)(mixed % 1999 - 999) / 333;
    if (row % 7 == 3 && d < 128) return 0;
    if (row % 11 == 5 && d == 200) return 30000;
    if (row % 11 == 7 && d == 70) return 112; /* 448 / 4, the largest of its tile: its scale is one exactly */
    return ldexpf(row % 5 == 1 ? fabsf(x) : x, (int)((row + d / 128) % 9) - 4 - (row % 13 == 9 ? 120 : 0));
}

/* ---- oracles ---- */

/* What a cache holds of a row, x [dim] in dtype, and behind the rows of its block; returns its bytes. */
static int64_t oracle_row(const cpa_kv_view *kv, const float *x, uint8_t *row, uint8_t *words) {
    const int32_t dim = kv->k_dim;
    if (kv->dtype == CPA_FP8_T64) return cpa_test_t64_row(x, row, words);
    if (cpa_dtype_is_plain(kv->dtype)) {
        for (int32_t d = 0; d < dim; d++) {
            const float rounded = cpa_reference_round(x[d], kv->dtype);
            cpa_narrow(row + d * cpa_dtype_bytes(kv->dtype), &rounded, kv->dtype, 1);
        }
        return dim * cpa_dtype_bytes(kv->dtype);
    }
    if (kv->dtype == CPA_FP8_E4M3) {
        for (int32_t d = 0; d < dim; d++) row[d] = cpa_test_nearest_code(x[d] / kv->k_scale);
        return dim;
    }
    const int32_t latent = dim - 64;
    for (int32_t first = 0; first < latent; first += 128) {
        float most = 0;
        for (int32_t d = first; d < first + 128; d++)
            if (isfinite(x[d])) most = fmaxf(most, fabsf(x[d]));
        const float scale = fmaxf(most / 448, FLT_MIN);
        for (int32_t d = first; d < first + 128; d++) row[d] = cpa_test_nearest_code(x[d] / scale);
        memcpy(row + latent + first / 128 * 4, &scale, sizeof scale);
    }
    for (int32_t d = latent; d < dim; d++) {
        const float rounded = cpa_reference_round(x[d], CPA_BF16);
        cpa_narrow(row + latent + latent / 128 * 4 + (d - latent) * 2, &rounded, CPA_BF16, 1);
    }
    return latent + latent / 128 * 4 + 128;
}

/* ---- writes ---- */

enum { TOKENS = 42, BLOCKS = 8, BLOCK = 16 };

static cpa_kv_view latents(cpa_dtype dtype, int32_t k_dim, float scale, int64_t blocks) {
    return (cpa_kv_view){.dtype = dtype,
                         .block_size = BLOCK,
                         .num_blocks = blocks,
                         .kv_heads = 1,
                         .k_dim = k_dim,
                         .v_dim = k_dim - 64,
                         .k_scale = dtype == CPA_FP8_E4M3 ? scale : 0,
                         .v_in_k = 1};
}

/* The rows of tokens in a dtype, `stride` elements apart, as the cache's writer is given them, and as floats. */
static void *make_rows(cpa_dtype dtype, int64_t tokens, int32_t dim, int64_t stride, float *wide) {
    char *rows = cpa_test_poisoned(tokens * stride, cpa_dtype_bytes(dtype));
    for (int64_t t = 0; t < tokens; t++) {
        float *x = wide + t * dim;
        char *row = rows + t * stride * cpa_dtype_bytes(dtype);
        for (int32_t d = 0; d < dim; d++) x[d] = element(t, d);
        if (t == 20) x[7] = NAN, x[300 % dim] = -INFINITY;
        cpa_narrow(row, x, dtype, dim);
        cpa_widen(x, row, dtype, dim);
    }
    return rows;
}

/* Whether pools of `bytes` have the same bytes, but for those of NaN, which are not the same on every back end. */
static int have_the_same(const char *got, const char *want, int64_t bytes, cpa_dtype dtype) {
    if (cpa_dtype_is_quantised(dtype)) return memcmp(got, want, (size_t)bytes) == 0;
    const int64_t element = cpa_dtype_bytes(dtype);
    for (int64_t at = 0; at < bytes; at += element) {
        float values[2];
        cpa_widen(&values[0], got + at, dtype, 1);
        cpa_widen(&values[1], want + at, dtype, 1);
        if (isnan(values[0]) && isnan(values[1])) continue;
        if (memcmp(got + at, want + at, (size_t)element) != 0) return 0;
    }
    return 1;
}

static void writes_of(cpa_dtype from, cpa_dtype to, int32_t dim, int64_t stride) {
    float *wide = malloc(sizeof(float) * TOKENS * (size_t)dim);
    void *rows = make_rows(from, TOKENS, dim, stride, wide);
    int64_t slots[TOKENS];
    cpa_kv_fixture f, want;
    cpa_kv_fixture_init_view(&f, latents(to, dim, 0.1f, BLOCKS), 0);
    cpa_kv_fixture_init_view(&want, latents(to, dim, 0.1f, BLOCKS), 0);
    const int64_t block_bytes = f.k_bytes / BLOCKS;
    for (int64_t t = 0; t < TOKENS; t++) {
        uint8_t row[CPA_MAX_HEAD_DIM * 4], words[8];
        slots[t] = t % 9 == 4 ? -1 : (t * 29) % (BLOCKS * BLOCK);
        const int64_t bytes = oracle_row(&f.view, wide + t * dim, row, words);
        if (t == 0) CU_ASSERT_EQUAL(block_bytes, to == CPA_FP8_T64 ? 9792 : BLOCK * bytes);
        if (slots[t] < 0) continue;
        char *block = (char *)want.view.k + slots[t] / BLOCK * block_bytes;
        memcpy(block + slots[t] % BLOCK * bytes, row, (size_t)bytes);
        if (to == CPA_FP8_T64) memcpy(block + BLOCK * bytes + slots[t] % BLOCK * 8, words, sizeof words);
    }
    const cpa_kv_view view = cpa_kv_fixture_upload(&f, stream);
    void *k = cpa_test_upload(stream, rows, TOKENS * stride * cpa_dtype_bytes(from));
    int64_t *mapping = cpa_test_upload(stream, slots, sizeof slots);
    const cpa_kv_write_args args = {.size = sizeof args,
                                    .tokens = TOKENS,
                                    .dtype = from,
                                    .k = k,
                                    .k_row_stride = stride,
                                    .slot_mapping = mapping,
                                    .kv = view};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&f, &view, stream);
    CU_ASSERT(have_the_same(f.view.k, want.view.k, f.k_bytes, to));
    cpa_test_free(stream, mapping);
    cpa_test_free(stream, k);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&want);
    cpa_kv_fixture_destroy(&f);
    free(rows);
    free(wide);
}

static void writes_have_the_bytes_of_an_oracle(void) {
    static const cpa_dtype caches[] = {CPA_F32, CPA_BF16, CPA_F16, CPA_FP8_E4M3, CPA_FP8_T128};
    cpa_test_device_open(2, &device, &stream);
    for (int from = 0; from < CPA_DTYPE_COUNT; from++) {
        for (size_t to = 0; to < sizeof caches / sizeof *caches; to++) {
            for (int32_t latent = 256; latent <= 512; latent += 256) {
                writes_of((cpa_dtype)from, caches[to], latent + 64, latent + 64);
                writes_of((cpa_dtype)from, caches[to], latent + 64, latent + 64 + (latent == 512 ? 8 : 3));
            }
        }
        writes_of((cpa_dtype)from, CPA_FP8_T64, 512, 512);
        writes_of((cpa_dtype)from, CPA_FP8_T64, 512, 515);
    }
    cpa_test_device_close(device, stream);
}

/* ---- moves ---- */

/* A cache whose every byte differs, and what it is after copies, moves and packing. */
static void blocks_and_tokens_keep_their_bytes(void) {
    static const cpa_dtype caches[] = {CPA_BF16, CPA_FP8_E4M3, CPA_FP8_T128, CPA_FP8_T64};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        const int32_t dim = caches[i] == CPA_FP8_T64 ? 512 : 576;
        for (int scaled = 0; scaled < 2; scaled++) { /* e4m3: rows have scales, or the tensor has */
            static const int64_t pairs[][2] = {{0, 5}, {3, 1}};
            static const int32_t table[] = {2, 0, 3};
            const cpa_kv_range range = {.first = BLOCK, .count = BLOCK + 5, .dst_block = 1};
            const int64_t slots[][2] = {{7, 100}, {100, 7}, {-1, 3}, {50, 51}};
            cpa_kv_fixture f, g;
            cpa_kv_fixture_init_view(&f, latents(caches[i], dim, scaled ? 0.1f : 0, BLOCKS), 0);
            cpa_kv_fixture_init_view(&g, latents(caches[i], dim, scaled ? 0.1f : 0, BLOCKS), 0);
            char *bytes = f.view.k;
            const int64_t row = cpa_kv_row_bytes(caches[i], CPA_KEYS, dim), block = f.k_bytes / BLOCKS;
            const int64_t word = caches[i] == CPA_FP8_T64 ? 8 : caches[i] == CPA_FP8_E4M3 && !scaled ? 4 : 0;
            for (int64_t b = 0; b < f.k_bytes; b++) bytes[b] = (char)(b * 131 + b / 251);
            const cpa_kv_view view = cpa_kv_fixture_upload(&f, stream), other = cpa_kv_fixture_upload(&g, stream);
            const cpa_kv_copy_args copy = {sizeof copy, view, view, pairs, 2};
            CU_ASSERT_EQUAL(cpa_kv_copy(&copy, stream), CPA_OK);
            for (int p = 0; p < 2; p++)
                memcpy(bytes + pairs[p][1] * block, bytes + pairs[p][0] * block, (size_t)(BLOCK * row));
            int64_t(*device_slots)[2] = cpa_test_upload(stream, slots, sizeof slots);
            const cpa_kv_move_args move = {sizeof move, view, view, (const int64_t(*)[2])(void *)device_slots,
                                           sizeof slots / sizeof *slots};
            CU_ASSERT_EQUAL(cpa_kv_move(&move, stream), CPA_OK);
            const cpa_kv_pack_args pack = {sizeof pack, view, other, table, 3, &range, 1};
            CU_ASSERT_EQUAL(cpa_kv_pack(&pack, stream), CPA_OK);
            char *expected = malloc((size_t)f.k_bytes), *packed = malloc((size_t)f.k_bytes);
            memcpy(expected, bytes, (size_t)f.k_bytes);
            const int64_t behind = BLOCK * word; /* scales of rows, and no more */
            for (int p = 0; p < 2 && behind; p++)
                memcpy(expected + pairs[p][1] * block + BLOCK * row, bytes + pairs[p][0] * block + BLOCK * row,
                       (size_t)behind);
            memcpy(packed, expected, (size_t)f.k_bytes);
            for (int p = 0; p < 4; p++) {
                const int64_t from = slots[p][0], to = slots[p][1];
                if (from < 0) continue;
                const int64_t at = from / BLOCK * block, there = to / BLOCK * block;
                memcpy(expected + there + to % BLOCK * row, packed + at + from % BLOCK * row, (size_t)row);
                if (behind)
                    memcpy(expected + there + BLOCK * row + to % BLOCK * word,
                           packed + at + BLOCK * row + from % BLOCK * word, (size_t)word);
            }
            memset(packed, 0xff, (size_t)f.k_bytes);
            for (int64_t t = 0; t < range.count; t++) {
                const int64_t at = table[1 + t / BLOCK] * block, there = (1 + t / BLOCK) * block;
                memcpy(packed + there + t % BLOCK * row, expected + at + t % BLOCK * row, (size_t)row);
                if (behind)
                    memcpy(packed + there + BLOCK * row + t % BLOCK * word,
                           expected + at + BLOCK * row + t % BLOCK * word, (size_t)word);
            }
            cpa_kv_fixture_download(&f, &view, stream);
            cpa_kv_fixture_download(&g, &other, stream);
            CU_ASSERT_EQUAL(memcmp(f.view.k, expected, (size_t)f.k_bytes), 0);
            CU_ASSERT_EQUAL(memcmp(g.view.k, packed, (size_t)f.k_bytes), 0);
            free(packed);
            free(expected);
            cpa_test_free(stream, device_slots);
            cpa_kv_view_free(&view, stream);
            cpa_kv_view_free(&other, stream);
            cpa_kv_fixture_destroy(&g);
            cpa_kv_fixture_destroy(&f);
        }
    }
    cpa_test_device_close(device, stream);
}

/* From each form to each other: what the first stands for, written as the second. */
static void forms_become_each_other(void) {
    enum { FORMS = 4 };
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < 2 * FORMS * FORMS; i++) {
        const int pair = i / 2, dim = i % 2 ? 512 : 576;
        const cpa_dtype forms[] = {CPA_BF16, CPA_F32, CPA_FP8_E4M3, i % 2 ? CPA_FP8_T64 : CPA_FP8_T128};
        const int64_t pairs[][2] = {{1, 2}, {4, 0}};
        cpa_kv_fixture from, to;
        cpa_kv_fixture_init_view(&from, latents(forms[pair % FORMS], dim, 0.1f, BLOCKS), 0);
        cpa_kv_fixture_init_view(&to, latents(forms[pair / FORMS], dim, 0.25f, BLOCKS), 0);
        for (int64_t t = 0; t < (int64_t)BLOCKS * BLOCK; t++) {
            float x[CPA_MAX_HEAD_DIM];
            for (int32_t d = 0; d < dim; d++) x[d] = element(t, d);
            cpa_kv_fixture_store(&from, t / BLOCK, t % BLOCK, 0, x, NULL);
        }
        const cpa_kv_view src = cpa_kv_fixture_upload(&from, stream), dst = cpa_kv_fixture_upload(&to, stream);
        const cpa_kv_convert_args args = {sizeof args, src, dst, pairs, 2};
        CU_ASSERT_EQUAL(cpa_kv_convert(&args, stream), CPA_OK);
        cpa_kv_fixture_download(&to, &dst, stream);
        const int same = pair % FORMS == pair / FORMS && forms[pair % FORMS] != CPA_FP8_E4M3;
        int wrong = 0;
        for (int p = 0; p < 2; p++) {
            for (int64_t t = 0; t < BLOCK; t++) {
                const int64_t bytes = cpa_kv_row_bytes(to.view.dtype, CPA_KEYS, dim);
                const char *block = (const char *)to.view.k + pairs[p][1] * (to.k_bytes / BLOCKS);
                const char *from_block = (const char *)from.view.k + pairs[p][0] * (from.k_bytes / BLOCKS);
                uint8_t row[CPA_MAX_HEAD_DIM * 4], words[8];
                float x[CPA_MAX_HEAD_DIM];
                cpa_kv_fixture_load(&from, pairs[p][0], t, 0, x, NULL);
                oracle_row(&to.view, x, row, words);
                if (same) memcpy(row, from_block + t * bytes, (size_t)bytes);
                if (same && to.view.dtype == CPA_FP8_T64)
                    memcpy(words, from_block + BLOCK * bytes + t * 8, sizeof words);
                wrong += memcmp(block + t * bytes, row, (size_t)bytes) != 0;
                if (to.view.dtype == CPA_FP8_T64) wrong += memcmp(block + BLOCK * bytes + t * 8, words, 8) != 0;
            }
        }
        CU_ASSERT_EQUAL(wrong, 0);
        cpa_kv_view_free(&dst, stream);
        cpa_kv_view_free(&src, stream);
        cpa_kv_fixture_destroy(&to);
        cpa_kv_fixture_destroy(&from);
    }
    cpa_test_device_close(device, stream);
}

/* ---- gather ---- */

/* Spans that begin and end within blocks, the last of them without tokens; dst rows between them stay poison. */
static void gathers_of(cpa_dtype dtype, int32_t dim, cpa_dtype dst_dtype, int raw, int64_t blocks) {
    enum { SPANS = 4, ENTRIES = 12 };
    const cpa_kv_span spans[SPANS] = {{.table = 0, .first = 3, .count = 70, .dst_row = 5},
                                      {.table = 6, .first = 0, .count = 33, .dst_row = 80},
                                      {.table = 6, .first = 47, .count = 1, .dst_row = 0},
                                      {.table = ENTRIES, .count = 0, .dst_row = 120}};
    const int64_t rows = 120;
    cpa_kv_fixture f;
    int32_t table[ENTRIES];
    cpa_kv_fixture_init_view(&f, latents(dtype, dim, 0.1f, blocks), 0);
    for (int i = 0; i < ENTRIES; i++) table[i] = (int32_t)((i * 5 + 3) % blocks);
    for (int64_t t = 0; t < blocks * BLOCK; t++) {
        float x[CPA_MAX_HEAD_DIM];
        for (int32_t d = 0; d < dim; d++) x[d] = element(t, d);
        cpa_kv_fixture_store(&f, t / BLOCK, t % BLOCK, 0, x, NULL);
    }
    const int64_t row_bytes = cpa_kv_row_bytes(dtype, CPA_KEYS, dim), unit = raw ? 1 : cpa_dtype_bytes(dst_dtype);
    const int64_t width = raw ? row_bytes : dim, stride = width + 8;
    char *want = cpa_test_poisoned(rows * stride, unit), *got = cpa_test_poisoned(rows * stride, unit);
    const cpa_kv_view view = cpa_kv_fixture_upload(&f, stream);
    void *dst = cpa_test_upload(stream, want, rows * stride * unit);
    const cpa_latent_gather_args args = {.size = sizeof args,
                                         .src = view,
                                         .block_tables = table,
                                         .n_table_entries = ENTRIES,
                                         .spans = spans,
                                         .n_spans = SPANS,
                                         .dst = dst,
                                         .dst_rows = rows,
                                         .dst_row_stride = stride,
                                         .dst_dtype = dst_dtype,
                                         .raw = raw};
    CU_ASSERT_EQUAL(cpa_latent_gather(&args, stream), CPA_OK);
    cpa_test_download(stream, got, dst, rows * stride * unit);
    for (int s = 0; s < SPANS; s++) {
        for (int64_t i = 0; i < spans[s].count; i++) {
            const int64_t token = spans[s].first + i, block = table[spans[s].table + token / BLOCK];
            char *to = want + (spans[s].dst_row + i) * stride * unit;
            float x[CPA_MAX_HEAD_DIM];
            if (raw) memcpy(to, (char *)f.view.k + (block * BLOCK + token % BLOCK) * row_bytes, (size_t)row_bytes);
            if (raw) continue;
            cpa_kv_fixture_load(&f, block, token % BLOCK, 0, x, NULL);
            for (int32_t d = 0; d < dim; d++) x[d] = cpa_reference_round(x[d], dst_dtype);
            cpa_narrow(to, x, dst_dtype, dim);
        }
    }
    CU_ASSERT_EQUAL(memcmp(got, want, (size_t)(rows * stride * unit)), 0);
    cpa_test_free(stream, dst);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_destroy(&f);
    free(got);
    free(want);
}

static void gathered_rows_are_rounded_once(void) {
    static const int32_t dims[] = {320, 512, 576};
    static const cpa_dtype caches[] = {CPA_F32, CPA_BF16, CPA_F16, CPA_FP8_E4M3};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < 3 * 4 * 3; i++)
        gathers_of(caches[i / 3 % 4], dims[i % 3], (cpa_dtype)(i / 12), 0, 16 + (int64_t)i % 3);
    for (int dst = 0; dst < CPA_DTYPE_COUNT; dst++) gathers_of(CPA_FP8_T128, 576, (cpa_dtype)dst, 0, 16);
    for (int dst = 0; dst < CPA_DTYPE_COUNT; dst++) gathers_of(CPA_FP8_T64, 512, (cpa_dtype)dst, 0, 16);
    for (size_t i = 0; i < 4; i++) gathers_of(caches[i], 576, CPA_F32, 1, 16);
    gathers_of(CPA_FP8_T128, 576, CPA_F32, 1, 16);
    cpa_test_device_close(device, stream);
}

static void expect_refusal(const cpa_latent_gather_args *args, const char *line) {
    CU_ASSERT_EQUAL(cpa_latent_gather(args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), line));
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void bad_gathers_are_refused(void) {
    static float pool[4 * 16 * 80], dst[8 * 80];
    static const int32_t table[] = {0, 3, 4};
    cpa_kv_span span = {.count = 8}, two[2] = {{.count = 2}, {.count = 2, .dst_row = 1}};
    cpa_latent_gather_args good = {.size = sizeof good, .block_tables = table, .n_table_entries = 3};
    cpa_test_device_open(2, &device, &stream);
    good.src = latents(CPA_F32, 80, 0, 4), good.src.k = pool, good.spans = &span, good.n_spans = 1;
    good.dst = dst, good.dst_rows = 8;
    cpa_latent_gather_args bad = good;
    bad.src.v_in_k = 0, bad.src.v = pool, expect_refusal(&bad, "src has v_in_k 0 and 1 KV heads");
    bad = good, bad.dst_dtype = CPA_INT8, expect_refusal(&bad, "dst_dtype is 4");
    bad = good, bad.raw = 2, expect_refusal(&bad, "raw is 2");
    bad = good, bad.raw = 1, bad.src.dtype = CPA_INT8, expect_refusal(&bad, "int8 whose scales lie behind its rows");
    bad = good, bad.dst = NULL, expect_refusal(&bad, "dst is NULL with 8 rows");
    bad = good, bad.dst_row_stride = 79, expect_refusal(&bad, "dst_row_stride is 79, expected 0 or at least 80");
    bad = good, bad.block_tables = NULL, expect_refusal(&bad, "block_tables is NULL");
    span.count = 9, expect_refusal(&good, "spans[0] fills 9 rows from 0 on of 8");
    span.count = 8, span.first = 41, expect_refusal(&good, "spans[0] reads table entry 0 + 3 of 3");
    span.first = 30, expect_refusal(&good, "spans[0] reads block 4 through table entry 2, expected 0..3");
    span.first = -1, expect_refusal(&good, "spans[0] has table 0, first -1");
    span.first = 0, span.reserved[1] = 1, expect_refusal(&good, "the reserved bytes of spans[0]");
    bad = good, bad.spans = two, bad.n_spans = 2, expect_refusal(&bad, "spans[0] and spans[1] both have row 1");
    cpa_test_device_close(device, stream);
}

static void expect_bad_view(cpa_kv_view view, const char *line) {
    static const int64_t slot = 0;
    static const float row[CPA_MAX_HEAD_DIM];
    const cpa_kv_write_args args = {.size = sizeof args, .tokens = 1, .k = row, .slot_mapping = &slot, .kv = view};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void bad_caches_are_refused(void) {
    static _Alignas(16) float pool[2 * 16 * 656 / 4 + 1];
    const int64_t pairs[1][2] = {{0, 1}};
    cpa_test_device_open(2, &device, &stream);
    cpa_kv_view good = latents(CPA_FP8_T128, 576, 0, 2), bad;
    good.k = pool;
    bad = good, bad.v_in_k = 2, expect_bad_view(bad, "v_in_k is 2");
    bad = good, bad.v_in_k = 0, bad.v = pool, expect_bad_view(bad, "kv_dtype is fp8_t128 and v_in_k is 0");
    bad = good, bad.layout = CPA_VLLM_X, expect_bad_view(bad, "layout is 2 with v_in_k");
    bad = good, bad.k = (char *)pool + 2, expect_bad_view(bad, "expected multiples of 4 bytes for fp8_t128");
    bad = good, bad.k_token_stride = 655, expect_bad_view(bad, "k_token_stride is 655, expected 0 or at least 656");
    bad = good, bad.k_block_stride = 16 * 656 + 2, expect_bad_view(bad, "expected multiples of 4 bytes");
    bad = good, bad.k = NULL, expect_bad_view(bad, "the key pool is NULL");
    bad = good, bad.reserved[14] = 1, expect_bad_view(bad, "the reserved bytes of the view");
    good = latents(CPA_FP8_T64, 512, 0, 2), good.k = pool;
    bad = good, bad.k_block_stride = 37440 + 64;
    expect_bad_view(bad, "a block stride is 37504, expected a multiple of 576 and at least 9792, scales included");
    bad = good, bad.k_token_stride = 592, expect_bad_view(bad, "a token stride is 592, expected 576 for fp8_t64");
    bad = good, bad.k = (char *)pool + 4, expect_bad_view(bad, "expected multiples of 16 bytes for fp8_t64");
    bad = good, bad.k_scale = 1, expect_bad_view(bad, "for a cache of fp8_t64, expected none");
    good = latents(CPA_FP8_T128, 576, 0, 2), good.k = pool;
    bad = latents(CPA_FP8_E4M3, 576, 0.1f, 1), bad.k = pool, bad.v_scale = 0.2f;
    expect_bad_view(bad, "k_scale is 0.1 and v_scale is 0.2, expected one");
    const cpa_kv_write_args without = {.size = sizeof without, .tokens = 1, .kv = good};
    CU_ASSERT_EQUAL(cpa_kv_write(&without, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "k is NULL"));
    /* What v says is not looked at: equal addresses of it are no pool in common. */
    bad = good, bad.k = (char *)pool + 4;
    const cpa_kv_convert_args convert = {sizeof convert, good, good, pairs, 1},
                              other = {sizeof other, good, bad, pairs, 0};
    CU_ASSERT_EQUAL(cpa_kv_convert(&convert, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "the same key pool"));
    CU_ASSERT_EQUAL(cpa_kv_convert(&other, stream), CPA_OK);
    cpa_test_device_close(device, stream);
}

/* Latents have no scale of their own: that of 576 columns would be none's. */
static void attention_without_a_scale_is_refused(void) {
    static const float pool[16 * 48], q[2 * 48];
    static float out[2 * 32];
    const int32_t table = 0;
    const cpa_attend_item item = {.q_count = 1, .k_count = 1};
    const cpa_attention_shape shape = {.q_heads = 2, .kv_heads = 1, .k_dim = 48, .v_dim = 32, .v_in_k = 1};
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {1, 16},
                                    .shape = shape,
                                    .block_size = 16,
                                    .items = &item,
                                    .n_items = 1,
                                    .block_tables = &table,
                                    .n_table_entries = 1};
    cpa_attend_args args = {.size = sizeof args, .q = q, .out = out, .kv = latents(CPA_F32, 48, 0, 1)};
    cpa_attend_plan *plan;
    args.kv.v_dim = 32, args.kv.k = (void *)(uintptr_t)pool;
    cpa_test_device_open(2, &device, &stream);
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "scale is 0 over latents"));
    args.scale = 1, args.kv.v_in_k = 0, args.kv.v = args.kv.k;
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "the cache has v_in_k 0, but the plan has 1"));
    cpa_attend_plan_destroy(plan);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"rows are written with the bytes of an oracle", writes_have_the_bytes_of_an_oracle},
    {"blocks and tokens keep their bytes", blocks_and_tokens_keep_their_bytes},
    {"forms become each other", forms_become_each_other},
    {"gathered rows are what attend reads, rounded once", gathered_rows_are_rounded_once},
    {"bad gathers are refused", bad_gathers_are_refused},
    {"bad caches of latents are refused", bad_caches_are_refused},
    {"attention over latents without a scale is refused", attention_without_a_scale_is_refused},
};
CPA_DEVICE_TEST_MAIN("caches of latents", tests)
