/* Which kernels a plan says that its attends run, and the rows that are counted where these are plain ones. */
#include <string.h>

#include "kernels/attend_plan.h"
#include "kernels/self_test.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

/* A decoding sequence and a prompt of 64 tokens; addresses count by their alignment alone. */
enum { HEADS = 8, KV_HEADS = 2, DIM = 64, BLOCK = 16, PROMPT = 64, BLOCKS = 2 * PROMPT / BLOCK };
static const cpa_attend_item ITEMS[] = {{.q_row = 0, .q_count = 1, .q_first = PROMPT - 1, .k_count = PROMPT},
                                        {.q_row = 1, .q_count = PROMPT, .k_count = PROMPT, .table = PROMPT / BLOCK}};
static const int32_t TABLES[BLOCKS] = {0, 1, 2, 3, 4, 5, 6, 7};
static char memory[64] __attribute__((aligned(64)));

static cpa_attend_batch batch_of(cpa_dtype dtype, int64_t n_items) {
    return (cpa_attend_batch){
        .size = sizeof(cpa_attend_batch),
        .map = {.cp_size = 1, .interleave = BLOCK},
        .shape =
            {.dtype = dtype, .kv_dtype = dtype, .q_heads = HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM},
        .block_size = BLOCK,
        .items = ITEMS,
        .n_items = n_items,
        .block_tables = TABLES,
        .n_table_entries = BLOCKS};
}

static cpa_attend_args args_of(cpa_dtype dtype) {
    return (cpa_attend_args){.size = sizeof(cpa_attend_args),
                             .q = memory,
                             .q_dtype = dtype,
                             .kv = {.k = memory,
                                    .v = memory,
                                    .dtype = dtype,
                                    .block_size = BLOCK,
                                    .num_blocks = BLOCKS,
                                    .kv_heads = KV_HEADS,
                                    .k_dim = DIM,
                                    .v_dim = DIM},
                             .mask = {.causal = 1},
                             .out = memory};
}

/* What a new plan of the batch says, asked with the arguments or without. */
static cpa_attend_kernels kernels_of(cpa_device *device, const cpa_attend_batch *batch, const cpa_attend_args *args) {
    cpa_attend_kernels kernels = {.decode.name = "?", .prefill.name = "?", .shared.name = "?"};
    cpa_attend_plan *plan;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_set(plan, batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_kernel(plan, args, &kernels, sizeof kernels, &err), CPA_OK);
    cpa_attend_plan_destroy(plan);
    return kernels;
}

static int is_named(const cpa_attend_kernel *kernel, const char *name) {
    return kernel->name && !strcmp(kernel->name, name);
}

/* Either a name without a reason that is also the fastest, or both and another. */
static int is_consistent(const cpa_attend_kernel *kernel) {
    if (!kernel->name) return !kernel->fastest && !kernel->why;
    return kernel->fastest && !strcmp(kernel->name, kernel->fastest) == !kernel->why;
}

static void each_kind_of_rows_has_a_name(void) {
    static const cpa_dtype dtypes[] = {CPA_F32, CPA_BF16, CPA_F16};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(1, &device, &stream);
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        const cpa_attend_args args = args_of(dtypes[i]);
        for (int64_t n = 0; n <= 2; n++) {
            const cpa_attend_batch batch = batch_of(dtypes[i], n);
            const cpa_attend_kernels told = kernels_of(device, &batch, NULL), asked = kernels_of(device, &batch, &args);
            CU_ASSERT_EQUAL(asked.decode.name != NULL, n > 0);
            CU_ASSERT_EQUAL(asked.prefill.name != NULL, n > 1);
            CU_ASSERT_PTR_NULL(asked.shared.name);
            CU_ASSERT(is_consistent(&asked.decode) && is_consistent(&asked.prefill) && is_consistent(&asked.shared));
            /* The arguments ask for nothing that the plan does not know. */
            CU_ASSERT_EQUAL(memcmp(&told, &asked, sizeof told), 0);
        }
    }
    cpa_test_device_close(device, stream);
}

/* fp32 has no tensor cores on a device, and no pairs on the host. */
static void fp32_is_plain_on_a_device_alone(void) {
    const cpa_attend_batch batch = batch_of(CPA_F32, 2);
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(1, &device, &stream);
    const cpa_attend_kernels kernels = kernels_of(device, &batch, NULL);
    if (cpa_test_promises_bits()) {
        const char *isa = device->self_test->attend_path(device, 0);
        CU_ASSERT(is_named(&kernels.decode, isa) && is_named(&kernels.prefill, isa));
    } else {
        CU_ASSERT(is_named(&kernels.decode, "simple") && is_named(&kernels.prefill, "simple"));
        CU_ASSERT(kernels.decode.why && kernels.prefill.why);
    }
    cpa_test_device_close(device, stream);
}

static void plain_rows_are_counted(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        cpa_attend_fixture f;
        cpa_attend_result result;
        cpa_attend_kernels kernels;
        cpa_attend_fixture_init(&f, &CPA_ATTEND_BASE[base], 1);
        cpa_attend_result_init(&result, &f);
        CU_ASSERT_EQUAL(f.stream->plain_rows, 0);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
        f.device->operators->attend_kernels(f.plan, NULL, &kernels);
        const int plain = is_named(&kernels.prefill, "simple");
        CU_ASSERT_EQUAL(f.plan->rows_attended, f.rows);
        CU_ASSERT_EQUAL(f.stream->plain_rows, plain ? f.rows : 0);
        if (f.shape.q_dtype == CPA_F32) CU_ASSERT_EQUAL(plain, !cpa_test_promises_bits());
        cpa_attend_result_destroy(&result);
        cpa_attend_fixture_destroy(&f);
    }
}

static void count_attend_lines(void *ctx, cpa_log_level level, const char *line) {
    *(int *)ctx += level == CPA_LOG_DEBUG && strstr(line, "attend: ") && strstr(line, "prefill by ");
}

/* Whatever base of shapes has been attended before, this one has not. */
static void the_log_has_a_shape_once(void) {
    cpa_attend_case shape = CPA_ATTEND_BASE[0];
    int lines = 0;
    shape.block_size = 128;
    for (int i = 0; i < 4; i++) {
        cpa_attend_fixture f;
        cpa_attend_result result;
        if (i == 2) shape.block_size = 256;
        cpa_attend_fixture_init(&f, &shape, 1);
        cpa_attend_result_init(&result, &f);
        cpa_log_set(count_attend_lines, &lines, CPA_LOG_DEBUG);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &result), CPA_OK);
        cpa_log_set(NULL, NULL, CPA_LOG_WARN);
        CU_ASSERT_EQUAL(lines, i < 2 ? 1 : 2);
        cpa_attend_result_destroy(&result);
        cpa_attend_fixture_destroy(&f);
    }
}

static void what_cannot_be_told_is_refused(void) {
    const cpa_attend_batch batch = batch_of(CPA_BF16, 2);
    cpa_attend_args args = args_of(CPA_BF16);
    cpa_attend_kernels kernels = {.decode.name = "kept"};
    cpa_attend_plan *plan;
    cpa_device *device;
    cpa_stream *stream;
    cpa_error err;
    cpa_test_device_open(1, &device, &stream);
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_kernel(NULL, NULL, &kernels, sizeof kernels, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_attend_plan_kernel(plan, NULL, &kernels, sizeof kernels, &err), CPA_INVALID);
    CU_ASSERT(strstr(err.message, "has not been set") != NULL);
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_set(plan, &batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_kernel(plan, NULL, NULL, sizeof kernels, &err), CPA_INVALID);
    args.kv.k_dim = 2 * DIM;
    CU_ASSERT_EQUAL(cpa_attend_plan_kernel(plan, &args, &kernels, sizeof kernels, &err), CPA_INVALID);
    CU_ASSERT(strstr(err.message, "k_dim") != NULL);
    CU_ASSERT_STRING_EQUAL(kernels.decode.name, "kept");
    /* A caller that knows of decode alone. */
    kernels.prefill.name = "kept";
    CU_ASSERT_EQUAL(cpa_attend_plan_kernel(plan, NULL, &kernels, sizeof kernels.decode, &err), CPA_OK);
    CU_ASSERT(strcmp(kernels.decode.name, "kept") != 0 && !strcmp(kernels.prefill.name, "kept"));
    cpa_attend_plan_destroy(plan);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"each kind of rows has a name", each_kind_of_rows_has_a_name},
    {"fp32 is plain on a device alone", fp32_is_plain_on_a_device_alone},
    {"plain rows are counted", plain_rows_are_counted},
    {"the log has a shape once", the_log_has_a_shape_once},
    {"what cannot be told is refused", what_cannot_be_told_is_refused},
};
CPA_DEVICE_TEST_MAIN("plan_kernel", tests)
