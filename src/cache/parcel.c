#include "src/cache/parcel.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"

enum { MAGIC = 0x42415043 /* "CPAB" */, VERSION = 1 };

/* SHA-256 of some runs of bytes. */
typedef struct run {
    const void *bytes;
    size_t n;
} run;

static int digest(const run *runs, int n_runs, uint8_t out[32]) {
    EVP_MD_CTX *hasher = EVP_MD_CTX_new();
    int ok = hasher && EVP_DigestInit_ex(hasher, EVP_sha256(), NULL);
    for (int i = 0; ok && i < n_runs; i++) ok = EVP_DigestUpdate(hasher, runs[i].bytes, runs[i].n);
    ok = ok && EVP_DigestFinal_ex(hasher, out, NULL);
    EVP_MD_CTX_free(hasher);
    return ok;
}

int cpa_parcel_root(const char *identity, const char *model, const char *salt, uint64_t layers,
                    cpa_prefix_digest *out) {
    char number[20];
    snprintf(number, sizeof number, "%016" PRIx64, layers);
    const char *texts[] = {"parcels 2", number, identity ? identity : "", model ? model : "", salt ? salt : ""};
    run runs[5];
    /* Each with its terminator: where one ends and the next begins is part of what is hashed. */
    for (int i = 0; i < 5; i++) runs[i] = (run){texts[i], strlen(texts[i]) + 1};
    return digest(runs, 5, out->bytes);
}

int cpa_parcel_link(const cpa_prefix_digest *parent, const uint32_t *tokens, int32_t n, cpa_prefix_digest *out) {
    const run runs[] = {{parent->bytes, sizeof parent->bytes}, {tokens, (size_t)n * sizeof *tokens}};
    return digest(runs, 2, out->bytes);
}

static void put(uint8_t *at, uint32_t word) {
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(word >> 8 * i);
}

static uint32_t get(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static int digest_part(const cpa_block_key *key, const uint8_t *bytes, int64_t n, uint8_t out[32]) {
    uint8_t group[4];
    put(group, (uint32_t)key->group);
    const run runs[] = {{key->digest, sizeof key->digest}, {group, sizeof group}, {bytes, (size_t)n}};
    return digest(runs, 3, out);
}

int cpa_part_seal(const cpa_block_key *key, const cpa_part *part, uint8_t *bytes) {
    const uint32_t words[] = {
        MAGIC, VERSION, (uint32_t)key->part, (uint32_t)part->parts, part->bits, (uint32_t)part->row_bytes};
    const int64_t n = cpa_part_bytes(part) - CPA_PART_DIGEST_BYTES;
    for (int i = 0; i < 6; i++) put(bytes + 4 * i, words[i]);
    return digest_part(key, bytes, n, bytes + n);
}

cpa_status cpa_part_open(const cpa_block_key *key, int64_t row_bytes, const uint8_t *bytes, int64_t n, cpa_part *out,
                         cpa_error *err) {
    uint32_t words[6];
    uint8_t found[32];
    if (n < CPA_PART_HEADER_BYTES + CPA_PART_DIGEST_BYTES)
        return cpa_fail(err, CPA_INVALID, "%" PRId64 " bytes, expected %d or more", n,
                        CPA_PART_HEADER_BYTES + CPA_PART_DIGEST_BYTES);
    for (int i = 0; i < 6; i++) words[i] = get(bytes + 4 * i);
    const cpa_part part = {(int32_t)words[3], words[4], words[5]};
    if (words[0] != MAGIC || words[1] != VERSION)
        return cpa_fail(err, CPA_INVALID, "begins with %08" PRIx32 ", version %" PRIu32 "; expected %08x, version %d",
                        words[0], words[1], MAGIC, VERSION);
    if (words[5] != row_bytes || words[2] != (uint32_t)key->part || part.parts < 1 || part.parts > CPA_PARCEL_TOKENS ||
        part.bits >> CPA_PARCEL_TOKENS != 0 || cpa_part_bytes(&part) != n)
        return cpa_fail(err, CPA_INVALID,
                        "%" PRId64 " bytes, part %" PRIu32 " of %" PRIu32 " with %d rows of %" PRIu32
                        " bytes; expected part %" PRId32 " with rows of %" PRId64,
                        n, words[2], words[3], cpa_part_rows(&part), words[5], key->part, row_bytes);
    if (!digest_part(key, bytes, n - CPA_PART_DIGEST_BYTES, found))
        return cpa_fail(err, CPA_INTERNAL, "OpenSSL gives no SHA-256");
    if (memcmp(found, bytes + n - CPA_PART_DIGEST_BYTES, sizeof found) != 0)
        return cpa_fail(err, CPA_INVALID, "its SHA-256 begins with %02x%02x%02x%02x, it says %02x%02x%02x%02x",
                        found[0], found[1], found[2], found[3], bytes[n - 32], bytes[n - 31], bytes[n - 30],
                        bytes[n - 29]);
    *out = part;
    return CPA_OK;
}
