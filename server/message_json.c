#include "server/message_json.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/hash.h"

static int put(json_t *object, const char *key, json_t *value) {
    return json_object_set_new(object, key, value) == 0;
}

static json_t *text_of(const cpa_bytes *text) {
    return json_stringn(text->data ? text->data : "", (size_t)text->count);
}

/* An id of a call: that of the model, or one of its own. Mistral's templates take nine letters and digits alone. */
static json_t *call_id(const cpa_answer *answer, int64_t i, int64_t n, const cpa_reply_call *call) {
    enum { SHORT_ID = 9 };
    static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyz";
    if (call->id) return json_string(call->id);
    const cpa_tool_form form = answer->generation.reply.tools;
    const uint64_t flight = answer->group->flights[i].id;
    uint64_t number = cpa_mix64(answer->server->instance + flight * CPA_GOLDEN + cpa_mix64((uint64_t)n + 1));
    char id[40];
    if (form != CPA_TOOLS_MISTRAL && form != CPA_TOOLS_MISTRAL_ARGS) {
        snprintf(id, sizeof id, "call_%016" PRIx64, number);
        return json_string(id);
    }
    for (int k = 0; k < SHORT_ID; k++, number /= sizeof digits - 1) id[k] = digits[number % (sizeof digits - 1)];
    return json_stringn(id, SHORT_ID);
}

/* {"index", "id", "type", "function": {"name", "arguments"}}: in a stream the index alone, and what the call goes on by,
 * once its name was told. */
static json_t *call_json(const cpa_answer *answer, int64_t i, int64_t n, const cpa_reply_call *call) {
    const cpa_choice *choice = &answer->choices[i];
    json_t *object = json_object(), *function = json_object();
    int is_made = 1;
    if (answer->generation.stream) is_made &= put(object, "index", json_integer(n));
    if (n >= choice->told_calls) {
        is_made &= put(object, "id", call_id(answer, i, n, call)) & put(object, "type", json_string("function")) &
                   put(function, "name", json_string(call->name));
    }
    is_made &= put(function, "arguments", text_of(&call->arguments));
    is_made &= put(object, "function", function);
    if (object && is_made) return object;
    json_decref(object);
    return NULL;
}

/* All calls, or those of which there is something new. */
static int put_calls(const cpa_answer *answer, int64_t i, json_t *message) {
    const cpa_choice *choice = &answer->choices[i];
    int64_t n_calls;
    const cpa_reply_call *calls = cpa_reply_calls(choice->reply, &n_calls);
    json_t *array = json_array();
    int is_made = array != NULL;
    for (int64_t n = 0; is_made && n < n_calls; n++) {
        if (n < choice->told_calls && calls[n].arguments.count == 0) continue;
        is_made = json_array_append_new(array, call_json(answer, i, n, &calls[n])) == 0;
    }
    if (is_made && json_array_size(array) > 0) return put(message, "tool_calls", array);
    json_decref(array);
    return is_made;
}

/* In a stream what is there; else content is null if there are calls alone. */
static int put_parts(const cpa_answer *answer, int64_t i, json_t *message) {
    const cpa_choice *choice = &answer->choices[i];
    const cpa_bytes *thoughts = cpa_reply_thoughts(choice->reply), *content = cpa_reply_content(choice->reply);
    int64_t n_calls;
    int is_made = 1;
    cpa_reply_calls(choice->reply, &n_calls);
    if (thoughts->count > 0) is_made &= put(message, "reasoning_content", text_of(thoughts));
    if (!answer->generation.stream) {
        is_made &= put(message, "content", content->count == 0 && n_calls > 0 ? json_null() : text_of(content));
    } else if (content->count > 0) {
        is_made &= put(message, "content", text_of(content));
    }
    return is_made & put_calls(answer, i, message);
}

json_t *cpa_message_json(const cpa_answer *answer, int64_t i) {
    const cpa_choice *choice = &answer->choices[i];
    json_t *message = json_object();
    int is_made = 1;
    if (!answer->generation.stream || !choice->is_begun) is_made = put(message, "role", json_string("assistant"));
    if (choice->reply) {
        is_made &= put_parts(answer, i, message);
    } else {
        is_made &= put(message, "content",
                       json_stringn(choice->text.text.data ? choice->text.text.data : "", (size_t)choice->text.ready));
    }
    if (message && is_made) return message;
    json_decref(message);
    return NULL;
}
