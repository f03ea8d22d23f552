/* Random JSON schemas, and a plain reading of what they say. */
#ifndef CPA_TESTS_GRAMMAR_RANDOM_SCHEMA_H
#define CPA_TESTS_GRAMMAR_RANDOM_SCHEMA_H

#include <jansson.h>
#include <stdint.h>

/* A schema of the keywords that schema.h lists, but format and pattern, with definitions that name each other. */
json_t *cpa_random_schema(uint64_t seed);

/* Whether a value is valid: keyword by keyword, as the specification has it. */
int cpa_is_valid(const json_t *root, const json_t *schema, const json_t *value);

#endif
