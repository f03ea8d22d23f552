/* Fields of a request's JSON object, checked as they are read. A field whose value is null counts as missing, and
 * leaves *out as it was. All functions return 0, with the refusal filled, for what they do not take; a message names
 * the field and what was expected of it, and shows what was found only of numbers.
 *
 * Texts may hold any character, U+0000 too: where they are taken as strings of C, they are to be without it. */
#ifndef CPA_SERVER_FIELDS_H
#define CPA_SERVER_FIELDS_H

#include <jansson.h>
#include <stdint.h>

#include "server/refusal.h"

/* Names that were looked for in an object, in the order of their first time. */
typedef struct cpa_field_names {
    const char *names[128];
    int count;
} cpa_field_names;

typedef struct cpa_fields {
    const json_t *object;
    const char *prefix; /* prefix of names in messages, such as "stream_options."; "" for the request's own fields */
    cpa_refusal *refusal;
    cpa_field_names *looked_for; /* collects the names that were looked for; NULL: they are not collected */
} cpa_fields;

/* Parses a body, which must be an object. The caller calls json_decref(*out). */
int cpa_fields_parse(const char *body, int64_t bytes, json_t **out, cpa_refusal *refusal);

/* The value, or NULL if it is missing or null. */
const json_t *cpa_field(const cpa_fields *fields, const char *name);

/* Bounds are included. An integer may be written as 16.0. */
int cpa_field_int(const cpa_fields *fields, const char *name, int64_t min, int64_t max, int64_t *out);
int cpa_field_number(const cpa_fields *fields, const char *name, double min, double max, float *out);
int cpa_field_flag(const cpa_fields *fields, const char *name, int *out);
/* Of a text without U+0000, which lives as long as the object. */
int cpa_field_text(const cpa_fields *fields, const char *name, const char **out);
/* The fields of an object; out->object is NULL if it is missing. `names`, for those that are looked for in it, is of
 * zeros and lives as long as *out; NULL where any name may be there. */
int cpa_field_object(const cpa_fields *fields, const char *name, const char *prefix, cpa_field_names *names,
                     cpa_fields *out);

/* Whether a value is this text. */
int cpa_json_is_text(const json_t *value, const char *text);

/* Whether a text, or one within an array or an object, has the character U+0000. */
int cpa_json_has_nul(const json_t *value);

/* Whether a value is an integer of these bounds, whatever it is. */
int cpa_json_is_int(const json_t *value, int64_t min, int64_t max, int64_t *out);

/* 400: "NAME: found ..., expected EXPECTED". */
int cpa_field_refuse(const cpa_fields *fields, const char *name, const json_t *found, const char *expected);
/* 500: no memory. */
int cpa_refuse_memory(const cpa_fields *fields);

/* Refuses a field that was not looked for and whose name is nearly that of one that was: it is misspelt. Other unknown
 * fields may stand. */
int cpa_fields_check_names(const cpa_fields *fields);

/* Refuses with a reason unless the field is missing, or says by its value that nothing is asked: false, 0, or empty. */
int cpa_field_unasked(const cpa_fields *fields, const char *name, const char *reason);

#endif
