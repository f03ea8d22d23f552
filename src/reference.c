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

static float widen_e4m3(uint8_t bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float value = (bits & 127) == 127 ? NAN
                  : exponent == 0     ? ldexpf((float)mantissa, -9)
                                      : ldexpf((float)(mantissa + 8), exponent - 10);
    return bits & 0x80 ? -value : value;
}

void cpa_reference_read_row(const void *row, cpa_dtype dtype, float tensor_scale, int32_t dim, float *out) {
    const uint8_t *codes = row;
    uint32_t word = 0;
    float scale = tensor_scale;
    if (!cpa_dtype_is_quantised(dtype)) {
        cpa_reference_widen(row, dtype, dim, out);
        return;
    }
    if (cpa_kv_scale_bytes(dtype, tensor_scale)) {
        memcpy(&word, codes + dim, sizeof word);
        uint32_t bits = dtype == CPA_INT8 ? word & 0xffffff00u : word;
        memcpy(&scale, &bits, sizeof scale);
    }
    int zero = (int8_t)(word & 0xff);
    for (int32_t d = 0; d < dim; d++)
        out[d] = scale * (dtype == CPA_INT8 ? (float)((int8_t)codes[d] - zero) : widen_e4m3(codes[d]));
}

/* The largest and the smallest finite element of a row, or 0. */
static void range_of(const float *row, int32_t dim, double *low, double *high) {
    *low = *high = 0;
    for (int32_t d = 0; d < dim; d++) {
        if (!isfinite(row[d])) continue;
        *low = fmin(*low, (double)row[d]);
        *high = fmax(*high, (double)row[d]);
    }
}

int cpa_reference_may_hold(const float *have, const float *want, cpa_dtype dtype, float tensor_scale, int32_t dim) {
    const double slack = 1 + 0x1p-10; /* for scales and products rounded to fp32 */
    double low, high;
    range_of(want, dim, &low, &high);
    double scale = dtype == CPA_INT8 ? (high - low) / 255
                   : tensor_scale    ? (double)tensor_scale
                                     : fmax(high, -low) / 448;
    if (dtype == CPA_FP8_E4M3) high = 448 * scale, low = -high;
    for (int32_t d = 0; d < dim; d++) {
        if (!cpa_dtype_is_quantised(dtype)) {
            if (have[d] != cpa_reference_round(want[d], dtype)) return 0;
            continue;
        }
        double x = isnan(want[d]) ? 0 : fmin(fmax((double)want[d], low), high);
        double step = dtype == CPA_INT8 ? scale / 2 : fmax(fabs(x) * 0x1p-4, scale * 0x1p-10);
        if (!(fabs((double)have[d] - x) <= step * slack + 0x1p-20 * fabs(x) + 0x1p-126)) return 0;
    }
    return 1;
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

/* The largest relative error of rounding to the dtype. */
static double unit_roundoff(cpa_dtype dtype) {
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
    *tolerance = 2 * fmax(plain_error, unit_roundoff(row->dtype) * mass) + 1e-5;
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
