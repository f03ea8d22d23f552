#include "server/completions.h"

#include <stdlib.h>
#include <sys/socket.h>

#include "base/check.h"
#include "server/answer.h"
#include "server/answer_json.h"
#include "server/chat_request.h"
#include "server/completion_request.h"
#include "server/event_stream.h"

typedef int (*reader)(const cpa_server *server, const json_t *body, cpa_generation *out, cpa_refusal *refusal);

static void prepare(cpa_http_exchange *x, reader read) {
    json_t *body = NULL;
    if (!cpa_http_exchange_is_ready(x, &x->refusal) || !cpa_fields_parse(x->body, x->bytes, &body, &x->refusal)) return;
    cpa_http_exchange_drop_body(x); /* the answer may take long */
    cpa_generation generation = {.n = 0}, *kept = malloc(sizeof *kept);
    const int is_read = read(x->server, body, &generation, &x->refusal);
    json_decref(body);
    const int is_named = x->server->api_keys.count < 2 || cpa_generation_set_tenant(&generation, x->key);
    if (is_read && is_named && kept) {
        *kept = generation;
        x->generation = kept;
        return;
    }
    cpa_generation_release(&generation);
    free(kept);
    if (is_read) cpa_refuse(&x->refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL, "no memory for the request");
}

void cpa_prepare_completion(cpa_http_exchange *x) {
    prepare(x, cpa_completion_read);
}

void cpa_prepare_chat(cpa_http_exchange *x) {
    prepare(x, cpa_chat_read);
}

/* A client that sends no more has closed its connection, or shut down one side of it and waits: the first answers what
 * it is sent with a reset. HTTP/1.0 has nothing that may be sent before the reply. */
static void try_silent_client(const cpa_http_exchange *x) {
    static const char interim[] = "HTTP/1.1 100 Continue\r\n\r\n";
    if (!cpa_in_flight_take_silence(x->answer->group) || !x->takes_interim) return;
    if (send(x->answer->socket, interim, sizeof interim - 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        cpa_log(CPA_LOG_DEBUG, "server: %s: its client has left", x->answer->id);
}

/* Waits for the whole answer, as often as the connection is resumed. */
static enum MHD_Result reply_whole(cpa_http_exchange *x) {
    for (;;) {
        cpa_refusal refusal;
        if (!cpa_answer_collect(x->answer, &refusal)) return cpa_reply_refusal(x, &refusal, NULL);
        if (cpa_answer_is_whole(x->answer)) return cpa_reply_json(x, MHD_HTTP_OK, cpa_answer_json(x->answer));
        try_silent_client(x);
        switch (cpa_in_flight_suspend(x->answer->group)) {
            case CPA_SUSPENDED: return MHD_YES;
            case CPA_SUSPEND_NEWS: break;
            case CPA_SUSPEND_GONE: return MHD_NO;
        }
    }
}

enum MHD_Result cpa_serve_generation(cpa_http_exchange *x) {
    if (!x->answer) {
        const int is_bound = x->generation && (!x->generation->binding || x->generation->constraint);
        if (!is_bound || !cpa_answer_open(x, x->generation, &x->answer, &x->refusal)) {
            return cpa_reply_refusal(x, &x->refusal, NULL);
        }
        if (x->answer->generation.stream) return cpa_event_stream_reply(x);
    }
    return reply_whole(x);
}
