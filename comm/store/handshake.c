#include "comm/store/handshake.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "base/check.h"
#include "base/clock.h"

/* How long to wait before who has hung up is tried again. */
#define RETRY_NS 50000000L

_Static_assert(sizeof(cpa_hello) == 56 && sizeof(cpa_challenge) == 40 && sizeof(cpa_reply) == 40, "no padding");

static cpa_status authenticate(const cpa_job_key *key, const void *data, size_t bytes, unsigned char out[32],
                               cpa_error *err) {
    unsigned int length = 0;
    if (!HMAC(EVP_sha256(), key->bytes, sizeof key->bytes, data, bytes, out, &length) || length != 32)
        return cpa_fail(err, CPA_NO_MEMORY, "HMAC-SHA-256 of libcrypto failed");
    return CPA_OK;
}

cpa_status cpa_job_key_derive(const cpa_job_key *key, const void *data, int64_t bytes, cpa_job_key *out,
                              cpa_error *err) {
    static const cpa_job_key known = {{0}};
    return authenticate(key ? key : &known, data, (size_t)bytes, out->bytes, err);
}

cpa_status cpa_random_fill(void *out, int64_t bytes, cpa_error *err) {
    for (int64_t at = 0; at < bytes;) {
        ssize_t n = getrandom((char *)out + at, (size_t)(bytes - at), 0);
        if (n < 0 && errno != EINTR) return cpa_fail(err, CPA_COMM, "getrandom: %s", strerror(errno));
        if (n > 0) at += n;
    }
    return CPA_OK;
}

cpa_status cpa_proof_make(const cpa_job_key *key, int listens, const cpa_hello *hello, const cpa_challenge *challenge,
                          cpa_proof *out, cpa_error *err) {
    const struct {
        uint64_t side;
        cpa_hello hello;
        cpa_challenge challenge;
    } said = {.side = (uint64_t)(listens != 0), .hello = *hello, .challenge = *challenge};
    return authenticate(key, &said, sizeof said, out->bytes, err);
}

int cpa_proof_is_equal(const cpa_proof *a, const cpa_proof *b) {
    return CRYPTO_memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

/* What came of one connection. */
typedef enum outcome { MET, HUNG_UP, FAILED } outcome;

/* Fails where what the other end says is wrong, and not where it hangs up, or says nothing in time. */
static outcome introduce(const cpa_caller *caller, int fd, double deadline, cpa_error *err) {
    cpa_hello hello = caller->hello;
    cpa_challenge challenge;
    cpa_reply answer;
    cpa_proof own, theirs;
    hello.magic = CPA_HANDSHAKE_MAGIC;
    if (cpa_random_fill(hello.nonce, sizeof hello.nonce, err) != CPA_OK) return FAILED;
    if (cpa_socket_send(fd, &hello, sizeof hello, deadline, NULL) != CPA_OK) return HUNG_UP;
    if (cpa_socket_receive(fd, &challenge, sizeof challenge, deadline, NULL) != CPA_OK) return HUNG_UP;
    if (challenge.magic != CPA_HANDSHAKE_MAGIC) {
        cpa_fail(err, CPA_COMM, "what answers is no rank of a job");
        return FAILED;
    }
    if (cpa_proof_make(caller->key, 0, &hello, &challenge, &own, err) != CPA_OK ||
        cpa_proof_make(caller->key, 1, &hello, &challenge, &theirs, err) != CPA_OK)
        return FAILED;
    if (cpa_socket_send(fd, &own, sizeof own, deadline, NULL) != CPA_OK) return HUNG_UP;
    if (cpa_socket_receive(fd, &answer, sizeof answer, deadline, NULL) != CPA_OK) return HUNG_UP;
    if (answer.verdict == CPA_VERDICT_WELCOME && cpa_proof_is_equal(&answer.proof, &theirs)) return MET;
    cpa_fail(err, CPA_INVALID, "the secret there is another one than here");
    return FAILED;
}

cpa_status cpa_handshake_connect(const cpa_caller *caller, const cpa_endpoint *to, double deadline, int *fd,
                                 cpa_error *err) {
    const struct timespec pause = {.tv_nsec = RETRY_NS};
    const char *address = to->n_addresses ? to->addresses[0] : "?";
    cpa_error why = {CPA_OK, ""};
    do {
        CPA_TRY(cpa_socket_connect(to, deadline, fd, err));
        const outcome met = introduce(caller, *fd, deadline, &why);
        if (met == MET) return CPA_OK;
        cpa_socket_close(fd);
        if (met == FAILED)
            return cpa_fail(err, why.status, "rank %d at %s port %d: %.300s", caller->hello.to, address, to->port,
                            why.message);
        nanosleep(&pause, NULL);
    } while (cpa_clock_now() < deadline);
    return cpa_fail(err, CPA_COMM, "rank %d at %s port %d: it hung up, or said nothing", caller->hello.to, address,
                    to->port);
}
