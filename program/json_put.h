/* Members of result files: each of these functions returns 0, or -1 without memory. And the files. */
#ifndef CPA_PROGRAM_JSON_PUT_H
#define CPA_PROGRAM_JSON_PUT_H

#include <jansson.h>
#include <stdint.h>

#include "program/field.h"

int cpa_json_put_int(json_t *object, const char *key, int64_t value);

/* JSON has no infinity and no NaN; they become null. */
int cpa_json_put_real(json_t *object, const char *key, double value);

/* Text that is no UTF-8 is shown as far as it is printable ASCII. */
int cpa_json_put_text(json_t *object, const char *key, const char *value);

/* The value of a field of `values` under its name: a number, true or false, or text; the word of a field that has one.
 * That of a secret one is not shown. */
int cpa_json_put_field(json_t *object, const cpa_field *field, const void *values);

/* Writes a whole file (program/output_file.h). CPA_IO, naming it, if that fails. */
cpa_status cpa_json_write(const char *path, const json_t *root, cpa_error *err);

#endif
