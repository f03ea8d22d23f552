/* One request of HTTP and its reply. */
#ifndef CPA_SERVER_HTTP_EXCHANGE_H
#define CPA_SERVER_HTTP_EXCHANGE_H

#include <jansson.h>
#include <microhttpd.h>
#include <stddef.h>

#include "server/refusal.h"
#include "server/server_internal.h"

typedef struct cpa_http_exchange {
    cpa_server *server;
    struct MHD_Connection *connection;
    const char *method, *path; /* without the query; live as long as the request */
    int closes;                /* the connection ends with the reply */
    int takes_interim;         /* replies 1xx before the reply: HTTP/1.1 */
    int is_incoming;           /* announced by cpa_in_flight_announce, and not yet in by cpa_in_flight_is_in */
    int64_t key;               /* index of the API key that the request came with, where one is wanted */
    char *body;                /* body of a POST */
    int64_t bytes, capacity;   /* bytes of the body */
    /* What a route has made of the body; where both are NULL it is refused. */
    struct cpa_generation *generation;
    char *reply; /* JSON */
    cpa_refusal refusal;
    struct cpa_answer *answer; /* answer to a request that is with the engine; NULL: none */
} cpa_http_exchange;

/* 413. */
int cpa_http_exchange_refuse_large(const cpa_http_exchange *exchange, cpa_refusal *refusal);
/* Adds to the body, or refuses: 413, or 503 where all bodies together are too large. */
int cpa_http_exchange_add(cpa_http_exchange *exchange, const char *bytes, int64_t n, cpa_refusal *refusal);
/* Lets go of the body. */
void cpa_http_exchange_drop_body(cpa_http_exchange *exchange);

/* Whether requests are taken; else 503. */
int cpa_http_exchange_is_ready(const cpa_http_exchange *exchange, cpa_refusal *refusal);

/* Each queues the reply and returns what the handler of a request is to return to libmicrohttpd. */

/* Takes the body, which may be NULL: there was no memory for it, and 500 is the reply. */
enum MHD_Result cpa_reply_json(cpa_http_exchange *exchange, unsigned status, json_t *body);
/* Takes the text, which is malloced; NULL as above. */
enum MHD_Result cpa_reply_text(cpa_http_exchange *exchange, const char *content_type, char *text);
/* Logs one line, too. `allow` is what 405 wants to have said, else NULL. */
enum MHD_Result cpa_reply_refusal(cpa_http_exchange *exchange, const cpa_refusal *refusal, const char *allow);

/* 204, for OPTIONS. It names no origin, so that browsers keep pages of others away from the server. */
enum MHD_Result cpa_reply_allowed(cpa_http_exchange *exchange, const char *allow);

/* What every reply says of the connection: that it ends, where the server does, or there are too many. */
void cpa_reply_headers(const cpa_http_exchange *exchange, struct MHD_Response *response);

#endif
