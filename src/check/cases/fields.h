/* Structs as text, a name and a value for each member: how a case is printed in one place and read in another. */
#ifndef CPA_CASES_FIELDS_H
#define CPA_CASES_FIELDS_H

#include <stddef.h>
#include <stdint.h>

typedef enum cpa_case_kind {
    CPA_CASE_INT32,
    CPA_CASE_INT64,
    CPA_CASE_FLOAT,
    CPA_CASE_DOUBLE,
    CPA_CASE_DTYPE,
    CPA_CASE_CHOICE, /* an int32_t, or an enum, by the name of its value */
    CPA_CASE_SET     /* an int32_t, by the names of its bits: one+other */
} cpa_case_kind;

typedef struct cpa_case_field {
    const char *name;
    cpa_case_kind kind;
    size_t at;                /* offset of the member in the struct */
    const char *const *names; /* names of a choice's values, or of a set's bits, from 0 on; NULL past the last */
} cpa_case_field;

/* The value of a member, which reads back as it is. */
void cpa_case_field_print(const cpa_case_field *field, const void *of, char *out, size_t size);
/* Sets a member; 0 if the text is no value of it. */
int cpa_case_field_read(const cpa_case_field *field, const char *text, void *of);
/* The field of that name among n, or NULL. */
const cpa_case_field *cpa_case_field_find(const cpa_case_field *fields, size_t n, const char *name);

/* Those of n members that are not 0, as name=value, a space apart; returns `out`. */
const char *cpa_case_fields_print(const cpa_case_field *fields, size_t n, const void *of, char *out, size_t size);
/* Sets the members that such a text names. 0, and which word is wrong, if one is. */
int cpa_case_fields_read(const cpa_case_field *fields, size_t n, const char *text, void *of, char *wrong, size_t size);

#endif
