/* What is wanted to know of the latencies of requests. */
#ifndef CPA_PROGRAM_METRICS_OPTIONS_H
#define CPA_PROGRAM_METRICS_OPTIONS_H

#include <cpattn/status.h>

typedef enum cpa_metric { CPA_TTFT = 0, CPA_TPOT, CPA_ITL, CPA_E2E, CPA_METRIC_COUNT } cpa_metric;

/* In the keys of result files: "ttft", "tpot", "itl" and "e2el", as vLLM has them. */
extern const char *const cpa_metric_names[CPA_METRIC_COUNT];

#define CPA_MAX_PERCENTILES 16

typedef struct cpa_metrics_options {
    double percentiles[CPA_MAX_PERCENTILES]; /* from 0 to 100 */
    int n_percentiles;
    double goodput_ms[CPA_METRIC_COUNT]; /* what a good request may take at most; 0: as long as it likes */
    int has_goodput;                     /* one of them is set */
} cpa_metrics_options;

/* Percentiles as "50,90,99.9". CPA_INVALID, "WHERE: found ..., expected ...", leaves *out alone. */
cpa_status cpa_percentiles_parse(const char *where, const char *text, cpa_metrics_options *out, cpa_error *err);

/* Objectives as "ttft:200 tpot:50 e2el:3000", spaces or commas between them; milliseconds. Errors as above. */
cpa_status cpa_goodput_parse(const char *where, const char *text, cpa_metrics_options *out, cpa_error *err);

#endif
