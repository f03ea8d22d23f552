#include "server/in_flight.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/clock.h"
#include "base/hash.h"

void cpa_in_flight_init(cpa_in_flight *in) {
    *in = (cpa_in_flight){.last_id = 0};
    pthread_mutex_init(&in->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&in->left, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void cpa_in_flight_destroy(cpa_in_flight *in) {
    cpa_in_flight_fail(in, "");
    free(in->due);
    pthread_cond_destroy(&in->left);
    pthread_mutex_destroy(&in->lock);
}

void cpa_in_flight_advance(cpa_in_flight *in, cpa_server_state state, int64_t vocabulary) {
    pthread_mutex_lock(&in->lock);
    if (state == CPA_SERVER_READY) in->vocabulary = vocabulary;
    if (atomic_load(&in->state) < state) atomic_store(&in->state, state);
    pthread_mutex_unlock(&in->lock);
}

static void free_prompts(cpa_token_list *prompts, int64_t n) {
    for (int64_t i = 0; i < n; i++) free(prompts[i].ids);
    free(prompts);
}

cpa_flight_group *cpa_flight_group_create(cpa_in_flight *in, int64_t n, cpa_token_list *prompts, int64_t n_prompts) {
    cpa_flight_group *group = calloc(1, sizeof *group);
    cpa_flight *flights = calloc((size_t)n, sizeof *flights);
    if (!group || !flights) {
        free(group);
        free(flights);
        free_prompts(prompts, n_prompts);
        return NULL;
    }
    *group = (cpa_flight_group){.in = in, .n = n, .flights = flights, .prompts = prompts, .n_prompts = n_prompts};
    pthread_mutex_lock(&in->lock);
    for (int64_t i = 0; i < n; i++) flights[i] = (cpa_flight){.id = ++in->last_id, .group = group};
    pthread_mutex_unlock(&in->lock);
    return group;
}

int cpa_flight_group_rank_prompts(cpa_flight_group *group, int32_t top) {
    group->prompt_ranks = calloc((size_t)group->n_prompts, sizeof *group->prompt_ranks);
    int is_made = group->prompt_ranks != NULL;
    for (int64_t i = 0; is_made && i < group->n_prompts; i++) {
        is_made = cpa_prompt_ranks_open(group->prompts[i].count, top, &group->prompt_ranks[i]);
    }
    return is_made;
}

void cpa_flight_group_destroy(cpa_flight_group *group) {
    for (int64_t i = 0; i < group->n; i++) cpa_arrival_release(&group->flights[i].arrived);
    for (int64_t i = 0; group->prompt_ranks && i < group->n_prompts; i++) {
        cpa_prompt_ranks_close(&group->prompt_ranks[i]);
    }
    free(group->prompt_ranks);
    free_prompts(group->prompts, group->n_prompts);
    free(group->flights);
    free(group);
}

/* The rest holds the lock where it is not taken. */

static cpa_flight *find(cpa_in_flight *in, uint64_t id) {
    cpa_flight *flight;
    HASH_FIND(hh, in->flights, &id, sizeof id, flight);
    return flight;
}

static void wake(cpa_flight_group *group) {
    group->has_news = 1;
    if (!group->is_suspended) return;
    group->is_suspended = 0;
    MHD_resume_connection(group->connection);
}

/* To be woken with others, or, without memory for that, at once. */
static void wake_later(cpa_flight_group *group) {
    cpa_in_flight *in = group->in;
    if (group->is_due) return;
    if (!cpa_array_reserve(&in->due, &in->due_capacity, in->n_due + 1, sizeof *in->due)) {
        wake(group);
        return;
    }
    group->is_due = 1;
    in->due[in->n_due++] = group->flights[0].id;
}

/* What is said of the flight's prompt; NULL: nobody wants that. */
static cpa_prompt_ranks *prompt_ranks(const cpa_flight *flight) {
    const cpa_flight_group *group = flight->group;
    return group->prompt_ranks ? &group->prompt_ranks[flight->prompt - group->prompts] : NULL;
}

/* The engine has this one no more. Returns the group if nobody else has it either. */
static cpa_flight_group *land(cpa_flight *flight) {
    cpa_flight_group *group = flight->group;
    HASH_DEL(group->in->flights, flight);
    group->with_engine--;
    return group->with_engine == 0 && !group->connection ? group : NULL;
}

/* Both tables have the group, or neither: without memory for an entry. */
static int enter(cpa_flight_group *group) {
    cpa_in_flight *in = group->in;
    HASH_ADD_KEYPTR(hh, in->groups, &group->flights[0].id, sizeof group->flights[0].id, group);
    if (!group->hh.tbl) return 0;
    for (int64_t i = 0; i < group->n; i++) {
        cpa_flight *flight = &group->flights[i];
        HASH_ADD(hh, in->flights, id, sizeof flight->id, flight);
        if (flight->hh.tbl) continue;
        while (i-- > 0) HASH_DEL(in->flights, &group->flights[i]);
        HASH_DEL(in->groups, group);
        return 0;
    }
    return 1;
}

int cpa_in_flight_announce(cpa_in_flight *in) {
    pthread_mutex_lock(&in->lock);
    const int is_in_time = atomic_load(&in->state) == CPA_SERVER_READY;
    in->incoming += is_in_time;
    pthread_mutex_unlock(&in->lock);
    return is_in_time;
}

void cpa_in_flight_is_in(cpa_in_flight *in) {
    pthread_mutex_lock(&in->lock);
    in->incoming--;
    pthread_mutex_unlock(&in->lock);
}

int64_t cpa_in_flight_incoming(cpa_in_flight *in) {
    pthread_mutex_lock(&in->lock);
    const int64_t incoming = in->incoming;
    pthread_mutex_unlock(&in->lock);
    return incoming;
}

int cpa_in_flight_depart(cpa_flight_group *group, struct MHD_Connection *connection, int is_incoming) {
    cpa_in_flight *in = group->in;
    pthread_mutex_lock(&in->lock);
    const cpa_server_state state = atomic_load(&in->state);
    const int is_let_in = state == CPA_SERVER_READY || (state == CPA_SERVER_DRAINING && is_incoming);
    const int departs = is_let_in && !in->is_closing && enter(group);
    if (departs) {
        group->connection = connection;
        group->with_engine = group->n;
    }
    pthread_mutex_unlock(&in->lock);
    return departs;
}

void cpa_in_flight_return(cpa_flight_group *group, int64_t first) {
    cpa_in_flight *in = group->in;
    pthread_mutex_lock(&in->lock);
    for (int64_t i = first; i < group->n; i++) {
        cpa_flight *flight = &group->flights[i];
        if (find(in, flight->id)) land(flight); /* else the engine was lost meanwhile */
    }
    pthread_mutex_unlock(&in->lock);
}

void cpa_in_flight_collect(cpa_flight_group *group, cpa_arrival *arrivals) {
    pthread_mutex_lock(&group->in->lock);
    group->has_news = 0;
    for (int64_t i = 0; i < group->n; i++) {
        const cpa_prompt_ranks *ranks = prompt_ranks(&group->flights[i]);
        cpa_arrival_collect(&group->flights[i].arrived, &arrivals[i]);
        arrivals[i].prompt_ranked = ranks ? ranks->count : 0;
    }
    pthread_mutex_unlock(&group->in->lock);
}

cpa_suspend_result cpa_in_flight_suspend(cpa_flight_group *group) {
    cpa_suspend_result result = CPA_SUSPENDED;
    pthread_mutex_lock(&group->in->lock);
    if (group->is_gone || group->in->is_closing) {
        result = CPA_SUSPEND_GONE;
    } else if (group->has_news) {
        result = CPA_SUSPEND_NEWS;
    } else {
        group->is_suspended = 1;
        MHD_suspend_connection(group->connection);
    }
    pthread_mutex_unlock(&group->in->lock);
    return result;
}

void cpa_in_flight_gone(cpa_in_flight *in, uint64_t first_id) {
    cpa_flight_group *group;
    pthread_mutex_lock(&in->lock);
    HASH_FIND(hh, in->groups, &first_id, sizeof first_id, group);
    if (group) {
        group->is_gone = 1;
        wake(group);
    }
    pthread_mutex_unlock(&in->lock);
}

void cpa_in_flight_silent(cpa_in_flight *in, uint64_t first_id) {
    cpa_flight_group *group;
    pthread_mutex_lock(&in->lock);
    HASH_FIND(hh, in->groups, &first_id, sizeof first_id, group);
    if (group) {
        group->is_silent = 1;
        wake(group);
    }
    pthread_mutex_unlock(&in->lock);
}

int cpa_in_flight_take_silence(cpa_flight_group *group) {
    pthread_mutex_lock(&group->in->lock);
    const int is_silent = group->is_silent;
    group->is_silent = 0;
    pthread_mutex_unlock(&group->in->lock);
    return is_silent;
}

void cpa_in_flight_leave(cpa_flight_group *group, uint64_t *unfinished) {
    cpa_in_flight *in = group->in;
    pthread_mutex_lock(&in->lock);
    for (int64_t i = 0; i < group->n; i++) {
        unfinished[i] = find(in, group->flights[i].id) ? group->flights[i].id : 0;
    }
    HASH_DEL(in->groups, group);
    group->connection = NULL;
    const int is_last = group->with_engine == 0;
    pthread_cond_broadcast(&in->left);
    pthread_mutex_unlock(&in->lock);
    if (is_last) cpa_flight_group_destroy(group);
}

/* Whether an output token of that index is the next of the flight, and somebody is there to take it. */
static int is_awaited(const cpa_flight *flight, int64_t index) {
    return flight && flight->group->connection && index == flight->received && !flight->arrived.has_ended;
}

void cpa_in_flight_ranks(cpa_in_flight *in, uint64_t id, int64_t position, const cpa_token_ranks *ranks) {
    pthread_mutex_lock(&in->lock);
    cpa_flight *flight = find(in, id);
    if (flight && flight->group->connection && position < flight->prompt->count) {
        if (prompt_ranks(flight)) cpa_prompt_ranks_add(prompt_ranks(flight), position, ranks);
    } else if (flight && is_awaited(flight, position - flight->prompt->count)) {
        cpa_arrival_add_ranks(&flight->arrived, ranks);
    }
    pthread_mutex_unlock(&in->lock);
}

void cpa_in_flight_token(cpa_in_flight *in, uint64_t id, int64_t index, uint32_t token, float logprob) {
    pthread_mutex_lock(&in->lock);
    cpa_flight *flight = find(in, id);
    if (is_awaited(flight, index)) {
        flight->received++;
        cpa_arrival_add_token(&flight->arrived, token, logprob);
        if (flight->group->wakes_on_tokens || flight->arrived.has_ended) wake_later(flight->group);
    }
    pthread_mutex_unlock(&in->lock);
}

int cpa_in_flight_has_due(cpa_in_flight *in) {
    pthread_mutex_lock(&in->lock);
    const int has_due = in->n_due > 0;
    pthread_mutex_unlock(&in->lock);
    return has_due;
}

void cpa_in_flight_wake_due(cpa_in_flight *in) {
    enum { AT_ONCE = 16 }; /* the engine's thread may be waiting for the lock */
    for (int is_left = 1; is_left;) {
        pthread_mutex_lock(&in->lock);
        for (int i = 0; i < AT_ONCE && in->n_due > 0; i++) {
            const uint64_t id = in->due[--in->n_due];
            cpa_flight_group *group;
            HASH_FIND(hh, in->groups, &id, sizeof id, group);
            if (!group) continue; /* its connection has left */
            group->is_due = 0;
            wake(group);
        }
        is_left = in->n_due > 0;
        pthread_mutex_unlock(&in->lock);
    }
}

void cpa_in_flight_finish(cpa_in_flight *in, const cpa_request_result *result) {
    pthread_mutex_lock(&in->lock);
    cpa_flight *flight = find(in, result->id);
    cpa_flight_group *unused = NULL;
    if (flight) {
        cpa_flight_group *group = flight->group;
        cpa_arrival_end(&flight->arrived, result->reason, result->error);
        unused = land(flight);
        const int is_due = group->wakes_on_tokens || group->with_engine == 0 || result->reason == CPA_FINISH_FAILED;
        if (group->connection && is_due) wake(group);
    }
    pthread_mutex_unlock(&in->lock);
    if (unused) cpa_flight_group_destroy(unused);
}

uint32_t cpa_in_flight_token_at(cpa_in_flight *in, uint64_t id, int64_t position) {
    uint32_t token = 0;
    pthread_mutex_lock(&in->lock);
    const cpa_flight *flight = find(in, id);
    if (flight && position < flight->prompt->count) {
        token = flight->prompt->ids[position];
    } else if (flight) {
        const uint64_t drawn = cpa_mix64(flight->seed + (uint64_t)position * CPA_GOLDEN);
        token = (uint32_t)(drawn % (uint64_t)in->vocabulary);
    }
    pthread_mutex_unlock(&in->lock);
    return token;
}

void cpa_in_flight_fail(cpa_in_flight *in, const char *message) {
    cpa_flight *flight, *next;
    pthread_mutex_lock(&in->lock);
    atomic_store(&in->state, CPA_SERVER_FAILED);
    HASH_ITER(hh, in->flights, flight, next) {
        cpa_flight_group *group = flight->group;
        cpa_arrival_end(&flight->arrived, CPA_FINISH_FAILED, message);
        cpa_flight_group *unused = land(flight);
        if (group->connection) wake(group);
        if (unused) cpa_flight_group_destroy(unused);
    }
    pthread_mutex_unlock(&in->lock);
}

int64_t cpa_in_flight_undelivered(cpa_in_flight *in) {
    pthread_mutex_lock(&in->lock);
    const int64_t n = HASH_COUNT(in->groups);
    pthread_mutex_unlock(&in->lock);
    return n;
}

int64_t cpa_in_flight_wait(cpa_in_flight *in, double seconds) {
    const struct timespec until = cpa_clock_after(fmax(seconds, 0));
    pthread_mutex_lock(&in->lock);
    while (in->groups && pthread_cond_timedwait(&in->left, &in->lock, &until) == 0) {}
    const int64_t n = HASH_COUNT(in->groups);
    pthread_mutex_unlock(&in->lock);
    return n;
}

void cpa_in_flight_close(cpa_in_flight *in) {
    cpa_flight_group *group, *next;
    pthread_mutex_lock(&in->lock);
    in->is_closing = 1;
    HASH_ITER(hh, in->groups, group, next) {
        wake(group);
    }
    pthread_mutex_unlock(&in->lock);
}
