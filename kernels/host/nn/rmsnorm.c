/* rmsnorm, with the sum of a residual and with codes, and rmsnorm2. */
#include "kernels/host/cache/quantise.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/nn.h"
#include "kernels/host/nn/row_norm.h"
#include "kernels/norm_codes.h"

/* residual[0..n) += x[0..n), rounded. */
static void add_rounded(char *residual, const char *x, cpa_dtype dtype, int64_t width) {
    const int64_t bytes = cpa_dtype_bytes(dtype);
    float sum[CPA_NORM_CHUNK], wide[CPA_NORM_CHUNK];
    for (int64_t at = 0; at < width; at += CPA_NORM_CHUNK) {
        const int64_t n = cpa_min64(CPA_NORM_CHUNK, width - at);
        cpa_widen(sum, residual + at * bytes, dtype, n);
        cpa_widen(wide, x + at * bytes, dtype, n);
        for (int64_t i = 0; i < n; i++) sum[i] += wide[i];
        cpa_narrow(residual + at * bytes, sum, dtype, n);
    }
}

/* ---- codes ---- */

/* A row that becomes codes. */
typedef struct coded_row {
    const cpa_rmsnorm_args *args;
    cpa_row_norm norm;
    const void *row;
    double scale; /* what the norm multiplies by */
} coded_row;

/* The largest finite magnitude of elements [at, end) of the norm; *nonfinite becomes 1 where one is not finite. */
static float largest_of(const coded_row *c, int64_t at, int64_t end, uint8_t *nonfinite) {
    float wide[CPA_NORM_CHUNK], largest = 0;
    for (; at < end; at += CPA_NORM_CHUNK) {
        const int64_t n = cpa_min64(CPA_NORM_CHUNK, end - at);
        cpa_row_norm_chunk(&c->norm, c->row, c->scale, at, n, wide);
        for (int64_t i = 0; i < n; i++) {
            largest = fmaxf(largest, fabsf(cpa_finite_or_zero(wide[i])));
            if (!isfinite(wide[i])) *nonfinite = 1;
        }
    }
    return largest;
}

/* The codes of elements [at, end), which share a scale. */
static void code_elements(const coded_row *c, int64_t at, int64_t end, float scale, uint8_t *out) {
    float wide[CPA_NORM_CHUNK];
    for (; at < end; at += CPA_NORM_CHUNK) {
        const int64_t n = cpa_min64(CPA_NORM_CHUNK, end - at);
        cpa_row_norm_chunk(&c->norm, c->row, c->scale, at, n, wide);
        if (c->args->codes == CPA_NORM_INT8_TOKEN) {
            for (int64_t i = 0; i < n; i++) out[at + i] = cpa_norm_int8(wide[i], scale);
        } else {
            for (int64_t i = 0; i < n; i++) out[at + i] = cpa_to_e4m3(wide[i] / scale);
        }
    }
}

static void norm_coded(const cpa_rmsnorm_args *a, const cpa_row_norm *norm, const void *row, int64_t index) {
    const coded_row c = {a, *norm, row, cpa_row_norm_scale(norm, row, a->width)};
    const int64_t group = cpa_norm_group(a);
    uint8_t *out = (uint8_t *)a->out + index * a->out_stride, nonfinite = 0;
    for (int64_t at = 0, i = 0; at < a->width; at += group, i++) {
        const int64_t end = cpa_min64(at + group, a->width);
        const float scale = cpa_norm_scale(a, largest_of(&c, at, end, &nonfinite));
        code_elements(&c, at, end, scale, out);
        if (a->scales) a->scales[cpa_norm_scale_at(a, index, i)] = scale;
    }
    if (nonfinite && a->nonfinite) a->nonfinite[index] = 1;
}

/* Scales by column of the rows that only fill up the last four. */
static void clear_scale_pads(const cpa_rmsnorm_args *a) {
    for (int64_t i = 0; a->scales_by_column && i * a->group < a->width; i++) {
        for (int64_t row = a->rows; row % 4; row++) a->scales[cpa_norm_scale_at(a, row, i)] = 0;
    }
}

/* ---- the operators ---- */

static void norm_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_rmsnorm_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    const cpa_row_norm norm = {a->dtype, a->weight_is_f32 ? CPA_F32 : a->dtype, a->weight, (double)a->weight_offset,
                               (double)a->eps};
    const char *x = (const char *)a->x + row * a->x_stride * bytes;
    (void)thread;
    if (a->residual) {
        char *residual = (char *)a->residual + row * a->residual_stride * bytes;
        add_rounded(residual, x, a->dtype, a->width);
        x = residual;
    }
    if (a->codes == CPA_NORM_PLAIN) {
        cpa_row_norm_plain(&norm, x, a->width, (char *)a->out + row * a->out_stride * bytes);
    } else {
        norm_coded(a, &norm, x, row);
    }
}

cpa_status cpa_host_rmsnorm(const cpa_rmsnorm_args *args, cpa_stream *stream) {
    cpa_rmsnorm_args copy = *args;
    clear_scale_pads(args);
    cpa_host_run(stream, args->rows, norm_row, &copy);
    return CPA_OK;
}

static void norm_two_rows(void *ctx, int64_t row, int32_t thread) {
    const cpa_rmsnorm2_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype);
    (void)thread;
    for (int i = 0; i < 2; i++) {
        const cpa_norm_rows *p = &a->parts[i];
        const cpa_row_norm norm = {a->dtype, a->weight_is_f32 ? CPA_F32 : a->dtype, p->weight, (double)a->weight_offset,
                                   (double)a->eps};
        cpa_row_norm_plain(&norm, (const char *)p->x + row * p->x_stride * bytes, p->width,
                           (char *)p->out + row * p->out_stride * bytes);
    }
}

cpa_status cpa_host_rmsnorm2(const cpa_rmsnorm2_args *args, cpa_stream *stream) {
    cpa_rmsnorm2_args copy = *args;
    cpa_host_run(stream, args->rows, norm_two_rows, &copy);
    return CPA_OK;
}
