/* Many connections to a server at once, by sockets, so that a test may do what no client library does: begin a request
 * and go, read nothing, send what is no HTTP. */
#ifndef CPA_TESTS_HTTP_CONNECTIONS_H
#define CPA_TESTS_HTTP_CONNECTIONS_H

#include <stddef.h>
#include <stdint.h>

/* Zeros, the request, and what else is wanted, to begin with. */
typedef struct http_connection {
    const char *request; /* [request_bytes], the caller's */
    size_t request_bytes;
    size_t leaves_at;      /* it closes when so many bytes of the reply are there; 0: never */
    double leaves_after_s; /* and so long after it was opened; 0: never */
    int leaves_hard;       /* with a reset */
    int says_end;          /* it tells that nothing more comes, once the request is sent */
    int reads_nothing;     /* until http_reads_again */

    int fd; /* 0: not open */
    size_t sent;
    double began_s, ended_s;
    char *reply; /* [bytes] and a zero; http_release */
    size_t bytes, capacity;
    int has_ended; /* the server has closed it, or this side has gone */
    int has_left;  /* this side */
} http_connection;

/* Opens those of the n connections that are not, sends, and reads, until all have ended, those that read nothing are
 * sent, or `limit_s` is over. How many are not there yet; -1 if a connection could not be opened. */
int64_t http_run(int port, http_connection *connections, int64_t n, double limit_s);

/* A connection that reads nothing reads in the next http_run, and has room for much. */
void http_reads_again(http_connection *connection);

void http_release(http_connection *connections, int64_t n);

/* The status of a reply; 0 if it is none. */
int http_status(const http_connection *connection);

/* The body of a reply, without what chunked encoding puts around it, for free(); NULL if it is not whole. */
char *http_body(const http_connection *connection);

/* GET of a path: the body of a reply of status 200, for free(); NULL if there is none within ten seconds. */
char *http_get(int port, const char *path);

/* A POST of a body, for free(). */
char *http_post_text(const char *path, const char *body);

#endif
