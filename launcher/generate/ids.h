/* Lists of token ids, as a user writes them. */
#ifndef CPA_LAUNCHER_IDS_H
#define CPA_LAUNCHER_IDS_H

#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_ids {
    uint32_t *ids; /* NULL: none */
    int64_t count;
} cpa_ids;

/* Reads ids with commas or white space between them, or those of a file, "@FILE"; an empty text has none. Each is below
 * the vocabulary. Otherwise CPA_INVALID, "WHERE: found ..., expected ...". *out is set only on success; cpa_ids_release
 * frees it. */
cpa_status cpa_ids_read(const char *where, const char *text, int64_t vocabulary, cpa_ids *out, cpa_error *err);
void cpa_ids_release(cpa_ids *ids);

#endif
