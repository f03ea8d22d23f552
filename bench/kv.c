/* bench kv_write, bench kv_pack and bench kv_convert: tokens into the pages of a poisoned cache, and out of them into
 * consecutive blocks, as they lie or from another layout.
 * Every byte is checked: what was to be written, and that the rest is still poison. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/check.h"
#include "bench/benchmark.h"
#include "bench/inputs.h"
#include "bench/memory.h"

enum { SKIP_EVERY = 64 }; /* kv_write: the slot of one token in so many is -1 */

typedef struct kv_state {
    cpa_bench_site *site;
    int64_t tokens, blocks;
    int32_t *table;    /* block i of the sequence lies there */
    cpa_kv_view cache; /* kv_write: written; kv_pack: read */
    cpa_kv_view staging;
    void *inputs[2];     /* kv_write: keys and values of all tokens, in --dtype */
    int64_t *slots;      /* kv_write: where the rows of each token go */
    int64_t (*pairs)[2]; /* kv_convert */
    void *device_slots;
} kv_state;

static int64_t width(const kv_state *s, cpa_synth_tensor tensor) {
    return s->cache.kv_heads * (int64_t)(tensor == CPA_SYNTH_V ? s->cache.v_dim : s->cache.k_dim);
}

/* Keys or values of all tokens on the device, in a dtype. */
static cpa_status make_tokens(kv_state *s, cpa_synth_tensor tensor, cpa_dtype dtype, void **out, cpa_error *err) {
    cpa_bench_site *site = s->site;
    int64_t kv_dtype = site->options.kv_dtype;
    int64_t *positions = cpa_bench_positions(0, s->tokens);
    cpa_status status = positions ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for positions");
    if (status == CPA_OK) {
        status = cpa_device_alloc(site->device, s->tokens * width(s, tensor) * cpa_dtype_bytes(dtype), out, err);
    }
    site->options.kv_dtype = dtype;
    if (status == CPA_OK) status = cpa_bench_synthesize(site, tensor, 0, positions, s->tokens, *out, err);
    site->options.kv_dtype = kv_dtype;
    free(positions);
    return status;
}

static cpa_status prepare_common(cpa_bench_site *site, const int64_t *shape, kv_state **out, void **state,
                                 cpa_error *err) {
    if (cpa_dtype_is_quantised((cpa_dtype)site->options.kv_dtype)) { /* the check compares rows of plain elements */
        return cpa_fail(err, CPA_INVALID, "bench: --kv-cache-dtype: found %s, expected fp32, bf16 or fp16 here",
                        cpa_dtype_name((cpa_dtype)site->options.kv_dtype));
    }
    if (site->options.v_in_k)
        return cpa_fail(err, CPA_INVALID, "bench: --v-in-k: found here, expected keys and values apart");
    kv_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory");
    *state = *out = s;
    s->site = site;
    s->tokens = shape[0];
    s->blocks = (s->tokens + site->options.block_size - 1) / site->options.block_size;
    CPA_TRY(cpa_bench_block_order(&site->options, s->blocks, &s->table, err));
    return cpa_bench_make_cache(site, s->blocks, &s->cache, err);
}

static void release(void *state) {
    kv_state *s = state;
    if (!s) return;
    void *const on_device[] = {s->device_slots, s->inputs[0], s->inputs[1], s->staging.k,
                               s->staging.v,    s->cache.k,   s->cache.v};
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++) cpa_device_free(s->site->device, on_device[i]);
    free(s->pairs);
    free(s->slots);
    free(s->table);
    free(s);
}

/* Compares one of the pools of a view with what it should hold, row by row (a token and KV head each). source(token in
 * the pool) is the token whose row is expected there, or -1 for poison; `rows` are those of all tokens in the dtype of
 * the view. */
static cpa_status compare_pool(const kv_state *s, const cpa_kv_view *view, cpa_synth_tensor tensor,
                               const int64_t *source, const char *rows, cpa_bench_row *row, cpa_error *err) {
    int64_t dim = tensor == CPA_SYNTH_V ? view->v_dim : view->k_dim, head_bytes = dim * cpa_dtype_bytes(view->dtype);
    int64_t pool_rows = s->blocks * view->block_size * view->kv_heads;
    char *pool = malloc((size_t)(pool_rows * head_bytes)), *poison = malloc((size_t)head_bytes);
    cpa_status status = pool && poison ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for the cache");
    if (status == CPA_OK) {
        const void *memory = tensor == CPA_SYNTH_V ? view->v : view->k;
        status = cpa_bench_copy(s->site, pool, memory, pool_rows * head_bytes, err);
    }
    if (status == CPA_OK) memset(poison, CPA_BENCH_POISON, (size_t)head_bytes);
    for (int64_t i = 0; status == CPA_OK && i < pool_rows; i++) {
        int64_t token = source[i / view->kv_heads], head = i % view->kv_heads;
        const char *want = token < 0 ? poison : rows + (token * view->kv_heads + head) * head_bytes;
        row->wrong += memcmp(pool + i * head_bytes, want, (size_t)head_bytes) != 0;
    }
    row->checked += status == CPA_OK ? pool_rows : 0;
    free(poison);
    free(pool);
    return status;
}

/* Both pools against the tokens. */
static cpa_status compare_view(kv_state *s, const cpa_kv_view *view, const int64_t *source, cpa_bench_row *row,
                               cpa_error *err) {
    cpa_kv_view recalled;
    row->checked = row->wrong = 0;
    CPA_TRY(cpa_bench_recall(s->site, 0, 0, s->tokens, &recalled, err));
    cpa_status status = compare_pool(s, view, CPA_SYNTH_K, source, recalled.k, row, err);
    if (status == CPA_OK) status = compare_pool(s, view, CPA_SYNTH_V, source, recalled.v, row, err);
    free(recalled.k);
    free(recalled.v);
    return status;
}

/* An array of one entry for each token of a pool, all -1. */
static int64_t *nothing_written(const kv_state *s) {
    int64_t n = s->blocks * s->cache.block_size;
    int64_t *source = malloc((size_t)n * sizeof *source);
    for (int64_t i = 0; source && i < n; i++) source[i] = -1;
    return source;
}

/* ---- kv_write ---- */

static cpa_status prepare_write(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                cpa_error *err) {
    kv_state *s = NULL;
    if (site->options.dtype != CPA_F32 && site->options.dtype != site->options.kv_dtype) {
        /* the check synthesizes in the dtype of the cache: one rounding, as from fp32, not two */
        return cpa_fail(
            err, CPA_INVALID, "bench kv_write: --dtype: found %s for a cache of %s, expected fp32 or the same",
            cpa_dtype_name((cpa_dtype)site->options.dtype), cpa_dtype_name((cpa_dtype)site->options.kv_dtype));
    }
    CPA_TRY(prepare_common(site, shape, &s, state, err));
    s->slots = malloc((size_t)s->tokens * sizeof *s->slots);
    if (!s->slots) return cpa_fail(err, CPA_NO_MEMORY, "bench kv_write: no memory for slots");
    int64_t written = 0, block_size = s->cache.block_size;
    for (int64_t i = 0; i < s->tokens; i++) {
        bool skipped = i % SKIP_EVERY == SKIP_EVERY - 1;
        s->slots[i] = skipped ? -1 : s->table[i / block_size] * block_size + i % block_size;
        written += !skipped;
    }
    CPA_TRY(cpa_bench_upload(site, s->slots, s->tokens * (int64_t)sizeof *s->slots, &s->device_slots, err));
    CPA_TRY(make_tokens(s, CPA_SYNTH_K, (cpa_dtype)site->options.dtype, &s->inputs[0], err));
    CPA_TRY(make_tokens(s, CPA_SYNTH_V, (cpa_dtype)site->options.dtype, &s->inputs[1], err));
    int64_t bytes = cpa_dtype_bytes((cpa_dtype)site->options.dtype) + cpa_dtype_bytes(s->cache.dtype);
    row->bytes = (double)written * (double)((width(s, CPA_SYNTH_K) + width(s, CPA_SYNTH_V)) * bytes);
    return CPA_OK;
}

static cpa_status run_write(void *state, int64_t call, cpa_error *err) {
    (void)call;
    kv_state *s = state;
    cpa_kv_write_args args = {
        .size = sizeof args,
        .tokens = s->tokens,
        .dtype = (cpa_dtype)s->site->options.dtype,
        .k = s->inputs[0],
        .v = s->inputs[1],
        .slot_mapping = s->device_slots,
        .kv = s->cache,
    };
    return cpa_bench_enqueued(s->site, cpa_kv_write(&args, s->site->stream), err);
}

static cpa_status check_write(void *state, cpa_bench_row *row, cpa_error *err) {
    kv_state *s = state;
    int64_t *source = nothing_written(s);
    if (!source) return cpa_fail(err, CPA_NO_MEMORY, "bench kv_write: no memory");
    for (int64_t i = 0; i < s->tokens; i++) {
        if (s->slots[i] >= 0) source[s->slots[i]] = i;
    }
    cpa_status status = compare_view(s, &s->cache, source, row, err);
    free(source);
    return status;
}

const cpa_bench cpa_bench_kv_write = {
    .name = "kv_write",
    .dims = "tokens",
    .n_dims = 1,
    .shapes_host = "64,16K",
    .shapes_cuda = "128K,128K:dtype=fp32:kv-cache-dtype=bf16,128K:block-size=16,64",
    .checked = "every row of the cache, a token and KV head each, keys and values",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_write,
    .run = run_write,
    .check = check_write,
    .release = release,
};

/* ---- kv_pack ---- */

static cpa_status prepare_pack(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                               cpa_error *err) {
    kv_state *s = NULL;
    CPA_TRY(prepare_common(site, shape, &s, state, err));
    CPA_TRY(cpa_bench_make_cache(site, s->blocks, &s->staging, err));
    int64_t *positions = cpa_bench_positions(0, s->tokens);
    if (!positions) return cpa_fail(err, CPA_NO_MEMORY, "bench kv_pack: no memory for positions");
    cpa_status status = cpa_bench_fill_cache(site, 0, positions, s->tokens, s->table, &s->cache, err);
    free(positions);
    int64_t bytes = 2 * cpa_dtype_bytes(s->cache.dtype);
    row->bytes = (double)s->tokens * (double)((width(s, CPA_SYNTH_K) + width(s, CPA_SYNTH_V)) * bytes);
    return status;
}

static cpa_status run_pack(void *state, int64_t call, cpa_error *err) {
    (void)call;
    kv_state *s = state;
    cpa_kv_range range = {.count = s->tokens};
    cpa_kv_pack_args args = {
        .size = sizeof args,
        .src = s->cache,
        .dst = s->staging,
        .block_tables = s->table,
        .n_table_entries = s->blocks,
        .ranges = &range,
        .n_ranges = 1,
    };
    return cpa_bench_enqueued(s->site, cpa_kv_pack(&args, s->site->stream), err);
}

static cpa_status check_pack(void *state, cpa_bench_row *row, cpa_error *err) {
    kv_state *s = state;
    int64_t *source = nothing_written(s);
    if (!source) return cpa_fail(err, CPA_NO_MEMORY, "bench kv_pack: no memory");
    for (int64_t i = 0; i < s->tokens; i++) source[i] = i;
    cpa_status status = compare_view(s, &s->staging, source, row, err);
    free(source);
    return status;
}

const cpa_bench cpa_bench_kv_pack = {
    .name = "kv_pack",
    .dims = "tokens",
    .n_dims = 1,
    .shapes_host = "64,16K",
    .shapes_cuda = "128K,128K:block-size=16",
    .checked = "every row of the packed blocks, a token and KV head each, keys and values",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_pack,
    .run = run_pack,
    .check = check_pack,
    .release = release,
};

/* ---- kv_convert ---- */

static cpa_status prepare_convert(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                  cpa_error *err) {
    const int64_t layout = site->options.layout;
    kv_state *s;
    CPA_TRY(prepare_pack(site, shape, row, state, err));
    s = *state;
    cpa_device_free(site->device, s->staging.k);
    cpa_device_free(site->device, s->staging.v);
    s->staging.k = s->staging.v = NULL;
    site->options.layout = CPA_TOKEN_MAJOR;
    cpa_status status = cpa_bench_make_cache(site, s->blocks, &s->staging, err);
    site->options.layout = layout;
    s->pairs = malloc((size_t)s->blocks * sizeof *s->pairs);
    if (!s->pairs) return cpa_fail(err, CPA_NO_MEMORY, "bench kv_convert: no memory for pairs");
    for (int64_t i = 0; i < s->blocks; i++) s->pairs[i][0] = s->table[i], s->pairs[i][1] = i;
    return status;
}

static cpa_status run_convert(void *state, int64_t call, cpa_error *err) {
    (void)call;
    kv_state *s = state;
    cpa_kv_convert_args args = {.size = sizeof args,
                                .src = s->cache,
                                .dst = s->staging,
                                .pairs = (const int64_t(*)[2])s->pairs,
                                .n_pairs = s->blocks};
    return cpa_bench_enqueued(s->site, cpa_kv_convert(&args, s->site->stream), err);
}

const cpa_bench cpa_bench_kv_convert = {
    .name = "kv_convert",
    .dims = "tokens",
    .n_dims = 1,
    .shapes_host = "64:layout=vllm-x,16K:layout=vllm-x",
    .shapes_cuda = "128K:layout=vllm-x:block-size=16,128K:layout=vllm-x:block-size=32",
    .checked = "every row of the blocks, a token and KV head each, keys and values",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_convert,
    .run = run_convert,
    .check = check_pack,
    .release = release,
};
