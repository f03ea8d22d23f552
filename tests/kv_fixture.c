#include "kv_fixture.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/host/quantise.h"
#include "kernels/kernels.h"
#include "src/reference.h"

/* All bits set is a NaN in every dtype, and -1 as an integer. */
void *cpa_test_poisoned(int64_t n, int64_t bytes) {
    size_t size = (size_t)(n * bytes);
    void *memory = malloc(size ? size : 1);
    if (!memory) abort();
    return memset(memory, 0xff, size);
}

void cpa_kv_fixture_init_view(cpa_kv_fixture *fixture, cpa_kv_view view, int head_major) {
    fixture->view = cpa_kv_view_order(view, head_major ? CPA_HEAD_MAJOR : CPA_TOKEN_MAJOR);
    fixture->k_bytes = view.num_blocks * fixture->view.k_block_stride * cpa_dtype_bytes(view.dtype);
    fixture->v_bytes = view.num_blocks * fixture->view.v_block_stride * cpa_dtype_bytes(view.dtype);
    fixture->view.k = cpa_test_poisoned(fixture->k_bytes, 1);
    fixture->view.v = cpa_test_poisoned(fixture->v_bytes, 1);
}

void cpa_kv_fixture_init(cpa_kv_fixture *fixture, cpa_dtype dtype, int64_t num_blocks, int32_t block_size,
                         int32_t kv_heads, int32_t k_dim, int32_t v_dim, int head_major) {
    cpa_kv_view view = {.dtype = dtype,
                        .block_size = block_size,
                        .num_blocks = num_blocks,
                        .kv_heads = kv_heads,
                        .k_dim = k_dim,
                        .v_dim = v_dim};
    cpa_kv_fixture_init_view(fixture, view, head_major);
}

void cpa_kv_fixture_destroy(cpa_kv_fixture *fixture) {
    free(fixture->view.k);
    free(fixture->view.v);
}

static char *key_at(const cpa_kv_view *kv, int64_t block, int64_t offset, int32_t head) {
    int64_t at = block * kv->k_block_stride + offset * kv->k_token_stride + head * kv->k_head_stride;
    return (char *)kv->k + at * cpa_dtype_bytes(kv->dtype);
}

static char *value_at(const cpa_kv_view *kv, int64_t block, int64_t offset, int32_t head) {
    int64_t at = block * kv->v_block_stride + offset * kv->v_token_stride + head * kv->v_head_stride;
    return (char *)kv->v + at * cpa_dtype_bytes(kv->dtype);
}

/* The scale word of a row; the pool has room for it only if rows have scales. */
static uint32_t *key_word(const cpa_kv_view *kv, int64_t block, int64_t offset, int32_t head) {
    char *words = (char *)kv->k + block * kv->k_block_stride + cpa_kv_scales_at(kv, kv->k_dim, kv->k_scale);
    return (uint32_t *)(void *)words + head * (int64_t)kv->block_size + offset;
}

static uint32_t *value_word(const cpa_kv_view *kv, int64_t block, int64_t offset, int32_t head) {
    char *words = (char *)kv->v + block * kv->v_block_stride + cpa_kv_scales_at(kv, kv->v_dim, kv->v_scale);
    return (uint32_t *)(void *)words + head * (int64_t)kv->block_size + offset;
}

static void store_row(char *row, uint32_t *word, const cpa_kv_view *kv, float tensor_scale, const float *x,
                      int32_t dim) {
    if (!cpa_dtype_is_quantised(kv->dtype)) {
        cpa_narrow(row, x, kv->dtype, dim);
        return;
    }
    uint32_t made = cpa_quantise(row, x, kv->dtype, tensor_scale, dim);
    if (cpa_kv_scale_bytes(kv->dtype, tensor_scale)) *word = made;
}

void cpa_kv_fixture_store(cpa_kv_fixture *fixture, int64_t block, int64_t offset, int32_t head, const float *k,
                          const float *v) {
    const cpa_kv_view *kv = &fixture->view;
    store_row(key_at(kv, block, offset, head), key_word(kv, block, offset, head), kv, kv->k_scale, k, kv->k_dim);
    store_row(value_at(kv, block, offset, head), value_word(kv, block, offset, head), kv, kv->v_scale, v, kv->v_dim);
}

void cpa_kv_fixture_load(const cpa_kv_fixture *fixture, int64_t block, int64_t offset, int32_t head, float *k,
                         float *v) {
    const cpa_kv_view *kv = &fixture->view;
    cpa_reference_read_rows(key_at(kv, block, offset, head), key_word(kv, block, offset, head), kv->dtype, kv->k_scale,
                            1, kv->k_dim, k);
    cpa_reference_read_rows(value_at(kv, block, offset, head), value_word(kv, block, offset, head), kv->dtype,
                            kv->v_scale, 1, kv->v_dim, v);
}

cpa_kv_view cpa_kv_fixture_upload(const cpa_kv_fixture *fixture, cpa_stream *stream) {
    cpa_kv_view view = fixture->view;
    view.k = cpa_test_upload(stream, fixture->view.k, fixture->k_bytes);
    view.v = cpa_test_upload(stream, fixture->view.v, fixture->v_bytes);
    return view;
}

void cpa_kv_fixture_download(cpa_kv_fixture *fixture, const cpa_kv_view *view, cpa_stream *stream) {
    cpa_test_download(stream, fixture->view.k, view->k, fixture->k_bytes);
    cpa_test_download(stream, fixture->view.v, view->v, fixture->v_bytes);
}

void cpa_kv_view_free(const cpa_kv_view *view, cpa_stream *stream) {
    cpa_test_free(stream, view->k);
    cpa_test_free(stream, view->v);
}

/* Fills one tensor of the sequence and rounds it to the dtype. */
static float *synthesize(cpa_device *device, const cpa_test_sequence *sequence, cpa_synth_tensor tensor, uint64_t seed,
                         int32_t heads, int32_t dim, cpa_dtype dtype) {
    int64_t n = sequence->length * heads * dim;
    float *out = cpa_test_poisoned(n, sizeof *out);
    uint32_t *tokens = cpa_test_poisoned(sequence->length, sizeof *tokens);
    int64_t *positions = cpa_test_poisoned(sequence->length, sizeof *positions);
    char *rounded = cpa_test_poisoned(n, cpa_dtype_bytes(dtype));
    for (int64_t i = 0; i < sequence->length; i++) {
        positions[i] = i;
        tokens[i] = (uint32_t)(seed * 7919 + (uint64_t)i * 2654435761u);
    }
    cpa_synth_args args = {.tensor = tensor,
                           .seed = seed,
                           .heads = heads,
                           .kv_heads = sequence->kv_heads,
                           .dim = dim,
                           .rows = sequence->length,
                           .tokens = tokens,
                           .positions = positions,
                           .dtype = CPA_F32,
                           .out = out};
    cpa_stream *stream = NULL;
    if (cpa_stream_create(device, &stream, NULL) != CPA_OK) abort();
    if (device->kernels->synthesize(&args, stream) != CPA_OK) abort();
    cpa_stream_destroy(stream);
    cpa_narrow(rounded, out, dtype, n);
    cpa_widen(out, rounded, dtype, n);
    free(rounded);
    free(positions);
    free(tokens);
    return out;
}

void cpa_test_sequence_init(cpa_test_sequence *sequence, uint64_t seed, int64_t length, int32_t q_heads,
                            int32_t kv_heads, int32_t k_dim, int32_t v_dim, cpa_dtype dtype) {
    cpa_device_options options = {.size = sizeof options};
    cpa_device *device = NULL;
    if (cpa_device_open(&options, &device, NULL) != CPA_OK) abort();
    *sequence =
        (cpa_test_sequence){.length = length, .q_heads = q_heads, .kv_heads = kv_heads, .k_dim = k_dim, .v_dim = v_dim};
    sequence->q = synthesize(device, sequence, CPA_SYNTH_Q, seed, q_heads, k_dim, dtype);
    sequence->k = synthesize(device, sequence, CPA_SYNTH_K, seed, kv_heads, k_dim, dtype);
    sequence->v = synthesize(device, sequence, CPA_SYNTH_V, seed, kv_heads, v_dim, dtype);
    cpa_device_close(device);
}

void cpa_test_sequence_destroy(cpa_test_sequence *sequence) {
    free(sequence->q);
    free(sequence->k);
    free(sequence->v);
}

int32_t *cpa_test_block_table(int64_t tokens, int32_t block_size, int64_t first_block, int64_t spare) {
    int64_t blocks = (tokens + block_size - 1) / block_size;
    int32_t *table = cpa_test_poisoned(blocks + spare, sizeof *table);
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)(first_block + blocks - 1 - i);
    for (int64_t i = blocks; i < blocks + spare; i++) table[i] = INT32_MAX;
    return table;
}

int64_t cpa_test_store_shard(cpa_kv_fixture *fixture, const cpa_test_sequence *sequence, cpa_owner_map map,
                             int32_t slot, int64_t length, const int32_t *block_table) {
    int64_t tokens = cpa_shard_len(map, slot, length);
    int32_t block_size = fixture->view.block_size, heads = sequence->kv_heads;
    for (int64_t i = 0; i < tokens; i++) {
        int64_t position = cpa_shard_pos(map, slot, i);
        for (int32_t head = 0; head < heads; head++) {
            cpa_kv_fixture_store(fixture, block_table[i / block_size], i % block_size, head,
                                 sequence->k + (position * heads + head) * sequence->k_dim,
                                 sequence->v + (position * heads + head) * sequence->v_dim);
        }
    }
    return tokens;
}
