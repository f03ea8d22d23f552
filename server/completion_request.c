#include "server/completion_request.h"

#include <microhttpd.h>
#include <stdlib.h>

#include "base/min_max.h"
#include "server/generation_fields.h"
#include "server/prompt_text.h"

enum { DEFAULT_TOKENS = 16 }; /* of an answer, as OpenAI's */

/* A text, or an array of ids, as a prompt of its own. */
static int add_prompt(const cpa_server *server, const cpa_fields *fields, const json_t *value, int add_special,
                      cpa_generation *g) {
    cpa_token_list *prompt = &g->prompts[g->n_prompts++];
    const int is_read = json_is_string(value) ? cpa_encode_field(server, fields, "prompt", value, add_special, prompt)
                                              : cpa_ids_field(server, fields, "prompt", value, prompt);
    if (!is_read || !g->echoes) return is_read;
    cpa_error err;
    const cpa_status status = cpa_prompt_text_open(server, value, prompt, &g->prompt_texts[g->n_prompt_texts++], &err);
    return status == CPA_OK || cpa_refuse_failure(fields->refusal, "prompt", &err);
}

/* A text or ids, or an array of such. */
static int read_prompts(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    const json_t *prompt = cpa_field(fields, "prompt");
    if (!prompt) return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "prompt", "prompt: expected one");
    if (!json_is_string(prompt) && !json_is_array(prompt)) {
        return cpa_field_refuse(fields, "prompt", prompt, "a string, token ids, or an array of such");
    }
    const json_t *first = json_array_get(prompt, 0);
    const int is_many = json_is_string(first) || json_is_array(first);
    const int64_t n = is_many ? (int64_t)json_array_size(prompt) : 1;
    int add_special = 1;
    if (!cpa_field_flag(fields, "add_special_tokens", &add_special)) return 0;
    if (n * g->n > CPA_MOST_FLIGHTS) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "prompt",
                          "prompt: found %lld prompts of %lld samples, expected at most %d of these in all",
                          (long long)n, (long long)g->n, CPA_MOST_FLIGHTS);
    }
    g->prompts = calloc((size_t)n, sizeof *g->prompts);
    g->prompt_texts = calloc(g->echoes ? (size_t)n : 1, sizeof *g->prompt_texts);
    if (!g->prompts || !g->prompt_texts) return cpa_refuse_memory(fields);
    if (!is_many) return add_prompt(server, fields, prompt, add_special, g);
    for (int64_t i = 0; i < n; i++) {
        if (!add_prompt(server, fields, json_array_get(prompt, (size_t)i), add_special, g)) return 0;
    }
    return 1;
}

static int read_logprobs(const cpa_fields *fields, cpa_generation *g) {
    int64_t top = -1;
    if (!cpa_field_int(fields, "logprobs", 0, INT32_MAX, &top)) return 0;
    if (top < 0) return 1;
    if (g->echoes) cpa_want_prompt_logprobs((int32_t)cpa_min64(top, CPA_MOST_TOP_LOGPROBS), g);
    return cpa_want_logprobs(fields, "logprobs", top, g);
}

/* An answer without tokens is its prompt alone. */
static int read_max_tokens(const cpa_fields *fields, cpa_generation *g) {
    g->max_tokens = DEFAULT_TOKENS;
    g->max_tokens_is_given = cpa_field(fields, "max_tokens") != NULL;
    if (!cpa_field_int(fields, "max_tokens", g->echoes ? 0 : 1, INT32_MAX, &g->max_tokens)) return 0;
    g->is_prompt_alone = g->max_tokens == 0;
    if (g->is_prompt_alone) g->max_tokens = 1;
    return 1;
}

int cpa_completion_read(const cpa_server *server, const json_t *body, cpa_generation *g, cpa_refusal *refusal) {
    cpa_field_names names = {.count = 0};
    const cpa_fields fields = {.object = body, .prefix = "", .refusal = refusal, .looked_for = &names};
    if (!cpa_generation_read(server, &fields, g) ||
        !cpa_field_unasked(&fields, "suffix", "completions follow their prompts") ||
        !cpa_field_flag(&fields, "echo", &g->echoes) || !read_logprobs(&fields, g) || !read_max_tokens(&fields, g)) {
        return 0;
    }
    int64_t best_of = g->n;
    if (!cpa_field_int(&fields, "best_of", 0, INT32_MAX, &best_of)) return 0;
    if (best_of != g->n) {
        return cpa_refuse(refusal, MHD_HTTP_BAD_REQUEST, "unsupported_parameter", "best_of",
                          "best_of is not supported: all n samples are returned");
    }
    return read_prompts(server, &fields, g) && cpa_check_prompts(server, &fields, "prompt", g) &&
           cpa_fields_check_names(&fields);
}
