#include "launcher/serve_limits.h"

#include <inttypes.h>

#include "base/check.h"
#include "base/min_max.h"

/* Tokens that the cache of a server on the host holds, all requests together, if none alone has more. */
#define HOST_TOKENS ((int64_t)1 << 18)

/* Blocks that can be of use: on a device those of all requests that run at once, each as long as it can be. */
static int64_t useful_blocks(const cpa_job *job, const cpa_cache_limits *limits, int64_t longest) {
    if (!cpa_job_is_on_cuda(job)) return cpa_cache_blocks_of(limits, cpa_max64(longest, HOST_TOKENS));
    return longest > 0 ? cpa_cache_blocks_of(limits, longest) * limits->max_num_seqs : INT32_MAX;
}

/* `longest` is the length of the longest request, 0 if the cache alone decides. */
static cpa_status find_blocks(const cpa_job *job, const cpa_cache_limits *limits, int64_t longest, int64_t *out,
                              cpa_error *err) {
    if (job->settings.num_blocks) {
        CPA_TRY(cpa_cache_check(limits, job->settings.num_blocks, err));
        *out = job->settings.num_blocks;
        return CPA_OK;
    }
    const int64_t most = cpa_cache_most_blocks(limits);
    if (most < 1)
        return cpa_fail(err, CPA_INVALID,
                        "found %" PRId64 " MiB of memory a rank for the cache, expected at least a block of %" PRId64
                        " KiB",
                        limits->memory_bytes >> 20, cpa_cache_block_bytes(limits) >> 10);
    *out = cpa_min64(most, useful_blocks(job, limits, longest));
    return CPA_OK;
}

cpa_status cpa_serve_limits_find(const cpa_job *job, const cpa_cache_limits *limits, cpa_serve_limits *out,
                                 cpa_error *err) {
    const int64_t asked = job->settings.max_model_len;
    const int64_t positions = job->has_network ? job->network.max_position : INT64_MAX;
    int64_t blocks = 0;
    if (asked > positions)
        return cpa_fail(err, CPA_INVALID,
                        "--max-model-len: found %" PRId64 ", expected at most the %" PRId64
                        " positions of %s (max_position_embeddings)",
                        asked, positions, job->model.name);
    CPA_TRY(find_blocks(job, limits, asked ? asked : job->has_network ? positions : 0, &blocks, err));
    const int64_t held = cpa_cache_tokens_of(limits, blocks);
    if (asked > held)
        return cpa_fail(err, CPA_INVALID,
                        "--max-model-len: found %" PRId64 ", expected at most %" PRId64 ": the cache has %" PRId64
                        " blocks of %" PRId32 " tokens a rank (%" PRId64 " MiB)",
                        asked, held, blocks, limits->block_size, cpa_cache_bytes(limits, blocks) >> 20);
    *out = (cpa_serve_limits){.num_blocks = blocks, .max_model_len = asked ? asked : cpa_min64(positions, held)};
    return CPA_OK;
}
