/* Files that are read from end to end. */
#ifndef CPA_FILE_H
#define CPA_FILE_H

#include <stdio.h>

#include <cpattn/status.h>

/* Opens a regular file to read its bytes. NULL, with the reason in *why, if there is none: what is another kind of
 * file, such as a pipe without a writer, is not waited for. */
FILE *cpa_file_open(const char *path, const char **why);

/* The status of a call on a file that has failed, by errno: CPA_NO_MEMORY, or `otherwise`. */
cpa_status cpa_file_failure(cpa_status otherwise);

#endif
