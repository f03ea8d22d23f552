/* Requests of an llm as their owners read them. */
#include <cpattn/llm.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/struct_size.h"
#include "src/llm/llm_internal.h"

const uint32_t *cpa_llm_prompt_ids(const cpa_llm_request *request, int64_t *n) {
    *n = request->prompt.count;
    return request->prompt.ids;
}

cpa_status cpa_llm_prompt_ranks(const cpa_llm_request *request, int64_t first, int64_t count, cpa_token_ranks *out,
                                cpa_error *err) {
    if (!request || !out)
        return cpa_fail(err, CPA_INVALID, "cpa_llm_prompt_ranks: request and out, expected not to be NULL");
    const int64_t tokens = request->prompt.count;
    if (!request->sampling.prompt_logprobs)
        return cpa_fail(err, CPA_UNSUPPORTED, "prompt_logprobs: not asked for by the sampling of this request");
    if (first < 1 || count < 0 || count > tokens - first)
        return cpa_fail(err, CPA_INVALID,
                        "prompt_logprobs: found %" PRId64 " tokens from %" PRId64
                        " on, expected those from 1 to %" PRId64,
                        count, first, tokens - 1);
    for (int64_t i = 0; i < count; i++) {
        if (!cpa_prompt_ranks_at(&request->prompt_ranks, request->read.prompt_ranked, first + i, &out[i]))
            return cpa_fail(err, CPA_BUSY, "prompt_logprobs: nothing has come of token %" PRId64 " yet", first + i);
    }
    return CPA_OK;
}

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
