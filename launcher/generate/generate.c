#include "launcher/generate/generate.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "launcher/generate/prompt_text.h"
#include "launcher/settings/settings_table.h"

static cpa_status open_text(const cpa_settings *settings, cpa_prompt_answer *answer, cpa_error *err) {
    answer->stop = (cpa_stop_text){strdup(settings->stop), strlen(settings->stop)};
    if (!answer->stop.text) return cpa_fail(err, CPA_NO_MEMORY, "--stop: no memory for it");
    return cpa_ending_text_open(answer->tokenizer, 0, &answer->text, err);
}

/* The prompt as text, which the tokenizer of the folder makes ids of. */
static cpa_status read_text(const cpa_settings *settings, int64_t vocabulary, cpa_prompt_answer *answer,
                            cpa_error *err) {
    CPA_TRY(cpa_tokenizer_open(settings->model_dir, &answer->tokenizer, err));
    if (!answer->tokenizer)
        return cpa_fail(err, CPA_INVALID,
                        "--prompt: found neither tokenizer.json nor tokenizer.model in %s, expected one; --prompt-ids "
                        "takes ids",
                        settings->model_dir);
    CPA_TRY(open_text(settings, answer, err));
    return cpa_prompt_text_read(settings, answer->tokenizer, vocabulary, &answer->prompt, err);
}

static cpa_status read_ids(const cpa_settings *settings, int64_t vocabulary, cpa_prompt_answer *answer,
                           cpa_error *err) {
    if (cpa_settings_given(settings, "prompt")) {
        CPA_TRY(read_text(settings, vocabulary, answer, err));
    } else {
        CPA_TRY(cpa_ids_read("--prompt-ids", settings->prompt_ids ? settings->prompt_ids : "", vocabulary,
                             &answer->prompt, err));
        if (answer->prompt.count == 0)
            return cpa_fail(err, CPA_INVALID, "--prompt-ids: found no id, expected at least one");
    }
    CPA_TRY(cpa_ids_read("--stop-ids", settings->stop_ids, vocabulary, &answer->stop_ids, err));
    if (settings->logit_bias)
        CPA_TRY(cpa_biases_read("--logit-bias", settings->logit_bias, vocabulary, &answer->biases, err));
    if (!settings->given_ids) return CPA_OK;
    CPA_TRY(cpa_ids_read("--given-ids", settings->given_ids, vocabulary, &answer->given, err));
    if (answer->given.count == 0) return cpa_fail(err, CPA_INVALID, "--given-ids: found no id, expected at least one");
    return CPA_OK;
}

static cpa_status allocate(cpa_prompt_answer *g, cpa_error *err) {
    const size_t most = (size_t)g->most;
    g->ids = calloc(most, sizeof *g->ids);
    g->logprobs = calloc(most, sizeof *g->logprobs);
    g->token_s = calloc(most, sizeof *g->token_s);
    g->best_ids = calloc(most, sizeof *g->best_ids);
    g->best_by = calloc(most, sizeof *g->best_by);
    if (g->ids && g->logprobs && g->token_s && g->best_ids && g->best_by) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "--max-tokens: no memory for %zu tokens", most);
}

cpa_status cpa_prompt_answer_open(const cpa_settings *settings, int64_t vocabulary, cpa_prompt_answer *out,
                                  cpa_error *err) {
    cpa_prompt_answer answer = {.settings = settings};
    cpa_status status = read_ids(settings, vocabulary, &answer, err);
    answer.most = answer.given.count > 0 ? answer.given.count : settings->max_tokens;
    if (status == CPA_OK) status = allocate(&answer, err);
    if (status != CPA_OK) {
        cpa_prompt_answer_close(&answer);
        return status;
    }
    *out = answer;
    out->text.stops = &out->stop;
    out->text.n_stops = out->stop.bytes > 0;
    out->text.min_tokens = settings->min_tokens;
    return CPA_OK;
}

void cpa_prompt_answer_close(cpa_prompt_answer *answer) {
    cpa_ending_text_close(&answer->text);
    free(answer->stop.text);
    cpa_tokenizer_close(answer->tokenizer);
    cpa_ids_release(&answer->prompt);
    cpa_ids_release(&answer->stop_ids);
    cpa_ids_release(&answer->given);
    free(answer->ids);
    free(answer->logprobs);
    free(answer->token_s);
    free(answer->best_ids);
    free(answer->best_by);
    *answer = (cpa_prompt_answer){.count = 0};
}

cpa_sampling cpa_prompt_answer_sampling(const cpa_prompt_answer *answer) {
    const cpa_settings *settings = answer->settings;
    return (cpa_sampling){
        .size = sizeof(cpa_sampling),
        .temperature = (float)settings->temperature,
        .top_p = (float)settings->top_p,
        .min_p = (float)settings->min_p,
        .top_k = (int32_t)settings->top_k,
        .repetition_penalty = (float)settings->repetition_penalty,
        .presence_penalty = (float)settings->presence_penalty,
        .frequency_penalty = (float)settings->frequency_penalty,
        .seed = (uint64_t)settings->seed,
        .logprobs = settings->logprobs || settings->json,
        .ignore_eos = settings->ignore_eos || answer->given.count > 0,
        .stop_ids = answer->stop_ids.ids,
        .n_stop_ids = answer->stop_ids.count,
        .logit_biases = answer->biases.biases,
        .n_logit_biases = answer->biases.count,
        .min_tokens = settings->min_tokens,
    };
}

/* Prints what is there and cannot be the beginning of the stop. */
static void print_text(cpa_prompt_answer *answer, FILE *out) {
    cpa_ending_text *text = &answer->text;
    if (text->ready == 0) return;
    fwrite(text->text.data, 1, (size_t)text->ready, out);
    cpa_ending_text_forget(text);
}

int cpa_prompt_answer_show(cpa_prompt_answer *answer, int64_t index, uint32_t id, float logprob, FILE *out) {
    if (answer->text.stop) return 0;
    if (answer->text.stream) (void)cpa_ending_text_push(&answer->text, id, NULL); /* without memory: less is shown */
    if (answer->settings->json) return answer->text.stop != NULL;
    if (answer->text.stream) {
        print_text(answer, out);
    } else {
        fprintf(out, "%s%" PRIu32, index > 0 ? " " : "", id);
    }
    if (answer->settings->logprobs) fprintf(out, " (%.4f)", (double)logprob);
    fflush(out);
    return answer->text.stop != NULL;
}

void cpa_prompt_answer_take(cpa_prompt_answer *answer, const cpa_request_result *result) {
    answer->count = cpa_min64(result->output_tokens, answer->most);
    answer->has_ended = 1;
    answer->reason = result->reason;
    if (answer->text.stream) (void)cpa_ending_text_finish(&answer->text, NULL);
    if (answer->text.stop) { /* tokens behind that were under way */
        answer->count = cpa_min64(answer->count, answer->text.tokens);
        answer->reason = CPA_FINISH_STOP;
    }
    for (int64_t i = 0; i < answer->count; i++) {
        answer->ids[i] = result->tokens[i];
        answer->logprobs[i] = result->logprobs[i];
        answer->token_s[i] = result->token_s[i] - result->arrival_s;
    }
}

void cpa_prompt_answer_take_logits(cpa_prompt_answer *answer, const cpa_logits_sample *sample) {
    for (int64_t i = 0; i < sample->count; i++) {
        const float *logits = sample->logits + i * sample->vocabulary;
        const int64_t index = sample->records[i].position + 1 - answer->prompt.count;
        int64_t best = 0;
        float next = -INFINITY;
        if (index < 0 || index >= answer->most) continue;
        for (int64_t id = 1; id < sample->vocabulary; id++) {
            next = fmaxf(next, fminf(logits[id], logits[best]));
            if (logits[id] > logits[best]) best = id;
        }
        answer->best_ids[index] = (uint32_t)best;
        answer->best_by[index] = logits[best] - next;
    }
}

/* Tokens a second of those behind the first; NaN where there are none. */
static double rate(const cpa_prompt_answer *g) {
    const double seconds = g->count > 1 ? g->token_s[g->count - 1] - g->token_s[0] : 0;
    return seconds > 0 ? (double)(g->count - 1) / seconds : NAN;
}

static const char *reason_name(const cpa_prompt_answer *g) {
    if (!g->has_ended) return "unfinished";
    switch (g->reason) {
        case CPA_FINISH_LENGTH: return "length";
        case CPA_FINISH_CANCELLED: return "cancelled";
        case CPA_FINISH_EXPIRED: return "expired";
        case CPA_FINISH_FAILED: return "failed";
        case CPA_FINISH_STOP: return "stop";
    }
    return "unknown";
}

static json_t *json_ids(const uint32_t *ids, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

/* JSON has no infinity and no NaN. */
static json_t *json_number_or_null(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *json_floats(const float *values, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_number_or_null(values[i]));
    return list;
}

static void print_json(const cpa_prompt_answer *g, FILE *out) {
    json_t *object = json_object(), *times = json_array();
    for (int64_t i = 0; i < g->count; i++) json_array_append_new(times, json_real(g->token_s[i]));
    json_object_set_new(object, "prompt_ids", json_ids(g->prompt.ids, g->prompt.count));
    json_object_set_new(object, "ids", json_ids(g->ids, g->count));
    if (g->text.stream)
        json_object_set_new(object, "text",
                            json_stringn(g->text.text.data ? g->text.text.data : "", (size_t)g->text.text.count));
    json_object_set_new(object, "logprobs", json_floats(g->logprobs, g->count));
    if (g->given.count > 0) {
        json_object_set_new(object, "best_ids", json_ids(g->best_ids, g->count));
        json_object_set_new(object, "best_by", json_floats(g->best_by, g->count));
    }
    json_object_set_new(object, "token_s", times);
    json_object_set_new(object, "reason", json_string(reason_name(g)));
    json_object_set_new(object, "ttft_s", json_number_or_null(g->count > 0 ? g->token_s[0] : NAN));
    json_object_set_new(object, "tokens_per_s", json_number_or_null(rate(g)));
    char *text = json_dumps(object, JSON_REAL_PRECISION(9));
    fprintf(out, "%s\n", text ? text : "{}");
    free(text);
    json_decref(object);
}

void cpa_prompt_answer_print(cpa_prompt_answer *answer, FILE *out) {
    const double tokens_per_s = rate(answer);
    if (answer->settings->json) {
        print_json(answer, out);
        return;
    }
    print_text(answer, out);
    fprintf(out, "\n%" PRId64 " tokens (%s) after %" PRId64 " of the prompt", answer->count, reason_name(answer),
            answer->prompt.count);
    if (answer->count > 0) fprintf(out, ", TTFT %.1f ms", 1e3 * answer->token_s[0]);
    if (!isnan(tokens_per_s)) fprintf(out, ", then %.1f tokens/s", tokens_per_s);
    fprintf(out, "\n");
}
