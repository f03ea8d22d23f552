/* Misuse of norms with codes or of two widths, of rotate and of latent_norm_rope, as test_misuse.c has it. */
#include "tests/fixtures/misuse.h"

enum { ROWS = 3, WIDTH = 8, HEADS = 2, DIM = 8, V_DIM = 6, BLOCK = 4, BLOCKS = 6, POSITIONS = 5 };
enum { BYTES = 4096 }; /* more than any tensor here has */

/* Zeros for each pointer of a call. */
enum { POINTERS = 9 };
static void *memory[POINTERS];
static void *next(int *used) {
    return memory[(*used)++];
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

static const cpa_test tests[] = {
    {"codes of rmsnorm", codes_of_rmsnorm},
    {"rmsnorm2", rmsnorm2},
    {"rotate", rotate},
    {"latent_norm_rope", latent_norm_rope},
};

static void take_memory(void) {
    for (int i = 0; i < POINTERS; i++) memory[i] = zeros(BYTES);
}

static void free_memory(void) {
    for (int i = 0; i < POINTERS; i++) cpa_test_free(stream, memory[i]);
}

int main(int argc, char **argv) {
    return misuse_main(argc, argv, "misuse of norms and rotations", tests, (int)(sizeof tests / sizeof *tests),
                       take_memory, free_memory);
}
