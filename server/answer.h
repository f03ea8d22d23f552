/* The answer to a request for completions or for a chat: its requests in the engine, and what has come of them. Of the
 * thread of its connection alone; what the engine's threads touch lies in its cpa_flight_group. */
#ifndef CPA_SERVER_ANSWER_H
#define CPA_SERVER_ANSWER_H

#include "server/choice.h"
#include "server/generation.h"
#include "server/http_exchange.h"
#include "server/in_flight.h"

typedef struct cpa_answer {
    cpa_server *server;
    cpa_generation generation;
    cpa_flight_group *group;
    int socket;
    char id[64];
    int64_t created; /* seconds of Unix time */
    int64_t n;       /* number of choices: all of the first prompt, then of the next */
    cpa_choice *choices;
    cpa_arrival *arrivals; /* [n] */
    uint64_t *unfinished;  /* [n], for when it is closed */
    /* An answer that is streamed: what is to be written, and how far it is. */
    char *out;
    int64_t out_bytes, out_sent, out_capacity;
    int is_over;
} cpa_answer;

/* Submits the requests of a generation, which is the answer's from now on, also if it is refused. */
int cpa_answer_open(cpa_http_exchange *exchange, cpa_generation *generation, cpa_answer **out, cpa_refusal *refusal);

/* Cancels what the engine still has of it. NULL does nothing. */
void cpa_answer_close(cpa_answer *answer);

/* Takes what has come into the choices, and cancels those that a text has stopped. 0, with the refusal filled, if the
 * answer has failed. */
int cpa_answer_collect(cpa_answer *answer, cpa_refusal *refusal);

int cpa_answer_is_whole(const cpa_answer *answer);

/* The prompt of a choice. */
const cpa_token_list *cpa_answer_prompt(const cpa_answer *answer, int64_t choice);

/* The text of the prompt that a choice is to begin with now; NULL: of none, or that has been written. */
const cpa_prompt_text *cpa_answer_echo(const cpa_answer *answer, int64_t choice);

/* What is known now of a token of the prompt of a choice, as cpa_prompt_ranks_at. */
int cpa_answer_prompt_ranks(const cpa_answer *answer, int64_t choice, int64_t position, cpa_token_ranks *out);

/* Whether all of a choice's prompt is known that it tells, or nothing more will be. */
int cpa_answer_knows_prompt(const cpa_answer *answer, int64_t choice);

#endif
