#include "src/reply/call_object.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static void add(cpa_call_object *o, cpa_bytes *to, const char *bytes, size_t n) {
    o->is_out_of_memory |= !cpa_bytes_add(to, bytes, n);
}

/* The text of the string that was read; NULL if it is none, such as half of a pair of surrogates. */
static json_t *decode(const cpa_call_object *o) {
    json_error_t error;
    return json_loadb(o->string.data, (size_t)o->string.count, JSON_DECODE_ANY, &error);
}

static cpa_json_step end_key(cpa_call_object *o) {
    json_t *key = decode(o);
    const char *text = json_string_value(key);
    o->where = CPA_CALL_BETWEEN;
    o->member = CPA_CALL_OTHER;
    if (text && strcmp(text, "name") == 0 && !o->name) o->member = CPA_CALL_NAME;
    if (text && (strcmp(text, "arguments") == 0 || strcmp(text, "parameters") == 0) && !o->has_arguments)
        o->member = CPA_CALL_ARGUMENTS;
    json_decref(key);
    return CPA_JSON_MORE;
}

static cpa_json_step begin_value(cpa_call_object *o, char byte) {
    o->where = CPA_CALL_IN_VALUE;
    o->first = byte;
    o->string.count = 0;
    if (o->member == CPA_CALL_NAME && byte != '"') return CPA_JSON_BROKEN;
    if (o->member != CPA_CALL_ARGUMENTS) return CPA_JSON_MORE;
    o->has_arguments = byte == '{' || byte == '"' || byte == 'n';
    return o->has_arguments ? CPA_JSON_MORE : CPA_JSON_BROKEN;
}

static cpa_json_step end_value(cpa_call_object *o) {
    o->where = CPA_CALL_BETWEEN;
    if (o->member == CPA_CALL_ARGUMENTS && o->first == 'n') add(o, &o->arguments, "{}", 2);
    if (o->member == CPA_CALL_OTHER || o->first != '"') return CPA_JSON_MORE;
    json_t *value = decode(o);
    const char *text = json_string_value(value);
    cpa_json_step step = text ? CPA_JSON_MORE : CPA_JSON_BROKEN;
    if (text && o->member == CPA_CALL_ARGUMENTS) add(o, &o->arguments, text, json_string_length(value));
    if (text && o->member == CPA_CALL_NAME) {
        if (!*text) step = CPA_JSON_BROKEN;
        o->name = strdup(text);
        o->is_out_of_memory |= !o->name;
    }
    json_decref(value);
    return step;
}

static cpa_json_step end(cpa_call_object *o) {
    if (!o->name) return CPA_JSON_BROKEN;
    if (!o->has_arguments) add(o, &o->arguments, "{}", 2);
    o->has_arguments = 1;
    return CPA_JSON_WHOLE;
}

/* Where the byte is that has led the scan from one state to the other. */
static cpa_json_step place(cpa_call_object *o, cpa_json_state before, char byte) {
    const cpa_json_scan *scan = &o->scan;
    if (o->where == CPA_CALL_IN_VALUE && before == CPA_JSON_NUMBER && scan->state != CPA_JSON_NUMBER) {
        o->where = CPA_CALL_BETWEEN; /* a number ends in front of what follows it */
    } else if (o->where == CPA_CALL_BETWEEN && before == CPA_JSON_VALUE && scan->state != CPA_JSON_VALUE) {
        return begin_value(o, byte);
    } else if (o->where == CPA_CALL_BETWEEN && scan->state == CPA_JSON_STRING) {
        o->where = CPA_CALL_IN_KEY;
        o->string.count = 0;
    }
    return CPA_JSON_MORE;
}

cpa_json_step cpa_call_object_byte(cpa_call_object *o, char byte) {
    const cpa_json_scan *scan = &o->scan;
    const int depth = scan->depth;
    const cpa_json_state before = scan->state;
    if (depth == 0 && byte != '{') return CPA_JSON_BROKEN;
    const cpa_json_step step = cpa_json_scan_byte(&o->scan, byte);
    if (step == CPA_JSON_BROKEN || (depth == 1 && place(o, before, byte) == CPA_JSON_BROKEN)) return CPA_JSON_BROKEN;
    if (step == CPA_JSON_WHOLE) return end(o);
    if (o->where == CPA_CALL_IN_KEY) {
        add(o, &o->string, &byte, 1);
        return scan->state == CPA_JSON_COLON ? end_key(o) : CPA_JSON_MORE;
    }
    if (o->where != CPA_CALL_IN_VALUE) return CPA_JSON_MORE;
    if (o->member == CPA_CALL_ARGUMENTS && o->first == '{') {
        add(o, &o->arguments, &byte, 1);
    } else if (o->member != CPA_CALL_OTHER) {
        add(o, &o->string, &byte, 1);
    }
    return scan->depth == 1 && scan->state == CPA_JSON_NEXT ? end_value(o) : CPA_JSON_MORE;
}

void cpa_call_object_release(cpa_call_object *o) {
    free(o->name);
    cpa_bytes_release(&o->string);
    cpa_bytes_release(&o->arguments);
    *o = (cpa_call_object){.name = NULL};
}
