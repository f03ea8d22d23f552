/* What reports say of the requests of a run or of a client. */
#ifndef CPA_PROGRAM_METRICS_REPORT_H
#define CPA_PROGRAM_METRICS_REPORT_H

#include <stdio.h>

#include "program/metrics.h"

/* Requests and tokens a second; with objectives, how many of the requests were good. */
void cpa_metrics_print_throughput(const cpa_metrics *metrics, double duration_s, FILE *out);

/* A table: a row a metric, a column for mean, median and each percentile of the options. */
void cpa_metrics_print_latencies(cpa_metrics *metrics, FILE *out);

#endif
