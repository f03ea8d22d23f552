#include "tests/shadow_model.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "src/scheduler_internal.h"
#include "tests/planner_fixture.h"

enum { MAX_REQUESTS = 48, MAX_TOKENS = 96, FAMILIES = 3 };

typedef struct request {
    cpa_scheduler_request asked;
    uint64_t family, text; /* of the shared beginning, and of the rest */
    int64_t shared;
    uint64_t tenant;
    int32_t slot; /* -1 = not running */
    int64_t computed, emitted;
    int64_t arrived_step; /* -1: not yet */
    uint64_t damaged;     /* the step that swapped it in with damage; 0: none */
} request;

typedef struct shadow {
    uint64_t random;
    cpa_scheduler_options options;
    cpa_scheduler *scheduler;
    cpa_step_plan plan;
    request requests[MAX_REQUESTS];
    int64_t n_requests, done;
    uint64_t *device; /* [cp_size, num_blocks, block_size]: what a token is, with all that comes before it */
    uint64_t *host;   /* [cp_size, host_blocks, block_size] */
    uint64_t *key;    /* [cp_size, num_blocks]: the first token of a block when it became findable; 0 = it is not */
    int32_t *owners;  /* [cp_size, num_blocks] */
    uint8_t *taken;   /* [cp_size, num_blocks], by a table in this plan */
    int64_t *slot_request; /* [max_num_seqs]; -1 = empty */
    int32_t *tables;       /* [max_num_seqs, cp_size, num_blocks]; -1 = void */
    int64_t *n_table;      /* [max_num_seqs, cp_size] */
    int32_t *arriving;     /* [cp_size, num_blocks] request + 1 that it is swapped in for; 0 = none */
    int64_t idle_plans;
    shadow_result *result;
} shadow;

static uint64_t mix(uint64_t a, uint64_t b) {
    return cpa_mix64(a * CPA_GOLDEN + b);
}

static int64_t between(shadow *m, int64_t low, int64_t high) {
    m->random = mix(m->random, 1);
    return low + (int64_t)(m->random % (uint64_t)(high - low + 1));
}

__attribute__((format(printf, 2, 3))) static void violate(shadow *m, const char *format, ...) {
    if (m->result->violation[0]) return;
    va_list args;
    va_start(args, format);
    vsnprintf(m->result->violation, sizeof m->result->violation, format, args);
    va_end(args);
}

#define CHECK(m, condition, ...)                                                                                       \
    do {                                                                                                               \
        if (!(condition)) violate((m), __VA_ARGS__);                                                                   \
    } while (0)

static uint32_t token_at(void *ctx, uint64_t id, int64_t position) {
    const shadow *m = ctx;
    const request *r = &m->requests[id];
    /* Most outputs are a request's own, also among the samples of one prompt. */
    uint64_t text = position < r->shared ? r->family : position < r->asked.prompt_tokens ? r->text : ~id;
    return (uint32_t)(mix(text, (uint64_t)position) >> 32);
}

/* What the cache holds of tokens [0, n) of a request: each with all that comes before it, and its tenant. */
static void expect_content(const shadow *m, const request *r, int64_t n, uint64_t *out) {
    uint64_t content = mix(r->tenant, 77);
    for (int64_t i = 0; i < n; i++) out[i] = content = mix(content, token_at((void *)(uintptr_t)m, r->asked.id, i)) | 1;
}

static uint64_t *device_block(shadow *m, int32_t rank, int64_t block) {
    return m->device + (rank * m->options.num_blocks + block) * m->options.block_size;
}

static uint64_t *host_block(shadow *m, int32_t rank, int64_t block) {
    return m->host + (rank * m->options.host_blocks + block) * m->options.block_size;
}

static int32_t *table_of(const shadow *m, int32_t slot, int32_t rank) {
    return m->tables + ((int64_t)slot * m->options.map.cp_size + rank) * m->options.num_blocks;
}

static int64_t *n_table_of(const shadow *m, int32_t slot, int32_t rank) {
    return &m->n_table[slot * m->options.map.cp_size + rank];
}

static void choose_options(shadow *m) {
    cpa_scheduler_options *o = &m->options;
    int32_t ranks = (int32_t)between(m, 1, 4), block_size = 1 << between(m, 0, 3);
    *o = (cpa_scheduler_options){
        .map = {ranks, block_size * (int32_t)between(m, 1, 3)},
        .block_size = block_size,
        .max_num_batched_tokens = between(m, 1, 48),
        .max_num_seqs = (int32_t)between(m, 1, 8),
        .planner = cpa_test_planner(ranks),
        .token_at = token_at,
        .token_ctx = m,
        .prefix_caching = between(m, 0, 4) > 0,
        .identity = "shadow",
        .preemption = (cpa_preemption_mode)between(m, 0, 2),
        .block_bytes = 1 << 20,
        .host_bandwidth = 1e9 * (double)between(m, 1, 40),
        .layers = 4,
        .policy = between(m, 0, 3) ? CPA_POLICY_PRIORITY : CPA_POLICY_FCFS,
        .ageing_s = between(m, 0, 1) ? 10 : 0,
        .long_prefill_threshold = between(m, 0, 2) ? 0 : between(m, 1, 20),
        .window = between(m, 0, 3) ? 0 : between(m, 1, 40),
    };
    int64_t most = cpa_request_blocks(o, MAX_TOKENS);
    o->num_blocks = most * between(m, 4, 12) / 4;
    o->host_blocks = between(m, 0, 3) ? o->num_blocks * between(m, 1, 8) / 4 : 0;
    o->tenant_block_quota = between(m, 0, 3) ? 0 : between(m, most, o->num_blocks);
    o->sinks = o->window ? between(m, 0, 9) : 0;
    o->planner.memory_bandwidth = 1e9;
    o->planner.exchange_s = 1e-6 * (double)between(m, 1, 1000);
    o->local_context = between(m, 0, 2) ? between(m, CPA_LOCAL_AUTO, MAX_TOKENS) : CPA_LOCAL_AUTO;
    if (between(m, 0, 2) == 0) o->local_context = 0;
}

static void start(shadow *m) {
    choose_options(m);
    size_t blocks = (size_t)(m->options.map.cp_size * m->options.num_blocks), seqs = (size_t)m->options.max_num_seqs;
    size_t ranks = (size_t)m->options.map.cp_size, block_size = (size_t)m->options.block_size;
    m->device = calloc(blocks * block_size, sizeof *m->device);
    m->host = calloc((size_t)m->options.host_blocks * ranks * block_size + 1, sizeof *m->host);
    m->key = calloc(blocks, sizeof *m->key);
    m->owners = calloc(blocks, sizeof *m->owners);
    m->taken = calloc(blocks, sizeof *m->taken);
    m->arriving = calloc(blocks, sizeof *m->arriving);
    m->slot_request = malloc(seqs * sizeof *m->slot_request);
    m->tables = malloc(seqs * blocks * sizeof *m->tables);
    m->n_table = calloc(seqs * ranks, sizeof *m->n_table);
    for (size_t i = 0; i < seqs; i++) m->slot_request[i] = -1;
    cpa_step_plan_init(&m->plan);
    cpa_error err;
    if (cpa_scheduler_create(&m->options, &m->scheduler, &err) != CPA_OK) violate(m, "create: %.100s", err.message);
}

static void end(shadow *m) {
    cpa_scheduler_destroy(m->scheduler);
    cpa_step_plan_destroy(&m->plan);
    free(m->device);
    free(m->host);
    free(m->key);
    free(m->owners);
    free(m->taken);
    free(m->arriving);
    free(m->slot_request);
    free(m->tables);
    free(m->n_table);
}

/* A request, or several samples of one prompt. */
static void add(shadow *m, double now) {
    static const char *const salts[] = {NULL, "a", "b"};
    int64_t samples = between(m, 0, 4) ? 1 : between(m, 2, 4), prompt = between(m, 1, MAX_TOKENS - 20);
    uint64_t tenant = (uint64_t)between(m, 0, 8) / 4, group = samples > 1 ? (uint64_t)m->n_requests + 1 : 0;
    uint64_t family = (uint64_t)between(m, 1, FAMILIES);
    int64_t shared = between(m, 0, 2) ? prompt : between(m, 0, prompt);
    if (samples == 1 && between(m, 0, 2) == 0) shared = MAX_TOKENS; /* the output too is what others begin with */
    double arrival = now + (double)between(m, 0, 3) * (double)between(m, 0, 3);
    for (int64_t i = 0; i < samples && m->n_requests < MAX_REQUESTS; i++) {
        uint64_t id = (uint64_t)m->n_requests++;
        request *r = &m->requests[id];
        *r = (request){
            .asked = {id, prompt, between(m, 1, 20), arrival, (int32_t)between(m, -1, 1), salts[tenant], group},
            .family = family,
            .text = group ? group << 32 : (id + 1) << 40,
            .shared = shared,
            .tenant = tenant,
            .slot = -1,
            .arrived_step = -1};
        cpa_error err;
        if (cpa_scheduler_add(m->scheduler, &r->asked, &err) != CPA_OK) violate(m, "add: %.100s", err.message);
    }
}

static void apply_voids(shadow *m) {
    const cpa_step_plan *plan = &m->plan;
    for (int64_t i = 0; i < plan->n_voids; i++) {
        const cpa_plan_void *v = &plan->voids[i];
        CHECK(m, v->entry < *n_table_of(m, v->seq, v->rank), "a void entry that is not there");
        table_of(m, v->seq, v->rank)[v->entry] = -1;
    }
}

static void apply_releases(shadow *m) {
    for (int64_t i = 0; i < m->plan.n_releases; i++) {
        int32_t slot = m->plan.releases[i];
        if (m->slot_request[slot] >= 0) {
            request *r = &m->requests[m->slot_request[slot]];
            r->slot = -1;
            m->slot_request[slot] = -1;
        }
        for (int32_t rank = 0; rank < m->options.map.cp_size; rank++) *n_table_of(m, slot, rank) = 0;
    }
}

static void apply_moves(shadow *m) {
    size_t bytes = (size_t)m->options.block_size * sizeof *m->device;
    const cpa_step_plan *plan = &m->plan;
    for (int64_t i = 0; i < plan->n_swap_outs; i++) {
        cpa_plan_move move = plan->swap_outs[i];
        memcpy(host_block(m, move.rank, move.to), device_block(m, move.rank, move.from), bytes);
    }
    for (int64_t i = 0; i < plan->n_swap_ins; i++) {
        cpa_plan_move move = plan->swap_ins[i];
        request *r = &m->requests[move.request];
        memcpy(device_block(m, move.rank, move.to), host_block(m, move.rank, move.from), bytes);
        m->arriving[move.rank * m->options.num_blocks + move.to] = (int32_t)move.request + 1;
        if (r->damaged != plan->step + 1 && between(m, 0, 30)) continue;
        /* A bit has flipped. */
        memset(device_block(m, move.rank, move.to), 0, bytes);
        r->damaged = plan->step + 1;
    }
    for (int64_t i = 0; i < plan->n_copies; i++) {
        cpa_plan_move move = plan->copies[i];
        CHECK(m, move.from != move.to, "a block is copied onto itself");
        memcpy(device_block(m, move.rank, move.to), device_block(m, move.rank, move.from), bytes);
    }
    m->result->swaps += plan->n_swap_ins;
    m->result->copies += plan->n_copies;
    m->result->voids += plan->n_voids;
}

static void apply_tables(shadow *m) {
    const cpa_step_plan *plan = &m->plan;
    for (int64_t i = 0; i < plan->n_appends; i++) {
        const cpa_plan_append *append = &plan->appends[i];
        int64_t *n = n_table_of(m, append->seq, append->rank);
        for (int32_t b = 0; b < append->count; b++) {
            int32_t block = plan->block_ids[append->blocks + b];
            table_of(m, append->seq, append->rank)[(*n)++] = block;
            if (block >= 0) m->taken[append->rank * m->options.num_blocks + block] = 1;
        }
    }
}

/* Where the cache has the token at a position of the sequence of a chunk; NULL where it has none. */
static uint64_t *cell(shadow *m, const cpa_plan_chunk *chunk, int64_t position) {
    int32_t rank = cpa_owner_rank(m->options.map, chunk->phase, position);
    int64_t local = cpa_shard_len(m->options.map, cpa_owner_slot(m->options.map, rank, chunk->phase), position);
    int64_t entry = local / m->options.block_size;
    int32_t block = entry < *n_table_of(m, chunk->seq, rank) ? table_of(m, chunk->seq, rank)[entry] : -1;
    return block < 0 ? NULL : device_block(m, rank, block) + local % m->options.block_size;
}

/* The chunk continues where its request stands; writes its tokens. */
static void write_chunk(shadow *m, const cpa_plan_chunk *chunk) {
    request *r = &m->requests[chunk->request];
    int64_t known = r->asked.prompt_tokens + r->emitted, end = chunk->start + chunk->count;
    uint64_t content[MAX_TOKENS + 1];
    if (chunk->flags & CPA_CHUNK_FIRST) {
        CHECK(m, r->slot < 0 && m->slot_request[chunk->seq] < 0, "request %" PRIu64 " starts twice", chunk->request);
        m->slot_request[chunk->seq] = (int64_t)chunk->request;
        r->slot = chunk->seq;
        r->computed = chunk->start;
        for (int64_t b = 0; b < m->options.map.cp_size * m->options.num_blocks; b++)
            if (m->arriving[b] == (int32_t)chunk->request + 1) m->arriving[b] = 0;
    }
    CHECK(m, r->slot == chunk->seq && r->computed == chunk->start && chunk->count > 0 && end <= known,
          "request %" PRIu64 " goes on at %" PRId64 " instead of %" PRId64, chunk->request, chunk->start, r->computed);
    CHECK(m, r->damaged == 0, "request %" PRIu64 " computes with what was damaged", chunk->request);
    int64_t n = cpa_plan_chunk_tokens(chunk);
    for (int64_t i = 0; i < n; i++)
        CHECK(m, m->plan.token_ids[chunk->tokens + i] == token_at(m, chunk->request, end - n + i), "wrong token");
    expect_content(m, r, end, content);
    for (int64_t p = chunk->start; p < end; p++) {
        uint64_t *at = cell(m, chunk, p);
        CHECK(m, at, "request %" PRIu64 " has no block for token %" PRId64, chunk->request, p);
        if (at) *at = content[p];
    }
    r->computed = end;
    r->emitted += (chunk->flags & CPA_CHUNK_EMITS) != 0;
    m->done += (chunk->flags & CPA_CHUNK_FINISHES) != 0;
    CHECK(m, ((chunk->flags & CPA_CHUNK_FINISHES) != 0) == (r->emitted == r->asked.output_tokens), "a wrong end");
}

/* Every key that a query of the chunk sees is what it should be. */
static void read_chunk(shadow *m, const cpa_plan_chunk *chunk) {
    const request *r = &m->requests[chunk->request];
    int64_t window = m->options.window, end = chunk->start + chunk->count;
    uint64_t content[MAX_TOKENS + 1];
    expect_content(m, r, end, content);
    for (int64_t p = 0; p < end && !m->result->violation[0]; p++) {
        if (window > 0 && p >= m->options.sinks && p <= chunk->start - window) continue;
        const uint64_t *at = cell(m, chunk, p);
        CHECK(m, at && *at == content[p], "request %" PRIu64 " reads a wrong token at %" PRId64 " in step %" PRIu64,
              chunk->request, p, m->plan.step);
    }
}

/* Every block has the owners that the tables, the moves and the pools agree on. */
static void check_blocks(shadow *m) {
    const cpa_scheduler *s = m->scheduler;
    int32_t ranks = m->options.map.cp_size;
    int64_t blocks = m->options.num_blocks;
    memset(m->owners, 0, (size_t)(ranks * blocks) * sizeof *m->owners);
    for (int32_t slot = 0; slot < m->options.max_num_seqs; slot++)
        for (int32_t rank = 0; rank < ranks; rank++)
            for (int64_t i = 0; i < *n_table_of(m, slot, rank); i++) {
                int32_t block = table_of(m, slot, rank)[i];
                if (block >= 0) m->owners[rank * blocks + block]++;
            }
    for (int64_t i = 0; i < m->plan.n_copies; i++)
        m->owners[m->plan.copies[i].rank * blocks + m->plan.copies[i].from]++;
    for (int32_t rank = 0; rank < ranks; rank++) {
        int64_t free_count = 0, kept = 0;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = rank * blocks + b;
            int32_t owners = m->owners[at] + (m->arriving[at] > 0);
            int holds = cpa_prefix_cache_holds(s->cache, rank, (int32_t)b);
            uint64_t first = device_block(m, rank, b)[0];
            CHECK(m, owners == cpa_block_pool_owners(s->pools[rank], (int32_t)b),
                  "block %" PRId64 " of rank %d has %d owners, the pool says %d", b, rank, owners,
                  cpa_block_pool_owners(s->pools[rank], (int32_t)b));
            CHECK(m, !holds || m->key[at] == 0 || m->key[at] == first || m->taken[at],
                  "the hash of block %" PRId64 " outlives it", b);
            m->key[at] = holds ? first : 0;
            m->taken[at] = 0;
            free_count += owners == 0;
            kept += owners == 0 && holds;
        }
        CHECK(m, free_count == cpa_block_pool_free_count(s->pools[rank]), "free and used are not all");
        CHECK(m, kept == cpa_block_pool_kept_count(s->pools[rank]), "kept blocks are miscounted");
    }
}

/* Reports what was damaged when the step with the swap_in has run, that is after one more plan. */
static void report_damage(shadow *m) {
    for (int64_t i = 0; i < m->n_requests; i++) {
        request *r = &m->requests[i];
        if (r->damaged == 0 || r->damaged > m->plan.step) continue;
        cpa_error err;
        if (cpa_scheduler_swap_failed(m->scheduler, r->asked.id, &err) != CPA_OK) violate(m, "%.100s", err.message);
        r->damaged = 0;
        m->result->failures++;
    }
}

/* What was swapped in and is in no table yet belongs to its sequence as long as that is running. */
static void forget_returns(shadow *m) {
    for (int64_t b = 0; b < m->options.map.cp_size * m->options.num_blocks; b++) {
        if (m->arriving[b] == 0) continue;
        uint64_t id = (uint64_t)m->arriving[b] - 1;
        cpa_sequence *sequence;
        HASH_FIND(hh, m->scheduler->by_id, &id, sizeof id, sequence);
        if (!sequence || !sequence->blocks || sequence->ready == m->plan.step + 2) m->arriving[b] = 0;
    }
}

/* Returns the time of the next step. */
static double step(shadow *m, double now) {
    double next;
    cpa_error err;
    int64_t ready = 0;
    if (cpa_scheduler_plan(m->scheduler, now, &m->plan, &next, &err) != CPA_OK) violate(m, "plan: %.100s", err.message);
    for (int64_t i = 0; i < m->n_requests; i++)
        ready += m->requests[i].asked.arrival <= now && m->requests[i].emitted < m->requests[i].asked.output_tokens;
    forget_returns(m);
    apply_voids(m);
    apply_releases(m);
    apply_moves(m);
    apply_tables(m);
    for (int64_t i = 0; i < m->plan.n_chunks; i++) write_chunk(m, &m->plan.chunks[i]);
    for (int64_t i = 0; i < m->plan.n_chunks; i++) read_chunk(m, &m->plan.chunks[i]);
    check_blocks(m);
    report_damage(m);
    m->result->steps++;
    m->idle_plans = m->plan.n_chunks == 0 && ready > 0 ? m->idle_plans + 1 : 0;
    CHECK(m, m->idle_plans < 4, "%" PRId64 " requests starve", ready);
    if (m->plan.n_chunks > 0) return now + 0.5;
    return isfinite(next) ? next : now;
}

static void count(shadow *m) {
    cpa_scheduler_stats stats;
    cpa_scheduler_get_stats(m->scheduler, &stats);
    m->result->hits += stats.prefix_hits;
    m->result->evictions += stats.evictions;
    m->result->preemptions += stats.preemptions;
    CHECK(m, stats.prefix_hits <= stats.prefix_queries, "more hits than queries");
    CHECK(m, stats.finished == m->n_requests, "%" PRId64 " of %" PRId64 " requests finished", stats.finished,
          m->n_requests);
}

void shadow_run(uint64_t seed, shadow_result *result) {
    shadow *m = calloc(1, sizeof *m);
    m->random = mix(seed, 12345);
    m->result = result;
    start(m);
    double now = 0;
    int64_t wanted = between(m, 4, MAX_REQUESTS - 8), steps = 0;
    while (!result->violation[0] && (m->n_requests < wanted || m->done < m->n_requests)) {
        if (m->n_requests < wanted && between(m, 0, 2) == 0) add(m, now);
        if (m->n_requests > 0) now = step(m, now);
        if (++steps > 20000)
            violate(m, "%" PRId64 " of %" PRId64 " requests are lost", m->n_requests - m->done, wanted);
        /* Time passes when nothing is there, too. */
        if (m->n_requests > 0 && m->plan.n_chunks == 0 && m->done == m->n_requests) now += 1;
    }
    if (!result->violation[0]) step(m, now);
    if (!result->violation[0]) count(m);
    end(m);
    free(m);
}
