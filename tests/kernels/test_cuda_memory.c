/* Memory and streams of the CUDA back end: what callers and plans may count on. */
#include <cuda_runtime_api.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/cuda/device/cuda.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *cuda_device;
static cpa_stream *cuda_stream;

/* What the caller enqueues between two copies of the library comes between them. */
static void the_native_stream_keeps_the_order(void) {
    enum { BYTES = 64 << 20 };
    unsigned char *before = cpa_test_poisoned(BYTES, 1), *after = cpa_test_poisoned(BYTES, 1);
    memset(before, 1, BYTES);
    void *memory = cpa_test_upload(cuda_stream, before, BYTES);
    CU_ASSERT_EQUAL(cuda_device->table->copy(memory, before, BYTES, cuda_stream), CPA_OK);
    CU_ASSERT_EQUAL(cudaMemsetAsync(memory, 2, BYTES, cpa_stream_native(cuda_stream)), cudaSuccess);
    CU_ASSERT_EQUAL(cuda_device->table->copy(after, memory, BYTES, cuda_stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(cuda_stream), CPA_OK);
    memset(before, 2, BYTES);
    CU_ASSERT_EQUAL(memcmp(before, after, BYTES), 0);
    cpa_test_free(cuda_stream, memory);
    free(after);
    free(before);
}

/* A stream that does nothing until it is told to, or for seconds. */
typedef struct barred {
    _Atomic int open, seconds_passed;
} barred;

static void CUDART_CB hold_stream(void *ctx) {
    const double most_s = 5, begin = cpa_clock_now();
    barred *b = ctx;
    while (!b->open && cpa_clock_now() - begin < most_s) sched_yield();
    b->seconds_passed = !b->open;
}

/* A plan for so many sequences of 512 keys. */
static cpa_status plan_sequences(cpa_attend_plan *plan, int64_t n) {
    enum { MOST = 4096, BLOCK = 64, BLOCKS = 8 };
    static cpa_attend_item items[MOST];
    static const int32_t table[BLOCKS] = {0};
    for (int64_t i = 0; i < n; i++)
        items[i] =
            (cpa_attend_item){.q_row = i, .q_count = 1, .q_first = BLOCK * BLOCKS - 1, .k_count = BLOCK * BLOCKS};
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {1, BLOCK},
                                    .shape.q_heads = 8,
                                    .shape.kv_heads = 2,
                                    .shape.k_dim = 128,
                                    .shape.v_dim = 128,
                                    .block_size = BLOCK,
                                    .shape.kv_dtype = CPA_BF16,
                                    .items = items,
                                    .n_items = n,
                                    .block_tables = table,
                                    .n_table_entries = BLOCKS};
    return cuda_device->operators->plan_set(plan, &batch, (cpa_attend_fusion){0}, NULL);
}

/* Whoever plans a step is the one who gives up on the step before: it must not wait for that. */
static void what_is_outgrown_is_freed_without_waiting(void) {
    enum { BYTES = 1 << 20 };
    const cpa_device_table *table = cuda_device->table;
    cpa_attend_plan *plan;
    void *memory;
    barred b = {0, 0};
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(cuda_device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_device_alloc(cuda_device, BYTES, &memory, NULL), CPA_OK);
    CU_ASSERT_EQUAL(plan_sequences(plan, 1), CPA_OK);
    CU_ASSERT_EQUAL(cudaLaunchHostFunc(cpa_stream_native(cuda_stream), hold_stream, &b), cudaSuccess);
    CU_ASSERT_EQUAL(cudaMemsetAsync(memory, 1, BYTES, cpa_stream_native(cuda_stream)), cudaSuccess);
    table->retire(cuda_device, memory);
    for (int64_t n = 2; n <= 4096; n *= 2) CU_ASSERT_EQUAL(plan_sequences(plan, n), CPA_OK);
    CU_ASSERT_EQUAL(b.seconds_passed, 0);
    b.open = 1;
    CU_ASSERT_EQUAL(cpa_stream_sync(cuda_stream), CPA_OK);
    CU_ASSERT_EQUAL(b.seconds_passed, 0);
    table->release(cuda_device);
    CU_ASSERT_PTR_NULL(((cpa_cuda_device *)cuda_device)->retired);
    cpa_attend_plan_destroy(plan);
}

static void too_much_memory_is_refused(void) {
    cpa_error err = {0};
    void *memory = NULL;
    CU_ASSERT_EQUAL(cpa_device_alloc(cuda_device, (int64_t)1 << 45, &memory, &err), CPA_NO_MEMORY);
    CU_ASSERT_PTR_NULL(memory);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "35184372088832 bytes"));
    CU_ASSERT_EQUAL(cpa_stream_sync(cuda_stream), CPA_OK);
}

/* Memory of at most so many bytes at once; what is longer there is none for. */
static void *limited_alloc(void *most, int64_t bytes) {
    void *memory = NULL;
    return bytes <= *(int64_t *)most && cudaMalloc(&memory, (size_t)bytes) == cudaSuccess ? memory : NULL;
}
static void limited_free(void *most, void *memory) {
    (void)most;
    CU_ASSERT_EQUAL(cudaFree(memory), cudaSuccess);
}

/* What prefill over 1,024 keys of an fp8 cache runs, whose workspace would take 4.9 MB. */
static cpa_attend_kernel prefill_within(int64_t most) {
    enum { BLOCK = 64, BLOCKS = 16, ROWS = 64 };
    static const int32_t table[BLOCKS] = {0};
    const cpa_attend_item item = {.q_count = ROWS, .q_first = BLOCK * BLOCKS - ROWS, .k_count = BLOCK * BLOCKS};
    const cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = {1, BLOCK},
        .shape =
            {.q_heads = 32, .kv_heads = 8, .k_dim = 128, .v_dim = 128, .dtype = CPA_BF16, .kv_dtype = CPA_FP8_E4M3},
        .block_size = BLOCK,
        .items = &item,
        .n_items = 1,
        .block_tables = table,
        .n_table_entries = BLOCKS};
    cpa_device_options options = cpa_test_device_options(1);
    cpa_attend_kernels kernels = {0};
    cpa_device *device;
    cpa_attend_plan *plan;
    options.memory = (cpa_allocator){limited_alloc, limited_free, &most};
    CU_ASSERT_EQUAL_FATAL(cpa_device_open(&options, &device, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &batch, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_kernel(plan, NULL, &kernels, sizeof kernels, NULL), CPA_OK);
    cpa_attend_plan_destroy(plan);
    cpa_device_close(device);
    return kernels.prefill;
}

static void keys_are_prepared_in_what_memory_there_is(void) {
    if (((cpa_cuda_device *)cuda_device)->path != CPA_CUDA_HOPPER) return;
    CU_ASSERT_PTR_NULL(prefill_within((int64_t)1 << 30).why);
    CU_ASSERT_PTR_NULL(prefill_within(1 << 20).why);
    const cpa_attend_kernel none = prefill_within(512 << 10);
    CU_ASSERT_STRING_EQUAL(none.fastest, "widen+hopper");
    CU_ASSERT_STRING_NOT_EQUAL(none.name, "widen+hopper");
    CU_ASSERT_PTR_NOT_NULL_FATAL(none.why);
    CU_ASSERT_PTR_NOT_NULL(strstr(none.why, "no memory"));
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"the native stream keeps the order", the_native_stream_keeps_the_order},
        {"what is outgrown is freed without waiting", what_is_outgrown_is_freed_without_waiting},
        {"too much memory is refused with the numbers", too_much_memory_is_refused},
        {"keys are prepared in what memory there is", keys_are_prepared_in_what_memory_there_is},
    };
    int missing = cpa_test_cuda_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    cpa_test_device_open(1, &cuda_device, &cuda_stream);
    int code = cpa_test_main(argc, argv, "memory on CUDA", tests, (int)(sizeof tests / sizeof tests[0]));
    cpa_test_device_close(cuda_device, cuda_stream);
    return code;
}
