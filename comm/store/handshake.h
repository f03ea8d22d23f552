/* How a connection between two ranks begins. Each end proves to the other that it knows the key of the job, by
 * HMAC-SHA-256 over random numbers of both ends and over what who connects says about itself, so that a proof holds for
 * one connection, one rank and one purpose:
 *
 *     who connects                       who listens
 *     hello, with a random number  -->
 *                                  <--   challenge: a random number
 *     proof                        -->   is checked before anything else counts
 *                                  <--   answer, with a proof
 *
 * Nothing that follows is encrypted or signed. */
#ifndef CPA_STORE_HANDSHAKE_H
#define CPA_STORE_HANDSHAKE_H

#include <stdint.h>

#include <cpattn/status.h>

#include "comm/store/socket.h"

enum { CPA_KEY_BYTES = 32, CPA_NONCE_BYTES = 32, CPA_PROOF_BYTES = 32 };

#define CPA_HANDSHAKE_MAGIC UINT64_C(0x63706174746e3032) /* "cpattn02" */

/* How long who connects may take in all to prove who it is. */
#define CPA_HANDSHAKE_S 5.0

/* What the ranks of a job know, and nobody else. */
typedef struct cpa_job_key {
    unsigned char bytes[CPA_KEY_BYTES];
} cpa_job_key;

/* The key that follows from `key` and some bytes; key NULL: one that everybody knows. */
cpa_status cpa_job_key_derive(const cpa_job_key *key, const void *data, int64_t bytes, cpa_job_key *out,
                              cpa_error *err);
/* Fills memory with random bytes of the kernel. */
cpa_status cpa_random_fill(void *out, int64_t bytes, cpa_error *err);

/* What a connection is for. */
typedef enum cpa_purpose { CPA_PURPOSE_MEET = 1, CPA_PURPOSE_MESSAGES, CPA_PURPOSE_WATCH } cpa_purpose;

/* What who connects says about itself: rank `rank` of `size` wants to reach rank `to`. */
typedef struct cpa_hello {
    uint64_t magic;
    int32_t purpose; /* cpa_purpose */
    int32_t rank, to, size;
    unsigned char nonce[CPA_NONCE_BYTES];
} cpa_hello;

typedef struct cpa_challenge {
    uint64_t magic;
    unsigned char nonce[CPA_NONCE_BYTES];
} cpa_challenge;

typedef struct cpa_proof {
    unsigned char bytes[CPA_PROOF_BYTES];
} cpa_proof;

typedef enum cpa_verdict { CPA_VERDICT_WELCOME = 1, CPA_VERDICT_OTHER_KEY } cpa_verdict;

typedef struct cpa_reply {
    int64_t verdict; /* cpa_verdict */
    cpa_proof proof; /* proof that the listener knows the key; zeros where the caller does not */
} cpa_reply;

/* The proof of the end that connects, or of the one that listens. */
cpa_status cpa_proof_make(const cpa_job_key *key, int listens, const cpa_hello *hello, const cpa_challenge *challenge,
                          cpa_proof *out, cpa_error *err);
/* In a time that does not depend on how much of them is equal. */
int cpa_proof_is_equal(const cpa_proof *a, const cpa_proof *b);

/* Who wants to connect: purpose, rank, to and size; the rest is filled in. */
typedef struct cpa_caller {
    cpa_hello hello;
    const cpa_job_key *key;
} cpa_caller;

/* Connects to where a rank listens, and tries again until the deadline where that does not answer, or hangs up before it
 * has. Ends at once, with CPA_INVALID, where the other end has another key, and with CPA_COMM where it is no rank. */
cpa_status cpa_handshake_connect(const cpa_caller *caller, const cpa_endpoint *to, double deadline, int *fd,
                                 cpa_error *err);

#endif
