/* Families of chat templates: what each writes of messages that have a role and a text alone. */
#ifndef CPA_TEXT_CHAT_FAMILY_H
#define CPA_TEXT_CHAT_FAMILY_H

#include <stddef.h>

#include "src/text/bytes.h"

typedef struct cpa_chat_message {
    const char *role; /* "system", "user", "assistant" */
    /* CPA_CHAT_NUL stands for U+0000, and also for itself in what is written, since no UTF-8 has it. */
    const char *content;
} cpa_chat_message;

#define CPA_CHAT_NUL "\xc0\x80"

/* What differs between templates of a family, or is the folder's; tokens may be "". */
typedef struct cpa_chat_details {
    const char *bos, *eos;      /* the tokens of the beginning and the end of a text */
    const char *default_system; /* the system message of a chat without one; NULL: none */
} cpa_chat_details;

typedef struct cpa_chat_family {
    const char *name;
    const char *default_system;
    /* Writes messages, at least one, of valid UTF-8; 0 without memory, else 1. *refusal is set if the template refuses
     * them. */
    int (*write)(const cpa_chat_details *details, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                 const char **refusal);
} cpa_chat_family;

/* Ends with one without a name. */
extern const cpa_chat_family cpa_chat_families[];

#endif
