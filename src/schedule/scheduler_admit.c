#include "src/schedule/scheduler_admit.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/fair_room.h"
#include "src/schedule/fair_share.h"
#include "src/schedule/fair_step.h"
#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/scheduler_chunk.h"
#include "src/schedule/scheduler_fetch.h"
#include "src/schedule/scheduler_found.h"
#include "src/schedule/scheduler_prefix.h"
#include "src/schedule/scheduler_transfer.h"

typedef enum verdict {
    ADMITTED,
    SKIP, /* it has to wait, and others need not wait for it */
    FULL, /* it has to wait, and others of its tenant, which has used up its quota, too */
    STOP  /* nobody is to overtake it */
} verdict;

/* The rank that would have the fewest blocks of the first group in use if the sequence lay on it; among equals the one
 * where it would begin otherwise, or the next. */
static int32_t best_rank(cpa_scheduler *s, cpa_sequence *sequence) {
    const cpa_owner_map map = s->options.map;
    int32_t best = sequence->first_rank;
    int64_t least = INT64_MAX;
    for (int32_t i = 0; i < map.cp_size; i++) {
        int32_t r = (sequence->first_rank + i) % map.cp_size;
        int64_t used = s->options.groups.list[0].num_blocks - cpa_block_pool_free_count(s->pools[r]);
        int64_t more = used - cpa_found_expect(s, sequence, (cpa_placement){CPA_ON_RANK, r});
        if (more >= least) continue;
        least = more;
        best = r;
    }
    return best;
}

/* Decides where the sequence is to lie, by how much of it lies there already. Returns the units that can be found there. */
static int64_t choose_placement(cpa_scheduler *s, cpa_sequence *sequence) {
    const cpa_scheduler_options *o = &s->options;
    sequence->placement = (cpa_placement){CPA_SHARDED, sequence->first_rank};
    const int64_t units = cpa_found_units(s, sequence, sequence->placement);
    if (!cpa_request_may_be_local(o, &sequence->request)) return units;
    const int64_t sharded_units = cpa_found_with_evicted(s, sequence, sequence->placement);
    int32_t rank = best_rank(s, sequence);
    const cpa_placement on_rank = {CPA_ON_RANK, rank};
    int64_t known = cpa_sequence_known(sequence);
    int64_t local = cpa_found_position(s, sequence, on_rank, cpa_found_with_evicted(s, sequence, on_rank));
    int64_t sharded = cpa_found_position(s, sequence, sequence->placement, sharded_units);
    int64_t output = sequence->request.output_tokens - sequence->emitted;
    int64_t others = s->n_running + s->waiting.count - 1; /* it is still among the waiting ones */
    if (o->local_context == 0 && !cpa_planner_prefers_local(&o->planner, known, output, local, sharded, others))
        return units;
    sequence->placement = on_rank;
    return cpa_found_units(s, sequence, on_rank);
}

/* Where the unit begins that the next tokens of a sequence go to. */
static int64_t open_unit(const cpa_scheduler *s, const cpa_sequence *sequence) {
    const int64_t unit = cpa_prefix_unit(&s->options, sequence->placement);
    return sequence->computed / unit * unit;
}

/* Whether the next entry of a table is one that no query from a position on sees; the first group keeps these too. */
static int next_is_unseen(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t pool, int64_t position) {
    const int64_t entry = sequence->shards[pool].held;
    return pool >= s->options.map.cp_size && entry >= cpa_sequence_first_unseen(sequence, &s->options, pool) &&
           entry < cpa_sequence_unseen(sequence, &s->options, pool, position);
}

/* Adds the blocks of a unit in a group, whose first token is that, as far as queries from `position` on see them; or, if
 * the sequence goes on within the unit, makes them the sources of copies. */
static cpa_status share_unit(cpa_scheduler *s, cpa_sequence *sequence, int32_t group, const int32_t *blocks,
                             int64_t first, int64_t position, cpa_error *err) {
    const int32_t size = s->options.map.cp_size;
    const int64_t unit = cpa_prefix_unit(&s->options, sequence->placement);
    const int64_t end = cpa_min64(first + unit, sequence->computed);
    for (int32_t r = 0; r < size; r++) {
        const int32_t p = group * size + r;
        if (!cpa_sequence_block(sequence, &s->options, p, first, end)) continue;
        if (next_is_unseen(s, sequence, p, position)) {
            cpa_sequence_skip_entry(sequence, p);
        } else if (end % unit != 0) {
            s->sources[p] = blocks ? blocks[r] : -1; /* none where nobody attends what it has there */
        } else {
            CPA_TRY(cpa_sequence_share(sequence, p, s->pools[p], blocks[r], err));
        }
    }
    return CPA_OK;
}

/* Shares so many leading units, which were found, with a sequence whose queries are from `position` on. */
static cpa_status share_units(cpa_scheduler *s, cpa_sequence *sequence, int64_t units, int64_t position,
                              cpa_error *err) {
    const cpa_placement placement = sequence->placement;
    const int64_t unit = cpa_prefix_unit(&s->options, placement);
    for (int64_t j = 0; j < units; j++) {
        for (int32_t g = 0; g < s->options.groups.count; g++) {
            const int is_needed = cpa_found_needs(s, sequence, placement, g, units, j);
            const int32_t *blocks = is_needed ? cpa_found_blocks(s, sequence, placement, g, j) : NULL;
            CPA_TRY(share_unit(s, sequence, g, blocks, j * unit, position, err));
        }
    }
    const int tail = units > 0 && cpa_found_end(s, sequence, placement, units - 1) < units * unit;
    sequence->linked = sequence->shared = units - tail;
    sequence->tail_linked = tail;
    sequence->tip = sequence->root;
    if (sequence->linked > 0) sequence->tip = *cpa_found_digest(s, sequence, placement, sequence->linked - 1);
    return CPA_OK;
}

/* Shares the leading units that can be found. If the last known token, which is left to compute, falls into one of
 * them, s->sources gets the blocks of that one, which copies of its own will replace; otherwise they are -1. */
static cpa_status share_prefix(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    const cpa_placement placement = sequence->placement;
    const int64_t unit = cpa_prefix_unit(&s->options, placement);
    int64_t units = cpa_found_units_again(s, sequence, placement);
    for (int32_t p = 0; p < s->n_pools; p++) s->sources[p] = -1;
    sequence->computed = cpa_found_position(s, sequence, placement, units);
    if (units > 0 && sequence->computed == (units - 1) * unit) units--; /* nothing of the last one would be used */
    return share_units(s, sequence, units, open_unit(s, sequence), err);
}

/* Shares the leading units that can be found with a sequence that imports its first `tokens` tokens, which are more: all
 * of these units are full. Where every layer has a window what they share may be what the import leaves out. */
static cpa_status share_before_import(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens, cpa_error *err) {
    const int all_windows = s->options.groups.list[0].window > 0;
    const int64_t units = all_windows ? 0 : cpa_found_units_again(s, sequence, sequence->placement);
    sequence->computed = units * cpa_prefix_unit(&s->options, sequence->placement);
    return share_units(s, sequence, units, tokens, err);
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

/* Plans the copies of the sources, and keeps these until the next plan. */
static cpa_status copy_on_write(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    const int32_t size = s->options.map.cp_size;
    const int64_t first = open_unit(s, sequence);
    for (int32_t p = 0; p < s->n_pools; p++) {
        if (s->sources[p] < 0) continue;
        cpa_block_move *copy = cpa_step_plan_add_copy(s->plan);
        if (!copy) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        const int32_t *to = cpa_sequence_block(sequence, &s->options, p, first, sequence->computed);
        *copy = (cpa_block_move){sequence->request.id, p / size, p % size, s->sources[p], *to};
        s->stats.cow_copies++;
        CPA_TRY(cpa_scheduler_pin(s, s->pools[p], s->sources[p], err));
    }
    return CPA_OK;
}

/* The sources must not be taken for something else in this plan. */
static cpa_status retain_sources(cpa_scheduler *s, cpa_error *err) {
    for (int32_t p = 0; p < s->n_pools; p++)
        if (s->sources[p] >= 0) CPA_TRY(cpa_block_pool_retain(s->pools[p], s->sources[p], err));
    return CPA_OK;
}

static cpa_status release_sources(cpa_scheduler *s, cpa_error *err) {
    for (int32_t p = 0; p < s->n_pools; p++) {
        if (s->sources[p] >= 0) CPA_TRY(cpa_block_pool_release(s->pools[p], s->sources[p], err));
        s->sources[p] = -1;
    }
    return CPA_OK;
}

/* Gives up the unit that was found and would be copied: its tokens are computed instead. */
static cpa_status give_up_sources(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    sequence->computed = open_unit(s, sequence);
    sequence->linked = sequence->computed / cpa_prefix_unit(&s->options, sequence->placement);
    sequence->shared = sequence->linked;
    sequence->tip = sequence->root;
    if (sequence->linked > 0) sequence->tip = *cpa_found_digest(s, sequence, sequence->placement, sequence->linked - 1);
    sequence->tail_linked = 0;
    return release_sources(s, err);
}

/* Entries of a table that are left out where a sequence goes on at a position. */
static int64_t unseen_entries(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t pool, int64_t position) {
    const int64_t first = cpa_sequence_first_unseen(sequence, &s->options, pool);
    if (pool < s->options.map.cp_size) return 0; /* the first group leaves none out */
    return cpa_max64(cpa_sequence_unseen(sequence, &s->options, pool, position) - first, 0);
}

/* Turns a request away that lacks a place, blocks, in s->lacks, or quota, even if all units that were found are shared: a
 * look that costs little, as the first in line may be turned away in many plans. Otherwise ADMITTED. */
static verdict look_for_room(cpa_scheduler *s, cpa_sequence *sequence, int64_t units) {
    int64_t quota = s->options.tenant_block_quota;
    int room = s->n_free_indices > 0;
    sequence->computed = cpa_found_position(s, sequence, sequence->placement, units);
    int64_t tokens = cpa_scheduler_next_tokens(s, sequence);
    if (s->options.adaptive_chunks) tokens = cpa_min64(tokens, s->options.block_size); /* the least that it is given */
    int64_t first = open_unit(s, sequence), end = sequence->computed + tokens;
    sequence->computed = 0;
    for (int32_t p = 0; p < s->n_pools; p++) {
        const int32_t rank = cpa_pool_rank(&s->options, p);
        int64_t needs = cpa_sequence_needs(sequence, &s->options, rank, end);
        s->lacks[p] = needs - cpa_sequence_needs(sequence, &s->options, rank, first);
        needs -= unseen_entries(s, sequence, p, first);
        if (s->lacks[p] > 0 && quota > 0 && sequence->tenant->held[p] + needs > quota) return FULL;
        if (s->lacks[p] > cpa_block_pool_free_count(s->pools[p])) room = 0;
    }
    return room ? ADMITTED : STOP;
}

/* Whether there is room for the tokens, with a place of its own and the blocks that s->lacks gets; it may be others'
 * that are beyond their share. */
static cpa_status find_room(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens, int *room, cpa_error *err) {
    *room = tokens > 0 && cpa_scheduler_has_room(s, sequence, sequence->computed + tokens);
    return *room || tokens == 0 ? CPA_OK : cpa_fair_make_room(s, sequence, s->lacks, room, err);
}

/* A request whose first tokens, behind those that can be found, come from a store of blocks; it is given others in the
 * second plan after. */
static cpa_status try_import(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens, verdict *out, cpa_error *err) {
    int room = 0;
    if (!cpa_sequence_open(sequence, s->n_pools))
        return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory for its block table", sequence->request.id);
    CPA_TRY(share_before_import(s, sequence, tokens, err));
    cpa_transfer_count_blocks(s, sequence, tokens);
    cpa_scheduler_charge(sequence, s->n_pools, 1);
    *out = cpa_scheduler_within_quota(s, sequence) ? STOP : FULL;
    cpa_scheduler_charge(sequence, s->n_pools, -1);
    if (*out == STOP) CPA_TRY(cpa_fair_make_room(s, sequence, s->lacks, &room, err));
    if (!room) {
        sequence->computed = sequence->linked = 0;
        return cpa_sequence_close(sequence, s->pools, s->n_pools, err);
    }
    *out = ADMITTED;
    count_hits(s, sequence);
    CPA_TRY(cpa_transfer_plan_import(s, sequence, tokens, err));
    cpa_scheduler_charge(sequence, s->n_pools, 1);
    s->stats.rank_local += sequence->placement.kind == CPA_ON_RANK;
    enter(s, sequence);
    sequence->ready = s->step + 2;
    return CPA_OK;
}

/* Has what is not on the device any more fetched from host memory and disk, unless there is none of it: *none. Looks for
 * it where there is room for the request at all. */
static cpa_status try_fetch(cpa_scheduler *s, cpa_sequence *sequence, int64_t found, int *none, verdict *out,
                            cpa_error *err) {
    int room = 1, coming;
    *none = !s->evicted;
    if (*none) return CPA_OK;
    *out = look_for_room(s, sequence, found);
    if (*out == STOP) CPA_TRY(cpa_fair_make_room(s, sequence, s->lacks, &room, err));
    if (*out == FULL || !room) return CPA_OK;
    found = cpa_found_units_again(s, sequence, sequence->placement); /* some may have been evicted since it looked */
    const int64_t units = cpa_fetch_units(s, sequence, found);
    *none = units <= found;
    if (*none) return CPA_OK;
    cpa_fetch_count_blocks(s, sequence, units);
    *out = cpa_scheduler_within_quota(s, sequence) ? STOP : FULL;
    if (*out == STOP) CPA_TRY(cpa_fair_make_room(s, sequence, s->lacks, &room, err));
    if (*out == FULL || !room) return CPA_OK;
    CPA_TRY(cpa_fetch_plan(s, sequence, units, &coming, err));
    *out = SKIP;
    *none = !coming; /* swapped sequences have all of host memory */
    return CPA_OK;
}

/* A request without anything in host memory. */
static cpa_status try_fresh(cpa_scheduler *s, cpa_sequence *sequence, verdict *out, cpa_error *err) {
    int room = 1, none;
    *out = SKIP;
    const int64_t units = choose_placement(s, sequence);
    if (cpa_found_later(s, sequence)) return CPA_OK;
    CPA_TRY(try_fetch(s, sequence, units, &none, out, err));
    if (!none) return CPA_OK;
    const int64_t imported = cpa_transfer_tokens(sequence, cpa_found_position(s, sequence, sequence->placement, units));
    if (imported > 0) return try_import(s, sequence, imported, out, err);
    *out = look_for_room(s, sequence, units);
    if (*out == STOP) CPA_TRY(cpa_fair_make_room(s, sequence, s->lacks, &room, err));
    if (*out == FULL || !room) return CPA_OK;
    if (!cpa_sequence_open(sequence, s->n_pools))
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
    cpa_scheduler_charge(sequence, s->n_pools, 1);
    int within = cpa_scheduler_within_quota(s, sequence);
    if (!room || !within) {
        *out = within ? STOP : FULL;
        s->stats.held_back += tokens == 0 && !sequence->held_back;
        sequence->held_back |= tokens == 0;
        cpa_scheduler_charge(sequence, s->n_pools, -1);
        CPA_TRY(release_sources(s, err));
        sequence->computed = sequence->linked = 0;
        return cpa_sequence_close(sequence, s->pools, s->n_pools, err);
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
    const int32_t size = s->options.map.cp_size;
    for (int32_t p = 0; p < s->n_pools; p++) {
        cpa_sequence_shard *shard = &sequence->shards[p];
        for (int64_t i = 0; i < shard->swapped; i++) {
            int32_t host = sequence->host[p * sequence->stride + i], *block = &sequence->blocks[shard->held++];
            block += p * sequence->stride;
            *block = -1;
            if (host < 0) {
                shard->voided++;
                continue;
            }
            cpa_block_pool_take(s->pools[p], 1, block);
            cpa_block_move *move = cpa_step_plan_add_swap_in(s->plan);
            if (!move) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
            *move = (cpa_block_move){sequence->request.id, p / size, p % size, host, *block};
            CPA_TRY(cpa_scheduler_pin(s, s->host_pools[p], host, err));
            s->stats.swapped_in++;
        }
        shard->swapped = 0;
    }
    free(sequence->host);
    sequence->host = NULL;
    return CPA_OK;
}

/* Blocks that a swapped sequence needs in each pool for its next token, in s->lacks. */
static void count_blocks_of_return(cpa_scheduler *s, const cpa_sequence *sequence) {
    for (int32_t p = 0; p < s->n_pools; p++) {
        s->lacks[p] = cpa_sequence_needs(sequence, &s->options, cpa_pool_rank(&s->options, p), sequence->computed + 1);
        for (int64_t i = 0; i < sequence->shards[p].swapped; i++)
            s->lacks[p] -= sequence->host[p * sequence->stride + i] < 0;
    }
}

/* A sequence that comes back from host memory; it is given tokens in the second plan after. */
static cpa_status try_return(cpa_scheduler *s, cpa_sequence *sequence, verdict *out, cpa_error *err) {
    int room = 0;
    count_blocks_of_return(s, sequence);
    *out = cpa_scheduler_within_quota(s, sequence) ? STOP : FULL;
    if (*out == STOP) CPA_TRY(cpa_fair_make_room(s, sequence, s->lacks, &room, err));
    if (!room) return CPA_OK;
    if (!cpa_sequence_open(sequence, s->n_pools))
        return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory for its block table", sequence->request.id);
    *out = ADMITTED;
    CPA_TRY(swap_in(s, sequence, err));
    cpa_scheduler_charge(sequence, s->n_pools, 1);
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
