#include "server/generation_fields.h"

#include <float.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/min_max.h"
#include "server/bound_answers.h"
#include "server/draw_limits.h"

/* The engine copies stop ids and salts for each sample, and compares each token with all stop ids. */
enum { MOST_SAMPLES = 128, MOST_STOP_BYTES = 1024, MOST_STOP_IDS = 256, MOST_SALT_BYTES = 1024 };

int cpa_model_field(const cpa_server *server, const cpa_fields *fields) {
    const char *name = server->options.model_name;
    if (!cpa_field_text(fields, "model", &name)) return 0;
    if (strcmp(name, server->options.model_name) == 0) return 1;
    return cpa_refuse(fields->refusal, MHD_HTTP_NOT_FOUND, "model_not_found", "model",
                      "the model %.100s does not exist; there is %s", name, server->options.model_name);
}

/* Answers are text, which is what clients that name it want. */
static int check_modalities(const cpa_fields *fields) {
    const json_t *modalities = cpa_field(fields, "modalities");
    if (!modalities) return 1;
    if (json_array_size(modalities) == 1 && cpa_json_is_text(json_array_get(modalities, 0), "text")) return 1;
    return cpa_field_refuse(fields, "modalities", modalities, "[\"text\"]");
}

static int refuse_what_is_not_there(const cpa_fields *fields) {
    static const struct {
        const char *name, *reason;
    } absent[] = {
        {"allowed_token_ids", "any token may be drawn"},
        {"bad_words", "any token may be drawn"},
        {"logits_processors", "no code comes with a request"},
        {"use_beam_search", "tokens are drawn one by one"},
        {"return_tokens_as_token_ids", "there is return_token_ids"},
        {"truncate_prompt_tokens", "prompts are taken whole"},
        {"prompt_embeds", "prompts are text or token ids"},
        {"thinking_token_budget", "answers are bounded by max_tokens alone"},
        {"reasoning_effort", "models think as they were taught; there is chat_template_kwargs"},
        {"lora_name", "there is one model, as it was loaded"},
        {"dry_multiplier", "there is presence_penalty and repetition_penalty"},
        {"xtc_probability", "tokens are chosen by temperature, top_k, top_p and min_p"},
        {"mirostat_mode", "tokens are chosen by temperature, top_k, top_p and min_p"},
    };
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        if (!cpa_field_unasked(fields, absent[i].name, absent[i].reason)) return 0;
    }
    float typical_p = 1; /* which keeps every token, as 0 does not */
    return cpa_field_number(fields, "typical_p", 1, 1, &typical_p) && check_modalities(fields);
}

static int read_sampling(const cpa_fields *fields, cpa_generation *g) {
    static const struct {
        const char *name;
        size_t offset; /* offset of a float in cpa_sampling */
        double least, most;
    } numbers[] = {
        {"temperature", offsetof(cpa_sampling, temperature), 0, 100},
        {"top_p", offsetof(cpa_sampling, top_p), 0, 1},
        {"min_p", offsetof(cpa_sampling, min_p), 0, 1},
        {"repetition_penalty", offsetof(cpa_sampling, repetition_penalty), 0.001, 1000},
        {"presence_penalty", offsetof(cpa_sampling, presence_penalty), -2, 2},
        {"frequency_penalty", offsetof(cpa_sampling, frequency_penalty), -2, 2},
    };
    cpa_sampling *s = &g->sampling;
    *s = (cpa_sampling){.size = sizeof *s, .temperature = 1, .top_p = 1, .repetition_penalty = 1};
    int64_t top_k = 0, seed = 0, priority = 0;
    g->has_seed = cpa_field(fields, "seed") != NULL;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        float *out = (float *)(void *)((char *)s + numbers[i].offset);
        if (!cpa_field_number(fields, numbers[i].name, numbers[i].least, numbers[i].most, out)) return 0;
    }
    if (!cpa_field_int(fields, "top_k", -1, INT32_MAX, &top_k) ||
        !cpa_field_int(fields, "seed", INT64_MIN, INT64_MAX, &seed) ||
        !cpa_field_int(fields, "priority", INT32_MIN, INT32_MAX, &priority) ||
        !cpa_field_flag(fields, "ignore_eos", &s->ignore_eos)) {
        return 0;
    }
    if (s->top_p < FLT_MIN) s->top_p = FLT_MIN; /* 0 is the most probable token alone, not all of them */
    s->top_k = top_k > 0 ? (int32_t)top_k : 0;
    s->seed = (uint64_t)seed;
    g->priority = (int32_t)priority;
    return 1;
}

static int add_stop(const cpa_fields *fields, const json_t *value, cpa_generation *g) {
    const size_t bytes = json_string_length(value);
    if (!json_is_string(value) || bytes == 0 || bytes > MOST_STOP_BYTES || cpa_json_has_nul(value)) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "stop",
                          "stop: expected strings of 1 to %d bytes without the character U+0000", MOST_STOP_BYTES);
    }
    cpa_stop_text *stop = &g->stops[g->n_stops];
    stop->text = strdup(json_string_value(value));
    if (!stop->text) return cpa_refuse_memory(fields);
    stop->bytes = bytes;
    g->n_stops++;
    return 1;
}

static int read_stops(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    const json_t *stop = cpa_field(fields, "stop");
    if (stop && !json_is_array(stop) && !json_is_string(stop)) {
        return cpa_field_refuse(fields, "stop", stop, "a string or an array of strings");
    }
    if (json_array_size(stop) > CPA_MOST_STOPS) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "stop",
                          "stop: found %zu strings, expected at most %d", json_array_size(stop), CPA_MOST_STOPS);
    }
    if (json_is_string(stop) && !add_stop(fields, stop, g)) return 0;
    for (size_t i = 0; i < json_array_size(stop); i++) {
        if (!add_stop(fields, json_array_get(stop, i), g)) return 0;
    }
    if (g->n_stops > 0 && !server->options.tokenizer) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", "stop",
                          "stop needs text, and this model has no tokenizer; there is stop_token_ids");
    }
    return cpa_field_flag(fields, "include_stop_str_in_output", &g->keeps_stop);
}

static int read_stop_ids(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    cpa_token_list ids = {0};
    const json_t *array = cpa_field(fields, "stop_token_ids");
    if (json_array_size(array) > MOST_STOP_IDS) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "stop_token_ids",
                          "stop_token_ids: found %zu of them, expected at most %d", json_array_size(array),
                          MOST_STOP_IDS);
    }
    const int is_read = !array || cpa_ids_field(server, fields, "stop_token_ids", array, &ids);
    g->stop_ids = ids.ids;
    g->sampling.stop_ids = ids.ids;
    g->sampling.n_stop_ids = ids.count;
    return is_read;
}

static int read_stream(const cpa_fields *fields, cpa_generation *g) {
    cpa_field_names names = {.count = 0};
    cpa_fields options;
    if (!cpa_field_flag(fields, "stream", &g->stream) ||
        !cpa_field_object(fields, "stream_options", "stream_options.", &names, &options)) {
        return 0;
    }
    if (options.object && !g->stream) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "stream_options",
                          "stream_options: expected only where stream is true");
    }
    return cpa_field_flag(&options, "include_usage", &g->include_usage) &&
           cpa_field_flag(&options, "continuous_usage_stats", &g->usage_always) && cpa_fields_check_names(&options);
}

/* As vLLM has it: of whole answers alone. */
static int read_prompt_logprobs(const cpa_fields *fields, cpa_generation *g) {
    int64_t top = -1;
    if (!cpa_field_int(fields, "prompt_logprobs", 0, CPA_MOST_TOP_LOGPROBS, &top)) return 0;
    if (top < 0) return 1;
    if (g->stream) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "prompt_logprobs",
                          "prompt_logprobs: expected only where stream is false; there is echo with logprobs");
    }
    g->tells_prompt = 1;
    g->top_of_prompt = (int32_t)top;
    cpa_want_prompt_logprobs(g->top_of_prompt, g);
    return 1;
}

static int read_salt(const cpa_fields *fields, cpa_generation *g) {
    const char *salt = NULL;
    if (!cpa_field_text(fields, "cache_salt", &salt)) return 0;
    if (!salt) return 1;
    if (!*salt || strlen(salt) > MOST_SALT_BYTES) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "cache_salt",
                          "cache_salt: found %zu bytes, expected 1 to %d", strlen(salt), MOST_SALT_BYTES);
    }
    g->salt = strdup(salt);
    return g->salt ? 1 : cpa_refuse_memory(fields);
}

/* As vLLM has it: do_remote_decode of a server that computes prompts for others, do_remote_prefill of one that goes on
 * with them. Other fields tell vLLM's connectors where the other server is, which a store makes no matter. Who
 * runs the server says whether anything is put into the store, which only grows. */
static int read_transfer(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    cpa_fields params;
    int imports = 0, exports = 0;
    g->transfer = (uint32_t)server->options.transfer;
    if (!cpa_field_object(fields, "kv_transfer_params", "kv_transfer_params.", NULL, &params)) return 0;
    if (!params.object) return 1;
    if (!cpa_field_flag(&params, "do_remote_prefill", &imports) ||
        !cpa_field_flag(&params, "do_remote_decode", &exports))
        return 0;
    if ((imports || exports) && !server->options.has_block_store) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "kv_transfer_params",
                          "kv_transfer_params: the cache is this server's alone; there is --block-store");
    }
    if (exports && !(g->transfer & CPA_TRANSFER_EXPORT)) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "kv_transfer_params.do_remote_decode",
                          "kv_transfer_params.do_remote_decode: this server puts nothing into the store; there is "
                          "--block-transfer export");
    }
    if (imports) g->transfer |= CPA_TRANSFER_IMPORT;
    return 1;
}

int cpa_generation_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    int skips_special = 1;
    g->n = 1;
    if (!cpa_model_field(server, fields) || !refuse_what_is_not_there(fields) || !read_sampling(fields, g) ||
        !cpa_field_int(fields, "n", 1, MOST_SAMPLES, &g->n) || !read_stops(server, fields, g) ||
        !read_stop_ids(server, fields, g) || !read_stream(fields, g) || !read_salt(fields, g) ||
        !read_transfer(server, fields, g) || !read_prompt_logprobs(fields, g) ||
        !cpa_draw_limits_read(server, fields, g) || !cpa_field_flag(fields, "return_token_ids", &g->returns_ids) ||
        !cpa_field_flag(fields, "skip_special_tokens", &skips_special) || !cpa_bound_answers_read(server, fields, g)) {
        return 0;
    }
    g->keeps_special = !skips_special;
    return 1;
}

int cpa_encode_field(const cpa_server *server, const cpa_fields *fields, const char *name, const json_t *text,
                     int add_special, cpa_token_list *out) {
    cpa_error err;
    if (!server->options.tokenizer) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", name,
                          "%s: this model has no tokenizer, expected token ids", name);
    }
    if (cpa_tokenizer_encode(server->options.tokenizer, json_string_value(text), json_string_length(text), add_special,
                             out, &err) == CPA_OK) {
        return 1;
    }
    return cpa_refuse_failure(fields->refusal, name, &err);
}

int cpa_ids_field(const cpa_server *server, const cpa_fields *fields, const char *name, const json_t *array,
                  cpa_token_list *out) {
    if (!json_is_array(array)) return cpa_field_refuse(fields, name, array, "an array of token ids");
    const size_t n = json_array_size(array);
    const int64_t last = server->engine.vocabulary - 1;
    if (!cpa_array_reserve(&out->ids, &out->capacity, out->count + (int64_t)n, sizeof *out->ids)) {
        return cpa_refuse_memory(fields);
    }
    for (size_t i = 0; i < n; i++) {
        int64_t id;
        if (!cpa_json_is_int(json_array_get(array, i), 0, last, &id)) {
            return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, name,
                              "%s: element %zu is no token id, expected integers from 0 to %" PRId64, name, i, last);
        }
        out->ids[out->count++] = (uint32_t)id;
    }
    return 1;
}

int64_t cpa_answer_tokens(const cpa_server *server, const cpa_generation *g, const cpa_token_list *prompt) {
    const int64_t left = server->engine.max_model_len - prompt->count;
    return g->max_tokens > 0 ? cpa_min64(g->max_tokens, left) : left;
}

static int check_prompt(const cpa_server *server, const cpa_fields *fields, const char *name,
                        const cpa_token_list *prompt, int64_t asked) {
    const int64_t most = server->engine.max_model_len;
    if (prompt->count == 0) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, name, "%s: found no tokens, expected some",
                          name);
    }
    if (prompt->count > most - asked) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, "context_length_exceeded", name,
                          "%s: %" PRId64 " tokens and %" PRId64 " of the answer, expected at most %" PRId64
                          " together, the length of the model",
                          name, prompt->count, asked, most);
    }
    for (int64_t i = 0; i < prompt->count; i++) { /* a tokenizer may know more than its model */
        if (prompt->ids[i] < server->engine.vocabulary) continue;
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, name,
                          "%s: token %" PRIu32
                          ", which the tokenizer has and the model has not, expected ids below "
                          "%" PRId64,
                          name, prompt->ids[i], server->engine.vocabulary);
    }
    return 1;
}

/* Log-probabilities of prompts, which each sample has, take some 500 bytes each as JSON in memory. */
static int check_told(const cpa_fields *fields, const char *name, const cpa_generation *g) {
    enum { MOST_TOLD = 1 << 20 };
    const int64_t each = g->n * (1 + g->sampling.top_prompt_logprobs);
    int64_t told = 0;
    for (int64_t i = 0; g->sampling.prompt_logprobs && i < g->n_prompts; i++) told += each * g->prompts[i].count;
    if (told <= MOST_TOLD) return 1;
    return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, name,
                      "%s: found %" PRId64 " log-probabilities of prompts to tell, expected at most %d", name, told,
                      MOST_TOLD);
}

int cpa_check_prompts(const cpa_server *server, const cpa_fields *fields, const char *name, const cpa_generation *g) {
    for (int64_t i = 0; i < g->n_prompts; i++) {
        const cpa_token_list *prompt = &g->prompts[i];
        const int64_t tokens = g->is_prompt_alone ? 0 : cpa_answer_tokens(server, g, prompt);
        if (!check_prompt(server, fields, name, prompt, g->max_tokens_is_given ? g->max_tokens : 1)) return 0;
        if (!cpa_draw_limits_check(fields, g, tokens)) return 0;
    }
    return check_told(fields, name, g);
}

void cpa_want_prompt_logprobs(int32_t top, cpa_generation *g) {
    cpa_sampling *s = &g->sampling;
    s->prompt_logprobs = 1;
    if (s->top_prompt_logprobs < top) s->top_prompt_logprobs = top;
}

int cpa_want_logprobs(const cpa_fields *fields, const char *name, int64_t top, cpa_generation *g) {
    if (top > CPA_MOST_TOP_LOGPROBS) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, name,
                          "%s: found %" PRId64 ", expected at most %d", name, top, CPA_MOST_TOP_LOGPROBS);
    }
    g->sampling.logprobs = 1;
    g->sampling.top_logprobs = (int32_t)top;
    return 1;
}
