/* What requests of an llm may ask for: answers that are bound, several to one prompt, and what is said of the prompt. */
#include <cpattn/llm.h>

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/unit.h"
#include "tests/llm/answers.h"

static cpa_llm *llm;

static cpa_test_answer *answer_bound(const char *constraint, float temperature, uint64_t seed) {
    const cpa_sampling sampling = {.size = sizeof sampling, .temperature = temperature, .seed = seed};
    const cpa_llm_request_options options = {
        .size = sizeof options, .max_tokens = 200, .sampling = &sampling, .constraint = constraint};
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    cpa_llm_request *request = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_llm_submit(llm, &prompt, &options, &request, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL_FATAL(err.message, "");
    return cpa_test_read_answer(request);
}

static void answers_are_what_they_are_bound_to(void) {
    for (uint64_t seed = 0; seed < 4; seed++) {
        const float temperature = seed ? 1.5F : 0;
        cpa_test_answer *a = answer_bound("{\"choice\": [\"red\", \"green\", \"a longer one\"]}", temperature, seed);
        CU_ASSERT(strcmp(a->text, "red") == 0 || strcmp(a->text, "green") == 0 || strcmp(a->text, "a longer one") == 0);
        CU_ASSERT_EQUAL(a->reason, CPA_FINISH_STOP);
        free(a);
        a = answer_bound("{\"regex\": \"[0-9]{3}-[a-f]{2}\"}", temperature, seed);
        CU_ASSERT_EQUAL(a->bytes, 6);
        CU_ASSERT_EQUAL(strspn(a->text, "0123456789"), 3);
        CU_ASSERT_EQUAL(strspn(a->text + 4, "abcdef"), 2);
        free(a);
        a = answer_bound(
            "{\"json_schema\": {\"type\": \"object\", \"properties\": {\"ok\": {\"type\": \"boolean\"}, \"n\": "
            "{\"type\": \"integer\", \"minimum\": 3, \"maximum\": 99}}, \"required\": [\"ok\", \"n\"], "
            "\"additionalProperties\": false}}",
            temperature, seed);
        json_t *object = json_loads(a->text, 0, NULL);
        CU_ASSERT_TRUE(json_is_boolean(json_object_get(object, "ok")));
        CPA_ASSERT_ORDER(json_integer_value(json_object_get(object, "n")), >=, 3);
        CPA_ASSERT_ORDER(json_integer_value(json_object_get(object, "n")), <=, 99);
        CU_ASSERT_EQUAL(json_object_size(object), 2);
        json_decref(object);
        free(a);
    }
}

static const cpa_sampling drawn = {
    .size = sizeof drawn, .temperature = 1, .seed = 7, .ignore_eos = 1, .logprobs = 1, .prompt_logprobs = 1};

static void samples_are_those_of_the_seeds_that_follow(void) {
    enum { N = 4, TOKENS = 24 };
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Once upon a time there was");
    cpa_llm_request_options options = {.size = sizeof options, .max_tokens = TOKENS, .sampling = &drawn};
    cpa_llm_request *requests[N] = {NULL};
    cpa_test_answer *samples[N];
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit_samples(llm, &prompt, &options, N, requests, NULL), CPA_OK);
    for (int i = 0; i < N; i++) samples[i] = cpa_test_read_answer(requests[i]);
    for (int i = 0; i < N; i++) {
        cpa_sampling one = drawn;
        one.seed = drawn.seed + (uint64_t)i;
        options.sampling = &one;
        CU_ASSERT_EQUAL_FATAL(cpa_llm_submit(llm, &prompt, &options, &requests[0], NULL), CPA_OK);
        cpa_test_answer *alone = cpa_test_read_answer(requests[0]);
        CU_ASSERT_EQUAL(samples[i]->n, TOKENS);
        CU_ASSERT_EQUAL(memcmp(alone->tokens, samples[i]->tokens, TOKENS * sizeof *alone->tokens), 0);
        if (i > 0) CU_ASSERT_NOT_EQUAL(memcmp(alone->tokens, samples[0]->tokens, TOKENS * sizeof *alone->tokens), 0);
        free(alone);
    }
    for (int i = 0; i < N; i++) free(samples[i]);
}

static void samples_are_taken_or_refused_together(void) {
    enum { TOO_MANY = 400 };
    static cpa_llm_request *requests[TOO_MANY];
    const cpa_engine_options engine = {.size = sizeof engine,
                                       .num_blocks = 64,
                                       .max_queued_requests = 4,
                                       .skip_self_test = 1,
                                       .device = cpa_test_engine_options().device};
    const cpa_llm_options opened = {.size = sizeof opened, .engine = &engine};
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    const cpa_llm_request_options options = {.size = sizeof options, .max_tokens = 8, .sampling = &drawn};
    cpa_llm *small = NULL;
    cpa_llm_request *none;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL_FATAL(cpa_llm_open(FOLDER, &opened, &small, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_llm_submit_samples(small, &prompt, &options, TOO_MANY, requests, &err), CPA_BUSY);
    CU_ASSERT_PTR_NULL(requests[0]);
    CU_ASSERT_EQUAL(cpa_llm_wait(small, 0.05, &none, NULL), CPA_BUSY); /* nobody is told of those that were taken */
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit_samples(small, &prompt, &options, 2, requests, &err), CPA_OK);
    for (int i = 0; i < 2; i++) free(cpa_test_read_answer(requests[i]));
    CU_ASSERT_EQUAL(cpa_llm_submit_samples(small, &prompt, &options, 0, requests, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "samples: found 0, expected 1 or more");
    cpa_llm_close(small);
}

/* Tokens that were drawn are the prompt of another request, which says of each what was said when it was drawn. */
static void a_prompt_is_told_as_its_tokens_were(void) {
    enum { TOKENS = 30, TOP = 3 };
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    cpa_sampling sampling = drawn;
    sampling.prompt_logprobs = 0;
    cpa_llm_request_options options = {.size = sizeof options, .max_tokens = TOKENS, .sampling = &sampling};
    cpa_llm_request *request = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit(llm, &prompt, &options, &request, NULL), CPA_OK);
    int64_t before;
    uint32_t ids[64];
    const uint32_t *first = cpa_llm_prompt_ids(request, &before);
    CPA_ASSERT_ORDER(before + TOKENS, <=, 64);
    memcpy(ids, first, (size_t)before * sizeof *ids);
    cpa_test_answer *a = cpa_test_read_answer(request);
    memcpy(ids + before, a->tokens, TOKENS * sizeof *ids);
    const cpa_llm_prompt whole = {.size = sizeof whole, .ids = ids, .n_ids = before + TOKENS};
    cpa_token_ranks ranks[64];
    cpa_llm_piece piece;
    cpa_error err;
    sampling.prompt_logprobs = 1;
    sampling.top_prompt_logprobs = TOP;
    options.max_tokens = 1;
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit(llm, &whole, &options, &request, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_llm_next(request, 60, &piece, sizeof piece, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_llm_prompt_ranks(request, before, TOKENS, ranks, NULL), CPA_OK);
    for (int i = 0; i < TOKENS; i++) {
        CPA_ASSERT_ORDER(fabsf(ranks[i].logprob - a->logprobs[i]), <, 1e-4F);
        CPA_ASSERT_ORDER(ranks[i].rank, >=, 1);
        if (ranks[i].rank <= TOP) CU_ASSERT_EQUAL(ranks[i].top[ranks[i].rank - 1].token, a->tokens[i]);
        CPA_ASSERT_ORDER(ranks[i].top[0].logprob, >=, ranks[i].logprob);
        CU_ASSERT_EQUAL(ranks[i].top[TOP].token, CPA_NO_TOKEN);
    }
    CU_ASSERT_EQUAL(cpa_llm_prompt_ranks(request, 0, 1, ranks, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_llm_prompt_ranks(request, 1, before + TOKENS, ranks, &err), CPA_INVALID);
    cpa_llm_release(request);
    free(a);
}

static void refuse(const cpa_llm_request_options *options, cpa_status status, const char *line) {
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    cpa_llm_request *request = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_llm_submit(llm, &prompt, options, &request, &err), status);
    CU_ASSERT_PTR_NULL(request);
    if (!strstr(err.message, line)) CU_ASSERT_STRING_EQUAL(err.message, line);
}

static void bad_options_are_refused_by_one_line(void) {
    cpa_llm_request_options options = {.size = sizeof options, .constraint = "{\"choice\": []}"};
    cpa_sampling sampling = {.size = sizeof sampling, .ignore_eos = 1};
    refuse(&options, CPA_INVALID, "constraint: ");
    options.constraint = "red";
    refuse(&options, CPA_INVALID, "constraint: ");
    options.constraint = "{\"choice\": [\"red\"]}";
    options.sampling = &sampling;
    refuse(&options, CPA_INVALID, "constraint: found ignore_eos beside it, expected an answer that has an end");
    options.constraint = NULL;
    sampling = (cpa_sampling){.size = sizeof sampling, .prompt_logprobs = 1, .top_prompt_logprobs = 21};
    refuse(&options, CPA_INVALID, "top_prompt_logprobs: found 21, expected 0 to 20");
    options = (cpa_llm_request_options){.size = sizeof options, .transfer = CPA_TRANSFER_EXPORT};
    refuse(&options, CPA_INVALID, "transfer 0x2, expected bits of 0x3, and 0 without a block_store");

    cpa_llm_request *request = NULL;
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    cpa_token_ranks ranks;
    cpa_error err;
    options = (cpa_llm_request_options){.size = sizeof options, .max_tokens = 1};
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit(llm, &prompt, &options, &request, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_llm_prompt_ranks(request, 1, 1, &ranks, &err), CPA_UNSUPPORTED);
    cpa_llm_release(request);
}

static const cpa_test tests[] = {
    {"answers are what they are bound to", answers_are_what_they_are_bound_to},
    {"samples are those of the seeds that follow", samples_are_those_of_the_seeds_that_follow},
    {"samples are taken or refused together", samples_are_taken_or_refused_together},
    {"a prompt is told as its tokens were", a_prompt_is_told_as_its_tokens_were},
    {"bad options are refused by one line", bad_options_are_refused_by_one_line},
};

int main(int argc, char **argv) {
    const cpa_engine_options engine = cpa_test_engine_options();
    const cpa_llm_options options = {.size = sizeof options, .engine = &engine, .has_dtype = 1, .dtype = CPA_F32};
    cpa_error err;
    if (cpa_llm_open(FOLDER, &options, &llm, &err) != CPA_OK) {
        fprintf(stderr, "test_llm_options: %s\n", err.message);
        return 1;
    }
    const int code = cpa_test_main(argc, argv, "options of requests", tests, (int)(sizeof tests / sizeof tests[0]));
    cpa_llm_close(llm);
    return code;
}
