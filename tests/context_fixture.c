#include "context_fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/host/convert.h"
#include "src/context_internal.h"
#include "src/reference.h"
#include "tests/transport_fixture.h"

/* Pages between the tables of two sequences, and table entries past the end of each: never to be read. */
enum { GAP_BLOCKS = 2, SPARE_ENTRIES = 3 };

int32_t cpa_test_ranks(void) {
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

static uint64_t random_state;

void cpa_test_random_seed(uint64_t seed) {
    random_state = seed;
}

int64_t cpa_test_random_below(int64_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((random_state >> 33) % (uint64_t)n);
}

int32_t cpa_test_random_phase(void) {
    int32_t rank = (int32_t)cpa_test_random_below(16);
    return cpa_test_random_below(4) ? rank : CPA_TEST_WHOLE + rank;
}

void cpa_test_cache_init(cpa_test_cache *cache, cpa_test_shape shape, uint64_t seed, const int64_t *lengths,
                         const int32_t *phases, int64_t n) {
    int size;
    *cache = (cpa_test_cache){.shape = shape, .n_sequences = n};
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &cache->rank);
    cache->map = (cpa_owner_map){size, shape.interleave};
    int64_t blocks = GAP_BLOCKS;
    for (int64_t i = 0; i < n; i++) {
        int32_t phase = phases ? phases[i] : 0;
        cache->phases[i] =
            phase < CPA_TEST_WHOLE ? phase % size : cpa_owner_whole_phase(cache->map, (phase - CPA_TEST_WHOLE) % size);
        int64_t tokens =
            cpa_shard_len(cache->map, cpa_owner_slot(cache->map, cache->rank, cache->phases[i]), lengths[i]);
        cache->tables[i] = cpa_test_block_table(tokens, shape.block_size, blocks, SPARE_ENTRIES);
        blocks += (tokens + shape.block_size - 1) / shape.block_size + GAP_BLOCKS;
    }
    cpa_kv_fixture_init(&cache->pool, shape.dtype, blocks, shape.block_size, shape.kv_heads, shape.k_dim, shape.v_dim,
                        shape.head_major);
    for (int64_t i = 0; i < n; i++) {
        cpa_test_sequence_init(&cache->sequences[i], seed * 100 + (uint64_t)i, lengths[i], shape.q_heads,
                               shape.kv_heads, shape.k_dim, shape.v_dim, shape.dtype);
        cpa_test_store_shard(&cache->pool, &cache->sequences[i], cache->map,
                             cpa_owner_slot(cache->map, cache->rank, cache->phases[i]), lengths[i], cache->tables[i]);
    }
}

void cpa_test_cache_destroy(cpa_test_cache *cache) {
    for (int64_t i = 0; i < cache->n_sequences; i++) {
        cpa_test_sequence_destroy(&cache->sequences[i]);
        free(cache->tables[i]);
    }
    cpa_kv_fixture_destroy(&cache->pool);
}

cpa_context_options cpa_test_context_options(const cpa_test_shape *shape, int64_t staging_bytes) {
    return (cpa_context_options){
        .size = sizeof(cpa_context_options),
        .q_heads = shape->q_heads,
        .kv_heads = shape->kv_heads,
        .k_dim = shape->k_dim,
        .v_dim = shape->v_dim,
        .dtype = shape->dtype,
        .kv_dtype = shape->dtype,
        .block_size = shape->block_size,
        .interleave = shape->interleave,
        .staging_bytes = staging_bytes,
        .max_rows = 4096,
    };
}

cpa_context *cpa_test_context(cpa_device *device, const cpa_test_shape *shape, int64_t staging_bytes) {
    cpa_context_options options = cpa_test_context_options(shape, staging_bytes);
    cpa_context *context = NULL;
    cpa_error err;
    const cpa_transport_table *over = cpa_test_transport_kind() == CPA_TRANSPORT_AUTO ? NULL : cpa_test_transport();
    if (cpa_context_create_over(MPI_COMM_WORLD, device, over, &options, &context, &err) != CPA_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return context;
}

cpa_status cpa_test_plan(cpa_context *context, const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n) {
    cpa_context_chunk planned[CPA_TEST_MAX_SEQUENCES];
    for (int64_t i = 0; i < n; i++) {
        planned[i] = (cpa_context_chunk){
            .start = chunks[i].start,
            .count = chunks[i].count,
            .phase = cache->phases[chunks[i].sequence],
            .algorithm = chunks[i].algorithm,
            .block_table = cache->tables[chunks[i].sequence],
        };
    }
    return cpa_context_plan(context, planned, n);
}

/* The local indices of a chunk on this rank: [*first, *end). */
static int32_t own_tokens(const cpa_test_cache *cache, const cpa_test_chunk *chunk, int64_t *first, int64_t *end) {
    int32_t slot = cpa_owner_slot(cache->map, cache->rank, cache->phases[chunk->sequence]);
    *first = cpa_shard_len(cache->map, slot, chunk->start);
    *end = cpa_shard_len(cache->map, slot, chunk->start + chunk->count);
    return slot;
}

/* The queries of this rank's rows, in the dtype of the shape. */
static char *gather_queries(const cpa_test_cache *cache, const cpa_test_chunk *chunks, int64_t n, int64_t *rows) {
    int64_t row = 0, first, end, width = (int64_t)cache->shape.q_heads * cache->shape.k_dim;
    for (int64_t i = 0; i < n; i++) {
        own_tokens(cache, &chunks[i], &first, &end);
        row += end - first;
    }
    *rows = row;
    float *wide = cpa_test_poisoned(row * width, sizeof *wide);
    row = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t slot = own_tokens(cache, &chunks[i], &first, &end);
        for (int64_t local = first; local < end; local++, row++) {
            int64_t position = cpa_shard_pos(cache->map, slot, local);
            memcpy(wide + row * width, cache->sequences[chunks[i].sequence].q + position * width,
                   (size_t)width * sizeof *wide);
        }
    }
    char *q = cpa_test_poisoned(row * width, cpa_dtype_bytes(cache->shape.dtype));
    cpa_narrow(q, wide, cache->shape.dtype, row * width);
    free(wide);
    return q;
}

void cpa_test_layer_upload(const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n,
                           int want_lse, cpa_stream *stream, cpa_test_layer *layer) {
    const cpa_test_shape *shape = &cache->shape;
    cpa_test_result *result = &layer->result;
    char *q = gather_queries(cache, chunks, n, &result->rows);
    result->out_bytes = result->rows * shape->q_heads * shape->v_dim * cpa_dtype_bytes(shape->dtype);
    result->out = cpa_test_poisoned(result->out_bytes, 1);
    result->lse_bytes = want_lse ? result->rows * shape->q_heads * (int64_t)sizeof(float) : 0;
    result->lse = want_lse ? cpa_test_poisoned(result->lse_bytes, 1) : NULL;
    int64_t q_bytes = result->rows * shape->q_heads * shape->k_dim * cpa_dtype_bytes(shape->dtype);
    layer->args = (cpa_context_args){.size = sizeof layer->args,
                                     .q = cpa_test_upload(stream, q, q_bytes),
                                     .kv = cpa_kv_fixture_upload(&cache->pool, stream),
                                     .mask = mask,
                                     .out = cpa_test_upload(stream, result->out, result->out_bytes),
                                     .lse = want_lse ? cpa_test_upload(stream, result->lse, result->lse_bytes) : NULL};
    free(q);
}

void cpa_test_layer_download(cpa_test_layer *layer, cpa_stream *stream) {
    cpa_context_args *args = &layer->args;
    cpa_test_download(stream, layer->result.out, args->out, layer->result.out_bytes);
    if (args->lse) {
        cpa_test_download(stream, layer->result.lse, args->lse, layer->result.lse_bytes);
        cpa_test_free(stream, args->lse);
    }
    cpa_test_free(stream, args->out);
    cpa_test_free(stream, (void *)(uintptr_t)args->q);
    cpa_kv_view_free(&args->kv, stream);
}

static cpa_status attend(cpa_context *context, const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunks,
                         int64_t n, int want_lse, cpa_stream *stream, cpa_test_result *result) {
    cpa_test_layer layer;
    cpa_test_layer_upload(cache, mask, chunks, n, want_lse, stream, &layer);
    cpa_status status = cpa_context_attend(context, &layer.args, stream);
    if (status == CPA_OK) status = cpa_stream_sync(stream);
    if (status != CPA_OK) fprintf(stderr, "rank %d: %s\n", cache->rank, cpa_context_error(context));
    cpa_test_layer_download(&layer, stream);
    *result = layer.result;
    return status;
}

cpa_status cpa_test_attend(cpa_context *context, const cpa_test_cache *cache, cpa_mask mask,
                           const cpa_test_chunk *chunks, int64_t n, cpa_stream *stream, cpa_test_result *result) {
    return attend(context, cache, mask, chunks, n, 1, stream, result);
}

cpa_status cpa_test_attend_without_lse(cpa_context *context, const cpa_test_cache *cache, cpa_mask mask,
                                       const cpa_test_chunk *chunks, int64_t n, cpa_stream *stream,
                                       cpa_test_result *result) {
    return attend(context, cache, mask, chunks, n, 0, stream, result);
}

void cpa_test_result_destroy(cpa_test_result *result) {
    free(result->out);
    free(result->lse);
}

static int same_bits(const cpa_test_result *a, const cpa_test_result *b) {
    if (a->rows != b->rows || a->out_bytes != b->out_bytes) return 0;
    if (a->rows == 0) return 1;
    return memcmp(a->out, b->out, (size_t)a->out_bytes) == 0 && memcmp(a->lse, b->lse, (size_t)a->lse_bytes) == 0;
}

int cpa_test_same_bits_or_right(const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n,
                                const cpa_test_result *a, const cpa_test_result *b) {
    if (cpa_test_promises_bits()) return same_bits(a, b);
    return a->rows == b->rows && cpa_test_count_wrong(cache, mask, chunks, n, a) == 0 &&
           cpa_test_count_wrong(cache, mask, chunks, n, b) == 0;
}

/* Whether one (row, head) of a result is right; lse NULL: not looked at. */
static int is_right(const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunk, int64_t position,
                    int32_t head, const float *out, const float *lse) {
    const cpa_test_shape *shape = &cache->shape;
    const cpa_test_sequence *sequence = &cache->sequences[chunk->sequence];
    int32_t kv_head = head / (shape->q_heads / shape->kv_heads);
    cpa_reference_row row;
    double want[CPA_MAX_HEAD_DIM], want_lse, tolerance;
    cpa_reference_begin(&row, sequence->q + (position * shape->q_heads + head) * shape->k_dim, shape->k_dim,
                        shape->v_dim, shape->dtype, 0);
    for (int64_t key = 0; key < chunk->start + chunk->count; key++) {
        if (!cpa_reference_sees(mask, position, key)) continue;
        int64_t at = key * shape->kv_heads + kv_head;
        cpa_reference_add(&row, sequence->k + at * shape->k_dim, sequence->v + at * shape->v_dim);
    }
    cpa_reference_end(&row, want, &want_lse, &tolerance);
    double error = cpa_reference_error(out, want, shape->v_dim);
    if (!(error <= tolerance)) return 0;
    if (!lse || (want_lse == -INFINITY && *lse == -INFINITY)) return 1;
    return fabs(*lse - want_lse) <= cpa_reference_lse_tolerance(shape->dtype);
}

int64_t cpa_test_count_wrong(const cpa_test_cache *cache, cpa_mask mask, const cpa_test_chunk *chunks, int64_t n,
                             const cpa_test_result *result) {
    const cpa_test_shape *shape = &cache->shape;
    int64_t row = 0, wrong = 0, first, end;
    for (int64_t i = 0; i < n; i++) {
        int32_t slot = own_tokens(cache, &chunks[i], &first, &end);
        for (int64_t local = first; local < end; local++, row++) {
            for (int32_t head = 0; head < shape->q_heads; head++) {
                float out[CPA_MAX_HEAD_DIM];
                int64_t at = row * shape->q_heads + head;
                cpa_reference_widen((char *)result->out + at * shape->v_dim * cpa_dtype_bytes(shape->dtype),
                                    shape->dtype, shape->v_dim, out);
                int64_t position = cpa_shard_pos(cache->map, slot, local);
                wrong += !is_right(cache, mask, &chunks[i], position, head, out, result->lse ? &result->lse[at] : NULL);
            }
        }
    }
    return wrong;
}
