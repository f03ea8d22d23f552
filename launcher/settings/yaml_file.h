/* A YAML file that is one flat mapping of names to single values, each with the line it stands on. */
#ifndef CPA_LAUNCHER_YAML_FILE_H
#define CPA_LAUNCHER_YAML_FILE_H

#include <cpattn/status.h>

#include "program/field.h"

typedef struct cpa_yaml_entry {
    const cpa_field *field;
    char *value;
    int line;
} cpa_yaml_entry;

typedef struct cpa_yaml_file {
    cpa_yaml_entry *entries;
    int n_entries;
} cpa_yaml_file;

/* Reads the file, of at most 1 MiB; its keys must be names of `fields`, each at most once. Errors are CPA_INVALID,
 * "PATH:LINE: found ..., expected ...". *out is set only on success and released by cpa_yaml_close. */
cpa_status cpa_yaml_open(const char *path, const cpa_field *fields, int n_fields, cpa_yaml_file *out, cpa_error *err);
void cpa_yaml_close(cpa_yaml_file *file);

#endif
