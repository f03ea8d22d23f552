#include "server/answer_json.h"

#include <string.h>

#include "server/message_json.h"
#include "server/token_name.h"

/* Adds a value, which it takes, to an object; 0 without memory. */
static int put(json_t *object, const char *key, json_t *value) {
    return json_object_set_new(object, key, value) == 0;
}

/* The object if everything in it was made. */
static json_t *whole(json_t *object, int is_made) {
    if (object && is_made) return object;
    json_decref(object);
    return NULL;
}

/* JSON has no infinity; this stands for one, as OpenAI's does. */
static json_t *log_probability(float value) {
    const double least = -9999;
    return json_real(value >= least ? (double)value : least);
}

static json_t *prompt_ids(const cpa_token_list *prompt) {
    json_t *array = json_array();
    int is_made = array != NULL;
    for (int64_t i = 0; is_made && i < prompt->count; i++) {
        is_made = json_array_append_new(array, json_integer(prompt->ids[i])) == 0;
    }
    return whole(array, is_made);
}

static json_t *output_ids(const cpa_choice *choice) {
    json_t *array = json_array();
    int is_made = array != NULL;
    for (int64_t i = 0; is_made && i < choice->n_tokens; i++) {
        is_made = json_array_append_new(array, json_integer(choice->tokens[i].id)) == 0;
    }
    return whole(array, is_made);
}

/* Adds a token, unless there is another one of the same text, which is more probable. */
static int put_top(const cpa_choice *choice, json_t *top, uint32_t id, float logprob) {
    json_t *name = cpa_token_name(choice->server, id);
    const char *text = json_string_value(name);
    const size_t bytes = json_string_length(name);
    int is_made = text != NULL;
    if (text && !json_object_getn(top, text, bytes)) {
        is_made = json_object_setn_new(top, text, bytes, log_probability(logprob)) == 0;
    }
    json_decref(name);
    return is_made;
}

/* {token: logprob} of the most probable ones, and of the chosen one. */
static json_t *completion_top(const cpa_choice *choice, int64_t i) {
    json_t *top = json_object();
    int is_made = top != NULL;
    for (int32_t n = 0; is_made && n < choice->generation->sampling.top_logprobs; n++) {
        const cpa_token_logprob *next = &choice->ranks[i].top[n];
        if (next->token < choice->server->engine.vocabulary) is_made = put_top(choice, top, next->token, next->logprob);
    }
    return whole(top, is_made && put_top(choice, top, choice->tokens[i].id, choice->tokens[i].logprob));
}

/* {"tokens": [...], "token_logprobs": [...], "top_logprobs": [{token: logprob}], "text_offset": [...]} */
static json_t *completion_logprobs(const cpa_choice *choice) {
    json_t *tokens = json_array(), *values = json_array(), *tops = json_array(), *offsets = json_array();
    int64_t offset = choice->forgotten_characters;
    int is_made = 1;
    for (int64_t i = 0; is_made && i < choice->n_tokens; i++) {
        const uint32_t id = choice->tokens[i].id;
        is_made = !json_array_append_new(tokens, cpa_token_name(choice->server, id)) &
                  !json_array_append_new(tops, completion_top(choice, i)) &
                  !json_array_append_new(values, log_probability(choice->tokens[i].logprob)) &
                  !json_array_append_new(offsets, json_integer(offset));
        offset += cpa_token_name_characters(choice->server, id);
    }
    json_t *object = json_object();
    is_made &= put(object, "text_offset", offsets) & put(object, "token_logprobs", values) &
               put(object, "tokens", tokens) & put(object, "top_logprobs", tops);
    return whole(object, is_made);
}

/* {"token", "logprob", "bytes"} */
static json_t *token_logprob(const cpa_choice *choice, uint32_t id, float logprob) {
    json_t *object = json_object();
    const int is_made = put(object, "token", cpa_token_name(choice->server, id)) &
                        put(object, "logprob", log_probability(logprob)) &
                        put(object, "bytes", cpa_token_bytes(choice->server, id));
    return whole(object, is_made);
}

/* The most probable tokens, like that. */
static json_t *chat_top(const cpa_choice *choice, int64_t i) {
    json_t *tops = json_array();
    int is_made = tops != NULL;
    for (int32_t n = 0; is_made && n < choice->generation->sampling.top_logprobs; n++) {
        const cpa_token_logprob *next = &choice->ranks[i].top[n];
        if (next->token >= choice->server->engine.vocabulary) break; /* it has no more */
        is_made = json_array_append_new(tops, token_logprob(choice, next->token, next->logprob)) == 0;
    }
    return whole(tops, is_made);
}

/* {"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}]} */
static json_t *chat_logprobs(const cpa_choice *choice) {
    json_t *content = json_array();
    int is_made = content != NULL;
    for (int64_t i = 0; is_made && i < choice->n_tokens; i++) {
        json_t *entry = token_logprob(choice, choice->tokens[i].id, choice->tokens[i].logprob);
        is_made = put(entry, "top_logprobs", chat_top(choice, i)) & !json_array_append_new(content, entry);
    }
    json_t *object = json_object();
    is_made &= put(object, "content", content);
    return whole(object, is_made);
}

static json_t *logprobs(const cpa_choice *choice) {
    if (!choice->generation->sampling.logprobs || choice->n_tokens == 0) return json_null();
    return choice->generation->is_chat ? chat_logprobs(choice) : completion_logprobs(choice);
}

static json_t *stop_reason(const cpa_choice *choice) {
    if (choice->stop_text) return json_string(choice->stop_text);
    return choice->stop_id >= 0 && choice->end == CPA_CHOICE_STOP ? json_integer(choice->stop_id) : json_null();
}

static json_t *finish_reason(const cpa_choice *choice) {
    const char *reason = cpa_choice_reason(choice);
    return reason ? json_string(reason) : json_null();
}

/* Ids are what there is where there is no text. */
static int gives_ids(const cpa_choice *choice) {
    return choice->generation->returns_ids || !choice->stream;
}

/* What says something: "text", "message" or "delta". */
static int put_text(json_t *object, const cpa_answer *answer, int64_t i) {
    const cpa_choice *choice = &answer->choices[i];
    const cpa_generation *g = &answer->generation;
    if (g->is_chat) return put(object, g->stream ? "delta" : "message", cpa_message_json(answer, i));
    return put(object, "text", json_stringn(choice->text ? choice->text : "", (size_t)choice->ready));
}

static json_t *choice_json(const cpa_answer *answer, int64_t i) {
    const cpa_choice *choice = &answer->choices[i];
    const cpa_generation *g = &answer->generation;
    json_t *object = json_object();
    int is_made = put(object, "index", json_integer(i)) & put_text(object, answer, i) &
                  put(object, "logprobs", logprobs(choice)) & put(object, "finish_reason", finish_reason(choice)) &
                  put(object, "stop_reason", stop_reason(choice));
    if (g->returns_ids && !g->is_chat && !choice->is_begun) {
        is_made &= put(object, "prompt_token_ids", prompt_ids(cpa_answer_prompt(answer, i)));
    }
    if (gives_ids(choice)) is_made &= put(object, "token_ids", output_ids(choice));
    return whole(object, is_made);
}

static json_t *usage(int64_t prompt, int64_t output) {
    return json_pack("{s:I,s:I,s:I}", "prompt_tokens", (json_int_t)prompt, "completion_tokens", (json_int_t)output,
                     "total_tokens", (json_int_t)(prompt + output));
}

/* Of the whole answer: samples of one prompt have it once. */
static json_t *answer_usage(const cpa_answer *answer) {
    int64_t prompt = 0, output = 0;
    for (int64_t i = 0; i < answer->n; i++) {
        if (i % answer->generation.n == 0) prompt += cpa_answer_prompt(answer, i)->count;
        output += answer->choices[i].total_tokens;
    }
    return usage(prompt, output);
}

/* The object around the choices, which it takes. */
static json_t *envelope(const cpa_answer *answer, const char *object_name, json_t *choices) {
    json_t *object = json_object();
    const int is_made = put(object, "id", json_string(answer->id)) & put(object, "object", json_string(object_name)) &
                        put(object, "created", json_integer(answer->created)) &
                        put(object, "model", json_string(answer->server->options.model_name)) &
                        put(object, "choices", choices);
    return whole(object, is_made);
}

json_t *cpa_answer_json(const cpa_answer *answer) {
    const cpa_generation *g = &answer->generation;
    json_t *choices = json_array();
    int is_made = choices != NULL;
    for (int64_t i = 0; is_made && i < answer->n; i++) {
        is_made = json_array_append_new(choices, choice_json(answer, i)) == 0;
    }
    json_t *object = envelope(answer, g->is_chat ? "chat.completion" : "text_completion", choices);
    is_made &= put(object, "usage", answer_usage(answer));
    if (g->is_chat && g->returns_ids) {
        is_made &= put(object, "prompt_token_ids", prompt_ids(cpa_answer_prompt(answer, 0)));
    }
    return whole(object, is_made);
}

static const char *chunk_name(const cpa_answer *answer) {
    return answer->generation.is_chat ? "chat.completion.chunk" : "text_completion";
}

json_t *cpa_chunk_json(const cpa_answer *answer, int64_t i) {
    const cpa_generation *g = &answer->generation;
    const cpa_choice *choice = &answer->choices[i];
    json_t *object = envelope(answer, chunk_name(answer), json_pack("[o]", choice_json(answer, i)));
    int is_made = 1;
    if (g->usage_always) {
        is_made = put(object, "usage", usage(cpa_answer_prompt(answer, i)->count, choice->total_tokens));
    } else if (g->include_usage) {
        is_made = put(object, "usage", json_null());
    }
    if (g->is_chat && g->returns_ids && !choice->is_begun) {
        is_made &= put(object, "prompt_token_ids", prompt_ids(cpa_answer_prompt(answer, i)));
    }
    return whole(object, is_made);
}

json_t *cpa_usage_chunk_json(const cpa_answer *answer) {
    json_t *object = envelope(answer, chunk_name(answer), json_array());
    const int is_made = put(object, "usage", answer_usage(answer));
    return whole(object, is_made);
}
