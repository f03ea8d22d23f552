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

/* The prompt as text, which the tokenizer of the folder makes ids of. */
static cpa_status read_text(const cpa_settings *settings, int64_t vocabulary, cpa_prompt_answer *generation,
                            cpa_error *err) {
    CPA_TRY(cpa_tokenizer_open(settings->model_dir, &generation->tokenizer, err));
    if (!generation->tokenizer)
        return cpa_fail(err, CPA_INVALID,
                        "--prompt: found neither tokenizer.json nor tokenizer.model in %s, expected one; --prompt-ids "
                        "takes ids",
                        settings->model_dir);
    CPA_TRY(cpa_answer_text_open(generation->tokenizer, settings->stop, &generation->answer, err));
    generation->answer.min_tokens = settings->min_tokens;
    return cpa_prompt_text_read(settings, generation->tokenizer, vocabulary, &generation->prompt, err);
}

static cpa_status read_ids(const cpa_settings *settings, int64_t vocabulary, cpa_prompt_answer *generation,
                           cpa_error *err) {
    if (cpa_settings_given(settings, "prompt")) {
        CPA_TRY(read_text(settings, vocabulary, generation, err));
    } else {
        CPA_TRY(cpa_ids_read("--prompt-ids", settings->prompt_ids ? settings->prompt_ids : "", vocabulary,
                             &generation->prompt, err));
        if (generation->prompt.count == 0)
            return cpa_fail(err, CPA_INVALID, "--prompt-ids: found no id, expected at least one");
    }
    CPA_TRY(cpa_ids_read("--stop-ids", settings->stop_ids, vocabulary, &generation->stop_ids, err));
    if (settings->logit_bias)
        CPA_TRY(cpa_biases_read("--logit-bias", settings->logit_bias, vocabulary, &generation->biases, err));
    if (!settings->given_ids) return CPA_OK;
    CPA_TRY(cpa_ids_read("--given-ids", settings->given_ids, vocabulary, &generation->given, err));
    if (generation->given.count == 0)
        return cpa_fail(err, CPA_INVALID, "--given-ids: found no id, expected at least one");
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
    cpa_prompt_answer generation = {.settings = settings};
    cpa_status status = read_ids(settings, vocabulary, &generation, err);
    generation.most = generation.given.count > 0 ? generation.given.count : settings->max_tokens;
    if (status == CPA_OK) status = allocate(&generation, err);
    if (status != CPA_OK) {
        cpa_prompt_answer_close(&generation);
        return status;
    }
    *out = generation;
    return CPA_OK;
}

void cpa_prompt_answer_close(cpa_prompt_answer *generation) {
    cpa_answer_text_close(&generation->answer);
    cpa_tokenizer_close(generation->tokenizer);
    cpa_ids_release(&generation->prompt);
    cpa_ids_release(&generation->stop_ids);
    cpa_ids_release(&generation->given);
    free(generation->ids);
    free(generation->logprobs);
    free(generation->token_s);
    free(generation->best_ids);
    free(generation->best_by);
    *generation = (cpa_prompt_answer){.count = 0};
}

cpa_sampling cpa_prompt_answer_sampling(const cpa_prompt_answer *generation) {
    const cpa_settings *settings = generation->settings;
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
        .ignore_eos = settings->ignore_eos || generation->given.count > 0,
        .stop_ids = generation->stop_ids.ids,
        .n_stop_ids = generation->stop_ids.count,
        .logit_biases = generation->biases.biases,
        .n_logit_biases = generation->biases.count,
        .min_tokens = settings->min_tokens,
    };
}

int cpa_prompt_answer_show(cpa_prompt_answer *generation, int64_t index, uint32_t id, float logprob, FILE *out) {
    if (generation->answer.has_stopped) return 0;
    cpa_answer_text_push(&generation->answer, id);
    if (generation->settings->json) return generation->answer.has_stopped;
    if (generation->answer.stream) {
        cpa_answer_text_print(&generation->answer, out);
    } else {
        fprintf(out, "%s%" PRIu32, index > 0 ? " " : "", id);
    }
    if (generation->settings->logprobs) fprintf(out, " (%.4f)", (double)logprob);
    fflush(out);
    return generation->answer.has_stopped;
}

void cpa_prompt_answer_take(cpa_prompt_answer *generation, const cpa_request_result *result) {
    generation->count = cpa_min64(result->output_tokens, generation->most);
    generation->has_ended = 1;
    generation->reason = result->reason;
    cpa_answer_text_finish(&generation->answer);
    if (generation->answer.has_stopped) { /* tokens behind that were under way */
        generation->count = cpa_min64(generation->count, generation->answer.tokens);
        generation->reason = CPA_FINISH_STOP;
    }
    for (int64_t i = 0; i < generation->count; i++) {
        generation->ids[i] = result->tokens[i];
        generation->logprobs[i] = result->logprobs[i];
        generation->token_s[i] = result->token_s[i] - result->arrival_s;
    }
}

void cpa_prompt_answer_take_logits(cpa_prompt_answer *generation, const cpa_logits_sample *sample) {
    for (int64_t i = 0; i < sample->count; i++) {
        const float *logits = sample->logits + i * sample->vocabulary;
        const int64_t index = sample->records[i].position + 1 - generation->prompt.count;
        int64_t best = 0;
        float next = -INFINITY;
        if (index < 0 || index >= generation->most) continue;
        for (int64_t id = 1; id < sample->vocabulary; id++) {
            next = fmaxf(next, fminf(logits[id], logits[best]));
            if (logits[id] > logits[best]) best = id;
        }
        generation->best_ids[index] = (uint32_t)best;
        generation->best_by[index] = logits[best] - next;
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
    if (g->answer.stream)
        json_object_set_new(object, "text",
                            json_stringn(g->answer.text.data ? g->answer.text.data : "", (size_t)g->answer.text.count));
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

void cpa_prompt_answer_print(cpa_prompt_answer *generation, FILE *out) {
    const double tokens_per_s = rate(generation);
    if (generation->settings->json) {
        print_json(generation, out);
        return;
    }
    cpa_answer_text_print(&generation->answer, out);
    fprintf(out, "\n%" PRId64 " tokens (%s) after %" PRId64 " of the prompt", generation->count,
            reason_name(generation), generation->prompt.count);
    if (generation->count > 0) fprintf(out, ", TTFT %.1f ms", 1e3 * generation->token_s[0]);
    if (!isnan(tokens_per_s)) fprintf(out, ", then %.1f tokens/s", tokens_per_s);
    fprintf(out, "\n");
}
