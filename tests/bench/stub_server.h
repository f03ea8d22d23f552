/* A server that plays given answers, right or wrong, to test a client: bytes, however they are cut. */
#ifndef CPA_TESTS_STUB_SERVER_H
#define CPA_TESTS_STUB_SERVER_H

#include <stddef.h>

/* What a connection gets, which is then closed. */
typedef struct cpa_stub_answer {
    const char *bytes; /* all of HTTP, "" for none */
    size_t piece;      /* bytes of a write; 0: all at once */
    int delay_ms;      /* before each write */
    int stays;         /* the connection stays open, silent, until the server stops */
} cpa_stub_answer;

typedef struct cpa_stub_script {
    const char *health, *models;    /* answers to GET /health and GET /v1/models; NULL: 404 */
    int failures;                   /* so often /health is 503 before */
    const cpa_stub_answer *answers; /* to POST, in turn */
    int n_answers;
} cpa_stub_script;

typedef struct cpa_stub cpa_stub;

/* Listens on a free port of the loopback; NULL if it cannot. The script must outlive it. */
cpa_stub *cpa_stub_start(const cpa_stub_script *script);
/* Ends every connection. */
void cpa_stub_stop(cpa_stub *stub);

int cpa_stub_port(const cpa_stub *stub);
/* What has come so far: how many POSTs, the most of them at once, and a whole request (head and body) by its number,
 * counted from 0; NULL if there is none. */
int cpa_stub_count(cpa_stub *stub);
int cpa_stub_most_at_once(cpa_stub *stub);
const char *cpa_stub_request(cpa_stub *stub, int number);

#endif
