#include "src/schedule/scheduler_admit.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/fair_room.h"
#include "src/schedule/fair_share.h"
#include "src/schedule/fair_step.h"
#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/scheduler_chunk.h"
#include "src/schedule/scheduler_prefix.h"
#include "src/schedule/unconfirmed.h"

typedef enum verdict {
    ADMITTED,
    SKIP, /* it has to wait, and others need not wait for it, */
    FULL, /* only those of other tenants need not: its own has used up the quota */
    STOP  /* nobody is to overtake it */
} verdict;

/* What can be looked up in a placement: the full units of the known tokens, then the end of a prompt that nothing
 * follows yet. What is found has no logits: a prompt that is to tell its log-probabilities is computed. */
static int64_t count_links(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement) {
    int64_t unit = cpa_prefix_unit(&s->options, placement), known = cpa_sequence_known(sequence);
    if (!cpa_scheduler_shares(s, sequence)) return 0;
    if (sequence->request.sampling.prompt_logprobs && sequence->emitted == 0) return 0;
    return known / unit + (sequence->emitted == 0 && known % unit != 0);
}

/* Where unit j ends, or the known tokens. */
static int64_t end_of_unit(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement, int64_t j) {
    return cpa_min64((j + 1) * cpa_prefix_unit(&s->options, placement), cpa_sequence_known(sequence));
}

/* The digest of unit j, which is that of its last block: blocks are chained alike in every placement. NULL without
 * memory. */
static const cpa_prefix_digest *probe(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int64_t j) {
    const int64_t block_size = s->options.block_size, end = end_of_unit(s, sequence, placement, j),
                  last = (end - 1) / block_size;
    if (!cpa_array_reserve(&sequence->probe, &sequence->probe_capacity, last + 1, sizeof *sequence->probe)) return NULL;
    for (int64_t i; (i = sequence->n_probe) <= last; sequence->n_probe++) {
        const cpa_prefix_digest *parent = i > 0 ? &sequence->probe[i - 1] : &sequence->root;
        const int32_t n = (int32_t)cpa_min64(block_size, cpa_sequence_known(sequence) - i * block_size);
        if (!cpa_scheduler_digest(s, sequence, parent, i * block_size, n, &sequence->probe[i])) return NULL;
    }
    return &sequence->probe[last];
}

/* What unit j is found by in a placement; 0 without memory. */
static int key_of(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int64_t j,
                  cpa_prefix_digest *key) {
    const cpa_prefix_digest *digest = probe(s, sequence, placement, j);
    if (digest) *key = cpa_sequence_key(placement, digest);
    return digest != NULL;
}

/* How many of its units were found in a placement when it last looked there. */
static int64_t *found_in(cpa_sequence *sequence, cpa_placement placement) {
    return placement.kind == CPA_ON_RANK ? &sequence->shards[placement.rank].found : &sequence->found_sharded;
}

/* Counts the leading units that can be found in a placement. Goes on where it ended the last time: what has been
 * evicted since then shows when the blocks are shared. */
static int64_t look(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement) {
    int64_t *found = found_in(sequence, placement);
    int64_t links = count_links(s, sequence, placement);
    for (; *found < links; ++*found) {
        cpa_prefix_digest key;
        if (!key_of(s, sequence, placement, *found, &key)) break;
        if (!cpa_prefix_cache_find(s->cache, &key) || cpa_unconfirmed_has(s, &key)) break;
    }
    return *found;
}

/* The running sequence that computes the first unit that cannot be found in a placement; NULL if none does. */
static const cpa_sequence *who_computes(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement) {
    const int64_t found = *found_in(sequence, placement);
    cpa_prefix_digest key;
    if (found >= count_links(s, sequence, placement) || !key_of(s, sequence, placement, found, &key)) return NULL;
    return cpa_scheduler_who_computes(s, &key);
}

/* Units that can be found in a placement, now or when one who computes the next of them is as far as is known. */
static int64_t expect(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement) {
    int64_t found = look(s, sequence, placement);
    const cpa_sequence *computing = who_computes(s, sequence, placement);
    if (!computing) return found;
    int64_t known = cpa_min64(cpa_sequence_known(sequence), cpa_sequence_known(computing));
    return cpa_max64(found, known / cpa_prefix_unit(&s->options, placement));
}

/* The rank that would have the fewest blocks in use if the sequence lay on it; among equals the one where it would
 * begin otherwise, or the next. */
static int32_t best_rank(cpa_scheduler *s, cpa_sequence *sequence) {
    const cpa_owner_map map = s->options.map;
    int32_t best = sequence->first_rank;
    int64_t least = INT64_MAX;
    for (int32_t i = 0; i < map.cp_size; i++) {
        int32_t r = (sequence->first_rank + i) % map.cp_size;
        int64_t used = s->options.num_blocks - cpa_block_pool_free_count(s->pools[r]);
        int64_t more = used - expect(s, sequence, (cpa_placement){CPA_ON_RANK, r});
        if (more >= least) continue;
        least = more;
        best = r;
    }
    return best;
}

/* Decides where the sequence is to lie, by how much of it lies there already. */
static void choose_placement(cpa_scheduler *s, cpa_sequence *sequence) {
    const cpa_scheduler_options *o = &s->options;
    sequence->placement = (cpa_placement){CPA_SHARDED, sequence->first_rank};
    int64_t found = look(s, sequence, sequence->placement);
    if (!cpa_request_may_be_local(o, &sequence->request)) return;
    int32_t rank = best_rank(s, sequence);
    int64_t known = cpa_sequence_known(sequence), most = known - 1;
    int64_t local = cpa_min64(sequence->shards[rank].found * o->block_size, most);
    int64_t sharded = cpa_min64(found * cpa_prefix_unit(o, sequence->placement), most);
    int64_t output = sequence->request.output_tokens - sequence->emitted;
    int64_t others = s->n_running + s->waiting.count - 1; /* it is still among the waiting ones */
    if (o->local_context == 0 && !cpa_planner_prefers_local(&o->planner, known, output, local, sharded, others)) return;
    sequence->placement = (cpa_placement){CPA_ON_RANK, rank};
}

/* Whether the first unit that cannot be found was computed in the last steps. */
static int awaits_confirmation(cpa_scheduler *s, cpa_sequence *sequence) {
    const int64_t found = *found_in(sequence, sequence->placement);
    cpa_prefix_digest key;
    if (found >= count_links(s, sequence, sequence->placement)) return 0;
    if (!key_of(s, sequence, sequence->placement, found, &key)) return 0;
    const int awaits = cpa_unconfirmed_has(s, &key);
    s->awaits_confirmation |= awaits;
    return awaits;
}

/* Whether a running sequence computes the first unit that cannot be found, or has just computed it. */
static int must_wait(cpa_scheduler *s, cpa_sequence *sequence) {
    return who_computes(s, sequence, sequence->placement) != NULL || awaits_confirmation(s, sequence);
}

/* Adds the blocks of a unit, or, if the sequence goes on within its tokens [first, computed), makes them the sources of
 * copies. */
static cpa_status share_unit(cpa_scheduler *s, cpa_sequence *sequence, const int32_t *unit, int64_t first, int copies,
                             cpa_error *err) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        if (!cpa_sequence_block(sequence, &s->options, r, first, sequence->computed)) continue;
        if (copies) {
            s->sources[r] = unit[r];
        } else {
            CPA_TRY(cpa_sequence_share(sequence, r, s->pools[r], unit[r], err));
        }
    }
    return CPA_OK;
}

/* Shares the leading units that can be found. At least the last known token is left to compute. If it falls into a
 * unit that was found, s->sources gets the blocks of that one, which copies of its own will replace; otherwise they are
 * -1. */
static cpa_status share_prefix(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    const cpa_placement placement = sequence->placement;
    int64_t unit = cpa_prefix_unit(&s->options, placement), known = cpa_sequence_known(sequence), j = 0;
    const int64_t links = count_links(s, sequence, placement);
    for (int32_t r = 0; r < s->options.map.cp_size; r++) s->sources[r] = -1;
    sequence->tip = sequence->root;
    sequence->linked = sequence->tail_linked = sequence->computed = 0;
    for (; j < links; j++) {
        cpa_prefix_digest key;
        const int64_t first = j * unit, end = end_of_unit(s, sequence, placement, j);
        if (!key_of(s, sequence, placement, j, &key)) break;
        const int32_t *blocks = cpa_prefix_cache_find(s->cache, &key);
        if (!blocks || cpa_unconfirmed_has(s, &key)) break;
        sequence->computed = cpa_min64(end, known - 1);
        if (sequence->computed == first) break; /* nothing of this unit would be used */
        if (end == first + unit) {
            sequence->tip = *probe(s, sequence, placement, j);
            sequence->linked++;
        } else {
            sequence->tail_linked = 1;
        }
        CPA_TRY(share_unit(s, sequence, blocks, first, sequence->computed % unit != 0, err));
    }
    *found_in(sequence, sequence->placement) = j;
    sequence->shared = sequence->linked;
    return CPA_OK;
}

/* Statistics of the first admission: blocks of whole units of the prompt, and those of them that were found. */
static void count_hits(cpa_scheduler *s, cpa_sequence *sequence) {
    if (sequence->queried || !cpa_scheduler_shares(s, sequence)) return;
    sequence->queried = 1;
    const int64_t unit = cpa_prefix_unit(&s->options, sequence->placement), blocks = unit / s->options.block_size;
    s->stats.prefix_queries += sequence->request.prompt_tokens / unit * blocks;
    s->stats.prefix_hits += sequence->linked * blocks;
}

/* Puts a sequence among the running ones, in their order. */
static void enter(cpa_scheduler *s, cpa_sequence *sequence) {
    int32_t at = s->n_running++;
    sequence->tenant->running++;
    for (; at > 0 && cpa_sequence_before(sequence, s->running[at - 1]); at--) s->running[at] = s->running[at - 1];
    s->running[at] = sequence;
    sequence->index = s->free_indices[--s->n_free_indices];
    free(sequence->probe);
    sequence->probe = NULL;
    sequence->n_probe = sequence->probe_capacity = sequence->found_sharded = 0;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) sequence->shards[r].found = 0;
}

/* Where the unit begins that the next tokens of a sequence go to. */
static int64_t open_unit(const cpa_scheduler *s, const cpa_sequence *sequence) {
    const int64_t unit = cpa_prefix_unit(&s->options, sequence->placement);
    return sequence->computed / unit * unit;
}

/* Plans the copies of the sources, and keeps these until the next plan. */
static cpa_status copy_on_write(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    const int64_t first = open_unit(s, sequence);
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        if (s->sources[r] < 0) continue;
        cpa_block_move *copy = cpa_step_plan_add_copy(s->plan);
        if (!copy) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        const int32_t *to = cpa_sequence_block(sequence, &s->options, r, first, sequence->computed);
        *copy = (cpa_block_move){sequence->request.id, r, s->sources[r], *to};
        s->stats.cow_copies++;
        CPA_TRY(cpa_scheduler_pin(s, s->pools[r], s->sources[r], err));
    }
    return CPA_OK;
}

/* The sources must not be taken for something else in this plan. */
static cpa_status retain_sources(cpa_scheduler *s, cpa_error *err) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++)
        if (s->sources[r] >= 0) CPA_TRY(cpa_block_pool_retain(s->pools[r], s->sources[r], err));
    return CPA_OK;
}

static cpa_status release_sources(cpa_scheduler *s, cpa_error *err) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        if (s->sources[r] >= 0) CPA_TRY(cpa_block_pool_release(s->pools[r], s->sources[r], err));
        s->sources[r] = -1;
    }
    return CPA_OK;
}

/* Gives up the unit that was found and would be copied: its tokens are computed instead. */
static cpa_status give_up_sources(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    sequence->computed = open_unit(s, sequence);
    sequence->linked = sequence->computed / cpa_prefix_unit(&s->options, sequence->placement);
    sequence->shared = sequence->linked;
    sequence->tip = sequence->root;
    if (sequence->linked > 0) sequence->tip = *probe(s, sequence, sequence->placement, sequence->linked - 1);
    sequence->tail_linked = 0;
    return release_sources(s, err);
}

/* Turns a request away that lacks a place, blocks, in s->lacks, or quota, even if all that was found is shared: a look
 * that costs little, as the first in line may be turned away in many plans. Otherwise ADMITTED. */
static verdict look_for_room(cpa_scheduler *s, cpa_sequence *sequence) {
    const int64_t units = *found_in(sequence, sequence->placement);
    int64_t quota = s->options.tenant_block_quota;
    int room = s->n_free_indices > 0;
    sequence->computed =
        cpa_min64(units * cpa_prefix_unit(&s->options, sequence->placement), cpa_sequence_known(sequence) - 1);
    int64_t tokens = cpa_scheduler_next_tokens(s, sequence);
    if (s->options.adaptive_chunks) tokens = cpa_min64(tokens, s->options.block_size); /* the least that it is given */
    int64_t first = open_unit(s, sequence), end = sequence->computed + tokens;
    sequence->computed = 0;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        int64_t needs = cpa_sequence_needs(sequence, &s->options, r, end);
        s->lacks[r] = needs - cpa_sequence_needs(sequence, &s->options, r, first);
        if (s->lacks[r] > 0 && quota > 0 && sequence->tenant->held[r] + needs > quota) return FULL;
        if (s->lacks[r] > cpa_block_pool_free_count(s->pools[r])) room = 0;
    }
    return room ? ADMITTED : STOP;
}

/* Whether there is room for the tokens, with a place of its own and the blocks that s->lacks gets; it may be others'
 * that are beyond their share. */
static cpa_status find_room(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens, int *room, cpa_error *err) {
    *room = tokens > 0 && cpa_scheduler_has_room(s, sequence, sequence->computed + tokens);
    return *room || tokens == 0 ? CPA_OK : cpa_fair_make_room(s, sequence, s->lacks, room, err);
}

/* A request without anything in host memory. */
static cpa_status try_fresh(cpa_scheduler *s, cpa_sequence *sequence, verdict *out, cpa_error *err) {
    const int32_t ranks = s->options.map.cp_size;
    int room = 1;
    *out = SKIP;
    choose_placement(s, sequence);
    if (must_wait(s, sequence)) return CPA_OK;
    *out = look_for_room(s, sequence);
    if (*out == STOP) CPA_TRY(cpa_fair_make_room(s, sequence, s->lacks, &room, err));
    if (*out == FULL || !room) return CPA_OK;
    if (!cpa_sequence_open(sequence, ranks))
        return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory for its block table", sequence->request.id);
    CPA_TRY(share_prefix(s, sequence, err));
    CPA_TRY(retain_sources(s, err));
    int64_t tokens = cpa_scheduler_chunk_tokens(s, sequence, 1);
    CPA_TRY(find_room(s, sequence, tokens, &room, err));
    if (!room && sequence->computed > open_unit(s, sequence)) {
        /* Sources and copies together may be more than there are; the blocks alone always fit at last. */
        CPA_TRY(give_up_sources(s, sequence, err));
        tokens = cpa_scheduler_chunk_tokens(s, sequence, 1);
        CPA_TRY(find_room(s, sequence, tokens, &room, err));
    }
    cpa_scheduler_charge(sequence, ranks, 1);
    int within = cpa_scheduler_within_quota(s, sequence);
    if (!room || !within) {
        *out = within ? STOP : FULL;
        s->stats.held_back += tokens == 0 && !sequence->held_back;
        sequence->held_back |= tokens == 0;
        cpa_scheduler_charge(sequence, ranks, -1);
        CPA_TRY(release_sources(s, err));
        sequence->computed = sequence->linked = 0;
        return cpa_sequence_close(sequence, s->pools, ranks, err);
    }
    *out = ADMITTED;
    count_hits(s, sequence);
    s->stats.rank_local += sequence->placement.kind == CPA_ON_RANK;
    enter(s, sequence);
    cpa_scheduler_place(s, sequence, tokens);
    CPA_TRY(copy_on_write(s, sequence, err));
    /* Others that come now wait for what this one computes. */
    return cpa_scheduler_link(s, sequence, err);
}

/* Plans the way back of what a sequence has in host memory, into the blocks of its new table. */
static cpa_status swap_in(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        cpa_sequence_shard *shard = &sequence->shards[r];
        for (int64_t i = 0; i < shard->swapped; i++) {
            int32_t host = sequence->host[r * sequence->stride + i], *block = &sequence->blocks[shard->held++];
            block += r * sequence->stride;
            *block = -1;
            if (host < 0) {
                shard->voided++;
                continue;
            }
            cpa_block_pool_take(s->pools[r], 1, block);
            cpa_block_move *move = cpa_step_plan_add_swap_in(s->plan);
            if (!move) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
            *move = (cpa_block_move){sequence->request.id, r, host, *block};
            CPA_TRY(cpa_scheduler_pin(s, s->host_pools[r], host, err));
            s->stats.swapped_in++;
        }
        shard->swapped = 0;
    }
    free(sequence->host);
    sequence->host = NULL;
    return CPA_OK;
}

/* Blocks that a swapped sequence needs on each rank for its next token, in s->lacks. */
static void count_blocks_of_return(cpa_scheduler *s, const cpa_sequence *sequence) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        s->lacks[r] = cpa_sequence_needs(sequence, &s->options, r, sequence->computed + 1);
        for (int64_t i = 0; i < sequence->shards[r].swapped; i++)
            s->lacks[r] -= sequence->host[r * sequence->stride + i] < 0;
    }
}

/* A sequence that comes back from host memory; it is given tokens in the second plan after. */
static cpa_status try_return(cpa_scheduler *s, cpa_sequence *sequence, verdict *out, cpa_error *err) {
    int room = 0;
    count_blocks_of_return(s, sequence);
    *out = cpa_scheduler_within_quota(s, sequence) ? STOP : FULL;
    if (*out == STOP) CPA_TRY(cpa_fair_make_room(s, sequence, s->lacks, &room, err));
    if (!room) return CPA_OK;
    if (!cpa_sequence_open(sequence, s->options.map.cp_size))
        return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory for its block table", sequence->request.id);
    *out = ADMITTED;
    CPA_TRY(swap_in(s, sequence, err));
    cpa_scheduler_charge(sequence, s->options.map.cp_size, 1);
    enter(s, sequence);
    sequence->ready = s->step + 2;
    return CPA_OK;
}

/* Those of one line that wait for their prefix are passed over one by one, up to a bound, and the rest of them, or all
 * where the tenant is at its quota, at once: how long one tenant's line is makes no difference to another. Where a
 * running sequence lacks blocks, and behind a sequence of a tenant that is below its share, whose first token others'
 * prompts in the same step would delay, such tenants alone are admitted. */
cpa_status cpa_scheduler_admit(cpa_scheduler *s, cpa_error *err) {
    cpa_sequence *sequence, *skipped = NULL;
    cpa_status status = CPA_OK;
    int spares = s->short_of_blocks; /* tenants that are not below their share wait for the next plan */
    while (s->budget > 0 && (sequence = cpa_waiting_first(&s->waiting))) {
        cpa_waiting_line *line = sequence->line;
        const int is_below = cpa_fair_is_below(s, sequence->tenant);
        verdict v = STOP;
        if (spares && !is_below) break;
        const int is_through = !sequence->host && cpa_fair_step_prompt_tokens(s, sequence->tenant) == 0;
        if (sequence->ready > s->step || is_through) { /* it has just given way, or its tenant has added enough */
            cpa_waiting_set_aside(&s->waiting, line);
            continue;
        }
        CPA_TRY_GOTO(sequence->host ? try_return(s, sequence, &v, err) : try_fresh(s, sequence, &v, err), done);
        if (v == STOP) break;
        if (v == FULL || (v == SKIP && line->skipped == CPA_MAX_SKIPPED)) {
            cpa_waiting_set_aside(&s->waiting, line);
            continue;
        }
        cpa_waiting_remove(&s->waiting, sequence);
        if (v == ADMITTED) {
            spares |= is_below;
            continue;
        }
        line->skipped++;
        sequence->next_skipped = skipped;
        skipped = sequence;
    }
done:
    for (; skipped; skipped = skipped->next_skipped) {
        skipped->line->skipped = 0;
        cpa_waiting_push(&s->waiting, skipped);
    }
    cpa_waiting_return_all(&s->waiting);
    return status;
}
