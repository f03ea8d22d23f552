#include "src/llm/length_limits.h"

#include <inttypes.h>

#include "base/check.h"
#include "base/min_max.h"

/* Tokens that the cache on the host holds, all requests together, if none alone has more. */
#define HOST_TOKENS ((int64_t)1 << 18)

/* Blocks that can be of use: on a device those of all requests that run at once, each as long as it can be. `longest` is
 * the length of the longest request, 0 if the cache alone decides. */
static int64_t useful_blocks(const cpa_length_wishes *wishes, const cpa_cache_limits *limits, int64_t longest) {
    if (!wishes->on_cuda) return cpa_cache_blocks_of(limits, cpa_max64(longest, HOST_TOKENS));
    return longest > 0 ? cpa_cache_blocks_of(limits, longest) * limits->max_num_seqs : INT32_MAX;
}

static cpa_status find_blocks(const cpa_length_wishes *wishes, const cpa_cache_limits *limits, int64_t *out,
                              cpa_error *err) {
    const int64_t asked = wishes->asked.max_model_len, longest = asked ? asked : wishes->positions;
    if (wishes->asked.num_blocks) {
        CPA_TRY(cpa_cache_check(limits, wishes->num_blocks_option, wishes->asked.num_blocks, err));
        *out = wishes->asked.num_blocks;
        return CPA_OK;
    }
    const int64_t most = cpa_cache_most_blocks(limits);
    if (most < 1)
        return cpa_fail(err, CPA_INVALID,
                        "found %" PRId64 " MiB of memory a rank for the cache, expected at least a block of %" PRId64
                        " KiB",
                        limits->memory_bytes >> 20, cpa_cache_block_bytes(limits) >> 10);
    *out = cpa_min64(most, useful_blocks(wishes, limits, longest));
    return CPA_OK;
}

cpa_status cpa_length_limits_find(const cpa_length_wishes *wishes, const cpa_cache_limits *limits,
                                  cpa_length_limits *out, cpa_error *err) {
    const int64_t asked = wishes->asked.max_model_len;
    const int64_t positions = wishes->positions ? wishes->positions : INT64_MAX;
    int64_t blocks = 0;
    if (asked > positions)
        return cpa_fail(err, CPA_INVALID,
                        "%s: found %" PRId64 ", expected at most the %" PRId64
                        " positions of %s (max_position_embeddings)",
                        wishes->max_model_len_option, asked, positions, wishes->model);
    CPA_TRY(find_blocks(wishes, limits, &blocks, err));
    const int64_t held = cpa_cache_tokens_of(limits, blocks);
    if (asked > held)
        return cpa_fail(err, CPA_INVALID,
                        "%s: found %" PRId64 ", expected at most %" PRId64 ": the cache has %" PRId64
                        " blocks of %" PRId32 " tokens a rank (%" PRId64 " MiB)",
                        wishes->max_model_len_option, asked, held, blocks, limits->block_size,
                        cpa_cache_bytes(limits, blocks) >> 20);
    *out = (cpa_length_limits){.num_blocks = blocks, .max_model_len = asked ? asked : cpa_min64(positions, held)};
    return CPA_OK;
}
