/* The engine over caches of latents: prompts expand them, what decodes attends them as they lie; every row is checked
 * against float64, whatever else an engine does with a cache. */
#include <math.h>
#include <string.h>

#include "src/model/synthetic.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { LAYERS = 3, REQUESTS = 6, PREFILL = 0, DECODE = 1 };

static const float SCALES[LAYERS] = {0.2f, 0.15f, 0.25f};
static const cpa_mask MASKS[LAYERS] = {
    {.causal = 1, .window = 50, .sinks = 3}, {.causal = 1}, {.causal = 1, .window = 33}};

/* Widths of a model: latents of 32 and rotated elements of 16, heads of 24 + 16 and 40. */
static cpa_model_form forms[2] = {{.widths = {.k_dim = 40, .v_dim = 40, .expanded = 1}, .layer_scales = SCALES},
                                  {.layer_scales = SCALES}};

static cpa_engine_options latent_options(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.model.layers = LAYERS;
    options.model.attention = (cpa_attention_shape){
        .q_heads = 4, .kv_heads = 1, .k_dim = 48, .v_dim = 32, .v_in_k = 1, .dtype = CPA_F32, .kv_dtype = CPA_F32};
    options.model.forms = forms;
    options.model.n_forms = 2;
    options.model.prefill_form = PREFILL;
    options.model.decode_form = DECODE;
    options.verify = 1;
    options.short_prompts = CPA_SHORT_PROMPTS_EXPAND; /* as all are short that tests can afford */
    return options;
}

static cpa_engine_stats run(const cpa_engine_options *options, const cpa_request *requests) {
    cpa_engine_stats stats;
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.verify_rows, >=, stats.computed_tokens * LAYERS * options->model.attention.q_heads);
    return stats;
}

static cpa_engine_stats run_mixed(const cpa_engine_options *options) {
    cpa_request requests[REQUESTS];
    cpa_test_mixed_requests(requests, REQUESTS);
    return run(options, requests);
}

/* Requests that take more blocks as they decode than there are. */
static cpa_engine_stats run_crowded(cpa_engine_options *options) {
    cpa_request requests[REQUESTS];
    int ranks;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 0; i < REQUESTS; i++)
        requests[i] =
            (cpa_request){.size = sizeof *requests, .id = (uint64_t)i, .prompt_tokens = 9 + 3 * i, .output_tokens = 40};
    options->num_blocks = 8 / ranks + 2;
    const cpa_engine_stats stats = run(options, requests);
    CPA_ASSERT_ORDER(stats.preemptions, >, 0);
    return stats;
}

static void results_do_not_depend_on_algorithm_or_step_size(void) {
    cpa_engine_options options = latent_options();
    options.skip_self_test = 0;
    const uint64_t digest = run_mixed(&options).output_digest;
    options.skip_self_test = 1;
    options.algorithm = CPA_PASS_KV;
    const uint64_t by_keys = run_mixed(&options).output_digest;
    options.algorithm = CPA_PASS_Q;
    options.max_num_batched_tokens = 33;
    options.model.attention.layout = CPA_HEAD_MAJOR;
    const uint64_t by_queries = run_mixed(&options).output_digest;
    if (!cpa_test_promises_bits()) return;
    CU_ASSERT_EQUAL(by_keys, digest);
    CU_ASSERT_EQUAL(by_queries, digest);
    forms[DECODE].layer_scales = (const float[LAYERS]){0.2f, 0.15f, 0.26f};
    CU_ASSERT_NOT_EQUAL(run_mixed(&options).output_digest, digest);
    forms[DECODE].layer_scales = SCALES;
}

static void every_form_of_cache_is_checked(void) {
    cpa_engine_options options = latent_options();
    options.model.attention.dtype = options.model.attention.kv_dtype = CPA_BF16;
    run_mixed(&options);
    options.model.attention.kv_dtype = CPA_FP8_E4M3;
    run_mixed(&options); /* a scale for each row */
    options.model.attention.k_scale = 0.05f;
    run_mixed(&options);
    options.model.attention.q_heads = 2;
    options.model.attention.k_dim = 576, options.model.attention.v_dim = 512;
    options.model.attention.kv_dtype = CPA_FP8_T128;
    options.model.attention.k_scale = 0;
    forms[PREFILL].widths.k_dim = 96; /* 64 rotated elements */
    options.verify = 0.1;
    cpa_request requests[2] = {{.size = sizeof *requests, .id = 1, .prompt_tokens = 130, .output_tokens = 3},
                               {.size = sizeof *requests, .id = 2, .prompt_tokens = 40, .output_tokens = 5}};
    cpa_engine_stats stats;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 2, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.verify_rows, >, 50);
    options.model.attention.k_dim = 512, options.model.attention.v_dim = 448;
    options.model.attention.kv_dtype = CPA_FP8_T64;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 2, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.verify_rows, >, 50);
    forms[PREFILL].widths.k_dim = 40;
}

static void layers_have_windows_of_their_own(void) {
    cpa_engine_options options = latent_options();
    options.model.layer_masks = MASKS;
    run_mixed(&options);
}

static void sequences_lie_on_one_rank_or_in_short_runs(void) {
    cpa_engine_options options = latent_options();
    options.local_context = 80;
    run_mixed(&options);
    options.local_context = 0;
    options.interleave = 4; /* a quarter of a block */
    run_mixed(&options);
}

static void preempted_requests_are_computed_again_or_swapped(void) {
    cpa_engine_options options = latent_options();
    run_crowded(&options);
    options.preemption = CPA_PREEMPT_SWAP;
    options.swap_bytes = 4 << 20;
    CPA_ASSERT_ORDER(run_crowded(&options).swapped_in, >, 0);
}

/* All requests are the beginning of one text, which repeats itself. */
static uint32_t token_of_the_text(void *ctx, uint64_t request, int64_t position) {
    (void)ctx, (void)request;
    return (uint32_t)(position % 40) * 2654435761u;
}

static void prompts_find_what_others_computed(void) {
    cpa_engine_options options = latent_options();
    cpa_request requests[REQUESTS];
    options.token_at = token_of_the_text;
    options.cascade_attention = CPA_CASCADE_ALWAYS;
    for (int i = 0; i < REQUESTS; i++)
        requests[i] =
            (cpa_request){.size = sizeof *requests, .id = (uint64_t)i, .prompt_tokens = 150 + i, .output_tokens = 9};
    cpa_engine_stats stats;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, REQUESTS, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.prefix_hits, >, 20);
}

static void drafts_attend_latents_as_they_lie(void) {
    for (int branches = 1; branches <= 2; branches++) {
        cpa_engine_options options = latent_options();
        options.token_at = token_of_the_text;
        options.drafter = CPA_DRAFT_NGRAM;
        options.ngram_branches = branches;
        cpa_request requests[2] = {{.size = sizeof *requests, .id = 1, .prompt_tokens = 100, .output_tokens = 30},
                                   {.size = sizeof *requests, .id = 2, .prompt_tokens = 90, .output_tokens = 30}};
        cpa_engine_stats stats;
        CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 2, NULL, NULL, &stats));
        CPA_ASSERT_ORDER(stats.accepted_tokens, >, 10);
    }
}

/* 900 tokens at once expand, a hundred at a time absorb: with latents of 128 for heads of 24 and 8 as many do either from
 * some 255 rows on (src/context/latent_work.h). */
static void short_chunks_of_prompts_absorb(void) {
    cpa_engine_options options = latent_options();
    const cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 900, .output_tokens = 2};
    uint64_t digests[2][2];
    options.algorithm = CPA_PASS_Q; /* by which the rows of all ranks meet the keys of each */
    options.num_blocks = 80;
    options.model.attention.q_heads = 2;
    options.model.attention.k_dim = 144, options.model.attention.v_dim = 128;
    forms[PREFILL].widths.k_dim = 24, forms[PREFILL].widths.v_dim = 8;
    options.verify = 0.2;
    for (int is_short = 0; is_short < 2; is_short++) {
        options.max_num_batched_tokens = is_short ? 100 : 900;
        for (int absorbs = 0; absorbs < 2; absorbs++) {
            cpa_engine_stats stats;
            options.short_prompts = absorbs ? CPA_SHORT_PROMPTS_ABSORB : CPA_SHORT_PROMPTS_EXPAND;
            CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
            CPA_ASSERT_ORDER(stats.verify_rows, >, 500);
            digests[is_short][absorbs] = stats.output_digest;
        }
    }
    forms[PREFILL].widths.k_dim = 40, forms[PREFILL].widths.v_dim = 40;
    CU_ASSERT_NOT_EQUAL(digests[1][0], digests[1][1]);
    if (!cpa_test_promises_bits()) return;
    CU_ASSERT_EQUAL(digests[0][0], digests[0][1]);
    CU_ASSERT_EQUAL(digests[0][0], digests[1][0]);
}

/* What attends is named: of prompts, which expand latents, and of single rows, which attend them as they lie. */
static void kernels_are_named(void) {
    const cpa_engine_options options = latent_options();
    cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 150, .output_tokens = 1};
    cpa_engine_stats stats;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
    CU_ASSERT_STRING_EQUAL(stats.decode_kernels, "");
    CU_ASSERT_STRING_NOT_EQUAL(stats.prefill_kernels, "");
    CU_ASSERT_PTR_NULL(strchr(stats.prefill_kernels, ','));
    request.output_tokens = 3;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
    CU_ASSERT_STRING_NOT_EQUAL(stats.decode_kernels, "");
    CU_ASSERT_PTR_NULL(strchr(stats.decode_kernels, ','));
    if (cpa_test_promises_bits()) CU_ASSERT_STRING_EQUAL(stats.decode_kernels, stats.prefill_kernels);
}

/* A network of the caller's with matrices of its own, whose rows are on all ranks. */
static void replicated_rows_attend_latents(void) {
    for (int slices = CPA_SLICES_DECODE; slices <= CPA_SLICES_ALL; slices++) {
        cpa_engine_options options = latent_options();
        cpa_synthetic synthetic = {.shape = options.model.attention, .seed = 5};
        cpa_stream *stream;
        cpa_error err = {CPA_OK, ""};
        cpa_test_device_open(1, &synthetic.device, &stream);
        CU_ASSERT_EQUAL(cpa_synthetic_take_forms(&synthetic, &options.model, &err), CPA_OK);
        cpa_model network = cpa_synthetic_model(&synthetic);
        network.slices = (cpa_model_slices)slices;
        options.network = &network;
        run_mixed(&options);
        cpa_synthetic_free(&synthetic);
        cpa_test_device_close(synthetic.device, stream);
    }
}

static void expect_refusal(const cpa_engine_options *options, const char *says) {
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));
    if (!strstr(err.message, says)) printf("%s\nis not\n%s\n", err.message, says);
    cpa_engine_destroy(engine);
}

static void what_latents_may_not_be_is_told(void) {
    static const void *const matrices[LAYERS] = {NULL};
    cpa_engine_options options = latent_options();
    options.model.forms = NULL, options.model.n_forms = options.model.decode_form = 0;
    expect_refusal(&options, "model: v_in_k without forms, expected one with layer_scales");
    options = latent_options(), options.model.decode_form = PREFILL;
    expect_refusal(&options, "form 0: is expanded and decode_form");
    options = latent_options(), forms[DECODE].layer_scales = NULL;
    expect_refusal(&options, "form 1, layer 0: scale is 0 over latents");
    forms[DECODE].layer_scales = SCALES, forms[PREFILL].layer_expansions = matrices;
    expect_refusal(&options, "form 0: has layer_expansions without a network");
    forms[PREFILL].layer_expansions = NULL, forms[PREFILL].widths.k_dim = 16;
    expect_refusal(&options, "form 0: is expanded, and k_dim is 16, expected 17 to 576");
    forms[PREFILL].widths.k_dim = 40;
}

static const cpa_test tests[] = {
    {"results do not depend on algorithm or step size", results_do_not_depend_on_algorithm_or_step_size},
    {"every form of cache is checked", every_form_of_cache_is_checked},
    {"layers have windows of their own", layers_have_windows_of_their_own},
    {"sequences lie on one rank or in short runs", sequences_lie_on_one_rank_or_in_short_runs},
    {"preempted requests are computed again or swapped", preempted_requests_are_computed_again_or_swapped},
    {"prompts find what others computed", prompts_find_what_others_computed},
    {"drafts attend latents as they lie", drafts_attend_latents_as_they_lie},
    {"short chunks of prompts absorb", short_chunks_of_prompts_absorb},
    {"kernels are named", kernels_are_named},
    {"replicated rows attend latents", replicated_rows_attend_latents},
    {"what latents may not be is told", what_latents_may_not_be_is_told},
};
CPA_MPI_DEVICE_TEST_MAIN("latent_engine", tests)
