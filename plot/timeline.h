/* What --timeline writes, drawn: what ranks do by time, and what a run counts by time. */
#ifndef CPA_PLOT_TIMELINE_H
#define CPA_PLOT_TIMELINE_H

#include <cpattn/status.h>

#include "plot/lines.h"

/* What a rank does, as it is drawn. */
typedef enum cpa_activity {
    CPA_ACTIVITY_ATTEND = 0,
    CPA_ACTIVITY_WAIT,  /* for messages */
    CPA_ACTIVITY_GRAPH, /* a step that is replayed as a graph */
    CPA_ACTIVITY_OTHER, /* of the compute stream */
    CPA_ACTIVITY_EXCHANGE,
    CPA_ACTIVITIES
} cpa_activity;

typedef struct cpa_activity_span {
    float begin_s, seconds;
    int16_t rank, activity;
} cpa_activity_span;

enum { CPA_PLOT_MOST_RANKS = 64 }; /* that a job has */

typedef struct cpa_timeline_file {
    cpa_activity_span *spans;
    int64_t n_spans, capacity;
    int32_t ranks;
    double end_s;
    cpa_series_set requests;                                 /* that run, and that wait, by seconds */
    cpa_series_set cache;                                    /* blocks taken, by seconds */
    int64_t bytes[CPA_PLOT_MOST_RANKS][CPA_PLOT_MOST_RANKS]; /* by sender and receiver */
    int has_bytes;                                           /* 0: the file tells none */
} cpa_timeline_file;

/* Reads a file of --timeline, an event a line. CPA_INVALID, naming file and line; CPA_IO; CPA_NO_MEMORY. Release it
 * after a failure too. */
cpa_status cpa_timeline_file_read(const char *path, cpa_timeline_file *out, cpa_error *err);
void cpa_timeline_file_release(cpa_timeline_file *file);

/* Two lanes a rank: what its compute stream does, and when it exchanges. A column shows what most of its time went
 * to. */
void cpa_timeline_file_draw(cpa_picture *picture, const cpa_timeline_file *file);

#endif
