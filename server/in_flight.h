/* The requests that are with the engine: where its threads and those of the server meet.
 *
 * The requests of one answer are a group, which both sides hold: the connection until it has left, the engine until the
 * last of them has ended. Who lets go last frees it. One lock guards all of that. Under it numbers and pointers change
 * hands and connections are resumed; nothing is read, written or rendered, so the engine's thread never waits for
 * more. */
#ifndef CPA_SERVER_IN_FLIGHT_H
#define CPA_SERVER_IN_FLIGHT_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

#include <cpattn/engine.h>

#include "base/hash_table.h"
#include "src/llm/arrival.h"
#include "src/llm/prompt_ranks.h"
#include "src/text/tokenizer.h"

typedef enum cpa_server_state {
    CPA_SERVER_STARTING = 0, /* no engine yet */
    CPA_SERVER_READY,
    CPA_SERVER_DRAINING,
    CPA_SERVER_FAILED
} cpa_server_state;

struct cpa_flight_group;

/* One request. */
typedef struct cpa_flight {
    uint64_t id;
    struct cpa_flight_group *group;
    const cpa_token_list *prompt; /* the request's prompt, one of the group's */
    uint64_t seed;
    /* Guarded by the lock. */
    UT_hash_handle hh; /* in cpa_in_flight.flights, while the engine has the request */
    cpa_arrival arrived;
    int64_t received; /* output tokens received */
} cpa_flight;

typedef struct cpa_flight_group {
    struct cpa_in_flight *in;
    int64_t n;
    cpa_flight *flights;     /* [n] */
    cpa_token_list *prompts; /* [n_prompts] */
    int64_t n_prompts;
    cpa_prompt_ranks *prompt_ranks; /* [n_prompts], added to by the lock; NULL: nobody wants them */
    int wakes_on_tokens;            /* the connection is resumed for each token, not for ends alone */
    /* Guarded by the lock. */
    struct MHD_Connection *connection; /* connection that waits for the group; NULL: it has left */
    UT_hash_handle hh; /* in cpa_in_flight.groups, by the id of the first flight, while the connection is there */
    int64_t with_engine;
    int is_suspended, has_news, is_silent, is_gone, is_due;
} cpa_flight_group;

typedef struct cpa_in_flight {
    pthread_mutex_t lock;
    pthread_cond_t left; /* signalled when a connection has left */
    cpa_flight *flights; /* flights by id */
    cpa_flight_group *groups;
    uint64_t *due; /* [n_due] groups that have tokens for connections to wake, by the ids of their first flights */
    int64_t n_due, due_capacity;
    uint64_t last_id;
    int64_t vocabulary;
    int64_t incoming; /* requests whose header came in time, and which are not yet with the engine */
    int is_closing;
    _Atomic(cpa_server_state) state; /* changes under the lock */
} cpa_in_flight;

void cpa_in_flight_init(cpa_in_flight *in);
/* What the engine still has is forgotten; no connection is left. */
void cpa_in_flight_destroy(cpa_in_flight *in);

/* Goes on to a later state; an earlier one is passed over. `vocabulary` counts for CPA_SERVER_READY. */
void cpa_in_flight_advance(cpa_in_flight *in, cpa_server_state state, int64_t vocabulary);

/* A group of n requests with ids; NULL without memory. Takes the prompts, also then, which are cpa_token_lists. The
 * caller sets prompts and seeds of the flights. */
cpa_flight_group *cpa_flight_group_create(cpa_in_flight *in, int64_t n, cpa_token_list *prompts, int64_t n_prompts);

/* What is said of its prompts is kept; before it departs. 0 without memory. */
int cpa_flight_group_rank_prompts(cpa_flight_group *group, int32_t top);

/* Whose connection never was there. */
void cpa_flight_group_destroy(cpa_flight_group *group);

/* The header of a request has come. Whether that was in time: then it is incoming, and is let in while the server is
 * drained, too. It is so until cpa_in_flight_is_in. */
int cpa_in_flight_announce(cpa_in_flight *in);
/* An incoming request is with the engine, or will never be. */
void cpa_in_flight_is_in(cpa_in_flight *in);
int64_t cpa_in_flight_incoming(cpa_in_flight *in);

/* The engine is about to get the requests: from now on the group is the engine's and the connection's. 0, and nothing
 * has happened, if the state is neither CPA_SERVER_READY nor, for incoming ones, CPA_SERVER_DRAINING, or without
 * memory. */
int cpa_in_flight_depart(cpa_flight_group *group, struct MHD_Connection *connection, int is_incoming);

/* The engine has not taken the flights from `first` on. */
void cpa_in_flight_return(cpa_flight_group *group, int64_t first);

/* Sets each arrivals[n] to what has come of its flight; its array is emptied and goes back. */
void cpa_in_flight_collect(cpa_flight_group *group, cpa_arrival *arrivals);

/* Suspends the connection, which has nothing to write, until something comes; not if that is there, to be collected, or
 * the connection is to end. */
typedef enum cpa_suspend_result { CPA_SUSPENDED = 0, CPA_SUSPEND_NEWS, CPA_SUSPEND_GONE } cpa_suspend_result;
/* From the thread of the connection. */
cpa_suspend_result cpa_in_flight_suspend(cpa_flight_group *group);

/* The client of the connection of this group sends no more: it may have left, or wait for its answer. */
void cpa_in_flight_silent(cpa_in_flight *in, uint64_t first_id);
/* Whether that has happened since this was asked. */
int cpa_in_flight_take_silence(cpa_flight_group *group);

/* The client of the connection of this group, if there is one of the id of its first flight, has left. */
void cpa_in_flight_gone(cpa_in_flight *in, uint64_t first_id);

/* The connection lets go of the group, which may be freed by that. Sets unfinished[n] to the ids of the flights that
 * the engine still has, and to 0 for the others. */
void cpa_in_flight_leave(cpa_flight_group *group, uint64_t *unfinished);

/* What the functions of server.h do that are called alike. Tokens are due to their connections until they are woken. */
void cpa_in_flight_ranks(cpa_in_flight *in, uint64_t id, int64_t position, const cpa_token_ranks *ranks);
void cpa_in_flight_token(cpa_in_flight *in, uint64_t id, int64_t index, uint32_t token, float logprob);
void cpa_in_flight_finish(cpa_in_flight *in, const cpa_request_result *result);
uint32_t cpa_in_flight_token_at(cpa_in_flight *in, uint64_t id, int64_t position);
void cpa_in_flight_fail(cpa_in_flight *in, const char *message);
int cpa_in_flight_has_due(cpa_in_flight *in);
void cpa_in_flight_wake_due(cpa_in_flight *in);
int64_t cpa_in_flight_undelivered(cpa_in_flight *in);

/* Waits, so many seconds at most, until no connection has an answer to deliver; returns how many have one then. */
int64_t cpa_in_flight_wait(cpa_in_flight *in, double seconds);
/* Connections end instead of waiting; none is suspended from now on. */
void cpa_in_flight_close(cpa_in_flight *in);

#endif
