/* Plans that are reserved: lengths and block tables from memory of the device, step after step. */
#include <string.h>

#include "kernels/attend_plan.h"
#include "tests/fixtures/decode_fixture.h"
#include "tests/fixtures/unit.h"

static const cpa_decode_case SMALL = {.dtype = CPA_BF16,
                                      .kv_dtype = CPA_BF16,
                                      .q_heads = 8,
                                      .kv_heads = 2,
                                      .dim = 64,
                                      .block_size = 16,
                                      .rows = 1,
                                      .sequences = 5,
                                      .tokens = 700,
                                      .length_bytes = 4,
                                      .mask = {.causal = 1},
                                      .threads = 2};

/* Updates and attends the step that is there; how many rows are wrong. */
static int64_t run(cpa_decode_fixture *f) {
    const cpa_attend_update_args update = cpa_decode_fixture_update(f);
    const cpa_attend_args attend = cpa_decode_fixture_attend(f);
    CU_ASSERT_EQUAL(cpa_attend_plan_update(f->plan, &update, f->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend(f->plan, &attend, f->stream), CPA_OK);
    return cpa_decode_fixture_check(f);
}

static int64_t run_lengths(cpa_decode_fixture *f, const int64_t *lengths, int64_t given) {
    cpa_decode_fixture_put(f, lengths, given);
    return run(f);
}

static void steps_of_any_lengths(const cpa_decode_case *shape) {
    static const int64_t steps[][5] = {
        {1, 16, 17, 500, 700}, {700, 2, 64, 65, 333}, {0, 0, 9, 0, 0}, {0, 0, 0, 0, 0}, {699, 699, 699, 699, 699}};
    cpa_decode_fixture f;
    cpa_decode_fixture_init(&f, shape);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        int64_t lengths[5];
        for (int s = 0; s < 5; s++) lengths[s] = steps[i][s] > 0 ? steps[i][s] + shape->rows - 1 : 0;
        for (int s = 0; s < 5; s++) lengths[s] = lengths[s] > shape->tokens ? shape->tokens : lengths[s];
        CU_ASSERT_EQUAL(run_lengths(&f, lengths, 5), 0);
    }
    cpa_decode_fixture_destroy(&f);
}

static void lengths_change(void) {
    steps_of_any_lengths(&SMALL);
}

static void dtypes_and_masks(void) {
    cpa_decode_case other = SMALL;
    other.kv_dtype = CPA_INT8;
    other.length_bytes = 8;
    steps_of_any_lengths(&other);
    other = SMALL;
    other.dtype = other.kv_dtype = CPA_F32;
    other.mask = (cpa_mask){.causal = 1, .window = 100, .sinks = 4};
    steps_of_any_lengths(&other);
}

static void several_rows_a_sequence(void) {
    cpa_decode_case rows = SMALL;
    rows.rows = 3;
    steps_of_any_lengths(&rows);
    rows.rows = 4;
    rows.mask.window = 70;
    steps_of_any_lengths(&rows);
}

static void pages_by_kv_indptr(void) {
    cpa_decode_case pages = SMALL;
    pages.by_indices = 1;
    steps_of_any_lengths(&pages);
    for (pages.block_size = 1; pages.block_size <= 4; pages.block_size *= 4) {
        for (pages.rows = 1; pages.rows <= 3; pages.rows += 2) steps_of_any_lengths(&pages);
    }
    pages.kv_dtype = CPA_INT8;
    pages.rows = 1;
    steps_of_any_lengths(&pages);
}

/* Groups of more heads than a CTA of decode has rows, and rows of several tokens that it does not hold together. */
static void wide_groups(void) {
    static const struct {
        int32_t q_heads, kv_heads, dim, block_size, rows;
        cpa_dtype kv_dtype;
        cpa_mask mask;
    } cases[] = {
        {17, 1, 64, 16, 1, CPA_BF16, {.causal = 1}},
        {64, 2, 64, 64, 4, CPA_FP8_E4M3, {.causal = 1}},
        {33, 1, 128, 64, 2, CPA_BF16, {.causal = 1}},
        {128, 2, 64, 16, 3, CPA_BF16, {.causal = 1, .window = 70}},
        {96, 1, 128, 16, 1, CPA_FP8_E4M3, {.causal = 1}},
        {128, 1, 128, 64, 1, CPA_BF16, {.causal = 1}},
        {128, 1, 128, 16, 4, CPA_BF16, {.causal = 1}},
        {40, 1, 256, 16, 2, CPA_BF16, {.causal = 1, .window = 90, .sinks = 4}},
        {8, 1, 64, 16, 5, CPA_BF16, {.causal = 1}},
        {16, 2, 128, 16, 6, CPA_BF16, {.causal = 1}},
        {128, 1, 64, 16, 1, CPA_F32, {.causal = 1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_decode_case wide = SMALL;
        wide.q_heads = cases[i].q_heads;
        wide.kv_heads = cases[i].kv_heads;
        wide.dim = cases[i].dim;
        wide.block_size = cases[i].block_size;
        wide.rows = cases[i].rows;
        wide.kv_dtype = cases[i].kv_dtype;
        wide.dtype = cases[i].kv_dtype == CPA_F32 ? CPA_F32 : CPA_BF16;
        wide.mask = cases[i].mask;
        wide.tokens = 350;
        steps_of_any_lengths(&wide);
    }
}

/* Latents: fewer heads than a CTA has rows, of several tokens, and more. */
static void latents(void) {
    static const int32_t heads[][2] = {{16, 4}, {48, 3}, {128, 1}, {126, 2}};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        cpa_decode_case latent = SMALL;
        latent.q_heads = heads[i][0], latent.rows = heads[i][1];
        latent.kv_heads = 1, latent.dim = 512, latent.v_in_k = 1;
        latent.block_size = i % 2 ? 64 : 16;
        latent.tokens = 150;
        steps_of_any_lengths(&latent);
    }
}

/* The latents of DeepSeek's models, whose values are narrower than their keys: groups that devices decode by a kernel for
 * few rows, and one of their others; as elements, by one scale, and by scales of tiles. The host, whose code is the same
 * for all of them, takes half. */
static void latents_of_512_and_64(void) {
    static const struct {
        cpa_dtype kv_dtype;
        float k_scale;
    } caches[] = {{CPA_BF16, 0}, {CPA_FP8_E4M3, 0.02f}, {CPA_FP8_T128, 0}};
    static const int32_t heads[][2] = {{16, 1}, {8, 2}, {3, 5}, {128, 1}};
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++)
        for (size_t h = 0; h < sizeof heads / sizeof *heads; h++) {
            cpa_decode_case latent = SMALL;
            if (cpa_test_promises_bits() && (i + h) % 2) continue;
            latent.q_heads = heads[h][0], latent.rows = heads[h][1], latent.kv_heads = 1;
            latent.dim = 576, latent.v_dim = 512, latent.v_in_k = 1;
            latent.kv_dtype = caches[i].kv_dtype, latent.k_scale = caches[i].k_scale;
            latent.block_size = h % 2 ? 16 : 64;
            steps_of_any_lengths(&latent);
        }
}

/* Rows as they come, of the reserved number at most: none of some sequences, gaps in front and behind; too many of one,
 * a descent and a beginning past the end, of which those around know nothing. */
static void rows_by_qo_indptr(void) {
    static const struct {
        int32_t indptr[6];
        int64_t lengths[5];
    } steps[] = {
        {{0, 1, 3, 6, 7, 9}, {1, 500, 17, 64, 700}},   {{2, 2, 5, 5, 6, 8}, {9, 3, 0, 333, 2}},
        {{0, 0, 0, 0, 0, 0}, {5, 6, 7, 8, 9}},         {{0, 3, 4, 7, 10, 13}, {2, 1, 300, 0, 701}},
        {{0, 2, 6, 7, 9, 11}, {40, 50, 60, 70, 80}},   {{12, 15, 3, 3, 5, 4}, {40, 50, 60, 70, 80}},
        {{-1, 1, 2, 3, 15, 16}, {40, 50, 60, 70, 80}},
    };
    for (int kind = 0; kind < 4; kind++) {
        cpa_decode_case rows = SMALL;
        cpa_decode_fixture f;
        rows.rows = 3;
        rows.by_indices = kind == 1;
        if (kind == 2) rows.dtype = rows.kv_dtype = CPA_F32;
        if (kind == 3) rows.q_heads = 80; /* 40 a KV head */
        cpa_decode_fixture_init(&f, &rows);
        f.ragged = 1;
        for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
            memcpy(f.qo_indptr, steps[i].indptr, sizeof steps[i].indptr);
            CU_ASSERT_EQUAL(run_lengths(&f, steps[i].lengths, 5), 0);
        }
        f.ragged = 0; /* and the next update may do without */
        CU_ASSERT_EQUAL(run_lengths(&f, steps[0].lengths, 5), 0);
        cpa_decode_fixture_destroy(&f);
    }
}

/* Prefill and decode together, by a bound on all rows: of prompts, of their later chunks, of drafts; rows and sums of
 * rows beyond the bounds, lengths that do not fit, and rows that descend. */
static void prefill_and_decode(void) {
    static const struct {
        int32_t indptr[6];
        int64_t lengths[5];
    } steps[] = {
        {{0, 1, 2, 3, 4, 5}, {1, 500, 17, 64, 700}},
        {{0, 300, 301, 302, 305, 400}, {300, 500, 17, 64, 700}},
        {{0, 4, 104, 105, 305, 305}, {50, 700, 9, 250, -7}},
        {{0, 290, 290, 290, 290, 390}, {333, 0, -1, 701, 100}},
        {{0, 0, 0, 0, 0, 0}, {5, 6, 7, 8, 9}},
        {{0, 150, 300, 390, 410, 411}, {150, 160, 700, 500, 3}},  /* more than 400 together */
        {{0, 301, 302, 303, 304, 305}, {700, 10, 20, 30, 40}},    /* more than 300 of one */
        {{0, 150, 300, 301, 302, 400}, {100, 701, 200, 0, 650}},  /* fewer tokens than rows, and too many */
        {{200, 390, 100, 300, 390, 399}, {400, 10, 300, 500, 9}}, /* rows that descend, or begin before others end */
        {{-3, 20, 330, 330, 340, 341}, {40, 500, 700, 11, 1}},
        {{0, 100, 200, 300, 400, 400}, {0, 0, 700, 100, 9}}, /* rows of no keys */
    };
    static const struct {
        int32_t q_heads, kv_heads, dim, block_size;
        cpa_dtype kv_dtype;
        cpa_mask mask;
    } cases[] = {
        {8, 2, 64, 16, CPA_BF16, {.causal = 1}}, {4, 1, 64, 64, CPA_BF16, {.causal = 1, .window = 100, .sinks = 4}},
        {4, 2, 64, 16, CPA_INT8, {.causal = 1}}, {40, 1, 32, 16, CPA_BF16, {.causal = 1}},
        {4, 4, 64, 1, CPA_F32, {.causal = 1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_decode_case mixed = SMALL;
        cpa_decode_fixture f;
        mixed.q_heads = cases[i].q_heads, mixed.kv_heads = cases[i].kv_heads, mixed.dim = cases[i].dim;
        mixed.block_size = cases[i].block_size, mixed.mask = cases[i].mask, mixed.kv_dtype = cases[i].kv_dtype;
        if (mixed.kv_dtype == CPA_F32) mixed.dtype = CPA_F32;
        mixed.rows = 300;
        mixed.total_rows = 400;
        cpa_decode_fixture_init(&f, &mixed);
        f.ragged = 1;
        for (size_t step = 0; step < sizeof steps / sizeof *steps; step++) {
            memcpy(f.qo_indptr, steps[step].indptr, sizeof steps[step].indptr);
            CU_ASSERT_EQUAL(run_lengths(&f, steps[step].lengths, 5), 0);
        }
        f.ragged = 0; /* one sequence of all rows that it may have, without qo_indptr */
        CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){420}, 1), 0);
        const cpa_attend_update_args update = cpa_decode_fixture_update(&f);
        cpa_attend_update_args two = update;
        two.sequences = 2;
        CU_ASSERT_EQUAL(cpa_attend_plan_update(f.plan, &two, f.stream), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(
            strstr(cpa_stream_error(f.stream), "2 sequences of 300 rows each, expected at most 400 rows in all"));
        cpa_decode_fixture_destroy(&f);
    }
}

static void run_many(int32_t q_heads, int32_t kv_heads, int64_t tokens) {
    cpa_decode_case many = SMALL;
    int64_t lengths[CPA_DECODE_MOST];
    cpa_decode_fixture f;
    many.sequences = CPA_DECODE_MOST;
    many.q_heads = q_heads;
    many.kv_heads = kv_heads;
    many.tokens = tokens;
    cpa_decode_fixture_init(&f, &many);
    for (int step = 0; step < 3; step++) {
        for (int s = 0; s < CPA_DECODE_MOST; s++) lengths[s] = (s * 131 + step * 517) % (tokens + 1);
        CU_ASSERT_EQUAL(run_lengths(&f, lengths, CPA_DECODE_MOST), 0);
    }
    cpa_decode_fixture_destroy(&f);
}

static void run_long(int32_t q_heads, int64_t tokens) {
    cpa_decode_case few = SMALL;
    cpa_decode_fixture f;
    few.sequences = 2;
    few.q_heads = q_heads;
    few.tokens = tokens;
    cpa_decode_fixture_init(&f, &few);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){tokens, 1}, 2), 0);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){3, tokens - 1}, 2), 0);
    cpa_decode_fixture_destroy(&f);
}

/* As many as share CTAs, or teams of them, and one that many take. */
static void many_sequences_and_one_long_one(void) {
    run_many(8, 8, SMALL.tokens);
    run_many(64, 1, 200);
    run_long(SMALL.q_heads, 9000);
    run_long(80, 3000);
}

static void fewer_sequences_than_are_reserved(void) {
    cpa_decode_fixture f;
    cpa_decode_fixture_init(&f, &SMALL);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){40, 50, 60, 70, 80}, 5), 0);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){90, 30}, 2), 0);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){0}, 0), 0);
    cpa_decode_fixture_destroy(&f);
}

/* A length beyond the reservation, or below the rows, and an entry that is no block: nothing is read by them. */
static void what_does_not_fit_is_nan(void) {
    cpa_decode_case rows = SMALL;
    cpa_decode_fixture f;
    rows.rows = 2;
    cpa_decode_fixture_init(&f, &rows);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 701, -1, 1, 0x7fffffff}, 5), 0);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){-5, -5, 701, 701, 1}, 5), 0);
    f.bad_entry = 2;
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 20, 300, 40, 500}, 5), 0);
    f.bad_entry = -1;
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 20, 300, 40, 500}, 5), 0);
    cpa_decode_fixture_destroy(&f);
}

/* After an update it is told which sequence was refused, the first of them, and why. */
static void what_was_refused_is_told(void) {
    cpa_decode_case rows = SMALL;
    cpa_decode_fixture f;
    cpa_error err = {.message = ""};
    rows.rows = 2;
    cpa_decode_fixture_init(&f, &rows);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 200, 701, -1, 1}, 5), 0);
    CU_ASSERT_EQUAL(cpa_attend_plan_refused(f.plan, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message,
                           "attend plan: the update refused sequence 2: its length is negative, below its "
                           "rows or above 700");
    f.bad_entry = 1;
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 200, 300, 40, 50}, 5), 0);
    CU_ASSERT_EQUAL(cpa_attend_plan_refused(f.plan, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "sequence 1: an entry of its table is no block of 0..219"));
    f.bad_entry = -1;
    f.ragged = 1;
    memcpy(f.qo_indptr, (int32_t[]){0, 2, 3, 4, 7, 8}, 6 * sizeof(int32_t));
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 200, 300, 40, 50}, 5), 0);
    CU_ASSERT_EQUAL(cpa_attend_plan_refused(f.plan, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "sequence 3: it has more than 2 rows, or all have more than 10"));
    memcpy(f.qo_indptr, (int32_t[]){0, 2, 3, 3, 4, 5}, 6 * sizeof(int32_t));
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 200, -9, 40, 50}, 5), 0); /* of no rows nothing is told */
    CU_ASSERT_EQUAL(cpa_attend_plan_refused(f.plan, &err), CPA_OK);
    cpa_decode_fixture_destroy(&f);
}

/* Pages that do not lie among the indices, and a last page of more tokens than a page has. */
static void indices_that_do_not_fit_are_nan(void) {
    cpa_decode_case pages = SMALL;
    cpa_decode_fixture f;
    pages.by_indices = 1;
    cpa_decode_fixture_init(&f, &pages);
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 701, -1, 30, 0x7fffffff}, 5), 0);
    f.bad_entry = 2;
    CU_ASSERT_EQUAL(run_lengths(&f, (int64_t[]){100, 20, 300, 40, 500}, 5), 0);
    f.bad_entry = 4; /* the last: its pages end behind the indices */
    cpa_decode_fixture_put(&f, (int64_t[]){100, 20, 300, 40, 500}, 5);
    f.n_indices--;
    CU_ASSERT_EQUAL(run(&f), 0);
    cpa_decode_fixture_destroy(&f);
}

/* Before the first update: empty rows, as of an update with lengths of 0. */
static void a_reservation_begins_empty(void) {
    cpa_decode_fixture f;
    cpa_decode_fixture_init(&f, &SMALL);
    cpa_decode_fixture_put(&f, (int64_t[]){0, 0, 0, 0, 0}, 5);
    const cpa_attend_args attend = cpa_decode_fixture_attend(&f);
    CU_ASSERT_EQUAL(cpa_attend(f.plan, &attend, f.stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_decode_fixture_check(&f), 0);
    CU_ASSERT_EQUAL(cpa_attend_plan_refused(f.plan, NULL), CPA_OK);
    cpa_decode_fixture_destroy(&f);
}

/* ---- misuse ---- */

static void refuse_limits(cpa_decode_fixture *f, cpa_attend_limits limits, cpa_status wanted, const char *says) {
    cpa_error err = {.message = ""};
    cpa_attend_plan *plan = NULL;
    CU_ASSERT_EQUAL(cpa_attend_plan_create(f->device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_reserve(plan, &limits, &err), wanted);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));
    CU_ASSERT_EQUAL(cpa_attend_plan_reserve(plan, &f->limits, NULL), CPA_OK); /* it is as new */
    cpa_attend_plan_destroy(plan);
}

#define REFUSE_LIMITS(f, says, ...)                                                                                    \
    do {                                                                                                               \
        cpa_attend_limits limits = (f)->limits;                                                                        \
        limits.__VA_ARGS__;                                                                                            \
        refuse_limits(f, limits, CPA_INVALID, says);                                                                   \
    } while (0)

static void bad_limits(void) {
    cpa_decode_fixture f;
    cpa_decode_fixture_init(&f, &SMALL);
    REFUSE_LIMITS(&f, "0 sequences, expected 1", sequences = 0);
    REFUSE_LIMITS(&f, "0 tokens a sequence, expected 1", tokens = 0);
    REFUSE_LIMITS(&f, "0 rows a sequence, expected 1..700", rows = 0);
    REFUSE_LIMITS(&f, "701 rows a sequence", rows = 701);
    REFUSE_LIMITS(&f, "caches of 0 blocks", num_blocks = 0);
    REFUSE_LIMITS(&f, "block_size", block_size = 3);
    REFUSE_LIMITS(&f, "kv_heads", shape.kv_heads = 3);
    REFUSE_LIMITS(&f, "size", size = 8);
    REFUSE_LIMITS(&f, "-1 rows in all, expected 0", total_rows = -1);
    if (!cpa_test_promises_bits()) {
        cpa_attend_limits many = f.limits;
        many.tokens = many.rows = 1 << 28;
        refuse_limits(&f, many, CPA_UNSUPPORTED,
                      "1342177280 rows of 4 query heads a KV head, at most 1073741823 in all");
    }
    cpa_decode_fixture_destroy(&f);
}

/* A plan is set or reserved, once. */
static void set_and_reserved(void) {
    cpa_decode_fixture f;
    cpa_error err = {.message = ""};
    cpa_attend_plan *plan = NULL;
    cpa_decode_fixture_init(&f, &SMALL);
    const cpa_attend_batch batch = {
        .size = sizeof batch, .map = {1, 16}, .shape = f.limits.shape, .block_size = SMALL.block_size};
    CU_ASSERT_EQUAL(cpa_attend_plan_set(f.plan, &batch, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "is reserved and cannot be set"));
    CU_ASSERT_EQUAL(cpa_attend_plan_reserve(f.plan, &f.limits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "is reserved already"));
    CU_ASSERT_EQUAL(cpa_attend_plan_create(f.device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_reserve(plan, &f.limits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "is set already"));
    cpa_decode_fixture_put(&f, (int64_t[]){10, 20, 30, 40, 50}, 5);
    const cpa_attend_update_args update = cpa_decode_fixture_update(&f);
    CU_ASSERT_EQUAL(cpa_attend_plan_update(plan, &update, f.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(f.stream), "an update of what is not reserved"));
    CU_ASSERT_EQUAL(cpa_attend_plan_refused(plan, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "it is not reserved"));
    CU_ASSERT_EQUAL(cpa_attend_plan_refused(NULL, &err), CPA_INVALID);
    cpa_attend_plan_destroy(plan);
    cpa_decode_fixture_destroy(&f);
}

#define REFUSE_UPDATE(f, says, ...)                                                                                    \
    do {                                                                                                               \
        cpa_attend_update_args update = cpa_decode_fixture_update(f);                                                  \
        update.__VA_ARGS__;                                                                                            \
        CU_ASSERT_EQUAL(cpa_attend_plan_update((f)->plan, &update, (f)->stream), CPA_INVALID);                         \
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error((f)->stream), says));                                           \
    } while (0)

static void bad_updates(void) {
    cpa_decode_fixture f;
    cpa_decode_fixture_init(&f, &SMALL);
    cpa_decode_fixture_put(&f, (int64_t[]){10, 20, 30, 40, 50}, 5);
    REFUSE_UPDATE(&f, "of 6 sequences, expected 0..5", sequences = 6);
    REFUSE_UPDATE(&f, "of -1 sequences", sequences = -1);
    REFUSE_UPDATE(&f, "length_bytes is 2", length_bytes = 2);
    REFUSE_UPDATE(&f, "table_stride is 43, expected at least the 44", table_stride = 43);
    REFUSE_UPDATE(&f, "lengths is NULL", lengths = NULL);
    REFUSE_UPDATE(&f, "block_tables is NULL", block_tables = NULL);
    REFUSE_UPDATE(&f, "lengths", lengths = (const char *)update.lengths + 1);
    REFUSE_UPDATE(&f, "first_ranks are those of context attention", first_ranks = f.device_lengths);
    REFUSE_UPDATE(&f, "kv_indptr and lengths are both set", kv_indptr = f.device_indptr);
    REFUSE_UPDATE(&f, "last_page_len is set without kv_indptr", last_page_len = f.device_last);
    REFUSE_UPDATE(&f, "qo_indptr", qo_indptr = (const int32_t *)(const void *)((const char *)f.device_qo + 2));
    REFUSE_UPDATE(&f, "n_indices is set without kv_indptr", n_indices = 3);
    cpa_attend_args attend = cpa_decode_fixture_attend(&f);
    attend.kv.num_blocks -= 2;
    CU_ASSERT_EQUAL(cpa_attend(f.plan, &attend, f.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(f.stream), "reads block"));
    CU_ASSERT_EQUAL(run(&f), 0); /* and the plan is as it was */
    cpa_decode_fixture_destroy(&f);
}

static const cpa_test tests[] = {
    {"lengths and tables change from step to step", lengths_change},
    {"other dtypes, windows, lengths of 64 bits", dtypes_and_masks},
    {"several rows a sequence", several_rows_a_sequence},
    {"wide groups", wide_groups},
    {"latents", latents},
    {"latents_of_512_and_64", latents_of_512_and_64},
    {"rows as they come, by qo_indptr", rows_by_qo_indptr},
    {"prefill and decode together", prefill_and_decode},
    {"many sequences, and one that is long", many_sequences_and_one_long_one},
    {"fewer sequences than are reserved", fewer_sequences_than_are_reserved},
    {"what does not fit is NaN", what_does_not_fit_is_nan},
    {"what was refused is told", what_was_refused_is_told},
    {"pages one behind the other, by kv_indptr", pages_by_kv_indptr},
    {"indices that do not fit are NaN", indices_that_do_not_fit_are_nan},
    {"a reservation begins empty", a_reservation_begins_empty},
    {"bad limits", bad_limits},
    {"a plan is set, or reserved once", set_and_reserved},
    {"bad updates", bad_updates},
};

CPA_DEVICE_TEST_MAIN("reserved plans of attend", tests)
