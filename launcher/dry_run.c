#include "launcher/dry_run.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/check.h"
#include "base/clock.h"
#include "launcher/output/report.h"
#include "launcher/output/result_json.h"
#include "launcher/settings/settings_check.h"
#include "program/output_file.h"
#include "program/progress_line.h"
#include "src/engine/engine_options.h"
#include "src/engine/head_scales.h"

/* Rates that nobody has measured here, those of an H200 on NVLink and PCIe: they decide which algorithm is counted, and
 * when swapping is cheaper. */
static const double FLOPS = 500e12, BANDWIDTH = 300e9, HOST_BANDWIDTH = 50e9;

static const double STEP_SECONDS = 1e-3;

static cpa_status add_requests(cpa_scheduler *scheduler, const cpa_workload *workload, cpa_error *err) {
    for (int64_t i = 0; i < workload->count; i++) {
        cpa_scheduler_request request = cpa_engine_scheduled(&workload->requests[i]);
        CPA_TRY(cpa_scheduler_add(scheduler, &request, err));
    }
    return CPA_OK;
}

/* Plans step after step until nothing is left. */
static cpa_status plan_all(cpa_scheduler *scheduler, cpa_progress_line *progress, cpa_engine_stats *stats,
                           cpa_error *err) {
    int64_t tokens = 0, finished = 0;
    cpa_step_plan plan;
    cpa_step_plan_init(&plan);
    cpa_status status = CPA_OK;
    double start = cpa_clock_now(), next = 0;
    for (double now = 0; isfinite(now) && status == CPA_OK;) {
        status = cpa_scheduler_plan(scheduler, now, &plan, &next, err);
        stats->steps += plan.n_chunks > 0;
        for (int64_t i = 0; i < plan.n_chunks; i++) {
            stats->computed_tokens += plan.chunks[i].count;
            stats->output_tokens += (plan.chunks[i].flags & CPA_CHUNK_EMITS) != 0;
            finished += (plan.chunks[i].flags & CPA_CHUNK_FINISHES) != 0;
        }
        tokens += plan.n_token_ids;
        cpa_progress_line_update(progress, tokens, finished, cpa_clock_now() - start);
        now = plan.n_chunks > 0 || next <= now ? now + STEP_SECONDS : next;
    }
    stats->duration_s = cpa_clock_now() - start;
    cpa_step_plan_destroy(&plan);
    return status;
}

static void report(const cpa_outcome *outcome, const cpa_scheduler_stats *stats) {
    const cpa_engine_stats *s = &outcome->stats;
    printf("\n%-12s%" PRId64 " of %" PRId64 " planned in %" PRId64 " steps, %.2f s, %.1f us a step\n", "requests",
           stats->finished, outcome->workload->count, s->steps, s->duration_s,
           s->steps > 0 ? 1e6 * s->duration_s / (double)s->steps : 0);
    printf("%-12s%" PRId64 " rows to compute, %" PRId64 " tokens of output\n", "tokens", s->computed_tokens,
           s->output_tokens);
    cpa_report_cache(outcome, stdout);
}

cpa_status cpa_dry_run(const cpa_job *job, int32_t cp_size, const cpa_workload *workload, cpa_error *err) {
    cpa_cache_size cache;
    cpa_cache_limits limits = cpa_job_cache_limits(job, cp_size, INT64_MAX);
    CPA_TRY(cpa_job_cache_size(job, &limits, workload, &cache, err));
    cpa_engine_options given = cpa_job_engine_options(job, cache, workload), options;
    CPA_TRY(cpa_engine_resolve(&given, &options, err));
    char identity[CPA_IDENTITY_BYTES];
    cpa_planner planner = cpa_engine_planner(&options, cp_size);
    planner.flops = FLOPS;
    planner.bandwidth = BANDWIDTH;
    const cpa_layer_groups groups = cpa_engine_groups(&options, cp_size);
    cpa_scheduler_options plan =
        cpa_engine_scheduler_options(&options, &groups, planner, cpa_head_scales_hash(&options), identity);
    plan.host_bandwidth = HOST_BANDWIDTH;
    cpa_metrics metrics = {0};
    CPA_TRY(cpa_settings_metrics(&job->settings, &metrics.options, err));
    cpa_outcome outcome = {
        .settings = &job->settings,
        .model = &job->model,
        .workload = workload,
        .device = "none: every step is planned, none computed",
        .cp_size = cp_size,
        .interleave = job->interleave,
        .block_bytes = cpa_engine_block_bytes(&options),
        .metrics = &metrics,
    };
    cpa_engine_describe_groups(&groups, &outcome.stats);
    cpa_progress_line progress =
        cpa_progress_line_start(workload->prompt_tokens + workload->output_tokens, workload->count);
    cpa_scheduler *scheduler;
    CPA_TRY(cpa_scheduler_create(&plan, &scheduler, err));
    cpa_status status = add_requests(scheduler, workload, err);
    if (status != CPA_OK) cpa_job_name_option(err);
    if (status == CPA_OK) {
        cpa_report_preamble(&outcome, stdout);
        status = cpa_output_flush(err);
        if (status == CPA_OK) status = plan_all(scheduler, &progress, &outcome.stats, err);
        cpa_progress_line_finish(&progress);
    }
    if (status == CPA_OK) {
        cpa_scheduler_stats stats;
        cpa_scheduler_get_stats(scheduler, &stats);
        cpa_engine_take_stats(&stats, &outcome.stats);
        metrics.completed = stats.finished;
        metrics.input_tokens = workload->prompt_tokens;
        metrics.output_tokens = outcome.stats.output_tokens;
        report(&outcome, &stats);
        status = cpa_output_flush(err);
        if (status == CPA_OK && job->settings.result_json[0])
            status = cpa_result_json_write(job->settings.result_json, &outcome, err);
    }
    cpa_scheduler_destroy(scheduler);
    return status;
}
