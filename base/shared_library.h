/* Libraries that are opened at run time: what may use them starts where they are missing, too. */
#ifndef CPA_BASE_SHARED_LIBRARY_H
#define CPA_BASE_SHARED_LIBRARY_H

#include <cpattn/status.h>

/* Opens a library, which stays open until the process ends: `file` is a path, or a name that the loader looks for.
 * CPA_UNSUPPORTED where there is none; the line begins with `what`, such as "nixl store". */
cpa_status cpa_library_open(const char *what, const char *file, void **out, cpa_error *err);
/* Stores a function at *function, a pointer to a function. CPA_UNSUPPORTED where the library has none of that name. */
cpa_status cpa_library_find(const char *what, void *library, const char *file, const char *name, void *function,
                            cpa_error *err);

#endif
