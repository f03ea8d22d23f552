/* What a run of `cp_attn bench serve` tells: a report, why requests failed, and a file. */
#ifndef CPA_BENCH_SERVE_RESULT_H
#define CPA_BENCH_SERVE_RESULT_H

#include <stdio.h>

#include "bench/serve/target.h"
#include "bench/serve/tenants.h"
#include "program/metrics.h"
#include "program/workload.h"

typedef struct cpa_serve_result {
    const cpa_target *target;
    const cpa_workload *workload;
    cpa_metrics *metrics;
    cpa_serve_tenants *tenants;
    double duration_s;
    int stopped_by; /* a signal; 0: none */
} cpa_serve_result;

/* Before the run. */
void cpa_serve_print_preamble(const cpa_serve_result *result, FILE *out);
void cpa_serve_print_report(const cpa_serve_result *result, FILE *out);

/* A line for each reason for which requests failed, the most frequent first; the last line counts the others. */
void cpa_serve_print_failures(const cpa_metrics *metrics, FILE *out);

/* Writes the file, with the keys of `vllm bench serve --save-result --save-detailed` but for the texts of the answers, and
 * "tenants" where there are several.
 * CPA_IO if that fails. */
cpa_status cpa_serve_write_json(const cpa_serve_result *result, const char *path, cpa_error *err);

#endif
