/* Tokens as texts of their own, as log-probabilities name them: "token_id:7" where there is no tokenizer. */
#ifndef CPA_SERVER_TOKEN_NAME_H
#define CPA_SERVER_TOKEN_NAME_H

#include <jansson.h>

#include "server/server_internal.h"

/* A string, with U+FFFD in place of what is no character; NULL without memory. */
json_t *cpa_token_name(const cpa_server *server, uint32_t id);

/* The bytes that it adds to a text, as an array of numbers; null without a tokenizer, NULL without memory. */
json_t *cpa_token_bytes(const cpa_server *server, uint32_t id);

/* The characters of the string. */
int64_t cpa_token_name_characters(const cpa_server *server, uint32_t id);

#endif
