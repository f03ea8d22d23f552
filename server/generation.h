/* What a request for completions or for a chat asks for, whatever its JSON looked like. */
#ifndef CPA_SERVER_GENERATION_H
#define CPA_SERVER_GENERATION_H

#include <jansson.h>

#include <cpattn/model.h>

#include "server/prompt_text.h"
#include "src/grammar/constraints.h"
#include "src/reply/reply.h"
#include "src/text/stop_text.h"
#include "src/text/tokenizer.h"

enum { CPA_MOST_STOPS = 16 }; /* OpenAI takes 4, vLLM any number */

typedef struct cpa_generation {
    int is_chat;
    cpa_token_list *prompts; /* [n_prompts] */
    int64_t n_prompts;
    int64_t n;               /* samples of each prompt */
    int64_t max_tokens;      /* most tokens of each sample; 0: what the model's length leaves to its prompt */
    int max_tokens_is_given; /* the request has given max_tokens; otherwise it is a bound that follows from the model */
    cpa_sampling sampling;   /* how tokens are drawn; stop_ids: the request's own, seed: that of the first sample */
    uint32_t *stop_ids;
    cpa_logit_bias *logit_biases;
    int has_seed;
    cpa_stop_text stops[CPA_MOST_STOPS];
    int n_stops;
    int keeps_stop;    /* a text or token that stops the answer belongs to its text */
    int keeps_special; /* special tokens belong to the text */
    int stream, include_usage, usage_always;
    int returns_ids;     /* token ids of prompt and answer are returned */
    int echoes;          /* the answer begins with its prompt */
    int is_prompt_alone; /* the answer ends with its prompt: a token is drawn that is not told */
    /* Log-probabilities of the prompt are told, with those of the top_of_prompt most probable tokens. */
    int tells_prompt;
    int32_t top_of_prompt;
    cpa_prompt_text *prompt_texts; /* [n_prompt_texts] where the answer echoes */
    int64_t n_prompt_texts;
    int32_t priority;           /* lower runs first */
    uint32_t transfer;          /* of cpa_transfer, or'ed */
    char *salt;                 /* NULL = "" */
    char *tenant;               /* NULL: the salt tells */
    char *binding;              /* grammar that answers are bound to (constraint_text.h); NULL: they are free */
    char binding_field[64];     /* the name of the field that binds answers */
    cpa_constraint *constraint; /* constraint made of `binding`, once that is done */
    json_t *tools;              /* the tools of a chat that an answer may call: an array, not empty; NULL: none */
    int has_parts;              /* answers are read by `reply`: thoughts, text, calls */
    cpa_reply_options reply;
} cpa_generation;

/* The requests are of the tenant whose API key has that index, and its salt is told apart from those of others. 0
 * without memory. */
int cpa_generation_set_tenant(cpa_generation *generation, int64_t key);

/* Frees what it holds. */
void cpa_generation_release(cpa_generation *generation);

#endif
