/* Bad arguments of devices, plans and attend: refused with one line that holds the numbers, and nothing is touched. */
#include <string.h>

#include <cpattn/cpattn.h>

#include "src/ops/check_score.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

static const cpa_attend_case SHAPE = {.q_heads = 4,
                                      .kv_heads = 2,
                                      .k_dim = 16,
                                      .v_dim = 16,
                                      .block_size = 16,
                                      .cp_size = 2,
                                      .interleave = 16,
                                      .length = 70,
                                      .mask = {.causal = 1}};

/* A good batch with one item, and good arguments for it. */
typedef struct good {
    cpa_attend_fixture fixture;
    cpa_attend_result result;
    float *o, *lse; /* the state on the device, all NaN */
    void *out;
    cpa_attend_item item;
    cpa_attend_batch batch;
    cpa_attend_args args;
} good;

static void begin(good *g) {
    cpa_attend_fixture_init(&g->fixture, &SHAPE, 1);
    cpa_attend_result_init(&g->result, &g->fixture);
    g->item = cpa_attend_fixture_item(&g->fixture, 0, 0, g->fixture.q_count[0], 0, 0, g->fixture.k_tokens[0]);
    g->batch = (cpa_attend_batch){.size = sizeof g->batch,
                                  .map = g->fixture.map,
                                  .shape.q_heads = SHAPE.q_heads,
                                  .shape.kv_heads = SHAPE.kv_heads,
                                  .shape.k_dim = SHAPE.k_dim,
                                  .shape.v_dim = SHAPE.v_dim,
                                  .block_size = SHAPE.block_size,
                                  .items = &g->item,
                                  .n_items = 1,
                                  .block_tables = g->fixture.tables,
                                  .n_table_entries = g->fixture.n_table_entries};
    g->o = cpa_test_upload(g->fixture.stream, g->result.o, g->result.o_bytes);
    g->lse = cpa_test_upload(g->fixture.stream, g->result.lse, g->result.lse_bytes);
    g->out = cpa_test_upload(g->fixture.stream, g->result.out, g->result.out_bytes);
    g->args = (cpa_attend_args){.size = sizeof g->args,
                                .q = g->fixture.device_q,
                                .kv = g->fixture.device_kv,
                                .mask = SHAPE.mask,
                                .state = {.o = g->o, .lse = g->lse}};
}

static void end(good *g) {
    cpa_test_free(g->fixture.stream, g->out);
    cpa_test_free(g->fixture.stream, g->lse);
    cpa_test_free(g->fixture.stream, g->o);
    cpa_attend_result_destroy(&g->result);
    cpa_attend_fixture_destroy(&g->fixture);
}

/* The change to g->batch or g->item is refused with a line that holds `says`. */
static void refuse_plan(good *g, const char *says) {
    cpa_error err = {0};
    CU_ASSERT_EQUAL(cpa_attend_plan_set(g->fixture.plan, &g->batch, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(err.status, CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));
    end(g);
    begin(g);
}

static void refuse_attend(good *g, const char *says) {
    CU_ASSERT_EQUAL(cpa_attend_plan_set(g->fixture.plan, &g->batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend(g->fixture.plan, &g->args, g->fixture.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(g->fixture.stream), says));
    CU_ASSERT_EQUAL(cpa_stream_sync(g->fixture.stream), CPA_OK);
    cpa_test_download(g->fixture.stream, g->result.lse, g->lse, g->result.lse_bytes);
    CU_ASSERT_TRUE(g->result.lse[0] != g->result.lse[0]);
    end(g);
    begin(g);
}

static void bad_plans(void) {
    good g;
    begin(&g);
    g.batch.size = 8, refuse_plan(&g, "struct size is 8");
    g.batch.map.cp_size = 0, refuse_plan(&g, "cp_size 0");
    g.batch.shape.q_heads = 3, refuse_plan(&g, "q_heads is 3, expected a positive multiple of kv_heads, 2");
    g.batch.shape.kv_heads = 0, refuse_plan(&g, "kv_heads, 0");
    g.batch.shape.k_dim = 577, refuse_plan(&g, "k_dim is 577, expected 1..576");
    g.batch.shape.v_dim = 0, refuse_plan(&g, "v_dim is 0");
    g.batch.shape.reserved[0] = 9, refuse_plan(&g, "the reserved bytes of the shape");
    g.batch.block_size = 24, refuse_plan(&g, "block_size is 24");
    g.batch.items = NULL, refuse_plan(&g, "items is NULL");
    g.batch.block_tables = NULL, refuse_plan(&g, "block_tables is NULL");
    g.item.q_count = -1, refuse_plan(&g, "q_count -1");
    g.item.k_first = 8, refuse_plan(&g, "k_first 8");
    g.item.k_count = -2, refuse_plan(&g, "k_count -2");
    g.item.k_count = INT64_MAX, refuse_plan(&g, "table entries");
    g.item.table = g.batch.n_table_entries, refuse_plan(&g, "table entries");
    g.item.table = -1, refuse_plan(&g, "table entries [-1");
    g.item.q_set.shard = 2, refuse_plan(&g, "q_set.shard 2, expected 0..1");
    g.item.k_set.shard = -1, refuse_plan(&g, "k_set.shard -1");
    g.item.k_set.kind = CPA_TOKENS_NONE, refuse_plan(&g, "k_set.kind 3");
    g.item.k_set.kind = (cpa_token_set_kind)4, refuse_plan(&g, "k_set.kind 4");
    g.item.k_set = (cpa_token_set){CPA_TOKENS_OTHERS, 2}, refuse_plan(&g, "k_set.shard 2");
    g.item.q_set.kind = CPA_TOKENS_NONE, refuse_plan(&g, "q_set.kind 3");
    g.item.q_set.kind = CPA_TOKENS_OTHERS, refuse_plan(&g, "q_set.kind 1");
    g.item.q_set.kind = CPA_TOKENS_ALL, refuse_plan(&g, "expected all keys too");
    g.item.q_set.kind = CPA_TOKENS_ALL, g.item.k_set.kind = CPA_TOKENS_OTHERS, refuse_plan(&g, "k_set.kind 1");
    g.fixture.tables[0] = -7, refuse_plan(&g, "is -7");
    end(&g);
}

static void bad_attends(void) {
    good g;
    begin(&g);
    g.args.size = 0, refuse_attend(&g, "struct size is 0");
    g.args.q = NULL, refuse_attend(&g, "q is NULL");
    g.args.q_dtype = (cpa_dtype)9, refuse_attend(&g, "q_dtype is 9");
    g.args.q_row_stride = 63, refuse_attend(&g, "q_row_stride is 63, expected 0 or at least 64");
    g.args.kv.k = NULL, refuse_attend(&g, "the key pool is NULL");
    g.args.kv.block_size = 32, refuse_attend(&g, "block_size 32, but the plan has");
    g.args.kv.num_blocks = 1, refuse_attend(&g, "but the cache has 1 blocks");
    g.args.kv.k_token_stride = -16, refuse_attend(&g, "k_token_stride is -16");
    g.args.mask.window = -1, refuse_attend(&g, "window is -1");
    g.args.mask.sinks = -3, refuse_attend(&g, "sinks is -3");
    g.args.scale = 1.0f / 0.0f, refuse_attend(&g, "scale is inf");
    g.args.state.o = NULL, refuse_attend(&g, "state.o is NULL");
    g.args.state.o_row_stride = 1, refuse_attend(&g, "o_row_stride is 1");
    g.args.resume = 1, g.args.out = g.out, g.args.state.lse = NULL, refuse_attend(&g, "state.lse is NULL");
    end(&g);
}

/* Rules go by indices, which devices with memory of their own count in 32 bits from a query's: here the query of the
 * last row, and then a key, is at one past 2^30. */
static void rules_over_more_tokens_than_a_device_counts(void) {
    const float slopes[4] = {0};
    const uint32_t bits = 0;
    const int64_t row = 0;
    const int32_t width = 0;
    const cpa_score_rules alibi = {.alibi_slopes = slopes}, none = {.softcap = 2};
    const cpa_key_bits of = {.bits = &bits, .row_word = &row, .first = &row, .width = &width};
    const cpa_key_selection selection = {.bits = &of};
    const cpa_score_bias bias = {.width = 0};
    const int64_t half = (int64_t)1 << 29; /* of two shards: at 2^30 */
    good g;
    begin(&g);
    const int own_memory = g.fixture.device->caps.own_memory;
    for (int way = 0; way < 4; way++) {
        g.item.q_first = half + 1 - g.item.q_count;
        if (way == 3) g.item.q_first = 0, g.item.k_first = half / 16 * 16;
        g.args.rules = way == 0 || way == 3 ? &alibi : &none;
        g.args.selection = way == 1 ? &selection : NULL;
        g.args.bias = way == 2 ? &bias : NULL;
        CU_ASSERT_EQUAL(cpa_attend_plan_set(g.fixture.plan, &g.batch, NULL), CPA_OK);
        g.fixture.device->caps.own_memory = 1; /* the host has no such bound */
        CU_ASSERT_EQUAL(cpa_attend(g.fixture.plan, &g.args, g.fixture.stream), CPA_UNSUPPORTED);
        g.fixture.device->caps.own_memory = own_memory;
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(g.fixture.stream), "expected at most 2^30 on this device"));
        if (way < 3) CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(g.fixture.stream), "over 1073741825 tokens"));
        end(&g);
        begin(&g);
    }
    cpa_device device = {.caps.own_memory = 1};
    cpa_error err;
    CU_ASSERT_EQUAL(cpa_check_score_reach("attend", &device, 2 * half, &alibi, &selection, &bias, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_check_score_reach("attend", &device, 2 * half + 1, &none, NULL, NULL, &err), CPA_OK);
    end(&g);
}

static void plan_and_stream_of_different_devices(void) {
    good a, b;
    begin(&a);
    begin(&b);
    CU_ASSERT_EQUAL(cpa_attend(a.fixture.plan, &a.args, b.fixture.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(b.fixture.stream), "different devices"));
    end(&b);
    end(&a);
}

/* A plan that could not be set has nothing to attend, and can be set again. */
static void plan_recovers_from_a_bad_batch(void) {
    good g;
    begin(&g);
    g.item.q_count = -1;
    CU_ASSERT_EQUAL(cpa_attend_plan_set(g.fixture.plan, &g.batch, NULL), CPA_INVALID);
    g.item.q_count = g.fixture.q_count[0];
    CU_ASSERT_EQUAL(cpa_attend_plan_set(g.fixture.plan, &g.batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend(g.fixture.plan, &g.args, g.fixture.stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(g.fixture.stream), CPA_OK);
    end(&g);
}

static void bad_devices(void) {
    cpa_device *device = NULL;
    cpa_error err = {0};
    int32_t cpu = 1 << 20;
    cpa_device_options options = cpa_test_device_options(0);
    options.size--;
    CU_ASSERT_EQUAL(cpa_device_open(&options, &device, &err), CPA_INVALID);
    options.size = sizeof options;
    options.threads = -1;
    CU_ASSERT_EQUAL(cpa_device_open(&options, &device, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "threads is -1"));
    options.threads = 2;
    const int32_t cpus[2] = {0, 0};
    options.cpus = (const int32_t *)(const void *)((const char *)cpus + 1);
    options.n_cpus = 1;
    CU_ASSERT_EQUAL(cpa_device_open(&options, &device, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "device: cpus at "));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "not aligned to its elements of 4 bytes"));
    options.cpus = NULL;
    options.n_cpus = 0;
    if (options.backend == CPA_BACKEND_HOST) { /* it has threads to bind; CUDA has devices to choose from */
        options.cpus = &cpu;
        options.n_cpus = 1;
    } else {
        options.ordinal = 99;
    }
    CU_ASSERT_EQUAL(cpa_device_open(&options, &device, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, options.n_cpus ? "CPU 1048576" : "ordinal is 99"));
    CU_ASSERT_PTR_NULL(device);
}

static const cpa_test tests[] = {
    {"a bad batch is refused with its numbers", bad_plans},
    {"bad arguments of attend are refused with their numbers, and nothing is written", bad_attends},
    {"rules over more tokens than a device counts are refused", rules_over_more_tokens_than_a_device_counts},
    {"a plan and a stream of different devices are refused", plan_and_stream_of_different_devices},
    {"a plan that could not be set can be set again", plan_recovers_from_a_bad_batch},
    {"bad options of a device are refused, and nothing is left open", bad_devices},
};
CPA_DEVICE_TEST_MAIN("ops", tests)
