#include "src/grammar/schema_values.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/grammar/schema_members.h"

enum {
    MOST_DEEP = 16,
    VALUE_VISITS = 50 /* that a value, or two forms side by side, is about as much work as */
};

/* ---- One value ---- */

static unsigned kind_of(const json_t *value) {
    switch (json_typeof(value)) {
        case JSON_NULL: return CPA_KIND_NULL;
        case JSON_TRUE:
        case JSON_FALSE: return CPA_KIND_BOOLEAN;
        case JSON_INTEGER: return CPA_KIND_INTEGER;
        case JSON_REAL:
            return floor(json_real_value(value)) == json_real_value(value) ? CPA_KIND_INTEGER : CPA_KIND_FRACTION;
        case JSON_STRING: return CPA_KIND_STRING;
        case JSON_ARRAY: return CPA_KIND_ARRAY;
        case JSON_OBJECT: return CPA_KIND_OBJECT;
    }
    return 0;
}

/* JSON Schema takes 1 and 1.0 for the same. */
static int are_equal(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    if (json_typeof(a) != json_typeof(b)) return 0;
    const size_t n = json_is_array(a) ? json_array_size(a) : json_object_size(a);
    if (!json_is_array(a) && !json_is_object(a)) return json_equal(a, b);
    if (n != (json_is_array(b) ? json_array_size(b) : json_object_size(b))) return 0;
    const char *key;
    json_t *value;
    size_t index;
    json_array_foreach((json_t *)(uintptr_t)a, index, value) {
        if (!are_equal(value, json_array_get(b, index))) return 0;
    }
    json_object_foreach((json_t *)(uintptr_t)a, key, value) {
        const json_t *other = json_object_get(b, key);
        if (!other || !are_equal(value, other)) return 0;
    }
    return 1;
}

static int64_t characters(const json_t *string) {
    int64_t n = 0;
    for (const char *s = json_string_value(string); *s; s++) n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

static cpa_status admits_string(const cpa_schema_reader *r, const cpa_schema_form *form, const json_t *value,
                                int *admits) {
    cpa_schema_form any_length = *form;
    any_length.least_characters = 0;
    any_length.most_characters = -1;
    const int64_t n = characters(value);
    *admits = n >= form->least_characters && (form->most_characters < 0 || n <= form->most_characters);
    cpa_dfa dfa = {0};
    int is_free;
    CPA_TRY(cpa_schema_strings(r, &any_length, &is_free, &dfa));
    if (!is_free && !cpa_dfa_takes(&dfa, json_string_value(value), json_string_length(value))) *admits = 0;
    cpa_dfa_release(&dfa);
    return CPA_OK;
}

static cpa_status admits_by_list(const cpa_schema_reader *r, const cpa_schema_list *list, const json_t *value,
                                 int depth, int *admits);

static cpa_status admits_parts(const cpa_schema_reader *r, const cpa_schema_form *form, const json_t *value, int depth,
                               int *admits) {
    const char *name;
    json_t *part;
    size_t index;
    cpa_schema_list list;
    *admits = 1;
    if (json_is_array(value)) {
        const int64_t n = (int64_t)json_array_size(value);
        *admits = n >= form->least_items && (form->most_items < 0 || n <= form->most_items);
    }
    json_array_foreach((json_t *)(uintptr_t)value, index, part) {
        list.n = 0;
        CPA_TRY(cpa_schema_of_item(r, form, (int64_t)index, &list));
        if (*admits) CPA_TRY(admits_by_list(r, &list, part, depth + 1, admits));
    }
    json_object_foreach((json_t *)(uintptr_t)value, name, part) {
        list.n = 0;
        CPA_TRY(cpa_schema_of_member(r, form, name, &list));
        if (*admits) CPA_TRY(admits_by_list(r, &list, part, depth + 1, admits));
    }
    for (int i = 0; json_is_object(value) && i < form->required.n; i++) {
        json_array_foreach((json_t *)(uintptr_t)form->required.parts[i], index, part) {
            if (!json_object_get(value, json_string_value(part))) *admits = 0;
        }
    }
    return CPA_OK;
}

static cpa_status admits_deep(const cpa_schema_reader *r, const cpa_schema_form *form, const json_t *value, int depth,
                              int *admits) {
    *admits = 0;
    if (!(kind_of(value) & form->kinds)) return CPA_OK;
    if (depth > MOST_DEEP) return cpa_schema_fail(r, CPA_UNSUPPORTED, NULL, "enum: values more than %d deep", depth);
    if (json_is_number(value)) *admits = cpa_number_range_has(&form->numbers, json_number_value(value));
    if (json_is_boolean(value) || json_is_null(value)) *admits = 1;
    if (json_is_string(value)) return admits_string(r, form, value, admits);
    if (json_is_array(value) || json_is_object(value)) return admits_parts(r, form, value, depth, admits);
    return CPA_OK;
}

/* Whether lists `first` and on of a form's values all have this one. */
static int is_listed(const cpa_schema_reader *r, const cpa_schema_form *form, int first, const json_t *value) {
    for (int i = first; i < form->values.n; i++) {
        const size_t n = json_array_size(form->values.parts[i]);
        int found = 0;
        cpa_effort_spend(r->effort, (int64_t)n);
        for (size_t k = 0; !found && k < n; k++) found = are_equal(value, json_array_get(form->values.parts[i], k));
        if (!found) return 0;
    }
    return 1;
}

static cpa_status admits_by_list(const cpa_schema_reader *r, const cpa_schema_list *list, const json_t *value,
                                 int depth, int *admits) {
    cpa_schema_forms forms;
    CPA_TRY(cpa_schema_forms_of(r, list, &forms));
    cpa_status status = cpa_schema_check_ones(r, &forms);
    *admits = 0;
    for (int64_t i = 0; status == CPA_OK && !*admits && i < forms.count; i++) {
        if (is_listed(r, &forms.forms[i], 0, value)) status = admits_deep(r, &forms.forms[i], value, depth, admits);
    }
    free(forms.forms);
    return status;
}

cpa_status cpa_schema_next_value(const cpa_schema_reader *reader, const cpa_schema_form *form, size_t *index,
                                 const json_t **out) {
    const json_t *values = form->values.parts[0];
    for (*out = NULL; *index < json_array_size(values) && !*out; (*index)++) {
        const json_t *value = json_array_get(values, *index);
        int admits = 0;
        CPA_TRY(cpa_schema_spend(reader, VALUE_VISITS));
        if (is_listed(reader, form, 1, value)) CPA_TRY(admits_deep(reader, form, value, 0, &admits));
        if (admits) *out = value;
    }
    return CPA_OK;
}

/* ---- Two forms ---- */

static cpa_status excludes(const cpa_schema_reader *r, const cpa_schema_form *a, const cpa_schema_form *b, int depth,
                           int *out);

/* Whether no value of the values that *a lists is of form *b. */
static cpa_status excludes_values(const cpa_schema_reader *r, const cpa_schema_form *a, const cpa_schema_form *b,
                                  int *out) {
    size_t index = 0;
    const json_t *value;
    *out = 1;
    do {
        int admits = 0;
        CPA_TRY(cpa_schema_next_value(r, a, &index, &value));
        if (value && is_listed(r, b, 0, value)) CPA_TRY(admits_deep(r, b, value, 0, &admits));
        if (admits) *out = 0;
    } while (value && *out);
    return CPA_OK;
}

/* A form without its formats: who only takes note of them may find a string of one to be of another too. */
static cpa_schema_form without_formats(const cpa_schema_form *form) {
    cpa_schema_form rest = *form;
    rest.strings.n = 0;
    for (int i = 0; i < form->strings.n; i++) {
        const json_t *part = form->strings.parts[i];
        if (!json_object_get(part, "format")) rest.strings.parts[rest.strings.n++] = part;
    }
    return rest;
}

static cpa_status excludes_strings(const cpa_schema_reader *r, const cpa_schema_form *a, const cpa_schema_form *b,
                                   int *out) {
    const cpa_schema_form forms[2] = {without_formats(a), without_formats(b)};
    cpa_dfa x = {0}, y = {0};
    cpa_error why;
    int x_is_free, y_is_free = 1;
    *out = (a->most_characters >= 0 && a->most_characters < b->least_characters) ||
           (b->most_characters >= 0 && b->most_characters < a->least_characters);
    if (*out) return CPA_OK;
    cpa_status status = cpa_schema_strings(r, &forms[0], &x_is_free, &x);
    if (status == CPA_OK) status = cpa_schema_strings(r, &forms[1], &y_is_free, &y);
    if (status == CPA_OK && !x_is_free && !y_is_free) {
        status = cpa_dfa_narrow(&x, &y, 0, r->effort, &why);
        *out = status == CPA_OK && x.n_states == 0;
        if (status == CPA_UNSUPPORTED) status = CPA_OK; /* too large to be certain */
    }
    cpa_dfa_release(&x);
    cpa_dfa_release(&y);
    return status;
}

/* Whether what holds for one member in both has no value in common. */
static cpa_status excludes_member(const cpa_schema_reader *r, const cpa_schema_form *a, const cpa_schema_form *b,
                                  const char *name, int depth, int *out) {
    cpa_schema_list lists[2] = {{.n = 0}, {.n = 0}};
    cpa_schema_forms forms[2] = {{.count = 0}, {.count = 0}};
    *out = 0;
    CPA_TRY(cpa_schema_of_member(r, a, name, &lists[0]));
    CPA_TRY(cpa_schema_of_member(r, b, name, &lists[1]));
    cpa_status status = cpa_schema_forms_of(r, &lists[0], &forms[0]);
    if (status == CPA_OK) status = cpa_schema_forms_of(r, &lists[1], &forms[1]);
    *out = status == CPA_OK;
    for (int64_t i = 0; status == CPA_OK && *out && i < forms[0].count; i++) {
        for (int64_t j = 0; status == CPA_OK && *out && j < forms[1].count; j++) {
            status = excludes(r, &forms[0].forms[i], &forms[1].forms[j], depth + 1, out);
        }
    }
    free(forms[0].forms);
    free(forms[1].forms);
    return status;
}

/* A member that one requires, and that has no value in common with what the other says of it. */
static cpa_status excludes_objects(const cpa_schema_reader *r, const cpa_schema_form *a, const cpa_schema_form *b,
                                   int depth, int *out) {
    const cpa_schema_form *forms[2] = {a, b};
    *out = 0;
    for (int f = 0; f < 2; f++) {
        const cpa_schema_parts *required = &forms[f]->required;
        for (int i = 0; i < required->n; i++) {
            for (size_t k = 0; k < json_array_size(required->parts[i]) && !*out; k++) {
                const char *name = json_string_value(json_array_get(required->parts[i], k));
                const int in_both = cpa_schema_requires(forms[1 - f], name);
                cpa_schema_list list = {.n = 0};
                if (in_both) CPA_TRY(excludes_member(r, a, b, name, depth, out));
                if (in_both) continue;
                CPA_TRY(cpa_schema_of_member(r, forms[1 - f], name, &list));
                for (int s = 0; s < list.n; s++) *out |= json_is_false(list.schemas[s]);
            }
        }
    }
    return CPA_OK;
}

static int are_apart(int64_t least, int64_t most, int64_t other_least, int64_t other_most) {
    return (most >= 0 && most < other_least) || (other_most >= 0 && other_most < least);
}

static int excludes_numbers(const cpa_number_range *a, const cpa_number_range *b) {
    return a->max < b->min || b->max < a->min || (a->max == b->min && (a->below_max || b->above_min)) ||
           (b->max == a->min && (b->below_max || a->above_min));
}

/* Whether it is certain that no value is of both forms. */
static cpa_status excludes(const cpa_schema_reader *r, const cpa_schema_form *a, const cpa_schema_form *b, int depth,
                           int *out) {
    const unsigned kinds = a->kinds & b->kinds;
    CPA_TRY(cpa_schema_spend(r, VALUE_VISITS));
    const int objects = (kinds & CPA_KIND_OBJECT) != 0, strings = (kinds & CPA_KIND_STRING) != 0;
    *out = kinds == 0;
    if (*out || depth > MOST_DEEP) return CPA_OK;
    if (a->values.n > 0) return excludes_values(r, a, b, out);
    if (b->values.n > 0) return excludes_values(r, b, a, out);
    if (kinds & (CPA_KIND_NULL | CPA_KIND_BOOLEAN)) return CPA_OK;
    if ((kinds & (CPA_KIND_INTEGER | CPA_KIND_FRACTION)) && !excludes_numbers(&a->numbers, &b->numbers)) return CPA_OK;
    if ((kinds & CPA_KIND_ARRAY) && !are_apart(a->least_items, a->most_items, b->least_items, b->most_items)) {
        return CPA_OK;
    }
    int strings_are_apart = 1, objects_are_apart = 1;
    if (strings) CPA_TRY(excludes_strings(r, a, b, &strings_are_apart));
    if (objects && strings_are_apart) CPA_TRY(excludes_objects(r, a, b, depth, &objects_are_apart));
    *out = strings_are_apart && objects_are_apart;
    return CPA_OK;
}

/* The oneOf of which two forms are in different branches; NULL if there is none. */
static const json_t *parting(const cpa_schema_form *a, const cpa_schema_form *b) {
    for (int i = 0; i < a->n_ones; i++) {
        for (int j = 0; j < b->n_ones; j++) {
            if (a->ones[i].array == b->ones[j].array && a->ones[i].branch != b->ones[j].branch) {
                return a->ones[i].schema;
            }
        }
    }
    return NULL;
}

cpa_status cpa_schema_check_ones(const cpa_schema_reader *reader, const cpa_schema_forms *forms) {
    for (int64_t i = 0; i < forms->count; i++) {
        for (int64_t j = i + 1; j < forms->count; j++) {
            const json_t *schema = parting(&forms->forms[i], &forms->forms[j]);
            int is_certain = schema == NULL;
            if (schema) CPA_TRY(excludes(reader, &forms->forms[i], &forms->forms[j], 0, &is_certain));
            if (is_certain) continue;
            return cpa_schema_fail(reader, CPA_UNSUPPORTED, schema,
                                   "oneOf: expected alternatives of which no value can be two, as by their types, or "
                                   "by the const of a required property; there is anyOf");
        }
    }
    return CPA_OK;
}
