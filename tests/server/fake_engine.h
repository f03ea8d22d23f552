/* An engine for tests of the server: it draws one token for each of its requests when the test says so, the bytes of a
 * text that the test chooses, or, where the answer is bound, some that may come next, and its end as soon as it may. It
 * remembers what it was asked for. Token i has the log-probability -(i + 1) / 2, and is the second one of the most
 * probable, behind "z". The token at position p of a prompt has -p / 8, where that is asked for, and is the second one
 * likewise. */
#ifndef CPA_TESTS_FAKE_ENGINE_H
#define CPA_TESTS_FAKE_ENGINE_H

#include <jansson.h>
#include <pthread.h>

#include "server/server.h"

enum { CPA_FAKE_MOST = 4096, CPA_FAKE_END = 256, CPA_FAKE_VOCABULARY = 300, CPA_FAKE_LENGTH = 4096 };

typedef struct cpa_fake_request {
    cpa_request request; /* its texts and sampling are these: */
    char salt[32];
    char tenant[32]; /* "": it has none */
    cpa_sampling sampling;
    uint32_t stop_ids[8];
    cpa_logit_bias biases[8];
    int64_t drawn;
    int is_cancelled, has_ended;
} cpa_fake_request;

typedef struct cpa_fake_engine {
    cpa_server *server;
    cpa_tokenizer *tokenizer;
    cpa_chat_template *chat;
    const char *script; /* what every answer says, then CPA_FAKE_END */
    cpa_status refusal; /* of the next submissions; CPA_OK */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t n, cancels;
    cpa_fake_request requests[CPA_FAKE_MOST];
} cpa_fake_engine;

/* A server with the engine behind it, on a port of its own; with_text: and a tokenizer whose ids are bytes (256 the
 * end, and one more, "<|beyond|>", which the model does not know), and the template "chatml" unless `options` has one. They are
 * changed by what is the fixture's. Aborts where that fails. */
cpa_fake_engine *cpa_fake_engine_start(cpa_server_options options, int with_text);
/* The same, without an engine attached yet. */
cpa_fake_engine *cpa_fake_engine_start_alone(cpa_server_options options, int with_text);
void cpa_fake_engine_attach(cpa_fake_engine *engine);

/* Stops the server, unless that is done (engine->server is NULL), and frees everything. */
void cpa_fake_engine_stop(cpa_fake_engine *engine);

int cpa_fake_engine_port(const cpa_fake_engine *engine);

/* Draws up to so many tokens for every request; those at their end, or cancelled, end. */
void cpa_fake_engine_step(cpa_fake_engine *engine, int64_t tokens);
/* Ends a request so. */
void cpa_fake_engine_end(cpa_fake_engine *engine, int64_t request, cpa_finish_reason reason, const char *error);

/* Wait until so many requests were submitted, or cancelled, in all; give up after 20 seconds, which fails the test. */
void cpa_fake_engine_await(cpa_fake_engine *engine, int64_t requests);
void cpa_fake_engine_await_cancels(cpa_fake_engine *engine, int64_t cancels);

/* Steps on until the thread that this runs in the background has its reply: a whole exchange with a POST. */
struct cpa_http_reply;
void cpa_fake_engine_post(cpa_fake_engine *engine, const char *path, const char *body, struct cpa_http_reply *out);
/* The same: the JSON that came, which the test fails without, as with another status; the caller calls json_decref. */
json_t *cpa_fake_engine_answer(cpa_fake_engine *engine, const char *path, const char *body, int status);

#endif
