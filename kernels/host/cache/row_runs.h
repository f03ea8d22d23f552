/* Rows of a cache whose elements do not lie side by side: to a row in one piece, and back. */
#ifndef CPA_HOST_ROW_RUNS_H
#define CPA_HOST_ROW_RUNS_H

#include <string.h>

#include "kernels/kv_view.h"

static inline void cpa_runs_gather(char *to, const char *row, int64_t run_bytes, int64_t run_stride,
                                   int64_t row_bytes) {
    for (int64_t at = 0; at < row_bytes; at += run_bytes, row += run_stride) memcpy(to + at, row, (size_t)run_bytes);
}

static inline void cpa_runs_scatter(char *row, const char *from, int64_t run_bytes, int64_t run_stride,
                                    int64_t row_bytes) {
    for (int64_t at = 0; at < row_bytes; at += run_bytes, row += run_stride) memcpy(row, from + at, (size_t)run_bytes);
}

#endif
