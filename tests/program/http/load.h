/* What a server must bear: many streams, clients that go, clients that stall. Each returns 0, or 1 after a line that
 * says what was wrong. */
#ifndef CPA_TESTS_HTTP_LOAD_H
#define CPA_TESTS_HTTP_LOAD_H

/* `connections` streams at once, whose prompts are those of `cases` ("PROMPT_IDS=ANSWER_IDS", ids with commas) in turn:
 * each answer is whole and has these ids. */
int http_streams(int port, int connections, char **cases, int n_cases);

/* So many clients that begin a stream and go at a random moment, before, while or after it comes; afterwards no request
 * runs or waits, and no block of the cache is in use. */
int http_cancels(int port, int clients);

/* A client that asks for a long stream and reads nothing for so many seconds slows no other; then it reads, and gets
 * all of it. */
int http_stall(int port, double seconds);

#endif
