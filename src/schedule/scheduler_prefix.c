#include "src/schedule/scheduler_prefix.h"

#include <string.h>

#include "base/check.h"
#include "src/schedule/block_events.h"
#include "src/schedule/unconfirmed.h"

int cpa_scheduler_shares(const cpa_scheduler *s, const cpa_sequence *sequence) {
    return s->options.prefix_caching || sequence->request.group != 0;
}

int cpa_scheduler_digest(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_prefix_digest *parent, int64_t first,
                         int32_t n, cpa_prefix_digest *out) {
    uint32_t *tokens = cpa_prefix_cache_tokens(s->caches[0]);
    cpa_prefix_digest at = *parent;
    for (int32_t done = 0; done < n; done += s->options.block_size) {
        const int32_t part = n - done < s->options.block_size ? n - done : s->options.block_size;
        for (int32_t i = 0; i < part; i++) tokens[i] = cpa_sequence_token(sequence, &s->options, first + done + i);
        if (!cpa_prefix_cache_link(s->caches[0], &at, part, &at)) return 0;
    }
    *out = at;
    return 1;
}

const cpa_sequence *cpa_scheduler_who_computes(const cpa_scheduler *s, const cpa_prefix_digest *key) {
    cpa_sequence *computing;
    HASH_FIND(pending, s->pending, key, sizeof *key, computing);
    return computing;
}

/* Finds out what the sequence completes next: the end of its prompt, or a full unit whose tokens can be named. */
static int set_next(cpa_scheduler *s, cpa_sequence *sequence) {
    int64_t unit = cpa_prefix_unit(&s->options, sequence->placement), first = sequence->linked * unit;
    int64_t tail = sequence->request.prompt_tokens - first;
    if (tail > 0 && tail < unit && !sequence->tail_linked) {
        sequence->next_tokens = (int32_t)tail;
    } else if (first + unit <= cpa_sequence_named(sequence)) {
        sequence->next_tokens = (int32_t)unit;
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

/* The blocks of a group on all ranks with tokens [first, end) of a sequence, in s->unit; whether all of them are there
 * still. */
static int find_unit(cpa_scheduler *s, const cpa_sequence *sequence, int32_t group, int64_t first, int64_t end) {
    const int32_t size = s->options.map.cp_size;
    int whole = 1;
    for (int32_t r = 0; r < size; r++) {
        const int32_t *block = cpa_sequence_block(sequence, &s->options, group * size + r, first, end);
        s->unit[r] = block ? *block : -1;
        whole &= !block || *block >= 0;
    }
    return whole;
}

/* Lets the blocks of a group in s->unit be found by what the sequence has computed last, if no others are. */
static cpa_status let_find(cpa_scheduler *s, const cpa_sequence *sequence, int32_t group, int partial, cpa_error *err) {
    const int32_t size = s->options.map.cp_size, pool = group * size;
    const int32_t first = cpa_owner_rank(s->options.map, sequence->placement,
                                         sequence->linked * cpa_prefix_unit(&s->options, sequence->placement));
    if (!cpa_prefix_cache_add(s->caches[group], &sequence->next_key, s->unit, partial)) return CPA_OK;
    if (!partial) {
        const int64_t n = sequence->next_tokens;
        const cpa_stored_unit unit = {group, sequence->next_key, cpa_sequence_key(sequence->placement, &sequence->tip),
                                      sequence->linked * n, n};
        cpa_block_events_stored(s, sequence, &unit);
    }
    for (int32_t r = 0; r < size; r++)
        if (s->unit[r] >= 0)
            CPA_TRY(cpa_block_pool_keep(s->pools[pool + r], s->unit[r], sequence->tenant->number, err));
    return cpa_unconfirmed_note(s, &sequence->next_key, sequence->request.id, pool + first, s->unit[first], err);
}

cpa_status cpa_scheduler_link(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    if (!cpa_scheduler_shares(s, sequence)) return CPA_OK;
    const int64_t unit = cpa_prefix_unit(&s->options, sequence->placement);
    while (sequence->has_next || set_next(s, sequence)) {
        const int64_t first = sequence->linked * unit, end = first + sequence->next_tokens;
        const int partial = sequence->next_tokens < unit;
        if (sequence->computed < end) return CPA_OK;
        cpa_scheduler_unlink(s, sequence);
        for (int32_t g = 0; g < s->options.groups.count; g++)
            if (cpa_layer_group_keeps(&s->options.groups.list[g], first) && find_unit(s, sequence, g, first, end))
                CPA_TRY(let_find(s, sequence, g, partial, err));
        if (partial) {
            sequence->tail_linked = 1;
        } else {
            sequence->tip = sequence->next;
            sequence->linked++;
        }
    }
    return CPA_OK;
}
