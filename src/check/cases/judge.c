#include "src/check/cases/judge.h"

#include <math.h>

#include "base/convert.h"

/* Keys at once, which the reference takes in a fraction of the time that it takes for them one by one: fewer of wide ones,
 * as they lie on the stack. */
enum { KEYS_AT_ONCE = 64, ELEMENTS_AT_ONCE = KEYS_AT_ONCE * 256 };

cpa_case_row cpa_case_row_of(const cpa_case_sequence *s, int64_t index, int32_t head, cpa_dtype dtype) {
    const int64_t kv_head = head / (s->q_heads / s->kv_heads), v_dim = s->v_in_k ? s->k_dim : s->v_dim;
    return (cpa_case_row){.dtype = dtype,
                          .k_dim = s->k_dim,
                          .v_dim = s->v_dim,
                          .q = s->q + (index * s->q_heads + head) * s->k_dim,
                          .k = s->k + kv_head * s->k_dim,
                          .v = (s->v_in_k ? s->k : s->v) + kv_head * v_dim,
                          .k_stride = (int64_t)s->kv_heads * s->k_dim,
                          .v_stride = s->kv_heads * v_dim,
                          .n_keys = s->length,
                          .index = index,
                          .head = head};
}

typedef struct batch {
    int64_t n, indices[KEYS_AT_ONCE];
    int biased;
    float bias[KEYS_AT_ONCE];
    float k[ELEMENTS_AT_ONCE], v[ELEMENTS_AT_ONCE];
} batch;

static void flush(batch *b, cpa_reference_row *reference) {
    cpa_reference_add_ruled(reference, b->n, b->k, b->v, b->indices, b->biased ? b->bias : NULL);
    b->n = b->biased = 0;
}

static int64_t keys_at_once(const cpa_case_row *row) {
    const int32_t widest = row->k_dim > row->v_dim ? row->k_dim : row->v_dim;
    return widest * KEYS_AT_ONCE > ELEMENTS_AT_ONCE ? ELEMENTS_AT_ONCE / widest : KEYS_AT_ONCE;
}

static void add_key(batch *b, const cpa_case_row *row, int64_t i, int64_t index, float bias,
                    cpa_reference_row *reference) {
    const int64_t bytes = cpa_dtype_bytes(row->kv_dtype);
    cpa_widen(b->k + b->n * row->k_dim, (const char *)row->k + i * row->k_stride * bytes, row->kv_dtype, row->k_dim);
    cpa_widen(b->v + b->n * row->v_dim, (const char *)row->v + i * row->v_stride * bytes, row->kv_dtype, row->v_dim);
    b->indices[b->n] = index;
    b->bias[b->n] = bias;
    b->biased |= bias != 0;
    if (++b->n == keys_at_once(row)) flush(b, reference);
}

void cpa_case_expect(const cpa_case_row *row, cpa_case_expected *out) {
    cpa_reference_row reference;
    batch b;
    float q[CPA_MAX_HEAD_DIM];
    cpa_widen(q, row->q, row->q_dtype, row->k_dim);
    cpa_reference_begin(&reference, q, row->k_dim, row->v_dim, row->dtype, row->scale);
    const cpa_reference_rules rules = cpa_case_score_rules(row->score, row->head, row->index);
    cpa_reference_set_rules(&reference, &rules);
    cpa_reference_set_skip(&reference, row->skip);
    b.n = b.biased = 0;
    for (int64_t i = 0; i < row->n_keys; i++) {
        const int64_t key = row->key_indices ? row->key_indices[i] : i;
        if (row->given && !row->given(row->given_ctx, key)) continue;
        if (!cpa_case_score_sees(row->score, row->mask, row->score_row, row->head, row->index, key)) continue;
        const float bias = cpa_case_score_bias(row->score, row->score_row, row->head, key);
        if (bias != -INFINITY) add_key(&b, row, i, key, bias, &reference);
    }
    flush(&b, &reference);
    out->dtype = row->dtype;
    out->v_dim = row->v_dim;
    cpa_reference_end(&reference, out->out, &out->lse, &out->out_tolerance);
    out->out_tolerance += cpa_reference_skip_tolerance(&reference);
    reference.rules.has_sink = 0; /* the state has none */
    cpa_reference_end(&reference, out->o, &out->lse, &out->o_tolerance);
    out->o_tolerance += cpa_reference_skip_tolerance(&reference);
    out->lse_tolerance =
        cpa_reference_lse_tolerance(row->dtype, out->lse) + cpa_reference_skip_lse_tolerance(&reference);
    if (row->rounds_rows) {
        const double slack = cpa_reference_product_tolerance(&reference);
        out->o_tolerance += slack, out->out_tolerance += slack;
        out->lse_tolerance += cpa_reference_rounded_score(&reference);
    }
    if (out->lse == -INFINITY) out->o_tolerance = out->out_tolerance = 0;
}

/* Whether an error is allowed; NaN is not. */
static int is_within(double error, double tolerance, double *worst) {
    if (worst && error > 0) *worst = fmax(*worst, tolerance > 0 ? error / tolerance : INFINITY);
    return error <= tolerance;
}

static int lse_is_right(double got, double want, double tolerance) {
    return got == want || (isnan(got) && isnan(want)) || fabs(got - want) <= tolerance;
}

int cpa_case_is_right(const cpa_case_expected *expected, const cpa_case_result *result, double *worst) {
    const int32_t n = expected->v_dim;
    int right = 1;
    if (result->o) right &= is_within(cpa_reference_error(result->o, expected->o, n), expected->o_tolerance, worst);
    if (result->out) {
        float out[CPA_MAX_HEAD_DIM];
        cpa_widen(out, result->out, result->out_dtype, n);
        right &=
            is_within(cpa_reference_error(out, expected->out, n), expected->out_tolerance + result->out_slack, worst);
    }
    if (result->lse) right &= lse_is_right((double)*result->lse, expected->lse, expected->lse_tolerance);
    return right;
}
