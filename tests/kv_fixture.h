/* Paged caches and sequences for tests: pools whose untouched memory is NaN, block tables whose unused entries are
 * huge, and peaky inputs. They are made in host memory; tests upload them. Functions abort on a lack of memory. */
#ifndef CPA_TESTS_KV_FIXTURE_H
#define CPA_TESTS_KV_FIXTURE_H

#include "device_fixture.h"

/* A pool of pages, all NaN at first. */
typedef struct cpa_kv_fixture {
    cpa_kv_view view;
    int64_t k_bytes, v_bytes;
} cpa_kv_fixture;

/* head_major orders a block [kv_heads, block_size, dim] instead of [block_size, kv_heads, dim]. */
void cpa_kv_fixture_init(cpa_kv_fixture *fixture, cpa_dtype dtype, int64_t num_blocks, int32_t block_size,
                         int32_t kv_heads, int32_t k_dim, int32_t v_dim, int head_major);
/* The same for a view whose pools and strides are not set: any dtype of a cache and any scales. */
void cpa_kv_fixture_init_view(cpa_kv_fixture *fixture, cpa_kv_view view, int head_major);
void cpa_kv_fixture_destroy(cpa_kv_fixture *fixture);
/* Stores one token's key and value of one head, rounded to the dtype of the pool, and reads them back. */
void cpa_kv_fixture_store(cpa_kv_fixture *fixture, int64_t block, int64_t offset, int32_t head, const float *k,
                          const float *v);
void cpa_kv_fixture_load(const cpa_kv_fixture *fixture, int64_t block, int64_t offset, int32_t head, float *k,
                         float *v);
/* The pool in the memory of the stream's device, as it is now; and what that holds, back into the fixture. */
cpa_kv_view cpa_kv_fixture_upload(const cpa_kv_fixture *fixture, cpa_stream *stream);
void cpa_kv_fixture_download(cpa_kv_fixture *fixture, const cpa_kv_view *view, cpa_stream *stream);
void cpa_kv_view_free(const cpa_kv_view *view, cpa_stream *stream);

/* Queries, keys and values of a whole sequence as floats, already rounded to a dtype:
 * q [length, q_heads, k_dim], k [length, kv_heads, k_dim], v [length, kv_heads, v_dim]. */
typedef struct cpa_test_sequence {
    int64_t length;
    int32_t q_heads, kv_heads, k_dim, v_dim;
    float *q, *k, *v;
} cpa_test_sequence;

/* Peaky inputs: the generator of kernels/host/synthesize.c. */
void cpa_test_sequence_init(cpa_test_sequence *sequence, uint64_t seed, int64_t length, int32_t q_heads,
                            int32_t kv_heads, int32_t k_dim, int32_t v_dim, cpa_dtype dtype);
void cpa_test_sequence_destroy(cpa_test_sequence *sequence);

/* A block table for `tokens` tokens with `spare` unused entries after it, which hold a huge id. The blocks are taken
 * from the end of [first_block, first_block + ceil(tokens / block_size)), so that no table is the identity. free() it.
 */
int32_t *cpa_test_block_table(int64_t tokens, int32_t block_size, int64_t first_block, int64_t spare);

/* Stores the keys and values of the shard at `slot` of the first `length` tokens through a block table; returns how
 * many tokens it holds. */
int64_t cpa_test_store_shard(cpa_kv_fixture *fixture, const cpa_test_sequence *sequence, cpa_owner_map map,
                             int32_t slot, int64_t length, const int32_t *block_table);

/* Allocates n * bytes, filled with NaN bits. */
void *cpa_test_poisoned(int64_t n, int64_t bytes);

#endif
