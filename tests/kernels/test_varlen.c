/* Attention without a cache against the float64 reference: the shapes of encoders of images and sound, ragged segments,
 * lengths that differ, windows to both sides, packed tensors, resumed calls. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/convert.h"
#include "base/threads.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"
#include "tests/fixtures/varlen_fixture.h"

/* ---- the grid ---- */

/* The shapes of encoders: of the whole grid the host takes, in short, a part with few products. */
enum { HOST_APART = 11, SAMPLES = 6, MOST_AT_ONCE = 8 };
static const double HOST_PRODUCTS = 1.5e8, MOST_PRODUCTS = 7e10;
static const int64_t HOST_ELEMENTS = 4 << 20, MOST_ELEMENTS = 12 << 20; /* of the queries */
static int whole_grid;

enum { DIMS = 6, HEADS = 3, BATCHES = 2, LENGTHS = 8, MASKS = 3 };
#define GRID_CASES ((int64_t)DIMS * HEADS * BATCHES * LENGTHS * MASKS * CPA_DTYPE_COUNT)

/* The i-th case of the whole grid; 0: it is left out. */
static int case_of_grid(int64_t i, cpa_test_varlen_case *c) {
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
    *c = (cpa_test_varlen_case){.dtype = dtype,
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
    cpa_test_varlen_site sites[MOST_AT_ONCE]; /* of each thread */
    atomic_llong cases, wrong;
} grid_run;

static void check_case(void *ctx, int64_t i, int32_t thread) {
    grid_run *run = ctx;
    cpa_test_varlen_case c;
    if (!case_of_grid(i, &c)) return;
    atomic_fetch_add(&run->cases, 1);
    atomic_fetch_add(&run->wrong, cpa_test_varlen_wrong_rows_at(&run->sites[thread], &c));
}

/* Most of a case of the whole grid is making and checking its tensors here: several are under way at once. */
static void grid_of_encoders(void) {
    const long cpus = whole_grid ? sysconf(_SC_NPROCESSORS_ONLN) : 1;
    const int32_t n = cpus < MOST_AT_ONCE ? (int32_t)cpus : MOST_AT_ONCE;
    cpa_threads *threads;
    grid_run run = {0};
    CU_ASSERT_EQUAL_FATAL(cpa_threads_create(n, NULL, 0, &threads, NULL), CPA_OK);
    for (int32_t i = 0; i < n; i++) cpa_test_varlen_open(&run.sites[i], 1);
    cpa_threads_run(threads, GRID_CASES, check_case, &run, NULL);
    for (int32_t i = 0; i < n; i++) cpa_test_varlen_close(&run.sites[i]);
    cpa_threads_destroy(threads);
    printf("%lld cases ", (long long)run.cases);
    CPA_ASSERT_ORDER(run.cases, >, 0);
    CU_ASSERT_EQUAL(run.wrong, 0);
}

/* ---- what the grid leaves out ---- */

static const cpa_test_varlen_case BASE[] = {
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
    {.dtype = CPA_BF16,
     .q_heads = 8,
     .kv_heads = 4,
     .k_dim = 64,
     .v_dim = 64,
     .n_segments = 3,
     .rows = 130,
     .keys = 130},
};
enum { BASES = sizeof BASE / sizeof BASE[0] };

static void ragged_segments(void) {
    for (int base = 0; base < BASES; base++) {
        for (int causal = 0; causal < 2; causal++) {
            cpa_test_varlen_case c = BASE[base];
            c.n_segments = CPA_TEST_MOST_SEGMENTS;
            c.rows = c.keys = whole_grid ? 4096 : 120;
            c.ragged = 1;
            c.causal = causal;
            c.samples = 300;
            CU_ASSERT_EQUAL(cpa_test_varlen_wrong_rows(&c), 0);
        }
    }
}

static void empty_segments(void) {
    for (int base = 0; base < BASES; base++) {
        for (int causal = 0; causal < 2; causal++) {
            cpa_test_varlen_case c = BASE[base];
            c.n_segments = 21;
            c.rows = 40, c.keys = 70;
            c.ragged = 2;
            c.causal = causal;
            for (c.keep = 0; c.keep < 2; c.keep++) CU_ASSERT_EQUAL(cpa_test_varlen_wrong_rows(&c), 0);
        }
    }
}

/* Queries of one thing and keys of another: fewer of either; a causal row may then see nothing. */
static void lengths_that_differ(void) {
    static const int64_t lengths[][2] = {{1, 1500}, {5, 300}, {17, 260}, {300, 5}, {200, 129}, {64, 700}};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            for (int causal = 0; causal < 2; causal++) {
                cpa_test_varlen_case c = BASE[base];
                c.rows = lengths[i][0], c.keys = lengths[i][1];
                c.causal = causal;
                c.keep = base == 0;
                c.samples = 200;
                CU_ASSERT_EQUAL(cpa_test_varlen_wrong_rows(&c), 0);
            }
        }
    }
}

static void windows_to_both_sides(void) {
    static const int64_t windows[][2] = {{1, 0}, {0, 1}, {1, 1}, {5, 3}, {64, 0}, {0, 64}, {100, 130}, {1000, 1000}};
    for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            for (int causal = 0; causal < 2; causal++) {
                cpa_test_varlen_case c = BASE[base];
                c.left = windows[i][0], c.right = windows[i][1];
                c.causal = causal;
                c.rows = c.keys = 300;
                if (i % 2) c.rows = 80;
                c.samples = 200;
                CU_ASSERT_EQUAL(cpa_test_varlen_wrong_rows(&c), 0);
            }
        }
    }
}

/* As some sound encoders have it; a device may have no kernel for it. */
static void capped_scores(void) {
    for (int base = 0; base <= BASES; base++) {
        cpa_test_varlen_case c = BASE[base < BASES ? base : 1];
        cpa_test_varlen_site s;
        cpa_test_varlen_tensors t = {0};
        cpa_test_varlen_result r;
        c.softcap = 1.5f;
        if (base == BASES) c.k_dim = c.v_dim = 72; /* a plan may have other tiles for such heads without rules */
        c.right = base == 1 ? 30 : 0;
        cpa_test_varlen_open(&s, 1);
        cpa_test_varlen_make(&c, &t);
        const cpa_status status = cpa_test_varlen_attend(&s, &c, &t, &r);
        CU_ASSERT_TRUE(status == CPA_OK || (status == CPA_UNSUPPORTED && !cpa_test_promises_bits()));
        if (status == CPA_OK) CU_ASSERT_EQUAL(cpa_test_varlen_count_wrong(&c, &t, &r), 0);
        cpa_test_varlen_free_result(&r);
        cpa_test_varlen_free(&c, &t);
        cpa_test_varlen_close(&s);
    }
}

static void any_width(void) {
    static const int32_t widths[][2] = {{72, 72}, {88, 88},   {96, 64},   {64, 96}, {72, 128}, {80, 16},
                                        {24, 80}, {192, 128}, {256, 256}, {13, 13}, {1, 1},    {65, 33}};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            cpa_test_varlen_case c = BASE[base];
            c.k_dim = widths[i][0], c.v_dim = widths[i][1];
            c.packed = (int32_t)i % 2;
            c.samples = 200;
            for (c.keep = 0; c.keep < 2; c.keep++) CU_ASSERT_EQUAL(cpa_test_varlen_wrong_rows(&c), 0);
        }
    }
}

/* Some groups of heads fill tiles of 64 rows, some do not. */
static void any_group(void) {
    static const int32_t groups[] = {1, 2, 3, 4, 5, 8, 12, 16, 64};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        cpa_test_varlen_case c = BASE[1 + i % (BASES - 1)];
        c.kv_heads = 2;
        c.q_heads = 2 * groups[i];
        c.rows = 30;
        c.samples = 200;
        CU_ASSERT_EQUAL(cpa_test_varlen_wrong_rows(&c), 0);
    }
}

/* Tiles of rows and keys that are full, one short, one over; a long one whose keys are split. */
static void any_length(void) {
    static const int64_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 385, 1025, 2600};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            cpa_test_varlen_case c = BASE[base];
            c.rows = c.keys = lengths[i];
            if (!whole_grid && c.rows > 1000) c.rows = 200;
            c.causal = (int32_t)i % 2;
            c.samples = 60;
            CU_ASSERT_EQUAL(cpa_test_varlen_wrong_rows(&c), 0);
        }
    }
}

/* ---- what goes beyond one call ---- */

/* Keys in two tensors, one after the other, are as all keys in one. */
static void resumed_over_more_keys(void) {
    for (int base = 0; base < BASES; base++) {
        const cpa_test_varlen_case *c = &BASE[base];
        cpa_test_varlen_site s;
        cpa_test_varlen_tensors t = {0};
        cpa_test_varlen_result r;
        cpa_test_varlen_open(&s, 2);
        cpa_test_varlen_make(c, &t);
        CU_ASSERT_EQUAL(cpa_test_varlen_attend(&s, c, &t, &r), CPA_OK);
        int64_t first_end[CPA_TEST_MOST_SEGMENTS + 1] = {0};
        const cpa_test_varlen_on_device d = cpa_test_varlen_upload(&s, c, &t);
        const int64_t heads = t.q_rows * c->q_heads, unit = (int64_t)sizeof(float);
        cpa_varlen_attend_args args = cpa_test_varlen_args(c, &t, d);
        memset(r.out, 0xff, (size_t)cpa_test_varlen_out_bytes(c, &t));
        args.out = cpa_test_upload(s.stream, r.out, cpa_test_varlen_out_bytes(c, &t));
        args.state.lse = cpa_test_upload(s.stream, r.lse, heads * unit);
        args.state.o = cpa_test_upload(s.stream, r.o, heads * c->v_dim * unit);
        /* A segment at a time, as the keys of each are cut: the first third, then the rest. */
        for (int64_t i = 0; i < c->n_segments; i++) {
            const int64_t begin = t.k_starts[i], cut = begin + c->keys / 3;
            const int64_t parts[] = {begin, cut, t.k_starts[i + 1]};
            for (int part = 0; part < 2; part++) {
                first_end[0] = parts[part], first_end[1] = parts[part + 1];
                args.resume = part;
                CU_ASSERT_EQUAL(cpa_test_varlen_plan(&s, c, &t.q_starts[i], first_end, 1), CPA_OK);
                CU_ASSERT_EQUAL(cpa_varlen_attend(s.plan, &args, s.stream), CPA_OK);
                CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
            }
        }
        cpa_test_download(s.stream, r.out, args.out, cpa_test_varlen_out_bytes(c, &t));
        cpa_test_download(s.stream, r.lse, args.state.lse, heads * unit);
        CU_ASSERT_EQUAL(cpa_test_varlen_count_wrong(c, &t, &r), 0);
        cpa_test_free(s.stream, args.state.o);
        cpa_test_free(s.stream, args.state.lse);
        cpa_test_free(s.stream, args.out);
        cpa_test_varlen_release(&s, d);
        cpa_test_varlen_free_result(&r);
        cpa_test_varlen_free(c, &t);
        cpa_test_varlen_close(&s);
    }
}

/* A plan serves any number of calls. */
static void used_again(void) {
    for (int base = 0; base < BASES; base++) {
        cpa_test_varlen_case c = BASE[base];
        cpa_test_varlen_site s;
        cpa_test_varlen_tensors t = {0};
        cpa_test_varlen_result r;
        c.n_segments = 50; /* more than a device takes at once */
        c.rows = c.keys = 100;
        c.samples = 200;
        cpa_test_varlen_open(&s, 2);
        cpa_test_varlen_make(&c, &t);
        CU_ASSERT_EQUAL(cpa_test_varlen_attend(&s, &c, &t, &r), CPA_OK);
        const cpa_test_varlen_on_device d = cpa_test_varlen_upload(&s, &c, &t);
        for (int call = 0; call < 3; call++) {
            CU_ASSERT_EQUAL(cpa_test_varlen_call(&s, &c, &t, d, &r), CPA_OK);
            CU_ASSERT_EQUAL(cpa_test_varlen_count_wrong(&c, &t, &r), 0);
        }
        cpa_test_varlen_release(&s, d);
        cpa_test_varlen_free_result(&r);
        cpa_test_varlen_free(&c, &t);
        cpa_test_varlen_close(&s);
    }
}

static void fill_head(char *rows, int64_t row, int64_t stride, int32_t dim, float first, cpa_dtype dtype) {
    float head[CPA_MAX_HEAD_DIM] = {first};
    cpa_narrow(rows + row * stride * cpa_dtype_bytes(dtype), head, dtype, dim);
}

/* A score may be finite and overflow through the scale: the row is NaN. Before that it may be too large for tensor
 * cores: the row is NaN or what it should be, never 0. A row of other scores is a number. */
static void overflow_through_the_scale(void) {
    for (int base = 1; base < BASES; base++) {
        cpa_test_varlen_case c = BASE[base];
        if (c.dtype != CPA_BF16) continue;
        cpa_test_varlen_site s;
        cpa_test_varlen_tensors t = {0};
        cpa_test_varlen_open(&s, 2);
        cpa_test_varlen_make(&c, &t);
        fill_head(t.q, t.q_starts[0], t.q_stride, c.k_dim, 1.5e19f, c.dtype);
        fill_head(t.q, t.q_starts[1] - 1, t.q_stride, c.k_dim, 0, c.dtype);
        fill_head(t.k, t.k_starts[0], t.k_stride, c.k_dim, 1.5e19f, c.dtype);
        for (int times = 0; times < 2; times++) {
            cpa_test_varlen_result r;
            c.scale = times ? 2 : 0;
            CU_ASSERT_EQUAL(cpa_test_varlen_attend(&s, &c, &t, &r), CPA_OK);
            const int64_t row = c.q_heads * c.v_dim * cpa_dtype_bytes(c.dtype);
            float first, last;
            cpa_widen(&first, r.out + t.q_starts[0] * row, c.dtype, 1);
            cpa_widen(&last, r.out + (t.q_starts[1] - 1) * row, c.dtype, 1);
            if (times || cpa_test_promises_bits()) CU_ASSERT_EQUAL(isnan(first) != 0, times);
            CU_ASSERT_EQUAL(isnan(first) != 0, isnan(r.lse[t.q_starts[0] * c.q_heads]) != 0);
            CU_ASSERT_NOT_EQUAL(first, 0);
            CU_ASSERT_FALSE(isnan(last));
            cpa_test_varlen_free_result(&r);
        }
        cpa_test_varlen_free(&c, &t);
        cpa_test_varlen_close(&s);
    }
}

/* The host's bits of a segment are those that it has alone; a device's repeat. */
static void bits_of_a_segment(void) {
    for (int base = 0; base < BASES; base++) {
        cpa_test_varlen_case c = BASE[base];
        cpa_test_varlen_site s;
        cpa_test_varlen_tensors t = {0};
        cpa_test_varlen_result all, again;
        c.n_segments = 9;
        c.ragged = 1;
        cpa_test_varlen_open(&s, 3);
        cpa_test_varlen_make(&c, &t);
        CU_ASSERT_EQUAL(cpa_test_varlen_attend(&s, &c, &t, &all), CPA_OK);
        CU_ASSERT_EQUAL(cpa_test_varlen_attend(&s, &c, &t, &again), CPA_OK);
        CU_ASSERT_EQUAL(memcmp(all.out, again.out, (size_t)cpa_test_varlen_out_bytes(&c, &t)), 0);
        cpa_test_varlen_free_result(&again);
        const int64_t row = c.q_heads * c.v_dim * cpa_dtype_bytes(c.dtype);
        for (int64_t i = 0; i < c.n_segments && cpa_test_promises_bits(); i++) {
            cpa_test_varlen_tensors one = t;
            cpa_test_varlen_case alone = c;
            memcpy(one.q_starts, &t.q_starts[i], 2 * sizeof t.q_starts[0]);
            memcpy(one.k_starts, &t.k_starts[i], 2 * sizeof t.k_starts[0]);
            alone.n_segments = 1;
            CU_ASSERT_EQUAL(cpa_test_varlen_attend(&s, &alone, &one, &again), CPA_OK);
            const int64_t begin = t.q_starts[i] * row, end = t.q_starts[i + 1] * row;
            CU_ASSERT_EQUAL(memcmp(all.out + begin, again.out + begin, (size_t)(end - begin)), 0);
            cpa_test_varlen_free_result(&again);
        }
        cpa_test_varlen_free_result(&all);
        cpa_test_varlen_free(&c, &t);
        cpa_test_varlen_close(&s);
    }
}

/* Tensors end with the last row that a segment has, wherever the next would start. */
static void starts_past_the_tensors(void) {
    enum { DIM = 8 };
    const int64_t q_starts[] = {0, (int64_t)1 << 44}, k_starts[] = {0, 1 << 30}, one[] = {1};
    const cpa_varlen_batch batch = {.size = sizeof batch,
                                    .q_heads = 1,
                                    .kv_heads = 1,
                                    .k_dim = DIM,
                                    .v_dim = DIM,
                                    .n_segments = 1,
                                    .q_starts = q_starts,
                                    .k_starts = k_starts,
                                    .q_counts = one,
                                    .k_counts = one};
    const float q[DIM] = {1}, k[DIM] = {2}, v[DIM] = {3, 5, 7};
    float out[DIM] = {0};
    cpa_test_varlen_site s;
    cpa_test_varlen_open(&s, 1);
    CU_ASSERT_EQUAL(cpa_varlen_plan_set(s.plan, &batch, NULL), CPA_OK);
    /* Strides at which rows up to the next start would be more than any memory has. */
    const cpa_varlen_attend_args args = {.size = sizeof args,
                                         .q = cpa_test_upload(s.stream, q, sizeof q),
                                         .k = cpa_test_upload(s.stream, k, sizeof k),
                                         .v = cpa_test_upload(s.stream, v, sizeof v),
                                         .q_row_stride = 1 << 20,
                                         .k_row_stride = 1 << 29,
                                         .v_row_stride = 1 << 29,
                                         .out = cpa_test_upload(s.stream, out, sizeof out)};
    CU_ASSERT_EQUAL(cpa_varlen_attend(s.plan, &args, s.stream), CPA_OK);
    cpa_test_download(s.stream, out, args.out, sizeof out);
    CU_ASSERT_EQUAL(memcmp(out, v, sizeof v), 0);
    const void *uploaded[] = {args.q, args.k, args.v, args.out};
    for (size_t i = 0; i < sizeof uploaded / sizeof *uploaded; i++)
        cpa_test_free(s.stream, (void *)(uintptr_t)uploaded[i]);
    cpa_test_varlen_close(&s);
}

static const cpa_test tests[] = {{"ragged segments", ragged_segments},
                                 {"empty segments", empty_segments},
                                 {"lengths that differ", lengths_that_differ},
                                 {"windows to both sides", windows_to_both_sides},
                                 {"capped scores", capped_scores},
                                 {"any width", any_width},
                                 {"any group of heads", any_group},
                                 {"any length", any_length},
                                 {"resumed over more keys", resumed_over_more_keys},
                                 {"used again", used_again},
                                 {"overflow through the scale", overflow_through_the_scale},
                                 {"bits of a segment", bits_of_a_segment},
                                 {"starts past the tensors", starts_past_the_tensors},
                                 {"grid of encoders", grid_of_encoders}};

/* --whole, or --short: the whole grid of devices on the host too, or on devices what the host has of it. */
int main(int argc, char **argv) {
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    if (argc == 3 && strcmp(argv[1], "--case") == 0) return cpa_test_varlen_case_main(argv[2]);
    const int shorter = cpa_test_take_option(&argc, argv, "--short");
    whole_grid = cpa_test_take_option(&argc, argv, "--whole") || (!shorter && !cpa_test_promises_bits());
    return cpa_test_main(argc, argv, "varlen", tests, (int)(sizeof tests / sizeof tests[0]));
}
