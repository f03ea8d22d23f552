/* Misuse of operators: every pointer NULL or misaligned in turn, every number extreme, every size of a struct. None may
 * crash, read out of bounds or overflow, and what is refused is refused with a line. */
#include <math.h>

#include "tests/fixtures/misuse.h"

enum { HEADS = 2, DIM = 8, BLOCK = 4, BLOCKS = 6, TOKENS = 5, ROW = HEADS * DIM };

/* ---- the calls ---- */

static cpa_kv_view view_of(float *k, float *v) {
    return (cpa_kv_view){
        .k = k, .v = v, .block_size = BLOCK, .num_blocks = BLOCKS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM};
}

static cpa_kv_view make_view(void) {
    const int64_t bytes = BLOCKS * BLOCK * ROW * (int64_t)sizeof(float);
    return view_of(zeros(bytes), zeros(bytes));
}

static void free_view(cpa_kv_view view) {
    cpa_test_free(stream, view.v);
    cpa_test_free(stream, view.k);
}

RUN(kv_write)

static void kv_write(void) {
    typedef cpa_kv_write_args T;
    static const member members[] = {M(T, tokens, INT64),       M(T, dtype, INT32),          M(T, k, POINTER),
                                     M(T, v, POINTER),          M(T, slot_mapping, POINTER), VIEW_MEMBERS(T, kv),
                                     M(T, k_row_stride, INT64), M(T, v_row_stride, INT64),   M(T, k_head_stride, INT64),
                                     M(T, v_head_stride, INT64)};
    const int64_t slots[TOKENS] = {3, 4, -1, 0, 23};
    void *rows = zeros(TOKENS * ROW * (int64_t)sizeof(float)), *mapping = cpa_test_upload(stream, slots, sizeof slots);
    T args = {sizeof args, TOKENS, CPA_F32, rows, rows, mapping, make_view(), NULL, 0, 0, 0, 0};
    misuse_all(&(call){"kv_write", run_kv_write, &args, sizeof args, MEMBERS(members), offsetof(T, nonfinite)});
    free_view(args.kv);
    cpa_test_free(stream, mapping);
    cpa_test_free(stream, rows);
}

RUN(kv_move)

static void kv_move(void) {
    typedef cpa_kv_move_args T;
    static const member members[] = {VIEW_MEMBERS(T, src), VIEW_MEMBERS(T, dst), M(T, n, INT64), M(T, slots, POINTER)};
    const int64_t slots[3][2] = {{0, 5}, {5, 0}, {-1, 5}};
    void *pairs = cpa_test_upload(stream, slots, sizeof slots);
    T args = {sizeof args, make_view(), make_view(), (const int64_t(*)[2])pairs, 2};
    misuse_all(&(call){"kv_move", run_kv_move, &args, sizeof args, MEMBERS(members), sizeof args});
    args.n = CPA_KV_MOVE_MOST + 1;
    CU_ASSERT_EQUAL(cpa_kv_move(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "kv_move: n is 2049, expected 0 to 2048");
    free_view(args.dst);
    free_view(args.src);
    cpa_test_free(stream, pairs);
}

RUN(kv_copy)

static void kv_copy(void) {
    typedef cpa_kv_copy_args T;
    static const member members[] = {VIEW_MEMBERS(T, src), VIEW_MEMBERS(T, dst), M(T, n_pairs, INT64),
                                     M(T, pairs, POINTER)};
    int64_t pairs[2][2] = {{0, 1}, {5, 2}};
    T args = {sizeof args, make_view(), make_view(), (const int64_t(*)[2])pairs, 2};
    misuse_all(&(call){"kv_copy", run_kv_copy, &args, sizeof args, MEMBERS(members), sizeof args});
    args.pairs = NULL;
    CU_ASSERT_EQUAL(cpa_kv_copy(&args, stream), CPA_INVALID);
    args.pairs = (const int64_t(*)[2])pairs;
    pairs[1][1] = 1;
    CU_ASSERT_EQUAL(cpa_kv_copy(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "kv_copy: pairs[0] and pairs[1] both have the destination 1");
    pairs[1][1] = 0;
    CU_ASSERT_EQUAL(cpa_kv_copy(&args, stream), CPA_OK);
    cpa_kv_view dst = args.dst;
    args.dst = args.src;
    CU_ASSERT_EQUAL(cpa_kv_copy(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "kv_copy: pairs[0] reads block 0, which pairs[1] writes in the same pool");
    free_view(dst);
    free_view(args.src);
}

RUN(kv_convert)

static void kv_convert(void) {
    typedef cpa_kv_convert_args T;
    static const member members[] = {VIEW_MEMBERS(T, src), VIEW_MEMBERS(T, dst), M(T, n_pairs, INT64),
                                     M(T, pairs, POINTER)};
    int64_t pairs[2][2] = {{0, 1}, {5, 2}};
    T args = {sizeof args, make_view(), make_view(), (const int64_t(*)[2])pairs, 2};
    misuse_all(&(call){"kv_convert", run_kv_convert, &args, sizeof args, MEMBERS(members), sizeof args});
    cpa_kv_view dst = args.dst;
    args.dst = args.src;
    CU_ASSERT_EQUAL(cpa_kv_convert(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "kv_convert: src and dst have the same key pool, expected two");
    free_view(dst);
    free_view(args.src);
}

RUN(kv_pack)

static cpa_kv_range packed_range;
static cpa_status run_range(const void *range, cpa_stream *on) {
    cpa_kv_pack_args args;
    if (!range) return CPA_INVALID;
    memcpy(&args, (const char *)range + sizeof packed_range, sizeof args);
    memcpy(&packed_range, range, sizeof packed_range);
    return cpa_kv_pack(&args, on);
}

static void kv_pack(void) {
    typedef cpa_kv_pack_args T;
    static const member members[] = {VIEW_MEMBERS(T, src), VIEW_MEMBERS(T, dst), M(T, n_ranges, INT64),
                                     M(T, ranges, POINTER), M(T, block_tables, POINTER)};
    static const member range_members[] = {M(cpa_kv_range, table, INT64), M(cpa_kv_range, first, INT64),
                                           M(cpa_kv_range, count, INT64), M(cpa_kv_range, dst_block, INT64),
                                           M(cpa_kv_range, reserved[3], RESERVED)};
    int32_t table[3] = {5, 0, 2};
    cpa_kv_range ranges[2] = {{.table = 1, .first = 4, .count = 4, .dst_block = 1}, {.count = 7, .dst_block = 2}};
    T args = {sizeof args, make_view(), make_view(), table, 3, ranges, 2};
    call c = {"kv_pack", run_kv_pack, &args, sizeof args, MEMBERS(members), sizeof args};
    misuse_all(&c);
    const int64_t bad[] = {INT64_MIN, -1, 2};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        args.n_table_entries = bad[i];
        CU_ASSERT_EQUAL(cpa_kv_pack(&args, stream), CPA_INVALID);
    }
    args.n_table_entries = 3;
    args.block_tables = NULL;
    CU_ASSERT_EQUAL(cpa_kv_pack(&args, stream), CPA_INVALID);
    args.block_tables = table;
    args.ranges = NULL;
    CU_ASSERT_EQUAL(cpa_kv_pack(&args, stream), CPA_INVALID);
    args.ranges = ranges;
    ranges[1].dst_block = 0;
    CU_ASSERT_EQUAL(cpa_kv_pack(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "kv_pack: ranges[1] and ranges[0] both have staging block 1");
    cpa_kv_view own = args.dst;
    args.dst = args.src;
    CU_ASSERT_EQUAL(cpa_kv_pack(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "kv_pack: src and dst have the same key pool, expected two");
    args.dst = own;

    struct {
        cpa_kv_range range;
        T args;
    } one = {ranges[0], args};
    one.args.ranges = &packed_range;
    one.args.n_ranges = 1;
    call of_range = {"kv_range",       run_range,     &one,
                     sizeof one.range, range_members, sizeof range_members / sizeof *members,
                     sizeof(one)};
    misuse(&of_range);
    free_view(args.dst);
    free_view(args.src);
}

/* A plan over a small cache. */
typedef struct planned {
    int32_t table[2];
    cpa_attend_item items[2];
    cpa_attend_batch batch;
    cpa_attend_plan *plan;
} planned;

static void make_planned(planned *p) {
    plan_error = (cpa_error){0};
    *p = (planned){.table = {1, 4},
                   .items = {{.q_count = 1, .q_row = 2, .k_count = 6},
                             {.q_count = 2, .q_first = 3, .k_count = 5, .k_set = {CPA_TOKENS_ALL, 0}}}};
    p->batch = (cpa_attend_batch){.size = sizeof p->batch,
                                  .map = {2, 4},
                                  .shape = {.q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM},
                                  .block_size = BLOCK,
                                  .items = p->items,
                                  .n_items = 2,
                                  .block_tables = p->table,
                                  .n_table_entries = 2};
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &p->plan, NULL), CPA_OK);
}

static planned shared_plan;
static cpa_status run_plan_set(const void *batch, cpa_stream *on) {
    return on ? cpa_attend_plan_set(shared_plan.plan, batch, &plan_error) : CPA_INVALID;
}

static void plan_set(void) {
    typedef cpa_attend_batch T;
    static const member members[] = {M(T, map.cp_size, INT32),
                                     M(T, map.interleave, INT32),
                                     M(T, shape.q_heads, INT32),
                                     M(T, shape.kv_heads, INT32),
                                     M(T, shape.k_dim, INT32),
                                     M(T, shape.v_dim, INT32),
                                     M(T, block_size, INT32),
                                     M(T, shape.kv_dtype, INT32),
                                     M(T, shape.dtype, INT32),
                                     M(T, shape.layout, INT32),
                                     M(T, shape.k_scale, INT32),
                                     M(T, shape.v_in_k, INT32),
                                     M(T, shape.reserved[0], RESERVED),
                                     M(T, shape.n_scales, INT32),
                                     M(T, n_items, INT64),
                                     M(T, items, POINTER),
                                     M(T, block_tables, POINTER),
                                     M(T, block_tables_on_device, INT32),
                                     M(T, num_blocks, INT64)};
    make_planned(&shared_plan);
    T *batch = &shared_plan.batch;
    misuse_all(
        &(call){"plan_set", run_plan_set, batch, sizeof *batch, MEMBERS(members), offsetof(T, cascade_attention)});
    CU_ASSERT_EQUAL(cpa_attend_plan_set(NULL, batch, NULL), CPA_INVALID);
    batch->shape.kv_dtype = (cpa_dtype)77;
    CU_ASSERT_EQUAL(cpa_attend_plan_set(shared_plan.plan, batch, NULL), CPA_INVALID);
    batch->shape.kv_dtype = CPA_F32;

    const int64_t entries[] = {INT64_MIN, -1, 1};
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        batch->n_table_entries = entries[i];
        CU_ASSERT_EQUAL(cpa_attend_plan_set(shared_plan.plan, batch, NULL), CPA_INVALID);
    }
    batch->n_table_entries = 2;
    batch->cascade_attention = (cpa_cascade_attention)3;
    CU_ASSERT_EQUAL(cpa_attend_plan_set(shared_plan.plan, batch, NULL), CPA_INVALID);
    batch->cascade_attention = CPA_CASCADE_AUTO;
    cpa_attend_plan_destroy(shared_plan.plan);
}

static cpa_status run_item(const void *item, cpa_stream *on) {
    return item && on ? cpa_attend_plan_set(shared_plan.plan, &shared_plan.batch, &plan_error) : CPA_INVALID;
}

static void items(void) {
    typedef cpa_attend_item T;
    static const member members[] = {
        M(T, q_row, INT64),   M(T, q_count, INT64),     M(T, q_first, INT64),        M(T, k_first, INT64),
        M(T, k_count, INT64), M(T, table, INT64),       M(T, q_set, INT32),          M(T, q_set.shard, INT32),
        M(T, k_set, INT32),   M(T, k_set.shard, INT32), M(T, reserved[0], RESERVED), M(T, reserved[3], RESERVED)};
    make_planned(&shared_plan);
    cpa_error err = {0};
    call c = {"item", run_item, &shared_plan.items[0], sizeof(T), MEMBERS(members), sizeof(T)};
    misuse(&c);
    shared_plan.items[0].q_row = 1;
    CU_ASSERT_EQUAL(cpa_attend_plan_set(shared_plan.plan, &shared_plan.batch, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "attend plan: items[1] and items[0] both have row 1");
    cpa_attend_plan_destroy(shared_plan.plan);
}

static cpa_status run_attend(const void *args, cpa_stream *on) {
    return cpa_attend(shared_plan.plan, args, on);
}

static void attend(void) {
    typedef cpa_attend_args T;
    static const member members[] = {M(T, q, POINTER),
                                     M(T, q_dtype, INT32),
                                     M(T, q_row_stride, INT64),
                                     M(T, q_head_stride, INT64),
                                     M(T, out_row_stride, INT64),
                                     M(T, out_head_stride, INT64),
                                     M(T, lse_head_stride, INT64),
                                     VIEW_MEMBERS(T, kv),
                                     M(T, mask.causal, INT32),
                                     M(T, mask.sinks, INT32),
                                     M(T, mask.right, INT64),
                                     M(T, mask.reserved[0], RESERVED),
                                     M(T, mask.reserved[4], RESERVED),
                                     M(T, scale, INT32),
                                     M(T, resume, INT32),
                                     M(T, state.o, POINTER),
                                     M(T, state.o_row_stride, INT64),
                                     M(T, state.lse, POINTER),
                                     M(T, state.lse_row_stride, INT64),
                                     M(T, state.reserved[0], RESERVED),
                                     M(T, out, OPTIONAL)};
    const int64_t bytes = 3 * ROW * (int64_t)sizeof(float);
    void *q = zeros(bytes), *o = zeros(bytes), *lse = zeros(bytes), *out = zeros(bytes);
    make_planned(&shared_plan);
    T args = {.size = sizeof args, .q = q, .kv = make_view(), .mask = {.causal = 1}, .state = {.o = o, .lse = lse}};
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "attend: the plan has not been set");
    CU_ASSERT_EQUAL(cpa_attend(NULL, &args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(shared_plan.plan, &shared_plan.batch, NULL), CPA_OK);
    misuse_all(&(call){"attend", run_attend, &args, sizeof args, MEMBERS(members), offsetof(T, out)});
    const int64_t windows[] = {(int64_t)1 << 62, INT64_MAX - 1, INT64_MAX};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) { /* as good as no window */
        args.mask.window = windows[i];
        CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_OK);
    }
    args.mask.window = 0;
    args.resume = 2;
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    args.resume = 0;
    args.mask.causal = 2;
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    args.mask.causal = 1;
    args.out_scale = q;
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "attend: out_scale is set and out is NULL");
    args.out = (char *)out + 1; /* codes are aligned anywhere, their scale is not */
    args.out_scale = (const float *)(const void *)((const char *)q + 2);
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(said(), "attend: out_scale"));
    args.out_scale = q;
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_attend_plan_destroy(shared_plan.plan);
    free_view(args.kv);
    void *const used[] = {q, o, lse, out};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(stream, used[i]);
}

/* Rules, bits and a bias of an attend that is good without them: each that is no such thing is refused, in one line. */
static void scores(void) {
    const int64_t bytes = 3 * ROW * (int64_t)sizeof(float);
    void *q = zeros(bytes), *o = zeros(bytes), *lse = zeros(bytes), *some = zeros(bytes);
    make_planned(&shared_plan);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(shared_plan.plan, &shared_plan.batch, NULL), CPA_OK);
    cpa_attend_args args = {
        .size = sizeof args, .q = q, .kv = make_view(), .mask = {.causal = 1}, .state = {.o = o, .lse = lse}};
    const struct {
        cpa_score_rules rules;
        const char *line;
    } rules[] = {{{.softcap = -1}, "attend: softcap is -1, expected 0 or a finite number above it"},
                 {{.softcap = INFINITY}, "attend: softcap is inf, expected 0 or a finite number above it"},
                 {{.temperature_len = 1}, "attend: temperature_len is 1, expected 0 or a finite number above 1"},
                 {{.temperature_len = NAN}, "attend: temperature_len is nan, expected 0 or a finite number above 1"},
                 {{.reserved = {0, 1}}, "attend: the reserved bytes of the score rules are not zero"}};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        args.rules = &rules[i].rules;
        CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
        CU_ASSERT_STRING_EQUAL(said(), rules[i].line);
    }
    const cpa_score_rules crooked = {.sink_logits = (const float *)((uintptr_t)some + 1)};
    args.rules = &crooked;
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    args.rules = NULL;

    const cpa_key_bits none = {.bits = some, .row_word = some, .width = some};
    args.selection = &(cpa_key_selection){.bits = &none};
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(said(), "expected none to be NULL"));
    const cpa_key_bits newer = {.bits = some, .row_word = some, .first = some, .width = some, .reserved = {1}};
    args.selection = &(cpa_key_selection){.bits = &newer};
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    args.selection = &(cpa_key_selection){.reserved = {1}};
    CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "attend: the reserved bytes of the selection are not zero");
    static const struct {
        cpa_key_indices indices;
        const char *says;
    } lists[] = {{{.width = -1}, "lists of -1 indices"},
                 {{.width = 3}, "lists of 3 indices at (nil), expected 0 or more, and not NULL"},
                 {{.unit = -4}, "unit of the selection's indices is -4"},
                 {{.row_stride = -1}, "row_stride of the selection is -1, expected 0 to 2^58"},
                 {{.head_stride = (int64_t)1 << 59}, "head_stride of the selection is"},
                 {{.reserved = {0, 1}}, "the reserved bytes of the selection's indices"}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        args.selection = &(cpa_key_selection){.indices = &lists[i].indices};
        CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(said(), lists[i].says));
    }
    const struct {
        cpa_key_blocks blocks;
        const char *says;
    } of_blocks[] = {
        {{.bits = some, .block = 1}, "expected neither to be NULL"},
        {{.bits = some, .row_word = some, .width = 3}, "has 3 blocks of 0 tokens"},
        {{.bits = some, .row_word = some, .width = -3, .block = 8}, "has -3 blocks of 8 tokens"},
        {{.bits = some, .row_word = some, .block = 8, .head_stride = -2}, "head_stride of the selection is -2"},
        {{.bits = some, .row_word = some, .width = 65, .block = 128, .head_stride = 2},
         "head_stride of the selection's blocks is 2, expected 0 or at least the 3 words of 65 blocks"},
        {{.bits = some, .row_word = some, .block = 8, .reserved = {1}}, "the selection's blocks"}};
    for (size_t i = 0; i < sizeof of_blocks / sizeof *of_blocks; i++) {
        args.selection = &(cpa_key_selection){.blocks = &of_blocks[i].blocks};
        CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(said(), of_blocks[i].says));
    }
    args.selection = NULL;

    const struct {
        cpa_score_bias bias;
        const char *line;
    } biases[] = {{{.values = some, .dtype = CPA_INT8}, "attend: dtype of the bias is 4, expected fp32, bf16 or fp16"},
                  {{.values = some, .first = -1}, "attend: the bias has keys [-1, +0), expected 0 to 2^44 for both"},
                  {{.width = 3}, "attend: the values of the bias are NULL for 3 keys"},
                  {{.values = some, .row_stride = -2},
                   "attend: the bias has row_stride -2 and head_stride 0, expected 0 to 2^58"},
                  {{.values = some, .reserved = {1}}, "attend: the reserved bytes of the bias are not zero"}};
    for (size_t i = 0; i < sizeof biases / sizeof *biases; i++) {
        args.bias = &biases[i].bias;
        CU_ASSERT_EQUAL(cpa_attend(shared_plan.plan, &args, stream), CPA_INVALID);
        CU_ASSERT_STRING_EQUAL(said(), biases[i].line);
    }
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_attend_plan_destroy(shared_plan.plan);
    free_view(args.kv);
    void *const used[] = {q, o, lse, some};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(stream, used[i]);
}

RUN(merge)

static void merge(void) {
    typedef cpa_merge_args T;
    static const member members[] = {M(T, rows, INT64),
                                     M(T, heads, INT32),
                                     M(T, v_dim, INT32),
                                     M(T, n_states, INT32),
                                     M(T, states, POINTER),
                                     M(T, out_dtype, INT32),
                                     M(T, out, POINTER),
                                     M(T, out_lse, OPTIONAL),
                                     M(T, out_row_stride, INT64),
                                     M(T, out_lse_row_stride, INT64),
                                     M(T, state_dtype, INT32),
                                     M(T, out_scale, OPTIONAL),
                                     M(T, tail_rows, INT64),
                                     M(T, lse_head_stride, INT64),
                                     M(T, out_lse_head_stride, INT64),
                                     M(T, lse_base2, INT32)};
    void *o = zeros(3 * ROW * (int64_t)sizeof(float)), *lse = zeros(3 * HEADS * (int64_t)sizeof(float));
    cpa_partial states[2] = {{.o = o, .lse = lse}, {.o = o, .lse = lse}};
    void *out = zeros(3 * ROW * (int64_t)sizeof(float));
    T args = {
        .size = sizeof args, .rows = 3, .heads = HEADS, .v_dim = DIM, .states = states, .n_states = 2, .out = out};
    misuse_all(&(call){"merge", run_merge, &args, sizeof args, MEMBERS(members), offsetof(T, out_row_stride)});
    args.states = NULL;
    CU_ASSERT_EQUAL(cpa_merge(&args, stream), CPA_INVALID);
    args.states = states;
    states[1].reserved[1] = 5;
    CU_ASSERT_EQUAL(cpa_merge(&args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_test_free(stream, out);
    cpa_test_free(stream, lse);
    cpa_test_free(stream, o);
}

RUN(state_pack)

static void state_pack(void) {
    typedef cpa_state_pack_args T;
    static const member members[] = {M(T, rows, INT64),         M(T, heads, INT32),          M(T, v_dim, INT32),
                                     M(T, o, POINTER),          M(T, o_dtype, INT32),        M(T, lse, POINTER),
                                     M(T, o_row_stride, INT64), M(T, lse_row_stride, INT64), M(T, row_map, OPTIONAL),
                                     M(T, dtype, INT32),        M(T, n_slices, INT32),       M(T, slices, POINTER)};
    void *o = zeros(3 * ROW * (int64_t)sizeof(float)), *lse = zeros(3 * HEADS * (int64_t)sizeof(float));
    void *packed = zeros(3 * HEADS * (DIM + 1) * (int64_t)sizeof(float));
    void *slices[CPA_MERGE_MAX_STATES] = {packed};
    T args = {.size = sizeof args,
              .rows = 3,
              .heads = HEADS,
              .v_dim = DIM,
              .o = o,
              .lse = lse,
              .n_slices = 1,
              .slices = slices};
    misuse_all(&(call){"state_pack", run_state_pack, &args, sizeof args, MEMBERS(members), sizeof args});
    args.slices = NULL;
    CU_ASSERT_EQUAL(cpa_state_pack(&args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_test_free(stream, packed);
    cpa_test_free(stream, lse);
    cpa_test_free(stream, o);
}

RUN(state_merge_packed)

static void state_merge_packed(void) {
    typedef cpa_state_merge_packed_args T;
    static const member members[] = {M(T, rows, INT64),       M(T, heads, INT32),    M(T, v_dim, INT32),
                                     M(T, dtype, INT32),      M(T, n_parts, INT32),  M(T, parts, POINTER),
                                     M(T, out_dtype, INT32),  M(T, out, POINTER),    M(T, out_row_stride, INT64),
                                     M(T, out_lse, OPTIONAL), M(T, order, OPTIONAL), M(T, out_lse_row_stride, INT64)};
    void *packed = zeros(3 * HEADS * (DIM + 1) * (int64_t)sizeof(float));
    void *out = zeros(3 * ROW * (int64_t)sizeof(float));
    const void *parts[CPA_MERGE_MAX_STATES] = {packed};
    T args = {.size = sizeof args, .rows = 3, .heads = HEADS, .v_dim = DIM, .n_parts = 1, .parts = parts, .out = out};
    misuse_all(&(call){"state_merge_packed", run_state_merge_packed, &args, sizeof args, MEMBERS(members),
                       offsetof(T, out_row_stride)});
    args.parts = NULL;
    CU_ASSERT_EQUAL(cpa_state_merge_packed(&args, stream), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_test_free(stream, out);
    cpa_test_free(stream, packed);
}

/* ---- devices and streams ---- */

static void no_device(void) {
    char address[CPA_PCI_ADDRESS_BYTES];
    void *memory;
    cpa_stream *other;
    cpa_attend_plan *plan;
    cpa_error err = {0};
    cpa_device_options options = cpa_test_device_options(1);
    CU_ASSERT_EQUAL(cpa_device_open(NULL, &device, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_device_open(&options, NULL, &err), CPA_INVALID);
    options.reserved[3] = 1;
    CU_ASSERT_EQUAL(cpa_device_open(&options, &device, &err), CPA_INVALID);
    cpa_device_close(NULL);
    CU_ASSERT_STRING_EQUAL(cpa_device_description(NULL), "");
    CU_ASSERT_EQUAL(cpa_device_count((cpa_backend)9), 0);
    cpa_device_pci_address(CPA_BACKEND_HOST, INT32_MAX, NULL);
    cpa_device_pci_address((cpa_backend)9, -1, address);
    CU_ASSERT_STRING_EQUAL(address, "");
    CU_ASSERT_EQUAL(cpa_device_alloc(NULL, 1, &memory, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_device_alloc(device, 1, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_device_alloc(device, INT64_MAX, &memory, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_device_alloc(device, -1, &memory, &err), CPA_INVALID);
    cpa_device_free(NULL, NULL);
    CU_ASSERT_EQUAL(cpa_stream_create(NULL, &other, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_stream_create(device, NULL, NULL), CPA_INVALID);
    cpa_stream_destroy(NULL);
    CU_ASSERT_PTR_NULL(cpa_stream_native(NULL));
    CU_ASSERT_EQUAL(cpa_stream_sync(NULL), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(cpa_stream_error(NULL));
    CU_ASSERT_EQUAL(cpa_attend_split_tokens(NULL), 0);
    CU_ASSERT_EQUAL(cpa_attend_plan_create(NULL, &plan, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_attend_plan_create(device, NULL, NULL), CPA_INVALID);
    cpa_attend_plan_destroy(NULL);
}

/* Options of an older caller, which end with the back end, open a device; and debug_checks finds what is on it. */
static void device_options(void) {
    const int64_t slots[TOKENS] = {3, 4, -1, 4, -1};
    cpa_device_options options = cpa_test_device_options(1);
    cpa_device *own_device = device, *other;
    cpa_stream *own = stream;
    options.size = offsetof(cpa_device_options, threads) + 4;
    CU_ASSERT_EQUAL(cpa_device_open(&options, &other, NULL), CPA_OK);
    cpa_device_close(other);
    options.size = sizeof options;
    options.debug_checks = 2;
    CU_ASSERT_EQUAL(cpa_device_open(&options, &other, NULL), CPA_INVALID);
    for (options.debug_checks = 0; options.debug_checks <= 1; options.debug_checks++) {
        CU_ASSERT_EQUAL_FATAL(cpa_device_open(&options, &device, NULL), CPA_OK);
        CU_ASSERT_EQUAL_FATAL(cpa_stream_create(device, &stream, NULL), CPA_OK);
        void *rows = zeros(TOKENS * ROW * (int64_t)sizeof(float));
        void *mapping = cpa_test_upload(stream, slots, sizeof slots);
        cpa_kv_write_args args = {sizeof args, TOKENS, CPA_F32, rows, rows, mapping, make_view(), NULL, 0, 0, 0, 0};
        CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), options.debug_checks ? CPA_INVALID : CPA_OK);
        if (options.debug_checks)
            CU_ASSERT_STRING_EQUAL(said(), "kv_write: slot_mapping[1] and slot_mapping[3] both have slot 4");
        CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
        /* As pairs: (3, 4), (-1, 4). */
        cpa_kv_move_args move = {sizeof move, args.kv, args.kv, (const int64_t(*)[2])mapping, 2};
        CU_ASSERT_EQUAL(cpa_kv_move(&move, stream), options.debug_checks ? CPA_INVALID : CPA_OK);
        if (options.debug_checks) CU_ASSERT_STRING_EQUAL(said(), "kv_move: slots[0] and slots[1] both have slot 4");
        free_view(args.kv);
        cpa_test_free(stream, mapping);
        cpa_test_free(stream, rows);
        cpa_stream_destroy(stream);
        cpa_device_close(device);
    }
    device = own_device;
    stream = own;
}

/* ---- memory and streams of the caller ---- */

typedef struct pool {
    cpa_device *source;
    int64_t taken, given_back, most; /* most: allocations that succeed */
} pool;

static void *take(void *ctx, int64_t bytes) {
    pool *p = ctx;
    void *memory = NULL;
    if (p->taken == p->most || cpa_device_alloc(p->source, bytes, &memory, NULL) != CPA_OK) return NULL;
    p->taken++;
    return memory;
}

static void give_back(void *ctx, void *memory) {
    pool *p = ctx;
    p->given_back++;
    cpa_device_free(p->source, memory);
}

/* Device memory comes from the caller's allocator and goes back there; where it has none, that is said. */
static void allocator(void) {
    pool p = {.source = device, .most = 2};
    cpa_device_options options = cpa_test_device_options(1);
    cpa_device *other;
    void *memory[3] = {NULL, NULL, NULL};
    cpa_error err = {0};
    options.memory = (cpa_allocator){take, NULL, &p};
    CU_ASSERT_EQUAL(cpa_device_open(&options, &other, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "device: memory.free is NULL, expected both or none");
    options.memory.free = give_back;
    CU_ASSERT_EQUAL_FATAL(cpa_device_open(&options, &other, NULL), CPA_OK);
    CU_ASSERT_EQUAL(p.taken, 0);
    CU_ASSERT_EQUAL(cpa_device_alloc(other, 100, &memory[0], NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_device_alloc(other, 0, &memory[1], NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_device_alloc(other, 100, &memory[2], &err), CPA_NO_MEMORY);
    CU_ASSERT_PTR_NULL(memory[2]);
    for (int i = 0; i < 3; i++) cpa_device_free(other, memory[i]);
    CU_ASSERT_EQUAL(p.taken, 2);
    CU_ASSERT_EQUAL(p.given_back, 2);
    cpa_device_close(other);
}

/* A stream of the caller's is used, and is there when its wrapping is gone. */
static void wrapped_stream(void) {
    const int64_t slots[TOKENS] = {0, 1, 2, 3, 4};
    float ones[TOKENS * ROW], got[ROW];
    for (int i = 0; i < TOKENS * ROW; i++) ones[i] = 1;
    cpa_stream *wrapped = NULL;
    cpa_error err = {0};
    CU_ASSERT_EQUAL(cpa_stream_wrap(NULL, &err, &wrapped, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_stream_wrap(device, NULL, &wrapped, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_stream_wrap(device, &err, NULL, NULL), CPA_INVALID);
    if (!cpa_stream_native(stream)) {
        CU_ASSERT_EQUAL(cpa_stream_wrap(device, &err, &wrapped, &err), CPA_UNSUPPORTED);
        CU_ASSERT_PTR_NULL(wrapped);
        return;
    }
    void *native = cpa_stream_native(stream), *rows = cpa_test_upload(stream, ones, sizeof ones);
    void *mapping = cpa_test_upload(stream, slots, sizeof slots);
    for (int again = 0; again < 2; again++) {
        cpa_kv_write_args args = {sizeof args, TOKENS, CPA_F32, rows, rows, mapping, make_view(), NULL, 0, 0, 0, 0};
        CU_ASSERT_EQUAL_FATAL(cpa_stream_wrap(device, native, &wrapped, NULL), CPA_OK);
        CU_ASSERT_PTR_EQUAL(cpa_stream_native(wrapped), native);
        CU_ASSERT_EQUAL(cpa_kv_write(&args, wrapped), CPA_OK);
        if (again) CU_ASSERT_EQUAL(cpa_stream_sync(wrapped), CPA_OK);
        cpa_stream_destroy(wrapped);
        cpa_test_download(stream, got, args.kv.v, sizeof got);
        CU_ASSERT_EQUAL(got[0], 1);
        CU_ASSERT_EQUAL(got[ROW - 1], 1);
        free_view(args.kv);
    }
    cpa_test_free(stream, mapping);
    cpa_test_free(stream, rows);
}

static const cpa_test tests[] = {
    {"kv_write", kv_write},
    {"kv_copy", kv_copy},
    {"kv_move", kv_move},
    {"kv_convert", kv_convert},
    {"kv_pack and its ranges", kv_pack},
    {"a batch", plan_set},
    {"an item", items},
    {"attend", attend},
    {"scores of attend", scores},
    {"merge", merge},
    {"state_pack", state_pack},
    {"state_merge_packed", state_merge_packed},
    {"no device, no stream, nowhere to put a result", no_device},
    {"options of a device", device_options},
    {"memory from the caller's allocator", allocator},
    {"a stream of the caller's", wrapped_stream},
};

int main(int argc, char **argv) {
    return misuse_main(argc, argv, "misuse of operators", tests, (int)(sizeof tests / sizeof *tests), NULL, NULL);
}
