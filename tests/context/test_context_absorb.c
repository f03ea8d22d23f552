/* Context attention whose rows ask as narrow as heads are and absorb at the rank that has the keys, by either algorithm,
 * on one rank and replicated, against float64 of rows that come folded. */
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/latent_site.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { EXPANDED = CPA_TEST_EXPANDED };

/* Rows of decode that ask as narrow as heads are. */
static const cpa_test_latent_chunk NARROW[] = {{0, 419, 1, CPA_PASS_Q, EXPANDED},
                                               {1, 227, 3, CPA_PASS_Q, EXPANDED},
                                               {2, 89, 1, CPA_PASS_Q, EXPANDED},
                                               {3, 332, 1, CPA_PASS_KV, EXPANDED},
                                               {4, 2, 1, CPA_PASS_Q, EXPANDED}};

static void run_absorbing(cpa_test_latent_site *s, double slack) {
    cpa_test_latent_run(s, cpa_test_latent_prompts, slack, NULL);
    cpa_test_latent_run(s, CPA_TEST_LATENT_STEP(NARROW), slack, NULL);
    cpa_test_latent_run(s, cpa_test_latent_mixed, slack, NULL);
}

/* What is folded at the rank that has the keys is the attention of rows that come folded; but for sums in another order,
 * where that decides how a folded query is rounded to 16 bits. */
static void narrow_queries_absorb_where_the_keys_are(void) {
    for (int i = 0; i < CPA_TEST_LATENT_SHAPES; i += 2) {
        cpa_test_latent_site s;
        cpa_test_latent_open(&s, cpa_test_latent_shapes[i], CPA_TEST_LATENT_SEQUENCES, CPA_ABSORB_ALWAYS, NULL);
        run_absorbing(&s, i == 0 ? 0 : 0.01);
        s.mask = (cpa_mask){.causal = 1, .window = 70, .sinks = 3};
        if (i == 0) run_absorbing(&s, 0);
        cpa_test_latent_close(&s);
    }
    cpa_context_options options = {.rows = CPA_ROWS_REPLICATED};
    cpa_test_latent_site s;
    cpa_test_latent_open(&s, cpa_test_latent_shapes[0], CPA_TEST_LATENT_SEQUENCES, CPA_ABSORB_ALWAYS, &options);
    cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(NARROW), 0, NULL);
    cpa_test_latent_run(&s, cpa_test_latent_mixed, 0, NULL);
    cpa_test_latent_close(&s);
}

/* Segments that come one after the other, and those of all peers at once, join what was there. */
static void absorbed_rows_go_on_from_segment_to_segment(void) {
    for (int gathers = 0; gathers < 2; gathers++) {
        cpa_test_latent_site s;
        cpa_error err;
        cpa_test_latent_open(&s, cpa_test_latent_shapes[0], CPA_TEST_LATENT_SEQUENCES, CPA_ABSORB_ALWAYS, NULL);
        cpa_context_options options = cpa_test_latent_options(&s.latents);
        cpa_context_destroy(s.context);
        if (gathers) s.device->caps.bit_exact = 0, s.device->caps.split_tokens = 1;
        options.staging_bytes = cpa_context_least_staging(s.device, &options, cpa_test_ranks());
        CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), s.device, &options, &s.context, &err), CPA_OK);
        run_absorbing(&s, 0);
        cpa_test_latent_close(&s);
    }
}

/* The results of a step, and how many bytes they have. */
static int64_t results_of(cpa_test_latent_site *s, cpa_test_latent_step of, char **results) {
    int64_t chunk = 0, position = -1, rows = 0;
    cpa_test_latent_run(s, of, 0.05, results);
    while (cpa_test_latent_next_row(s, of, EXPANDED, &chunk, &position)) rows++;
    return rows * s->latents.shape.heads * s->latents.shape.value * cpa_dtype_bytes(s->latents.shape.dtype);
}

/* With latents of 128 + 16 for heads of 8 + 16 and 8 it is the bytes of what is expanded that count: some 90 rows over a
 * long context are worth it (latent_work.h). On one rank a plan has them all. */
static void it_is_counted_who_absorbs(void) {
    static const cpa_test_latent_chunk few[] = {{0, 380, 40, CPA_PASS_Q, EXPANDED}},
                                       many[] = {{0, 30, 390, CPA_PASS_Q, EXPANDED}};
    cpa_test_latent_shape shape = cpa_test_latent_shapes[1];
    char *results[3][2][CPA_TEST_LATENT_FORMS];
    int64_t bytes[2] = {0};
    shape.latent = 128, shape.nope = shape.value = 8;
    for (int absorbs = CPA_ABSORB_NEVER; absorbs <= CPA_ABSORB_ALWAYS; absorbs++) {
        cpa_test_latent_site s;
        cpa_test_latent_open(&s, shape, 1, (cpa_absorb)absorbs, NULL);
        bytes[0] = results_of(&s, CPA_TEST_LATENT_STEP(few), results[absorbs][0]);
        bytes[1] = results_of(&s, CPA_TEST_LATENT_STEP(many), results[absorbs][1]);
        cpa_test_latent_close(&s);
    }
    for (int is_many = 0; is_many < 2 && cpa_test_promises_bits(); is_many++) {
        const char *never = results[CPA_ABSORB_NEVER][is_many][EXPANDED],
                   *counted = results[CPA_ABSORB_COUNTED][is_many][EXPANDED],
                   *always = results[CPA_ABSORB_ALWAYS][is_many][EXPANDED];
        if (is_many && cpa_test_ranks() > 1) continue;
        if (bytes[is_many] == 0) continue;
        CU_ASSERT_NOT_EQUAL(memcmp(never, always, (size_t)bytes[is_many]), 0);
        CU_ASSERT_EQUAL(memcmp(counted, is_many ? never : always, (size_t)bytes[is_many]), 0);
    }
    for (int i = 0; i < 3 * 2 * CPA_TEST_LATENT_FORMS; i++) free((&results[0][0][0])[i]);
}

static const cpa_test TESTS[] = {
    {"narrow queries absorb where the keys are", narrow_queries_absorb_where_the_keys_are},
    {"absorbed rows go on from segment to segment", absorbed_rows_go_on_from_segment_to_segment},
    {"it is counted who absorbs", it_is_counted_who_absorbs},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "context_absorb", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]))
