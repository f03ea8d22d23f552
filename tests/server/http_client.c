#include "tests/server/http_client.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int cpa_http_connect(int port) {
    const struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const struct timeval limit = {.tv_sec = 20};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&at, sizeof at)) {
        perror("connect");
        abort();
    }
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    return fd;
}

void cpa_http_send(int fd, const char *bytes, size_t n) {
    while (n > 0) {
        const ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent <= 0) return;
        bytes += sent;
        n -= (size_t)sent;
    }
}

void cpa_http_ask(int fd, const char *method, const char *path, const char *headers, const char *body) {
    char *request;
    const int n = body ? asprintf(&request, "%s %s HTTP/1.1\r\nHost: test\r\n%sContent-Length: %zu\r\n\r\n%s", method,
                                  path, headers, strlen(body), body)
                       : asprintf(&request, "%s %s HTTP/1.1\r\nHost: test\r\n%s\r\n", method, path, headers);
    if (n < 0) abort();
    cpa_http_send(fd, request, (size_t)n);
    free(request);
}

size_t cpa_http_read_until(int fd, const char *text, char *out, size_t n) {
    size_t got = 0;
    out[0] = 0;
    while (got + 1 < n && !strstr(out, text)) {
        const ssize_t read = recv(fd, out + got, n - 1 - got, 0);
        if (read <= 0) break;
        got += (size_t)read;
        out[got] = 0;
    }
    return got;
}

static char *read_all(int fd, size_t *bytes) {
    size_t capacity = 1 << 16, got = 0;
    char *all = malloc(capacity);
    for (;;) {
        if (!all) abort();
        const ssize_t read = recv(fd, all + got, capacity - got - 1, 0);
        if (read <= 0) break;
        got += (size_t)read;
        if (capacity - got < 2) all = realloc(all, capacity *= 2);
    }
    all[got] = 0;
    *bytes = got;
    return all;
}

/* Takes the lengths of chunks out of a body, in place. */
static size_t join_chunks(char *body, size_t bytes) {
    size_t from = 0, to = 0;
    while (from < bytes) {
        char *end;
        const size_t chunk = strtoul(body + from, &end, 16);
        from = (size_t)(end - body) + 2;
        if (chunk == 0 || from + chunk > bytes) break;
        memmove(body + to, body + from, chunk);
        to += chunk;
        from += chunk + 2;
    }
    return to;
}

void cpa_http_talk(int port, const char *request, size_t n, cpa_http_reply *out) {
    const int fd = cpa_http_connect(port);
    cpa_http_send(fd, request, n);
    *out = (cpa_http_reply){.status = 0};
    char *all = read_all(fd, &out->bytes), *end = strstr(all, "\r\n\r\n");
    close(fd);
    out->body = all;
    if (!end) return;
    snprintf(out->head, sizeof out->head, "%.*s", (int)(end + 2 - all), all);
    sscanf(all, "HTTP/1.%*d %d", &out->status);
    out->bytes -= (size_t)(end + 4 - all);
    memmove(all, end + 4, out->bytes);
    if (strstr(out->head, "Transfer-Encoding: chunked")) out->bytes = join_chunks(all, out->bytes);
    all[out->bytes] = 0;
}

void cpa_http_request(int port, const char *method, const char *path, const char *headers, const char *body,
                      cpa_http_reply *out) {
    char *request;
    const int n =
        asprintf(&request, "%s %s HTTP/1.1\r\nHost: test\r\nConnection: close\r\n%sContent-Length: %zu\r\n\r\n%s",
                 method, path, headers, body ? strlen(body) : 0, body ? body : "");
    if (n < 0) abort();
    cpa_http_talk(port, request, (size_t)n, out);
    free(request);
}

void cpa_http_reply_free(cpa_http_reply *reply) {
    free(reply->body);
    *reply = (cpa_http_reply){.status = 0};
}

json_t *cpa_http_json(const cpa_http_reply *reply) {
    return json_loadb(reply->body, reply->bytes, JSON_ALLOW_NUL, NULL);
}

const json_t *cpa_json_at(const json_t *value, const char *path) {
    while (value && *path) {
        const size_t bytes = strcspn(path, ".");
        char key[64];
        snprintf(key, sizeof key, "%.*s", (int)bytes, path);
        value = json_is_array(value) ? json_array_get(value, (size_t)atoi(key)) : json_object_get(value, key);
        path += bytes + (path[bytes] == '.');
    }
    return value;
}

const char *cpa_json_text_at(const json_t *value, const char *path) {
    const json_t *text = cpa_json_at(value, path);
    return json_is_string(text) ? json_string_value(text) : "";
}
