#include "server/fields.h"

#include <inttypes.h>
#include <math.h>
#include <microhttpd.h>
#include <stdio.h>
#include <string.h>

#include "base/json_file.h"
#include "base/min_max.h"
#include "base/text.h"

/* What jansson says of a text may quote it; this does not. */
static const char *parse_error(const json_error_t *error) {
    switch (json_error_code(error)) {
        case json_error_invalid_utf8: return "text that is not UTF-8";
        case json_error_premature_end_of_input: return "it ends too early";
        case json_error_end_of_input_expected: return "more follows its end";
        case json_error_null_byte_in_key: return "the character U+0000 in a key";
        case json_error_duplicate_key: return "a key is there twice";
        case json_error_numeric_overflow: return "a number that is too large";
        case json_error_stack_overflow: return "it is nested too deep";
        default: return "a syntax error";
    }
}

int cpa_fields_parse(const char *body, int64_t bytes, json_t **out, cpa_refusal *refusal) {
    json_error_t error;
    json_t *parsed;
    if (bytes == 0) {
        return cpa_refuse(refusal, MHD_HTTP_BAD_REQUEST, NULL, NULL, "the body is empty, expected a JSON object");
    }
    const cpa_status status =
        cpa_json_parse(body, (size_t)bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &parsed, &error);
    if (status == CPA_NO_MEMORY) {
        return cpa_refuse(refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL, "no memory for the request");
    }
    if (status != CPA_OK) {
        return cpa_refuse(refusal, MHD_HTTP_BAD_REQUEST, NULL, NULL, "the body is not JSON: line %d, column %d: %s",
                          error.line, error.column, parse_error(&error));
    }
    if (!json_is_object(parsed)) {
        json_decref(parsed);
        return cpa_refuse(refusal, MHD_HTTP_BAD_REQUEST, NULL, NULL, "the body is no JSON object");
    }
    *out = parsed;
    return 1;
}

static int is_noted(const cpa_field_names *names, const char *name) {
    for (int i = 0; i < names->count; i++) {
        if (strcmp(names->names[i], name) == 0) return 1;
    }
    return 0;
}

static void note_name(cpa_field_names *names, const char *name) {
    const int most = (int)(sizeof names->names / sizeof *names->names);
    if (names && names->count < most && !is_noted(names, name)) names->names[names->count++] = name;
}

const json_t *cpa_field(const cpa_fields *fields, const char *name) {
    const json_t *value = json_object_get(fields->object, name);
    note_name(fields->looked_for, name);
    return json_is_null(value) ? NULL : value;
}

int cpa_refuse_memory(const cpa_fields *fields) {
    return cpa_refuse(fields->refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL, "no memory for the request");
}

int cpa_field_refuse(const cpa_fields *fields, const char *name, const json_t *found, const char *expected) {
    static const char *const kinds[] = {
        [JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
        [JSON_TRUE] = "true",        [JSON_FALSE] = "false",    [JSON_NULL] = "null"};
    char shown[40], full[64];
    switch (json_typeof(found)) {
        case JSON_INTEGER: snprintf(shown, sizeof shown, "%" JSON_INTEGER_FORMAT, json_integer_value(found)); break;
        case JSON_REAL: snprintf(shown, sizeof shown, "%g", json_real_value(found)); break;
        default: snprintf(shown, sizeof shown, "%s", kinds[json_typeof(found)]);
    }
    snprintf(full, sizeof full, "%s%s", fields->prefix, name);
    return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, full, "%s: found %s, expected %s", full, shown,
                      expected);
}

int cpa_json_is_text(const json_t *value, const char *text) {
    const size_t bytes = strlen(text);
    return json_is_string(value) && json_string_length(value) == bytes &&
           memcmp(json_string_value(value), text, bytes) == 0;
}

int cpa_json_has_nul(const json_t *value) {
    const char *key;
    json_t *member;
    if (json_is_string(value)) return memchr(json_string_value(value), 0, json_string_length(value)) != NULL;
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (cpa_json_has_nul(json_array_get(value, i))) return 1;
    }
    json_object_foreach((json_t *)(uintptr_t)value, key, member) {
        if (cpa_json_has_nul(member)) return 1;
    }
    return 0;
}

int cpa_json_is_int(const json_t *value, int64_t min, int64_t max, int64_t *out) {
    const double exact = 9007199254740992; /* 2^53: integers up to it are numbers of their own as doubles */
    int64_t number;
    if (json_is_integer(value)) {
        number = json_integer_value(value);
    } else if (json_is_real(value) && fabs(json_real_value(value)) <= exact &&
               json_real_value(value) == floor(json_real_value(value))) {
        number = (int64_t)json_real_value(value);
    } else {
        return 0;
    }
    if (number < min || number > max) return 0;
    *out = number;
    return 1;
}

int cpa_field_int(const cpa_fields *fields, const char *name, int64_t min, int64_t max, int64_t *out) {
    const json_t *value = cpa_field(fields, name);
    if (!value || cpa_json_is_int(value, min, max, out)) return 1;
    char expected[80];
    snprintf(expected, sizeof expected, "an integer from %" PRId64 " to %" PRId64, min, max);
    return cpa_field_refuse(fields, name, value, expected);
}

int cpa_field_number(const cpa_fields *fields, const char *name, double min, double max, float *out) {
    const json_t *value = cpa_field(fields, name);
    if (!value) return 1;
    const double number = json_number_value(value);
    if (json_is_number(value) && number >= min && number <= max) {
        *out = (float)number;
        return 1;
    }
    char expected[80];
    snprintf(expected, sizeof expected, "a number from %g to %g", min, max);
    return cpa_field_refuse(fields, name, value, expected);
}

int cpa_field_flag(const cpa_fields *fields, const char *name, int *out) {
    const json_t *value = cpa_field(fields, name);
    if (!value) return 1;
    if (!json_is_boolean(value)) return cpa_field_refuse(fields, name, value, "true or false");
    *out = json_is_true(value);
    return 1;
}

int cpa_field_text(const cpa_fields *fields, const char *name, const char **out) {
    const json_t *value = cpa_field(fields, name);
    if (!value) return 1;
    if (!json_is_string(value)) return cpa_field_refuse(fields, name, value, "a string");
    if (cpa_json_has_nul(value)) {
        return cpa_field_refuse(fields, name, value, "one without the character U+0000");
    }
    *out = json_string_value(value);
    return 1;
}

int cpa_field_object(const cpa_fields *fields, const char *name, const char *prefix, cpa_field_names *names,
                     cpa_fields *out) {
    const json_t *value = cpa_field(fields, name);
    if (value && !json_is_object(value)) return cpa_field_refuse(fields, name, value, "an object");
    *out = (cpa_fields){.object = value, .prefix = prefix, .refusal = fields->refusal, .looked_for = names};
    return 1;
}

static int asks_nothing(const json_t *value) {
    return !value || json_is_null(value) || json_is_false(value) ||
           (json_is_number(value) && json_number_value(value) == 0) ||
           (json_is_string(value) && json_string_length(value) == 0) ||
           (json_is_array(value) && !json_array_size(value)) || (json_is_object(value) && !json_object_size(value));
}

/* Letters of a name that may be wrong: one in four. */
static const char *nearest_name(const cpa_field_names *names, const char *found) {
    const size_t bytes = strlen(found);
    for (int i = 0; bytes <= CPA_NAME_BYTES && i < names->count; i++) {
        const size_t known = strlen(names->names[i]);
        if (cpa_name_distance(found, bytes, names->names[i], known) <= (int)(cpa_min64((int64_t)known, 8) / 4))
            return names->names[i];
    }
    return NULL;
}

int cpa_fields_check_names(const cpa_fields *fields) {
    const char *found;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)fields->object, found, value) {
        if (asks_nothing(value) || is_noted(fields->looked_for, found)) continue;
        const char *near = nearest_name(fields->looked_for, found);
        if (!near) continue;
        char full[64];
        snprintf(full, sizeof full, "%s%s", fields->prefix, near);
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, full,
                          "found a field that is not known, of nearly the name of %s: expected %s", full, full);
    }
    return 1;
}

int cpa_field_unasked(const cpa_fields *fields, const char *name, const char *reason) {
    char full[64];
    if (asks_nothing(cpa_field(fields, name))) return 1;
    snprintf(full, sizeof full, "%s%s", fields->prefix, name);
    return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", full, "%s is not supported: %s",
                      full, reason);
}
