#include "src/model/stored_weight.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"

enum { BLOCK = CPA_STORED_WEIGHT_BLOCK };

static int64_t blocks_of(int64_t elements) {
    return (elements + BLOCK - 1) / BLOCK;
}

static float scale_at(const cpa_tensor *scales, int64_t index) {
    float scale;
    memcpy(&scale, (const char *)scales->data + index * (int64_t)sizeof scale, sizeof scale); /* it may lie anywhere */
    return scale;
}

static cpa_status check_scales(const cpa_tensor *tensor, const cpa_tensor *scales, cpa_error *err) {
    const int64_t rows = blocks_of(tensor->shape[0]), columns = blocks_of(tensor->shape[1]);
    if (!scales->plain || scales->dtype != CPA_F32)
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: found dtype %s, supported is F32", scales->name, scales->type);
    if (scales->dims != 2 || scales->shape[0] != rows || scales->shape[1] != columns) {
        return cpa_fail(err, CPA_INVALID, "%s: found %lld scales in %d dimensions, expected [%lld, %lld]", scales->name,
                        (long long)scales->elements, scales->dims, (long long)rows, (long long)columns);
    }
    for (int64_t i = 0; i < scales->elements; i++) {
        const float scale = scale_at(scales, i);
        if (scale > 0 && isfinite(scale)) continue;
        return cpa_fail(err, CPA_INVALID, "%s: scale [%lld, %lld] is %g, expected a number above 0", scales->name,
                        (long long)(i / columns), (long long)(i % columns), (double)scale);
    }
    return CPA_OK;
}

cpa_status cpa_stored_weight_find(const cpa_safetensors *files, const char *name, cpa_stored_weight *out,
                                  cpa_error *err) {
    char scales_name[192];
    const cpa_tensor *tensor = cpa_safetensors_find(files, name), *scales = NULL;
    if (!tensor) return cpa_fail(err, CPA_INVALID, "the weights have no tensor %s", name);
    if (!tensor->plain) {
        if (strcmp(tensor->type, "F8_E4M3") != 0 || tensor->dims != 2) {
            return cpa_fail(err, CPA_UNSUPPORTED,
                            "%s: found dtype %s, supported are F32, BF16 and F16, and of matrices F8_E4M3", name,
                            tensor->type);
        }
        snprintf(scales_name, sizeof scales_name, "%s_scale_inv", name);
        scales = cpa_safetensors_find(files, scales_name);
        if (!scales) return cpa_fail(err, CPA_INVALID, "the weights have no tensor %s", scales_name);
        CPA_TRY(check_scales(tensor, scales, err));
    }
    *out = (cpa_stored_weight){tensor, scales};
    return CPA_OK;
}

/* Elements of one row that have one scale. */
static void read_codes(const cpa_stored_weight *weight, int64_t first, int64_t n, float *out) {
    const int64_t columns = weight->tensor->shape[1], blocks = weight->scales->shape[1];
    const float scale = scale_at(weight->scales, first / columns / BLOCK * blocks + first % columns / BLOCK);
    const uint8_t *codes = (const uint8_t *)weight->tensor->data + first;
    for (int64_t i = 0; i < n; i++) out[i] = cpa_from_e4m3(codes[i]) * scale;
}

static void read_plain(const cpa_tensor *tensor, int64_t first, int64_t n, float *out) {
    float aligned[1024]; /* wide enough for any dtype */
    const int64_t bytes = cpa_dtype_bytes(tensor->dtype), at_once = (int64_t)(sizeof aligned / sizeof *aligned);
    for (int64_t at = 0; at < n; at += at_once) {
        const int64_t part = cpa_min64(at_once, n - at);
        memcpy(aligned, (const char *)tensor->data + (first + at) * bytes, (size_t)(part * bytes));
        cpa_widen(out + at, aligned, tensor->dtype, part);
    }
}

void cpa_stored_weight_read(const cpa_stored_weight *weight, int64_t first, int64_t n, float *out) {
    if (!weight->scales) {
        read_plain(weight->tensor, first, n, out);
        return;
    }
    const int64_t columns = weight->tensor->shape[1];
    for (int64_t at = first, part; at < first + n; at += part) {
        const int64_t column = at % columns, end = cpa_min64(columns, (column / BLOCK + 1) * BLOCK);
        part = cpa_min64(end - column, first + n - at);
        read_codes(weight, at, part, out + (at - first));
    }
}
