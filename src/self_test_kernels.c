#include "src/self_test_kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/host/synthesize.h"
#include "kernels/kernels.h"
#include "src/reference.h"

/* One sequence over two shards: the queries lie in shard 0, keys in both. */
enum { TOKENS = 401, SHARDS = 2, DECODE_ROWS = 3, SPARE_BLOCKS = 2, BUFFERS = 24, HOST_ROWS_APART = 9 };

/* Results of every row and head, on the device. */
typedef struct result {
    float *o, *lse;
    void *out;
} result;

/* What rows must be. tolerance < 0: the row was not computed. */
typedef struct expected {
    float *o, *lse, *tolerance; /* host: [rows, heads, v_dim], [rows, heads] twice */
} expected;

typedef struct kernel_test {
    cpa_device *device;
    const cpa_kernel_table *kernels;
    const cpa_worker_options *options;
    cpa_self_test_kernels_stats *stats;
    cpa_stream *stream;
    cpa_reference_blas *blas; /* NULL: the reference runs on the host */
    cpa_attend_plan *plans[SHARDS];
    uint64_t seed;
    cpa_owner_map map;
    cpa_dtype coarser;
    float scale;
    void *device_memory[BUFFERS], *host_memory[BUFFERS];
    int32_t n_device, n_host;

    int64_t keys[SHARDS], rows; /* keys of shard 0, then those of shard 1; prefill rows, then decode rows */
    int64_t *k_positions, *q_positions, *limits; /* host; limits: the keys of shard 1 that a row is given */
    char *q_raw, *k_raw, *v_raw;                 /* in the model's dtype */
    float *q, *k, *v;                            /* as the kernels read them: keys and values rounded to the cache's */
    int32_t *tables;                             /* shard 0's entries, then shard 1's */
    int64_t n_blocks, first_entry[SHARDS];
    cpa_kv_view kv;
    void *q_device;
    result results[3];
    expected want;
    /* For the reference on the device. */
    float *q_wide, *k_wide, *v_wide, *ref_o, *ref_mass, *ref_lse;
    int64_t *k_positions_device, *q_positions_device, *limits_device;
    char *got; /* host: the largest result */
} kernel_test;

static cpa_status host(kernel_test *t, int64_t bytes, void *out, cpa_error *err) {
    void *memory = malloc((size_t)bytes + 1);
    if (!memory) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld bytes", (long long)bytes);
    t->host_memory[t->n_host++] = memory;
    memcpy(out, &memory, sizeof memory);
    return CPA_OK;
}

/* Device memory with the bytes of `from`, or with NaN of every dtype. */
static cpa_status device(kernel_test *t, int64_t bytes, const void *from, void *out, cpa_error *err) {
    const int nan_byte = 0xff;
    void *memory = NULL, *poison = from ? NULL : malloc((size_t)bytes + 1);
    if (!from && !poison) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld bytes", (long long)bytes);
    if (poison) memset(poison, nan_byte, (size_t)bytes);
    cpa_status status = t->kernels->alloc(t->device, bytes, &memory, err);
    if (status == CPA_OK) {
        t->device_memory[t->n_device++] = memory;
        status = t->kernels->copy(memory, from ? from : poison, bytes, t->stream);
        if (status == CPA_OK) status = t->kernels->stream_sync(t->stream);
    }
    free(poison);
    memcpy(out, &memory, sizeof memory);
    return status;
}

static const char *dtype_name(cpa_dtype dtype) {
    static const char *const names[CPA_KV_DTYPE_COUNT] = {"fp32", "bf16", "fp16", "fp8_e4m3", "int8"};
    return names[dtype];
}

static int64_t total_keys(const kernel_test *t) {
    return t->keys[0] + t->keys[1];
}

/* Rows of one tensor from the generator, [n, heads, dim] in the model's dtype. */
static void generate(const kernel_test *t, cpa_synth_tensor tensor, int32_t heads, int32_t dim, int64_t n,
                     const int64_t *positions, char *out, uint32_t *tokens, char *head_rows) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t bytes = dim * cpa_dtype_bytes(m->dtype);
    for (int64_t i = 0; i < n; i++) tokens[i] = (uint32_t)(positions[i] * 0x9e3779b1u);
    cpa_synth_args args = {.tensor = tensor,
                           .seed = t->seed,
                           .heads = heads,
                           .kv_heads = m->kv_heads,
                           .dim = dim,
                           .rows = n,
                           .tokens = tokens,
                           .positions = positions,
                           .dtype = m->dtype,
                           .out = head_rows};
    for (int32_t h = 0; h < heads; h++) {
        cpa_synthesize_head(&args, h);
        for (int64_t i = 0; i < n; i++) memcpy(out + (i * heads + h) * bytes, head_rows + i * bytes, (size_t)bytes);
    }
}

static void set_positions(kernel_test *t, int64_t prefill) {
    for (int64_t i = 0; i < total_keys(t); i++)
        t->k_positions[i] = i < t->keys[0] ? cpa_shard_pos(t->map, 0, i) : cpa_shard_pos(t->map, 1, i - t->keys[0]);
    /* Decode rows: all of shard 1, a part of it that ends within a page, none of it. */
    const int64_t given[DECODE_ROWS] = {t->keys[1], t->keys[1] - 3, 0};
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t local = r < prefill ? t->keys[0] - prefill + r : t->keys[0] - DECODE_ROWS + (r - prefill);
        t->q_positions[r] = t->k_positions[local];
        t->limits[r] = r < prefill ? t->keys[1] : given[r - prefill];
    }
}

static cpa_status make_inputs(kernel_test *t, int64_t prefill, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t n = total_keys(t), most = n > t->rows ? n : t->rows, element = cpa_dtype_bytes(m->dtype);
    const int64_t q = t->rows * m->q_heads * m->head_dim, k = n * m->kv_heads * m->head_dim;
    const int64_t v = n * m->kv_heads * m->v_head_dim;
    uint32_t *tokens = NULL;
    char *head_rows = NULL;
    CPA_TRY(host(t, n * (int64_t)sizeof(int64_t), &t->k_positions, err));
    CPA_TRY(host(t, t->rows * (int64_t)sizeof(int64_t), &t->q_positions, err));
    CPA_TRY(host(t, t->rows * (int64_t)sizeof(int64_t), &t->limits, err));
    CPA_TRY(host(t, q * element, &t->q_raw, err));
    CPA_TRY(host(t, k * element, &t->k_raw, err));
    CPA_TRY(host(t, v * element, &t->v_raw, err));
    CPA_TRY(host(t, q * (int64_t)sizeof(float), &t->q, err));
    CPA_TRY(host(t, k * (int64_t)sizeof(float), &t->k, err));
    CPA_TRY(host(t, v * (int64_t)sizeof(float), &t->v, err));
    CPA_TRY(host(t, most * (int64_t)sizeof *tokens, &tokens, err));
    CPA_TRY(host(t, most * CPA_MAX_HEAD_DIM * element, &head_rows, err));
    set_positions(t, prefill);
    generate(t, CPA_SYNTH_Q, m->q_heads, m->head_dim, t->rows, t->q_positions, t->q_raw, tokens, head_rows);
    generate(t, CPA_SYNTH_K, m->kv_heads, m->head_dim, n, t->k_positions, t->k_raw, tokens, head_rows);
    generate(t, CPA_SYNTH_V, m->kv_heads, m->v_head_dim, n, t->k_positions, t->v_raw, tokens, head_rows);
    cpa_reference_widen(t->q_raw, m->dtype, q, t->q);
    cpa_reference_widen(t->k_raw, m->dtype, k, t->k);
    cpa_reference_widen(t->v_raw, m->dtype, v, t->v);
    return device(t, q * element, t->q_raw, &t->q_device, err);
}

static cpa_kv_view make_view(const kernel_test *t, int64_t n_blocks) {
    const cpa_worker_options *o = t->options;
    return (cpa_kv_view){.dtype = o->kv_dtype,
                         .block_size = o->block_size,
                         .num_blocks = n_blocks,
                         .kv_heads = o->model.kv_heads,
                         .k_dim = o->model.head_dim,
                         .v_dim = o->model.v_head_dim,
                         .k_scale = o->k_scale,
                         .v_scale = o->v_scale};
}

/* Bytes of a block of the keys or of the values of a view. */
static int64_t block_bytes(const cpa_kv_view *view, int values) {
    return cpa_kv_block_bytes(view->dtype, values ? view->v_scale : view->k_scale, view->block_size, view->kv_heads,
                              values ? view->v_dim : view->k_dim);
}

static cpa_status make_pool(kernel_test *t, cpa_kv_view *view, cpa_error *err) {
    CPA_TRY(device(t, view->num_blocks * block_bytes(view, 0), NULL, &view->k, err));
    return device(t, view->num_blocks * block_bytes(view, 1), NULL, &view->v, err);
}

/* Writes the keys and values through a slot mapping into pages that lie in no order. */
static cpa_status write_pages(kernel_test *t, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t n = total_keys(t), block = t->options->block_size, element = cpa_dtype_bytes(m->dtype);
    int64_t used[SHARDS], *slots = NULL, *slots_device = NULL;
    void *k_device = NULL, *v_device = NULL;
    for (int s = 0; s < SHARDS; s++) used[s] = (t->keys[s] + block - 1) / block;
    t->n_blocks = used[0] + used[1] + SPARE_BLOCKS;
    t->first_entry[1] = used[0];
    CPA_TRY(host(t, (used[0] + used[1]) * (int64_t)sizeof *t->tables, &t->tables, err));
    for (int64_t i = 0; i < used[0] + used[1]; i++) t->tables[i] = (int32_t)(t->n_blocks - 1 - i);
    CPA_TRY(host(t, n * (int64_t)sizeof *slots, &slots, err));
    for (int64_t i = 0; i < n; i++) {
        int shard = i >= t->keys[0];
        int64_t local = shard ? i - t->keys[0] : i;
        slots[i] = t->tables[t->first_entry[shard] + local / block] * block + local % block;
    }
    t->kv = make_view(t, t->n_blocks);
    CPA_TRY(make_pool(t, &t->kv, err));
    CPA_TRY(device(t, n * (int64_t)sizeof *slots, slots, &slots_device, err));
    CPA_TRY(device(t, n * m->kv_heads * m->head_dim * element, t->k_raw, &k_device, err));
    CPA_TRY(device(t, n * m->kv_heads * m->v_head_dim * element, t->v_raw, &v_device, err));
    cpa_kv_write_args args = {sizeof args, n, m->dtype, k_device, v_device, slots_device, t->kv};
    return cpa_kv_write(&args, t->stream);
}

static cpa_status wrong_pages(const kernel_test *t, int values, int64_t at, int32_t dim, float got, float want,
                              cpa_error *err) {
    const cpa_worker_options *o = t->options;
    int64_t row = at / dim, heads = o->model.kv_heads;
    return cpa_fail(err, CPA_CHECK_FAILED,
                    "kv_write and kv_pack, %s to %s, blocks of %d, %d KV heads: %s of token %lld, head %lld, element "
                    "%lld is %g, expected %g",
                    dtype_name(o->model.dtype), dtype_name(o->kv_dtype), o->block_size, o->model.kv_heads,
                    values ? "value" : "key", (long long)(row / heads), (long long)(row % heads), (long long)(at % dim),
                    (double)got, (double)want);
}

/* Compares `rows` rows of a block, which lies at t->got, with what was written. What a quantised cache holds is then what
 * the results are compared with. */
static cpa_status check_block(kernel_test *t, const cpa_kv_view *view, int values, int64_t rows, int64_t first_row,
                              cpa_error *err) {
    const int32_t dim = values ? view->v_dim : view->k_dim, heads = view->kv_heads;
    const float scale = values ? view->v_scale : view->k_scale;
    const char *block = (const char *)t->got, *words = block + cpa_kv_scales_at(view, dim, scale);
    for (int64_t r = 0; r < rows; r++) {
        float got[CPA_MAX_HEAD_DIM], *want = (values ? t->v : t->k) + (first_row + r) * dim;
        cpa_reference_read_rows(block + r * dim * cpa_dtype_bytes(view->dtype),
                                words + (r % heads * view->block_size + r / heads) * 4, view->dtype, scale, 1, dim,
                                got);
        int32_t worst = 0;
        for (int32_t d = 1; d < dim; d++) {
            if (!(fabsf(got[d] - want[d]) <= fabsf(got[worst] - want[worst]))) worst = d;
        }
        if (!cpa_reference_may_hold(got, want, view->dtype, scale, dim))
            return wrong_pages(t, values, (first_row + r) * dim + worst, dim, got[worst], want[worst], err);
        memcpy(want, got, (size_t)dim * sizeof *got);
    }
    return CPA_OK;
}

/* Packs both shards and compares what comes with what was written. */
static cpa_status check_pages(kernel_test *t, cpa_error *err) {
    const int64_t block = t->options->block_size, heads = t->options->model.kv_heads;
    cpa_kv_view packed = make_view(t, t->n_blocks);
    cpa_kv_span spans[SHARDS] = {{0, 0, t->keys[0], 0}, {t->first_entry[1], 0, t->keys[1], t->first_entry[1]}};
    CPA_TRY(make_pool(t, &packed, err));
    cpa_kv_pack_args args = {sizeof args, t->kv, packed, t->tables, spans, SHARDS};
    CPA_TRY(cpa_kv_pack(&args, t->stream));
    for (int i = 0; i < 2 * SHARDS; i++) {
        int shard = i / 2, values = i % 2;
        const int64_t bytes = block_bytes(&packed, values), before = shard ? t->keys[0] : 0;
        const char *pool = values ? packed.v : packed.k;
        for (int64_t done = 0; done < t->keys[shard]; done += block) {
            int64_t left = t->keys[shard] - done;
            CPA_TRY(t->kernels->copy(t->got, pool + (spans[shard].dst_block + done / block) * bytes, bytes, t->stream));
            CPA_TRY(t->kernels->stream_sync(t->stream));
            CPA_TRY(
                check_block(t, &packed, values, (left < block ? left : block) * heads, (before + done) * heads, err));
        }
    }
    return CPA_OK;
}

static cpa_status make_plans(kernel_test *t, int64_t prefill, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    for (int32_t s = 0; s < SHARDS; s++) {
        cpa_attend_item items[1 + DECODE_ROWS];
        for (int64_t i = 0; i < 1 + DECODE_ROWS; i++) {
            int64_t row = i == 0 ? 0 : prefill + i - 1;
            items[i] = (cpa_attend_item){.q_row = row,
                                         .q_count = i == 0 ? prefill : 1,
                                         .q_first = i == 0 ? t->keys[0] - prefill : t->keys[0] - DECODE_ROWS + i - 1,
                                         .k_count = s == 0 ? t->keys[0] : t->limits[row],
                                         .table = t->first_entry[s],
                                         .k_slot = s};
        }
        cpa_attend_batch batch = {.size = sizeof batch,
                                  .map = t->map,
                                  .q_heads = m->q_heads,
                                  .kv_heads = m->kv_heads,
                                  .k_dim = m->head_dim,
                                  .v_dim = m->v_head_dim,
                                  .block_size = t->options->block_size,
                                  .items = items,
                                  .n_items = 1 + DECODE_ROWS,
                                  .block_tables = t->tables,
                                  .n_table_entries = t->n_blocks - SPARE_BLOCKS};
        CPA_TRY(cpa_attend_plan_create(t->device, &t->plans[s], err));
        CPA_TRY(cpa_attend_plan_set(t->plans[s], &batch, err));
    }
    return CPA_OK;
}

static cpa_status make_results(kernel_test *t, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t heads = t->rows * m->q_heads, o = heads * m->v_head_dim * (int64_t)sizeof(float);
    const int64_t lse = heads * (int64_t)sizeof(float);
    int64_t pages = 2 * total_keys(t) * m->kv_heads * (int64_t)sizeof(float) *
                    (m->head_dim > m->v_head_dim ? m->head_dim : m->v_head_dim);
    for (int i = 0; i < 3; i++) {
        CPA_TRY(device(t, o, NULL, &t->results[i].o, err));
        CPA_TRY(device(t, lse, NULL, &t->results[i].lse, err));
    }
    CPA_TRY(device(t, o, NULL, &t->results[0].out, err));
    CPA_TRY(host(t, o, &t->want.o, err));
    CPA_TRY(host(t, lse, &t->want.lse, err));
    CPA_TRY(host(t, lse, &t->want.tolerance, err));
    return host(t, o + o > pages ? o + o : pages, &t->got, err);
}

/* What the reference on the device reads and writes. */
static cpa_status make_blas(kernel_test *t, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t n = total_keys(t), element = (int64_t)sizeof(float), index = (int64_t)sizeof(int64_t);
    const int64_t heads = t->rows * m->q_heads;
    if (!t->kernels->reference_open) return CPA_OK;
    cpa_error own = {CPA_OK, ""};
    cpa_status status = t->kernels->reference_open(t->device, &t->blas, &own);
    if (status == CPA_UNSUPPORTED) {
        snprintf(t->stats->why, sizeof t->stats->why, "%.199s", own.message);
        return CPA_OK;
    }
    if (status != CPA_OK) return cpa_fail(err, status, "%s", own.message);
    t->stats->on_blas = 1;
    CPA_TRY(device(t, heads * m->head_dim * element, t->q, &t->q_wide, err));
    CPA_TRY(device(t, n * m->kv_heads * m->head_dim * element, t->k, &t->k_wide, err));
    CPA_TRY(device(t, n * m->kv_heads * m->v_head_dim * element, t->v, &t->v_wide, err));
    CPA_TRY(device(t, n * index, t->k_positions, &t->k_positions_device, err));
    CPA_TRY(device(t, t->rows * index, t->q_positions, &t->q_positions_device, err));
    CPA_TRY(device(t, t->rows * index, t->limits, &t->limits_device, err));
    CPA_TRY(device(t, heads * m->v_head_dim * element, NULL, &t->ref_o, err));
    CPA_TRY(device(t, heads * m->v_head_dim * element, NULL, &t->ref_mass, err));
    return device(t, heads * element, NULL, &t->ref_lse, err);
}

/* Keys that a row is given: those of shard 1 up to its limit, behind all of shard 0 where `both`. */
static cpa_status expect_on_device(kernel_test *t, cpa_mask mask, int both) {
    const cpa_model_shape *m = &t->options->model;
    const double unit = t->coarser == CPA_BF16 ? 0x1p-8 : t->coarser == CPA_F16 ? 0x1p-11 : 0x1p-24;
    const int64_t heads = t->rows * m->q_heads, from = both ? 0 : t->keys[0], element = (int64_t)sizeof(float);
    cpa_reference_attend_args args = {.rows = t->rows,
                                      .keys = both ? total_keys(t) : t->keys[1],
                                      .q_heads = m->q_heads,
                                      .kv_heads = m->kv_heads,
                                      .k_dim = m->head_dim,
                                      .v_dim = m->v_head_dim,
                                      .q = t->q_wide,
                                      .k = t->k_wide + from * m->kv_heads * m->head_dim,
                                      .v = t->v_wide + from * m->kv_heads * m->v_head_dim,
                                      .q_positions = t->q_positions_device,
                                      .k_positions = t->k_positions_device + from,
                                      .limits = t->limits_device,
                                      .limit_base = both ? t->keys[0] : 0,
                                      .mask = mask,
                                      .scale = t->scale,
                                      .o = t->ref_o,
                                      .mass = t->ref_mass,
                                      .lse = t->ref_lse};
    float *mass = (float *)t->got;
    CPA_TRY(t->kernels->reference_attend(t->blas, &args, t->stream));
    CPA_TRY(t->kernels->copy(t->want.o, t->ref_o, heads * m->v_head_dim * element, t->stream));
    CPA_TRY(t->kernels->copy(t->want.lse, t->ref_lse, heads * element, t->stream));
    CPA_TRY(t->kernels->copy(mass, t->ref_mass, heads * m->v_head_dim * element, t->stream));
    CPA_TRY(t->kernels->stream_sync(t->stream));
    for (int64_t i = 0; i < heads; i++) {
        float most = 0;
        for (int32_t d = 0; d < m->v_head_dim; d++) most = fmaxf(most, mass[i * m->v_head_dim + d]);
        t->want.tolerance[i] = (float)(2 * unit * (double)most + 1e-5);
    }
    return CPA_OK;
}

static void expect_row(kernel_test *t, cpa_mask mask, int both, int64_t row, int32_t head) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t at = row * m->q_heads + head, kv_head = head / (m->q_heads / m->kv_heads);
    double o[CPA_MAX_HEAD_DIM], lse, tolerance;
    cpa_reference_row reference;
    cpa_reference_begin(&reference, t->q + at * m->head_dim, m->head_dim, m->v_head_dim, t->coarser, (double)t->scale);
    for (int64_t i = both ? 0 : t->keys[0]; i < t->keys[0] + t->limits[row]; i++) {
        if (!cpa_reference_sees(mask, t->q_positions[row], t->k_positions[i])) continue;
        cpa_reference_add(&reference, t->k + (i * m->kv_heads + kv_head) * m->head_dim,
                          t->v + (i * m->kv_heads + kv_head) * m->v_head_dim);
    }
    cpa_reference_end(&reference, o, &lse, &tolerance);
    for (int32_t d = 0; d < m->v_head_dim; d++) t->want.o[at * m->v_head_dim + d] = (float)o[d];
    t->want.lse[at] = (float)lse;
    t->want.tolerance[at] = (float)tolerance;
}

static cpa_status expect(kernel_test *t, cpa_mask mask, int both) {
    const cpa_model_shape *m = &t->options->model;
    if (t->blas) return expect_on_device(t, mask, both);
    /* Every ninth row and the last ones, each with one query head of every KV head. */
    for (int64_t row = 0; row < t->rows; row++) {
        int taken = row % HOST_ROWS_APART == 0 || row >= t->rows - DECODE_ROWS - 1;
        for (int32_t head = 0; head < m->q_heads; head++) {
            t->want.tolerance[row * m->q_heads + head] = -1;
            if (taken && (head + row) % (m->q_heads / m->kv_heads) == 0) expect_row(t, mask, both, row, head);
        }
    }
    return CPA_OK;
}

static cpa_status wrong_row(const kernel_test *t, const char *what, cpa_mask mask, int64_t at, const char *which,
                            double error, double allowed, cpa_error *err) {
    const cpa_worker_options *o = t->options;
    const cpa_model_shape *m = &o->model;
    return cpa_fail(
        err, CPA_CHECK_FAILED,
        "%s, %s over %s, %d/%d heads of %d/%d, blocks of %d, %s, window %lld, %d sinks: row %lld (%s), head "
        "%lld: |%s - %s reference| = %.3g, allowed %.3g",
        what, dtype_name(m->dtype), dtype_name(o->kv_dtype), m->q_heads, m->kv_heads, m->head_dim, m->v_head_dim,
        o->block_size, mask.causal ? "causal" : "full", (long long)mask.window, mask.sinks,
        (long long)(at / m->q_heads), at / m->q_heads < t->rows - DECODE_ROWS ? "prefill" : "decode",
        (long long)(at % m->q_heads), which, t->blas ? "fp32 BLAS" : "float64", error, allowed);
}

/* Compares a state, or the rounded result beside its LSE, with what rows must be. */
static cpa_status compare(kernel_test *t, const char *what, cpa_mask mask, const result *r, int rounded,
                          cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t heads = t->rows * m->q_heads, n = heads * m->v_head_dim;
    const cpa_dtype dtype = rounded ? m->dtype : CPA_F32;
    const double lse_allowed = (t->blas ? 3 : 1) * cpa_reference_lse_tolerance(t->coarser); /* of two fp32 results */
    float *wide = (float *)t->got + n, *lse = (float *)t->got;
    CPA_TRY(t->kernels->copy(t->got, rounded ? r->out : (void *)r->o, n * cpa_dtype_bytes(dtype), t->stream));
    CPA_TRY(t->kernels->stream_sync(t->stream));
    cpa_reference_widen(t->got, dtype, n, wide);
    CPA_TRY(t->kernels->copy(lse, r->lse, heads * (int64_t)sizeof *lse, t->stream));
    CPA_TRY(t->kernels->stream_sync(t->stream));
    for (int64_t i = 0; i < heads; i++) {
        if (t->want.tolerance[i] < 0) continue;
        double worst = 0, allowed = (double)t->want.tolerance[i];
        for (int64_t d = i * m->v_head_dim; d < (i + 1) * m->v_head_dim; d++) {
            double error = fabs((double)wide[d] - (double)t->want.o[d]);
            if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
        }
        int empty = t->want.lse[i] == -INFINITY;
        double lse_error = lse[i] == t->want.lse[i] ? 0 : fabs((double)lse[i] - (double)t->want.lse[i]);
        if (empty) allowed = 0;
        if (worst > allowed) return wrong_row(t, what, mask, i, "O", worst, allowed, err);
        if (!(lse_error <= lse_allowed)) return wrong_row(t, what, mask, i, "LSE", lse_error, lse_allowed, err);
        t->stats->rows++;
    }
    return CPA_OK;
}

static cpa_status attend(kernel_test *t, int32_t shard, cpa_mask mask, int resume, const result *r, cpa_error *err) {
    cpa_attend_args args = {.size = sizeof args,
                            .q = t->q_device,
                            .q_dtype = t->options->model.dtype,
                            .kv = t->kv,
                            .mask = mask,
                            .scale = t->scale,
                            .resume = resume,
                            .state = {.o = r->o, .lse = r->lse},
                            .out = r->out};
    cpa_status status = cpa_attend(t->plans[shard], &args, t->stream);
    return status == CPA_OK ? status : cpa_fail(err, status, "attend: %s", t->stream->error.message);
}

/* Shard 1, nothing (NaN, which counts as -inf) and shard 0. */
static cpa_status merge(kernel_test *t, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    cpa_partial states[3];
    const int order[3] = {0, 2, 1};
    for (int i = 0; i < 3; i++) states[i] = (cpa_partial){.o = t->results[order[i]].o, .lse = t->results[order[i]].lse};
    cpa_merge_args args = {.size = sizeof args,
                           .rows = t->rows,
                           .heads = m->q_heads,
                           .v_dim = m->v_head_dim,
                           .states = states,
                           .n_states = 3,
                           .out_dtype = m->dtype,
                           .out = t->results[0].out,
                           .out_lse = t->results[1].lse};
    cpa_status status = cpa_merge(&args, t->stream);
    return status == CPA_OK ? status : cpa_fail(err, status, "merge: %s", t->stream->error.message);
}

/* One mask: every path attends shard 1, merges that with shard 0, and resumes it over shard 0. */
static cpa_status check_mask(kernel_test *t, cpa_mask mask, cpa_error *err) {
    const char *path;
    char what[64];
    for (int both = 0; both < 2; both++) {
        CPA_TRY(expect(t, mask, both));
        for (int32_t p = 0; (path = t->kernels->attend_path(t->device, p)); p++) {
            result fresh = t->results[0], other = t->results[1], merged = t->results[0];
            t->stats->paths = p + 1;
            snprintf(what, sizeof what, "attend, path %s", path);
            CPA_TRY(attend(t, 1, mask, 0, &fresh, err));
            if (!both) {
                CPA_TRY(compare(t, what, mask, &fresh, 0, err));
                CPA_TRY(compare(t, what, mask, &fresh, 1, err));
                continue;
            }
            CPA_TRY(attend(t, 0, mask, 0, &other, err));
            CPA_TRY(merge(t, err));
            merged.lse = other.lse;
            snprintf(what, sizeof what, "merge, after path %s", path);
            CPA_TRY(compare(t, what, mask, &merged, 1, err));
            fresh.out = NULL;
            snprintf(what, sizeof what, "attend, path %s, resumed", path);
            CPA_TRY(attend(t, 0, mask, 1, &fresh, err));
            CPA_TRY(compare(t, what, mask, &fresh, 0, err));
        }
    }
    return CPA_OK;
}

static cpa_status run(kernel_test *t, cpa_error *err) {
    const cpa_model_shape *m = &t->options->model;
    const int64_t one_group = 136, groups = 72; /* packed rows of a KV head: more than a tile, and ragged */
    const int64_t prefill = m->q_heads == m->kv_heads ? one_group : groups;
    const cpa_mask masks[] = {{.causal = 1}, {.causal = 0}, {.causal = 1, .window = 50, .sinks = 4}, m->mask};
    for (int32_t s = 0; s < SHARDS; s++) t->keys[s] = cpa_shard_len(t->map, s, TOKENS);
    t->rows = prefill + DECODE_ROWS;
    CPA_TRY(t->kernels->stream_create(t->device, &t->stream, err));
    CPA_TRY(make_inputs(t, prefill, err));
    CPA_TRY(write_pages(t, err));
    CPA_TRY(make_results(t, err));
    CPA_TRY(check_pages(t, err));
    CPA_TRY(make_plans(t, prefill, err));
    CPA_TRY(make_blas(t, err));
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        int repeated = 0;
        for (size_t j = 0; j < i; j++) repeated |= memcmp(&masks[i], &masks[j], sizeof masks[i]) == 0;
        if (!repeated) CPA_TRY(check_mask(t, masks[i], err));
    }
    return CPA_OK;
}

cpa_status cpa_self_test_kernels(cpa_device *dev, const cpa_worker_options *options, uint64_t seed,
                                 cpa_self_test_kernels_stats *stats, cpa_error *err) {
    const cpa_model_shape *m = &options->model;
    kernel_test t = {
        .device = dev,
        .kernels = dev->kernels,
        .options = options,
        .stats = stats,
        .seed = seed,
        .map = {SHARDS, options->block_size},
        .coarser = m->dtype == CPA_F32 ? options->kv_dtype : m->dtype,
        .scale = 1.0f / sqrtf((float)m->head_dim),
    };
    cpa_error own = {CPA_OK, ""};
    *stats = (cpa_self_test_kernels_stats){0};
    cpa_status status = run(&t, &own);
    if (status != CPA_OK)
        cpa_fail(err, status, "self-test: %s", own.status != CPA_OK ? own.message : t.stream->error.message);
    (void)t.kernels->attend_path(dev, 0);
    if (t.stream) (void)t.kernels->stream_sync(t.stream);
    if (t.blas) t.kernels->reference_close(t.blas);
    for (int i = 0; i < SHARDS; i++) cpa_attend_plan_destroy(t.plans[i]);
    for (int32_t i = t.n_device - 1; i >= 0; i--) t.kernels->free(dev, t.device_memory[i]);
    for (int32_t i = t.n_host - 1; i >= 0; i--) free(t.host_memory[i]);
    if (t.stream) t.kernels->stream_destroy(t.stream);
    return status;
}
