#include "src/schedule/sequence.h"

#include <stdlib.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/check.h"

/* Where the request stands in line. With ageing, waiting makes up for priority: one level for every ageing_s seconds.
 * As all who wait age alike, that is an order by arrival + priority * ageing_s, which time does not change. */
static void set_order(cpa_sequence *sequence, const cpa_scheduler_options *options) {
    const cpa_scheduler_request *request = &sequence->request;
    sequence->key = request->arrival;
    if (options->policy == CPA_POLICY_FCFS) return;
    if (options->ageing_s > 0) {
        sequence->key += request->priority * options->ageing_s;
    } else {
        sequence->level = request->priority;
    }
}

static int64_t blocks_for(int64_t tokens, int32_t block_size) {
    return tokens / block_size + (tokens % block_size != 0);
}

cpa_sequence *cpa_sequence_create(const cpa_scheduler_options *options, const cpa_scheduler_request *request,
                                  const cpa_prefix_digest *first) {
    size_t shards = (size_t)cpa_pools(options) * sizeof(cpa_sequence_shard);
    cpa_sequence *sequence = calloc(1, sizeof *sequence + shards);
    if (!sequence) return NULL;
    uint64_t hash;
    memcpy(&hash, first->bytes, sizeof hash);
    sequence->request = *request;
    sequence->request.salt = sequence->request.tenant = NULL;
    sequence->guess = CPA_NO_TOKEN;
    sequence->first_rank = (int32_t)(hash % (uint64_t)options->map.cp_size);
    sequence->placement = (cpa_placement){CPA_SHARDED, sequence->first_rank};
    int64_t tokens = cpa_cached_tokens(request->prompt_tokens, request->output_tokens);
    sequence->stride = cpa_request_may_be_local(options, request) ? blocks_for(tokens, options->block_size)
                                                                  : cpa_request_blocks(options, tokens);
    set_order(sequence, options);
    return sequence;
}

void cpa_sequence_destroy(cpa_sequence *sequence) {
    if (!sequence) return;
    if (sequence->tenant) cpa_tenant_leave(sequence->tenant);
    cpa_drafting_destroy(sequence->drafting);
    free(sequence->outputs);
    free(sequence->probe);
    free(sequence->host);
    free(sequence->blocks);
    free(sequence);
}

int64_t cpa_request_blocks(const cpa_scheduler_options *options, int64_t tokens) {
    return blocks_for(cpa_shard_len(options->map, 0, tokens), options->block_size);
}

int64_t cpa_request_needs(const cpa_scheduler_options *options, int32_t group, cpa_placement_kind kind,
                          int64_t tokens) {
    if (group == 0)
        return kind == CPA_ON_RANK ? blocks_for(tokens, options->block_size) : cpa_request_blocks(options, tokens);
    return cpa_layer_group_most(&options->groups.list[group], options->map, options->block_size, kind,
                                options->max_num_batched_tokens, tokens);
}

int cpa_request_may_be_local(const cpa_scheduler_options *options, const cpa_scheduler_request *request) {
    int64_t tokens = cpa_cached_tokens(request->prompt_tokens, request->output_tokens),
            blocks = blocks_for(tokens, options->block_size);
    int64_t most = options->local_context;
    if (most == 0) most = cpa_planner_local_tokens(&options->planner);
    if (options->map.cp_size == 1 || tokens > most) return 0;
    for (int32_t g = 0; g < options->groups.count; g++)
        if (cpa_request_needs(options, g, CPA_ON_RANK, tokens) > options->groups.list[g].num_blocks) return 0;
    return options->tenant_block_quota == 0 || blocks <= options->tenant_block_quota;
}

int64_t cpa_prefix_unit(const cpa_scheduler_options *options, cpa_placement placement) {
    const int shorter = options->map.interleave < options->block_size && placement.kind == CPA_SHARDED;
    return (int64_t)options->block_size * (shorter ? options->map.cp_size : 1);
}

cpa_prefix_digest cpa_sequence_key(cpa_placement placement, const cpa_prefix_digest *digest) {
    cpa_prefix_digest key = *digest;
    uint32_t word;
    memcpy(&word, key.bytes, sizeof word);
    word ^= (uint32_t)placement.rank << 1 | (placement.kind == CPA_ON_RANK);
    memcpy(key.bytes, &word, sizeof word);
    return key;
}

int64_t cpa_sequence_known(const cpa_sequence *sequence) {
    return sequence->request.prompt_tokens + sequence->emitted;
}

int64_t cpa_sequence_named(const cpa_sequence *sequence) {
    const cpa_scheduler_request *request = &sequence->request;
    return request->draws ? request->prompt_tokens + sequence->reported : cpa_sequence_known(sequence);
}

uint32_t cpa_sequence_token(const cpa_sequence *sequence, const cpa_scheduler_options *options, int64_t position) {
    const cpa_scheduler_request *request = &sequence->request;
    if (request->draws && position >= request->prompt_tokens)
        return sequence->outputs[position - request->prompt_tokens];
    return options->token_at(options->token_ctx, request->id, position);
}

int cpa_sequence_decodes(const cpa_sequence *sequence) {
    return sequence->emitted > 0 && sequence->computed + sequence->misplaced == cpa_sequence_known(sequence) - 1;
}

int64_t cpa_sequence_draft_behind(const cpa_sequence *sequence, int64_t i, uint32_t token) {
    for (int64_t next = i + 1; next < sequence->n_listed; next++) {
        const int64_t parent = sequence->parents ? sequence->parents[next] : next - 1;
        if (parent == i && sequence->drafts[next] == token) return next;
    }
    return -1;
}

int cpa_sequence_before(const cpa_sequence *a, const cpa_sequence *b) {
    if (a->level != b->level) return a->level < b->level;
    if (a->key < b->key || a->key > b->key) return a->key < b->key;
    return a->request.id < b->request.id;
}

int64_t cpa_sequence_needs(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t rank,
                           int64_t tokens) {
    const cpa_token_set held = cpa_tokens_on(options->map, sequence->placement, rank);
    return blocks_for(cpa_tokens_before(options->map, held, tokens), options->block_size);
}

int64_t cpa_sequence_lacks(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool,
                           int64_t tokens) {
    const int32_t rank = cpa_pool_rank(options, pool);
    return cpa_sequence_needs(sequence, options, rank, tokens) - sequence->shards[pool].held;
}

int64_t cpa_sequence_first_unseen(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool) {
    return cpa_sequence_needs(sequence, options, cpa_pool_rank(options, pool), cpa_pool_group(options, pool)->sinks);
}

/* A query at `position` or later sees keys after position - window, and the sinks. */
int64_t cpa_sequence_unseen(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool,
                            int64_t position) {
    const int64_t window = cpa_pool_group(options, pool)->window, oldest = position - window + 1;
    const cpa_token_set held = cpa_tokens_on(options->map, sequence->placement, cpa_pool_rank(options, pool));
    if (window == 0 || oldest <= 0) return 0;
    return cpa_tokens_before(options->map, held, oldest) / options->block_size;
}

int32_t *cpa_sequence_block(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t pool,
                            int64_t first, int64_t end) {
    const int32_t rank = cpa_pool_rank(options, pool);
    const int64_t entry = cpa_sequence_needs(sequence, options, rank, first);
    if (cpa_sequence_needs(sequence, options, rank, end) == entry) return NULL;
    return sequence->blocks + pool * sequence->stride + entry;
}

int cpa_sequence_open(cpa_sequence *sequence, int32_t n_pools) {
    sequence->blocks = malloc((size_t)n_pools * (size_t)sequence->stride * sizeof *sequence->blocks);
    return sequence->blocks != NULL;
}

void cpa_sequence_take(cpa_sequence *sequence, int32_t index, cpa_block_pool *pool, int64_t n) {
    cpa_sequence_shard *shard = &sequence->shards[index];
    if (cpa_block_pool_take(pool, n, sequence->blocks + index * sequence->stride + shard->held)) shard->held += n;
}

cpa_status cpa_sequence_share(cpa_sequence *sequence, int32_t index, cpa_block_pool *pool, int32_t block,
                              cpa_error *err) {
    cpa_sequence_shard *shard = &sequence->shards[index];
    CPA_TRY(cpa_block_pool_retain(pool, block, err));
    sequence->blocks[index * sequence->stride + shard->held++] = block;
    return CPA_OK;
}

void cpa_sequence_skip_entry(cpa_sequence *sequence, int32_t index) {
    cpa_sequence_shard *shard = &sequence->shards[index];
    sequence->blocks[index * sequence->stride + shard->held++] = -1;
    shard->voided++;
}

cpa_status cpa_sequence_null_entry(cpa_sequence *sequence, int32_t index, int64_t entry, cpa_block_pool *pool,
                                   cpa_error *err) {
    int32_t *block = &sequence->blocks[index * sequence->stride + entry];
    CPA_TRY(cpa_block_pool_release(pool, *block, err));
    sequence->shards[index].voided++;
    *block = -1;
    return CPA_OK;
}

cpa_status cpa_sequence_close(cpa_sequence *sequence, cpa_block_pool **pools, int32_t n_pools, cpa_error *err) {
    for (int32_t p = 0; p < n_pools; p++) {
        cpa_sequence_shard *shard = &sequence->shards[p];
        for (int64_t i = shard->held - 1; i >= 0; i--) {
            int32_t block = sequence->blocks[p * sequence->stride + i];
            if (block < 0) continue;
            CPA_TRY(cpa_block_pool_release(pools[p], block, err));
        }
        shard->held = shard->voided = shard->announced = 0;
    }
    free(sequence->blocks);
    sequence->blocks = NULL;
    return CPA_OK;
}
