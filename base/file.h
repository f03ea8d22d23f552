/* Files that are read from end to end. */
#ifndef CPA_FILE_H
#define CPA_FILE_H

#include <stdio.h>

/* Opens a regular file to read its bytes. NULL, with the reason in *why, if there is none: what is another kind of
 * file, such as a pipe without a writer, is not waited for. */
FILE *cpa_file_open(const char *path, const char **why);

#endif
