/* Server-sent events, and answers made of them, whole, cut anywhere, and wrong. */
#include <stdlib.h>
#include <string.h>

#include "bench/serve/stream_answer.h"
#include "tests/fixtures/unit.h"

/* ---- events ---- */

/* Events, as text: the data of each between brackets. */
typedef struct heard {
    char text[512];
    int most; /* it has heard enough then; 0: never */
    int count;
} heard;

static bool hear(void *ctx, const char *data, size_t bytes) {
    heard *h = ctx;
    CU_ASSERT_EQUAL(data[bytes], 0);
    strcat(h->text, "[");
    strncat(h->text, data, bytes);
    strcat(h->text, "]");
    return ++h->count != h->most;
}

/* Reads the text in pieces of that size. */
static heard read_events(const char *text, size_t piece, int most) {
    heard h = {.most = most};
    cpa_event_reader reader = {.has_data = false};
    for (size_t at = 0; at < strlen(text) && (!most || h.count < most); at += piece) {
        const size_t left = strlen(text) - at;
        CU_ASSERT_PTR_NULL(cpa_event_reader_feed(&reader, text + at, left < piece ? left : piece, hear, &h));
    }
    cpa_event_reader_release(&reader);
    return h;
}

static void events_are_the_same_however_they_are_cut(void) {
    static const struct {
        const char *text, *events;
    } cases[] = {
        {"data: one\n\ndata: two\n\n", "[one][two]"},
        {"data: one\r\n\r\ndata: two\r\n\r\n", "[one][two]"},
        {"data: one\r\rdata: two\r\r", "[one][two]"},
        {"\xef\xbb\xbf"
         "data: one\n\n",
         "[one]"},
        {": a comment\n\n:\ndata:one\n:more\n\n", "[one]"},
        {"data: a\ndata: b\ndata\n\n", "[a\nb\n]"},
        {"data: a\r\ndata: b\r\n\r\n", "[a\nb]"},
        {"event: x\nid: 7\nretry: 3\ndata:  two spaces\n\n", "[ two spaces]"},
        {"data\n\ndata:\n\n", "[][]"},
        {"\n\n\nevent: nothing\n\ndataset: x\n\n", ""},
        {"data: never ended\n", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (size_t piece = 1; piece <= strlen(cases[i].text); piece++)
            CU_ASSERT_STRING_EQUAL(read_events(cases[i].text, piece, 0).text, cases[i].events);
    }
}

static void nothing_is_read_behind_the_last_event_that_is_wanted(void) {
    CU_ASSERT_STRING_EQUAL(read_events("data: a\n\ndata: b\n\ndata: c\n\n", 100, 2).text, "[a][b]");
}

static void an_event_without_end_is_given_up(void) {
    enum { PIECE = 1 << 20 };
    char *piece = malloc(PIECE);
    heard h = {.most = 0};
    const char *wrong = NULL;
    cpa_event_reader reader = {.has_data = false};
    memset(piece, 'x', PIECE);
    for (int i = 0; i < 17 && !wrong; i++) wrong = cpa_event_reader_feed(&reader, piece, PIECE, hear, &h);
    CU_ASSERT_PTR_NOT_NULL(wrong);
    cpa_event_reader_release(&reader);
    free(piece);
}

/* ---- answers ---- */

#define CHUNK(text) "data: {\"choices\": [{\"text\": \"" text "\", \"finish_reason\": null}]}\n\n"
#define LAST(text, reason) "data: {\"choices\": [{\"text\": \"" text "\", \"finish_reason\": \"" reason "\"}]}\n\n"
#define USAGE "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 7, \"completion_tokens\": 3}}\n\n"
#define DELTA(delta) "data: {\"choices\": [{\"delta\": {" delta "}, \"finish_reason\": null}]}\n\n"
#define DONE "data: [DONE]\n\n"

/* Reads an answer in pieces of that size, the k-th of which comes at k seconds. */
static cpa_stream_answer read_answer(const char *text, size_t piece, bool is_chat) {
    cpa_stream_answer answer = {.is_chat = is_chat};
    bool goes_on = true;
    double now = 1;
    for (size_t at = 0; at < strlen(text) && goes_on; at += piece) {
        const size_t left = strlen(text) - at;
        goes_on = cpa_stream_answer_feed(&answer, text + at, left < piece ? left : piece, now);
        now += 1;
    }
    cpa_stream_answer_end(&answer);
    return answer;
}

static void an_answer_has_its_times_and_counts(void) {
    static const char text[] = CHUNK("a") CHUNK("") LAST("c", "length") USAGE DONE "rubbish";
    for (size_t piece = 1; piece < sizeof text; piece++) {
        cpa_stream_answer answer = read_answer(text, piece, false);
        CU_ASSERT_STRING_EQUAL(answer.error, "");
        CU_ASSERT_EQUAL(answer.n_times, 3);
        CU_ASSERT_EQUAL(answer.token_s[0], (double)((sizeof CHUNK("a") - 2) / piece + 1));
        CU_ASSERT_EQUAL(answer.prompt_tokens, 7);
        CU_ASSERT_EQUAL(cpa_stream_answer_tokens(&answer), 3);
        cpa_stream_answer_release(&answer);
    }
}

static void what_brings_output_has_a_time(void) {
    cpa_stream_answer answer = read_answer(CHUNK("a") CHUNK("b") LAST("", "stop") DONE, 1000, false);
    CU_ASSERT_EQUAL(answer.n_times, 2);
    CU_ASSERT_EQUAL(cpa_stream_answer_tokens(&answer), 2);
    cpa_stream_answer_release(&answer);
    answer = read_answer(CHUNK("a") LAST("b", "stop"), 1000, false); /* not every server says [DONE] */
    CU_ASSERT_EQUAL(answer.n_times, 2);
    CU_ASSERT_STRING_EQUAL(answer.error, "");
    cpa_stream_answer_release(&answer);
    answer = read_answer(LAST("", "length") USAGE DONE, 1000, false);
    CU_ASSERT_EQUAL(answer.n_times, 1);
    CU_ASSERT_EQUAL(cpa_stream_answer_tokens(&answer), 3);
    cpa_stream_answer_release(&answer);
    answer = read_answer(DELTA("\"role\": \"assistant\", \"content\": \"\"") DELTA("\"content\": \"a\"")
                             DELTA("\"reasoning_content\": \"b\"") DELTA("") DONE,
                         1000, true);
    CU_ASSERT_EQUAL(answer.n_times, 2);
    cpa_stream_answer_release(&answer);
    answer = read_answer(
        "data: {\"choices\": [{\"text\": \"\", \"token_ids\": [1, 2, 3], \"finish_reason\": \"length\"}]}\n\n" DONE,
        1000, false);
    CU_ASSERT_EQUAL(answer.n_times, 1);
    CU_ASSERT_EQUAL(cpa_stream_answer_tokens(&answer), 3);
    cpa_stream_answer_release(&answer);
}

static void an_answer_that_is_not_whole_says_why(void) {
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"", "before any output"},
        {"hello\n\n", "before any output"},
        {DONE, "without any output"},
        {USAGE DONE, "without any output"},
        {CHUNK("a"), "the stream ended before [DONE]"},
        {CHUNK("a") "data: [DO", "the stream ended before [DONE]"},
        {"data: {\"choices\": [{\"te\n\n", "no JSON: {\"choices\": [{\"te"},
        {"data: 7\n\n", "no JSON: 7"},
        {"data: \xff\xfe\n\n", "no JSON: ??"},
        {"data: {}\n\n", "without choices"},
        {"data: {\"choices\": {}}\n\n", "without choices"},
        {"data: {\"choices\": [3]}\n\n", "no object"},
        {CHUNK("a") "data: {\"error\": {\"message\": \"out of\\nluck\"}}\n\n", "an error event: out of?luck"},
        {"data: {\"error\": \"plain\"}\n\n", "an error event: plain"},
        {"data: {\"error\": {}}\n\n", "an error event: without a message"},
        {CHUNK("a") LAST("", "abort") DONE, "the server ended it: abort"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (size_t piece = 1; piece < 40; piece += 6) {
            cpa_stream_answer answer = read_answer(cases[i].text, piece, false);
            CU_ASSERT_PTR_NOT_NULL(strstr(answer.error, cases[i].error));
            if (!strstr(answer.error, cases[i].error)) printf("case %zu: %s\n", i, answer.error);
            cpa_stream_answer_release(&answer);
        }
    }
}

static void a_refusal_is_told_in_a_line(void) {
    static const struct {
        const char *body, *said;
    } cases[] = {
        {"{\"error\": {\"message\": \"too long\", \"code\": 400}}", "too long"},
        {"{\"message\": \"too\\nlong\"}", "too?long"},
        {"{\"error\": \"gone\"}", "gone"},
        {"<html>\n", "<html>?"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char said[64];
        cpa_answer_refusal(cases[i].body, strlen(cases[i].body), said, sizeof said);
        CU_ASSERT_STRING_EQUAL(said, cases[i].said);
    }
}

static const cpa_test tests[] = {
    {"events are the same however they are cut", events_are_the_same_however_they_are_cut},
    {"nothing is read behind the last event that is wanted", nothing_is_read_behind_the_last_event_that_is_wanted},
    {"an event without end is given up", an_event_without_end_is_given_up},
    {"an answer has its times and counts", an_answer_has_its_times_and_counts},
    {"what brings output has a time", what_brings_output_has_a_time},
    {"an answer that is not whole says why", an_answer_that_is_not_whole_says_why},
    {"a refusal is told in a line", a_refusal_is_told_in_a_line},
};
CPA_TEST_MAIN("stream answer", tests)
