#include "server/answer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/check.h"
#include "base/hash.h"
#include "server/generation_fields.h"

const cpa_token_list *cpa_answer_prompt(const cpa_answer *answer, int64_t choice) {
    return answer->group->flights[choice].prompt;
}

const cpa_prompt_text *cpa_answer_echo(const cpa_answer *answer, int64_t choice) {
    const cpa_generation *g = &answer->generation;
    return g->echoes && !answer->choices[choice].is_begun ? &g->prompt_texts[choice / g->n] : NULL;
}

int cpa_answer_prompt_ranks(const cpa_answer *answer, int64_t choice, int64_t position, cpa_token_ranks *out) {
    const cpa_prompt_ranks *ranks = answer->group->prompt_ranks;
    if (!ranks) return 0;
    return cpa_prompt_ranks_at(&ranks[choice / answer->generation.n], answer->arrivals[choice].prompt_ranked, position,
                               out);
}

int cpa_answer_knows_prompt(const cpa_answer *answer, int64_t choice) {
    if (!answer->group->prompt_ranks) return 1;
    return answer->arrivals[choice].prompt_ranked + 1 >= cpa_answer_prompt(answer, choice)->count ||
           cpa_answer_is_whole(answer);
}

/* Without the group: that is there last. */
static void destroy(cpa_answer *answer) {
    for (int64_t i = 0; answer->choices && i < answer->n; i++) cpa_choice_close(&answer->choices[i]);
    for (int64_t i = 0; answer->arrivals && i < answer->n; i++) cpa_arrival_release(&answer->arrivals[i]);
    cpa_generation_release(&answer->generation);
    free(answer->choices);
    free(answer->arrivals);
    free(answer->unfinished);
    free(answer->out);
    free(answer);
}

static cpa_answer *create(cpa_server *server, cpa_generation *g, cpa_refusal *refusal) {
    cpa_answer *answer = calloc(1, sizeof *answer);
    cpa_error err = {.status = CPA_NO_MEMORY, .message = "no memory for the answer"};
    if (!answer) {
        cpa_generation_release(g);
        cpa_refuse_failure(refusal, NULL, &err);
        return NULL;
    }
    answer->server = server;
    answer->generation = *g;
    answer->n = g->n_prompts * g->n;
    answer->created = time(NULL);
    answer->choices = calloc((size_t)answer->n, sizeof *answer->choices);
    answer->arrivals = calloc((size_t)answer->n, sizeof *answer->arrivals);
    answer->unfinished = calloc((size_t)answer->n, sizeof *answer->unfinished);
    int is_made = answer->choices && answer->arrivals && answer->unfinished;
    for (int64_t i = 0; is_made && i < answer->n; i++) {
        is_made = cpa_choice_open(&answer->choices[i], server, &answer->generation, &err) == CPA_OK;
    }
    if (is_made) {
        answer->group = cpa_flight_group_create(&server->in_flight, answer->n, g->prompts, g->n_prompts);
        answer->generation.prompts = NULL; /* they are the group's */
        answer->generation.n_prompts = 0;
    }
    if (answer->group && g->sampling.prompt_logprobs &&
        !cpa_flight_group_rank_prompts(answer->group, g->sampling.top_prompt_logprobs)) {
        cpa_flight_group_destroy(answer->group);
        answer->group = NULL;
    }
    if (answer->group) return answer;
    destroy(answer);
    cpa_refuse_failure(refusal, NULL, &err);
    return NULL;
}

/* Prompts and seeds; samples of one prompt have seeds that follow each other. */
static void prepare(cpa_answer *answer) {
    const cpa_generation *g = &answer->generation;
    cpa_flight_group *group = answer->group;
    const uint64_t first = group->flights[0].id, own = answer->server->options.seed;
    const uint64_t seed = g->has_seed ? g->sampling.seed : cpa_mix64(own + first * CPA_GOLDEN);
    for (int64_t i = 0; i < answer->n; i++) {
        group->flights[i].prompt = &group->prompts[i / g->n];
        group->flights[i].seed = seed + (uint64_t)(i % g->n);
    }
    group->wakes_on_tokens = g->stream || g->n_stops > 0 || g->reply.most_calls > 0;
    snprintf(answer->id, sizeof answer->id, "%s-%016" PRIx64 "%016" PRIx64, g->is_chat ? "chatcmpl" : "cmpl",
             answer->server->instance, cpa_mix64(first * CPA_GOLDEN));
}

static cpa_status submit(const cpa_answer *answer, int64_t choice, cpa_error *err) {
    const cpa_generation *g = &answer->generation;
    const cpa_server_engine *engine = &answer->server->engine;
    const cpa_flight *flight = &answer->group->flights[choice];
    cpa_sampling sampling = g->sampling;
    sampling.seed = flight->seed;
    if (choice % g->n > 0)
        sampling.prompt_logprobs = sampling.top_prompt_logprobs = 0; /* the first sample tells them */
    cpa_constraint *constraint = NULL;
    if (g->constraint) CPA_TRY(cpa_constraint_again(g->constraint, &constraint, err));
    const cpa_request request = {
        .size = sizeof request,
        .id = flight->id,
        .prompt_tokens = flight->prompt->count,
        .output_tokens = cpa_answer_tokens(answer->server, g, flight->prompt),
        .priority = g->priority,
        .transfer = g->transfer,
        .salt = g->salt,
        .tenant = g->tenant,
        .group = g->n > 1 ? answer->group->flights[choice - choice % g->n].id : 0,
        .sampling = &sampling,
        .constraint = constraint ? &cpa_constraint_engine_ops : NULL,
        .constraint_ctx = constraint,
    };
    const cpa_status status = engine->submit(engine->ctx, &request, err);
    if (status != CPA_OK) cpa_constraint_close(constraint);
    return status;
}

/* The engine has all of its requests, or none. */
static int depart(cpa_answer *answer, const cpa_http_exchange *x, cpa_refusal *refusal) {
    struct MHD_Connection *connection = x->connection;
    if (!cpa_in_flight_depart(answer->group, connection, x->is_incoming)) {
        cpa_flight_group_destroy(answer->group);
        destroy(answer);
        return cpa_refuse(refusal, MHD_HTTP_SERVICE_UNAVAILABLE, NULL, NULL, "the server takes no more requests");
    }
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    answer->socket = info->connect_fd;
    cpa_client_watch_add(&answer->server->watch, answer->socket, answer->group->flights[0].id);
    cpa_error err = {.status = CPA_OK};
    for (int64_t i = 0; i < answer->n; i++) {
        if (submit(answer, i, &err) == CPA_OK) continue;
        cpa_in_flight_return(answer->group, i);
        cpa_answer_close(answer);
        return cpa_refuse_failure(refusal, NULL, &err);
    }
    return 1;
}

int cpa_answer_open(cpa_http_exchange *x, cpa_generation *generation, cpa_answer **out, cpa_refusal *refusal) {
    cpa_answer *answer = create(x->server, generation, refusal);
    *generation = (cpa_generation){.n = 0};
    if (!answer) return 0;
    prepare(answer);
    if (!depart(answer, x, refusal)) return 0;
    *out = answer;
    return 1;
}

void cpa_answer_close(cpa_answer *answer) {
    if (!answer) return;
    const cpa_server_engine *engine = &answer->server->engine;
    cpa_client_watch_remove(&answer->server->watch, answer->socket);
    cpa_in_flight_leave(answer->group, answer->unfinished);
    for (int64_t i = 0; i < answer->n; i++) {
        if (answer->unfinished[i] && !answer->choices[i].is_cancelled) {
            engine->cancel(engine->ctx, answer->unfinished[i]);
        }
    }
    destroy(answer);
}

int cpa_answer_collect(cpa_answer *answer, cpa_refusal *refusal) {
    const cpa_server_engine *engine = &answer->server->engine;
    cpa_error err;
    cpa_in_flight_collect(answer->group, answer->arrivals);
    for (int64_t i = 0; i < answer->n; i++) {
        cpa_choice *choice = &answer->choices[i];
        if (choice->end != CPA_CHOICE_GOES_ON) continue;
        if (cpa_choice_add(choice, &answer->arrivals[i], &err) != CPA_OK) {
            return cpa_refuse_failure(refusal, NULL, &err);
        }
        if (choice->end == CPA_CHOICE_ERROR) {
            const int is_lost = atomic_load(&answer->server->in_flight.state) == CPA_SERVER_FAILED;
            return cpa_refuse(refusal, is_lost ? MHD_HTTP_SERVICE_UNAVAILABLE : MHD_HTTP_INTERNAL_SERVER_ERROR, NULL,
                              NULL, "%s", choice->error);
        }
        if (choice->end != CPA_CHOICE_GOES_ON && !answer->arrivals[i].has_ended) {
            choice->is_cancelled = 1;
            engine->cancel(engine->ctx, answer->group->flights[i].id);
        }
    }
    return 1;
}

int cpa_answer_is_whole(const cpa_answer *answer) {
    for (int64_t i = 0; i < answer->n; i++) {
        if (answer->choices[i].end == CPA_CHOICE_GOES_ON) return 0;
    }
    return 1;
}
