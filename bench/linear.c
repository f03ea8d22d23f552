/* bench linear: rows times a matrix of weights, which repeat after PERIOD outputs, so that only so many results of a
 * row are computed again, in float64. */
#include <math.h>
#include <stdlib.h>

#include <cpattn/nn.h>

#include "base/check.h"
#include "base/convert.h"
#include "bench/benchmark.h"
#include "bench/memory.h"
#include "bench/noise.h"

enum { PERIOD = 64, CHECKED_ROWS = 16 };

typedef struct linear_state {
    cpa_bench_site *site;
    int64_t rows, outputs, inputs;
    int64_t copies, weight_bytes; /* copies of the weights, which take turns, and the bytes of one */
    float *x, *weight;            /* [rows, inputs] and [PERIOD, inputs], as the dtype has them */
    void *device_x, *device_weights, *out;
} linear_state;

/* Noise of n elements in the dtype of the options, as floats and on the device, where it begins `bytes` of memory. */
static cpa_status make_noise(linear_state *s, uint64_t seed, int64_t n, int64_t bytes, float **out, void **on_device,
                             cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)s->site->options.dtype;
    const int64_t own = n * cpa_dtype_bytes(dtype);
    float *noise = *out = malloc((size_t)n * sizeof *noise);
    void *narrow = malloc((size_t)own);
    cpa_status status = noise && narrow ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench linear: no memory");
    if (status == CPA_OK) {
        for (int64_t i = 0; i < n; i++) noise[i] = cpa_bench_normal(cpa_bench_hash(seed + (uint64_t)i));
        cpa_narrow(narrow, noise, dtype, n);
        cpa_widen(noise, narrow, dtype, n);
        status = cpa_bench_upload_period(s->site, narrow, own, bytes, on_device, err);
    }
    free(narrow);
    return status;
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    const int64_t bytes = cpa_dtype_bytes((cpa_dtype)site->options.dtype);
    linear_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench linear: no memory");
    *state = s;
    s->site = site;
    s->rows = shape[0], s->outputs = shape[1], s->inputs = shape[2];
    if (s->outputs % PERIOD != 0 || s->outputs > INT32_MAX || s->inputs > INT32_MAX)
        return cpa_fail(err, CPA_INVALID, "bench linear: %lld outputs, expected a multiple of %d",
                        (long long)s->outputs, PERIOD);
    const int64_t x_elements = s->rows * s->inputs;
    s->weight_bytes = s->outputs * s->inputs * bytes;
    s->copies = cpa_bench_copies(site, s->weight_bytes);
    CPA_TRY(make_noise(s, 1, x_elements, x_elements * bytes, &s->x, &s->device_x, err));
    CPA_TRY(make_noise(s, (uint64_t)x_elements + 1, PERIOD * s->inputs, s->copies * s->weight_bytes, &s->weight,
                       &s->device_weights, err));
    CPA_TRY(cpa_bench_poisoned(site, s->rows * s->outputs * bytes, &s->out, err));
    row->flops = 2.0 * (double)s->rows * (double)s->outputs * (double)s->inputs;
    row->bytes = (double)s->weight_bytes + (double)(s->rows * (s->inputs + s->outputs) * bytes);
    return CPA_OK;
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    linear_state *s = state;
    const cpa_dtype dtype = (cpa_dtype)s->site->options.dtype;
    cpa_linear_args args = {
        .size = sizeof args,
        .rows = s->rows,
        .inputs = (int32_t)s->inputs,
        .outputs = (int32_t)s->outputs,
        .dtype = dtype,
        .out_dtype = dtype,
        .x = s->device_x,
        .weight = (const char *)s->device_weights + call % s->copies * s->weight_bytes,
        .out = s->out,
    };
    return cpa_bench_enqueued(s->site, cpa_linear(&args, s->site->stream), err);
}

/* The results of row r in float64, and how far one may be from it by its rounding and those of an fp32 sum. */
static void expect_row(const linear_state *s, int64_t r, double *want, double *slack) {
    const cpa_dtype dtype = (cpa_dtype)s->site->options.dtype;
    const double unit = dtype == CPA_F32 ? 0x1p-23 : dtype == CPA_BF16 ? 0x1p-8 : 0x1p-11;
    const float *x = s->x + r * s->inputs;
    for (int64_t o = 0; o < PERIOD; o++) {
        const float *weight = s->weight + o * s->inputs;
        double sum = 0, size = 0;
        for (int64_t i = 0; i < s->inputs; i++) {
            sum += (double)x[i] * (double)weight[i];
            size += fabs((double)x[i] * (double)weight[i]);
        }
        want[o] = sum;
        slack[o] = unit * fabs(sum) + 0x1p-23 * (2 + sqrt((double)s->inputs)) * size;
    }
}

static bool row_is_wrong(const linear_state *s, int64_t r, const char *row, float *got) {
    double want[PERIOD], slack[PERIOD];
    int64_t wrong = 0;
    expect_row(s, r, want, slack);
    cpa_widen(got, row, (cpa_dtype)s->site->options.dtype, s->outputs);
    for (int64_t o = 0; o < s->outputs; o++) wrong += !(fabs((double)got[o] - want[o % PERIOD]) <= slack[o % PERIOD]);
    return wrong > 0;
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    const linear_state *s = state;
    const int64_t row_bytes = s->outputs * cpa_dtype_bytes((cpa_dtype)s->site->options.dtype);
    char *out = malloc((size_t)(s->rows * row_bytes));
    float *got = malloc((size_t)s->outputs * sizeof *got);
    cpa_status status = out && got ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench linear: no memory for results");
    if (status == CPA_OK) status = cpa_bench_copy(s->site, out, s->out, s->rows * row_bytes, err);
    row->checked = row->wrong = 0;
    for (int64_t r = 0; status == CPA_OK && r < s->rows; r += (s->rows + CHECKED_ROWS - 1) / CHECKED_ROWS) {
        row->checked++;
        row->wrong += row_is_wrong(s, r, out + r * row_bytes, got);
    }
    free(got);
    free(out);
    return status;
}

static void release(void *state) {
    linear_state *s = state;
    if (!s) return;
    cpa_device_free(s->site->device, s->out);
    cpa_device_free(s->site->device, s->device_weights);
    cpa_device_free(s->site->device, s->device_x);
    free(s->weight);
    free(s->x);
    free(s);
}

const cpa_bench cpa_bench_linear = {
    .name = "linear",
    .dims = "rows x outputs x inputs",
    .n_dims = 3,
    .shapes_host = "1x4Kx4K,16x4Kx4K",
    .shapes_cuda =
        "1x4Kx4K,1x6Kx4K,1x28Kx4K,1x4Kx14K,1x128256x4K,4x4Kx4K,4x28Kx4K,8x4Kx4K,8x28Kx4K,16x4Kx4K,16x28Kx4K,"
        "17x4Kx4K,32x4Kx4K,32x28Kx4K,64x28Kx4K,8Kx4Kx4K,8Kx28Kx4K",
    .checked = "rows, up to 16 spread over all",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
