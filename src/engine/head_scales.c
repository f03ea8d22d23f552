#include "src/engine/head_scales.h"

#include <math.h>

#include "base/check.h"
#include "base/hash.h"
#include "kernels/device.h"

static int has_some(const cpa_engine_options *o) {
    return o->scales_on_host && o->model.attention.k_scales;
}

/* Those of keys, or of values; over latents one array is both. */
static const float *scales_of(const cpa_attention_shape *shape, int values) {
    return values && shape->v_scales ? shape->v_scales : shape->k_scales;
}

cpa_status cpa_head_scales_check(const cpa_engine_options *o, cpa_error *err) {
    const cpa_attention_shape *shape = &o->model.attention;
    if (o->scales_on_host != 0 && o->scales_on_host != 1)
        return cpa_fail(err, CPA_INVALID, "scales_on_host: %d, expected 0 or 1", o->scales_on_host);
    for (int values = 0; has_some(o) && values < 2; values++)
        for (int32_t head = 0; head < shape->n_scales; head++) {
            const float scale = scales_of(shape, values)[head];
            if (!(scale > 0 && isfinite(scale)))
                return cpa_fail(err, CPA_INVALID, "%s[%d]: %g, expected a finite number above 0",
                                values ? "v_scales" : "k_scales", head, (double)scale);
        }
    return CPA_OK;
}

uint64_t cpa_head_scales_hash(const cpa_engine_options *o) {
    const cpa_attention_shape *shape = &o->model.attention;
    const size_t bytes = (size_t)shape->n_scales * sizeof(float);
    if (!has_some(o)) return 0;
    return cpa_hash_bytes(cpa_hash_bytes(CPA_HASH_START, scales_of(shape, 0), bytes), scales_of(shape, 1), bytes);
}

static cpa_status copy(cpa_device *device, const cpa_attention_shape *from, float *to, cpa_error *err) {
    const int64_t bytes = from->n_scales * (int64_t)sizeof *to;
    const cpa_device_table *table = device->table;
    cpa_stream *stream = NULL;
    CPA_TRY(table->stream_create(device, &stream, err));
    cpa_status status = table->copy(to, scales_of(from, 0), bytes, stream);
    if (status == CPA_OK) status = table->copy(to + from->n_scales, scales_of(from, 1), bytes, stream);
    if (status == CPA_OK) status = table->stream_sync(stream);
    if (status != CPA_OK) cpa_fail(err, status, "scales of heads: %s", stream->error.message);
    table->stream_destroy(stream);
    return status;
}

cpa_status cpa_head_scales_upload(const cpa_engine_options *o, cpa_device *device, cpa_attention_shape *shape,
                                  void **memory, cpa_error *err) {
    const int32_t n = shape->n_scales;
    *memory = NULL;
    if (!has_some(o)) return CPA_OK;
    CPA_TRY(device->table->alloc(device, 2 * n * (int64_t)sizeof(float), memory, err));
    float *scales = *memory;
    const cpa_status status = copy(device, shape, scales, err);
    shape->k_scales = scales;
    shape->v_scales = shape->v_in_k ? scales : scales + n;
    return status;
}
