#include "src/worker/worker_score.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* Slopes and sinks of a layer. */
enum { ARRAYS = 2 };

static void place(const float *from, float *host, const float *device, int64_t at, int64_t heads, const float **out) {
    if (!from) return;
    memcpy(host + at, from, (size_t)heads * sizeof *host);
    *out = device + at;
}

static cpa_status copy_rules(cpa_worker *worker, float *host, cpa_error *err) {
    const cpa_model_shape *model = &worker->options.model;
    const int64_t heads = model->attention.q_heads, n = model->layers * ARRAYS * heads;
    const cpa_device_table *table = worker->device->table;
    void *memory = NULL;
    CPA_TRY(table->alloc(worker->device, n * (int64_t)sizeof *host, &memory, err));
    worker->score_memory = memory;
    for (int32_t layer = 0; layer < model->layers; layer++) {
        const cpa_score_rules *from = &model->layer_rules[layer];
        cpa_score_rules *to = &worker->score[layer];
        *to = *from;
        place(from->alibi_slopes, host, memory, layer * ARRAYS * heads, heads, &to->alibi_slopes);
        place(from->sink_logits, host, memory, (layer * ARRAYS + 1) * heads, heads, &to->sink_logits);
    }
    cpa_status status = table->copy(memory, host, n * (int64_t)sizeof *host, worker->stream);
    if (status == CPA_OK) status = table->stream_sync(worker->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", worker->stream->error.message);
}

cpa_status cpa_worker_score_create(cpa_worker *worker, cpa_error *err) {
    const cpa_model_shape *model = &worker->options.model;
    if (!model->layer_rules) return CPA_OK;
    float *host = calloc((size_t)(model->layers * ARRAYS) * (size_t)model->attention.q_heads, sizeof *host);
    worker->score = calloc((size_t)model->layers, sizeof *worker->score);
    cpa_status status = host && worker->score ? copy_rules(worker, host, err)
                                              : cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for score rules");
    free(host);
    return status;
}

void cpa_worker_score_destroy(cpa_worker *worker) {
    worker->device->table->free(worker->device, worker->score_memory);
    free(worker->score);
}
