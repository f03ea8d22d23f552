/* JSON schemas as what an answer may be one of: alternatives, each with the constraints of one value side by side.
 *
 * The constraints of a value are a list of schemas that all hold for it: those that $ref, allOf, anyOf and oneOf name
 * join the list, and what an element of it has to hold to follows from all of them. So nothing is copied, and lists that
 * are met again, as in schemas that name themselves, are known by their pointers. */
#ifndef CPA_GRAMMAR_SCHEMA_FORMS_H
#define CPA_GRAMMAR_SCHEMA_FORMS_H

#include "src/grammar/number_range.h"
#include "src/grammar/schema_reader.h"

enum { /* kinds of values; a number is an integer or a fraction */
       CPA_KIND_NULL = 1,
       CPA_KIND_BOOLEAN = 2,
       CPA_KIND_INTEGER = 4,
       CPA_KIND_FRACTION = 8,
       CPA_KIND_STRING = 16,
       CPA_KIND_ARRAY = 32,
       CPA_KIND_OBJECT = 64,
       CPA_KIND_ANY = 127
};

enum { CPA_MOST_PARTS = 32, CPA_MOST_FORMS = 256 };

typedef struct cpa_schema_parts {
    const json_t *parts[CPA_MOST_PARTS];
    int n;
} cpa_schema_parts;

/* One alternative. */
typedef struct cpa_schema_form {
    unsigned kinds;
    cpa_schema_parts values;   /* arrays of what it may be: one of each, where there are any */
    cpa_schema_parts strings;  /* schemas with pattern or format */
    cpa_schema_parts arrays;   /* with items or prefixItems */
    cpa_schema_parts objects;  /* with properties, patternProperties or additionalProperties */
    cpa_schema_parts required; /* arrays of names */
    cpa_number_range numbers;
    int64_t least_characters, most_characters, least_items, most_items; /* most < 0: any number */
    struct {
        const json_t *schema, *array;
        size_t branch;
    } ones[CPA_MOST_PARTS]; /* for each oneOf the branch that the form is of */
    int n_ones;
} cpa_schema_form;

typedef struct cpa_schema_forms {
    cpa_schema_form *forms;
    int64_t count, capacity;
} cpa_schema_forms;

/* The alternatives of a list; the caller frees out->forms. Those of a oneOf may have values in common: that is a matter
 * of cpa_schema_check_ones. CPA_UNSUPPORTED for keywords that are not known, with their
 * place in the schema, and for values of keywords that cannot be held to; CPA_INVALID for what is no schema;
 * CPA_NO_MEMORY. */
cpa_status cpa_schema_forms_of(const cpa_schema_reader *reader, const cpa_schema_list *list, cpa_schema_forms *out);

#endif
