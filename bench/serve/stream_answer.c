#include "bench/serve/stream_answer.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "program/field.h"

#define MOST_PIECES ((int64_t)1 << 24)

static bool fail(cpa_stream_answer *answer, const char *what, const char *detail, size_t bytes) {
    char shown[96];
    cpa_text_quote(detail, bytes, shown, sizeof shown);
    snprintf(answer->error, sizeof answer->error, "%s%s", what, shown);
    return false;
}

/* {"message": ...}, or {"error": ...} of a text or such an object; NULL if it is none. */
static const char *message_of(const json_t *object) {
    const json_t *error = json_object_get(object, "error");
    const json_t *holder = json_is_object(error) ? error : object;
    if (json_is_string(error)) return json_string_value(error);
    return json_string_value(json_object_get(holder, "message"));
}

void cpa_answer_refusal(const char *body, size_t bytes, char *out, size_t out_bytes) {
    json_t *object = json_loadb(body, bytes, JSON_ALLOW_NUL, NULL);
    const char *message = message_of(object);
    if (message) {
        cpa_text_quote(message, strlen(message), out, out_bytes);
    } else {
        cpa_text_quote(body, bytes, out, out_bytes);
    }
    json_decref(object);
}

static bool is_text(const json_t *value) {
    return json_is_string(value) && json_string_length(value) > 0;
}

/* Whether a choice brings output. Chat begins with the role alone. A completion's text may be empty while a character
 * is not whole; with the reason of its end it brings nothing, unless the answer is a token without a text. */
static bool has_output(const cpa_stream_answer *answer, const json_t *choice) {
    const json_t *delta = json_object_get(choice, "delta");
    if (answer->n_times == 0 && json_is_string(json_object_get(choice, "finish_reason"))) return true;
    if (json_array_size(json_object_get(choice, "token_ids")) > 0) return true;
    if (!answer->is_chat)
        return is_text(json_object_get(choice, "text")) || !json_is_string(json_object_get(choice, "finish_reason"));
    return is_text(json_object_get(delta, "content")) || is_text(json_object_get(delta, "reasoning_content")) ||
           json_array_size(json_object_get(delta, "tool_calls")) > 0;
}

static bool take_choice(cpa_stream_answer *answer, const json_t *choice) {
    const char *reason = json_string_value(json_object_get(choice, "finish_reason"));
    if (!json_is_object(choice)) return fail(answer, "an event with a choice that is no object", "", 0);
    if (has_output(answer, choice)) {
        if (answer->n_times == MOST_PIECES) return fail(answer, "an answer that does not end", "", 0);
        if (!cpa_array_reserve(&answer->token_s, &answer->times_capacity, answer->n_times + 1, sizeof *answer->token_s))
            return fail(answer, "no memory for its times", "", 0);
        answer->token_s[answer->n_times++] = answer->now;
    }
    answer->ids += (int64_t)json_array_size(json_object_get(choice, "token_ids"));
    if (!reason) return true;
    answer->has_finished = true;
    if (strcmp(reason, "abort") == 0 || strcmp(reason, "error") == 0)
        return fail(answer, "the server ended it: ", reason, strlen(reason));
    return true;
}

static bool take_object(cpa_stream_answer *answer, const json_t *object) {
    const json_t *choices = json_object_get(object, "choices"), *usage = json_object_get(object, "usage");
    const json_t *error = json_object_get(object, "error");
    if (error && !json_is_null(error)) {
        const char *message = message_of(object);
        if (!message) message = "without a message";
        return fail(answer, "an error event: ", message, strlen(message));
    }
    if (!json_is_array(choices)) return fail(answer, "an event without choices", "", 0);
    if (json_array_size(choices) > 0 && !take_choice(answer, json_array_get(choices, 0))) return false;
    if (json_integer_value(json_object_get(usage, "prompt_tokens")) > 0)
        answer->prompt_tokens = json_integer_value(json_object_get(usage, "prompt_tokens"));
    if (json_integer_value(json_object_get(usage, "completion_tokens")) > 0)
        answer->completion_tokens = json_integer_value(json_object_get(usage, "completion_tokens"));
    return true;
}

/* A cpa_event_fn. */
static bool take_event(void *ctx, const char *data, size_t bytes) {
    cpa_stream_answer *answer = ctx;
    if (bytes == 6 && memcmp(data, "[DONE]", 6) == 0) {
        answer->is_done = true;
        return false;
    }
    json_t *object = json_loadb(data, bytes, JSON_ALLOW_NUL, NULL);
    const bool is_good =
        json_is_object(object) ? take_object(answer, object) : fail(answer, "an event that is no JSON: ", data, bytes);
    json_decref(object);
    return is_good;
}

bool cpa_stream_answer_feed(cpa_stream_answer *answer, const char *bytes, size_t count, double now) {
    if (answer->error[0]) return false;
    if (answer->is_done) return true; /* nothing counts behind it */
    answer->now = now;
    const char *wrong = cpa_event_reader_feed(&answer->events, bytes, count, take_event, answer);
    if (wrong) fail(answer, wrong, "", 0);
    return !answer->error[0];
}

void cpa_stream_answer_end(cpa_stream_answer *answer) {
    if (answer->error[0]) return;
    if (!answer->is_done && !answer->has_finished) { /* not every server says [DONE] */
        fail(answer, answer->n_times > 0 ? "the stream ended before [DONE]" : "an answer that ended before any output",
             "", 0);
    } else if (answer->n_times == 0) {
        fail(answer, "an answer without any output", "", 0);
    }
}

int64_t cpa_stream_answer_tokens(const cpa_stream_answer *answer) {
    if (answer->completion_tokens > 0) return answer->completion_tokens;
    return answer->ids > answer->n_times ? answer->ids : answer->n_times;
}

void cpa_stream_answer_release(cpa_stream_answer *answer) {
    cpa_event_reader_release(&answer->events);
    free(answer->token_s);
    *answer = (cpa_stream_answer){.is_chat = false};
}
