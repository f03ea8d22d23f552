/* Logits of an indexer against float64 that knows no pages, shards or limits but those of positions: forms of heads and
 * widths, pages, shards of an owner map, keys that stand for several tokens, largest scores of units of keys; the
 * columns that are -inf, exactly; what is not to be read is NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kernels/index_cases.h"

/* ---- what is expected of it ---- */

typedef struct verdict {
    int64_t pattern, far, cells;
    double xy, xx, yy;
} verdict;

/* The largest expected L of a column's keys that the row sees; -inf: none. */
static double expected_column(const problem *p, const shard *s, int64_t row, int64_t column, double *magnitude) {
    const form *f = p->form;
    const int64_t keys = keys_of(f, p->sequence[row]), in_shard = cpa_shard_len(map_of_keys(s, f), s->index, keys);
    double most = -INFINITY;
    *magnitude = 0;
    for (int64_t i = column * f->unit; i < (column + 1) * f->unit && i < in_shard; i++) {
        const int64_t key = cpa_shard_pos(map_of_keys(s, f), s->index, i);
        if ((key + 1) * f->tokens_per_key - 1 > p->position[row]) continue;
        most = fmax(most, p->expected[row * MOST_KEYS + key]);
        *magnitude = fmax(*magnitude, p->magnitude[row * MOST_KEYS + key]);
    }
    return most;
}

/* Tensor cores of compute capability 9.0 add 32 products of codes at once and cut each to 13 bits below the largest: of the
 * four sums of a width of 128 each may be off by that of 33 terms, 4 * 33 * 2^-14 of the largest at worst. What is off by half
 * of that is not those roundings, which have any sign. */
static void judge_cell(verdict *v, double got, double want, double magnitude) {
    const double bar = cpa_test_promises_bits() ? 2e-6 : 4e-3;
    v->cells++;
    if (isinf(want) || !isfinite(got)) {
        v->pattern += got != want;
        return;
    }
    v->far += fabs(got - want) > bar * magnitude;
    v->xy += got * want, v->xx += got * got, v->yy += want * want;
}

static void judge(const problem *p, const shard *s, const float *logits) {
    verdict v = {0};
    for (int64_t i = 0; i < s->n_rows; i++) {
        const float *row = logits + i * (s->columns + PAD);
        for (int64_t c = 0; c < s->columns + PAD; c++) {
            double magnitude = 0;
            const int is_left_alone = s->rows[i] < 0 || c >= s->columns;
            const double want = is_left_alone ? UNTOUCHED : expected_column(p, s, s->rows[i], c, &magnitude);
            if (is_left_alone)
                v.pattern += row[c] != UNTOUCHED;
            else
                judge_cell(&v, (double)row[c], want, magnitude);
        }
    }
    CU_ASSERT_EQUAL(v.pattern, 0);
    CU_ASSERT_EQUAL(v.far, 0);
    CPA_ASSERT_ORDER(1 - 2 * v.xy / (v.xx + v.yy), <, 5e-6);
}

/* On the host: the bits of each row and key are those of one rank that has all keys. */
static void check_bits_of_one_rank(const problem *p, const shard *s, const float *logits, const shard *one,
                                   const float *all) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < s->n_rows; i++) {
        int64_t of_one = 0;
        while (one->rows[of_one] != s->rows[i]) of_one++;
        for (int64_t c = 0; s->rows[i] >= 0 && c < s->columns; c++) {
            const int64_t key = cpa_shard_pos(map_of_keys(s, p->form), s->index, c);
            const float got = logits[i * (s->columns + PAD) + c];
            if (isinf(got)) continue;
            wrong += got != all[of_one * (one->columns + PAD) + key];
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* ---- tests ---- */

static void check_form(const form *f, int32_t most_ranks, const int32_t *runs, int n_runs) {
    problem p = make_problem(f);
    shard one = make_shard(&p, (cpa_owner_map){1, f->tokens_per_key}, 0);
    float *all = run(f, &one, one.items, one.n_items);
    judge(&p, &one, all);
    for (int32_t n = 2; n <= most_ranks; n++) {
        for (int r = 0; r < n_runs; r++) {
            for (int32_t index = 0; index < n; index++) {
                shard s = make_shard(&p, (cpa_owner_map){n, runs[r]}, index);
                float *logits = run(f, &s, s.items, s.n_items);
                judge(&p, &s, logits);
                if (cpa_test_promises_bits() && f->unit == 1) check_bits_of_one_rank(&p, &s, logits, &one, all);
                free(logits);
                free_shard(&s);
            }
        }
    }
    free(all);
    free_shard(&one);
    free_problem(&p);
}

static void every_shard_has_the_logits_of_its_keys(void) {
    const int32_t heads[] = {32, 64}, dims[] = {32, 64, 128}, runs[] = {64, 256};
    cpa_test_device_open(2, &device, &stream);
    for (size_t h = 0; h < sizeof heads / sizeof *heads; h++) {
        for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
            const form f = {heads[h], dims[d], CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
            check_form(&f, heads[h] + dims[d] == 192 ? 4 : 2, runs, 2);
        }
    }
    cpa_test_device_close(device, stream);
}

static void forms_of_heads_widths_pages_and_units(void) {
    const form forms[] = {
        {4, 128, CPA_BF16, 0, 64, 4, 1, 0, 0}, /* four heads without weights, keys of four tokens */
        {4, 128, CPA_BF16, 0, 16, 1, 4, 0, 0},      {64, 128, CPA_FP8_E4M3, 1, 64, 1, 16, 0, 0},
        {32, 64, CPA_BF16, 1, 128, 1, 1, 0, 0},     {8, 32, CPA_BF16, 1, 32, 2, 2, 0, 0},
        {64, 128, CPA_FP8_E4M3, 1, 1, 1, 1, 1, 0}, /* keys in a tensor */
        {64, 128, CPA_FP8_E4M3, 1, 32, 4, 1, 1, 1}, {128, 128, CPA_FP8_E4M3, 1, 256, 1, 1, 0, 1},
        {1, 64, CPA_FP8_E4M3, 1, 4, 1, 8, 0, 0},    {3, 40, CPA_FP8_E4M3, 1, 8, 1, 1, 0, 0},
        {70, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0}, {5, 256, CPA_BF16, 0, 64, 1, 1, 0, 0},
    };
    const int32_t runs[] = {32};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) check_form(&forms[i], 2, runs, 1);
    cpa_test_device_close(device, stream);
}

/* Of later keys alone, and of rows alone: with the bits of all together. */
static void an_item_has_its_own_keys_and_no_others(void) {
    const form f = {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_test_device_open(3, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    float *all = run(&f, &s, s.items, s.n_items);
    cpa_attend_item item = s.items[SEQUENCES - 1];
    item.q_row += 7, item.q_first += 7, item.q_count = 20;
    item.k_first = 256, item.k_count -= 256 + 11, item.table += 256 / f.block_size;
    float *some = run(&f, &s, &item, 1);
    int64_t wrong = 0;
    for (int64_t i = 0; i < s.n_rows; i++) {
        const int is_of_item = i >= item.q_row && i < item.q_row + item.q_count;
        for (int64_t c = 0; c < s.columns; c++) {
            const float got = some[i * (s.columns + PAD) + c];
            if (!is_of_item) {
                wrong += got != UNTOUCHED;
            } else if (c >= item.k_count || c + 256 > item.q_first + i - item.q_row) {
                wrong += got != -INFINITY;
            } else {
                const float want = all[i * (s.columns + PAD) + c + 256];
                wrong += cpa_test_promises_bits() ? got != want : fabsf(got - want) > 1e-3f * (1 + fabsf(want));
            }
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(some);
    free(all);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

/* So many items that a device cuts their keys into few long pieces, each with the row and the keys of one. */
static void many_items_have_the_logits_of_one(void) {
    enum { ITEMS = 132, LONGEST = 2 };
    const form f = {16, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_attend_item items[ITEMS];
    cpa_test_device_open(2, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0), many = s;
    float *one = run(&f, &s, s.items, s.n_items);
    const int64_t row = s.items[LONGEST].q_row, stride = s.columns + PAD, q_bytes = (int64_t)f.heads * f.dim;
    char *q = malloc((size_t)(ITEMS * q_bytes));
    float *weights = malloc(sizeof *weights * (size_t)(ITEMS * f.heads));
    for (int64_t i = 0; i < ITEMS; i++) {
        items[i] = s.items[LONGEST], items[i].q_row = i;
        memcpy(q + i * q_bytes, p.q + s.rows[row] * q_bytes, (size_t)q_bytes);
        memcpy(weights + i * f.heads, p.weights + s.rows[row] * f.heads, sizeof *weights * (size_t)f.heads);
    }
    many.n_rows = ITEMS;
    many.q = cpa_test_upload(stream, q, ITEMS * q_bytes);
    many.weights = cpa_test_upload(stream, weights, ITEMS * f.heads * (int64_t)sizeof *weights);
    float *got = run(&f, &many, items, ITEMS);
    int64_t wrong = 0;
    for (int64_t i = 0; i < ITEMS * stride; i++) {
        const float want = one[row * stride + i % stride];
        const int is_same = got[i] == want || (!cpa_test_promises_bits() && isfinite(want) &&
                                               fabsf(got[i] - want) <= 1e-3f * (1 + fabsf(want)));
        wrong += !is_same;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    void *const on_device[] = {many.q, many.weights}, *const own[] = {got, weights, q, one};
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++) cpa_test_free(stream, on_device[i]);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) free(own[i]);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

static void results_repeat_bit_for_bit(void) {
    const int times = cpa_test_promises_bits() ? 3 : 20; /* what threads of the host do has an order */
    const form f = {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_test_device_open(2, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    float *first = run(&f, &s, s.items, s.n_items);
    for (int i = 0; i < times; i++) {
        float *again = run(&f, &s, s.items, s.n_items);
        CU_ASSERT_EQUAL(memcmp(first, again, (size_t)(s.n_rows * (s.columns + PAD)) * sizeof *first), 0);
        free(again);
    }
    free(first);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

static void expect_line(const cpa_index_plan *plan, const cpa_index_logits_args *args, const char *line) {
    CU_ASSERT_EQUAL(cpa_index_logits(plan, args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), line);
}

static void bad_logits_are_refused_in_one_line(void) {
    const form f = {4, 64, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_test_device_open(1, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    cpa_index_plan *plan = make_plan(&f, &s, s.items, s.n_items), *unset;
    void *logits = cpa_test_upload(stream, p.q, 1);
    const cpa_index_logits_args good = args_of(&f, &s, logits);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &unset, NULL), CPA_OK);
    cpa_index_logits_args a = good;
    expect_line(unset, &a, "index_logits: the plan has not been set");
    a.heads = 0;
    expect_line(plan, &a, "index_logits: heads is 0, expected 1 to 128");
    a = good, a.hadamard = 1;
    expect_line(plan, &a,
                "index_logits: the queries have hadamard 1, but the cache 0; expected both or neither transformed");
    a = good, a.cache.kv.k = NULL;
    expect_line(plan, &a, "index_logits: the cache of index keys is NULL");
    a = good, a.weights = NULL;
    expect_line(plan, &a, "index_logits: weights is NULL, expected those that index_q made of queries in codes");
    a = good, a.cache.kv.block_size = 32;
    expect_line(plan, &a, "index_logits: the cache has blocks of 32 tokens, but the plan of 64");
    a = good, a.width = 4412;
    expect_line(
        plan, &a,
        "index_logits: width is 4412, expected at least the 4413 columns of the longest item, and at most 2^40");
    a = good, a.unit = 3;
    expect_line(plan, &a, "index_logits: unit is 3, expected a power of two up to 16");
    a = good, a.k_scales = s.scales;
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &a, stream), CPA_INVALID);
    a = good, a.row_stride = a.width - 1;
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &a, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "row_stride is 4414"));
    a = good, a.q_row_stride = 4 * 64 - 1;
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &a, stream), CPA_INVALID);
    cpa_index_plan_destroy(unset);
    cpa_index_plan_destroy(plan);
    cpa_test_free(stream, logits);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"every shard has the logits of its keys", every_shard_has_the_logits_of_its_keys},
    {"forms of heads, widths, pages and units", forms_of_heads_widths_pages_and_units},
    {"an item has its own keys and no others", an_item_has_its_own_keys_and_no_others},
    {"many items have the logits of one", many_items_have_the_logits_of_one},
    {"results repeat bit for bit", results_repeat_bit_for_bit},
    {"bad logits are refused in one line", bad_logits_are_refused_in_one_line},
};
CPA_DEVICE_TEST_MAIN("index_logits", tests)
