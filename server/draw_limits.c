#include "server/draw_limits.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const double MOST_BIAS = 100; /* as OpenAI has it, and as much below 0 */

/* An id as it is written in decimal, without signs or zeros in front, so that no two names are one token. */
static int read_id(const char *name, int64_t vocabulary, uint32_t *out) {
    int64_t id = 0;
    const size_t digits = strspn(name, "0123456789");
    if (digits == 0 || digits > 10 || name[digits] || (name[0] == '0' && digits > 1)) return 0;
    for (size_t i = 0; i < digits; i++) id = 10 * id + (name[i] - '0');
    *out = (uint32_t)id;
    return id < vocabulary;
}

/* {"ID": BIAS, ...} */
static int read_biases(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    cpa_fields biases;
    const char *name;
    json_t *value;
    if (!cpa_field_object(fields, "logit_bias", "logit_bias.", NULL, &biases)) return 0;
    const size_t n = json_object_size(biases.object);
    if (n == 0) return 1;
    if (n > CPA_MOST_LOGIT_BIASES) {
        return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "logit_bias",
                          "logit_bias: found %zu tokens, expected at most %d", n, CPA_MOST_LOGIT_BIASES);
    }
    g->logit_biases = calloc(n, sizeof *g->logit_biases);
    if (!g->logit_biases) return cpa_refuse_memory(fields);
    g->sampling.logit_biases = g->logit_biases;
    json_object_foreach((json_t *)(uintptr_t)biases.object, name, value) {
        cpa_logit_bias *bias = &g->logit_biases[g->sampling.n_logit_biases++];
        if (!read_id(name, server->engine.vocabulary, &bias->token)) {
            return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "logit_bias",
                              "logit_bias: found a name that is no token id, expected integers from 0 to %" PRId64,
                              server->engine.vocabulary - 1);
        }
        const double number = json_number_value(value);
        if (!json_is_number(value) || number < -MOST_BIAS || number > MOST_BIAS) {
            return cpa_field_refuse(fields, "logit_bias", value, "a number from -100 to 100 for each token");
        }
        bias->bias = (float)number;
    }
    return 1;
}

int cpa_draw_limits_read(const cpa_server *server, const cpa_fields *fields, cpa_generation *g) {
    return read_biases(server, fields, g) && cpa_field_int(fields, "min_tokens", 0, INT32_MAX, &g->sampling.min_tokens);
}

int cpa_draw_limits_check(const cpa_fields *fields, const cpa_generation *g, int64_t tokens) {
    if (g->sampling.min_tokens <= tokens) return 1;
    return cpa_refuse(fields->refusal, MHD_HTTP_BAD_REQUEST, NULL, "min_tokens",
                      "min_tokens: found %" PRId64 ", expected at most %" PRId64 ", the tokens of an answer",
                      g->sampling.min_tokens, tokens);
}
