/* --metrics-file: what Prometheus is told of a run, in a file that is whole at any moment, as the collector of text
 * files of a node exporter takes it. Written when the run begins, every few seconds after a step, and when it ends. One
 * thread at a time. */
#ifndef CPA_LAUNCHER_METRICS_FILE_H
#define CPA_LAUNCHER_METRICS_FILE_H

#include "launcher/output/exposition.h"

typedef struct cpa_metrics_file {
    const char *path;           /* the caller's; NULL: nothing is written */
    cpa_exposition *exposition; /* the caller's */
    double period_s;            /* between two writes */
    double next_s;              /* when the next one is due, of cpa_clock_now */
    int failed;                 /* a write has failed, and that was logged */
} cpa_metrics_file;

/* The file of an exposition, which is written with zeros. CPA_IO, naming the path, or CPA_NO_MEMORY. */
cpa_status cpa_metrics_file_open(const char *path, cpa_exposition *exposition, cpa_metrics_file *file, cpa_error *err);
/* Writes it if that is due. A failure is logged, once. */
void cpa_metrics_file_update(cpa_metrics_file *file, const cpa_engine_stats *stats);
/* Writes it. */
cpa_status cpa_metrics_file_write(const cpa_metrics_file *file, const cpa_engine_stats *stats, cpa_error *err);

#endif
