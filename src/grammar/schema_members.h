/* What holds for the parts of a value that is of some form: elements of arrays, members of objects, and strings. */
#ifndef CPA_GRAMMAR_SCHEMA_MEMBERS_H
#define CPA_GRAMMAR_SCHEMA_MEMBERS_H

#include "src/grammar/schema_forms.h"

/* The schemas of element `index` of an array are added to *out. */
cpa_status cpa_schema_of_item(const cpa_schema_reader *reader, const cpa_schema_form *form, int64_t index,
                              cpa_schema_list *out);

/* How many elements have schemas of their own: behind them all have the same. */
int64_t cpa_schema_prefix(const cpa_schema_form *form);

/* The schemas of a member are added to *out, by its name. */
cpa_status cpa_schema_of_member(const cpa_schema_reader *reader, const cpa_schema_form *form, const char *name,
                                cpa_schema_list *out);

/* The same for members whose names are none of `properties`, and have those of the patterns in them whose bit is set in
 * `matched`: bits as cpa_schema_patterns counts them. */
cpa_status cpa_schema_of_others(const cpa_schema_reader *reader, const cpa_schema_form *form, unsigned matched,
                                cpa_schema_list *out);

enum { CPA_MOST_NAME_PATTERNS = 4 };

/* The patterns of patternProperties, of all parts; CPA_UNSUPPORTED if there are more than CPA_MOST_NAME_PATTERNS. */
cpa_status cpa_schema_patterns(const cpa_schema_reader *reader, const cpa_schema_form *form,
                               const char *patterns[CPA_MOST_NAME_PATTERNS], int *n);

int cpa_schema_requires(const cpa_schema_form *form, const char *name);

/* What an expression takes, or a line that names the keyword that it is of. */
cpa_status cpa_schema_expression(const cpa_schema_reader *reader, const json_t *schema, const char *key,
                                 const char *expression, int is_whole, cpa_dfa *out);

/* What strings patterns, formats and lengths allow; *is_free: there are no patterns and formats, and *out is nothing. */
cpa_status cpa_schema_strings(const cpa_schema_reader *reader, const cpa_schema_form *form, int *is_free, cpa_dfa *out);

#endif
