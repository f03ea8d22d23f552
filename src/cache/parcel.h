/* Parcels of a prompt and the parts of them that stores keep (cpattn/blocks.h). A part, little-endian:
 *
 *     header  magic u32, version u32, part u32, parts u32, bits u32, row_bytes u32
 *     rows    [popcount(bits), row_bytes]: those of the tokens of the parcel that the part has, in their order
 *     end     SHA-256 of the key, the header and the rows
 *
 * Pure functions. */
#ifndef CPA_PARCEL_H
#define CPA_PARCEL_H

#include <cpattn/blocks.h>

#include "src/cache/prefix_cache.h"

enum { CPA_PART_HEADER_BYTES = 24, CPA_PART_DIGEST_BYTES = 32 };

typedef struct cpa_part {
    int32_t parts; /* how many the parcel has */
    uint32_t bits; /* bit i: the part has token i of the parcel */
    int64_t row_bytes;
} cpa_part;

/* How many parcels so many tokens are. */
static inline int64_t cpa_parcels(int64_t tokens) {
    return tokens / CPA_PARCEL_TOKENS + (tokens % CPA_PARCEL_TOKENS != 0);
}

/* The root of the digests of prompts with that identity, model and salt (texts; NULL counts as empty), and layers that
 * have the hash `layers`. Returns 0 if it could not be computed. */
int cpa_parcel_root(const char *identity, const char *model, const char *salt, uint64_t layers, cpa_prefix_digest *out);
/* The digest of a parcel of n tokens, at most CPA_PARCEL_TOKENS, behind `parent`, which may be where `out` is. Returns 0
 * if it could not be computed. */
int cpa_parcel_link(const cpa_prefix_digest *parent, const uint32_t *tokens, int32_t n, cpa_prefix_digest *out);

static inline int32_t cpa_part_rows(const cpa_part *part) {
    return __builtin_popcount(part->bits);
}

static inline int64_t cpa_part_bytes(const cpa_part *part) {
    return CPA_PART_HEADER_BYTES + cpa_part_rows(part) * part->row_bytes + CPA_PART_DIGEST_BYTES;
}

/* Bytes of a part with all tokens of its parcel. */
static inline int64_t cpa_part_most_bytes(int64_t row_bytes) {
    return cpa_part_bytes(&(cpa_part){1, (1U << CPA_PARCEL_TOKENS) - 1, row_bytes});
}

/* Writes header and end around the rows of a part, which lie in `bytes` already, in their place; `bytes` are
 * cpa_part_bytes. Returns 0 if the end could not be computed. */
int cpa_part_seal(const cpa_block_key *key, const cpa_part *part, uint8_t *bytes);
/* Checks n bytes, from whom ever, against the key that they were found by and the length of a row that is expected. The
 * rows begin behind the header. */
cpa_status cpa_part_open(const cpa_block_key *key, int64_t row_bytes, const uint8_t *bytes, int64_t n, cpa_part *out,
                         cpa_error *err);

#endif
