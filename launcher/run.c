#include "launcher/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/min_max.h"
#include "comm/comm.h"
#include "launcher/dry_run.h"
#include "launcher/job.h"
#include "launcher/network.h"
#include "launcher/output_file.h"
#include "launcher/progress.h"
#include "launcher/ranks.h"
#include "launcher/report.h"
#include "launcher/result_json.h"
#include "launcher/signals.h"
#include "launcher/timeline_json.h"

/* One run, on one rank. What rank 0 alone knows is empty on the others. */
typedef struct service {
    cpa_comm *comm;
    cpa_control control;
    int rank, size;
    cpa_job job;
    cpa_rank_placement placement;
    int64_t num_blocks;
    cpa_network network;
    cpa_engine *engine;
    cpa_workload workload; /* rank 0 */
    cpa_metrics metrics;   /* rank 0 */
    cpa_progress progress; /* rank 0 */
    cpa_outcome outcome;   /* rank 0: what is known so far */
    double began;          /* the requests, on the monotonic clock; 0: not yet */
} service;

static void log_line(void *ctx, cpa_log_level level, const char *line) {
    static const char *const names[] = {"error", "warn", "info", "debug"};
    const service *s = ctx;
    if (s->rank == 0) {
        fprintf(stderr, "cp_attn: %s: %s\n", names[level], line);
    } else {
        fprintf(stderr, "cp_attn: %s: rank %d: %s\n", names[level], s->rank, line);
    }
}

/* A fault of another rank is said once: by that rank, or by the first of those that lost it. They end the others, which
 * takes mpirun a second; the rest speak up only if that does not happen. */
static void let_others_speak(const service *s, cpa_status status) {
    enum { TURN_S = 2, MOST_TURNS = 3 };
    if (!cpa_ranks_end_together() || cpa_comm_check(s->comm, -1, NULL) == CPA_OK) return;
    const int turn = s->rank + (status != CPA_COMM);
    struct timespec left = {.tv_sec = TURN_S * (turn < MOST_TURNS ? turn : MOST_TURNS)};
    while (nanosleep(&left, &left) != 0) continue; /* a signal of mpirun is no reason to speak */
}

/* Ends the job from a rank that others wait for. */
static _Noreturn void abort_job(const service *s, cpa_status status, const char *message) {
    cpa_comm_abort(s->comm, status, message);
    cpa_signals_break_off();
    let_others_speak(s, status);
    fprintf(stderr, "cp_attn: rank %d: %s\n", s->rank, message);
    fflush(stderr);
    cpa_ranks_abort(CPA_EXIT_FAULT);
}

/* What rank 0 has in `data`, on every rank. */
static void broadcast(service *s, void *data, int64_t bytes) {
    cpa_error err;
    if (cpa_control_bcast(&s->control, data, bytes, 0, &err) != CPA_OK) abort_job(s, err.status, err.message);
}

/* Every rank returns what rank 0 decided. */
static cpa_exit_code agree(service *s, cpa_exit_code code) {
    broadcast(s, &code, sizeof code);
    return code;
}

/* Rank 0 says what is wrong; `err` is read only then. */
static cpa_exit_code explain(const service *s, cpa_status status, const char *message) {
    if (status != CPA_OK && s->rank == 0) fprintf(stderr, "cp_attn: %s\n", message);
    return cpa_exit_code_of(status);
}

/* The least memory that any rank has for itself. */
static int64_t memory_of_a_rank(service *s) {
    cpa_error err;
    double bytes = -(double)s->placement.memory_bytes;
    if (cpa_control_max(&s->control, &bytes, 1, &err) != CPA_OK) abort_job(s, err.status, err.message);
    return (int64_t)-bytes;
}

/* Chooses the size of the cache on rank 0. */
static cpa_exit_code size_cache(service *s) {
    cpa_error err;
    const int64_t memory = memory_of_a_rank(s);
    cpa_cache_limits limits = cpa_job_cache_limits(&s->job, s->size, memory);
    cpa_exit_code code = CPA_EXIT_DONE;
    if (s->rank == 0) {
        cpa_status status = cpa_job_check_memory(&s->job, memory, &err);
        if (status == CPA_OK) status = cpa_job_num_blocks(&s->job, &limits, &s->workload, &s->num_blocks, &err);
        code = explain(s, status, err.message);
    }
    broadcast(s, &s->num_blocks, sizeof s->num_blocks);
    return agree(s, code);
}

/* Loads the weights of --model-dir on every rank. */
static cpa_exit_code load_network(service *s) {
    cpa_error err;
    if (!s->job.has_network) return CPA_EXIT_DONE;
    const cpa_device_options device = cpa_placement_device(&s->placement);
    cpa_status status = cpa_network_open(&s->job, s->rank, &s->workload, &device, &s->network, &err);
    status = cpa_control_agree(&s->control, status, &err);
    return explain(s, status, err.message);
}

static void on_token(void *ctx, uint64_t request, int64_t index, uint32_t token, float logprob) {
    const service *s = ctx;
    (void)request;
    cpa_generation_show(&s->workload.generation, index, token, logprob, stdout);
}

static cpa_exit_code create_engine(service *s) {
    cpa_error err;
    cpa_engine_options options = cpa_job_engine_options(&s->job, s->num_blocks, &s->workload);
    options.device = cpa_placement_device(&s->placement);
    if (s->job.has_network) {
        options.network = &s->network.model;
        options.token_at = cpa_vocabulary_token;
        options.token_ctx = &s->network.tokens;
        options.outputs_given = s->workload.generation.given.count > 0;
        options.on_token = s->job.settings.generate ? on_token : NULL;
    }
    cpa_status status = cpa_engine_create(s->comm, &options, &s->engine, &err);
    if (status != CPA_OK && !cpa_control_all_failed(&s->control)) abort_job(s, status, err.message);
    if (status == CPA_NO_MEMORY) {
        char why[sizeof err.message];
        snprintf(why, sizeof why, "%s", err.message);
        cpa_fail(&err, status,
                 "%.300s; lower --num-blocks (%" PRId64
                 " now), --max-num-batched-tokens, --staging-bytes or --swap-space, or start more ranks",
                 why, s->num_blocks);
    }
    if (status == CPA_INVALID || status == CPA_UNSUPPORTED) cpa_job_name_option(&err);
    return explain(s, status, err.message);
}

/* Rank 0, before the engine is there. */
static void begin_outcome(service *s) {
    cpa_cache_limits limits = cpa_job_cache_limits(&s->job, s->size, 0);
    s->outcome = (cpa_outcome){
        .settings = &s->job.settings,
        .model = &s->job.model,
        .workload = &s->workload,
        .device = "not opened",
        .cp_size = s->size,
        .interleave = s->job.interleave,
        .block_bytes = cpa_cache_block_bytes(&limits),
        .metrics = &s->metrics,
    };
}

/* Rank 0: notes what the engine has counted so far. */
static void note_stats(service *s) {
    cpa_engine_get_stats(s->engine, &s->outcome.stats, sizeof s->outcome.stats);
    s->outcome.stats.kv_blocks = s->num_blocks;
}

static void report_stop(const service *s) {
    fprintf(stderr, "cp_attn: stopped by signal %d: %" PRId64 " of %" PRId64 " requests were not finished%s\n",
            s->outcome.stopped_by, s->workload.count - s->metrics.completed, s->workload.count,
            s->outcome.given_up ? "; the step in flight was given up" : "");
}

/* Rank 0: the report, or the end of the answer. */
static void print_outcome(const service *s) {
    if (!s->job.settings.generate) {
        cpa_report_print(&s->outcome, stdout);
        return;
    }
    cpa_generation_print(&s->workload.generation, stdout);
    if (s->outcome.checked_logits && !s->job.settings.json) cpa_report_logits(&s->outcome, stdout);
}

/* Rank 0, in the thread that watches for signals, while the run is in the middle of something: a cpa_give_up_fn. */
static void give_up(void *ctx, int signal) {
    service *s = ctx;
    cpa_error err;
    s->outcome.stopped_by = signal;
    s->outcome.given_up = 1;
    s->outcome.stats.duration_s = s->began > 0 ? cpa_clock_now() - s->began : 0;
    cpa_progress_finish(&s->progress);
    print_outcome(s);
    explain(s, cpa_output_flush(&err), err.message);
    report_stop(s);
    const char *path = s->job.settings.result_json;
    if (path[0]) explain(s, cpa_result_json_write(path, &s->outcome, &err), err.message);
}

/* Rank 0: says what will run and hands the requests to the engine. */
static cpa_status submit(service *s, cpa_error *err) {
    if (s->workload.count == 0) {
        cpa_cache_limits limits = cpa_job_cache_limits(&s->job, s->size, 0);
        cpa_workload mixed;
        int64_t most = cpa_cache_tokens_of(&limits, s->num_blocks);
        if (s->job.has_network) most = cpa_min64(most, s->job.network.max_position);
        CPA_TRY(cpa_workload_mixed(s->engine, most, &mixed, err));
        cpa_signals_lock();
        s->workload = mixed;
        cpa_signals_unlock();
    }
    if (s->job.has_network) CPA_TRY(cpa_network_begin(&s->job, &s->network, err));
    for (int64_t i = 0; i < s->workload.count; i++) {
        if (s->job.has_network) s->workload.requests[i].sampling = &s->network.sampling;
        cpa_status status = cpa_engine_submit(s->engine, &s->workload.requests[i]);
        if (status == CPA_OK) continue;
        cpa_fail(err, status, "%s", cpa_engine_error(s->engine));
        cpa_job_name_option(err);
        return status;
    }
    cpa_signals_lock();
    s->outcome.device = cpa_engine_device(s->engine);
    note_stats(s);
    if (!s->job.settings.generate) cpa_report_preamble(&s->outcome, stdout);
    s->progress = cpa_progress_start(s->workload.prompt_tokens + s->workload.output_tokens, s->workload.count);
    s->began = cpa_clock_now();
    cpa_signals_unlock();
    CPA_TRY(cpa_output_flush(err));
    return CPA_OK;
}

static cpa_exit_code submit_all(service *s) {
    cpa_error err;
    cpa_exit_code code = CPA_EXIT_DONE;
    if (s->rank == 0) code = explain(s, submit(s, &err), err.message);
    return agree(s, code);
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    service *s = ctx;
    cpa_signals_lock();
    cpa_metrics_add(&s->metrics, result);
    if (s->job.has_network) cpa_network_on_finish(&s->network, result);
    cpa_signals_unlock();
    if (result->reason == CPA_FINISH_FAILED && s->metrics.failed == 1)
        fprintf(stderr, "cp_attn: request %" PRIu64 " failed: %s\n", result->id, result->error);
}

static void on_progress(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    service *s = ctx;
    cpa_signals_lock();
    note_stats(s);
    if (!s->job.settings.generate) cpa_progress_update(&s->progress, tokens, requests, elapsed_s);
    cpa_signals_unlock();
}

/* Every rank's spans go to the file, which rank 0 writes. Collective. */
static cpa_exit_code write_timeline(service *s) {
    cpa_error err;
    cpa_timeline_json json;
    cpa_exit_code code = CPA_EXIT_DONE;
    const char *path = s->job.settings.timeline;
    if (!path[0]) return CPA_EXIT_DONE;
    if (s->rank == 0) code = explain(s, cpa_timeline_json_open(&json, path, s->size, &err), err.message);
    code = agree(s, code);
    if (code != CPA_EXIT_DONE) return code;
    code = explain(s, cpa_engine_timeline(s->engine, cpa_timeline_json_add, &json), cpa_engine_error(s->engine));
    if (s->rank != 0) return code;
    cpa_status closed = cpa_timeline_json_close(&json, &err);
    return closed == CPA_OK ? code : explain(s, closed, err.message);
}

/* Rank 0: names the worst token, if logits are wrong. */
static cpa_exit_code judge_logits(const service *s) {
    const cpa_logits_verdict *logits = &s->outcome.logits;
    if (!s->outcome.checked_logits || logits->violations == 0) return CPA_EXIT_DONE;
    fprintf(stderr,
            "cp_attn: logits of %" PRId64 " of %" PRId64 " tokens are wrong; request %" PRIu64 ", position %" PRId64
            ": off by %.3g (root mean square), expected at most %.3g\n",
            logits->violations, logits->tokens, logits->worst_request, logits->worst_position, logits->worst_error,
            logits->worst_allowed);
    return CPA_EXIT_CHECK_FAILED;
}

/* Rank 0: what is to be said besides the report, and written besides stdout. */
static cpa_exit_code conclude(service *s, cpa_status status) {
    cpa_error err;
    cpa_exit_code code = cpa_exit_code_of(status);
    const cpa_metrics *ended = &s->metrics;
    const int64_t lost = s->workload.count - ended->completed - ended->failed - ended->cancelled - ended->expired;
    note_stats(s);
    if (status == CPA_OK || status == CPA_STOPPED) s->outcome.stopped_by = cpa_signals_received();
    print_outcome(s);
    cpa_exit_code lost_report = explain(s, cpa_output_flush(&err), err.message);
    if (s->outcome.stopped_by) {
        report_stop(s);
        if (ended->completed < s->workload.count) code = (cpa_exit_code)(CPA_EXIT_SIGNAL + s->outcome.stopped_by);
    } else if (status != CPA_OK) {
        explain(s, status, cpa_engine_error(s->engine));
    } else if (lost > 0) {
        fprintf(stderr, "cp_attn: %" PRId64 " of %" PRId64 " requests were lost\n", lost, s->workload.count);
        code = CPA_EXIT_CHECK_FAILED;
    } else if (ended->failed > 0) {
        code = CPA_EXIT_CHECK_FAILED;
    } else {
        code = judge_logits(s);
    }
    if (s->metrics.out_of_memory) cpa_log(CPA_LOG_WARN, "no memory for every latency: the summaries leave some out");
    if (s->job.settings.result_json[0]) {
        cpa_status written = cpa_result_json_write(s->job.settings.result_json, &s->outcome, &err);
        cpa_exit_code lost_json = explain(s, written, err.message);
        if (code == CPA_EXIT_DONE) code = lost_json;
    }
    return code == CPA_EXIT_DONE ? lost_report : code;
}

/* What the model has to say when all requests have ended. Collective. */
static void end_network(service *s) {
    cpa_error err;
    if (!s->job.has_network) return;
    cpa_status status = cpa_network_end(&s->job, &s->network, &s->control, &s->outcome.logits, &err);
    if (status != CPA_OK) abort_job(s, status, err.message);
    s->outcome.checked_logits = s->job.settings.check_logits > 0;
}

static cpa_exit_code run(service *s) {
    cpa_status status = cpa_engine_run(s->engine, on_finish, on_progress, s);
    if (status != CPA_OK && status != CPA_CHECK_FAILED && status != CPA_STOPPED) {
        abort_job(s, status, cpa_engine_error(s->engine));
    }
    if (status == CPA_OK) end_network(s);
    cpa_signals_finish();
    cpa_progress_finish(&s->progress);
    cpa_exit_code code = s->rank == 0 ? conclude(s, status) : CPA_EXIT_DONE;
    cpa_exit_code written = write_timeline(s); /* last: it may take long, and a run that was stopped has little time */
    return agree(s, code == CPA_EXIT_DONE ? written : code);
}

/* The steps of a run; each returns the same code on every rank. */
static cpa_exit_code run_job(service *s) {
    const cpa_settings *settings = &s->job.settings;
    cpa_error err;
    cpa_status placed =
        cpa_placement_find(s->comm, (int32_t)settings->threads, (int)settings->bind, &s->placement, &err);
    if (placed == CPA_OK)
        placed = cpa_placement_choose(s->comm, (cpa_device_choice)settings->device, &s->placement, &err);
    if (placed != CPA_OK) return explain(s, placed, err.message);
    cpa_exit_code code = size_cache(s);
    if (code != CPA_EXIT_DONE) return code;
    if (s->rank == 0) begin_outcome(s);
    if (cpa_signals_install(s->comm, settings->shutdown_timeout, give_up, s, &err) != CPA_OK)
        abort_job(s, err.status, err.message);
    code = load_network(s);
    if (code == CPA_EXIT_DONE) code = create_engine(s);
    if (code != CPA_EXIT_DONE) return code;
    cpa_signals_watch(s->engine);
    code = submit_all(s);
    return code == CPA_EXIT_DONE ? run(s) : code;
}

/* Rank 0 plans; the others have nothing to do. */
static cpa_exit_code dry_run(service *s) {
    cpa_error err;
    cpa_exit_code code = CPA_EXIT_DONE;
    if (s->rank == 0) code = explain(s, cpa_dry_run(&s->job, s->size, &s->workload, &err), err.message);
    return agree(s, code);
}

cpa_exit_code cpa_run_main(cpa_comm *comm, int argc, char **argv) {
    service s = {.comm = comm, .rank = cpa_comm_rank(comm), .size = cpa_comm_size(comm)};
    (void)cpa_control_open(comm, &s.control, NULL); /* fails without a communicator only */
    if (s.rank == 0) cpa_job_prepare(argc, argv, s.size, &s.job, &s.workload);
    broadcast(&s, &s.job, sizeof s.job);
    cpa_exit_code code = s.job.code;
    if (s.job.run) {
        cpa_log_set(log_line, &s, (cpa_log_level)s.job.settings.log_level);
        cpa_comm_set_timeout(comm, s.job.settings.rank_timeout);
        code = s.job.settings.dry_run ? dry_run(&s) : run_job(&s);
        cpa_signals_finish();
        cpa_signals_watch(NULL);
        cpa_engine_destroy(s.engine);
        cpa_network_close(&s.network);
        cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    }
    cpa_workload_release(&s.workload);
    cpa_metrics_release(&s.metrics);
    cpa_control_close(&s.control);
    return code;
}
