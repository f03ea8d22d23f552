/* bench sparse: rows that attend keys of their own by lists of slots, checked against float64 over sampled rows. The
 * rows choose their keys from a cache of so many tokens; what the cache holds repeats after PERIOD tokens, so that
 * those alone are made on the host again. */
#include <math.h>
#include <stdlib.h>

#include <cpattn/sparse.h>

#include "base/check.h"
#include "base/min_max.h"
#include "bench/benchmark.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/noise.h"
#include "src/check/cases/judge.h"

enum { PERIOD = 1 << 14, SAMPLED_ROWS = 4, SAMPLED_HEADS = 4 };

typedef struct sparse_state {
    cpa_bench_site *site;
    int64_t rows, keys, top, period, entries; /* entries of a list, of `unit` tokens each */
    cpa_kv_view kv;
    int32_t *slots; /* [rows, kv_heads, entries], on the host */
    void *q, *device_slots, *out;
    float *lse;
} sparse_state;

static cpa_status fill_cache(sparse_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t blocks = s->period / o->block_size, all = s->kv.num_blocks;
    int64_t *positions = cpa_bench_positions(0, s->period);
    int32_t *table = malloc((size_t)blocks * sizeof *table);
    cpa_status status =
        positions && table ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench sparse: no memory for a block table");
    for (int64_t i = 0; status == CPA_OK && i < blocks; i++) table[i] = (int32_t)i;
    if (status == CPA_OK) status = cpa_bench_fill_cache(s->site, 0, positions, s->period, table, &s->kv, err);
    for (cpa_kv_part part = CPA_KEYS; status == CPA_OK && part < (s->kv.v_in_k ? CPA_VALUES : 2); part++) {
        const int64_t bytes = cpa_bench_block_bytes(o, part == CPA_KEYS ? CPA_SYNTH_K : CPA_SYNTH_V);
        status = cpa_bench_replicate(s->site, part == CPA_KEYS ? s->kv.k : s->kv.v, blocks * bytes, all * bytes, err);
    }
    free(table);
    free(positions);
    return status;
}

/* The keys of a list lie as far apart as they can, at random: ascending, none twice. */
static cpa_status make_lists(sparse_state *s, cpa_error *err) {
    const int64_t lists = s->rows * s->site->options.kv_heads, n = lists * s->entries;
    const int64_t apart = s->keys / s->site->options.unit / s->entries;
    s->slots = malloc((size_t)n * sizeof *s->slots);
    if (!s->slots) return cpa_fail(err, CPA_NO_MEMORY, "bench sparse: no memory for lists");
    for (int64_t i = 0; i < n; i++)
        s->slots[i] = (int32_t)(i % s->entries * apart + (int64_t)(cpa_bench_hash((uint64_t)i) % (uint64_t)apart));
    return cpa_bench_upload(s->site, s->slots, n * (int64_t)sizeof *s->slots, &s->device_slots, err);
}

static cpa_status check_shape(const cpa_bench_options *o, const int64_t *shape, cpa_error *err) {
    if (shape[1] % PERIOD != 0 && (shape[1] > PERIOD || shape[1] % o->block_size != 0))
        return cpa_fail(err, CPA_INVALID, "bench sparse: %lld keys, expected a multiple of 16K, or of the block below",
                        (long long)shape[1]);
    if (shape[2] > shape[1] || shape[2] % o->unit != 0 || shape[1] > INT32_MAX)
        return cpa_fail(err, CPA_INVALID, "bench sparse: %lld of %lld keys in units of %lld", (long long)shape[2],
                        (long long)shape[1], (long long)o->unit);
    return CPA_OK;
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    const int64_t element = cpa_dtype_bytes((cpa_dtype)o->dtype);
    sparse_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench sparse: no memory");
    *state = s;
    CPA_TRY(check_shape(o, shape, err));
    *s = (sparse_state){.site = site, .rows = shape[0], .keys = shape[1], .top = shape[2]};
    s->period = cpa_min64(s->keys, PERIOD);
    s->entries = s->top / o->unit;
    CPA_TRY(cpa_bench_make_cache(site, s->keys / o->block_size, &s->kv, err));
    CPA_TRY(fill_cache(s, err));
    CPA_TRY(make_lists(s, err));
    const int64_t heads = s->rows * o->q_heads, out_bytes = heads * o->v_dim * element;
    int64_t *positions = cpa_bench_positions(s->period, s->rows);
    if (!positions) return cpa_fail(err, CPA_NO_MEMORY, "bench sparse: no memory for positions");
    cpa_status status = cpa_device_alloc(site->device, heads * o->k_dim * element, &s->q, err);
    if (status == CPA_OK) status = cpa_bench_synthesize(site, CPA_SYNTH_Q, 0, positions, s->rows, s->q, err);
    free(positions);
    CPA_TRY(status);
    CPA_TRY(cpa_bench_poisoned(site, out_bytes, &s->out, err));
    CPA_TRY(cpa_bench_poisoned(site, heads * (int64_t)sizeof *s->lse, (void **)&s->lse, err));
    const cpa_attention_shape of = cpa_bench_shape(o);
    const double token =
        (double)cpa_shape_row_bytes(&of, CPA_KEYS) + (o->v_in_k ? 0 : (double)cpa_shape_row_bytes(&of, CPA_VALUES));
    row->flops = 2.0 * (double)heads * (double)s->top * (double)(o->k_dim + o->v_dim);
    row->bytes = (double)(s->rows * o->kv_heads) * ((double)s->top * token + 4.0 * (double)s->entries) +
                 (double)heads * ((double)((o->k_dim + o->v_dim) * element) + 4.0);
    return CPA_OK;
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    const sparse_state *s = state;
    const cpa_bench_options *o = &s->site->options;
    (void)call;
    const cpa_sparse_scope scope = {.kv = s->kv,
                                    .slots = s->device_slots,
                                    .row_stride = o->kv_heads * s->entries,
                                    .head_stride = s->entries,
                                    .width = (int32_t)s->entries,
                                    .unit = (int32_t)o->unit};
    const cpa_sparse_attend_args args = {.size = sizeof args,
                                         .rows = s->rows,
                                         .q_heads = (int32_t)o->q_heads,
                                         .q_dtype = (cpa_dtype)o->dtype,
                                         .q = s->q,
                                         .scopes = &scope,
                                         .n_scopes = 1,
                                         .scale = cpa_bench_scale(o),
                                         .state = {.lse = s->lse},
                                         .out = s->out};
    return cpa_bench_enqueued(s->site, cpa_sparse_attend(&args, s->site->stream), err);
}

/* What a row and head attend, as floats. */
typedef struct listed_floats {
    float *k, *v; /* [top, width] */
} listed_floats;

static int is_right(const sparse_state *s, const cpa_kv_view *period, int64_t row, int64_t head, listed_floats *keys,
                    const char *q, const char *out, const float *lse) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t kv_head = head / (o->q_heads / o->kv_heads), element = cpa_dtype_bytes((cpa_dtype)o->dtype);
    const int32_t *list = s->slots + (row * o->kv_heads + kv_head) * s->entries;
    cpa_case_expected expected;
    for (int64_t i = 0; i < s->top; i++) {
        const int64_t token = ((int64_t)list[i / o->unit] * o->unit + i % o->unit) % s->period;
        cpa_bench_recalled_row(period, CPA_SYNTH_K, token, kv_head, keys->k + i * o->k_dim);
        if (!o->v_in_k) cpa_bench_recalled_row(period, CPA_SYNTH_V, token, kv_head, keys->v + i * o->v_dim);
    }
    cpa_case_expect(&(cpa_case_row){.dtype = (cpa_dtype)o->dtype,
                                    .k_dim = (int32_t)o->k_dim,
                                    .v_dim = (int32_t)o->v_dim,
                                    .q = q + head * o->k_dim * element,
                                    .q_dtype = (cpa_dtype)o->dtype,
                                    .k = keys->k,
                                    .v = o->v_in_k ? keys->k : keys->v,
                                    .k_stride = o->k_dim,
                                    .v_stride = o->v_in_k ? o->k_dim : o->v_dim,
                                    .scale = (double)cpa_bench_scale(o),
                                    .n_keys = s->top},
                    &expected);
    const cpa_case_result got = {
        .lse = &lse[head], .out = out + head * o->v_dim * element, .out_dtype = (cpa_dtype)o->dtype};
    return cpa_case_is_right(&expected, &got, NULL);
}

static cpa_status check_row(sparse_state *s, const cpa_kv_view *period, int64_t at, listed_floats *keys, char *q,
                            char *out, float *lse, cpa_bench_row *row, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t element = cpa_dtype_bytes((cpa_dtype)o->dtype), heads = o->q_heads;
    const int64_t q_bytes = heads * o->k_dim * element, out_bytes = heads * o->v_dim * element;
    CPA_TRY(cpa_bench_copy(s->site, q, (char *)s->q + at * q_bytes, q_bytes, err));
    CPA_TRY(cpa_bench_copy(s->site, out, (char *)s->out + at * out_bytes, out_bytes, err));
    CPA_TRY(cpa_bench_copy(s->site, lse, s->lse + at * heads, heads * (int64_t)sizeof *lse, err));
    for (int64_t i = 0; i < cpa_min64(SAMPLED_HEADS, heads); i++) {
        row->wrong +=
            !is_right(s, period, at, (i + 1) * heads / cpa_min64(SAMPLED_HEADS, heads) - 1, keys, q, out, lse);
        row->checked++;
    }
    return CPA_OK;
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    sparse_state *s = state;
    const cpa_bench_options *o = &s->site->options;
    const size_t heads = (size_t)o->q_heads, element = (size_t)cpa_dtype_bytes((cpa_dtype)o->dtype);
    cpa_kv_view period = {0};
    listed_floats keys = {.k = malloc((size_t)(s->top * o->k_dim) * sizeof(float)),
                          .v = malloc((size_t)(s->top * o->v_dim) * sizeof(float))};
    char *q = malloc(heads * (size_t)o->k_dim * element), *out = malloc(heads * (size_t)o->v_dim * element);
    float *lse = malloc(heads * sizeof *lse);
    cpa_status status = keys.k && keys.v && q && out && lse
                            ? cpa_bench_recall(s->site, 0, 0, s->period, &period, err)
                            : cpa_fail(err, CPA_NO_MEMORY, "bench sparse: no memory for samples");
    row->checked = row->wrong = 0;
    const int64_t sampled = cpa_min64(SAMPLED_ROWS, s->rows);
    for (int64_t i = 0; status == CPA_OK && i < sampled; i++)
        status = check_row(s, &period, (i + 1) * s->rows / sampled - 1, &keys, q, out, lse, row, err);
    void *made[] = {keys.k, keys.v, q, out, lse, period.k, period.v};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) free(made[i]);
    return status;
}

static void release(void *state) {
    sparse_state *s = state;
    if (!s) return;
    if (s->site) {
        void *used[] = {s->q, s->device_slots, s->out, s->lse, s->kv.k, s->kv.v};
        for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_device_free(s->site->device, used[i]);
    }
    free(s->slots);
    free(s);
}

const cpa_bench cpa_bench_sparse = {
    .name = "sparse",
    .dims = "rows x keys x chosen keys",
    .n_dims = 3,
    .shapes_host = "2x4Kx256,2x4Kx256:unit=4",
    .shapes_cuda =
        "256x2Mx2K:v-in-k=true:q-heads=128:kv-cache-dtype=fp8_t128,256x2Mx2K:v-in-k=true:q-heads=128,"
        "4Kx128Kx2K:v-in-k=true:q-heads=128,1x128Kx2K:v-in-k=true:q-heads=128,64x8Mx2K,64x8Mx2K:unit=4,"
        "1x128Kx2K",
    .checked = "sampled rows and heads",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
