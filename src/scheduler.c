#include "src/scheduler.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/sequence.h"
#include "src/sequence_queue.h"

struct cpa_scheduler {
    cpa_scheduler_options options;
    cpa_block_pool **pools; /* [cp_size] */
    cpa_sequence *by_id;    /* hash table of every unfinished sequence */
    cpa_sequence_queue future;
    cpa_sequence_queue waiting;
    cpa_sequence **running; /* [max_num_seqs], in the order of cpa_sequence_before */
    int32_t n_running;
    cpa_sequence **finished; /* [max_num_seqs], finished in the last plan; they still hold slot and blocks */
    int32_t n_finished;
    int32_t *free_slots; /* [max_num_seqs], a stack */
    int32_t n_free_slots;
    uint64_t step;
    cpa_scheduler_stats stats;

    /* Of the plan being made. */
    cpa_sequence **scheduled; /* [max_num_seqs], in the order of the chunks; those with planned == 0 were withdrawn */
    int32_t n_scheduled;
    int64_t budget;  /* tokens left */
    int out_of_room; /* a running sequence lacked blocks */
    int64_t *lacks;  /* [cp_size], blocks that the sequence being scheduled lacks */
};

static int arrives_before(const cpa_sequence *a, const cpa_sequence *b) {
    return a->request.arrival < b->request.arrival;
}

static cpa_status check_options(const cpa_scheduler_options *o, cpa_error *err) {
    if (o->map.cp_size < 1 || o->planner.cp_size != o->map.cp_size)
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: %" PRId32 " ranks, planner for %" PRId32 "; expected the same, at least 1",
                        o->map.cp_size, o->planner.cp_size);
    if (o->block_size < 1 || o->map.interleave < 1 || o->map.interleave % o->block_size != 0)
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: interleave %" PRId32 " is not a positive multiple of block size %" PRId32,
                        o->map.interleave, o->block_size);
    if (o->max_num_batched_tokens < 1 || o->max_num_seqs < 1)
        return cpa_fail(err, CPA_INVALID,
                        "scheduler: a step of %" PRId64 " tokens and %" PRId32
                        " sequences; expected at least 1 of each",
                        o->max_num_batched_tokens, o->max_num_seqs);
    if (!o->token_at) return cpa_fail(err, CPA_INVALID, "scheduler: no source of tokens");
    return CPA_OK;
}

cpa_status cpa_scheduler_create(const cpa_scheduler_options *options, cpa_scheduler **out, cpa_error *err) {
    CPA_TRY(check_options(options, err));
    size_t ranks = (size_t)options->map.cp_size, slots = (size_t)options->max_num_seqs;
    cpa_status status = CPA_NO_MEMORY;
    cpa_scheduler *s = calloc(1, sizeof *s);
    if (!s) goto no_memory;
    s->options = *options;
    s->future.before = arrives_before;
    s->waiting.before = cpa_sequence_before;
    s->pools = calloc(ranks, sizeof *s->pools);
    s->lacks = calloc(ranks, sizeof *s->lacks);
    s->running = calloc(slots, sizeof *s->running);
    s->finished = calloc(slots, sizeof *s->finished);
    s->scheduled = calloc(slots, sizeof *s->scheduled);
    s->free_slots = calloc(slots, sizeof *s->free_slots);
    if (!s->pools || !s->lacks || !s->running || !s->finished || !s->scheduled || !s->free_slots) goto no_memory;
    for (size_t r = 0; r < ranks; r++)
        CPA_TRY_GOTO(cpa_block_pool_create(options->num_blocks, &s->pools[r], err), fail);
    s->n_free_slots = options->max_num_seqs;
    for (int32_t i = 0; i < s->n_free_slots; i++) s->free_slots[i] = s->n_free_slots - 1 - i;
    *out = s;
    return CPA_OK;

no_memory:
    cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for %" PRId32 " sequences on %" PRId32 " ranks",
             options->max_num_seqs, options->map.cp_size);
fail:
    cpa_scheduler_destroy(s);
    return status;
}

void cpa_scheduler_destroy(cpa_scheduler *s) {
    if (!s) return;
    cpa_sequence *sequence, *next;
    HASH_ITER(hh, s->by_id, sequence, next) {
        HASH_DEL(s->by_id, sequence);
        cpa_sequence_destroy(sequence);
    }
    for (int32_t i = 0; i < s->n_finished; i++) cpa_sequence_destroy(s->finished[i]);
    for (int32_t r = 0; s->pools && r < s->options.map.cp_size; r++) cpa_block_pool_destroy(s->pools[r]);
    cpa_sequence_queue_destroy(&s->waiting);
    cpa_sequence_queue_destroy(&s->future);
    free(s->free_slots);
    free(s->scheduled);
    free(s->finished);
    free(s->running);
    free(s->lacks);
    free(s->pools);
    free(s);
}

static cpa_status check_request(const cpa_scheduler *s, const cpa_scheduler_request *r, cpa_error *err) {
    if (r->prompt_tokens < 1 || r->output_tokens < 1 || r->prompt_tokens > INT64_MAX - r->output_tokens)
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": %" PRId64 " prompt and %" PRId64
                        " output tokens; expected at least 1 of each",
                        r->id, r->prompt_tokens, r->output_tokens);
    if (!isfinite(r->arrival))
        return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": arrival at %g s; expected a finite time", r->id,
                        r->arrival);
    int64_t tokens = cpa_request_cached_tokens(r), blocks = cpa_request_blocks(&s->options, tokens);
    if (blocks > s->options.num_blocks)
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": %" PRId64 " prompt + %" PRId64 " output tokens need %" PRId64
                        " blocks of %" PRId32 " tokens on one of %" PRId32 " ranks, which has %" PRId64
                        "; use --num-blocks %" PRId64 " or more",
                        r->id, r->prompt_tokens, r->output_tokens, blocks, s->options.block_size,
                        s->options.map.cp_size, s->options.num_blocks, blocks);
    cpa_sequence *other;
    HASH_FIND(hh, s->by_id, &r->id, sizeof r->id, other);
    if (other) return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": another request has this id", r->id);
    return CPA_OK;
}

cpa_status cpa_scheduler_add(cpa_scheduler *s, const cpa_scheduler_request *request, cpa_error *err) {
    CPA_TRY(check_request(s, request, err));
    int64_t most = (int64_t)HASH_COUNT(s->by_id) + 1;
    if (!cpa_sequence_queue_reserve(&s->future, most) || !cpa_sequence_queue_reserve(&s->waiting, most)) goto no_memory;
    cpa_sequence *sequence = cpa_sequence_create(&s->options, request);
    if (!sequence) goto no_memory;
    HASH_ADD_KEYPTR(hh, s->by_id, &sequence->request.id, sizeof sequence->request.id, sequence);
    if (!sequence->hh.tbl) {
        cpa_sequence_destroy(sequence);
        goto no_memory;
    }
    cpa_sequence_queue_push(&s->future, sequence);
    return CPA_OK;

no_memory:
    return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory to queue it", request->id);
}

/* Slot and blocks of the sequences that finished in the last plan are free from this one on. */
static cpa_status retire_finished(cpa_scheduler *s, cpa_step_plan *plan, cpa_error *err) {
    while (s->n_finished > 0) {
        cpa_sequence *sequence = s->finished[--s->n_finished];
        *cpa_step_plan_add_release(plan) = sequence->slot;
        s->free_slots[s->n_free_slots++] = sequence->slot;
        cpa_status status = cpa_sequence_close(sequence, s->pools, s->options.map.cp_size, err);
        cpa_sequence_destroy(sequence);
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

/* Takes running[index] out of its slot; it keeps what it has emitted and computes everything again. A chunk that it was
 * given in this plan is withdrawn. */
static cpa_status preempt(cpa_scheduler *s, int32_t index, cpa_step_plan *plan, cpa_error *err) {
    cpa_sequence *victim = s->running[index];
    s->n_running--;
    memmove(&s->running[index], &s->running[index + 1], (size_t)(s->n_running - index) * sizeof *s->running);
    victim->planned = 0;
    victim->computed = 0;
    *cpa_step_plan_add_release(plan) = victim->slot;
    s->free_slots[s->n_free_slots++] = victim->slot;
    cpa_sequence_queue_push(&s->waiting, victim);
    s->stats.preemptions++;
    return cpa_sequence_close(victim, s->pools, s->options.map.cp_size, err);
}

/* What the sequence lacks on each rank for its first `tokens` tokens; whether the pools have it. */
static int has_room(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    int room = 1;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        s->lacks[r] = cpa_sequence_lacks(sequence, &s->options, r, tokens);
        if (s->lacks[r] > cpa_block_pool_free_count(s->pools[r])) room = 0;
    }
    return room;
}

/* Whether the sequences after running[index] hold what it lacks beyond the free blocks, on every rank. */
static int younger_hold_enough(const cpa_scheduler *s, int32_t index) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        int64_t missing = s->lacks[r] - cpa_block_pool_free_count(s->pools[r]);
        for (int32_t i = s->n_running - 1; i > index && missing > 0; i--) missing -= s->running[i]->shards[r].held;
        if (missing > 0) return 0;
    }
    return 1;
}

static cpa_status preempt_younger(cpa_scheduler *s, int32_t index, cpa_step_plan *plan, cpa_error *err) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        for (int32_t i = s->n_running - 1; i > index && s->lacks[r] > cpa_block_pool_free_count(s->pools[r]); i--)
            if (s->running[i]->shards[r].held > 0) CPA_TRY(preempt(s, i, plan, err));
    }
    return CPA_OK;
}

/* Gives the sequence `tokens` more tokens in this plan, and the blocks for them; has_room has just said yes. */
static void place(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++) cpa_sequence_take(sequence, r, s->pools[r], s->lacks[r]);
    sequence->planned = tokens;
    s->budget -= tokens;
    s->scheduled[s->n_scheduled++] = sequence;
}

static int64_t next_tokens(const cpa_scheduler *s, const cpa_sequence *sequence) {
    int64_t rest = cpa_sequence_known(sequence) - sequence->computed;
    return rest < s->budget ? rest : s->budget;
}

/* Places the running sequences that decode (or those that do not), the first ones first. A preemption only removes
 * sequences after the one at hand. */
static cpa_status schedule_running(cpa_scheduler *s, int decodes, cpa_step_plan *plan, cpa_error *err) {
    for (int32_t i = 0; i < s->n_running && s->budget > 0; i++) {
        cpa_sequence *sequence = s->running[i];
        if (cpa_sequence_decodes(sequence) != decodes) continue;
        int64_t tokens = next_tokens(s, sequence);
        if (!has_room(s, sequence, sequence->computed + tokens)) {
            s->out_of_room = 1;
            if (!younger_hold_enough(s, i)) continue;
            CPA_TRY(preempt_younger(s, i, plan, err));
        }
        place(s, sequence, tokens);
    }
    return CPA_OK;
}

/* Admits waiting requests in their order until one does not fit. */
static cpa_status admit_waiting(cpa_scheduler *s, cpa_error *err) {
    cpa_sequence *sequence;
    while (s->budget > 0 && s->n_free_slots > 0 && (sequence = cpa_sequence_queue_first(&s->waiting))) {
        int64_t tokens = next_tokens(s, sequence);
        if (!has_room(s, sequence, tokens)) break;
        if (!cpa_sequence_open(sequence, s->options.map.cp_size))
            return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for the block table of request %" PRIu64,
                            sequence->request.id);
        cpa_sequence_queue_pop(&s->waiting);
        sequence->slot = s->free_slots[--s->n_free_slots];
        int32_t at = s->n_running++;
        for (; at > 0 && cpa_sequence_before(sequence, s->running[at - 1]); at--) s->running[at] = s->running[at - 1];
        s->running[at] = sequence;
        place(s, sequence, tokens);
    }
    return CPA_OK;
}

/* Writes what the sequence was given into the plan, which has room for it. */
static void write_chunk(cpa_scheduler *s, cpa_sequence *sequence, cpa_step_plan *plan) {
    int64_t end = sequence->computed + sequence->planned;
    int decodes = cpa_sequence_decodes(sequence), emits = end == cpa_sequence_known(sequence);
    int finishes = emits && sequence->emitted + 1 == sequence->request.output_tokens;
    cpa_planner_choice choice = cpa_planner_choose(&s->options.planner, sequence->planned, sequence->computed, decodes);
    s->stats.chunks[choice.algorithm][choice.reason]++;
    *cpa_step_plan_add_chunk(plan) = (cpa_plan_chunk){
        .request = sequence->request.id,
        .seq = sequence->slot,
        .phase = sequence->phase,
        .start = sequence->computed,
        .count = sequence->planned,
        .first_output = cpa_sequence_known(sequence) - 1,
        .algorithm = choice.algorithm,
        .flags = (sequence->computed == 0 ? CPA_CHUNK_FIRST : 0u) | (emits ? CPA_CHUNK_EMITS : 0u) |
                 (finishes ? CPA_CHUNK_FINISHES : 0u) | (decodes ? CPA_CHUNK_DECODE : 0u),
        .tokens = plan->n_token_ids,
    };
    uint32_t *tokens = cpa_step_plan_add_tokens(plan, sequence->planned);
    for (int64_t i = 0; i < sequence->planned; i++)
        tokens[i] = s->options.token_at(s->options.token_ctx, sequence->request.id, sequence->computed + i);
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        cpa_sequence_shard *shard = &sequence->shards[r];
        int64_t added = shard->held - shard->announced;
        if (added == 0) continue;
        *cpa_step_plan_add_append(plan) = (cpa_plan_append){sequence->slot, r, (int32_t)added, plan->n_block_ids};
        memcpy(cpa_step_plan_add_blocks(plan, added), sequence->blocks + r * sequence->stride + shard->announced,
               (size_t)added * sizeof *sequence->blocks);
        shard->announced = shard->held;
    }
    sequence->computed = end;
    sequence->emitted += emits;
    sequence->planned = 0;
}

/* Writes the chunks of all that were given tokens and were not withdrawn. */
static cpa_status write_chunks(cpa_scheduler *s, cpa_step_plan *plan, cpa_error *err) {
    int64_t chunks = 0, appends = 0, blocks = 0, tokens = 0;
    for (int32_t i = 0; i < s->n_scheduled; i++) {
        if (s->scheduled[i]->planned == 0) continue;
        chunks++;
        tokens += s->scheduled[i]->planned;
        for (int32_t r = 0; r < s->options.map.cp_size; r++) {
            int64_t added = s->scheduled[i]->shards[r].held - s->scheduled[i]->shards[r].announced;
            appends += added > 0;
            blocks += added;
        }
    }
    if (!cpa_step_plan_reserve(plan, chunks, plan->n_releases, appends, blocks, tokens))
        return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan of %" PRId64 " tokens", tokens);
    for (int32_t i = 0; i < s->n_scheduled; i++)
        if (s->scheduled[i]->planned > 0) write_chunk(s, s->scheduled[i], plan);
    return CPA_OK;
}

/* Moves the sequences whose last token is planned out of the running ones. */
static void collect_finished(cpa_scheduler *s) {
    int32_t kept = 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        cpa_sequence *sequence = s->running[i];
        if (sequence->emitted < sequence->request.output_tokens) {
            s->running[kept++] = sequence;
        } else {
            HASH_DEL(s->by_id, sequence);
            s->finished[s->n_finished++] = sequence;
            s->stats.finished++;
        }
    }
    s->n_running = kept;
}

cpa_status cpa_scheduler_plan(cpa_scheduler *s, double now, cpa_step_plan *plan, double *next_arrival, cpa_error *err) {
    cpa_step_plan_clear(plan);
    if (!cpa_step_plan_reserve(plan, 0, s->n_running + s->n_finished, 0, 0, 0))
        return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    plan->step = s->step++;
    s->budget = s->options.max_num_batched_tokens;
    s->n_scheduled = 0;
    s->out_of_room = 0;
    CPA_TRY(retire_finished(s, plan, err));
    while (s->future.count > 0 && cpa_sequence_queue_first(&s->future)->request.arrival <= now)
        cpa_sequence_queue_push(&s->waiting, cpa_sequence_queue_pop(&s->future));
    CPA_TRY(schedule_running(s, 1, plan, err));
    CPA_TRY(schedule_running(s, 0, plan, err));
    if (!s->out_of_room) CPA_TRY(admit_waiting(s, err));
    CPA_TRY(write_chunks(s, plan, err));
    collect_finished(s);
    *next_arrival = s->future.count > 0 ? cpa_sequence_queue_first(&s->future)->request.arrival : INFINITY;
    return CPA_OK;
}

void cpa_scheduler_get_stats(const cpa_scheduler *s, cpa_scheduler_stats *out) {
    *out = s->stats;
    out->waiting = s->future.count + s->waiting.count;
    out->running = s->n_running;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        int64_t peak = cpa_block_pool_peak(s->pools[r]);
        if (peak > out->peak_blocks) out->peak_blocks = peak;
    }
}
