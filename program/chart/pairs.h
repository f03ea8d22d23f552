/* Bytes that each rank sent each other, as a square. */
#ifndef CPA_PLOT_PAIRS_H
#define CPA_PLOT_PAIRS_H

#include "plot/picture.h"
#include "plot/timeline.h"

/* By sender and receiver. */
void cpa_pairs_draw(cpa_picture *picture, const int64_t (*bytes)[CPA_PLOT_MOST_RANKS], int32_t ranks);

#endif
