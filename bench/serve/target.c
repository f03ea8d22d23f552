#include "bench/serve/target.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "bench/serve/interrupt.h"
#include "bench/serve/stream_answer.h"

static const double ASK_TIMEOUT_S = 10, CONNECT_TIMEOUT_S = 60, PAUSE_S = 0.1, PATIENCE_S = 1;
enum { MOST_BYTES = 1 << 20, DEFAULT_VOCABULARY = 1000 };

CURLcode cpa_target_prepare(const cpa_target *target, CURL *easy, const char *url) {
    const struct {
        CURLoption option;
        long value;
    } numbers[] = {{CURLOPT_NOSIGNAL, 1},
                   {CURLOPT_TCP_KEEPALIVE, 1},
                   {CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1},
                   {CURLOPT_CONNECTTIMEOUT_MS, (long)(1e3 * CONNECT_TIMEOUT_S)}};
    CURLcode code = curl_easy_setopt(easy, CURLOPT_URL, url);
    for (size_t i = 0; code == CURLE_OK && i < sizeof numbers / sizeof numbers[0]; i++)
        code = curl_easy_setopt(easy, numbers[i].option, numbers[i].value);
    if (code == CURLE_OK) code = curl_easy_setopt(easy, CURLOPT_HTTPHEADER, target->headers);
    return code;
}

/* ---- questions before the run ---- */

typedef struct reply {
    char *bytes;
    int64_t count, capacity;
    long status; /* HTTP status; 0: there was no answer, and `code` says why */
    CURLcode code;
} reply;

static size_t take_bytes(char *bytes, size_t size, size_t count, void *ctx) {
    reply *r = ctx;
    const int64_t n = (int64_t)(size * count);
    if (r->count + n > MOST_BYTES || !cpa_array_reserve(&r->bytes, &r->capacity, r->count + n, 1)) return 0;
    memcpy(r->bytes + r->count, bytes, (size_t)n);
    r->count += n;
    return (size_t)n;
}

/* GET of a path; free() reply->bytes. */
static void ask(const cpa_target *target, const char *path, reply *out) {
    char url[2 * CPA_TEXT_BYTES];
    CURL *easy = curl_easy_init();
    *out = (reply){.code = easy ? CURLE_OK : CURLE_OUT_OF_MEMORY};
    if (!easy) return;
    snprintf(url, sizeof url, "%s%s", target->options->url, path);
    out->code = cpa_target_prepare(target, easy, url);
    if (out->code == CURLE_OK) out->code = curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)(1e3 * ASK_TIMEOUT_S));
    if (out->code == CURLE_OK) out->code = curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_bytes);
    if (out->code == CURLE_OK) out->code = curl_easy_setopt(easy, CURLOPT_WRITEDATA, out);
    if (out->code == CURLE_OK) out->code = curl_easy_perform(easy);
    if (out->code == CURLE_OK) curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &out->status);
    curl_easy_cleanup(easy);
}

/* Why a question has no good answer. */
static void explain(const reply *r, char *out, size_t bytes) {
    char said[128];
    if (r->status == 0) {
        snprintf(out, bytes, "%s", curl_easy_strerror(r->code));
        return;
    }
    cpa_answer_refusal(r->bytes ? r->bytes : "", (size_t)r->count, said, sizeof said);
    snprintf(out, bytes, "HTTP %ld%s%s", r->status, said[0] ? ": " : "", said);
}

static void pause_a_moment(void) {
    const struct timespec moment = {.tv_nsec = (long)(1e9 * PAUSE_S)};
    nanosleep(&moment, NULL);
}

/* A server without /health is ready when it answers. */
static bool is_ready(const reply *r) {
    return r->status == 200 || r->status == 404 || r->status == 405 || r->status == 501;
}

/* No time changes that: there is no such host, or the key is not the right one. */
static bool is_hopeless(const reply *r) {
    return r->code == CURLE_COULDNT_RESOLVE_HOST || r->status == 401 || r->status == 403;
}

static cpa_status wait_until_ready(const cpa_target *target, cpa_error *err) {
    const double begin = cpa_clock_now(), limit = target->options->ready_timeout_s;
    bool has_told = false;
    char why[256];
    while (limit > 0 && !cpa_interrupt_received()) {
        reply health;
        ask(target, "/health", &health);
        const bool ready = is_ready(&health), hopeless = is_hopeless(&health);
        const double waited = cpa_clock_now() - begin;
        explain(&health, why, sizeof why);
        free(health.bytes);
        if (ready) return CPA_OK;
        if (waited >= limit || hopeless)
            return cpa_fail(err, CPA_IO, "bench serve: %s/health: found %s after %.1f s, expected HTTP 200",
                            target->options->url, why, waited);
        if (waited >= PATIENCE_S && !has_told) {
            fprintf(stderr, "cp_attn: waiting for %s/health: %s\n", target->options->url, why);
            has_told = true;
        }
        pause_a_moment();
    }
    return CPA_OK;
}

/* Takes name and vocabulary of the first model that is listed; a vocabulary is an addition of this project's server. */
static bool take_model(const reply *models, cpa_target *target) {
    json_t *root = json_loadb(models->bytes ? models->bytes : "", (size_t)models->count, 0, NULL);
    const json_t *first = json_array_get(json_object_get(root, "data"), 0);
    const char *name = json_string_value(json_object_get(first, "id"));
    const json_int_t vocabulary = json_integer_value(json_object_get(first, "vocab_size"));
    const bool is_good = name && name[0] && strlen(name) < sizeof target->model;
    if (is_good && !target->model[0]) strcpy(target->model, name);
    if (target->vocabulary == 0 && vocabulary > 0 && vocabulary <= UINT32_MAX)
        target->vocabulary = (uint32_t)vocabulary;
    json_decref(root);
    return is_good;
}

static cpa_status ask_for_model(cpa_target *target, cpa_error *err) {
    reply models;
    char why[256];
    if (target->model[0] && target->vocabulary > 0) return CPA_OK;
    ask(target, "/v1/models", &models);
    explain(&models, why, sizeof why);
    if (models.status == 200 && !take_model(&models, target)) snprintf(why, sizeof why, "no list of models");
    free(models.bytes);
    if (target->vocabulary == 0) target->vocabulary = DEFAULT_VOCABULARY;
    if (target->model[0] || cpa_interrupt_received()) return CPA_OK;
    return cpa_fail(err, CPA_IO, "bench serve: %s/v1/models: found %s, expected a model (or --model)",
                    target->options->url, why);
}

/* ---- life ---- */

static cpa_status add_header(cpa_target *target, const char *header, cpa_error *err) {
    struct curl_slist *longer = curl_slist_append(target->headers, header);
    if (!longer) return cpa_fail(err, CPA_NO_MEMORY, "bench serve: no memory for the headers");
    target->headers = longer;
    return CPA_OK;
}

static cpa_status add_headers(cpa_target *target, cpa_error *err) {
    char key[CPA_TEXT_BYTES + 64];
    CPA_TRY(add_header(target, "Content-Type: application/json", err));
    CPA_TRY(add_header(target, "Expect:", err)); /* a long body does not wait to be wanted */
    if (!target->options->api_key[0]) return CPA_OK;
    snprintf(key, sizeof key, "Authorization: Bearer %s", target->options->api_key);
    return add_header(target, key, err);
}

cpa_status cpa_target_open(const cpa_serve_options *options, cpa_target *out, cpa_error *err) {
    cpa_target target = {.options = options, .vocabulary = (uint32_t)options->vocabulary};
    snprintf(target.completions, sizeof target.completions, "%s%s", options->url,
             cpa_serve_endpoints[options->endpoint]);
    strcpy(target.model, options->model);
    cpa_status status = add_headers(&target, err);
    if (status == CPA_OK) status = wait_until_ready(&target, err);
    if (status == CPA_OK) status = ask_for_model(&target, err);
    if (status != CPA_OK) {
        cpa_target_close(&target);
        return status;
    }
    *out = target;
    return CPA_OK;
}

void cpa_target_close(cpa_target *target) {
    curl_slist_free_all(target->headers);
    target->headers = NULL;
}
