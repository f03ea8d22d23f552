/* sparse_attend against float64 over the keys that lists name: every format of cache, both scopes, units, lists with
 * entries that are none, and the grids of FlashMLA's own tests, of which --whole takes all. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/sparse.h>

#include "base/convert.h"
#include "src/check/cases/judge.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/rules_fixture.h"
#include "tests/fixtures/unit.h"

enum { SCOPES = CPA_SPARSE_MOST_SCOPES };
static int whole;

/* Keys of a scope lie in every second entry of its pool, the others are NaN. gap: rows between blocks. */
typedef struct scope_case {
    int32_t keys, block_size, width, unit, gap;
} scope_case;

enum { SINKS = 1, TWO_CALLS = 2, HEAD_LISTS = 4, NO_COUNTS = 8, NONE_AT_ALL = 16, ONE_LIST = 32, NO_LISTS = 64 };

typedef struct sparse_case {
    int64_t rows;
    int32_t q_heads, kv_heads, k_dim, v_dim, v_in_k;
    cpa_dtype q_dtype, kv_dtype;
    float k_scale, scale;
    scope_case scopes[SCOPES];
    int what;
} sparse_case;

static const sparse_case LATENT = {.rows = 3,
                                   .q_heads = 64,
                                   .kv_heads = 1,
                                   .k_dim = 576,
                                   .v_dim = 512,
                                   .v_in_k = 1,
                                   .q_dtype = CPA_BF16,
                                   .kv_dtype = CPA_BF16,
                                   .scale = 0.0721687824f,
                                   .scopes = {{.keys = 300, .block_size = 64, .width = 200, .unit = 1}}};
static const sparse_case HEADS = {.rows = 4,
                                  .q_heads = 8,
                                  .kv_heads = 2,
                                  .k_dim = 128,
                                  .v_dim = 128,
                                  .q_dtype = CPA_BF16,
                                  .kv_dtype = CPA_BF16,
                                  .scopes = {{.keys = 400, .block_size = 16, .width = 150, .unit = 1}}};

/* ---- inputs ---- */

/* A scope on the host and on the device; k and v: what its keys stand for, [keys, kv_heads, width]. */
typedef struct scope_data {
    cpa_kv_fixture kv;
    cpa_kv_view device_kv;
    float *k, *v;
    int32_t *slots, *counts;
    void *device_slots, *device_counts;
    int64_t row_stride, head_stride;
} scope_data;

typedef struct sparse_data {
    sparse_case shape;
    int32_t n_scopes;
    cpa_device *device;
    cpa_stream *stream;
    void *q, *device_q;
    cpa_case_score score; /* sinks */
    void *device_sinks;
    scope_data scopes[SCOPES];
    float *o, *lse, *max_logits;
    void *out, *device_o, *device_lse, *device_out, *device_max;
} sparse_data;

static uint64_t random_state;
static uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

/* Keys that are as peaky as those of models, in their entries; units stay together. */
static void store_keys(scope_data *s, const sparse_case *c, const scope_case *of, uint64_t seed) {
    const int32_t v_dim = c->v_in_k ? 0 : c->v_dim, entries = 2 * ((of->keys + of->unit - 1) / of->unit) + 1;
    const int64_t tokens = (int64_t)entries * of->unit, n = of->keys;
    cpa_kv_view view = {.dtype = c->kv_dtype,
                        .block_size = of->block_size,
                        .num_blocks = (tokens + of->block_size - 1) / of->block_size,
                        .kv_heads = c->kv_heads,
                        .k_dim = c->k_dim,
                        .v_dim = c->v_dim,
                        .k_scale = c->k_scale,
                        .v_scale = c->k_scale,
                        .v_in_k = c->v_in_k};
    cpa_case_sequence sequence = {.length = n,
                                  .q_heads = c->q_heads,
                                  .kv_heads = c->kv_heads,
                                  .k_dim = c->k_dim,
                                  .v_dim = c->v_dim,
                                  .v_in_k = c->v_in_k};
    if (of->gap > 0) {
        const cpa_kv_view dense = cpa_kv_view_resolve(view);
        view.k_block_stride = dense.k_block_stride + of->gap * dense.k_token_stride;
        view.v_block_stride = dense.v_block_stride + of->gap * dense.v_token_stride;
    }
    cpa_kv_fixture_init_view(&s->kv, view, 0);
    CU_ASSERT_EQUAL_FATAL(cpa_case_sequence_make(&sequence, seed, n - 1, CPA_F32, NULL), CPA_OK);
    s->k = malloc((size_t)(n * c->kv_heads * c->k_dim) * sizeof(float));
    s->v = malloc((size_t)(n * c->kv_heads * c->v_dim) * sizeof(float));
    for (int64_t i = 0; i < n * c->kv_heads; i++) {
        const int64_t key = i / c->kv_heads, slot = (2 * (key / of->unit) + 1) * of->unit + key % of->unit;
        const int64_t block = slot / of->block_size, offset = slot % of->block_size;
        const int32_t head = (int32_t)(i % c->kv_heads);
        const float *k = sequence.k + i * c->k_dim, *v = v_dim ? sequence.v + i * v_dim : k;
        cpa_kv_fixture_store(&s->kv, block, offset, head, k, v);
        cpa_kv_fixture_load(&s->kv, block, offset, head, s->k + i * c->k_dim, s->v + i * c->v_dim);
        if (c->v_in_k) memcpy(s->v + i * c->v_dim, s->k + i * c->k_dim, (size_t)c->v_dim * sizeof(float));
    }
    cpa_case_sequence_release(&sequence);
}

/* An entry of a list: a key twice, one that is none, and one past the pool among them. */
static int32_t entry_of(const scope_data *s, const sparse_case *c, const scope_case *of) {
    const int64_t pool = s->kv.view.num_blocks * of->block_size / of->unit;
    const uint32_t kind = random_below(16);
    if (c->what & NONE_AT_ALL || kind == 0) return -1 - (int32_t)random_below(3);
    if (kind == 1) return (int32_t)pool + (int32_t)random_below(1000);
    return 2 * (int32_t)random_below((uint32_t)(of->keys / of->unit)) + 1;
}

static void make_lists(scope_data *s, const sparse_case *c, const scope_case *of) {
    const int32_t lists = c->what & HEAD_LISTS ? c->kv_heads : 1, padded = of->width + 3;
    const int64_t rows = c->what & ONE_LIST ? 1 : c->rows, n = rows * lists * padded;
    s->head_stride = c->what & HEAD_LISTS ? padded : 0;
    s->row_stride = c->what & ONE_LIST ? 0 : (int64_t)lists * padded;
    s->slots = malloc((size_t)(n + 1) * sizeof *s->slots);
    s->counts = malloc((size_t)c->rows * sizeof *s->counts);
    for (int64_t row = 0; row < c->rows; row++)
        s->counts[row] = row % 5 == 2          ? -(int32_t)(row % 2)
                         : c->what & NO_COUNTS ? of->width
                                               : of->width - (int32_t)random_below((uint32_t)of->width / 2 + 1);
    for (int64_t i = 0; i < n; i++) {
        const int32_t at = (int32_t)(i % padded);
        const int32_t end = c->what & (NO_COUNTS | ONE_LIST) ? of->width : s->counts[i / padded / lists];
        s->slots[i] = at < end ? entry_of(s, c, of) : at % 2 ? 0 : 2147480000; /* behind it: NaN, and nowhere */
    }
}

static void make_scope(sparse_data *d, int32_t i) {
    const sparse_case *c = &d->shape;
    scope_data *s = &d->scopes[i];
    store_keys(s, c, &c->scopes[i], 11 + (uint64_t)i);
    make_lists(s, c, &c->scopes[i]);
    const int64_t lists = c->what & HEAD_LISTS ? c->kv_heads : 1, rows = c->what & ONE_LIST ? 1 : c->rows;
    s->device_kv = cpa_kv_fixture_upload(&s->kv, d->stream);
    s->device_slots = cpa_test_upload(d->stream, s->slots, rows * lists * (c->scopes[i].width + 3) * 4);
    s->device_counts = cpa_test_upload(d->stream, s->counts, c->rows * 4);
}

static void make(sparse_data *d, const sparse_case *shape) {
    *d = (sparse_data){.shape = *shape};
    const sparse_case *c = &d->shape;
    const int64_t n = c->rows * c->q_heads, bytes = cpa_dtype_bytes(c->q_dtype);
    int64_t *positions = malloc((size_t)c->rows * sizeof *positions);
    random_state = (uint64_t)(c->rows * 31 + c->q_heads + c->scopes[0].width);
    cpa_test_device_open(2, &d->device, &d->stream);
    for (int64_t i = 0; i < c->rows; i++) positions[i] = 5 + 3 * i;
    d->q = malloc((size_t)(n * c->k_dim * bytes));
    const cpa_synth_args q = {.tensor = CPA_SYNTH_Q,
                              .seed = 11,
                              .heads = c->q_heads,
                              .kv_heads = c->kv_heads,
                              .dim = c->k_dim,
                              .rows = c->rows,
                              .positions = positions,
                              .dtype = c->q_dtype};
    CU_ASSERT_EQUAL_FATAL(cpa_case_synthesize(q, d->q, NULL), CPA_OK);
    free(positions);
    d->device_q = cpa_test_upload(d->stream, d->q, n * c->k_dim * bytes);
    d->score.q_heads = c->q_heads;
    if (c->what & SINKS) {
        CU_ASSERT_EQUAL_FATAL(cpa_case_score_add_sinks(&d->score, NULL), CPA_OK);
        d->score.sinks[0] = INFINITY;
        d->device_sinks = cpa_test_upload(d->stream, d->score.sinks, c->q_heads * 4);
    }
    for (d->n_scopes = 0; d->n_scopes < SCOPES && c->scopes[d->n_scopes].block_size > 0; d->n_scopes++)
        make_scope(d, d->n_scopes);
    d->o = cpa_test_poisoned(n * c->v_dim, 4), d->lse = cpa_test_poisoned(n, 4);
    d->max_logits = cpa_test_poisoned(n, 4), d->out = cpa_test_poisoned(n * c->v_dim, bytes);
    d->device_o = cpa_test_upload(d->stream, d->o, n * c->v_dim * 4);
    d->device_lse = cpa_test_upload(d->stream, d->lse, n * 4);
    d->device_max = cpa_test_upload(d->stream, d->max_logits, n * 4);
    d->device_out = cpa_test_upload(d->stream, d->out, n * c->v_dim * bytes);
}

static void release(sparse_data *d) {
    for (int32_t i = 0; i < d->n_scopes; i++) {
        scope_data *s = &d->scopes[i];
        cpa_kv_view_free(&s->device_kv, d->stream);
        cpa_kv_fixture_destroy(&s->kv);
        cpa_test_free(d->stream, s->device_slots);
        cpa_test_free(d->stream, s->device_counts);
        void *made[] = {s->k, s->v, s->slots, s->counts};
        for (size_t j = 0; j < sizeof made / sizeof *made; j++) free(made[j]);
    }
    void *used[] = {d->device_q, d->device_o, d->device_lse, d->device_out, d->device_max};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(d->stream, used[i]);
    if (d->device_sinks) cpa_test_free(d->stream, d->device_sinks);
    void *made[] = {d->q, d->o, d->lse, d->max_logits, d->out};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) free(made[i]);
    cpa_case_score_release(&d->score);
    cpa_test_device_close(d->device, d->stream);
}

/* ---- runs ---- */

/* Rows [first, first + rows) over scopes [scope, scope_end), those before having been attended. */
static cpa_status attend(sparse_data *d, int64_t first, int64_t rows, int32_t scope, int32_t scope_end) {
    const sparse_case *c = &d->shape;
    const int64_t bytes = cpa_dtype_bytes(c->q_dtype), heads = first * c->q_heads;
    cpa_sparse_scope scopes[SCOPES] = {0};
    for (int32_t i = scope; i < scope_end; i++) {
        const scope_data *s = &d->scopes[i];
        scopes[i] = (cpa_sparse_scope){.kv = s->device_kv,
                                       .slots = (const int32_t *)s->device_slots + first * s->row_stride,
                                       .row_stride = s->row_stride,
                                       .head_stride = s->head_stride,
                                       .width = c->what & NO_LISTS ? 0 : c->scopes[i].width,
                                       .unit = c->scopes[i].unit};
        if (!(c->what & NO_COUNTS)) scopes[i].counts = (const int32_t *)s->device_counts + first;
    }
    const cpa_sparse_attend_args args = {
        .size = sizeof args,
        .rows = rows,
        .q_heads = c->q_heads,
        .q_dtype = c->q_dtype,
        .q = (char *)d->device_q + heads * c->k_dim * bytes,
        .scopes = scopes + scope,
        .n_scopes = scope_end - scope,
        .scale = c->scale,
        .state = {.o = (float *)d->device_o + heads * c->v_dim, .lse = (float *)d->device_lse + heads},
        .out = (char *)d->device_out + heads * c->v_dim * bytes,
        .resume = scope > 0,
        .sink_logits = d->device_sinks,
        .max_logits = (float *)d->device_max + heads};
    const cpa_status status = cpa_sparse_attend(&args, d->stream);
    if (status != CPA_OK) printf("  %s\n", cpa_stream_error(d->stream));
    return status;
}

static void download(sparse_data *d) {
    const sparse_case *c = &d->shape;
    const int64_t n = c->rows * c->q_heads;
    cpa_test_download(d->stream, d->o, d->device_o, n * c->v_dim * 4);
    cpa_test_download(d->stream, d->lse, d->device_lse, n * 4);
    cpa_test_download(d->stream, d->max_logits, d->device_max, n * 4);
    cpa_test_download(d->stream, d->out, d->device_out, n * c->v_dim * cpa_dtype_bytes(c->q_dtype));
}

/* ---- the reference ---- */

/* The keys of a row and KV head, one behind the other. */
typedef struct listed_keys {
    float *k, *v;
    int64_t n, capacity;
} listed_keys;

static void list_keys(const sparse_data *d, int32_t scope, int64_t row, int32_t kv_head, listed_keys *keys) {
    const sparse_case *c = &d->shape;
    const scope_case *of = &c->scopes[scope];
    const scope_data *s = &d->scopes[scope];
    const int32_t *list = s->slots + row * s->row_stride + kv_head * s->head_stride;
    const int32_t count = c->what & NO_LISTS ? 0 : c->what & NO_COUNTS ? of->width : s->counts[row];
    for (int32_t i = 0; i < count; i++) {
        for (int32_t token = 0; token < of->unit; token++) {
            const int64_t slot = (int64_t)list[i] * of->unit + token, key = list[i] / 2 * of->unit + token;
            if (slot < 0 || slot >= s->kv.view.num_blocks * of->block_size) continue;
            const int64_t at = key * c->kv_heads + kv_head;
            memcpy(keys->k + keys->n * c->k_dim, s->k + at * c->k_dim, (size_t)c->k_dim * sizeof(float));
            memcpy(keys->v + keys->n++ * c->v_dim, s->v + at * c->v_dim, (size_t)c->v_dim * sizeof(float));
        }
    }
}

/* What FlashMLA's tests ask of all results together: 1 - 2 x y / (x^2 + y^2). */
typedef struct likeness {
    double xy, xx_yy;
} likeness;

static double largest_score(const sparse_data *d, const float *q, const listed_keys *keys) {
    const double scale = d->shape.scale != 0 ? (double)d->shape.scale : 1 / sqrt(d->shape.k_dim);
    double largest = -INFINITY;
    for (int64_t i = 0; i < keys->n; i++) {
        double dot = 0;
        for (int32_t j = 0; j < d->shape.k_dim; j++) dot += (double)q[j] * (double)keys->k[i * d->shape.k_dim + j];
        largest = fmax(largest, scale * dot);
    }
    return largest;
}

/* Of the call's own scopes, from `max_scope` on, is the largest score. */
static int is_right(const sparse_data *d, int64_t row, int32_t head, int32_t max_scope, likeness *all) {
    const sparse_case *c = &d->shape;
    const int32_t kv_head = head / (c->q_heads / c->kv_heads);
    const int64_t at = row * c->q_heads + head, bytes = cpa_dtype_bytes(c->q_dtype);
    listed_keys keys = {0};
    cpa_case_expected expected;
    float q[CPA_MAX_HEAD_DIM], out[CPA_MAX_HEAD_DIM];
    int64_t most = 1, before_max = 0;
    for (int32_t i = 0; i < d->n_scopes; i++) most += (int64_t)c->scopes[i].width * c->scopes[i].unit;
    keys.k = malloc((size_t)(most * c->k_dim) * sizeof(float));
    keys.v = malloc((size_t)(most * c->v_dim) * sizeof(float));
    for (int32_t i = 0; i < d->n_scopes; i++) {
        if (i == max_scope) before_max = keys.n;
        list_keys(d, i, row, kv_head, &keys);
    }
    cpa_widen(q, (const char *)d->q + at * c->k_dim * bytes, c->q_dtype, c->k_dim);
    const cpa_case_row of = {.dtype = c->q_dtype,
                             .k_dim = c->k_dim,
                             .v_dim = c->v_dim,
                             .scale = (double)c->scale,
                             .q = q,
                             .k = keys.k,
                             .v = keys.v,
                             .k_stride = c->k_dim,
                             .v_stride = c->v_dim,
                             .n_keys = keys.n,
                             .score = &d->score,
                             .head = head};
    cpa_case_expect(&of, &expected);
    const cpa_case_result got = {
        .o = c->what & TWO_CALLS ? NULL : d->o + at * c->v_dim, /* of a resumed call not said */
        .lse = &d->lse[at],
        .out = (const char *)d->out + at * c->v_dim * bytes,
        .out_dtype = c->q_dtype};
    int right = cpa_case_is_right(&expected, &got, NULL);
    const listed_keys of_call = {keys.k + before_max * c->k_dim, NULL, keys.n - before_max, 0};
    const double max = largest_score(d, q, &of_call), error = fabs((double)d->max_logits[at] - max);
    right &= (double)d->max_logits[at] == max || error <= expected.lse_tolerance + fabs(max) * 2.01 / 65536;
    cpa_widen(out, got.out, c->q_dtype, c->v_dim);
    for (int32_t i = 0; i < c->v_dim; i++) {
        all->xy += (double)out[i] * expected.out[i];
        all->xx_yy += (double)out[i] * (double)out[i] + expected.out[i] * expected.out[i];
    }
    free(keys.k);
    free(keys.v);
    return right;
}

/* Rows and heads that are wrong, of one row in `step`: of the first heads, the last, and one that changes. */
static int64_t count_wrong(const sparse_data *d, int64_t step) {
    const sparse_case *c = &d->shape;
    const int32_t max_scope = c->what & TWO_CALLS ? 1 : 0;
    likeness all = {0, 0};
    int64_t wrong = 0;
    for (int64_t row = 0; row < c->rows; row += step) {
        const int32_t heads[] = {0, c->q_heads / 2, (int32_t)((row * 31 + 7) % c->q_heads), c->q_heads - 1};
        for (int i = 0; i < 4; i++)
            if (i == 0 || heads[i] != heads[i - 1]) wrong += !is_right(d, row, heads[i], max_scope, &all);
    }
    return wrong + (all.xx_yy > 0 && 1 - 2 * all.xy / all.xx_yy > 5e-6);
}

static int64_t wrong_of(const sparse_case *shape) {
    sparse_data d;
    int64_t wrong = 0;
    make(&d, shape);
    if (shape->what & TWO_CALLS)
        wrong += attend(&d, 0, shape->rows, 0, 1) != CPA_OK || attend(&d, 0, shape->rows, 1, d.n_scopes) != CPA_OK;
    else
        wrong += attend(&d, 0, shape->rows, 0, d.n_scopes) != CPA_OK;
    download(&d);
    wrong += count_wrong(&d, shape->rows / 6 + 1);
    if (wrong)
        printf("\n    %lld wrong: %lld rows, %d heads over %d of %d, %s over %s, lists of %d and %d, what %d\n",
               (long long)wrong, (long long)shape->rows, shape->q_heads, shape->kv_heads, shape->k_dim,
               cpa_dtype_name(shape->q_dtype), cpa_dtype_name(shape->kv_dtype), shape->scopes[0].width,
               shape->scopes[1].width, shape->what);
    release(&d);
    return wrong;
}

/* ---- tests ---- */

static void every_format_of_latents(void) {
    static const struct {
        cpa_dtype q, kv;
        float scale;
    } formats[] = {{CPA_BF16, CPA_BF16, 0},        {CPA_F16, CPA_F16, 0},      {CPA_F32, CPA_F32, 0},
                   {CPA_BF16, CPA_FP8_E4M3, 0.1f}, {CPA_F16, CPA_FP8_E4M3, 2}, {CPA_BF16, CPA_FP8_T128, 0},
                   {CPA_F32, CPA_FP8_T128, 0},     {CPA_BF16, CPA_INT8, 0}};
    static const int whats[] = {0, SINKS, TWO_CALLS | SINKS, NO_COUNTS, ONE_LIST};
    for (int i = 0; i < 8 * 5; i++) {
        sparse_case c = LATENT;
        c.q_dtype = formats[i % 8].q, c.kv_dtype = formats[i % 8].kv, c.k_scale = formats[i % 8].scale;
        c.what = whats[i % 5];
        c.q_heads = i % 3 ? 64 : 5, c.rows = 1 + i % 7;
        if (i % 2 || c.what & TWO_CALLS)
            c.scopes[1] = (scope_case){.keys = 130, .block_size = 16, .width = 70, .unit = 1, .gap = 2};
        CU_ASSERT_EQUAL(wrong_of(&c), 0);
    }
}

static void every_count_of_heads(void) {
    static const int32_t heads[] = {1, 3, 16, 33, 63, 65, 126, 128};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        sparse_case c = LATENT;
        c.q_heads = heads[i], c.rows = 2;
        if (i % 2) c.kv_dtype = CPA_FP8_T128;
        CU_ASSERT_EQUAL(wrong_of(&c), 0);
    }
}

/* Latents of other widths, of which tensor cores know no more than 512 of 512. */
static void every_width_of_latents(void) {
    static const int32_t widths[][3] = {{512, 512, 1}, {320, 256, 1}, {48, 32, 2}, {17, 5, 1}};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        sparse_case c = LATENT;
        c.k_dim = widths[i][0], c.v_dim = widths[i][1], c.kv_heads = widths[i][2], c.q_heads = 6;
        c.what = c.kv_heads > 1 ? HEAD_LISTS : 0;
        CU_ASSERT_EQUAL(wrong_of(&c), 0);
    }
}

/* Groups of 1 to 16 heads and wider ones, heads of 64 to 256, single keys and neighbours of four. */
static void grouped_heads(void) {
    static const int32_t heads[][2] = {{8, 2}, {3, 3}, {24, 2}, {16, 1}, {34, 2}, {6, 1}};
    static const int32_t widths[][2] = {{128, 128}, {64, 64}, {256, 256}, {192, 128}, {80, 80}, {72, 40}};
    static const cpa_dtype dtypes[][2] = {{CPA_BF16, CPA_BF16},     {CPA_F16, CPA_F16},  {CPA_BF16, CPA_FP8_E4M3},
                                          {CPA_BF16, CPA_FP8_E5M2}, {CPA_F32, CPA_BF16}, {CPA_F16, CPA_INT8}};
    static const int whats[] = {HEAD_LISTS, 0, HEAD_LISTS | SINKS, NO_COUNTS | HEAD_LISTS, TWO_CALLS | HEAD_LISTS};
    for (int i = 0; i < 6 * 6 * 5; i += cpa_test_promises_bits() ? 7 : 1) {
        sparse_case c = HEADS;
        c.q_heads = heads[i % 6][0], c.kv_heads = heads[i % 6][1];
        c.k_dim = widths[i / 6 % 6][0], c.v_dim = widths[i / 6 % 6][1];
        const int dtype = i % 4 ? i / 4 % 2 : i / 4 % 6;
        c.q_dtype = dtypes[dtype][0], c.kv_dtype = dtypes[dtype][1];
        c.what = whats[i / 7 % 5];
        c.rows = 1 + i % 9;
        if (i % 2) c.scopes[0].unit = 4, c.scopes[0].width = 60;
        if (i % 3 == 1) c.scopes[0].block_size = 4;
        if (c.what & TWO_CALLS) c.scopes[1] = (scope_case){.keys = 96, .block_size = 8, .width = 40, .unit = 1};
        CU_ASSERT_EQUAL(wrong_of(&c), 0);
    }
}

static void rows_without_keys(void) {
    static const int whats[] = {NONE_AT_ALL, NO_LISTS, NONE_AT_ALL | SINKS | NO_COUNTS};
    for (int i = 0; i < 6; i++) {
        sparse_case c = i % 2 ? LATENT : HEADS;
        sparse_data d;
        c.what = whats[i / 2];
        c.scopes[0].unit = 1;
        make(&d, &c);
        CU_ASSERT_EQUAL(attend(&d, 0, c.rows, 0, 1), CPA_OK);
        download(&d);
        for (int64_t at = 0; at < c.rows * c.q_heads; at++) {
            CU_ASSERT_EQUAL(d.lse[at], -INFINITY);
            CU_ASSERT(d.o[at * c.v_dim] == 0 && d.max_logits[at] == -INFINITY);
        }
        release(&d);
    }
}

/* Lists longer than there are keys, in which each occurs several times, and such as need many tiles. */
static void long_lists(void) {
    for (int i = 0; i < 4; i++) {
        sparse_case c = i % 2 ? LATENT : HEADS;
        c.rows = 1 + i / 2, c.q_heads = c.kv_heads * 4;
        c.scopes[0].keys = 64, c.scopes[0].width = 2500 + 13 * i;
        CU_ASSERT_EQUAL(wrong_of(&c), 0);
    }
}

/* A few of a grid on the host, most on a device, all with --whole. */
static int is_taken(const sparse_case *c, int i, int one_in) {
    const double pairs = (double)c->rows * c->q_heads * (double)(c->scopes[0].width + c->scopes[1].width);
    if (whole) return 1;
    return cpa_test_promises_bits() ? pairs < 3e5 && i % one_in == 0 : pairs < 3e7;
}

/* A block that is no power of two is one of single tokens. */
static scope_case scope_of(int32_t keys, int32_t width, int32_t block_size) {
    const int power = (block_size & (block_size - 1)) == 0;
    return (scope_case){keys, power ? block_size : 1, width, 1, power ? 1 : 0};
}

/* FlashMLA, tests/test_flash_mla_sparse_decoding.py: keys, entries of a list and blocks of either scope, batches of
 * sequences of 1 and 3 rows. */
static void grid_of_decode(void) {
    static const int32_t shapes[][3] = {{512, 64, 2},    {512, 64, 64},   {512, 64, 69},    {1024, 576, 2},
                                        {1024, 576, 61}, {2046, 2048, 2}, {2046, 2048, 64}, {2046, 2048, 576}};
    static const int32_t batches[] = {4, 74, 321};
    int taken = 0;
    for (int i = 0; i < 8 * 9 * 3 * 2 * 2 * 2; i++) {
        sparse_case c = LATENT;
        const int32_t *first = shapes[i % 8], *second = shapes[i / 8 % 9 % 8];
        c.rows = (int64_t)batches[i / 72 % 3] * (i / 216 % 2 ? 3 : 1);
        c.q_heads = i / 432 % 2 ? 128 : 64;
        c.k_dim = i / 864 ? 512 : 576;
        c.kv_dtype = c.k_dim == 576 && i % 3 ? CPA_FP8_T128 : CPA_BF16;
        c.scopes[0] = scope_of(first[0], first[1], first[2]);
        if (i / 8 % 9 < 8) c.scopes[1] = scope_of(second[0], second[1], second[2]);
        c.what = (i % 5 ? 0 : SINKS) | (i % 11 ? 0 : NO_LISTS);
        if (!is_taken(&c, i, 17)) continue;
        CU_ASSERT_EQUAL(wrong_of(&c), 0);
        taken++;
    }
    printf(" %d cases ", taken);
}

/* FlashMLA, tests/test_flash_mla_sparse_prefill.py. */
static void grid_of_prefill(void) {
    static const int32_t shapes[][2] = {{128, 128},  {256, 256},  {512, 512}, {592, 128}, {1840, 256},
                                        {1592, 384}, {1521, 512}, {95, 128},  {153, 256}, {114, 384}};
    static const int32_t rows[] = {1, 62, 213};
    int taken = 0;
    for (int i = 0; i < 10 * 3 * 2 * 2; i++) {
        sparse_case c = LATENT;
        c.rows = rows[i / 10 % 3];
        c.q_heads = i / 30 % 2 ? 128 : 64;
        c.k_dim = i / 60 ? 512 : 576;
        c.scopes[0] = (scope_case){shapes[i % 10][0], 1, shapes[i % 10][1], 1, 0};
        c.what = i % 3 ? 0 : SINKS;
        if (!is_taken(&c, i, 7)) continue;
        CU_ASSERT_EQUAL(wrong_of(&c), 0);
        taken++;
    }
    printf(" %d cases ", taken);
}

/* Rows by themselves, in one batch, and again. */
static void bits_do_not_depend_on_the_batch(void) {
    for (int i = 0; i < 2; i++) {
        sparse_case c = i ? LATENT : HEADS;
        sparse_data d;
        c.rows = 7;
        make(&d, &c);
        const int64_t n = c.rows * c.q_heads, bytes = n * c.v_dim * (int64_t)sizeof(float);
        float *o = malloc((size_t)bytes), *lse = malloc((size_t)n * sizeof *lse);
        CU_ASSERT_EQUAL(attend(&d, 0, c.rows, 0, 1), CPA_OK);
        download(&d);
        memcpy(o, d.o, (size_t)bytes);
        memcpy(lse, d.lse, (size_t)n * sizeof *lse);
        for (int64_t row = 0; row < c.rows; row += 3)
            CU_ASSERT_EQUAL(attend(&d, row, row + 3 < c.rows ? 3 : c.rows - row, 0, 1), CPA_OK);
        download(&d);
        if (d.device->caps.bit_exact)
            CU_ASSERT(memcmp(o, d.o, (size_t)bytes) == 0 && memcmp(lse, d.lse, (size_t)n * sizeof *lse) == 0);
        CU_ASSERT_EQUAL(count_wrong(&d, 1), 0);
        CU_ASSERT_EQUAL(attend(&d, 0, c.rows, 0, 1), CPA_OK);
        download(&d);
        memcpy(o, d.o, (size_t)bytes);
        CU_ASSERT_EQUAL(attend(&d, 0, c.rows, 0, 1), CPA_OK);
        download(&d);
        CU_ASSERT_EQUAL(memcmp(o, d.o, (size_t)bytes), 0);
        free(o);
        free(lse);
        release(&d);
    }
}

/* The slots of a row's list that its mask shows, through the block table. */
static void map_row(const cpa_attend_fixture *f, int64_t row, int32_t *slots) {
    const cpa_case_score *score = f->score;
    const int64_t entry = score->row_map ? score->row_map[row] : row;
    const int32_t *list = score->lists + entry * score->list_width;
    const int64_t query = f->shape.start + row;
    for (int32_t i = 0; i < score->list_width; i++) {
        const int64_t key = list[i];
        const int seen = i < score->counts[entry] && key >= 0 && key < f->shape.length && key <= query;
        slots[i] = seen ? f->tables[f->table[0] + key / f->shape.block_size] * f->shape.block_size +
                              (int32_t)(key % f->shape.block_size)
                        : -1;
    }
}

/* What attend makes of lists of indices is what this makes of their slots. */
static void slots_are_what_indices_become(void) {
    cpa_attend_case shape = CPA_ATTEND_BASE[1];
    cpa_attend_fixture f;
    cpa_attend_result result;
    shape.kv_heads = 1, shape.q_heads = 4, shape.start = shape.length - 9;
    cpa_attend_fixture_init(&f, &shape, 2);
    cpa_attend_result_init(&result, &f);
    cpa_case_score score = cpa_test_score_of(&f, CPA_TEST_LISTS);
    f.score = &score;
    for (int64_t i = 0; i < score.rows; i++)
        if (score.counts[i] < 0) score.counts[i] = 0; /* those that attend all keys */
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
    int32_t *slots = malloc((size_t)(score.rows * score.list_width) * sizeof *slots);
    for (int64_t row = 0; row < score.rows; row++) map_row(&f, row, slots + row * score.list_width);
    const int64_t n = f.rows * shape.q_heads;
    void *device_slots = cpa_test_upload(f.stream, slots, score.rows * score.list_width * 4);
    void *o = cpa_test_upload(f.stream, result.o, result.o_bytes), *lse = cpa_test_upload(f.stream, result.lse, n * 4);
    void *out = cpa_test_upload(f.stream, result.out, result.out_bytes);
    const cpa_sparse_scope scope = {
        .kv = f.device_kv, .slots = device_slots, .row_stride = score.list_width, .width = score.list_width, .unit = 1};
    const cpa_sparse_attend_args args = {.size = sizeof args,
                                         .rows = f.rows,
                                         .q_heads = shape.q_heads,
                                         .q_dtype = shape.q_dtype,
                                         .q = f.device_q,
                                         .scopes = &scope,
                                         .n_scopes = 1,
                                         .scale = shape.scale,
                                         .state = {.o = o, .lse = lse},
                                         .out = out};
    CU_ASSERT_EQUAL(cpa_sparse_attend(&args, f.stream), CPA_OK);
    cpa_test_download(f.stream, result.o, o, result.o_bytes);
    cpa_test_download(f.stream, result.lse, lse, n * 4);
    cpa_test_download(f.stream, result.out, out, result.out_bytes);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
    void *used[] = {device_slots, o, lse, out};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(f.stream, used[i]);
    free(slots);
    cpa_case_score_release(&score);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&f);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"every format of latents, one scope and two", every_format_of_latents},
        {"1 to 128 query heads over latents", every_count_of_heads},
        {"every width of latents", every_width_of_latents},
        {"grouped heads, single keys and units of four", grouped_heads},
        {"rows without keys", rows_without_keys},
        {"long lists, in which keys occur several times", long_lists},
        {"the grid of decode of FlashMLA", grid_of_decode},
        {"the grid of prefill of FlashMLA", grid_of_prefill},
        {"bits do not depend on the batch", bits_do_not_depend_on_the_batch},
        {"slots are what indices become", slots_are_what_indices_become},
    };
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    whole = cpa_test_take_option(&argc, argv, "--whole");
    return cpa_test_main(argc, argv, "sparse attend", tests, (int)(sizeof tests / sizeof tests[0]));
}
