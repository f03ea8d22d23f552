/* bench rmsnorm, swiglu, qk_norm_rope and sample: operators beside attention that only move memory. Rows repeat after
 * PERIOD; those of the first period are checked against what the host back end makes of them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/check.h"
#include "base/convert.h"
#include "bench/benchmark.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/noise.h"

enum { PERIOD = 16 };
static const double rope_theta = 5e5;
static const float temperature = 0.7f, top_p = 0.9f;
static const int32_t top_k = 50;

/* A tensor: the first period of it on the host as well. */
typedef struct tensor {
    cpa_dtype dtype;
    int64_t width; /* elements of a row */
    void *device, *host;
} tensor;

typedef struct nn_state {
    cpa_bench_site *site;
    cpa_device *host; /* for the reference */
    cpa_stream *host_stream;
    int64_t rows, period;
    tensor in, residual, weight, out;
    tensor numbers[2], counts; /* arguments of sample: temperature and top_p; top_k */
    tensor positions, table;   /* arguments of qk_norm_rope: positions, which are slots as well; table of angles */
    cpa_attention_shape shape;
    cpa_kv_view cache;
    void *host_out;
} nn_state;

typedef cpa_status call_fn(const nn_state *s, int on_host, cpa_stream *stream);

static int64_t row_bytes(const tensor *t) {
    return t->width * cpa_dtype_bytes(t->dtype);
}

static void *memory_of(const tensor *t, int on_host) {
    return on_host ? t->host : t->device;
}

/* Memory for `rows` rows of which the first period, from `host`, repeats. */
static cpa_status upload_rows(nn_state *s, tensor *t, int64_t rows, cpa_error *err) {
    const int64_t period = rows < s->period ? rows : s->period;
    CPA_TRY(cpa_device_alloc(s->site->device, rows * row_bytes(t), &t->device, err));
    CPA_TRY(cpa_bench_copy(s->site, t->device, t->host, period * row_bytes(t), err));
    return cpa_bench_replicate(s->site, t->device, period * row_bytes(t), rows * row_bytes(t), err);
}

static cpa_status make_noise(nn_state *s, tensor *t, cpa_dtype dtype, int64_t rows, int64_t width, float size,
                             uint64_t seed, cpa_error *err) {
    const int64_t period = rows < s->period ? rows : s->period, bytes = cpa_dtype_bytes(dtype);
    *t = (tensor){dtype, width, NULL, malloc((size_t)(period * width * bytes))};
    if (!t->host) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for inputs");
    for (int64_t i = 0; i < period * width; i++) {
        const float noise = size * cpa_bench_normal(cpa_bench_hash(seed + (uint64_t)i));
        cpa_narrow((char *)t->host + i * bytes, &noise, dtype, 1);
    }
    return upload_rows(s, t, rows, err);
}

/* A number for each row; `number` has the bytes of the dtype. */
static cpa_status make_numbers(nn_state *s, tensor *t, const void *number, cpa_error *err) {
    *t = (tensor){CPA_F32, 1, NULL, malloc((size_t)s->period * sizeof(float))};
    if (!t->host) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for inputs");
    for (int64_t i = 0; i < s->period; i++) memcpy((char *)t->host + i * 4, number, 4);
    return upload_rows(s, t, s->rows, err);
}

static cpa_status make_out(nn_state *s, cpa_dtype dtype, int64_t width, cpa_error *err) {
    s->out = (tensor){dtype, width, NULL, malloc((size_t)(s->period * width * cpa_dtype_bytes(dtype)))};
    s->host_out = malloc((size_t)(s->period * row_bytes(&s->out)));
    if (!s->out.host || !s->host_out) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for results");
    return cpa_bench_poisoned(s->site, s->rows * row_bytes(&s->out), &s->out.device, err);
}

static cpa_status prepare_state(cpa_bench_site *site, int64_t rows, nn_state **out, void **state, cpa_error *err) {
    const cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST};
    nn_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory");
    *state = *out = s;
    s->site = site;
    s->rows = rows;
    s->period = rows < PERIOD ? rows : PERIOD;
    CPA_TRY(cpa_device_open(&options, &s->host, err));
    return cpa_stream_create(s->host, &s->host_stream, err);
}

static void free_tensor(const nn_state *s, tensor *t) {
    cpa_device_free(s->site->device, t->device);
    free(t->host);
}

static void release(void *state) {
    nn_state *s = state;
    if (!s) return;
    tensor *const tensors[] = {&s->in,         &s->residual, &s->weight,    &s->out,  &s->numbers[0],
                               &s->numbers[1], &s->counts,   &s->positions, &s->table};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) free_tensor(s, tensors[i]);
    cpa_device_free(s->site->device, s->cache.k);
    cpa_device_free(s->site->device, s->cache.v);
    cpa_stream_destroy(s->host_stream);
    if (s->host) cpa_device_close(s->host);
    free(s->host_out);
    free(s);
}

/* One step of the dtype apart, or what fp32 arithmetic may be. */
static bool is_near(float got, float want, cpa_dtype dtype) {
    const float unit = dtype == CPA_F32 ? 0x1p-20f : dtype == CPA_BF16 ? 0x1p-7f : 0x1p-10f;
    return fabsf(got - want) <= unit * fabsf(want) + 1e-6f;
}

static int64_t differing_rows(const nn_state *s) {
    const int64_t width = s->out.width, bytes = row_bytes(&s->out);
    float *got = malloc((size_t)width * sizeof *got), *want = malloc((size_t)width * sizeof *want);
    int64_t wrong = 0;
    for (int64_t row = 0; got && want && row < s->period; row++) {
        bool is_wrong = false;
        cpa_widen(got, (char *)s->host_out + row * bytes, s->out.dtype, width);
        cpa_widen(want, (char *)s->out.host + row * bytes, s->out.dtype, width);
        for (int64_t i = 0; i < width; i++) is_wrong |= !is_near(got[i], want[i], s->out.dtype);
        wrong += is_wrong;
    }
    if (!got || !want) wrong = s->period;
    free(want);
    free(got);
    return wrong;
}

/* The first period of the results in host_out, and those of the host in out.host. */
static cpa_status make_reference(nn_state *s, call_fn *call, cpa_error *err) {
    CPA_TRY(cpa_bench_copy(s->site, s->host_out, s->out.device, s->period * row_bytes(&s->out), err));
    cpa_status status = call(s, 1, s->host_stream);
    return status == CPA_OK ? status : cpa_fail(err, status, "bench: %s", cpa_stream_error(s->host_stream));
}

static cpa_status check_floats(nn_state *s, call_fn *call, cpa_bench_row *row, cpa_error *err) {
    CPA_TRY(make_reference(s, call, err));
    row->checked = s->period;
    row->wrong = differing_rows(s);
    return CPA_OK;
}

/* ---- rmsnorm ---- */

static cpa_status call_rmsnorm(const nn_state *s, int on_host, cpa_stream *stream) {
    /* The residual has grown by x in each call: what is normed is what the last one left. */
    const cpa_rmsnorm_args args = {.size = sizeof args,
                                   .rows = on_host ? s->period : s->rows,
                                   .width = (int32_t)s->in.width,
                                   .dtype = s->in.dtype,
                                   .x = on_host ? s->residual.host : s->in.device,
                                   .residual = on_host ? NULL : s->residual.device,
                                   .weight = memory_of(&s->weight, on_host),
                                   .eps = 1e-5f,
                                   .out = memory_of(&s->out, on_host)};
    return cpa_rmsnorm(&args, stream);
}

static cpa_status prepare_rmsnorm(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                  cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    const int64_t width = shape[1];
    nn_state *s = NULL;
    CPA_TRY(prepare_state(site, shape[0], &s, state, err));
    CPA_TRY(make_noise(s, &s->in, dtype, s->rows, width, 1, 1, err));
    CPA_TRY(make_noise(s, &s->residual, dtype, s->rows, width, 1, 2, err));
    CPA_TRY(make_noise(s, &s->weight, dtype, 1, width, 1, 3, err));
    row->bytes = 4.0 * (double)(s->rows * row_bytes(&s->in));
    return make_out(s, dtype, width, err);
}

static cpa_status run_rmsnorm(void *state, int64_t call, cpa_error *err) {
    const nn_state *s = state;
    (void)call;
    return cpa_bench_enqueued(s->site, call_rmsnorm(s, 0, s->site->stream), err);
}

static cpa_status check_rmsnorm(void *state, cpa_bench_row *row, cpa_error *err) {
    nn_state *s = state;
    CPA_TRY(cpa_bench_copy(s->site, s->residual.host, s->residual.device, s->period * row_bytes(&s->residual), err));
    return check_floats(s, call_rmsnorm, row, err);
}

const cpa_bench cpa_bench_rmsnorm = {
    .name = "rmsnorm",
    .dims = "rows x width",
    .n_dims = 2,
    .shapes_host = "64x4K",
    .shapes_cuda = "1x4K,64x4K,8Kx4K,32Kx4K,16Kx8K",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_rmsnorm,
    .run = run_rmsnorm,
    .check = check_rmsnorm,
    .release = release,
};

/* ---- swiglu ---- */

static cpa_status call_swiglu(const nn_state *s, int on_host, cpa_stream *stream) {
    const cpa_swiglu_args args = {.size = sizeof args,
                                  .rows = on_host ? s->period : s->rows,
                                  .width = (int32_t)s->out.width,
                                  .dtype = s->out.dtype,
                                  .gate_up = memory_of(&s->in, on_host),
                                  .out = memory_of(&s->out, on_host)};
    return cpa_swiglu(&args, stream);
}

static cpa_status prepare_swiglu(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    nn_state *s = NULL;
    CPA_TRY(prepare_state(site, shape[0], &s, state, err));
    CPA_TRY(make_noise(s, &s->in, dtype, s->rows, 2 * shape[1], 2, 1, err));
    row->bytes = 1.5 * (double)(s->rows * row_bytes(&s->in));
    return make_out(s, dtype, shape[1], err);
}

static cpa_status run_swiglu(void *state, int64_t call, cpa_error *err) {
    const nn_state *s = state;
    (void)call;
    return cpa_bench_enqueued(s->site, call_swiglu(s, 0, s->site->stream), err);
}

static cpa_status check_swiglu(void *state, cpa_bench_row *row, cpa_error *err) {
    return check_floats(state, call_swiglu, row, err);
}

const cpa_bench cpa_bench_swiglu = {
    .name = "swiglu",
    .dims = "rows x width",
    .n_dims = 2,
    .shapes_host = "64x4K",
    .shapes_cuda = "1x14K,64x14K,4Kx14K,16Kx14K",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_swiglu,
    .run = run_swiglu,
    .check = check_swiglu,
    .release = release,
};

/* ---- qk_norm_rope ---- */

static cpa_status call_qk_norm_rope(const nn_state *s, int on_host, cpa_stream *stream) {
    const cpa_qk_norm_rope_args args = {
        .size = sizeof args,
        .rows = on_host ? s->period : s->rows,
        .shape = s->shape,
        .qkv = memory_of(&s->in, on_host),
        .q_weight = memory_of(&s->weight, on_host),
        .k_weight = memory_of(&s->weight, on_host),
        .eps = 1e-5f,
        .rope = {.table = memory_of(&s->table, on_host), .max_position = s->rows, .dim = s->shape.k_dim},
        .positions = memory_of(&s->positions, on_host),
        .q = memory_of(&s->out, on_host),
        .slot_mapping = on_host ? NULL : s->positions.device,
        .kv = s->cache,
    };
    return cpa_qk_norm_rope(&args, stream);
}

/* Positions 0, 1, ..., which are slots too, and the cosines and sines of all of them. */
static cpa_status make_positions(nn_state *s, cpa_error *err) {
    const int64_t dim = s->shape.k_dim, table_bytes = s->rows * dim * (int64_t)sizeof(float);
    const cpa_rope_config config = {
        .size = sizeof config, .dim = (int32_t)dim, .theta = rope_theta, .max_position = s->rows};
    s->positions.host = cpa_bench_positions(0, s->rows);
    s->table.host = malloc((size_t)table_bytes);
    if (!s->positions.host || !s->table.host) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for positions");
    CPA_TRY(cpa_rope_table(&config, s->table.host, err));
    CPA_TRY(cpa_bench_upload(s->site, s->table.host, table_bytes, &s->table.device, err));
    return cpa_bench_upload(s->site, s->positions.host, s->rows * (int64_t)sizeof(int64_t), &s->positions.device, err);
}

static cpa_status prepare_qk_norm_rope(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                       cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    nn_state *s = NULL;
    CPA_TRY(prepare_state(site, shape[0], &s, state, err));
    s->shape = cpa_bench_shape(&site->options);
    const int64_t q = (int64_t)s->shape.q_heads * s->shape.k_dim;
    const int64_t kv = (int64_t)s->shape.kv_heads * (s->shape.k_dim + s->shape.v_dim);
    CPA_TRY(make_noise(s, &s->in, dtype, s->rows, q + kv, 1, 1, err));
    CPA_TRY(make_noise(s, &s->weight, dtype, 1, s->shape.k_dim, 1, 2, err));
    CPA_TRY(make_positions(s, err));
    const int64_t blocks = (s->rows + site->options.block_size - 1) / site->options.block_size;
    CPA_TRY(cpa_bench_make_cache(site, blocks, &s->cache, err));
    row->bytes = (double)s->rows * (double)((2 * q + kv) * cpa_dtype_bytes(dtype) +
                                            cpa_shape_row_bytes(&s->shape, CPA_KEYS) * s->shape.kv_heads +
                                            cpa_shape_row_bytes(&s->shape, CPA_VALUES) * s->shape.kv_heads);
    return make_out(s, dtype, q, err);
}

static cpa_status run_qk_norm_rope(void *state, int64_t call, cpa_error *err) {
    const nn_state *s = state;
    (void)call;
    return cpa_bench_enqueued(s->site, call_qk_norm_rope(s, 0, s->site->stream), err);
}

static cpa_status check_qk_norm_rope(void *state, cpa_bench_row *row, cpa_error *err) {
    return check_floats(state, call_qk_norm_rope, row, err);
}

const cpa_bench cpa_bench_qk_norm_rope = {
    .name = "qk_norm_rope",
    .dims = "rows",
    .n_dims = 1,
    .shapes_host = "64",
    .shapes_cuda = "1,64,8K,32K,32K:kv-cache-dtype=fp8_e4m3",
    .checked = "queries of up to 16 rows",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_qk_norm_rope,
    .run = run_qk_norm_rope,
    .check = check_qk_norm_rope,
    .release = release,
};

/* ---- sample ---- */

static cpa_status call_sample(const nn_state *s, int on_host, cpa_stream *stream) {
    const cpa_sample_args args = {.size = sizeof args,
                                  .rows = on_host ? s->period : s->rows,
                                  .vocabulary = s->in.width,
                                  .logits = memory_of(&s->in, on_host),
                                  .temperature = memory_of(&s->numbers[0], on_host),
                                  .top_p = memory_of(&s->numbers[1], on_host),
                                  .top_k = memory_of(&s->counts, on_host),
                                  .tokens = memory_of(&s->out, on_host)};
    return cpa_sample(&args, stream);
}

static cpa_status prepare_sample(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    nn_state *s = NULL;
    CPA_TRY(prepare_state(site, shape[0], &s, state, err));
    CPA_TRY(make_noise(s, &s->in, CPA_F32, s->rows, shape[1], 3, 1, err));
    CPA_TRY(make_numbers(s, &s->numbers[0], &temperature, err));
    CPA_TRY(make_numbers(s, &s->numbers[1], &top_p, err));
    CPA_TRY(make_numbers(s, &s->counts, &top_k, err));
    row->bytes = (double)(s->rows * row_bytes(&s->in));
    return make_out(s, CPA_F32, 1, err); /* tokens, of as many bytes */
}

static cpa_status run_sample(void *state, int64_t call, cpa_error *err) {
    const nn_state *s = state;
    (void)call;
    return cpa_bench_enqueued(s->site, call_sample(s, 0, s->site->stream), err);
}

static cpa_status check_sample(void *state, cpa_bench_row *row, cpa_error *err) {
    nn_state *s = state;
    const uint32_t *got = s->host_out, *want = s->out.host;
    CPA_TRY(make_reference(s, call_sample, err));
    row->checked = s->period;
    row->wrong = 0;
    for (int64_t i = 0; i < s->period; i++) row->wrong += got[i] != want[i];
    return CPA_OK;
}

const cpa_bench cpa_bench_sample = {
    .name = "sample",
    .dims = "rows x vocabulary",
    .n_dims = 2,
    .shapes_host = "1x32K",
    .shapes_cuda = "1x128256,32x128256,256x128256",
    .checked = "tokens of up to 16 rows",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare_sample,
    .run = run_sample,
    .check = check_sample,
    .release = release,
};
