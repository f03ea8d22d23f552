/* Requests of an llm on their way to its engine. */
#include <cpattn/llm.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/llm/llm_internal.h"

/* ---- what a request is made of ---- */

static cpa_status copy_stops(const cpa_llm_request_options *o, cpa_llm_request *request, cpa_error *err) {
    if (o->n_stops < 0 || (o->n_stops > 0 && !o->stops))
        return cpa_fail(err, CPA_INVALID, "stops: found %d of them, expected 0 or more, and an array", o->n_stops);
    request->stops = calloc((size_t)o->n_stops + 1, sizeof *request->stops);
    if (!request->stops) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the texts that stop a request");
    request->n_stops = o->n_stops;
    for (int32_t i = 0; i < o->n_stops; i++) {
        if (!o->stops[i] || !o->stops[i][0])
            return cpa_fail(err, CPA_INVALID, "stops: text %d is empty, expected at least one byte", i);
        request->stops[i] = (cpa_stop_text){strdup(o->stops[i]), strlen(o->stops[i])};
        if (!request->stops[i].text) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the texts that stop a request");
    }
    return CPA_OK;
}

/* The sampling of one of the answers to a prompt, with ids of its own; the engine checks the rest. */
static cpa_status copy_sampling(const cpa_llm_request_options *o, int32_t sample, cpa_llm_request *request,
                                cpa_error *err) {
    const cpa_sampling none = {.size = sizeof none};
    cpa_sampling *s = &request->sampling;
    CPA_TRY(CPA_STRUCT_TAKE("sampling", o->sampling ? o->sampling : &none, cpa_sampling, size, s, err));
    const uint32_t *ids = s->stop_ids;
    s->stop_ids = NULL;
    s->seed += (uint64_t)sample;
    if (sample > 0) s->prompt_logprobs = s->top_prompt_logprobs = 0; /* the first one has them */
    if (s->top_prompt_logprobs < 0 || s->top_prompt_logprobs > CPA_MOST_TOP_LOGPROBS)
        return cpa_fail(err, CPA_INVALID, "top_prompt_logprobs: found %d, expected 0 to %d", s->top_prompt_logprobs,
                        CPA_MOST_TOP_LOGPROBS);
    if (s->n_stop_ids < 0 || (s->n_stop_ids > 0 && !ids) || s->n_stop_ids > INT32_MAX)
        return cpa_fail(err, CPA_INVALID, "stop_ids: found %" PRId64 " of them, expected 0 or more, and an array",
                        s->n_stop_ids);
    uint32_t *copy = malloc((size_t)s->n_stop_ids * sizeof *copy + 1);
    if (!copy) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the ids that stop a request");
    if (s->n_stop_ids > 0) memcpy(copy, ids, (size_t)s->n_stop_ids * sizeof *copy);
    s->stop_ids = copy;
    return CPA_OK;
}

static cpa_status open_text(const cpa_llm *llm, const cpa_llm_request_options *o, cpa_llm_request *request,
                            cpa_error *err) {
    if (!llm->source.tokenizer) {
        if (o->n_stops == 0) return CPA_OK;
        return cpa_fail(err, CPA_UNSUPPORTED, "stops: there is no text: %s", llm->source.why);
    }
    CPA_TRY(cpa_ending_text_open(llm->source.tokenizer, o->keeps_special, &request->text, err));
    request->text.stops = request->stops;
    request->text.n_stops = request->n_stops;
    request->text.min_tokens = request->sampling.min_tokens;
    request->text.keeps_stop = o->keeps_stop != 0;
    return CPA_OK;
}

static cpa_status bind(const cpa_llm *llm, const cpa_llm_request_options *o, cpa_llm_request *request, cpa_error *err) {
    cpa_error why = {CPA_OK, ""};
    if (!o->constraint) return CPA_OK;
    if (!llm->constraints)
        return cpa_fail(err, CPA_UNSUPPORTED, "constraint: there is no text, or no token that ends it: %s",
                        llm->source.tokenizer ? "config.json has no eos_token_id" : llm->source.why);
    if (request->sampling.ignore_eos)
        return cpa_fail(err, CPA_INVALID, "constraint: found ignore_eos beside it, expected an answer that has an end");
    const cpa_status status =
        cpa_constraint_open(llm->constraints, o->constraint, strlen(o->constraint), &request->bound, &why);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "constraint: %s", why.message);
}

static cpa_status copy_prompt(const cpa_token_list *prompt, cpa_token_list *out, cpa_error *err) {
    *out = (cpa_token_list){malloc((size_t)prompt->count * sizeof *out->ids), prompt->count, prompt->count};
    if (!out->ids) {
        out->count = 0;
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for a prompt");
    }
    memcpy(out->ids, prompt->ids, (size_t)prompt->count * sizeof *out->ids);
    return CPA_OK;
}

/* `first`: the request for the first of the answers to the prompt, which has been filled; NULL: this is it. */
static cpa_status fill(const cpa_llm *llm, const cpa_llm_prompt *prompt, const cpa_llm_request_options *o,
                       int32_t sample, const cpa_llm_request *first, cpa_llm_request *request, cpa_error *err) {
    const cpa_sampling *s = &request->sampling;
    CPA_TRY(copy_sampling(o, sample, request, err));
    CPA_TRY(copy_stops(o, request, err));
    CPA_TRY(open_text(llm, o, request, err));
    if (first) {
        CPA_TRY(copy_prompt(&first->prompt, &request->prompt, err));
        return first->bound ? cpa_constraint_again(first->bound, &request->bound, err) : CPA_OK;
    }
    CPA_TRY(cpa_prompt_ids_of(&llm->source, prompt, &request->prompt, err));
    if (s->prompt_logprobs &&
        !cpa_prompt_ranks_open(request->prompt.count, s->top_prompt_logprobs, &request->prompt_ranks))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the log-probabilities of a prompt");
    return bind(llm, o, request, err);
}

/* ---- to the engine ---- */

/* The most tokens of the answer. */
static cpa_status find_tokens(const cpa_llm *llm, const cpa_llm_request_options *o, const cpa_llm_request *request,
                              int64_t *out, cpa_error *err) {
    const int64_t most = llm->setup.lengths.max_model_len, asked = o->max_tokens > 0 ? o->max_tokens : 1;
    if (o->max_tokens < 0)
        return cpa_fail(err, CPA_INVALID, "max_tokens: found %" PRId64 ", expected 0 or more", o->max_tokens);
    if (request->prompt.count > most - asked)
        return cpa_fail(err, CPA_INVALID,
                        "prompt: found %" PRId64 " tokens and %" PRId64 " of the answer, expected at most %" PRId64
                        " together, max_model_len",
                        request->prompt.count, asked, most);
    *out = o->max_tokens > 0 ? o->max_tokens : most - request->prompt.count;
    return CPA_OK;
}

/* What the requests for the answers to one prompt have in common. */
typedef struct samples {
    cpa_llm_request **requests; /* [n] */
    int32_t n;
    int64_t tokens; /* most tokens of each answer */
} samples;

/* Gives one to the engine, without telling anybody. */
static cpa_status give(cpa_llm *llm, const cpa_llm_request_options *o, const samples *all, int32_t sample,
                       cpa_error *err) {
    cpa_llm_request *request = all->requests[sample];
    CPA_TRY(cpa_request_table_enter(&llm->requests, request, err));
    const cpa_request given = {.size = sizeof given,
                               .id = request->id,
                               .prompt_tokens = request->prompt.count,
                               .output_tokens = all->tokens,
                               .priority = o->priority,
                               .salt = o->salt,
                               .tenant = o->tenant,
                               .group = all->n > 1 ? all->requests[0]->id : 0,
                               .deadline_s = o->deadline_s,
                               .sampling = &request->sampling,
                               .constraint = request->bound ? &cpa_constraint_engine_ops : NULL,
                               .constraint_ctx = request->bound,
                               .transfer = o->transfer};
    const cpa_status status = cpa_engine_submit(llm->engine, &given);
    if (status == CPA_OK) {
        request->bound = NULL; /* it is the engine's */
        return CPA_OK;
    }
    cpa_request_table_return(&llm->requests, request);
    return cpa_fail(err, status, "%s", cpa_engine_error(llm->engine));
}

/* All are with the engine, and others are told of them, or none is. */
static cpa_status hand_over(cpa_llm *llm, const cpa_llm_request_options *o, samples *all, cpa_error *err) {
    cpa_status status = CPA_OK;
    int32_t given = 0;
    CPA_TRY(find_tokens(llm, o, all->requests[0], &all->tokens, err));
    while (status == CPA_OK && given < all->n) {
        status = give(llm, o, all, given, err);
        given += status == CPA_OK;
    }
    for (int32_t i = 0; i < given; i++) {
        cpa_llm_request *request = all->requests[i];
        if (status != CPA_OK) cpa_request_table_silence(&llm->requests, request);
        cpa_request_table_take(&llm->requests, request);
        if (status == CPA_OK) continue;
        cpa_llm_release(request);
        all->requests[i] = NULL;
    }
    return status;
}

/* Makes the requests, and hands them over. On failure those that the engine never had are the caller's. */
static cpa_status submit(cpa_llm *llm, const cpa_llm_prompt *prompt, const cpa_llm_request_options *o, samples *all,
                         cpa_error *err) {
    for (int32_t i = 0; i < all->n; i++) {
        cpa_llm_request *request = calloc(1, sizeof *request);
        if (!request) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a request");
        all->requests[i] = request;
        request->llm = llm;
        pthread_cond_init(&request->came, NULL);
        CPA_TRY(fill(llm, prompt, o, i, i > 0 ? all->requests[0] : NULL, request, err));
    }
    return hand_over(llm, o, all, err);
}

cpa_status cpa_llm_submit_samples(cpa_llm *llm, const cpa_llm_prompt *given, const cpa_llm_request_options *options,
                                  int32_t n, cpa_llm_request **out, cpa_error *err) {
    const cpa_llm_request_options none = {.size = sizeof none};
    cpa_llm_request_options o;
    cpa_llm_prompt prompt;
    if (!llm || !out) return cpa_fail(err, CPA_INVALID, "cpa_llm_submit: llm and out, expected not to be NULL");
    if (n < 1) return cpa_fail(err, CPA_INVALID, "samples: found %d, expected 1 or more", n);
    if (llm->rank > 0) return cpa_fail(err, CPA_STOPPED, "rank %d takes no requests: rank 0 does", llm->rank);
    CPA_TRY(CPA_STRUCT_TAKE("prompt", given, cpa_llm_prompt, size, &prompt, err));
    CPA_TRY(CPA_STRUCT_TAKE("request options", options ? options : &none, cpa_llm_request_options, size, &o, err));
    CPA_TRY(cpa_request_table_check(&llm->requests, err));
    samples all = {calloc((size_t)n, sizeof *all.requests), n, 0};
    if (!all.requests) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %d requests", n);
    const cpa_status status = submit(llm, &prompt, &o, &all, err);
    if (status == CPA_OK) memcpy(out, all.requests, (size_t)n * sizeof(cpa_llm_request *));
    for (int32_t i = 0; status != CPA_OK && i < n; i++) cpa_request_free(all.requests[i]);
    free(all.requests);
    return status;
}

cpa_status cpa_llm_submit(cpa_llm *llm, const cpa_llm_prompt *prompt, const cpa_llm_request_options *options,
                          cpa_llm_request **out, cpa_error *err) {
    return cpa_llm_submit_samples(llm, prompt, options, 1, out, err);
}
