#include "src/text/json_part.h"

#include <stdio.h>
#include <string.h>

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

static cpa_status read_part(const cpa_json *parent, const char *key, int64_t index, int depth,
                            const cpa_json_parts *parts, void *out, cpa_error *err) {
    enum { MOST_SEQUENCES = 8 };
    cpa_json_part part;
    const json_t *list = NULL;
    CPA_TRY(cpa_json_part_of(parent, key, index, &part, err));
    if (!part.json.object) return CPA_OK;
    if (strcmp(part.type, "Sequence") != 0) return parts->read(&part, out, err);
    if (depth == MOST_SEQUENCES) return cpa_json_unsupported(&part.json, "type", parts->too_deep, err);
    CPA_TRY(cpa_json_list(&part.json, parts->list, &list, err));
    for (size_t i = 0; i < json_array_size(list); i++)
        CPA_TRY(read_part(&part.json, parts->list, (int64_t)i, depth + 1, parts, out, err));
    return CPA_OK;
}

cpa_status cpa_json_read_parts(const cpa_json *file, const cpa_json_parts *parts, void *out, cpa_error *err) {
    return read_part(file, parts->key, CPA_JSON_NO_INDEX, 0, parts, out, err);
}
