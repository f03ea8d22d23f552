/* What result files hold that is drawn: latencies of requests, and the scaling of a benchmark. */
#ifndef CPA_PLOT_RESULTS_H
#define CPA_PLOT_RESULTS_H

#include "base/json_file.h"
#include "program/chart/lines.h"

/* Series of all files. Zeros to begin with. */
typedef struct cpa_results {
    cpa_series_set ttft, itl; /* a series a file: the share of values up to a latency, in ms */
    cpa_series_set scaling;   /* a series a work and shape: speedup by ranks */
} cpa_results;

/* Adds what a file of --result-json holds, of a run, `bench serve` or `bench scaling`; its series have `label` for a
 * name. CPA_INVALID, naming file and key, for what is not as these files are; CPA_NO_MEMORY. */
cpa_status cpa_results_read(cpa_results *results, const cpa_json *file, const char *label, cpa_error *err);

/* The scaling in order, and beside it what would be ideal: a speedup of as many times as there are ranks. */
void cpa_results_finish(cpa_results *results);

void cpa_results_release(cpa_results *results);

#endif
