/* The keys that requests may bring, as "Authorization: Bearer KEY". */
#ifndef CPA_SERVER_API_KEYS_H
#define CPA_SERVER_API_KEYS_H

#include <stdint.h>

/* Constant once it is made. */
typedef struct cpa_api_keys {
    char **keys; /* [count] */
    int64_t count;
} cpa_api_keys;

/* Copies the keys. 0 without memory, and nothing is left. */
int cpa_api_keys_copy(const char *const *keys, int64_t count, cpa_api_keys *out);
void cpa_api_keys_release(cpa_api_keys *keys);

/* The index of the key that the value of the header names, which may be NULL; -1: none. In a time that tells nothing of
 * the keys but their lengths. */
int64_t cpa_api_keys_find(const cpa_api_keys *keys, const char *authorization);

#endif
