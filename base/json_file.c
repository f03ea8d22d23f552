#include "base/json_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/file.h"

/* Why there is no value, errno having been 0 before: jansson calls most texts for which memory lacks wrong ones. */
static cpa_status parse_status(const json_error_t *why) {
    return errno == ENOMEM || json_error_code(why) == json_error_out_of_memory ? CPA_NO_MEMORY : CPA_INVALID;
}

cpa_status cpa_json_parse(const char *text, size_t bytes, size_t flags, json_t **out, json_error_t *why) {
    errno = 0;
    json_t *value = json_loadb(text, bytes, flags, why);
    if (!value) return parse_status(why);
    *out = value;
    return CPA_OK;
}

cpa_status cpa_json_load(const char *path, json_t **out, cpa_error *err) {
    const char *why;
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, cpa_file_failure(CPA_IO), "%s: %s", path, why);
    json_error_t error;
    errno = 0;
    json_t *value = json_loadf(file, JSON_REJECT_DUPLICATES, &error);
    const cpa_status parsed = value ? CPA_OK : parse_status(&error);
    int lost = ferror(file);
    fclose(file);
    if (lost) {
        json_decref(value);
        return cpa_fail(err, CPA_IO, "%s: could not be read", path);
    }
    if (parsed == CPA_NO_MEMORY) return cpa_fail(err, parsed, "%s: no memory to read it", path);
    if (!value) return cpa_fail(err, parsed, "%s:%d:%d: %s", path, error.line, error.column, error.text);
    if (!json_is_object(value)) {
        json_decref(value);
        return cpa_fail(err, CPA_INVALID, "%s: found no object, expected one", path);
    }
    *out = value;
    return CPA_OK;
}

const json_t *cpa_json_get(const cpa_json *json, const char *key) {
    const json_t *value = json_object_get(json->object, key);
    return json_is_null(value) ? NULL : value;
}

cpa_status cpa_json_refuse(const cpa_json *json, const char *key, const char *expected, cpa_error *err) {
    const json_t *value = cpa_json_get(json, key);
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    cpa_status status = cpa_fail(err, CPA_INVALID, "%s: %s%s: found %.80s, expected %s", json->path, json->prefix, key,
                                 text ? text : "nothing", expected);
    free(text);
    return status;
}

cpa_status cpa_json_int(const cpa_json *json, const char *key, cpa_json_presence presence, int64_t min, int64_t max,
                        int64_t *out, cpa_error *err) {
    const json_t *value = cpa_json_get(json, key);
    if (!value && presence == CPA_JSON_OPTIONAL) return CPA_OK;
    int64_t number = json_is_integer(value) ? json_integer_value(value) : 0;
    if (!json_is_integer(value) || number < min || number > max) {
        char expected[80];
        snprintf(expected, sizeof expected, "an integer from %lld to %lld", (long long)min, (long long)max);
        return cpa_json_refuse(json, key, expected, err);
    }
    *out = number;
    return CPA_OK;
}

cpa_status cpa_json_int32(const cpa_json *json, const char *key, cpa_json_presence presence, int32_t min, int32_t max,
                          int32_t *out, cpa_error *err) {
    int64_t value = *out;
    CPA_TRY(cpa_json_int(json, key, presence, min, max, &value, err));
    *out = (int32_t)value;
    return CPA_OK;
}

cpa_status cpa_json_number(const cpa_json *json, const char *key, cpa_json_presence presence, double min, double max,
                           double *out, cpa_error *err) {
    const json_t *value = cpa_json_get(json, key);
    if (!value && presence == CPA_JSON_OPTIONAL) return CPA_OK;
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= min && number <= max)) {
        char expected[80];
        snprintf(expected, sizeof expected, "a number from %g to %g", min, max);
        return cpa_json_refuse(json, key, expected, err);
    }
    *out = number;
    return CPA_OK;
}

cpa_status cpa_json_flag(const cpa_json *json, const char *key, int *out, cpa_error *err) {
    const json_t *value = cpa_json_get(json, key);
    if (!value) return CPA_OK;
    if (!json_is_boolean(value)) return cpa_json_refuse(json, key, "true or false", err);
    *out = json_is_true(value);
    return CPA_OK;
}

cpa_status cpa_json_text(const cpa_json *json, const char *key, cpa_json_presence presence, const char **out,
                         cpa_error *err) {
    const json_t *value = cpa_json_get(json, key);
    if (!value && presence == CPA_JSON_OPTIONAL) return CPA_OK;
    if (!json_is_string(value)) return cpa_json_refuse(json, key, "a text", err);
    *out = json_string_value(value);
    return CPA_OK;
}
