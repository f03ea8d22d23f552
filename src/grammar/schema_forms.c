#include "src/grammar/schema_forms.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "src/grammar/schema_keywords.h"

/* An alternative that is being read. */
typedef struct branch {
    cpa_schema_form form;
    cpa_schema_list list; /* all that holds for the value; the first `read` are read */
    int read;
    int8_t by[CPA_MOST_SCHEMAS]; /* index in `list` of the schema that brought in each of them; NOBODY: none */
    struct {
        const json_t *array;
        int is_one, by;
    } unions[CPA_MOST_PARTS]; /* unions that are still to be expanded */
    int n_unions;
} branch;

enum {
    NOBODY = -1,
    APPLY_VISITS = 500 /* that a schema is about as much work as */
};

static cpa_status add_part(const cpa_schema_reader *r, cpa_schema_parts *parts, const json_t *part) {
    for (int i = 0; i < parts->n; i++) {
        if (parts->parts[i] == part) return CPA_OK;
    }
    if (parts->n == CPA_MOST_PARTS) {
        return cpa_schema_fail(r, CPA_UNSUPPORTED, part, "more than %d schemas for one value", CPA_MOST_PARTS);
    }
    parts->parts[parts->n++] = part;
    return CPA_OK;
}

/* Adds a schema that another one names for the same value. */
static cpa_status add_named(const cpa_schema_reader *r, branch *b, const json_t *schema, int by) {
    const int n = b->list.n;
    for (int i = by; i != NOBODY; i = b->by[i]) {
        if (b->list.schemas[i] != schema) continue;
        return cpa_schema_fail(r, CPA_UNSUPPORTED, schema, "it names itself with no part of the value in between");
    }
    const cpa_status status = cpa_schema_list_add(r, &b->list, schema);
    if (b->list.n > n) b->by[n] = (int8_t)by;
    return status;
}

/* ---- Keywords ---- */

static cpa_status read_kinds(const cpa_schema_reader *r, branch *b, const json_t *schema) {
    static const struct {
        const char *name;
        unsigned kinds;
    } types[] = {{"null", CPA_KIND_NULL},       {"boolean", CPA_KIND_BOOLEAN},
                 {"integer", CPA_KIND_INTEGER}, {"number", CPA_KIND_INTEGER | CPA_KIND_FRACTION},
                 {"string", CPA_KIND_STRING},   {"array", CPA_KIND_ARRAY},
                 {"object", CPA_KIND_OBJECT}};
    const json_t *type = json_object_get(schema, "type");
    if (!type) return CPA_OK;
    unsigned kinds = 0;
    const size_t n = json_is_array(type) ? json_array_size(type) : 1;
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_is_array(type) ? json_array_get(type, i) : type);
        unsigned found = 0;
        for (size_t t = 0; name && t < sizeof types / sizeof *types; t++) {
            if (strcmp(name, types[t].name) == 0) found = types[t].kinds;
        }
        if (!found) return cpa_schema_fail(r, CPA_INVALID, schema, "type: expected names of types of JSON");
        kinds |= found;
    }
    b->form.kinds &= kinds;
    return CPA_OK;
}

static cpa_status read_values(const cpa_schema_reader *r, branch *b, const json_t *schema) {
    const json_t *values = json_object_get(schema, "enum"), *value = json_object_get(schema, "const");
    if (values) {
        if (!json_is_array(values)) return cpa_schema_fail(r, CPA_INVALID, schema, "enum: expected an array");
        CPA_TRY(add_part(r, &b->form.values, values));
    }
    if (!value) return CPA_OK;
    json_t *one = json_array();
    if (!one || json_array_append(one, (json_t *)(uintptr_t)value) != 0 || json_array_append_new(r->made, one) != 0) {
        return cpa_schema_fail(r, CPA_NO_MEMORY, schema, "no memory");
    }
    return add_part(r, &b->form.values, one);
}

/* A bound of numbers: the narrower of two counts. */
static cpa_status read_bound(const cpa_schema_reader *r, branch *b, const json_t *schema, const char *key) {
    const json_t *value = json_object_get(schema, key);
    if (!value) return CPA_OK;
    if (!json_is_number(value)) return cpa_schema_fail(r, CPA_UNSUPPORTED, schema, "%s: expected a number", key);
    cpa_number_range *n = &b->form.numbers;
    const double x = json_number_value(value);
    const int is_open = key[0] == 'e', is_min = strstr(key, "inimum") != NULL;
    if (is_min && (x > n->min || (x == n->min && is_open))) {
        n->min = x;
        n->above_min = is_open;
    } else if (!is_min && (x < n->max || (x == n->max && is_open))) {
        n->max = x;
        n->below_max = is_open;
    }
    return CPA_OK;
}

static int64_t divisor(int64_t a, int64_t b) {
    return b == 0 ? a : divisor(b, a % b);
}

static cpa_status read_multiple(const cpa_schema_reader *r, branch *b, const json_t *schema) {
    const json_t *value = json_object_get(schema, "multipleOf");
    if (!value) return CPA_OK;
    const double x = json_is_number(value) ? json_number_value(value) : 0;
    int64_t of = x >= 1 && x <= CPA_NUMBER_MOST_MULTIPLE && floor(x) == x ? (int64_t)x : 0;
    if (of > 0 && b->form.numbers.multiple_of > 0) {
        of = of / divisor(of, b->form.numbers.multiple_of) * b->form.numbers.multiple_of;
    }
    if (of == 0 || of > CPA_NUMBER_MOST_MULTIPLE) {
        return cpa_schema_fail(r, CPA_UNSUPPORTED, schema, "multipleOf: expected an integer from 1 to %d",
                               CPA_NUMBER_MOST_MULTIPLE);
    }
    b->form.numbers.multiple_of = of;
    return CPA_OK;
}

static cpa_status read_count(const cpa_schema_reader *r, const json_t *schema, const char *key, int is_most,
                             int64_t *count) {
    const json_t *value = json_object_get(schema, key);
    if (!value) return CPA_OK;
    const double x = json_is_number(value) ? json_number_value(value) : -1;
    if (x < 0 || floor(x) != x) {
        return cpa_schema_fail(r, CPA_INVALID, schema, "%s: expected an integer from 0 on", key);
    }
    const int64_t n = x < 1e15 ? (int64_t)x : (int64_t)1e15;
    if (is_most ? *count < 0 || n < *count : n > *count) *count = n;
    return CPA_OK;
}

static cpa_status read_counts(const cpa_schema_reader *r, branch *b, const json_t *schema) {
    cpa_schema_form *f = &b->form;
    CPA_TRY(read_count(r, schema, "minLength", 0, &f->least_characters));
    CPA_TRY(read_count(r, schema, "maxLength", 1, &f->most_characters));
    CPA_TRY(read_count(r, schema, "minItems", 0, &f->least_items));
    return read_count(r, schema, "maxItems", 1, &f->most_items);
}

/* The schema that a $ref names, by a JSON pointer into the root. */
static const json_t *find_target(const cpa_schema_reader *r, const char *ref) {
    const json_t *at = r->root;
    if (*ref != '#' || (ref[1] != 0 && ref[1] != '/')) return NULL;
    for (ref++; *ref == '/' && at;) {
        char name[256];
        size_t n = 0;
        for (ref++; *ref && *ref != '/' && n + 1 < sizeof name; ref++) {
            unsigned code;
            char c = *ref;
            if (c == '~' && (ref[1] == '0' || ref[1] == '1')) {
                c = *++ref == '0' ? '~' : '/';
            } else if (c == '%' && sscanf(ref + 1, "%2x", &code) == 1 && ref[2]) {
                c = (char)code;
                ref += 2;
            }
            name[n++] = c;
        }
        name[n] = 0;
        if (json_is_array(at)) {
            char *end;
            const unsigned long index = strtoul(name, &end, 10);
            at = n > 0 && !*end ? json_array_get(at, index) : NULL;
        } else {
            at = json_object_get(at, name);
        }
    }
    return *ref ? NULL : at;
}

static cpa_status read_references(const cpa_schema_reader *r, branch *b, const json_t *schema, int by) {
    const json_t *ref = json_object_get(schema, "$ref"), *all = json_object_get(schema, "allOf");
    if (ref) {
        const json_t *target = json_is_string(ref) ? find_target(r, json_string_value(ref)) : NULL;
        if (!target) {
            return cpa_schema_fail(r, CPA_UNSUPPORTED, schema, "$ref: found %.80s, expected # or #/... that is there",
                                   json_is_string(ref) ? json_string_value(ref) : "no string");
        }
        CPA_TRY(add_named(r, b, target, by));
    }
    for (size_t i = 0; i < json_array_size(all); i++) {
        CPA_TRY(add_named(r, b, json_array_get(all, i), by));
    }
    static const char *const keys[] = {"allOf", "anyOf", "oneOf"};
    for (int k = 0; k < 3; k++) {
        const json_t *array = json_object_get(schema, keys[k]);
        if (!array) continue;
        if (json_array_size(array) == 0) {
            return cpa_schema_fail(r, CPA_INVALID, schema, "%s: expected an array of schemas", keys[k]);
        }
        int is_there = k == 0;
        for (int u = 0; u < b->n_unions; u++) is_there |= b->unions[u].array == array;
        if (is_there) continue;
        if (b->n_unions == CPA_MOST_PARTS) {
            return cpa_schema_fail(r, CPA_UNSUPPORTED, schema, "%s: more than %d of them for one value", keys[k],
                                   CPA_MOST_PARTS);
        }
        b->unions[b->n_unions].array = array;
        b->unions[b->n_unions].is_one = k == 2;
        b->unions[b->n_unions++].by = by;
    }
    return CPA_OK;
}

static cpa_status read_parts(const cpa_schema_reader *r, branch *b, const json_t *schema) {
    static const char *const objects[] = {"properties", "patternProperties", "additionalProperties"};
    static const char *const arrays[] = {"items", "prefixItems"}, *const strings[] = {"pattern", "format"};
    cpa_schema_form *f = &b->form;
    int has_objects = 0, has_arrays = 0, has_strings = 0;
    for (int i = 0; i < 3; i++) has_objects |= json_object_get(schema, objects[i]) != NULL;
    for (int i = 0; i < 2; i++) has_arrays |= json_object_get(schema, arrays[i]) != NULL;
    for (int i = 0; i < 2; i++) has_strings |= json_object_get(schema, strings[i]) != NULL;
    const json_t *required = json_object_get(schema, "required");
    if (has_objects) CPA_TRY(add_part(r, &f->objects, schema));
    if (has_arrays) CPA_TRY(add_part(r, &f->arrays, schema));
    if (has_strings) CPA_TRY(add_part(r, &f->strings, schema));
    if (!required) return CPA_OK;
    for (size_t i = 0; i == 0 || i < json_array_size(required); i++) {
        if (json_is_array(required) &&
            (json_array_size(required) == 0 || json_is_string(json_array_get(required, i)))) {
            continue;
        }
        return cpa_schema_fail(r, CPA_UNSUPPORTED, schema, "required: expected an array of names");
    }
    return add_part(r, &f->required, required);
}

static cpa_status apply(const cpa_schema_reader *r, branch *b, int index) {
    static const char *const bounds[] = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
    const json_t *schema = b->list.schemas[index];
    if (json_is_boolean(schema)) { /* false: true is never listed */
        b->form.kinds = 0;
        return CPA_OK;
    }
    CPA_TRY(cpa_schema_check_keywords(r, schema));
    CPA_TRY(read_kinds(r, b, schema));
    CPA_TRY(read_values(r, b, schema));
    for (int i = 0; i < 4; i++) CPA_TRY(read_bound(r, b, schema, bounds[i]));
    CPA_TRY(read_multiple(r, b, schema));
    CPA_TRY(read_counts(r, b, schema));
    CPA_TRY(read_parts(r, b, schema));
    return read_references(r, b, schema, index);
}

/* ---- Alternatives ---- */

static cpa_status add_form(const cpa_schema_reader *r, const branch *b, cpa_schema_forms *out) {
    if (b->form.kinds == 0) return CPA_OK;
    if (out->count == CPA_MOST_FORMS) {
        return cpa_schema_fail(r, CPA_UNSUPPORTED, NULL, "more than %d alternatives for one value", CPA_MOST_FORMS);
    }
    if (!cpa_array_reserve(&out->forms, &out->capacity, out->count + 1, sizeof *out->forms)) {
        return cpa_schema_fail(r, CPA_NO_MEMORY, NULL, "no memory");
    }
    out->forms[out->count++] = b->form;
    return CPA_OK;
}

static cpa_status expand(const cpa_schema_reader *r, branch *b, cpa_schema_forms *out);

static cpa_status expand_union(const cpa_schema_reader *r, branch *b, cpa_schema_forms *out) {
    b->n_unions--;
    const json_t *array = b->unions[b->n_unions].array;
    const int is_one = b->unions[b->n_unions].is_one, by = b->unions[b->n_unions].by;
    const json_t *schema = b->list.schemas[by];
    branch *next = malloc(sizeof *next);
    cpa_status status = next ? CPA_OK : cpa_schema_fail(r, CPA_NO_MEMORY, schema, "no memory");
    if (is_one && b->form.n_ones == CPA_MOST_PARTS) {
        status =
            cpa_schema_fail(r, CPA_UNSUPPORTED, schema, "oneOf: more than %d of them for one value", CPA_MOST_PARTS);
    }
    for (size_t i = 0; status == CPA_OK && i < json_array_size(array); i++) {
        *next = *b;
        if (is_one) {
            next->form.ones[next->form.n_ones].schema = schema;
            next->form.ones[next->form.n_ones].array = array;
            next->form.ones[next->form.n_ones++].branch = i;
        }
        status = add_named(r, next, json_array_get(array, i), by);
        if (status == CPA_OK) status = expand(r, next, out);
    }
    free(next);
    return status;
}

/* Adds the alternatives of a branch, which changes. */
static cpa_status expand(const cpa_schema_reader *r, branch *b, cpa_schema_forms *out) {
    while (b->read < b->list.n) {
        CPA_TRY(cpa_schema_spend(r, APPLY_VISITS));
        CPA_TRY(apply(r, b, b->read++));
    }
    if (b->form.kinds == 0) return CPA_OK;
    return b->n_unions > 0 ? expand_union(r, b, out) : add_form(r, b, out);
}

cpa_status cpa_schema_forms_of(const cpa_schema_reader *reader, const cpa_schema_list *list, cpa_schema_forms *out) {
    branch *b = calloc(1, sizeof *b);
    if (!b) return cpa_schema_fail(reader, CPA_NO_MEMORY, NULL, "no memory");
    b->list = *list;
    memset(b->by, NOBODY, sizeof b->by);
    b->form = (cpa_schema_form){
        .kinds = CPA_KIND_ANY, .numbers = {.min = -INFINITY, .max = INFINITY}, .most_characters = -1, .most_items = -1};
    *out = (cpa_schema_forms){.forms = NULL};
    const cpa_status status = expand(reader, b, out);
    free(b);
    if (status == CPA_OK) return status;
    free(out->forms);
    *out = (cpa_schema_forms){.forms = NULL};
    return status;
}
