/* What the user sees of a run: a preamble that says what will happen, and the report of what did. */
#ifndef CPA_LAUNCHER_REPORT_H
#define CPA_LAUNCHER_REPORT_H

#include <stdio.h>

#include "launcher/settings/model_file.h"
#include "launcher/settings/settings.h"
#include "program/metrics.h"
#include "program/placement.h"
#include "program/workload.h"
#include "src/model/logits_check.h"

/* All that is known of a run when it has ended; rank 0. */
typedef struct cpa_outcome {
    const cpa_settings *settings;
    const cpa_model_file *model;
    const cpa_workload *workload;
    const char *device;    /* one line */
    const char *transport; /* as of cpa_engine_transport */
    const cpa_link *links; /* [cp_size, cp_size], as of cpa_engine_links; NULL: not known, or none */
    int32_t cp_size;
    int64_t interleave;
    int64_t block_bytes;
    cpa_engine_stats stats;
    cpa_metrics *metrics;
    int checked_logits; /* the next was found out: --check-logits */
    cpa_logits_verdict logits;
    int stopped_by;    /* a signal; 0: none */
    int given_up;      /* in the middle of a step: what ranks count and check is not known */
    cpa_error failure; /* what ended the run; CPA_OK: nothing failed */
} cpa_outcome;

/* Bytes of a rank's cache, and those of the most blocks that each group of layers had in use. */
typedef struct cpa_cache_bytes_used {
    int64_t all, peak;
} cpa_cache_bytes_used;
cpa_cache_bytes_used cpa_outcome_cache_bytes(const cpa_outcome *outcome);

/* Version, device, links, model and cache. */
void cpa_report_place(const cpa_outcome *outcome, FILE *out);
/* Before the run: these, and what will run; of the statistics only the cache and the planner's rates are there. */
void cpa_report_preamble(const cpa_outcome *outcome, FILE *out);
/* Part of the report: how full the cache was, what was shared, and what moved. */
void cpa_report_cache(const cpa_outcome *outcome, FILE *out);
/* Part of the report: how logits compare with a plain forward. */
void cpa_report_logits(const cpa_outcome *outcome, FILE *out);
void cpa_report_print(const cpa_outcome *outcome, FILE *out);

#endif
