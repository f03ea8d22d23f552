/* The step plan and its wire form: what goes in comes out, and nothing malformed comes in. */
#include <stdlib.h>
#include <string.h>

#include "src/cache/parcel.h"
#include "src/schedule/step_plan_wire.h"
#include "tests/fixtures/unit.h"

static const cpa_plan_limits limits = {.cp_size = 3,
                                       .max_seqs = 8,
                                       .groups = {2,
                                                  {{.num_blocks = 100, .host_blocks = 40, .disk_blocks = 60},
                                                   {.num_blocks = 30, .host_blocks = 7, .disk_blocks = 8}}},
                                       .max_tokens = 64};

/* Offsets in a message: the header's counts, then the first chunk. */
enum {
    VERSION_AT = 4,
    FLAGS_AT = 16,
    COUNTS_AT = 20,
    HEADER = 164,
    CHUNK = 92,
    MOVE = 24,
    DISCARD = 16,
    CUT = 12,
    SAMPLING = 96,
    BIAS = 8,
    DISK_MOVE = 52
};

static int64_t below(int64_t n) {
    return rand() % n;
}

static void add_random_chunk(cpa_step_plan *plan, int64_t count) {
    static const cpa_algorithm algorithms[] = {CPA_PASS_KV, CPA_PASS_Q};
    cpa_plan_chunk *chunk = cpa_step_plan_add_chunk(plan);
    *chunk = (cpa_plan_chunk){
        .request = (uint64_t)rand() << 40 | (uint64_t)rand(),
        .seq = (int32_t)below(limits.max_seqs),
        .placement = {below(2) ? CPA_SHARDED : CPA_ON_RANK, (int32_t)below(limits.cp_size)},
        .start = below(1000) << below(32),
        .count = count,
        .first_output = below(1000) << below(32),
        .algorithm = algorithms[below(2)],
        .flags = (uint32_t)below(16),
        .tokens = plan->n_token_ids,
        .given = below(3) ? below(1LL << 32) : -1,
        .parents = -1,
        .sampling = below(plan->n_samplings + 1) - 1,
    };
    if (count == 1 && !(chunk->flags & CPA_CHUNK_FIRST) && below(2)) chunk->flags |= CPA_CHUNK_DRAWN;
    /* A first chunk brings the tokens before its start. */
    if (chunk->flags & CPA_CHUNK_FIRST) chunk->start = below(20);
    if (count > 1 && below(2)) {
        chunk->flags = CPA_CHUNK_EMITS | CPA_CHUNK_DECODE | (chunk->flags & CPA_CHUNK_FIRST);
        chunk->drafts = 1 + below(count - 1);
        if (below(2)) chunk->parents = plan->n_parents;
    }
    for (int64_t i = 0; chunk->parents >= 0 && i < chunk->drafts; i++)
        *cpa_step_plan_add_parents(plan, 1) = (int32_t)below(i + 1) - 1;
    int64_t n = cpa_plan_chunk_tokens(chunk) + (chunk->given >= 0 ? chunk->drafts : 0);
    uint32_t *tokens = cpa_step_plan_add_tokens(plan, n);
    for (int64_t i = 0; i < n; i++) tokens[i] = (uint32_t)rand() * 2 + (uint32_t)below(2);
}

static void add_random_append(cpa_step_plan *plan) {
    int64_t count = 1 + below(5);
    const int32_t group = (int32_t)below(limits.groups.count);
    *cpa_step_plan_add_append(plan) = (cpa_plan_append){
        (int32_t)below(limits.max_seqs), group, (int32_t)below(limits.cp_size), (int32_t)count, plan->n_block_ids};
    int32_t *blocks = cpa_step_plan_add_blocks(plan, count);
    for (int64_t i = 0; i < count; i++) blocks[i] = (int32_t)below(limits.groups.list[group].num_blocks + 1) - 1;
}

typedef enum tier { HOST, DEVICE } tier;

static int64_t blocks_in(tier where, int32_t group) {
    return where == HOST ? limits.groups.list[group].host_blocks : limits.groups.list[group].num_blocks;
}

static cpa_block_move random_move(tier from, tier to) {
    const int32_t group = (int32_t)below(limits.groups.count);
    return (cpa_block_move){(uint64_t)rand() << 40, group, (int32_t)below(limits.cp_size),
                            (int32_t)below(blocks_in(from, group)), (int32_t)below(blocks_in(to, group))};
}

static cpa_disk_move random_disk_move(void) {
    const int32_t group = (int32_t)below(limits.groups.count);
    return (cpa_disk_move){.group = group,
                           .rank = (int32_t)below(limits.cp_size),
                           .host = (int32_t)below(limits.groups.list[group].host_blocks),
                           .slot = (int32_t)below(limits.groups.list[group].disk_blocks),
                           .ranks = 1 + (uint32_t)below(limits.cp_size),
                           .digest = {(uint64_t)rand() << 40, 1, (uint64_t)rand(), 3}};
}

static void add_random_moves(cpa_step_plan *plan, int64_t entries) {
    for (int64_t i = below(entries + 1); i > 0; i--) *cpa_step_plan_add_swap_out(plan) = random_move(DEVICE, HOST);
    for (int64_t i = below(entries + 1); i > 0; i--) *cpa_step_plan_add_swap_in(plan) = random_move(HOST, DEVICE);
    for (int64_t i = below(entries + 1); i > 0; i--) *cpa_step_plan_add_copy(plan) = random_move(DEVICE, DEVICE);
    for (int64_t i = below(entries + 1); i > 0; i--) *cpa_step_plan_add_store(plan) = random_disk_move();
    for (int64_t i = below(entries + 1); i > 0; i--) *cpa_step_plan_add_load(plan) = random_disk_move();
    for (int64_t i = below(entries + 1); i > 0; i--)
        *cpa_step_plan_add_nulled(plan) =
            (cpa_plan_nulled){(int32_t)below(limits.max_seqs), (int32_t)below(limits.groups.count),
                              (int32_t)below(limits.cp_size), (int32_t)below(100)};
}

static float fraction(void) {
    return (float)below(1000) / 999;
}

static void add_random_drawing(cpa_step_plan *plan, int64_t entries) {
    for (int64_t i = below(entries + 1); i > 0; i--)
        *cpa_step_plan_add_discard(plan) = (cpa_plan_discard){(uint64_t)rand() << 40, below(1000) << below(32)};
    for (int64_t i = below(entries + 1); i > 0; i--)
        *cpa_step_plan_add_cut(plan) = (cpa_plan_cut){(int32_t)below(limits.max_seqs), below(1000) << below(32)};
    const int64_t biases = below(40);
    for (int64_t i = 0; i < biases; i++)
        *cpa_step_plan_add_biases(plan, 1) = (cpa_plan_bias){(uint32_t)rand(), fraction()};
    for (int64_t i = below(entries + 1); i > 0; i--)
        *cpa_step_plan_add_sampling(plan) = (cpa_plan_sampling){.temperature = fraction(),
                                                                .top_p = fraction(),
                                                                .min_p = fraction(),
                                                                .top_k = (int32_t)below(100),
                                                                .repetition_penalty = fraction(),
                                                                .presence_penalty = fraction(),
                                                                .frequency_penalty = fraction(),
                                                                .seed = (uint64_t)rand() << 33 | (uint64_t)rand(),
                                                                .logprobs = (uint32_t)below(2),
                                                                .top_logprobs = (int32_t)below(21),
                                                                .prompt_logprobs = (uint32_t)below(2),
                                                                .top_prompt_logprobs = (int32_t)below(21),
                                                                .prompt_tokens = below(1000) << below(32),
                                                                .constrained = (uint32_t)below(2),
                                                                .min_tokens = below(1000) << below(32),
                                                                .n_biases = below(biases / 2 + 1),
                                                                .n_ends = below(biases / 2 + 1)};
}

static void add_random_transfer(cpa_step_plan *plan) {
    cpa_plan_transfer *transfer = cpa_step_plan_add_transfer(plan);
    *transfer = (cpa_plan_transfer){
        .request = (uint64_t)rand() << 40 | (uint64_t)rand(),
        .placement = {below(2) ? CPA_SHARDED : CPA_ON_RANK, (int32_t)below(limits.cp_size)},
        .tokens = 1 + below(100),
        .digests = plan->n_token_ids,
        .blocks = plan->n_transfer_blocks,
        .n_blocks = 1 + below(5),
        .imports = (uint32_t)below(2),
    };
    cpa_step_plan_add_tokens(plan, cpa_parcels(transfer->tokens) * CPA_PLAN_DIGEST_WORDS);
    for (int64_t i = 0; i < transfer->n_blocks; i++) {
        const int32_t group = (int32_t)below(limits.groups.count);
        *cpa_step_plan_add_transfer_block(plan) =
            (cpa_plan_transfer_block){group, (int32_t)below(limits.cp_size), (int32_t)below(1000),
                                      (int32_t)below(limits.groups.list[group].num_blocks)};
    }
}

/* A plan within the limits; `entries` bounds the length of each list. */
static void fill_random(cpa_step_plan *plan, int64_t entries) {
    cpa_step_plan_clear(plan);
    plan->step = (uint64_t)rand() << 33 | (uint64_t)rand();
    plan->flags = (uint32_t)below(2);
    add_random_drawing(plan, entries);
    for (int64_t i = below(entries + 1); i > 0; i--) add_random_chunk(plan, 1 + below(8));
    for (int64_t i = below(entries + 1); i > 0; i--) *cpa_step_plan_add_release(plan) = (int32_t)below(limits.max_seqs);
    for (int64_t i = below(2 * entries + 1); i > 0; i--) add_random_append(plan);
    add_random_moves(plan, entries);
    for (int64_t i = below(entries / 2 + 1); i > 0; i--) add_random_transfer(plan);
}

static int chunks_equal(const cpa_plan_chunk *a, const cpa_plan_chunk *b) {
    return a->request == b->request && a->seq == b->seq && a->placement.kind == b->placement.kind &&
           a->placement.rank == b->placement.rank && a->start == b->start && a->count == b->count &&
           a->first_output == b->first_output && a->algorithm == b->algorithm && a->flags == b->flags &&
           a->tokens == b->tokens && a->given == b->given && a->drafts == b->drafts && a->parents == b->parents &&
           a->sampling == b->sampling;
}

static int drawing_equal(const cpa_step_plan *a, const cpa_step_plan *b) {
    int equal = a->n_discards == b->n_discards && a->n_samplings == b->n_samplings && a->n_cuts == b->n_cuts;
    for (int64_t i = 0; equal && i < a->n_cuts; i++)
        equal = a->cuts[i].seq == b->cuts[i].seq && a->cuts[i].tokens == b->cuts[i].tokens;
    for (int64_t i = 0; equal && i < a->n_discards; i++)
        equal = a->discards[i].request == b->discards[i].request && a->discards[i].position == b->discards[i].position;
    for (int64_t i = 0; equal && i < a->n_samplings; i++) {
        const cpa_plan_sampling *x = &a->samplings[i], *y = &b->samplings[i];
        equal = memcmp(&x->temperature, &y->temperature, 7 * sizeof x->temperature) == 0 && x->seed == y->seed &&
                x->logprobs == y->logprobs && x->top_logprobs == y->top_logprobs &&
                x->prompt_logprobs == y->prompt_logprobs && x->top_prompt_logprobs == y->top_prompt_logprobs &&
                x->prompt_tokens == y->prompt_tokens && x->constrained == y->constrained &&
                x->min_tokens == y->min_tokens && x->biases == y->biases && x->n_biases == y->n_biases &&
                x->n_ends == y->n_ends;
    }
    equal &= a->n_biases == b->n_biases;
    return equal && (a->n_biases == 0 || memcmp(a->biases, b->biases, (size_t)a->n_biases * sizeof *a->biases) == 0);
}

static int moves_equal(const cpa_block_move *a, int64_t n_a, const cpa_block_move *b, int64_t n_b) {
    int equal = n_a == n_b;
    for (int64_t i = 0; equal && i < n_a; i++)
        equal = a[i].request == b[i].request && a[i].group == b[i].group && a[i].rank == b[i].rank &&
                a[i].from == b[i].from && a[i].to == b[i].to;
    return equal;
}

static int disk_moves_equal(const cpa_disk_move *a, int64_t n_a, const cpa_disk_move *b, int64_t n_b) {
    int equal = n_a == n_b;
    for (int64_t i = 0; equal && i < n_a; i++)
        equal = a[i].group == b[i].group && a[i].rank == b[i].rank && a[i].host == b[i].host &&
                a[i].slot == b[i].slot && a[i].ranks == b[i].ranks &&
                memcmp(a[i].digest, b[i].digest, sizeof a[i].digest) == 0;
    return equal;
}

static int voids_equal(const cpa_step_plan *a, const cpa_step_plan *b) {
    int equal = a->n_nulled == b->n_nulled;
    for (int64_t i = 0; equal && i < a->n_nulled; i++)
        equal = a->nulled[i].seq == b->nulled[i].seq && a->nulled[i].group == b->nulled[i].group &&
                a->nulled[i].rank == b->nulled[i].rank && a->nulled[i].entry == b->nulled[i].entry;
    return equal;
}

static int transfers_equal(const cpa_step_plan *a, const cpa_step_plan *b) {
    int equal = a->n_transfers == b->n_transfers && a->n_transfer_blocks == b->n_transfer_blocks;
    for (int64_t i = 0; equal && i < a->n_transfers; i++) {
        const cpa_plan_transfer *x = &a->transfers[i], *y = &b->transfers[i];
        equal = x->request == y->request && x->placement.kind == y->placement.kind &&
                x->placement.rank == y->placement.rank && x->tokens == y->tokens && x->digests == y->digests &&
                x->blocks == y->blocks && x->n_blocks == y->n_blocks && x->imports == y->imports;
    }
    for (int64_t i = 0; equal && i < a->n_transfer_blocks; i++)
        equal = memcmp(&a->transfer_blocks[i], &b->transfer_blocks[i], sizeof a->transfer_blocks[i]) == 0;
    return equal;
}

static int plans_equal(const cpa_step_plan *a, const cpa_step_plan *b) {
    if (a->step != b->step || a->flags != b->flags || a->n_chunks != b->n_chunks || a->n_releases != b->n_releases ||
        a->n_appends != b->n_appends || a->n_block_ids != b->n_block_ids || a->n_token_ids != b->n_token_ids)
        return 0;
    if (!moves_equal(a->swap_outs, a->n_swap_outs, b->swap_outs, b->n_swap_outs) ||
        !moves_equal(a->swap_ins, a->n_swap_ins, b->swap_ins, b->n_swap_ins) ||
        !moves_equal(a->copies, a->n_copies, b->copies, b->n_copies) ||
        !disk_moves_equal(a->stores, a->n_stores, b->stores, b->n_stores) ||
        !disk_moves_equal(a->loads, a->n_loads, b->loads, b->n_loads) || !voids_equal(a, b) || !drawing_equal(a, b) ||
        !transfers_equal(a, b))
        return 0;
    for (int64_t i = 0; i < a->n_chunks; i++)
        if (!chunks_equal(&a->chunks[i], &b->chunks[i])) return 0;
    for (int64_t i = 0; i < a->n_releases; i++)
        if (a->releases[i] != b->releases[i]) return 0;
    for (int64_t i = 0; i < a->n_appends; i++) {
        const cpa_plan_append *x = &a->appends[i], *y = &b->appends[i];
        if (x->seq != y->seq || x->group != y->group || x->rank != y->rank || x->count != y->count ||
            x->blocks != y->blocks)
            return 0;
    }
    for (int64_t i = 0; i < a->n_block_ids; i++)
        if (a->block_ids[i] != b->block_ids[i]) return 0;
    for (int64_t i = 0; i < a->n_token_ids; i++)
        if (a->token_ids[i] != b->token_ids[i]) return 0;
    return 1;
}

static int moves_within(const cpa_block_move *moves, int64_t n, tier from, tier to) {
    int good = 1;
    for (int64_t i = 0; i < n && good; i++)
        good = moves[i].group >= 0 && moves[i].group < limits.groups.count && moves[i].rank >= 0 &&
               moves[i].rank < limits.cp_size && moves[i].from >= 0 &&
               moves[i].from < blocks_in(from, moves[i].group) && moves[i].to >= 0 &&
               moves[i].to < blocks_in(to, moves[i].group);
    return good;
}

static int disk_moves_within(const cpa_disk_move *moves, int64_t n) {
    int good = 1;
    for (int64_t i = 0; i < n && good; i++)
        good = moves[i].group >= 0 && moves[i].group < limits.groups.count && moves[i].rank >= 0 &&
               moves[i].rank < limits.cp_size && moves[i].host >= 0 &&
               moves[i].host < limits.groups.list[moves[i].group].host_blocks && moves[i].slot >= 0 &&
               moves[i].slot < limits.groups.list[moves[i].group].disk_blocks && moves[i].ranks >= 1 &&
               moves[i].ranks <= (uint32_t)limits.cp_size;
    return good;
}

static int transfers_within(const cpa_step_plan *plan) {
    int good = plan->n_transfers <= limits.max_seqs;
    for (int64_t i = 0; good && i < plan->n_transfers; i++) {
        const cpa_plan_transfer *t = &plan->transfers[i];
        const int64_t words = cpa_parcels(t->tokens) * CPA_PLAN_DIGEST_WORDS;
        good &= cpa_placement_is_valid((cpa_owner_map){limits.cp_size, 1}, t->placement);
        good &= t->tokens > 0 && t->digests >= 0 && words <= plan->n_token_ids - t->digests;
        good &= t->n_blocks > 0 && t->blocks >= 0 && t->n_blocks <= plan->n_transfer_blocks - t->blocks;
    }
    for (int64_t i = 0; good && i < plan->n_transfer_blocks; i++) {
        const cpa_plan_transfer_block *b = &plan->transfer_blocks[i];
        good = b->group >= 0 && b->group < limits.groups.count && b->rank >= 0 && b->rank < limits.cp_size &&
               b->entry >= 0 && b->block >= 0 && b->block < limits.groups.list[b->group].num_blocks;
    }
    return good;
}

/* Every index in the plan may be used without another look. */
static int within_limits(const cpa_step_plan *plan) {
    int64_t rows = 0;
    int good = plan->n_chunks <= limits.max_seqs && plan->n_releases <= limits.max_seqs;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *c = &plan->chunks[i];
        good &= c->seq >= 0 && c->seq < limits.max_seqs;
        good &= cpa_placement_is_valid((cpa_owner_map){limits.cp_size, 1}, c->placement);
        good &= c->start >= 0 && c->count > 0 && c->start <= INT64_MAX - c->count && c->first_output >= 0;
        good &= c->tokens >= 0 && c->tokens <= plan->n_token_ids;
        const int64_t given = c->given >= 0 ? c->drafts : 0;
        good &= good && cpa_plan_chunk_tokens(c) + given <= plan->n_token_ids - c->tokens;
        good &=
            c->drafts == 0 || (c->drafts > 0 && c->count > c->drafts && cpa_plan_chunk_emissions(c) == 1 + c->drafts);
        good &= c->parents >= -1 && (c->parents < 0 || (c->drafts > 0 && c->drafts <= plan->n_parents - c->parents));
        for (int64_t d = 0; good && d < c->drafts; d++)
            good = cpa_plan_parent(plan, c, d) >= -1 && cpa_plan_parent(plan, c, d) < d;
        good &= c->algorithm == CPA_PASS_KV || c->algorithm == CPA_PASS_Q;
        good &= c->flags < 32 && (!(c->flags & CPA_CHUNK_DRAWN) || (c->count == 1 && !(c->flags & CPA_CHUNK_FIRST)));
        good &= c->given >= -1 && c->given < 1LL << 32 && c->sampling >= -1 && c->sampling < plan->n_samplings;
        rows += good ? c->count : 0;
    }
    for (int64_t i = 0; i < plan->n_releases; i++)
        good &= plan->releases[i] >= 0 && plan->releases[i] < limits.max_seqs;
    good &= moves_within(plan->swap_outs, plan->n_swap_outs, DEVICE, HOST);
    good &= moves_within(plan->swap_ins, plan->n_swap_ins, HOST, DEVICE);
    good &= moves_within(plan->copies, plan->n_copies, DEVICE, DEVICE);
    good &= disk_moves_within(plan->stores, plan->n_stores) && disk_moves_within(plan->loads, plan->n_loads);
    for (int64_t i = 0; i < plan->n_nulled; i++)
        good &= plan->nulled[i].seq >= 0 && plan->nulled[i].seq < limits.max_seqs && plan->nulled[i].rank >= 0 &&
                plan->nulled[i].rank < limits.cp_size && plan->nulled[i].entry >= 0;
    for (int64_t i = 0; i < plan->n_cuts; i++)
        good &= plan->cuts[i].seq >= 0 && plan->cuts[i].seq < limits.max_seqs && plan->cuts[i].tokens >= 0;
    for (int64_t i = 0; i < plan->n_samplings; i++) {
        const cpa_plan_sampling *s = &plan->samplings[i];
        good &= s->n_biases >= 0 && s->n_ends >= 0 && cpa_plan_listed_biases(s) <= CPA_PLAN_MOST_BIASES;
        good &= cpa_plan_listed_biases(s) == 0 ||
                (s->biases >= 0 && s->biases <= plan->n_biases - cpa_plan_listed_biases(s));
    }
    for (int64_t i = 0; i < plan->n_appends; i++) {
        const cpa_plan_append *a = &plan->appends[i];
        good &= a->seq >= 0 && a->seq < limits.max_seqs && a->rank >= 0 && a->rank < limits.cp_size;
        good &= a->group >= 0 && a->group < limits.groups.count;
        for (int64_t b = 0; good && b < a->count; b++)
            good &= plan->block_ids[a->blocks + b] < limits.groups.list[a->group].num_blocks;
        good &= a->count > 0 && a->blocks >= 0 && a->blocks + a->count <= plan->n_block_ids;
    }
    for (int64_t i = 0; i < plan->n_block_ids; i++)
        good &= plan->block_ids[i] >= -1 && plan->block_ids[i] < limits.groups.list[0].num_blocks;
    return good && rows <= limits.max_tokens && transfers_within(plan);
}

/* Decodes a copy that ends where the allocation ends, so that a sanitizer sees one byte too many. */
static cpa_status decode_copy(const uint8_t *message, int64_t bytes, cpa_step_plan *out, cpa_error *err) {
    uint8_t *copy = malloc(bytes > 0 ? (size_t)bytes : 1);
    memcpy(copy, message, (size_t)bytes);
    cpa_status status = cpa_step_plan_decode(copy, bytes, &limits, out, err);
    free(copy);
    return status;
}

typedef struct fixture {
    cpa_step_plan plan, out;
    uint8_t *message;
    int64_t capacity, bytes;
} fixture;

static void encode(fixture *f) {
    CU_ASSERT_EQUAL_FATAL(cpa_step_plan_encode(&f->plan, &f->message, &f->capacity, &f->bytes, NULL), CPA_OK);
}

/* One plan of every kind of entry: chunk (4 tokens), release, swap-out, swap-in, copy, append (2 blocks), void,
 * discard, cut, sampling (3 biases), store, load. */
static void setup(fixture *f) {
    memset(f, 0, sizeof *f);
    cpa_step_plan_init(&f->plan);
    cpa_step_plan_init(&f->out);
    f->plan.step = 0x0102030405060708;
    f->plan.flags = CPA_PLAN_STOP;
    *cpa_step_plan_add_chunk(&f->plan) = (cpa_plan_chunk){.request = 9,
                                                          .seq = 7,
                                                          .placement = {CPA_SHARDED, 2},
                                                          .start = 16,
                                                          .count = 4,
                                                          .first_output = 19,
                                                          .algorithm = CPA_PASS_Q,
                                                          .flags = CPA_CHUNK_EMITS,
                                                          .tokens = 0,
                                                          .given = 77,
                                                          .parents = -1,
                                                          .sampling = 0};
    *cpa_step_plan_add_release(&f->plan) = 3;
    *cpa_step_plan_add_swap_out(&f->plan) = (cpa_block_move){9, 0, 1, 99, 39};
    *cpa_step_plan_add_swap_in(&f->plan) = (cpa_block_move){8, 0, 2, 39, 99};
    *cpa_step_plan_add_copy(&f->plan) = (cpa_block_move){9, 0, 0, 98, 99};
    *cpa_step_plan_add_append(&f->plan) = (cpa_plan_append){7, 0, 2, 2, 0};
    *cpa_step_plan_add_store(&f->plan) = (cpa_disk_move){.rank = 1, .host = 39, .slot = 59, .ranks = 1};
    *cpa_step_plan_add_load(&f->plan) = (cpa_disk_move){.rank = 2, .host = 38, .slot = 59, .ranks = 3};
    *cpa_step_plan_add_nulled(&f->plan) = (cpa_plan_nulled){7, 0, 2, 1};
    *cpa_step_plan_add_discard(&f->plan) = (cpa_plan_discard){9, 20};
    *cpa_step_plan_add_cut(&f->plan) = (cpa_plan_cut){7, 18};
    *cpa_step_plan_add_sampling(&f->plan) =
        (cpa_plan_sampling){.temperature = 1, .top_p = 1, .prompt_tokens = 20, .biases = 0, .n_biases = 2, .n_ends = 1};
    memcpy(cpa_step_plan_add_biases(&f->plan, 3), (cpa_plan_bias[]){{3, 1}, {5, 2}, {4, -3}},
           3 * sizeof(cpa_plan_bias));
    memcpy(cpa_step_plan_add_blocks(&f->plan, 2), (int32_t[]){99, 5}, 8);
    memcpy(cpa_step_plan_add_tokens(&f->plan, 4), (uint32_t[]){1, 2, 0xfffffffe, 4}, 16);
    encode(f);
}

static void teardown(fixture *f) {
    free(f->message);
    cpa_step_plan_destroy(&f->out);
    cpa_step_plan_destroy(&f->plan);
}

static void random_plans_survive_the_round_trip(void) {
    fixture f;
    setup(&f);
    srand(1);
    for (int i = 0; i < 5000; i++) {
        fill_random(&f.plan, below(9));
        encode(&f);
        cpa_status status = decode_copy(f.message, f.bytes, &f.out, NULL);
        CU_ASSERT_EQUAL_FATAL(status, CPA_OK);
        CU_ASSERT_FATAL(plans_equal(&f.plan, &f.out));
        CU_ASSERT_FATAL(within_limits(&f.out));
    }
    teardown(&f);
}

static void the_bytes_are_little_endian_and_start_with_magic_and_version(void) {
    static const uint8_t head[] = {'C', 'P', 'A', 'P', 12, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0};
    fixture f;
    setup(&f);
    CU_ASSERT_EQUAL(memcmp(f.message, head, sizeof head), 0);
    CU_ASSERT_EQUAL(f.bytes, HEADER + CHUNK + 4 + 3 * MOVE + 24 + 16 + DISCARD + CUT + SAMPLING + 3 * BIAS + 2 * 4 +
                                 4 * 4 + 2 * DISK_MOVE);
    CU_ASSERT_EQUAL(f.message[f.bytes - 2 * DISK_MOVE - 8], 0xfe);
    CU_ASSERT_EQUAL(f.message[f.bytes - 2 * DISK_MOVE - 5], 0xff);
    teardown(&f);
}

static void a_message_cut_anywhere_or_too_long_is_refused(void) {
    fixture f;
    setup(&f);
    srand(2);
    for (int i = 0; i < 20; i++) {
        fill_random(&f.plan, 4);
        encode(&f);
        for (int64_t bytes = 0; bytes < f.bytes; bytes++)
            CU_ASSERT_EQUAL(decode_copy(f.message, bytes, &f.out, NULL), CPA_INVALID);
        uint8_t *longer = calloc(1, (size_t)f.bytes + 1);
        memcpy(longer, f.message, (size_t)f.bytes);
        CU_ASSERT_EQUAL(decode_copy(longer, f.bytes + 1, &f.out, NULL), CPA_INVALID);
        free(longer);
    }
    teardown(&f);
}

static void a_mutated_message_is_refused_or_stays_within_the_limits(void) {
    fixture f;
    setup(&f);
    srand(3);
    int refused = 0, accepted = 0;
    for (int i = 0; i < 100000; i++) {
        if (i % 50 == 0) {
            fill_random(&f.plan, 6);
            encode(&f);
        }
        uint8_t *copy = malloc((size_t)f.bytes);
        memcpy(copy, f.message, (size_t)f.bytes);
        for (int64_t n = 1 + below(3); n > 0; n--) copy[below(f.bytes)] = (uint8_t)rand();
        cpa_status status = cpa_step_plan_decode(copy, f.bytes, &limits, &f.out, NULL);
        free(copy);
        refused += status != CPA_OK;
        accepted += status == CPA_OK;
        if (status == CPA_OK) CU_ASSERT_FATAL(within_limits(&f.out));
    }
    CPA_ASSERT_ORDER(refused, >, 10000);
    CPA_ASSERT_ORDER(accepted, >, 10000);
    teardown(&f);
}

/* One wrong field of the plan of setup(), and a part of the message that names it. */
typedef struct bad_field {
    int64_t offset;
    int bytes;
    int64_t value;
    const char *message;
} bad_field;

enum {
    CHUNK_AT = HEADER,
    RELEASE_AT = CHUNK_AT + CHUNK,
    SWAP_OUT_AT = RELEASE_AT + 4,
    SWAP_IN_AT = SWAP_OUT_AT + MOVE,
    COPY_AT = SWAP_IN_AT + MOVE,
    APPEND_AT = COPY_AT + MOVE,
    VOID_AT = APPEND_AT + 24,
    DISCARD_AT = VOID_AT + 16,
    CUT_AT = DISCARD_AT + DISCARD,
    SAMPLING_AT = CUT_AT + CUT,
    BLOCK_AT = SAMPLING_AT + SAMPLING + 3 * BIAS,
    STORE_AT = BLOCK_AT + 2 * 4 + 4 * 4,
    LOAD_AT = STORE_AT + DISK_MOVE
};

static const bad_field bad_fields[] = {
    {0, 1, 'X', "begins with"},
    {VERSION_AT, 4, 1, "version 1; expected 12"},
    {FLAGS_AT, 4, 2, "unknown flags 0x2"},
    {COUNTS_AT, 8, -1, "-1 chunks"},
    {COUNTS_AT, 8, INT64_MAX, "chunks do not fit"},
    {COUNTS_AT, 8, 0, "bytes too many"},
    {COUNTS_AT + 8, 8, 1 << 20, "releases do not fit"},
    {COUNTS_AT + 16, 8, 1000, "swap-outs do not fit"},
    {COUNTS_AT + 24, 8, -1, "-1 swap-ins do not fit"},
    {COUNTS_AT + 32, 8, 49, "49 copies"},
    {COUNTS_AT + 40, 8, INT64_MIN, "appends do not fit"},
    {COUNTS_AT + 48, 8, 1000, "nulled do not fit"},
    {COUNTS_AT + 56, 8, 1000, "discards do not fit"},
    {COUNTS_AT + 64, 8, 1000, "cuts do not fit"},
    {COUNTS_AT + 72, 8, 1000, "samplings do not fit"},
    {COUNTS_AT + 80, 8, 1000, "biases do not fit"},
    {COUNTS_AT + 88, 8, 1000, "blocks do not fit"},
    {COUNTS_AT + 96, 8, 50, "tokens do not fit"},
    {COUNTS_AT + 96, 8, 3, "bytes too many"},
    {COUNTS_AT + 104, 8, 10, "transfer blocks do not fit"},
    {COUNTS_AT + 112, 8, 8, "transfers do not fit"},
    {COUNTS_AT + 120, 8, 3, "stores do not fit"},
    {COUNTS_AT + 128, 8, -1, "-1 loads do not fit"},
    {COUNTS_AT + 136, 8, 1, "parents do not fit"},
    {STORE_AT, 4, 2, "store 0 has group 2; expected 0 to 1"},
    {STORE_AT + 4, 4, 3, "store 0 has rank 3; expected 0 to 2"},
    {STORE_AT + 8, 4, 40, "store 0 has host block 40; expected 0 to 39"},
    {STORE_AT + 12, 4, 60, "store 0 has slot 60; expected 0 to 59"},
    {LOAD_AT, 4, 1, "load 0 has host block 38; expected 0 to 6"},
    {LOAD_AT + 12, 4, -1, "load 0 has slot -1; expected 0 to 59"},
    {LOAD_AT + 16, 4, 4, "load 0 has number of further ranks 3; expected 0 to 2"},
    {LOAD_AT + 16, 4, 0, "load 0 has number of further ranks -1"},
    {CHUNK_AT + 8, 4, 8, "chunk 0 has sequence 8; expected 0 to 7"},
    {CHUNK_AT + 8, 4, -1, "chunk 0 has sequence -1"},
    {CHUNK_AT + 12, 4, 2, "chunk 0 has unknown placement 2"},
    {CHUNK_AT + 16, 4, 3, "chunk 0 has rank 3; expected 0 to 2"},
    {CHUNK_AT + 16, 4, -1, "chunk 0 has rank -1"},
    {CHUNK_AT + 20, 8, -1, "chunk 0 has start -1"},
    {CHUNK_AT + 20, 8, INT64_MAX - 3, "chunk 0 has start"},
    {CHUNK_AT + 28, 8, 0, "chunk 0 takes 0 entries"},
    {CHUNK_AT + 28, 8, -4, "chunk 0 takes -4 entries"},
    {CHUNK_AT + 28, 8, 5, "chunk 0 takes 5 entries from 0 on; there are 4"},
    {CHUNK_AT + 28, 8, INT64_MAX, "chunk 0 takes"},
    {CHUNK_AT + 36, 8, -1, "chunk 0 has first output -1"},
    {CHUNK_AT + 44, 4, 0, "chunk 0 has unknown algorithm 0"},
    {CHUNK_AT + 44, 4, 3, "chunk 0 has unknown algorithm 3"},
    {CHUNK_AT + 48, 4, 32, "chunk 0 has unknown flags 0x20"},
    {CHUNK_AT + 48, 4, CPA_CHUNK_DRAWN, "chunk 0 of 4 tokens goes on with a token that was drawn"},
    {CHUNK_AT + 52, 8, 1, "chunk 0 takes 4 entries from 1 on"},
    {CHUNK_AT + 52, 8, -1, "chunk 0 takes 4 entries from -1 on"},
    {CHUNK_AT + 52, 8, INT64_MAX, "chunk 0 takes"},
    {CHUNK_AT + 60, 8, 1LL << 32, "chunk 0 has given token 4294967296"},
    {CHUNK_AT + 60, 8, -2, "chunk 0 has given token -2"},
    {CHUNK_AT + 68, 8, 3,
     "chunk 0 of 4 tokens and flags 0x2 has 3 drafts; expected fewer than tokens, in a decode chunk"},
    {CHUNK_AT + 68, 8, -1, "chunk 0 of 4 tokens and flags 0x2 has -1 drafts"},
    {CHUNK_AT + 76, 8, 0, "chunk 0 of 4 tokens and flags 0x2 has 0 drafts"},
    {CHUNK_AT + 84, 8, 1, "chunk 0 has sampling 1; expected 0 to 0"},
    {CHUNK_AT + 84, 8, -2, "chunk 0 has sampling -2"},
    {CUT_AT, 4, 8, "cut 0 has sequence 8"},
    {CUT_AT + 4, 8, -1, "cut 0 has length -1"},
    {DISCARD_AT + 8, 8, -1, "discard 0 has position -1"},
    {SAMPLING_AT + 52, 8, -1, "sampling 0 has prompt length -1"},
    {SAMPLING_AT + 72, 8, 1, "sampling 0 takes 3 entries from 1 on; there are 3"},
    {SAMPLING_AT + 72, 8, -1, "sampling 0 takes 3 entries from -1 on"},
    {SAMPLING_AT + 80, 8, -1, "sampling 0 has count of biases -1"},
    {SAMPLING_AT + 80, 8, 513, "sampling 0 has count of biases 513; expected 0 to 512"},
    {SAMPLING_AT + 88, 8, 511, "sampling 0 has count of ends 511; expected 0 to 510"},
    {SAMPLING_AT + 88, 8, 2, "sampling 0 takes 4 entries from 0 on; there are 3"},
    {RELEASE_AT, 4, 8, "release 0 has sequence 8"},
    {RELEASE_AT, 4, -1, "release 0 has sequence -1"},
    {CHUNK_AT + 48, 4, CPA_CHUNK_FIRST, "chunk 0 takes 20 entries from 0 on; there are 4"},
    {SWAP_OUT_AT + 8, 4, 2, "swap-out 0 has group 2; expected 0 to 1"},
    {SWAP_OUT_AT + 8, 4, 1, "swap-out 0 has source 99; expected 0 to 29"},
    {SWAP_OUT_AT + 12, 4, 3, "swap-out 0 has rank 3; expected 0 to 2"},
    {SWAP_OUT_AT + 16, 4, 100, "swap-out 0 has source 100; expected 0 to 99"},
    {SWAP_OUT_AT + 20, 4, 40, "swap-out 0 has destination 40; expected 0 to 39"},
    {SWAP_IN_AT + 16, 4, 40, "swap-in 0 has source 40; expected 0 to 39"},
    {SWAP_IN_AT + 20, 4, -1, "swap-in 0 has destination -1; expected 0 to 99"},
    {COPY_AT + 16, 4, 100, "copy 0 has source 100; expected 0 to 99"},
    {COPY_AT + 20, 4, 100, "copy 0 has destination 100; expected 0 to 99"},
    {VOID_AT, 4, 8, "void 0 has sequence 8"},
    {VOID_AT + 4, 4, 2, "void 0 has group 2"},
    {VOID_AT + 8, 4, -1, "void 0 has rank -1"},
    {VOID_AT + 12, 4, 100, "void 0 has entry 100"},
    {APPEND_AT, 4, 8, "append 0 has sequence 8"},
    {APPEND_AT + 4, 4, -1, "append 0 has group -1; expected 0 to 1"},
    {APPEND_AT + 4, 4, 1, "block 0 has id 99; expected 0 to 29"},
    {APPEND_AT + 8, 4, 3, "append 0 has rank 3; expected 0 to 2"},
    {APPEND_AT + 12, 4, 0, "append 0 takes 0 entries"},
    {APPEND_AT + 12, 4, 3, "append 0 takes 3 entries from 0 on; there are 2"},
    {APPEND_AT + 16, 8, 1, "append 0 takes 2 entries from 1 on"},
    {APPEND_AT + 16, 8, INT64_MIN, "append 0 takes"},
    {BLOCK_AT, 4, 100, "block 0 has id 100; expected 0 to 99"},
    {BLOCK_AT + 4, 4, -2, "block 1 has id -2"},
};

static void every_field_out_of_bounds_is_named(void) {
    for (size_t i = 0; i < sizeof bad_fields / sizeof *bad_fields; i++) {
        const bad_field *bad = &bad_fields[i];
        fixture f;
        cpa_error err = {0};
        setup(&f);
        for (int b = 0; b < bad->bytes; b++) f.message[bad->offset + b] = (uint8_t)((uint64_t)bad->value >> 8 * b);
        CU_ASSERT_EQUAL(decode_copy(f.message, f.bytes, &f.out, &err), CPA_INVALID);
        int named = strstr(err.message, bad->message) != NULL;
        CU_ASSERT(named);
        if (!named) printf("\n    expected \"%s\" in \"%s\"\n", bad->message, err.message);
        teardown(&f);
    }
}

/* Each comes behind a lower one of its chunk, or the token before all of them. */
static void drafts_behind_themselves_are_refused(void) {
    static const int32_t bad[][3] = {{0, -1, 0}, {-1, 1, 0}, {-1, 0, 2}, {-1, -2, 0}, {-1, 0, INT32_MIN}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        fixture f;
        cpa_error err = {0};
        setup(&f);
        f.plan.chunks[0].flags |= CPA_CHUNK_DECODE;
        f.plan.chunks[0].given = -1;
        f.plan.chunks[0].drafts = 3;
        f.plan.chunks[0].parents = 0;
        memcpy(cpa_step_plan_add_parents(&f.plan, 3), bad[i], sizeof bad[i]);
        encode(&f);
        CU_ASSERT_EQUAL(decode_copy(f.message, f.bytes, &f.out, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "of chunk 0 comes behind draft"));
        teardown(&f);
    }
}

static void a_step_of_more_tokens_or_chunks_than_the_limits_is_refused(void) {
    fixture f;
    cpa_error err = {0};
    setup(&f);
    cpa_step_plan_clear(&f.plan);
    add_random_chunk(&f.plan, limits.max_tokens);
    encode(&f);
    CU_ASSERT_EQUAL(decode_copy(f.message, f.bytes, &f.out, NULL), CPA_OK);
    cpa_plan_chunk *again = cpa_step_plan_add_chunk(&f.plan);
    *again = f.plan.chunks[0];
    encode(&f);
    CU_ASSERT_EQUAL(decode_copy(f.message, f.bytes, &f.out, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "step plan: more than 64 tokens up to chunk 1");
    cpa_step_plan_clear(&f.plan);
    for (int32_t i = 0; i <= limits.max_seqs; i++) add_random_chunk(&f.plan, 1);
    encode(&f);
    CU_ASSERT_EQUAL(decode_copy(f.message, f.bytes, &f.out, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "step plan: 9 chunks; expected at most 8");
    teardown(&f);
}

static void a_refused_message_leaves_the_plan_untouched(void) {
    fixture f;
    setup(&f);
    CU_ASSERT_EQUAL(decode_copy(f.message, f.bytes, &f.out, NULL), CPA_OK);
    srand(4);
    cpa_step_plan other;
    cpa_step_plan_init(&other);
    for (int i = 0; i < 1000; i++) {
        uint8_t *message = NULL;
        int64_t capacity = 0, bytes = 0;
        fill_random(&other, 8);
        add_random_append(&other);
        other.appends[other.n_appends - 1].rank = limits.cp_size;
        CU_ASSERT_EQUAL_FATAL(cpa_step_plan_encode(&other, &message, &capacity, &bytes, NULL), CPA_OK);
        CU_ASSERT_EQUAL(decode_copy(message, bytes, &f.out, NULL), CPA_INVALID);
        CU_ASSERT_FATAL(plans_equal(&f.plan, &f.out));
        free(message);
    }
    cpa_step_plan_destroy(&other);
    teardown(&f);
}

static void clearing_and_encoding_again_keep_their_memory(void) {
    fixture f;
    setup(&f);
    const cpa_plan_chunk *chunks = f.plan.chunks;
    const uint8_t *message = f.message;
    cpa_step_plan_clear(&f.plan);
    CU_ASSERT_EQUAL(f.plan.n_chunks + f.plan.n_releases + f.plan.n_appends, 0);
    CU_ASSERT_EQUAL(f.plan.n_block_ids + f.plan.n_token_ids, 0);
    CU_ASSERT_EQUAL(f.plan.step, 0);
    CU_ASSERT_EQUAL(f.plan.flags, 0);
    CU_ASSERT_PTR_EQUAL(cpa_step_plan_add_chunk(&f.plan), chunks);
    CU_ASSERT_EQUAL(f.plan.chunks[0].request, 0);
    encode(&f);
    CU_ASSERT_PTR_EQUAL(f.message, message);
    teardown(&f);
}

static const cpa_test tests[] = {
    {"random plans survive the round trip", random_plans_survive_the_round_trip},
    {"the bytes are little-endian and start with magic and version",
     the_bytes_are_little_endian_and_start_with_magic_and_version},
    {"a message cut anywhere or too long is refused", a_message_cut_anywhere_or_too_long_is_refused},
    {"a mutated message is refused or stays within the limits",
     a_mutated_message_is_refused_or_stays_within_the_limits},
    {"every field out of bounds is named", every_field_out_of_bounds_is_named},
    {"drafts behind themselves are refused", drafts_behind_themselves_are_refused},
    {"a step of more tokens or chunks than the limits is refused",
     a_step_of_more_tokens_or_chunks_than_the_limits_is_refused},
    {"a refused message leaves the plan untouched", a_refused_message_leaves_the_plan_untouched},
    {"clearing and encoding again keep their memory", clearing_and_encoding_again_keep_their_memory},
};

CPA_TEST_MAIN("step plan", tests)
