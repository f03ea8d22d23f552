/* Whole sequences dealt to the ranks' poisoned caches, steps of context attention over them, and the float64 reference
 * of every row that a rank owns. Every rank builds the same sequences and keeps its shards. */
#ifndef CPA_TESTS_CONTEXT_FIXTURE_H
#define CPA_TESTS_CONTEXT_FIXTURE_H

#include <cpattn/context.h>

#include "kv_fixture.h"

#define CPA_TEST_MAX_SEQUENCES 12

typedef struct cpa_test_shape {
    int32_t q_heads, kv_heads, k_dim, v_dim;
    int32_t block_size, interleave;
    cpa_dtype dtype;
    int head_major;
    cpa_mask mask;
} cpa_test_shape;

typedef struct cpa_test_cache {
    cpa_test_shape shape;
    cpa_owner_map map;
    int32_t rank;
    int64_t n_sequences;
    cpa_test_sequence sequences[CPA_TEST_MAX_SEQUENCES];
    int32_t phases[CPA_TEST_MAX_SEQUENCES];
    int32_t *tables[CPA_TEST_MAX_SEQUENCES];
    cpa_kv_fixture pool;
} cpa_test_cache;

/* A chunk of one of the sequences of a cache. */
typedef struct cpa_test_chunk {
    int64_t sequence, start, count;
    cpa_algorithm algorithm;
} cpa_test_chunk;

typedef struct cpa_test_result {
    int64_t rows, out_bytes, lse_bytes;
    void *out;  /* [rows, q_heads, v_dim] */
    float *lse; /* [rows, q_heads] */
} cpa_test_result;

/* The ranks of MPI_COMM_WORLD. */
int32_t cpa_test_ranks(void);
/* Random numbers in [0, n), the same on every rank that was given the same seed. */
void cpa_test_random_seed(uint64_t seed);
int64_t cpa_test_random_below(int64_t n);

/* What the phases below mean: p, dealt from rank p on; CPA_TEST_WHOLE + p, whole on rank p; modulo the ranks. */
enum { CPA_TEST_WHOLE = 100 };
/* One sequence in four is whole. */
int32_t cpa_test_random_phase(void);

void cpa_test_cache_init(cpa_test_cache *cache, cpa_test_shape shape, uint64_t seed, const int64_t *lengths,
                         const int32_t *phases, int64_t n);
void cpa_test_cache_destroy(cpa_test_cache *cache);

/* A context for the shape over MPI_COMM_WORLD; aborts if it cannot be made. */
cpa_context *cpa_test_context(cpa_device *device, const cpa_test_shape *shape, int64_t staging_bytes);
cpa_context_options cpa_test_context_options(const cpa_test_shape *shape, int64_t staging_bytes);

/* Plans the chunks. */
cpa_status cpa_test_plan(cpa_context *context, const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n);
/* One layer of a step on the device: what it reads and what it writes, which is poisoned. */
typedef struct cpa_test_layer {
    cpa_context_args args;
    cpa_test_result result;
} cpa_test_layer;

void cpa_test_layer_upload(const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n,
                           int want_lse, cpa_stream *stream, cpa_test_layer *layer);
/* Waits for the stream; frees what is on the device. The result is the caller's. */
void cpa_test_layer_download(cpa_test_layer *layer, cpa_stream *stream);

/* Attends one layer of the planned step on the stream's device: the chunks again, over this cache, under this mask. */
cpa_status cpa_test_attend(cpa_context *context, const cpa_test_cache *cache, cpa_mask mask,
                           const cpa_test_chunk *chunks, int64_t n, cpa_stream *stream, cpa_test_result *result);
/* The same without asking for the LSE; result->lse is NULL. */
cpa_status cpa_test_attend_without_lse(cpa_context *context, const cpa_test_cache *cache, cpa_mask mask,
                                       const cpa_test_chunk *chunks, int64_t n, cpa_stream *stream,
                                       cpa_test_result *result);
void cpa_test_result_destroy(cpa_test_result *result);

/* Whether two results have the same bits on a back end that promises bits; on another, whether each of the two is
 * within the tolerance. */
int cpa_test_same_bits_or_right(const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n,
                                const cpa_test_result *a, const cpa_test_result *b);

/* How many (row, head) of the result are off by more than the tolerance, in O or LSE. */
int64_t cpa_test_count_wrong(const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n,
                             const cpa_test_result *result);

#endif
