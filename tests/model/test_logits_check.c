/* The comparison of a run's logits with a plain forward: right ones of every dtype pass, wrong ones are found, and the
 * sample is the same on any number of ranks. */
#include "src/model/logits_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/min_max.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/model/model_steps.h"

enum { MOST = 20 };

/* Request r is the answer to prompt r, fed with the tokens of transformers. */
static uint32_t token_at(void *ctx, uint64_t request, int64_t position) {
    const cpa_test_expected *expected = ctx;
    const int64_t prompt = expected->prompt_tokens[request];
    return position < prompt ? expected->prompts[request][position] : expected->outputs[request][position - prompt];
}

static int64_t count(void *ctx, uint64_t request) {
    const cpa_test_expected *expected = ctx;
    return expected->prompt_tokens[request] + CPA_TEST_OUTPUTS;
}

/* The same, as if the requests had ended four tokens earlier. */
static int64_t count_less(void *ctx, uint64_t request) {
    return count(ctx, request) - 4;
}

/* Runs the prompts in a dtype and gathers a sample on rank 0. */
static void run(const char *name, cpa_dtype dtype, const cpa_test_expected *expected, cpa_logits_sample *sample) {
    cpa_test_model *m = malloc(sizeof *m);
    cpa_control control;
    cpa_test_model_open(m, name, dtype);
    CU_ASSERT_EQUAL(cpa_logits_sample_open(MOST, expected->vocabulary, 5, sample, NULL), CPA_OK);
    m->also_observe = cpa_logits_sample_take;
    m->also_ctx = sample;
    for (int p = 0; p < CPA_TEST_PROMPTS; p++) {
        cpa_test_model_add(m, expected->prompts[p], expected->prompt_tokens[p], (cpa_placement){CPA_SHARDED, 0});
        m->answers[p].given = expected->outputs[p];
    }
    for (int i = 0; i < CPA_TEST_OUTPUTS; i++) {
        cpa_test_part parts[CPA_TEST_PROMPTS];
        for (int p = 0; p < CPA_TEST_PROMPTS; p++)
            parts[p] = (cpa_test_part){p, m->answers[p].known - m->answers[p].computed, CPA_PASS_Q};
        cpa_test_model_step(m, parts, CPA_TEST_PROMPTS);
    }
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_logits_sample_gather(sample, &control, NULL), CPA_OK);
    cpa_control_close(&control);
    cpa_test_model_close(m);
    free(m);
}

static cpa_logits_verdict verdict_on(const char *name, cpa_dtype dtype, const cpa_logits_sample *sample,
                                     cpa_test_expected *expected, int64_t (*how_many)(void *, uint64_t)) {
    cpa_model_config config;
    cpa_safetensors *files = NULL;
    cpa_logits_verdict verdict = {.tokens = -1};
    cpa_error err = {CPA_OK, ""};
    const cpa_logits_tokens tokens = {expected, token_at, how_many};
    CU_ASSERT_EQUAL(cpa_model_config_load(cpa_test_model_folder(name), &config, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_safetensors_open(cpa_test_model_folder(name), &files, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_logits_check(&config, files, dtype, sample, &tokens, &verdict, &err), CPA_OK);
    cpa_safetensors_close(files);
    return verdict;
}

static void right_logits_pass(void) {
    static const struct {
        const char *name;
        cpa_dtype dtype;
    } runs[] = {{"tiny-llama", CPA_F32}, {"tiny-qwen3", CPA_BF16}, {"tiny-sharded", CPA_F16}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        cpa_logits_sample sample;
        cpa_test_expected_read(runs[i].name, expected);
        run(runs[i].name, runs[i].dtype, expected, &sample);
        if (cpa_test_rank() == 0) {
            cpa_logits_verdict verdict = verdict_on(runs[i].name, runs[i].dtype, &sample, expected, count);
            CU_ASSERT(verdict.tokens > MOST / 2 && verdict.violations == 0 && verdict.worst_error > 0);
            CPA_ASSERT_ORDER(verdict.max_error, <, (runs[i].dtype == CPA_F32 ? 1e-4 : 0.3));
        }
        cpa_logits_sample_close(&sample);
    }
    free(expected);
}

static void wrong_logits_are_found(void) {
    cpa_logits_sample sample;
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_expected_read("tiny-llama", expected);
    run("tiny-llama", CPA_BF16, expected, &sample);
    if (cpa_test_rank() == 0) {
        float *row = sample.logits + 3 * expected->vocabulary;
        const cpa_logits_record record = sample.records[3];
        for (int i = 0; i < expected->vocabulary; i++) row[i] += i % 2 ? 0.5f : -0.5f;
        cpa_logits_verdict verdict = verdict_on("tiny-llama", CPA_BF16, &sample, expected, count);
        CU_ASSERT(verdict.violations == 1 && verdict.max_error > 0.5);
        CU_ASSERT(verdict.worst_request == record.request && verdict.worst_position == record.position);
        row[5] = NAN;
        verdict = verdict_on("tiny-llama", CPA_BF16, &sample, expected, count);
        CU_ASSERT(verdict.violations == 1 && isnan(verdict.max_error));
        CU_ASSERT(verdict.worst_request == record.request && verdict.worst_position == record.position);
    }
    cpa_logits_sample_close(&sample);
    free(expected);
}

/* ---- choices of experts ---- */

/* The last prompt of a model with experts, and how its tokens choose these. */
enum { CHOOSING = CPA_TEST_PROMPTS - 1 };
typedef struct choosing {
    cpa_model_config config;
    cpa_safetensors *files;
    cpa_test_expected expected;
    int64_t positions[CPA_TEST_MAX_TOKENS], count;
    double *biased, *rounded; /* [layers, count, experts], of the reference, and of one that rounds to bf16 */
} choosing;

static void forward(const choosing *c, cpa_dtype dtype, const int64_t *position, int64_t n, cpa_plain_choices choices,
                    float *logits) {
    const cpa_plain_question question = {.config = &c->config,
                                         .files = c->files,
                                         .dtype = dtype,
                                         .tokens = c->expected.prompts[CHOOSING],
                                         .count = c->count,
                                         .positions = position,
                                         .n_positions = n,
                                         .choices = choices};
    CU_ASSERT_EQUAL(cpa_plain_forward(&question, logits, NULL), CPA_OK);
}

static choosing *open_choosing(const char *name) {
    choosing *c = calloc(1, sizeof *c);
    if (!c) abort();
    cpa_test_expected_read(name, &c->expected);
    CU_ASSERT_EQUAL(cpa_model_config_load(cpa_test_model_folder(name), &c->config, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_safetensors_open(cpa_test_model_folder(name), &c->files, NULL), CPA_OK);
    c->count = c->expected.prompt_tokens[CHOOSING];
    for (int64_t i = 0; i < c->count; i++) c->positions[i] = i;
    const size_t scores = (size_t)(c->config.layers * c->count * c->config.moe.experts);
    float *logits = calloc((size_t)(c->count * c->config.vocabulary), sizeof *logits);
    c->biased = calloc(scores, sizeof *c->biased);
    c->rounded = calloc(scores, sizeof *c->rounded);
    forward(c, CPA_F32, c->positions, c->count, (cpa_plain_choices){.biased = c->biased}, logits);
    forward(c, CPA_BF16, c->positions, c->count, (cpa_plain_choices){.biased = c->rounded}, logits);
    free(logits);
    return c;
}

static void close_choosing(choosing *c) {
    cpa_safetensors_close(c->files);
    free(c->biased);
    free(c->rounded);
    free(c);
}

/* By how much the scores of a token in a layer would have to move for a turn, in multiples of what rounding moves them
 * by. */
static double times_of(const choosing *c, cpa_turned_choice turned) {
    const int32_t experts = c->config.moe.experts;
    const int64_t at = (turned.layer * c->count + turned.position) * experts;
    double moved = 0;
    for (int32_t e = 0; e < experts; e++) moved = fmax(moved, fabs(c->biased[at + e] - c->rounded[at + e]));
    return cpa_plain_turn_distance(&c->config.moe, c->biased + at, turned.turn) / moved;
}

/* The verdict on logits in bf16 of a token, and so many behind it, that are those of the reference, but that the token
 * has taken another choice. */
static cpa_logits_verdict verdict_on_turned(choosing *c, cpa_turned_choice turned, int64_t behind, float spoiled) {
    const int64_t n = cpa_min64(1 + behind, c->count - turned.position), vocabulary = c->config.vocabulary;
    float *logits = calloc((size_t)(n * vocabulary), sizeof *logits);
    cpa_logits_record records[CPA_TEST_MAX_TOKENS];
    cpa_logits_verdict verdict = {.tokens = -1};
    const cpa_logits_tokens tokens = {&c->expected, token_at, count};
    const cpa_logits_sample sample = {
        .vocabulary = vocabulary, .most = n, .count = n, .records = records, .logits = logits};
    for (int64_t i = 0; i < n; i++)
        records[i] = (cpa_logits_record){.request = CHOOSING, .position = turned.position + i};
    forward(c, CPA_F32, &c->positions[turned.position], n, (cpa_plain_choices){.turned = &turned, .n_turned = 1},
            logits);
    for (int64_t i = 0; i < vocabulary; i++) logits[i] += i % 2 ? spoiled : -spoiled;
    CU_ASSERT_EQUAL(cpa_logits_check(&c->config, c->files, CPA_BF16, &sample, &tokens, &verdict, NULL), CPA_OK);
    CU_ASSERT_EQUAL(verdict.tokens, n);
    free(logits);
    return verdict;
}

/* Choices that rounding allows are right, if the logits are those that they give, also of the tokens behind. */
static void near_choices_of_experts_are_right(void) {
    static const char *const names[] = {"tiny-deepseek-v3", "tiny-qwen3-moe"};
    int64_t behind = 0;
    if (cpa_comm_size(cpa_test_comm()) > 1) return; /* the same on any number of ranks */
    for (int i = 0; i < 2; i++) {
        choosing *c = open_choosing(names[i]);
        int right = 0;
        for (int64_t at = 0; at < c->count * c->config.layers && right < 6; at++) {
            const cpa_turned_choice turned = {CPA_TURN_EXPERT, (int32_t)(at % c->config.layers), at / c->config.layers};
            if (!c->config.moe.sparse[turned.layer] || !(times_of(c, turned) < 2.9)) continue;
            const cpa_logits_verdict verdict = verdict_on_turned(c, turned, 0, 0);
            CU_ASSERT_EQUAL(verdict.violations, 0);
            if (verdict.turned == 0) continue; /* it counts too little */
            CU_ASSERT_EQUAL(verdict_on_turned(c, turned, 0, 1).violations, 1);
            const cpa_logits_verdict more = verdict_on_turned(c, turned, 8, 0);
            CU_ASSERT_EQUAL(more.violations, 0);
            behind += more.turned - 1;
            right++;
        }
        CU_ASSERT(right > 0);
        close_choosing(c);
    }
    CU_ASSERT(behind > 0);
}

/* Where rounding does not come near them, they are wrong. */
static void far_choices_of_experts_are_wrong(void) {
    if (cpa_comm_size(cpa_test_comm()) > 1) return; /* the same on any number of ranks */
    choosing *c = open_choosing("tiny-deepseek-v3");
    int wrong = 0;
    for (int64_t at = 0; at < c->count * c->config.layers && wrong < 3; at++) {
        const cpa_turned_choice turned = {CPA_TURN_EXPERT, (int32_t)(at % c->config.layers), at / c->config.layers};
        if (!c->config.moe.sparse[turned.layer]) continue;
        const double times = times_of(c, turned);
        if (!(times > 30) || isinf(times)) continue;
        const cpa_logits_verdict verdict = verdict_on_turned(c, turned, 0, 0);
        CU_ASSERT_EQUAL(verdict.turned, 0);
        wrong += verdict.violations == 1;
    }
    CU_ASSERT_EQUAL(wrong, 3);
    close_choosing(c);
}

/* The sample follows from the hashes alone, and what lies behind the end of a request is no part of it. */
static void samples_do_not_depend_on_ranks(void) {
    cpa_logits_sample sample;
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_expected_read("tiny-llama2", expected);
    run("tiny-llama2", CPA_F32, expected, &sample);
    if (cpa_test_rank() == 0) {
        int64_t less_than_kept = 0;
        uint64_t largest = 0;
        CU_ASSERT_EQUAL(sample.count, MOST);
        for (int64_t i = 0; i < sample.count; i++)
            if (sample.records[i].hash > largest) largest = sample.records[i].hash;
        for (uint64_t p = 0; p < CPA_TEST_PROMPTS; p++)
            for (int64_t i = 0; i < CPA_TEST_OUTPUTS; i++)
                less_than_kept += cpa_logits_hash(5, p, expected->prompt_tokens[p] - 1 + i) <= largest;
        CU_ASSERT_EQUAL(less_than_kept, MOST);
        cpa_logits_verdict all = verdict_on("tiny-llama2", CPA_F32, &sample, expected, count);
        cpa_logits_verdict less = verdict_on("tiny-llama2", CPA_F32, &sample, expected, count_less);
        CU_ASSERT(all.tokens > less.tokens && less.tokens > 0 && all.violations == 0 && less.violations == 0);
    }
    cpa_logits_sample_close(&sample);
    free(expected);
}

static const cpa_test TESTS[] = {
    {"right logits pass in every dtype", right_logits_pass},
    {"wrong logits are found", wrong_logits_are_found},
    {"near choices of experts are right", near_choices_of_experts_are_right},
    {"far choices of experts are wrong", far_choices_of_experts_are_wrong},
    {"samples do not depend on ranks", samples_do_not_depend_on_ranks},
};

CPA_MPI_DEVICE_TEST_MAIN("logits check", TESTS)
