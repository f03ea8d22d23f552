/* Prompts that attend the blocks which XAttention selects (cpa_engine_options.sparse_stride): on any number of ranks, by
 * either algorithm and in chunks, each checked row is right under the blocks of its own, and blocks are left out. */
#include <string.h>

#include <cpattn/xattn.h>

#include "base/check.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { REQUESTS = 3 };

/* A long prompt, one that is too short, and one in between; a group of four tokens begins with 512. */
static cpa_engine_options options_of(cpa_request *requests) {
    static const int64_t prompts[REQUESTS] = {2300, 300, 1111};
    cpa_engine_options options = cpa_test_engine_options();
    for (int64_t i = 0; i < REQUESTS; i++)
        requests[i] = (cpa_request){
            .size = sizeof requests[i], .id = (uint64_t)(3 * i), .prompt_tokens = prompts[i], .output_tokens = 3};
    options.num_blocks = 400;
    options.interleave = 0;
    options.max_num_batched_tokens = 1024;
    options.verify = 0.05;
    options.local_context = CPA_LOCAL_CONTEXT_NONE; /* by rates that are measured a short prompt may lie on one rank */
    options.sparse_stride = 4;
    options.sparse_tau = 0.85f;
    return options;
}

static cpa_engine_stats run(const cpa_engine_options *options, const cpa_request *requests) {
    cpa_engine_stats stats;
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.verify_rows, >, 200);
    return stats;
}

static void expect_sparse(const cpa_engine_stats *stats) {
    CPA_ASSERT_ORDER(stats->sparse_blocks_kept, <, stats->sparse_blocks_seen);
    CPA_ASSERT_ORDER(stats->sparse_s, >, 0);
    CPA_ASSERT_ORDER(stats->sparse_blocks_kept, >, 0);
    CPA_ASSERT_ORDER(stats->selection_rows, >, 100);
    CPA_ASSERT_ORDER(stats->selection_rows, <, stats->verify_rows);
    CPA_ASSERT_ORDER(stats->selection_mass_left_out_mean, >, 0.001);
    CPA_ASSERT_ORDER(stats->selection_mass_left_out_mean, <, 0.4);
}

static void prompts_attend_some_blocks(void) {
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    const cpa_algorithm algorithms[] = {CPA_AUTO, CPA_PASS_KV, CPA_PASS_Q};
    for (int i = 0; i < 3; i++) {
        options.algorithm = algorithms[i];
        options.max_num_batched_tokens = i == 2 ? 512 : 1024;
        const cpa_engine_stats stats = run(&options, requests);
        expect_sparse(&stats);
    }
}

/* Of a prompt alone, between whose chunks no rows of decode come, whose number is a matter of time. */
static void algorithms_attend_the_same_blocks(void) {
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    cpa_engine_stats by_kv, by_q;
    options.algorithm = CPA_PASS_KV;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 1, NULL, NULL, &by_kv));
    options.algorithm = CPA_PASS_Q;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 1, NULL, NULL, &by_q));
    CPA_ASSERT_ORDER(by_kv.sparse_blocks_kept, >, 0);
    CU_ASSERT_EQUAL(by_kv.sparse_blocks_seen, by_q.sparse_blocks_seen);
    CU_ASSERT_EQUAL(by_kv.sparse_blocks_kept, by_q.sparse_blocks_kept);
}

/* Chunks that begin anywhere, over prefixes that were found. */
static void chunks_may_begin_anywhere(void) {
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    options.max_num_batched_tokens = 777;
    options.sparse_stride = 8;
    const cpa_engine_stats stats = run(&options, requests);
    expect_sparse(&stats);
}

static cpa_engine_options quantised(cpa_request *requests, cpa_dtype dtype) {
    cpa_engine_options options = options_of(requests);
    options.model.attention.dtype = CPA_BF16;
    options.model.attention.k_dim = options.model.attention.v_dim = 64;
    options.model.attention.kv_dtype = dtype;
    return options;
}

/* Codes go to other ranks as they lie, and each rank estimates over what its own stand for. */
static void caches_may_be_quantised(void) {
    static const cpa_dtype dtypes[] = {CPA_INT8, CPA_FP8_E4M3, CPA_FP8_E5M2, CPA_TQ_K8V4, CPA_TQ_4BIT, CPA_TQ_3BIT};
    static const cpa_algorithm algorithms[] = {CPA_PASS_KV, CPA_PASS_Q, CPA_AUTO};
    for (int i = 0; i < 6; i++) {
        cpa_request requests[REQUESTS];
        cpa_engine_options options = quantised(requests, dtypes[i]);
        options.algorithm = algorithms[i % 3];
        options.max_num_batched_tokens = i % 2 ? 700 : 1024;
        const cpa_engine_stats stats = run(&options, requests);
        expect_sparse(&stats);
    }
}

/* Prompts begin alike, up to a token within a block, and repeat themselves, so that n-grams are drafts of what comes. */
static uint32_t text_at(void *ctx, uint64_t request, int64_t position) {
    enum { COMMON = 1415, PERIOD = 23 };
    (void)ctx;
    return (uint32_t)(position % PERIOD) + (position < COMMON ? 0 : (uint32_t)(request * PERIOD));
}

/* Prefixes that are found and that rows of decode share, chunks that are cut to free blocks, windows, drafts and codes,
 * all together, by either algorithm. */
static void all_of_it_goes_together(void) {
    static const cpa_mask masks[] = {{.causal = 1}, {.causal = 1, .window = 300, .sinks = 4}, {.causal = 1}};
    for (int i = 0; i < 3; i++) {
        cpa_request requests[REQUESTS];
        cpa_engine_options options =
            i == 2 ? options_of(requests) : quantised(requests, i ? CPA_TQ_4BIT : CPA_FP8_E4M3);
        for (int r = 0; r < REQUESTS; r++) requests[r].prompt_tokens = 1800 + 130 * r, requests[r].output_tokens = 20;
        options.model.layer_masks = masks;
        options.algorithm = i == 1 ? CPA_PASS_Q : CPA_PASS_KV;
        options.max_num_seqs = 2; /* the third prompt beside an answer */
        options.max_num_batched_tokens = 700;
        options.adaptive_chunks = 1;
        options.cascade_attention = CPA_CASCADE_ALWAYS;
        options.token_at = text_at;
        options.outputs_given = 1;
        options.drafter = CPA_DRAFT_NGRAM;
        const cpa_engine_stats stats = run(&options, requests);
        expect_sparse(&stats);
        CPA_ASSERT_ORDER(stats.prefix_hits, >, 0);
        CPA_ASSERT_ORDER(stats.accepted_tokens, >, 0);
    }
}

/* Groups, their statistics and a number for each pair of blocks: nothing that is as large as the scores of groups. */
static void no_scores_are_stored(void) {
    enum { PROMPT = 6000, CHUNK = 2048 };
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    cpa_engine_stats stats;
    requests[0].prompt_tokens = PROMPT;
    options.num_blocks = 500;
    options.max_num_batched_tokens = CHUNK;
    options.verify = 0;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 1, NULL, NULL, &stats));
    const cpa_attention_shape *attention = &options.model.attention;
    const cpa_xattn_shape shape = {.stride = options.sparse_stride,
                                   .block = CPA_XATTN_MOST_BLOCK,
                                   .q_heads = attention->q_heads,
                                   .kv_heads = attention->kv_heads,
                                   .dim = attention->k_dim,
                                   .dtype = attention->dtype};
    const int64_t lists = 32 * CHUNK; /* words of rows, bits and counts of blocks */
    const int64_t needed = cpa_xattn_packed_bytes(&shape, shape.q_heads, CHUNK) +
                           cpa_xattn_packed_bytes(&shape, shape.kv_heads, PROMPT) +
                           cpa_xattn_stats_bytes(&shape, CHUNK) + cpa_xattn_sums_bytes(&shape, CHUNK, PROMPT) + lists;
    CPA_ASSERT_ORDER(stats.sparse_bytes, >, 0);
    CPA_ASSERT_ORDER(stats.sparse_bytes, <=, needed / 4 * 5);
    CPA_ASSERT_ORDER(2 * stats.sparse_bytes, <, cpa_xattn_scores_bytes(&shape, CHUNK, PROMPT));
}

/* Rows go round the ranks block by block: what these select goes with them. */
static void ranks_are_balanced(void) {
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    cpa_engine_stats stats;
    int ranks;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    requests[0].prompt_tokens = 4 * 1536;
    options.num_blocks = 500;
    options.max_num_batched_tokens = 1536;
    options.verify = 0;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 1, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.sparse_blocks_busiest * ranks, >=, stats.sparse_blocks_kept);
    CPA_ASSERT_ORDER(stats.sparse_blocks_busiest * ranks * 10, <=, stats.sparse_blocks_kept * 11);
}

/* Keys on the host: each rank reads its own once a chunk and layer for the estimate, and attends them through its ring
 * by either algorithm, elements and codes. */
static void caches_may_lie_on_the_host(void) {
    enum { CHUNK = 768, CHUNKS = 4 };
    static const cpa_algorithm algorithms[] = {CPA_PASS_KV, CPA_PASS_Q};
    for (int i = 0; i < 2; i++) {
        cpa_request requests[REQUESTS];
        cpa_engine_options options = i ? quantised(requests, CPA_FP8_E4M3) : options_of(requests);
        const cpa_attention_shape *shape = &options.model.attention;
        const int64_t key_bytes = shape->kv_heads * (i ? shape->k_dim + (int64_t)sizeof(float) : shape->k_dim * 4);
        cpa_engine_stats stats;
        requests[0].prompt_tokens = CHUNKS * CHUNK;
        options.num_blocks = 500;
        options.max_num_batched_tokens = CHUNK;
        options.algorithm = algorithms[i];
        options.ring_bytes = 2 << 20;
        options.verify = 0.02;
        CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, 1, NULL, NULL, &stats));
        expect_sparse(&stats);
        CPA_ASSERT_ORDER(stats.ring_bytes_read, >, 0);
        CU_ASSERT_EQUAL(stats.sparse_host_bytes, options.model.layers * CHUNK * CHUNKS * (CHUNKS + 1) / 2 * key_bytes);
    }
}

static void without_it_all_keys_are_attended(void) {
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    options.sparse_tau = 0, options.sparse_stride = 0;
    const cpa_engine_stats stats = run(&options, requests);
    CU_ASSERT_EQUAL(stats.sparse_blocks_seen, 0);
    CU_ASSERT_EQUAL(stats.sparse_s, 0);
    CU_ASSERT_EQUAL(stats.selection_rows, 0);
    CU_ASSERT_EQUAL(stats.sparse_host_bytes, 0);
}

/* The last test: over several ranks no engine can be made behind one that failed. */
static void what_is_not_estimated_is_told(void) {
    cpa_request requests[REQUESTS];
    cpa_error err = {0};
    cpa_engine *engine = NULL;
    static const struct {
        int32_t stride;
        float tau;
        const char *says;
    } cases[] = {{12, 0.9f, "sparse_stride: 12, expected 4, 8 or 16"},
                 {8, 1.5f, "sparse_tau: 1.5, expected above 0"},
                 {8, 0, "sparse_tau: 0"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_engine_options options = options_of(requests);
        options.sparse_stride = cases[i].stride, options.sparse_tau = cases[i].tau;
        CU_ASSERT_NOT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_OK);
        if (!strstr(err.message, cases[i].says)) CU_FAIL(err.message);
    }
    if (cpa_test_promises_bits()) return;
    cpa_engine_options options = quantised(requests, CPA_INT8);
    options.model.attention.k_dim = options.model.attention.v_dim = 256;
    CU_ASSERT_NOT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_OK);
    if (!strstr(err.message, "a quantised cache of wide heads on a device")) CU_FAIL(err.message);
}

static const cpa_test tests[] = {
    {"prompts attend some blocks", prompts_attend_some_blocks},
    {"algorithms attend the same blocks", algorithms_attend_the_same_blocks},
    {"chunks may begin anywhere", chunks_may_begin_anywhere},
    {"caches may be quantised", caches_may_be_quantised},
    {"all of it goes together", all_of_it_goes_together},
    {"caches may lie on the host", caches_may_lie_on_the_host},
    {"no scores are stored", no_scores_are_stored},
    {"ranks are balanced", ranks_are_balanced},
    {"without it all keys are attended", without_it_all_keys_are_attended},
    {"what is not estimated is told", what_is_not_estimated_is_told},
};
CPA_MPI_DEVICE_TEST_MAIN("sparse_prompts", tests)
