/* Objects inside of a JSON file, with the way to them for messages. */
#ifndef CPA_TEXT_JSON_PART_H
#define CPA_TEXT_JSON_PART_H

#include "base/json_file.h"

/* Lies where it is made: json.prefix points into it. */
typedef struct cpa_json_part {
    cpa_json json;
    char prefix[160];
    const char *type; /* the value of its key "type"; "" without, or if it is no text */
} cpa_json_part;

enum { CPA_JSON_NO_INDEX = -1 };

/* The object under a key, or element `index` of the list under it. json.object is NULL if the key is missing or null;
 * CPA_INVALID if there is anything but an object. */
cpa_status cpa_json_part_of(const cpa_json *parent, const char *key, int64_t index, cpa_json_part *out, cpa_error *err);

/* Parts that may be sequences: objects of the type "Sequence", which have a list of parts, up to eight inside each
 * other. */
typedef struct cpa_json_parts {
    const char *key;      /* key of the first part in the file's object */
    const char *list;     /* the key of a sequence's list */
    const char *too_deep; /* what is expected instead of a ninth sequence inside of eight */
    cpa_status (*read)(const cpa_json_part *part, void *out, cpa_error *err);
} cpa_json_parts;

/* Calls parts->read for each part that is no sequence, in their order, until one fails; missing ones are passed
 * over. */
cpa_status cpa_json_read_parts(const cpa_json *file, const cpa_json_parts *parts, void *out, cpa_error *err);

/* Fails with CPA_UNSUPPORTED: "PATH: KEY: found VALUE, expected ...". */
cpa_status cpa_json_unsupported(const cpa_json *json, const char *key, const char *expected, cpa_error *err);

/* The list under a key. CPA_INVALID if there is anything else; *out is NULL if the key is missing or null. */
cpa_status cpa_json_list(const cpa_json *json, const char *key, const json_t **out, cpa_error *err);

#endif
