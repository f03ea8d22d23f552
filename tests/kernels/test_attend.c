/* attend against the float64 reference: dtypes, shapes, masks, shards, ragged tails, page orders, batches of long and
 * short items, resumed calls. Whatever is no key or value is NaN. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/attend_plan.h"
#include "kernels/device.h"
#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

enum { ROW_PADDING = 8 };

/* With --whole, and on devices, every case of a grid; the host, whose code is the same for many, else takes those in
 * which any two of the axes have each pair of their values. */
static int whole;

/* Every case runs in fp32 and in bf16, with the head width of each. */
enum { BASES = 2 };

/* Attends over the keys of each slot in turn and counts rows that disagree with the reference. */
static int64_t wrong_rows(const cpa_attend_case *shape, int64_t stride) {
    cpa_attend_case padded = *shape;
    padded.padding = ROW_PADDING;
    return cpa_test_wrong_rows(&padded, 0, stride);
}

static void every_pair_of_dtypes(void) {
    for (int q = 0; q < CPA_DTYPE_COUNT; q++) {
        for (int kv = 0; kv < CPA_DTYPE_COUNT; kv++) {
            for (int base = 0; base < BASES; base++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.q_dtype = (cpa_dtype)q;
                shape.kv_dtype = (cpa_dtype)kv;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 7), 0);
            }
        }
    }
}

/* As prefill, and as decode of the last tokens. */
static void every_width_of_heads(void) {
    static const int32_t widths[][2] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {192, 128},
                                        {72, 8},  {1, 1},   {7, 3},   {33, 65},   {8, 256},   {255, 17}};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[0];
            shape.k_dim = widths[i][0];
            shape.v_dim = widths[i][1];
            shape.start = late ? shape.length - 2 : 0;
            for (int dtype = 0; dtype < CPA_DTYPE_COUNT; dtype++) {
                shape.q_dtype = shape.kv_dtype = (cpa_dtype)dtype;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 31), 0);
            }
        }
    }
}

static void every_grouping_of_heads(void) {
    static const int32_t heads[][2] = {{1, 1}, {4, 4}, {6, 2}, {8, 1}, {10, 2}, {32, 1}, {140, 1}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        for (int late = 0; late < 2; late++) {
            for (int base = 0; base < BASES; base++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.q_heads = heads[i][0];
                shape.kv_heads = heads[i][1];
                shape.start = late ? shape.length - 1 : 0;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 37), 0);
            }
        }
    }
}

static void every_block_size_and_page_order(void) {
    static const int32_t sizes[] = {1, 2, 16, 32, 64, 128, 256};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int head_major = 0; head_major < 2; head_major++) {
            for (int base = 0; base < BASES; base++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.block_size = shape.interleave = sizes[i];
                shape.head_major = head_major;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
                shape.start = shape.length - 3;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 1), 0);
            }
        }
    }
}

/* Tiles and splits of keys that are full, one short, one over; queries from the start, the middle, and the last. */
static void long_sequences_with_ragged_tails(void) {
    static const int64_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2600};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const int64_t starts[] = {0, lengths[i] - 1 - lengths[i] / 5, lengths[i] - 1};
        for (int s = 0; s < 3; s++) {
            for (int base = 0; base < BASES; base++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.length = lengths[i];
                shape.start = starts[s];
                CU_ASSERT_EQUAL(wrong_rows(&shape, 61), 0);
            }
        }
    }
}

static void more_tiles_than_a_device_runs_at_once(void) {
    for (int width = 64; width <= 128; width += 64) {
        cpa_attend_case shape = CPA_ATTEND_BASE[1];
        shape.q_heads = shape.kv_heads = cpa_test_promises_bits() ? 4 : 64; /* the host has no such bound */
        shape.k_dim = shape.v_dim = width;
        shape.length = 2600;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 331), 0);
    }
}

static void shards_of_every_rank_count(void) {
    static const int32_t interleaves[] = {1, 4, 16, 48, 256}; /* blocks of 16 and 64 */
    for (int32_t n = 1; n <= 5; n++) {
        for (size_t i = 0; i < sizeof interleaves / sizeof interleaves[0]; i++) {
            for (int causal = 0; causal < 2; causal++) {
                for (int base = 0; base < BASES; base++) {
                    cpa_attend_case shape = CPA_ATTEND_BASE[base];
                    if (!whole && 2 * base + causal != (n + (int32_t)i) % 4) continue;
                    shape.cp_size = n;
                    shape.interleave = interleaves[i];
                    shape.mask.causal = causal;
                    shape.length = base ? 733 : 333;
                    CU_ASSERT_EQUAL(wrong_rows(&shape, base ? 41 : 13), 0);
                }
            }
        }
    }
}

/* Pages of all shards in one table, in the order of positions: the keys of a sequence for the queries of a shard. */
static void queries_of_shards_over_the_keys_of_all(void) {
    for (int i = 0; i < 2 * BASES; i++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[i / 2];
        shape.cp_size = 3, shape.interleave = 32, shape.block_size = 16;
        shape.start = 61, shape.length = whole ? 733 : 397;
        shape.mask.causal = i % 2;
        cpa_attend_fixture f;
        cpa_attend_fixture_init(&f, &shape, 1);
        const int64_t blocks = (shape.length + shape.block_size - 1) / shape.block_size;
        int32_t *table = malloc((size_t)blocks * sizeof *table);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t position = block * shape.block_size;
            const int32_t shard = cpa_owner_rank(f.map, (cpa_placement){CPA_SHARDED, 0}, position);
            table[block] = f.tables[f.table[shard] + cpa_shard_len(f.map, shard, position) / shape.block_size];
        }
        free(f.tables);
        f.tables = table;
        f.n_table_entries = blocks;
        cpa_attend_item items[3];
        for (int32_t slot = 0; slot < shape.cp_size; slot++) {
            items[slot] = cpa_attend_fixture_item(&f, slot, 0, f.q_count[slot], slot, 0, shape.length);
            items[slot].table = 0;
            items[slot].k_set = (cpa_token_set){CPA_TOKENS_ALL, 0};
        }
        cpa_attend_result result;
        cpa_attend_result_init(&result, &f);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, items, shape.cp_size, 0, &result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, -1, 1, &result, NULL), 0);
        cpa_attend_result_destroy(&result);
        cpa_attend_fixture_destroy(&f);
    }
}

/* So many that a device splits them over its multiprocessors; on the host three splits. */
static int64_t many_keys(void) {
    return cpa_test_promises_bits() ? 3001 : 9001;
}

/* The last rows of a decode batch have their queries elsewhere, and NaN where the others are; enough keys for every CTA
 * of a device to begin with them, and few. */
static void queries_that_are_ready_elsewhere(void) {
    enum { ROWS = 8, READY = 3 };
    for (int i = 0; i < 2 * BASES; i++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[i / 2];
        shape.length = i % 2 ? many_keys() : 300;
        shape.start = shape.length - ROWS;
        cpa_attend_fixture f;
        cpa_attend_fixture_init(&f, &shape, 1);
        const int64_t row_bytes = (int64_t)shape.q_heads * shape.k_dim * cpa_dtype_bytes(shape.q_dtype);
        const int64_t others = (ROWS - READY) * row_bytes, bytes = READY * row_bytes;
        char *poison = cpa_test_poisoned(bytes, 1);
        CU_ASSERT_EQUAL(f.device->table->copy((char *)f.device_q + others, poison, bytes, f.stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_stream_sync(f.stream), CPA_OK);
        void *elsewhere = cpa_test_upload(f.stream, (char *)f.q + others, bytes);
        f.fusion = (cpa_attend_fusion){.ready_items = READY, .ready_row = ROWS - READY, .ready_rows = READY};
        f.ready_q = elsewhere;
        f.again = 1;
        cpa_attend_item items[ROWS];
        for (int32_t row = 0; row < ROWS; row++)
            items[row] = cpa_attend_fixture_item(&f, 0, row, 1, 0, 0, shape.length);
        cpa_attend_result result;
        cpa_attend_result_init(&result, &f);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, items, ROWS, 0, &result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 1, &result, NULL), 0);
        cpa_attend_result_destroy(&result);
        cpa_test_free(f.stream, elsewhere);
        free(poison);
        cpa_attend_fixture_destroy(&f);
    }
}

/* Queries that are ready lie elsewhere; the library sets plans by the operator itself, whose kernels ask for this too. */
static void a_plan_counts_the_rows_of_q(void) {
    cpa_attend_fixture f;
    cpa_attend_fixture_init(&f, &CPA_ATTEND_BASE[0], 1);
    cpa_attend_item items[] = {
        cpa_attend_fixture_item(&f, 0, 0, 5, 3, 0, 64),
        cpa_attend_fixture_item(&f, 0, 5, 0, 90, 0, 64),
        cpa_attend_fixture_item(&f, 0, 5, 2, 40, 0, 64),
    };
    items[0].q_row = 3;
    items[1].q_row = 90;
    items[2].q_row = 40;
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = f.map,
                                    .shape = {.q_heads = f.shape.q_heads,
                                              .kv_heads = f.shape.kv_heads,
                                              .k_dim = f.shape.k_dim,
                                              .v_dim = f.shape.v_dim,
                                              .kv_dtype = f.shape.kv_dtype},
                                    .block_size = f.shape.block_size,
                                    .items = items,
                                    .n_items = 3,
                                    .block_tables = f.tables,
                                    .n_table_entries = f.n_table_entries};
    cpa_error err;
    CU_ASSERT_EQUAL(f.device->operators->plan_set(f.plan, &batch, (cpa_attend_fusion){0}, &err), CPA_OK);
    CU_ASSERT_EQUAL(f.plan->rows, 42);
    const cpa_attend_fusion fusion = {.ready_items = 1, .ready_row = 40, .ready_rows = 2};
    CU_ASSERT_EQUAL(f.device->operators->plan_set(f.plan, &batch, fusion, &err), CPA_OK);
    CU_ASSERT_EQUAL(f.plan->rows, 8);
    cpa_attend_fixture_destroy(&f);
}

static void windows_and_sinks(void) {
    static const cpa_mask masks[] = {
        {.causal = 1, .sinks = 0, .window = 1},     {.causal = 1, .sinks = 0, .window = 100},
        {.causal = 1, .sinks = 4, .window = 64},    {.causal = 1, .sinks = 40, .window = 17},
        {.causal = 0, .sinks = 4, .window = 50},    {.causal = 1, .sinks = 4, .window = 5000},
        {.causal = 1, .sinks = 150, .window = 300}, {.causal = 1, .sinks = 16, .window = 16}};
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        for (int32_t n = 1; n <= 3; n += 2) {
            for (int base = 0; base < BASES; base++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                if (!whole && n / 2 != ((int)i + base) % 2) continue;
                shape.cp_size = n;
                shape.length = 1500;
                shape.mask = masks[i];
                CU_ASSERT_EQUAL(wrong_rows(&shape, 97), 0);
                shape.start = shape.length - 4;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 1), 0);
            }
        }
    }
}

static void scale_of_the_caller(void) {
    static const float scales[] = {0.02f, 0.15f, -0.1f};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        for (int base = 0; base < BASES; base++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            shape.scale = scales[i];
            CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
        }
    }
}

/* Decode rows of one tile and of two, and single tiles of prefill. */
static void few_queries_over_many_keys(void) {
    static const int64_t queries[] = {1, 4, 7, 40};
    for (size_t i = 0; i < sizeof queries / sizeof queries[0]; i++) {
        for (int32_t n = 1; n <= 2; n++) {
            for (int base = 0; base < BASES; base++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.cp_size = n;
                shape.block_size = shape.interleave = 64;
                shape.length = many_keys();
                shape.start = shape.length - queries[i];
                CU_ASSERT_EQUAL(wrong_rows(&shape, 7), 0);
            }
        }
    }
}

/* The keys of a row are split, and what counts the pieces that are done has to begin anew. */
static void one_plan_serves_many_attends(void) {
    for (int base = 0; base < BASES; base++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[base];
        cpa_attend_fixture fixture;
        cpa_attend_result once, thrice;
        shape.length = 5000;
        shape.start = shape.length - 2;
        cpa_attend_fixture_init(&fixture, &shape, 1);
        cpa_attend_result_init(&once, &fixture);
        cpa_attend_result_init(&thrice, &fixture);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixture, 0, &once), CPA_OK);
        fixture.again = 2;
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixture, 0, &thrice), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&fixture, 0, 1, &thrice, NULL), 0);
        CU_ASSERT(cpa_attend_result_same(&once, &thrice));
        cpa_attend_result_destroy(&thrice);
        cpa_attend_result_destroy(&once);
        cpa_attend_fixture_destroy(&fixture);
    }
}

/* Rows so short that a device may read those of two heads at once, if there are two. */
static void narrow_heads_in_odd_and_even_numbers(void) {
    for (int32_t heads = 1; heads <= 4; heads++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[1];
        shape.q_heads = 4 * heads;
        shape.kv_heads = heads;
        shape.k_dim = shape.v_dim = 64;
        shape.length = 3001;
        shape.start = 2999;
        for (shape.head_major = 0; shape.head_major < 2; shape.head_major++) CU_ASSERT_EQUAL(wrong_rows(&shape, 1), 0);
    }
}

/* Attends the items of one slot, and checks every stride-th row. */
static int64_t wrong_items(cpa_attend_fixture *fixture, const cpa_attend_item *items, int64_t n, int64_t stride) {
    cpa_attend_result result;
    cpa_attend_result_init(&result, fixture);
    int64_t wrong = cpa_attend_fixture_run(fixture, items, n, 0, &result) != CPA_OK;
    wrong += cpa_attend_fixture_check(fixture, 0, stride, &result, NULL);
    cpa_attend_result_destroy(&result);
    return wrong;
}

/* One plan with items of many lengths, each with keys of its own length; long and short ones mixed. */
static void ragged_batches(void) {
    static const int64_t counts[] = {1, 2, 70, 1, 4, 5, 300, 1, 16, 33, 128, 3};
    enum { ITEMS = sizeof counts / sizeof counts[0] };
    for (int32_t width = 64; width <= 256; width *= 2) {
        cpa_attend_case shape = CPA_ATTEND_BASE[1];
        cpa_attend_fixture fixture;
        cpa_attend_item items[ITEMS];
        int64_t row = 0;
        shape.k_dim = shape.v_dim = width;
        shape.length = 0;
        for (int i = 0; i < ITEMS; i++) shape.length += counts[i];
        cpa_attend_fixture_init(&fixture, &shape, 1);
        for (int i = 0; i < ITEMS; i++) {
            row += counts[i];
            items[i] = cpa_attend_fixture_item(&fixture, 0, row - counts[i], counts[i], 0, 0, row);
        }
        CU_ASSERT_EQUAL(wrong_items(&fixture, items, ITEMS, 5), 0);
        CPA_ASSERT_ORDER(wrong_items(&fixture, items, 0, shape.length), >, 0); /* the same plan, without items */
        CU_ASSERT_EQUAL(wrong_items(&fixture, items, ITEMS, 11), 0);
        cpa_attend_fixture_destroy(&fixture);
    }
}

/* The keys in four calls, the first and the last of which some rows do not see at all. */
static void resumed_calls(void) {
    static const int64_t starts[] = {0, 590};
    for (int s = 0; s < 2; s++) {
        for (int base = 0; base < BASES; base++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_fixture fixture;
            cpa_attend_result result;
            shape.length = 600;
            shape.start = starts[s];
            cpa_attend_fixture_init(&fixture, &shape, 1);
            cpa_attend_result_init(&result, &fixture);
            fixture.padding = ROW_PADDING;
            const int64_t cuts[] = {0, 16, 16, 400, shape.length};
            for (int i = 0; i < 4; i++) {
                cpa_attend_item item = cpa_attend_fixture_item(&fixture, 0, 0, fixture.rows, 0, cuts[i], cuts[i + 1]);
                CU_ASSERT_EQUAL(cpa_attend_fixture_run(&fixture, &item, 1, i > 0, &result), CPA_OK);
            }
            cpa_narrow(result.out, result.o, shape.q_dtype, result.o_bytes / (int64_t)sizeof *result.o);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&fixture, 0, 7, &result, NULL), 0);
            cpa_attend_result_destroy(&result);
            cpa_attend_fixture_destroy(&fixture);
        }
    }
}

/* All rows without keys: O = 0 and LSE = -inf. Resumed they go on from a state of LSE = +inf, which is empty. */
static void expect_empty_state(cpa_attend_fixture *fixture, int resume) {
    cpa_attend_result result;
    cpa_attend_result_init(&result, fixture);
    for (int64_t i = 0; i < result.lse_bytes / (int64_t)sizeof *result.lse; i++) result.lse[i] = INFINITY;
    fixture->padding = ROW_PADDING;
    cpa_attend_item item = cpa_attend_fixture_item(fixture, 0, 0, fixture->rows, 0, 0, 0);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(fixture, &item, 1, resume, &result), CPA_OK);
    int64_t elements = result.o_bytes / (int64_t)sizeof *result.o, wrong = 0;
    const char *out = result.out;
    for (int64_t i = 0; i < elements; i++) wrong += result.o[i] != 0;
    for (int64_t i = 0; i < result.out_bytes && !resume; i++) wrong += out[i] != 0;
    for (int64_t i = 0; i < elements / fixture->shape.v_dim; i++) wrong += result.lse[i] != -INFINITY;
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_attend_result_destroy(&result);
}

/* From the empty state; and resumed. */
static void empty_shard_gives_the_empty_state(void) {
    static const int64_t starts[] = {0, 298};
    for (int turn = 0; turn < 2 * 2 * BASES; turn++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[turn & 1];
        cpa_attend_fixture fixture;
        shape.start = starts[turn >> 2];
        cpa_attend_fixture_init(&fixture, &shape, 1);
        expect_empty_state(&fixture, turn >> 1 & 1);
        cpa_attend_fixture_destroy(&fixture);
    }
}

static void empty_pool_gives_the_empty_state(void) {
    for (int width = 64; width <= 128; width += 64) {
        cpa_attend_case shape = CPA_ATTEND_BASE[1];
        cpa_attend_fixture fixture;
        shape.k_dim = shape.v_dim = width;
        cpa_attend_fixture_init(&fixture, &shape, 1);
        const cpa_kv_view pool = fixture.device_kv;
        fixture.device_kv.k = fixture.device_kv.v = NULL;
        fixture.device_kv.num_blocks = 0;
        expect_empty_state(&fixture, 0);
        fixture.device_kv = pool;
        cpa_attend_fixture_destroy(&fixture);
    }
}

static void rows_of_no_item_are_left_alone(void) {
    for (int base = 0; base < BASES; base++) {
        const cpa_attend_case *shape = &CPA_ATTEND_BASE[base];
        cpa_attend_fixture fixture;
        cpa_attend_result result, untouched;
        cpa_attend_fixture_init(&fixture, shape, 2);
        cpa_attend_result_init(&result, &fixture);
        cpa_attend_result_init(&untouched, &fixture);
        fixture.padding = ROW_PADDING;
        cpa_attend_item item = cpa_attend_fixture_item(&fixture, 0, 10, 20, 0, 0, fixture.k_tokens[0]);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&fixture, &item, 1, 0, &result), CPA_OK);
        int64_t row = (int64_t)shape->q_heads * shape->v_dim, bytes = row * (int64_t)sizeof(float);
        CU_ASSERT_EQUAL(memcmp(result.o, untouched.o, (size_t)(10 * bytes)), 0);
        CU_ASSERT_EQUAL(memcmp(result.o + 30 * row, untouched.o, (size_t)(270 * bytes)), 0);
        CU_ASSERT_EQUAL(memcmp(result.lse, untouched.lse, 10 * sizeof(float) * (size_t)shape->q_heads), 0);
        cpa_attend_result_destroy(&untouched);
        cpa_attend_result_destroy(&result);
        cpa_attend_fixture_destroy(&fixture);
    }
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"every pair of dtypes matches the reference", every_pair_of_dtypes},
        {"every width of heads matches the reference", every_width_of_heads},
        {"every grouping of heads matches the reference", every_grouping_of_heads},
        {"every block size and page order matches the reference", every_block_size_and_page_order},
        {"long sequences with ragged tails match the reference", long_sequences_with_ragged_tails},
        {"more tiles than a device runs at once match the reference", more_tiles_than_a_device_runs_at_once},
        {"shards of every rank count match the reference", shards_of_every_rank_count},
        {"queries of shards over the keys of all match the reference", queries_of_shards_over_the_keys_of_all},
        {"queries that are ready elsewhere match the reference", queries_that_are_ready_elsewhere},
        {"a plan counts the rows of q", a_plan_counts_the_rows_of_q},
        {"windows and sinks match the reference", windows_and_sinks},
        {"a scale of the caller matches the reference", scale_of_the_caller},
        {"few queries over many keys match the reference", few_queries_over_many_keys},
        {"one plan serves many attends", one_plan_serves_many_attends},
        {"narrow heads in odd and even numbers", narrow_heads_in_odd_and_even_numbers},
        {"batches of long and short items match the reference, plan after plan", ragged_batches},
        {"resumed calls match the reference", resumed_calls},
        {"an empty shard gives O = 0 and LSE = -inf whatever memory held", empty_shard_gives_the_empty_state},
        {"an empty pool gives O = 0 and LSE = -inf", empty_pool_gives_the_empty_state},
        {"rows of no item and padding are left alone", rows_of_no_item_are_left_alone},
    };
    int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    if (argc == 3 && strcmp(argv[1], "--case") == 0) return cpa_attend_case_main(argv[2]);
    whole = cpa_test_take_option(&argc, argv, "--whole") || !cpa_test_promises_bits();
    return cpa_test_main(argc, argv, "attend", tests, (int)(sizeof tests / sizeof tests[0]));
}
