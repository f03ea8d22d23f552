/* The keywords of a schema. */
#ifndef CPA_GRAMMAR_SCHEMA_KEYWORDS_H
#define CPA_GRAMMAR_SCHEMA_KEYWORDS_H

#include "src/grammar/schema_reader.h"

/* CPA_UNSUPPORTED for a schema with a keyword that is neither known nor without meaning for what is valid. */
cpa_status cpa_schema_check_keywords(const cpa_schema_reader *reader, const json_t *schema);

#endif
