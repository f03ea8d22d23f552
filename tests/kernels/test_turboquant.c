/* Caches of TurboQuant: the codebook, bytes of a row, what returns of rows, attention over them, conversions. On the
 * host, and the same on a device. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/codebook.h"
#include "kernels/host/cache/row_codes.h"
#include "src/check/reference.h"
#include "src/check/reference_rows.h"
#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

enum { HEADS = 3, BLOCK_SIZE = 16, BLOCKS = 4, ROWS = BLOCKS * BLOCK_SIZE, MOST_DIM = 256 };

static const cpa_dtype DTYPES[] = {CPA_TQ_K8V4, CPA_TQ_4BIT, CPA_TQ_K3V4, CPA_TQ_3BIT};
enum { N_DTYPES = sizeof DTYPES / sizeof DTYPES[0] };

/* With --whole, and on devices, every case; the host else takes each dtype of queries with each cache and each width, and
 * of groups over a cache windows or shards. */
static int whole;
static cpa_device *device;
static cpa_stream *stream;

/* ---- the codebook ---- */

static double density(double x) {
    return exp(-x * x / 2);
}

/* The mean of a normal variable between two bounds, by trapezoids. */
static double mean_between(double low, double high) {
    enum { STEPS = 200 };
    double moment = 0, weight = 0;
    for (int i = 0; i <= STEPS; i++) {
        const double x = low + (high - low) * i / STEPS, half = i == 0 || i == STEPS ? 0.5 : 1;
        moment += half * x * density(x);
        weight += half * density(x);
    }
    return moment / weight;
}

static void lloyd(int bits, double *levels) {
    const int n = 1 << bits;
    double moved = 1;
    for (int i = 0; i < n; i++) levels[i] = -3.5 + 7.0 * (i + 0.5) / n;
    for (int round = 0; round < 200 && moved >= 1e-10; round++) {
        double next[CPA_MOST_LEVELS];
        moved = 0;
        for (int i = 0; i < n; i++) {
            const double low = i == 0 ? -10.5 : (levels[i - 1] + levels[i]) / 2;
            const double high = i == n - 1 ? 10.5 : (levels[i] + levels[i + 1]) / 2;
            next[i] = mean_between(low, high);
            moved = fmax(moved, fabs(next[i] - levels[i]));
        }
        memcpy(levels, next, sizeof next);
    }
}

static void the_codebook_is_lloyds(void) {
    static const double max_of_1960[2][8] = {{.2451, .7560, 1.3439, 2.1520},
                                             {.1284, .3881, .6568, .9424, 1.2562, 1.6181, 2.0690, 2.7326}};
    for (int bits = 3; bits <= 4; bits++) {
        const int half = 1 << (bits - 1);
        double levels[CPA_MOST_LEVELS];
        float ours[CPA_MOST_LEVELS];
        lloyd(bits, levels);
        cpa_tq_centroids(bits, ours);
        for (int i = 0; i < 2 * half; i++) CU_ASSERT_DOUBLE_EQUAL((double)ours[i], levels[i], 1e-7);
        for (int i = 0; i < half; i++)
            CU_ASSERT_DOUBLE_EQUAL((double)ours[half + i], max_of_1960[bits - 3][i], bits == 3 ? 2e-3 : 2e-3);
    }
}

static void rows_take_the_bytes_of_their_codes(void) {
    static const int32_t bytes[N_DTYPES][3][2] = {{{64, 36}, {128, 68}, {256, 132}},
                                                  {{34, 36}, {66, 68}, {130, 132}},
                                                  {{26, 36}, {50, 68}, {98, 132}},
                                                  {{26, 28}, {50, 52}, {98, 100}}};
    for (int i = 0; i < N_DTYPES; i++)
        for (int w = 0; w < 3; w++) {
            CU_ASSERT_EQUAL(cpa_kv_row_bytes(DTYPES[i], CPA_KEYS, 64 << w), bytes[i][w][0]);
            CU_ASSERT_EQUAL(cpa_kv_row_bytes(DTYPES[i], CPA_VALUES, 64 << w), bytes[i][w][1]);
        }
    CU_ASSERT_EQUAL(cpa_kv_block_bytes(CPA_TQ_K8V4, CPA_VALUES, 0, 16, 8, 96), 16 * 8 * 52);
}

static void a_rotation_undoes_itself(void) {
    float x[MOST_DIM], y[MOST_DIM];
    for (int32_t n = 32; n <= MOST_DIM; n *= 2) {
        for (int32_t i = 0; i < n; i++) x[i] = y[i] = (float)((i * 37 + n) % 101 - 50);
        cpa_tq_rotate(y, n);
        float first = 0;
        for (int32_t i = 0; i < n; i++) first += i % 2 ? -x[i] : x[i]; /* row 1 of Sylvester's matrix */
        CU_ASSERT_EQUAL(y[1], first);
        cpa_tq_rotate(y, n);
        for (int32_t i = 0; i < n; i++) CU_ASSERT_EQUAL(y[i], x[i] * (float)n);
    }
}

/* ---- rows ---- */

static cpa_kv_view view_of(cpa_dtype dtype, int32_t k_dim, int32_t v_dim) {
    return (cpa_kv_view){.dtype = dtype,
                         .block_size = BLOCK_SIZE,
                         .num_blocks = BLOCKS,
                         .kv_heads = HEADS,
                         .k_dim = k_dim,
                         .v_dim = v_dim};
}

/* Rows of all magnitudes, one-sided ones, single outliers. */
static void make_rows(float *x, int32_t dim, int seed) {
    for (int64_t row = 0; row < ROWS * HEADS; row++)
        for (int32_t d = 0; d < dim; d++) {
            const int64_t i = row + seed;
            const float even = (float)((d * 37 + i * 101 + d * i) % 199 - 99) / 99;
            const float x_d = i % 4 == 1 ? fabsf(even) + 3 : i % 4 == 3 && d == i % dim ? 30 : even;
            x[row * dim + d] = ldexpf(x_d, (int)(i % 16) - 8);
        }
}

/* Writes a row for each token and head. */
static void write_rows(cpa_kv_fixture *f, const float *k, const float *v, uint8_t *nonfinite) {
    int64_t slots[ROWS];
    for (int64_t i = 0; i < ROWS; i++) slots[i] = (i * 29 + 5) % ROWS;
    cpa_kv_view view = cpa_kv_fixture_upload(f, stream);
    void *device_k = cpa_test_upload(stream, k, ROWS * HEADS * view.k_dim * (int64_t)sizeof *k);
    void *device_v = cpa_test_upload(stream, v, ROWS * HEADS * view.v_dim * (int64_t)sizeof *v);
    int64_t *device_slots = cpa_test_upload(stream, slots, sizeof slots);
    uint8_t *flags = nonfinite ? cpa_test_upload(stream, nonfinite, ROWS) : NULL;
    const cpa_kv_write_args args = {.size = sizeof args,
                                    .tokens = ROWS,
                                    .dtype = CPA_F32,
                                    .k = device_k,
                                    .v = device_v,
                                    .slot_mapping = device_slots,
                                    .kv = view,
                                    .nonfinite = flags};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_kv_fixture_download(f, &view, stream);
    if (flags) cpa_test_download(stream, nonfinite, flags, ROWS);
    cpa_test_free(stream, flags);
    cpa_test_free(stream, device_slots);
    cpa_test_free(stream, device_v);
    cpa_test_free(stream, device_k);
    cpa_kv_view_free(&view, stream);
}

static float range_of(const float *x, int32_t n) {
    float least = x[0], most = x[0];
    for (int32_t d = 1; d < n; d++) least = fminf(least, x[d]), most = fmaxf(most, x[d]);
    return most - least;
}

static void judge_rows(const cpa_kv_fixture *f, const float *k, const float *v) {
    const int32_t k_dim = f->view.k_dim, v_dim = f->view.v_dim;
    for (int64_t i = 0; i < ROWS; i++)
        for (int32_t head = 0; head < HEADS; head++) {
            const int64_t slot = (i * 29 + 5) % ROWS;
            const float *key = k + (i * HEADS + head) * k_dim, *value = v + (i * HEADS + head) * v_dim;
            float got_k[MOST_DIM], got_v[MOST_DIM];
            cpa_kv_fixture_load(f, slot / BLOCK_SIZE, slot % BLOCK_SIZE, head, got_k, got_v);
            CU_ASSERT(cpa_reference_may_hold(got_k, key, f->view.dtype, CPA_KEYS, 0, k_dim));
            CU_ASSERT(cpa_reference_may_hold(got_v, value, f->view.dtype, CPA_VALUES, 0, v_dim));
            /* Another length, or an element elsewhere, does not pass. Keys of e4m3 have no scale to fit. */
            const int64_t size = (i * HEADS + head) % 16;
            const int fits = f->view.dtype != CPA_TQ_K8V4 || (size >= 6 && size < 12);
            for (int32_t d = 0; d < k_dim; d++) got_k[d] *= f->view.dtype == CPA_TQ_K8V4 ? 1.15f : 1.01f;
            if (fits) CU_ASSERT_FALSE(cpa_reference_may_hold(got_k, key, f->view.dtype, CPA_KEYS, 0, k_dim));
            got_v[i % v_dim] += 0.6f * range_of(value, v_dim) + 0.01f * fabsf(value[0]);
            CU_ASSERT_FALSE(cpa_reference_may_hold(got_v, value, f->view.dtype, CPA_VALUES, 0, v_dim));
        }
}

/* Rows by the operator are those that the host's functions make. */
static void judge_bytes(const cpa_kv_fixture *f, const float *k, const float *v) {
    const cpa_kv_view *view = &f->view;
    cpa_kv_fixture host;
    cpa_kv_fixture_init_layout(&host, view_of(view->dtype, view->k_dim, view->v_dim), view->layout);
    for (int64_t i = 0; i < ROWS; i++)
        for (int32_t head = 0; head < HEADS; head++) {
            const int64_t slot = (i * 29 + 5) % ROWS, row = i * HEADS + head;
            cpa_kv_fixture_store(&host, slot / BLOCK_SIZE, slot % BLOCK_SIZE, head, k + row * view->k_dim,
                                 v + row * view->v_dim);
        }
    CU_ASSERT_EQUAL(memcmp(host.view.k, view->k, (size_t)f->k_bytes), 0);
    CU_ASSERT_EQUAL(memcmp(host.view.v, view->v, (size_t)f->v_bytes), 0);
    cpa_kv_fixture_destroy(&host);
}

static void rows_return_as_their_codes(void) {
    static const int32_t widths[][2] = {{128, 128}, {64, 96}, {256, 32}, {32, 256}};
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_DTYPES; i++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
            const int32_t k_dim = widths[w][0], v_dim = widths[w][1];
            cpa_kv_fixture f;
            float *k = malloc(ROWS * HEADS * (size_t)k_dim * sizeof *k),
                  *v = malloc(ROWS * HEADS * (size_t)v_dim * sizeof *v);
            make_rows(k, k_dim, 0);
            make_rows(v, v_dim, 7);
            cpa_kv_fixture_init_view(&f, view_of(DTYPES[i], k_dim, v_dim), w % 2);
            write_rows(&f, k, v, NULL);
            judge_rows(&f, k, v);
            judge_bytes(&f, k, v);
            cpa_kv_fixture_destroy(&f);
            free(v);
            free(k);
        }
    cpa_test_device_close(device, stream);
}

static double cosine(const float *a, const float *b, int32_t n) {
    double ab = 0, aa = 0, bb = 0;
    for (int32_t d = 0; d < n; d++) {
        ab += (double)a[d] * (double)b[d];
        aa += (double)a[d] * (double)a[d];
        bb += (double)b[d] * (double)b[d];
    }
    return ab / sqrt(aa * bb);
}

/* A number of about the normal distribution: a sum of uniform ones. */
static float normal_of(uint32_t i) {
    float sum = 0;
    for (uint32_t n = 0; n < 12; n++) {
        uint32_t h = (i * 12 + n) * 2654435761u;
        h = (h ^ h >> 15) * 2246822519u;
        sum += (float)(h >> 8) * 0x1p-24f - 0.5f;
    }
    return sum;
}

static void rows_keep_their_direction(void) {
    enum { DIM = 128 };
    for (int i = 0; i < N_DTYPES; i++)
        for (uint32_t row = 0; row < 100; row++) {
            char codes[2 * DIM];
            float x[DIM], got[DIM];
            for (uint32_t d = 0; d < DIM; d++) x[d] = normal_of(row * DIM + d) * 3;
            for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
                cpa_tq_quantise(codes, x, DTYPES[i], (cpa_kv_part)part, DIM);
                cpa_tq_dequantise(got, codes, DTYPES[i], (cpa_kv_part)part, DIM);
                CPA_ASSERT_ORDER(cosine(got, x, DIM), >, DTYPES[i] == CPA_TQ_K8V4 ? 0.99 : 0.96);
            }
        }
}

static void what_is_not_finite_counts_as_zero_and_is_told_of(void) {
    enum { DIM = 64 };
    static float k[ROWS * HEADS * DIM], v[ROWS * HEADS * DIM];
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_DTYPES; i++) {
        uint8_t flags[ROWS] = {0};
        cpa_kv_fixture f;
        make_rows(k, DIM, 3);
        make_rows(v, DIM, 4);
        memset(k, 0, HEADS * DIM * sizeof *k); /* zeros are zeros */
        memset(v, 0, HEADS * DIM * sizeof *v);
        k[1 * HEADS * DIM + 5] = NAN, k[2 * HEADS * DIM + DIM] = INFINITY, v[3 * HEADS * DIM + 9] = -INFINITY;
        for (int d = 0; d < HEADS * DIM; d++) k[4 * HEADS * DIM + d] = v[4 * HEADS * DIM + d] = NAN;
        for (int d = 0; d < HEADS * DIM; d++) k[5 * HEADS * DIM + d] = d % 2 ? 3e38f : -3e38f;
        cpa_kv_fixture_init_view(&f, view_of(DTYPES[i], DIM, DIM), 0);
        write_rows(&f, k, v, flags);
        for (int t = 0; t < ROWS; t++) {
            float got_k[DIM], got_v[DIM];
            const int64_t slot = (t * 29 + 5) % ROWS;
            cpa_kv_fixture_load(&f, slot / BLOCK_SIZE, slot % BLOCK_SIZE, 0, got_k, got_v);
            CU_ASSERT_EQUAL(flags[t], t >= 1 && t <= 4);
            for (int d = 0; d < DIM; d++) {
                CU_ASSERT(isfinite(got_k[d]) && isfinite(got_v[d]));
                if (t == 0 || t == 4) CU_ASSERT(got_k[d] == 0 && got_v[d] == 0);
            }
        }
        cpa_kv_fixture_destroy(&f);
    }
    cpa_test_device_close(device, stream);
}

/* ---- attention ---- */

static const cpa_attend_case BASE = {.q_heads = 4,
                                     .kv_heads = 2,
                                     .k_dim = 128,
                                     .v_dim = 128,
                                     .block_size = 16,
                                     .cp_size = 1,
                                     .interleave = 16,
                                     .length = 300,
                                     .mask = {.causal = 1}};

static void attend_equals_float64_of_what_rows_stand_for(void) {
    static const int32_t widths[][2] = {{128, 128}, {64, 64}, {256, 256}, {64, 96}};
    for (int i = 0; i < N_DTYPES; i++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
            for (int q = 0; q < CPA_DTYPE_COUNT; q++) {
                cpa_attend_case shape = BASE;
                if (!whole && (i + (int)w + q) % CPA_DTYPE_COUNT != 0) continue;
                shape.kv_dtype = DTYPES[i];
                shape.q_dtype = (cpa_dtype)q;
                shape.k_dim = widths[w][0];
                shape.v_dim = widths[w][1];
                shape.head_major = w % 2;
                shape.q_heads = w == 0 ? 8 : 4;
                shape.block_size = w == 3 ? 8 : 16;
                CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, 0, 3), 0);
                shape.cp_size = 3;
                shape.start = 290;
                CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_SOFTCAP, 1), 0);
                shape.mask = (cpa_mask){.causal = 1, .sinks = 5, .window = 100};
                CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, 0, 1), 0);
            }
}

static void long_caches_are_split_without_error(void) {
    for (int i = 0; i < N_DTYPES; i++)
        for (int heads = 1; heads <= 8; heads *= 8) {
            cpa_attend_case shape = BASE;
            shape.kv_dtype = DTYPES[i];
            shape.q_dtype = heads == 1 ? CPA_F16 : CPA_BF16;
            shape.kv_heads = heads;
            shape.q_heads = 4 * heads;
            shape.block_size = 64;
            shape.length = 5000;
            shape.start = 4998;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, 0, 1), 0);
        }
}

/* Where the rows of a head lie 16 bytes apart, or multiples of them. */
static void groups_of_all_sizes_attend(void) {
    static const int32_t groups[] = {1, 2, 4, 5, 8, 16};
    for (int i = 0; i < N_DTYPES; i++)
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
            cpa_attend_case shape = BASE;
            shape.kv_dtype = DTYPES[i];
            shape.q_dtype = g % 2 ? CPA_F16 : CPA_BF16;
            shape.kv_heads = 8;
            shape.q_heads = 8 * groups[g];
            shape.block_size = 16 << g % 3;
            shape.length = 1003 + 16 * (int64_t)g;
            shape.start = shape.length - (groups[g] < 8 ? 2 : 1);
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, 0, 1), 0);
            const int windowed = (i + (int)g) % 2;
            shape.mask = (cpa_mask){.causal = 1, .sinks = 5, .window = 200};
            if (whole || windowed) CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, 0, 1), 0);
            shape.cp_size = 3;
            shape.mask = BASE.mask;
            if (whole || !windowed) CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, 0, 1), 0);
        }
}

/* The cache of a fixture as vLLM has it: of each token and head the key, then the value. */
static void pair_rows(cpa_attend_fixture *f) {
    const cpa_kv_view *kv = &f->kv.view;
    const int64_t k_bytes = cpa_kv_row_bytes(kv->dtype, CPA_KEYS, kv->k_dim);
    const int64_t slot = k_bytes + cpa_kv_row_bytes(kv->dtype, CPA_VALUES, kv->v_dim);
    const int64_t bytes = kv->num_blocks * kv->block_size * kv->kv_heads * slot;
    char *pool = cpa_test_poisoned(bytes, 1);
    cpa_kv_view view = *kv;
    view.k_head_stride = view.v_head_stride = slot;
    view.k_token_stride = view.v_token_stride = slot * kv->kv_heads;
    view.k_block_stride = view.v_block_stride = view.k_token_stride * kv->block_size;
    for (int64_t b = 0; b < kv->num_blocks; b++)
        for (int64_t t = 0; t < kv->block_size; t++)
            for (int32_t h = 0; h < kv->kv_heads; h++) {
                char *to = pool + b * view.k_block_stride + t * view.k_token_stride + h * slot;
                const int64_t k = b * kv->k_block_stride + t * kv->k_token_stride + h * kv->k_head_stride;
                const int64_t v = b * kv->v_block_stride + t * kv->v_token_stride + h * kv->v_head_stride;
                memcpy(to, (const char *)kv->k + k, (size_t)k_bytes);
                memcpy(to + k_bytes, (const char *)kv->v + v, (size_t)(slot - k_bytes));
            }
    cpa_kv_view_free(&f->device_kv, f->stream);
    view.k = cpa_test_upload(f->stream, pool, bytes);
    view.v = (char *)view.k + k_bytes;
    f->device_kv = view;
    free(pool);
}

/* Wrong rows, of every ninth, of a batch of an item for each query of the case, over keys of its own as far as a plan
 * knows: enough for CTAs that take whole tokens. Every other one ends with the last key that it sees. */
static int64_t wrong_rows_of_items(const cpa_attend_case *shape, int32_t k_slot, int paired) {
    enum { MOST_ITEMS = 96 };
    cpa_attend_item items[MOST_ITEMS];
    cpa_attend_fixture fixture;
    cpa_attend_result result;
    int64_t n = 0;
    cpa_attend_fixture_init(&fixture, shape, 2);
    fixture.tables_on_device = 1; /* that they share their keys is not seen then */
    if (paired) pair_rows(&fixture);
    cpa_attend_result_init(&result, &fixture);
    CPA_ASSERT_ORDER(fixture.rows, <=, MOST_ITEMS);
    for (int32_t slot = 0; slot < shape->cp_size; slot++)
        for (int64_t i = 0; i < fixture.q_count[slot]; i++) {
            const int64_t seen = shape->cp_size == 1 && i % 2 ? shape->start + i + 1 : fixture.k_tokens[k_slot];
            items[n++] = cpa_attend_fixture_item(&fixture, slot, i, 1, k_slot, 0, seen);
        }
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&fixture, items, n, 0, &result), CPA_OK);
    const int64_t wrong = cpa_attend_fixture_check(&fixture, k_slot, 9, &result, NULL);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&fixture);
    return wrong;
}

static void many_items_attend(void) {
    static const int32_t groups[] = {5, 16, 4, 8, 2};
    for (int i = 0; i < N_DTYPES; i++)
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
            cpa_attend_case shape = BASE;
            if (DTYPES[i] != CPA_TQ_4BIT && g % N_DTYPES != (size_t)i) continue;
            shape.kv_dtype = DTYPES[i];
            shape.q_dtype = g % 2 ? CPA_F16 : CPA_BF16;
            shape.kv_heads = g == 4 ? 16 : 8;
            shape.q_heads = shape.kv_heads * groups[g];
            shape.block_size = 16 << g % 3;
            shape.length = 1100 + 7 * (int64_t)g;
            shape.start = shape.length - 64;
            CU_ASSERT_EQUAL(wrong_rows_of_items(&shape, 0, 0), 0);
            CU_ASSERT_EQUAL(wrong_rows_of_items(&shape, 0, 1), 0);
            shape.mask = (cpa_mask){.causal = 1, .sinks = 5, .window = 900};
            CU_ASSERT_EQUAL(wrong_rows_of_items(&shape, 0, 0), 0);
            shape.cp_size = 3;
            shape.length = 3000;
            shape.start = 2920;
            CU_ASSERT_EQUAL(wrong_rows_of_items(&shape, 1, 0), 0);
        }
}

static void pairs_of_rows_attend(void) {
    for (int i = 0; i < N_DTYPES; i++)
        for (int heads = 1; heads <= 8; heads *= 8) {
            cpa_attend_case shape = BASE;
            cpa_attend_fixture fixture;
            cpa_attend_result result;
            shape.kv_dtype = DTYPES[i];
            shape.q_dtype = heads == 1 ? CPA_F16 : CPA_BF16;
            shape.kv_heads = heads;
            shape.q_heads = 6 * heads;
            shape.start = 299;
            cpa_attend_fixture_init(&fixture, &shape, 2);
            pair_rows(&fixture);
            cpa_attend_result_init(&result, &fixture);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixture, 0, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&fixture, 0, 1, &result, NULL), 0);
            cpa_attend_result_destroy(&result);
            cpa_attend_fixture_destroy(&fixture);
        }
}

/* The length of a key. */
static void a_wrong_length_shows(void) {
    cpa_attend_case shape = BASE;
    cpa_attend_fixture fixture;
    cpa_attend_result result;
    shape.kv_dtype = CPA_TQ_4BIT;
    shape.q_dtype = CPA_BF16;
    shape.start = 298;
    cpa_attend_fixture_init(&fixture, &shape, 2);
    cpa_attend_result_init(&result, &fixture);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixture, 0, &result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&fixture, 0, 1, &result, NULL), 0);
    const cpa_kv_view *kv = &fixture.kv.view;
    const int32_t block = fixture.tables[fixture.table[0] + 297 / kv->block_size];
    char *row = (char *)kv->k + block * kv->k_block_stride + 297 % kv->block_size * kv->k_token_stride;
    const uint16_t length = cpa_to_f16(900);
    memcpy(row + 64, &length, sizeof length);
    cpa_kv_view_free(&fixture.device_kv, fixture.stream);
    fixture.device_kv = cpa_kv_fixture_upload(&fixture.kv, fixture.stream);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixture, 0, &result), CPA_OK);
    CPA_ASSERT_ORDER(cpa_attend_fixture_check(&fixture, 0, 1, &result, NULL), >, 0);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&fixture);
}

/* ---- elsewhere ---- */

static void rows_become_elements(void) {
    enum { DIM = 128 };
    static float k[ROWS * HEADS * DIM], v[ROWS * HEADS * DIM];
    const int64_t pairs[][2] = {{0, 3}, {2, 1}, {3, 0}};
    cpa_test_device_open(2, &device, &stream);
    make_rows(k, DIM, 1);
    make_rows(v, DIM, 2);
    for (int i = 0; i < N_DTYPES; i++)
        for (int to = 0; to < CPA_DTYPE_COUNT; to++) {
            cpa_kv_fixture codes, elements;
            cpa_kv_fixture_init_view(&codes, view_of(DTYPES[i], DIM, DIM), to == 1);
            cpa_kv_fixture_init_view(&elements, view_of((cpa_dtype)to, DIM, DIM), 0);
            write_rows(&codes, k, v, NULL);
            cpa_kv_view src = cpa_kv_fixture_upload(&codes, stream), dst = cpa_kv_fixture_upload(&elements, stream);
            const cpa_kv_convert_args args = {
                .size = sizeof args, .src = src, .dst = dst, .pairs = pairs, .n_pairs = 3};
            CU_ASSERT_EQUAL(cpa_kv_convert(&args, stream), CPA_OK);
            cpa_kv_fixture_download(&elements, &dst, stream);
            for (int64_t t = 0; t < 3 * BLOCK_SIZE; t++) {
                float want[2][DIM], got[2][DIM];
                const int64_t *pair = pairs[t / BLOCK_SIZE], offset = t % BLOCK_SIZE;
                cpa_kv_fixture_load(&codes, pair[0], offset, 1, want[0], want[1]);
                cpa_kv_fixture_load(&elements, pair[1], offset, 1, got[0], got[1]);
                for (int part = 0; part < 2; part++)
                    for (int32_t d = 0; d < DIM; d++) {
                        const double unit = to == CPA_F32 ? 0x1p-20 : to == CPA_F16 ? 0x1p-10 : 0x1p-7;
                        const double x = (double)want[part][d], of_sums = (double)range_of(want[part], DIM) * 0x1p-20;
                        CU_ASSERT_DOUBLE_EQUAL((double)got[part][d], x, fabs(x) * unit + of_sums + 0x1p-24);
                    }
            }
            cpa_kv_view_free(&dst, stream);
            cpa_kv_view_free(&src, stream);
            cpa_kv_fixture_destroy(&elements);
            cpa_kv_fixture_destroy(&codes);
        }
    cpa_test_device_close(device, stream);
}

static void shapes_without_a_codebook_are_refused(void) {
    const struct {
        cpa_dtype dtype;
        int32_t k_dim, v_dim;
        cpa_kv_layout layout;
        const char *line;
    } bad[] = {
        {CPA_TQ_4BIT, 96, 64, 0, "k_dim is 96 and v_dim is 64 for a cache of tq_4bit, expected a power of two"},
        {CPA_TQ_3BIT, 64, 40, 0, "v_dim is 40"},
        {CPA_TQ_K8V4, 512, 64, 0, "expected multiples of 32 up to 256"},
        {CPA_TQ_K3V4, 64, 64, CPA_VLLM_X, "expected 0 and rows of one piece"},
    };
    static float rows[HEADS * 512];
    int64_t slot = 0;
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_kv_view view = view_of(bad[i].dtype, bad[i].k_dim, bad[i].v_dim);
        view.layout = bad[i].layout;
        view.k = view.v = rows;
        const cpa_kv_write_args args = {.size = sizeof args,
                                        .tokens = 1,
                                        .dtype = CPA_F32,
                                        .k = rows,
                                        .v = rows,
                                        .slot_mapping = &slot,
                                        .kv = view};
        CU_ASSERT_NOT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), bad[i].line));
    }
    cpa_kv_view odd = view_of(CPA_TQ_4BIT, 64, 64);
    odd.k = odd.v = rows;
    odd.k_token_stride = 3 * 34 + 1;
    const cpa_kv_write_args args = {
        .size = sizeof args, .tokens = 1, .dtype = CPA_F32, .k = rows, .v = rows, .slot_mapping = &slot, .kv = odd};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "expected multiples of 2 bytes for tq_4bit"));
    cpa_test_device_close(device, stream);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"the codebook is Lloyd's", the_codebook_is_lloyds},
        {"rows take the bytes of their codes", rows_take_the_bytes_of_their_codes},
        {"a rotation undoes itself", a_rotation_undoes_itself},
        {"rows return as their codes", rows_return_as_their_codes},
        {"rows keep their direction", rows_keep_their_direction},
        {"what is not finite counts as zero and is told of", what_is_not_finite_counts_as_zero_and_is_told_of},
        {"attend equals float64 of what rows stand for", attend_equals_float64_of_what_rows_stand_for},
        {"long caches are split without error", long_caches_are_split_without_error},
        {"groups of all sizes attend", groups_of_all_sizes_attend},
        {"many items attend", many_items_attend},
        {"pairs of rows attend", pairs_of_rows_attend},
        {"a wrong length shows", a_wrong_length_shows},
        {"rows become elements", rows_become_elements},
        {"shapes without a codebook are refused", shapes_without_a_codebook_are_refused},
    };
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    whole = cpa_test_take_option(&argc, argv, "--whole") || !cpa_test_promises_bits();
    return cpa_test_main(argc, argv, "turboquant", tests, (int)(sizeof tests / sizeof *tests));
}
