/* One sequence on all ranks, of which each has one block: its tables name that again and again. Calibrations attend one
 * layer of it by a context of their own. */
#ifndef CPA_CALIBRATE_PROBE_H
#define CPA_CALIBRATE_PROBE_H

#include "comm/comm.h"
#include "src/context/context.h"
#include "src/worker/worker.h"

typedef struct cpa_calibrate_probe {
    cpa_control *control;
    cpa_device *device;
    cpa_context *context;
    cpa_stream *stream;
    cpa_kv_view kv;
    void *q, *out;
    int32_t *table;
} cpa_calibrate_probe;

/* Collective. Zeros for steps of at most `tokens` new tokens, of which a rank has `rows`, over at most `keys` of its
 * own. What is there after a failure cpa_calibrate_probe_close frees. */
cpa_status cpa_calibrate_probe_open(cpa_calibrate_probe *probe, cpa_control *control, cpa_device *device,
                                    const cpa_worker_options *options, int64_t tokens, int64_t rows, int64_t keys,
                                    cpa_error *err);
/* Of zeros it does nothing. */
void cpa_calibrate_probe_close(cpa_calibrate_probe *probe);

/* Attends so many layers of the step that is planned. Enqueues only. */
cpa_status cpa_calibrate_probe_attend(cpa_calibrate_probe *probe, int layers, cpa_error *err);

/* The status, with the message of the context or of the stream in front of which a calibration stands. */
cpa_status cpa_calibrate_context_failed(const cpa_calibrate_probe *probe, cpa_status status, cpa_error *err);
cpa_status cpa_calibrate_stream_failed(const cpa_calibrate_probe *probe, cpa_status status, cpa_error *err);

#endif
