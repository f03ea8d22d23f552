#include "server/receive.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/check.h"
#include "server/answer.h"
#include "server/bound_answers.h"
#include "server/connection.h"
#include "server/http_exchange.h"
#include "server/routes.h"

/* Bodies of refused requests are read, and forgotten, up to so many times the bound of others: a client that is cut off
 * while it sends does not see the reply. */
enum { DISCARDED_BODIES = 4 };

enum { LARGE_BODY = 32 << 10 }; /* takes a millisecond or more to parse and encode */

typedef struct call {
    cpa_http_exchange exchange;
    const cpa_route *route;
    const char *allow;
    int64_t announced, arrived; /* bytes of the body */
    int is_refused, refuses_now, is_prepared, is_bound;
    int is_question; /* OPTIONS: what may be asked of the path */
    cpa_work_item work;
} call;

static const char *header(const call *c, const char *name) {
    return MHD_lookup_connection_value(c->exchange.connection, MHD_HEADER_KIND, name);
}

/* Whether it has a key where one is wanted. */
static int has_key(call *c) {
    const cpa_api_keys *keys = &c->exchange.server->api_keys;
    if (keys->count == 0 || c->route->is_open) return 1;
    c->exchange.key = cpa_api_keys_find(keys, header(c, MHD_HTTP_HEADER_AUTHORIZATION));
    return c->exchange.key >= 0;
}

/* Types that no client sends JSON as; form data is what curl calls any body. */
static int is_clearly_not_json(const char *type) {
    static const char *const others[] = {"multipart/", "image/", "audio/", "video/", "text/html", "application/xml"};
    for (size_t i = 0; type && i < sizeof others / sizeof *others; i++) {
        if (strncasecmp(type, others[i], strlen(others[i])) == 0) return 1;
    }
    return 0;
}

static int is_head_or_get(const char *method) {
    return strcmp(method, MHD_HTTP_METHOD_GET) == 0 || strcmp(method, MHD_HTTP_METHOD_HEAD) == 0;
}

static const char *methods_of(const cpa_route *route) {
    return route->prepare ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
}

/* What can be said by the header alone. */
static int check_header(call *c) {
    const cpa_http_exchange *x = &c->exchange;
    const cpa_server_options *o = &x->server->options;
    c->route = cpa_route_find(x->path);
    if (cpa_connection_is_crowded(x->connection) && !(c->route && c->route->is_probe)) {
        return cpa_refuse(&c->exchange.refusal, MHD_HTTP_SERVICE_UNAVAILABLE, NULL, NULL,
                          "too many connections, there may be %lld", (long long)o->max_connections);
    }
    if (!c->route)
        return cpa_refuse(&c->exchange.refusal, MHD_HTTP_NOT_FOUND, NULL, NULL, "no such path: %.100s", x->path);
    c->is_question = strcmp(x->method, MHD_HTTP_METHOD_OPTIONS) == 0;
    if (c->is_question) return 1;
    if (c->route->prepare ? strcmp(x->method, MHD_HTTP_METHOD_POST) != 0 : !is_head_or_get(x->method)) {
        c->allow = methods_of(c->route);
        return cpa_refuse(&c->exchange.refusal, MHD_HTTP_METHOD_NOT_ALLOWED, NULL, NULL, "%.16s %.100s: expected %s",
                          x->method, x->path, c->allow);
    }
    if (!has_key(c)) {
        return cpa_refuse(&c->exchange.refusal, MHD_HTTP_UNAUTHORIZED, "invalid_api_key", NULL,
                          "no API key, or a wrong one; expected \"Authorization: Bearer KEY\"");
    }
    if (c->announced > o->max_body_bytes) return cpa_http_exchange_refuse_large(x, &c->exchange.refusal);
    const char *type = header(c, MHD_HTTP_HEADER_CONTENT_TYPE);
    if (c->route->prepare && is_clearly_not_json(type)) {
        return cpa_refuse(&c->exchange.refusal, MHD_HTTP_UNSUPPORTED_MEDIA_TYPE, NULL, NULL,
                          "Content-Type %.60s: expected application/json", type);
    }
    return 1;
}

/* Whether the reply cannot wait for the body: who asks first whether to send it is told at once, and so is who has more
 * than is worth reading. */
static int must_refuse_now(const call *c) {
    const char *expected = header(c, MHD_HTTP_HEADER_EXPECT);
    return c->refuses_now || (expected && strcasecmp(expected, "100-continue") == 0) ||
           c->announced > DISCARDED_BODIES * c->exchange.server->options.max_body_bytes;
}

static enum MHD_Result begin(cpa_server *server, struct MHD_Connection *connection, const char *url, const char *method,
                             const char *version, void **out) {
    call *c = calloc(1, sizeof *c);
    if (!c) return MHD_NO;
    *out = c;
    c->exchange = (cpa_http_exchange){.server = server, .connection = connection, .method = method, .path = url};
    c->exchange.takes_interim = strcmp(version, MHD_HTTP_VERSION_1_0) != 0;
    const char *length = header(c, MHD_HTTP_HEADER_CONTENT_LENGTH);
    if (length) c->announced = strtoll(length, NULL, 10); /* which libmicrohttpd has checked */
    c->refuses_now = !cpa_connection_check_head(connection, method, version, &c->exchange.refusal);
    c->exchange.closes = c->refuses_now;
    c->is_refused = c->refuses_now || !check_header(c);
    c->exchange.is_incoming = !c->is_refused && c->route->prepare && cpa_in_flight_announce(&server->in_flight);
    if (c->is_refused && must_refuse_now(c)) return cpa_reply_refusal(&c->exchange, &c->exchange.refusal, c->allow);
    return MHD_YES;
}

/* A part of the body. */
static enum MHD_Result take(call *c, const char *upload, size_t *upload_bytes) {
    cpa_http_exchange *x = &c->exchange;
    const int64_t bytes = (int64_t)*upload_bytes;
    *upload_bytes = 0;
    c->arrived += bytes;
    if (!c->is_refused && c->route->prepare && !c->is_question)
        c->is_refused = !cpa_http_exchange_add(x, upload, bytes, &c->exchange.refusal);
    if (c->is_refused) cpa_http_exchange_drop_body(x);
    return c->arrived > DISCARDED_BODIES * x->server->options.max_body_bytes ? MHD_NO : MHD_YES;
}

/* It is with the engine, or will never be. */
static void end_arrival(cpa_http_exchange *x) {
    if (x->is_incoming) cpa_in_flight_is_in(&x->server->in_flight);
    x->is_incoming = 0;
}

static void run_prepare(void *ctx) {
    call *c = ctx;
    c->route->prepare(&c->exchange);
}

/* Who prepares what takes long; NULL: it does not. What waits for a template holds up other chats alone. */
static cpa_work *work_of(const call *c) {
    cpa_server *server = c->exchange.server;
    const cpa_chat_template *chat = server->options.chat;
    if (c->route->renders && chat && cpa_chat_template_is_slow(chat)) return &server->rendering;
    return c->exchange.bytes >= LARGE_BODY ? &server->work : NULL;
}

static void run_bind(void *ctx) {
    call *c = ctx;
    cpa_bind_generation(c->exchange.server, c->exchange.generation, &c->exchange.refusal);
}

/* 1: it is done; 0: it will be, and the connection is suspended. */
static int run(call *c, cpa_work *work, void (*step)(void *call)) {
    cpa_http_exchange *x = &c->exchange;
    c->work = (cpa_work_item){.connection = x->connection, .run = step, .ctx = c};
    cpa_refuse(&x->refusal, MHD_HTTP_SERVICE_UNAVAILABLE, NULL, NULL, "the server has stopped"); /* if nothing runs */
    if (work && cpa_work_hand_over(work, &c->work)) return 0;
    step(c);
    return 1;
}

/* The body is whole. What an answer is bound to is made by threads of its own: it may be much work. */
static int prepare(call *c) {
    cpa_http_exchange *x = &c->exchange;
    if (!c->is_prepared && c->route->prepare) {
        c->is_prepared = 1;
        if (!run(c, work_of(c), run_prepare)) return 0;
    }
    if (c->is_bound || !x->generation || !x->generation->binding) return 1;
    c->is_bound = 1;
    return run(c, &x->server->binding, run_bind);
}

enum MHD_Result cpa_receive(void *server, struct MHD_Connection *connection, const char *url, const char *method,
                            const char *version, const char *upload, size_t *upload_bytes, void **state) {
    if (!*state) return begin(server, connection, url, method, version, state);
    call *c = *state;
    if (*upload_bytes > 0) return take(c, upload, upload_bytes);
    cpa_connection_has_read(connection);
    if (c->is_refused) return cpa_reply_refusal(&c->exchange, &c->exchange.refusal, c->allow);
    if (c->is_question) return cpa_reply_allowed(&c->exchange, methods_of(c->route));
    if (!prepare(c)) return MHD_YES;
    const enum MHD_Result served = c->route->serve(&c->exchange);
    end_arrival(&c->exchange);
    return served;
}

void cpa_receive_completed(void *server, struct MHD_Connection *connection, void **state,
                           enum MHD_RequestTerminationCode why) {
    (void)server;
    cpa_connection_reads(connection);
    call *c = *state;
    if (!c) return;
    *state = NULL;
    if (why == MHD_REQUEST_TERMINATED_TIMEOUT_REACHED) {
        cpa_log(CPA_LOG_WARN, "server: %.16s %.80s: closed, as the client was idle for too long", c->exchange.method,
                c->exchange.path);
    }
    end_arrival(&c->exchange);
    cpa_answer_close(c->exchange.answer);
    if (c->exchange.generation) cpa_generation_release(c->exchange.generation);
    free(c->exchange.generation);
    free(c->exchange.reply);
    cpa_http_exchange_drop_body(&c->exchange);
    free(c);
}
