/* Messages of a chat as the text that a model was trained on. Templates of Hugging Face folders are programs (Jinja), and
 * are run as such (jinja.h); those of common families are functions here, too, for who names one. */
#ifndef CPA_TEXT_CHAT_TEMPLATE_H
#define CPA_TEXT_CHAT_TEMPLATE_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include <cpattn/status.h>

#include "src/text/bytes.h"

/* Does not change once it is open: any number of threads may use one at once. */
typedef struct cpa_chat_template cpa_chat_template;

/* What apply_chat_template of transformers takes. Messages are objects with "role" and, as in OpenAI's interface,
 * "content" (a text, or an array of {"type": "text", "text": ...}), "tool_calls", "tool_call_id", "reasoning_content"
 * and whatever else the template knows. What is NULL is not there. */
typedef struct cpa_chat {
    const json_t *messages;    /* an array, not empty */
    const json_t *tools;       /* an array of objects */
    const json_t *documents;   /* an array of objects */
    const json_t *kwargs;      /* an object: names that the template knows, and their values */
    int add_generation_prompt; /* the text ends with what an answer follows */
    int continues_last;        /* the text ends in the last message, for the answer to go on there */
    int64_t now;               /* seconds of Unix time: dates in the text are of then, in the local time zone */
} cpa_chat;

/* Finds the template of a folder. `name` is that of a family, or a file with a template; if it is NULL, the folder's own
 * is taken: chat_template.jinja, or chat_template in tokenizer_config.json, and beside it "tool_use" for chats with
 * tools. *out is NULL, with CPA_OK, if the folder has none. CPA_UNSUPPORTED for a name that is not known, a template that
 * Jinja does not take, or one where Jinja's packages are missing; CPA_IO, CPA_INVALID. The caller closes *out. */
cpa_status cpa_chat_template_open(const char *folder, const char *name, cpa_chat_template **out, cpa_error *err);
void cpa_chat_template_close(cpa_chat_template *chat); /* which may be NULL */

/* "chatml", "llama3", ..., or the name of the file that the template is from. */
const char *cpa_chat_template_name(const cpa_chat_template *chat);

/* The text of the templates of a folder or a file, all of them; "" for a family. It lives as long as the template. */
const char *cpa_chat_template_source(const cpa_chat_template *chat);

/* Whether another process renders: it takes a fraction of a millisecond at least, and seconds at most. */
int cpa_chat_template_is_slow(const cpa_chat_template *chat);

/* Adds the text of a chat to *out. Special tokens are spelled out, the beginning of text too: the text is to be encoded
 * without `add_special`. CPA_INVALID for what the template refuses, and for what a family's function does not know;
 * CPA_BUSY, CPA_IO as jinja.h says. */
cpa_status cpa_chat_template_render(const cpa_chat_template *chat, const cpa_chat *what, cpa_bytes *out,
                                    cpa_error *err);

#endif
