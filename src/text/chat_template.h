/* Messages of a chat as the text that a model was trained on. Templates of Hugging Face folders are programs (Jinja);
 * those of the common families are recognised, and written out here as functions. */
#ifndef CPA_TEXT_CHAT_TEMPLATE_H
#define CPA_TEXT_CHAT_TEMPLATE_H

#include <stddef.h>

#include <cpattn/status.h>

/* Does not change once it is open: any number of threads may use one at once. */
typedef struct cpa_chat_template cpa_chat_template;

typedef struct cpa_chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} cpa_chat_message;

/* Finds the template of a folder: the one of this name, or, if `name` is NULL, the one that its chat_template.jinja, or
 * chat_template in its tokenizer_config.json, is. *out is NULL, with CPA_OK, if the folder names none. CPA_UNSUPPORTED,
 * with the names that there are, for one that is not known; CPA_IO, CPA_INVALID. The caller closes *out. */
cpa_status cpa_chat_template_open(const char *folder, const char *name, cpa_chat_template **out, cpa_error *err);
void cpa_chat_template_close(cpa_chat_template *chat); /* which may be NULL */

/* "chatml", "llama3", ... */
const char *cpa_chat_template_name(const cpa_chat_template *chat);

/* Writes the messages out, and with `add_generation_prompt` what an answer follows. Special tokens are spelled out, the
 * beginning of text too: the text is to be encoded without `add_special`. CPA_INVALID for roles, or an order of them,
 * that the template refuses. The caller frees *text. */
cpa_status cpa_chat_template_render(const cpa_chat_template *chat, const cpa_chat_message *messages, size_t n,
                                    int add_generation_prompt, char **text, cpa_error *err);

#endif
