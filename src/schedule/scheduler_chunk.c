#include "src/schedule/scheduler_chunk.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/scheduler_blocks.h"

/* Blocks of each rank that are spared for the running sequences, in s->spared. */
static void spare(cpa_scheduler *s, int waits) {
    memset(s->spared, 0, (size_t)s->options.map.cp_size * sizeof *s->spared);
    for (int32_t i = 0; i < s->n_running; i++) {
        const cpa_sequence *other = s->running[i];
        const int decodes = cpa_sequence_decodes(other);
        if (!decodes && !waits) continue;
        for (int32_t r = 0; r < s->options.map.cp_size; r++) {
            if (cpa_tokens_on(s->options.map, other->placement, r).kind == CPA_TOKENS_NONE) continue;
            s->spared[r] += decodes ? 1 : cpa_sequence_lacks(other, &s->options, r, cpa_sequence_known(other));
        }
    }
}

/* Blocks that a rank has for so many more tokens beyond those that they need; less than 0: they do not fit. */
static int64_t left_over(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t rank, int64_t tokens) {
    const int64_t lacks = cpa_sequence_lacks(sequence, &s->options, rank, sequence->computed + tokens);
    return lacks <= 0 ? 0 : cpa_block_pool_free_count(s->pools[rank]) - s->spared[rank] - lacks;
}

/* The rank that has least for so many tokens. */
static int32_t fullest_rank(const cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    int32_t fullest = 0;
    for (int32_t r = 1; r < s->options.map.cp_size; r++)
        if (left_over(s, sequence, r, tokens) < left_over(s, sequence, fullest, tokens)) fullest = r;
    return fullest;
}

static int fits(const cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    return left_over(s, sequence, fullest_rank(s, sequence, tokens), tokens) >= 0;
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
    const int32_t fullest = fullest_rank(s, sequence, most);
    const int64_t spared = s->spared[fullest], free_blocks = cpa_block_pool_free_count(s->pools[fullest]);
    int64_t blocks = 0, above = (most + block - 1) / block; /* that many fit, that many do not */
    while (above - blocks > 1) {
        const int64_t between = blocks + (above - blocks) / 2;
        *(fits(s, sequence, between * block) ? &blocks : &above) = between;
    }
    int64_t tokens = blocks * block;
    if (tokens == 0) {
        memset(s->spared, 0, (size_t)s->options.map.cp_size * sizeof *s->spared);
        for (tokens = cpa_min64(most, block); tokens > 1 && !fits(s, sequence, tokens);) tokens /= 2;
    }
    s->stats.cut_chunks += tokens < most;
    cpa_log(CPA_LOG_INFO,
            "request %" PRIu64 ": a chunk of %" PRId64 " tokens in place of %" PRId64 ": rank %" PRId32 " has %" PRId64
            " free blocks, %" PRId64 " of them spared for others",
            sequence->request.id, tokens, most, fullest, free_blocks, spared);
    return tokens;
}
