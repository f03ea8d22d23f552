/* Random schedules with everything the cache can do at once, beside the memory as it must be: a million steps, with
 * --fewer a fifth of them, with --fewest a twenty-fifth. */
#include <stdio.h>

#include "tests/fixtures/shadow_model.h"
#include "tests/fixtures/unit.h"

static int64_t most_steps = 1000000;

static void every_query_sees_its_own_tokens_and_every_block_has_its_owners(void) {
    shadow_result result = {0};
    uint64_t seed = 0;
    while (result.steps < most_steps && !result.violation[0]) shadow_run(++seed, &result);
    CU_ASSERT_STRING_EQUAL(result.violation, "");
    if (result.violation[0]) printf("\n    seed %lu: %s\n", (unsigned long)seed, result.violation);
    /* All of it took place. */
    CPA_ASSERT_ORDER(result.hits, >, result.steps / 100);
    CPA_ASSERT_ORDER(result.copies, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.swaps, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.evictions, >, result.steps / 100);
    CPA_ASSERT_ORDER(result.preemptions, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.nulled, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.failures, >, 0);
    CPA_ASSERT_ORDER(result.drawn, >, result.steps / 10);
    CPA_ASSERT_ORDER(result.accepted, >, result.steps / 100);
    CPA_ASSERT_ORDER(result.misplaced, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.drafts - result.accepted, >, result.steps / 100);
    CPA_ASSERT_ORDER(result.cuts, >, result.steps / 100);
    CPA_ASSERT_ORDER(result.ended, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.discarded, >, result.steps / 10000);
    CPA_ASSERT_ORDER(result.cut_chunks, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.unit_hits, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.unit_copies, >, result.steps / 10000);
    CPA_ASSERT_ORDER(result.unit_evictions, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.window_hits, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.window_nulled, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.window_swaps, >, result.steps / 10000);
    CPA_ASSERT_ORDER(result.fetches, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.loads, >, result.steps / 10000);
    CPA_ASSERT_ORDER(result.stores, >, result.steps / 1000);
    CPA_ASSERT_ORDER(result.unit_damages, >, result.steps / 100000);
    printf(
        "%ld steps, %ld hits (%ld), %ld copies (%ld), %ld swaps, %ld evictions (%ld of units over all ranks), %ld "
        "preemptions, %ld nulled (%ld hits, %ld nulled, %ld swaps with several groups), %ld failures, %ld drawn, %ld "
        "drafts, %ld accepted, %ld cuts, %ld ended, %ld "
        "discarded, %ld fetched, %ld loaded, %ld stored, %ld of these damaged ... ",
        (long)result.steps, (long)result.hits, (long)result.unit_hits, (long)result.copies, (long)result.unit_copies,
        (long)result.swaps, (long)result.evictions, (long)result.unit_evictions, (long)result.preemptions,
        (long)result.nulled, (long)result.window_hits, (long)result.window_nulled, (long)result.window_swaps,
        (long)result.failures, (long)result.drawn, (long)result.drafts, (long)result.accepted, (long)result.cuts,
        (long)result.ended, (long)result.discarded, (long)result.fetches, (long)result.loads, (long)result.stores,
        (long)result.unit_damages);
}

static const cpa_test tests[] = {
    {"every query sees its own tokens and every block has its owners",
     every_query_sees_its_own_tokens_and_every_block_has_its_owners},
};

int main(int argc, char **argv) {
    if (cpa_test_take_option(&argc, argv, "--fewer")) most_steps /= 5;
    if (cpa_test_take_option(&argc, argv, "--fewest")) most_steps /= 25;
    return cpa_test_main(argc, argv, "shadow", tests, 1);
}
