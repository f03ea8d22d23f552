/* Families of chat templates: how each is recognised, and what it writes. */
#ifndef CPA_TEXT_CHAT_FAMILY_H
#define CPA_TEXT_CHAT_FAMILY_H

#include "src/text/bytes.h"
#include "src/text/chat_template.h"

/* What differs between templates of a family; texts may be "". */
typedef struct cpa_chat_details {
    const char *bos, *eos;      /* the tokens of the beginning and the end of a text */
    const char *default_system; /* the system message of a chat without one; NULL: none */
    int starts_with_bos;        /* the text does */
    int always_asks;            /* what an answer follows comes even if it is not wanted */
    int uses_today;             /* the date is that of the day */
    int skips_empty_system;     /* a system message of no bytes is left out */
} cpa_chat_details;

typedef struct cpa_chat_family {
    const char *name;
    const char *has[4];       /* all of these are in the form (jinja_form.h) of its templates, */
    const char *has_not[4];   /* and none of these; NULL ends both */
    cpa_chat_details details; /* of the template with the family's name */
    /* Writes messages, at least one, of valid UTF-8; 0 without memory, else 1. *refusal is set if the template refuses
     * them. */
    int (*write)(const cpa_chat_details *details, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                 const char **refusal);
} cpa_chat_family;

/* Ends with one without a name. A template is of the first family that it fits. */
extern const cpa_chat_family cpa_chat_families[];

#endif
