/* Dtypes and layouts of caches as values of fields, under the names that other libraries have for them too
 * (cpattn/names.h). */
#ifndef CPA_PROGRAM_NAMES_H
#define CPA_PROGRAM_NAMES_H

#include <cpattn/status.h>

/* *name becomes the name here of what `text` names: `named` of a field. Otherwise fails as cpattn/names.h says. */
cpa_status cpa_named_dtype(const char *text, const char **name, cpa_error *err);
cpa_status cpa_named_layout(const char *text, const char **name, cpa_error *err);

#endif
