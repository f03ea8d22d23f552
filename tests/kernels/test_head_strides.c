/* Heads that lie apart: tensors whose rows lie within heads, as [sequences, heads, tokens, dim] has them, give the bits
 * of dense rows, and nothing between their rows is read or written. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"
#include "tests/fixtures/varlen_fixture.h"

/* Rows of heads of `dim` elements of so many bytes; strides in elements. */
typedef struct strided {
    int64_t rows, row_stride, head_stride, bytes;
    int32_t heads, dim;
} strided;

/* Dense rows, and those within heads, with `gap` rows behind those of each head and `pad` elements behind each row. */
static strided dense_of(int64_t rows, int32_t heads, int32_t dim, int64_t bytes) {
    return (strided){rows, (int64_t)heads * dim, dim, bytes, heads, dim};
}
static strided within_heads(strided dense, int64_t gap, int64_t pad) {
    dense.row_stride = dense.dim + pad;
    dense.head_stride = (dense.rows + gap) * dense.row_stride;
    return dense;
}

static int64_t bytes_of(strided s) {
    const int64_t most = s.head_stride > s.row_stride ? s.heads * s.head_stride : s.rows * s.row_stride;
    return most * s.bytes;
}

/* Copies rows [from_row, from_row + n) of one tensor to those from to_row on of another. */
static void copy_rows(char *to, strided t, int64_t to_row, const char *from, strided f, int64_t from_row, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        for (int32_t head = 0; head < f.heads; head++)
            memcpy(to + ((to_row + i) * t.row_stride + head * t.head_stride) * t.bytes,
                   from + ((from_row + i) * f.row_stride + head * f.head_stride) * f.bytes, (size_t)(f.dim * f.bytes));
}

/* ---- attend over pages ---- */

typedef struct paged_run {
    strided q, out;
    int64_t lse_head_stride; /* 0: [rows, heads] */
    int with_state;          /* O of a state too */
    float out_scale;
} paged_run;

/* The result of a call as dense rows; *touched counts bytes of the memory of `out` and the LSEs that changed beside them. */
static cpa_attend_result attend_with(cpa_attend_fixture *f, const paged_run *run, int64_t *touched) {
    const cpa_attend_case *c = &f->shape;
    const strided dense_q = dense_of(f->rows, c->q_heads, c->k_dim, run->q.bytes);
    const strided dense_out = dense_of(f->rows, c->q_heads, c->v_dim, run->out.bytes);
    const int64_t out_bytes = bytes_of(run->out), lse_floats = f->rows * c->q_heads + 1024;
    cpa_attend_result result;
    f->out_scale = run->out_scale;
    cpa_attend_result_init(&result, f);
    char *q = cpa_test_poisoned(bytes_of(run->q), 1), *out = cpa_test_poisoned(out_bytes, 1);
    float *lse = cpa_test_poisoned(lse_floats, sizeof *lse);
    copy_rows(q, run->q, 0, f->q, dense_q, 0, f->rows);
    const cpa_attend_item item = cpa_attend_fixture_item(f, 0, 0, f->q_count[0], 0, 0, f->k_tokens[0]);
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = f->map,
                                    .shape = {.q_heads = c->q_heads,
                                              .kv_heads = c->kv_heads,
                                              .k_dim = c->k_dim,
                                              .v_dim = c->v_dim,
                                              .dtype = c->q_dtype,
                                              .kv_dtype = c->kv_dtype,
                                              .layout = c->layout,
                                              .v_in_k = c->v_in_k},
                                    .block_size = c->block_size,
                                    .items = &item,
                                    .n_items = 1,
                                    .block_tables = f->tables,
                                    .n_table_entries = f->n_table_entries};
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_set(f->plan, &batch, NULL), CPA_OK);
    const int dense = run->q.head_stride == c->k_dim; /* zeros stand for all strides of dense rows */
    void *scale = cpa_test_upload(f->stream, &run->out_scale, sizeof run->out_scale);
    cpa_attend_args args = {.size = sizeof args,
                            .q = cpa_test_upload(f->stream, q, bytes_of(run->q)),
                            .q_dtype = c->q_dtype,
                            .q_row_stride = dense ? 0 : run->q.row_stride,
                            .q_head_stride = dense ? 0 : run->q.head_stride,
                            .kv = f->device_kv,
                            .mask = c->mask,
                            .scale = c->scale,
                            .state.lse = cpa_test_upload(f->stream, lse, lse_floats * (int64_t)sizeof *lse),
                            .out = cpa_test_upload(f->stream, out, out_bytes),
                            .out_row_stride = dense ? 0 : run->out.row_stride,
                            .out_head_stride = dense ? 0 : run->out.head_stride,
                            .out_scale = run->out_scale != 0 ? scale : NULL,
                            .lse_head_stride = run->lse_head_stride};
    if (run->with_state) args.state.o = cpa_test_upload(f->stream, result.o, result.o_bytes);
    CU_ASSERT_EQUAL(cpa_attend(f->plan, &args, f->stream), CPA_OK);
    cpa_test_download(f->stream, out, args.out, out_bytes);
    cpa_test_download(f->stream, lse, args.state.lse, lse_floats * (int64_t)sizeof *lse);
    if (run->with_state) cpa_test_download(f->stream, result.o, args.state.o, result.o_bytes);
    copy_rows(result.out, dense_out, 0, out, run->out, 0, f->rows);
    for (int64_t row = 0; row < f->rows; row++)
        for (int32_t head = 0; head < c->q_heads; head++) {
            float *one = &lse[run->lse_head_stride ? row + head * run->lse_head_stride : row * c->q_heads + head];
            result.lse[row * c->q_heads + head] = *one;
            memset(one, UINT8_MAX, sizeof *one);
        }
    char *poison = cpa_test_poisoned(result.out_bytes, 1);
    copy_rows(out, run->out, 0, poison, dense_out, 0, f->rows);
    *touched = 0;
    for (int64_t at = 0; at < out_bytes; at++) *touched += (uint8_t)out[at] != UINT8_MAX;
    const uint8_t *lse_bytes = (const uint8_t *)lse;
    for (int64_t at = 0; at < lse_floats * (int64_t)sizeof *lse; at++) *touched += lse_bytes[at] != UINT8_MAX;
    void *uploaded[] = {scale, (void *)(uintptr_t)args.q, args.out, args.state.lse, args.state.o};
    for (size_t i = 0; i < sizeof uploaded / sizeof *uploaded; i++) cpa_test_free(f->stream, uploaded[i]);
    free(poison), free(q), free(out), free(lse);
    return result;
}

static void rows_within_heads_give_the_bits_of_dense_rows(void) {
    enum { KINDS = 8 };
    for (int i = 0; i < KINDS * CPA_ATTEND_BASES; i++) {
        cpa_attend_case c = CPA_ATTEND_BASE[i % CPA_ATTEND_BASES];
        const int kind = i / CPA_ATTEND_BASES;
        c.cp_size = 1;
        if (kind == 1) c.start = c.length - 2;             /* few rows, */
        if (kind == 2) c.start = (c.length = 5000) - 3;    /* whose keys are cut */
        if (kind == 3) c.k_dim = c.v_dim = 112;            /* a width that tiles do not have */
        if (kind == 4) c.layout = CPA_VLLM_X, c.start = 1; /* keys that are prepared */
        if (kind == 5) c.k_dim = c.v_dim = 320;            /* wide heads */
        if (kind >= 6) {                                   /* latents, of many rows and of few */
            c.kv_heads = c.v_in_k = 1, c.k_dim = 576, c.v_dim = 512, c.scale = 0.05f;
            if (kind == 7) c.start = c.length - 2;
        }
        cpa_attend_fixture f;
        cpa_attend_fixture_init(&f, &c, 2);
        const float out_scale = kind == 1 ? 0.02f : 0;
        const int64_t bytes = cpa_dtype_bytes(c.q_dtype), out_bytes = out_scale != 0 ? 1 : bytes;
        paged_run dense = {dense_of(f.rows, c.q_heads, c.k_dim, bytes), dense_of(f.rows, c.q_heads, c.v_dim, out_bytes),
                           0, kind % 2, out_scale};
        paged_run apart = dense;
        apart.q = within_heads(dense.q, 3, 16);
        apart.out = within_heads(dense.out, 2, kind == 0 ? 0 : 8);
        apart.lse_head_stride = f.rows + 5;
        int64_t touched;
        cpa_attend_result want = attend_with(&f, &dense, &touched), got = attend_with(&f, &apart, &touched);
        CU_ASSERT_EQUAL(touched, 0);
        CU_ASSERT(cpa_attend_result_same(&want, &got));
        cpa_attend_result_destroy(&want);
        cpa_attend_result_destroy(&got);
        cpa_attend_fixture_destroy(&f);
    }
}

/* ---- tensors without a cache ---- */

/* [segments, heads, tokens + 2, dim] of dense rows; the rows of segment s begin at s * heads * (tokens + 2). */
static char *of_batches(const char *rows, strided dense, const int64_t *starts, int64_t n, int64_t tokens,
                        strided *out) {
    *out = dense;
    out->row_stride = dense.dim;
    out->head_stride = (tokens + 2) * dense.dim;
    char *memory = cpa_test_poisoned(n * dense.heads * out->head_stride * dense.bytes, 1);
    for (int64_t s = 0; s < n; s++)
        copy_rows(memory, *out, s * dense.heads * (tokens + 2), rows, dense, starts[s], starts[s + 1] - starts[s]);
    return memory;
}

/* Elements that are not alike: in their bits where these are promised, else by more than rounding. */
static int64_t differing(const void *got, const void *expected, int64_t n, cpa_dtype dtype) {
    int64_t different = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i * cpa_dtype_bytes(dtype);
        float x, want;
        if (!memcmp((const char *)got + at, (const char *)expected + at, (size_t)cpa_dtype_bytes(dtype))) continue;
        cpa_widen(&x, (const char *)got + at, dtype, 1);
        cpa_widen(&want, (const char *)expected + at, dtype, 1);
        different += cpa_test_promises_bits() || !(fabsf(x - want) <= 0x1p-7f * fmaxf(1, fabsf(want)));
        if (different == 1) printf(" element %lld is %g, expected %g ", (long long)i, (double)x, (double)want);
    }
    return different;
}

static void attend_batches(const cpa_test_varlen_case *c) {
    cpa_test_varlen_site site;
    cpa_test_varlen_tensors t;
    cpa_test_varlen_result want;
    int64_t q_starts[CPA_TEST_MOST_SEGMENTS + 1], k_starts[CPA_TEST_MOST_SEGMENTS + 1];
    int64_t q_counts[CPA_TEST_MOST_SEGMENTS], k_counts[CPA_TEST_MOST_SEGMENTS];
    const int64_t bytes = cpa_dtype_bytes(c->dtype), n = c->n_segments;
    strided q, k, v, out;
    cpa_test_varlen_open(&site, 2);
    cpa_test_varlen_make(c, &t);
    CU_ASSERT_EQUAL_FATAL(cpa_test_varlen_attend(&site, c, &t, &want), CPA_OK);
    const strided dense_out = dense_of(t.q_rows, c->q_heads, c->v_dim, bytes);
    char *qs = of_batches(t.q, dense_of(t.q_rows, c->q_heads, c->k_dim, bytes), t.q_starts, n, c->rows, &q);
    char *ks = of_batches(t.k, dense_of(t.k_rows, c->kv_heads, c->k_dim, bytes), t.k_starts, n, c->keys, &k);
    char *vs = of_batches(t.v, dense_of(t.k_rows, c->kv_heads, c->v_dim, bytes), t.k_starts, n, c->keys, &v);
    const int64_t q_bytes = n * q.heads * q.head_stride * bytes, k_bytes = n * k.heads * k.head_stride * bytes,
                  v_bytes = n * v.heads * v.head_stride * bytes;
    char *expected = of_batches(want.out, dense_out, t.q_starts, n, c->rows, &out);
    const int64_t out_bytes = n * out.heads * out.head_stride * bytes, lses = n * out.heads * (c->rows + 2);
    char *got = cpa_test_poisoned(out_bytes, 1);
    float *lse = cpa_test_poisoned(lses, sizeof *lse);
    for (int64_t s = 0; s <= n; s++) {
        q_starts[s] = s * c->q_heads * (c->rows + 2);
        k_starts[s] = s * c->kv_heads * (c->keys + 2);
        if (s < n) q_counts[s] = t.q_starts[s + 1] - t.q_starts[s], k_counts[s] = t.k_starts[s + 1] - t.k_starts[s];
    }
    const cpa_varlen_batch batch = {.size = sizeof batch,
                                    .q_heads = c->q_heads,
                                    .kv_heads = c->kv_heads,
                                    .k_dim = c->k_dim,
                                    .v_dim = c->v_dim,
                                    .n_segments = n,
                                    .q_starts = q_starts,
                                    .k_starts = k_starts,
                                    .causal = c->causal,
                                    .q_counts = q_counts,
                                    .k_counts = k_counts};
    CU_ASSERT_EQUAL_FATAL(cpa_varlen_plan_set(site.plan, &batch, NULL), CPA_OK);
    cpa_varlen_attend_args args = {.size = sizeof args,
                                   .dtype = c->dtype,
                                   .q = cpa_test_upload(site.stream, qs, q_bytes),
                                   .k = cpa_test_upload(site.stream, ks, k_bytes),
                                   .v = cpa_test_upload(site.stream, vs, v_bytes),
                                   .q_row_stride = q.row_stride,
                                   .k_row_stride = k.row_stride,
                                   .v_row_stride = v.row_stride,
                                   .causal = c->causal,
                                   .left = c->left,
                                   .right = c->right,
                                   .state.lse = cpa_test_upload(site.stream, lse, lses * (int64_t)sizeof *lse),
                                   .out = cpa_test_upload(site.stream, got, out_bytes),
                                   .q_head_stride = q.head_stride,
                                   .k_head_stride = k.head_stride,
                                   .v_head_stride = v.head_stride,
                                   .out_row_stride = out.row_stride,
                                   .out_head_stride = out.head_stride,
                                   .lse_head_stride = c->rows + 2};
    CU_ASSERT_EQUAL(cpa_varlen_attend(site.plan, &args, site.stream), CPA_OK);
    cpa_test_download(site.stream, got, args.out, out_bytes);
    cpa_test_download(site.stream, lse, args.state.lse, lses * (int64_t)sizeof *lse);
    CU_ASSERT_EQUAL(differing(got, expected, out_bytes / bytes, c->dtype), 0);
    const strided dense_lse = dense_of(t.q_rows, c->q_heads, 1, sizeof(float));
    strided lse_of;
    char *expected_lse = of_batches((char *)want.lse, dense_lse, t.q_starts, n, c->rows, &lse_of);
    CU_ASSERT_EQUAL(differing(lse, expected_lse, lses, CPA_F32), 0);
    const void *uploaded[] = {args.q, args.k, args.v, args.state.lse, args.out};
    for (size_t i = 0; i < sizeof uploaded / sizeof *uploaded; i++)
        cpa_test_free(site.stream, (void *)(uintptr_t)uploaded[i]);
    free(qs), free(ks), free(vs), free(expected), free(expected_lse), free(got), free(lse);
    cpa_test_varlen_free_result(&want);
    cpa_test_varlen_free(c, &t);
    cpa_test_varlen_close(&site);
}

static void batches_of_heads_are_attended_as_they_lie(void) {
    const cpa_test_varlen_case cases[] = {
        {.q_heads = 4, .kv_heads = 2, .k_dim = 40, .v_dim = 24, .n_segments = 3, .rows = 70, .keys = 90, .causal = 1},
        {.dtype = CPA_BF16,
         .q_heads = 4,
         .kv_heads = 2,
         .k_dim = 64,
         .v_dim = 64,
         .n_segments = 4,
         .rows = 150,
         .keys = 150,
         .ragged = 2,
         .causal = 1},
        {.dtype = CPA_F16,
         .q_heads = 6,
         .kv_heads = 3,
         .k_dim = 128,
         .v_dim = 128,
         .n_segments = 3,
         .rows = 130,
         .keys = 130,
         .left = 50,
         .right = 9},
        {.dtype = CPA_BF16,
         .q_heads = 2,
         .kv_heads = 2,
         .k_dim = 80,
         .v_dim = 80,
         .n_segments = 2,
         .rows = 3,
         .keys = 300},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) attend_batches(&cases[i]);
}

/* ---- writes ---- */

/* The pool that a write of these rows leaves, all of them within heads or dense. */
static cpa_kv_fixture pool_after(const cpa_kv_view *shape, cpa_dtype from, int64_t tokens, int apart,
                                 cpa_stream *stream) {
    cpa_kv_fixture pool;
    const int64_t bytes = cpa_dtype_bytes(from);
    const strided dense[] = {dense_of(tokens, shape->kv_heads, shape->k_dim, bytes),
                             dense_of(tokens, shape->kv_heads, shape->v_dim, bytes)};
    strided of[2];
    char *memory[2];
    int64_t slots[64];
    cpa_kv_fixture_init_layout(&pool, *shape, shape->layout);
    for (int part = 0; part < 2; part++) {
        const int64_t n = tokens * dense[part].heads * dense[part].dim;
        float *values = malloc((size_t)n * sizeof *values);
        for (int64_t i = 0; i < n; i++) values[i] = (float)((i * 7919 + part) % 1001 - 500) / 64;
        char *rows = malloc((size_t)(n * bytes));
        cpa_narrow(rows, values, from, n);
        of[part] = apart ? within_heads(dense[part], 2 + part, 8) : dense[part];
        char *placed = cpa_test_poisoned(bytes_of(of[part]), 1);
        copy_rows(placed, of[part], 0, rows, dense[part], 0, tokens);
        memory[part] = cpa_test_upload(stream, placed, bytes_of(of[part]));
        free(placed), free(rows), free(values);
    }
    for (int64_t i = 0; i < tokens; i++)
        slots[i] = i % 9 == 4 ? -1 : (i * 29) % (shape->num_blocks * shape->block_size);
    cpa_kv_view view = cpa_kv_fixture_upload(&pool, stream);
    cpa_kv_write_args args = {.size = sizeof args,
                              .tokens = tokens,
                              .dtype = from,
                              .k = memory[0],
                              .v = memory[1],
                              .slot_mapping = cpa_test_upload(stream, slots, sizeof slots),
                              .kv = view};
    if (apart) {
        args.k_row_stride = of[0].row_stride, args.k_head_stride = of[0].head_stride;
        args.v_row_stride = of[1].row_stride, args.v_head_stride = of[1].head_stride;
    }
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&pool, &view, stream);
    cpa_kv_view_free(&view, stream);
    cpa_test_free(stream, (void *)(uintptr_t)args.slot_mapping);
    cpa_test_free(stream, memory[0]);
    cpa_test_free(stream, memory[1]);
    return pool;
}

static void keys_within_heads_are_written_as_dense_ones(void) {
    const cpa_kv_view base = {.block_size = 16, .num_blocks = 5, .kv_heads = 3};
    const struct {
        cpa_dtype from, to;
        int32_t k_dim, v_dim;
        cpa_kv_layout layout;
        float scale;
    } kinds[] = {
        {CPA_F32, CPA_F32, 7, 5, CPA_TOKEN_MAJOR, 0},     {CPA_BF16, CPA_BF16, 64, 128, CPA_HEAD_MAJOR, 0},
        {CPA_F16, CPA_F32, 64, 64, CPA_TOKEN_MAJOR, 0},   {CPA_BF16, CPA_BF16, 64, 48, CPA_VLLM_X, 0},
        {CPA_BF16, CPA_INT8, 64, 64, CPA_TOKEN_MAJOR, 0}, {CPA_F32, CPA_FP8_E4M3, 80, 64, CPA_HEAD_MAJOR, 0.1f}};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(1, &device, &stream);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        cpa_kv_view shape = base;
        shape.dtype = kinds[i].to, shape.layout = kinds[i].layout;
        shape.k_dim = kinds[i].k_dim, shape.v_dim = kinds[i].v_dim;
        shape.k_scale = shape.v_scale = kinds[i].scale;
        cpa_kv_fixture dense = pool_after(&shape, kinds[i].from, 41, 0, stream),
                       apart = pool_after(&shape, kinds[i].from, 41, 1, stream);
        CU_ASSERT_EQUAL(memcmp(dense.view.k, apart.view.k, (size_t)dense.k_bytes), 0);
        CU_ASSERT_EQUAL(memcmp(dense.view.v, apart.view.v, (size_t)dense.v_bytes), 0);
        cpa_kv_fixture_destroy(&dense);
        cpa_kv_fixture_destroy(&apart);
    }
    cpa_test_device_close(device, stream);
}

/* ---- refusals ---- */

static void strides_that_none_can_have_are_refused(void) {
    cpa_attend_case c = CPA_ATTEND_BASE[0];
    c.cp_size = 1;
    cpa_attend_fixture f;
    int64_t touched;
    cpa_attend_fixture_init(&f, &c, 1);
    const paged_run dense = {dense_of(f.rows, c.q_heads, c.k_dim, 4), dense_of(f.rows, c.q_heads, c.v_dim, 4), 0, 0, 0};
    cpa_attend_result result = attend_with(&f, &dense, &touched); /* which sets the plan */
    const cpa_attend_args good = {
        .size = sizeof good, .q = f.device_q, .kv = f.device_kv, .out = result.out, .state.lse = result.lse};
    struct {
        int64_t q_row, q_head, out_row, out_head, lse_row, lse_head;
        const char *line;
    } bad[] = {
        {.q_head = c.k_dim - 1, .line = "attend: q_head_stride is"},
        {.q_row = c.k_dim - 1, .q_head = c.k_dim * 1000, .line = "attend: q_row_stride is"},
        {.q_row = c.k_dim, .line = "attend: q_row_stride is"},
        {.out_head = -c.v_dim, .line = "attend: out_head_stride is"},
        {.out_row = c.v_dim, .line = "attend: out_row_stride is"},
        {.out_row = c.v_dim, .out_head = c.v_dim + 1, .line = "that do not overlap"},
        {.out_row = c.v_dim, .out_head = INT64_MAX / 2, .line = "reach beyond 2^60 bytes"},
        {.lse_row = 2, .lse_head = 1000, .line = "attend: lse_row_stride is 2 and lse_head_stride is 1000"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_attend_args args = good;
        args.q_row_stride = bad[i].q_row, args.q_head_stride = bad[i].q_head;
        args.out_row_stride = bad[i].out_row, args.out_head_stride = bad[i].out_head;
        args.state.lse_row_stride = bad[i].lse_row, args.lse_head_stride = bad[i].lse_head;
        CU_ASSERT_EQUAL(cpa_attend(f.plan, &args, f.stream), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(f.stream), bad[i].line));
    }
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&f);
}

static const cpa_test TESTS[] = {
    {"rows within heads give the bits of dense rows", rows_within_heads_give_the_bits_of_dense_rows},
    {"batches of heads are attended as they lie", batches_of_heads_are_attended_as_they_lie},
    {"keys within heads are written as dense ones are", keys_within_heads_are_written_as_dense_ones},
    {"strides that none can have are refused", strides_that_none_can_have_are_refused},
};

CPA_DEVICE_TEST_MAIN("heads that lie apart", TESTS)
