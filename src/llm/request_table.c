#include "src/llm/request_table.h"

#include <stdlib.h>
#include <string.h>
#include <utlist.h>

#include "base/check.h"
#include "base/clock.h"

void cpa_request_table_open(cpa_request_table *table) {
    *table = (cpa_request_table){.last_id = 0};
    pthread_mutex_init(&table->lock, NULL);
    pthread_cond_init(&table->news, NULL);
}

void cpa_request_free(cpa_llm_request *request) {
    if (!request) return;
    cpa_arrival_release(&request->read);
    cpa_arrival_release(&request->arrived);
    cpa_prompt_ranks_close(&request->prompt_ranks);
    cpa_constraint_close(request->bound);
    cpa_ending_text_close(&request->text);
    cpa_bytes_release(&request->said);
    for (int32_t i = 0; request->stops && i < request->n_stops; i++) free(request->stops[i].text);
    free(request->stops);
    free((void *)(uintptr_t)request->sampling.stop_ids);
    free(request->ids);
    free(request->logprobs);
    cpa_token_list_release(&request->prompt);
    pthread_cond_destroy(&request->came);
    free(request);
}

void cpa_request_table_close(cpa_request_table *table) {
    cpa_llm_request *request, *next;
    HASH_CLEAR(hh, table->with_engine);
    DL_FOREACH_SAFE(table->all, request, next) {
        cpa_request_free(request);
    }
    pthread_cond_destroy(&table->news);
    pthread_mutex_destroy(&table->lock);
}

/* ---- with the lock held ---- */

static cpa_llm_request *find(cpa_request_table *table, uint64_t id) {
    cpa_llm_request *request;
    HASH_FIND(hh, table->with_engine, &id, sizeof id, request);
    return request;
}

static void set_due(cpa_request_table *table, cpa_llm_request *request, int is_due) {
    if (request->is_due == is_due) return;
    request->is_due = is_due;
    if (is_due) {
        DL_APPEND2(table->due, request, due_prev, due_next);
    } else {
        DL_DELETE2(table->due, request, due_prev, due_next);
    }
}

/* Something has come of it. */
static void tell(cpa_request_table *table, cpa_llm_request *request) {
    if (request->is_silent || request->is_in_doubt) return;
    set_due(table, request, 1);
    if (request->readers > 0) pthread_cond_broadcast(&request->came);
}

static void wake_waiting(cpa_request_table *table) {
    if (table->due && table->waiting > 0) pthread_cond_broadcast(&table->news);
}

/* Requests that the engine has when it is stopped, or may have, are still to be told of. */
static int has_stopped(const cpa_request_table *table) {
    return table->is_stopping && !table->with_engine && table->in_doubt == 0;
}

static void set_in_doubt(cpa_request_table *table, cpa_llm_request *request, int is_in_doubt) {
    request->is_in_doubt = is_in_doubt;
    table->in_doubt += is_in_doubt ? 1 : -1;
    if (has_stopped(table)) pthread_cond_broadcast(&table->news);
}

static cpa_status check(const cpa_request_table *table, cpa_error *err) {
    if (table->failure.status != CPA_OK) return cpa_fail(err, table->failure.status, "%s", table->failure.message);
    if (table->is_stopping) return cpa_fail(err, CPA_STOPPED, "no requests are taken any more: the llm was stopped");
    return CPA_OK;
}

static void end(cpa_request_table *table, cpa_llm_request *request, cpa_finish_reason reason, const char *error) {
    cpa_arrival_end(&request->arrived, reason, error);
    HASH_DEL(table->with_engine, request);
    tell(table, request);
}

static void forget(cpa_request_table *table, cpa_llm_request *request) {
    set_due(table, request, 0);
    DL_DELETE(table->all, request);
}

/* A wait for signals that began now and takes timeout_s at most; negative: without end. */
typedef struct wait_limit {
    int is_endless;
    struct timespec until;
} wait_limit;

static wait_limit limit_of(double timeout_s) {
    const double most = 1e9; /* thirty years */
    if (timeout_s < 0 || timeout_s > most) return (wait_limit){.is_endless = 1};
    return (wait_limit){.until = cpa_clock_after(timeout_s > 0 ? timeout_s : 0)};
}

/* Waits for a signal; 0 when the time is up. */
static int wait_for(pthread_cond_t *signal, cpa_request_table *table, const wait_limit *limit) {
    if (limit->is_endless) return pthread_cond_wait(signal, &table->lock) == 0;
    return pthread_cond_clockwait(signal, &table->lock, CLOCK_MONOTONIC, &limit->until) == 0;
}

/* ---- for those who submit and read ---- */

cpa_status cpa_request_table_check(cpa_request_table *table, cpa_error *err) {
    pthread_mutex_lock(&table->lock);
    const cpa_status status = check(table, err);
    pthread_mutex_unlock(&table->lock);
    return status;
}

cpa_status cpa_request_table_enter(cpa_request_table *table, cpa_llm_request *request, cpa_error *err) {
    pthread_mutex_lock(&table->lock);
    cpa_status status = check(table, err);
    if (status == CPA_OK) {
        request->id = ++table->last_id;
        HASH_ADD(hh, table->with_engine, id, sizeof request->id, request);
        if (!request->hh.tbl) status = cpa_fail(err, CPA_NO_MEMORY, "no memory for a request");
    }
    if (status == CPA_OK) {
        DL_APPEND(table->all, request);
        set_in_doubt(table, request, 1);
    }
    pthread_mutex_unlock(&table->lock);
    return status;
}

void cpa_request_table_take(cpa_request_table *table, cpa_llm_request *request) {
    pthread_mutex_lock(&table->lock);
    set_in_doubt(table, request, 0);
    if (request->arrived.count > 0 || request->arrived.has_ended) tell(table, request);
    wake_waiting(table);
    pthread_mutex_unlock(&table->lock);
}

void cpa_request_table_return(cpa_request_table *table, cpa_llm_request *request) {
    pthread_mutex_lock(&table->lock);
    if (find(table, request->id)) HASH_DEL(table->with_engine, request); /* else the engine was lost meanwhile */
    forget(table, request);
    set_in_doubt(table, request, 0);
    pthread_mutex_unlock(&table->lock);
}

cpa_status cpa_request_table_collect(cpa_request_table *table, cpa_llm_request *request, double timeout_s,
                                     cpa_error *err) {
    const wait_limit limit = limit_of(timeout_s);
    const cpa_arrival *arrived = &request->arrived;
    int is_time = 1;
    pthread_mutex_lock(&table->lock);
    request->readers++;
    while (is_time && arrived->count == 0 && !arrived->has_ended) is_time = wait_for(&request->came, table, &limit);
    request->readers--;
    const int has_come = arrived->count > 0 || arrived->has_ended;
    if (has_come) cpa_arrival_collect(&request->arrived, &request->read);
    set_due(table, request, 0);
    pthread_mutex_unlock(&table->lock);
    return has_come ? CPA_OK : cpa_fail(err, CPA_BUSY, "nothing has come of the request in %g s", timeout_s);
}

cpa_status cpa_request_table_wait(cpa_request_table *table, double timeout_s, cpa_llm_request **out, cpa_error *err) {
    const wait_limit limit = limit_of(timeout_s);
    int is_time = 1;
    pthread_mutex_lock(&table->lock);
    table->waiting++;
    while (is_time && !table->due && !has_stopped(table)) is_time = wait_for(&table->news, table, &limit);
    table->waiting--;
    cpa_llm_request *request = table->due;
    if (request) set_due(table, request, 0);
    const int is_over = has_stopped(table);
    pthread_mutex_unlock(&table->lock);
    if (!request && is_over) return cpa_fail(err, CPA_STOPPED, "the llm was stopped");
    if (!request) return cpa_fail(err, CPA_BUSY, "nothing has come of any request in %g s", timeout_s);
    *out = request;
    return CPA_OK;
}

void cpa_request_table_silence(cpa_request_table *table, cpa_llm_request *request) {
    pthread_mutex_lock(&table->lock);
    request->is_silent = 1;
    set_due(table, request, 0);
    pthread_mutex_unlock(&table->lock);
}

int cpa_request_table_release(cpa_request_table *table, cpa_llm_request *request) {
    pthread_mutex_lock(&table->lock);
    const int is_with_engine = find(table, request->id) != NULL;
    request->is_silent = request->is_released = 1;
    set_due(table, request, 0);
    if (!is_with_engine) forget(table, request);
    pthread_mutex_unlock(&table->lock);
    if (!is_with_engine) cpa_request_free(request);
    return is_with_engine;
}

void cpa_request_table_stop(cpa_request_table *table) {
    pthread_mutex_lock(&table->lock);
    table->is_stopping = 1;
    pthread_cond_broadcast(&table->news);
    pthread_mutex_unlock(&table->lock);
}

/* ---- for the thread of the engine ---- */

void cpa_request_table_end(cpa_request_table *table, const cpa_error *failure) {
    cpa_llm_request *request, *next;
    pthread_mutex_lock(&table->lock);
    table->failure = *failure;
    const cpa_finish_reason reason = failure->status == CPA_OK ? CPA_FINISH_CANCELLED : CPA_FINISH_FAILED;
    HASH_ITER(hh, table->with_engine, request, next) {
        end(table, request, reason, failure->message);
    }
    pthread_cond_broadcast(&table->news);
    pthread_mutex_unlock(&table->lock);
}

/* Whether an output token of that index is the next of the request, and somebody is there to take it. */
static int is_awaited(const cpa_llm_request *request, int64_t index) {
    return request && !request->is_silent && index == request->received && !request->arrived.has_ended;
}

void cpa_request_table_on_ranks(void *ctx, uint64_t id, int64_t position, const cpa_token_ranks *ranks) {
    cpa_request_table *table = ctx;
    pthread_mutex_lock(&table->lock);
    cpa_llm_request *request = find(table, id);
    if (request && position < request->prompt.count) {
        cpa_prompt_ranks_add(&request->prompt_ranks, position, ranks);
        request->arrived.prompt_ranked = request->prompt_ranks.count;
    } else if (request && is_awaited(request, position - request->prompt.count)) {
        cpa_arrival_add_ranks(&request->arrived, ranks);
    }
    pthread_mutex_unlock(&table->lock);
}

void cpa_request_table_on_token(void *ctx, uint64_t id, int64_t index, uint32_t token, float logprob) {
    cpa_request_table *table = ctx;
    pthread_mutex_lock(&table->lock);
    cpa_llm_request *request = find(table, id);
    if (is_awaited(request, index)) {
        request->received++;
        cpa_arrival_add_token(&request->arrived, token, logprob);
        tell(table, request);
    }
    pthread_mutex_unlock(&table->lock);
}

void cpa_request_table_on_finish(void *ctx, const cpa_request_result *result) {
    cpa_request_table *table = ctx;
    pthread_mutex_lock(&table->lock);
    cpa_llm_request *request = find(table, result->id);
    if (request) end(table, request, result->reason, result->error);
    const int is_free = request && request->is_released;
    if (is_free) forget(table, request);
    wake_waiting(table);
    pthread_mutex_unlock(&table->lock);
    if (is_free) cpa_request_free(request);
}

void cpa_request_table_on_step(void *ctx, int64_t tokens, int64_t requests, double elapsed_s) {
    cpa_request_table *table = ctx;
    (void)tokens, (void)requests, (void)elapsed_s;
    pthread_mutex_lock(&table->lock);
    wake_waiting(table);
    pthread_mutex_unlock(&table->lock);
}

uint32_t cpa_request_table_token_at(void *ctx, uint64_t id, int64_t position) {
    cpa_request_table *table = ctx;
    pthread_mutex_lock(&table->lock);
    const cpa_llm_request *request = find(table, id);
    const uint32_t token = request && position < request->prompt.count ? request->prompt.ids[position] : 0;
    pthread_mutex_unlock(&table->lock);
    return token;
}
