/* A client of HTTP for tests: what it sends is written by hand, what it gets is read as bytes. */
#ifndef CPA_TESTS_HTTP_CLIENT_H
#define CPA_TESTS_HTTP_CLIENT_H

#include <jansson.h>
#include <stddef.h>

/* What came back; `head` is the status line and the headers, `body` is without its chunks. */
typedef struct cpa_http_reply {
    int status; /* 0: nothing came */
    char head[4096];
    char *body; /* ends with a zero */
    size_t bytes;
} cpa_http_reply;

/* A connection to 127.0.0.1; aborts where there is none. Reads give up after 20 seconds. */
int cpa_http_connect(int port);
/* Sends as much as the server takes. */
void cpa_http_send(int fd, const char *bytes, size_t n);
/* Sends a request with a JSON body, or without one where it is NULL; `headers` are lines with "\r\n", or "". */
void cpa_http_ask(int fd, const char *method, const char *path, const char *headers, const char *body);
/* Reads until `text` has come, or n bytes have, or the end; returns the bytes that are in `out` then, a string. */
size_t cpa_http_read_until(int fd, const char *text, char *out, size_t n);

/* Sends `request`, which asks to close the connection, and reads the reply. */
void cpa_http_talk(int port, const char *request, size_t n, cpa_http_reply *out);
/* The same for a request made of parts. */
void cpa_http_request(int port, const char *method, const char *path, const char *headers, const char *body,
                      cpa_http_reply *out);
void cpa_http_reply_free(cpa_http_reply *reply);

/* The body as JSON; NULL if it is none. */
json_t *cpa_http_json(const cpa_http_reply *reply);

/* The value at a path such as "choices.0.text"; NULL if there is none. */
const json_t *cpa_json_at(const json_t *value, const char *path);
/* The string there, or "". */
const char *cpa_json_text_at(const json_t *value, const char *path);

#endif
