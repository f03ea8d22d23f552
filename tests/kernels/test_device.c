/* What a device says of itself, and that its tables are whole. */
#include <string.h>

#include "kernels/graph.h"
#include "kernels/operators.h"
#include "kernels/self_test.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

static void is_whole(const void *table, size_t bytes) {
    CU_ASSERT_PTR_NOT_NULL_FATAL(table);
    for (size_t at = 0; at < bytes; at += sizeof(void (*)(void))) {
        void (*entry)(void);
        memcpy(&entry, (const char *)table + at, sizeof entry);
        CU_ASSERT_TRUE(entry != NULL);
    }
}

static void every_entry_of_a_table_is_set(void) {
    cpa_test_device_open(1, &device, &stream);
    is_whole(device->table, sizeof *device->table);
    is_whole(device->operators, sizeof *device->operators);
    if (device->caps.has_graphs) is_whole(device->graphs, sizeof *device->graphs);
    if (device->caps.has_reference) is_whole(device->self_test, sizeof *device->self_test);
    CU_ASSERT_TRUE(device->self_test->attend_path != NULL);
    cpa_test_device_close(device, stream);
}

static void capabilities_agree_with_each_other(void) {
    cpa_test_device_open(1, &device, &stream);
    const cpa_device_caps caps = device->caps;
    CPA_ASSERT_ORDER(caps.split_tokens, >=, 1);
    CU_ASSERT_EQUAL(caps.bit_exact, caps.split_tokens > 1);
    CU_ASSERT_EQUAL(caps.bit_exact, cpa_test_promises_bits());
    CU_ASSERT_EQUAL(cpa_attend_split_tokens(device), caps.split_tokens);
    CU_ASSERT_TRUE(!caps.has_graphs || caps.asynchronous); /* what has run cannot be noted */
    CU_ASSERT_EQUAL(caps.own_memory, cpa_device_free_memory(device->backend, 0) >= 0);
    CU_ASSERT_EQUAL(caps.shared_bytes > 0, device->backend == CPA_BACKEND_CUDA);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"every entry of a table is set", every_entry_of_a_table_is_set},
    {"capabilities agree with each other", capabilities_agree_with_each_other},
};
CPA_DEVICE_TEST_MAIN("device", tests)
