/* What a run writes: files, which are checked before it, and at its end are whole or not there at all; and standard
 * output. */
#ifndef CPA_PROGRAM_OUTPUT_FILE_H
#define CPA_PROGRAM_OUTPUT_FILE_H

#include <limits.h>
#include <stdio.h>

#include <cpattn/status.h>

typedef struct cpa_output_file {
    FILE *file;
    const char *path; /* the path of the file; the caller's */
    char name[PATH_MAX];
} cpa_output_file;

/* Checks before a run that a file can be written at `path`, and leaves what is there as it is. CPA_INVALID, naming the
 * option and the path, if not. */
cpa_status cpa_output_check(const char *option, const char *path, cpa_error *err);

/* The same of a folder that files will be put in. */
cpa_status cpa_output_check_folder(const char *option, const char *path, cpa_error *err);

/* When a run begins: the file that an earlier one has left at `path` becomes PATH.old, in the place of an older one, so
 * that what stands at `path` is always of the last run. CPA_IO, naming the path, if it cannot. */
cpa_status cpa_output_retire(const char *path, cpa_error *err);

/* Whether all that was printed has been written; CPA_IO, with the reason, if not. */
cpa_status cpa_output_flush(cpa_error *err);

/* Opens a new file beside its place. CPA_IO, naming the path, on failure. */
cpa_status cpa_output_open(const char *path, cpa_output_file *out, cpa_error *err);
/* Closes it and moves it to its place if it was written `whole`; removes it, and returns CPA_IO, if not. */
cpa_status cpa_output_close(cpa_output_file *output, int whole, cpa_error *err);

#endif
