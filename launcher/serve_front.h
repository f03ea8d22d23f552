/* What clients of a server meet, on rank 0: the HTTP server with the tokenizer and the chat template of the model, and
 * the figures that it shows. It listens before there is an engine. */
#ifndef CPA_LAUNCHER_SERVE_FRONT_H
#define CPA_LAUNCHER_SERVE_FRONT_H

#include <stdatomic.h>

#include "launcher/job.h"
#include "launcher/output/exposition.h"
#include "launcher/output/live_history.h"
#include "server/server.h"

/* One that was never opened has only zeros. It must not move. */
typedef struct cpa_serve_front {
    cpa_server *server;
    cpa_tokenizer *tokenizer; /* NULL: token ids alone */
    cpa_chat_template *chat;  /* NULL: no chat */
    cpa_tool_form tool_form;  /* how the model writes calls and thoughts */
    cpa_thought_form thought_form;
    cpa_exposition *exposition;
    cpa_live_history *history;
    int32_t ranks;
    _Atomic(cpa_engine *) engine; /* NULL: not attached */
    const char *name;             /* name of the model for clients; the job's */
    char says[128];               /* what requests can be, in words */
} cpa_serve_front;

/* Reads what the model's folder says of text, and listens. A tokenizer of another kind than is known, or a
 * template that cannot be run, is told by a warning, and done without; CPA_INVALID for one that is broken, a
 * --chat-template that is not known, or an address that cannot be listened at. On failure it is as if never opened. */
cpa_status cpa_serve_front_open(const cpa_job *job, int32_t ranks, cpa_serve_front *front, cpa_error *err);
/* After the engine's last callback. */
void cpa_serve_front_close(cpa_serve_front *front);

/* From now on requests are taken and go to the engine, of up to max_model_len tokens each, prompt and answer. Its
 * token_at is cpa_serve_front_token_at, with the front as ctx; its callbacks tell front->server. It must outlive the
 * front. */
cpa_status cpa_serve_front_attach(cpa_serve_front *front, const cpa_job *job, cpa_engine *engine, int64_t max_model_len,
                                  cpa_error *err);

/* For the engine's callbacks: a request has ended; a step is done, and these are the statistics after it. */
void cpa_serve_front_on_finish(cpa_serve_front *front, const cpa_request_result *result);
void cpa_serve_front_on_step(cpa_serve_front *front, const cpa_engine_stats *stats);

/* A cpa_token_at_fn. */
uint32_t cpa_serve_front_token_at(void *front, uint64_t request, int64_t position);

/* Every answer ends with an error that says why, if its client takes it within a moment. May be called by several
 * threads, and again. */
void cpa_serve_front_fail(cpa_serve_front *front, const char *why);

#endif
