/* The texts of prompts that answers begin with (`echo`). */
#ifndef CPA_SERVER_PROMPT_TEXT_H
#define CPA_SERVER_PROMPT_TEXT_H

#include <jansson.h>

#include "server/server_internal.h"
#include "src/text/tokenizer.h"

/* One of zeros is empty, as it is without a tokenizer. */
typedef struct cpa_prompt_text {
    char *text; /* [bytes] */
    size_t bytes;
    int64_t characters; /* characters of the text; without a tokenizer, of the names of its tokens */
} cpa_prompt_text;

/* The text of a prompt: as the request has it, or, where `given` is no string, that of the ids. */
cpa_status cpa_prompt_text_open(const cpa_server *server, const json_t *given, const cpa_token_list *ids,
                                cpa_prompt_text *out, cpa_error *err);
void cpa_prompt_text_close(cpa_prompt_text *text);

/* How many of the text's characters begin in its next token, and moves *at, a byte of the text, behind it. A text
 * has those special tokens alone that it spells out, and no space that a tokenizer puts in front of it. */
int64_t cpa_prompt_text_pass(const cpa_server *server, const cpa_prompt_text *text, uint32_t id, size_t *at);

#endif
