#include "src/engine/calibrate_probe.h"

#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "kernels/block_layout.h"
#include "kernels/device.h"

cpa_status cpa_calibrate_stream_failed(const cpa_calibrate_probe *p, cpa_status status, cpa_error *err) {
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "calibration: %s", p->stream->error.message);
}

cpa_status cpa_calibrate_context_failed(const cpa_calibrate_probe *p, cpa_status status, cpa_error *err) {
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "calibration: %s", cpa_context_error(p->context));
}

static cpa_status zeros(cpa_calibrate_probe *p, int64_t bytes, void **out, cpa_error *err) {
    const cpa_device_table *table = p->device->table;
    CPA_TRY(table->alloc(p->device, bytes, out, err));
    void *from = calloc(1, (size_t)bytes);
    if (!from) return cpa_fail(err, CPA_NO_MEMORY, "calibration: no memory for %lld bytes", (long long)bytes);
    cpa_status status = table->copy(*out, from, bytes, p->stream);
    if (status == CPA_OK) status = table->stream_sync(p->stream);
    free(from);
    return cpa_calibrate_stream_failed(p, status, err);
}

static cpa_status make_memory(cpa_calibrate_probe *p, const cpa_worker_options *o, int64_t rows, int64_t keys,
                              cpa_error *err) {
    const cpa_attention_shape *shape = &o->model.attention;
    const cpa_block_layout layout = cpa_block_layout_of(shape, o->block_size);
    p->table = calloc((size_t)((keys + o->block_size - 1) / o->block_size), sizeof *p->table);
    if (!p->table) return cpa_fail(err, CPA_NO_MEMORY, "calibration: no memory");
    CPA_TRY(p->device->table->stream_create(p->device, &p->stream, err));
    CPA_TRY(zeros(p, layout.bytes, &p->kv.k, err));
    p->kv = cpa_block_layout_view(&layout, p->kv.k, 1, 0);
    CPA_TRY(zeros(p, rows * cpa_shape_q_bytes(shape), &p->q, err));
    return zeros(p, rows * cpa_shape_out_bytes(shape), &p->out, err);
}

cpa_status cpa_calibrate_probe_open(cpa_calibrate_probe *p, cpa_control *control, cpa_device *device,
                                    const cpa_worker_options *o, int64_t tokens, int64_t rows, int64_t keys,
                                    cpa_error *err) {
    cpa_context_options options = cpa_worker_context_options(o, tokens);
    options.ring_bytes = 0; /* what is probed lies on the device */
    *p = (cpa_calibrate_probe){.control = control, .device = device};
    CPA_TRY(cpa_control_agree(control, make_memory(p, o, rows, keys, err), err));
    return cpa_context_create_over(control->comm, device, o->transport, &options, &p->context, err);
}

void cpa_calibrate_probe_close(cpa_calibrate_probe *p) {
    if (!p->device) return;
    const cpa_device_table *table = p->device->table;
    cpa_context_destroy(p->context);
    table->free(p->device, p->out);
    table->free(p->device, p->q);
    table->free(p->device, p->kv.k);
    if (p->stream) table->stream_destroy(p->stream);
    free(p->table);
}

cpa_status cpa_calibrate_probe_attend(cpa_calibrate_probe *p, int layers, cpa_error *err) {
    cpa_context_args args = {.size = sizeof args,
                             .q = p->q,
                             .kv = p->kv,
                             .mask = {.causal = 1},
                             .scale = 1 / sqrtf((float)p->kv.k_dim), /* which has to be told over latents */
                             .out = p->out};
    for (int layer = 0; layer < layers; layer++)
        CPA_TRY(cpa_calibrate_context_failed(p, cpa_context_attend(p->context, &args, p->stream), err));
    return CPA_OK;
}
