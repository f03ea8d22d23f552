/* Values that are given, and those that two forms have in common. */
#ifndef CPA_GRAMMAR_SCHEMA_VALUES_H
#define CPA_GRAMMAR_SCHEMA_VALUES_H

#include "src/grammar/schema_forms.h"

/* The next value, from *index on, that every list of values of a form has, and the form admits; NULL: no more. */
cpa_status cpa_schema_next_value(const cpa_schema_reader *reader, const cpa_schema_form *form, size_t *index,
                                 const json_t **out);

/* CPA_UNSUPPORTED if two forms of different branches of a oneOf may have a value in common. */
cpa_status cpa_schema_check_ones(const cpa_schema_reader *reader, const cpa_schema_forms *forms);

#endif
