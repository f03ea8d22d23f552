#include "server/status_routes.h"

#include <stdlib.h>
#include <string.h>

static cpa_server_state state_of(const cpa_http_exchange *x) {
    return atomic_load(&x->server->in_flight.state);
}

static enum MHD_Result reply_status(cpa_http_exchange *x, unsigned status, const char *text) {
    return cpa_reply_json(x, status, json_pack("{s:s}", "status", text));
}

enum MHD_Result cpa_serve_live(cpa_http_exchange *x) {
    return reply_status(x, MHD_HTTP_OK, "live");
}

/* Asked often, so that an answer of 503 is not logged. */
enum MHD_Result cpa_serve_health(cpa_http_exchange *x) {
    static const char *const names[] = {"starting", "ready", "draining", "failed"};
    const cpa_server_state state = state_of(x);
    return reply_status(x, state == CPA_SERVER_READY ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, names[state]);
}

enum MHD_Result cpa_serve_version(cpa_http_exchange *x) {
    return cpa_reply_json(x, MHD_HTTP_OK, json_pack("{s:s}", "version", cpa_version()));
}

enum MHD_Result cpa_serve_metrics(cpa_http_exchange *x) {
    const cpa_server_options *o = &x->server->options;
    return cpa_reply_text(x, "text/plain; version=0.0.4; charset=utf-8",
                          o->metrics ? o->metrics(o->metrics_ctx) : strdup(""));
}

enum MHD_Result cpa_serve_status_page(cpa_http_exchange *x) {
    const cpa_server_options *o = &x->server->options;
    return cpa_reply_text(x, "text/html; charset=utf-8", o->status_page ? o->status_page(o->status_ctx) : strdup(""));
}

static json_t *model(const cpa_http_exchange *x) {
    const cpa_server *server = x->server;
    const char *name = server->options.model_name;
    const int known = atomic_load(&x->server->is_attached);
    return json_pack("{s:s,s:s,s:I,s:s,s:s,s:n,s:o,s:o}", "id", name, "object", "model", "created",
                     (json_int_t)server->created, "owned_by", "cp_attn", "root", name, "parent", "max_model_len",
                     known ? json_integer(server->engine.max_model_len) : json_null(), "vocab_size",
                     known ? json_integer(server->engine.vocabulary) : json_null());
}

enum MHD_Result cpa_serve_models(cpa_http_exchange *x) {
    return cpa_reply_json(x, MHD_HTTP_OK, json_pack("{s:s,s:[o]}", "object", "list", "data", model(x)));
}

enum MHD_Result cpa_serve_model(cpa_http_exchange *x) {
    const char *name = x->path + strlen("/v1/models/");
    if (strcmp(name, x->server->options.model_name) == 0) return cpa_reply_json(x, MHD_HTTP_OK, model(x));
    cpa_refusal refusal;
    cpa_refuse(&refusal, MHD_HTTP_NOT_FOUND, "model_not_found", "model", "the model %.100s does not exist; there is %s",
               name, x->server->options.model_name);
    return cpa_reply_refusal(x, &refusal, NULL);
}
