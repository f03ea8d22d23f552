/* A corpus of malformed requests. */
#ifndef CPA_TESTS_HTTP_CORPUS_H
#define CPA_TESTS_HTTP_CORPUS_H

/* Sends each request of the file to the server, one after another. Each is answered with a status of 4xx, or as the
 * file says, and the server's log, a file, has a line for it; or the connection is closed, and there is at most one.
 * The server answers the next one. 0, or 1 after a line for each that is wrong. */
int http_corpus(int port, const char *path, const char *log_path);

#endif
