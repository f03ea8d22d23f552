/* What --timeline writes: what ranks do by time, and what a run counts by time. */
#ifndef CPA_PLOT_TIMELINE_H
#define CPA_PLOT_TIMELINE_H

#include <cpattn/status.h>

#include "program/chart/lines.h"
#include "program/chart/pairs.h"
#include "program/chart/rank_times.h"

typedef struct cpa_timeline_file {
    cpa_rank_times times;
    cpa_series_set requests;                                   /* that run, and that wait, by seconds */
    cpa_series_set cache;                                      /* blocks taken, by seconds */
    int64_t bytes[CPA_CHART_MOST_RANKS][CPA_CHART_MOST_RANKS]; /* by sender and receiver */
    int has_bytes;                                             /* 0: the file tells none */
} cpa_timeline_file;

/* Reads a file of --timeline, an event a line. CPA_INVALID, naming file and line; CPA_IO; CPA_NO_MEMORY. Release it
 * after a failure too. */
cpa_status cpa_timeline_file_read(const char *path, cpa_timeline_file *out, cpa_error *err);
void cpa_timeline_file_release(cpa_timeline_file *file);

#endif
