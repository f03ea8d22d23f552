#include "server/completions.h"

#include "server/answer.h"
#include "server/answer_json.h"
#include "server/chat_request.h"
#include "server/completion_request.h"
#include "server/event_stream.h"

typedef int (*reader)(const cpa_server *server, const json_t *body, cpa_generation *out, cpa_refusal *refusal);

/* From the body to requests in the engine. */
static int open_answer(cpa_exchange *x, reader read, cpa_refusal *refusal) {
    json_t *body = NULL;
    cpa_generation generation = {.n = 0};
    if (!cpa_exchange_is_ready(x, refusal) || !cpa_fields_parse(x->body, x->bytes, &body, refusal)) return 0;
    cpa_exchange_drop_body(x); /* the answer may take long */
    const int is_read = read(x->server, body, &generation, refusal);
    json_decref(body);
    if (is_read) return cpa_answer_open(x, &generation, &x->answer, refusal);
    cpa_generation_release(&generation);
    return 0;
}

/* Waits for the whole answer, as often as the connection is resumed. */
static enum MHD_Result reply_whole(cpa_exchange *x) {
    for (;;) {
        cpa_refusal refusal;
        if (!cpa_answer_collect(x->answer, &refusal)) return cpa_reply_refusal(x, &refusal, NULL);
        if (cpa_answer_is_whole(x->answer)) return cpa_reply_json(x, MHD_HTTP_OK, cpa_answer_json(x->answer));
        switch (cpa_in_flight_rest(x->answer->group)) {
            case CPA_REST_SUSPENDED: return MHD_YES;
            case CPA_REST_NEWS: break;
            case CPA_REST_GONE: return MHD_NO;
        }
    }
}

static enum MHD_Result serve(cpa_exchange *x, reader read) {
    cpa_refusal refusal;
    if (!x->answer) {
        if (!open_answer(x, read, &refusal)) return cpa_reply_refusal(x, &refusal, NULL);
        if (x->answer->generation.stream) return cpa_event_stream_reply(x);
    }
    return reply_whole(x);
}

enum MHD_Result cpa_serve_completions(cpa_exchange *x) {
    return serve(x, cpa_completion_read);
}

enum MHD_Result cpa_serve_chat(cpa_exchange *x) {
    return serve(x, cpa_chat_read);
}
