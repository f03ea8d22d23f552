#include "tests/scheduler_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "tests/unit.h"

enum { PREFIX_TOKENS = 40 };

static uint32_t token_at(void *ctx, uint64_t request, int64_t position) {
    const scheduler_model *m = ctx;
    uint64_t text = position < PREFIX_TOKENS ? (uint64_t)m->requests[request].prefix : request << 32;
    return (uint32_t)((text + (uint64_t)position) * CPA_GOLDEN >> 32);
}

void scheduler_model_start(scheduler_model *m, const cpa_scheduler_options *options) {
    memset(m, 0, sizeof *m);
    m->options = *options;
    m->options.token_at = token_at;
    m->options.token_ctx = m;
    m->options.planner.cp_size = options->map.cp_size;
    size_t slots = (size_t)options->max_num_seqs, ranks = (size_t)options->map.cp_size;
    m->slot_request = malloc(slots * sizeof *m->slot_request);
    m->slot_blocks = calloc(slots * ranks, sizeof *m->slot_blocks);
    m->block_owner = malloc(ranks * (size_t)options->num_blocks * sizeof *m->block_owner);
    for (size_t i = 0; i < slots; i++) m->slot_request[i] = -1;
    for (size_t i = 0; i < ranks * (size_t)options->num_blocks; i++) m->block_owner[i] = -1;
    cpa_step_plan_init(&m->plan);
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_create(&m->options, &m->scheduler, NULL), CPA_OK);
}

void scheduler_model_end(scheduler_model *m) {
    cpa_scheduler_destroy(m->scheduler);
    cpa_step_plan_destroy(&m->plan);
    free(m->block_owner);
    free(m->slot_blocks);
    free(m->slot_request);
    free(m->requests);
}

int64_t scheduler_model_add(scheduler_model *m, int64_t prompt, int64_t output, double arrival, int32_t priority) {
    int64_t id = m->n_requests++;
    m->requests = realloc(m->requests, (size_t)m->n_requests * sizeof *m->requests);
    m->requests[id] = (model_request){.request = {(uint64_t)id, prompt, output, arrival, priority, NULL, 0},
                                      .prefix = m->prefix,
                                      .slot = -1,
                                      .phase = -1};
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_add(m->scheduler, &m->requests[id].request, NULL), CPA_OK);
    return id;
}

static int goes_before(const cpa_scheduler_request *a, const cpa_scheduler_request *b) {
    if (a->priority != b->priority) return a->priority < b->priority;
    if (a->arrival < b->arrival || a->arrival > b->arrival) return a->arrival < b->arrival;
    return a->id < b->id;
}

/* Frees the slots of the plan; one whose request is not done was preempted. */
static void apply_releases(scheduler_model *m) {
    int32_t ranks = m->options.map.cp_size;
    for (int64_t i = 0; i < m->plan.n_releases; i++) {
        int32_t slot = m->plan.releases[i];
        CU_ASSERT_FATAL(slot >= 0 && slot < m->options.max_num_seqs);
        CU_ASSERT_FATAL(m->slot_request[slot] >= 0);
        model_request *r = &m->requests[m->slot_request[slot]];
        for (int64_t b = 0; b < ranks * m->options.num_blocks; b++)
            if (m->block_owner[b] == slot) m->block_owner[b] = -1;
        memset(m->slot_blocks + slot * ranks, 0, (size_t)ranks * sizeof *m->slot_blocks);
        m->slot_request[slot] = -1;
        r->slot = -1;
        if (r->done) continue;
        r->computed = 0;
        r->preempted_at = m->steps;
        m->preemptions++;
    }
}

/* Every appended block is free on its rank, and belongs to a slot that has a chunk in this plan. */
static void apply_appends(scheduler_model *m, const int32_t *chunk_of_slot) {
    for (int64_t i = 0; i < m->plan.n_appends; i++) {
        const cpa_plan_append *append = &m->plan.appends[i];
        CU_ASSERT_FATAL(chunk_of_slot[append->seq] >= 0);
        CU_ASSERT_FATAL(append->count > 0);
        for (int32_t b = 0; b < append->count; b++) {
            int32_t *owner =
                &m->block_owner[append->rank * m->options.num_blocks + m->plan.block_ids[append->blocks + b]];
            CU_ASSERT_EQUAL_FATAL(*owner, -1);
            *owner = append->seq;
        }
        m->slot_blocks[append->seq * m->options.map.cp_size + append->rank] += append->count;
    }
}

/* The sequence holds exactly the blocks that its tokens need, on every rank. */
static void check_blocks(const scheduler_model *m, const cpa_plan_chunk *chunk) {
    for (int32_t r = 0; r < m->options.map.cp_size; r++) {
        int64_t len =
            cpa_shard_len(m->options.map, cpa_owner_slot(m->options.map, r, chunk->phase), chunk->start + chunk->count);
        int64_t held = m->slot_blocks[chunk->seq * m->options.map.cp_size + r];
        CU_ASSERT_EQUAL_FATAL(held, (len + m->options.block_size - 1) / m->options.block_size);
    }
}

/* A chunk continues where its request stands, and yields the next token if it reaches the last known one. */
static void apply_chunk(scheduler_model *m, const cpa_plan_chunk *chunk, double now) {
    CU_ASSERT_FATAL(chunk->request < (uint64_t)m->n_requests);
    model_request *r = &m->requests[chunk->request];
    int64_t known = r->request.prompt_tokens + r->emitted, end = chunk->start + chunk->count;
    int first = chunk->start == 0, emits = end == known, finishes = emits && r->emitted + 1 == r->request.output_tokens;
    int decodes = r->emitted > 0 && chunk->count == 1 && emits;
    CU_ASSERT_FATAL(!r->done && r->request.arrival <= now);
    CU_ASSERT_FATAL(chunk->count > 0 && end <= known);
    CU_ASSERT_EQUAL_FATAL(chunk->start, r->computed);
    CU_ASSERT_EQUAL_FATAL(chunk->seq, r->slot);
    CU_ASSERT_FATAL(r->phase < 0 || r->phase == chunk->phase);
    CU_ASSERT_EQUAL(chunk->first_output, known - 1);
    CU_ASSERT_EQUAL_FATAL((chunk->flags & CPA_CHUNK_FIRST) != 0, first);
    CU_ASSERT_EQUAL_FATAL((chunk->flags & CPA_CHUNK_EMITS) != 0, emits);
    CU_ASSERT_EQUAL_FATAL((chunk->flags & CPA_CHUNK_FINISHES) != 0, finishes);
    CU_ASSERT_EQUAL_FATAL((chunk->flags & CPA_CHUNK_DECODE) != 0, decodes);
    CU_ASSERT_EQUAL(chunk->algorithm,
                    cpa_planner_choose(&m->options.planner, chunk->count, chunk->start, decodes).algorithm);
    int wrong_tokens = 0;
    for (int64_t i = 0; i < chunk->count; i++)
        wrong_tokens += m->plan.token_ids[chunk->tokens + i] != token_at(m, chunk->request, chunk->start + i);
    CU_ASSERT_EQUAL(wrong_tokens, 0);
    check_blocks(m, chunk);
    r->phase = chunk->phase;
    r->computed = end;
    r->emitted += emits;
    r->done = finishes;
}

/* Decode before running prefills before admissions, each in order; and nobody waits whom an admitted one goes after. */
static void check_order(const scheduler_model *m, double now) {
    const cpa_plan_chunk *last = NULL, *last_admitted = NULL;
    int last_group = 0;
    for (int64_t i = 0; i < m->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &m->plan.chunks[i];
        int group = chunk->flags & CPA_CHUNK_DECODE ? 0 : chunk->flags & CPA_CHUNK_FIRST ? 2 : 1;
        CU_ASSERT_FATAL(group >= last_group);
        if (last && group == last_group)
            CU_ASSERT_FATAL(goes_before(&m->requests[last->request].request, &m->requests[chunk->request].request));
        last = chunk;
        last_group = group;
        if (group == 2) last_admitted = chunk;
    }
    for (int64_t i = 0; last_admitted && i < m->n_requests; i++) {
        const model_request *r = &m->requests[i];
        if (r->slot >= 0 || r->done || r->request.arrival > now) continue;
        CU_ASSERT_FATAL(goes_before(&m->requests[last_admitted->request].request, &r->request));
    }
}

/* The first of the running sequences advances while there is budget. Nobody is admitted while a running one waits for
 * blocks, or lost them in this plan; and only for the sake of one that goes before them. */
static void check_running(const scheduler_model *m, const int32_t *chunk_of_slot, int budget_left) {
    const model_request *first = NULL, *first_grown = NULL;
    int short_of_blocks = 0, admitted = 0;
    for (int64_t i = 0; i < m->plan.n_chunks; i++) admitted |= (m->plan.chunks[i].flags & CPA_CHUNK_FIRST) != 0;
    for (int32_t slot = 0; slot < m->options.max_num_seqs; slot++) {
        if (m->slot_request[slot] < 0) continue;
        const model_request *r = &m->requests[m->slot_request[slot]];
        if (!first || goes_before(&r->request, &first->request)) first = r;
        if (chunk_of_slot[slot] < 0) short_of_blocks |= budget_left;
    }
    if (first && budget_left) CU_ASSERT_FATAL(chunk_of_slot[first->slot] >= 0);
    for (int64_t i = 0; i < m->plan.n_appends; i++) {
        const model_request *r = &m->requests[m->slot_request[m->plan.appends[i].seq]];
        if (!first_grown || goes_before(&r->request, &first_grown->request)) first_grown = r;
    }
    for (int64_t i = 0; i < m->n_requests; i++) {
        const model_request *r = &m->requests[i];
        if (r->preempted_at != m->steps) continue;
        short_of_blocks = 1;
        CU_ASSERT_FATAL(first_grown && goes_before(&first_grown->request, &r->request));
    }
    CU_ASSERT_FATAL(!(short_of_blocks && admitted));
}

/* The numbers that the scheduler reports are those of the model. */
static void check_totals(scheduler_model *m, double now) {
    cpa_scheduler_stats stats;
    int64_t running = 0, waiting = 0, done = 0, ready = 0;
    double next = INFINITY;
    cpa_scheduler_get_stats(m->scheduler, &stats);
    for (int64_t i = 0; i < m->n_requests; i++) {
        const model_request *r = &m->requests[i];
        done += r->done;
        running += !r->done && r->slot >= 0;
        waiting += !r->done && r->slot < 0;
        ready += !r->done && r->request.arrival <= now;
        if (r->request.arrival > now && r->request.arrival < next) next = r->request.arrival;
    }
    for (int32_t rank = 0; rank < m->options.map.cp_size; rank++) {
        int64_t used = 0;
        for (int64_t b = 0; b < m->options.num_blocks; b++)
            used += m->block_owner[rank * m->options.num_blocks + b] >= 0;
        if (used > m->peak_blocks) m->peak_blocks = used;
    }
    CU_ASSERT_EQUAL_FATAL(stats.running, running);
    CU_ASSERT_EQUAL_FATAL(stats.waiting, waiting);
    CU_ASSERT_EQUAL_FATAL(stats.finished, done);
    CU_ASSERT_EQUAL_FATAL(stats.preemptions, m->preemptions);
    CU_ASSERT(stats.peak_blocks >= m->peak_blocks && stats.peak_blocks <= m->options.num_blocks);
    CU_ASSERT(m->next_arrival == next);
    CU_ASSERT_FATAL(m->plan.n_chunks > 0 || ready == 0);
}

int64_t scheduler_model_step(scheduler_model *m, double now) {
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_plan(m->scheduler, now, &m->plan, &m->next_arrival, NULL), CPA_OK);
    CU_ASSERT_EQUAL(m->plan.step, (uint64_t)m->steps);
    m->now = now;
    m->steps++;
    int32_t *chunk_of_slot = malloc((size_t)m->options.max_num_seqs * sizeof *chunk_of_slot);
    for (int32_t i = 0; i < m->options.max_num_seqs; i++) chunk_of_slot[i] = -1;
    apply_releases(m);
    int64_t tokens = 0;
    for (int64_t i = 0; i < m->plan.n_chunks; i++) {
        const cpa_plan_chunk *chunk = &m->plan.chunks[i];
        CU_ASSERT_FATAL(chunk->seq >= 0 && chunk->seq < m->options.max_num_seqs && chunk_of_slot[chunk->seq] < 0);
        chunk_of_slot[chunk->seq] = (int32_t)i;
        tokens += chunk->count;
        if (!(chunk->flags & CPA_CHUNK_FIRST)) continue;
        CU_ASSERT_EQUAL_FATAL(m->slot_request[chunk->seq], -1);
        m->slot_request[chunk->seq] = (int64_t)chunk->request;
        m->requests[chunk->request].slot = chunk->seq;
    }
    CU_ASSERT_FATAL(tokens <= m->options.max_num_batched_tokens);
    CU_ASSERT_EQUAL(tokens, m->plan.n_token_ids);
    check_order(m, now);
    check_running(m, chunk_of_slot, tokens < m->options.max_num_batched_tokens);
    apply_appends(m, chunk_of_slot);
    for (int64_t i = 0; i < m->plan.n_chunks; i++) apply_chunk(m, &m->plan.chunks[i], now);
    check_totals(m, now);
    free(chunk_of_slot);
    return m->plan.n_chunks;
}

void scheduler_model_finish(scheduler_model *m, double dt) {
    int64_t last_step = m->steps + 1000000;
    while (scheduler_model_step(m, m->now) > 0 || isfinite(m->next_arrival)) {
        CU_ASSERT_FATAL(m->steps < last_step);
        m->now = m->plan.n_chunks > 0 ? m->now + dt : m->next_arrival;
    }
    for (int64_t i = 0; i < m->n_requests; i++) {
        CU_ASSERT(m->requests[i].done);
        CU_ASSERT_EQUAL(m->requests[i].emitted, m->requests[i].request.output_tokens);
        CU_ASSERT_EQUAL(m->requests[i].slot, -1);
    }
    for (int64_t b = 0; b < m->options.map.cp_size * m->options.num_blocks; b++)
        CU_ASSERT_FATAL(m->block_owner[b] == -1);
}
