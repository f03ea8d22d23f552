/* bench merge: n partial states of the same rows into one, checked element by element against the definition in
 * float64. Some states are empty, some have a NaN LSE, and the O of those is NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/check.h"
#include "launcher/bench.h"
#include "src/reference.h"

enum {
    EMPTY_EVERY = 8, /* one LSE in so many is -inf */
    NAN_EVERY = 64,  /* and one in so many NaN */
};

typedef struct merge_state {
    cpa_bench_site *site;
    int64_t rows, states;
    cpa_partial partials[CPA_MERGE_MAX_STATES];
    void *out;
    float *out_lse;
} merge_state;

/* LSEs of a row spread over a few units, so that several states matter. Row 0 is empty in every state. */
static float make_lse(int64_t row, uint64_t random) {
    if (row == 0 || random % EMPTY_EVERY == 0) return -INFINITY;
    if (random % NAN_EVERY == 1) return NAN;
    return 3.0f * cpa_bench_normal(cpa_bench_hash(random));
}

static cpa_status make_partial(merge_state *s, int64_t index, cpa_error *err) {
    cpa_bench_site *site = s->site;
    int64_t heads = site->options.q_heads, dim = site->options.head_dim, n = s->rows * heads;
    cpa_partial *p = &s->partials[index];
    *p = (cpa_partial){.o_row_stride = heads * dim, .lse_row_stride = heads};
    CPA_TRY(cpa_device_alloc(site->device, n * dim * (int64_t)sizeof *p->o, (void **)&p->o, err));
    CPA_TRY(cpa_device_alloc(site->device, n * (int64_t)sizeof *p->lse, (void **)&p->lse, err));
    for (int64_t i = 0; i < n; i++) {
        uint64_t seed = cpa_bench_hash((uint64_t)(index * n + i));
        p->lse[i] = make_lse(i / heads, seed);
        for (int64_t d = 0; d < dim; d++) {
            p->o[i * dim + d] = isfinite(p->lse[i]) ? cpa_bench_normal(cpa_bench_hash(seed + (uint64_t)d)) : NAN;
        }
    }
    return CPA_OK;
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
    int64_t head_rows = s->rows * site->options.q_heads, elements = head_rows * site->options.head_dim;
    int64_t out_bytes = elements * cpa_dtype_bytes(site->options.dtype);
    for (int64_t i = 0; i < s->states; i++) CPA_TRY(make_partial(s, i, err));
    CPA_TRY(cpa_device_alloc(site->device, out_bytes, &s->out, err));
    CPA_TRY(cpa_device_alloc(site->device, head_rows * (int64_t)sizeof *s->out_lse, (void **)&s->out_lse, err));
    row->flops = 2.0 * (double)s->states * (double)elements;
    row->bytes = (double)s->states * 4.0 * (double)(elements + head_rows) + (double)(out_bytes + 4 * head_rows);
    return CPA_OK;
}

static cpa_status run(void *state, cpa_error *err) {
    merge_state *s = state;
    cpa_merge_args args = {
        .size = sizeof args,
        .rows = s->rows,
        .heads = s->site->options.q_heads,
        .v_dim = s->site->options.head_dim,
        .states = s->partials,
        .n_states = (int32_t)s->states,
        .out_dtype = s->site->options.dtype,
        .out = s->out,
        .out_lse = s->out_lse,
    };
    cpa_status status = cpa_merge(&args, s->site->stream);
    if (status == CPA_OK) status = cpa_stream_sync(s->site->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_stream_error(s->site->stream));
}

/* Whether row i (a row and head) differs from sum w_j O_j / sum w_j, w_j = exp(lse_j - max), by more than the rounding
 * to the dtype explains. */
static bool row_is_wrong(const merge_state *s, int64_t i) {
    cpa_dtype dtype = s->site->options.dtype;
    int64_t dim = s->site->options.head_dim;
    double weights[CPA_MERGE_MAX_STATES], max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < s->states; j++) {
        if (isfinite(s->partials[j].lse[i])) max = fmax(max, s->partials[j].lse[i]);
    }
    for (int64_t j = 0; j < s->states; j++) {
        float lse = s->partials[j].lse[i];
        sum += weights[j] = isfinite(lse) ? exp(lse - max) : 0;
    }
    double want_lse = sum > 0 ? max + log(sum) : -INFINITY;
    if (isinf(want_lse) ? s->out_lse[i] != want_lse
                        : !(fabs(s->out_lse[i] - want_lse) <= cpa_reference_lse_tolerance(CPA_F32))) {
        return true;
    }
    float got[CPA_MAX_HEAD_DIM];
    cpa_reference_widen((const char *)s->out + i * dim * cpa_dtype_bytes(dtype), dtype, dim, got);
    for (int64_t d = 0; d < dim; d++) {
        double want = 0;
        for (int64_t j = 0; j < s->states; j++) {
            if (weights[j] > 0) want += weights[j] / sum * s->partials[j].o[i * dim + d];
        }
        double rounding = fabs(cpa_reference_round((float)want, dtype) - want);
        if (!(fabs(got[d] - want) <= 2 * rounding + 1e-5)) return true;
    }
    return false;
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    (void)err;
    const merge_state *s = state;
    row->checked = s->rows * s->site->options.q_heads;
    row->wrong = 0;
    for (int64_t i = 0; i < row->checked; i++) row->wrong += row_is_wrong(s, i);
    return CPA_OK;
}

static void release(void *state) {
    merge_state *s = state;
    if (!s) return;
    cpa_device_free(s->site->device, s->out_lse);
    cpa_device_free(s->site->device, s->out);
    for (int64_t i = 0; i < s->states; i++) {
        cpa_device_free(s->site->device, s->partials[i].lse);
        cpa_device_free(s->site->device, s->partials[i].o);
    }
    free(s);
}

const cpa_bench cpa_bench_merge = {
    .name = "merge",
    .dims = "rows x states",
    .n_dims = 2,
    .default_shapes = "64x2,64x8,4Kx2,4Kx4,4Kx8",
    .checked = "every row, a token and head each",
    .min_ranks = 1,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
