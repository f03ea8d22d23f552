#include "src/reference.h"

#include <math.h>
#include <string.h>

static float widen_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static float widen_f16(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                  : exponent == 0 ? ldexpf((float)mantissa, -24)
                                  : ldexpf((float)(mantissa + 1024), exponent - 25);
    return bits & 0x8000 ? -value : value;
}

void cpa_reference_widen(const void *src, cpa_dtype dtype, int64_t n, float *dst) {
    const uint16_t *half = src;
    if (dtype == CPA_F32) {
        memcpy(dst, src, (size_t)n * sizeof *dst);
        return;
    }
    for (int64_t i = 0; i < n; i++) dst[i] = dtype == CPA_BF16 ? widen_bf16(half[i]) : widen_f16(half[i]);
}

/* Rounds to `bits` significant bits, but not below the spacing 2^min_exponent of the dtype's smallest numbers. */
static float round_significand(float value, int bits, int min_exponent) {
    if (value == 0 || !isfinite(value)) return value;
    int exponent;
    frexpf(value, &exponent);
    int unit = exponent - bits > min_exponent ? exponent - bits : min_exponent;
    return ldexpf(nearbyintf(ldexpf(value, -unit)), unit);
}

float cpa_reference_round(float value, cpa_dtype dtype) {
    if (dtype == CPA_BF16) return round_significand(value, 8, -133);
    if (dtype == CPA_F16) {
        float rounded = round_significand(value, 11, -24);
        return fabsf(rounded) > 65504.0f ? copysignf(INFINITY, rounded) : rounded;
    }
    return value;
}

int cpa_reference_sees(cpa_mask mask, int64_t q, int64_t k) {
    if (mask.causal && k > q) return 0;
    return mask.window == 0 || q - k < mask.window || k < mask.sinks;
}

void cpa_reference_begin(cpa_reference_row *row, const float *q, int32_t k_dim, int32_t v_dim, cpa_dtype dtype,
                         double scale) {
    memset(row, 0, sizeof *row);
    row->k_dim = k_dim;
    row->v_dim = v_dim;
    row->dtype = dtype;
    row->scale = scale != 0 ? scale : 1.0 / sqrt(k_dim);
    row->max = -INFINITY;
    row->plain_max = -INFINITY;
    memcpy(row->q, q, (size_t)k_dim * sizeof *q);
}

/* One step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867) in float64. */
static void add_exact(cpa_reference_row *row, double score, const float *v) {
    if (score > row->max) {
        double keep = exp(row->max - score);
        row->sum *= keep;
        for (int32_t d = 0; d < row->v_dim; d++) row->o[d] *= keep;
        row->max = score;
    }
    double p = exp(score - row->max);
    row->sum += p;
    for (int32_t d = 0; d < row->v_dim; d++) row->o[d] += p * (double)v[d];
}

/* The same in fp32 with probabilities rounded to the dtype, as an unfused implementation stores them. */
static void add_plain(cpa_reference_row *row, float score, const float *v) {
    if (score > row->plain_max) {
        float keep = expf(row->plain_max - score);
        row->plain_sum *= keep;
        for (int32_t d = 0; d < row->v_dim; d++) row->plain_o[d] *= keep, row->mass[d] *= keep;
        row->plain_max = score;
    }
    float p = expf(score - row->plain_max), stored = cpa_reference_round(p, row->dtype);
    row->plain_sum += p;
    for (int32_t d = 0; d < row->v_dim; d++) row->plain_o[d] += stored * v[d], row->mass[d] += p * fabsf(v[d]);
}

void cpa_reference_add(cpa_reference_row *row, const float *k, const float *v) {
    double exact = 0;
    float plain = 0;
    for (int32_t d = 0; d < row->k_dim; d++) {
        exact += (double)row->q[d] * (double)k[d];
        plain += row->q[d] * k[d];
    }
    add_exact(row, exact * row->scale, v);
    add_plain(row, plain * (float)row->scale, v);
}

double cpa_reference_unit_roundoff(cpa_dtype dtype) {
    return dtype == CPA_BF16 ? 0x1p-8 : dtype == CPA_F16 ? 0x1p-11 : 0x1p-24;
}

void cpa_reference_end(cpa_reference_row *row, double *out, double *lse, double *tolerance) {
    double plain_error = 0, mass = 0;
    for (int32_t d = 0; d < row->v_dim; d++) {
        out[d] = row->sum > 0 ? row->o[d] / row->sum : 0;
        float plain = row->sum > 0 ? cpa_reference_round(row->plain_o[d] / row->plain_sum, row->dtype) : 0;
        plain_error = fmax(plain_error, fabs((double)plain - out[d]));
        if (row->sum > 0) mass = fmax(mass, (double)row->mass[d] / (double)row->plain_sum);
    }
    *lse = row->sum > 0 ? row->max + log(row->sum) : -INFINITY;
    *tolerance = 2 * fmax(plain_error, cpa_reference_unit_roundoff(row->dtype) * mass) + 1e-5;
}

double cpa_reference_error(const float *got, const double *want, int32_t n) {
    double error = 0;
    for (int32_t i = 0; i < n; i++) {
        double difference = fabs((double)got[i] - want[i]);
        if (!(difference <= error)) error = isnan(difference) ? INFINITY : difference;
    }
    return error;
}

double cpa_reference_lse_tolerance(cpa_dtype dtype) {
    return dtype == CPA_F32 ? 1e-5 : 2e-3;
}
