/* How far a reply is read, for the files that read it. */
#ifndef CPA_REPLY_STATE_H
#define CPA_REPLY_STATE_H

#include "src/reply/call_object.h"
#include "src/reply/reply.h"

/* Where in the text the reader is. */
typedef enum cpa_reply_place {
    CPA_REPLY_BEGIN = 0, /* before anything, or space alone */
    CPA_REPLY_THOUGHTS,
    CPA_REPLY_TEXT,
    /* Of calls, by their form: */
    CPA_REPLY_OPEN,    /* behind the mark */
    CPA_REPLY_OBJECT,  /* in {"name", "arguments"} */
    CPA_REPLY_CLOSE,   /* behind that */
    CPA_REPLY_ELEMENT, /* before an element of Mistral's array */
    CPA_REPLY_NAME,    /* before, or in a name that is no JSON */
    CPA_REPLY_CALL_ID,
    CPA_REPLY_FENCE,     /* DeepSeek: between name and JSON */
    CPA_REPLY_ARGUMENTS, /* in {...} behind such a name */
    CPA_REPLY_OVER       /* what comes counts nothing */
} cpa_reply_place;

/* Of a step of the reader. */
typedef enum cpa_reply_step {
    CPA_REPLY_WAIT = 0, /* for more text */
    CPA_REPLY_GO_ON,
    CPA_REPLY_NO_CALL /* what was held is text */
} cpa_reply_step;

struct cpa_reply {
    cpa_reply_options options;
    cpa_bytes thoughts, content;
    cpa_reply_call *calls;
    int64_t n_calls, calls_capacity;
    int is_out_of_memory, is_finished;
    cpa_reply_place place;
    /* Text that is not told yet; of it `at` bytes are read. What is read is part of a call that may prove to be none. */
    cpa_bytes held;
    int64_t at;
    cpa_bytes space; /* at the end of thoughts or content: told if more follows, but not in front of a call */
    int drops_lines; /* line ends at the beginning of thoughts or content are left out */
    int has_text;    /* content other than space has come */
    /* The call that is read. */
    cpa_call_object object;
    cpa_json_scan scan;
    cpa_bytes name, id;
    int is_array, is_fenced;
    int has_call; /* calls[n_calls - 1] is this one, and what is read of it is told */
};

/* Steps over space, and returns whether a byte other than that is there. */
int cpa_reply_skip_space(cpa_reply *reply);

/* 1: the text goes on with this one, which is stepped over; 0: it does not; -1: it may, as far as it is. */
int cpa_reply_takes(cpa_reply *reply, const char *text);

/* Lets go of the text that is read: it has been told, or counts nothing. */
void cpa_reply_drop_read(cpa_reply *reply);

#endif
