/* Misuse of the operators of an indexer, as test_misuse.c has it. */
#include "tests/fixtures/misuse.h"

enum { ROWS = 3, HEADS = 2, DIM = 8, BLOCK = 4, BLOCKS = 6, POSITIONS = 5, KEYS = 7 };
enum { BYTES = 4096 }; /* more than any tensor here has */

/* Zeros for each pointer of a call. */
enum { POINTERS = 9 };
static void *memory[POINTERS];
static void *next(int *used) {
    return memory[(*used)++];
}

static cpa_index_cache cache_at(void *pool) {
    return (cpa_index_cache){.kv = {.k = pool,
                                    .dtype = CPA_FP8_E4M3,
                                    .block_size = BLOCK,
                                    .num_blocks = BLOCKS,
                                    .kv_heads = 1,
                                    .k_dim = DIM,
                                    .v_dim = DIM,
                                    .v_in_k = 1}};
}
#define CACHE_MEMBERS(T)                                                                                               \
    M(T, cache.kv.k, POINTER), M(T, cache.kv.dtype, INT32), M(T, cache.kv.block_size, INT32),                          \
        M(T, cache.kv.num_blocks, INT64), M(T, cache.kv.kv_heads, INT32), M(T, cache.kv.k_dim, INT32),                 \
        M(T, cache.kv.v_dim, INT32), M(T, cache.kv.k_block_stride, INT64), M(T, cache.kv.k_token_stride, INT64),       \
        M(T, cache.kv.k_scale, INT32), M(T, cache.kv.layout, INT32), M(T, cache.kv.reserved[3], RESERVED),             \
        M(T, cache.hadamard, INT32), M(T, cache.reserved[0], RESERVED), M(T, cache.reserved[13], RESERVED)

RUN(index_write)

static void index_write(void) {
    typedef cpa_index_write_args T;
    static const member members[] = {
        M(T, tokens, INT64),       M(T, dtype, INT32),          M(T, k, POINTER),
        M(T, k_row_stride, INT64), M(T, gamma, POINTER),        M(T, beta, POINTER),
        M(T, eps, INT32),          M(T, rope.table, OPTIONAL),  M(T, rope.max_position, INT64),
        M(T, rope.dim, INT32),     M(T, rope.first, INT32),     M(T, rope.reserved[1], RESERVED),
        M(T, positions, POINTER),  M(T, slot_mapping, POINTER), CACHE_MEMBERS(T),
        M(T, floor, INT32),        M(T, scales_pow2, INT32),
    };
    int used = 0;
    T args = {.size = sizeof args,
              .tokens = ROWS,
              .k = next(&used),
              .gamma = next(&used),
              .beta = next(&used),
              .rope = {.table = next(&used), .max_position = POSITIONS, .dim = DIM},
              .positions = next(&used),
              .slot_mapping = next(&used),
              .cache = cache_at(next(&used))};
    misuse_all(&(call){"index_write", run_index_write, &args, sizeof args, MEMBERS(members), offsetof(T, floor)});
    args.tokens = 0;
    CU_ASSERT_EQUAL(cpa_index_write(&args, stream), CPA_OK);
}

RUN(index_q)

static void index_q(void) {
    typedef cpa_index_q_args T;
    static const member members[] = {
        M(T, tokens, INT64),
        M(T, heads, INT32),
        M(T, dim, INT32),
        M(T, dtype, INT32),
        M(T, q, POINTER),
        M(T, q_row_stride, INT64),
        M(T, rope.max_position, INT64),
        M(T, rope.dim, INT32),
        M(T, positions, POINTER),
        M(T, hadamard, INT32),
        M(T, format, INT32),
        M(T, out, POINTER),
        M(T, weight_dtype, INT32),
        M(T, softmax_scale, INT32),
        M(T, head_scale, INT32),
        M(T, floor, INT32),
    };
    static const member of_weights[] = {M(T, weights, POINTER), M(T, weight_row_stride, INT64),
                                        M(T, weights_out, POINTER)};
    int used = 0;
    T args = {.size = sizeof args,
              .tokens = ROWS,
              .heads = HEADS,
              .dim = DIM,
              .q = next(&used),
              .rope = {.table = next(&used), .max_position = POSITIONS, .dim = DIM},
              .positions = next(&used),
              .format = CPA_INDEX_BF16,
              .out = next(&used)};
    misuse_all(&(call){"index_q", run_index_q, &args, sizeof args, MEMBERS(members), offsetof(T, weights)});
    args.format = CPA_INDEX_FP8;
    args.weights = next(&used), args.weights_out = next(&used);
    misuse(&(call){"index_q", run_index_q, &args, sizeof args, MEMBERS(of_weights), sizeof args});
    args.format = CPA_INDEX_MXFP4, args.scales = next(&used);
    CU_ASSERT_EQUAL(cpa_index_q(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "index_q: dim is 8, expected a multiple of the 32 elements that share a scale");
}

static cpa_index_plan *plan;
static cpa_status run_index_logits(const void *args, cpa_stream *on) {
    return cpa_index_logits(plan, args, on);
}

static cpa_attend_batch batch_of(const cpa_attend_item *item) {
    static const int32_t tables[] = {1, 2};
    return (cpa_attend_batch){.size = sizeof(cpa_attend_batch),
                              .map = {1, 1},
                              .shape = {.q_heads = 1, .kv_heads = 1, .k_dim = DIM, .v_dim = DIM},
                              .block_size = BLOCK,
                              .items = item,
                              .n_items = 1,
                              .block_tables = tables,
                              .n_table_entries = 2};
}

static void index_logits(void) {
    typedef cpa_index_logits_args T;
    static const member members[] = {
        M(T, heads, INT32),      M(T, q_row_stride, INT64), M(T, weights, POINTER), M(T, weight_row_stride, INT64),
        M(T, hadamard, INT32),   CACHE_MEMBERS(T),          M(T, logits, POINTER),  M(T, width, INT64),
        M(T, row_stride, INT64), M(T, unit, INT32),
    };
    const cpa_attend_item item = {.q_count = ROWS, .q_first = 4, .k_count = KEYS};
    const cpa_attend_batch batch = batch_of(&item);
    int used = 0;
    T args = {.size = sizeof args,
              .heads = HEADS,
              .q = next(&used),
              .weights = next(&used),
              .cache = cache_at(next(&used)),
              .logits = next(&used),
              .width = KEYS};
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_set(plan, &batch, 1, NULL), CPA_OK);
    misuse_all(
        &(call){"index_logits", run_index_logits, &args, sizeof args, MEMBERS(members), offsetof(T, row_stride)});
    CU_ASSERT_EQUAL(cpa_index_logits(NULL, &args, stream), CPA_INVALID);
    args.q = NULL; /* of bytes, which lie anywhere */
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &args, stream), CPA_INVALID);
    cpa_index_plan_destroy(plan);
}

/* What a batch may not say is what an attend plan refuses too; and keys of several tokens. */
static void index_plan(void) {
    cpa_attend_item item = {.q_count = ROWS, .q_first = 4, .k_count = KEYS};
    cpa_attend_batch batch = batch_of(&item);
    cpa_error err = {0};
    CU_ASSERT_EQUAL(cpa_index_plan_create(NULL, &plan, &err), CPA_INVALID);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_index_plan_set(NULL, &batch, 1, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_index_plan_set(plan, NULL, 1, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_index_plan_set(plan, &batch, 0, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "index plan: tokens_per_key is 0, expected a divisor of the interleave, 1");
    batch.map = (cpa_owner_map){2, 6};
    item.q_set.shard = 1;
    CU_ASSERT_EQUAL(cpa_index_plan_set(plan, &batch, 4, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "index plan: tokens_per_key is 4, expected a divisor of the interleave, 6");
    CU_ASSERT_EQUAL(cpa_index_plan_set(plan, &batch, 3, &err), CPA_OK);
    item.k_count = 9;
    CU_ASSERT_EQUAL(cpa_index_plan_set(plan, &batch, 3, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "attend plan: items[0] uses table entries [0, +3) of 2");
    batch.n_items = 0;
    CU_ASSERT_EQUAL(cpa_index_plan_set(plan, &batch, 3, &err), CPA_OK);
    cpa_index_plan_destroy(plan);
    cpa_index_plan_destroy(NULL);
}

static const cpa_test tests[] = {
    {"index_write", index_write},
    {"index_q", index_q},
    {"index_logits", index_logits},
    {"index_plan", index_plan},
};

static void take_memory(void) {
    for (int i = 0; i < POINTERS; i++) memory[i] = zeros(BYTES);
}

static void free_memory(void) {
    for (int i = 0; i < POINTERS; i++) cpa_test_free(stream, memory[i]);
}

int main(int argc, char **argv) {
    return misuse_main(argc, argv, "misuse of an indexer", tests, (int)(sizeof tests / sizeof *tests), take_memory,
                       free_memory);
}
