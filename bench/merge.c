/* bench merge: n partial states of the same rows into one, checked against the definition in float64. Some states are
 * empty, some have a NaN LSE, and the O of those is NaN. The inputs repeat after PERIOD_ROWS rows, so that only those
 * are computed again; the others must have their bits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/check.h"
#include "bench/benchmark.h"
#include "bench/memory.h"
#include "bench/noise.h"
#include "kernels/host/cache/quantise.h"
#include "src/check/reference.h"

enum {
    EMPTY_EVERY = 8,    /* one LSE in so many is -inf */
    NAN_EVERY = 64,     /* and one in so many NaN */
    PERIOD_ROWS = 4096, /* a token and head each */
};

typedef struct merge_state {
    cpa_bench_site *site;
    /* Rows: tokens; head_rows: tokens and heads; period: head_rows until values repeat; states that are merged. */
    int64_t rows, head_rows, period, states;
    cpa_partial partials[CPA_MERGE_MAX_STATES];
    float *o[CPA_MERGE_MAX_STATES], *lse[CPA_MERGE_MAX_STATES]; /* the first period on the host */
    void *out;
    float *out_lse;
    void *out_scale;
} merge_state;

static const float fp8_scale = 0.05f;

static cpa_dtype out_dtype(const merge_state *s) {
    return s->site->options.fp8_out ? CPA_FP8_E4M3 : (cpa_dtype)s->site->options.dtype;
}

/* LSEs of a row spread over a few units, so that several states matter. Row 0 is empty in every state. */
static float make_lse(int64_t row, uint64_t random) {
    if (row == 0 || random % EMPTY_EVERY == 0) return -INFINITY;
    if (random % NAN_EVERY == 1) return NAN;
    return 3.0f * cpa_bench_normal(cpa_bench_hash(random));
}

/* The first period of a state, on the host. */
static cpa_status make_period(merge_state *s, int64_t index, cpa_error *err) {
    int64_t heads = s->site->options.q_heads, dim = s->site->options.v_dim, n = s->period;
    float *o = s->o[index] = malloc((size_t)(n * dim) * sizeof *o);
    float *lse = s->lse[index] = malloc((size_t)n * sizeof *lse);
    if (!o || !lse) return cpa_fail(err, CPA_NO_MEMORY, "bench merge: no memory for the reference");
    for (int64_t i = 0; i < n; i++) {
        uint64_t seed = cpa_bench_hash((uint64_t)(index * n + i));
        lse[i] = make_lse(i / heads, seed);
        for (int64_t d = 0; d < dim; d++) {
            o[i * dim + d] = isfinite(lse[i]) ? cpa_bench_normal(cpa_bench_hash(seed + (uint64_t)d)) : NAN;
        }
    }
    return CPA_OK;
}

static cpa_status make_partial(merge_state *s, int64_t index, cpa_error *err) {
    int64_t heads = s->site->options.q_heads, dim = s->site->options.v_dim;
    const int64_t lse_bytes = (int64_t)sizeof(float), o_bytes = dim * lse_bytes;
    cpa_partial *p = &s->partials[index];
    *p = (cpa_partial){.o_row_stride = heads * dim, .lse_row_stride = heads};
    CPA_TRY(make_period(s, index, err));
    CPA_TRY(cpa_bench_upload_period(s->site, s->o[index], s->period * o_bytes, s->head_rows * o_bytes, (void **)&p->o,
                                    err));
    return cpa_bench_upload_period(s->site, s->lse[index], s->period * lse_bytes, s->head_rows * lse_bytes,
                                   (void **)&p->lse, err);
}

/* The states of rows whose O counts: an empty one need not be read. */
static double full_states(const merge_state *s) {
    int64_t n = 0;
    for (int64_t j = 0; j < s->states; j++) {
        for (int64_t i = 0; i < s->period; i++) n += isfinite(s->lse[j][i]) != 0;
    }
    return (double)n * (double)s->head_rows / (double)s->period;
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    merge_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench merge: no memory");
    *state = s;
    s->site = site;
    s->rows = shape[0];
    if (shape[1] > CPA_MERGE_MAX_STATES) {
        return cpa_fail(err, CPA_INVALID, "bench merge: %lld states, at most %d", (long long)shape[1],
                        CPA_MERGE_MAX_STATES);
    }
    s->states = shape[1];
    s->head_rows = s->rows * site->options.q_heads;
    int64_t tokens = PERIOD_ROWS / site->options.q_heads + 1; /* in a period, whole tokens */
    s->period = (s->rows < tokens ? s->rows : tokens) * site->options.q_heads;
    int64_t elements = s->head_rows * site->options.v_dim;
    int64_t out_bytes = elements * cpa_dtype_bytes(out_dtype(s));
    CPA_TRY(cpa_bench_upload(site, &fp8_scale, sizeof fp8_scale, &s->out_scale, err));
    for (int64_t i = 0; i < s->states; i++) CPA_TRY(make_partial(s, i, err));
    CPA_TRY(cpa_bench_poisoned(site, out_bytes, &s->out, err));
    CPA_TRY(cpa_bench_poisoned(site, s->head_rows * (int64_t)sizeof *s->out_lse, (void **)&s->out_lse, err));
    row->flops = 2.0 * (double)s->states * (double)elements;
    row->bytes = 4.0 * (double)s->head_rows * (double)s->states + 4.0 * (double)site->options.v_dim * full_states(s) +
                 (double)(out_bytes + 4 * s->head_rows);
    return CPA_OK;
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    (void)call;
    merge_state *s = state;
    cpa_merge_args args = {
        .size = sizeof args,
        .rows = s->rows,
        .heads = (int32_t)s->site->options.q_heads,
        .v_dim = (int32_t)s->site->options.v_dim,
        .states = s->partials,
        .n_states = (int32_t)s->states,
        .out_dtype = out_dtype(s),
        .out_scale = s->site->options.fp8_out ? s->out_scale : NULL,
        .out = s->out,
        .out_lse = s->out_lse,
        .foreign_lse = 1,
    };
    return cpa_bench_enqueued(s->site, cpa_merge(&args, s->site->stream), err);
}

/* Whether row i (a row and head) differs from sum w_j O_j / sum w_j, w_j = exp(lse_j - max), by more than the rounding
 * to the dtype explains. */
static bool row_is_wrong(const merge_state *s, int64_t i, const void *out, float out_lse) {
    cpa_dtype dtype = out_dtype(s);
    int64_t dim = s->site->options.v_dim;
    double weights[CPA_MERGE_MAX_STATES], max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < s->states; j++) {
        if (isfinite(s->lse[j][i])) max = fmax(max, s->lse[j][i]);
    }
    for (int64_t j = 0; j < s->states; j++) {
        float lse = s->lse[j][i];
        sum += weights[j] = isfinite(lse) ? exp(lse - max) : 0;
    }
    double want_lse = sum > 0 ? max + log(sum) : -INFINITY;
    if (isinf(want_lse) ? out_lse != want_lse
                        : !(fabs(out_lse - want_lse) <= cpa_reference_lse_tolerance(CPA_F32, want_lse))) {
        return true;
    }
    float got[CPA_MAX_HEAD_DIM];
    const char *row = (const char *)out + i * dim * cpa_dtype_bytes(dtype);
    if (dtype == CPA_FP8_E4M3)
        cpa_dequantise(got, row, dtype, fp8_scale, 0, dim);
    else
        cpa_reference_widen(row, dtype, dim, got);
    for (int64_t d = 0; d < dim; d++) {
        double want = 0;
        for (int64_t j = 0; j < s->states; j++) {
            if (weights[j] > 0) want += weights[j] / sum * s->o[j][i * dim + d];
        }
        float rounded = dtype == CPA_FP8_E4M3 ? fp8_scale * cpa_from_e4m3(cpa_to_e4m3((float)want * (1 / fp8_scale)))
                                              : cpa_reference_round((float)want, dtype);
        double rounding = fabs(rounded - want);
        if (!(fabs(got[d] - want) <= 2 * rounding + 1e-5)) return true;
    }
    return false;
}

static int64_t count_wrong(const merge_state *s, const char *out, const float *lse) {
    int64_t row_bytes = s->site->options.v_dim * cpa_dtype_bytes(out_dtype(s)), wrong = 0;
    for (int64_t i = 0; i < s->period; i++) wrong += row_is_wrong(s, i, out, lse[i]);
    for (int64_t i = s->period; i < s->head_rows; i++) {
        wrong += memcmp(out + i * row_bytes, out + (i - s->period) * row_bytes, (size_t)row_bytes) != 0 ||
                 memcmp(&lse[i], &lse[i - s->period], sizeof *lse) != 0;
    }
    return wrong;
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    const merge_state *s = state;
    int64_t lse_bytes = s->head_rows * (int64_t)sizeof(float);
    int64_t out_bytes = s->head_rows * s->site->options.v_dim * cpa_dtype_bytes(out_dtype(s));
    char *out = malloc((size_t)out_bytes);
    float *lse = malloc((size_t)lse_bytes);
    cpa_status status = out && lse ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench merge: no memory for results");
    if (status == CPA_OK) status = cpa_bench_copy(s->site, out, s->out, out_bytes, err);
    if (status == CPA_OK) status = cpa_bench_copy(s->site, lse, s->out_lse, lse_bytes, err);
    if (status == CPA_OK) {
        row->checked = s->head_rows;
        row->wrong = count_wrong(s, out, lse);
    }
    free(lse);
    free(out);
    return status;
}

static void release(void *state) {
    merge_state *s = state;
    if (!s) return;
    cpa_device_free(s->site->device, s->out_scale);
    cpa_device_free(s->site->device, s->out_lse);
    cpa_device_free(s->site->device, s->out);
    for (int64_t i = 0; i < s->states; i++) {
        cpa_device_free(s->site->device, s->partials[i].lse);
        cpa_device_free(s->site->device, s->partials[i].o);
        free(s->lse[i]);
        free(s->o[i]);
    }
    free(s);
}

const cpa_bench cpa_bench_merge = {
    .name = "merge",
    .dims = "rows x states",
    .n_dims = 2,
    .shapes_host = "64x2,64x8,4Kx2,4Kx4,4Kx8",
    .shapes_cuda = "32Kx2,32Kx4,32Kx8,32Kx2:dtype=fp32,32Kx8:dtype=fp32,64x4",
    .checked = "every row, a token and head each",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
