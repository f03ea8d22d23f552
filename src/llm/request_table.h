/* The requests of an llm: where the thread that runs the engine and those that read answers meet. One lock guards all
 * of it, which is held for moments. */
#ifndef CPA_LLM_REQUEST_TABLE_H
#define CPA_LLM_REQUEST_TABLE_H

#include <pthread.h>

#include <cpattn/llm.h>

#include "base/hash_table.h"
#include "src/grammar/constraints.h"
#include "src/llm/arrival.h"
#include "src/llm/prompt_ranks.h"
#include "src/text/ending_text.h"
#include "src/text/token_list.h"

struct cpa_llm_request {
    cpa_llm *llm;
    uint64_t id;
    cpa_token_list prompt;
    cpa_sampling sampling; /* how its tokens are drawn; stop_ids are the request's own */
    cpa_constraint *bound; /* what its answer is bound to, until the engine has it; NULL: nothing */
    cpa_stop_text *stops;  /* [n_stops] */
    int32_t n_stops;
    /* Of the thread that reads it. */
    cpa_arrival read;
    cpa_ending_text text;
    uint32_t *ids; /* [read.count], as logprobs */
    float *logprobs;
    int64_t ids_capacity, logprobs_capacity;
    cpa_bytes said;
    int is_over; /* its end has been told, or is found in its text */
    cpa_finish_reason reason;
    /* Guarded by the table's lock. */
    UT_hash_handle hh;                           /* in cpa_request_table.with_engine */
    struct cpa_llm_request *prev, *next;         /* in cpa_request_table.all */
    struct cpa_llm_request *due_prev, *due_next; /* in cpa_request_table.due, while is_due */
    cpa_arrival arrived;
    cpa_prompt_ranks prompt_ranks; /* the first read.prompt_ranked are of the thread that reads, too */
    int64_t received;              /* output tokens that have come */
    int is_due, is_silent, is_released;
    int is_in_doubt;     /* cpa_engine_submit is still to say whether the engine takes it: nobody is told of it */
    int readers;         /* threads that wait for it */
    pthread_cond_t came; /* signalled for them */
};

typedef struct cpa_request_table {
    pthread_mutex_t lock;
    pthread_cond_t news;          /* signalled for those that wait for any request */
    int waiting;                  /* threads that do */
    cpa_llm_request *all;         /* requests that are not released, or the engine still has */
    cpa_llm_request *with_engine; /* requests by id, while the engine has them */
    cpa_llm_request *due;         /* requests of which something has come, the oldest first */
    int64_t in_doubt;             /* requests that are */
    uint64_t last_id;
    int is_stopping;
    cpa_error failure; /* why the engine has ended, where it has failed; status CPA_OK: it has not */
} cpa_request_table;

void cpa_request_table_open(cpa_request_table *table);
/* No thread uses it any more: frees every request. */
void cpa_request_table_close(cpa_request_table *table);

/* Frees a request that is in no table, or NULL. */
void cpa_request_free(cpa_llm_request *request);

/* Whether requests are taken: CPA_STOPPED, or the engine's failure. */
cpa_status cpa_request_table_check(cpa_request_table *table, cpa_error *err);

/* The request gets an id, and is about to go to the engine. CPA_NO_MEMORY, and as cpa_request_table_check. */
cpa_status cpa_request_table_enter(cpa_request_table *table, cpa_llm_request *request, cpa_error *err);
/* The engine has taken it: from now on others are told of it. */
void cpa_request_table_take(cpa_request_table *table, cpa_llm_request *request);
/* The engine has not taken it: it is in the table no more. */
void cpa_request_table_return(cpa_request_table *table, cpa_llm_request *request);

/* Moves what has come of the request to request->read, for which it waits; cpa_llm_next and cpa_llm_wait say more. */
cpa_status cpa_request_table_collect(cpa_request_table *table, cpa_llm_request *request, double timeout_s,
                                     cpa_error *err);
cpa_status cpa_request_table_wait(cpa_request_table *table, double timeout_s, cpa_llm_request **out, cpa_error *err);

/* Nobody wants to hear more of the request. */
void cpa_request_table_silence(cpa_request_table *table, cpa_llm_request *request);
/* Its owner lets go: it is freed, or will be once the engine has ended it. 1: the engine has it still. */
int cpa_request_table_release(cpa_request_table *table, cpa_llm_request *request);

/* No more are taken. */
void cpa_request_table_stop(cpa_request_table *table);
/* The engine has ended, by `failure` if that is not CPA_OK: so has every request. */
void cpa_request_table_end(cpa_request_table *table, const cpa_error *failure);

/* The engine's callbacks, with the table as ctx; after each step, those who wait for any request are woken. */
void cpa_request_table_on_ranks(void *table, uint64_t id, int64_t position, const cpa_token_ranks *ranks);
void cpa_request_table_on_token(void *table, uint64_t id, int64_t index, uint32_t token, float logprob);
void cpa_request_table_on_finish(void *table, const cpa_request_result *result);
void cpa_request_table_on_step(void *table, int64_t tokens, int64_t requests, double elapsed_s);
uint32_t cpa_request_table_token_at(void *table, uint64_t id, int64_t position);

#endif
