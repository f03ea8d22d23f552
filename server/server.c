#include "server/server.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "server/connection.h"
#include "server/listen.h"
#include "server/receive.h"
#include "server/server_internal.h"
#include "src/llm/bound_vocabulary.h"

/* For clients to take the error that their answers end with. */
static const double LAST_WORDS_S = 0.5;

enum { HEADER_BYTES = 32 << 10 }; /* of one request, with what libmicrohttpd needs itself */

/* Each connection is an open file: as many as there may be, and no more of them than leave some for the rest. */
static void bound_by_open_files(cpa_server_options *o) {
    enum { OTHER_FILES = 256 };
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files)) return;
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files)) getrlimit(RLIMIT_NOFILE, &files);
    const int64_t most = files.rlim_cur > OTHER_FILES + CPA_TOLD_CONNECTIONS + 1 && files.rlim_cur < INT32_MAX
                             ? (int64_t)files.rlim_cur - OTHER_FILES - CPA_TOLD_CONNECTIONS
                             : o->max_connections;
    if (o->max_connections <= most) return;
    cpa_log(CPA_LOG_WARN,
            "server: %lld connections, as the limit of open files (ulimit -n) is %lld; %lld were asked for",
            (long long)most, (long long)files.rlim_cur, (long long)o->max_connections);
    o->max_connections = most;
}

/* The text of a page, in place, up to the end of its body. */
static const char *without_tags(char *page) {
    char *out = page;
    for (const char *c = page; *c && strncmp(c, "</body>", 7) != 0; c++) {
        if (*c == '<') c += strcspn(c, ">");
        if (!*c) break;
        if (*c != '>') *out++ = *c;
    }
    *out = 0;
    return page;
}

/* Lines of libmicrohttpd. Of requests that it refuses itself it tells the status and the page that it replies with. */
static void log_http(void *ctx, const char *format, va_list args) {
    (void)ctx;
    char line[600];
    const int is_refusal = strncmp(format, "Error processing request", 24) == 0;
    if (!cpa_log_enabled(is_refusal ? CPA_LOG_WARN : CPA_LOG_DEBUG)) return;
    vsnprintf(line, sizeof line, format, args);
    if (!is_refusal) {
        line[strcspn(line, "\n")] = 0;
        cpa_log(CPA_LOG_DEBUG, "server: %s", line); /* of clients that have left, mostly */
        return;
    }
    unsigned status = 0;
    sscanf(line, "%*[^0-9]%u", &status);
    const char *body = strstr(line, "<body>");
    cpa_log(CPA_LOG_WARN, "server: a request is refused: %u: %s", status,
            without_tags(body ? memmove(line, body, strlen(body) + 1) : line));
}

static void destroy(cpa_server *server) {
    cpa_api_keys_release(&server->api_keys);
    free((void *)(uintptr_t)server->options.model_name);
    free((void *)(uintptr_t)server->engine.end_ids);
    cpa_constraints_close(server->constraints);
    cpa_in_flight_destroy(&server->in_flight);
    pthread_mutex_destroy(&server->open.lock);
    free(server);
}

static cpa_server *create(const cpa_server_options *given) {
    cpa_server *server = calloc(1, sizeof *server);
    if (!server) return NULL;
    cpa_in_flight_init(&server->in_flight);
    pthread_mutex_init(&server->open.lock, NULL);
    cpa_server_options *o = &server->options;
    *o = *given;
    o->host = NULL;
    o->api_keys = NULL;
    const int has_keys = cpa_api_keys_copy(given->api_keys, given->n_api_keys, &server->api_keys);
    o->model_name = strdup(given->model_name);
    if (o->max_body_bytes == 0) o->max_body_bytes = 32 << 20;
    if (o->max_connections == 0) o->max_connections = 2048;
    if (o->idle_timeout_s == 0) o->idle_timeout_s = 60;
    if (o->threads == 0) o->threads = 4;
    bound_by_open_files(o);
    server->created = time(NULL);
    if (getrandom(&server->instance, sizeof server->instance, 0) < 0) server->instance = (uint64_t)server->created;
    if (o->model_name && has_keys) return server;
    destroy(server);
    return NULL;
}

int epoll_wait(int epoll_fd, struct epoll_event *events, int most, int timeout_ms)
    __attribute__((visibility("default")));

/* Stands in for the C library's in a program that this is linked into, so that it is what libmicrohttpd calls.
 *
 * libmicrohttpd (MHD_epoll, as of 0.9.75 and 1.0.1) has room for 128 events, and where as many come it asks for more
 * before it looks at any. Where there are no more, it waits: until something else happens, or the time-out of a
 * connection is over, when all 128 are closed. So it gets one less than it has room for, which any caller of epoll_wait
 * must be ready for, and what is left comes with the next call. */
int epoll_wait(int epoll_fd, struct epoll_event *events, int most, int timeout_ms) {
    return epoll_pwait(epoll_fd, events, most > 1 ? most - 1 : most, timeout_ms, NULL);
}

static struct MHD_Daemon *start_daemon(cpa_server *server, int listen_fd) {
    const cpa_server_options *o = &server->options;
    /* libmicrohttpd shares its connections out among its threads evenly, the kernel does not. */
    const unsigned threads = (unsigned)o->threads;
    const unsigned connections = threads * ((unsigned)o->max_connections + CPA_TOLD_CONNECTIONS);
    const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    const struct MHD_OptionItem pool[] = {{threads > 1 ? MHD_OPTION_THREAD_POOL_SIZE : MHD_OPTION_END, threads, NULL},
                                          {MHD_OPTION_END, 0, NULL}};
    return MHD_start_daemon(
        flags, 0, NULL, NULL, cpa_receive, server, MHD_OPTION_EXTERNAL_LOGGER, log_http, NULL, MHD_OPTION_LISTEN_SOCKET,
        listen_fd, MHD_OPTION_CONNECTION_LIMIT, connections, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)ceil(o->idle_timeout_s), MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_BYTES,
        MHD_OPTION_NOTIFY_COMPLETED, cpa_receive_completed, server, MHD_OPTION_NOTIFY_CONNECTION, cpa_connection_notify,
        server, MHD_OPTION_URI_LOG_CALLBACK, cpa_connection_speaks, server, MHD_OPTION_ARRAY, pool, MHD_OPTION_END);
}

static void on_gone(void *ctx, uint64_t first_id) {
    cpa_server *server = ctx;
    cpa_in_flight_gone(&server->in_flight, first_id);
}

static void on_silent(void *ctx, uint64_t first_id) {
    cpa_server *server = ctx;
    cpa_in_flight_silent(&server->in_flight, first_id);
}

/* A request has 1.5 times the idle time-out to come whole: with a tick of a quarter, two of them in all. */
static void end_slow_clients(void *ctx) {
    cpa_server *server = ctx;
    cpa_connection_end_slow(&server->open, 1.5 * server->options.idle_timeout_s);
}

cpa_status cpa_server_start(const cpa_server_options *options, cpa_server **out, cpa_error *err) {
    int listen_fd;
    cpa_server *server = create(options);
    if (!server) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the server");
    cpa_status status =
        cpa_listen(options->host ? options->host : "127.0.0.1", options->port, &listen_fd, &server->port, err);
    if (status != CPA_OK) goto no_socket;
    server->watch = (cpa_client_watch){.on_silent = on_silent,
                                       .on_gone = on_gone,
                                       .on_tick = end_slow_clients,
                                       .tick_ms = (int)fmin(fmax(250 * server->options.idle_timeout_s, 1), 60e3),
                                       .ctx = server};
    CPA_TRY_GOTO(cpa_client_watch_start(&server->watch, err), no_watch);
    CPA_TRY_GOTO(cpa_work_start(&server->work, err), no_work);
    CPA_TRY_GOTO(cpa_work_start(&server->rendering, err), no_rendering);
    CPA_TRY_GOTO(cpa_work_start(&server->binding, err), no_binding);
    CPA_TRY_GOTO(cpa_waker_start(&server->waker, &server->in_flight, err), no_waker);
    server->daemon = start_daemon(server, listen_fd);
    if (server->daemon) {
        *out = server;
        return CPA_OK;
    }
    status = cpa_fail(err, CPA_NO_MEMORY, "the server cannot start its %d threads", server->options.threads);
    cpa_waker_stop(&server->waker);
no_waker:
    cpa_work_stop(&server->binding);
no_binding:
    cpa_work_stop(&server->rendering);
no_rendering:
    cpa_work_stop(&server->work);
no_work:
    cpa_client_watch_stop(&server->watch);
no_watch:
    close(listen_fd);
no_socket:
    destroy(server);
    return status;
}

int cpa_server_port(const cpa_server *server) {
    return server->port;
}

cpa_status cpa_server_attach(cpa_server *server, const cpa_server_engine *engine, cpa_error *err) {
    uint32_t *ends = NULL;
    if (engine->n_end_ids > 0) {
        ends = malloc((size_t)engine->n_end_ids * sizeof *ends);
        if (!ends) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the end tokens");
        memcpy(ends, engine->end_ids, (size_t)engine->n_end_ids * sizeof *ends);
    }
    server->engine = *engine;
    server->engine.end_ids = ends;
    CPA_TRY(cpa_bound_vocabulary_open(server->options.tokenizer, engine->vocabulary, ends, engine->n_end_ids,
                                      &server->constraints, err));
    atomic_store(&server->is_attached, 1);
    cpa_in_flight_advance(&server->in_flight, CPA_SERVER_READY, engine->vocabulary);
    return CPA_OK;
}

void cpa_server_on_ranks(cpa_server *server, uint64_t request, int64_t position, const cpa_token_ranks *ranks) {
    cpa_in_flight_ranks(&server->in_flight, request, position, ranks);
}

void cpa_server_on_token(cpa_server *server, uint64_t request, int64_t index, uint32_t token, float logprob) {
    cpa_in_flight_token(&server->in_flight, request, index, token, logprob);
}

void cpa_server_on_step(cpa_server *server) {
    cpa_waker_call(&server->waker);
}

void cpa_server_on_finish(cpa_server *server, const cpa_request_result *result) {
    cpa_in_flight_finish(&server->in_flight, result);
}

uint32_t cpa_server_token_at(cpa_server *server, uint64_t request, int64_t position) {
    return cpa_in_flight_token_at(&server->in_flight, request, position);
}

void cpa_server_drain(cpa_server *server) {
    cpa_in_flight_advance(&server->in_flight, CPA_SERVER_DRAINING, 0);
}

int64_t cpa_server_incoming(cpa_server *server) {
    return cpa_in_flight_incoming(&server->in_flight);
}

void cpa_server_fail(cpa_server *server, const char *message) {
    cpa_in_flight_fail(&server->in_flight, message);
}

int64_t cpa_server_undelivered(cpa_server *server) {
    return cpa_in_flight_undelivered(&server->in_flight);
}

int64_t cpa_server_wait(cpa_server *server, double seconds) {
    return cpa_in_flight_wait(&server->in_flight, seconds);
}

void cpa_server_stop(cpa_server *server, double seconds) {
    if (!server) return;
    cpa_server_drain(server);
    if (cpa_in_flight_wait(&server->in_flight, seconds) > 0) {
        cpa_in_flight_fail(&server->in_flight, "the server has stopped");
        cpa_in_flight_wait(&server->in_flight, LAST_WORDS_S);
    }
    cpa_in_flight_close(&server->in_flight);
    cpa_work_stop(&server->work);
    cpa_work_stop(&server->rendering);
    cpa_work_stop(&server->binding);
    cpa_waker_stop(&server->waker);
    MHD_stop_daemon(server->daemon);
    cpa_client_watch_stop(&server->watch);
    destroy(server);
}
