/* The fields that requests for completions and for chats have in common, from JSON to a cpa_generation.
 *
 * Fields that nobody here knows are passed over, as other servers of this interface do: clients send some for one
 * server to all of them. What would change the answer, and is not there, is refused. */
#ifndef CPA_SERVER_GENERATION_FIELDS_H
#define CPA_SERVER_GENERATION_FIELDS_H

#include "server/fields.h"
#include "server/generation.h"
#include "server/server_internal.h"

/* Most requests of the engine that one request of a client makes: prompts times samples. */
enum { CPA_MOST_FLIGHTS = 1024 };

/* Whether `model`, if it is there, names the one that is served; else 404. */
int cpa_model_field(const cpa_server *server, const cpa_fields *fields);

/* *out is zeros, and in either case to be released by the caller. */
int cpa_generation_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *out);

/* Adds the ids of a text to a prompt; refuses where there is no tokenizer. */
int cpa_encode_field(const cpa_server *server, const cpa_fields *fields, const char *name, const json_t *text,
                     int add_special, cpa_token_list *out);

/* Adds ids that are given as an array of integers. */
int cpa_ids_field(const cpa_server *server, const cpa_fields *fields, const char *name, const json_t *array,
                  cpa_token_list *out);

/* 400 if some prompt is empty, has tokens that the model does not know, or leaves too little of the model's length, or
 * if an answer would tell too much of its prompts. */
int cpa_check_prompts(const cpa_server *server, const cpa_fields *fields, const char *name, const cpa_generation *g);

/* The tokens of an answer to a prompt. */
int64_t cpa_answer_tokens(const cpa_server *server, const cpa_generation *g, const cpa_token_list *prompt);

/* Asks for those of the prompt: of its tokens, and of so many of the most probable ones, or as many as were asked for
 * before. */
void cpa_want_prompt_logprobs(int32_t top, cpa_generation *g);

/* Asks for log-probabilities: of the chosen tokens, and of so many of the most probable ones. */
int cpa_want_logprobs(const cpa_fields *fields, const char *name, int64_t top, cpa_generation *g);

#endif
