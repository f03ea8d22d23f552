/* Tables of rotary positions, rotated rows and norms against the vectors of tests/data/oracle, which were computed from
 * the definitions alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/oracle_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* dtypes as columns have them. */
static const cpa_dtype DTYPES[] = {CPA_F32, CPA_F16, CPA_BF16};

static void report(const char *file, int64_t number, int64_t wrong) {
    if (wrong) printf("  %s, case %lld: %lld wrong\n", file, (long long)number, (long long)wrong);
    CU_ASSERT_EQUAL(wrong, 0);
}

/* A tensor on the device; NULL where the case has none. */
static void *upload(const cpa_test_oracle *oracle, int64_t number, const char *name) {
    const cpa_tensor *tensor = cpa_test_oracle_find(oracle, number, name);
    return tensor ? cpa_test_upload(stream, tensor->data, tensor->bytes) : NULL;
}

static float float_of(const cpa_tensor *tensor, int64_t i) {
    float value;
    memcpy(&value, (const char *)tensor->data + i * 4, sizeof value);
    return value;
}

/* ---- tables ---- */

enum { KIND, TABLE_DIM, TABLE_INTS };
enum {
    BASE,
    FACTOR,
    ORIGINAL,
    LOW,
    HIGH,
    BETA_FAST,
    BETA_SLOW,
    ATTENTION,
    MSCALE,
    MSCALE_ALL_DIM,
    TABLE_SCALE,
    SOFTMAX_FACTOR,
    TABLE_FLOATS
};
enum { MOST_POSITIONS = 4096 }; /* a table of the farthest positions would take long */

static cpa_rope_config config_of(const int32_t *ints, const double *floats) {
    static const cpa_rope_scaling KINDS[] = {CPA_ROPE_PLAIN, CPA_ROPE_LINEAR, CPA_ROPE_LLAMA3, CPA_ROPE_YARN,
                                             CPA_ROPE_YARN};
    return (cpa_rope_config){.size = sizeof(cpa_rope_config),
                             .scaling = KINDS[ints[KIND]],
                             .dim = ints[TABLE_DIM],
                             .theta = floats[BASE],
                             .max_position = MOST_POSITIONS,
                             .factor = floats[FACTOR],
                             .low_freq_factor = floats[LOW],
                             .high_freq_factor = floats[HIGH],
                             .beta_fast = floats[BETA_FAST],
                             .beta_slow = floats[BETA_SLOW],
                             .attention_factor = ints[KIND] == 3 ? floats[TABLE_SCALE] : 0,
                             .original_max_position = (int64_t)floats[ORIGINAL],
                             .mscale = floats[MSCALE],
                             .mscale_all_dim = floats[MSCALE_ALL_DIM]};
}

static void tables_are_those_of_the_oracle(void) {
    cpa_test_oracle oracle = cpa_test_oracle_open("rope_table.safetensors");
    const cpa_tensor *positions = cpa_test_oracle_find(&oracle, -1, "positions");
    CPA_ASSERT_ORDER(oracle.cases, >=, 10);
    for (int64_t n = 0; n < oracle.cases; n++) {
        int32_t ints[TABLE_INTS];
        double floats[TABLE_FLOATS];
        int64_t wrong = 0;
        cpa_test_oracle_ints(&oracle, n, TABLE_INTS, ints);
        cpa_test_oracle_floats(&oracle, n, TABLE_FLOATS, floats);
        const cpa_rope_config config = config_of(ints, floats);
        const cpa_tensor *want = cpa_test_oracle_find(&oracle, n, "cos_sin");
        float *table = malloc((size_t)(MOST_POSITIONS * config.dim) * sizeof *table);
        CU_ASSERT_EQUAL(cpa_rope_table(&config, table, NULL), CPA_OK);
        for (int64_t row = 0; row < positions->shape[0]; row++) {
            int64_t position;
            memcpy(&position, (const char *)positions->data + row * 8, sizeof position);
            for (int32_t i = 0; position < MOST_POSITIONS && i < config.dim; i++)
                wrong += !cpa_test_is_near(table[position * config.dim + i],
                                           (double)float_of(want, row * config.dim + i), CPA_F32, 1e-9);
        }
        report("rope_table", n, wrong);
        free(table);
    }
    cpa_test_oracle_close(&oracle);
}

/* ---- rows ---- */

enum {
    ROW_DTYPE,
    TOKENS,
    HEADS,
    HEAD_DIM,
    NORM_DIM,
    HAS_WEIGHT,
    FIRST,
    ROTATED,
    GPTJ,
    INVERSE,
    SECTION_T,
    SECTION_H,
    SECTION_W,
    INTERLEAVED,
    MAX_POSITION,
    ROW_INTS
};
enum { ROW_EPS, ROW_OFFSET, ROW_FLOATS };

/* A case, with its tensors on the device. */
typedef struct rows_case {
    const int32_t *ints;
    float eps, offset;
    cpa_dtype dtype;
    cpa_rope rope;
    void *x, *weight, *positions, *out;
} rows_case;

/* Weights of 1, where the norm has none. */
static void *ones(cpa_dtype dtype, int64_t n) {
    cpa_test_tensor t = cpa_test_tensor_blank(stream, dtype, 1, n, 0);
    char *narrow = malloc((size_t)(n * 4));
    for (int64_t i = 0; i < n; i++) t.values[i] = 1;
    cpa_test_tensor_send(&t, stream);
    cpa_test_download(stream, narrow, t.device, n * cpa_dtype_bytes(dtype));
    void *copy = cpa_test_upload(stream, narrow, n * cpa_dtype_bytes(dtype));
    cpa_test_tensor_free(&t, stream);
    free(narrow);
    return copy;
}

static cpa_status rotate_alone(const rows_case *c) {
    const cpa_rotate_args args = {.size = sizeof args,
                                  .rows = c->ints[TOKENS],
                                  .heads = c->ints[HEADS],
                                  .dim = c->ints[HEAD_DIM],
                                  .dtype = c->dtype,
                                  .x = c->x,
                                  .rope = c->rope,
                                  .positions = c->positions,
                                  .out = c->out};
    return cpa_rotate(&args, stream);
}

static cpa_status norm_heads(const rows_case *c) {
    const cpa_qk_norm_rope_args args = {
        .size = sizeof args,
        .rows = c->ints[TOKENS],
        .shape = {.q_heads = c->ints[HEADS], .k_dim = c->ints[HEAD_DIM], .v_dim = 1, .dtype = c->dtype},
        .qkv = c->x,
        .q_weight = c->weight,
        .weight_offset = c->offset,
        .eps = c->eps,
        .rope = c->rope,
        .positions = c->positions,
        .q = c->out};
    return cpa_qk_norm_rope(&args, stream);
}

static cpa_status norm_latents(const rows_case *c) {
    cpa_latent_norm_rope_args args = {.size = sizeof args,
                                      .rows = c->ints[TOKENS],
                                      .shape = {.kv_heads = 1,
                                                .k_dim = c->ints[HEAD_DIM],
                                                .v_dim = c->ints[NORM_DIM],
                                                .v_in_k = 1,
                                                .dtype = c->dtype},
                                      .x = c->x,
                                      .weight = c->weight,
                                      .weight_offset = c->offset,
                                      .eps = c->eps,
                                      .rope = c->rope,
                                      .positions = c->positions,
                                      .out = c->out};
    args.rope.first -= c->ints[NORM_DIM];
    return cpa_latent_norm_rope(&args, stream);
}

/* Elements that are wrong; where a position lies outside of the table, of those that are rotated. */
static int64_t wrong_rows(const rows_case *c, const cpa_tensor *want) {
    const int32_t *ints = c->ints;
    const int64_t n = (int64_t)ints[TOKENS] * ints[HEADS] * ints[HEAD_DIM];
    cpa_test_tensor got = cpa_test_tensor_blank(stream, c->dtype, 1, n, 0);
    char *narrow = malloc((size_t)n * 4);
    int64_t wrong = 0;
    cpa_test_download(stream, narrow, c->out, n * cpa_dtype_bytes(c->dtype));
    cpa_widen(got.values, narrow, c->dtype, n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t head = i / ints[HEAD_DIM] * ints[HEAD_DIM];
        double largest = 0;
        for (int32_t d = 0; d < ints[HEAD_DIM]; d++) largest = fmax(largest, fabs((double)float_of(want, head + d)));
        if (isnan(float_of(want, head + ints[FIRST])) && !isnan(float_of(want, i))) continue;
        wrong += !cpa_test_is_near(got.values[i], (double)float_of(want, i), c->dtype, 1e-6 * largest);
    }
    free(narrow);
    cpa_test_tensor_free(&got, stream);
    return wrong;
}

static void check_rows(const cpa_test_oracle *oracle, int64_t number) {
    int32_t ints[ROW_INTS];
    double floats[ROW_FLOATS];
    char table_name[32];
    cpa_test_oracle_ints(oracle, number, ROW_INTS, ints);
    cpa_test_oracle_floats(oracle, number, ROW_FLOATS, floats);
    snprintf(table_name, sizeof table_name, "cos_sin.%d", ints[ROTATED]);
    const cpa_tensor *x = cpa_test_oracle_find(oracle, number, "x");
    float *table = upload(oracle, -1, table_name);
    rows_case c = {.ints = ints,
                   .eps = (float)floats[ROW_EPS],
                   .offset = (float)floats[ROW_OFFSET],
                   .dtype = DTYPES[ints[ROW_DTYPE]],
                   .rope = {.table = table,
                            .max_position = ints[MAX_POSITION],
                            .dim = ints[ROTATED],
                            .first = ints[FIRST],
                            .interleaved = ints[GPTJ],
                            .inverse = ints[INVERSE],
                            .sections = {ints[SECTION_T], ints[SECTION_H], ints[SECTION_W]},
                            .sections_interleaved = ints[INTERLEAVED]},
                   .x = upload(oracle, number, "x"),
                   .weight = upload(oracle, number, "weight"),
                   .positions = upload(oracle, number, "positions"),
                   .out = cpa_test_upload(stream, x->data, x->bytes)};
    if (!c.weight) c.weight = ones(c.dtype, ints[HEAD_DIM]);
    CU_ASSERT_EQUAL(ints[NORM_DIM] == 0                ? rotate_alone(&c)
                    : ints[NORM_DIM] == ints[HEAD_DIM] ? norm_heads(&c)
                                                       : norm_latents(&c),
                    CPA_OK);
    report("rope_rows", number, wrong_rows(&c, cpa_test_oracle_find(oracle, number, "out")));
    void *const memory[] = {table, c.x, c.weight, c.positions, c.out};
    for (int i = 0; i < 5; i++) cpa_test_free(stream, memory[i]);
}

static void rows_are_those_of_the_oracle(void) {
    cpa_test_oracle oracle = cpa_test_oracle_open("rope_rows.safetensors");
    CPA_ASSERT_ORDER(oracle.cases, >=, 20);
    cpa_test_device_open(1, &device, &stream);
    for (int64_t n = 0; n < oracle.cases; n++) check_rows(&oracle, n);
    cpa_test_device_close(device, stream);
    cpa_test_oracle_close(&oracle);
}

/* ---- norms ---- */

enum { NORM_DTYPE, WEIGHT_DTYPE, NORM_ROWS, WIDTH, HAS_RESIDUAL, NORM_HAS_WEIGHT, QUANT, GROUP, POW2, NORM_INTS };
enum { NORM_EPS, NORM_OFFSET, STATIC_SCALE, SCALE_BOUND, NORM_FLOATS };

static int64_t differing_bytes(const void *got, const cpa_tensor *want) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < want->bytes; i++) wrong += ((const uint8_t *)got)[i] != ((const uint8_t *)want->data)[i];
    return wrong;
}

static int64_t wrong_plain(const void *got, cpa_dtype dtype, const cpa_tensor *want) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < want->elements; i++) {
        const double x = (double)float_of(want, i);
        float value;
        cpa_widen(&value, (const char *)got + i * cpa_dtype_bytes(dtype), dtype, 1);
        wrong += !cpa_test_is_near(value, x, dtype, 1e-6 * fabs(x));
    }
    return wrong;
}

/* Scales, but those of rows of zeros, which are not judged. */
static int64_t wrong_scales(const float *got, const cpa_tensor *want, int exact) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < want->elements; i++) {
        const float scale = float_of(want, i);
        wrong += scale != 0 && !(fabsf(got[i] - scale) <= (exact ? 0 : 1e-6f * scale));
    }
    return wrong;
}

static void check_norm(const cpa_test_oracle *oracle, int64_t number) {
    static const cpa_norm_codes CODES[] = {CPA_NORM_PLAIN, CPA_NORM_FP8_STATIC, CPA_NORM_FP8_TOKEN, CPA_NORM_FP8_GROUP,
                                           CPA_NORM_INT8_TOKEN};
    enum { X, RESIDUAL, WEIGHT, OUT, SCALES, NUMBER, N_MEMORY };
    int32_t ints[NORM_INTS];
    double floats[NORM_FLOATS];
    cpa_test_oracle_ints(oracle, number, NORM_INTS, ints);
    cpa_test_oracle_floats(oracle, number, NORM_FLOATS, floats);
    const cpa_dtype dtype = DTYPES[ints[NORM_DTYPE]];
    const cpa_tensor *x = cpa_test_oracle_find(oracle, number, "x"), *want;
    const int is_static = ints[QUANT] == 1, has_bound = ints[QUANT] == 2 && isfinite(floats[SCALE_BOUND]);
    const float scalar = (float)floats[is_static ? STATIC_SCALE : SCALE_BOUND];
    char *got = malloc((size_t)x->bytes), *scales = calloc((size_t)x->elements, 4);
    void *memory[N_MEMORY] = {upload(oracle, number, "x"),
                              upload(oracle, number, "residual"),
                              upload(oracle, number, "weight"),
                              cpa_test_upload(stream, x->data, x->bytes),
                              cpa_test_upload(stream, scales, x->elements * 4),
                              cpa_test_upload(stream, &scalar, sizeof scalar)};
    if (!memory[WEIGHT]) memory[WEIGHT] = ones(DTYPES[ints[WEIGHT_DTYPE]], ints[WIDTH]);
    const cpa_rmsnorm_args args = {.size = sizeof args,
                                   .rows = ints[NORM_ROWS],
                                   .width = ints[WIDTH],
                                   .dtype = dtype,
                                   .x = memory[X],
                                   .residual = memory[RESIDUAL],
                                   .weight = memory[WEIGHT],
                                   .weight_offset = (float)floats[NORM_OFFSET],
                                   .eps = (float)floats[NORM_EPS],
                                   .out = memory[OUT],
                                   .weight_is_f32 = ints[WEIGHT_DTYPE] != ints[NORM_DTYPE],
                                   .codes = CODES[ints[QUANT]],
                                   .group = ints[GROUP],
                                   .scales_pow2 = ints[POW2],
                                   .static_scale = is_static ? memory[NUMBER] : NULL,
                                   .scale_bound = has_bound ? memory[NUMBER] : NULL,
                                   .scales = ints[QUANT] > 1 ? memory[SCALES] : NULL};
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
    cpa_test_download(stream, got, memory[OUT], x->bytes);
    cpa_test_download(stream, scales, memory[SCALES], x->elements * 4);
    want = cpa_test_oracle_find(oracle, number, ints[QUANT] ? "codes" : "out");
    int64_t wrong = ints[QUANT] ? differing_bytes(got, want) : wrong_plain(got, dtype, want);
    want = cpa_test_oracle_find(oracle, number, "scales");
    if (want) wrong += wrong_scales((const float *)(const void *)scales, want, ints[POW2]);
    want = cpa_test_oracle_find(oracle, number, "residual_out");
    if (want) {
        cpa_test_download(stream, got, memory[RESIDUAL], x->bytes);
        wrong += differing_bytes(got, want);
    }
    report("rmsnorm", number, wrong);
    for (int i = 0; i < N_MEMORY; i++) {
        if (memory[i]) cpa_test_free(stream, memory[i]);
    }
    free(scales);
    free(got);
}

static void norms_are_those_of_the_oracle(void) {
    cpa_test_oracle oracle = cpa_test_oracle_open("rmsnorm.safetensors");
    CPA_ASSERT_ORDER(oracle.cases, >=, 15);
    cpa_test_device_open(1, &device, &stream);
    for (int64_t n = 0; n < oracle.cases; n++) check_norm(&oracle, n);
    cpa_test_device_close(device, stream);
    cpa_test_oracle_close(&oracle);
}

static const cpa_test tests[] = {
    {"tables are those of the oracle", tables_are_those_of_the_oracle},
    {"rows are those of the oracle", rows_are_those_of_the_oracle},
    {"norms are those of the oracle", norms_are_those_of_the_oracle},
};
CPA_DEVICE_TEST_MAIN("norms and rotations by the oracle", tests)
