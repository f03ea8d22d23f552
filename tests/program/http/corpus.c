#include "tests/program/http/corpus.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/program/http/connections.h"

/* ---- the file ----
 *
 * A line is a request: what is expected, what kind it is, and its text.
 *     expected   a status as 413, 4xx, "end": 4xx or a closed connection without an answer, or "any": the same, or a
 *                status of 5xx where libmicrohttpd thinks so (a version of HTTP, a line of a chunk without end)
 *     kind       raw: all of HTTP; else a POST of the text to /v1/completions (body), /v1/chat/completions (chat),
 *                /tokenize (tokenize) or /detokenize (detokenize); a raw request that breaks off, by a client that goes
 *                soon after: cut
 * In the text \r, \n, \t, \0, \\ and \xNN are what they are in C, and %{N:TEXT} is TEXT N times. Empty lines, and lines
 * that begin with #, are passed over. */

typedef struct text {
    char *bytes;
    size_t count, capacity;
} text;

static void put(text *t, char c) {
    if (t->count + 1 >= t->capacity) {
        t->capacity = 2 * t->capacity + 256;
        t->bytes = realloc(t->bytes, t->capacity);
        if (!t->bytes) abort();
    }
    t->bytes[t->count++] = c;
    t->bytes[t->count] = 0;
}

static int hex(char c) {
    return isdigit((unsigned char)c) ? c - '0' : (tolower((unsigned char)c) - 'a') + 10;
}

static void put_escaped(text *t, const char *from, const char *end);

/* %{N:TEXT}, at *from; moves it behind. */
static void put_repeated(text *t, const char **from, const char *end) {
    char *colon;
    const long times = strtol(*from + 2, &colon, 10);
    const char *close = memchr(colon, '}', (size_t)(end - colon));
    if (*colon != ':' || !close) abort();
    for (long i = 0; i < times; i++) put_escaped(t, colon + 1, close);
    *from = close + 1;
}

static void put_escaped(text *t, const char *from, const char *end) {
    static const char names[] = "rnt0\\", values[] = "\r\n\t\0\\";
    while (from < end) {
        if (from[0] == '%' && from + 1 < end && from[1] == '{') {
            put_repeated(t, &from, end);
        } else if (from[0] == '\\' && from + 3 < end && from[1] == 'x') {
            put(t, (char)(16 * hex(from[2]) + hex(from[3])));
            from += 4;
        } else if (from[0] == '\\' && from + 1 < end && memchr(names, from[1], sizeof names - 1)) {
            put(t, values[strchr(names, from[1]) - names]);
            from += 2;
        } else {
            put(t, *from++);
        }
    }
}

typedef struct entry {
    char expected[8], kind[16];
    text request;
} entry;

static const char *path_of(const char *kind) {
    static const char *const paths[][2] = {{"body", "/v1/completions"},
                                           {"chat", "/v1/chat/completions"},
                                           {"tokenize", "/tokenize"},
                                           {"detokenize", "/detokenize"}};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        if (strcmp(kind, paths[i][0]) == 0) return paths[i][1];
    }
    return NULL;
}

/* Reads a line into *out; 0 if it is no request. */
static int read_entry(char *line, entry *out) {
    int at = 0;
    line[strcspn(line, "\n")] = 0;
    *out = (entry){.expected = ""};
    if (line[0] == 0 || line[0] == '#') return 0;
    if (sscanf(line, "%7s %15s%n", out->expected, out->kind, &at) != 2) abort();
    const char *from = line + at + (line[at] == ' ');
    text body = {.bytes = NULL};
    put_escaped(&body, from, line + strlen(line));
    const char *path = path_of(out->kind);
    if (path) {
        char head[256];
        snprintf(head, sizeof head,
                 "POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n", path,
                 body.count);
        for (const char *c = head; *c; c++) put(&out->request, *c);
        for (size_t i = 0; i < body.count; i++) put(&out->request, body.bytes[i]);
        free(body.bytes);
    } else {
        out->request = body;
    }
    return 1;
}

/* ---- the test ---- */

static int is_expected(const entry *e, int status) {
    if (strcmp(e->expected, "end") == 0) return status == 0 || status / 100 == 4;
    if (strcmp(e->expected, "any") == 0) return status == 0 || status >= 400;
    if (strcmp(e->expected, "4xx") == 0) return status / 100 == 4;
    return status == atoi(e->expected);
}

/* Lines of the log so far. */
static int count_lines(const char *path) {
    FILE *file = fopen(path, "r");
    int lines = 0;
    for (int c; file && (c = getc(file)) != EOF;) lines += c == '\n';
    if (file) fclose(file);
    return lines;
}

/* Lines since there were `before`; the first may come a little late, when a connection is closed. */
static int count_new_lines(const char *path, int before) {
    enum { MOST_TRIES = 10 };
    const struct timespec moment = {.tv_nsec = 10000000};
    int lines = count_lines(path) - before;
    for (int i = 0; i < MOST_TRIES && lines == 0; i++) {
        nanosleep(&moment, NULL);
        lines = count_lines(path) - before;
    }
    return lines;
}

/* Sends one; how many things are wrong. */
static int try_entry(int port, const entry *e, int number, const char *log_path) {
    static const double LIMIT_S = 10, SOON_S = 0.1;
    const int before = count_lines(log_path), is_cut = strcmp(e->kind, "cut") == 0;
    static const char status_line[] = "HTTP/1.1 400 ";
    http_connection c = {.request = e->request.bytes,
                         .request_bytes = e->request.count,
                         .leaves_at = sizeof status_line - 1,
                         .says_end = is_cut,
                         .leaves_after_s = is_cut ? SOON_S : 0};
    const int64_t left = http_run(port, &c, 1, LIMIT_S);
    const int status = http_status(&c);
    int wrong = 0;
    if (left != 0 && status == 0) wrong += printf("line %d: no answer within %.0f s\n", number, LIMIT_S) > 0;
    if (left == 0 || status != 0) {
        if (!is_expected(e, status))
            wrong += printf("line %d: answered %d, expected %s: %.200s\n", number, status, e->expected,
                            c.bytes > 0 ? c.reply : "") > 0;
    }
    http_release(&c, 1);
    char *alive = http_get(port, "/live");
    if (!alive) wrong += printf("line %d: the server does not answer the next one\n", number) > 0;
    free(alive);
    const int lines = count_new_lines(log_path, before);
    if (lines > 1 || (lines == 0 && status >= 400))
        wrong += printf("line %d: answered %d, %d lines in the log\n", number, status, lines) > 0;
    return wrong;
}

int http_corpus(int port, const char *path, const char *log_path) {
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t capacity = 0;
    int number = 0, entries = 0, wrong = 0;
    if (!file) abort();
    while (getline(&line, &capacity, file) > 0) {
        entry e;
        number++;
        if (!read_entry(line, &e)) continue;
        wrong += try_entry(port, &e, number, log_path);
        free(e.request.bytes);
        entries++;
    }
    free(line);
    fclose(file);
    printf("%d malformed requests, %d things wrong\n", entries, wrong);
    return wrong > 0;
}
