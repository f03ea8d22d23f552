#include "src/sequence.h"

#include <stdlib.h>

#include "base/check.h"

/* The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014). */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static int32_t phase_of(const cpa_scheduler_options *options, const cpa_scheduler_request *request) {
    int64_t run = options->map.interleave;
    uint64_t hash = 0;
    if (run > request->prompt_tokens) run = request->prompt_tokens;
    for (int64_t i = 0; i < run; i++)
        hash = mix(hash + UINT64_C(0x9e3779b97f4a7c15) + options->token_at(options->token_ctx, request->id, i));
    return (int32_t)(hash % (uint64_t)options->map.cp_size);
}

cpa_sequence *cpa_sequence_create(const cpa_scheduler_options *options, const cpa_scheduler_request *request) {
    size_t shards = (size_t)options->map.cp_size * sizeof(cpa_sequence_shard);
    cpa_sequence *sequence = calloc(1, sizeof *sequence + shards);
    if (!sequence) return NULL;
    sequence->request = *request;
    sequence->phase = phase_of(options, request);
    sequence->stride = cpa_request_blocks(options, cpa_request_cached_tokens(request));
    return sequence;
}

void cpa_sequence_destroy(cpa_sequence *sequence) {
    if (!sequence) return;
    free(sequence->blocks);
    free(sequence);
}

int64_t cpa_request_cached_tokens(const cpa_scheduler_request *request) {
    return request->prompt_tokens + request->output_tokens - 1;
}

static int64_t blocks_for(int64_t tokens, int32_t block_size) {
    return tokens / block_size + (tokens % block_size != 0);
}

int64_t cpa_request_blocks(const cpa_scheduler_options *options, int64_t tokens) {
    return blocks_for(cpa_shard_len(options->map, 0, tokens), options->block_size);
}

int64_t cpa_sequence_known(const cpa_sequence *sequence) {
    return sequence->request.prompt_tokens + sequence->emitted;
}

int cpa_sequence_decodes(const cpa_sequence *sequence) {
    return sequence->emitted > 0 && sequence->computed == cpa_sequence_known(sequence) - 1;
}

int cpa_sequence_before(const cpa_sequence *a, const cpa_sequence *b) {
    const cpa_scheduler_request *x = &a->request, *y = &b->request;
    if (x->priority != y->priority) return x->priority < y->priority;
    if (x->arrival < y->arrival || x->arrival > y->arrival) return x->arrival < y->arrival;
    return x->id < y->id;
}

int64_t cpa_sequence_lacks(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t rank,
                           int64_t tokens) {
    int32_t slot = cpa_owner_slot(options->map, rank, sequence->phase);
    return blocks_for(cpa_shard_len(options->map, slot, tokens), options->block_size) - sequence->shards[rank].held;
}

int cpa_sequence_open(cpa_sequence *sequence, int32_t cp_size) {
    sequence->blocks = malloc((size_t)cp_size * (size_t)sequence->stride * sizeof *sequence->blocks);
    return sequence->blocks != NULL;
}

void cpa_sequence_take(cpa_sequence *sequence, int32_t rank, cpa_block_pool *pool, int64_t n) {
    cpa_sequence_shard *shard = &sequence->shards[rank];
    if (cpa_block_pool_take(pool, n, sequence->blocks + rank * sequence->stride + shard->held)) shard->held += n;
}

cpa_status cpa_sequence_close(cpa_sequence *sequence, cpa_block_pool **pools, int32_t cp_size, cpa_error *err) {
    for (int32_t rank = 0; rank < cp_size; rank++) {
        cpa_sequence_shard *shard = &sequence->shards[rank];
        for (int64_t i = 0; i < shard->held; i++)
            CPA_TRY(cpa_block_pool_release(pools[rank], sequence->blocks[rank * sequence->stride + i], err));
        *shard = (cpa_sequence_shard){0};
    }
    free(sequence->blocks);
    sequence->blocks = NULL;
    return CPA_OK;
}
