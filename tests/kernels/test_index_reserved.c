/* Reserved plans of an indexer: steps of other items, rows and keys have the bits of plans of their own; what is beyond the
 * limits is refused with one line. */
#include <stdio.h>

#include "tests/kernels/index_cases.h"

enum { STEPS = 5 };

/* Items of a step of a reserved plan: some of those of a shard, with fewer rows and keys, those of the last one
 * none. */
static int64_t items_of_step(const shard *s, int step, cpa_attend_item items[4 * SEQUENCES]) {
    int64_t n = 0;
    for (int64_t i = 0; i < s->n_items; i++) {
        const cpa_attend_item *item = &s->items[i];
        const int64_t cut = step == 0 ? 0 : (i * 3 + step) % 4;
        if (step == STEPS - 1 || (step == 3 && i % 2)) continue;
        items[n] = *item;
        items[n].q_count = cut < item->q_count ? item->q_count - cut : item->q_count;
        items[n].k_count = item->k_count > 300 * cut ? item->k_count - 300 * cut : item->k_count;
        n++;
    }
    return n;
}

static cpa_status set_items(cpa_index_plan *plan, const form *f, const shard *s, const cpa_attend_item *items,
                            int64_t n_items, cpa_error *err) {
    const cpa_attend_batch batch = batch_of(f, s, items, n_items);
    return cpa_index_plan_set(plan, &batch, f->tokens_per_key, err);
}

/* Steps of a plan that is reserved for the rows of a shard, or of those with up to `item_rows`, beside the same of
 * plans of their own: one memory of results, whose bits are the same, and the same are left alone. */
static void check_reserved(const problem *p, int64_t item_rows, cpa_owner_map map, int32_t index) {
    const form *f = p->form;
    cpa_attend_item items[4 * SEQUENCES];
    cpa_index_plan *plan;
    shard s = make_shard(p, map, index);
    int64_t kept = 0;
    for (int64_t i = 0; i < s.n_items; i++)
        if (s.items[i].q_count <= item_rows) s.items[kept++] = s.items[i];
    s.n_items = kept;
    const cpa_index_limits limits = {.size = sizeof limits,
                                     .items = s.n_items + 2,
                                     .item_rows = item_rows,
                                     .rows = s.n_rows,
                                     .keys = s.columns * f->unit,
                                     .table_entries = f->tables_on_device ? 0 : s.n_entries};
    const int64_t n = s.n_rows * (s.columns + PAD), bytes = n * (int64_t)sizeof(float);
    float *got = malloc((size_t)bytes);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_reserve(plan, &limits, NULL), CPA_OK);
    for (int step = 0; step < STEPS; step++) {
        const int64_t n_items = items_of_step(&s, step, items);
        float *want = run(f, &s, items, n_items);
        for (int64_t i = 0; i < n; i++) got[i] = UNTOUCHED;
        void *memory = cpa_test_upload(stream, got, bytes);
        const cpa_index_logits_args args = args_of(f, &s, memory);
        CU_ASSERT_EQUAL(set_items(plan, f, &s, items, n_items, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_index_plan_upload(plan, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_index_logits(plan, &args, stream), CPA_OK);
        cpa_test_download(stream, got, memory, bytes);
        CU_ASSERT_EQUAL(memcmp(got, want, (size_t)bytes), 0);
        cpa_test_free(stream, memory);
        free(want);
    }
    free(got);
    cpa_index_plan_destroy(plan);
    free_shard(&s);
}

static void reserved_plans_have_the_bits_of_others(void) {
    const form forms[] = {
        {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 1}, {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0},
        {4, 128, CPA_BF16, 0, 16, 1, 4, 0, 1},      {128, 128, CPA_FP8_E4M3, 1, 256, 1, 1, 0, 0},
        {3, 40, CPA_FP8_E4M3, 1, 8, 1, 1, 0, 0},    {8, 64, CPA_BF16, 1, 32, 2, 2, 0, 1},
    };
    const int64_t item_rows[] = {1, 2, 5, 40};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const cpa_owner_map one = {1, 1}, three = {3, 4 * forms[i].block_size};
        problem p = make_problem(&forms[i]);
        for (size_t r = 0; r < sizeof item_rows / sizeof *item_rows; r++)
            check_reserved(&p, item_rows[r], i % 2 ? three : one, i % 2 ? (int32_t)(r % 3) : 0);
        free_problem(&p);
    }
    cpa_test_device_close(device, stream);
}

static void expect_beyond(cpa_index_plan *plan, const form *f, const shard *s, const cpa_attend_item *items, int64_t n,
                          const char *line) {
    cpa_error err = {0};
    CU_ASSERT_EQUAL(set_items(plan, f, s, items, n, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, line);
}

static void what_is_beyond_the_limits_is_refused(void) {
    const form f = {4, 64, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_index_plan *plan;
    cpa_error err = {0};
    cpa_test_device_open(1, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    cpa_index_limits limits = {.size = sizeof limits, .items = 2, .item_rows = 2, .rows = 3, .keys = 64};
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_index_plan_upload(plan, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), "index plan: an upload of a plan that is not reserved");
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, NULL, &err), CPA_INVALID);
    limits.items = 0;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "index plan: reserved for 0 items, expected 1..2147483647");
    limits.items = 2, limits.item_rows = 4;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "index plan: reserved for 4 rows an item, expected 1..3, all rows");
    limits.item_rows = 2, limits.table_entries = s.n_entries;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_index_plan_upload(plan, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), "index plan: an upload of a plan that is not set");
    CU_ASSERT_EQUAL(set_items(plan, &f, &s, s.items, 2, &err), CPA_OK);
    expect_beyond(plan, &f, &s, s.items, 3, "index plan: 3 items with rows, but the plan is reserved for 2");
    expect_beyond(plan, &f, &s, s.items + 4, 1, "index plan: 5 rows of an item, but the plan is reserved for 2");
    expect_beyond(plan, &f, &s, s.items + 2, 1, "index plan: 5 rows, but the plan is reserved for 3");
    cpa_attend_item longer = s.items[3];
    longer.q_row = 0;
    expect_beyond(plan, &f, &s, &longer, 1, "index plan: 517 keys of an item, but the plan is reserved for 64");
    limits.table_entries = 1;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_OK);
    char line[128];
    snprintf(line, sizeof line, "index plan: %d table entries on the host, but the plan is reserved for 1",
             (int)s.n_entries);
    expect_beyond(plan, &f, &s, s.items, 2, line);
    cpa_index_plan_destroy(plan);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"reserved plans have the bits of others", reserved_plans_have_the_bits_of_others},
    {"what is beyond the limits is refused", what_is_beyond_the_limits_is_refused},
};
CPA_DEVICE_TEST_MAIN("reserved plans of an indexer", tests)
