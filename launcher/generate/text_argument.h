/* Texts that a user gives as they are or in a file. */
#ifndef CPA_LAUNCHER_TEXT_ARGUMENT_H
#define CPA_LAUNCHER_TEXT_ARGUMENT_H

#include <cpattn/status.h>

/* The argument itself, or with "@FILE" what the file holds, at most 256 MiB without zero bytes; else CPA_INVALID,
 * "WHERE: ...". The caller frees *out, which is set only on success. */
cpa_status cpa_text_argument_read(const char *where, const char *argument, char **out, cpa_error *err);

#endif
