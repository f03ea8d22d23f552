/* The file of --api-keys: a key a line; empty lines and those that begin with # are passed over. */
#ifndef CPA_LAUNCHER_API_KEYS_FILE_H
#define CPA_LAUNCHER_API_KEYS_FILE_H

#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_api_keys_file {
    char **keys; /* [count] */
    int64_t count, capacity;
} cpa_api_keys_file;

/* CPA_INVALID, with the file and the line but never a key, for a file that cannot be read or has no key in it, and for a
 * key that is there twice, is too long, or has characters that no header takes. *out is set only on success. */
cpa_status cpa_api_keys_file_read(const char *path, cpa_api_keys_file *out, cpa_error *err);
/* Adds a copy of a key; `where` is what a refusal begins with. */
cpa_status cpa_api_keys_file_add(cpa_api_keys_file *file, const char *where, const char *key, cpa_error *err);
void cpa_api_keys_file_release(cpa_api_keys_file *file);

#endif
