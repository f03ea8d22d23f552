/* What the files of the self-test of operations share.
 *
 *   self_test_kernels.c  attend and merge, against the reference
 *   self_test_rules.c    attend with score rules and masks of bits
 *   self_test_results.c  results, and what they are compared with
 *   self_test_pages.c    memory and inputs; kv_write and kv_pack
 */
#ifndef CPA_SELF_TEST_INTERNAL_H
#define CPA_SELF_TEST_INTERNAL_H

#include "kernels/self_test.h"
#include "src/check/self_test_kernels.h"

/* One sequence over two shards: the queries lie in shard 0, keys in both. */
enum {
    CPA_SELF_TEST_SHARDS = 2,
    CPA_SELF_TEST_DECODE_ROWS = 3,
    CPA_SELF_TEST_SPARE_BLOCKS = 2,
    CPA_SELF_TEST_BUFFERS = 36
};

/* Results of every row and head, on the device. */
typedef struct cpa_self_test_result {
    float *o, *lse;
    void *out;
} cpa_self_test_result;

/* What rows must be. tolerance < 0: the row was not computed. */
typedef struct cpa_self_test_expected {
    float *o, *lse, *tolerance; /* host: [rows, heads, v_dim], [rows, heads] twice */
} cpa_self_test_expected;

typedef struct cpa_kernel_test {
    cpa_device *device;
    const cpa_worker_options *options;
    cpa_self_test_kernels_stats *stats;
    cpa_stream *stream;
    cpa_reference_blas *blas; /* NULL: the reference runs on the host */
    cpa_attend_plan *plans[CPA_SELF_TEST_SHARDS];
    uint64_t seed;
    cpa_owner_map map;
    cpa_dtype coarser;
    float scale;
    void *device_memory[CPA_SELF_TEST_BUFFERS], *host_memory[CPA_SELF_TEST_BUFFERS];
    int32_t n_device, n_host;

    int64_t keys[CPA_SELF_TEST_SHARDS];          /* keys of each shard */
    int64_t rows;                                /* prefill rows, then decode rows */
    int64_t *k_positions, *q_positions, *limits; /* host; limits: the keys of shard 1 that a row is given */
    char *q_raw, *k_raw, *v_raw;                 /* in the model's dtype */
    float *q, *k, *v; /* queries, keys and values as the kernels read them, rounded to the cache's dtype */
    int32_t *tables;  /* shard 0's entries, then shard 1's */
    int64_t n_blocks, first_entry[CPA_SELF_TEST_SHARDS];
    cpa_kv_view kv;
    void *q_device;
    cpa_self_test_result results[3];
    cpa_self_test_expected want;
    /* For the reference on the device. */
    float *q_wide, *k_wide, *v_wide, *ref_o, *ref_mass, *ref_lse;
    int64_t *k_positions_device, *q_positions_device, *limits_device;
    char *got; /* host: the largest result */
} cpa_kernel_test;

static inline int64_t cpa_self_test_total_keys(const cpa_kernel_test *t) {
    return t->keys[0] + t->keys[1];
}

#endif
