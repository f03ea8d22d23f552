/* A client that is not kind, for tests of `cp_attn serve`:
 *     test_http_client PORT streams CONNECTIONS PROMPT=ANSWER...
 *     test_http_client PORT cancels CLIENTS
 *     test_http_client PORT stall SECONDS
 *     test_http_client PORT corpus FILE LOG
 *     test_http_client PORT get PATH                  prints the body, once the status is 200 (waits for a minute) */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "tests/program/http/connections.h"
#include "tests/program/http/corpus.h"
#include "tests/program/http/load.h"

static int print_body(int port, const char *path) {
    enum { MOST_TRIES = 600 };
    const struct timespec moment = {.tv_nsec = 100000000};
    for (int i = 0; i < MOST_TRIES; i++) {
        char *body = http_get(port, path);
        if (body) printf("%s", body);
        free(body);
        if (body) return 0;
        nanosleep(&moment, NULL);
    }
    return 1;
}

int main(int argc, char **argv) {
    struct rlimit files;
    signal(SIGPIPE, SIG_IGN);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    const int port = argc > 1 ? atoi(argv[1]) : 0;
    const char *what = argc > 3 ? argv[2] : "";
    if (strcmp(what, "streams") == 0) return http_streams(port, atoi(argv[3]), argv + 4, argc - 4);
    if (strcmp(what, "cancels") == 0) return http_cancels(port, atoi(argv[3]));
    if (strcmp(what, "stall") == 0) return http_stall(port, atof(argv[3]));
    if (strcmp(what, "corpus") == 0 && argc > 4) return http_corpus(port, argv[3], argv[4]);
    if (strcmp(what, "get") == 0) return print_body(port, argv[3]);
    fprintf(stderr, "usage: see tests/program/http/main.c\n");
    return 2;
}
