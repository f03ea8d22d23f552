#include "tests/program/http/load.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/hash.h"
#include "bench/serve/events.h"
#include "tests/program/http/connections.h"

static int wrong(const char *what) {
    printf("wrong: %s\n", what);
    return 1;
}

/* A stream of so many tokens after a prompt of ids, as a whole request; `more` is put into its body. */
static char *stream_text(const char *prompt, int tokens, const char *more) {
    char *body = NULL;
    if (asprintf(&body,
                 "{%s\"prompt\": [%s], \"max_tokens\": %d, \"temperature\": 0, \"ignore_eos\": true, \"stream\": true, "
                 "\"return_token_ids\": true}",
                 more, prompt, tokens) < 0)
        abort();
    char *text = http_post_text("/v1/completions", body);
    free(body);
    return text;
}

/* ---- answers ---- */

/* The ids of an answer as text, with commas, as far as there is room. */
typedef struct answer {
    char ids[1 << 16];
    size_t length;
    int n, is_done;
} answer;

static bool take_event(void *ctx, const char *data, size_t bytes) {
    answer *a = ctx;
    json_t *object = json_loadb(data, bytes, JSON_ALLOW_NUL, NULL), *id;
    size_t i;
    if (strcmp(data, "[DONE]") == 0) a->is_done = 1;
    json_array_foreach(json_object_get(json_array_get(json_object_get(object, "choices"), 0), "token_ids"), i, id) {
        a->n++;
        if (a->length + 16 > sizeof a->ids) continue;
        a->length += (size_t)sprintf(a->ids + a->length, "%s%lld", a->length > 0 ? "," : "", json_integer_value(id));
    }
    json_decref(object);
    return true;
}

/* The ids of a stream that is whole; free() it; NULL if it is not. */
static answer *answer_of(const http_connection *c) {
    char *body = http_status(c) == 200 ? http_body(c) : NULL;
    answer *a = calloc(1, sizeof *a);
    cpa_event_reader reader = {.has_data = false};
    if (!a) abort();
    if (body) (void)cpa_event_reader_feed(&reader, body, strlen(body), take_event, a);
    cpa_event_reader_release(&reader);
    free(body);
    if (a->is_done) return a;
    free(a);
    return NULL;
}

/* ---- many streams ---- */

static int count_ids(const char *ids) {
    int n = 1;
    for (; *ids; ids++) n += *ids == ',';
    return n;
}

int http_streams(int port, int connections, char **cases, int n_cases) {
    static const double LIMIT_S = 120;
    http_connection *all = calloc((size_t)connections, sizeof *all);
    char **texts = calloc((size_t)n_cases, sizeof *texts);
    int64_t whole = 0, right = 0;
    if (!all || !texts) abort();
    for (int k = 0; k < n_cases; k++) {
        char *answer_ids = strchr(cases[k], '=');
        if (!answer_ids) return wrong("a case without =");
        *answer_ids = 0;
        texts[k] = stream_text(cases[k], count_ids(answer_ids + 1), "");
        cases[k] = answer_ids + 1;
    }
    for (int i = 0; i < connections; i++)
        all[i] = (http_connection){.request = texts[i % n_cases], .request_bytes = strlen(texts[i % n_cases])};
    const double begin = cpa_clock_now();
    const int64_t left = http_run(port, all, connections, LIMIT_S);
    for (int i = 0; i < connections; i++) {
        answer *a = answer_of(&all[i]);
        whole += a != NULL;
        right += a && strcmp(a->ids, cases[i % n_cases]) == 0;
        if (!a || strcmp(a->ids, cases[i % n_cases]) != 0)
            printf("connection %d: found %s, expected %s\n", i, a ? a->ids : all[i].reply, cases[i % n_cases]);
        free(a);
    }
    printf("%d streams in %.2f s: %lld whole, %lld right, %lld not ended\n", connections, cpa_clock_now() - begin,
           (long long)whole, (long long)right, (long long)left);
    http_release(all, connections);
    for (int k = 0; k < n_cases; k++) free(texts[k]);
    free(texts);
    free(all);
    return right == connections ? 0 : wrong("not every answer is right");
}

/* ---- clients that go ---- */

/* The value of a metric, summed over its labels; -1 if it is not there. */
static double metric(const char *text, const char *name) {
    const size_t length = strlen(name);
    double sum = -1;
    for (const char *line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, name, length) != 0 || (line[length] != ' ' && line[length] != '{')) continue;
        const char *end = strchr(line, '\n'), *space = end ? memrchr(line, ' ', (size_t)(end - line)) : NULL;
        if (space) sum = (sum < 0 ? 0 : sum) + atof(space);
    }
    return sum;
}

/* Waits until nothing runs, waits or holds a block. */
static int becomes_idle(int port) {
    static const char *const names[] = {"cpattn_num_requests_running", "cpattn_num_requests_waiting",
                                        "cpattn_kv_cache_usage_perc"};
    static const double LIMIT_S = 15; /* far less than the answers would take that nobody reads */
    const struct timespec moment = {.tv_nsec = 50000000};
    const double begin = cpa_clock_now();
    double values[3] = {-1, -1, -1};
    while (cpa_clock_now() - begin < LIMIT_S) {
        char *text = http_get(port, "/metrics");
        for (int i = 0; i < 3; i++) values[i] = metric(text, names[i]);
        free(text);
        if (values[0] == 0 && values[1] == 0 && values[2] == 0) return 1;
        nanosleep(&moment, NULL);
    }
    printf("after %.0f s %g run, %g wait, and %g of the cache is in use\n", LIMIT_S, values[0], values[1], values[2]);
    return 0;
}

int http_cancels(int port, int clients) {
    enum { AT_ONCE = 100, TOKENS = 4000, MOST_BYTES = 30000 };
    static const double LIMIT_S = 60, MOST_S = 0.2;
    char *text = stream_text("3,1,4,1,5,9,2,6,5,3,5,8,9,7,9,3", TOKENS, "");
    int64_t left = 0, went = 0;
    for (int done = 0; done < clients && left == 0; done += AT_ONCE) {
        http_connection all[AT_ONCE];
        const int n = clients - done < AT_ONCE ? clients - done : AT_ONCE;
        for (int i = 0; i < n; i++) {
            const uint64_t draw = cpa_mix64((uint64_t)(done + i + 1) * CPA_GOLDEN);
            all[i] = (http_connection){.request = text, .request_bytes = strlen(text), .leaves_hard = draw & 1};
            if (draw & 2) all[i].leaves_at = 1 + (size_t)(draw >> 8) % MOST_BYTES;
            all[i].leaves_after_s = MOST_S * (double)(draw >> 40) * 0x1p-24;
        }
        left = http_run(port, all, n, LIMIT_S);
        for (int i = 0; i < n; i++) went += all[i].has_left;
        http_release(all, n);
    }
    free(text);
    printf("%lld of %d clients went before their answer was whole\n", (long long)went, clients);
    if (left != 0) return wrong("some clients could neither go nor end");
    if (went < clients / 2) return wrong("too few went before the end");
    return becomes_idle(port) ? 0 : wrong("something is left of those that went");
}

/* ---- clients that stall ---- */

/* Seconds that a client with a short stream needs, the median of several one after another; < 0 if one fails. */
static double time_of_short_streams(int port) {
    enum { TIMES = 9, TOKENS = 8 };
    double seconds[TIMES], result = -1;
    char *text = stream_text("2,7,1,8,2,8", TOKENS, "");
    for (int i = 0; i < TIMES; i++) {
        http_connection c = {.request = text, .request_bytes = strlen(text)};
        const int64_t left = http_run(port, &c, 1, 20);
        answer *a = left == 0 ? answer_of(&c) : NULL;
        seconds[i] = a && a->n == TOKENS ? c.ended_s - c.began_s : -1;
        free(a);
        http_release(&c, 1);
        if (seconds[i] < 0) goto done;
        for (int k = i; k > 0 && seconds[k] < seconds[k - 1]; k--) {
            const double swapped = seconds[k];
            seconds[k] = seconds[k - 1];
            seconds[k - 1] = swapped;
        }
    }
    result = seconds[TIMES / 2];
done:
    free(text);
    return result;
}

static double tokens_so_far(int port) {
    char *text = http_get(port, "/metrics");
    const double tokens = metric(text, "cpattn_generation_tokens_total");
    free(text);
    return tokens;
}

/* Waits until so many tokens have been computed since the server began. */
static int has_computed(int port, double tokens) {
    static const double LIMIT_S = 60;
    const struct timespec moment = {.tv_nsec = 20000000};
    const double begin = cpa_clock_now();
    while (tokens_so_far(port) < tokens && cpa_clock_now() - begin < LIMIT_S) nanosleep(&moment, NULL);
    return tokens_so_far(port) >= tokens;
}

int http_stall(int port, double seconds) {
    /* More than the kernel keeps of a connection, so that the server has to. */
    enum { SAMPLES = 128, TOKENS = 200 };
    static const double SLACK_S = 0.2, LIMIT_S = 60;
    static const char more[] = "\"n\": 128, ";
    char *text = stream_text("3,1,4,1,5", TOKENS, more);
    http_connection c = {.request = text, .request_bytes = strlen(text), .reads_nothing = 1};
    const double before = time_of_short_streams(port);
    const double tokens = tokens_so_far(port);
    double worst = 0;
    int64_t left = http_run(port, &c, 1, LIMIT_S); /* returns as nobody reads */
    const int is_computed = has_computed(port, tokens + SAMPLES * TOKENS);
    const double begin = cpa_clock_now();
    while (left >= 0 && worst >= 0 && cpa_clock_now() - begin < seconds) {
        const double now = time_of_short_streams(port);
        worst = now < 0 || now > worst ? now : worst;
    }
    http_reads_again(&c);
    left = http_run(port, &c, 1, LIMIT_S);
    answer *a = answer_of(&c);
    printf(
        "a short stream takes %.4f s, beside a client that reads nothing %.4f s; that gets %d of %d tokens, %zu "
        "bytes\n",
        before, worst, a ? a->n : 0, SAMPLES * TOKENS, c.bytes);
    const int is_whole = left == 0 && a && a->n == SAMPLES * TOKENS;
    free(a);
    http_release(&c, 1);
    free(text);
    if (before < 0 || worst < 0) return wrong("a short stream failed");
    if (!is_computed) return wrong("an answer that nobody reads is not computed to its end");
    if (worst > 3 * before + SLACK_S) return wrong("a client that reads nothing slows others");
    return is_whole ? 0 : wrong("who read nothing for a while has not got all in the end");
}
