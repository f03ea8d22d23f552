#include "server/logprobs_json.h"

#include <inttypes.h>
#include <stdio.h>

#include "server/token_name.h"

/* Adds a value, which it takes, to an object; 0 without memory. */
static int put(json_t *object, const char *key, json_t *value) {
    return json_object_set_new(object, key, value) == 0;
}

/* The value if everything in it was made. */
static json_t *whole(json_t *value, int is_made) {
    if (value && is_made) return value;
    json_decref(value);
    return NULL;
}

/* JSON has no infinity; this stands for one, as OpenAI's does. */
static json_t *log_probability(float value) {
    const double least = -9999;
    return json_real(value >= least ? (double)value : least);
}

/* ---- Completions ---- */

/* Adds a token, unless there is another one of the same text, which is more probable. */
static int put_top(const cpa_server *server, json_t *top, uint32_t id, float logprob) {
    json_t *name = cpa_token_name(server, id);
    const char *text = json_string_value(name);
    const size_t bytes = json_string_length(name);
    int is_made = text != NULL;
    if (text && !json_object_getn(top, text, bytes)) {
        is_made = json_object_setn_new(top, text, bytes, log_probability(logprob)) == 0;
    }
    json_decref(name);
    return is_made;
}

/* {token: logprob} of the first n of the most probable ones, and of the token itself. */
static json_t *top_object(const cpa_server *server, const cpa_token_logprob *tops, int32_t n, uint32_t id,
                          float logprob) {
    json_t *top = json_object();
    int is_made = top != NULL;
    for (int32_t i = 0; is_made && i < n; i++) {
        if (tops[i].token < server->engine.vocabulary) is_made = put_top(server, top, tops[i].token, tops[i].logprob);
    }
    return whole(top, is_made && put_top(server, top, id, logprob));
}

/* An entry a token in each. */
typedef struct token_lists {
    json_t *tokens, *values, *tops, *offsets;
} token_lists;

/* Adds a token; takes the value and the object of the most probable ones. */
static int add_token(const cpa_server *server, token_lists *to, uint32_t id, int64_t offset, json_t *value,
                     json_t *top) {
    return !json_array_append_new(to->tokens, cpa_token_name(server, id)) & !json_array_append_new(to->tops, top) &
           !json_array_append_new(to->values, value) & !json_array_append_new(to->offsets, json_integer(offset));
}

/* Nothing is said of the first token. */
static int add_prompt(const cpa_answer *answer, int64_t i, const cpa_prompt_text *text, token_lists *to) {
    const cpa_server *server = answer->server;
    const cpa_token_list *prompt = cpa_answer_prompt(answer, i);
    int64_t offset = 0;
    size_t at = 0;
    int is_made = 1;
    for (int64_t k = 0; is_made && k < prompt->count; k++) {
        const uint32_t id = prompt->ids[k];
        cpa_token_ranks ranks;
        if (cpa_answer_prompt_ranks(answer, i, k, &ranks)) {
            const int32_t top = answer->generation.sampling.top_logprobs;
            is_made = add_token(server, to, id, offset, log_probability(ranks.logprob),
                                top_object(server, ranks.top, top, id, ranks.logprob));
        } else {
            is_made = add_token(server, to, id, offset, json_null(), json_null());
        }
        offset += cpa_prompt_text_pass(server, text, id, &at);
    }
    return is_made;
}

static int add_output(const cpa_answer *answer, int64_t i, token_lists *to) {
    const cpa_server *server = answer->server;
    const cpa_generation *g = &answer->generation;
    const cpa_choice *choice = &answer->choices[i];
    int64_t offset = choice->forgotten_characters + (g->echoes ? g->prompt_texts[i / g->n].characters : 0);
    int is_made = 1;
    for (int64_t k = 0; is_made && k < choice->n_tokens; k++) {
        const cpa_output_token token = choice->tokens[k];
        const cpa_token_logprob *tops = choice->ranks ? choice->ranks[k].top : NULL;
        is_made = add_token(server, to, token.id, offset, log_probability(token.logprob),
                            top_object(server, tops, g->sampling.top_logprobs, token.id, token.logprob));
        offset += cpa_token_name_characters(server, token.id);
    }
    return is_made;
}

/* {"tokens": [...], "token_logprobs": [...], "top_logprobs": [{token: logprob}], "text_offset": [...]} */
static json_t *completion_logprobs(const cpa_answer *answer, int64_t i) {
    token_lists lists = {json_array(), json_array(), json_array(), json_array()};
    const cpa_prompt_text *echo = cpa_answer_echo(answer, i);
    json_t *object = json_object();
    int is_made = (!echo || add_prompt(answer, i, echo, &lists)) && add_output(answer, i, &lists);
    is_made &= put(object, "text_offset", lists.offsets) & put(object, "token_logprobs", lists.values) &
               put(object, "tokens", lists.tokens) & put(object, "top_logprobs", lists.tops);
    return whole(object, is_made);
}

/* ---- Chats ---- */

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

json_t *cpa_logprobs_json(const cpa_answer *answer, int64_t i) {
    const cpa_choice *choice = &answer->choices[i];
    const int is_empty = choice->n_tokens == 0 && !cpa_answer_echo(answer, i);
    if (!answer->generation.sampling.logprobs || is_empty) return json_null();
    return answer->generation.is_chat ? chat_logprobs(choice) : completion_logprobs(answer, i);
}

/* ---- Prompts ---- */

static int put_ranked(const cpa_server *server, json_t *to, uint32_t id, float logprob, int32_t rank) {
    char key[16];
    snprintf(key, sizeof key, "%" PRIu32, id);
    if (json_object_get(to, key)) return 1;
    json_t *object = json_object();
    const int is_made = put(object, "logprob", log_probability(logprob)) & put(object, "rank", json_integer(rank)) &
                        put(object, "decoded_token", cpa_token_name(server, id));
    return put(to, key, whole(object, is_made));
}

/* The token itself, then the most probable ones. */
static json_t *ranked_tokens(const cpa_server *server, uint32_t id, const cpa_token_ranks *ranks, int32_t n) {
    json_t *object = json_object();
    int is_made = object && put_ranked(server, object, id, ranks->logprob, ranks->rank);
    for (int32_t i = 0; is_made && i < n && ranks->top[i].token < server->engine.vocabulary; i++) {
        is_made = put_ranked(server, object, ranks->top[i].token, ranks->top[i].logprob, i + 1);
    }
    return whole(object, is_made);
}

json_t *cpa_prompt_logprobs_json(const cpa_answer *answer, int64_t i) {
    const cpa_token_list *prompt = cpa_answer_prompt(answer, i);
    json_t *array = json_array();
    int is_made = array != NULL;
    for (int64_t k = 0; is_made && k < prompt->count; k++) {
        cpa_token_ranks ranks;
        json_t *entry = cpa_answer_prompt_ranks(answer, i, k, &ranks)
                            ? ranked_tokens(answer->server, prompt->ids[k], &ranks, answer->generation.top_of_prompt)
                            : json_null();
        is_made = json_array_append_new(array, entry) == 0;
    }
    return whole(array, is_made);
}
