/* What the self-test of kernels attends over: its memory, inputs and pages. */
#ifndef CPA_SELF_TEST_PAGES_H
#define CPA_SELF_TEST_PAGES_H

#include "src/check/self_test_internal.h"

/* Memory that lives as long as the test; *out is a pointer. On the device it has the bytes of `from`, or NaN of every
 * dtype. */
cpa_status cpa_self_test_host(cpa_kernel_test *t, int64_t bytes, void *out, cpa_error *err);
cpa_status cpa_self_test_device(cpa_kernel_test *t, int64_t bytes, const void *from, void *out, cpa_error *err);

/* Queries, keys and values: `prefill` rows, then the decode rows. */
cpa_status cpa_self_test_make_inputs(cpa_kernel_test *t, int64_t prefill, cpa_error *err);
/* Writes the keys and values through a slot mapping into pages that lie in no order. */
cpa_status cpa_self_test_write_pages(cpa_kernel_test *t, cpa_error *err);
/* Packs both shards and compares what comes with what was written. What the cache holds replaces t->k and t->v. */
cpa_status cpa_self_test_check_pages(cpa_kernel_test *t, cpa_error *err);

#endif
