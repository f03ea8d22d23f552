/* A chart of what ranks do by time, a row a rank. */
#ifndef CPA_CHART_RANK_TIMES_H
#define CPA_CHART_RANK_TIMES_H

#include "program/chart/picture.h"

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

/* Zeros to begin with. */
typedef struct cpa_rank_times {
    cpa_activity_span *spans;
    int64_t n_spans, capacity;
    int32_t ranks;
    double end_s; /* when the last span ends; the chart begins at 0 */
    int failed;   /* memory was lacking */
} cpa_rank_times;

void cpa_rank_times_add(cpa_rank_times *times, int32_t rank, cpa_activity activity, double begin_s, double seconds);
void cpa_rank_times_release(cpa_rank_times *times);

/* A lane a rank for what its compute stream does, and one for when it exchanges if any does. A column shows what most
 * of its time went to. */
void cpa_rank_times_draw(cpa_picture *picture, const cpa_rank_times *times);

#endif
