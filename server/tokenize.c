#include "server/tokenize.h"

#include <stdlib.h>

#include "server/chat_request.h"
#include "server/fields.h"
#include "server/generation_fields.h"
#include "server/token_name.h"

/* What a body is answered with; NULL with the refusal filled. */
typedef json_t *(*converter)(const cpa_server *server, const cpa_fields *fields, cpa_token_list *ids);

/* {"count", "max_model_len", "tokens", "token_strs"} */
static json_t *tokens_json(const cpa_server *server, const cpa_token_list *ids, int with_texts) {
    json_t *tokens = json_array(), *texts = with_texts ? json_array() : json_null();
    int is_made = tokens && texts;
    for (int64_t i = 0; is_made && i < ids->count; i++) {
        is_made = json_array_append_new(tokens, json_integer(ids->ids[i])) == 0 &&
                  (!with_texts || json_array_append_new(texts, cpa_token_name(server, ids->ids[i])) == 0);
    }
    json_t *object = json_pack("{s:I,s:I,s:o,s:o}", "count", (json_int_t)ids->count, "max_model_len",
                               (json_int_t)server->engine.max_model_len, "tokens", tokens, "token_strs", texts);
    if (is_made) return object;
    json_decref(object);
    return NULL;
}

static int read_text(const cpa_server *server, const cpa_fields *fields, cpa_token_list *ids) {
    const json_t *prompt = cpa_field(fields, "prompt");
    int add_special = 1, thinks;
    if (!prompt && cpa_field(fields, "messages")) return cpa_messages_read(server, fields, ids, &thinks);
    if (!json_is_string(prompt)) {
        return cpa_field_refuse(fields, "prompt", prompt ? prompt : json_null(), "a string, or messages");
    }
    return cpa_field_flag(fields, "add_special_tokens", &add_special) &&
           cpa_encode_field(server, fields, "prompt", prompt, add_special, ids);
}

static json_t *tokenize(const cpa_server *server, const cpa_fields *fields, cpa_token_list *ids) {
    int with_texts = 0;
    if (!read_text(server, fields, ids) || !cpa_field_flag(fields, "return_token_strs", &with_texts)) return NULL;
    json_t *object = tokens_json(server, ids, with_texts);
    if (!object) cpa_refuse_memory(fields);
    return object;
}

static json_t *detokenize(const cpa_server *server, const cpa_fields *fields, cpa_token_list *ids) {
    const json_t *tokens = cpa_field(fields, "tokens");
    if (!cpa_ids_field(server, fields, "tokens", tokens ? tokens : json_null(), ids)) return NULL;
    if (!server->options.tokenizer) {
        cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", "tokens",
                   "tokens: this model has no tokenizer");
        return NULL;
    }
    cpa_error err;
    char *text;
    size_t bytes;
    if (cpa_tokenizer_decode(server->options.tokenizer, ids->ids, ids->count, 0, &text, &bytes, &err) != CPA_OK) {
        cpa_refuse_failure(fields->refusal, "tokens", &err);
        return NULL;
    }
    json_t *object = json_object();
    const int is_made = json_object_set_new(object, "prompt", json_stringn(text, bytes)) == 0;
    free(text);
    if (is_made) return object;
    json_decref(object);
    cpa_refuse_memory(fields);
    return NULL;
}

static void prepare(cpa_http_exchange *x, converter convert) {
    json_t *body = NULL, *reply = NULL;
    cpa_token_list ids = {0};
    if (cpa_http_exchange_is_ready(x, &x->refusal) && cpa_fields_parse(x->body, x->bytes, &body, &x->refusal)) {
        cpa_field_names names = {.count = 0};
        const cpa_fields fields = {.object = body, .prefix = "", .refusal = &x->refusal, .looked_for = &names};
        if (cpa_model_field(x->server, &fields)) reply = convert(x->server, &fields, &ids);
        if (reply && !cpa_fields_check_names(&fields)) {
            json_decref(reply);
            reply = NULL;
        }
        if (reply && !(x->reply = json_dumps(reply, JSON_COMPACT))) cpa_refuse_memory(&fields);
    }
    json_decref(reply);
    json_decref(body);
    free(ids.ids);
}

void cpa_prepare_tokens(cpa_http_exchange *x) {
    prepare(x, tokenize);
}

void cpa_prepare_text(cpa_http_exchange *x) {
    prepare(x, detokenize);
}

enum MHD_Result cpa_serve_conversion(cpa_http_exchange *x) {
    if (!x->reply) return cpa_reply_refusal(x, &x->refusal, NULL);
    char *reply = x->reply;
    x->reply = NULL;
    return cpa_reply_text(x, "application/json", reply);
}
