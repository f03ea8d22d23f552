/* Bytes that each rank sent each other, as a square. */
#ifndef CPA_CHART_PAIRS_H
#define CPA_CHART_PAIRS_H

#include "program/chart/picture.h"

enum { CPA_CHART_MOST_RANKS = 64 }; /* that a job has */

/* By sender and receiver. */
void cpa_pairs_draw(cpa_picture *picture, const int64_t (*bytes)[CPA_CHART_MOST_RANKS], int32_t ranks);

#endif
