#include "src/check/reference_rows.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/codebook.h"
#include "src/check/reference.h"

/* The upper byte of fp16. */
static float widen_e5m2(uint8_t code) {
    const uint16_t half = (uint16_t)(code << 8);
    float wide;
    cpa_reference_widen(&half, CPA_F16, 1, &wide);
    return wide;
}

/* Shifted into the places of an fp32, exponent and mantissa read 2^-120 of their value, subnormals included. */
static float widen_e4m3(uint8_t code) {
    if ((code & 127) == 127) return NAN;
    return cpa_bits_float(cpa_float_bits(cpa_bits_float((uint32_t)(code & 127) << 20) * 0x1p120f) |
                          (uint32_t)(code & 128) << 24);
}

/* What attend reads of a row of latents with scales of tiles: codes, scales, elements of bf16. `bytes` are the scales of
 * CPA_FP8_T64. */
enum { TAIL = 64 };
static void read_tiles(const char *row, const uint8_t *bytes, cpa_dtype dtype, int32_t dim, float *out) {
    const int of_powers = dtype == CPA_FP8_T64;
    const int32_t codes = dim - TAIL, tile = of_powers ? 64 : 128, tail_at = codes + (of_powers ? 0 : codes / tile * 4);
    for (int32_t d = 0; d < codes; d++) {
        float scale;
        if (of_powers)
            scale = bytes[d / tile] == 255 ? NAN : (float)ldexp(1, bytes[d / tile] - 127);
        else
            memcpy(&scale, row + codes + d / tile * 4, sizeof scale);
        out[d] = cpa_reference_round(scale * widen_e4m3((uint8_t)row[d]), CPA_BF16);
    }
    cpa_reference_widen(row + tail_at, CPA_BF16, TAIL, out + codes);
}

/* ---- CPA_TQ_ ---- */

static int code_bits(cpa_dtype dtype, cpa_kv_part part) {
    return cpa_dtype_traits_of(dtype)->rows[part].element_bits;
}

static double centroid(int bits, int code) {
    static const float three[] = {CPA_CODEBOOK_3BIT}, four[] = {CPA_CODEBOOK_4BIT};
    const int half = 1 << (bits - 1), i = code < half ? half - 1 - code : code - half;
    const double positive = (double)(bits == 3 ? three[i] : four[i]);
    return code < half ? -positive : positive;
}

/* x = H x in the order of Sylvester, without its factor. */
static void rotate(double *x, int32_t n) {
    for (int32_t step = 1; step < n; step *= 2)
        for (int32_t i = 0; i < n; i++) {
            if (i & step) continue;
            const double a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
        }
}

static int read_code(const uint8_t *codes, int bits, int32_t i) {
    int code = 0;
    for (int b = 0; b < bits; b++) code |= (codes[(i * bits + b) / 8] >> ((i * bits + b) % 8) & 1) << b;
    return code;
}

static void read_turboquant(const uint8_t *row, cpa_dtype dtype, cpa_kv_part part, int32_t dim, float *out) {
    const int bits = code_bits(dtype, part);
    double wide[CPA_MAX_HEAD_DIM], sum = 0;
    float behind[2];
    if (bits == 8) {
        for (int32_t d = 0; d < dim; d++) out[d] = widen_e4m3(row[d]);
        return;
    }
    cpa_reference_widen(row + dim * bits / 8, CPA_F16, part == CPA_KEYS ? 1 : 2, behind);
    if (part == CPA_VALUES) {
        for (int32_t d = 0; d < dim; d++) out[d] = behind[0] * (float)read_code(row, bits, d) + behind[1];
        return;
    }
    for (int32_t d = 0; d < dim; d++) {
        wide[d] = centroid(bits, read_code(row, bits, d));
        sum += wide[d] * wide[d];
    }
    rotate(wide, dim);
    for (int32_t d = 0; d < dim; d++) out[d] = (float)(wide[d] * (double)behind[0] / sqrt(sum * dim));
}

static double length_of(const double *x, int32_t dim) {
    double sum = 0;
    for (int32_t d = 0; d < dim; d++) sum += x[d] * x[d];
    return sqrt(sum);
}

/* Whether a key is the length of `want` times centroids of codes of its rotated elements, or of the next code where an
 * element lies at a midpoint but for rounding. */
static int key_may_hold(const float *have, const double *want, int bits, int32_t dim) {
    const double length = length_of(want, dim), unit = sqrt((double)dim);
    double x[CPA_MAX_HEAD_DIM], y[CPA_MAX_HEAD_DIM], factor = 0, weight = 0;
    for (int32_t d = 0; d < dim; d++) x[d] = (double)have[d], y[d] = want[d] / (length + 1e-8);
    if (!(fabs(length_of(x, dim) - fmin(length, 65504)) <= length * 0x1p-10 + 0x1p-24)) return 0;
    rotate(x, dim);
    rotate(y, dim);
    for (int pass = 0; pass < 2; pass++) /* the factor of codes that are certain, then all elements by it */
        for (int32_t d = 0; d < dim; d++) {
            int low = 0, high = 0;
            for (int level = 1; level < 1 << bits; level++) {
                const double midpoint = (centroid(bits, level - 1) + centroid(bits, level)) / 2;
                low += midpoint + 1e-5 * unit <= y[d];
                high += midpoint - 1e-5 * unit <= y[d];
            }
            if (pass == 0 && low == high) factor += x[d] * centroid(bits, low), weight += pow(centroid(bits, low), 2);
            const double scale = weight > 0 ? factor / weight : 0, slack = scale * 1e-3 + 0x1p-24;
            if (pass == 1 && !(fabs(x[d] - scale * centroid(bits, low)) <= slack) &&
                !(fabs(x[d] - scale * centroid(bits, high)) <= slack))
                return 0;
        }
    return 1;
}

/* Half a step, and what rounding the scale and the least value to fp16 moves. */
static int value_may_hold(const float *have, const double *want, int bits, int32_t dim) {
    const double levels = (1 << bits) - 1;
    double least = want[0], most = want[0];
    for (int32_t d = 1; d < dim; d++) least = fmin(least, want[d]), most = fmax(most, want[d]);
    const double scale = fmax((most - least) / levels, 1e-8);
    const double rounding = (scale * levels + fabs(least)) * 0x1p-11 + levels * 0x1p-25;
    for (int32_t d = 0; d < dim; d++)
        if (!(fabs((double)have[d] - want[d]) <= scale / 2 + rounding * (1 + 0x1p-10))) return 0;
    return 1;
}

static int turboquant_may_hold(const float *have, const float *want, cpa_dtype dtype, cpa_kv_part part, int32_t dim) {
    const int bits = code_bits(dtype, part);
    double finite[CPA_MAX_HEAD_DIM];
    if (bits == 8) return cpa_reference_may_hold(have, want, CPA_FP8_E4M3, part, 1, dim);
    for (int32_t d = 0; d < dim; d++) finite[d] = isfinite(want[d]) ? (double)want[d] : 0;
    return part == CPA_KEYS ? key_may_hold(have, finite, bits, dim) : value_may_hold(have, finite, bits, dim);
}

/* ---- all dtypes ---- */

void cpa_reference_read_rows(const void *rows, const void *words, cpa_dtype dtype, cpa_kv_part part, float tensor_scale,
                             int64_t n, int32_t dim, float *out) {
    const uint8_t *codes = rows;
    if (!cpa_dtype_is_quantised(dtype)) {
        cpa_reference_widen(rows, dtype, n * dim, out);
        return;
    }
    for (int64_t row = 0; cpa_dtype_is_turboquant(dtype) && row < n; row++)
        read_turboquant((const uint8_t *)rows + row * cpa_kv_row_bytes(dtype, part, dim), dtype, part, dim,
                        out + row * dim);
    if (cpa_dtype_is_turboquant(dtype)) return;
    const int tiled = dtype == CPA_FP8_T128 || dtype == CPA_FP8_T64;
    for (int64_t row = 0; tiled && row < n; row++)
        read_tiles((const char *)rows + row * cpa_kv_row_bytes(dtype, CPA_KEYS, dim), (const uint8_t *)words + row * 8,
                   dtype, dim, out + row * dim);
    if (tiled) return;
    for (int64_t row = 0; row < n; row++, codes += dim, out += dim) {
        uint32_t word = 0;
        if (cpa_kv_scale_bytes(dtype, CPA_KEYS, tensor_scale))
            memcpy(&word, (const char *)words + row * 4, sizeof word);
        const int zero = (int8_t)(word & 0xff);
        const float scale = dtype == CPA_INT8 ? cpa_bits_float(word & 0xffffff00u)
                            : tensor_scale    ? tensor_scale
                                              : cpa_bits_float(word);
        for (int32_t d = 0; d < dim; d++) {
            const float code = dtype == CPA_INT8       ? (float)((int8_t)codes[d] - zero)
                               : dtype == CPA_FP8_E5M2 ? widen_e5m2(codes[d])
                                                       : widen_e4m3(codes[d]);
            out[d] = scale * code;
        }
    }
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

/* The same of a row with scales of tiles: tile by tile as one of e4m3, to which a rounding to bf16 comes. A power of two
 * is up to twice the scale. */
static int tiles_may_hold(const float *have, const float *want, cpa_dtype dtype, int32_t dim) {
    const int32_t codes = dim - TAIL, tile = dtype == CPA_FP8_T64 ? 64 : 128;
    for (int32_t first = 0; first < codes; first += tile) {
        double low, high;
        range_of(want + first, tile, &low, &high);
        const double most = fmax(high, -low);
        const double scale = dtype == CPA_FP8_T64 ? exp2(ceil(log2(fmax(most, 1e-4) * (1 + 0x1p-8) / 448)))
                                                  : fmax(most / 448, (double)FLT_MIN);
        for (int32_t d = first; d < first + tile; d++) {
            const double x = isnan(want[d]) ? 0 : fmin(fmax((double)want[d], -448 * scale), 448 * scale);
            const double step = fmax(fabs(x) * 0x1p-4, scale * 0x1p-10) * (1 + 0x1p-10) + fabs(x) * 0x1p-8;
            if (!(fabs((double)have[d] - x) <= step + 0x1p-126)) return 0;
        }
    }
    return cpa_reference_may_hold(have + codes, want + codes, CPA_BF16, CPA_KEYS, 0, TAIL);
}

int cpa_reference_may_hold(const float *have, const float *want, cpa_dtype dtype, cpa_kv_part part, float tensor_scale,
                           int32_t dim) {
    const double slack = 1 + 0x1p-10; /* for scales and products rounded to fp32 */
    double low, high;
    if (dtype == CPA_FP8_T128 || dtype == CPA_FP8_T64) return tiles_may_hold(have, want, dtype, dim);
    if (cpa_dtype_is_turboquant(dtype)) return turboquant_may_hold(have, want, dtype, part, dim);
    range_of(want, dim, &low, &high);
    const int wide = dtype == CPA_FP8_E5M2;
    const double most = wide ? 57344 : 448;
    double scale = dtype == CPA_INT8 ? (high - low) / 255
                   : tensor_scale    ? (double)tensor_scale
                                     : fmax(high, -low) / most;
    if (dtype == CPA_FP8_E4M3 || wide) high = most * scale, low = -high;
    for (int32_t d = 0; d < dim; d++) {
        if (!cpa_dtype_is_quantised(dtype)) {
            const float rounded = cpa_reference_round(want[d], dtype);
            if (have[d] != rounded && !(isnan(have[d]) && isnan(rounded))) return 0;
            continue;
        }
        double x = isnan(want[d]) ? 0 : fmin(fmax((double)want[d], low), high);
        double step = dtype == CPA_INT8 ? scale / 2
                      : wide            ? fmax(fabs(x) * 0x1p-3, scale * 0x1p-17)
                                        : fmax(fabs(x) * 0x1p-4, scale * 0x1p-10);
        if (!(fabs((double)have[d] - x) <= step * slack + 0x1p-20 * fabs(x) + 0x1p-126)) return 0;
    }
    return 1;
}
