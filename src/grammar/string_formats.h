/* The values of JSON Schema's `format`, as regular expressions of texts that have them: not of all such texts always,
 * but of none that have not. */
#ifndef CPA_GRAMMAR_STRING_FORMATS_H
#define CPA_GRAMMAR_STRING_FORMATS_H

/* NULL for a format that is not known. */
const char *cpa_string_format(const char *name);

#endif
