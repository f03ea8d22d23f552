#include "tests/bench/stub_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CONNECTIONS = 256, REQUEST_BYTES = 1 << 16, NAP_MS = 5 };

struct cpa_stub {
    const cpa_stub_script *script;
    int listener, port;
    pthread_t thread;
    pthread_mutex_t lock;
    bool stopping;
    int healths, posts, at_once, most_at_once;
    char *requests[MOST_CONNECTIONS]; /* of POSTs */
    pthread_t threads[MOST_CONNECTIONS];
    int n_threads;
};

typedef struct connection {
    cpa_stub *stub;
    int socket;
} connection;

static void nap(int ms) {
    const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&time, NULL);
}

static bool is_stopping(cpa_stub *stub) {
    pthread_mutex_lock(&stub->lock);
    const bool stopping = stub->stopping;
    pthread_mutex_unlock(&stub->lock);
    return stopping;
}

/* Reads until the request is whole; its text, or NULL if the client has gone. */
static char *read_request(cpa_stub *stub, int socket) {
    char *text = calloc(1, REQUEST_BYTES);
    size_t count = 0, body = 0;
    while (!is_stopping(stub) && count + 1 < REQUEST_BYTES) {
        struct pollfd ready = {.fd = socket, .events = POLLIN};
        if (poll(&ready, 1, NAP_MS) == 0) continue;
        const ssize_t got = read(socket, text + count, REQUEST_BYTES - 1 - count);
        if (got <= 0) break;
        count += (size_t)got;
        const char *end = strstr(text, "\r\n\r\n"), *length = strcasestr(text, "\r\nContent-Length:");
        if (!end) continue;
        body = length && length < end ? strtoul(length + 17, NULL, 10) : 0;
        if (count >= (size_t)(end + 4 - text) + body) return text;
    }
    free(text);
    return NULL;
}

static void write_bytes(cpa_stub *stub, int socket, const cpa_stub_answer *answer) {
    const size_t total = strlen(answer->bytes), piece = answer->piece ? answer->piece : total;
    for (size_t at = 0; at < total && !is_stopping(stub); at += piece) {
        if (answer->delay_ms) nap(answer->delay_ms);
        if (send(socket, answer->bytes + at, total - at < piece ? total - at : piece, MSG_NOSIGNAL) < 0) return;
    }
    while (answer->stays && !is_stopping(stub)) nap(NAP_MS);
}

static void answer_post(cpa_stub *stub, int socket, char *text) {
    pthread_mutex_lock(&stub->lock);
    const int number = stub->posts++;
    stub->requests[number] = text;
    if (++stub->at_once > stub->most_at_once) stub->most_at_once = stub->at_once;
    pthread_mutex_unlock(&stub->lock);
    write_bytes(stub, socket, &stub->script->answers[number % stub->script->n_answers]);
    pthread_mutex_lock(&stub->lock);
    stub->at_once--;
    pthread_mutex_unlock(&stub->lock);
}

static void answer_get(cpa_stub *stub, int socket, const char *text) {
    static const char missing[] = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
    static const char starting[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
    cpa_stub_answer answer = {.bytes = NULL};
    if (strncmp(text, "GET /health ", 12) == 0) {
        pthread_mutex_lock(&stub->lock);
        answer.bytes = stub->healths++ < stub->script->failures ? starting : stub->script->health;
        pthread_mutex_unlock(&stub->lock);
    }
    if (strncmp(text, "GET /v1/models ", 15) == 0) answer.bytes = stub->script->models;
    if (!answer.bytes) answer.bytes = missing;
    write_bytes(stub, socket, &answer);
}

static void *serve(void *ctx) {
    connection c = *(connection *)ctx;
    free(ctx);
    char *text = read_request(c.stub, c.socket);
    if (text && strncmp(text, "POST ", 5) == 0) {
        answer_post(c.stub, c.socket, text);
    } else if (text) {
        answer_get(c.stub, c.socket, text);
        free(text);
    }
    close(c.socket);
    return NULL;
}

static void *listen_for_clients(void *ctx) {
    cpa_stub *stub = ctx;
    while (!is_stopping(stub)) {
        struct pollfd ready = {.fd = stub->listener, .events = POLLIN};
        if (poll(&ready, 1, NAP_MS) != 1 || stub->n_threads == MOST_CONNECTIONS) continue;
        connection *c = malloc(sizeof *c);
        *c = (connection){stub, accept(stub->listener, NULL, NULL)};
        if (c->socket < 0 || pthread_create(&stub->threads[stub->n_threads], NULL, serve, c) != 0) {
            if (c->socket >= 0) close(c->socket);
            free(c);
            continue;
        }
        stub->n_threads++;
    }
    return NULL;
}

cpa_stub *cpa_stub_start(const cpa_stub_script *script) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    cpa_stub *stub = calloc(1, sizeof *stub);
    stub->script = script;
    pthread_mutex_init(&stub->lock, NULL);
    stub->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(stub->listener, (struct sockaddr *)&address, length) == 0 && listen(stub->listener, 128) == 0 &&
        getsockname(stub->listener, (struct sockaddr *)&address, &length) == 0 &&
        pthread_create(&stub->thread, NULL, listen_for_clients, stub) == 0) {
        stub->port = ntohs(address.sin_port);
        return stub;
    }
    close(stub->listener);
    free(stub);
    return NULL;
}

void cpa_stub_stop(cpa_stub *stub) {
    pthread_mutex_lock(&stub->lock);
    stub->stopping = true;
    pthread_mutex_unlock(&stub->lock);
    pthread_join(stub->thread, NULL);
    for (int t = 0; t < stub->n_threads; t++) pthread_join(stub->threads[t], NULL);
    close(stub->listener);
    for (int i = 0; i < stub->posts; i++) free(stub->requests[i]);
    pthread_mutex_destroy(&stub->lock);
    free(stub);
}

int cpa_stub_port(const cpa_stub *stub) {
    return stub->port;
}

int cpa_stub_count(cpa_stub *stub) {
    pthread_mutex_lock(&stub->lock);
    const int count = stub->posts;
    pthread_mutex_unlock(&stub->lock);
    return count;
}

int cpa_stub_most_at_once(cpa_stub *stub) {
    pthread_mutex_lock(&stub->lock);
    const int most = stub->most_at_once;
    pthread_mutex_unlock(&stub->lock);
    return most;
}

const char *cpa_stub_request(cpa_stub *stub, int number) {
    return number < cpa_stub_count(stub) ? stub->requests[number] : NULL;
}
