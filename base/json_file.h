/* Values of JSON files, checked as they are read. A message names the file and the key: "PATH: a.b: found ..., expected
 * ...". Keys whose value is null count as missing. */
#ifndef CPA_BASE_JSON_FILE_H
#define CPA_BASE_JSON_FILE_H

#include <stdint.h>

#include <jansson.h>

#include <cpattn/status.h>

/* An object of a file. */
typedef struct cpa_json {
    const char *path;   /* path of the file; the caller's */
    const char *prefix; /* the keys on the way to the object, such as "rope_scaling."; "" for the file's own */
    const json_t *object;
} cpa_json;

/* Whether a key must be there; the value of one that need not be, and is not, is left as it was. */
typedef enum cpa_json_presence { CPA_JSON_REQUIRED = 0, CPA_JSON_OPTIONAL } cpa_json_presence;

/* json_loadb with these flags: CPA_INVALID, and jansson's reason, for what is no JSON, CPA_NO_MEMORY where memory was
 * lacking. The caller calls json_decref(*out), which is set only on success. */
cpa_status cpa_json_parse(const char *text, size_t bytes, size_t flags, json_t **out, json_error_t *why);

/* Reads a file whose value is an object. CPA_IO if it cannot be read, CPA_INVALID with line and column if it is not
 * JSON. The caller calls json_decref(*out). */
cpa_status cpa_json_load(const char *path, json_t **out, cpa_error *err);

/* The value of a key, or NULL if it is missing or null. */
const json_t *cpa_json_get(const cpa_json *json, const char *key);

/* Typed and bounded values, bounds included; CPA_INVALID for others. Numbers are finite. A text lives as long as the
 * object. */
cpa_status cpa_json_int(const cpa_json *json, const char *key, cpa_json_presence presence, int64_t min, int64_t max,
                        int64_t *out, cpa_error *err);
cpa_status cpa_json_int32(const cpa_json *json, const char *key, cpa_json_presence presence, int32_t min, int32_t max,
                          int32_t *out, cpa_error *err);
cpa_status cpa_json_number(const cpa_json *json, const char *key, cpa_json_presence presence, double min, double max,
                           double *out, cpa_error *err);
cpa_status cpa_json_flag(const cpa_json *json, const char *key, int *out, cpa_error *err); /* optional */
cpa_status cpa_json_text(const cpa_json *json, const char *key, cpa_json_presence presence, const char **out,
                         cpa_error *err);

/* Fails with CPA_INVALID: "PATH: KEY: found VALUE, expected ...". */
cpa_status cpa_json_refuse(const cpa_json *json, const char *key, const char *expected, cpa_error *err);

#endif
