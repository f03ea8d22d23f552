/* The cache of a server, and its longest request. */
#include <string.h>

#include "launcher/job.h"
#include "tests/fixtures/unit.h"

#define KIB ((int64_t)1 << 10)
#define MIB ((int64_t)1 << 20)
#define GIB ((int64_t)1 << 30)

/* A model whose blocks of 16 tokens take 16 KiB, of at most `positions` tokens; 0: the synthetic one, which has no
 * bound. */
static cpa_job job_of(cpa_device_choice device, int64_t positions) {
    cpa_job job = {.has_network = 0, .interleave = 16};
    job.model.shape = (cpa_model_shape){
        .layers = 2,
        .attention = {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .dtype = CPA_F32, .kv_dtype = CPA_F32}};
    strcpy(job.model.name, "tiny");
    job.settings.serve = 1;
    job.settings.device = device;
    job.settings.block_size = 16;
    job.settings.max_num_seqs = 4;
    job.settings.gpu_memory_utilization = 0.9;
    job.network.max_position = positions;
    return job;
}

static cpa_status find(cpa_job *job, int64_t positions, int32_t ranks, int64_t memory, cpa_length_limits *out,
                       cpa_error *err) {
    /* Memory of the network does not count: it has none here. */
    job->has_network = 0;
    const cpa_cache_limits limits = cpa_job_cache_limits(job, ranks, memory);
    CU_ASSERT_EQUAL(cpa_cache_block_bytes(&limits), 16 * KIB);
    job->has_network = positions > 0;
    const cpa_length_wishes wishes = cpa_job_length_wishes(job);
    return cpa_length_limits_find(&wishes, &limits, out, err);
}

static void a_host_holds_many_short_requests_or_a_long_one(void) {
    cpa_length_limits limits;
    cpa_error err;
    cpa_job job = job_of(CPA_DEVICE_HOST, 4096);
    CU_ASSERT_EQUAL_FATAL(find(&job, 4096, 2, GIB, &limits, &err), CPA_OK);
    CU_ASSERT_EQUAL(limits.num_blocks, (1 << 18) / 16 / 2);
    CU_ASSERT_EQUAL(limits.max_model_len, 4096);
    job = job_of(CPA_DEVICE_HOST, 0);
    job.settings.max_model_len = 1 << 19;
    CU_ASSERT_EQUAL_FATAL(find(&job, 0, 1, 4 * GIB, &limits, &err), CPA_OK);
    CU_ASSERT_EQUAL(limits.num_blocks, (1 << 19) / 16);
    CU_ASSERT_EQUAL(limits.max_model_len, 1 << 19);
    job = job_of(CPA_DEVICE_HOST, 4096);
    CU_ASSERT_EQUAL_FATAL(find(&job, 4096, 2, MIB, &limits, &err), CPA_OK); /* half of it is 32 blocks */
    CU_ASSERT_EQUAL(limits.num_blocks, 32);
    CU_ASSERT_EQUAL(limits.max_model_len, 32 * 16 * 2);
}

/* 10 of 12 layers see 1,024 tokens: with them a cache holds nearly six times as many blocks of the others. */
static void narrow_windows_leave_memory_to_the_layers_that_keep_most(void) {
    enum { LAYERS = 12 };
    cpa_mask masks[LAYERS];
    for (int layer = 0; layer < LAYERS; layer++)
        masks[layer] = (cpa_mask){.causal = 1, .window = layer % 6 == 5 ? 0 : 1024};
    cpa_cache_limits limits = {
        .model = {.layers = LAYERS, .attention = {.q_heads = 1, .kv_heads = 1, .k_dim = 8, .v_dim = 8}},
        .block_size = 16,
        .map = {1, 16},
        .max_num_seqs = 4,
        .window_seqs = 4,
        .max_num_batched_tokens = 2048,
        .memory_bytes = 100 * MIB};
    const int64_t alike = cpa_cache_most_blocks(&limits);
    CU_ASSERT_EQUAL(alike, 100 * MIB / cpa_cache_block_bytes(&limits));
    limits.model.layer_masks = masks;
    const int64_t most = cpa_cache_most_blocks(&limits);
    CU_ASSERT(most > 5 * alike && most < 6 * alike);
    CU_ASSERT(cpa_cache_bytes(&limits, most) <= 100 * MIB && cpa_cache_bytes(&limits, most + 1) > 100 * MIB);
    limits.window_seqs = 1 << 20;
    CU_ASSERT_EQUAL(cpa_cache_most_blocks(&limits), alike);
    limits.memory_bytes = 0;
    CU_ASSERT_EQUAL(cpa_cache_most_blocks(&limits), 0);
    limits.memory_bytes = INT64_MAX;
    CU_ASSERT_EQUAL(cpa_cache_most_blocks(&limits), INT32_MAX);
}

/* First tokens that are precise have blocks of their own, as many as sequences and a step need. */
static void precise_tokens_take_memory_beside_the_quantised_ones(void) {
    enum { LAYERS = 12, SEQS = 4, STEP = 2048, BLOCK = 16 };
    cpa_cache_limits limits = {
        .model = {.layers = LAYERS,
                  .attention = {.q_heads = 1, .kv_heads = 1, .k_dim = 8, .v_dim = 8, .kv_dtype = CPA_INT8}},
        .block_size = BLOCK,
        .map = {1, BLOCK},
        .max_num_seqs = SEQS,
        .window_seqs = SEQS,
        .max_num_batched_tokens = STEP,
        .memory_bytes = 100 * MIB};
    const int64_t precise_block = (int64_t)LAYERS * BLOCK * 16 * (int64_t)sizeof(float);
    const int64_t block = cpa_cache_block_bytes(&limits), alike = cpa_cache_most_blocks(&limits);
    limits.precise_tokens = 4 * BLOCK;
    const int64_t most = cpa_cache_most_blocks(&limits), precise = cpa_cache_bytes(&limits, most) - most * block;
    CPA_ASSERT_ORDER(precise, >=, (SEQS * 4 + STEP / BLOCK) * precise_block);
    CPA_ASSERT_ORDER(precise, <=, (SEQS * 6 + STEP / BLOCK + 1) * precise_block);
    CPA_ASSERT_ORDER(most, <, alike);
    CU_ASSERT(cpa_cache_bytes(&limits, most) <= 100 * MIB && cpa_cache_bytes(&limits, most + 1) > 100 * MIB);
}

static void a_device_has_the_share_that_is_left_beside_staging(void) {
    cpa_length_limits limits;
    cpa_error err;
    cpa_job job = job_of(CPA_DEVICE_CUDA, 0);
    CU_ASSERT_EQUAL_FATAL(find(&job, 0, 1, 20 * GIB, &limits, &err), CPA_OK);
    CU_ASSERT_EQUAL(limits.num_blocks, 16 * GIB / (16 * KIB)); /* 18 of 20, less 2 of staging */
    CU_ASSERT_EQUAL(limits.max_model_len, limits.num_blocks * 16);
    job.settings.staging_bytes = GIB;
    job.settings.gpu_memory_utilization = 0.5;
    CU_ASSERT_EQUAL_FATAL(find(&job, 0, 1, 20 * GIB, &limits, &err), CPA_OK);
    CU_ASSERT_EQUAL(limits.num_blocks, 9 * GIB / (16 * KIB));
    job = job_of(CPA_DEVICE_CUDA, 4096);
    CU_ASSERT_EQUAL_FATAL(find(&job, 4096, 2, 20 * GIB, &limits, &err), CPA_OK);
    CU_ASSERT_EQUAL(limits.num_blocks, 4096 / 16 / 2 * 4); /* of no use are more */
    CU_ASSERT_EQUAL(limits.max_model_len, 4096);
}

static void what_cannot_be_held_is_refused_with_the_numbers(void) {
    cpa_length_limits limits = {.num_blocks = -1};
    cpa_error err;
    cpa_job job = job_of(CPA_DEVICE_HOST, 4096);
    job.settings.max_model_len = 4097;
    CU_ASSERT_EQUAL(find(&job, 4096, 1, GIB, &limits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(err.message, "--max-model-len: found 4097, expected at most the 4096 positions of tiny"));
    job.settings.max_model_len = 1000;
    job.settings.num_blocks = 30;
    CU_ASSERT_EQUAL(find(&job, 4096, 2, GIB, &limits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "--max-model-len: found 1000, expected at most 960: the cache has 30"));
    job.settings.max_model_len = 0;
    CU_ASSERT_EQUAL(find(&job, 4096, 2, 20 * KIB, &limits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "--num-blocks: found 30, expected at most 1"));
    job.settings.num_blocks = 0;
    CU_ASSERT_EQUAL(find(&job, 4096, 2, 20 * KIB, &limits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "expected at least a block of 16 KiB"));
    job = job_of(CPA_DEVICE_CUDA, 0);
    CU_ASSERT_EQUAL(find(&job, 0, 1, 2 * GIB, &limits, &err), CPA_INVALID); /* less than staging */
    CU_ASSERT_EQUAL(limits.num_blocks, -1);
}

static void prompts_that_wait_are_bounded_in_a_server_alone(void) {
    static char serve[] = "serve", program[] = "cp_attn", option[] = "--max-queued-tokens", none[] = "none";
    char *server[] = {program, serve, option, none, NULL}, *batch[] = {program, NULL};
    const cpa_workload workload = {.count = 0};
    cpa_job job = job_of(CPA_DEVICE_HOST, 4096);
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_settings_load(2, server, &job.settings, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_job_engine_options(&job, (cpa_cache_size){64, 1}, &workload).max_queued_tokens, 1 << 26);
    CU_ASSERT_EQUAL_FATAL(cpa_settings_load(4, server, &job.settings, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_job_engine_options(&job, (cpa_cache_size){64, 1}, &workload).max_queued_tokens, 0);
    CU_ASSERT_EQUAL_FATAL(cpa_settings_load(1, batch, &job.settings, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_job_engine_options(&job, (cpa_cache_size){64, 1}, &workload).max_queued_tokens, 0);
}

static const cpa_test tests[] = {
    {"a host holds many short requests or a long one", a_host_holds_many_short_requests_or_a_long_one},
    {"narrow windows leave memory to the layers that keep most",
     narrow_windows_leave_memory_to_the_layers_that_keep_most},
    {"precise tokens take memory beside the quantised ones", precise_tokens_take_memory_beside_the_quantised_ones},
    {"a device has the share that is left beside staging", a_device_has_the_share_that_is_left_beside_staging},
    {"what cannot be held is refused with the numbers", what_cannot_be_held_is_refused_with_the_numbers},
    {"prompts that wait are bounded in a server alone", prompts_that_wait_are_bounded_in_a_server_alone},
};
CPA_TEST_MAIN("serve limits", tests)
