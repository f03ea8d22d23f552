/* JSON schemas (2020-12, and what drafts 6 to 2019-09 have in common with it) as grammars: of the values that are valid,
 * in one way to write them. Members of an object come in the order of `properties`, then those that are only required,
 * then others; space and numbers are those of json_rules.h.
 *
 * Known are type, enum, const; minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf (an integer); minLength,
 * maxLength, pattern, format (string_formats.h); items, prefixItems, minItems, maxItems; properties, required,
 * patternProperties, additionalProperties; allOf, anyOf, oneOf (where its alternatives exclude each other for certain)
 * and $ref into the schema itself, also around. What only describes (title, default, ...) is passed over, and everything
 * else refused. */
#ifndef CPA_GRAMMAR_SCHEMA_H
#define CPA_GRAMMAR_SCHEMA_H

#include <jansson.h>

#include "src/grammar/json_rules.h"

/* Adds what a schema allows between two nodes. CPA_UNSUPPORTED for what is not known or too large, and CPA_INVALID for
 * what is no schema, with the place in it; CPA_NO_MEMORY. */
cpa_status cpa_schema_build(const json_t *schema, const cpa_json_rules *rules, cpa_grammar *grammar, uint32_t from,
                            uint32_t to, cpa_effort *effort, cpa_error *err);

#endif
