#include "src/schedule/scheduler_chunk.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/scheduler_blocks.h"

/* Blocks that a sequence lacks in a pool for its first tokens. In all groups but the first they are no more than it can
 * ever hold at once there. */
static int64_t lacks(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t pool, int64_t tokens) {
    const cpa_sequence_shard *shard = &sequence->shards[pool];
    const int64_t all = cpa_sequence_lacks(sequence, &s->options, pool, tokens);
    if (pool < s->options.map.cp_size) return all;
    const int32_t group = pool / s->options.map.cp_size;
    const int64_t most = cpa_request_needs(&s->options, group, sequence->placement.kind, tokens);
    return cpa_min64(all, most - (shard->held - shard->voided));
}

/* Blocks of each pool that are spared for the running sequences, in s->spared. */
static void spare(cpa_scheduler *s, int waits) {
    memset(s->spared, 0, (size_t)s->n_pools * sizeof *s->spared);
    for (int32_t i = 0; i < s->n_running; i++) {
        const cpa_sequence *other = s->running[i];
        const int decodes = cpa_sequence_decodes(other);
        if (!decodes && !waits) continue;
        for (int32_t p = 0; p < s->n_pools; p++) {
            const int32_t rank = cpa_pool_rank(&s->options, p);
            if (cpa_tokens_on(s->options.map, other->placement, rank).kind == CPA_TOKENS_NONE) continue;
            s->spared[p] += decodes ? 1 : lacks(s, other, p, cpa_sequence_known(other));
        }
    }
}

/* Blocks that a pool has for so many more tokens beyond those that they need; less than 0: they do not fit. */
static int64_t left_over(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t pool, int64_t tokens) {
    const int64_t lacking = lacks(s, sequence, pool, sequence->computed + tokens);
    return lacking <= 0 ? 0 : cpa_block_pool_free_count(s->pools[pool]) - s->spared[pool] - lacking;
}

/* The pool that has least for so many tokens. */
static int32_t fullest_pool(const cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    int32_t fullest = 0;
    for (int32_t p = 1; p < s->n_pools; p++)
        if (left_over(s, sequence, p, tokens) < left_over(s, sequence, fullest, tokens)) fullest = p;
    return fullest;
}

static int fits(const cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    return left_over(s, sequence, fullest_pool(s, sequence, tokens), tokens) >= 0;
}

int64_t cpa_scheduler_chunk_tokens(cpa_scheduler *s, const cpa_sequence *sequence, int waits) {
    const int64_t most = cpa_scheduler_next_tokens(s, sequence), block = s->options.block_size,
                  rest = cpa_sequence_known(sequence) - sequence->computed;
    if (!s->options.adaptive_chunks || cpa_sequence_decodes(sequence)) return most;
    spare(s, waits);
    if (waits && s->n_running > 0 && !fits(s, sequence, rest)) {
        cpa_log(CPA_LOG_DEBUG,
                "request %" PRIu64 " is not begun: its %" PRId64 " tokens do not fit beside those that run",
                sequence->request.id, rest);
        return 0;
    }
    if (fits(s, sequence, most)) return most;
    const int32_t fullest = fullest_pool(s, sequence, most);
    const int64_t spared = s->spared[fullest], free_blocks = cpa_block_pool_free_count(s->pools[fullest]);
    int64_t blocks = 0, above = (most + block - 1) / block; /* that many fit, that many do not */
    while (above - blocks > 1) {
        const int64_t between = blocks + (above - blocks) / 2;
        *(fits(s, sequence, between * block) ? &blocks : &above) = between;
    }
    int64_t tokens = blocks * block;
    if (tokens == 0) {
        memset(s->spared, 0, (size_t)s->n_pools * sizeof *s->spared);
        for (tokens = cpa_min64(most, block); tokens > 1 && !fits(s, sequence, tokens);) tokens /= 2;
    }
    s->stats.cut_chunks += tokens < most;
    cpa_log(CPA_LOG_INFO,
            "request %" PRIu64 ": a chunk of %" PRId64 " tokens in place of %" PRId64 ": rank %" PRId32 " has %" PRId64
            " free blocks, %" PRId64 " of them spared for others",
            sequence->request.id, tokens, most, cpa_pool_rank(&s->options, fullest), free_blocks, spared);
    return tokens;
}
