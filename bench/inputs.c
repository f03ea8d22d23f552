#include "bench/inputs.h"

#include <stdlib.h>

#include "base/check.h"
#include "bench/memory.h"
#include "bench/noise.h"
#include "src/check/cases/inputs.h"
#include "src/check/reference.h"
#include "src/check/reference_rows.h"
#include "src/model/synthetic.h"

enum { PIECE_TOKENS = 16384 }; /* given to one kv_write */
static uint64_t seed = 1;

int64_t *cpa_bench_positions(int64_t first, int64_t n) {
    int64_t *positions = malloc((size_t)(n + 1) * sizeof *positions);
    for (int64_t i = 0; positions && i < n; i++) positions[i] = first + i;
    return positions;
}

/* The dtype of what is written to the cache. */
static cpa_dtype written_dtype(const cpa_bench_options *o) {
    return (cpa_dtype)(cpa_dtype_is_quantised((cpa_dtype)o->kv_dtype) ? o->dtype : o->kv_dtype);
}

/* A share of the keys becomes light, on the host. */
static cpa_status lighten(cpa_bench_site *site, cpa_dtype dtype, const int64_t *positions, int64_t n, void *keys,
                          cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    const int64_t row = o->kv_heads * o->k_dim, bytes = n * row * cpa_dtype_bytes(dtype);
    void *host = malloc((size_t)bytes);
    cpa_status status = host ? cpa_bench_copy(site, host, keys, bytes, err)
                             : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for %lld keys", (long long)n);
    if (status == CPA_OK) {
        cpa_case_lighten(host, dtype, row, positions, n, o->light);
        status = cpa_bench_copy(site, keys, host, bytes, err);
    }
    free(host);
    return status;
}

cpa_status cpa_bench_synthesize(cpa_bench_site *site, cpa_synth_tensor tensor, int64_t sequence,
                                const int64_t *positions, int64_t n, void *dst, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    uint32_t *tokens = malloc((size_t)(n + 1) * sizeof *tokens);
    void *device_tokens = NULL, *device_positions = NULL;
    cpa_status status =
        tokens ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for %lld tokens", (long long)n);
    if (status != CPA_OK || n == 0) goto done;
    for (int64_t i = 0; i < n; i++) tokens[i] = cpa_synthetic_token(&seed, (uint64_t)sequence, positions[i]);
    CPA_TRY_GOTO(cpa_bench_upload(site, tokens, n * (int64_t)sizeof *tokens, &device_tokens, err), done);
    CPA_TRY_GOTO(cpa_bench_upload(site, positions, n * (int64_t)sizeof *positions, &device_positions, err), done);
    const cpa_attention_shape shape = cpa_bench_shape(o);
    cpa_synth_args args = cpa_synth_of(&shape, tensor);
    args.seed = seed;
    args.rows = n;
    args.tokens = device_tokens;
    args.positions = device_positions;
    if (tensor != CPA_SYNTH_Q) args.dtype = written_dtype(o);
    args.out = dst;
    CPA_TRY_GOTO(cpa_bench_enqueued(site, site->device->operators->synthesize(&args, site->stream), err), done);
    CPA_TRY_GOTO(cpa_bench_enqueued(site, cpa_stream_sync(site->stream), err), done);
    if (tensor == CPA_SYNTH_K && o->light > 0) status = lighten(site, args.dtype, positions, n, dst, err);
done:
    cpa_device_free(site->device, device_positions);
    cpa_device_free(site->device, device_tokens);
    free(tokens);
    return status;
}

int64_t cpa_bench_block_bytes(const cpa_bench_options *o, cpa_synth_tensor tensor) {
    const cpa_attention_shape shape = cpa_bench_shape(o);
    return cpa_shape_block_bytes(&shape, tensor == CPA_SYNTH_V ? CPA_VALUES : CPA_KEYS, (int32_t)o->block_size);
}

cpa_status cpa_bench_make_cache(cpa_bench_site *site, int64_t blocks, cpa_kv_view *out, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    if (blocks > INT32_MAX) {
        return cpa_fail(err, CPA_INVALID, "bench: %lld blocks, at most %d", (long long)blocks, INT32_MAX);
    }
    const cpa_attention_shape shape = cpa_bench_shape(o);
    *out = cpa_kv_view_of(&shape, (int32_t)o->block_size, blocks);
    CPA_TRY(cpa_bench_poisoned(site, blocks * cpa_bench_block_bytes(o, CPA_SYNTH_K), &out->k, err));
    out->v = NULL;
    if (out->v_in_k) return CPA_OK;
    return cpa_bench_poisoned(site, blocks * cpa_bench_block_bytes(o, CPA_SYNTH_V), &out->v, err);
}

/* The buffers of one kv_write. */
typedef struct piece {
    void *k, *v, *slots;
    int64_t *host_slots;
} piece;

static cpa_status fill_piece(cpa_bench_site *site, int64_t sequence, const int64_t *positions, int64_t first, int64_t n,
                             const int32_t *table, const cpa_kv_view *kv, piece *p, cpa_error *err) {
    for (int64_t i = 0; i < n; i++) {
        int64_t at = first + i;
        p->host_slots[i] = (int64_t)table[at / kv->block_size] * kv->block_size + at % kv->block_size;
    }
    CPA_TRY(cpa_bench_copy(site, p->slots, p->host_slots, n * (int64_t)sizeof *p->host_slots, err));
    CPA_TRY(cpa_bench_synthesize(site, CPA_SYNTH_K, sequence, positions + first, n, p->k, err));
    if (!kv->v_in_k) CPA_TRY(cpa_bench_synthesize(site, CPA_SYNTH_V, sequence, positions + first, n, p->v, err));
    cpa_kv_write_args args = {.size = sizeof args,
                              .tokens = n,
                              .dtype = written_dtype(&site->options),
                              .k = p->k,
                              .v = p->v,
                              .slot_mapping = p->slots,
                              .kv = *kv};
    CPA_TRY(cpa_bench_enqueued(site, cpa_kv_write(&args, site->stream), err));
    return cpa_bench_enqueued(site, cpa_stream_sync(site->stream), err);
}

cpa_status cpa_bench_fill_cache(cpa_bench_site *site, int64_t sequence, const int64_t *positions, int64_t n,
                                const int32_t *table, const cpa_kv_view *kv, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    int64_t most = n < PIECE_TOKENS ? n : PIECE_TOKENS;
    int64_t token_bytes = o->kv_heads * cpa_dtype_bytes(written_dtype(o));
    piece p = {.host_slots = malloc((size_t)(most + 1) * sizeof *p.host_slots)};
    cpa_status status = p.host_slots ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for slots");
    if (status != CPA_OK || n == 0) goto done;
    CPA_TRY_GOTO(cpa_device_alloc(site->device, most * token_bytes * o->k_dim, &p.k, err), done);
    CPA_TRY_GOTO(cpa_device_alloc(site->device, most * token_bytes * o->v_dim, &p.v, err), done);
    CPA_TRY_GOTO(cpa_device_alloc(site->device, most * (int64_t)sizeof(int64_t), &p.slots, err), done);
    for (int64_t first = 0; first < n; first += most) {
        int64_t count = n - first < most ? n - first : most;
        CPA_TRY_GOTO(fill_piece(site, sequence, positions, first, count, table, kv, &p, err), done);
    }
done:
    cpa_device_free(site->device, p.slots);
    cpa_device_free(site->device, p.v);
    cpa_device_free(site->device, p.k);
    free(p.host_slots);
    return status;
}

cpa_status cpa_bench_block_order(const cpa_bench_options *options, int64_t n, int32_t **out, cpa_error *err) {
    int32_t *order = malloc((size_t)(n + 1) * sizeof *order);
    if (!order) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for block tables");
    for (int64_t i = 0; i < n; i++) {
        int64_t j = options->pages_ordered ? i : (int64_t)(cpa_bench_hash((uint64_t)i) % (uint64_t)(i + 1));
        order[i] = order[j];
        order[j] = (int32_t)i;
    }
    *out = order;
    return CPA_OK;
}

/* The same in device memory: by kv_write if it is quantised, else as it was synthesized. */
static cpa_status recall_on_device(cpa_bench_site *site, int64_t sequence, const int64_t *positions, int64_t n,
                                   const int32_t *table, const cpa_kv_view *kv, cpa_error *err) {
    if (cpa_dtype_is_quantised(kv->dtype)) {
        return cpa_bench_fill_cache(site, sequence, positions, n, table, kv, err);
    }
    CPA_TRY(cpa_bench_synthesize(site, CPA_SYNTH_K, sequence, positions, n, kv->k, err));
    return kv->v_in_k ? CPA_OK : cpa_bench_synthesize(site, CPA_SYNTH_V, sequence, positions, n, kv->v, err);
}

/* A copy of device memory on the host, to be freed; NULL and *status unless all is well. */
static void *receive_states(cpa_bench_site *site, const void *memory, int64_t bytes, cpa_status *status,
                            cpa_error *err) {
    void *host = *status == CPA_OK ? malloc((size_t)bytes) : NULL;
    if (*status == CPA_OK && !host) *status = cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for keys");
    if (*status == CPA_OK) *status = cpa_bench_copy(site, host, memory, bytes, err);
    if (*status == CPA_OK) return host;
    free(host);
    return NULL;
}

cpa_status cpa_bench_recall(cpa_bench_site *site, int64_t sequence, int64_t first, int64_t n, cpa_kv_view *out,
                            cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    int64_t blocks = (n + o->block_size - 1) / o->block_size;
    int64_t *positions = cpa_bench_positions(first, n);
    int32_t *table = malloc((size_t)(blocks + 1) * sizeof *table);
    cpa_kv_view kv = {0};
    cpa_status status = CPA_OK;
    if (!positions || !table) status = cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for %lld keys", (long long)n);
    for (int64_t i = 0; status == CPA_OK && i < blocks; i++) table[i] = (int32_t)i;
    const int64_t layout = site->options.layout;
    site->options.layout = CPA_TOKEN_MAJOR;
    if (status == CPA_OK) status = cpa_bench_make_cache(site, blocks, &kv, err);
    site->options.layout = layout;
    if (status == CPA_OK) status = recall_on_device(site, sequence, positions, n, table, &kv, err);
    void *k = receive_states(site, kv.k, blocks * cpa_bench_block_bytes(o, CPA_SYNTH_K), &status, err);
    void *v = receive_states(site, kv.v, blocks * cpa_bench_block_bytes(o, CPA_SYNTH_V), &status, err);
    cpa_device_free(site->device, kv.v);
    cpa_device_free(site->device, kv.k);
    free(table);
    free(positions);
    if (status != CPA_OK) {
        free(k);
        return status;
    }
    *out = kv;
    out->k = k;
    out->v = v;
    return CPA_OK;
}

void cpa_bench_recalled_row(const cpa_kv_view *kv, cpa_synth_tensor tensor, int64_t i, int64_t head, float *dst) {
    const cpa_kv_pool pool = cpa_kv_pool_of(kv, tensor == CPA_SYNTH_V ? CPA_VALUES : CPA_KEYS);
    const int64_t offset = i % kv->block_size;
    const char *block = pool.memory + i / kv->block_size * pool.block_stride;
    cpa_reference_read_rows(block + offset * pool.token_stride + head * pool.head_stride,
                            block + pool.scales_at + (head * kv->block_size + offset) * pool.scale_bytes, kv->dtype,
                            pool.part, kv->k_scale, 1, pool.dim, dst);
}
