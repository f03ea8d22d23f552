#include "bench/serve/body.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One token each in most vocabularies. */
static const char *const words[] = {
    "time",  "year",  "people", "way",  "day",  "man",   "thing", "woman",   "life",   "child",  "world",
    "hand",  "part",  "place",  "week", "case", "work",  "point", "company", "number", "group",  "problem",
    "fact",  "be",    "have",   "do",   "say",  "get",   "make",  "go",      "know",   "take",   "see",
    "come",  "think", "look",   "want", "give", "use",   "find",  "tell",    "ask",    "seem",   "feel",
    "try",   "leave", "call",   "good", "new",  "first", "last",  "long",    "great",  "little", "own",
    "other", "old",   "right",  "big",  "high", "small", "large", "next",    "early"};
enum { N_WORDS = sizeof words / sizeof words[0], LONGEST_ITEM = 12 };

/* Everything but the prompt, as an object without its end. */
static char *members(const cpa_target *target, const cpa_request *request) {
    const cpa_serve_options *options = target->options;
    const int is_chat = options->endpoint == CPA_SERVE_CHAT;
    json_t *object = json_pack("{ss sI sf sb s{sb}}", "model", target->model,
                               is_chat ? "max_completion_tokens" : "max_tokens", (json_int_t)request->output_tokens,
                               "temperature", options->temperature, "stream", 1, "stream_options", "include_usage", 1);
    json_t *extra = options->extra_body[0] ? json_loads(options->extra_body, 0, NULL) : NULL;
    int bad = 0;
    if (options->ignore_eos) bad |= json_object_set_new(object, "ignore_eos", json_true());
    if (request->priority != 0) bad |= json_object_set_new(object, "priority", json_integer(request->priority));
    if (request->salt && request->salt[0]) bad |= json_object_set_new(object, "cache_salt", json_string(request->salt));
    if (extra) bad |= json_object_update(object, extra);
    char *text = bad ? NULL : json_dumps(object, JSON_COMPACT);
    json_decref(extra);
    json_decref(object);
    if (text) text[strlen(text) - 1] = 0; /* its closing brace */
    return text;
}

/* Writes the prompt's tokens, each followed by the separator but the last; returns the end. */
static char *write_prompt(const cpa_target *target, cpa_vocabulary_tokens *tokens, const cpa_request *request,
                          char *out) {
    const int is_text = target->options->prompts == CPA_SERVE_TEXT;
    for (int64_t i = 0; i < request->prompt_tokens; i++) {
        const uint32_t token = cpa_vocabulary_token(tokens, request->id, i);
        if (i > 0) *out++ = is_text ? ' ' : ',';
        out += is_text ? sprintf(out, "%s", words[token % N_WORDS]) : sprintf(out, "%" PRIu32, token);
    }
    return out;
}

char *cpa_serve_body(const cpa_target *target, cpa_vocabulary_tokens *tokens, const cpa_request *request,
                     size_t *bytes) {
    static const char *const brackets[2][2] = {{",\"prompt\":[", "]}"}, {",\"prompt\":\"", "\"}"}};
    static const char *const chat[2] = {",\"messages\":[{\"role\":\"user\",\"content\":\"", "\"}]}"};
    const char *const *around =
        target->options->endpoint == CPA_SERVE_CHAT ? chat : brackets[target->options->prompts == CPA_SERVE_TEXT];
    char *head = members(target, request), *body = NULL;
    if (head)
        body = malloc(strlen(head) + strlen(around[0]) + (size_t)request->prompt_tokens * LONGEST_ITEM +
                      strlen(around[1]) + 1);
    if (body) {
        char *end = body + sprintf(body, "%s%s", head, around[0]);
        end = write_prompt(target, tokens, request, end);
        end += sprintf(end, "%s", around[1]);
        *bytes = (size_t)(end - body);
    }
    free(head);
    return body;
}
