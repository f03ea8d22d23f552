#include "src/grammar/schema_keywords.h"

#include <stdint.h>
#include <string.h>

/* Keywords of which nothing follows for what is valid; `discriminator`, OpenAPI's, is a hint beside a oneOf. */
static int is_note(const char *key) {
    static const char *const notes[] = {
        "$defs",   "definitions", "title",    "description", "default",    "examples",    "example",
        "$schema", "$comment",    "readOnly", "writeOnly",   "deprecated", "$vocabulary", "discriminator",
    };
    for (size_t i = 0; i < sizeof notes / sizeof *notes; i++) {
        if (strcmp(key, notes[i]) == 0) return 1;
    }
    return 0;
}

/* Keywords that hold for nothing but with one value, which is what others mean that leave them away. */
static int says_nothing(const char *key, const json_t *value) {
    if (strcmp(key, "uniqueItems") == 0 || strcmp(key, "nullable") == 0) return json_is_false(value);
    if (strcmp(key, "minProperties") == 0) return json_is_integer(value) && json_integer_value(value) == 0;
    return 0;
}

/* What a keyword's value has to be, beyond what is seen where it is read. */
typedef enum shape { ANY = 0, OBJECT, ARRAY, SCHEMA, SCHEMA_OR_ARRAY } shape;

static int has_shape(const json_t *value, shape wanted) {
    const int is_schema = json_is_object(value) || json_is_boolean(value);
    switch (wanted) {
        case OBJECT: return json_is_object(value);
        case ARRAY: return json_is_array(value);
        case SCHEMA: return is_schema;
        case SCHEMA_OR_ARRAY: return is_schema || json_is_array(value);
        case ANY: break;
    }
    return 1;
}

static const struct keyword {
    const char *name;
    shape shape;
} known[] = {
    {"type", ANY},
    {"enum", ARRAY},
    {"const", ANY},
    {"properties", OBJECT},
    {"required", ARRAY},
    {"patternProperties", OBJECT},
    {"items", SCHEMA_OR_ARRAY},
    {"prefixItems", ARRAY},
    {"additionalProperties", SCHEMA},
    {"minItems", ANY},
    {"maxItems", ANY},
    {"minLength", ANY},
    {"maxLength", ANY},
    {"pattern", ANY},
    {"format", ANY},
    {"minimum", ANY},
    {"maximum", ANY},
    {"exclusiveMinimum", ANY},
    {"multipleOf", ANY},
    {"exclusiveMaximum", ANY},
    {"anyOf", ARRAY},
    {"oneOf", ARRAY},
    {"allOf", ARRAY},
    {"$ref", ANY},
};

static const struct keyword *find(const char *key) {
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(key, known[i].name) == 0) return &known[i];
    }
    return NULL;
}

cpa_status cpa_schema_check_keywords(const cpa_schema_reader *reader, const json_t *schema) {
    static const char *const shapes[] = {"a value", "an object", "an array", "a schema",
                                         "a schema or an array of them"};
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)schema, key, value) {
        const struct keyword *keyword = find(key);
        const int is_id = strcmp(key, "$id") == 0 && schema == reader->root;
        if (!keyword && !is_note(key) && !says_nothing(key, value) && !is_id) {
            return cpa_schema_fail(reader, CPA_UNSUPPORTED, schema, "the keyword %.80s is not supported", key);
        }
        if (keyword && !has_shape(value, keyword->shape)) {
            return cpa_schema_fail(reader, CPA_INVALID, schema, "%s: expected %s", key, shapes[keyword->shape]);
        }
    }
    return CPA_OK;
}
