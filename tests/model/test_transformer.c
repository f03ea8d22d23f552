/* The transformer over context attention beside what Hugging Face transformers gave for the same files: logits and
 * greedy tokens of every family, however prompts are cut into chunks, whatever is computed beside them, by both
 * algorithms, on one rank or sharded. */
#include "src/model/transformer.h"

#include <stdlib.h>
#include <string.h>

#include "base/min_max.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/model/model_steps.h"

/* How the prompts are computed. */
typedef struct way {
    int64_t chunk;    /* tokens of a prompt in a step */
    int64_t together; /* the prompts' decoding: in the same steps; 0: one after the other */
    cpa_algorithm algorithm;
    cpa_placement_kind kind;
} way;
static const way plain = {.chunk = CPA_TEST_MAX_TOKENS, .together = 1, .algorithm = CPA_PASS_KV};

static void add_prompts(cpa_test_model *m, const cpa_test_expected *expected, way w, int forced) {
    cpa_test_model_clear(m);
    for (int p = 0; p < CPA_TEST_PROMPTS; p++) {
        const cpa_placement placement = {w.kind, p % m->map.cp_size};
        cpa_test_model_add(m, expected->prompts[p], expected->prompt_tokens[p], placement);
        if (forced) m->answers[p].given = expected->outputs[p];
    }
}

/* The next tokens of an answer that is not complete; 0 if it is. */
static int next_part(const cpa_test_model *m, int index, way w, cpa_test_part *part) {
    const cpa_test_answer *answer = &m->answers[index];
    if (answer->known - answer->prompt == CPA_TEST_OUTPUTS) return 0;
    const int64_t count = cpa_min64(w.chunk, answer->known - answer->computed);
    *part = (cpa_test_part){index, count, count == 1 ? CPA_PASS_Q : w.algorithm};
    return 1;
}

static void run(cpa_test_model *m, way w) {
    for (int first = 0, last; first < m->n_answers; first = last) {
        last = w.together ? m->n_answers : first + 1;
        for (int n = 1; n > 0;) {
            cpa_test_part parts[CPA_TEST_SEQUENCES];
            n = 0;
            for (int i = first; i < last; i++) n += next_part(m, i, w, &parts[n]);
            if (n > 0) cpa_test_model_step(m, parts, n);
        }
    }
}

/* The largest of the logits. */
static float best_of(const float *logits, int vocabulary) {
    float best = logits[0];
    for (int i = 1; i < vocabulary; i++) best = logits[i] > best ? logits[i] : best;
    return best;
}

/* Tokens and logits are those of transformers: the token's logit is the best but for the tolerance. */
static void check(const cpa_test_model *m, const cpa_test_expected *expected, const char *name, float tolerance) {
    float worst = 0;
    int wrong = 0;
    for (int p = 0; p < CPA_TEST_PROMPTS; p++) {
        const cpa_test_answer *answer = &m->answers[p];
        for (int i = 0; i < CPA_TEST_OUTPUTS; i++) {
            const float error = cpa_test_logits_error(expected, p, i, answer->logits[i]);
            if (!(error <= worst)) worst = error;
            const uint32_t token = expected->outputs[p][i];
            wrong += answer->tokens[answer->prompt + i] != token;
            wrong += best_of(answer->logits[i], expected->vocabulary) - answer->logits[i][token] > tolerance;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CPA_ASSERT_ORDER(worst, <=, tolerance);
    if (wrong > 0 || !(worst <= tolerance))
        printf("\n%s: %d tokens are wrong, logits are off by up to %g, allowed are %g\n", name, wrong, (double)worst,
               (double)tolerance);
}

static void greedy_tokens_are_those_of_transformers(void) {
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    for (int i = 0; cpa_test_models[i]; i++) {
        cpa_test_expected_read(cpa_test_models[i], expected);
        cpa_test_model_open(m, cpa_test_models[i], CPA_F32);
        add_prompts(m, expected, plain, 0);
        run(m, plain);
        check(m, expected, cpa_test_models[i], 1e-4f);
        cpa_test_model_close(m);
    }
    free(m);
    free(expected);
}

/* The logits of a run in some way are, to the bit where the device promises it, those of `reference`. */
static void check_same(const cpa_test_model *m, const cpa_test_answer *reference, const cpa_test_expected *expected,
                       const char *name) {
    if (!cpa_test_promises_bits()) {
        check(m, expected, name, 1e-4f);
        return;
    }
    for (int p = 0; p < CPA_TEST_PROMPTS; p++) {
        CU_ASSERT_EQUAL(memcmp(m->answers[p].logits, reference[p].logits, sizeof reference[p].logits), 0);
        CU_ASSERT_EQUAL(memcmp(m->answers[p].tokens, reference[p].tokens, sizeof reference[p].tokens), 0);
        CU_ASSERT_EQUAL(memcmp(m->answers[p].logprobs, reference[p].logprobs, sizeof reference[p].logprobs), 0);
    }
}

static void batches_chunks_and_algorithms_do_not_matter(void) {
    static const char *const names[] = {"tiny-qwen2", "tiny-llama", "tiny-qwen3-moe"};
    const way ways[] = {
        {7, 1, CPA_PASS_KV, CPA_SHARDED}, {64, 0, CPA_PASS_Q, CPA_SHARDED}, {1, 1, CPA_PASS_Q, CPA_SHARDED}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    cpa_test_answer *reference = malloc(CPA_TEST_PROMPTS * sizeof *reference);
    for (int i = 0; i < 3; i++) {
        cpa_test_expected_read(names[i], expected);
        cpa_test_model_open(m, names[i], CPA_F32);
        add_prompts(m, expected, plain, 0);
        run(m, plain);
        memcpy(reference, m->answers, CPA_TEST_PROMPTS * sizeof *reference);
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            add_prompts(m, expected, ways[w], 0);
            run(m, ways[w]);
            check_same(m, reference, expected, names[i]);
        }
        cpa_test_model_close(m);
    }
    free(reference);
    free(m);
    free(expected);
}

/* Decode, and prompts that come token by token, with slices of the weights; prompts in chunks with all of them. */
static void slices_of_the_weights_give_the_same_tokens(void) {
    const way ways[] = {
        {30, 1, CPA_PASS_KV, CPA_SHARDED}, {1, 1, CPA_PASS_Q, CPA_SHARDED}, {40, 0, CPA_PASS_Q, CPA_ON_RANK}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    for (int i = 0; cpa_test_models[i]; i++) {
        const way w = ways[i % 3];
        cpa_test_expected_read(cpa_test_models[i], expected);
        cpa_test_model_open_sliced(m, cpa_test_models[i], CPA_F32);
        CU_ASSERT_EQUAL(m->model.slices, m->map.cp_size > 1);
        add_prompts(m, expected, w, 0);
        run(m, w);
        check(m, expected, cpa_test_models[i], 1e-4f);
        cpa_test_model_close(m);
    }
    free(m);
    free(expected);
}

/* Ranks have different numbers of rows, in different numbers of pieces, or none at all. */
static void rows_that_are_sent_to_their_experts_keep_their_bits(void) {
    static const struct {
        const char *name;
        way how;
    } runs[] = {{"tiny-mixtral", {CPA_TEST_MAX_TOKENS, 1, CPA_PASS_KV, CPA_SHARDED}},
                {"tiny-qwen3-moe", {50, 0, CPA_PASS_KV, CPA_ON_RANK}},
                {"tiny-joined-moe", {40, 1, CPA_PASS_Q, CPA_SHARDED}}};
    if (!cpa_test_promises_bits()) return; /* on the host alone */
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    cpa_test_answer *reference = malloc(CPA_TEST_PROMPTS * sizeof *reference);
    for (int i = 0; i < 3; i++) {
        cpa_test_expected_read(runs[i].name, expected);
        for (int spread = 0; spread < 2; spread++) {
            cpa_test_model_open_spread(m, runs[i].name, CPA_F32, spread ? CPA_EXPERTS_SENT : CPA_EXPERTS_REPLICATED);
            add_prompts(m, expected, runs[i].how, 0);
            run(m, runs[i].how);
            if (!spread) memcpy(reference, m->answers, CPA_TEST_PROMPTS * sizeof *reference);
            if (spread) check_same(m, reference, expected, runs[i].name);
            cpa_test_model_close(m);
        }
    }
    free(reference);
    free(m);
    free(expected);
}

/* The same where sums have another order. tiny-qwen3-moe has 5 experts, which 2, 3 and 4 ranks do not divide. */
static void rows_that_are_gathered_give_the_tokens(void) {
    static const struct {
        const char *name;
        way how;
    } runs[] = {{"tiny-mixtral", {1, 1, CPA_PASS_Q, CPA_ON_RANK}},
                {"tiny-qwen3-moe", {50, 0, CPA_PASS_KV, CPA_SHARDED}},
                {"tiny-deepseek-v3", {CPA_TEST_MAX_TOKENS, 1, CPA_PASS_KV, CPA_SHARDED}}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    for (int i = 0; i < 3; i++) {
        cpa_test_expected_read(runs[i].name, expected);
        cpa_test_model_open_spread(m, runs[i].name, CPA_F32, CPA_EXPERTS_GATHERED);
        add_prompts(m, expected, runs[i].how, 0);
        run(m, runs[i].how);
        check(m, expected, runs[i].name, 1e-4f);
        cpa_test_model_close(m);
    }
    free(m);
    free(expected);
}

/* Prompts expand keys, decoding absorbs queries; steps have rows of either, and of both. */
static void latent_attention_gives_the_tokens_of_transformers(void) {
    const way ways[] = {
        {20, 1, CPA_PASS_KV, CPA_SHARDED}, plain, {1, 1, CPA_PASS_Q, CPA_SHARDED}, {64, 0, CPA_PASS_Q, CPA_ON_RANK}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    for (int i = 0; cpa_test_latent_models[i]; i++) {
        cpa_test_expected_read(cpa_test_latent_models[i], expected);
        cpa_test_model_open_sliced(m, cpa_test_latent_models[i], CPA_F32);
        CU_ASSERT_EQUAL(m->model.slices, CPA_SLICES_NONE);
        for (int w = 0; w < (i == 1 ? 4 : 1); w++) {
            add_prompts(m, expected, ways[w], 0);
            run(m, ways[w]);
            check(m, expected, cpa_test_latent_models[i], 1e-4f);
        }
        cpa_test_model_close(m);
    }
    free(m);
    free(expected);
}

static void sequences_may_lie_on_one_rank(void) {
    const way local = {.chunk = 50, .together = 1, .algorithm = CPA_PASS_KV, .kind = CPA_ON_RANK};
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    cpa_test_expected_read("tiny-mistral", expected);
    cpa_test_model_open(m, "tiny-mistral", CPA_F32);
    add_prompts(m, expected, local, 0);
    run(m, local);
    check(m, expected, "tiny-mistral", 1e-4f);
    cpa_test_model_close(m);
    free(m);
    free(expected);
}

/* In the narrow dtypes, fed with the tokens of transformers. Where two experts are as good for a token as its dtype can
 * tell, it may have another one than in fp32, which is more than rounding. On devices few rows go by fused products, also
 * where experts are spread. */
static void narrow_dtypes_are_as_near_as_they_can_be(void) {
    static const struct {
        const char *name;
        cpa_dtype dtype;
        float tolerance;
        cpa_experts_over_ranks experts;
    } runs[] = {{"tiny-llama", CPA_BF16, 0.25f, CPA_EXPERTS_REPLICATED},
                {"tiny-qwen3", CPA_BF16, 0.25f, CPA_EXPERTS_REPLICATED},
                {"tiny-llama2", CPA_F16, 0.03f, CPA_EXPERTS_REPLICATED},
                {"tiny-qwen3-moe", CPA_BF16, 0.4f, CPA_EXPERTS_GATHERED},
                {"tiny-joined-moe", CPA_F16, 0.03f, CPA_EXPERTS_REPLICATED},
                {"tiny-joined-moe", CPA_F16, 0.03f, CPA_EXPERTS_GATHERED}};
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        cpa_test_expected_read(runs[i].name, expected);
        cpa_test_model_open_spread(m, runs[i].name, runs[i].dtype, runs[i].experts);
        add_prompts(m, expected, plain, 1);
        run(m, plain);
        check(m, expected, runs[i].name, runs[i].tolerance);
        cpa_test_model_close(m);
    }
    free(m);
    free(expected);
}

/* Draws depend on seed and position, not on what is beside them. */
static void draws_do_not_depend_on_the_batch(void) {
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_model *m = malloc(sizeof *m);
    uint32_t drawn[3][CPA_TEST_MAX_TOKENS];
    const way alone = {.chunk = 9, .together = 0, .algorithm = CPA_PASS_Q};
    cpa_test_expected_read("tiny-qwen3", expected);
    cpa_test_model_open(m, "tiny-qwen3", CPA_F32);
    for (int turn = 0; turn < 3; turn++) {
        add_prompts(m, expected, plain, 0);
        for (int p = 0; p < CPA_TEST_PROMPTS; p++) {
            m->answers[p].temperature = 1.5f;
            m->answers[p].seed = turn < 2 ? 11 : 12;
        }
        run(m, turn == 0 ? plain : alone);
        memcpy(drawn[turn], m->answers[1].tokens, sizeof drawn[turn]);
    }
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(memcmp(drawn[0], drawn[1], sizeof drawn[0]), 0);
    CU_ASSERT_NOT_EQUAL(memcmp(drawn[1], drawn[2], sizeof drawn[0]), 0);
    CU_ASSERT_NOT_EQUAL(
        memcmp(drawn[0] + expected->prompt_tokens[1], expected->outputs[1], sizeof expected->outputs[1]), 0);
    cpa_test_model_close(m);
    free(m);
    free(expected);
}

static const cpa_test TESTS[] = {
    {"greedy tokens and logits of all families are those of transformers", greedy_tokens_are_those_of_transformers},
    {"batches, chunks and algorithms do not matter", batches_chunks_and_algorithms_do_not_matter},
    {"slices of the weights give the same tokens", slices_of_the_weights_give_the_same_tokens},
    {"rows that are sent to their experts keep their bits", rows_that_are_sent_to_their_experts_keep_their_bits},
    {"rows that are gathered for experts give the tokens of transformers", rows_that_are_gathered_give_the_tokens},
    {"latent attention gives the tokens of transformers", latent_attention_gives_the_tokens_of_transformers},
    {"sequences may lie on one rank", sequences_may_lie_on_one_rank},
    {"bf16 and fp16 are as near as they can be", narrow_dtypes_are_as_near_as_they_can_be},
    {"draws do not depend on the batch", draws_do_not_depend_on_the_batch},
};

CPA_MPI_DEVICE_TEST_MAIN("transformer", TESTS)
