/* Answers that tell of their prompts: echo, prompt_logprobs; and what limits the tokens that are drawn. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/prompt_text.h"
#include "tests/fixtures/unit.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

static const cpa_server_options plain = {.model_name = "tiny"};

/* Whether the value at a path of an answer is that of a text of JSON. */
static int is_at(const json_t *answer, const char *path, const char *text) {
    json_t *wanted = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    const json_t *found = cpa_json_at(answer, path);
    const int is_equal = wanted && found && json_equal(found, wanted);
    if (!is_equal) {
        char *shown = json_dumps(answer, JSON_COMPACT);
        fprintf(stderr, "%s: expected %s in %s\n", path, text, shown);
        free(shown);
    }
    json_decref(wanted);
    return is_equal;
}

/* The texts of the choices of a stream, one behind the other, and the first event that has log-probabilities; the
 * caller calls json_decref. */
static json_t *read_stream(char *body, char texts[4][100]) {
    json_t *first = NULL;
    for (char *rest = body, *line; (line = strsep(&rest, "\n"));) {
        json_t *event = strncmp(line, "data: {", 7) ? NULL : json_loads(line + 6, JSON_ALLOW_NUL, NULL);
        const json_int_t i = json_integer_value(cpa_json_at(event, "choices.0.index"));
        if (i < 4) strncat(texts[i], cpa_json_text_at(event, "choices.0.text"), 50);
        if (!first && json_is_object(cpa_json_at(event, "choices.0.logprobs"))) first = json_incref(event);
        json_decref(event);
    }
    return first;
}

static void an_echo_begins_with_the_prompt(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    json_t *answer = cpa_fake_engine_answer(engine, "/v1/completions",
                                            "{\"prompt\": \"Say: \", \"echo\": true, \"max_tokens\": 3}", 200);
    CU_ASSERT(is_at(answer, "choices.0.text", "\"Say: Hel\""));
    CU_ASSERT(is_at(answer, "choices.0.logprobs", "null"));
    CU_ASSERT(is_at(answer, "usage", "{\"prompt_tokens\": 5, \"completion_tokens\": 3, \"total_tokens\": 8}"));
    CU_ASSERT_FALSE(engine->requests[0].sampling.prompt_logprobs);
    json_decref(answer);
    /* Of ids, and of several prompts with samples. A text that stops answers is looked for behind the prompt. */
    answer =
        cpa_fake_engine_answer(engine, "/v1/completions",
                               "{\"prompt\": [[72, 108, 256], [105]], \"echo\": true, \"n\": 2, \"stop\": \"l\"}", 200);
    CU_ASSERT(is_at(answer, "choices.0.text", "\"Hl<|im_end|>He\""));
    CU_ASSERT(is_at(answer, "choices.1.text", "\"Hl<|im_end|>He\""));
    CU_ASSERT(is_at(answer, "choices.2.text", "\"iHe\""));
    CU_ASSERT(is_at(answer, "choices.3.text", "\"iHe\""));
    json_decref(answer);
    answer = cpa_fake_engine_answer(engine, "/v1/completions",
                                    "{\"prompt\": \"a\\u0000b\", \"echo\": true, \"max_tokens\": 1}", 200);
    CU_ASSERT(is_at(answer, "choices.0.text", "\"a\\u0000bH\""));
    CU_ASSERT(is_at(answer, "usage.prompt_tokens", "3"));
    json_decref(answer);
    answer = cpa_fake_engine_answer(engine, "/v1/completions",
                                    "{\"prompt\": \"a\", \"echo\": false, \"max_tokens\": 1}", 200);
    CU_ASSERT(is_at(answer, "choices.0.text", "\"H\""));
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

static void an_echo_has_log_probabilities(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    static const char *const bodies[] = {
        "{\"prompt\": \"a\xc3\xa9\", \"echo\": true, \"logprobs\": 1, \"max_tokens\": 1}",
        "{\"prompt\": \"a\xc3\xa9\", \"echo\": true, \"logprobs\": 1, \"max_tokens\": 1, \"stream\": true}"};
    for (int stream = 0; stream < 2; stream++) {
        cpa_http_reply reply;
        char texts[4][100] = {""};
        cpa_fake_engine_post(engine, "/v1/completions", bodies[stream], &reply);
        json_t *answer = stream ? read_stream(reply.body, texts) : cpa_http_json(&reply);
        CU_ASSERT(is_at(answer, "choices.0.text", "\"a\xc3\xa9H\""));
        CU_ASSERT(is_at(answer, "choices.0.logprobs",
                        "{\"tokens\": [\"a\", \"\ufffd\", \"\ufffd\", \"H\"],"
                        " \"token_logprobs\": [null, -0.125, -0.25, -0.5],"
                        " \"top_logprobs\": [null, {\"z\": 0.125, \"\ufffd\": -0.125}, {\"z\": 0.0, \"\ufffd\": -0.25},"
                        " {\"z\": -0.25, \"H\": -0.5}], \"text_offset\": [0, 1, 2, 2]}"));
        json_decref(answer);
        cpa_http_reply_free(&reply);
    }
    CU_ASSERT_EQUAL(engine->requests[0].sampling.top_prompt_logprobs, 1);
    /* A special token that the text spells out is a part of it. */
    json_t *answer = cpa_fake_engine_answer(
        engine, "/v1/completions", "{\"prompt\": \"a<|im_end|>b\", \"echo\": true, \"logprobs\": 0, \"max_tokens\": 2}",
        200);
    CU_ASSERT(is_at(answer, "choices.0.logprobs.text_offset", "[0, 1, 11, 12, 13]"));
    CU_ASSERT(is_at(answer, "choices.0.logprobs.top_logprobs.1", "{\"<|im_end|>\": -0.125}"));
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

/* One sample of each prompt has it told, all say it. */
static void samples_tell_of_their_prompts(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    json_t *answer = cpa_fake_engine_answer(engine, "/v1/completions",
                                            "{\"prompt\": [\"abc\", \"x\"], \"n\": 2, \"echo\": true, \"logprobs\": 0,"
                                            " \"prompt_logprobs\": 2, \"max_tokens\": 1}",
                                            200);
    static const char prompt[] =
        "[null, {\"98\": {\"logprob\": -0.125, \"rank\": 2, \"decoded_token\": \"b\"},"
        " \"122\": {\"logprob\": 0.125, \"rank\": 1, \"decoded_token\": \"z\"}},"
        " {\"99\": {\"logprob\": -0.25, \"rank\": 2, \"decoded_token\": \"c\"},"
        " \"122\": {\"logprob\": 0.0, \"rank\": 1, \"decoded_token\": \"z\"}}]";
    for (int i = 0; i < 2; i++) {
        char path[60];
        snprintf(path, sizeof path, "choices.%d.prompt_logprobs", i);
        CU_ASSERT(is_at(answer, path, prompt));
        snprintf(path, sizeof path, "choices.%d.logprobs.token_logprobs", i);
        CU_ASSERT(is_at(answer, path, "[null, -0.125, -0.25, -0.5]"));
        snprintf(path, sizeof path, "choices.%d.logprobs.top_logprobs.1", i);
        CU_ASSERT(is_at(answer, path, "{\"b\": -0.125}"));
        snprintf(path, sizeof path, "choices.%d.prompt_logprobs", 2 + i);
        CU_ASSERT(is_at(answer, path, "[null]"));
    }
    json_decref(answer);
    for (int i = 0; i < 4; i++) {
        CU_ASSERT_EQUAL(engine->requests[i].sampling.prompt_logprobs, i % 2 == 0);
        CU_ASSERT_EQUAL(engine->requests[i].sampling.top_prompt_logprobs, i % 2 == 0 ? 2 : 0);
    }
    answer = cpa_fake_engine_answer(engine, "/v1/chat/completions",
                                    "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"prompt_logprobs\": 0,"
                                    " \"max_tokens\": 1, \"n\": 2}",
                                    200);
    CU_ASSERT_EQUAL(json_array_size(cpa_json_at(answer, "prompt_logprobs")),
                    (size_t)engine->requests[4].request.prompt_tokens);
    CU_ASSERT(
        is_at(answer, "prompt_logprobs.1", "{\"124\": {\"logprob\": -0.125, \"rank\": 2, \"decoded_token\": \"|\"}}"));
    CU_ASSERT_PTR_NULL(cpa_json_at(answer, "choices.0.prompt_logprobs"));
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

/* The second sample may be ahead of the first, which is told of the prompt. */
static void a_stream_waits_for_its_prompt(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    const int fd = cpa_http_connect(cpa_fake_engine_port(engine));
    cpa_http_ask(
        fd, "POST", "/v1/completions", "",
        "{\"prompt\": \"abc\", \"n\": 2, \"echo\": true, \"logprobs\": 0, \"max_tokens\": 2, \"stream\": true}");
    cpa_fake_engine_await(engine, 2);
    const uint64_t first = engine->requests[0].request.id, second = engine->requests[1].request.id;
    cpa_server_on_token(engine->server, second, 0, 'x', -1);
    cpa_server_on_step(engine->server);
    usleep(50000); /* the connection has seen it */
    const cpa_token_ranks ranks = {.logprob = -3, .rank = 7};
    cpa_server_on_ranks(engine->server, first, 1, &ranks);
    cpa_server_on_ranks(engine->server, first, 1, &(cpa_token_ranks){.logprob = -9}); /* has come already */
    cpa_server_on_ranks(engine->server, first, 2, &(cpa_token_ranks){.logprob = -4});
    cpa_server_on_token(engine->server, first, 0, 'y', -2);
    cpa_server_on_step(engine->server);
    char body[4000];
    cpa_http_read_until(fd, "[null,-3.0,-4.0,-1.0]", body, sizeof body);
    CU_ASSERT_PTR_NOT_NULL(strstr(body, "\"text\":\"abcy\""));
    CU_ASSERT_PTR_NOT_NULL(strstr(body, "\"text\":\"abcx\""));
    CU_ASSERT_PTR_NULL(strstr(body, "\"text\":\"x\""));
    CU_ASSERT_PTR_NOT_NULL(strstr(body, "\"token_logprobs\":[null,-3.0,-4.0,-2.0]"));
    CU_ASSERT_PTR_NOT_NULL(strstr(body, "\"token_logprobs\":[null,-3.0,-4.0,-1.0]"));
    close(fd);
    cpa_fake_engine_stop(engine);
}

/* What is drawn for it is not told, an end of the model's neither. */
static void an_echo_may_be_all(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    engine->script = "";
    json_t *answer = cpa_fake_engine_answer(
        engine, "/v1/completions", "{\"prompt\": \"ab\", \"n\": 2, \"echo\": true, \"max_tokens\": 0, \"logprobs\": 1}",
        200);
    CU_ASSERT(
        is_at(answer, "choices.1",
              "{\"index\": 1, \"text\": \"ab\", \"finish_reason\": \"length\", \"stop_reason\": null, \"logprobs\":"
              " {\"tokens\": [\"a\", \"b\"], \"token_logprobs\": [null, -0.125],"
              " \"top_logprobs\": [null, {\"z\": 0.125, \"b\": -0.125}], \"text_offset\": [0, 1]}}"));
    CU_ASSERT(is_at(answer, "usage", "{\"prompt_tokens\": 2, \"completion_tokens\": 0, \"total_tokens\": 2}"));
    CU_ASSERT_EQUAL(engine->requests[0].request.output_tokens, 1);
    json_decref(answer);
    cpa_http_reply reply;
    char texts[4][100] = {""};
    cpa_fake_engine_post(engine, "/v1/completions",
                         "{\"prompt\": [\"ab\", \"c\"], \"echo\": true, \"max_tokens\": 0, \"stream\": true}", &reply);
    CU_ASSERT_PTR_NOT_NULL(strstr(reply.body, "data: [DONE]"));
    json_decref(read_stream(reply.body, texts));
    CU_ASSERT_STRING_EQUAL(texts[0], "ab");
    CU_ASSERT_STRING_EQUAL(texts[1], "c");
    cpa_http_reply_free(&reply);
    cpa_fake_engine_stop(engine);
}

static void without_a_tokenizer_an_echo_has_names(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 0);
    json_t *answer = cpa_fake_engine_answer(
        engine, "/v1/completions", "{\"prompt\": [7, 8], \"echo\": true, \"max_tokens\": 1, \"logprobs\": 0}", 200);
    CU_ASSERT(is_at(answer, "choices.0.text", "\"\""));
    CU_ASSERT(is_at(answer, "choices.0.logprobs.tokens", "[\"token_id:7\", \"token_id:8\", \"token_id:72\"]"));
    CU_ASSERT(is_at(answer, "choices.0.logprobs.token_logprobs", "[null, -0.125, -0.5]"));
    CU_ASSERT(is_at(answer, "choices.0.logprobs.text_offset", "[0, 10, 20]"));
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

/* Characters of a text in front of each of its tokens, with commas. */
static void offsets_of(const char *folder, const char *text, char *out, size_t bytes) {
    cpa_error err;
    cpa_server server = {.port = 0};
    cpa_tokenizer *tokenizer = NULL;
    cpa_token_list ids = {0};
    cpa_prompt_text prompt = {.text = NULL};
    json_t *given = json_string(text);
    CU_ASSERT_EQUAL_FATAL(cpa_tokenizer_open(folder, &tokenizer, &err), CPA_OK);
    server.options.tokenizer = tokenizer;
    CU_ASSERT_EQUAL(cpa_tokenizer_encode(tokenizer, text, strlen(text), 1, &ids, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_prompt_text_open(&server, given, &ids, &prompt, &err), CPA_OK);
    int64_t offset = 0;
    size_t at = 0;
    *out = 0;
    for (int64_t i = 0; i < ids.count; i++) {
        snprintf(out + strlen(out), bytes - strlen(out), "%s%lld", i > 0 ? "," : "", (long long)offset);
        offset += cpa_prompt_text_pass(&server, &prompt, ids.ids[i], &at);
    }
    CU_ASSERT_EQUAL(offset, prompt.characters);
    json_decref(given);
    cpa_prompt_text_close(&prompt);
    free(ids.ids);
    cpa_tokenizer_close(tokenizer);
}

/* A beginning that a tokenizer adds has no place in the text, nor has a space that it puts in front. */
static void offsets_are_those_of_the_text(void) {
    char found[200];
    offsets_of(CPA_TEST_DATA "/text/llama3", "a\xc3\xa9 b", found, sizeof found);
    CU_ASSERT_STRING_EQUAL(found, "0,0,1,2");
    offsets_of(CPA_TEST_DATA "/text/llama2", "a b", found, sizeof found);
    CU_ASSERT_STRING_EQUAL(found, "0,0,1");
    offsets_of(CPA_TEST_DATA "/text/llama2", " a b", found, sizeof found);
    CU_ASSERT_STRING_EQUAL(found, "0,0,1,2");
}

static void limits_of_drawing_go_to_the_engine(void) {
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    json_decref(cpa_fake_engine_answer(engine, "/v1/completions",
                                       "{\"prompt\": [7], \"n\": 2, \"min_tokens\": 3, \"max_tokens\": 4,"
                                       " \"logit_bias\": {\"299\": -100, \"0\": 2.5, \"17\": 100}}",
                                       200));
    for (int i = 0; i < 2; i++) {
        const cpa_fake_request *r = &engine->requests[i];
        CU_ASSERT_EQUAL(r->sampling.min_tokens, 3);
        CU_ASSERT_EQUAL_FATAL(r->sampling.n_logit_biases, 3);
        CU_ASSERT(r->biases[0].token == 299 && r->biases[0].bias == -100);
        CU_ASSERT(r->biases[1].token == 0 && r->biases[1].bias == 2.5F);
        CU_ASSERT(r->biases[2].token == 17 && r->biases[2].bias == 100);
    }
    json_decref(cpa_fake_engine_answer(engine, "/v1/chat/completions",
                                       "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"min_tokens\": 5,"
                                       " \"logit_bias\": {}}",
                                       200));
    CU_ASSERT_EQUAL(engine->requests[2].sampling.min_tokens, 5);
    CU_ASSERT_EQUAL(engine->requests[2].sampling.n_logit_biases, 0);
    /* Texts do not stop what has to go on: those that begin in the first tokens. */
    engine->script = "abababab";
    json_t *answer = cpa_fake_engine_answer(engine, "/v1/completions",
                                            "{\"prompt\": [7], \"min_tokens\": 3, \"stop\": \"ab\"}", 200);
    CU_ASSERT(is_at(answer, "choices.0.text", "\"abab\""));
    CU_ASSERT(is_at(answer, "choices.0.stop_reason", "\"ab\""));
    json_decref(answer);
    cpa_fake_engine_stop(engine);
}

static void too_much_of_prompts_is_refused(void) {
    enum { PROMPTS = 8, TOKENS = 4000, MOST = PROMPTS * (TOKENS * 2 + 10) + 200 };
    cpa_fake_engine *engine = cpa_fake_engine_start(plain, 1);
    char *body = malloc(MOST);
    CU_ASSERT_PTR_NOT_NULL_FATAL(body);
    size_t at = (size_t)sprintf(body, "{\"echo\": true, \"max_tokens\": 0, \"logprobs\": 20, \"n\": 2, \"prompt\": [");
    for (int i = 0; i < PROMPTS; i++) {
        at += (size_t)sprintf(body + at, "%s[1", i > 0 ? "," : "");
        for (int k = 1; k < TOKENS; k++) at += (size_t)sprintf(body + at, ",1");
        at += (size_t)sprintf(body + at, "]");
    }
    sprintf(body + at, "]}");
    json_t *answer = cpa_fake_engine_answer(engine, "/v1/completions", body, 400);
    CU_ASSERT(is_at(answer, "error.message",
                    "\"prompt: found 1344000 log-probabilities of prompts to tell, expected at most 1048576\""));
    CU_ASSERT_EQUAL(engine->n, 0);
    json_decref(answer);
    free(body);
    cpa_fake_engine_stop(engine);
}

static const cpa_test tests[] = {
    {"an echo begins with the prompt", an_echo_begins_with_the_prompt},
    {"an echo has log-probabilities", an_echo_has_log_probabilities},
    {"samples tell of their prompts", samples_tell_of_their_prompts},
    {"a stream waits for its prompt", a_stream_waits_for_its_prompt},
    {"an echo may be all", an_echo_may_be_all},
    {"without a tokenizer an echo has names", without_a_tokenizer_an_echo_has_names},
    {"offsets are those of the text", offsets_are_those_of_the_text},
    {"limits of drawing go to the engine", limits_of_drawing_go_to_the_engine},
    {"too much of prompts is refused", too_much_of_prompts_is_refused},
};

CPA_TEST_MAIN("prompts told", tests)
