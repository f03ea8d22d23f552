#include "src/text/json_part.h"

#include <stdio.h>

#include "base/check.h"

cpa_status cpa_json_part_of(const cpa_json *parent, const char *key, int64_t index, cpa_json_part *out,
                            cpa_error *err) {
    const json_t *value = cpa_json_get(parent, key);
    char at[32] = "";
    if (index >= 0) {
        value = json_array_get(value, (size_t)index);
        snprintf(at, sizeof at, "[%lld]", (long long)index);
    }
    *out = (cpa_json_part){.json = {.path = parent->path, .object = value}, .type = ""};
    snprintf(out->prefix, sizeof out->prefix, "%s%s%s.", parent->prefix, key, at);
    out->json.prefix = out->prefix;
    if (!value) return CPA_OK;
    if (!json_is_object(value))
        return cpa_fail(err, CPA_INVALID, "%s: %s%s%s: found no object, expected one", parent->path, parent->prefix,
                        key, at);
    const char *type = json_string_value(cpa_json_get(&out->json, "type"));
    if (type) out->type = type;
    return CPA_OK;
}

cpa_status cpa_json_unsupported(const cpa_json *json, const char *key, const char *expected, cpa_error *err) {
    cpa_json_refuse(json, key, expected, err);
    if (err) err->status = CPA_UNSUPPORTED;
    return CPA_UNSUPPORTED;
}

cpa_status cpa_json_list(const cpa_json *json, const char *key, const json_t **out, cpa_error *err) {
    const json_t *value = cpa_json_get(json, key);
    if (value && !json_is_array(value)) return cpa_json_refuse(json, key, "a list", err);
    *out = value;
    return CPA_OK;
}
