#include "server/choice.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "server/token_name.h"

cpa_status cpa_choice_open(cpa_choice *choice, const cpa_server *server, const cpa_generation *g, cpa_error *err) {
    *choice = (cpa_choice){.server = server, .generation = g, .stop_id = -1};
    if (!server->options.tokenizer) return CPA_OK;
    if (g->has_parts) CPA_TRY(cpa_reply_open(&g->reply, &choice->reply, err));
    const int flags = CPA_TEXT_CONTINUES | (g->keeps_special ? 0 : CPA_TEXT_SKIP_SPECIAL);
    return cpa_text_stream_open(server->options.tokenizer, flags, &choice->stream, err);
}

void cpa_choice_close(cpa_choice *choice) {
    cpa_text_stream_close(choice->stream);
    cpa_reply_close(choice->reply);
    free(choice->tokens);
    free(choice->ranks);
    free(choice->text);
}

static cpa_status add_text(cpa_choice *choice, const char *text, size_t bytes, cpa_error *err) {
    if (bytes == 0) return CPA_OK;
    if (!cpa_array_reserve(&choice->text, &choice->text_capacity, choice->bytes + (int64_t)bytes, 1)) {
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of an answer");
    }
    memcpy(choice->text + choice->bytes, text, bytes);
    choice->bytes += (int64_t)bytes;
    const cpa_generation *g = choice->generation;
    if (choice->total_tokens <= g->sampling.min_tokens) { /* no text that begins here stops it */
        choice->ready = choice->bytes;
        return CPA_OK;
    }
    int which = 0;
    const int64_t at = cpa_stop_text_find(g->stops, g->n_stops, choice->text, choice->bytes, choice->ready, &which);
    if (at >= 0) {
        choice->end = CPA_CHOICE_STOP;
        choice->stop_text = g->stops[which].text;
        choice->bytes = at + (g->keeps_stop ? (int64_t)g->stops[which].bytes : 0);
        choice->ready = choice->bytes;
    } else {
        choice->ready = choice->bytes - cpa_stop_text_begun(g->stops, g->n_stops, choice->text + choice->ready,
                                                            choice->bytes - choice->ready);
    }
    return CPA_OK;
}

static int is_among(uint32_t id, const uint32_t *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] == id) return 1;
    }
    return 0;
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
    const int is_stop = is_among(token.id, s->stop_ids, s->n_stop_ids);
    const int is_end = is_stop || (!s->ignore_eos && is_among(token.id, engine->end_ids, engine->n_end_ids));
    if (is_stop) choice->stop_id = token.id;
    if (!choice->stream || (is_end && !choice->generation->keeps_stop)) return CPA_OK;
    const char *text;
    size_t bytes;
    const char *mark = find_mark(choice, token.id, &bytes);
    if (mark) return add_text(choice, mark, bytes, err);
    CPA_TRY(cpa_text_stream_push(choice->stream, token.id, &text, &bytes, err));
    return add_text(choice, text, bytes, err);
}

/* The engine has ended it: nothing is held back any more. */
static cpa_status finish(cpa_choice *choice, const cpa_arrival *arrival, cpa_error *err) {
    if (choice->stream) {
        const char *text;
        size_t bytes;
        CPA_TRY(cpa_text_stream_finish(choice->stream, &text, &bytes, err));
        CPA_TRY(add_text(choice, text, bytes, err));
        choice->ready = choice->bytes;
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

static void drop_ready(cpa_choice *choice) {
    if (choice->ready > 0) memmove(choice->text, choice->text + choice->ready, (size_t)(choice->bytes - choice->ready));
    choice->bytes -= choice->ready;
    choice->ready = 0;
}

/* Reads what can be said. Enough calls end it, as a text does that stops it. */
static cpa_status read_reply(cpa_choice *choice, cpa_error *err) {
    CPA_TRY(cpa_reply_push(choice->reply, choice->text, (size_t)choice->ready, err));
    drop_ready(choice);
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
    if (!choice->reply) return choice->ready > 0;
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
    drop_ready(choice);
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
