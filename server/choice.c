#include "server/choice.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "server/token_name.h"

cpa_status cpa_choice_open(cpa_choice *choice, const cpa_server *server, const cpa_generation *g, cpa_error *err) {
    *choice = (cpa_choice){.server = server, .generation = g, .stop_id = -1};
    if (!server->options.tokenizer) return CPA_OK;
    if (g->has_parts) CPA_TRY(cpa_reply_open(&g->reply, &choice->reply, err));
    CPA_TRY(cpa_ending_text_open(server->options.tokenizer, g->keeps_special, &choice->text, err));
    choice->text.stops = g->stops;
    choice->text.n_stops = g->n_stops;
    choice->text.keeps_stop = g->keeps_stop;
    choice->text.min_tokens = g->sampling.min_tokens;
    return CPA_OK;
}

void cpa_choice_close(cpa_choice *choice) {
    cpa_ending_text_close(&choice->text);
    cpa_reply_close(choice->reply);
    free(choice->tokens);
    free(choice->ranks);
}

/* Appends a token, and what the logits say of it, where that is asked for. */
static cpa_status keep_token(cpa_choice *choice, cpa_output_token token, const cpa_token_ranks *ranks, cpa_error *err) {
    const int64_t n = choice->n_tokens;
    if (!cpa_array_reserve(&choice->tokens, &choice->capacity, n + 1, sizeof token) ||
        (ranks && !cpa_array_reserve(&choice->ranks, &choice->ranks_capacity, n + 1, sizeof *ranks))) {
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the tokens of an answer");
    }
    if (ranks) choice->ranks[n] = *ranks;
    choice->tokens[choice->n_tokens++] = token;
    return CPA_OK;
}

/* The text of a special token that the reply is read by, though others are left out. */
static const char *find_mark(const cpa_choice *choice, uint32_t id, size_t *bytes) {
    const cpa_generation *g = choice->generation;
    const cpa_tokenizer *tokenizer = choice->server->options.tokenizer;
    if (!choice->reply || g->keeps_special || !cpa_tokenizer_is_special(tokenizer, id)) return NULL;
    const char *text = cpa_tokenizer_token(tokenizer, id, bytes);
    return text && cpa_forms_have_mark(g->reply.tools, g->reply.thoughts, text, *bytes) ? text : NULL;
}

static cpa_status add_token(cpa_choice *choice, const cpa_arrival *arrival, int64_t i, cpa_error *err) {
    const cpa_sampling *s = &choice->generation->sampling;
    const cpa_server_engine *engine = &choice->server->engine;
    const cpa_output_token token = arrival->tokens[i];
    CPA_TRY(keep_token(choice, token, s->top_logprobs > 0 ? &arrival->ranks[i] : NULL, err));
    choice->total_tokens++;
    const int is_stop = cpa_token_is_among(token.id, s->stop_ids, s->n_stop_ids);
    const int is_end = is_stop || (!s->ignore_eos && cpa_token_is_among(token.id, engine->end_ids, engine->n_end_ids));
    if (is_stop) choice->stop_id = token.id;
    if (!choice->text.stream) return CPA_OK;
    size_t bytes = 0;
    const char *mark = find_mark(choice, token.id, &bytes);
    if (is_end && !choice->generation->keeps_stop) {
        CPA_TRY(cpa_ending_text_push_as(&choice->text, "", 0, err));
    } else if (mark) {
        CPA_TRY(cpa_ending_text_push_as(&choice->text, mark, bytes, err));
    } else {
        CPA_TRY(cpa_ending_text_push(&choice->text, token.id, err));
    }
    if (choice->text.stop) choice->end = CPA_CHOICE_STOP;
    return CPA_OK;
}

/* The engine has ended it: nothing is held back any more. */
static cpa_status finish(cpa_choice *choice, const cpa_arrival *arrival, cpa_error *err) {
    if (choice->text.stream) {
        CPA_TRY(cpa_ending_text_finish(&choice->text, err));
        if (choice->text.stop) choice->end = CPA_CHOICE_STOP;
    }
    if (choice->end != CPA_CHOICE_GOES_ON) return CPA_OK;
    switch (arrival->reason) {
        case CPA_FINISH_LENGTH: choice->end = CPA_CHOICE_LENGTH; break;
        case CPA_FINISH_STOP:
            choice->end = choice->generation->is_prompt_alone ? CPA_CHOICE_LENGTH : CPA_CHOICE_STOP;
            break;
        case CPA_FINISH_FAILED: choice->end = CPA_CHOICE_ERROR; break;
        default: choice->end = CPA_CHOICE_ABORT;
    }
    if (choice->end == CPA_CHOICE_ERROR) choice->error = arrival->error;
    if (choice->end != CPA_CHOICE_STOP) choice->stop_id = -1;
    return CPA_OK;
}

/* Reads what can be said. Enough calls end it, as a text does that stops it. */
static cpa_status read_reply(cpa_choice *choice, cpa_error *err) {
    CPA_TRY(cpa_reply_push(choice->reply, choice->text.text.data, (size_t)choice->text.ready, err));
    cpa_ending_text_forget(&choice->text);
    if (choice->end == CPA_CHOICE_GOES_ON && cpa_reply_is_over(choice->reply)) choice->end = CPA_CHOICE_STOP;
    return choice->end == CPA_CHOICE_GOES_ON ? CPA_OK : cpa_reply_finish(choice->reply, err);
}

cpa_status cpa_choice_add(cpa_choice *choice, const cpa_arrival *arrival, cpa_error *err) {
    const int64_t count = choice->generation->is_prompt_alone ? 0 : arrival->count;
    for (int64_t i = 0; i < count && choice->end == CPA_CHOICE_GOES_ON; i++) {
        CPA_TRY(add_token(choice, arrival, i, err));
    }
    if (arrival->has_ended && choice->end == CPA_CHOICE_GOES_ON) CPA_TRY(finish(choice, arrival, err));
    return choice->reply ? read_reply(choice, err) : CPA_OK;
}

int cpa_choice_has_text(const cpa_choice *choice) {
    if (!choice->reply) return choice->text.ready > 0;
    int64_t n;
    const cpa_reply_call *calls = cpa_reply_calls(choice->reply, &n);
    int has_text = n > choice->told_calls || cpa_reply_content(choice->reply)->count > 0 ||
                   cpa_reply_thoughts(choice->reply)->count > 0;
    for (int64_t i = 0; i < n; i++) has_text |= calls[i].arguments.count > 0;
    return has_text;
}

void cpa_choice_forget(cpa_choice *choice) {
    for (int64_t i = 0; choice->generation->sampling.logprobs && i < choice->n_tokens; i++) {
        choice->forgotten_characters += cpa_token_name_characters(choice->server, choice->tokens[i].id);
    }
    choice->n_tokens = 0;
    cpa_ending_text_forget(&choice->text);
    if (!choice->reply) return;
    cpa_reply_calls(choice->reply, &choice->told_calls);
    cpa_reply_forget(choice->reply);
}

static int has_calls(const cpa_choice *choice) {
    int64_t n = 0;
    if (choice->reply) cpa_reply_calls(choice->reply, &n);
    return n > 0;
}

const char *cpa_choice_reason(const cpa_choice *choice) {
    switch (choice->end) {
        case CPA_CHOICE_LENGTH: return "length";
        case CPA_CHOICE_STOP: return has_calls(choice) ? "tool_calls" : "stop";
        case CPA_CHOICE_ABORT: return "abort";
        default: return NULL;
    }
}
