/* Memory that a network is found to need: that of the rank that has the most of it. */
#include <string.h>

#include "launcher/job.h"
#include "tests/fixtures/unit.h"

enum { EXPERTS = 5, HIDDEN = 64, INNER = 128, LAYERS = 3 };

/* Experts on the host, spread over ranks that do not divide them. */
static void make_job(cpa_job *job, int32_t ranks) {
    memset(job, 0, sizeof *job);
    job->has_network = 1;
    job->ranks = ranks;
    job->model.shape.attention.dtype = CPA_F32;
    job->settings.device = CPA_DEVICE_HOST;
    job->settings.max_num_batched_tokens = 64;
    job->settings.max_num_seqs = 4;
    job->settings.spread_experts = 1;
    job->network = (cpa_model_config){.layers = LAYERS,
                                      .hidden = HIDDEN,
                                      .intermediate = INNER,
                                      .q_heads = 4,
                                      .kv_heads = 2,
                                      .head_dim = 16,
                                      .vocabulary = 100,
                                      .rope = {.max_position = 128, .dim = 16},
                                      .moe = {.experts = EXPERTS, .top_k = 2, .intermediate = INNER}};
    memset(job->network.moe.sparse, 1, LAYERS);
}

static int64_t bytes_on(const cpa_job *job, int32_t rank) {
    cpa_transformer_options options = cpa_job_transformer_options(job);
    options.rank = rank;
    return cpa_transformer_bytes(&job->network, &options);
}

static void the_rank_with_the_most_experts_counts(void) {
    static cpa_job job;
    cpa_error err;
    make_job(&job, 2);
    const int64_t least = bytes_on(&job, 0), most = bytes_on(&job, 1); /* 2 experts, and 3 */
    CU_ASSERT(most >= least + LAYERS * 3 * INNER * HIDDEN * (int64_t)sizeof(float));
    CU_ASSERT_EQUAL(cpa_job_check_memory(&job, most + 1, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_job_check_memory(&job, most, &err), CPA_NO_MEMORY);
    CU_ASSERT_EQUAL(cpa_job_check_memory(&job, least + 1, &err), CPA_NO_MEMORY);
    CU_ASSERT_EQUAL(cpa_job_cache_limits(&job, 2, 3 * most).memory_bytes, most); /* half of what is left */
}

static void ranks_may_have_no_experts(void) {
    static cpa_job job;
    make_job(&job, 8);
    CU_ASSERT(bytes_on(&job, 0) < bytes_on(&job, 1));
    CU_ASSERT_EQUAL(cpa_job_check_memory(&job, bytes_on(&job, 1), NULL), CPA_NO_MEMORY);
}

static const cpa_test TESTS[] = {
    {"the rank with the most experts counts", the_rank_with_the_most_experts_counts},
    {"ranks may have no experts", ranks_may_have_no_experts},
};

CPA_TEST_MAIN("memory of a network", TESTS)
