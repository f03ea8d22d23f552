#include "src/model/logits_sample.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "kernels/device.h"

uint64_t cpa_logits_hash(uint64_t seed, uint64_t request, int64_t position) {
    return cpa_mix64(cpa_mix64(seed + request * CPA_GOLDEN) ^ (uint64_t)position * CPA_GOLDEN);
}

cpa_status cpa_logits_sample_open(int64_t most, int64_t vocabulary, uint64_t seed, cpa_logits_sample *out,
                                  cpa_error *err) {
    cpa_logits_sample sample = {.seed = seed, .vocabulary = vocabulary, .most = most, .bound = UINT64_MAX};
    sample.records = calloc((size_t)most, sizeof *sample.records);
    sample.logits = calloc((size_t)(most * vocabulary), sizeof *sample.logits);
    if (!sample.records || !sample.logits) {
        cpa_logits_sample_close(&sample);
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the logits of %lld tokens", (long long)most);
    }
    *out = sample;
    return CPA_OK;
}

void cpa_logits_sample_close(cpa_logits_sample *sample) {
    free(sample->records);
    free(sample->logits);
    free(sample->rows);
    *sample = (cpa_logits_sample){.most = 0};
}

static void drop(cpa_logits_sample *sample, int64_t i) {
    const size_t row = (size_t)sample->vocabulary;
    const int64_t last = --sample->count;
    sample->records[i] = sample->records[last];
    memmove(sample->logits + (size_t)i * row, sample->logits + (size_t)last * row, row * sizeof *sample->logits);
}

/* Keeps none whose hash is the bound or above it. */
static void drop_from_bound(cpa_logits_sample *sample) {
    for (int64_t i = sample->count - 1; i >= 0; i--)
        if (sample->records[i].hash >= sample->bound) drop(sample, i);
}

/* Whether the record is to be kept, which there is room for then: those of the same token from steps before are
 * dropped, since the last step that computed it counts, and all with the largest hash where there are too many. */
static int has_place(cpa_logits_sample *sample, const cpa_logits_record *record) {
    for (int64_t i = sample->count - 1; i >= 0; i--) {
        if (sample->records[i].hash != record->hash) continue;
        if (sample->records[i].step > record->step) return 0;
        if (sample->records[i].step < record->step) drop(sample, i);
    }
    if (record->hash < sample->bound && sample->count == sample->most) {
        sample->bound = record->hash;
        for (int64_t i = 0; i < sample->count; i++)
            if (sample->records[i].hash > sample->bound) sample->bound = sample->records[i].hash;
        drop_from_bound(sample);
    }
    return record->hash < sample->bound;
}

static float *keep(cpa_logits_sample *sample, const cpa_logits_record *record) {
    sample->records[sample->count] = *record;
    return sample->logits + sample->count++ * sample->vocabulary;
}

static cpa_status take_row(cpa_logits_sample *sample, const cpa_rows *rows, int32_t row, const float *logits,
                           cpa_stream *stream) {
    const uint64_t request = rows->requests[row];
    const int64_t position = rows->positions[row];
    const cpa_logits_record record = {cpa_logits_hash(sample->seed, request, position), request, position,
                                      sample->steps};
    if (!has_place(sample, &record)) return CPA_OK;
    float *out = keep(sample, &record);
    return stream->device->table->copy(out, logits, sample->vocabulary * (int64_t)sizeof *out, stream);
}

cpa_status cpa_logits_sample_take(void *ctx, const cpa_model_step *step, int64_t first, int64_t count,
                                  const float *logits, cpa_stream *stream) {
    cpa_logits_sample *sample = ctx;
    const cpa_device_table *table = stream->device->table;
    sample->steps += first == 0;
    if (!cpa_array_reserve(&sample->rows, &sample->cap_rows, count, sizeof *sample->rows))
        return cpa_fail(&stream->error, CPA_NO_MEMORY, "no memory for the logits of %lld rows", (long long)count);
    CPA_TRY(table->copy(sample->rows, step->emissions.rows + first, count * (int64_t)sizeof *sample->rows, stream));
    CPA_TRY(table->stream_sync(stream));
    for (int64_t i = 0; i < count; i++)
        if (sample->rows[i] >= 0)
            CPA_TRY(take_row(sample, &step->rows, sample->rows[i], logits + i * sample->vocabulary, stream));
    return table->stream_sync(stream);
}

/* Whether it is there already, as where every rank has all rows. */
static int has_row(const cpa_logits_sample *sample, const cpa_logits_record *record, const float *row) {
    const size_t bytes = (size_t)sample->vocabulary * sizeof *row;
    for (int64_t i = 0; i < sample->count; i++)
        if (sample->records[i].hash == record->hash && memcmp(sample->logits + i * sample->vocabulary, row, bytes) == 0)
            return 1;
    return 0;
}

/* One rank's records and their logits to rank 0, which keeps the least. */
static cpa_status share(cpa_logits_sample *sample, cpa_control *control, int32_t from, float *row, cpa_error *err) {
    int64_t count = sample->count;
    uint64_t bound = sample->bound;
    CPA_TRY(cpa_control_bcast(control, &count, sizeof count, from, err));
    CPA_TRY(cpa_control_bcast(control, &bound, sizeof bound, from, err));
    if (control->rank == 0 && bound < sample->bound) sample->bound = bound;
    for (int64_t i = 0; i < count; i++) {
        const int64_t bytes = sample->vocabulary * (int64_t)sizeof *row;
        cpa_logits_record record = {0};
        if (control->rank == from) {
            record = sample->records[i];
            memcpy(row, sample->logits + i * sample->vocabulary, (size_t)bytes);
        }
        CPA_TRY(cpa_control_bcast(control, &record, sizeof record, from, err));
        CPA_TRY(cpa_control_bcast(control, row, bytes, from, err));
        if (control->rank == 0 && !has_row(sample, &record, row) && has_place(sample, &record))
            memcpy(keep(sample, &record), row, (size_t)bytes);
    }
    if (control->rank == 0) drop_from_bound(sample);
    return CPA_OK;
}

cpa_status cpa_logits_sample_gather(cpa_logits_sample *sample, cpa_control *control, cpa_error *err) {
    float *row = calloc((size_t)cpa_max64(sample->vocabulary, 1), sizeof *row);
    cpa_status status = row ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for a row of logits");
    status = cpa_control_agree(control, status, err);
    for (int32_t rank = 1; status == CPA_OK && rank < control->size; rank++)
        status = share(sample, control, rank, row, err);
    free(row);
    return status;
}
