#include "server/answer_json.h"

#include <string.h>

#include "server/logprobs_json.h"
#include "server/message_json.h"
#include "src/text/bytes.h"

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

static json_t *stop_reason(const cpa_choice *choice) {
    if (choice->text.stop) return json_string(choice->text.stop->text);
    return choice->stop_id >= 0 && choice->end == CPA_CHOICE_STOP ? json_integer(choice->stop_id) : json_null();
}

static json_t *finish_reason(const cpa_choice *choice) {
    const char *reason = cpa_choice_reason(choice);
    return reason ? json_string(reason) : json_null();
}

/* Ids are what there is where there is no text. */
static int gives_ids(const cpa_choice *choice) {
    return choice->generation->returns_ids || !choice->text.stream;
}

/* What can be said, behind the prompt where that is wanted and was not said. */
static json_t *completion_text(const cpa_answer *answer, int64_t i) {
    const cpa_choice *choice = &answer->choices[i];
    const cpa_prompt_text *prompt = cpa_answer_echo(answer, i);
    cpa_bytes text = {.count = 0};
    if (!prompt) return json_stringn(choice->text.text.data ? choice->text.text.data : "", (size_t)choice->text.ready);
    const int is_made = cpa_bytes_add(&text, prompt->text, prompt->bytes) &&
                        cpa_bytes_add(&text, choice->text.text.data, (size_t)choice->text.ready) &&
                        cpa_bytes_add(&text, "", 1);
    json_t *value = is_made ? json_stringn(text.data, (size_t)text.count - 1) : NULL;
    cpa_bytes_release(&text);
    return value;
}

/* What says something: "text", "message" or "delta". */
static int put_text(json_t *object, const cpa_answer *answer, int64_t i) {
    const cpa_generation *g = &answer->generation;
    if (g->is_chat) return put(object, g->stream ? "delta" : "message", cpa_message_json(answer, i));
    return put(object, "text", completion_text(answer, i));
}

static json_t *choice_json(const cpa_answer *answer, int64_t i) {
    const cpa_choice *choice = &answer->choices[i];
    const cpa_generation *g = &answer->generation;
    json_t *object = json_object();
    int is_made = put(object, "index", json_integer(i)) & put_text(object, answer, i) &
                  put(object, "logprobs", cpa_logprobs_json(answer, i)) &
                  put(object, "finish_reason", finish_reason(choice)) & put(object, "stop_reason", stop_reason(choice));
    if (g->returns_ids && !g->is_chat && !choice->is_begun) {
        is_made &= put(object, "prompt_token_ids", prompt_ids(cpa_answer_prompt(answer, i)));
    }
    if (gives_ids(choice)) is_made &= put(object, "token_ids", output_ids(choice));
    if (g->tells_prompt && !g->is_chat) is_made &= put(object, "prompt_logprobs", cpa_prompt_logprobs_json(answer, i));
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
    if (g->is_chat && g->tells_prompt) {
        is_made &= put(object, "prompt_logprobs", cpa_prompt_logprobs_json(answer, 0));
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
