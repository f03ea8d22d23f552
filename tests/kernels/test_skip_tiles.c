/* attend that leaves out tiles of keys which cannot matter (skip_tiles), over inputs of which more than half can be:
 * results beside float64 within the bound of what may be missing, which without it they are not; how many tiles are
 * counted; and what is asked for without any left out. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/device.h"
#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

/* Heads that devices leave tiles out for, in both dtypes of 16 bits; and others. */
enum { SHAPES = 5 };
static cpa_attend_case shape_of(int i) {
    static const int bases[SHAPES] = {1, 1, 0, 2, 3};
    cpa_attend_case c = CPA_ATTEND_BASE[bases[i]];
    if (i == 0) c.q_dtype = c.kv_dtype = CPA_F16, c.block_size = 64;
    c.length = 3000;
    c.mask = (cpa_mask){.causal = 1};
    c.light = 0.75f;
    c.scale = 0.2f;
    c.skip_tiles = 5;
    return c;
}
/* Whether the device at hand leaves tiles out for these rows: the host always does. */
static int leaves_out(const cpa_attend_case *c) {
    const int decode = c->length - c->start == 1;
    return cpa_test_promises_bits() ||
           (c->k_dim > (decode ? 64 : 96) && c->q_dtype != CPA_F32 && c->kv_dtype == c->q_dtype);
}

/* The rows that are wrong beside float64, every 20th or so; the share of tiles left out; *kept, unless it is NULL: the
 * results, to be destroyed. `allowed`: the distance that what may be missing is allowed for. */
static int64_t wrong_rows(const cpa_attend_case *shape, float allowed, double *share, cpa_attend_result *kept) {
    cpa_attend_fixture f;
    cpa_attend_result result;
    cpa_attend_fixture_init(&f, shape, 2);
    cpa_attend_result_init(&result, &f);
    int64_t wrong = 0;
    *share = 0;
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        f.shape.skip_tiles = shape->skip_tiles;
        wrong += cpa_attend_fixture_run_slot(&f, slot, &result) != CPA_OK;
        f.shape.skip_tiles = allowed;
        wrong += cpa_attend_fixture_check(&f, slot, f.rows / 20 + 1, &result, NULL);
        CU_ASSERT(f.tile_counts[1] <= f.tile_counts[0]);
        if (f.tile_counts[0] > 0)
            *share += (double)f.tile_counts[1] / (double)f.tile_counts[0] / (double)shape->cp_size;
    }
    if (kept) {
        *kept = result;
    } else {
        cpa_attend_result_destroy(&result);
    }
    cpa_attend_fixture_destroy(&f);
    return wrong;
}

static void most_tiles_are_left_out(void) {
    enum { KINDS = 6 };
    for (int i = 0; i < SHAPES * KINDS; i++) {
        cpa_attend_case c = shape_of(i % SHAPES);
        const int kind = i / SHAPES;
        /* Devices cut the keys of few rows into pieces, of which some have light keys alone. */
        const double in_pieces[KINDS] = {0.3, 0.1, 0.1, 0, 0.01, 0.05}, whole[KINDS] = {0.5, 0.5, 0.5, 0.45, 0.3, 0.1};
        const double least = cpa_test_promises_bits() ? whole[kind] : in_pieces[kind];
        const int large = !cpa_test_promises_bits(); /* pieces of some length on devices */
        double share;
        if (kind <= 2 && large) c.q_heads = 32, c.kv_heads = 8;
        if (kind == 1 && large) c.length = 16000;
        c.start = c.length - (large ? 1600 : 200);
        if (kind == 1) c.start = c.length - 1;                                     /* decode */
        if (kind == 2) c.start = (c.length = large ? 15873 : 3073) - 1;            /* a last tile that is not full */
        if (kind == 3) c.start = c.length - 77;                                    /* and rows */
        if (kind == 4) c.cp_size = 2, c.interleave = 64, c.start = c.length - 200; /* keys and queries of two ranks */
        if (kind == 5) c.start = 0, c.length = 1100;                               /* rows of which some see little */
        CU_ASSERT_EQUAL(wrong_rows(&c, c.skip_tiles, &share, NULL), 0);
        const int as_expected = leaves_out(&c) ? share >= least && share < 0.95 : share == 0;
        if (!as_expected) printf("  kind %d of shape %d: %.3f of its tiles\n", kind, i % SHAPES, share);
        CU_ASSERT(as_expected);
    }
}

/* Prefill of devices leaves tiles out only where some of those before could have been. */
static void light_keys_begin_and_end_within_a_piece(void) {
    enum { LENGTH = 12000, PLACES = 3 };
    static const struct {
        int64_t first, end;
        double least;
    } places[PLACES] = {{LENGTH / 2, 0, 0.25}, {0, LENGTH / 2, 0.1}, {LENGTH / 4, LENGTH / 2, 0.05}};
    for (int i = 0; i < 2 * PLACES; i++) {
        cpa_attend_case c = shape_of(i / PLACES);
        const int place = i % PLACES;
        double share;
        c.length = LENGTH;
        c.start = c.length - (cpa_test_promises_bits() ? 20 : 1600);
        if (!cpa_test_promises_bits()) c.q_heads = 32, c.kv_heads = 8;
        c.light_first = places[place].first, c.light_end = places[place].end;
        CU_ASSERT_EQUAL(wrong_rows(&c, c.skip_tiles, &share, NULL), 0);
        const int as_expected = share >= places[place].least && share < 0.8;
        if (!as_expected) printf("  light from %lld on: %.3f of the tiles\n", (long long)c.light_first, share);
        CU_ASSERT(as_expected);
    }
}

/* With a distance that is too short rows lack what counts, which only the allowance for it lets pass. */
static void what_is_missing_is_within_its_bound(void) {
    for (int i = 0; i < SHAPES; i++) {
        cpa_attend_case c = shape_of(i);
        double share;
        int64_t caught = 0;
        c.light = 0;
        c.skip_tiles = 0.02f;
        for (int decode = 0; decode < 2; decode++) {
            if (decode && !cpa_test_promises_bits()) c.q_heads = 32, c.kv_heads = 8, c.length = 16000; /* as above */
            c.start = c.length - (decode ? 1 : 64);
            if (!leaves_out(&c)) continue;
            CU_ASSERT_EQUAL(wrong_rows(&c, c.skip_tiles, &share, NULL), 0);
            CU_ASSERT(share > 0);
            caught += wrong_rows(&c, 0, &share, NULL);
        }
        CU_ASSERT(caught > 0 || !leaves_out(&c));
    }
}

/* Without a distance nothing is counted; with one below which no score lies nothing is left out, and where bits are
 * promised they are the same. */
static void what_is_not_left_out_is_as_without(void) {
    for (int i = 0; i < SHAPES; i++) {
        cpa_attend_case c = shape_of(i);
        cpa_attend_result without, with;
        double share;
        c.start = c.length - 70;
        c.skip_tiles = 0;
        CU_ASSERT_EQUAL(wrong_rows(&c, 0, &share, &without), 0);
        CU_ASSERT(share == 0);
        c.skip_tiles = 1e6f;
        CU_ASSERT_EQUAL(wrong_rows(&c, 0, &share, &with), 0);
        CU_ASSERT(share == 0);
        if (cpa_test_promises_bits()) CU_ASSERT(cpa_attend_result_same(&without, &with));
        cpa_attend_result_destroy(&with);
        cpa_attend_result_destroy(&without);
    }
}

/* Tiles of 256 keys, a group of rows each: of the host, where rows of all KV heads fit into one. */
static void every_tile_is_counted_once(void) {
    cpa_attend_case c = shape_of(1);
    cpa_attend_fixture f;
    cpa_attend_result result;
    if (!cpa_test_promises_bits()) return;
    c.start = c.length - 1;
    cpa_attend_fixture_init(&f, &c, 2);
    cpa_attend_result_init(&result, &f);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
    CU_ASSERT_EQUAL(f.tile_counts[0] % ((c.length + 255) / 256), 0);
    CU_ASSERT(f.tile_counts[0] > 0);
    CU_ASSERT_EQUAL(4 * f.tile_counts[1], 3 * f.tile_counts[0]); /* three runs in four are light */
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&f);
}

static void a_distance_that_is_none_is_refused(void) {
    static const float bad[] = {-1, NAN, INFINITY};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_attend_case c = shape_of(1);
        cpa_attend_fixture f;
        cpa_attend_result result;
        c.start = c.length - 1;
        c.skip_tiles = bad[i];
        cpa_attend_fixture_init(&f, &c, 1);
        cpa_attend_result_init(&result, &f);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_INVALID);
        CU_ASSERT(strstr(cpa_stream_error(f.stream), "attend: skip_tiles is") != NULL);
        cpa_attend_result_destroy(&result);
        cpa_attend_fixture_destroy(&f);
    }
}

static const cpa_test TESTS[] = {
    {"most tiles are left out", most_tiles_are_left_out},
    {"light keys begin and end within a piece", light_keys_begin_and_end_within_a_piece},
    {"what is missing is within its bound", what_is_missing_is_within_its_bound},
    {"what is not left out is as without", what_is_not_left_out_is_as_without},
    {"every tile is counted once", every_tile_is_counted_once},
    {"a distance that is none is refused", a_distance_that_is_none_is_refused},
};

CPA_DEVICE_TEST_MAIN("attend that leaves out tiles", TESTS)
