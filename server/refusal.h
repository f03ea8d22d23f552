/* Why a request is refused, as OpenAI's interface says it. */
#ifndef CPA_SERVER_REFUSAL_H
#define CPA_SERVER_REFUSAL_H

#include <jansson.h>

#include <cpattn/status.h>

typedef struct cpa_refusal {
    unsigned status;  /* HTTP status */
    const char *code; /* "context_length_exceeded", ...; NULL = none */
    char param[64];   /* the field that is to blame, "" if it is none */
    char message[512];
    int quotes; /* the message may have a part of the request in it, which no log shows */
} cpa_refusal;

/* Fills *refusal and returns 0, as the functions do that may refuse; they return 1 otherwise. `param` may be NULL. */
__attribute__((format(printf, 5, 6))) int cpa_refuse(cpa_refusal *refusal, unsigned status, const char *code,
                                                     const char *param, const char *format, ...);

/* 400 for CPA_INVALID and CPA_UNSUPPORTED, 429 for CPA_BUSY, 503 for CPA_STOPPED, else 500. */
int cpa_refuse_failure(cpa_refusal *refusal, const char *param, const cpa_error *err);

/* {"error": {"message", "type", "param", "code"}}; NULL without memory. */
json_t *cpa_refusal_json(const cpa_refusal *refusal);

#endif
