/* The frame of a chart within a picture: axes with round numbers, a grid, and a legend at its right. */
#ifndef CPA_CHART_FRAME_H
#define CPA_CHART_FRAME_H

#include "program/chart/picture.h"

/* Values from low to high, low < high; of a logarithmic axis both are above 0. */
typedef struct cpa_axis {
    double low, high;
    int is_log;
    int is_whole;      /* it has whole numbers alone */
    const char *label; /* what it shows, with its unit */
} cpa_axis;

typedef struct cpa_frame {
    cpa_picture *picture;
    cpa_axis x, y;
    cpa_point corner; /* upper left */
    double width, height;
    int n_legend; /* lines of the legend so far */
} cpa_frame;

/* Of the picture's area, what is left between its margins; gives the picture its size, so that a chart within is
 * `height` high, and draws axes and grid. Axes without a label have no numbers either. */
cpa_frame cpa_frame_begin(cpa_picture *picture, cpa_axis x, cpa_axis y, double height);

/* Where a value lies; one beyond the axes at their end. */
cpa_point cpa_frame_at(const cpa_frame *frame, double x, double y);

/* One more line of the legend. */
void cpa_frame_explain(cpa_frame *frame, cpa_ink ink, const char *label);

#endif
