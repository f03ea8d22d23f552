/* Attention whose keys lie on the host and come through a ring of segments: on the host the bits of attention over keys
 * that lie on the device, on devices within the tolerance of the float64 reference. What copies read, and what of the
 * device's memory is taken, is counted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/ring_fixture.h"
#include "tests/fixtures/unit.h"

static void check_case(const cpa_attend_case *shape, int what, int32_t segments, int64_t least) {
    cpa_ring_site s;
    cpa_ring_site_open(&s, shape, segments, least);
    cpa_case_score score = cpa_test_score_of(&s.f, what);
    s.f.score = what ? &score : NULL;
    s.f.resumed_out = 1;
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        s.f.padding = slot % 2 ? 6 : 0;
        cpa_ring_site_check(&s.f, slot, 0, 61);
    }
    cpa_case_score_release(&score);
    cpa_ring_site_close(&s);
}

/* So many tokens of a base, of which the last `rows` are queries. */
static cpa_attend_case of_base(int base, int64_t length, int64_t rows) {
    cpa_attend_case shape = CPA_ATTEND_BASE[base];
    shape.length = length;
    shape.start = length - rows;
    if (shape.mask.window) shape.mask.window = length / 2;
    return shape;
}

/* ---- results ---- */

enum { LENGTH = 5001 };

static void prompts_have_the_results_of_keys_on_the_device(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        const cpa_attend_case shape = of_base(base, LENGTH, 300);
        check_case(&shape, 0, 2, 1);
    }
}

/* Rows that lie before keys of most passes, and see none of them, but for the last mask. */
static void rows_before_the_keys_of_a_pass_do(void) {
    static const cpa_mask masks[] = {
        {.causal = 1}, {.causal = 1, .window = 700, .sinks = 3}, {.causal = 0, .right = 900}, {.causal = 0}};
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        cpa_attend_case shape = of_base(i % 2, 3 * LENGTH / 4, 3 * LENGTH / 4);
        shape.mask = masks[i];
        shape.q_heads = shape.kv_heads = 2;
        check_case(&shape, 0, 2, 1);
        check_case(&shape, CPA_TEST_SINKS, 3, 1);
    }
}

static void decode_and_drafts_do(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        const cpa_attend_case one = of_base(base, LENGTH, 1), some = of_base(base, LENGTH - 40, 5);
        check_case(&one, 0, 3, 1);
        check_case(&some, 0, 2, 2);
    }
}

static void shards_do(void) {
    for (int32_t ranks = 2; ranks <= 3; ranks++) {
        cpa_attend_case shape = of_base(1, 3 * LENGTH, 70);
        shape.cp_size = ranks;
        shape.interleave = 32;
        check_case(&shape, 0, 2, 1);
        shape.interleave = 4; /* runs shorter than blocks */
        check_case(&shape, 0, 2, 1);
    }
}

static void other_caches_do(void) {
    cpa_attend_case codes = of_base(1, LENGTH, 90), heads = codes, latents = codes, runs = codes, packed = codes;
    codes.kv_dtype = CPA_FP8_E4M3;
    check_case(&codes, 0, 2, 1);
    codes.k_scale = 0.02f, codes.v_scale = 0.03f;
    check_case(&codes, 0, 2, 1);
    codes.k_scale = codes.v_scale = 0, codes.n_scales = codes.kv_heads;
    check_case(&codes, 0, 2, 1);
    heads.head_major = 1;
    check_case(&heads, 0, 2, 1);
    runs.layout = CPA_VLLM_X;
    check_case(&runs, 0, 2, 1);
    packed.kv_dtype = CPA_TQ_4BIT;
    check_case(&packed, 0, 2, 1);
    latents.kv_heads = 1, latents.k_dim = 192, latents.v_dim = 128, latents.v_in_k = 1, latents.scale = 0.07f;
    check_case(&latents, 0, 2, 1);
}

static void score_rules_do(void) {
    const int rules[] = {CPA_TEST_SOFTCAP | CPA_TEST_SINKS, CPA_TEST_ALIBI | CPA_TEST_TEMPERATURE, CPA_TEST_WHOLE_MASK,
                         CPA_TEST_BLOCKS, CPA_TEST_LISTS};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const cpa_attend_case shape = of_base(1, LENGTH / 2, 40);
        check_case(&shape, rules[i], 2, 1);
    }
}

static void resumed_states_do(void) {
    for (int base = 0; base < 2; base++) {
        cpa_ring_site s;
        const cpa_attend_case shape = of_base(base, LENGTH, 80);
        cpa_ring_site_open(&s, &shape, 2, 1);
        const int64_t split = cpa_attend_split_tokens(s.f.device), block = shape.block_size;
        for (int with_out = 0; with_out < 2; with_out++) {
            s.f.resumed_out = with_out;
            if (with_out && !cpa_test_promises_bits()) continue; /* what the state holds then is not said */
            cpa_ring_site_check(&s.f, 0, split > block ? 2 * split : 19 * block, 7);
        }
        cpa_ring_site_close(&s);
    }
}

/* ---- what is counted ---- */

static int64_t block_bytes(const cpa_ring_site *s) {
    const cpa_kv_view *kv = &s->f.host_kv;
    return (int64_t)kv->block_size * kv->kv_heads * (kv->k_dim + kv->v_dim) * cpa_dtype_bytes(kv->dtype);
}

static void a_pass_reads_the_context_once(void) {
    cpa_ring_site s;
    cpa_attend_result result;
    const cpa_attend_case shape = of_base(0, LENGTH, 1);
    cpa_ring_site_open(&s, &shape, 2, 1);
    cpa_attend_result_init(&result, &s.f);
    s.f.again = 2;
    cpa_ring_site_run(&s.f, 0, 0, &result);
    const int64_t blocks = (LENGTH + shape.block_size - 1) / shape.block_size;
    const cpa_kv_ring_stats stats = cpa_ring_site_stats(&s);
    CU_ASSERT_EQUAL(stats.bytes_read, 3 * blocks * block_bytes(&s));
    CU_ASSERT_EQUAL(stats.timed_bytes, stats.bytes_read);
    CU_ASSERT(stats.copy_s > 0 && stats.waited_s >= 0);
    CPA_ASSERT_ORDER(stats.passes, >=, 3 * LENGTH / stats.segment_tokens);
    cpa_attend_result_destroy(&result);
    cpa_ring_site_close(&s);
}

static void keys_that_no_row_sees_are_not_read(void) {
    cpa_ring_site s;
    cpa_attend_result result;
    cpa_attend_case shape = of_base(0, LENGTH, 1);
    shape.mask = (cpa_mask){.causal = 1, .window = 100};
    cpa_ring_site_open(&s, &shape, 2, 1);
    cpa_attend_result_init(&result, &s.f);
    cpa_ring_site_run(&s.f, 0, 0, &result);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&s.f, 0, 1, &result, NULL), 0);
    CPA_ASSERT_ORDER(cpa_ring_site_stats(&s).passes, <=, 2);
    cpa_attend_result_destroy(&result);
    cpa_ring_site_close(&s);
}

/* Two rows of one sequence, each an item over all of its keys, which fit a segment together only as they share them. */
static void items_of_a_pass_share_blocks(void) {
    cpa_ring_site s;
    cpa_attend_result result;
    const cpa_attend_case shape = of_base(0, 1000, 2);
    cpa_ring_site_open(&s, &shape, 2, 9);
    cpa_attend_result_init(&result, &s.f);
    const cpa_attend_item items[] = {cpa_attend_fixture_item(&s.f, 0, 0, 1, 0, 0, 999),
                                     cpa_attend_fixture_item(&s.f, 0, 1, 1, 0, 0, 1000)};
    CPA_ASSERT_ORDER(cpa_ring_site_stats(&s).segment_tokens, >=, 2 * 1000 + 64);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&s.f, items, 2, 0, &result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&s.f, 0, 1, &result, NULL), 0);
    CU_ASSERT_EQUAL(cpa_ring_site_stats(&s).passes, 1);
    CU_ASSERT_EQUAL(cpa_ring_site_stats(&s).bytes_read, 63 * block_bytes(&s));
    cpa_attend_result_destroy(&result);
    cpa_ring_site_close(&s);
}

/* ---- memory of the device ---- */

/* A caller's memory, which is that of another device, and the most of it that was taken at once. */
enum { MOST_ALLOCATIONS = 4096 };
typedef struct counted_memory {
    cpa_device *device;
    void *memory[MOST_ALLOCATIONS];
    int64_t bytes[MOST_ALLOCATIONS], now, peak;
} counted_memory;

static void *count_alloc(void *ctx, int64_t bytes) {
    counted_memory *m = ctx;
    int i = 0;
    while (m->memory[i]) i++;
    if (i + 1 == MOST_ALLOCATIONS || cpa_device_alloc(m->device, bytes, &m->memory[i], NULL) != CPA_OK) return NULL;
    m->bytes[i] = bytes;
    m->now += bytes;
    if (m->now > m->peak) m->peak = m->now;
    return m->memory[i];
}

static void count_free(void *ctx, void *memory) {
    counted_memory *m = ctx;
    int i = 0;
    while (memory && m->memory[i] != memory) i++;
    if (!memory) return;
    m->now -= m->bytes[i];
    m->memory[i] = NULL;
    cpa_device_free(m->device, memory);
}

enum { TOKENS = 1 << 16, LARGE_BLOCK = 64, BLOCKS = TOKENS / LARGE_BLOCK, HEADS = 2, DIM = 128 };

static const cpa_attention_shape LARGE = {
    .q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .dtype = CPA_BF16, .kv_dtype = CPA_BF16};

/* One row over TOKENS keys, zeros in a pool of so many bytes on the host. */
static void decode_large(cpa_kv_ring *ring, cpa_stream *stream, char *pool, int64_t bytes, void *q_and_out) {
    static int32_t table[BLOCKS];
    cpa_ring_plan *plan;
    for (int32_t i = 0; i < BLOCKS; i++) table[i] = BLOCKS - 1 - i;
    const cpa_attend_item item = {.q_count = 1, .q_first = TOKENS - 1, .k_count = TOKENS};
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {1, LARGE_BLOCK},
                                    .shape = LARGE,
                                    .block_size = LARGE_BLOCK,
                                    .items = &item,
                                    .n_items = 1,
                                    .block_tables = table,
                                    .n_table_entries = BLOCKS};
    cpa_kv_view kv = cpa_kv_view_of(&LARGE, LARGE_BLOCK, BLOCKS);
    kv.k = pool;
    kv.v = pool + bytes / 2;
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = q_and_out,
                                  .q_dtype = CPA_BF16,
                                  .kv = kv,
                                  .mask = {.causal = 1},
                                  .out = (char *)q_and_out + HEADS * DIM * 2};
    CU_ASSERT_EQUAL_FATAL(cpa_ring_plan_create(ring, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_ring_plan_set(plan, &batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_ring_attend(plan, &args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_ring_plan_destroy(plan);
}

/* 64K tokens of 1 KiB decoded through a ring of a sixteenth of them: of the device's memory that is taken, and what plans
 * take. */
static void the_ring_bounds_the_memory_of_the_device(void) {
    static counted_memory memory;
    static const float zeros[HEADS * DIM];
    const int64_t bytes = (int64_t)TOKENS * HEADS * 2 * DIM * 2, ring_bytes = bytes / 16, plans = 4 << 20;
    cpa_device *device;
    cpa_stream *plain, *stream;
    cpa_kv_ring *ring;
    void *pool;
    cpa_test_device_open(1, &memory.device, &plain);
    cpa_device_options options = cpa_test_device_options(1);
    options.memory = (cpa_allocator){count_alloc, count_free, &memory};
    CU_ASSERT_EQUAL_FATAL(cpa_device_open(&options, &device, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_stream_create(device, &stream, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(device->table->alloc_host(device, bytes, &pool, NULL), CPA_OK);
    memset(pool, 0, (size_t)bytes);
    const cpa_kv_ring_options o = {.size = sizeof o, .shape = LARGE, .block_size = LARGE_BLOCK, .bytes = ring_bytes};
    CU_ASSERT_EQUAL_FATAL(cpa_kv_ring_create(device, &o, &ring, NULL), CPA_OK);
    void *q_and_out = cpa_test_upload(plain, zeros, sizeof zeros);
    decode_large(ring, stream, pool, bytes, q_and_out);
    CPA_ASSERT_ORDER(memory.peak, >=, ring_bytes / 2);
    CPA_ASSERT_ORDER(memory.peak, <=, ring_bytes + plans);
    cpa_test_free(plain, q_and_out);
    cpa_kv_ring_destroy(ring);
    device->table->free_host(device, pool);
    cpa_stream_destroy(stream);
    cpa_device_close(device);
    CU_ASSERT_EQUAL(memory.now, 0);
    cpa_test_device_close(memory.device, plain);
}

/* ---- refusals ---- */

static void expect_line(cpa_status status, cpa_status expected, const char *line, const char *found) {
    CU_ASSERT_EQUAL(status, expected);
    if (strcmp(line, found) != 0) printf("\n    '%s', expected '%s'", found, line);
    CU_ASSERT_EQUAL(strcmp(line, found), 0);
}

static void options_that_make_no_ring_are_refused(void) {
    cpa_ring_site s;
    cpa_error err;
    cpa_kv_ring *none = NULL;
    char line[256];
    const cpa_attend_case shape = of_base(1, 300, 10);
    cpa_ring_site_open(&s, &shape, 2, 1);
    cpa_kv_ring_options o = cpa_ring_site_options(&s.f, 1);
    expect_line(cpa_kv_ring_create(s.f.device, &o, &none, &err), CPA_INVALID, "ring: 1 segments, expected 2..8",
                err.message);
    CU_ASSERT_EQUAL(cpa_kv_ring_least_bytes(s.f.device, &o), 0);
    o = cpa_ring_site_options(&s.f, 3);
    const int64_t least = cpa_kv_ring_least_bytes(s.f.device, &o);
    o.bytes = least - 1;
    snprintf(line, sizeof line, "ring: bytes is %lld, expected at least %lld: 3 segments of %lld tokens",
             (long long)o.bytes, (long long)least, (long long)s.ring->step);
    expect_line(cpa_kv_ring_create(s.f.device, &o, &none, &err), CPA_INVALID, line, err.message);
    CU_ASSERT_PTR_NULL(none);
    cpa_ring_site_close(&s);
}

static void what_a_ring_cannot_take_is_refused(void) {
    cpa_ring_site s;
    cpa_error err;
    const cpa_attend_case shape = of_base(1, 300, 10);
    cpa_ring_site_open(&s, &shape, 2, 1);
    const cpa_attend_item item = cpa_attend_fixture_item(&s.f, 0, 0, 10, 0, 0, 300);
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = s.f.map,
                              .shape = s.ring->options.shape,
                              .block_size = 16,
                              .items = &item,
                              .n_items = 1,
                              .block_tables = s.f.tables,
                              .n_table_entries = s.f.n_table_entries,
                              .block_tables_on_device = 1,
                              .num_blocks = s.f.host_kv.num_blocks};
    cpa_attend_args args = {
        .size = sizeof args, .q = s.f.device_q, .q_dtype = CPA_BF16, .kv = s.f.host_kv, .out = s.f.device_q};
    expect_line(cpa_ring_attend(s.f.ring_plan, &args, s.f.stream), CPA_INVALID, "attend: the plan has not been set",
                cpa_stream_error(s.f.stream));
    expect_line(cpa_ring_plan_set(s.f.ring_plan, &batch, &err), CPA_INVALID,
                "ring plan: block_tables_on_device is 1, expected tables on the host", err.message);
    batch.block_tables_on_device = 0;
    CU_ASSERT_EQUAL(cpa_ring_plan_set(s.f.ring_plan, &batch, &err), CPA_OK);
    args.kv.k_token_stride = 2 * args.kv.kv_heads * args.kv.k_dim;
    args.kv.k_block_stride = 16 * args.kv.k_token_stride;
    expect_line(cpa_ring_attend(s.f.ring_plan, &args, s.f.stream), CPA_UNSUPPORTED,
                "attend: blocks of keys on the host have strides of tokens and heads of 512 and 128 elements, expected "
                "blocks in one piece",
                cpa_stream_error(s.f.stream));
    CU_ASSERT_EQUAL(cpa_ring_site_stats(&s).passes, 0);
    cpa_ring_site_close(&s);
}

static const cpa_test tests[] = {
    {"prompts have the results of keys on the device", prompts_have_the_results_of_keys_on_the_device},
    {"rows before the keys of a pass do", rows_before_the_keys_of_a_pass_do},
    {"decode and drafts do", decode_and_drafts_do},
    {"shards do", shards_do},
    {"other caches do", other_caches_do},
    {"score rules do", score_rules_do},
    {"resumed states do", resumed_states_do},
    {"a pass reads the context once", a_pass_reads_the_context_once},
    {"keys that no row sees are not read", keys_that_no_row_sees_are_not_read},
    {"items of a pass share blocks", items_of_a_pass_share_blocks},
    {"the ring bounds the memory of the device", the_ring_bounds_the_memory_of_the_device},
    {"options that make no ring are refused", options_that_make_no_ring_are_refused},
    {"what a ring cannot take is refused", what_a_ring_cannot_take_is_refused},
};
CPA_DEVICE_TEST_MAIN("kv_ring", tests)
