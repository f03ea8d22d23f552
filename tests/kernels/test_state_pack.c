/* state_pack and state_merge_packed: the layout of slices bit for bit, and the merge of slices against cpa_merge of
 * what they were cut from, with heads that the ranks divide and heads that they do not. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/convert.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

enum { MOST_RANKS = 8 };

/* `ranks` ranks with states of the same rows; the last `padding` rows belong to nobody. */
typedef struct pack_case {
    int32_t ranks, heads, v_dim;
    int64_t rows, padding;
    cpa_dtype o_dtype, dtype;
} pack_case;

/* What each rank has: O as its kernel left it, as it is packed in floats, LSE, and where the rows are. */
typedef struct rank_states {
    void *o;
    float *packed_o, *lse;
    int32_t *map;
    void *device_o, *device_packed_o, *device_lse, *device_map;
    void *slices[MOST_RANKS];
} rank_states;

typedef struct fixture {
    pack_case shape;
    cpa_device *device;
    cpa_stream *stream;
    rank_states ranks[MOST_RANKS];
} fixture;

static uint64_t random_state;

static float uniform(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(random_state >> 33) / 0x1p30 - 1);
}

static int64_t first_head(const pack_case *c, int32_t slice) {
    return (int64_t)c->heads * slice / c->ranks;
}

static int64_t slice_heads(const pack_case *c, int32_t slice) {
    return first_head(c, slice + 1) - first_head(c, slice);
}

static int64_t head_bytes(const pack_case *c) {
    return c->v_dim * cpa_dtype_bytes(c->dtype) + 4;
}

static int64_t slice_bytes(const pack_case *c, int32_t slice) {
    return c->rows * slice_heads(c, slice) * head_bytes(c);
}

/* A rank has keys of three rows in four, and of some heads of those nothing that can be seen, whose O is NaN. */
static void init_rank(fixture *f, int32_t rank) {
    const pack_case *c = &f->shape;
    rank_states *s = &f->ranks[rank];
    const int64_t heads = c->rows * c->heads, n = heads * c->v_dim;
    float *wide = cpa_test_poisoned(n, sizeof *wide);
    s->o = cpa_test_poisoned(n, cpa_dtype_bytes(c->o_dtype));
    s->packed_o = cpa_test_poisoned(n, sizeof *s->packed_o);
    s->lse = cpa_test_poisoned(heads, sizeof *s->lse);
    s->map = malloc((size_t)c->rows * sizeof *s->map);
    for (int64_t i = 0; i < heads; i++) {
        s->lse[i] = (i + rank) % 7 == 0 ? -INFINITY : (i + rank) % 31 == 0 ? INFINITY : 20 * uniform();
        for (int32_t d = 0; d < c->v_dim && isfinite(s->lse[i]); d++) wide[i * c->v_dim + d] = uniform();
    }
    for (int64_t row = 0; row < c->rows; row++) /* read from behind */
        s->map[row] = row >= c->rows - c->padding || (row + rank) % 4 == 0 ? -1 : (int32_t)(c->rows - 1 - row);
    cpa_narrow(s->o, wide, c->o_dtype, n);
    for (int64_t i = 0; i < heads; i++) {
        char half[CPA_MAX_HEAD_DIM * 4];
        cpa_convert(half, c->dtype, (char *)s->o + i * c->v_dim * cpa_dtype_bytes(c->o_dtype), c->o_dtype, c->v_dim);
        cpa_widen(s->packed_o + i * c->v_dim, half, c->dtype, c->v_dim);
    }
    free(wide);
    s->device_o = cpa_test_upload(f->stream, s->o, n * cpa_dtype_bytes(c->o_dtype));
    s->device_packed_o = cpa_test_upload(f->stream, s->packed_o, n * (int64_t)sizeof(float));
    s->device_lse = cpa_test_upload(f->stream, s->lse, heads * (int64_t)sizeof(float));
    s->device_map = cpa_test_upload(f->stream, s->map, c->rows * (int64_t)sizeof *s->map);
    for (int32_t r = 0; r < c->ranks; r++) {
        void *poison = cpa_test_poisoned(slice_bytes(c, r) + 1, 1);
        s->slices[r] = cpa_test_upload(f->stream, poison, slice_bytes(c, r) + 1);
        free(poison);
    }
}

static cpa_state_pack_args pack_args(const fixture *f, int32_t rank) {
    const rank_states *s = &f->ranks[rank];
    return (cpa_state_pack_args){
        .size = sizeof(cpa_state_pack_args),
        .rows = f->shape.rows,
        .heads = f->shape.heads,
        .v_dim = f->shape.v_dim,
        .o = s->device_o,
        .o_dtype = f->shape.o_dtype,
        .lse = s->device_lse,
        .row_map = s->device_map,
        .n_slices = f->shape.ranks,
        .dtype = f->shape.dtype,
        .slices = s->slices,
    };
}

static void fixture_init(fixture *f, pack_case shape) {
    *f = (fixture){.shape = shape};
    random_state = 5;
    cpa_test_device_open(2, &f->device, &f->stream);
    for (int32_t rank = 0; rank < shape.ranks; rank++) {
        init_rank(f, rank);
        cpa_state_pack_args args = pack_args(f, rank);
        CU_ASSERT_EQUAL(cpa_state_pack(&args, f->stream), CPA_OK);
    }
}

static void fixture_destroy(fixture *f) {
    for (int32_t rank = 0; rank < f->shape.ranks; rank++) {
        rank_states *s = &f->ranks[rank];
        void *const on_device[] = {s->device_o, s->device_packed_o, s->device_lse, s->device_map};
        for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++) cpa_test_free(f->stream, on_device[i]);
        for (int32_t r = 0; r < f->shape.ranks; r++) cpa_test_free(f->stream, s->slices[r]);
        free(s->o);
        free(s->packed_o);
        free(s->lse);
        free(s->map);
    }
    cpa_test_device_close(f->device, f->stream);
}

/* Whether a rank's slice is [rows, heads, O then LSE] of its states, to the bit, and nothing behind it is touched. */
static int64_t wrong_heads(const fixture *f, int32_t rank, int32_t slice) {
    const pack_case *c = &f->shape;
    const rank_states *s = &f->ranks[rank];
    const int64_t bytes = slice_bytes(c, slice), o_bytes = c->v_dim * cpa_dtype_bytes(c->dtype);
    char *got = malloc((size_t)bytes + 1), *at = got;
    int64_t wrong = 0;
    cpa_test_download(f->stream, got, s->slices[slice], bytes + 1);
    for (int64_t row = 0; row < c->rows; row++) {
        for (int64_t h = first_head(c, slice); h < first_head(c, slice + 1); h++, at += head_bytes(c)) {
            char want[CPA_MAX_HEAD_DIM * 4 + 4] = {0};
            const int64_t from = s->map[row] * c->heads + h;
            float lse = -INFINITY;
            if (s->map[row] >= 0) {
                cpa_narrow(want, s->packed_o + from * c->v_dim, c->dtype, c->v_dim);
                lse = s->lse[from];
            }
            memcpy(want + o_bytes, &lse, sizeof lse);
            /* A NaN may have any bits, where it is no copy. */
            const int any = s->map[row] >= 0 && !isfinite(lse) && c->o_dtype != c->dtype;
            wrong += memcmp(at + o_bytes, want + o_bytes, 4) != 0 || (!any && memcmp(at, want, (size_t)o_bytes) != 0);
        }
    }
    wrong += (unsigned char)got[bytes] != 0xff;
    free(got);
    return wrong;
}

/* Merges the slices of a rank; out [rows, heads of the slice, v_dim] in fp32. */
static void merge_slice(const fixture *f, int32_t slice, const int32_t *order, float *out, float *lse) {
    const pack_case *c = &f->shape;
    const void *parts[MOST_RANKS];
    const int64_t lse_bytes = c->rows * slice_heads(c, slice) * (int64_t)sizeof(float), bytes = lse_bytes * c->v_dim;
    void *device_out = cpa_test_upload(f->stream, out, bytes), *device_lse = cpa_test_upload(f->stream, lse, lse_bytes);
    void *device_order = order ? cpa_test_upload(f->stream, order, c->rows * c->ranks * (int64_t)sizeof *order) : NULL;
    for (int32_t rank = 0; rank < c->ranks; rank++) parts[rank] = f->ranks[rank].slices[slice];
    cpa_state_merge_packed_args args = {
        .size = sizeof args,
        .rows = c->rows,
        .heads = (int32_t)slice_heads(c, slice),
        .v_dim = c->v_dim,
        .dtype = c->dtype,
        .n_parts = c->ranks,
        .parts = parts,
        .out = device_out,
        .out_lse = device_lse,
        .order = device_order,
    };
    CU_ASSERT_EQUAL(cpa_state_merge_packed(&args, f->stream), CPA_OK);
    cpa_test_download(f->stream, out, device_out, bytes);
    cpa_test_download(f->stream, lse, device_lse, lse_bytes);
    if (device_order) cpa_test_free(f->stream, device_order);
    cpa_test_free(f->stream, device_lse);
    cpa_test_free(f->stream, device_out);
}

/* The same of all heads by cpa_merge, from what was packed; the states in order, or in the reverse one. */
static void merge_whole(const fixture *f, int reversed, float *out, float *lse) {
    const pack_case *c = &f->shape;
    const int64_t lse_bytes = c->rows * c->heads * (int64_t)sizeof(float), bytes = lse_bytes * c->v_dim;
    cpa_partial states[MOST_RANKS];
    const int32_t *maps[MOST_RANKS];
    void *device_out = cpa_test_upload(f->stream, out, bytes), *device_lse = cpa_test_upload(f->stream, lse, lse_bytes);
    for (int32_t i = 0; i < c->ranks; i++) {
        const rank_states *s = &f->ranks[reversed ? c->ranks - 1 - i : i];
        states[i] = (cpa_partial){.o = s->device_packed_o, .lse = s->device_lse};
        maps[i] = s->device_map;
    }
    cpa_merge_args args = {
        .size = sizeof args,
        .rows = c->rows,
        .heads = c->heads,
        .v_dim = c->v_dim,
        .states = states,
        .row_maps = maps,
        .n_states = c->ranks,
        .out = device_out,
        .out_lse = device_lse,
    };
    CU_ASSERT_EQUAL(cpa_merge(&args, f->stream), CPA_OK);
    cpa_test_download(f->stream, out, device_out, bytes);
    cpa_test_download(f->stream, lse, device_lse, lse_bytes);
    cpa_test_free(f->stream, device_lse);
    cpa_test_free(f->stream, device_out);
}

/* Rows of a slice that differ from those of the merge of all heads; of every other row if `odd` >= 0. */
static int64_t rows_that_differ(const pack_case *c, int32_t slice, const float *out, const float *lse,
                                const float *whole, const float *whole_lse, int odd) {
    const int64_t heads = slice_heads(c, slice), width = heads * c->v_dim;
    int64_t differ = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        const int64_t at = row * c->heads + first_head(c, slice);
        if (odd >= 0 && row % 2 != odd) continue;
        differ += memcmp(out + row * width, whole + at * c->v_dim, (size_t)width * sizeof *out) != 0 ||
                  memcmp(lse + row * heads, whole_lse + at, (size_t)heads * sizeof *lse) != 0;
    }
    return differ;
}

static void check_case(pack_case c) {
    const int64_t heads = c.rows * c.heads;
    fixture f;
    fixture_init(&f, c);
    float *out = cpa_test_poisoned(heads * c.v_dim, 4), *lse = cpa_test_poisoned(heads, 4);
    float *whole[2], *whole_lse[2];
    int32_t *order = malloc((size_t)(c.rows * c.ranks) * sizeof *order);
    for (int reversed = 0; reversed < 2; reversed++) {
        whole[reversed] = cpa_test_poisoned(heads * c.v_dim, 4);
        whole_lse[reversed] = cpa_test_poisoned(heads, 4);
        merge_whole(&f, reversed, whole[reversed], whole_lse[reversed]);
    }
    /* Odd rows in the reverse order; what the map of a rank leaves out is left out here too. */
    for (int64_t row = 0; row < c.rows; row++) {
        for (int32_t i = 0; i < c.ranks; i++) {
            const int32_t part = row % 2 ? c.ranks - 1 - i : i;
            order[row * c.ranks + i] = f.ranks[part].map[row] >= 0 ? part : row % 2 ? -1 : c.ranks + (int32_t)row;
        }
    }
    for (int32_t slice = 0; slice < c.ranks; slice++) {
        for (int32_t rank = 0; rank < c.ranks; rank++) CU_ASSERT_EQUAL(wrong_heads(&f, rank, slice), 0);
        merge_slice(&f, slice, NULL, out, lse);
        CU_ASSERT_EQUAL(rows_that_differ(&c, slice, out, lse, whole[0], whole_lse[0], -1), 0);
        merge_slice(&f, slice, order, out, lse);
        CU_ASSERT_EQUAL(rows_that_differ(&c, slice, out, lse, whole[0], whole_lse[0], 0), 0);
        CU_ASSERT_EQUAL(rows_that_differ(&c, slice, out, lse, whole[1], whole_lse[1], 1), 0);
    }
    for (int reversed = 0; reversed < 2; reversed++) {
        free(whole[reversed]);
        free(whole_lse[reversed]);
    }
    free(order);
    free(lse);
    free(out);
    fixture_destroy(&f);
}

/* Ranks and heads of decode in use elsewhere; then heads that the ranks do not divide, fewer than there are ranks
 * too. */
static void slices_and_their_merge_are_exact(void) {
    static const int32_t ranks_heads[][2] = {{8, 16}, {8, 128}, {4, 16}, {2, 2}, {1, 3}, {3, 7}, {3, 32}, {4, 2}};
    static const cpa_dtype dtypes[][2] = {
        {CPA_BF16, CPA_BF16}, {CPA_F32, CPA_BF16}, {CPA_F16, CPA_F16}, {CPA_F32, CPA_F16}, {CPA_F32, CPA_F32}};
    for (size_t i = 0; i < sizeof ranks_heads / sizeof *ranks_heads; i++) {
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
            const int64_t padding = i % 2 ? 2 : 0;
            check_case((pack_case){ranks_heads[i][0], ranks_heads[i][1], d % 2 ? 64 : 128, 5 + padding, padding,
                                   dtypes[d][0], dtypes[d][1]});
        }
    }
}

/* More rows than a unit of work has, and widths that fill no vector. */
static void any_number_of_rows_and_any_width_will_do(void) {
    check_case((pack_case){2, 3, 256, 52 * 16, 2, CPA_F32, CPA_BF16});
    check_case((pack_case){3, 5, 5, 42, 0, CPA_F16, CPA_F16});
    check_case((pack_case){3, 5, 129, 17, 1, CPA_F32, CPA_F32});
    check_case((pack_case){2, 2, 1, 1, 0, CPA_F32, CPA_BF16});
}

/* A NaN LSE spoils its row and head, and counts as empty where states are those of others. */
static void a_nan_lse_stays_unless_it_is_foreign(void) {
    enum { WIDTH = 6 };
    const float states[2][WIDTH + 1] = {{1, 2, 3, 4, 5, 6, 0.5f}, {9, 9, 9, 9, 9, 9, NAN}};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(1, &device, &stream);
    const void *parts[2];
    for (int i = 0; i < 2; i++) parts[i] = cpa_test_upload(stream, states[i], sizeof states[i]);
    float out[WIDTH], lse;
    void *device_out = cpa_test_upload(stream, out, sizeof out),
         *device_lse = cpa_test_upload(stream, &lse, sizeof lse);
    for (int foreign = 0; foreign < 2; foreign++) {
        cpa_state_merge_packed_args args = {.size = sizeof args,
                                            .rows = 1,
                                            .heads = 1,
                                            .v_dim = WIDTH,
                                            .n_parts = 2,
                                            .parts = parts,
                                            .out = device_out,
                                            .out_lse = device_lse,
                                            .foreign_lse = foreign};
        CU_ASSERT_EQUAL(cpa_state_merge_packed(&args, stream), CPA_OK);
        cpa_test_download(stream, out, device_out, sizeof out);
        cpa_test_download(stream, &lse, device_lse, sizeof lse);
        CU_ASSERT(foreign ? lse == 0.5f : isnan(lse));
        CU_ASSERT(foreign ? memcmp(out, states[0], sizeof out) == 0 : isnan(out[0]) && isnan(out[WIDTH - 1]));
    }
    cpa_test_free(stream, device_lse);
    cpa_test_free(stream, device_out);
    for (int i = 0; i < 2; i++) cpa_test_free(stream, (void *)(uintptr_t)parts[i]);
    cpa_test_device_close(device, stream);
}

static void a_slice_may_be_left_out(void) {
    fixture f;
    fixture_init(&f, (pack_case){2, 4, 8, 3, 0, CPA_F32, CPA_F32});
    cpa_state_pack_args args = pack_args(&f, 0);
    void *slices[2] = {NULL, f.ranks[0].slices[1]};
    args.slices = slices;
    args.row_map = NULL;
    for (int r = 0; r < 3; r++) f.ranks[0].map[r] = r;
    CU_ASSERT_EQUAL(cpa_state_pack(&args, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(wrong_heads(&f, 0, 1), 0);
    CU_ASSERT_NOT_EQUAL(wrong_heads(&f, 0, 0), 0); /* as it was before */
    fixture_destroy(&f);
}

static void wrong_arguments_are_named(void) {
    fixture f;
    fixture_init(&f, (pack_case){2, 4, 8, 3, 0, CPA_F32, CPA_BF16});
    cpa_state_pack_args pack = pack_args(&f, 0);
    pack.n_slices = 65;
    CU_ASSERT_EQUAL(cpa_state_pack(&pack, f.stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(f.stream), "state_pack: n_slices is 65, expected 1..64");
    pack = pack_args(&f, 0);
    pack.o_dtype = CPA_F16;
    CU_ASSERT_EQUAL(cpa_state_pack(&pack, f.stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(f.stream),
                           "state_pack: o_dtype is 2, expected that of the slices, bf16, or fp32");
    const void *parts[2] = {f.ranks[0].slices[0], NULL};
    cpa_state_merge_packed_args merge = {.size = sizeof merge,
                                         .rows = 3,
                                         .heads = 2,
                                         .v_dim = 8,
                                         .dtype = CPA_BF16,
                                         .n_parts = 2,
                                         .parts = parts,
                                         .out = f.ranks[0].device_o};
    CU_ASSERT_EQUAL(cpa_state_merge_packed(&merge, f.stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(f.stream), "state_merge_packed: parts[1] is NULL");
    merge.heads = 0; /* a rank that has none */
    CU_ASSERT_EQUAL(cpa_state_merge_packed(&merge, f.stream), CPA_OK);
    fixture_destroy(&f);
}

static const cpa_test tests[] = {
    {"slices and their merge are exact", slices_and_their_merge_are_exact},
    {"any number of rows and any width will do", any_number_of_rows_and_any_width_will_do},
    {"a NaN LSE stays unless it is foreign", a_nan_lse_stays_unless_it_is_foreign},
    {"a slice may be left out", a_slice_may_be_left_out},
    {"wrong arguments are named", wrong_arguments_are_named},
};
CPA_DEVICE_TEST_MAIN("state_pack", tests)
