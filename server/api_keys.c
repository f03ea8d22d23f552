#include "server/api_keys.h"

#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

int cpa_api_keys_copy(const char *const *keys, int64_t count, cpa_api_keys *out) {
    cpa_api_keys copy = {.keys = calloc((size_t)count + 1, sizeof *copy.keys)};
    for (; copy.keys && copy.count < count; copy.count++) {
        copy.keys[copy.count] = strdup(keys[copy.count]);
        if (!copy.keys[copy.count]) break;
    }
    if (copy.keys && copy.count == count) {
        *out = copy;
        return 1;
    }
    cpa_api_keys_release(&copy);
    return 0;
}

void cpa_api_keys_release(cpa_api_keys *keys) {
    for (int64_t i = 0; i < keys->count; i++) free(keys->keys[i]);
    free(keys->keys);
    *keys = (cpa_api_keys){NULL, 0};
}

int64_t cpa_api_keys_find(const cpa_api_keys *keys, const char *authorization) {
    static const char scheme[] = "Bearer ";
    int64_t found = -1;
    if (!authorization || strncasecmp(authorization, scheme, sizeof scheme - 1) != 0) return -1;
    const char *given = authorization + sizeof scheme - 1;
    const size_t bytes = strlen(given);
    for (int64_t i = 0; i < keys->count; i++) {
        const char *key = keys->keys[i];
        if (strlen(key) == bytes && CRYPTO_memcmp(given, key, bytes) == 0) found = i;
    }
    return found;
}
