#include "launcher/run.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/min_max.h"
#include "launcher/output/metrics_file.h"
#include "launcher/output/result_json.h"
#include "launcher/ranks/signals.h"
#include "launcher/settings/settings_check.h"
#include "program/output_file.h"
#include "program/progress_line.h"

/* One run, on one rank. What rank 0 alone knows is empty on the others. */
typedef struct batch_run {
    cpa_service *service;
    cpa_workload *workload;     /* rank 0 */
    cpa_metrics metrics;        /* rank 0 */
    cpa_progress_line progress; /* rank 0 */
    cpa_outcome outcome;        /* rank 0: what is known so far */
    double began;               /* the requests, on the monotonic clock; 0: not yet */
    int is_told;                /* rank 0: the outcome of a run that broke off is written */
    cpa_exposition *exposition; /* rank 0, with --metrics-file; NULL: nobody is told */
    cpa_metrics_file metrics_file;
} batch_run;

static cpa_status choose_cache(void *ctx, const cpa_cache_limits *limits, cpa_cache_size *out, cpa_error *err) {
    const batch_run *r = ctx;
    return cpa_job_cache_size(&r->service->job, limits, r->workload, out, err);
}

static void on_token(void *ctx, uint64_t request, int64_t index, uint32_t token, float logprob) {
    batch_run *r = ctx;
    if (cpa_prompt_answer_show(&r->service->answer, index, token, logprob, stdout))
        (void)cpa_engine_cancel(r->service->engine, request); /* what can fail is that it has ended by itself */
}

static cpa_engine_options engine_options(batch_run *r) {
    const cpa_job *job = &r->service->job;
    cpa_engine_options options = cpa_job_engine_options(job, r->service->cache, r->workload);
    if (!job->has_network) return options;
    options.token_at = cpa_vocabulary_token;
    options.token_ctx = &r->service->network.tokens;
    options.outputs_given = r->workload->given.count > 0;
    options.on_token = job->settings.generate ? on_token : NULL;
    return options;
}

static void report_stop(const batch_run *r) {
    fprintf(stderr, "cp_attn: stopped by signal %d: %" PRId64 " of %" PRId64 " requests were not finished%s\n",
            r->outcome.stopped_by, r->workload->count - r->metrics.completed, r->workload->count,
            r->outcome.given_up ? "; the step in flight was given up" : "");
}

/* Rank 0: the report, or the end of the answer. */
static void print_outcome(const batch_run *r) {
    if (!r->service->job.settings.generate) {
        cpa_report_print(&r->outcome, stdout);
        return;
    }
    cpa_prompt_answer_print(&r->service->answer, stdout);
    if (r->outcome.checked_logits && !r->service->job.settings.json) cpa_report_logits(&r->outcome, stdout);
}

/* Rank 0, with the lock of the signals held: says what is known of a run that is in the middle of something. */
static void tell_unfinished(batch_run *r) {
    cpa_error err;
    r->is_told = 1;
    r->outcome.given_up = 1;
    r->outcome.stats.duration_s = r->began > 0 ? cpa_clock_now() - r->began : 0;
    cpa_progress_line_finish(&r->progress);
    print_outcome(r);
    cpa_job_ranks_explain(&r->service->ranks, cpa_output_flush(&err), err.message);
    if (r->outcome.stopped_by) report_stop(r);
    const char *path = r->service->job.settings.result_json;
    if (path[0]) cpa_job_ranks_explain(&r->service->ranks, cpa_result_json_write(path, &r->outcome, &err), err.message);
    const cpa_status written = cpa_metrics_file_write(&r->metrics_file, &r->outcome.stats, &err);
    cpa_job_ranks_explain(&r->service->ranks, written, err.message);
}

static void on_lost(void *ctx, int rank) {
    batch_run *r = ctx;
    if (r->began == 0 || r->is_told) return;
    cpa_job_ranks_explain_loss(&r->service->ranks, rank, &r->outcome.failure);
    tell_unfinished(r);
}

static void give_up(void *ctx, int signal) {
    batch_run *r = ctx;
    r->outcome.stopped_by = signal;
    tell_unfinished(r);
}

/* Ends the job after a failure that the other ranks may not know of; rank 0 first says what is known of the run. */
static _Noreturn void break_off(batch_run *r, cpa_status status, const char *message) {
    if (r->service->ranks.rank == 0) {
        cpa_signals_lock();
        if (!r->is_told) {
            cpa_fail(&r->outcome.failure, status, "%s", message);
            tell_unfinished(r);
        }
        cpa_signals_unlock();
    }
    cpa_job_ranks_abort(&r->service->ranks, status, message);
}

/* Rank 0: begins the file of --metrics-file, if it is asked for. */
static cpa_status open_metrics(batch_run *r, cpa_error *err) {
    const cpa_job *job = &r->service->job;
    const char *path = job->settings.metrics_file;
    if (!path[0]) return CPA_OK;
    r->exposition = cpa_exposition_create(job->model.name, job->settings.block_size);
    if (!r->exposition) return cpa_fail(err, CPA_NO_MEMORY, "--metrics-file: no memory");
    return cpa_metrics_file_open(path, r->exposition, &r->metrics_file, err);
}

/* Rank 0: says what will run and hands the requests to the engine. */
static cpa_status submit(batch_run *r, cpa_error *err) {
    cpa_service *s = r->service;
    if (r->workload->count == 0) {
        cpa_cache_limits limits = cpa_job_cache_limits(&s->job, s->ranks.size, 0);
        cpa_workload mixed;
        int64_t most = cpa_cache_tokens_of(&limits, s->cache.num_blocks);
        if (s->job.has_network) most = cpa_min64(most, s->job.network.max_position);
        CPA_TRY(cpa_workload_mixed(s->engine, most, &mixed, err));
        cpa_signals_lock();
        *r->workload = mixed;
        cpa_signals_unlock();
    }
    if (s->job.has_network) CPA_TRY(cpa_network_begin(&s->job, &s->network, err));
    for (int64_t i = 0; i < r->workload->count; i++) {
        if (s->job.has_network) r->workload->requests[i].sampling = &s->network.sampling;
        r->workload->requests[i].transfer = (uint32_t)s->job.settings.block_transfer;
        cpa_status status = cpa_engine_submit(s->engine, &r->workload->requests[i]);
        if (status == CPA_OK) continue;
        cpa_fail(err, status, "%s", cpa_engine_error(s->engine));
        cpa_job_name_option(err);
        return status;
    }
    cpa_signals_lock();
    cpa_status opened = open_metrics(r, err);
    cpa_service_note_place(s, &r->outcome);
    cpa_service_note_stats(s, &r->outcome);
    if (r->exposition && r->outcome.links)
        cpa_exposition_set_links(r->exposition, r->outcome.transport, r->outcome.links, s->ranks.size);
    if (!s->job.settings.generate) cpa_report_preamble(&r->outcome, stdout);
    r->progress = cpa_progress_line_start(r->workload->prompt_tokens + r->workload->output_tokens, r->workload->count);
    r->began = cpa_clock_now();
    cpa_signals_unlock();
    CPA_TRY(opened);
    return cpa_output_flush(err);
}

static cpa_exit_code submit_all(batch_run *r) {
    cpa_error err;
    cpa_exit_code code = CPA_EXIT_DONE;
    if (r->service->ranks.rank == 0) code = cpa_job_ranks_explain(&r->service->ranks, submit(r, &err), err.message);
    return cpa_job_ranks_agree(&r->service->ranks, code);
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    batch_run *r = ctx;
    cpa_signals_lock();
    cpa_metrics_add(&r->metrics, result);
    if (r->exposition) cpa_exposition_add_result(r->exposition, result);
    if (r->service->job.has_network) cpa_network_on_finish(&r->service->network, result);
    cpa_signals_unlock();
    if (result->reason == CPA_FINISH_FAILED && r->metrics.failed == 1)
        fprintf(stderr, "cp_attn: request %" PRIu64 " failed: %s\n", result->id, result->error);
}

static void on_progress(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    batch_run *r = ctx;
    cpa_signals_lock();
    cpa_service_note_step(r->service, &r->outcome, elapsed_s);
    if (!r->service->job.settings.generate) cpa_progress_line_update(&r->progress, tokens, requests, elapsed_s);
    if (r->exposition) cpa_exposition_add_step(r->exposition, &r->outcome.stats);
    cpa_metrics_file_update(&r->metrics_file, &r->outcome.stats);
    cpa_signals_unlock();
}

/* Rank 0: names the worst token, if logits are wrong. */
static cpa_exit_code judge_logits(const batch_run *r) {
    const cpa_logits_verdict *logits = &r->outcome.logits;
    if (!r->outcome.checked_logits || logits->violations == 0) return CPA_EXIT_DONE;
    fprintf(stderr,
            "cp_attn: logits of %" PRId64 " of %" PRId64 " tokens are wrong; request %" PRIu64 ", position %" PRId64
            ": off by %.3g (root mean square), expected at most %.3g\n",
            logits->violations, logits->tokens, logits->worst_request, logits->worst_position, logits->worst_error,
            logits->worst_allowed);
    return CPA_EXIT_CHECK_FAILED;
}

/* Rank 0: what is to be said besides the report, and written besides stdout. */
static cpa_exit_code conclude(batch_run *r, cpa_status status) {
    cpa_error err;
    cpa_exit_code code = cpa_exit_code_of(status);
    const cpa_metrics *ended = &r->metrics;
    const int64_t lost = r->workload->count - ended->completed - ended->failed - ended->cancelled - ended->expired;
    cpa_service_note_stats(r->service, &r->outcome);
    if (status == CPA_OK || status == CPA_STOPPED) {
        r->outcome.stopped_by = cpa_signals_received();
    } else {
        cpa_fail(&r->outcome.failure, status, "%s", cpa_engine_error(r->service->engine));
    }
    print_outcome(r);
    cpa_exit_code lost_report = cpa_job_ranks_explain(&r->service->ranks, cpa_output_flush(&err), err.message);
    if (r->outcome.stopped_by) {
        report_stop(r);
        if (ended->completed < r->workload->count) code = (cpa_exit_code)(CPA_EXIT_SIGNAL + r->outcome.stopped_by);
    } else if (status != CPA_OK) {
        cpa_job_ranks_explain(&r->service->ranks, status, r->outcome.failure.message);
    } else if (lost > 0) {
        fprintf(stderr, "cp_attn: %" PRId64 " of %" PRId64 " requests were lost\n", lost, r->workload->count);
        code = CPA_EXIT_CHECK_FAILED;
    } else if (ended->failed > 0) {
        code = CPA_EXIT_CHECK_FAILED;
    } else {
        code = judge_logits(r);
    }
    if (r->metrics.out_of_memory) cpa_log(CPA_LOG_WARN, "no memory for every latency: the summaries leave some out");
    if (r->service->job.settings.result_json[0]) {
        cpa_status written = cpa_result_json_write(r->service->job.settings.result_json, &r->outcome, &err);
        cpa_exit_code lost_json = cpa_job_ranks_explain(&r->service->ranks, written, err.message);
        if (code == CPA_EXIT_DONE) code = lost_json;
    }
    const cpa_status written = cpa_metrics_file_write(&r->metrics_file, &r->outcome.stats, &err);
    const cpa_exit_code lost_metrics = cpa_job_ranks_explain(&r->service->ranks, written, err.message);
    if (code == CPA_EXIT_DONE) code = lost_metrics;
    return code == CPA_EXIT_DONE ? lost_report : code;
}

/* What the model has to say when all requests have ended. Collective. */
static void end_network(batch_run *r) {
    cpa_error err;
    if (!r->service->job.has_network) return;
    cpa_status status =
        cpa_network_end(&r->service->job, &r->service->network, &r->service->ranks.control, &r->outcome.logits, &err);
    if (status != CPA_OK) break_off(r, status, err.message);
    r->outcome.checked_logits = r->service->job.settings.check_logits > 0;
}

static cpa_exit_code run(batch_run *r) {
    cpa_status status = cpa_engine_run(r->service->engine, on_finish, on_progress, r);
    if (status != CPA_OK && status != CPA_CHECK_FAILED && status != CPA_STOPPED)
        break_off(r, status, cpa_engine_error(r->service->engine));
    if (status == CPA_OK) end_network(r);
    cpa_signals_finish();
    cpa_progress_line_finish(&r->progress);
    cpa_exit_code code = r->service->ranks.rank == 0 ? conclude(r, status) : CPA_EXIT_DONE;
    /* Last: it may take long, and a run that was stopped has little time. */
    cpa_exit_code written = cpa_service_write_timeline(r->service);
    return cpa_job_ranks_agree(&r->service->ranks, code == CPA_EXIT_DONE ? written : code);
}

/* The steps of a run; each returns the same code on every rank. */
static cpa_exit_code run_steps(batch_run *r) {
    cpa_service *service = r->service;
    cpa_error err;
    cpa_exit_code code = cpa_service_place(service);
    if (code == CPA_EXIT_DONE) code = cpa_service_size_cache(service, choose_cache, r);
    if (code != CPA_EXIT_DONE) return code;
    if (service->ranks.rank == 0) r->outcome = cpa_service_outcome(service, r->workload, &r->metrics);
    const cpa_signal_actions actions = {.ctx = r, .lost = on_lost, .give_up = give_up};
    if (cpa_signals_install(service->ranks.comm, service->job.settings.shutdown_timeout, &actions, &err) != CPA_OK)
        cpa_job_ranks_abort(&service->ranks, err.status, err.message);
    code = cpa_service_load_network(service, r->workload);
    if (code == CPA_EXIT_DONE) code = cpa_service_create_engine(service, engine_options(r));
    if (code != CPA_EXIT_DONE) return code;
    cpa_signals_watch(service->engine);
    code = submit_all(r);
    return code == CPA_EXIT_DONE ? run(r) : code;
}

cpa_exit_code cpa_run_batch(cpa_service *service, cpa_workload *workload) {
    batch_run r = {.service = service, .workload = workload};
    (void)cpa_settings_metrics(&service->job.settings, &r.metrics.options, NULL); /* right, as they are loaded */
    cpa_exit_code code = run_steps(&r);
    cpa_signals_finish();
    cpa_signals_watch(NULL);
    cpa_service_close(service);
    cpa_exposition_release(r.exposition);
    cpa_metrics_release(&r.metrics);
    return code;
}
