#include "src/grammar/schema_members.h"

#include <string.h>

#include "src/grammar/string_formats.h"

/* ---- Arrays ---- */

/* The schemas of the first elements; `items` was an array until draft 2019-09. */
static const json_t *prefix_of(const json_t *schema) {
    const json_t *prefix = json_object_get(schema, "prefixItems"), *items = json_object_get(schema, "items");
    return prefix ? prefix : json_is_array(items) ? items : NULL;
}

cpa_status cpa_schema_of_item(const cpa_schema_reader *reader, const cpa_schema_form *form, int64_t index,
                              cpa_schema_list *out) {
    for (int i = 0; i < form->arrays.n; i++) {
        const json_t *schema = form->arrays.parts[i], *prefix = prefix_of(schema);
        const json_t *items = json_object_get(schema, "items");
        if (prefix && !json_is_array(prefix)) {
            return cpa_schema_fail(reader, CPA_INVALID, schema, "prefixItems: expected an array of schemas");
        }
        const json_t *item = json_array_get(prefix, (size_t)index);
        if (!item && !json_is_array(items)) item = items;
        if (item) {
            const cpa_status status = cpa_schema_list_add(reader, out, item);
            if (status != CPA_OK) return status;
        }
    }
    return CPA_OK;
}

int64_t cpa_schema_prefix(const cpa_schema_form *form) {
    size_t most = 0;
    for (int i = 0; i < form->arrays.n; i++) {
        const size_t n = json_array_size(prefix_of(form->arrays.parts[i]));
        if (n > most) most = n;
    }
    return (int64_t)most;
}

/* ---- Objects ---- */

cpa_status cpa_schema_expression(const cpa_schema_reader *reader, const json_t *schema, const char *key,
                                 const char *expression, int is_whole, cpa_dfa *out) {
    cpa_error why;
    const cpa_status status = cpa_dfa_of_regex(expression, strlen(expression), is_whole, reader->effort, out, &why);
    return status == CPA_OK ? CPA_OK
                            : cpa_schema_fail(reader, status, schema, "%s %.100s: %s", key, expression, why.message);
}

/* Whether a pattern is in a name. */
static cpa_status is_in(const cpa_schema_reader *reader, const json_t *schema, const char *pattern, const char *name,
                        int *out) {
    cpa_dfa dfa = {0};
    const cpa_status status = cpa_schema_expression(reader, schema, "patternProperties", pattern, 0, &dfa);
    *out = status == CPA_OK && cpa_dfa_takes(&dfa, name, strlen(name));
    cpa_dfa_release(&dfa);
    return status;
}

static cpa_status add(const cpa_schema_reader *reader, cpa_schema_list *out, const json_t *schema) {
    return schema ? cpa_schema_list_add(reader, out, schema) : CPA_OK;
}

cpa_status cpa_schema_of_member(const cpa_schema_reader *reader, const cpa_schema_form *form, const char *name,
                                cpa_schema_list *out) {
    for (int i = 0; i < form->objects.n; i++) {
        const json_t *part = form->objects.parts[i];
        const json_t *member = json_object_get(json_object_get(part, "properties"), name);
        int is_named = member != NULL;
        cpa_status status = add(reader, out, member);
        const char *pattern;
        json_t *schema;
        json_object_foreach(json_object_get(part, "patternProperties"), pattern, schema) {
            int matches = 0;
            if (status == CPA_OK) status = is_in(reader, part, pattern, name, &matches);
            if (status == CPA_OK && matches) status = add(reader, out, schema);
            is_named |= matches;
        }
        if (status == CPA_OK && !is_named) status = add(reader, out, json_object_get(part, "additionalProperties"));
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

cpa_status cpa_schema_of_others(const cpa_schema_reader *reader, const cpa_schema_form *form, unsigned matched,
                                cpa_schema_list *out) {
    unsigned bit = 1;
    for (int i = 0; i < form->objects.n; i++) {
        const json_t *part = form->objects.parts[i];
        int is_named = 0;
        cpa_status status = CPA_OK;
        const char *pattern;
        json_t *schema;
        json_object_foreach(json_object_get(part, "patternProperties"), pattern, schema) {
            if (status == CPA_OK && (matched & bit)) status = add(reader, out, schema);
            is_named |= (matched & bit) != 0;
            bit <<= 1;
        }
        if (status == CPA_OK && !is_named) status = add(reader, out, json_object_get(part, "additionalProperties"));
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

cpa_status cpa_schema_patterns(const cpa_schema_reader *reader, const cpa_schema_form *form,
                               const char *patterns[CPA_MOST_NAME_PATTERNS], int *n) {
    *n = 0;
    for (int i = 0; i < form->objects.n; i++) {
        const json_t *part = form->objects.parts[i];
        const char *pattern;
        json_t *schema;
        json_object_foreach(json_object_get(part, "patternProperties"), pattern, schema) {
            if (*n == CPA_MOST_NAME_PATTERNS) {
                return cpa_schema_fail(reader, CPA_UNSUPPORTED, part, "patternProperties: more than %d patterns",
                                       CPA_MOST_NAME_PATTERNS);
            }
            patterns[(*n)++] = pattern;
        }
    }
    return CPA_OK;
}

int cpa_schema_requires(const cpa_schema_form *form, const char *name) {
    for (int i = 0; i < form->required.n; i++) {
        const json_t *names = form->required.parts[i];
        for (size_t k = 0; k < json_array_size(names); k++) {
            if (strcmp(json_string_value(json_array_get(names, k)), name) == 0) return 1;
        }
    }
    return 0;
}

/* ---- Strings ---- */

/* *out, which takes all where it is the first, takes only what *part takes too, which is released. */
static cpa_status narrow(const cpa_schema_reader *reader, const json_t *schema, int *is_first, cpa_dfa *out,
                         cpa_dfa *part) {
    cpa_error why;
    if (*is_first) {
        *out = *part;
        *is_first = 0;
        return CPA_OK;
    }
    const cpa_status status = cpa_dfa_narrow(out, part, 0, reader->effort, &why);
    return status == CPA_OK ? CPA_OK
                            : cpa_schema_fail(reader, status, schema, "pattern, format and lengths: %s", why.message);
}

static cpa_status narrow_by(const cpa_schema_reader *reader, const json_t *schema, int *is_first, cpa_dfa *out) {
    const json_t *pattern = json_object_get(schema, "pattern"), *format = json_object_get(schema, "format");
    cpa_dfa part = {0};
    if (pattern) {
        if (!json_is_string(pattern)) return cpa_schema_fail(reader, CPA_INVALID, schema, "pattern: expected a string");
        cpa_status status = cpa_schema_expression(reader, schema, "pattern", json_string_value(pattern), 0, &part);
        if (status == CPA_OK) status = narrow(reader, schema, is_first, out, &part);
        if (status != CPA_OK) return status;
    }
    if (!format) return CPA_OK;
    const char *name = json_string_value(format), *expression = name ? cpa_string_format(name) : NULL;
    if (!expression) {
        return cpa_schema_fail(reader, CPA_UNSUPPORTED, schema, "format: %.80s is not supported",
                               name ? name : "what is no string");
    }
    part = (cpa_dfa){.n_states = 0};
    const cpa_status status = cpa_schema_expression(reader, schema, "format", expression, 1, &part);
    return status == CPA_OK ? narrow(reader, schema, is_first, out, &part) : status;
}

cpa_status cpa_schema_strings(const cpa_schema_reader *reader, const cpa_schema_form *form, int *is_free,
                              cpa_dfa *out) {
    cpa_dfa dfa = {0}, part = {0};
    cpa_error why;
    int is_first = 1;
    cpa_status status = CPA_OK;
    for (int i = 0; status == CPA_OK && i < form->strings.n; i++) {
        status = narrow_by(reader, form->strings.parts[i], &is_first, &dfa);
    }
    *is_free = is_first;
    if (status == CPA_OK && !is_first && (form->least_characters > 0 || form->most_characters >= 0)) {
        const json_t *schema = form->strings.parts[0];
        status = cpa_dfa_of_lengths(form->least_characters, form->most_characters, reader->effort, &part, &why);
        status = status == CPA_OK ? narrow(reader, schema, &is_first, &dfa, &part)
                                  : cpa_schema_fail(reader, status, schema, "minLength and maxLength: %s", why.message);
    }
    if (status == CPA_OK) {
        *out = dfa;
    } else {
        cpa_dfa_release(&dfa);
    }
    return status;
}
