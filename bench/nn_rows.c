#include "bench/nn_rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/noise.h"

enum { PERIOD = 16 };
static const double rope_theta = 5e5;

/* Memory for `rows` rows of which the first period, from `host`, repeats. */
static cpa_status upload_rows(cpa_bench_nn *s, cpa_bench_tensor *t, int64_t rows, cpa_error *err) {
    const int64_t period = rows < s->period ? rows : s->period;
    const int64_t bytes = cpa_bench_row_bytes(t);
    return cpa_bench_upload_period(s->site, t->host, period * bytes, rows * bytes, &t->device, err);
}

cpa_status cpa_bench_make_noise(cpa_bench_nn *s, cpa_bench_tensor *t, cpa_dtype dtype, int64_t rows, int64_t width,
                                float size, uint64_t seed, cpa_error *err) {
    const int64_t period = rows < s->period ? rows : s->period, bytes = cpa_dtype_bytes(dtype);
    *t = (cpa_bench_tensor){dtype, width, NULL, malloc((size_t)(period * width * bytes))};
    if (!t->host) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for inputs");
    for (int64_t i = 0; i < period * width; i++) {
        const float noise = size * cpa_bench_normal(cpa_bench_hash(seed + (uint64_t)i));
        cpa_narrow((char *)t->host + i * bytes, &noise, dtype, 1);
    }
    return upload_rows(s, t, rows, err);
}

cpa_status cpa_bench_make_numbers(cpa_bench_nn *s, cpa_bench_tensor *t, const void *number, cpa_error *err) {
    *t = (cpa_bench_tensor){CPA_F32, 1, NULL, malloc((size_t)s->period * sizeof(float))};
    if (!t->host) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for inputs");
    for (int64_t i = 0; i < s->period; i++) memcpy((char *)t->host + i * 4, number, 4);
    return upload_rows(s, t, s->rows, err);
}

cpa_status cpa_bench_make_out(cpa_bench_nn *s, cpa_dtype dtype, int64_t width, cpa_error *err) {
    s->out = (cpa_bench_tensor){dtype, width, NULL, malloc((size_t)(s->period * width * cpa_dtype_bytes(dtype)))};
    s->host_out = malloc((size_t)(s->period * cpa_bench_row_bytes(&s->out)));
    if (!s->out.host || !s->host_out) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for results");
    return cpa_bench_poisoned(s->site, s->rows * cpa_bench_row_bytes(&s->out), &s->out.device, err);
}

cpa_status cpa_bench_nn_prepare(cpa_bench_site *site, int64_t rows, cpa_bench_nn_call *call, cpa_bench_nn **out,
                                void **state, cpa_error *err) {
    const cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST};
    cpa_bench_nn *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory");
    *state = *out = s;
    s->site = site;
    s->call = call;
    s->rows = rows;
    s->period = rows < PERIOD ? rows : PERIOD;
    CPA_TRY(cpa_device_open(&options, &s->host, err));
    return cpa_stream_create(s->host, &s->host_stream, err);
}

static void free_tensor(const cpa_bench_nn *s, cpa_bench_tensor *t) {
    cpa_device_free(s->site->device, t->device);
    free(t->host);
}

void cpa_bench_nn_release(void *state) {
    cpa_bench_nn *s = state;
    if (!s) return;
    cpa_bench_tensor *const tensors[] = {&s->in,         &s->residual, &s->weight,    &s->out,   &s->numbers[0],
                                         &s->numbers[1], &s->counts,   &s->positions, &s->table, &s->scales};
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

static int64_t differing_rows(const cpa_bench_nn *s) {
    const int64_t width = s->out.width, bytes = cpa_bench_row_bytes(&s->out);
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

cpa_status cpa_bench_nn_reference(cpa_bench_nn *s, cpa_error *err) {
    CPA_TRY(cpa_bench_copy(s->site, s->host_out, s->out.device, s->period * cpa_bench_row_bytes(&s->out), err));
    cpa_status status = s->call(s, 1, s->host_stream);
    return status == CPA_OK ? status : cpa_fail(err, status, "bench: %s", cpa_stream_error(s->host_stream));
}

cpa_status cpa_bench_nn_run(void *state, int64_t call, cpa_error *err) {
    const cpa_bench_nn *s = state;
    (void)call;
    return cpa_bench_enqueued(s->site, s->call(s, 0, s->site->stream), err);
}

cpa_status cpa_bench_nn_check(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    CPA_TRY(cpa_bench_nn_reference(s, err));
    row->checked = s->period;
    row->wrong = differing_rows(s);
    return CPA_OK;
}

cpa_status cpa_bench_make_positions(cpa_bench_nn *s, int64_t dim, cpa_error *err) {
    const int64_t table_bytes = s->rows * dim * (int64_t)sizeof(float);
    const cpa_rope_config config = {
        .size = sizeof config, .dim = (int32_t)dim, .theta = rope_theta, .max_position = s->rows};
    s->positions.host = cpa_bench_positions(0, s->rows);
    s->table.host = malloc((size_t)table_bytes);
    if (!s->positions.host || !s->table.host) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for positions");
    CPA_TRY(cpa_rope_table(&config, s->table.host, err));
    CPA_TRY(cpa_bench_upload(s->site, s->table.host, table_bytes, &s->table.device, err));
    return cpa_bench_upload(s->site, s->positions.host, s->rows * (int64_t)sizeof(int64_t), &s->positions.device, err);
}
