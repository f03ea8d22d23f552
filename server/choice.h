/* One of the texts of an answer, as its tokens come: what can be said of it now, and when it is at its end. */
#ifndef CPA_SERVER_CHOICE_H
#define CPA_SERVER_CHOICE_H

#include "server/generation.h"
#include "server/in_flight.h"
#include "server/server_internal.h"
#include "src/reply/reply.h"
#include "src/text/ending_text.h"

/* Why it ended. */
typedef enum cpa_choice_end {
    CPA_CHOICE_GOES_ON = 0,
    CPA_CHOICE_LENGTH,
    CPA_CHOICE_STOP,
    CPA_CHOICE_ABORT, /* the engine was told to */
    CPA_CHOICE_ERROR
} cpa_choice_end;

typedef struct cpa_choice {
    const cpa_server *server;
    const cpa_generation *generation;
    cpa_ending_text text; /* text since cpa_choice_forget; without a stream where there is no tokenizer */
    cpa_reply *reply;     /* reads the text as far as it can be said; NULL: it is text alone */
    int64_t told_calls;   /* calls whose names have been told */
    /* Since cpa_choice_forget. */
    cpa_output_token *tokens; /* [n_tokens] */
    int64_t n_tokens, capacity;
    cpa_token_ranks *ranks; /* [n_tokens] where ranks are asked for */
    int64_t ranks_capacity;
    /* Since the beginning of the choice. */
    int64_t total_tokens, forgotten_characters; /* tokens so far; characters of those that were forgotten */
    cpa_choice_end end;
    int64_t stop_id;         /* the token of stop_token_ids that stopped the choice, or -1 */
    const char *error;       /* why, with CPA_CHOICE_ERROR; the arrival's */
    int is_begun, is_closed; /* the first event has been written; the last one has */
    int is_cancelled;        /* the engine's request was cancelled, as a text has stopped the choice */
} cpa_choice;

/* Both must outlive the choice. */
cpa_status cpa_choice_open(cpa_choice *choice, const cpa_server *server, const cpa_generation *generation,
                           cpa_error *err);
void cpa_choice_close(cpa_choice *choice);

/* Adds what has arrived, up to its end. */
cpa_status cpa_choice_add(cpa_choice *choice, const cpa_arrival *arrival, cpa_error *err);

/* Whether there is something to say of its text. */
int cpa_choice_has_text(const cpa_choice *choice);

/* What could be said has been said. */
void cpa_choice_forget(cpa_choice *choice);

/* "stop", "tool_calls", "length", "abort"; NULL while it goes on. */
const char *cpa_choice_reason(const cpa_choice *choice);

#endif
