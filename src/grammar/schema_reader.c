#include "src/grammar/schema_reader.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"

enum { MOST_DEEP = 64, PLACE_BYTES = 256 };

/* Writes where a part lies in another, as a JSON pointer behind the `n` bytes of place; 0 if it is none. */
static int find(const json_t *in, const json_t *part, char *place, size_t n, int depth) {
    if (in == part) return 1;
    if (depth == MOST_DEEP) return 0;
    const char *key;
    json_t *value;
    size_t index;
    json_object_foreach((json_t *)(uintptr_t)in, key, value) {
        const int added = snprintf(place + n, PLACE_BYTES - n, "/%.60s", key);
        if ((size_t)added < PLACE_BYTES - n && find(value, part, place, n + (size_t)added, depth + 1)) return 1;
    }
    json_array_foreach((json_t *)(uintptr_t)in, index, value) {
        const int added = snprintf(place + n, PLACE_BYTES - n, "/%zu", index);
        if ((size_t)added < PLACE_BYTES - n && find(value, part, place, n + (size_t)added, depth + 1)) return 1;
    }
    place[n] = 0;
    return 0;
}

cpa_status cpa_schema_fail(const cpa_schema_reader *reader, cpa_status status, const json_t *schema, const char *format,
                           ...) {
    char place[PLACE_BYTES] = "#", line[sizeof((cpa_error *)NULL)->message];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (schema && find(reader->root, schema, place, 1, 0)) return cpa_fail(reader->err, status, "%s: %s", place, line);
    return cpa_fail(reader->err, status, "%s", line);
}

cpa_status cpa_schema_list_add(const cpa_schema_reader *reader, cpa_schema_list *list, const json_t *schema) {
    if (!json_is_object(schema) && !json_is_boolean(schema)) {
        return cpa_schema_fail(reader, CPA_INVALID, schema, "expected a schema: an object, true or false");
    }
    if (json_is_true(schema)) return CPA_OK;
    for (int i = 0; i < list->n; i++) {
        if (list->schemas[i] == schema) return CPA_OK;
    }
    if (list->n == CPA_MOST_SCHEMAS) {
        return cpa_schema_fail(reader, CPA_UNSUPPORTED, schema, "more than %d schemas for one value", CPA_MOST_SCHEMAS);
    }
    list->schemas[list->n++] = schema;
    return CPA_OK;
}

cpa_status cpa_schema_spend(const cpa_schema_reader *reader, int64_t visits) {
    return cpa_effort_spend(reader->effort, visits) ? CPA_OK : cpa_effort_fail(reader->err);
}
