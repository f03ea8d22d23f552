#include "src/reply/reply_calls.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

enum { MOST_NAME_BYTES = 256 };

void cpa_reply_clear_call(cpa_reply *r) {
    cpa_call_object_release(&r->object);
    cpa_bytes_release(&r->name);
    cpa_bytes_release(&r->id);
    r->scan = (cpa_json_scan){.depth = 0};
    r->has_call = r->is_array = r->is_fenced = 0;
}

static cpa_reply_step go(cpa_reply *r, cpa_reply_place place) {
    r->place = place;
    return CPA_REPLY_GO_ON;
}

/* It is a call, and is told from now on; its name and id are the reply's. */
static cpa_reply_call *begin_call(cpa_reply *r, char *name, char *id) {
    if (!cpa_array_reserve(&r->calls, &r->calls_capacity, r->n_calls + 1, sizeof *r->calls) || !name) {
        r->is_out_of_memory = 1;
        free(name);
        free(id);
        return NULL;
    }
    cpa_reply_call *call = &r->calls[r->n_calls++];
    *call = (cpa_reply_call){.name = name, .id = id};
    r->has_call = 1;
    r->space.count = 0; /* what stands between text and a call belongs to neither */
    return call;
}

static int is_known(const cpa_reply *r, const char *name) {
    for (size_t i = 0; i < json_array_size(r->options.known); i++) {
        const json_t *function = json_object_get(json_array_get(r->options.known, i), "function");
        const char *known = json_string_value(json_object_get(function, "name"));
        if (known && strcmp(known, name) == 0) return 1;
    }
    return 0;
}

/* The call is at its end: another may follow where `place` says, within the same marks. */
static cpa_reply_step end_call(cpa_reply *r, cpa_reply_place place) {
    const int is_array = r->is_array;
    const int64_t most = r->options.most_calls;
    cpa_reply_drop_read(r);
    cpa_reply_clear_call(r);
    r->is_array = is_array;
    return go(r, most > 0 && r->n_calls >= most ? CPA_REPLY_OVER : place);
}

/* Behind the marks of calls. */
static cpa_reply_step end_calls(cpa_reply *r) {
    cpa_reply_clear_call(r);
    return go(r, CPA_REPLY_TEXT);
}

static void take_arguments(cpa_reply *r, cpa_bytes *from) {
    cpa_reply_call *call = &r->calls[r->n_calls - 1];
    if (from->count > 0) r->is_out_of_memory |= !cpa_bytes_add(&call->arguments, from->data, (size_t)from->count);
    from->count = 0;
}

/* {"name": ..., "arguments": ...} */
static cpa_reply_step read_object(cpa_reply *r, int is_first_of_reply, cpa_reply_place then) {
    cpa_call_object *o = &r->object;
    cpa_json_step step = CPA_JSON_MORE;
    int is_told = o->name && o->has_arguments;
    while (step == CPA_JSON_MORE && r->at < r->held.count) {
        step = cpa_call_object_byte(o, r->held.data[r->at]);
        if (step != CPA_JSON_BROKEN) r->at++;
        if (is_told || !o->name || (!o->has_arguments && step != CPA_JSON_WHOLE) || step == CPA_JSON_BROKEN) continue;
        if (is_first_of_reply && !is_known(r, o->name)) return CPA_REPLY_NO_CALL;
        is_told = begin_call(r, strdup(o->name), NULL) != NULL;
        if (!is_told) return CPA_REPLY_WAIT;
    }
    r->is_out_of_memory |= o->is_out_of_memory;
    if (is_told) take_arguments(r, &o->arguments);
    if (step == CPA_JSON_WHOLE) return end_call(r, then);
    if (step == CPA_JSON_MORE) return CPA_REPLY_WAIT;
    return is_told ? end_calls(r) : CPA_REPLY_NO_CALL;
}

/* {...} behind a name. */
static cpa_reply_step read_arguments(cpa_reply *r, cpa_reply_place then) {
    cpa_json_step step = CPA_JSON_MORE;
    const int64_t begin = r->at;
    while (step == CPA_JSON_MORE && r->at < r->held.count) {
        step = cpa_json_scan_byte(&r->scan, r->held.data[r->at]);
        if (step != CPA_JSON_BROKEN) r->at++;
    }
    cpa_bytes part = {.data = r->held.data + begin, .count = r->at - begin};
    take_arguments(r, &part);
    if (step == CPA_JSON_WHOLE) return end_call(r, then);
    return step == CPA_JSON_MORE ? CPA_REPLY_WAIT : end_calls(r);
}

/* Before arguments: whether they begin as an object does, and the call with them. */
static cpa_reply_step begin_arguments(cpa_reply *r) {
    if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
    if (r->held.data[r->at] != '{' || r->name.count == 0) return r->has_call ? end_calls(r) : CPA_REPLY_NO_CALL;
    char *id = r->id.count > 0 ? strndup(r->id.data, (size_t)r->id.count) : NULL;
    if (!begin_call(r, strndup(r->name.data, (size_t)r->name.count), id)) return CPA_REPLY_WAIT;
    return go(r, CPA_REPLY_ARGUMENTS);
}

/* Reads bytes of a name up to `end`, or the first that none has; 1: it ended so, 0: more is to come, -1: it is none. */
static int read_name(cpa_reply *r, cpa_bytes *name, const char *ends) {
    while (r->at < r->held.count) {
        const char c = r->held.data[r->at];
        if (c && strchr(ends, c)) return name->count > 0 ? 1 : -1;
        if ((unsigned char)c <= ' ' || strchr("{}[]()<>\"`,;", c) || name->count == MOST_NAME_BYTES) return -1;
        r->is_out_of_memory |= !cpa_bytes_add(name, &c, 1);
        r->at++;
    }
    return 0;
}

static cpa_reply_step no_call(cpa_reply *r) {
    return r->has_call ? end_calls(r) : CPA_REPLY_NO_CALL;
}

/* ---- Hermes ---- */

static cpa_reply_step step_hermes(cpa_reply *r) {
    int found;
    switch (r->place) {
        case CPA_REPLY_OPEN:
            if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
            return go(r, CPA_REPLY_OBJECT);
        case CPA_REPLY_OBJECT: return read_object(r, 0, CPA_REPLY_CLOSE);
        default:
            if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
            found = cpa_reply_takes(r, "</tool_call>");
            return found < 0 ? CPA_REPLY_WAIT : end_calls(r);
    }
}

/* ---- Llama ---- */

static cpa_reply_step step_llama3(cpa_reply *r) {
    int found;
    switch (r->place) {
        case CPA_REPLY_OPEN:
            if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
            return go(r, CPA_REPLY_OBJECT);
        case CPA_REPLY_OBJECT: return read_object(r, 1, CPA_REPLY_CLOSE);
        default:
            if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
            found = cpa_reply_takes(r, ";");
            return found ? go(r, CPA_REPLY_OPEN) : end_calls(r);
    }
}

/* ---- Mistral ---- */

static cpa_reply_step open_mistral(cpa_reply *r) {
    if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
    const char first = r->held.data[r->at];
    if (first == '{') return go(r, CPA_REPLY_OBJECT);
    if (first != '[') return go(r, CPA_REPLY_NAME);
    r->at++;
    r->is_array = 1;
    return go(r, CPA_REPLY_ELEMENT);
}

/* NAME, then [CALL_ID]ID and [ARGS], or neither. */
static cpa_reply_step name_mistral(cpa_reply *r) {
    const int ends = read_name(r, &r->name, "[{");
    if (ends <= 0) return ends < 0 ? no_call(r) : CPA_REPLY_WAIT;
    if (r->held.data[r->at] == '{') return begin_arguments(r);
    const int has_id = cpa_reply_takes(r, "[CALL_ID]"), has_arguments = has_id ? 0 : cpa_reply_takes(r, "[ARGS]");
    if (has_id < 0 || has_arguments < 0) return CPA_REPLY_WAIT;
    if (has_id) return go(r, CPA_REPLY_CALL_ID);
    return has_arguments ? go(r, CPA_REPLY_FENCE) : no_call(r);
}

static cpa_reply_step id_mistral(cpa_reply *r) {
    const int ends = read_name(r, &r->id, "[");
    if (ends <= 0) return ends < 0 ? no_call(r) : CPA_REPLY_WAIT;
    const int found = cpa_reply_takes(r, "[ARGS]");
    if (found < 0) return CPA_REPLY_WAIT;
    return found ? go(r, CPA_REPLY_FENCE) : no_call(r);
}

static cpa_reply_step next_mistral(cpa_reply *r) {
    if (!r->is_array) return end_calls(r); /* another has its own mark */
    if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
    if (cpa_reply_takes(r, ",")) return go(r, CPA_REPLY_ELEMENT);
    cpa_reply_takes(r, "]");
    return end_calls(r);
}

static cpa_reply_step step_mistral(cpa_reply *r) {
    switch (r->place) {
        case CPA_REPLY_OPEN: return open_mistral(r);
        case CPA_REPLY_ELEMENT:
            if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
            return go(r, CPA_REPLY_OBJECT);
        case CPA_REPLY_OBJECT: return read_object(r, 0, CPA_REPLY_CLOSE);
        case CPA_REPLY_NAME: return name_mistral(r);
        case CPA_REPLY_CALL_ID: return id_mistral(r);
        case CPA_REPLY_FENCE: return begin_arguments(r);
        case CPA_REPLY_ARGUMENTS: return read_arguments(r, CPA_REPLY_CLOSE);
        default: return next_mistral(r);
    }
}

/* ---- DeepSeek ---- */

/* <call begin>NAME<sep>{...}, or <call begin>function<sep>NAME, and the arguments fenced. */
static cpa_reply_step open_deepseek(cpa_reply *r) {
    if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
    const int found = cpa_reply_takes(r, "<｜tool▁call▁begin｜>");
    if (found < 0) return CPA_REPLY_WAIT;
    return found ? go(r, CPA_REPLY_NAME) : no_call(r);
}

static cpa_reply_step name_deepseek(cpa_reply *r) {
    if (r->name.count == 0 && !cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
    const int ends = read_name(r, &r->name, "<");
    if (ends <= 0) return ends < 0 ? no_call(r) : CPA_REPLY_WAIT;
    const int found = cpa_reply_takes(r, "<｜tool▁sep｜>");
    if (found < 0) return CPA_REPLY_WAIT;
    return found ? go(r, CPA_REPLY_FENCE) : no_call(r);
}

static cpa_reply_step fence_deepseek(cpa_reply *r) {
    if (!r->is_fenced) {
        if (r->id.count == 0 && !cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
        if (r->id.count == 0 && r->held.data[r->at] == '{') return begin_arguments(r);
        const int ends = read_name(r, &r->id, "\n"); /* that in front was the type */
        if (ends <= 0) return ends < 0 ? no_call(r) : CPA_REPLY_WAIT;
        const int found = cpa_reply_takes(r, "\n```json");
        if (found <= 0) return found < 0 ? CPA_REPLY_WAIT : no_call(r);
        r->is_fenced = 1;
        const cpa_bytes type = r->name;
        r->name = r->id;
        r->id = type;
        r->id.count = 0;
    }
    return begin_arguments(r);
}

static cpa_reply_step close_deepseek(cpa_reply *r) {
    if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
    const int is_fence = cpa_reply_takes(r, "```");
    if (is_fence) return is_fence < 0 ? CPA_REPLY_WAIT : CPA_REPLY_GO_ON;
    const int is_next = cpa_reply_takes(r, "<｜tool▁call▁end｜>");
    if (is_next) return is_next < 0 ? CPA_REPLY_WAIT : CPA_REPLY_GO_ON;
    const int is_end = cpa_reply_takes(r, "<｜tool▁calls▁end｜>");
    if (is_end) return is_end < 0 ? CPA_REPLY_WAIT : end_calls(r);
    return go(r, CPA_REPLY_OPEN);
}

static cpa_reply_step step_deepseek(cpa_reply *r) {
    switch (r->place) {
        case CPA_REPLY_OPEN: return open_deepseek(r);
        case CPA_REPLY_NAME: return name_deepseek(r);
        case CPA_REPLY_FENCE: return fence_deepseek(r);
        case CPA_REPLY_ARGUMENTS: return read_arguments(r, CPA_REPLY_CLOSE);
        default: return close_deepseek(r);
    }
}

cpa_reply_step cpa_reply_step_call(cpa_reply *r) {
    switch (r->options.tools) {
        case CPA_TOOLS_LLAMA3: return step_llama3(r);
        case CPA_TOOLS_MISTRAL:
        case CPA_TOOLS_MISTRAL_ARGS: return step_mistral(r);
        case CPA_TOOLS_DEEPSEEK_V3:
        case CPA_TOOLS_DEEPSEEK_V31: return step_deepseek(r);
        default: return step_hermes(r);
    }
}
