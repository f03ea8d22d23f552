#include "src/llm/cache_size.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/cache/kv_cache.h"
#include "src/cache/layer_groups.h"
#include "src/schedule/scheduler.h"

/* A cache that is sized for what it is to hold leaves memory to everything else. */
#define MEMORY_SHARE 2

/* What exchanges take of a device where staging_bytes is 0 (cpa_context_options). */
#define DEVICE_STAGING_BYTES ((int64_t)2 << 30)

int64_t cpa_cache_memory_bytes(const cpa_cache_memory *memory) {
    const int64_t left = memory->memory_bytes - memory->network_bytes;
    if (memory->num_blocks) return left;
    if (memory->share == 0) return left / MEMORY_SHARE;
    const int64_t spared = (int64_t)((1 - memory->share) * (double)memory->memory_bytes);
    return left - spared - (memory->staging_bytes ? memory->staging_bytes : DEVICE_STAGING_BYTES);
}

int64_t cpa_cache_block_bytes(const cpa_cache_limits *limits) {
    return cpa_layer_groups_block_bytes(&limits->model, limits->block_size);
}

static cpa_layer_groups groups_of(const cpa_cache_limits *limits, int64_t blocks) {
    const cpa_layer_groups_load load = {.map = limits->map,
                                        .block_size = limits->block_size,
                                        .sequences = limits->window_seqs,
                                        .step_tokens = limits->max_num_batched_tokens};
    cpa_layer_groups groups;
    cpa_layer_groups_of(&limits->model, limits->block_size, &groups);
    cpa_layer_groups_add_precise(&groups, &limits->model, limits->block_size, limits->precise_tokens);
    cpa_layer_groups_size(&groups, &load, blocks);
    return groups;
}

int64_t cpa_cache_bytes(const cpa_cache_limits *limits, int64_t blocks) {
    const cpa_layer_groups groups = groups_of(limits, blocks);
    return cpa_layer_groups_bytes(&groups);
}

int64_t cpa_cache_most_blocks(const cpa_cache_limits *limits) {
    const cpa_layer_groups groups = groups_of(limits, INT32_MAX);
    int64_t of_all = 0, above = INT32_MAX + 1LL;
    for (int32_t g = 0; g < groups.count; g++) of_all += groups.list[g].block_bytes;
    /* Every group has that many; beyond, those with narrow windows need no more. */
    int64_t fits = cpa_min64(limits->memory_bytes / of_all, INT32_MAX);
    if (groups.count == 1 || limits->memory_bytes < 0) return fits;
    while (above - fits > 1) {
        const int64_t between = fits + (above - fits) / 2;
        *(cpa_cache_bytes(limits, between) <= limits->memory_bytes ? &fits : &above) = between;
    }
    return fits;
}

int64_t cpa_cache_blocks_of(const cpa_cache_limits *limits, int64_t tokens) {
    /* Shard 0 is the longest one. */
    return (cpa_shard_len(limits->map, 0, tokens) + limits->block_size - 1) / limits->block_size;
}

int64_t cpa_cache_tokens_of(const cpa_cache_limits *limits, int64_t blocks) {
    const int64_t held = blocks * limits->block_size, run = limits->map.interleave;
    /* Whole rounds over all ranks, then what shard 0 still has room for; if that is nothing, shard 0 would be next. */
    return held / run * run * limits->map.cp_size + held % run;
}

static int64_t cached_tokens(const cpa_request *request) {
    return cpa_cached_tokens(request->prompt_tokens, request->output_tokens);
}

/* Blocks that a rank holds more of a sequence when it keeps all of it. The least used rank keeps the next one, so that
 * no rank ever has more beyond its share than the largest of these. */
static int64_t blocks_beyond_share(const cpa_cache_limits *limits, int64_t tokens) {
    if (tokens > limits->local_tokens) return 0;
    return (tokens + limits->block_size - 1) / limits->block_size - cpa_cache_blocks_of(limits, tokens);
}

static int descending(const void *a, const void *b) {
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return left < right ? 1 : left > right ? -1 : 0;
}

cpa_status cpa_cache_size_for(const cpa_cache_limits *limits, const cpa_request *requests, int64_t count, int64_t *out,
                              cpa_error *err) {
    const int64_t most = cpa_cache_most_blocks(limits);
    int64_t *needs = calloc((size_t)count + 1, sizeof *needs);
    if (!needs) return cpa_fail(err, CPA_NO_MEMORY, "no memory to size the cache for %" PRId64 " requests", count);
    int64_t largest = 0, uneven = 0;
    for (int64_t i = 0; i < count; i++) {
        needs[i] = cpa_cache_blocks_of(limits, cached_tokens(&requests[i]));
        if (needs[i] > needs[largest]) largest = i;
        uneven = cpa_max64(uneven, blocks_beyond_share(limits, cached_tokens(&requests[i])));
    }
    cpa_status status = CPA_OK;
    if (needs[largest] > most) {
        status = cpa_fail(err, CPA_INVALID,
                          "request %" PRIu64 ": found %" PRId64 " tokens, which need %" PRId64
                          " blocks on a rank, expected at most %" PRId64 " (%" PRId64 " MiB of free memory a rank)",
                          requests[largest].id, cached_tokens(&requests[largest]), needs[largest], most,
                          limits->memory_bytes >> 20);
    } else {
        qsort(needs, (size_t)count, sizeof *needs, descending);
        int64_t blocks = uneven;
        for (int64_t i = 0; i < count && i < limits->max_num_seqs && blocks < most; i++) blocks += needs[i];
        *out = blocks < most ? blocks : most;
    }
    free(needs);
    return status;
}

cpa_status cpa_cache_check(const cpa_cache_limits *limits, const char *option, int64_t blocks, cpa_error *err) {
    const int64_t most = cpa_cache_most_blocks(limits);
    if (blocks <= most) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "%s: found %" PRId64 ", expected at most %" PRId64 " (blocks of %" PRId64 " KiB in %" PRId64
                    " MiB of free memory a rank)",
                    option, blocks, most, cpa_cache_block_bytes(limits) >> 10, limits->memory_bytes >> 20);
}
