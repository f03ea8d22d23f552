#include "launcher/serve.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "launcher/output/metrics_file.h"
#include "launcher/output/result_json.h"
#include "launcher/ranks/signals.h"
#include "launcher/serve_front.h"
#include "launcher/settings/settings_check.h"
#include "program/output_file.h"
#include "program/report_line.h"
#include "src/llm/length_limits.h"

/* Of each latency the report tells of the last so many. */
#define KEPT_LATENCIES ((int64_t)1 << 16)

/* One server, on one rank. What rank 0 alone knows is empty on the others. */
typedef struct serving {
    cpa_service *service;
    cpa_serve_front front; /* rank 0, as all that follows */
    cpa_length_limits limits;
    cpa_workload workload; /* counts the requests there were, at the end */
    cpa_metrics metrics;
    cpa_metrics_file metrics_file;
    cpa_outcome outcome; /* what is known so far */
    double began;        /* when it began to serve, on the monotonic clock; 0: not yet */
    double deliver_by; /* on the monotonic clock, when answers have to be delivered after a signal; 0: none has come */
    int is_told;       /* the outcome of a server that broke off is written */
} serving;

/* ---- signals: in the watching thread, with the lock held ---- */

static void on_drain(void *ctx, double seconds) {
    serving *s = ctx;
    s->deliver_by = cpa_clock_now() + seconds;
    cpa_server_drain(s->front.server);
}

static int has_incoming(void *ctx) {
    return cpa_server_incoming(((serving *)ctx)->front.server) > 0;
}

/* Adds up the requests there were, those that have not ended included. */
static void count_requests(serving *s) {
    const cpa_metrics *ended = &s->metrics;
    s->workload.count = ended->completed + ended->failed + ended->cancelled + ended->expired +
                        s->outcome.stats.requests_waiting + s->outcome.stats.requests_running;
}

static void report_stop(const serving *s, int64_t undelivered) {
    fprintf(stderr, "cp_attn: stopped by signal %d: %" PRId64 " answers were not finished or not taken%s\n",
            s->outcome.stopped_by, undelivered, s->outcome.given_up ? "; the step in flight was given up" : "");
}

/* The report, and the result file. */
static cpa_exit_code report_results(serving *s) {
    cpa_error err;
    const cpa_job_ranks *ranks = &s->service->ranks;
    const char *path = s->service->job.settings.result_json;
    count_requests(s);
    cpa_report_print(&s->outcome, stdout);
    const cpa_exit_code printed = cpa_job_ranks_explain(ranks, cpa_output_flush(&err), err.message);
    const cpa_status results = path[0] ? cpa_result_json_write(path, &s->outcome, &err) : CPA_OK;
    const cpa_exit_code written = cpa_job_ranks_explain(ranks, results, err.message);
    const cpa_status metrics = cpa_metrics_file_write(&s->metrics_file, &s->outcome.stats, &err);
    const cpa_exit_code exposed = cpa_job_ranks_explain(ranks, metrics, err.message);
    return printed != CPA_EXIT_DONE ? printed : written != CPA_EXIT_DONE ? written : exposed;
}

/* Ends every answer with `why`, and says what is known of a server that is in the middle of something. */
static void tell_unfinished(serving *s, const char *why) {
    s->is_told = 1;
    s->outcome.given_up = 1;
    s->outcome.stats.duration_s = s->began > 0 ? cpa_clock_now() - s->began : 0;
    const int64_t undelivered = s->front.server ? cpa_server_undelivered(s->front.server) : 0;
    cpa_serve_front_fail(&s->front, why);
    if (s->outcome.stopped_by) report_stop(s, undelivered);
    (void)report_results(s);
}

static void give_up(void *ctx, int signal) {
    serving *s = ctx;
    s->outcome.stopped_by = signal;
    tell_unfinished(s, "the server was stopped");
}

/* A server that has not begun has no results. */
static void on_lost(void *ctx, int rank) {
    serving *s = ctx;
    if (s->is_told) return;
    cpa_job_ranks_explain_loss(&s->service->ranks, rank, &s->outcome.failure);
    if (s->began > 0) {
        tell_unfinished(s, s->outcome.failure.message);
    } else {
        cpa_serve_front_fail(&s->front, s->outcome.failure.message);
    }
}

/* Ends the job after a failure that the other ranks may not know of; rank 0 first says what is known of the server. */
static _Noreturn void break_off(serving *s, cpa_status status, const char *message) {
    if (s->service->ranks.rank == 0) {
        cpa_signals_lock();
        if (!s->is_told) {
            cpa_fail(&s->outcome.failure, status, "%s", message);
            tell_unfinished(s, message);
        }
        cpa_signals_unlock();
    }
    cpa_job_ranks_abort(&s->service->ranks, status, message);
}

/* ---- callbacks of the engine ---- */

static void on_ranks(void *ctx, uint64_t request, int64_t position, const cpa_token_ranks *ranks) {
    cpa_server_on_ranks(((serving *)ctx)->front.server, request, position, ranks);
}

static void on_token(void *ctx, uint64_t request, int64_t index, uint32_t token, float logprob) {
    cpa_server_on_token(((serving *)ctx)->front.server, request, index, token, logprob);
}

static void on_finish(void *ctx, const cpa_request_result *result) {
    serving *s = ctx;
    cpa_serve_front_on_finish(&s->front, result);
    cpa_signals_lock();
    cpa_metrics_add(&s->metrics, result);
    cpa_signals_unlock();
}

static void on_progress(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    serving *s = ctx;
    (void)tokens, (void)requests;
    cpa_server_on_step(s->front.server);
    cpa_signals_lock();
    cpa_service_note_step(s->service, &s->outcome, elapsed_s);
    cpa_serve_front_on_step(&s->front, &s->outcome.stats);
    cpa_metrics_file_update(&s->metrics_file, &s->outcome.stats);
    cpa_signals_unlock();
}

/* ---- steps ---- */

/* Rank 0 listens, before what takes long begins. */
static cpa_exit_code listen_early(serving *s) {
    cpa_error err;
    cpa_job_ranks *ranks = &s->service->ranks;
    cpa_exit_code code = CPA_EXIT_DONE;
    if (ranks->rank == 0)
        code = cpa_job_ranks_explain(ranks, cpa_serve_front_open(&s->service->job, ranks->size, &s->front, &err),
                                     err.message);
    return cpa_job_ranks_agree(ranks, code);
}

static cpa_status choose_cache(void *ctx, const cpa_cache_limits *limits, cpa_cache_size *out, cpa_error *err) {
    serving *s = ctx;
    const cpa_length_wishes wishes = cpa_job_length_wishes(&s->service->job);
    CPA_TRY(cpa_length_limits_find(&wishes, limits, &s->limits, err));
    *out = (cpa_cache_size){s->limits.num_blocks, limits->window_seqs};
    return CPA_OK;
}

static cpa_engine_options engine_options(serving *s) {
    cpa_engine_options options = cpa_job_engine_options(&s->service->job, s->service->cache, &s->workload);
    options.token_at = cpa_serve_front_token_at;
    options.token_ctx = &s->front;
    options.on_token = on_token;
    options.on_ranks = on_ranks;
    return options;
}

static cpa_status install_signals(serving *s, cpa_error *err) {
    const cpa_signal_actions actions = {
        .ctx = s, .drain = on_drain, .has_incoming = has_incoming, .lost = on_lost, .give_up = give_up};
    return cpa_signals_install(s->service->ranks.comm, s->service->job.settings.shutdown_timeout, &actions, err);
}

static void print_address(const serving *s) {
    const char *host = s->service->job.settings.host;
    const int is_bare = strchr(host, ':') == NULL; /* else an address of IPv6 */
    cpa_report_line(stdout, "serving", "%s on http://%s%s%s:%d", s->front.name, is_bare ? "" : "[", host,
                    is_bare ? "" : "]", cpa_server_port(s->front.server));
    cpa_report_line(stdout, "", "requests of up to %" PRId64 " tokens; %s", s->limits.max_model_len, s->front.says);
}

/* Rank 0: takes requests from now on, and says so. */
static cpa_status accept_requests(serving *s, cpa_error *err) {
    const cpa_job *job = &s->service->job;
    const char *metrics = job->settings.metrics_file;
    cpa_signals_lock();
    const cpa_status opened =
        metrics[0] ? cpa_metrics_file_open(metrics, s->front.exposition, &s->metrics_file, err) : CPA_OK;
    cpa_service_note_place(s->service, &s->outcome);
    if (s->outcome.links)
        cpa_exposition_set_links(s->front.exposition, s->outcome.transport, s->outcome.links, s->service->ranks.size);
    cpa_service_note_stats(s->service, &s->outcome);
    s->began = cpa_clock_now();
    cpa_signals_unlock();
    CPA_TRY(opened);
    CPA_TRY(cpa_serve_front_attach(&s->front, job, s->service->engine, s->limits.max_model_len, err));
    cpa_report_place(&s->outcome, stdout);
    print_address(s);
    return cpa_output_flush(err);
}

static cpa_exit_code start_serving(serving *s) {
    cpa_error err;
    cpa_job_ranks *ranks = &s->service->ranks;
    cpa_exit_code code = CPA_EXIT_DONE;
    if (ranks->rank == 0) code = cpa_job_ranks_explain(ranks, accept_requests(s, &err), err.message);
    return cpa_job_ranks_agree(ranks, code);
}

/* Rank 0, when the engine has ended: lets clients take what is left of their answers. Returns how many were not
 * finished or not taken. */
static int64_t deliver(serving *s, cpa_status status) {
    const int64_t unfinished = cpa_server_undelivered(s->front.server);
    if (status == CPA_OK) {
        cpa_signals_lock();
        const double seconds = s->deliver_by - cpa_clock_now();
        cpa_signals_unlock();
        return cpa_server_wait(s->front.server, seconds);
    }
    const int is_stopped = status == CPA_STOPPED;
    cpa_serve_front_fail(&s->front, is_stopped ? "the server was stopped" : cpa_engine_error(s->service->engine));
    return unfinished;
}

/* Rank 0: the report, and what the program ends with. */
static cpa_exit_code conclude(serving *s, cpa_status status, int64_t undelivered) {
    cpa_exit_code code = cpa_exit_code_of(status);
    cpa_service_note_stats(s->service, &s->outcome);
    if (status == CPA_CHECK_FAILED) {
        cpa_fail(&s->outcome.failure, status, "%s", cpa_engine_error(s->service->engine));
        (void)cpa_job_ranks_explain(&s->service->ranks, status, s->outcome.failure.message);
    } else {
        s->outcome.stopped_by = cpa_signals_received();
        code = undelivered > 0 ? (cpa_exit_code)(CPA_EXIT_SIGNAL + s->outcome.stopped_by) : CPA_EXIT_DONE;
        if (undelivered > 0) report_stop(s, undelivered);
    }
    const cpa_exit_code reported = report_results(s);
    return code == CPA_EXIT_DONE ? reported : code;
}

static cpa_exit_code serve(serving *s) {
    cpa_service *service = s->service;
    const int is_first = service->ranks.rank == 0;
    const cpa_status status = cpa_engine_serve(service->engine, on_finish, on_progress, s);
    if (status != CPA_OK && status != CPA_CHECK_FAILED && status != CPA_STOPPED)
        break_off(s, status, cpa_engine_error(service->engine));
    const int64_t undelivered = is_first ? deliver(s, status) : 0;
    cpa_signals_finish();
    cpa_exit_code code = is_first ? conclude(s, status, undelivered) : CPA_EXIT_DONE;
    /* Last: it may take long, and a server that was stopped has little time. */
    const cpa_exit_code written = cpa_service_write_timeline(service);
    return cpa_job_ranks_agree(&service->ranks, code == CPA_EXIT_DONE ? written : code);
}

/* Each returns the same code on every rank. */
static cpa_exit_code serve_steps(serving *s) {
    cpa_service *service = s->service;
    cpa_error err;
    cpa_exit_code code = cpa_service_place(service); /* threads of the server begin with the cores of the rank */
    if (code == CPA_EXIT_DONE) code = listen_early(s);
    if (code == CPA_EXIT_DONE) code = cpa_service_size_cache(service, choose_cache, s);
    if (code != CPA_EXIT_DONE) return code;
    if (service->ranks.rank == 0) s->outcome = cpa_service_outcome(service, &s->workload, &s->metrics);
    if (install_signals(s, &err) != CPA_OK) cpa_job_ranks_abort(&service->ranks, err.status, err.message);
    code = cpa_service_load_network(service, &s->workload);
    if (code == CPA_EXIT_DONE) code = cpa_service_create_engine(service, engine_options(s));
    if (code != CPA_EXIT_DONE) return code;
    cpa_signals_watch(service->engine);
    code = start_serving(s);
    return code == CPA_EXIT_DONE ? serve(s) : code;
}

cpa_exit_code cpa_serve(cpa_service *service) {
    serving s = {.service = service, .workload.title = "a server", .metrics.window = KEPT_LATENCIES};
    (void)cpa_settings_metrics(&service->job.settings, &s.metrics.options, NULL); /* right, as they are loaded */
    const cpa_exit_code code = serve_steps(&s);
    cpa_signals_finish();
    cpa_signals_watch(NULL);
    cpa_serve_front_close(&s.front);
    cpa_service_close(service);
    cpa_metrics_release(&s.metrics);
    return code;
}
