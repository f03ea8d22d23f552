/* Templates of Jinja, each an own program of its model's folder, rendered by a child (jinja_child.h). */
#ifndef CPA_TEXT_JINJA_H
#define CPA_TEXT_JINJA_H

#include <jansson.h>

#include <cpattn/status.h>

#include "src/text/bytes.h"

/* Any number of threads may render at once; one is rendered at a time. */
typedef struct cpa_jinja cpa_jinja;

typedef struct cpa_jinja_limits {
    double seconds;     /* time that a chat may take, in s, while it waits for others too */
    int64_t memory;     /* bytes of the address space of the child */
    const char *python; /* the interpreter; NULL: that of the system, else that of PATH */
} cpa_jinja_limits;

#define CPA_JINJA_LIMITS ((cpa_jinja_limits){.seconds = 5, .memory = (int64_t)1 << 30})

/* Compiles the templates of an object: "default", and "tool_use" for chats with tools. `tokens` has the texts that
 * templates know by names such as bos_token. CPA_INVALID with the line for what is no template; CPA_UNSUPPORTED where
 * packages are missing; CPA_IO. The caller closes *out. */
cpa_status cpa_jinja_open(const json_t *templates, const json_t *tokens, const cpa_jinja_limits *limits,
                          cpa_jinja **out, cpa_error *err);
void cpa_jinja_close(cpa_jinja *jinja); /* which may be NULL */

/* Renders a chat, the object that jinja_child.py takes, and adds the text to *out. A child that has died is replaced.
 * CPA_INVALID for what the template refuses, and for what takes too long or too much memory; CPA_BUSY if other chats
 * took all of the time; CPA_IO if the child dies of it. */
cpa_status cpa_jinja_render(cpa_jinja *jinja, const json_t *chat, cpa_bytes *out, cpa_error *err);

#endif
