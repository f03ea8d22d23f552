/* Bugs in the scheduler that are switched on one by one: the shadow model sees each within a thousand seeds. */
#include <stdio.h>

#include "tests/faults/fault.h"
#include "tests/fixtures/shadow_model.h"
#include "tests/fixtures/unit.h"

static void is_caught(cpa_fault fault) {
    shadow_result result = {0};
    uint64_t seed = 0;
    cpa_fault_armed = fault;
    while (seed < 1000 && !result.violation[0]) shadow_run(++seed, &result);
    cpa_fault_armed = CPA_FAULT_NONE;
    CU_ASSERT(result.violation[0] != 0);
    printf("seed %lu: %s ... ", (unsigned long)seed, result.violation);
}

static void a_hash_that_outlives_its_block_is_caught(void) {
    is_caught(CPA_FAULT_STALE_HASH);
}
static void an_owner_that_is_not_counted_is_caught(void) {
    is_caught(CPA_FAULT_UNCOUNTED_OWNER);
}
static void a_leaked_block_is_caught(void) {
    is_caught(CPA_FAULT_LEAKED_BLOCK);
}
static void a_block_reused_while_a_copy_reads_it_is_caught(void) {
    is_caught(CPA_FAULT_EARLY_REUSE);
}
static void a_lost_sequence_is_caught(void) {
    is_caught(CPA_FAULT_LOST_SEQUENCE);
}
static void a_waiter_that_is_never_woken_is_caught(void) {
    is_caught(CPA_FAULT_STARVED_WAITER);
}
static void a_unit_whose_blocks_are_out_of_step_is_caught(void) {
    is_caught(CPA_FAULT_UNEVEN_UNIT);
}
static void a_block_found_before_its_drafts_are_accepted_is_caught(void) {
    is_caught(CPA_FAULT_EARLY_HASH);
}

static const cpa_test tests[] = {
    {"a hash that outlives its block is caught", a_hash_that_outlives_its_block_is_caught},
    {"an owner that is not counted is caught", an_owner_that_is_not_counted_is_caught},
    {"a leaked block is caught", a_leaked_block_is_caught},
    {"a block reused while a copy reads it is caught", a_block_reused_while_a_copy_reads_it_is_caught},
    {"a lost sequence is caught", a_lost_sequence_is_caught},
    {"a unit whose blocks are out of step is caught", a_unit_whose_blocks_are_out_of_step_is_caught},
    {"a waiter that is never woken is caught", a_waiter_that_is_never_woken_is_caught},
    {"a block found before its drafts are accepted is caught", a_block_found_before_its_drafts_are_accepted_is_caught},
};

CPA_TEST_MAIN("shadow faults", tests)
