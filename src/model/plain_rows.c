#include "src/model/plain_rows.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <cblas.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"
#include "src/model/stored_weight.h"

cpa_plain_name cpa_plain_name_of(int32_t layer, const char *part, const char *kind) {
    cpa_plain_name name;
    snprintf(name.text, sizeof name.text, "model.layers.%d.%s.%s", layer, part, kind);
    return name;
}

void cpa_plain_round_to(cpa_dtype dtype, float *values, int64_t n) {
    enum { AT_ONCE = 1024 };
    uint16_t narrow[AT_ONCE];
    if (dtype == CPA_F32) return;
    for (int64_t at = 0; at < n; at += AT_ONCE) {
        const int64_t part = cpa_min64(AT_ONCE, n - at);
        cpa_narrow(narrow, values + at, dtype, part);
        cpa_widen(values + at, narrow, dtype, part);
    }
}

void cpa_plain_round(const cpa_plain *f, float *values, int64_t n) {
    cpa_plain_round_to(f->dtype, values, n);
}

cpa_status cpa_plain_read_part(const cpa_plain *f, const char *name, int64_t whole, int64_t first, int64_t elements,
                               float *out) {
    cpa_stored_weight weight;
    CPA_TRY(cpa_stored_weight_find(f->files, name, &weight, f->err));
    if (weight.tensor->elements != whole) {
        return cpa_fail(f->err, CPA_INVALID, "%s: found another shape, expected a tensor of %lld elements", name,
                        (long long)whole);
    }
    cpa_stored_weight_read(&weight, first, elements, out);
    cpa_plain_round(f, out, elements);
    return CPA_OK;
}

cpa_status cpa_plain_read(const cpa_plain *f, const char *name, int64_t elements, float *out) {
    return cpa_plain_read_part(f, name, elements, 0, elements, out);
}

void cpa_plain_multiply(const cpa_plain *f, int64_t rows, const float *x, int64_t inputs, int64_t outputs, float *out) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)outputs, (int)inputs, 1, x, (int)inputs,
                f->weight, (int)inputs, 0, out, (int)outputs);
}

cpa_status cpa_plain_linear(cpa_plain *f, int32_t layer, const char *part, int has_bias, const float *x, int64_t inputs,
                            int64_t outputs, float *out) {
    const int64_t rows = f->count;
    CPA_TRY(cpa_plain_read(f, cpa_plain_name_of(layer, part, "weight").text, outputs * inputs, f->weight));
    for (int64_t o = 0; o < outputs; o++) f->bias[o] = 0;
    if (has_bias) CPA_TRY(cpa_plain_read(f, cpa_plain_name_of(layer, part, "bias").text, outputs, f->bias));
    for (int64_t row = 0; row < rows; row++) memcpy(out + row * outputs, f->bias, (size_t)outputs * sizeof *out);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)outputs, (int)inputs, 1, x, (int)inputs,
                f->weight, (int)inputs, 1, out, (int)outputs);
    cpa_plain_round(f, out, rows * outputs);
    return CPA_OK;
}

void cpa_plain_activate(cpa_plain *f, int64_t n) {
    for (int64_t i = 0; i < n; i++) f->gate[i] = f->gate[i] / (1 + expf(-f->gate[i])) * f->up[i];
    cpa_plain_round(f, f->gate, n);
}

void cpa_plain_normalise(const float *x, int64_t rows, int64_t width, const float *weight, float eps, float *out) {
    for (int64_t row = 0; row < rows; row++) {
        double sum = 0;
        for (int64_t i = 0; i < width; i++) sum += (double)x[row * width + i] * x[row * width + i];
        const double scale = 1 / sqrt(sum / (double)width + eps);
        for (int64_t i = 0; i < width; i++) out[row * width + i] = (float)(x[row * width + i] * scale * weight[i]);
    }
}

cpa_status cpa_plain_norm(cpa_plain *f, const char *name) {
    const int64_t hidden = f->config->hidden;
    CPA_TRY(cpa_plain_read(f, name, hidden, f->weight));
    cpa_plain_normalise(f->residual, f->count, hidden, f->weight, f->config->norm_eps, f->x);
    cpa_plain_round(f, f->x, f->count * hidden);
    return CPA_OK;
}

void cpa_plain_add(cpa_plain *f) {
    const int64_t n = f->count * f->config->hidden;
    for (int64_t i = 0; i < n; i++) f->residual[i] += f->x[i];
    cpa_plain_round(f, f->residual, n);
}

void cpa_plain_rotate(const cpa_plain *f, float *x, int32_t heads, int64_t stride, int interleaved) {
    const int32_t rotated = f->config->rope.dim, half = rotated / 2;
    for (int64_t row = 0; row < f->count * heads; row++, x += stride) {
        const float *cosines = f->angles + row / heads * rotated, *sines = cosines + half;
        for (int32_t i = 0; i < half; i++) {
            float *first = &x[interleaved ? 2 * i : i], *second = first + (interleaved ? 1 : half);
            const float a = *first, b = *second;
            *first = a * cosines[i] - b * sines[i];
            *second = b * cosines[i] + a * sines[i];
        }
    }
}
