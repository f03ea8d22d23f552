/* A JSON schema that is read: what its files share. */
#ifndef CPA_GRAMMAR_SCHEMA_READER_H
#define CPA_GRAMMAR_SCHEMA_READER_H

#include <jansson.h>

#include "src/grammar/effort.h"

typedef struct cpa_schema_reader {
    const json_t *root;
    json_t *made; /* an array of what was made of its parts */
    cpa_effort *effort;
    cpa_error *err;
} cpa_schema_reader;

enum { CPA_MOST_SCHEMAS = 64 };

/* Schemas that all hold for one value, each once: objects and false. */
typedef struct cpa_schema_list {
    const json_t *schemas[CPA_MOST_SCHEMAS];
    int n;
} cpa_schema_list;

/* Adds a schema to a list where it is not there yet; true, of which nothing follows, is left out. CPA_INVALID for what
 * is no schema, CPA_UNSUPPORTED if there are too many. */
cpa_status cpa_schema_list_add(const cpa_schema_reader *reader, cpa_schema_list *list, const json_t *schema);

/* Takes off so many visits; fails once there is no effort left. */
cpa_status cpa_schema_spend(const cpa_schema_reader *reader, int64_t visits);

/* Fails with a line that has the place of a schema in front, if it is a part of the root. */
__attribute__((format(printf, 4, 5))) cpa_status cpa_schema_fail(const cpa_schema_reader *reader, cpa_status status,
                                                                 const json_t *schema, const char *format, ...);

#endif
