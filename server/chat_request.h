/* Requests for answers in a chat: POST /v1/chat/completions, and what of them /tokenize takes. */
#ifndef CPA_SERVER_CHAT_REQUEST_H
#define CPA_SERVER_CHAT_REQUEST_H

#include "server/fields.h"
#include "server/generation.h"
#include "server/server_internal.h"

/* *out is zeros, and in either case to be released by the caller. */
int cpa_chat_read(const cpa_server *server, const json_t *body, cpa_generation *out, cpa_refusal *refusal);

/* Adds the ids of `messages`, written out by the model's template. *thinks: their text ends with what thoughts begin
 * with. */
int cpa_messages_read(const cpa_server *server, const cpa_fields *fields, cpa_token_list *out, int *thinks);

#endif
