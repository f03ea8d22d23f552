/* Plans of prompts that come from a store of blocks, and go there. */
#include "src/cache/parcel.h"
#include "src/schedule/scheduler_transfer.h"
#include "tests/fixtures/scheduler_fixture.h"

static void setup(fixture *f, int32_t ranks, int32_t block_size) {
    const cpa_scheduler_options options = options_of((cpa_owner_map){ranks, block_size}, block_size, 16, 64, 4);
    prepare(f, &options);
    f->options.local_context = CPA_LOCAL_CONTEXT_NONE;
    f->options.identity = "a shape";
    f->options.model = "a model";
    begin(f);
}

static cpa_scheduler_request importing(uint64_t id, int64_t prompt, int64_t output) {
    cpa_scheduler_request request = asked(id, prompt, output);
    request.imports = 1;
    return request;
}

static cpa_scheduler_request exporting(uint64_t id, int64_t prompt, int64_t output) {
    cpa_scheduler_request request = asked(id, prompt, output);
    request.exports = 1;
    return request;
}

/* The plan has one transfer, of so many tokens and blocks. */
static void check_transfer(const fixture *f, uint32_t imports, int64_t tokens, int64_t blocks) {
    CU_ASSERT_EQUAL_FATAL(f->plan.n_transfers, 1);
    CU_ASSERT_EQUAL((f->plan.transfers[0].imports != 0), imports);
    CU_ASSERT_EQUAL(f->plan.transfers[0].tokens, tokens);
    CU_ASSERT_EQUAL(f->plan.transfers[0].n_blocks, blocks);
}

static void check_chunk(const fixture *f, int64_t start, int64_t count) {
    CU_ASSERT_EQUAL_FATAL(f->plan.n_chunks, 1);
    CU_ASSERT_EQUAL(f->plan.chunks[0].start, start);
    CU_ASSERT_EQUAL(f->plan.chunks[0].count, count);
}

static void a_prompt_that_comes_is_given_tokens_two_plans_later(void) {
    fixture f;
    setup(&f, 2, 4);
    add(&f, importing(0, 22, 3), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    check_transfer(&f, 1, 21, 6);
    CU_ASSERT_EQUAL(f.next, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    CU_ASSERT_EQUAL(f.plan.n_transfers, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 21, 1);
    CU_ASSERT(f.plan.chunks[0].flags & CPA_CHUNK_FIRST);
    CU_ASSERT(f.plan.chunks[0].flags & CPA_CHUNK_EMITS);
    CU_ASSERT_EQUAL(f.stats.imported_tokens, 21);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.used_blocks[0], 0);
    teardown(&f);
}

static void what_does_not_come_is_asked_for_once_more_and_then_computed(void) {
    fixture f;
    setup(&f, 2, 4);
    add(&f, importing(0, 22, 3), 0);
    step(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_import_failed(f.scheduler, 0, 17, NULL), CPA_OK);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    check_transfer(&f, 1, 17, 5);
    CU_ASSERT_EQUAL(f.stats.imported_tokens, 17);
    step(&f, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_import_failed(f.scheduler, 0, 9, NULL), CPA_OK);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.n_transfers, 0);
    check_chunk(&f, 0, 22);
    CU_ASSERT_EQUAL(f.stats.imported_tokens, 0);
    CU_ASSERT_EQUAL(f.stats.import_failures, 2);
    CU_ASSERT_EQUAL(cpa_scheduler_import_failed(f.scheduler, 7, 0, NULL), CPA_INVALID);
    finish(&f);
    teardown(&f);
}

static void the_rest_of_a_prompt_is_computed_behind_what_came(void) {
    fixture f;
    setup(&f, 1, 4);
    add(&f, importing(0, 22, 3), 0);
    step(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_import_failed(f.scheduler, 0, 10, NULL), CPA_OK);
    step(&f, 0);
    step(&f, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 10, 12);
    finish(&f);
    teardown(&f);
}

/* What was to come has gone with its blocks before the rest of it is found missing. */
static void an_import_that_fails_after_a_preemption_does_not_count(void) {
    fixture f;
    setup(&f, 1, 4);
    add(&f, asked(0, 31, 9), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    add(&f, importing(1, 32, 3), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1); /* each has 8 of the 16 blocks */
    check_transfer(&f, 1, 31, 8);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.stats.preemptions, 1);
    CU_ASSERT_EQUAL(cpa_scheduler_import_failed(f.scheduler, 1, 9, NULL), CPA_OK);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.import_failures, 1);
    CU_ASSERT_EQUAL(f.stats.imported_tokens, 9);
    teardown(&f);
}

static void a_prompt_goes_out_once_with_its_first_token(void) {
    fixture f;
    setup(&f, 2, 4);
    f.common[0] = 0;
    add(&f, exporting(0, 70, 3), 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1); /* 64 tokens */
    CU_ASSERT_EQUAL(f.plan.n_transfers, 0);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_transfer(&f, 0, 70, 18);
    for (int64_t i = 0; i < 18; i++) {
        const cpa_plan_transfer_block *block = &f.plan.transfer_blocks[i];
        CU_ASSERT_EQUAL(block->entry, i % 9);
        CU_ASSERT_EQUAL(block->rank, i / 9);
    }
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.n_transfers, 0);
    finish(&f);
    teardown(&f);
}

static void one_job_asks_for_what_another_has_put(void) {
    fixture out, in;
    setup(&out, 1, 4);
    setup(&in, 2, 8);
    add(&out, exporting(0, 38, 1), 0);
    add(&in, importing(0, 38, 1), 0);
    step(&out, 0);
    step(&in, 0);
    CU_ASSERT_EQUAL_FATAL(out.plan.n_transfers, 1);
    CU_ASSERT_EQUAL_FATAL(in.plan.n_transfers, 1);
    CU_ASSERT_EQUAL(
        memcmp(out.plan.token_ids + out.plan.transfers[0].digests, in.plan.token_ids + in.plan.transfers[0].digests,
               3 * CPA_PLAN_DIGEST_WORDS * sizeof(uint32_t)),
        0);
    finish(&out);
    finish(&in);
    teardown(&out);
    teardown(&in);
}

/* Those that draft are no part of the identity. */
static void what_other_layers_have_put_is_not_asked_for(void) {
    fixture jobs[2];
    uint32_t digests[2][CPA_PLAN_DIGEST_WORDS];
    for (int i = 0; i < 2; i++) {
        fixture *f = &jobs[i];
        const cpa_scheduler_options options = options_of((cpa_owner_map){1, 4}, 4, 16, 64, 4);
        prepare(f, &options);
        f->options.identity = "a shape";
        f->options.store_layers = (uint64_t)i;
        begin(f);
        add(f, exporting(0, 38, 1), 0);
        step(f, 0);
        CU_ASSERT_EQUAL_FATAL(f->plan.n_transfers, 1);
        memcpy(digests[i], f->plan.token_ids + f->plan.transfers[0].digests, sizeof digests[i]);
        finish(f);
        teardown(f);
    }
    CU_ASSERT(memcmp(digests[0], digests[1], sizeof digests[0]) != 0);
}

static void what_is_found_here_does_not_come(void) {
    fixture f;
    setup(&f, 2, 4);
    add(&f, asked(0, 22, 1), 22);
    finish(&f);
    add(&f, importing(1, 22, 2), 22);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    CU_ASSERT_EQUAL(f.plan.n_transfers, 0);
    check_chunk(&f, 21, 1);
    finish(&f);
    teardown(&f);
}

static void what_is_found_here_is_shared_and_the_rest_comes(void) {
    fixture f;
    setup(&f, 2, 4);
    add(&f, asked(0, 22, 1), 22);
    finish(&f);
    add(&f, importing(1, 40, 2), 22);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    check_transfer(&f, 1, 39, 5); /* 10 blocks, of which 5 are found */
    for (int64_t i = 0; i < 5; i++) {
        const cpa_plan_transfer_block *block = &f.plan.transfer_blocks[i];
        CPA_ASSERT_ORDER(block->entry * 2 + block->rank, >=, 4);
    }
    CU_ASSERT_EQUAL(f.stats.imported_tokens, 19);
    step(&f, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_import_failed(f.scheduler, 1, 25, NULL), CPA_OK);
    CU_ASSERT_EQUAL(step(&f, 0), 0);
    check_transfer(&f, 1, 25, 2);
    CU_ASSERT_EQUAL(f.stats.imported_tokens, 5);
    step(&f, 0);
    CU_ASSERT_EQUAL(cpa_scheduler_import_failed(f.scheduler, 1, 23, NULL), CPA_OK);
    CU_ASSERT_EQUAL(step(&f, 0), 1);
    check_chunk(&f, 20, 20);
    CU_ASSERT_EQUAL(f.stats.imported_tokens, 0);
    finish(&f);
    CU_ASSERT_EQUAL(f.stats.used_blocks[0], 0);
    teardown(&f);
}

static void others_find_what_came_once_it_counts(void) {
    fixture f;
    setup(&f, 2, 4);
    add(&f, importing(0, 22, 2), 22);
    step(&f, 0);
    add(&f, asked(1, 22, 1), 22);
    CU_ASSERT_EQUAL(step(&f, 0), 1); /* it computes: nobody is told of blocks that may not have come */
    check_chunk(&f, 0, 22);
    finish(&f);
    teardown(&f);
    setup(&f, 2, 4);
    add(&f, importing(0, 22, 2), 22);
    finish(&f);
    add(&f, asked(1, 23, 1), 22);
    step(&f, 0);
    check_chunk(&f, 20, 3);
    finish(&f);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"a prompt that comes is given tokens two plans later", a_prompt_that_comes_is_given_tokens_two_plans_later},
    {"what does not come is asked for once more, and then computed",
     what_does_not_come_is_asked_for_once_more_and_then_computed},
    {"the rest of a prompt is computed behind what came", the_rest_of_a_prompt_is_computed_behind_what_came},
    {"an import that fails after a preemption does not count", an_import_that_fails_after_a_preemption_does_not_count},
    {"a prompt goes out once, with its first token", a_prompt_goes_out_once_with_its_first_token},
    {"one job asks for what another has put", one_job_asks_for_what_another_has_put},
    {"what other layers have put is not asked for", what_other_layers_have_put_is_not_asked_for},
    {"what is found here does not come", what_is_found_here_does_not_come},
    {"what is found here is shared, and the rest comes", what_is_found_here_is_shared_and_the_rest_comes},
    {"others find what came, once it counts", others_find_what_came_once_it_counts},
};

CPA_TEST_MAIN("transfer plans", tests)
