#include "src/check/reference.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/convert.h"
#include "src/check/vector_loops.h"

/* In a build with sanitizers the innermost loops go without, as most of the time of tests would be theirs; the rows
 * that they read are asked for as a whole before. */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define INNERMOST __attribute__((no_sanitize("address,undefined"), optimize("O3")))
static void ask_for(const float *rows, int64_t n) {
    const volatile char *bad = __asan_region_is_poisoned((void *)(uintptr_t)rows, (size_t)n * sizeof *rows);
    if (bad) (void)*bad; /* is reported here */
}
#else
#define INNERMOST CPA_VECTOR_LOOPS
static void ask_for(const float *rows, int64_t n) {
    (void)rows, (void)n;
}
#endif

enum { KEYS_AT_ONCE = 64, LANES = 4, SUMS = 4 };
typedef float narrow_lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef double wide_lanes __attribute__((vector_size(LANES * sizeof(double))));

/* An fp16 read as an fp32 with the same exponent field is 2^-112 of its value, subnormals included. */
static float widen_f16(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    return cpa_bits_float(cpa_float_bits(cpa_bits_float(magnitude) * 0x1p112f) | special | sign);
}

CPA_VECTOR_LOOPS void cpa_reference_widen(const void *src, cpa_dtype dtype, int64_t n, float *dst) {
    const uint16_t *half = src;
    if (dtype == CPA_F32) {
        memcpy(dst, src, (size_t)n * sizeof *dst);
    } else if (dtype == CPA_BF16) {
        for (int64_t i = 0; i < n; i++) dst[i] = cpa_bits_float((uint32_t)half[i] << 16);
    } else {
        for (int64_t i = 0; i < n; i++) dst[i] = widen_f16(half[i]);
    }
}

/* Keeps the upper bits of an fp32 without the last `dropped`, to nearest even. */
static float round_bits(float value, int dropped) {
    uint32_t bits = cpa_float_bits(value), half = (uint32_t)1 << (dropped - 1);
    return cpa_bits_float((bits + half - 1 + (bits >> dropped & 1)) & ~(2 * half - 1));
}

float cpa_reference_round(float value, cpa_dtype dtype) {
    const float largest = 65504.0f, least_normal = 0x1p-14f, spaced = 0.5f; /* from 0.5 on fp32 is 2^-24 apart */
    if (dtype == CPA_F32 || cpa_dtype_is_quantised(dtype) || !isfinite(value)) return value;
    if (dtype == CPA_BF16) return round_bits(value, 16);
    float magnitude = fabsf(value);
    if (magnitude < least_normal) return copysignf(magnitude + spaced - spaced, value);
    float rounded = round_bits(value, 13);
    return fabsf(rounded) > largest ? copysignf(INFINITY, rounded) : rounded;
}

int cpa_reference_sees(cpa_mask mask, int64_t q, int64_t k) {
    if (mask.causal && k > q) return 0;
    if (mask.right > 0 && k - q >= mask.right) return 0;
    return mask.window == 0 || q - k < mask.window || k < mask.sinks;
}

void cpa_reference_begin(cpa_reference_row *row, const float *q, int32_t k_dim, int32_t v_dim, cpa_dtype dtype,
                         double scale) {
    memset(row, 0, sizeof *row);
    row->k_dim = k_dim;
    row->v_dim = v_dim;
    row->dtype = dtype;
    row->scale = scale != 0 ? scale : 1.0 / sqrt(k_dim);
    row->max = CPA_LOWEST_EXPONENT * M_LN2; /* lower scores weigh nothing (cpattn/ops.h) */
    row->plain_max = (float)row->max;
    memcpy(row->q, q, (size_t)k_dim * sizeof *q);
}

/* The raw scores of n keys, in float64 and in fp32, as sums of SUMS * LANES partial sums. */
INNERMOST static void score_keys(const cpa_reference_row *row, int64_t n, const float *k, double *exact, float *plain) {
    const int32_t dim = row->k_dim, whole = dim / (SUMS * LANES) * (SUMS * LANES);
    for (int64_t t = 0; t < n; t++, k += dim) {
        wide_lanes wide[SUMS] = {{0}};
        narrow_lanes narrow[SUMS] = {{0}};
        for (int32_t d = 0; d < whole; d += SUMS * LANES) {
            for (int j = 0; j < SUMS; j++) {
                narrow_lanes a, b;
                memcpy(&a, row->q + d + j * LANES, sizeof a);
                memcpy(&b, k + d + j * LANES, sizeof b);
                wide[j] += __builtin_convertvector(a, wide_lanes) * __builtin_convertvector(b, wide_lanes);
                narrow[j] += a * b;
            }
        }
        wide_lanes wide_all = (wide[0] + wide[1]) + (wide[2] + wide[3]);
        narrow_lanes narrow_all = (narrow[0] + narrow[1]) + (narrow[2] + narrow[3]);
        double wide_sum = (wide_all[0] + wide_all[1]) + (wide_all[2] + wide_all[3]);
        float narrow_sum = (narrow_all[0] + narrow_all[1]) + (narrow_all[2] + narrow_all[3]);
        for (int32_t d = whole; d < dim; d++) {
            wide_sum += (double)row->q[d] * (double)k[d];
            narrow_sum += row->q[d] * k[d];
        }
        exact[t] = wide_sum * row->scale;
        plain[t] = narrow_sum * (float)row->scale;
    }
}

/* Of the keys whose scores lead, one after another. For the score size: scores are sums in fp32 whatever the dtype; beside
 * the roundings of bf16 and fp16 theirs are nothing. */
static void note_score_size(cpa_reference_row *row, const float *k) {
    float size = 0, largest = 0;
    for (int32_t d = 0; d < row->k_dim; d++) {
        size += fabsf(row->q[d] * k[d]);
        largest = fmaxf(largest, fabsf(row->q[d] * k[d]));
    }
    if (row->dtype == CPA_F32) row->score_size = fmaxf(row->score_size, size * (float)fabs(row->scale));
    row->element_size = fmaxf(row->element_size, largest * (float)fabs(row->scale));
}

CPA_VECTOR_LOOPS static void scale_exact(cpa_reference_row *row, double factor) {
    row->sum *= factor;
    for (int32_t d = 0; d < row->v_dim; d++) row->o[d] *= factor;
}

CPA_VECTOR_LOOPS static void scale_plain(cpa_reference_row *row, float factor) {
    row->plain_sum *= factor;
    for (int32_t d = 0; d < row->v_dim; d++) row->plain_o[d] *= factor, row->mass[d] *= factor;
}

/* Adds the values of n keys with their probabilities: p in float64; p and p rounded to the dtype in fp32. */
INNERMOST static void add_values(cpa_reference_row *row, int64_t n, const float *restrict v, const double *exact,
                                 const float *plain, const float *stored) {
    const int32_t dim = row->v_dim;
    double *restrict o = row->o;
    float *restrict plain_o = row->plain_o, *restrict mass = row->mass;
    for (int64_t t = 0; t < n; t++, v += dim) {
        const double p = exact[t];
        const float q = plain[t], r = stored[t];
        for (int32_t d = 0; d < dim; d++) o[d] += p * (double)v[d];
        for (int32_t d = 0; d < dim; d++) plain_o[d] += r * v[d];
        for (int32_t d = 0; d < dim; d++) mass[d] += q * fabsf(v[d]);
    }
}

/* What may be left out, and how large the values are that it has. */
static void note_skipped(cpa_reference_row *row, int64_t n, const float *v, const double *scores) {
    cpa_skipped_mass_add(&row->skipped, n, scores);
    float most = row->value_size; /* a comparison, as fmaxf is a call */
    for (int64_t i = 0; i < n * row->v_dim; i++) most = fabsf(v[i]) > most ? fabsf(v[i]) : most;
    row->value_size = most;
}

/* One step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867) for a few keys, in float64; beside it the
 * same in fp32 with probabilities rounded to the dtype, as an unfused implementation stores them. */
static void weigh_some(cpa_reference_row *row, int64_t n, const float *k, const float *v, double *exact, float *plain) {
    float stored[KEYS_AT_ONCE], plain_max = row->plain_max;
    double max = row->max;
    if (row->skipped.step > 0) note_skipped(row, n, v, exact);
    for (int64_t t = 0; t < n; t++) max = exact[t] > max ? exact[t] : max;
    for (int64_t t = 0; t < n; t++) {
        if (!(plain[t] > plain_max)) continue;
        plain_max = plain[t];
        note_score_size(row, k + t * row->k_dim);
    }
    if ((double)plain_max >= CPA_HIGHEST_EXPONENT * M_LN2) row->undecided = 1;
    if (max > row->max) scale_exact(row, exp(row->max - max));
    if (plain_max > row->plain_max) scale_plain(row, expf(row->plain_max - plain_max));
    row->max = max;
    row->plain_max = plain_max;
    for (int64_t t = 0; t < n; t++) {
        exact[t] = exp(exact[t] - max);
        plain[t] = expf(plain[t] - plain_max);
        stored[t] = cpa_reference_round(plain[t], row->dtype);
        row->sum += exact[t];
        row->plain_sum += plain[t];
    }
    add_values(row, n, v, exact, plain, stored);
}

/* Whether every order of summing the products of a key gives the infinity of that sign. */
static int surely_overflows(const cpa_reference_row *row, const float *k, float infinity) {
    double sums[2] = {0, 0}; /* of the products of that sign, and of the other */
    for (int32_t d = 0; d < row->k_dim; d++) {
        double product = (double)row->q[d] * (double)k[d] * (infinity > 0 ? 1 : -1);
        sums[product < 0] += fabs(product);
    }
    return sums[1] <= (double)FLT_MAX && (sums[0] - sums[1]) * fmax(1, fabs(row->scale)) > (double)FLT_MAX;
}

/* A key whose score is no finite number. */
static void add_not_finite(cpa_reference_row *row, const float *k, float score) {
    int finite = 1;
    for (int32_t d = 0; d < row->k_dim; d++) finite &= isfinite(row->q[d]) && isfinite(k[d]);
    if (score != -INFINITY) row->not_finite = 1;
    if (finite && (isnan(score) || !surely_overflows(row, k, score))) row->undecided = 1;
}

/* The rules, in float64 and in fp32. */
static void rule_scores(const cpa_reference_row *row, int64_t n, const int64_t *indices, const float *bias,
                        double *exact, float *plain) {
    const cpa_reference_rules *rules = &row->rules;
    const double len = rules->temperature_len, index = (double)rules->index;
    const double temperature = len > 0 && index > len ? log2(index) / log2(len) : 1;
    const float softcap = (float)rules->softcap, slope = (float)rules->slope;
    if (rules->softcap == 0 && temperature == 1 && (!indices || rules->slope == 0) && !bias) return;
    for (int64_t t = 0; t < n; t++) {
        if (rules->softcap > 0) {
            exact[t] = rules->softcap * tanh(exact[t] / rules->softcap);
            plain[t] = softcap * tanhf(plain[t] / softcap);
        }
        exact[t] *= temperature;
        plain[t] *= (float)temperature;
        if (indices && rules->slope != 0) {
            exact[t] += rules->slope * (double)(indices[t] - rules->index);
            plain[t] += slope * (float)(indices[t] - rules->index);
        }
        if (bias) {
            exact[t] += (double)bias[t];
            plain[t] += bias[t];
        }
    }
}

static void add_some(cpa_reference_row *row, int64_t n, const float *k, const float *v, const int64_t *indices,
                     const float *bias) {
    double exact[KEYS_AT_ONCE];
    float plain[KEYS_AT_ONCE];
    int64_t first = 0;
    ask_for(k, n * row->k_dim);
    ask_for(v, n * row->v_dim);
    score_keys(row, n, k, exact, plain);
    rule_scores(row, n, indices, bias, exact, plain);
    for (int64_t t = 0; t <= n; t++) {
        if (t < n && isfinite(plain[t])) continue;
        if (t > first)
            weigh_some(row, t - first, k + first * row->k_dim, v + first * row->v_dim, exact + first, plain + first);
        if (t < n) add_not_finite(row, k + t * row->k_dim, plain[t]);
        first = t + 1;
    }
}

void cpa_reference_add_keys(cpa_reference_row *row, int64_t n, const float *k, const float *v) {
    for (int64_t first = 0; first < n; first += KEYS_AT_ONCE) {
        int64_t count = n - first < KEYS_AT_ONCE ? n - first : KEYS_AT_ONCE;
        add_some(row, count, k + first * row->k_dim, v + first * row->v_dim, NULL, NULL);
    }
}

void cpa_reference_set_rules(cpa_reference_row *row, const cpa_reference_rules *rules) {
    row->rules = *rules;
}

void cpa_reference_set_skip(cpa_reference_row *row, double distance) {
    row->skipped = cpa_skipped_mass_of(distance);
}

void cpa_reference_add_ruled(cpa_reference_row *row, int64_t n, const float *k, const float *v, const int64_t *indices,
                             const float *bias) {
    for (int64_t first = 0; first < n; first += KEYS_AT_ONCE) {
        int64_t count = n - first < KEYS_AT_ONCE ? n - first : KEYS_AT_ONCE;
        add_some(row, count, k + first * row->k_dim, v + first * row->v_dim, indices + first,
                 bias ? bias + first : NULL);
    }
}

void cpa_reference_score_keys(const cpa_reference_row *row, int64_t n, const float *k, const int64_t *indices,
                              double *scores) {
    float plain[KEYS_AT_ONCE];
    ask_for(k, n * row->k_dim);
    score_keys(row, n, k, scores, plain);
    rule_scores(row, n, indices, NULL, scores, plain);
}

void cpa_reference_add(cpa_reference_row *row, const float *k, const float *v) {
    cpa_reference_add_keys(row, 1, k, v);
}

void cpa_reference_join(cpa_reference_row *row, const cpa_reference_row *other) {
    row->not_finite |= other->not_finite;
    row->undecided |= other->undecided;
    double max = fmax(row->max, other->max), weight = exp(other->max - max);
    float plain_max = fmaxf(row->plain_max, other->plain_max), plain_weight = expf(other->plain_max - plain_max);
    scale_exact(row, exp(row->max - max));
    scale_plain(row, expf(row->plain_max - plain_max));
    row->max = max;
    row->plain_max = plain_max;
    row->sum += weight * other->sum;
    row->plain_sum += plain_weight * other->plain_sum;
    row->score_size = fmaxf(row->score_size, other->score_size);
    row->element_size = fmaxf(row->element_size, other->element_size);
    row->value_size = fmaxf(row->value_size, other->value_size);
    cpa_skipped_mass_join(&row->skipped, &other->skipped);
    for (int32_t d = 0; d < row->v_dim; d++) {
        row->o[d] += weight * other->o[d];
        row->plain_o[d] += plain_weight * other->plain_o[d];
        row->mass[d] += plain_weight * other->mass[d];
    }
}

double cpa_reference_unit_roundoff(cpa_dtype dtype) {
    return dtype == CPA_BF16 ? 0x1p-8 : dtype == CPA_F16 ? 0x1p-11 : 0x1p-24;
}

double cpa_reference_tolerance(cpa_dtype dtype, int32_t k_dim, double plain_error, double mass, double score_size) {
    const double score_error = dtype == CPA_F32 ? 0.5 * sqrt(k_dim) * 0x1p-24 * score_size : 0;
    return 2 * fmax(plain_error, (cpa_reference_unit_roundoff(dtype) + score_error) * mass) + 1e-5;
}

/* What a sink leaves of the results. */
static double sink_factor(const cpa_reference_row *row) {
    if (!row->rules.has_sink || !(row->sum > 0)) return 1;
    return 1 / (1 + exp(row->rules.sink - (row->max + log(row->sum))));
}

void cpa_reference_end(cpa_reference_row *row, double *out, double *lse, double *tolerance) {
    const double kept = sink_factor(row);
    double plain_error = 0, mass = 0;
    if (row->not_finite) {
        for (int32_t d = 0; d < row->v_dim; d++) out[d] = NAN;
        *lse = NAN;
        *tolerance = 0;
        return;
    }
    for (int32_t d = 0; d < row->v_dim; d++) {
        out[d] = row->sum > 0 ? row->o[d] / row->sum * kept : 0;
        if (!isfinite(out[d])) continue; /* of a value that is not */
        float plain =
            row->sum > 0 ? cpa_reference_round(row->plain_o[d] / row->plain_sum * (float)kept, row->dtype) : 0;
        plain_error = fmax(plain_error, fabs((double)plain - out[d]));
        if (row->sum > 0) mass = fmax(mass, (double)row->mass[d] / (double)row->plain_sum);
    }
    *lse = row->sum > 0 ? row->max + log(row->sum) : -INFINITY;
    *tolerance = cpa_reference_tolerance(row->dtype, row->k_dim, plain_error, mass, (double)row->score_size);
}

double cpa_reference_error(const float *got, const double *want, int32_t n) {
    double error = 0;
    for (int32_t i = 0; i < n; i++) {
        double difference = fabs((double)got[i] - want[i]);
        if ((double)got[i] == want[i] || (isnan(got[i]) && isnan(want[i]))) continue;
        if (!(difference <= error)) error = isnan(difference) ? INFINITY : difference;
    }
    return error;
}

double cpa_reference_lse_tolerance(cpa_dtype dtype, double lse) {
    return isfinite(lse) ? (dtype == CPA_F32 ? 1e-5 : 2e-3) + 1e-5 * fabs(lse) : 0;
}

double cpa_reference_rounded_score(const cpa_reference_row *row) {
    return row->plain_sum > 0 ? 4 * cpa_reference_unit_roundoff(row->dtype) * (1 + (double)row->element_size) : 0;
}

double cpa_reference_product_tolerance(const cpa_reference_row *row) {
    double mass = 0;
    if (!(row->plain_sum > 0)) return 0;
    for (int32_t d = 0; d < row->v_dim; d++) mass = fmax(mass, (double)(row->mass[d] / row->plain_sum));
    return cpa_reference_rounded_score(row) * mass;
}

double cpa_reference_skip_lse_tolerance(const cpa_reference_row *row) {
    return -log1p(-cpa_skipped_mass_share(&row->skipped));
}

double cpa_reference_skip_tolerance(const cpa_reference_row *row) {
    const double of_sink = row->rules.has_sink ? cpa_reference_skip_lse_tolerance(row) / 4 : 0;
    return (2 * cpa_skipped_mass_share(&row->skipped) + of_sink) * (double)row->value_size;
}
