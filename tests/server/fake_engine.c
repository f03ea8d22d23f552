#include "tests/server/fake_engine.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"
#include "tests/server/http_client.h"

/* Byte-level BPE writes bytes that are no printable Latin-1 as the characters from U+0100 on. */
static void byte_name(int byte, int *next, char out[3]) {
    const int printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int code = printable ? byte : 256 + (*next)++;
    if (code < 128) {
        snprintf(out, 3, "%c", code);
    } else {
        snprintf(out, 3, "%c%c", 0xc0 | code >> 6, 0x80 | (code & 63));
    }
}

static void open_text(cpa_fake_engine *engine) {
    json_t *vocabulary = json_object();
    int next = 0;
    for (int byte = 0; byte < 256; byte++) {
        char name[3];
        byte_name(byte, &next, name);
        json_object_set_new(vocabulary, name, json_integer(byte));
    }
    json_t *root = json_pack(
        "{s:s,s:[{s:i,s:s,s:b,s:b,s:b,s:b,s:b},{s:i,s:s,s:b,s:b,s:b,s:b,s:b}],s:n,s:{s:s,s:b,s:b,s:b},s:n,s:{s:s},s:{s:"
        "s,s:o,s:[]}}",
        "version", "1.0", "added_tokens", "id", CPA_FAKE_END, "content", "<|im_end|>", "special", 1, "single_word", 0,
        "lstrip", 0, "rstrip", 0, "normalized", 0, "id", CPA_FAKE_VOCABULARY, "content", "<|beyond|>", "special", 1,
        "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "normalizer", "pre_tokenizer", "type", "ByteLevel",
        "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 1, "post_processor", "decoder", "type", "ByteLevel",
        "model", "type", "BPE", "vocab", vocabulary, "merges");
    char *text = json_dumps(root, JSON_COMPACT);
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_test_folder_write(&folder, "tokenizer.json", text, strlen(text));
    cpa_error err = {.message = "no memory"};
    if (cpa_tokenizer_open(folder.path, &engine->tokenizer, &err) != CPA_OK ||
        cpa_chat_template_open(folder.path, "chatml", &engine->chat, &err) != CPA_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    cpa_test_folder_remove(&folder);
    free(text);
    json_decref(root);
}

static cpa_status submit(void *ctx, const cpa_request *request, cpa_error *err) {
    cpa_fake_engine *engine = ctx;
    pthread_mutex_lock(&engine->lock);
    const cpa_status refusal = engine->refusal;
    if (refusal == CPA_OK) {
        cpa_fake_request *r = &engine->requests[engine->n++];
        r->request = *request;
        r->sampling = *request->sampling;
        snprintf(r->salt, sizeof r->salt, "%s", request->salt ? request->salt : "");
        snprintf(r->tenant, sizeof r->tenant, "%s", request->tenant ? request->tenant : "");
        r->sampling.n_stop_ids = cpa_min64(r->sampling.n_stop_ids, sizeof r->stop_ids / sizeof *r->stop_ids);
        for (int64_t i = 0; i < r->sampling.n_stop_ids; i++) r->stop_ids[i] = r->sampling.stop_ids[i];
        r->sampling.n_logit_biases = cpa_min64(r->sampling.n_logit_biases, sizeof r->biases / sizeof *r->biases);
        for (int64_t i = 0; i < r->sampling.n_logit_biases; i++) r->biases[i] = r->sampling.logit_biases[i];
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
    return refusal == CPA_OK ? CPA_OK : cpa_fail(err, refusal, "the fake engine is %s", cpa_status_name(refusal));
}

static cpa_status cancel(void *ctx, uint64_t id) {
    cpa_fake_engine *engine = ctx;
    cpa_status status = CPA_INVALID;
    pthread_mutex_lock(&engine->lock);
    for (int64_t i = 0; i < engine->n; i++) {
        cpa_fake_request *r = &engine->requests[i];
        if (r->request.id != id || r->has_ended) continue;
        r->is_cancelled = 1;
        engine->cancels++;
        status = CPA_OK;
    }
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
    return status;
}

cpa_fake_engine *cpa_fake_engine_start_alone(cpa_server_options options, int with_text) {
    cpa_fake_engine *engine = calloc(1, sizeof *engine);
    cpa_error err = {.message = ""};
    if (!engine) abort();
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->changed, NULL);
    engine->script = "Hello";
    if (with_text) open_text(engine);
    options.tokenizer = engine->tokenizer;
    if (!options.chat) options.chat = engine->chat;
    if (!options.model_name) options.model_name = "tiny";
    if (cpa_server_start(&options, &engine->server, &err) != CPA_OK) fprintf(stderr, "%s\n", err.message), abort();
    return engine;
}

void cpa_fake_engine_attach(cpa_fake_engine *engine) {
    static const uint32_t ends[] = {CPA_FAKE_END};
    const cpa_server_engine attached = {.ctx = engine,
                                        .submit = submit,
                                        .cancel = cancel,
                                        .vocabulary = CPA_FAKE_VOCABULARY,
                                        .max_model_len = CPA_FAKE_LENGTH,
                                        .end_ids = ends,
                                        .n_end_ids = 1};
    if (cpa_server_attach(engine->server, &attached, NULL) != CPA_OK) abort();
}

cpa_fake_engine *cpa_fake_engine_start(cpa_server_options options, int with_text) {
    cpa_fake_engine *engine = cpa_fake_engine_start_alone(options, with_text);
    cpa_fake_engine_attach(engine);
    return engine;
}

static void close_constraint(cpa_fake_request *r) {
    if (r->request.constraint) r->request.constraint->close(r->request.constraint_ctx);
    r->request.constraint = NULL;
}

void cpa_fake_engine_stop(cpa_fake_engine *engine) {
    cpa_server_stop(engine->server, 0);
    for (int64_t i = 0; i < engine->n; i++) close_constraint(&engine->requests[i]); /* as an engine that is destroyed */
    cpa_chat_template_close(engine->chat);
    cpa_tokenizer_close(engine->tokenizer);
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

int cpa_fake_engine_port(const cpa_fake_engine *engine) {
    return cpa_server_port(engine->server);
}

void cpa_fake_engine_end(cpa_fake_engine *engine, int64_t i, cpa_finish_reason reason, const char *error) {
    pthread_mutex_lock(&engine->lock);
    cpa_fake_request *r = &engine->requests[i];
    const int ends = !r->has_ended;
    r->has_ended = 1;
    const cpa_request_result result = {.id = r->request.id,
                                       .prompt_tokens = r->request.prompt_tokens,
                                       .output_tokens = r->drawn,
                                       .reason = reason,
                                       .error = error};
    pthread_mutex_unlock(&engine->lock);
    if (!ends) return;
    cpa_server_on_finish(engine->server, &result);
    close_constraint(r);
}

static int is_allowed(const uint32_t *words, uint32_t token) {
    return words[token / 32] >> token % 32 & 1;
}

/* The end if it may come next, else any token that may. */
static uint32_t draw_bound(const cpa_fake_request *r, int64_t index) {
    const cpa_request *request = &r->request;
    uint32_t words[CPA_FAKE_VOCABULARY / 32 + 1] = {0};
    CU_ASSERT_EQUAL(request->constraint->mask(request->constraint_ctx, words, NULL), CPA_OK);
    uint32_t token = CPA_FAKE_END;
    if (is_allowed(words, token)) return token;
    const uint64_t first = cpa_mix64(r->sampling.seed * 1000 + (uint64_t)index) % CPA_FAKE_VOCABULARY;
    for (uint32_t i = 0; i < CPA_FAKE_VOCABULARY; i++) {
        token = (uint32_t)((first + i) % CPA_FAKE_VOCABULARY);
        if (is_allowed(words, token)) break;
    }
    CU_ASSERT_EQUAL(request->constraint->accept(request->constraint_ctx, token, NULL), CPA_OK);
    return token;
}

/* The most probable token is "z", the next one the chosen one, and then come "y", "x" and so on. */
static cpa_token_ranks ranks_of(uint32_t token, float logprob, int32_t top) {
    cpa_token_ranks ranks = {.logprob = logprob, .rank = 2};
    for (int32_t i = 0; i < CPA_MOST_TOP_LOGPROBS; i++) {
        ranks.top[i] = (cpa_token_logprob){CPA_NO_TOKEN, 0};
        if (i < top)
            ranks.top[i] = (cpa_token_logprob){'z' - (uint32_t)i + (i > 1), logprob + 0.25F - 0.25F * (float)i};
        if (i == 1 && i < top) ranks.top[i].token = token;
    }
    return ranks;
}

static void tell_prompt(cpa_fake_engine *engine, const cpa_fake_request *r) {
    for (int64_t position = 1; position < r->request.prompt_tokens; position++) {
        const uint32_t token = cpa_server_token_at(engine->server, r->request.id, position);
        const cpa_token_ranks ranks = ranks_of(token, -0.125F * (float)position, r->sampling.top_prompt_logprobs);
        cpa_server_on_ranks(engine->server, r->request.id, position, &ranks);
    }
}

static void draw(cpa_fake_engine *engine, int64_t i) {
    cpa_fake_request *r = &engine->requests[i];
    pthread_mutex_lock(&engine->lock);
    const int ended = r->has_ended, cancelled = r->is_cancelled;
    const int64_t index = r->drawn;
    if (!ended && !cancelled) r->drawn++;
    pthread_mutex_unlock(&engine->lock);
    if (ended) return;
    if (cancelled) {
        cpa_fake_engine_end(engine, i, CPA_FINISH_CANCELLED, "");
        return;
    }
    if (index == 0 && r->sampling.prompt_logprobs) tell_prompt(engine, r);
    const int64_t length = (int64_t)strlen(engine->script);
    uint32_t token = index < length ? (unsigned char)engine->script[index] : CPA_FAKE_END;
    if (r->request.constraint) token = draw_bound(r, index);
    const float logprob = r->sampling.logprobs ? -0.5F * (float)(index + 1) : 0;
    if (r->sampling.top_logprobs > 0) {
        const cpa_token_ranks ranks = ranks_of(token, logprob, r->sampling.top_logprobs);
        cpa_server_on_ranks(engine->server, r->request.id, r->request.prompt_tokens + index, &ranks);
    }
    cpa_server_on_token(engine->server, r->request.id, index, token, logprob);
    int stops = token == CPA_FAKE_END && !r->sampling.ignore_eos;
    for (int64_t s = 0; s < r->sampling.n_stop_ids; s++) stops |= token == r->stop_ids[s];
    if (stops) {
        cpa_fake_engine_end(engine, i, CPA_FINISH_STOP, "");
    } else if (index + 1 == r->request.output_tokens) {
        cpa_fake_engine_end(engine, i, CPA_FINISH_LENGTH, "");
    }
}

void cpa_fake_engine_step(cpa_fake_engine *engine, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++) {
        pthread_mutex_lock(&engine->lock);
        const int64_t n = engine->n;
        pthread_mutex_unlock(&engine->lock);
        for (int64_t i = 0; i < n; i++) draw(engine, i);
        cpa_server_on_step(engine->server);
    }
}

static void await(cpa_fake_engine *engine, const int64_t *counter, int64_t value) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    pthread_mutex_lock(&engine->lock);
    while (*counter < value && pthread_cond_timedwait(&engine->changed, &engine->lock, &until) == 0) {}
    CPA_ASSERT_ORDER(*counter, >=, value);
    pthread_mutex_unlock(&engine->lock);
}

void cpa_fake_engine_await(cpa_fake_engine *engine, int64_t requests) {
    await(engine, &engine->n, requests);
}

void cpa_fake_engine_await_cancels(cpa_fake_engine *engine, int64_t cancels) {
    await(engine, &engine->cancels, cancels);
}

typedef struct post {
    int port;
    const char *path, *body;
    cpa_http_reply *reply;
    _Atomic int is_done;
} post;

static void *run_post(void *ctx) {
    post *p = ctx;
    cpa_http_request(p->port, "POST", p->path, "", p->body, p->reply);
    p->is_done = 1;
    return NULL;
}

void cpa_fake_engine_post(cpa_fake_engine *engine, const char *path, const char *body, cpa_http_reply *out) {
    post p = {.port = cpa_fake_engine_port(engine), .path = path, .body = body, .reply = out};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_post, &p)) abort();
    while (!p.is_done) {
        cpa_fake_engine_step(engine, 1);
        usleep(200);
    }
    pthread_join(thread, NULL);
}

json_t *cpa_fake_engine_answer(cpa_fake_engine *engine, const char *path, const char *body, int status) {
    cpa_http_reply reply;
    cpa_fake_engine_post(engine, path, body, &reply);
    if (reply.status != status) fprintf(stderr, "\n%s: %d %s\n", body, reply.status, reply.body ? reply.body : "");
    CU_ASSERT_EQUAL(reply.status, status);
    json_t *answer = cpa_http_json(&reply);
    CU_ASSERT_PTR_NOT_NULL_FATAL(answer);
    cpa_http_reply_free(&reply);
    return answer;
}
