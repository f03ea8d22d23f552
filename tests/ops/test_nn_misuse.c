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

/* What codes need, and what they have no use for. */
static void codes_of_rmsnorm(void) {
    int used = 0;
    float *const x = next(&used), *const numbers = next(&used);
    const cpa_rmsnorm_args plain = {
        .size = sizeof plain, .rows = ROWS, .width = WIDTH, .x = x, .weight = next(&used), .out = next(&used)};
    const struct {
        cpa_norm_codes codes;
        int32_t group, pow2, by_column;
        int is_static, bound, scales; /* whether these are given */
        const char *said;             /* NULL: it is done */
    } cases[] = {
        {CPA_NORM_PLAIN, 0, 0, 0, 0, 0, 1, "rmsnorm: scales is given, but the codes have none"},
        {CPA_NORM_PLAIN, 64, 0, 0, 0, 0, 0, "rmsnorm: group is 64, expected 0 for codes that have no groups"},
        {CPA_NORM_FP8_STATIC, 0, 0, 0, 1, 0, 0, NULL},
        {CPA_NORM_FP8_STATIC, 0, 0, 0, 0, 0, 0, "rmsnorm: static_scale is NULL"},
        {CPA_NORM_FP8_STATIC, 0, 0, 0, 1, 1, 0, "rmsnorm: scale_bound is given, but the codes have none"},
        {CPA_NORM_FP8_TOKEN, 0, 0, 0, 0, 1, 1, NULL},
        {CPA_NORM_FP8_TOKEN, 0, 0, 0, 0, 1, 0, "rmsnorm: scales is NULL"},
        {CPA_NORM_FP8_TOKEN, 0, 1, 0, 0, 1, 1,
         "rmsnorm: scales_pow2 or scales_by_column is set for codes that have no groups"},
        {CPA_NORM_FP8_GROUP, 64, 1, 1, 0, 0, 1, NULL},
        {CPA_NORM_FP8_GROUP, 96, 0, 0, 0, 0, 1, "rmsnorm: group is 96, expected 64 or 128"},
        {CPA_NORM_FP8_GROUP, 128, 0, 0, 1, 0, 1, "rmsnorm: static_scale is given, but the codes have none"},
        {CPA_NORM_INT8_TOKEN, 0, 0, 0, 0, 0, 1, NULL},
        {CPA_NORM_INT8_TOKEN, 0, 0, 0, 0, 1, 1, "rmsnorm: scale_bound is given, but the codes have none"},
        {CPA_NORM_CODES_COUNT, 0, 0, 0, 0, 0, 0, "rmsnorm: codes is 5, expected 0..4"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_rmsnorm_args args = plain;
        args.codes = cases[i].codes, args.group = cases[i].group;
        args.scales_pow2 = cases[i].pow2, args.scales_by_column = cases[i].by_column;
        args.static_scale = cases[i].is_static ? numbers : NULL;
        args.scale_bound = cases[i].bound ? numbers : NULL;
        args.scales = cases[i].scales ? numbers : NULL;
        CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), cases[i].said ? CPA_INVALID : CPA_OK);
        if (cases[i].said) CU_ASSERT_STRING_EQUAL(said(), cases[i].said);
    }
    cpa_rmsnorm_args args = plain;
    args.codes = CPA_NORM_INT8_TOKEN, args.scales = numbers, args.out = x;
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "rmsnorm: out is x, where codes cannot be written");
}

RUN(rmsnorm2)

static void rmsnorm2(void) {
    typedef cpa_rmsnorm2_args T;
    static const member members[] = {
        M(T, rows, INT64),
        M(T, dtype, INT32),
        M(T, weight_offset, INT32),
        M(T, eps, INT32),
        M(T, weight_is_f32, INT32),
        M(T, parts[0].x, POINTER),
        M(T, parts[0].x_stride, INT64),
        M(T, parts[0].weight, POINTER),
        M(T, parts[0].out, POINTER),
        M(T, parts[0].out_stride, INT64),
        M(T, parts[0].width, INT32),
        M(T, parts[0].reserved[0], RESERVED),
        M(T, parts[1].x, POINTER),
        M(T, parts[1].weight, POINTER),
        M(T, parts[1].out, POINTER),
        M(T, parts[1].width, INT32),
        M(T, parts[1].reserved[3], RESERVED),
    };
    int used = 0;
    T args = {.size = sizeof args, .rows = ROWS};
    for (int i = 0; i < 2; i++)
        args.parts[i] = (cpa_norm_rows){
            .x = next(&used), .weight = next(&used), .out = next(&used), .width = i ? WIDTH : 2 * WIDTH};
    misuse_all(&(call){"rmsnorm2", run_rmsnorm2, &args, sizeof args, MEMBERS(members), sizeof args});
    args.parts[1].width = 0;
    CU_ASSERT_EQUAL(cpa_rmsnorm2(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "rmsnorm2: parts[1].width is 0, expected 1 to 16777216");
}

RUN(rotate)

static void rotate(void) {
    typedef cpa_rotate_args T;
    static const member members[] = {
        M(T, rows, INT64),
        M(T, heads, INT32),
        M(T, dim, INT32),
        M(T, dtype, INT32),
        M(T, x, POINTER),
        M(T, x_stride, INT64),
        M(T, x_head_stride, INT64),
        M(T, rope.table, POINTER),
        M(T, rope.max_position, INT64),
        M(T, rope.dim, INT32),
        M(T, rope.first, INT32),
        M(T, rope.interleaved, INT32),
        M(T, rope.inverse, INT32),
        M(T, rope.sections[0], INT32),
        M(T, rope.sections[2], INT32),
        M(T, rope.sections_interleaved, INT32),
        M(T, rope.reserved[1], RESERVED),
        M(T, positions, POINTER),
        M(T, out, POINTER),
        M(T, out_stride, INT64),
        M(T, out_head_stride, INT64),
    };
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .heads = HEADS,
              .dim = DIM,
              .x = next(&used),
              .rope = {.table = next(&used), .max_position = POSITIONS, .dim = DIM},
              .positions = next(&used),
              .out = next(&used)};
    misuse_all(&(call){"rotate", run_rotate, &args, sizeof args, MEMBERS(members), offsetof(T, out_stride)});
    args.rope.sections[0] = 1, args.rope.sections[1] = 2;
    CU_ASSERT_EQUAL(cpa_rotate(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(),
                           "rotate: rope.sections are 1, 2 and 0, expected three counts that sum to half of "
                           "rope.dim, 4");
    args.rope.sections[2] = 1;
    CU_ASSERT_EQUAL(cpa_rotate(&args, stream), CPA_OK);
    args.out = (void *)(uintptr_t)args.x;
    args.out_head_stride = DIM + 4;
    CU_ASSERT_EQUAL(cpa_rotate(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "rotate: out is x, but its heads are 12 elements apart and those of x 8");
    args.rows = 0;
    CU_ASSERT_EQUAL(cpa_rotate(&args, stream), CPA_OK);
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

RUN(latent_norm_rope)

static void latent_norm_rope(void) {
    typedef cpa_latent_norm_rope_args T;
    static const member members[] = {
        M(T, rows, INT64),
        M(T, shape.q_heads, INT32),
        M(T, shape.kv_heads, INT32),
        M(T, shape.k_dim, INT32),
        M(T, shape.v_dim, INT32),
        M(T, shape.dtype, INT32),
        M(T, shape.reserved[0], RESERVED),
        M(T, x, POINTER),
        M(T, x_stride, INT64),
        M(T, weight, POINTER),
        M(T, weight_offset, INT32),
        M(T, eps, INT32),
        M(T, rope.table, POINTER),
        M(T, rope.dim, INT32),
        M(T, rope.first, INT32),
        M(T, positions, POINTER),
        M(T, q, OPTIONAL),
        M(T, q_stride, INT64),
        M(T, q_head_stride, INT64),
        M(T, q_out, POINTER),
        M(T, q_out_stride, INT64),
        M(T, q_out_head_stride, INT64),
        M(T, out, OPTIONAL),
        M(T, out_stride, INT64),
        M(T, slot_mapping, OPTIONAL),
        M(T, kv.k, POINTER),
        M(T, kv.block_size, INT32),
        M(T, kv.num_blocks, INT64),
        M(T, kv.dtype, INT32),
        M(T, kv.k_token_stride, INT64),
    };
    int used = 0;
    T args = {.size = sizeof args,
              .rows = ROWS,
              .shape = {.q_heads = HEADS, .kv_heads = 1, .k_dim = DIM, .v_dim = V_DIM, .v_in_k = 1},
              .x = next(&used),
              .weight = next(&used),
              .rope = {.table = next(&used), .max_position = POSITIONS, .dim = DIM - V_DIM},
              .positions = next(&used),
              .q = next(&used),
              .q_out = next(&used),
              .out = next(&used),
              .slot_mapping = next(&used),
              .kv = {.k = next(&used),
                     .block_size = BLOCK,
                     .num_blocks = BLOCKS,
                     .kv_heads = 1,
                     .k_dim = DIM,
                     .v_dim = V_DIM,
                     .v_in_k = 1}};
    misuse_all(&(call){"latent_norm_rope", run_latent_norm_rope, &args, sizeof args, MEMBERS(members),
                       offsetof(T, nonfinite)});
    args.rope.dim = DIM;
    CU_ASSERT_EQUAL(cpa_latent_norm_rope(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(),
                           "latent_norm_rope: rope.dim is 8 and rope.first is 0, expected an even number of "
                           "elements within k_dim - v_dim, 2");
    args.shape.v_in_k = 0;
    CU_ASSERT_EQUAL(cpa_latent_norm_rope(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(),
                           "latent_norm_rope: the shape has v_in_k 0 and 1 KV heads, expected that of latents, "
                           "with 1 of each");
    args.shape.v_in_k = 1, args.rope.dim = 2;
    args.kv.k_dim = DIM + 1;
    CU_ASSERT_EQUAL(cpa_latent_norm_rope(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(said(), "latent_norm_rope: the cache has k_dim 9, but the shape has 8");
    args.slot_mapping = NULL;
    CU_ASSERT_EQUAL(cpa_latent_norm_rope(&args, stream), CPA_OK);
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

static const cpa_test tests[] = {
    {"rmsnorm", rmsnorm},
    {"codes of rmsnorm", codes_of_rmsnorm},
    {"rmsnorm2", rmsnorm2},
    {"rotate", rotate},
    {"qk_norm_rope", qk_norm_rope},
    {"latent_norm_rope", latent_norm_rope},
    {"slots of qk_norm_rope", slots},
    {"swiglu", swiglu},
    {"embed", embed},
    {"linear", linear},
    {"sample", sample},
    {"rank_tokens", rank_tokens},
    {"mark_tokens", mark_tokens},
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
