#include "server/http_exchange.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "server/connection.h"

/* As many bodies of the greatest length as there may be at a time: most are small, and soon read. */
enum { MOST_BODIES = 16 };

int cpa_http_exchange_refuse_large(const cpa_http_exchange *x, cpa_refusal *refusal) {
    return cpa_refuse(refusal, MHD_HTTP_CONTENT_TOO_LARGE, NULL, NULL,
                      "the body of the request is too large, expected at most %lld bytes",
                      (long long)x->server->options.max_body_bytes);
}

int cpa_http_exchange_add(cpa_http_exchange *x, const char *bytes, int64_t n, cpa_refusal *refusal) {
    const int64_t most = x->server->options.max_body_bytes;
    if (x->bytes + n > most) return cpa_http_exchange_refuse_large(x, refusal);
    if (atomic_fetch_add(&x->server->body_bytes, n) + n > MOST_BODIES * most ||
        !cpa_array_reserve(&x->body, &x->capacity, x->bytes + n, 1)) {
        atomic_fetch_sub(&x->server->body_bytes, n);
        return cpa_refuse(refusal, MHD_HTTP_SERVICE_UNAVAILABLE, NULL, NULL,
                          "no memory for the body of the request: others have it");
    }
    memcpy(x->body + x->bytes, bytes, (size_t)n);
    x->bytes += n;
    return 1;
}

void cpa_http_exchange_drop_body(cpa_http_exchange *x) {
    atomic_fetch_sub(&x->server->body_bytes, x->bytes);
    free(x->body);
    x->body = NULL;
    x->bytes = x->capacity = 0;
}

int cpa_http_exchange_is_ready(const cpa_http_exchange *x, cpa_refusal *refusal) {
    static const char *const why[] = {"is starting", "", "takes no more requests", "has lost its engine"};
    const cpa_server_state state = atomic_load(&x->server->in_flight.state);
    if (state == CPA_SERVER_READY || (state == CPA_SERVER_DRAINING && x->is_incoming)) return 1;
    return cpa_refuse(refusal, MHD_HTTP_SERVICE_UNAVAILABLE, NULL, NULL, "the server %s", why[state]);
}

void cpa_reply_headers(const cpa_http_exchange *x, struct MHD_Response *response) {
    if (x->closes || atomic_load(&x->server->in_flight.state) >= CPA_SERVER_DRAINING ||
        cpa_connection_is_crowded(x->connection)) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    }
}

static struct MHD_Response *response_of(char *text, const char *content_type) {
    struct MHD_Response *response = MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_FREE);
    if (!response) {
        free(text);
        return NULL;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
    return response;
}

/* Without memory even for this the connection is closed. */
static enum MHD_Result queue(cpa_http_exchange *x, unsigned status, struct MHD_Response *response) {
    if (!response) {
        static char none[] = "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\"}}";
        status = MHD_HTTP_INTERNAL_SERVER_ERROR;
        response = MHD_create_response_from_buffer(sizeof none - 1, none, MHD_RESPMEM_PERSISTENT);
        if (!response) return MHD_NO;
        cpa_log(CPA_LOG_WARN, "server: %s %.80s: %u: out of memory", x->method, x->path, status);
    }
    cpa_reply_headers(x, response);
    const enum MHD_Result queued = MHD_queue_response(x->connection, status, response);
    MHD_destroy_response(response);
    return queued;
}

static struct MHD_Response *json_response(json_t *body) {
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    return text ? response_of(text, "application/json") : NULL;
}

enum MHD_Result cpa_reply_json(cpa_http_exchange *x, unsigned status, json_t *body) {
    return queue(x, status, json_response(body));
}

enum MHD_Result cpa_reply_text(cpa_http_exchange *x, const char *content_type, char *text) {
    return queue(x, MHD_HTTP_OK, text ? response_of(text, content_type) : NULL);
}

enum MHD_Result cpa_reply_refusal(cpa_http_exchange *x, const cpa_refusal *refusal, const char *allow) {
    cpa_log(CPA_LOG_WARN, "server: %.16s %.80s: %u: %s", x->method, x->path, refusal->status,
            refusal->quotes ? "refused for what is in it, as the client is told" : refusal->message);
    struct MHD_Response *response = json_response(cpa_refusal_json(refusal));
    if (response && allow) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, allow);
    if (response && refusal->status == MHD_HTTP_UNAUTHORIZED) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    }
    if (response &&
        (refusal->status == MHD_HTTP_TOO_MANY_REQUESTS || refusal->status == MHD_HTTP_SERVICE_UNAVAILABLE)) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
    }
    return queue(x, refusal->status, response);
}

enum MHD_Result cpa_reply_allowed(cpa_http_exchange *x, const char *allow) {
    struct MHD_Response *response = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    if (response) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, allow);
    return queue(x, MHD_HTTP_NO_CONTENT, response);
}
