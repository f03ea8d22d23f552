/* Misuse of the operators beside attention, as test_misuse.c has it. */
#include "tests/fixtures/misuse.h"

enum { ROWS = 3, WIDTH = 8, HEADS = 2, DIM = 8, V_DIM = 6, BLOCK = 4, BLOCKS = 6, POSITIONS = 5, VOCABULARY = 40 };
enum { BYTES = 4096 }; /* more than any tensor here has */

/* Zeros for each pointer of a call. */
enum { POINTERS = 26 };
static void *memory[POINTERS];
static void *next(int *used) {
    return memory[(*used)++];
}

RUN(rmsnorm)

static void rmsnorm(void) {
    typedef cpa_rmsnorm_args T;
    static const member members[] = {M(T, rows, INT64),
                                     M(T, width, INT32),
                                     M(T, dtype, INT32),
                                     M(T, x, POINTER),
                                     M(T, x_stride, INT64),
                                     M(T, residual, OPTIONAL),
                                     M(T, weight, POINTER),
                                     M(T, weight_offset, INT32),
                                     M(T, eps, INT32),
                                     M(T, out, POINTER),
                                     M(T, residual_stride, INT64),
                                     M(T, out_stride, INT64),
                                     M(T, weight_is_f32, INT32),
                                     M(T, codes, INT32),
                                     M(T, group, INT32),
                                     M(T, scales_pow2, INT32),
                                     M(T, scales_by_column, INT32),
                                     M(T, static_scale, OPTIONAL),
                                     M(T, scale_bound, OPTIONAL),
                                     M(T, scales, OPTIONAL)};
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .width = WIDTH,
              .x = next(&used),
              .residual = next(&used),
              .weight = next(&used),
              .out = next(&used)};
    misuse_all(&(call){"rmsnorm", run_rmsnorm, &args, sizeof args, MEMBERS(members), offsetof(T, residual_stride)});
    args.out = args.residual;
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "rmsnorm: out is the residual");
    args.residual = NULL;
    args.x_stride = WIDTH + 4;
    args.x = args.out;
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "rmsnorm: out is x, but its rows are 8 elements apart and those of x 12");
    args.out_stride = WIDTH + 4;
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
    args.rows = 0;
    args.out = NULL, args.x = NULL;
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
}

RUN(qk_norm_rope)

static void qk_norm_rope(void) {
    typedef cpa_qk_norm_rope_args T;
    static const member members[] = {M(T, rows, INT64),
                                     M(T, shape.q_heads, INT32),
                                     M(T, shape.kv_heads, INT32),
                                     M(T, shape.k_dim, INT32),
                                     M(T, shape.v_dim, INT32),
                                     M(T, shape.v_in_k, RESERVED),
                                     M(T, shape.dtype, INT32),
                                     M(T, shape.reserved[0], RESERVED),
                                     M(T, qkv, POINTER),
                                     M(T, qkv_stride, INT64),
                                     M(T, q_weight, OPTIONAL),
                                     M(T, k_weight, OPTIONAL),
                                     M(T, weight_offset, INT32),
                                     M(T, eps, INT32),
                                     M(T, rope.table, OPTIONAL),
                                     M(T, rope.max_position, INT64),
                                     M(T, rope.dim, INT32),
                                     M(T, rope.first, INT32),
                                     M(T, rope.interleaved, INT32),
                                     M(T, rope.inverse, INT32),
                                     M(T, rope.sections[0], INT32),
                                     M(T, rope.sections[1], INT32),
                                     M(T, rope.sections[2], INT32),
                                     M(T, rope.sections_interleaved, INT32),
                                     M(T, rope.reserved[0], RESERVED),
                                     M(T, rope.reserved[2], RESERVED),
                                     M(T, positions, POINTER),
                                     M(T, q, POINTER),
                                     M(T, q_stride, INT64),
                                     M(T, k, OPTIONAL),
                                     M(T, k_stride, INT64),
                                     M(T, v, OPTIONAL),
                                     M(T, v_stride, INT64),
                                     M(T, slot_mapping, OPTIONAL),
                                     VIEW_MEMBERS(T, kv)};
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .shape = {.q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = V_DIM},
              .qkv = next(&used),
              .q_weight = next(&used),
              .k_weight = next(&used),
              .rope = {.table = next(&used), .max_position = POSITIONS, .dim = DIM},
              .positions = next(&used),
              .q = next(&used),
              .k = next(&used),
              .v = next(&used),
              .slot_mapping = next(&used),
              .kv = {.k = next(&used),
                     .v = next(&used),
                     .block_size = BLOCK,
                     .num_blocks = BLOCKS,
                     .kv_heads = HEADS,
                     .k_dim = DIM,
                     .v_dim = V_DIM}};
    misuse_all(&(call){"qk_norm_rope", run_qk_norm_rope, &args, sizeof args, MEMBERS(members), offsetof(T, nonfinite)});
    args.kv.k_dim = DIM - 1;
    CU_ASSERT_EQUAL(cpa_qk_norm_rope(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "qk_norm_rope: the cache has k_dim 7, but the shape has 8");
    args.slot_mapping = NULL;
    CU_ASSERT_EQUAL(cpa_qk_norm_rope(&args, stream), CPA_OK);
    args.rope.first = 2;
    CU_ASSERT_EQUAL(cpa_qk_norm_rope(&args, stream), CPA_INVALID);
    args.rope.dim = 5;
    CU_ASSERT_EQUAL(cpa_qk_norm_rope(&args, stream), CPA_INVALID);
    args.rope.table = NULL;
    args.positions = NULL;
    CU_ASSERT_EQUAL(cpa_qk_norm_rope(&args, stream), CPA_OK);
}

/* A slot that is none is refused before anything is written; a device says so when the stream is waited for. */
static void slots(void) {
    const int64_t bad[] = {BLOCK * BLOCKS, -2, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int used = 0;
        int64_t *mapping = cpa_test_upload(stream, &bad[i], sizeof bad[i]);
        cpa_qk_norm_rope_args args = {.size = sizeof args,
                                      .rows = 1,
                                      .shape = {.q_heads = HEADS, .kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM},
                                      .qkv = next(&used),
                                      .q = next(&used),
                                      .slot_mapping = mapping,
                                      .kv = {.k = next(&used),
                                             .v = next(&used),
                                             .block_size = BLOCK,
                                             .num_blocks = BLOCKS,
                                             .kv_heads = HEADS,
                                             .k_dim = DIM,
                                             .v_dim = DIM}};
        cpa_status status = cpa_qk_norm_rope(&args, stream);
        if (status == CPA_OK) status = cpa_stream_sync(stream);
        CU_ASSERT_EQUAL(status, CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(said(), "slot_mapping[0] is "));
        CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
        cpa_test_free(stream, mapping);
    }
}

RUN(swiglu)

static void swiglu(void) {
    typedef cpa_swiglu_args T;
    static const member members[] = {M(T, rows, INT64), M(T, width, INT32), M(T, dtype, INT32), M(T, gate_up, POINTER),
                                     M(T, out, POINTER)};
    int used = 0;
    T args = {sizeof args, ROWS, WIDTH, CPA_F32, next(&used), next(&used)};
    misuse_all(&(call){"swiglu", run_swiglu, &args, sizeof args, MEMBERS(members), sizeof args});
}

RUN(embed)

static void embed(void) {
    typedef cpa_embed_args T;
    static const member members[] = {M(T, rows, INT64),       M(T, width, INT32),   M(T, dtype, INT32),
                                     M(T, vocabulary, INT64), M(T, table, POINTER), M(T, tokens, POINTER),
                                     M(T, out, POINTER)};
    int used = 0;
    T args = {sizeof args, ROWS, WIDTH, CPA_F32, VOCABULARY, next(&used), next(&used), next(&used)};
    misuse_all(&(call){"embed", run_embed, &args, sizeof args, MEMBERS(members), sizeof args});
}

RUN(linear)

static void linear(void) {
    typedef cpa_linear_args T;
    static const member members[] = {M(T, rows, INT64),
                                     M(T, inputs, INT32),
                                     M(T, outputs, INT32),
                                     M(T, dtype, INT32),
                                     M(T, out_dtype, INT32),
                                     M(T, x, POINTER),
                                     M(T, x_stride, INT64),
                                     M(T, weight, POINTER),
                                     M(T, weight_stride, INT64),
                                     M(T, bias, OPTIONAL),
                                     M(T, out, POINTER),
                                     M(T, out_stride, INT64),
                                     M(T, weight_scale, OPTIONAL),
                                     M(T, batch, INT32)};
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .inputs = WIDTH,
              .outputs = WIDTH,
              .x = next(&used),
              .weight = next(&used),
              .bias = next(&used),
              .out = next(&used)};
    misuse_all(&(call){"linear", run_linear, &args, sizeof args, MEMBERS(members), offsetof(T, out_stride)});
    args.out_dtype = CPA_F16;
    CU_ASSERT_EQUAL(cpa_linear(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "linear: out_dtype is 2, expected fp32 or fp32");
    args.out_dtype = CPA_F32;
    args.batch = 2;
    CU_ASSERT_EQUAL(cpa_linear(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(said(), " with a batch of 2, expected NULL"));
    args.bias = NULL;
    CU_ASSERT_EQUAL(cpa_linear(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(said(), "linear: batch strides are 0, 0 and 0, expected"));
    args.batch = 0;
    args.weight_scale = next(&used), args.weight_scale_rows = 2, args.weight_scale_columns = 1;
    CU_ASSERT_EQUAL(cpa_linear(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "linear: scales are [2, 1], expected [1, 1] or [8, 1] for weights [8, 8]");
}

RUN(sample)

static void sample(void) {
    typedef cpa_sample_args T;
    static const member members[] = {
        M(T, rows, INT64),          M(T, vocabulary, INT64),       M(T, logits, POINTER),
        M(T, logits_stride, INT64), M(T, temperature, OPTIONAL),   M(T, top_k, OPTIONAL),
        M(T, top_p, OPTIONAL),      M(T, min_p, OPTIONAL),         M(T, repetition, OPTIONAL),
        M(T, presence, OPTIONAL),   M(T, seed, OPTIONAL),          M(T, position, OPTIONAL),
        M(T, given, OPTIONAL),      M(T, in_prompt, OPTIONAL),     M(T, in_output, OPTIONAL),
        M(T, sequence, POINTER),    M(T, sequences, INT64),        M(T, tokens, POINTER),
        M(T, tokens_stride, INT64), M(T, logprobs, OPTIONAL),      M(T, logprobs_stride, INT64),
        M(T, frequency, OPTIONAL),  M(T, output_counts, OPTIONAL), M(T, masks, POINTER),
        M(T, mask_index, OPTIONAL), M(T, n_masks, INT64),          M(T, bias_tokens, POINTER),
        M(T, bias_values, POINTER), M(T, bias_first, POINTER),     M(T, bias_count, OPTIONAL),
        M(T, bias_entries, INT64)};
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .vocabulary = VOCABULARY,
              .logits = next(&used),
              .temperature = next(&used),
              .top_k = next(&used),
              .top_p = next(&used),
              .min_p = next(&used),
              .repetition = next(&used),
              .presence = next(&used),
              .seed = next(&used),
              .position = next(&used),
              .given = next(&used),
              .in_prompt = next(&used),
              .in_output = next(&used),
              .sequence = next(&used),
              .sequences = 2,
              .tokens = next(&used),
              .logprobs = next(&used),
              .frequency = next(&used),
              .output_counts = next(&used),
              .masks = next(&used),
              .mask_index = next(&used),
              .n_masks = 2,
              .bias_tokens = next(&used),
              .bias_values = next(&used),
              .bias_first = next(&used),
              .bias_count = next(&used),
              .bias_entries = 2};
    misuse_all(&(call){"sample", run_sample, &args, sizeof args, MEMBERS(members), offsetof(T, logprobs)});
    args.in_prompt = NULL, args.in_output = NULL, args.sequence = NULL;
    CU_ASSERT_EQUAL(cpa_sample(&args, stream), CPA_OK);
}

RUN(rank_tokens)

static void rank_tokens(void) {
    typedef cpa_rank_tokens_args T;
    static const member members[] = {M(T, rows, INT64),           M(T, vocabulary, INT64), M(T, logits, POINTER),
                                     M(T, logits_stride, INT64),  M(T, tokens, POINTER),   M(T, tokens_stride, INT64),
                                     M(T, top, OPTIONAL),         M(T, ranks, POINTER),    M(T, logprobs, OPTIONAL),
                                     M(T, logprobs_stride, INT64)};
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .vocabulary = VOCABULARY,
              .logits = next(&used),
              .tokens = next(&used),
              .top = next(&used),
              .ranks = next(&used),
              .logprobs = next(&used)};
    misuse_all(&(call){"rank_tokens", run_rank_tokens, &args, sizeof args, MEMBERS(members), offsetof(T, logprobs)});
}

RUN(mark_tokens)

static void mark_tokens(void) {
    typedef cpa_mark_tokens_args T;
    static const member members[] = {M(T, vocabulary, INT64),  M(T, sequences, INT64),       M(T, in_prompt, POINTER),
                                     M(T, in_output, POINTER), M(T, n_restarts, INT64),      M(T, restarts, POINTER),
                                     M(T, count, INT64),       M(T, sequence, POINTER),      M(T, tokens, POINTER),
                                     M(T, outputs, POINTER),   M(T, output_counts, OPTIONAL)};
    int used = 0;
    T args = {.size = sizeof args,
              .vocabulary = VOCABULARY,
              .sequences = 2,
              .in_prompt = next(&used),
              .in_output = next(&used),
              .n_restarts = 1,
              .restarts = next(&used),
              .count = ROWS,
              .sequence = next(&used),
              .tokens = next(&used),
              .outputs = next(&used),
              .output_counts = next(&used)};
    misuse_all(
        &(call){"mark_tokens", run_mark_tokens, &args, sizeof args, MEMBERS(members), offsetof(T, output_counts)});
}

RUN(topk)

static void topk(void) {
    typedef cpa_topk_args T;
    static const member members[] = {
        M(T, rows, INT64),           M(T, width, INT64),       M(T, logits, POINTER),   M(T, logits_stride, INT64),
        M(T, first, OPTIONAL),       M(T, end, OPTIONAL),      M(T, k, INT32),          M(T, indices, POINTER),
        M(T, indices_stride, INT64), M(T, counts, OPTIONAL),   M(T, scores, OPTIONAL),  M(T, scores_stride, INT64),
        M(T, forced_first, INT32),   M(T, forced_last, INT32), M(T, tables, OPTIONAL),  M(T, table_rows, OPTIONAL),
        M(T, table_stride, INT64),   M(T, block_size, INT32),  M(T, out_rows, OPTIONAL)};
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .width = VOCABULARY,
              .logits = next(&used),
              .first = next(&used),
              .end = next(&used),
              .k = WIDTH,
              .indices = next(&used),
              .counts = next(&used),
              .scores = next(&used),
              .forced_first = 3,
              .forced_last = WIDTH - 3,
              .tables = next(&used),
              .table_rows = next(&used),
              .block_size = BLOCK};
    const call all = {"topk", run_topk, &args, sizeof args, MEMBERS(members), offsetof(T, indices_stride)};
    misuse(&all);
    const int32_t *tables = args.tables, *table_rows = args.table_rows;
    args.tables = args.table_rows = NULL; /* which want a block_size */
    sizes(&all);
    args.tables = tables, args.table_rows = table_rows;
    args.forced_first = 4;
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(),
                           "topk: forced_first is 4 and forced_last 5, expected none negative and together at "
                           "most k, 8");
    args.forced_first = 3;
    args.shards = next(&used);
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "topk: shards and tables are both set, expected one of them or none");
    args.tables = NULL, args.table_rows = NULL;
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(),
                           "topk: forced_last is 5 in shards, but lengths is NULL, expected those of the sequences");
    args.lengths = next(&used);
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID); /* no map */
    args.map = (cpa_owner_map){2, 4};
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_OK);
    args.k = CPA_MOST_TOPK + 1;
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "topk: k is 4097, expected 1 to 4096");
}

RUN(topk_merge)

static void topk_merge(void) {
    typedef cpa_topk_merge_args T;
    static const member members[] = {M(T, rows, INT64),        M(T, n, INT32),         M(T, width, INT32),
                                     M(T, scores, POINTER),    M(T, indices, POINTER), M(T, list_stride, INT64),
                                     M(T, row_stride, INT64),  M(T, k, INT32),         M(T, out, POINTER),
                                     M(T, out_stride, INT64),  M(T, counts, OPTIONAL), M(T, forced_first, INT32),
                                     M(T, forced_last, INT32), M(T, lengths, POINTER), M(T, out_rows, OPTIONAL)};
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .n = 2,
              .width = WIDTH,
              .scores = next(&used),
              .indices = next(&used),
              .k = WIDTH,
              .out = next(&used),
              .counts = next(&used),
              .forced_first = 1,
              .forced_last = 2,
              .lengths = next(&used)};
    const call all = {"topk_merge", run_topk_merge, &args, sizeof args, MEMBERS(members), offsetof(T, out_stride)};
    misuse(&all);
    args.forced_first = args.forced_last = 0; /* which wants lengths */
    sizes(&all);
}

static const cpa_test tests[] = {
    {"rmsnorm", rmsnorm},
    {"qk_norm_rope", qk_norm_rope},
    {"slots of qk_norm_rope", slots},
    {"swiglu", swiglu},
    {"embed", embed},
    {"linear", linear},
    {"sample", sample},
    {"rank_tokens", rank_tokens},
    {"mark_tokens", mark_tokens},
    {"topk", topk},
    {"topk_merge", topk_merge},
};

static void take_memory(void) {
    for (int i = 0; i < POINTERS; i++) memory[i] = zeros(BYTES);
}

static void free_memory(void) {
    for (int i = 0; i < POINTERS; i++) cpa_test_free(stream, memory[i]);
}

int main(int argc, char **argv) {
    return misuse_main(argc, argv, "misuse of operators beside attention", tests, (int)(sizeof tests / sizeof *tests),
                       take_memory, free_memory);
}
