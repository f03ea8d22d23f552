/* The answer of a model as its parts: thoughts, text, and calls of tools, told apart as its text comes. However the text
 * is cut into pieces, the parts are the same. What is no call is text, but for what a call has been told of already:
 * where its arguments stop being JSON, text goes on. */
#ifndef CPA_REPLY_H
#define CPA_REPLY_H

#include <jansson.h>
#include <stddef.h>

#include <cpattn/status.h>

#include "src/reply/reply_forms.h"
#include "src/text/bytes.h"

typedef struct cpa_reply_options {
    cpa_tool_form tools;
    cpa_thought_form thoughts;
    int thinks_already;  /* the prompt ends with the beginning of thoughts */
    const json_t *known; /* tools that may be called, as requests have them: calls without a mark are of one of these */
    int64_t most_calls;  /* most calls of a reply that count; 0: any number */
} cpa_reply_options;

typedef struct cpa_reply_call {
    char *name;
    char *id; /* id that the model gave the call; NULL: none */
    cpa_bytes arguments;
} cpa_reply_call;

/* One thread at a time. */
typedef struct cpa_reply cpa_reply;

/* What `known` points to must outlive it. CPA_NO_MEMORY. */
cpa_status cpa_reply_open(const cpa_reply_options *options, cpa_reply **out, cpa_error *err);
void cpa_reply_close(cpa_reply *reply); /* which may be NULL */

/* The text goes on; and it is at its end. CPA_NO_MEMORY. */
cpa_status cpa_reply_push(cpa_reply *reply, const char *text, size_t bytes, cpa_error *err);
cpa_status cpa_reply_finish(cpa_reply *reply, cpa_error *err);

/* What has come since cpa_reply_forget. */
const cpa_bytes *cpa_reply_thoughts(const cpa_reply *reply);
const cpa_bytes *cpa_reply_content(const cpa_reply *reply);
/* All calls since the beginning; arguments since cpa_reply_forget. */
const cpa_reply_call *cpa_reply_calls(const cpa_reply *reply, int64_t *n);
void cpa_reply_forget(cpa_reply *reply);

/* Whether most_calls are there, whole. */
int cpa_reply_is_over(const cpa_reply *reply);

#endif
