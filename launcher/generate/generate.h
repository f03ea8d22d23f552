/* `cp_attn generate`: the answer to one prompt, token by token. */
#ifndef CPA_LAUNCHER_GENERATE_H
#define CPA_LAUNCHER_GENERATE_H

#include <stdio.h>

#include <cpattn/engine.h>

#include "launcher/generate/biases.h"
#include "launcher/generate/ids.h"
#include "launcher/settings/settings.h"
#include "src/model/logits_sample.h"
#include "src/text/ending_text.h"
#include "src/text/tokenizer.h"

/* Rank 0. One that was never opened has only zeros. */
typedef struct cpa_prompt_answer {
    const cpa_settings *settings; /* the caller's */
    cpa_tokenizer *tokenizer;     /* for prompts of text; NULL: ids alone */
    cpa_ending_text text;         /* the text of the answer, to a prompt of text */
    cpa_stop_text stop;           /* the text that stops it, of 0 bytes: none */
    cpa_ids prompt;
    cpa_ids stop_ids;
    cpa_biases biases;
    cpa_ids given;       /* the answer's tokens, if these are imposed */
    int64_t most, count; /* tokens of the answer, and how many are there */
    uint32_t *ids;       /* [most], as are logprobs, token_s, best_ids and best_by */
    float *logprobs;
    double *token_s;    /* after the arrival of the request */
    uint32_t *best_ids; /* with given tokens: the most probable token at each place */
    float *best_by;     /* with given tokens: by how much the logit of the most probable one is above the next */
    int has_ended;
    cpa_finish_reason reason; /* why it has ended, if it has */
} cpa_prompt_answer;

/* Reads the prompt of the settings, text or ids of a vocabulary. *out is set only on success; the settings must outlive
 * it. */
cpa_status cpa_prompt_answer_open(const cpa_settings *settings, int64_t vocabulary, cpa_prompt_answer *out,
                                  cpa_error *err);
void cpa_prompt_answer_close(cpa_prompt_answer *answer);

/* How the tokens are drawn. It points into the answer, which is to stay where it is. */
cpa_sampling cpa_prompt_answer_sampling(const cpa_prompt_answer *answer);

/* Prints the next token of the answer, as text where the prompt was one, unless all is to be JSON at the end. 1: its text
 * has come to --stop, and it is to be cancelled. */
int cpa_prompt_answer_show(cpa_prompt_answer *answer, int64_t index, uint32_t id, float logprob, FILE *out);
/* The request has ended: keeps what it got. */
void cpa_prompt_answer_take(cpa_prompt_answer *answer, const cpa_request_result *result);
/* The logits before given tokens, of all ranks: keeps the best of each. */
void cpa_prompt_answer_take_logits(cpa_prompt_answer *answer, const cpa_logits_sample *sample);
/* Ends the line of tokens, and says how long they took; or prints the JSON of everything. */
void cpa_prompt_answer_print(cpa_prompt_answer *answer, FILE *out);

#endif
