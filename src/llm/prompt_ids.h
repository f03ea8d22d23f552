/* Prompts of an llm as token ids. */
#ifndef CPA_LLM_PROMPT_IDS_H
#define CPA_LLM_PROMPT_IDS_H

#include <cpattn/llm.h>

#include "src/text/chat_template.h"
#include "src/text/token_list.h"
#include "src/text/tokenizer.h"

/* What a folder has for text. Does not change once it is open. */
typedef struct cpa_prompt_source {
    cpa_tokenizer *tokenizer; /* NULL: ids alone; why says why */
    cpa_chat_template *chat;  /* NULL: no chat; why says why */
    int64_t vocabulary;       /* ids of the model are below it */
    char why[512];
} cpa_prompt_source;

/* Opens what the folder has. A tokenizer or a template of another kind than is known is done without; CPA_IO and
 * CPA_INVALID for one that is broken. `chat_template` as in cpa_llm_options, of which what cannot be had is
 * CPA_INVALID. On failure it is as if never opened. */
cpa_status cpa_prompt_source_open(const char *folder, const char *chat_template, int64_t vocabulary,
                                  cpa_prompt_source *out, cpa_error *err);
void cpa_prompt_source_close(cpa_prompt_source *source);

/* The ids of a prompt, as cpa_llm_submit says; the caller releases *out, which is set only on success. */
cpa_status cpa_prompt_ids_of(const cpa_prompt_source *source, const cpa_llm_prompt *prompt, cpa_token_list *out,
                             cpa_error *err);

#endif
