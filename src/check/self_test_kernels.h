/* The self-test of one device's operations, before ranks work together: kv_write and kv_pack bring keys and values into
 * pages and back, and every path of attend, prefill and decode, fresh and resumed, under each mask, the same over
 * tensors without pages, with score rules and masks of bits, and merge give what an unfused reference gives. The
 * reference is fp32 on the device's BLAS where there is one, every row; float64 on the host (src/check/reference.h),
 * some rows, elsewhere and for rules. Page tails and unused pages hold NaN. */
#ifndef CPA_SELF_TEST_KERNELS_H
#define CPA_SELF_TEST_KERNELS_H

#include "src/worker/worker.h"

typedef struct cpa_self_test_kernels_stats {
    int64_t rows;    /* (row, head) results compared */
    int32_t paths;   /* paths of attend */
    int32_t on_blas; /* whether the reference ran on the device */
    char why[200];   /* why not, where its library is missing; else empty */
} cpa_self_test_kernels_stats;

/* Shapes and dtypes are those of `options`. CPA_CHECK_FAILED with the operation, path, shape, row, head and error of
 * the first wrong result. Waits for the device. */
cpa_status cpa_self_test_kernels(cpa_device *device, const cpa_worker_options *options, uint64_t seed,
                                 cpa_self_test_kernels_stats *stats, cpa_error *err);

#endif
