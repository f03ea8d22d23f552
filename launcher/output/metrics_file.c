#include "launcher/output/metrics_file.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "program/output_file.h"

/* As often as Prometheus asks at most, by its habit. */
#define PERIOD_S 5.0

cpa_status cpa_metrics_file_open(const char *path, cpa_exposition *exposition, cpa_metrics_file *file, cpa_error *err) {
    const cpa_engine_stats none = {.steps = 0};
    *file = (cpa_metrics_file){path, exposition, PERIOD_S, cpa_clock_now() + PERIOD_S, 0};
    return cpa_metrics_file_write(file, &none, err);
}

void cpa_metrics_file_update(cpa_metrics_file *file, const cpa_engine_stats *stats) {
    cpa_error err;
    const double now = cpa_clock_now();
    if (!file->path || now < file->next_s) return;
    file->next_s = now + file->period_s;
    if (cpa_metrics_file_write(file, stats, &err) == CPA_OK || file->failed) return;
    file->failed = 1;
    cpa_log(CPA_LOG_WARN, "%s", err.message);
}

cpa_status cpa_metrics_file_write(const cpa_metrics_file *file, const cpa_engine_stats *stats, cpa_error *err) {
    cpa_output_file output;
    if (!file->path) return CPA_OK;
    char *text = cpa_exposition_render(file->exposition, stats);
    if (!text) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory to write it", file->path);
    cpa_status status = cpa_output_open(file->path, &output, err);
    if (status == CPA_OK) {
        const int whole = fputs(text, output.file) != EOF;
        status = cpa_output_close(&output, whole, err);
    }
    free(text);
    return status;
}
