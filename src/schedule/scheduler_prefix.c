#include "src/schedule/scheduler_prefix.h"

#include <string.h>

#include "base/check.h"
#include "src/schedule/unconfirmed.h"

int cpa_scheduler_shares(const cpa_scheduler *s, const cpa_sequence *sequence) {
    return s->options.prefix_caching || sequence->request.group != 0;
}

int cpa_scheduler_digest(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_prefix_digest *parent, int64_t first,
                         int32_t n, cpa_prefix_digest *out) {
    uint32_t *tokens = cpa_prefix_cache_tokens(s->cache);
    for (int32_t i = 0; i < n; i++) tokens[i] = cpa_sequence_token(sequence, &s->options, first + i);
    return cpa_prefix_cache_link(s->cache, parent, n, out);
}

const cpa_sequence *cpa_scheduler_who_computes(const cpa_scheduler *s, const cpa_prefix_digest *key) {
    cpa_sequence *computing;
    HASH_FIND(pending, s->pending, key, sizeof *key, computing);
    return computing;
}

/* Finds out what the sequence completes next: the end of its prompt, or a full block whose tokens can be named. */
static int set_next(cpa_scheduler *s, cpa_sequence *sequence) {
    int64_t block_size = s->options.block_size, first = sequence->linked * block_size;
    int64_t tail = sequence->request.prompt_tokens - first;
    if (tail > 0 && tail < block_size && !sequence->tail_linked) {
        sequence->next_tokens = (int32_t)tail;
    } else if (first + block_size <= cpa_sequence_named(sequence)) {
        sequence->next_tokens = (int32_t)block_size;
    } else {
        return 0;
    }
    if (!cpa_scheduler_digest(s, sequence, &sequence->tip, first, sequence->next_tokens, &sequence->next)) return 0;
    sequence->has_next = 1;
    sequence->next_key = cpa_sequence_key(sequence->placement, &sequence->next);
    if (!cpa_scheduler_who_computes(s, &sequence->next_key))
        HASH_ADD(pending, s->pending, next_key, sizeof sequence->next_key, sequence);
    return 1;
}

void cpa_scheduler_unlink(cpa_scheduler *s, cpa_sequence *sequence) {
    if (sequence->pending.tbl) HASH_DELETE(pending, s->pending, sequence);
    memset(&sequence->pending, 0, sizeof sequence->pending);
    sequence->has_next = 0;
}

cpa_status cpa_scheduler_link(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    if (!cpa_scheduler_shares(s, sequence)) return CPA_OK;
    while (sequence->has_next || set_next(s, sequence)) {
        int32_t n = sequence->next_tokens;
        int partial = n < s->options.block_size;
        if (sequence->computed < sequence->linked * s->options.block_size + n) return CPA_OK;
        int32_t rank = cpa_sequence_block_rank(sequence, &s->options, sequence->linked);
        int32_t block = *cpa_sequence_block(sequence, &s->options, sequence->linked);
        cpa_scheduler_unlink(s, sequence);
        if (block >= 0 && cpa_prefix_cache_add(s->cache, &sequence->next_key, rank, block, partial)) {
            CPA_TRY(cpa_block_pool_keep(s->pools[rank], block, sequence->tenant->number, err));
            CPA_TRY(cpa_unconfirmed_note(s, &sequence->next_key, sequence->request.id, rank, block, err));
        }
        if (partial) {
            sequence->tail_linked = 1;
        } else {
            sequence->tip = sequence->next;
            sequence->linked++;
        }
    }
    return CPA_OK;
}
