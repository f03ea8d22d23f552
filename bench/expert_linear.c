/* bench expert_linear: the products of tokens with the weights of the experts that each has chosen. Rows of x repeat after
 * PERIOD; so do those of the weights, over all experts, and as PERIOD is no number of outputs every expert has others.
 * Some results are computed again, in float64. */
#include <math.h>
#include <stdlib.h>

#include <cpattn/experts.h>

#include "base/check.h"
#include "base/convert.h"
#include "bench/benchmark.h"
#include "bench/memory.h"
#include "bench/noise.h"

enum { PERIOD = 61, CHECKED_PLACES = 16, CHECKED_OUTPUTS = 64, SCALE_BLOCK = 128 };

typedef struct experts_state {
    cpa_bench_site *site;
    int64_t tokens, outputs, inputs, places;
    int32_t experts, top_k;
    int64_t scale_rows, scale_columns;
    float *x, *weight; /* [PERIOD, inputs] as the dtype, or the codes, have them */
    float *scales;     /* [experts, scale_rows, scale_columns]; NULL: none */
    int32_t *offsets;
    uint32_t *rows; /* [places] token of each */
    void *device_x, *device_weights, *device_scales, *device_offsets, *device_rows, *out;
} experts_state;

static cpa_dtype dtype_of(const experts_state *s) {
    return (cpa_dtype)s->site->options.dtype;
}

/* Rows that repeat after PERIOD: as floats, and on the device in the dtype. */
static cpa_status make_rows(experts_state *s, uint64_t seed, int64_t rows, float **out, void **on_device,
                            cpa_error *err) {
    const int64_t n = PERIOD * s->inputs, bytes = cpa_dtype_bytes(dtype_of(s));
    float *noise = *out = malloc((size_t)n * sizeof *noise);
    void *narrow = malloc((size_t)(n * bytes));
    cpa_status status = noise && narrow ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench expert_linear: no memory");
    if (status == CPA_OK) {
        for (int64_t i = 0; i < n; i++) noise[i] = cpa_bench_normal(cpa_bench_hash(seed + (uint64_t)i));
        cpa_narrow(narrow, noise, dtype_of(s), n);
        cpa_widen(noise, narrow, dtype_of(s), n);
        const int64_t all = rows * s->inputs * bytes, period = n * bytes < all ? n * bytes : all;
        status = cpa_bench_upload_period(s->site, narrow, period, all, on_device, err);
    }
    free(narrow);
    return status;
}

/* The same in FP8: the numbers +-1, 1.125, ... 1.875, whose codes are 0x38 and on, with scales of the blocks. */
static cpa_status make_codes(experts_state *s, cpa_error *err) {
    const int64_t n = PERIOD * s->inputs, all = s->experts * s->outputs * s->inputs, period = n < all ? n : all;
    s->scale_rows = (s->outputs + SCALE_BLOCK - 1) / SCALE_BLOCK;
    s->scale_columns = (s->inputs + SCALE_BLOCK - 1) / SCALE_BLOCK;
    const int64_t n_scales = s->experts * s->scale_rows * s->scale_columns;
    uint8_t *codes = malloc((size_t)n);
    cpa_status status = CPA_OK;
    s->weight = malloc((size_t)n * sizeof *s->weight);
    s->scales = malloc((size_t)n_scales * sizeof *s->scales);
    if (!codes || !s->weight || !s->scales) status = cpa_fail(err, CPA_NO_MEMORY, "bench expert_linear: no memory");
    if (status == CPA_OK) {
        for (int64_t i = 0; i < n; i++) {
            const uint64_t h = cpa_bench_hash((uint64_t)i + 17);
            codes[i] = (uint8_t)(0x38 | (h & 7) | (h & 8) << 4);
            s->weight[i] = (h & 8 ? -1 : 1) * (1 + (float)(h & 7) / 8);
        }
        for (int64_t i = 0; i < n_scales; i++) s->scales[i] = 0.5f + (float)(cpa_bench_hash((uint64_t)i) % 64) / 64;
        status = cpa_bench_upload_period(s->site, codes, period, all, &s->device_weights, err);
        if (status == CPA_OK)
            status =
                cpa_bench_upload(s->site, s->scales, n_scales * (int64_t)sizeof *s->scales, &s->device_scales, err);
    }
    free(codes);
    return status;
}

/* Every token chooses neighbouring experts, from a random one on. */
static cpa_status make_places(experts_state *s, cpa_error *err) {
    int32_t at = 0;
    s->offsets = calloc((size_t)s->experts + 1, sizeof *s->offsets);
    s->rows = malloc((size_t)s->places * sizeof *s->rows);
    if (!s->offsets || !s->rows) return cpa_fail(err, CPA_NO_MEMORY, "bench expert_linear: no memory");
    for (int32_t e = 0; e < s->experts; e++) {
        for (int64_t t = 0; t < s->tokens; t++) {
            const int32_t first = (int32_t)(cpa_bench_hash((uint64_t)t) % (uint64_t)s->experts);
            if ((e - first + s->experts) % s->experts < s->top_k) s->rows[at++] = (uint32_t)t;
        }
        s->offsets[e + 1] = at;
    }
    CPA_TRY(
        cpa_bench_upload(s->site, s->offsets, (s->experts + 1) * (int64_t)sizeof *s->offsets, &s->device_offsets, err));
    return cpa_bench_upload(s->site, s->rows, s->places * (int64_t)sizeof *s->rows, &s->device_rows, err);
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    const int64_t bytes = cpa_dtype_bytes((cpa_dtype)o->dtype);
    int64_t active = 0;
    experts_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench expert_linear: no memory");
    *state = s;
    s->site = site;
    s->tokens = shape[0], s->outputs = shape[1], s->inputs = shape[2];
    s->experts = (int32_t)o->experts, s->top_k = (int32_t)o->top_k;
    s->places = s->tokens * s->top_k;
    if (s->top_k > s->experts || s->places > INT32_MAX || s->outputs > INT32_MAX || s->inputs > INT32_MAX)
        return cpa_fail(err, CPA_INVALID, "bench expert_linear: %lld tokens of %d of %d experts", (long long)s->tokens,
                        s->top_k, s->experts);
    CPA_TRY(make_places(s, err));
    CPA_TRY(make_rows(s, 1, s->tokens, &s->x, &s->device_x, err));
    if (o->fp8_weights) {
        CPA_TRY(make_codes(s, err));
    } else {
        const uint64_t seed = 1 + (uint64_t)(PERIOD * s->inputs);
        CPA_TRY(make_rows(s, seed, s->experts * s->outputs, &s->weight, &s->device_weights, err));
    }
    CPA_TRY(cpa_bench_poisoned(site, s->places * s->outputs * bytes, &s->out, err));
    for (int32_t e = 0; e < s->experts; e++) active += s->offsets[e + 1] > s->offsets[e];
    row->flops = 2.0 * (double)s->places * (double)s->outputs * (double)s->inputs;
    row->bytes = (double)active * (double)s->outputs * (double)s->inputs * (double)(o->fp8_weights ? 1 : bytes) +
                 (double)((s->tokens * s->inputs + s->places * s->outputs) * bytes);
    return CPA_OK;
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    const experts_state *s = state;
    const cpa_expert_linear_args args = {
        .size = sizeof args,
        .experts = s->experts,
        .rows = s->places,
        .inputs = (int32_t)s->inputs,
        .outputs = (int32_t)s->outputs,
        .dtype = dtype_of(s),
        .out_dtype = dtype_of(s),
        .offsets = s->device_offsets,
        .x = s->device_x,
        .x_rows = s->tokens,
        .weight = s->device_weights,
        .out = s->out,
        .tokens = s->device_rows,
        .weight_scale = s->device_scales,
        .weight_scale_rows = (int32_t)s->scale_rows,
        .weight_scale_columns = (int32_t)s->scale_columns,
    };
    (void)call;
    return cpa_bench_enqueued(s->site, cpa_expert_linear(&args, s->site->stream), err);
}

/* Whether a result is what float64 gives, but for its rounding and those of an fp32 sum. */
static bool is_right(const experts_state *s, int32_t expert, int64_t place, int64_t output, float got) {
    const cpa_dtype dtype = dtype_of(s);
    const double unit = dtype == CPA_F32 ? 0x1p-23 : dtype == CPA_BF16 ? 0x1p-8 : 0x1p-11;
    const float *x = s->x + s->rows[place] % PERIOD * s->inputs;
    const float *weight = s->weight + (expert * s->outputs + output) % PERIOD * s->inputs;
    double sum = 0, size = 0;
    for (int64_t i = 0; i < s->inputs; i++) {
        const int64_t block = (expert * s->scale_rows + output / SCALE_BLOCK) * s->scale_columns + i / SCALE_BLOCK;
        const double term = (double)x[i] * (double)weight[i] * (s->scales ? (double)s->scales[block] : 1);
        sum += term, size += fabs(term);
    }
    return fabs((double)got - sum) <= unit * fabs(sum) + 0x1p-23 * (2 + sqrt((double)s->inputs)) * size;
}

/* Of some places, some outputs. */
static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    const experts_state *s = state;
    const int64_t bytes = cpa_dtype_bytes(dtype_of(s)), row_bytes = s->outputs * bytes;
    const int64_t step = (s->places + CHECKED_PLACES - 1) / CHECKED_PLACES;
    char *out = malloc((size_t)row_bytes);
    cpa_status status = out ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench expert_linear: no memory for results");
    row->checked = row->wrong = 0;
    int32_t expert = 0;
    for (int64_t place = 0; status == CPA_OK && place < s->places; place += step) {
        int64_t wrong = 0;
        while (s->offsets[expert + 1] <= place) expert++;
        status = cpa_bench_copy(s->site, out, (char *)s->out + place * row_bytes, row_bytes, err);
        for (int64_t o = place % 7; status == CPA_OK && o < s->outputs; o += s->outputs / CHECKED_OUTPUTS + 1) {
            float got;
            cpa_widen(&got, out + o * bytes, dtype_of(s), 1);
            wrong += !is_right(s, expert, place, o, got);
        }
        row->checked++;
        row->wrong += wrong > 0;
    }
    free(out);
    return status;
}

static void release(void *state) {
    experts_state *s = state;
    if (!s) return;
    void *const on_device[] = {s->device_x,       s->device_weights, s->device_scales,
                               s->device_offsets, s->device_rows,    s->out};
    void *const own[] = {s->x, s->weight, s->scales, s->offsets, s->rows, s};
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++) cpa_device_free(s->site->device, on_device[i]);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) free(own[i]);
}

const cpa_bench cpa_bench_expert_linear = {
    .name = "expert_linear",
    .dims = "tokens x outputs x inputs",
    .n_dims = 3,
    .shapes_host = "1x1536x2K:experts=16,64x1536x2K:experts=16",
    .shapes_cuda =
        "1x4Kx7K:experts=256,8x4Kx7K:experts=256,64x4Kx7K:experts=256,4Kx4Kx7K:experts=256,"
        "1x4Kx7K:experts=256:fp8-weights=true,8x4Kx7K:experts=256:fp8-weights=true,"
        "4Kx4Kx7K:experts=256:fp8-weights=true,4Kx7Kx2K:experts=256,"
        "1x1536x2K:experts=128,4Kx1536x2K:experts=128",
    .checked = "places, up to 16, of which some outputs",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
