/* The HTTP server in front of an engine: OpenAI's interface with the extensions of vLLM's, and what operators ask for.
 *
 *     POST /v1/completions  /v1/chat/completions  /tokenize  /detokenize
 *     GET  /v1/models  /v1/models/NAME  /health  /live  /version  /metrics  /status
 *
 * It listens from cpa_server_start on, and takes requests from cpa_server_attach on. It has threads of its own; the
 * engine's threads hand tokens over and never wait for a client. Docs: "The server" in docs/ARCHITECTURE.md. */
#ifndef CPA_SERVER_H
#define CPA_SERVER_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/engine.h>

#include "src/reply/reply_forms.h"
#include "src/text/chat_template.h"
#include "src/text/tokenizer.h"

typedef struct cpa_server cpa_server;

/* Texts are copied; tokenizer and template must outlive the server. */
typedef struct cpa_server_options {
    const char *host; /* to listen on, a name or an address; NULL = "127.0.0.1" */
    int port;         /* 0: any that is free; cpa_server_port tells */
    /* [n_api_keys] one of which /v1/..., /tokenize and /detokenize want as "Authorization: Bearer KEY"; none: they want
     * none. The requests of each of several are a tenant's (cpa_request.tenant), who shares cached prefixes with no
     * other. */
    const char *const *api_keys;
    int64_t n_api_keys;
    const char *model_name;         /* name that /v1/models gives, and that requests may use */
    const cpa_tokenizer *tokenizer; /* NULL: prompts and answers are token ids */
    const cpa_chat_template *chat;  /* NULL: no chat */
    cpa_tool_form tool_form;        /* how the model writes calls; CPA_TOOLS_NONE: they are text */
    cpa_thought_form thought_form;  /* how the model writes thoughts */
    int32_t transfer;               /* what all requests import and export, of cpa_transfer */
    int32_t has_block_store;        /* requests may ask for an import */
    uint64_t seed;                  /* what the seeds of requests without one follow from */
    int64_t max_body_bytes;         /* most bytes of the body of a request; 0 = 32 MiB */
    int64_t max_connections;        /* connections beyond so many are answered 503 and closed; up to 2^20, 0 = 2048 */
    double idle_timeout_s;          /* a connection without progress by its client is closed after it; 0 = 60 */
    int32_t threads;                /* threads that parse requests and write answers; 0 = 4 */
    /* The text of /metrics, which the server frees; from any thread of the server. NULL: an empty one. */
    char *(*metrics)(void *ctx);
    void *metrics_ctx;
    /* The same of /status, a page of HTML. */
    char *(*status_page)(void *ctx);
    void *status_ctx;
} cpa_server_options;

/* What takes the requests. submit and cancel are called from any thread of the server, as cpa_engine_submit and
 * cpa_engine_cancel may be, and they do the same; submit puts its message into *err. */
typedef struct cpa_server_engine {
    void *ctx;
    cpa_status (*submit)(void *ctx, const cpa_request *request, cpa_error *err);
    cpa_status (*cancel)(void *ctx, uint64_t id);
    int64_t vocabulary;      /* token ids are below it */
    int64_t max_model_len;   /* most tokens of a prompt and its answer */
    const uint32_t *end_ids; /* [n_end_ids] tokens that end an answer; copied */
    int64_t n_end_ids;
} cpa_server_engine;

/* Listens: /live answers 200, /health and requests 503. Raises the soft limit of open files to the hard one.
 * CPA_INVALID with the host and port if they cannot be listened on; CPA_NO_MEMORY. */
cpa_status cpa_server_start(const cpa_server_options *options, cpa_server **out, cpa_error *err);

/* The port that it listens on. */
int cpa_server_port(const cpa_server *server);

/* From now on /health answers 200 and requests are taken; once. */
cpa_status cpa_server_attach(cpa_server *server, const cpa_server_engine *engine, cpa_error *err);

/* For the engine's callbacks: on_ranks, on_token, on_finish, and on_progress after each step, when its tokens go to the
 * clients. They wait for nothing but a lock that is held for moments. Requests that are not the server's are passed
 * over, and so is a token whose index has come. After cpa_server_stop they must not be called. */
void cpa_server_on_ranks(cpa_server *server, uint64_t request, int64_t position, const cpa_token_ranks *ranks);
void cpa_server_on_token(cpa_server *server, uint64_t request, int64_t index, uint32_t token, float logprob);
void cpa_server_on_finish(cpa_server *server, const cpa_request_result *result);
void cpa_server_on_step(cpa_server *server);

/* For the engine's token_at: tokens of the prompt, and, behind it, what stands for the output where none is drawn,
 * which follows from the seed of the request and the position. */
uint32_t cpa_server_token_at(cpa_server *server, uint64_t request, int64_t position);

/* From now on /health and new requests are answered 503; those that are under way go on, and those whose header has come
 * are still let in: the engine should not be drained before they are. */
void cpa_server_drain(cpa_server *server);
/* How many are still to be let in. */
int64_t cpa_server_incoming(cpa_server *server);

/* The engine is lost: as drained, and every answer that is not whole ends with an error. It may be asked to cancel
 * until cpa_server_stop returns. */
void cpa_server_fail(cpa_server *server, const char *message);

/* Answers that are not wholly delivered yet. */
int64_t cpa_server_undelivered(cpa_server *server);

/* Waits until there are none, but at most so many seconds; returns how many there are then. Any thread. */
int64_t cpa_server_wait(cpa_server *server, double seconds);

/* Waits until all answers are delivered, but at most so many seconds; then closes every connection and frees the
 * server. The engine must still be there, but call back no more. NULL does nothing. */
void cpa_server_stop(cpa_server *server, double seconds);

#endif
