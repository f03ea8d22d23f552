/* The results of the self-test of operations, and what they are compared with. */
#include "src/check/self_test_results.h"

#include <math.h>

#include "base/check.h"
#include "src/check/cases/judge.h"
#include "src/check/self_test_pages.h"

cpa_status cpa_self_test_make_results(cpa_kernel_test *t, cpa_error *err) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t heads = t->rows * shape->q_heads, o = heads * shape->v_dim * (int64_t)sizeof(float);
    const int64_t lse = heads * (int64_t)sizeof(float);
    int64_t pages = 2 * cpa_self_test_total_keys(t) * shape->kv_heads * (int64_t)sizeof(float) *
                    (shape->k_dim > shape->v_dim ? shape->k_dim : shape->v_dim);
    for (int i = 0; i < 3; i++) {
        CPA_TRY(cpa_self_test_device(t, o, NULL, &t->results[i].o, err));
        CPA_TRY(cpa_self_test_device(t, lse, NULL, &t->results[i].lse, err));
    }
    CPA_TRY(cpa_self_test_device(t, o, NULL, &t->results[0].out, err));
    CPA_TRY(cpa_self_test_host(t, o, &t->want.o, err));
    CPA_TRY(cpa_self_test_host(t, lse, &t->want.lse, err));
    CPA_TRY(cpa_self_test_host(t, lse, &t->want.tolerance, err));
    return cpa_self_test_host(t, o + o > pages ? o + o : pages, &t->got, err);
}

double cpa_self_test_rounding(const cpa_kernel_test *t) {
    const int rounds = cpa_dtype_is_turboquant(t->options->model.attention.kv_dtype);
    return rounds ? 8 * cpa_reference_unit_roundoff(t->coarser) : 0;
}

enum { ROWS_APART = 9 }; /* that the reference on the host is asked for, beside the last ones */

static void expect_row(cpa_kernel_test *t, cpa_mask mask, const cpa_case_score *score, int both, int64_t row,
                       int32_t head) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t at = row * shape->q_heads + head, from = both ? 0 : t->keys[0];
    const cpa_case_sequence all = {
        cpa_self_test_total_keys(t), shape->q_heads, shape->kv_heads, shape->k_dim, shape->v_dim, t->q, t->k, t->v, 0};
    cpa_case_row question = cpa_case_row_of(&all, row, head, t->coarser);
    cpa_case_expected expected;
    question.scale = (double)t->scale;
    question.k = (const float *)question.k + from * question.k_stride;
    question.v = (const float *)question.v + from * question.v_stride;
    question.n_keys = t->keys[0] - from + t->limits[row];
    question.key_indices = t->k_positions + from;
    question.index = t->q_positions[row];
    question.mask = mask;
    question.score = score;
    question.score_row = row;
    question.rounds_rows = cpa_self_test_rounding(t) > 0;
    cpa_case_expect(&question, &expected);
    for (int32_t d = 0; d < shape->v_dim; d++) t->want.o[at * shape->v_dim + d] = (float)expected.out[d];
    t->want.lse[at] = (float)expected.lse;
    t->want.tolerance[at] = (float)expected.out_tolerance;
}

void cpa_self_test_expect(cpa_kernel_test *t, cpa_mask mask, const cpa_case_score *score, int both,
                          int32_t heads_apart) {
    const int32_t heads = t->options->model.attention.q_heads;
    for (int64_t i = 0; i < t->rows * heads; i++) t->want.tolerance[i] = -1;
    for (int64_t row = 0; row < t->rows; row++) {
        if (row % ROWS_APART != 0 && row < t->rows - CPA_SELF_TEST_DECODE_ROWS - 1) continue;
        for (int32_t head = 0; head < heads; head++)
            if ((head + row) % heads_apart == 0) expect_row(t, mask, score, both, row, head);
    }
}

static cpa_status wrong_row(const cpa_kernel_test *t, const char *what, cpa_mask mask, int64_t at, const char *which,
                            double error, double allowed, cpa_error *err) {
    const cpa_worker_options *o = t->options;
    const cpa_attention_shape *shape = &o->model.attention;
    return cpa_fail(
        err, CPA_CHECK_FAILED,
        "%s, %s over %s, %d/%d heads of %d/%d, blocks of %d, %s, window %lld, %d sinks: row %lld (%s), head "
        "%lld: |%s - %s reference| = %.3g, allowed %.3g",
        what, cpa_dtype_name(shape->dtype), cpa_dtype_name(shape->kv_dtype), shape->q_heads, shape->kv_heads,
        shape->k_dim, shape->v_dim, o->block_size, mask.causal ? "causal" : "full", (long long)mask.window, mask.sinks,
        (long long)(at / shape->q_heads),
        at / shape->q_heads < t->rows - CPA_SELF_TEST_DECODE_ROWS ? "prefill" : "decode",
        (long long)(at % shape->q_heads), which, t->blas ? "fp32 BLAS" : "float64", error, allowed);
}

cpa_status cpa_self_test_compare(cpa_kernel_test *t, const char *what, cpa_mask mask, const cpa_self_test_result *r,
                                 int rounded, cpa_error *err) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t heads = t->rows * shape->q_heads, n = heads * shape->v_dim;
    const cpa_dtype dtype = rounded ? shape->dtype : CPA_F32;
    float *wide = (float *)t->got + n, *lse = (float *)t->got;
    CPA_TRY(t->device->table->copy(t->got, rounded ? r->out : (void *)r->o, n * cpa_dtype_bytes(dtype), t->stream));
    CPA_TRY(t->device->table->stream_sync(t->stream));
    cpa_reference_widen(t->got, dtype, n, wide);
    CPA_TRY(t->device->table->copy(lse, r->lse, heads * (int64_t)sizeof *lse, t->stream));
    CPA_TRY(t->device->table->stream_sync(t->stream));
    for (int64_t i = 0; i < heads; i++) {
        if (t->want.tolerance[i] < 0) continue;
        double worst = 0, allowed = (double)t->want.tolerance[i];
        for (int64_t d = i * shape->v_dim; d < (i + 1) * shape->v_dim; d++) {
            double error = fabs((double)wide[d] - (double)t->want.o[d]);
            if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
        }
        int empty = t->want.lse[i] == -INFINITY;
        double lse_error = lse[i] == t->want.lse[i] ? 0 : fabs((double)lse[i] - (double)t->want.lse[i]);
        const double lse_allowed = /* of two fp32 results */
            (t->blas ? 3 : 1) * cpa_reference_lse_tolerance(t->coarser, (double)t->want.lse[i]) +
            cpa_self_test_rounding(t);
        if (empty) allowed = 0;
        if (worst > allowed) return wrong_row(t, what, mask, i, "O", worst, allowed, err);
        if (!(lse_error <= lse_allowed)) return wrong_row(t, what, mask, i, "LSE", lse_error, lse_allowed, err);
        t->stats->rows++;
    }
    return CPA_OK;
}
