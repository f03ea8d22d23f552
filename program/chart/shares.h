/* The distribution of values: the share of them up to each, as a series of a chart of lines. */
#ifndef CPA_CHART_SHARES_H
#define CPA_CHART_SHARES_H

#include "program/chart/lines.h"

/* Adds the shares of values[n], which it sorts: from 0 at the least to 1 at the greatest, with 500 points at most; no
 * series where there are none. */
void cpa_shares_add(cpa_series_set *set, const char *label, double *values, int64_t n);

#endif
