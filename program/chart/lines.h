/* A chart of lines, each of a series of points. */
#ifndef CPA_CHART_LINES_H
#define CPA_CHART_LINES_H

#include "program/chart/picture.h"

typedef struct cpa_series {
    char label[128];   /* UTF-8; a longer one is cut behind a letter */
    cpa_point *points; /* in the order in which they are joined */
    int64_t n_points, capacity;
    int is_guide; /* what data are compared with, as an ideal */
} cpa_series;

/* Zeros to begin with. */
typedef struct cpa_series_set {
    cpa_series *series;
    int64_t n, capacity;
    int failed; /* memory was lacking */
} cpa_series_set;

/* The series of that label, which is made if there is none; NULL without memory. Valid until the next one is made. */
cpa_series *cpa_series_of(cpa_series_set *set, const char *label);
void cpa_series_add(cpa_series_set *set, const char *label, double x, double y);
void cpa_series_release(cpa_series_set *set);

typedef struct cpa_lines_style {
    const char *x_label, *y_label;
    int x_is_log, has_marks; /* marks: a box at each point */
    int x_is_whole, y_is_whole;
    int is_step;          /* a value holds until the next */
    double height;        /* of the chart, pixels; 0: 280 */
    double x_low, x_high; /* ends of the axis; equal: those of the points */
    double y_high;        /* the axis goes up so far at least */
} cpa_lines_style;

/* Draws the series that have points; there is one at least. */
void cpa_lines_draw(cpa_picture *picture, const cpa_series_set *set, const cpa_lines_style *style);

#endif
