/* rotate against float64: pairs of both kinds, forward and back, parts of heads, slices of rows, three positions a row,
 * and positions outside of the table. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;
static int whole_grid;

enum { POSITIONS = 90 };
static const double THETA = 1e4;

/* A head of the form is `dim` elements that begin at `at` of `apart`. */
typedef struct form {
    int64_t rows;
    int32_t heads, apart, at, dim;
    cpa_dtype dtype;
    int32_t rotated, first, interleaved, inverse, sections[3], sections_interleaved;
    int in_place;
} form;

/* What a call reads and writes; a row of x and of out is heads that lie `apart`. */
typedef struct call {
    const form *form;
    cpa_test_tensor x, out;
    float *device_table;
    int64_t *at, *device_at; /* [3, rows] */
    uint8_t *flags, *device_flags;
} call;

static void make(call *c, const form *f) {
    const cpa_rope_config config = {
        .size = sizeof config, .dim = f->rotated, .theta = THETA, .max_position = POSITIONS};
    float *table = malloc((size_t)(POSITIONS * f->rotated) * sizeof *table);
    const int64_t width = (int64_t)f->heads * f->apart;
    *c = (call){.form = f};
    CU_ASSERT_EQUAL_FATAL(cpa_rope_table(&config, table, NULL), CPA_OK);
    c->device_table = cpa_test_upload(stream, table, POSITIONS * f->rotated * (int64_t)sizeof *table);
    c->x = cpa_test_tensor_make(stream, f->dtype, f->rows, width, width + 8, 1);
    c->out = cpa_test_tensor_blank(stream, f->dtype, f->rows, width, width + 8);
    c->at = malloc((size_t)(3 * f->rows) * sizeof *c->at);
    c->flags = calloc((size_t)f->rows, 1);
    const int64_t odd[] = {0, POSITIONS - 1, POSITIONS, -1, INT64_MAX, INT64_MIN};
    for (int64_t i = 0; i < 3 * f->rows; i++) /* the first rows in another stream each: odd ones */
        c->at[i] = i % f->rows < 6 && i / f->rows == i % f->rows % 3 ? odd[i % f->rows] : (i * 37 + 5) % POSITIONS;
    for (int64_t row = 0; !f->sections[0] && row < f->rows && row < 6; row++) c->at[row] = odd[row];
    c->device_at = cpa_test_upload(stream, c->at, 3 * f->rows * (int64_t)sizeof *c->at);
    c->device_flags = cpa_test_upload(stream, c->flags, f->rows);
    free(table);
}

static void destroy(call *c) {
    cpa_test_free(stream, c->device_flags);
    cpa_test_free(stream, c->device_at);
    cpa_test_free(stream, c->device_table);
    cpa_test_tensor_free(&c->out, stream);
    cpa_test_tensor_free(&c->x, stream);
    free(c->flags);
    free(c->at);
}

static void run(call *c) {
    const form *f = c->form;
    const int64_t offset = f->at * cpa_dtype_bytes(f->dtype);
    void *out = (char *)(f->in_place ? c->x.device : c->out.device) + offset;
    const cpa_rotate_args args = {.size = sizeof args,
                                  .rows = f->rows,
                                  .heads = f->heads,
                                  .dim = f->dim,
                                  .dtype = f->dtype,
                                  .x = (char *)c->x.device + offset,
                                  .x_stride = c->x.stride,
                                  .x_head_stride = f->apart,
                                  .rope = {.table = c->device_table,
                                           .max_position = POSITIONS,
                                           .dim = f->rotated,
                                           .first = f->first,
                                           .interleaved = f->interleaved,
                                           .inverse = f->inverse,
                                           .sections = {f->sections[0], f->sections[1], f->sections[2]},
                                           .sections_interleaved = f->sections_interleaved},
                                  .positions = c->device_at,
                                  .out = out,
                                  .out_stride = c->out.stride,
                                  .out_head_stride = f->apart,
                                  .outside = c->device_flags};
    CU_ASSERT_EQUAL(cpa_rotate(&args, stream), CPA_OK);
    cpa_test_download(stream, c->flags, c->device_flags, f->rows);
    if (!f->in_place) {
        cpa_test_tensor_fetch(&c->out, stream);
        return;
    }
    memcpy(c->out.values, c->x.values, (size_t)(f->rows * c->x.stride) * sizeof *c->x.values);
    float *before = c->x.values;
    c->x.values = c->out.values; /* fetches what was written */
    cpa_test_tensor_fetch(&c->x, stream);
    c->x.values = before;
}

/* The position that turns a pair, as the public header says it. */
static int64_t position_of(const call *c, int64_t row, int pair) {
    const form *f = c->form;
    const int32_t *s = f->sections;
    int kind = 0;
    if (f->sections_interleaved) {
        kind = pair % 3 == 1 && pair < 3 * s[1] ? 1 : pair % 3 == 2 && pair < 3 * s[2] ? 2 : 0;
    } else if (s[0]) {
        kind = pair < s[0] ? 0 : pair < s[0] + s[1] ? 1 : 2;
    }
    return c->at[kind * f->rows + row];
}

static int is_outside(const call *c, int64_t row) {
    int outside = 0;
    for (int kind = 0; kind < (c->form->sections[0] ? 3 : 1); kind++) {
        const int64_t position = c->at[kind * c->form->rows + row];
        outside |= position < 0 || position >= POSITIONS;
    }
    return outside;
}

/* Elements of a head, with what lies beside it, that are wrong. */
static int wrong_in_head(const call *c, int64_t row, int32_t head) {
    const form *f = c->form;
    const float *in = cpa_test_row(&c->x, row) + head * f->apart, *got = cpa_test_row(&c->out, row) + head * f->apart;
    double want[CPA_MAX_HEAD_DIM], size[CPA_MAX_HEAD_DIM];
    int wrong = 0;
    for (int i = 0; i < f->dim; i++) {
        want[i] = is_outside(c, row) ? (double)NAN : (double)in[f->at + i];
        size[i] = 0;
    }
    for (int i = 0; i < f->rotated / 2; i++) {
        const int x = f->first + (f->interleaved ? 2 * i : i), y = x + (f->interleaved ? 1 : f->rotated / 2);
        const double angle = (double)position_of(c, row, i) * pow(THETA, -2.0 * i / f->rotated), a = want[x],
                     b = want[y], sine = f->inverse ? -sin(angle) : sin(angle);
        want[x] = a * cos(angle) - b * sine;
        want[y] = b * cos(angle) + a * sine;
        size[x] = size[y] = fabs(a) + fabs(b);
    }
    for (int i = 0; i < f->apart; i++) {
        const int inside = i >= f->at && i < f->at + f->dim;
        const float beside = f->in_place ? in[i] : NAN;
        if (inside) {
            wrong += !cpa_test_is_near(got[i], want[i - f->at], f->dtype, 3e-7 * size[i - f->at]);
        } else {
            wrong += got[i] != beside && !(isnan(got[i]) && isnan(beside));
        }
    }
    return wrong;
}

static void check(const form *f) {
    call c;
    int wrong = 0;
    make(&c, f);
    run(&c);
    for (int64_t row = 0; row < f->rows; row++) {
        for (int32_t head = 0; head < f->heads; head++) wrong += wrong_in_head(&c, row, head);
        wrong += c.flags[row] != is_outside(&c, row);
    }
    if (wrong)
        printf("  %lld rows of %d heads of %d at %d of %d, %s, rotated %d at %d, style %d: %d wrong\n",
               (long long)f->rows, f->heads, f->dim, f->at, f->apart, cpa_dtype_name(f->dtype), f->rotated, f->first,
               f->interleaved, wrong);
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&c.out));
    destroy(&c);
}

/* Slices of rows, as layers of latent attention have them; odd widths; M-RoPE as vLLM tests it. */
static void heads_are_those_of_float64(void) {
    static const form FORMS[] = {
        {8, 16, 192, 128, 64, CPA_BF16, 64, 0, 1, 0, {0}, 0, 1}, /* the last of DeepSeek's queries */
        {8, 16, 192, 128, 64, CPA_BF16, 64, 0, 0, 0, {0}, 0, 0}, /* to another place */
        {8, 1, 576, 512, 64, CPA_BF16, 64, 0, 1, 0, {0}, 0, 1},  /* the key of a latent row */
        {8, 3, 192, 0, 192, CPA_F16, 64, 128, 1, 1, {0}, 0, 0},  /* whole heads, rotated back */
        {8, 3, 192, 0, 192, CPA_F32, 64, 128, 0, 1, {0}, 0, 1},  /* the same in place */
        {7, 17, 10, 1, 7, CPA_BF16, 6, 1, 0, 0, {0}, 0, 0},      /* nothing is aligned */
        {7, 5, 11, 1, 10, CPA_F32, 6, 3, 1, 0, {0}, 0, 1},
        {9, 16, 128, 0, 128, CPA_BF16, 128, 0, 0, 0, {16, 24, 24}, 0, 0},
        {9, 16, 64, 0, 64, CPA_BF16, 64, 0, 0, 0, {8, 12, 12}, 0, 1},
        {9, 8, 256, 0, 256, CPA_BF16, 256, 0, 0, 0, {32, 48, 48}, 0, 0},
        {9, 4, 128, 0, 128, CPA_BF16, 128, 0, 0, 0, {24, 20, 20}, 1, 0}, /* Qwen3-VL */
        {9, 2, 128, 0, 128, CPA_F32, 64, 32, 1, 1, {20, 8, 4}, 1, 1},
    };
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) check(&FORMS[i]);
    cpa_test_device_close(device, stream);
}

/* vLLM's grid of tests/kernels/core/test_pos_encoding.py; daily, a part of it. */
static void grid_of_heads(void) {
    static const int32_t DIMS[] = {64, 80, 120, 128, 256}, HEADS[] = {1, 16, 17};
    static const int64_t ROWS[] = {1, 4, 55};
    int i = 0;
    cpa_test_device_open(2, &device, &stream);
    for (int d = 0; d < 5; d++) {
        for (int h = 0; h < 3; h++) {
            for (int r = 0; r < 3; r++) {
                for (int part = 0; part < 4; part++) { /* all, half, a quarter, or 32 are rotated */
                    const int32_t dim = DIMS[d], rotated = part == 3 ? 32 : dim >> part;
                    for (int style = 0; style < 12; style++) {
                        const form f = {.rows = ROWS[r],
                                        .heads = HEADS[h],
                                        .apart = dim,
                                        .dim = dim,
                                        .dtype = (cpa_dtype)(style / 4),
                                        .rotated = rotated,
                                        .interleaved = style % 2,
                                        .inverse = i % 5 == 0,
                                        .in_place = style / 2 % 2};
                        if (rotated % 2 == 0 && (whole_grid || i % 17 == 0)) check(&f);
                        i++;
                    }
                }
            }
        }
    }
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"heads are those of float64", heads_are_those_of_float64},
    {"grid of heads", grid_of_heads},
};

/* --whole: all of the grid. */
int main(int argc, char **argv) {
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    whole_grid = cpa_test_take_option(&argc, argv, "--whole");
    return cpa_test_main(argc, argv, "rotate", tests, (int)(sizeof tests / sizeof tests[0]));
}
