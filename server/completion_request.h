/* Requests for completions: POST /v1/completions. */
#ifndef CPA_SERVER_COMPLETION_REQUEST_H
#define CPA_SERVER_COMPLETION_REQUEST_H

#include "server/fields.h"
#include "server/generation.h"
#include "server/server_internal.h"

/* *out is zeros, and in either case to be released by the caller. */
int cpa_completion_read(const cpa_server *server, const json_t *body, cpa_generation *out, cpa_refusal *refusal);

#endif
