/* qk_norm_rope against float64, its cache writes against kv_write bit for bit, and the tables of rotary positions. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

enum { ROWS = 9, POSITIONS = 300, BLOCK = 16, BLOCKS = 5 };
static const double THETA = 1e4;
static float eps = 1e-5f;

/* Positions at both ends of the table and outside of it; two rows share one. */
static const int64_t AT[ROWS] = {0, 1, POSITIONS - 1, POSITIONS, 17, 17, -1, 255, INT64_MAX};
/* Those of height and width, which rows of other forms do not read. */
static const int64_t MORE_AT[2 * ROWS] = {5, 0,  99, 7, POSITIONS, 2, 3, 4,
                                          5, /* width */
                                          8, 64, 1,  2, 3,         0, 9, POSITIONS - 1,
                                          6};
static const int64_t SLOTS[ROWS] = {7, BLOCK *BLOCKS - 1, 0, 33, -1, 34, 35, 16, -1};
enum { NAN_ROW = 5 };

typedef struct form {
    int32_t q_heads, kv_heads, k_dim, v_dim;
    cpa_dtype dtype, kv_dtype;
    float tensor_scale;
    int head_major, norm;
    float weight_offset;
    int32_t dim, first, interleaved; /* of the rotation; dim 0: none */
    int pad;
    int32_t inverse, sections[3], sections_interleaved;
} form;

static const form FORMS[] = {
    {4, 2, 64, 64, CPA_BF16, CPA_BF16, 0, 0, 1, 0, 64, 0, 0, 8, 0, {0}, 0},
    {16, 4, 128, 128, CPA_BF16, CPA_BF16, 0, 1, 1, 0, 128, 0, 1, 0, 0, {0}, 0},
    {3, 1, 80, 80, CPA_F16, CPA_F16, 0, 0, 0, 0, 80, 0, 1, 3, 0, {0}, 0},
    {2, 2, 120, 120, CPA_F32, CPA_F32, 0, 0, 1, 1, 32, 0, 0, 0, 0, {0}, 0},
    {17, 1, 256, 64, CPA_BF16, CPA_FP8_E4M3, 0, 1, 0, 0, 64, 192, 1, 8, 0, {0}, 0},
    {4, 2, 64, 24, CPA_F32, CPA_INT8, 0, 0, 1, 0, 32, 16, 0, 4, 0, {0}, 0},
    {1, 1, 128, 128, CPA_BF16, CPA_FP8_E4M3, 0.5f, 0, 1, 0, 128, 0, 0, 0, 0, {0}, 0},
    {2, 2, 10, 6, CPA_F16, CPA_F32, 0, 1, 1, 0, 0, 0, 0, 1, 0, {0}, 0},
    {5, 0, 64, 64, CPA_BF16, CPA_BF16, 0, 0, 1, 0, 64, 0, 0, 0, 0, {0}, 0},
    {0, 3, 64, 64, CPA_BF16, CPA_INT8, 0, 0, 1, 0, 64, 0, 0, 8, 0, {0}, 0},
    {4, 2, 64, 64, CPA_BF16, CPA_BF16, 0, 0, 1, 0, 64, 0, 0, 8, 1, {0}, 0},
    {16, 4, 128, 128, CPA_BF16, CPA_BF16, 0, 0, 1, 0, 128, 0, 0, 0, 0, {16, 24, 24}, 0},
    {16, 2, 64, 64, CPA_BF16, CPA_BF16, 0, 0, 1, 0, 64, 0, 0, 0, 0, {8, 12, 12}, 0},
    {8, 8, 256, 256, CPA_BF16, CPA_BF16, 0, 0, 1, 0, 256, 0, 0, 0, 0, {32, 48, 48}, 0},
    {8, 2, 128, 128, CPA_BF16, CPA_FP8_E4M3, 0, 0, 1, 0, 128, 0, 0, 0, 0, {24, 20, 20}, 1},
    {3, 1, 80, 80, CPA_F32, CPA_F32, 0, 0, 0, 0, 40, 8, 1, 3, 1, {8, 7, 5}, 1},
};
enum { N_FORMS = sizeof FORMS / sizeof *FORMS };

/* What a call reads and writes. */
typedef struct call {
    const form *form;
    cpa_test_tensor qkv, q_weight, k_weight, q, k, v;
    float *table;
    void *device_table;
    int64_t *positions, *slots; /* device */
    uint8_t *nonfinite;         /* device */
    cpa_kv_fixture pool;        /* all NaN */
    cpa_qk_norm_rope_args args;
} call;

static float *make_table(int32_t dim) {
    const cpa_rope_config config = {
        .size = sizeof config, .scaling = CPA_ROPE_PLAIN, .dim = dim, .theta = THETA, .max_position = POSITIONS};
    cpa_error err = {0};
    float *table = malloc((size_t)(POSITIONS * dim) * sizeof *table);
    CU_ASSERT_EQUAL_FATAL(cpa_rope_table(&config, table, &err), CPA_OK);
    return table;
}

static void make(call *c, const form *f) {
    const int64_t q = (int64_t)f->q_heads * f->k_dim, k = (int64_t)f->kv_heads * f->k_dim,
                  v = (int64_t)f->kv_heads * f->v_dim;
    const uint8_t flags[ROWS] = {0};
    *c = (call){.form = f};
    c->qkv = cpa_test_tensor_make(stream, f->dtype, ROWS, q + k + v, q + k + v + f->pad, 1);
    cpa_test_row(&c->qkv, NAN_ROW)[q + k + v - 1] = NAN; /* of the last value, or query */
    cpa_test_tensor_send(&c->qkv, stream);
    c->q_weight = cpa_test_tensor_make(stream, f->dtype, 1, f->k_dim, 0, 2);
    c->k_weight = cpa_test_tensor_make(stream, f->dtype, 1, f->k_dim, 0, 3);
    c->q = cpa_test_tensor_blank(stream, f->dtype, ROWS, q, q + f->pad);
    c->k = cpa_test_tensor_blank(stream, f->dtype, ROWS, k, k + 2 * f->pad);
    c->v = cpa_test_tensor_blank(stream, f->dtype, ROWS, v, v + f->pad);
    if (f->dim) {
        c->table = make_table(f->dim);
        c->device_table = cpa_test_upload(stream, c->table, POSITIONS * f->dim * (int64_t)sizeof *c->table);
    }
    int64_t positions[3 * ROWS];
    memcpy(positions, AT, sizeof AT);
    memcpy(positions + ROWS, MORE_AT, sizeof MORE_AT);
    c->positions = cpa_test_upload(stream, positions, sizeof positions);
    c->slots = cpa_test_upload(stream, SLOTS, sizeof SLOTS);
    c->nonfinite = cpa_test_upload(stream, flags, sizeof flags);
    c->args = (cpa_qk_norm_rope_args){
        .size = sizeof c->args,
        .rows = ROWS,
        .shape =
            {.q_heads = f->q_heads, .kv_heads = f->kv_heads, .k_dim = f->k_dim, .v_dim = f->v_dim, .dtype = f->dtype},
        .qkv = c->qkv.device,
        .qkv_stride = c->qkv.stride,
        .q_weight = f->norm ? c->q_weight.device : NULL,
        .k_weight = f->norm ? c->k_weight.device : NULL,
        .weight_offset = f->weight_offset,
        .eps = eps,
        .rope = {.table = c->device_table,
                 .max_position = POSITIONS,
                 .dim = f->dim,
                 .first = f->first,
                 .interleaved = f->interleaved,
                 .inverse = f->inverse,
                 .sections = {f->sections[0], f->sections[1], f->sections[2]},
                 .sections_interleaved = f->sections_interleaved},
        .positions = c->positions,
        .q = c->q.device,
        .q_stride = c->q.stride,
    };
    if (!f->kv_heads) return;
    cpa_kv_fixture_init_view(&c->pool,
                             (cpa_kv_view){.dtype = f->kv_dtype,
                                           .block_size = BLOCK,
                                           .num_blocks = BLOCKS,
                                           .kv_heads = f->kv_heads,
                                           .k_dim = f->k_dim,
                                           .v_dim = f->v_dim,
                                           .k_scale = f->tensor_scale,
                                           .v_scale = f->tensor_scale},
                             f->head_major);
}

static void destroy(call *c) {
    cpa_test_tensor *const tensors[] = {&c->qkv, &c->q_weight, &c->k_weight, &c->q, &c->k, &c->v};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) cpa_test_tensor_free(tensors[i], stream);
    if (c->form->kv_heads) cpa_kv_fixture_destroy(&c->pool);
    cpa_test_free(stream, c->nonfinite);
    cpa_test_free(stream, c->slots);
    cpa_test_free(stream, c->positions);
    cpa_test_free(stream, c->device_table);
    free(c->table);
}

/* ---- queries and keys against float64 ---- */

/* The position that turns a pair of a row. */
static int64_t position_of(const form *f, int row, int pair) {
    const int32_t *s = f->sections;
    int kind = 0;
    if (f->sections_interleaved) {
        kind = pair % 3 == 1 && pair < 3 * s[1] ? 1 : pair % 3 == 2 && pair < 3 * s[2] ? 2 : 0;
    } else if (s[0]) {
        kind = pair < s[0] ? 0 : pair < s[0] + s[1] ? 1 : 2;
    }
    return kind ? MORE_AT[(kind - 1) * ROWS + row] : AT[row];
}

static int is_outside(const form *f, int row) {
    int outside = AT[row] < 0 || AT[row] >= POSITIONS;
    for (int kind = 0; f->sections[0] && kind < 2; kind++) outside |= MORE_AT[kind * ROWS + row] >= POSITIONS;
    return f->dim && outside;
}

/* The elements of a head that are wrong. */
static int wrong_in_head(const call *c, const float *in, const float *weight, int row, const float *got) {
    const form *f = c->form;
    double want[CPA_MAX_HEAD_DIM], size[CPA_MAX_HEAD_DIM], squares = 0;
    int wrong = 0;
    for (int i = 0; i < f->k_dim; i++) squares += (double)in[i] * (double)in[i];
    const double scale = f->norm ? 1 / sqrt(squares / f->k_dim + (double)eps) : 1;
    for (int i = 0; i < f->k_dim; i++) {
        want[i] = (double)in[i] * scale * (f->norm ? (double)weight[i] + (double)f->weight_offset : 1);
        size[i] = fabs(want[i]);
    }
    for (int i = 0; i < f->dim / 2; i++) {
        const int x = f->first + (f->interleaved ? 2 * i : i), y = x + (f->interleaved ? 1 : f->dim / 2);
        const double angle = (double)position_of(f, row, i) * pow(THETA, -2.0 * i / f->dim), a = want[x], b = want[y],
                     sine = f->inverse ? -sin(angle) : sin(angle);
        want[x] = a * cos(angle) - b * sine;
        want[y] = b * cos(angle) + a * sine;
        size[x] = size[y] = fabs(a) + fabs(b);
    }
    const int outside = is_outside(f, row);
    for (int i = 0; i < f->k_dim; i++)
        wrong += !cpa_test_is_near(got[i], outside ? NAN : want[i], f->dtype, 1e-6 * size[i]);
    return wrong;
}

static int wrong_elements(const call *c) {
    const form *f = c->form;
    int wrong = 0;
    for (int row = 0; row < ROWS; row++) {
        const float *in = cpa_test_row(&c->qkv, row), *values = in + (f->q_heads + f->kv_heads) * f->k_dim;
        for (int head = 0; head < f->q_heads; head++, in += f->k_dim)
            wrong += wrong_in_head(c, in, c->q_weight.values, row, cpa_test_row(&c->q, row) + head * f->k_dim);
        for (int head = 0; head < f->kv_heads; head++, in += f->k_dim)
            wrong += wrong_in_head(c, in, c->k_weight.values, row, cpa_test_row(&c->k, row) + head * f->k_dim);
        for (int i = 0; i < f->kv_heads * f->v_dim; i++) {
            const float got = cpa_test_row(&c->v, row)[i];
            wrong += got != values[i] && !(isnan(got) && isnan(values[i]));
        }
    }
    return wrong;
}

/* To q, k and v alone. */
static void run_apart(call *c) {
    cpa_qk_norm_rope_args args = c->args;
    args.k = c->k.device, args.k_stride = c->k.stride;
    args.v = c->v.device, args.v_stride = c->v.stride;
    CU_ASSERT_EQUAL(cpa_qk_norm_rope(&args, stream), CPA_OK);
    cpa_test_tensor_fetch(&c->q, stream);
    cpa_test_tensor_fetch(&c->k, stream);
    cpa_test_tensor_fetch(&c->v, stream);
}

static void check_heads(const form *f) {
    call c;
    make(&c, f);
    run_apart(&c);
    CU_ASSERT_EQUAL(wrong_elements(&c), 0);
    CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&c.q));
    CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&c.k));
    CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&c.v));
    destroy(&c);
}

static void heads_are_those_of_float64(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_FORMS; i++) check_heads(&FORMS[i]);
    cpa_test_device_close(device, stream);
}

/* vLLM's grid of tests/kernels/core/test_fused_qk_norm_rope.py: what part is rotated, pairs, eps and dtype. */
static void grid_of_heads(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < 24; i++) {
        const cpa_dtype dtype = i % 2 ? CPA_F16 : CPA_BF16;
        const form f = {16, 4, 128, 128, dtype, dtype, 0, 0, 1, 0, 128 >> i / 8, 0, i / 2 % 2, 0, 0, {0}, 0};
        eps = i / 4 % 2 ? 1e-6f : 1e-5f;
        check_heads(&f);
    }
    eps = 1e-5f;
    cpa_test_device_close(device, stream);
}

/* ---- the cache ---- */

/* A pool that kv_write has filled from k and v, and its flags. */
static void write_apart(const call *c, cpa_kv_fixture *out, uint8_t *flags) {
    const form *f = c->form;
    cpa_test_tensor k = cpa_test_tensor_blank(stream, f->dtype, ROWS, c->k.width, 0);
    cpa_test_tensor v = cpa_test_tensor_blank(stream, f->dtype, ROWS, c->v.width, 0);
    for (int row = 0; row < ROWS; row++) {
        memcpy(cpa_test_row(&k, row), cpa_test_row(&c->k, row), (size_t)k.width * sizeof *k.values);
        memcpy(cpa_test_row(&v, row), cpa_test_row(&c->v, row), (size_t)v.width * sizeof *v.values);
    }
    cpa_test_tensor_send(&k, stream);
    cpa_test_tensor_send(&v, stream);
    cpa_kv_fixture_init_view(out, c->pool.view, f->head_major);
    cpa_kv_view view = cpa_kv_fixture_upload(out, stream);
    cpa_kv_write_args args = {sizeof args, ROWS,         f->dtype, k.device, v.device, c->slots,
                              view,        c->nonfinite, 0,        0,        0,        0};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_kv_fixture_download(out, &view, stream);
    cpa_test_download(stream, flags, c->nonfinite, ROWS);
    cpa_kv_view_free(&view, stream);
    cpa_test_tensor_free(&v, stream);
    cpa_test_tensor_free(&k, stream);
}

static void check_pages(call *c) {
    uint8_t want_flags[ROWS], flags[ROWS];
    const uint8_t none[ROWS] = {0};
    cpa_kv_fixture want;
    run_apart(c);
    write_apart(c, &want, want_flags);
    uint8_t *raised = cpa_test_upload(stream, none, sizeof none);
    cpa_kv_view view = cpa_kv_fixture_upload(&c->pool, stream);
    cpa_qk_norm_rope_args args = c->args;
    args.slot_mapping = c->slots, args.kv = view, args.nonfinite = raised;
    CU_ASSERT_EQUAL(cpa_qk_norm_rope(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&c->pool, &view, stream);
    cpa_test_download(stream, flags, raised, ROWS);
    CU_ASSERT_EQUAL(memcmp(c->pool.view.k, want.view.k, (size_t)want.k_bytes), 0);
    CU_ASSERT_EQUAL(memcmp(c->pool.view.v, want.view.v, (size_t)want.v_bytes), 0);
    CU_ASSERT_EQUAL(memcmp(flags, want_flags, ROWS), 0);
    CU_ASSERT_EQUAL(flags[NAN_ROW], 1);
    CU_ASSERT_EQUAL(flags[0], 0);
    cpa_kv_view_free(&view, stream);
    cpa_test_free(stream, raised);
    cpa_kv_fixture_destroy(&want);
}

static void pages_get_the_bits_of_kv_write(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_FORMS; i++) {
        call c;
        if (!FORMS[i].kv_heads) continue;
        make(&c, &FORMS[i]);
        check_pages(&c);
        destroy(&c);
    }
    cpa_test_device_close(device, stream);
}

/* ---- tables ---- */

/* A configuration and the frequencies that transformers 5.23 derives from it, in fp32. */
typedef struct known_table {
    cpa_rope_config config;
    double size; /* of cosines and sines */
    int32_t index[7];
    double frequency[7];
} known_table;

static const known_table KNOWN[] = {
    {{sizeof(cpa_rope_config), CPA_ROPE_LINEAR, 128, 1e4, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0},
     1,
     {0, 1, 16, 32, 35, 48, 63},
     {0.25, 0.216491088, 0.0250000004, 0.00249999994, 0.00162345415, 0.000250000012, 2.88695483e-05}},
    {{sizeof(cpa_rope_config), CPA_ROPE_LLAMA3, 128, 5e5, 2, 8, 1, 4, 0, 0, 0, 8192, 0, 0},
     1,
     {0, 1, 16, 32, 35, 48, 63},
     {1, 0.814617217, 0.0376060307, 0.000524846022, 9.55621217e-05, 6.64786967e-06, 3.06892588e-07}},
    {{sizeof(cpa_rope_config), CPA_ROPE_LLAMA3, 64, 5e5, 2, 32, 1, 4, 0, 0, 0, 8192, 0, 0},
     1,
     {0, 1, 8, 16, 19, 24, 31},
     {1, 0.663601279, 0.0376060307, 0.000429556705, 1.29147675e-05, 1.66196742e-06, 9.41830649e-08}},
    {{sizeof(cpa_rope_config), CPA_ROPE_YARN, 128, 1e6, 2, 4, 0, 0, 0, 0, 0, 32768, 0, 0},
     1.138629436111989,
     {0, 1, 16, 32, 35, 48, 63},
     {1, 0.805842221, 0.0316227786, 0.000602941145, 0.000246258394, 7.90569356e-06, 3.10234441e-07}},
    {{sizeof(cpa_rope_config), CPA_ROPE_YARN, 64, 1e4, 2, 40, 0, 0, 32, 1, 1, 4096, 0, 0},
     1,
     {0, 1, 8, 16, 19, 24, 31},
     {1, 0.749894202, 0.100000001, 0.00550000044, 0.00137051346, 2.49999994e-05, 3.33380353e-06}},
    {{sizeof(cpa_rope_config), CPA_ROPE_YARN, 16, 1e4, 2, 2, 0, 0, 16, 2, 1.25, 32, 0, 0},
     1.25,
     {0, 1, 2, 4, 7, 6, 7},
     {1, 0.158113882, 0.0500000007, 0.00499999989, 0.000158113893, 0.000500000024, 0.000158113893}},
    /* DeepSeek's: equal ones give 1; then two that differ; and one alone, as DeepSeek's own code has it. */
    {{sizeof(cpa_rope_config), CPA_ROPE_YARN, 64, 1e4, 2, 40, 0, 0, 32, 1, 0, 4096, 1, 1},
     1,
     {0, 1, 8, 16, 19, 24, 31},
     {1, 0.749894202, 0.100000001, 0.00550000044, 0.00137051346, 2.49999994e-05, 3.33380353e-06}},
    {{sizeof(cpa_rope_config), CPA_ROPE_YARN, 64, 1e4, 2, 40, 0, 0, 32, 1, 0, 4096, 0.707, 0.5},
     1.0644689039,
     {0, 1, 8, 16, 19, 24, 31},
     {1, 0.749894202, 0.100000001, 0.00550000044, 0.00137051346, 2.49999994e-05, 3.33380353e-06}},
    {{sizeof(cpa_rope_config), CPA_ROPE_YARN, 64, 1e4, 2, 40, 0, 0, 32, 1, 0, 4096, 0.707, 0},
     1.2608037774,
     {0, 1, 8, 16, 19, 24, 31},
     {1, 0.749894202, 0.100000001, 0.00550000044, 0.00137051346, 2.49999994e-05, 3.33380353e-06}},
};

static void tables_have_the_frequencies_of_transformers(void) {
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++) {
        const known_table *known = &KNOWN[i];
        const int32_t dim = known->config.dim;
        float table[2 * CPA_MAX_HEAD_DIM];
        CU_ASSERT_EQUAL(cpa_rope_table(&known->config, table, NULL), CPA_OK);
        for (int j = 0; j < 7; j++) {
            const double cosine = (double)table[dim + known->index[j]],
                         sine = (double)table[dim + dim / 2 + known->index[j]], want = known->frequency[j];
            CU_ASSERT_DOUBLE_EQUAL(atan2(sine, cosine), want, 1e-6 * want);
            CU_ASSERT_DOUBLE_EQUAL(hypot(sine, cosine), known->size, 1e-6);
        }
    }
}

static void far_positions_keep_their_digits(void) {
    enum { DIM = 16, FAR = 1 << 18 };
    const cpa_rope_config config = {.size = sizeof config, .dim = DIM, .theta = 5e5, .max_position = FAR};
    float *table = malloc((size_t)FAR * DIM * sizeof *table);
    int wrong = 0;
    CU_ASSERT_EQUAL(cpa_rope_table(&config, table, NULL), CPA_OK);
    for (int64_t position = FAR - 3; position < FAR; position++) {
        for (int i = 0; i < DIM / 2; i++) {
            const double angle = (double)position * pow(5e5, -2.0 * i / DIM);
            wrong += !cpa_test_is_near(table[position * DIM + i], cos(angle), CPA_F32, 1e-9);
            wrong += !cpa_test_is_near(table[position * DIM + DIM / 2 + i], sin(angle), CPA_F32, 1e-9);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(table);
}

static void what_is_no_rotation_is_refused(void) {
    const cpa_rope_config good = KNOWN[1].config, yarn = KNOWN[3].config;
    float table[2 * CPA_MAX_HEAD_DIM];
    cpa_rope_config bad[16];
    for (int i = 0; i < 16; i++) bad[i] = i < 10 ? good : yarn;
    bad[0].dim = 7;
    bad[1].dim = CPA_MAX_HEAD_DIM + 2;
    bad[2].theta = 1;
    bad[3].theta = INFINITY;
    bad[4].factor = 0.5;
    bad[5].original_max_position = 0;
    bad[6].high_freq_factor = bad[6].low_freq_factor;
    bad[7].scaling = CPA_ROPE_SCALING_COUNT;
    bad[8].max_position = 0;
    bad[9].low_freq_factor = NAN;
    bad[10].factor = NAN;
    bad[11].beta_fast = -1;
    bad[12].attention_factor = INFINITY;
    bad[13].original_max_position = -1;
    bad[14].mscale = NAN;
    bad[15].mscale_all_dim = -1;
    for (int i = 0; i < 16; i++) {
        cpa_error err = {0};
        CU_ASSERT_EQUAL(cpa_rope_table(&bad[i], table, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "rope table: "));
    }
    CU_ASSERT_EQUAL(cpa_rope_table(&good, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_rope_table(NULL, table, NULL), CPA_INVALID);
}

static const cpa_test tests[] = {
    {"heads are those of float64", heads_are_those_of_float64},
    {"grid of heads", grid_of_heads},
    {"pages get the bits of kv_write", pages_get_the_bits_of_kv_write},
    {"tables have the frequencies of transformers", tables_have_the_frequencies_of_transformers},
    {"far positions keep their digits", far_positions_keep_their_digits},
    {"what is no rotation is refused", what_is_no_rotation_is_refused},
};
CPA_DEVICE_TEST_MAIN("qk_norm_rope", tests)
