#include "src/schedule/scheduler_write.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/scheduler_drafts.h"
#include "src/schedule/scheduler_prefix.h"
#include "src/schedule/scheduler_transfer.h"

static void write_appends(cpa_scheduler *s, cpa_sequence *sequence) {
    cpa_step_plan *plan = s->plan;
    for (int32_t p = 0; p < s->n_pools; p++) {
        const int32_t size = s->options.map.cp_size;
        cpa_sequence_shard *shard = &sequence->shards[p];
        int64_t added = shard->held - shard->announced;
        if (added == 0) continue;
        *cpa_step_plan_add_append(plan) =
            (cpa_plan_append){sequence->index, p / size, p % size, (int32_t)added, plan->n_block_ids};
        memcpy(cpa_step_plan_add_blocks(plan, added), sequence->blocks + p * sequence->stride + shard->announced,
               (size_t)added * sizeof *sequence->blocks);
        shard->announced = shard->held;
    }
}

/* Whether the most probable token is taken every time, of the logits as they are. */
static int is_plain(const cpa_plan_sampling *sampling) {
    return !(sampling->temperature > 0) && !cpa_plan_has_penalties(sampling) && !sampling->logprobs &&
           !sampling->prompt_logprobs && !sampling->constrained && sampling->n_biases == 0 && sampling->n_ends == 0;
}

/* Tells the ranks how the tokens of a sequence that they meet are drawn; -1: there is nothing to tell. */
static int64_t write_sampling(cpa_scheduler *s, const cpa_sequence *sequence) {
    const cpa_scheduler_request *request = &sequence->request;
    if (sequence->introduced || is_plain(&request->sampling)) return -1;
    cpa_plan_sampling *sampling = cpa_step_plan_add_sampling(s->plan);
    *sampling = request->sampling;
    sampling->prompt_tokens = request->prompt_tokens;
    sampling->biases = s->plan->n_biases;
    const int64_t n = cpa_plan_listed_biases(sampling);
    if (n > 0) memcpy(cpa_step_plan_add_biases(s->plan, n), request->biases, (size_t)n * sizeof *request->biases);
    return s->plan->n_samplings - 1;
}

/* The tokens of a chunk: what is known, its drafts, and what it is given for the rows of these. */
static void write_tokens(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_plan_chunk *chunk) {
    const int64_t known = cpa_sequence_known(sequence), drafts = chunk->drafts, n = cpa_plan_chunk_tokens(chunk);
    const int64_t first = chunk->start + chunk->count - n, certain = n - drafts;
    const int drawn = (chunk->flags & CPA_CHUNK_DRAWN) != 0, given = chunk->given >= 0;
    uint32_t *tokens = cpa_step_plan_add_tokens(s->plan, n + (given ? drafts : 0));
    if (chunk->parents >= 0)
        memcpy(cpa_step_plan_add_parents(s->plan, drafts), sequence->parents,
               (size_t)drafts * sizeof *sequence->parents);
    for (int64_t i = 0; i < certain - drawn; i++) tokens[i] = cpa_sequence_token(sequence, &s->options, first + i);
    for (int64_t i = 0; i < drafts; i++) tokens[certain + i] = sequence->drafts[i];
    for (int64_t i = 0; given && i < drafts; i++)
        tokens[n + i] = cpa_sequence_token(sequence, &s->options, cpa_plan_position(s->plan, chunk, known + i) + 1);
}

static void write_chunk(cpa_scheduler *s, cpa_sequence *sequence) {
    cpa_step_plan *plan = s->plan;
    const int64_t drafts = sequence->n_drafts;
    int64_t end = sequence->computed + sequence->planned - drafts;
    int emits = end == cpa_sequence_known(sequence), decodes = emits && cpa_sequence_decodes(sequence);
    int drawn = end > cpa_sequence_named(sequence);
    int64_t given = -1;
    const int is_scored = sequence->request.sampling.prompt_logprobs && end < sequence->request.prompt_tokens;
    const int looks_ahead = s->options.drafting.is_told && !emits && end < cpa_sequence_named(sequence);
    if (is_scored || looks_ahead || (emits && !sequence->request.draws))
        given = cpa_sequence_token(sequence, &s->options, end);
    int finishes = emits && sequence->emitted + 1 == sequence->request.output_tokens; /* with drafts it goes on */
    const cpa_planner planner = cpa_scheduler_planner(s, sequence);
    cpa_planner_choice choice = cpa_planner_choose(&planner, sequence->planned, sequence->computed, decodes);
    s->stats.chunks[choice.algorithm][choice.reason]++;
    cpa_plan_chunk *chunk = cpa_step_plan_add_chunk(plan);
    *chunk = (cpa_plan_chunk){
        .request = sequence->request.id,
        .seq = sequence->index,
        .placement = sequence->placement,
        .start = sequence->computed,
        .count = sequence->planned,
        .first_output = cpa_sequence_known(sequence) - 1,
        .algorithm = choice.algorithm,
        .flags = (sequence->introduced ? 0u : CPA_CHUNK_FIRST) | (emits ? CPA_CHUNK_EMITS : 0u) |
                 (finishes ? CPA_CHUNK_FINISHES : 0u) | (decodes ? CPA_CHUNK_DECODE : 0u) |
                 (drawn ? CPA_CHUNK_DRAWN : 0u),
        .tokens = plan->n_token_ids,
        .given = given,
        .drafts = drafts,
        .parents = drafts > 0 && sequence->parents ? plan->n_parents : -1,
        .sampling = write_sampling(s, sequence),
    };
    write_tokens(s, sequence, chunk);
    cpa_scheduler_teach_drafter(s, sequence, end);
    write_appends(s, sequence);
    sequence->introduced = 1;
    sequence->misplaced = cpa_max64(0, sequence->misplaced - (end - sequence->computed));
    sequence->computed = end;
    sequence->emitted += emits;
    sequence->planned = 0;
}

cpa_status cpa_scheduler_write(cpa_scheduler *s, cpa_error *err) {
    int64_t chunks = 0, appends = 0, blocks = 0, tokens = 0, drafts = 0, biases = 0;
    for (int32_t i = 0; i < s->n_scheduled; i++) {
        const cpa_sequence *sequence = s->scheduled[i];
        if (sequence->planned == 0) continue;
        chunks++;
        drafts += sequence->n_drafts;
        biases += sequence->introduced ? 0 : cpa_plan_listed_biases(&sequence->request.sampling);
        tokens += sequence->planned + sequence->n_drafts + (sequence->introduced ? 0 : sequence->computed);
        for (int32_t p = 0; p < s->n_pools; p++) {
            int64_t added = sequence->shards[p].held - sequence->shards[p].announced;
            appends += added > 0;
            blocks += added;
        }
    }
    if (!cpa_step_plan_reserve(s->plan, chunks, s->plan->n_releases, appends, blocks, tokens) ||
        !cpa_step_plan_reserve_drawing(s->plan, s->plan->n_discards, s->plan->n_cuts, chunks, biases, drafts))
        return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan of %" PRId64 " tokens", tokens);
    for (int32_t i = 0; i < s->n_scheduled; i++)
        if (s->scheduled[i]->planned > 0) write_chunk(s, s->scheduled[i]);
    for (int32_t i = 0; i < s->n_scheduled; i++) {
        cpa_sequence *sequence = s->scheduled[i];
        if (!sequence->blocks) continue;
        CPA_TRY(cpa_scheduler_link(s, sequence, err));
        CPA_TRY(cpa_transfer_plan_export(s, sequence, err));
    }
    return CPA_OK;
}

/* Gives back the blocks of a pool that no query of the sequence sees any more; the next one is at `computed`. */
static cpa_status null_unseen_in(cpa_scheduler *s, cpa_sequence *sequence, int32_t pool, cpa_error *err) {
    const int32_t size = s->options.map.cp_size;
    const int64_t unseen = cpa_sequence_unseen(sequence, &s->options, pool, sequence->computed);
    cpa_sequence_shard *shard = &sequence->shards[pool];
    int64_t entry = cpa_sequence_first_unseen(sequence, &s->options, pool) + shard->voided;
    for (; entry < unseen; entry++) {
        if (entry < shard->announced) {
            cpa_plan_nulled *v = cpa_step_plan_add_nulled(s->plan);
            if (!v) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
            *v = (cpa_plan_nulled){sequence->index, pool / size, pool % size, (int32_t)entry};
        }
        sequence->tenant->held[pool]--;
        CPA_TRY(cpa_sequence_null_entry(sequence, pool, entry, s->pools[pool], err));
    }
    return CPA_OK;
}

cpa_status cpa_scheduler_null_unseen(cpa_scheduler *s, cpa_error *err) {
    for (int32_t i = 0; i < s->n_running; i++)
        for (int32_t p = 0; p < s->n_pools; p++)
            if (cpa_pool_group(&s->options, p)->window > 0) CPA_TRY(null_unseen_in(s, s->running[i], p, err));
    return CPA_OK;
}
