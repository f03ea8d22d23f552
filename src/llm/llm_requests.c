/* Requests of an llm as their owners see them. */
#include <cpattn/llm.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/struct_size.h"
#include "src/llm/llm_internal.h"

/* ---- submitting ---- */

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

/* The sampling with ids of its own; the engine checks the rest. */
static cpa_status copy_sampling(const cpa_llm_request_options *o, cpa_llm_request *request, cpa_error *err) {
    const cpa_sampling none = {.size = sizeof none};
    cpa_sampling *s = &request->sampling;
    CPA_TRY(CPA_STRUCT_TAKE("sampling", o->sampling ? o->sampling : &none, cpa_sampling, size, s, err));
    const uint32_t *ids = s->stop_ids;
    s->stop_ids = NULL;
    if (s->prompt_logprobs)
        return cpa_fail(err, CPA_UNSUPPORTED, "sampling: prompt_logprobs, which an llm does not tell");
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

static cpa_status fill(cpa_llm *llm, const cpa_llm_prompt *prompt, const cpa_llm_request_options *o,
                       cpa_llm_request *request, cpa_error *err) {
    CPA_TRY(copy_sampling(o, request, err));
    CPA_TRY(copy_stops(o, request, err));
    CPA_TRY(open_text(llm, o, request, err));
    return cpa_prompt_ids_of(&llm->source, prompt, &request->prompt, err);
}

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

static cpa_status hand_over(cpa_llm *llm, const cpa_llm_request_options *o, cpa_llm_request *request, cpa_error *err) {
    int64_t tokens = 0;
    CPA_TRY(find_tokens(llm, o, request, &tokens, err));
    CPA_TRY(cpa_request_table_enter(&llm->requests, request, err));
    const cpa_request given = {.size = sizeof given,
                               .id = request->id,
                               .prompt_tokens = request->prompt.count,
                               .output_tokens = tokens,
                               .priority = o->priority,
                               .salt = o->salt,
                               .tenant = o->tenant,
                               .deadline_s = o->deadline_s,
                               .sampling = &request->sampling};
    const cpa_status status = cpa_engine_submit(llm->engine, &given);
    if (status == CPA_OK) {
        cpa_request_table_take(&llm->requests, request);
        return CPA_OK;
    }
    cpa_request_table_return(&llm->requests, request);
    return cpa_fail(err, status, "%s", cpa_engine_error(llm->engine));
}

static cpa_status submit(cpa_llm *llm, const cpa_llm_prompt *prompt, const cpa_llm_request_options *o,
                         cpa_llm_request **out, cpa_error *err) {
    cpa_llm_request *request = calloc(1, sizeof *request);
    if (!request) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a request");
    request->llm = llm;
    pthread_cond_init(&request->came, NULL);
    cpa_status status = fill(llm, prompt, o, request, err);
    if (status == CPA_OK) status = hand_over(llm, o, request, err);
    if (status == CPA_OK)
        *out = request;
    else
        cpa_request_free(request);
    return status;
}

cpa_status cpa_llm_submit(cpa_llm *llm, const cpa_llm_prompt *given, const cpa_llm_request_options *options,
                          cpa_llm_request **out, cpa_error *err) {
    const cpa_llm_request_options none = {.size = sizeof none};
    cpa_llm_request_options o;
    cpa_llm_prompt prompt;
    if (!llm || !out) return cpa_fail(err, CPA_INVALID, "cpa_llm_submit: llm and out, expected not to be NULL");
    if (llm->rank > 0) return cpa_fail(err, CPA_STOPPED, "rank %d takes no requests: rank 0 does", llm->rank);
    CPA_TRY(CPA_STRUCT_TAKE("prompt", given, cpa_llm_prompt, size, &prompt, err));
    CPA_TRY(CPA_STRUCT_TAKE("request options", options ? options : &none, cpa_llm_request_options, size, &o, err));
    CPA_TRY(cpa_request_table_check(&llm->requests, err));
    return submit(llm, &prompt, &o, out, err);
}

const uint32_t *cpa_llm_prompt_ids(const cpa_llm_request *request, int64_t *n) {
    *n = request->prompt.count;
    return request->prompt.ids;
}

/* ---- reading ---- */

/* Whether the token ends the answer, and is no part of its text. */
static int is_hidden(const cpa_llm_request *request, uint32_t id) {
    const cpa_sampling *s = &request->sampling;
    const cpa_model_config *config = &request->llm->setup.config;
    if (request->text.keeps_stop) return 0;
    return cpa_token_is_among(id, s->stop_ids, s->n_stop_ids) ||
           (!s->ignore_eos && cpa_token_is_among(id, config->end_ids, config->n_end_ids));
}

/* Takes the tokens that have come, up to a text that stops it. */
static cpa_status read_tokens(cpa_llm_request *request, int64_t *n, cpa_error *err) {
    const cpa_arrival *read = &request->read;
    if (!cpa_array_reserve(&request->ids, &request->ids_capacity, read->count, sizeof *request->ids) ||
        !cpa_array_reserve(&request->logprobs, &request->logprobs_capacity, read->count, sizeof *request->logprobs))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the tokens of an answer");
    for (*n = 0; *n < read->count && !request->text.stop; (*n)++) {
        const cpa_output_token token = read->tokens[*n];
        request->ids[*n] = token.id;
        request->logprobs[*n] = token.logprob;
        if (!request->text.stream) continue;
        if (is_hidden(request, token.id))
            CPA_TRY(cpa_ending_text_push_as(&request->text, "", 0, err));
        else
            CPA_TRY(cpa_ending_text_push(&request->text, token.id, err));
    }
    return CPA_OK;
}

/* The text that can be said, with a zero behind it. */
static cpa_status say_text(cpa_llm_request *request, cpa_error *err) {
    cpa_ending_text *text = &request->text;
    request->said.count = 0;
    if (!cpa_bytes_add(&request->said, text->text.data ? text->text.data : "", (size_t)text->ready) ||
        !cpa_bytes_add(&request->said, "", 1))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of an answer");
    cpa_ending_text_forget(text);
    return CPA_OK;
}

static cpa_status read_piece(cpa_llm_request *request, cpa_llm_piece *out, cpa_error *err) {
    const cpa_arrival *read = &request->read;
    const cpa_sampling *s = &request->sampling;
    CPA_TRY(read_tokens(request, &out->n_tokens, err));
    if (read->has_ended && request->text.stream) CPA_TRY(cpa_ending_text_finish(&request->text, err));
    CPA_TRY(say_text(request, err));
    out->tokens = request->ids;
    if (s->logprobs) out->logprobs = request->logprobs;
    if (s->top_logprobs > 0) out->ranks = read->ranks;
    request->is_over = read->has_ended || request->text.stop;
    request->reason = request->text.stop ? CPA_FINISH_STOP : read->reason;
    return CPA_OK;
}

cpa_status cpa_llm_next(cpa_llm_request *request, double timeout_s, cpa_llm_piece *out, size_t size, cpa_error *err) {
    cpa_llm_piece piece = {.text = "", .error = ""};
    if (!request || !out) return cpa_fail(err, CPA_INVALID, "cpa_llm_next: request and out, expected not to be NULL");
    if (!request->is_over) {
        CPA_TRY(cpa_request_table_collect(&request->llm->requests, request, timeout_s, err));
        const cpa_status status = read_piece(request, &piece, err);
        if (status != CPA_OK) {
            cpa_llm_cancel(request);
            return status;
        }
        piece.text = request->said.data;
        piece.text_bytes = request->said.count - 1;
        if (request->text.stop) { /* the engine may still be at it */
            cpa_request_table_silence(&request->llm->requests, request);
            cpa_llm_cancel(request);
        }
    }
    piece.has_ended = request->is_over;
    piece.reason = request->reason;
    if (request->text.stop) piece.stop = request->text.stop->text;
    if (request->is_over && request->reason == CPA_FINISH_FAILED) piece.error = request->read.error;
    return cpa_struct_give(&piece, sizeof piece, out, size);
}

cpa_status cpa_llm_wait(cpa_llm *llm, double timeout_s, cpa_llm_request **out, cpa_error *err) {
    if (!llm || !out) return cpa_fail(err, CPA_INVALID, "cpa_llm_wait: llm and out, expected not to be NULL");
    return cpa_request_table_wait(&llm->requests, timeout_s, out, err);
}

void cpa_llm_cancel(cpa_llm_request *request) {
    if (request) (void)cpa_engine_cancel(request->llm->engine, request->id); /* fails where it has ended already */
}

void cpa_llm_release(cpa_llm_request *request) {
    if (!request) return;
    cpa_engine *engine = request->llm->engine;
    const uint64_t id = request->id;
    if (cpa_request_table_release(&request->llm->requests, request)) (void)cpa_engine_cancel(engine, id);
}
