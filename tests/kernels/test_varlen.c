/* Attention without a cache against the float64 reference: the shapes of encoders of images and sound, ragged segments,
 * lengths that differ, windows to both sides, packed tensors, resumed calls. Whatever is in no segment is NaN. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cpattn/varlen.h>

#include "base/convert.h"
#include "base/threads.h"
#include "src/check/reference.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/reference_fixture.h"
#include "tests/fixtures/unit.h"

enum { MOST_SEGMENTS = 64, GAP = 3, ROW_PADDING = 8 };

typedef struct varlen_case {
    cpa_dtype dtype;
    int32_t q_heads, kv_heads, k_dim, v_dim;
    int64_t n_segments;
    int64_t rows, keys; /* of each segment; ragged: the most of one */
    int32_t ragged;     /* lengths from 1 on; 2: empty ones too */
    int32_t causal;
    int64_t left, right;
    int32_t packed; /* q, k and v are parts of the rows of one tensor */
    int32_t keep;   /* a state too, not only `out` */
    float softcap;
    int64_t samples; /* (row, head) pairs that are compared, about; 0: all */
} varlen_case;

/* Tensors on the host; rows in no segment, and what lies between rows, are NaN. */
typedef struct tensors {
    int64_t q_starts[MOST_SEGMENTS + 1], k_starts[MOST_SEGMENTS + 1];
    int64_t q_rows, k_rows, q_stride, k_stride, v_stride; /* rows with those in no segment; elements */
    int64_t k_at, v_at;                                   /* packed: of a row */
    char *q, *k, *v;
} tensors;

typedef struct result {
    float *o, *lse;
    char *out;
} result;

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 31) * 0x7fb5d329728ea185u;
    x = (x ^ x >> 27) * 0x81dadef4bc2dd44du;
    return x ^ x >> 33;
}

/* Queries are large, so that few keys have most of the weight. */
static void fill(char *to, int64_t n, uint64_t seed, float size, cpa_dtype dtype) {
    enum { RUN = CPA_MAX_HEAD_DIM, AT_ONCE = 4 }; /* of one number of 64 bits */
    float wide[RUN];
    for (int64_t first = 0; first < n; first += RUN) {
        const int64_t run = n - first < RUN ? n - first : RUN;
        for (int64_t i = 0; i < RUN; i += AT_ONCE) {
            const uint64_t x = mixed(seed + (uint64_t)(first + i));
            for (int part = 0; part < AT_ONCE; part++)
                wide[i + part] = size * (float)(int16_t)(x >> 16 * part & 0xffff) / 0x1p15f;
        }
        cpa_narrow(to + first * cpa_dtype_bytes(dtype), wide, dtype, run);
    }
}

/* Lengths of a segment; every fifth of `ragged` 2 has no rows, or no keys, in turn. */
static int64_t length_of(const varlen_case *c, int64_t segment, int keys) {
    const int64_t most = keys ? c->keys : c->rows;
    if (!c->ragged) return most;
    if (c->ragged == 2 && segment % 5 == (keys ? 2 : 4)) return 0;
    return 1 + (int64_t)(mixed((uint64_t)(segment + 77 * (c->rows != c->keys && keys))) % (uint64_t)most);
}

static void fill_rows(char *rows, int64_t stride, int64_t begin, int64_t end, int64_t width, uint64_t seed, float size,
                      cpa_dtype dtype) {
    for (int64_t i = begin; i < end; i++)
        fill(rows + i * stride * cpa_dtype_bytes(dtype), width, seed + (uint64_t)(i << 20), size, dtype);
}

static void make_tensors(const varlen_case *c, tensors *t) {
    const int64_t q = (int64_t)c->q_heads * c->k_dim, k = (int64_t)c->kv_heads * c->k_dim;
    const int64_t v = (int64_t)c->kv_heads * c->v_dim, bytes = cpa_dtype_bytes(c->dtype);
    t->q_starts[0] = t->k_starts[0] = GAP;
    for (int64_t s = 0; s < c->n_segments; s++) {
        t->q_starts[s + 1] = t->q_starts[s] + length_of(c, s, 0);
        t->k_starts[s + 1] = t->k_starts[s] + length_of(c, s, 1);
    }
    t->q_rows = t->q_starts[c->n_segments] + GAP;
    t->k_rows = t->k_starts[c->n_segments] + GAP;
    if (c->packed) {
        t->q_stride = t->k_stride = t->v_stride = (q + k + v + ROW_PADDING) / ROW_PADDING * ROW_PADDING;
        t->k_at = q, t->v_at = q + k;
        t->q = cpa_test_poisoned((t->q_rows > t->k_rows ? t->q_rows : t->k_rows) * t->q_stride, bytes);
        t->k = t->q + t->k_at * bytes, t->v = t->q + t->v_at * bytes;
    } else {
        t->q_stride = q, t->k_stride = k, t->v_stride = v;
        t->q = cpa_test_poisoned(t->q_rows * q, bytes);
        t->k = cpa_test_poisoned(t->k_rows * k, bytes), t->v = cpa_test_poisoned(t->k_rows * v, bytes);
    }
    for (int64_t s = 0; s < c->n_segments; s++) {
        /* Keys of a segment that nobody asks for are in none, in effect. */
        const int asked = t->q_starts[s + 1] > t->q_starts[s];
        fill_rows(t->q, t->q_stride, t->q_starts[s], t->q_starts[s + 1], q, 1, 8, c->dtype);
        if (!asked) continue;
        fill_rows(t->k, t->k_stride, t->k_starts[s], t->k_starts[s + 1], k, (uint64_t)1 << 60, 1, c->dtype);
        fill_rows(t->v, t->v_stride, t->k_starts[s], t->k_starts[s + 1], v, (uint64_t)1 << 61, 1, c->dtype);
    }
}

static void free_tensors(const varlen_case *c, tensors *t) {
    free(t->q);
    if (c->packed) return;
    free(t->k);
    free(t->v);
}

/* ---- a call ---- */

typedef struct site {
    cpa_device *device;
    cpa_stream *stream;
    cpa_attend_plan *plan;
} site;

static void open_site(site *s, int32_t threads) {
    cpa_test_device_open(threads, &s->device, &s->stream);
    if (cpa_attend_plan_create(s->device, &s->plan, NULL) != CPA_OK) abort();
}

static void close_site(site *s) {
    cpa_attend_plan_destroy(s->plan);
    cpa_test_device_close(s->device, s->stream);
}

static int64_t out_bytes(const varlen_case *c, const tensors *t) {
    return t->q_rows * c->q_heads * c->v_dim * cpa_dtype_bytes(c->dtype);
}

/* The tensors on the device. The last row of keys ends the memory there. */
typedef struct on_device {
    char *q, *k, *v, *packed;
} on_device;

static on_device upload(const site *s, const varlen_case *c, const tensors *t) {
    const int64_t bytes = cpa_dtype_bytes(c->dtype), k_end = t->k_starts[c->n_segments];
    if (c->packed) {
        const int64_t rows = t->q_rows > t->k_rows ? t->q_rows : t->k_rows;
        char *all = cpa_test_upload(s->stream, t->q, rows * t->q_stride * bytes);
        return (on_device){all, all + t->k_at * bytes, all + t->v_at * bytes, all};
    }
    return (on_device){cpa_test_upload(s->stream, t->q, t->q_rows * t->q_stride * bytes),
                       cpa_test_upload(s->stream, t->k, k_end * t->k_stride * bytes),
                       cpa_test_upload(s->stream, t->v, k_end * t->v_stride * bytes), NULL};
}

static void release(const site *s, on_device d) {
    cpa_test_free(s->stream, d.q);
    if (d.packed) return;
    cpa_test_free(s->stream, d.k);
    cpa_test_free(s->stream, d.v);
}

static cpa_status set_plan(const site *s, const varlen_case *c, const int64_t *q_starts, const int64_t *k_starts,
                           int64_t n) {
    const cpa_varlen_batch batch = {.size = sizeof batch,
                                    .q_heads = c->q_heads,
                                    .kv_heads = c->kv_heads,
                                    .k_dim = c->k_dim,
                                    .v_dim = c->v_dim,
                                    .n_segments = n,
                                    .q_starts = q_starts,
                                    .k_starts = k_starts,
                                    .causal = c->causal};
    return cpa_varlen_plan_set(s->plan, &batch, NULL);
}

static cpa_varlen_attend_args args_of(const varlen_case *c, const tensors *t, on_device d) {
    return (cpa_varlen_attend_args){.size = sizeof(cpa_varlen_attend_args),
                                    .dtype = c->dtype,
                                    .q = d.q,
                                    .k = d.k,
                                    .v = d.v,
                                    .q_row_stride = t->q_stride,
                                    .k_row_stride = t->k_stride,
                                    .v_row_stride = t->v_stride,
                                    .causal = c->causal,
                                    .left = c->left,
                                    .right = c->right,
                                    .softcap = c->softcap};
}

/* Attends the segments; the result in host memory, all NaN at first. */
static cpa_status attend(const site *s, const varlen_case *c, const tensors *t, result *r) {
    const int64_t heads = t->q_rows * c->q_heads, floats = heads * c->v_dim, unit = (int64_t)sizeof(float);
    *r = (result){cpa_test_poisoned(floats, unit), cpa_test_poisoned(heads, unit),
                  cpa_test_poisoned(out_bytes(c, t), 1)};
    const on_device d = upload(s, c, t);
    cpa_varlen_attend_args args = args_of(c, t, d);
    args.out = cpa_test_upload(s->stream, r->out, out_bytes(c, t));
    args.state.lse = cpa_test_upload(s->stream, r->lse, heads * unit);
    if (c->keep) args.state.o = cpa_test_upload(s->stream, r->o, floats * unit);
    const int same = memcmp(t->q_starts, t->k_starts, sizeof t->q_starts) == 0;
    cpa_status status = set_plan(s, c, t->q_starts, same ? NULL : t->k_starts, c->n_segments);
    if (status == CPA_OK) status = cpa_varlen_attend(s->plan, &args, s->stream);
    if (status != CPA_OK) printf("\n    status %d: %s", status, cpa_stream_error(s->stream));
    cpa_test_download(s->stream, r->out, args.out, out_bytes(c, t));
    cpa_test_download(s->stream, r->lse, args.state.lse, heads * unit);
    if (c->keep) cpa_test_download(s->stream, r->o, args.state.o, floats * unit);
    cpa_test_free(s->stream, args.state.o);
    cpa_test_free(s->stream, args.state.lse);
    cpa_test_free(s->stream, args.out);
    release(s, d);
    return status;
}

static void free_result(result *r) {
    free(r->o);
    free(r->lse);
    free(r->out);
}

/* ---- the reference ---- */

static const char *element(const char *rows, int64_t row, int64_t stride, int64_t at, cpa_dtype dtype) {
    return rows + (row * stride + at) * cpa_dtype_bytes(dtype);
}

/* Whether row i of a segment, one of n_q queries and n_k keys, sees key j: as cpattn/varlen.h says it. */
static int sees(const varlen_case *c, int64_t i, int64_t n_q, int64_t j, int64_t n_k) {
    const int64_t p = i + n_k - n_q;
    return (!c->causal || j <= p) && (!c->left || p - j < c->left) && (!c->right || j - p < c->right);
}

/* Whether O, if it is kept, out and LSE of a row and head are what the reference says. */
static int check_row(const varlen_case *c, const tensors *t, const result *r, int64_t segment, int64_t i,
                     int32_t head) {
    const int32_t kv_head = head / (c->q_heads / c->kv_heads);
    const int64_t row = t->q_starts[segment] + i, at = row * c->q_heads + head;
    const int64_t n_q = t->q_starts[segment + 1] - t->q_starts[segment], k_begin = t->k_starts[segment];
    const int64_t n_k = t->k_starts[segment + 1] - k_begin;
    float q[CPA_MAX_HEAD_DIM], k[CPA_MAX_HEAD_DIM], v[CPA_MAX_HEAD_DIM], out[CPA_MAX_HEAD_DIM];
    double want[CPA_MAX_HEAD_DIM], lse, tolerance;
    cpa_reference_row reference;
    cpa_test_keys keys;
    cpa_widen(q, element(t->q, row, t->q_stride, (int64_t)head * c->k_dim, c->dtype), c->dtype, c->k_dim);
    cpa_reference_begin(&reference, q, c->k_dim, c->v_dim, c->dtype, 0);
    cpa_reference_set_rules(&reference, &(cpa_reference_rules){.softcap = (double)c->softcap});
    cpa_test_keys_begin(&keys, &reference);
    for (int64_t j = 0; j < n_k; j++) {
        if (!sees(c, i, n_q, j, n_k)) continue;
        const int64_t key = k_begin + j;
        cpa_widen(k, element(t->k, key, t->k_stride, (int64_t)kv_head * c->k_dim, c->dtype), c->dtype, c->k_dim);
        cpa_widen(v, element(t->v, key, t->v_stride, (int64_t)kv_head * c->v_dim, c->dtype), c->dtype, c->v_dim);
        cpa_test_keys_add(&keys, k, v, j, 0);
    }
    cpa_test_keys_end(&keys);
    cpa_reference_end(&reference, want, &lse, &tolerance);
    cpa_widen(out, r->out + at * c->v_dim * cpa_dtype_bytes(c->dtype), c->dtype, c->v_dim);
    const double error = cpa_reference_error(out, want, c->v_dim);
    const double kept = c->keep ? cpa_reference_error(r->o + at * c->v_dim, want, c->v_dim) : 0;
    if (isinf(lse)) return r->lse[at] == -INFINITY && error == 0 && kept == 0;
    return error <= tolerance && kept <= tolerance &&
           fabs((double)r->lse[at] - lse) <= cpa_reference_lse_tolerance(c->dtype);
}

/* How many of the sampled rows are wrong: the first and the last of a segment, and some between. */
static int64_t count_wrong(const varlen_case *c, const tensors *t, const result *r) {
    const int64_t all = (t->q_starts[c->n_segments] - t->q_starts[0]) * c->q_heads;
    const uint64_t apart = c->samples && all > c->samples ? (uint64_t)(all / c->samples) : 1;
    int64_t wrong = 0;
    for (int64_t s = 0; s < c->n_segments; s++) {
        const int64_t n = t->q_starts[s + 1] - t->q_starts[s];
        for (int64_t i = 0; i < n; i++) {
            for (int32_t head = 0; head < c->q_heads; head++) {
                const int end = (i == 0 && s == 0) || (i == n - 1 && s == c->n_segments - 1);
                const int taken = mixed((uint64_t)((t->q_starts[s] + i) * c->q_heads + head)) % apart == 0;
                if (taken || (end && head == c->q_heads - 1)) wrong += !check_row(c, t, r, s, i, head);
            }
        }
    }
    return wrong;
}

/* Whether rows in no segment are as they were. */
static int outside_is_untouched(const varlen_case *c, const tensors *t, const result *r) {
    const int64_t row = c->q_heads * c->v_dim * cpa_dtype_bytes(c->dtype), end = t->q_starts[c->n_segments];
    int untouched = 1;
    for (int64_t i = 0; i < t->q_rows; i++) {
        if (i >= t->q_starts[0] && i < end) continue;
        for (int64_t b = 0; b < row; b++) untouched &= (uint8_t)r->out[i * row + b] == 0xff;
    }
    return untouched;
}

static int64_t wrong_rows_at(const site *s, const varlen_case *c) {
    tensors t = {0};
    result r;
    make_tensors(c, &t);
    int64_t wrong = attend(s, c, &t, &r) != CPA_OK;
    wrong += count_wrong(c, &t, &r);
    wrong += !outside_is_untouched(c, &t, &r);
    if (wrong) {
        printf(
            "\n    %lld wrong: %s, heads %d/%d of %d/%d, %lld segments of %lld x %lld, ragged %d, causal %d, left "
            "%lld, right %lld, packed %d",
            (long long)wrong, cpa_dtype_name(c->dtype), c->q_heads, c->kv_heads, c->k_dim, c->v_dim,
            (long long)c->n_segments, (long long)c->rows, (long long)c->keys, c->ragged, c->causal, (long long)c->left,
            (long long)c->right, c->packed);
    }
    free_result(&r);
    free_tensors(c, &t);
    return wrong;
}

static int64_t wrong_rows(const varlen_case *c) {
    site s;
    open_site(&s, 1);
    const int64_t wrong = wrong_rows_at(&s, c);
    close_site(&s);
    return wrong;
}

/* ---- the grid ---- */

/* The shapes of encoders: of the whole grid the host takes, in short, a part with few products. */
enum { HOST_APART = 11, SAMPLES = 6, MOST_AT_ONCE = 8 };
static const double HOST_PRODUCTS = 1.5e8, MOST_PRODUCTS = 7e10;
static const int64_t HOST_ELEMENTS = 4 << 20, MOST_ELEMENTS = 12 << 20; /* of the queries */
static int whole_grid;

enum { DIMS = 6, HEADS = 3, BATCHES = 2, LENGTHS = 8, MASKS = 3 };
#define GRID_CASES ((int64_t)DIMS * HEADS * BATCHES * LENGTHS * MASKS * CPA_DTYPE_COUNT)

/* The i-th case of the whole grid; 0: it is left out. */
static int case_of_grid(int64_t i, varlen_case *c) {
    static const int32_t dims[DIMS] = {64, 72, 80, 88, 96, 128}, heads[HEADS] = {1, 16, 25};
    static const int64_t batches[BATCHES] = {1, 16}, lengths[LENGTHS] = {196, 256, 577, 729, 1024, 1500, 4096, 16384};
    const int64_t most_elements = cpa_test_promises_bits() ? HOST_ELEMENTS : MOST_ELEMENTS;
    int64_t rest = i;
    const int32_t dim = dims[rest % DIMS], n_heads = heads[(rest /= DIMS) % HEADS];
    const int64_t batch = batches[(rest /= HEADS) % BATCHES], length = lengths[(rest /= BATCHES) % LENGTHS];
    const int64_t mask = (rest /= LENGTHS) % MASKS;
    const cpa_dtype dtype = (cpa_dtype)(rest / MASKS);
    const double products = 2.0 * (double)(batch * n_heads * dim) * (double)(length * length);
    if (products > MOST_PRODUCTS || batch * length * n_heads * dim > most_elements) return 0;
    if (!whole_grid && (i % HOST_APART || products > HOST_PRODUCTS)) return 0;
    *c = (varlen_case){.dtype = dtype,
                       .q_heads = n_heads,
                       .kv_heads = i % 2 && n_heads == 16 ? 4 : n_heads,
                       .k_dim = dim,
                       .v_dim = dim,
                       .n_segments = batch,
                       .rows = length,
                       .keys = length,
                       .causal = mask == 1,
                       .left = mask == 2 ? 128 : 0,
                       .right = mask == 2 ? 97 : 0,
                       .packed = (int32_t)(i / 2 % 2),
                       .samples = SAMPLES};
    return 1;
}

typedef struct grid_run {
    site sites[MOST_AT_ONCE]; /* of each thread */
    atomic_llong cases, wrong;
} grid_run;

static void check_case(void *ctx, int64_t i, int32_t thread) {
    grid_run *run = ctx;
    varlen_case c;
    if (!case_of_grid(i, &c)) return;
    atomic_fetch_add(&run->cases, 1);
    atomic_fetch_add(&run->wrong, wrong_rows_at(&run->sites[thread], &c));
}

/* Most of a case of the whole grid is making and checking its tensors here: several are under way at once. */
static void grid_of_encoders(void) {
    const long cpus = whole_grid ? sysconf(_SC_NPROCESSORS_ONLN) : 1;
    const int32_t n = cpus < MOST_AT_ONCE ? (int32_t)cpus : MOST_AT_ONCE;
    cpa_threads *threads;
    grid_run run = {0};
    CU_ASSERT_EQUAL_FATAL(cpa_threads_create(n, NULL, 0, &threads, NULL), CPA_OK);
    for (int32_t i = 0; i < n; i++) open_site(&run.sites[i], 1);
    cpa_threads_run(threads, GRID_CASES, check_case, &run, NULL, NULL);
    for (int32_t i = 0; i < n; i++) close_site(&run.sites[i]);
    cpa_threads_destroy(threads);
    printf("%lld cases ", (long long)run.cases);
    CU_ASSERT_TRUE(run.cases > 0);
    CU_ASSERT_EQUAL(run.wrong, 0);
}

/* ---- what the grid leaves out ---- */

static const varlen_case BASE[] = {
    {.q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .n_segments = 3, .rows = 150, .keys = 150},
    {.dtype = CPA_BF16,
     .q_heads = 3,
     .kv_heads = 3,
     .k_dim = 80,
     .v_dim = 80,
     .n_segments = 2,
     .rows = 200,
     .keys = 200},
    {.dtype = CPA_F16,
     .q_heads = 4,
     .kv_heads = 1,
     .k_dim = 128,
     .v_dim = 128,
     .n_segments = 2,
     .rows = 140,
     .keys = 140},
};
enum { BASES = sizeof BASE / sizeof BASE[0] };

static void ragged_segments(void) {
    for (int base = 0; base < BASES; base++) {
        for (int causal = 0; causal < 2; causal++) {
            varlen_case c = BASE[base];
            c.n_segments = MOST_SEGMENTS;
            c.rows = c.keys = whole_grid ? 4096 : 120;
            c.ragged = 1;
            c.causal = causal;
            c.samples = 300;
            CU_ASSERT_EQUAL(wrong_rows(&c), 0);
        }
    }
}

static void empty_segments(void) {
    for (int base = 0; base < BASES; base++) {
        for (int causal = 0; causal < 2; causal++) {
            varlen_case c = BASE[base];
            c.n_segments = 21;
            c.rows = 40, c.keys = 70;
            c.ragged = 2;
            c.causal = causal;
            c.keep = 1;
            CU_ASSERT_EQUAL(wrong_rows(&c), 0);
        }
    }
}

/* Queries of one thing and keys of another: fewer of either; a causal row may then see nothing. */
static void lengths_that_differ(void) {
    static const int64_t lengths[][2] = {{1, 1500}, {5, 300}, {17, 260}, {300, 5}, {200, 129}, {64, 700}};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            for (int causal = 0; causal < 2; causal++) {
                varlen_case c = BASE[base];
                c.rows = lengths[i][0], c.keys = lengths[i][1];
                c.causal = causal;
                c.keep = base == 0;
                c.samples = 200;
                CU_ASSERT_EQUAL(wrong_rows(&c), 0);
            }
        }
    }
}

static void windows_to_both_sides(void) {
    static const int64_t windows[][2] = {{1, 0}, {0, 1}, {1, 1}, {5, 3}, {64, 0}, {0, 64}, {100, 130}, {1000, 1000}};
    for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            for (int causal = 0; causal < 2; causal++) {
                varlen_case c = BASE[base];
                c.left = windows[i][0], c.right = windows[i][1];
                c.causal = causal;
                c.rows = c.keys = 300;
                if (i % 2) c.rows = 80;
                c.samples = 200;
                CU_ASSERT_EQUAL(wrong_rows(&c), 0);
            }
        }
    }
}

/* As some sound encoders have it; a device may have no kernel for it. */
static void capped_scores(void) {
    for (int base = 0; base <= BASES; base++) {
        varlen_case c = BASE[base < BASES ? base : 1];
        site s;
        tensors t = {0};
        result r;
        c.softcap = 1.5f;
        if (base == BASES) c.k_dim = c.v_dim = 72; /* a plan may have other tiles for such heads without rules */
        c.right = base == 1 ? 30 : 0;
        open_site(&s, 1);
        make_tensors(&c, &t);
        const cpa_status status = attend(&s, &c, &t, &r);
        CU_ASSERT_TRUE(status == CPA_OK || (status == CPA_UNSUPPORTED && !cpa_test_promises_bits()));
        if (status == CPA_OK) CU_ASSERT_EQUAL(count_wrong(&c, &t, &r), 0);
        free_result(&r);
        free_tensors(&c, &t);
        close_site(&s);
    }
}

static void any_width(void) {
    static const int32_t widths[][2] = {{72, 72}, {88, 88},   {96, 64},   {64, 96}, {72, 128}, {80, 16},
                                        {24, 80}, {192, 128}, {256, 256}, {13, 13}, {1, 1},    {65, 33}};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            varlen_case c = BASE[base];
            c.k_dim = widths[i][0], c.v_dim = widths[i][1];
            c.packed = (int32_t)i % 2;
            c.keep = 1;
            c.samples = 200;
            CU_ASSERT_EQUAL(wrong_rows(&c), 0);
        }
    }
}

/* Tiles of rows and keys that are full, one short, one over; a long one whose keys are split. */
static void any_length(void) {
    static const int64_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 385, 1025, 2600};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            varlen_case c = BASE[base];
            c.rows = c.keys = lengths[i];
            c.causal = (int32_t)i % 2;
            c.samples = 60;
            CU_ASSERT_EQUAL(wrong_rows(&c), 0);
        }
    }
}

/* ---- what goes beyond one call ---- */

/* Keys in two tensors, one after the other, are as all keys in one. */
static void resumed_over_more_keys(void) {
    for (int base = 0; base < BASES; base++) {
        const varlen_case *c = &BASE[base];
        site s;
        tensors t = {0};
        result r;
        open_site(&s, 2);
        make_tensors(c, &t);
        CU_ASSERT_EQUAL(attend(&s, c, &t, &r), CPA_OK);
        int64_t first_end[MOST_SEGMENTS + 1] = {0};
        const on_device d = upload(&s, c, &t);
        const int64_t heads = t.q_rows * c->q_heads, unit = (int64_t)sizeof(float);
        cpa_varlen_attend_args args = args_of(c, &t, d);
        memset(r.out, 0xff, (size_t)out_bytes(c, &t));
        args.out = cpa_test_upload(s.stream, r.out, out_bytes(c, &t));
        args.state.lse = cpa_test_upload(s.stream, r.lse, heads * unit);
        args.state.o = cpa_test_upload(s.stream, r.o, heads * c->v_dim * unit);
        /* A segment at a time, as the keys of each are cut: the first third, then the rest. */
        for (int64_t i = 0; i < c->n_segments; i++) {
            const int64_t begin = t.k_starts[i], cut = begin + c->keys / 3;
            const int64_t parts[] = {begin, cut, t.k_starts[i + 1]};
            for (int part = 0; part < 2; part++) {
                first_end[0] = parts[part], first_end[1] = parts[part + 1];
                args.resume = part;
                CU_ASSERT_EQUAL(set_plan(&s, c, &t.q_starts[i], first_end, 1), CPA_OK);
                CU_ASSERT_EQUAL(cpa_varlen_attend(s.plan, &args, s.stream), CPA_OK);
                CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
            }
        }
        cpa_test_download(s.stream, r.out, args.out, out_bytes(c, &t));
        cpa_test_download(s.stream, r.lse, args.state.lse, heads * unit);
        CU_ASSERT_EQUAL(count_wrong(c, &t, &r), 0);
        cpa_test_free(s.stream, args.state.o);
        cpa_test_free(s.stream, args.state.lse);
        cpa_test_free(s.stream, args.out);
        release(&s, d);
        free_result(&r);
        free_tensors(c, &t);
        close_site(&s);
    }
}

/* The host's bits of a segment are those that it has alone; a device's repeat. */
static void bits_of_a_segment(void) {
    for (int base = 0; base < BASES; base++) {
        varlen_case c = BASE[base];
        site s;
        tensors t = {0};
        result all, again;
        c.n_segments = 9;
        c.ragged = 1;
        open_site(&s, 3);
        make_tensors(&c, &t);
        CU_ASSERT_EQUAL(attend(&s, &c, &t, &all), CPA_OK);
        CU_ASSERT_EQUAL(attend(&s, &c, &t, &again), CPA_OK);
        CU_ASSERT_EQUAL(memcmp(all.out, again.out, (size_t)out_bytes(&c, &t)), 0);
        free_result(&again);
        const int64_t row = c.q_heads * c.v_dim * cpa_dtype_bytes(c.dtype);
        for (int64_t i = 0; i < c.n_segments && cpa_test_promises_bits(); i++) {
            tensors one = t;
            varlen_case alone = c;
            memcpy(one.q_starts, &t.q_starts[i], 2 * sizeof t.q_starts[0]);
            memcpy(one.k_starts, &t.k_starts[i], 2 * sizeof t.k_starts[0]);
            alone.n_segments = 1;
            CU_ASSERT_EQUAL(attend(&s, &alone, &one, &again), CPA_OK);
            const int64_t begin = t.q_starts[i] * row, end = t.q_starts[i + 1] * row;
            CU_ASSERT_EQUAL(memcmp(all.out + begin, again.out + begin, (size_t)(end - begin)), 0);
            free_result(&again);
        }
        free_result(&all);
        free_tensors(&c, &t);
        close_site(&s);
    }
}

static const cpa_test tests[] = {{"ragged segments", ragged_segments},
                                 {"empty segments", empty_segments},
                                 {"lengths that differ", lengths_that_differ},
                                 {"windows to both sides", windows_to_both_sides},
                                 {"capped scores", capped_scores},
                                 {"any width", any_width},
                                 {"any length", any_length},
                                 {"resumed over more keys", resumed_over_more_keys},
                                 {"bits of a segment", bits_of_a_segment},
                                 {"grid of encoders", grid_of_encoders}};

/* test_varlen whole, or short: the whole grid of devices on the host too, or on devices what the host has of it. */
int main(int argc, char **argv) {
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    whole_grid = argc > 1 ? strcmp(argv[1], "whole") == 0 : !cpa_test_promises_bits();
    return cpa_test_main("varlen", tests, (int)(sizeof tests / sizeof tests[0]));
}
