#include "bench/serve/options.h"

#include <ctype.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <curl/curl.h>
#include <jansson.h>

#include "base/check.h"
#include "program/trace.h"

#define TOKENS_MAX 0x1p40
#define SEED_MAX 0x1p62

const char *const cpa_serve_endpoints[] = {"/v1/completions", "/v1/chat/completions", NULL};
static const char *const prompts[] = {"auto", "ids", "text", NULL};

#define TEXT(member) CPA_FIELD_TEXT, offsetof(cpa_serve_options, member), ""
#define FLAG(member, initial) CPA_FIELD_FLAG, offsetof(cpa_serve_options, member), initial
#define INT(member, initial, min, max) CPA_FIELD_INT, offsetof(cpa_serve_options, member), initial, min, max
#define REAL(member, initial, min, max) CPA_FIELD_REAL, offsetof(cpa_serve_options, member), initial, min, max
#define CHOICE(member, initial, choices) CPA_FIELD_CHOICE, offsetof(cpa_serve_options, member), initial, 0, 0, choices

static const cpa_field table[] = {
    {NULL, "url", "URL", TEXT(url), .help = "the server, such as http://localhost:8000"},
    {NULL, "endpoint", NULL, CHOICE(endpoint, "/v1/completions", cpa_serve_endpoints), .help = "what is asked"},
    {NULL, "model", "NAME", TEXT(model), .help = "without it, the first of the server's /v1/models"},
    {NULL, "api-key", "KEY", TEXT(api_key), .secret = 1,
     .help = "sent as bearer token; without it, what the environment has as OPENAI_API_KEY"},
    {NULL, "trace", "FILE", TEXT(trace), .help = "requests to send, Mooncake format: one JSON object a line"},
    {NULL, "requests", "N", INT(requests, "all", 1, CPA_TRACE_MAX_REQUESTS), .word = "all",
     .help = "only the first N of the trace; without a trace, how many (all: 16)"},
    {NULL, "length-scale", "S", REAL(length_scale, "1", 1e-9, 1e6), .help = "multiplies the lengths of the trace"},
    {NULL, "time-scale", "S", REAL(time_scale, "off", 0, 1e6), .word = "off",
     .help = "requests are sent at the times of the trace, multiplied by S"},
    {NULL, "request-rate", "R", REAL(request_rate, "inf", 1e-6, INFINITY),
     .help = "requests are sent at random, R a second (Poisson); inf: all at once"},
    {NULL, "max-concurrency", "N", INT(max_concurrency, "none", 1, 1 << 16), .word = "none",
     .help = "most requests at once; others wait until one has ended"},
    {NULL, "input-len", "N", INT(input_len, "1024", 1, TOKENS_MAX), .help = "prompt tokens, without a trace"},
    {NULL, "output-len", "N", INT(output_len, "128", 1, TOKENS_MAX), .help = "output tokens, without a trace"},
    {NULL, "seed", "N", INT(seed, "0", 0, SEED_MAX), .help = "of prompts and times"},
    {NULL, "prompts", NULL, CHOICE(prompts, "auto", prompts),
     .help = "token ids, or text of a word for each; auto: ids for completions, text for chat"},
    {NULL, "vocabulary", "N", INT(vocabulary, "auto", 1, 0x1p31), .word = "auto",
     .help = "ids are below N; auto: the vocab_size in the server's /v1/models, else 1000"},
    {NULL, "ignore-eos", NULL, FLAG(ignore_eos, "true"),
     .help = "an answer is as long as it was asked to be; --no-ignore-eos for servers that do not know it"},
    {NULL, "temperature", "T", REAL(temperature, "0", 0, 1e6), .help = "of every request"},
    {NULL, "extra-body", "JSON", TEXT(extra_body),
     .help = "an object, whose members are put into every request; not prompt, messages, stream or n"},
    {NULL, "timeout", "S", REAL(timeout_s, "21600", 1e-3, 1e6), .help = "most seconds of a request"},
    {NULL, "ready-timeout", "S", REAL(ready_timeout_s, "600", 0, 1e6),
     .help = "most seconds until the server's /health is 200; 0: it is not asked"},
    {NULL, "percentiles", "LIST", CPA_FIELD_TEXT, offsetof(cpa_serve_options, percentiles), "99",
     .help = "of the latencies, such as 50,90,99"},
    {NULL, "goodput", "LIST", TEXT(goodput),
     .help = "most milliseconds of TTFT, TPOT, E2EL of a good request, such as 'ttft:200 tpot:50'"},
    {NULL, "result-json", "FILE", TEXT(result_json),
     .help = "write the results there as vLLM's benchmark does; an older file becomes FILE.old"},
    {NULL, "help", NULL, FLAG(help, "false"), .help = "print this text and stop"},
};
enum { N_FIELDS = sizeof table / sizeof table[0] };

const cpa_field *cpa_serve_options_table(int *n_fields) {
    *n_fields = N_FIELDS;
    return table;
}

void cpa_serve_options_print_help(void) {
    printf(
        "usage: cp_attn bench serve --url URL [options]\n"
        "Sends requests to a server that speaks OpenAI's interface, this one or another, and measures its answers.\n");
    for (int f = 0; f < N_FIELDS; f++)
        cpa_field_print_help(&table[f], table[f].type != CPA_FIELD_FLAG || table[f].initial[0] == 't', stdout);
    printf(
        "exit codes: 0 every request completed, 1 one failed, 2 bad usage, 3 no server or a fault, 130 or 143 "
        "stopped\n");
}

/* ---- the command line ---- */

static bool is_given(const bool *given, const char *name) {
    return given[cpa_field_find(table, N_FIELDS, name, strlen(name)) - table];
}

/* An http URL with a host and no user: what is printed and written has no secret in it. The path loses its last slashes
 * and a last /v1, with which the endpoints begin. */
static cpa_status check_url(char *url, cpa_error *err) {
    char *scheme = NULL, *user = NULL, *query = NULL;
    char shown[64];
    cpa_status status = CPA_OK;
    CURLU *parts = curl_url();
    if (!parts) return cpa_fail(err, CPA_NO_MEMORY, "bench serve: no memory for the URL");
    const bool is_right = curl_url_set(parts, CURLUPART_URL, url, 0) == CURLUE_OK &&
                          curl_url_get(parts, CURLUPART_SCHEME, &scheme, 0) == CURLUE_OK &&
                          (strcmp(scheme, "http") == 0 || strcmp(scheme, "https") == 0);
    const bool is_plain = is_right && curl_url_get(parts, CURLUPART_USER, &user, 0) != CURLUE_OK &&
                          curl_url_get(parts, CURLUPART_QUERY, &query, 0) != CURLUE_OK && !strpbrk(url, "@#?");
    cpa_text_quote(url, strlen(url), shown, sizeof shown);
    if (!is_right) {
        status = cpa_fail(err, CPA_INVALID, "bench serve: --url: found '%s', expected one like http://localhost:8000",
                          shown);
    } else if (!is_plain) {
        status = cpa_fail(err, CPA_INVALID,
                          "bench serve: --url: found a user, a query or a fragment in it, expected one like "
                          "http://localhost:8000");
    }
    for (size_t n = strlen(url); n > 0 && url[n - 1] == '/';) url[--n] = 0;
    const size_t length = strlen(url);
    if (length > 3 && strcmp(url + length - 3, "/v1") == 0) url[length - 3] = 0;
    curl_free(scheme);
    curl_free(user);
    curl_free(query);
    curl_url_cleanup(parts);
    return status;
}

/* What is sent as it stands: in JSON, or in a header, which it must not end. Neither is shown. */
static cpa_status check_texts(const cpa_serve_options *o, cpa_error *err) {
    json_t *model = json_string(o->model);
    const bool is_utf8 = model != NULL;
    json_decref(model);
    if (!is_utf8) return cpa_fail(err, CPA_INVALID, "bench serve: --model: found no UTF-8, expected a name");
    for (const char *c = o->api_key; *c; c++) {
        if (!isprint((unsigned char)*c))
            return cpa_fail(err, CPA_INVALID,
                            "bench serve: --api-key: found a character that is not printable, "
                            "expected none");
    }
    return CPA_OK;
}

/* Of the prompt, and of the one answer as a stream that is measured, there is nothing to choose. */
static cpa_status check_extra_body(const char *text, cpa_error *err) {
    static const char *const ours[] = {"prompt", "messages", "stream", "n"};
    json_t *object = text[0] ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : json_object();
    const bool is_right = json_is_object(object);
    const char *wrong = NULL;
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++) {
        if (json_object_get(object, ours[i])) wrong = ours[i];
    }
    json_decref(object);
    if (wrong)
        return cpa_fail(err, CPA_INVALID, "bench serve: --extra-body: found \"%s\", expected other members", wrong);
    if (is_right) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "bench serve: --extra-body: found no JSON object, expected {\"name\": value, ...}");
}

/* What only means something with other options, or without them. */
static cpa_status check_together(cpa_serve_options *o, const bool *given, cpa_error *err) {
    static const char *const with_trace[] = {"length-scale", "time-scale"}, *const without[] = {"input-len",
                                                                                                "output-len"};
    if (!o->url[0]) return cpa_fail(err, CPA_INVALID, "bench serve: found no --url, expected that of a server");
    CPA_TRY(check_url(o->url, err));
    CPA_TRY(check_texts(o, err));
    CPA_TRY(check_extra_body(o->extra_body, err));
    for (int i = 0; i < 2; i++) {
        if (!o->trace[0] && is_given(given, with_trace[i]))
            return cpa_fail(err, CPA_INVALID, "bench serve: --%s: found without --trace, expected with it",
                            with_trace[i]);
        if (o->trace[0] && is_given(given, without[i]))
            return cpa_fail(err, CPA_INVALID, "bench serve: --%s: found with --trace, expected without it", without[i]);
    }
    if (o->time_scale > 0 && !isinf(o->request_rate))
        return cpa_fail(err, CPA_INVALID,
                        "bench serve: --request-rate: found with --time-scale, expected one of the two");
    if (o->prompts == CPA_SERVE_IDS && o->endpoint == CPA_SERVE_CHAT)
        return cpa_fail(err, CPA_INVALID, "bench serve: --prompts: found ids with chat, expected text");
    if (o->prompts == CPA_SERVE_AUTO) o->prompts = o->endpoint == CPA_SERVE_CHAT ? CPA_SERVE_TEXT : CPA_SERVE_IDS;
    CPA_TRY(cpa_percentiles_parse("bench serve: --percentiles", o->percentiles, &o->metrics, err));
    return cpa_goodput_parse("bench serve: --goodput", o->goodput, &o->metrics, err);
}

/* `--goodput ttft:200 tpot:50` is one list, as in vLLM. */
static cpa_status read_more_goodput(int argc, char **argv, int *i, cpa_serve_options *out, cpa_error *err) {
    while (*i + 1 < argc && argv[*i + 1][0] != '-') {
        const size_t used = strlen(out->goodput), more = strlen(argv[++*i]);
        if (used + more + 2 > sizeof out->goodput)
            return cpa_fail(err, CPA_INVALID,
                            "bench serve: --goodput: found a list of more than %zu bytes, expected fewer",
                            sizeof out->goodput - 1);
        snprintf(out->goodput + used, sizeof out->goodput - used, " %s", argv[*i]);
    }
    return CPA_OK;
}

cpa_status cpa_serve_options_parse(int argc, char **argv, const char *api_key, cpa_serve_options *out, cpa_error *err) {
    cpa_serve_options options = {0};
    bool given[N_FIELDS] = {false};
    for (int f = 0; f < N_FIELDS; f++) CPA_TRY(cpa_field_set(&table[f], &options, "default", table[f].initial, err));
    for (int i = 1; i < argc; i++) {
        const cpa_field *field;
        CPA_TRY(cpa_field_read_argument(table, N_FIELDS, "bench serve", argc, argv, &i, &options, &field, err));
        if (strcmp(field->name, "goodput") == 0) CPA_TRY(read_more_goodput(argc, argv, &i, &options, err));
        given[field - table] = true;
    }
    if (!options.api_key[0] && api_key) {
        if (strlen(api_key) >= sizeof options.api_key)
            return cpa_fail(err, CPA_INVALID, "OPENAI_API_KEY: found %zu bytes, expected at most %zu", strlen(api_key),
                            sizeof options.api_key - 1);
        strcpy(options.api_key, api_key);
    }
    if (!options.help) CPA_TRY(check_together(&options, given, err));
    *out = options;
    return CPA_OK;
}
