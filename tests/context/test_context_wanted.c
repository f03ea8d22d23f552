/* pass-KV under a selection of blocks sends those alone that a row of another rank attends: counted in bytes, with what
 * is not sent poisoned; peer by peer and all peers at once, beside windows, shared prefixes, drafts and codes. */
#include <stdlib.h>
#include <string.h>

#include "base/min_max.h"
#include "kernels/device.h"
#include "src/check/cases/selection.h"
#include "src/context/context.h"
#include "src/context/context_internal.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { LENGTH = 4000, START = 2000, BLOCK_SIZE = 16, DRAFTED = 4, MOST_CHUNKS = 2, STAGING = 16 << 20 };

static cpa_device *device;
static cpa_stream *stream;

/* A prompt from `start` on; or two that begin alike; or a prompt, and a row of decode with drafts. Its rows attend some
 * of the blocks that lie before `start`. */
typedef struct wanted_case {
    cpa_test_shape shape;
    int gathers;           /* all peers at once, as on devices; on the host else peer by peer */
    int64_t length, start; /* 0: LENGTH and START */
    int64_t step, first;   /* every step-th block, from a key on */
    int64_t end;           /* before a key; 0: up to the start */
    int dense;             /* not 0: the first rows attend all keys, up to a whole block */
    int64_t shared;        /* tokens of a second prompt that are those of the first; 0: there is none */
    int drafts;            /* not 0: a row of decode with drafts goes by pass-Q beside */
} wanted_case;

/* What runs of a case have. */
typedef struct wanted_run {
    wanted_case of;
    int32_t block; /* tokens of a block of keys */
    cpa_test_cache cache;
    cpa_case_score score;
    cpa_test_chunk chunks[MOST_CHUNKS];
    int64_t n_chunks, block_bytes;
} wanted_run;

/* Devices read keys by 128. */
static int32_t block_of(const wanted_case *of) {
    return of->gathers ? 128 : 32;
}
static int leaves_out(const wanted_run *r) {
    return cpa_test_promises_bits() || r->block >= 128;
}

/* Nothing that does not come may be read. */
static void poison_staging(cpa_context *c) {
    const cpa_kv_transfers *t = &c->kv.transfers;
    const int64_t bytes = t->memory ? t->staging.segments * t->staging.capacity * t->staging.block_bytes : 0;
    char *poison = cpa_test_poisoned(bytes, 1);
    CU_ASSERT_EQUAL(device->table->copy(t->memory, poison, bytes, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    free(poison);
}

/* ---- a case ---- */

static int64_t step_rows(const wanted_run *r) {
    int64_t rows = 0;
    for (int64_t i = 0; i < r->n_chunks; i++) rows += r->chunks[i].count;
    return rows;
}

static void leave_blocks(wanted_run *r) {
    cpa_case_score *score = &r->score;
    const wanted_case *of = &r->of;
    const int64_t words = cpa_mask_words(score->n_blocks), end = of->end ? of->end : of->start;
    for (int64_t i = 0; i < score->n_block_words; i++)
        for (int64_t bit = 0; bit < 32; bit++) {
            const int64_t block = i % words * 32 + bit;
            const int chosen = block * r->block >= of->first && (block + 1) * r->block <= end && block % of->step == 0;
            if (!chosen) score->blocks[i] &= ~(1u << bit);
            if (of->step == 1 && chosen) score->blocks[i] |= 1u << bit;
        }
}

/* No row attends all keys but drafts and what is `dense`. */
static void name_words(wanted_run *r) {
    cpa_case_score *score = &r->score;
    int64_t row = 0, last = 0;
    for (int64_t i = 0; i < r->n_chunks; i++) {
        const cpa_test_chunk *chunk = &r->chunks[i];
        const int64_t whole = (chunk->start + r->block - 1) / r->block * r->block - chunk->start;
        for (int64_t at = 0; at < chunk->count; at++, row++) {
            const int all = chunk->algorithm == CPA_PASS_Q || (r->of.dense && at < whole);
            if (score->block_word[row] >= 0) last = score->block_word[row];
            score->block_word[row] = all ? -1 : last;
        }
    }
}

static void begin(wanted_run *r, const wanted_case *of) {
    const cpa_placement placements[] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 1}};
    *r = (wanted_run){.of = *of, .block = block_of(of), .n_chunks = 1};
    if (!r->of.length) r->of.length = LENGTH, r->of.start = START;
    r->of.shape.interleave = r->block;
    r->chunks[0] = (cpa_test_chunk){0, r->of.start, r->of.length - r->of.start, CPA_PASS_KV};
    if (of->shared) r->chunks[r->n_chunks++] = (cpa_test_chunk){1, r->of.start, r->chunks[0].count, CPA_PASS_KV};
    if (of->drafts) r->chunks[r->n_chunks++] = (cpa_test_chunk){1, r->of.length - DRAFTED, DRAFTED, CPA_PASS_Q};
    const int64_t lengths[] = {r->of.length, r->of.length};
    cpa_test_device_open(1, &device, &stream);
    if (of->gathers && device->caps.bit_exact) device->caps.bit_exact = 0, device->caps.split_tokens = 1;
    cpa_test_cache_init(&r->cache, r->of.shape, 5, lengths, placements, r->n_chunks);
    if (of->shared) cpa_test_cache_share(&r->cache, 1, 0, of->shared);
    r->cache.check_every = cpa_test_promises_bits() ? 4 : 8; /* one head of each row, or of every second */
    r->score = (cpa_case_score){.q_heads = of->shape.q_heads, .rows = step_rows(r)};
    CU_ASSERT_EQUAL_FATAL(cpa_case_score_add_blocks(&r->score, r->block, r->of.length + r->block, NULL), CPA_OK);
    leave_blocks(r);
    name_words(r);
    cpa_test_score_unmap(&r->score);
    r->cache.score = &r->score;
}

static void end(wanted_run *r) {
    r->cache.score = NULL;
    cpa_case_score_release(&r->score);
    cpa_test_cache_destroy(&r->cache);
    cpa_test_device_close(device, stream);
}

/* ---- what goes ---- */

static int is_own(const cpa_test_cache *cache, int64_t position) {
    return cpa_owner_rank(cache->map, cache->placements[0], position) == cache->rank;
}

/* Blocks of the cache of the own shard of a chunk's sequence that its rows on other ranks attend. */
static int64_t wanted_of_chunk(const wanted_run *r, const cpa_test_chunk *chunk, int64_t first_row) {
    int64_t n = 0;
    for (int64_t key = 0; key < r->of.start; key += BLOCK_SIZE) {
        int wanted = 0;
        for (int64_t row = 0; row < chunk->count && !wanted && is_own(&r->cache, key); row++)
            for (int32_t head = 0; head < r->score.q_heads && !is_own(&r->cache, chunk->start + row); head++)
                wanted |= cpa_case_score_selects(&r->score, first_row + row, head, key);
        n += wanted;
    }
    return n;
}
static int64_t wanted_blocks(const wanted_run *r) {
    int64_t n = 0, row = 0;
    for (int64_t i = 0; i < r->n_chunks; row += r->chunks[i++].count)
        if (r->chunks[i].algorithm == CPA_PASS_KV) n += wanted_of_chunk(r, &r->chunks[i], row);
    return n;
}

/* Attends chunks over poisoned staging; returns the bytes that were sent. */
static int64_t attend(wanted_run *r, const cpa_test_chunk *chunks, int64_t n, cpa_test_result *result) {
    const cpa_context_options options = cpa_test_context_options(&r->of.shape, 0);
    const int64_t least = cpa_context_least_staging(device, &options, cpa_test_ranks());
    cpa_context *context = cpa_test_context(device, &r->of.shape, cpa_max64(STAGING, least));
    const cpa_mask mask = r->of.shape.mask;
    cpa_context_stats stats;
    poison_staging(context);
    if (r->of.drafts) cpa_context_set_least_blocks(context, DRAFTED + 1);
    CU_ASSERT_EQUAL(cpa_test_plan(context, &r->cache, chunks, n), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_test_attend(context, &r->cache, mask, chunks, n, stream, result), CPA_OK);
    if (r->cache.score) CU_ASSERT_EQUAL(cpa_test_count_wrong(&r->cache, mask, chunks, n, result), 0);
    cpa_context_get_stats(context, &stats, sizeof stats);
    r->block_bytes = context->kv.transfers.layout ? context->kv.transfers.layout->bytes : 0;
    cpa_context_destroy(context);
    return stats.bytes_sent;
}

static int64_t bytes_sent(wanted_run *r, const cpa_test_chunk *chunks, int64_t n) {
    cpa_test_result result;
    const int64_t sent = attend(r, chunks, n, &result);
    cpa_test_result_destroy(&result);
    return sent;
}

/* What goes without a selection. */
static int64_t all_bytes(wanted_run *r) {
    r->cache.score = NULL;
    const int64_t sent = bytes_sent(r, r->chunks, r->n_chunks);
    r->cache.score = &r->score;
    return sent;
}

/* Queries of drafts and their states, which go by themselves as they do beside others. */
static int64_t draft_bytes(wanted_run *r) {
    if (!r->of.drafts) return 0;
    r->cache.score = NULL;
    const int64_t sent = bytes_sent(r, &r->chunks[1], 1);
    r->cache.score = &r->score;
    return sent;
}

static void expect_wanted(const wanted_case *of) {
    wanted_run r;
    begin(&r, of);
    const int64_t sent = bytes_sent(&r, r.chunks, r.n_chunks), beside = draft_bytes(&r), all = all_bytes(&r);
    const int64_t wanted = wanted_blocks(&r) * (cpa_test_ranks() - 1) * r.block_bytes;
    CU_ASSERT_EQUAL(sent, leaves_out(&r) ? wanted + beside : all);
    if (cpa_test_ranks() > 1) CPA_ASSERT_ORDER(wanted, <, all - beside);
    if (cpa_test_ranks() > 1 && !of->gathers) CPA_ASSERT_ORDER(wanted, >, 0); /* large blocks: some rank has none */
    end(&r);
}

static void expect_all(const wanted_case *of) {
    wanted_run r;
    begin(&r, of);
    const int64_t sent = bytes_sent(&r, r.chunks, r.n_chunks);
    CU_ASSERT_EQUAL(sent, all_bytes(&r));
    end(&r);
}

static wanted_case case_of(int gathers, int head_major) {
    return (wanted_case){.shape = {.q_heads = 4,
                                   .kv_heads = 2,
                                   .k_dim = 32,
                                   .v_dim = 32,
                                   .block_size = BLOCK_SIZE,
                                   .dtype = cpa_test_promises_bits() ? CPA_F32 : CPA_BF16,
                                   .head_major = head_major,
                                   .mask = {.causal = 1}},
                         .gathers = gathers,
                         .step = 5};
}

/* ---- tests ---- */

static void what_another_rank_attends_is_sent(void) {
    for (int i = 0; i < 4; i++) {
        const wanted_case of = case_of(i % 2, i / 2);
        expect_wanted(&of);
    }
}

static void both_algorithms_give_the_same_bits(void) {
    const wanted_case of = case_of(0, 0);
    cpa_test_result by_kv, by_q;
    wanted_run r;
    begin(&r, &of);
    attend(&r, r.chunks, 1, &by_kv);
    r.chunks[0].algorithm = CPA_PASS_Q;
    attend(&r, r.chunks, 1, &by_q);
    CU_ASSERT(cpa_test_same_bits_or_right(&r.cache, of.shape.mask, r.chunks, 1, &by_kv, &by_q));
    cpa_test_result_destroy(&by_q);
    cpa_test_result_destroy(&by_kv);
    end(&r);
}

/* Of the blocks that it leaves, and none of those before. */
static void what_a_window_hides_is_not_sent(void) {
    enum { WINDOW = 500, SEEN = START - WINDOW + 1, HIDDEN = 1024 };
    for (int i = 0; i < 3; i++) {
        wanted_case of = case_of(i > 0, i > 0);
        const int hidden = i == 2; /* all peers at once: peer by peer long pieces begin before what is seen */
        of.shape.mask.window = WINDOW;
        of.step = 3;
        of.first = hidden ? 0 : SEEN + 127;
        of.end = hidden ? HIDDEN : 0;
        wanted_run r;
        begin(&r, &of);
        const int64_t sent = bytes_sent(&r, r.chunks, 1), wanted = hidden ? 0 : wanted_blocks(&r);
        if (leaves_out(&r)) CU_ASSERT_EQUAL(sent, wanted * (cpa_test_ranks() - 1) * r.block_bytes);
        end(&r);
    }
}

static void prefixes_may_be_shared(void) {
    for (int gathers = 0; gathers < 2; gathers++) {
        wanted_case of = case_of(gathers, 0);
        of.shared = 1536;
        expect_wanted(&of);
    }
}

static void drafts_lie_beside(void) {
    for (int gathers = 0; gathers < 2; gathers++) {
        wanted_case of = case_of(gathers, 0);
        of.drafts = 1;
        expect_wanted(&of);
    }
}

/* Codes go as they lie, with what belongs to them. */
static void caches_may_be_quantised(void) {
    static const cpa_dtype caches[] = {CPA_FP8_E4M3, CPA_INT8, CPA_FP8_E5M2, CPA_TQ_4BIT, CPA_TQ_K8V4, CPA_TQ_3BIT};
    for (int i = 0; i < 6; i++) {
        wanted_case of = case_of(i % 2, i == 0);
        of.shape.dtype = CPA_BF16;
        of.shape.kv_dtype = caches[i];
        of.shape.k_dim = of.shape.v_dim = 64;
        expect_wanted(&of);
    }
}

/* A chunk that begins within a block, behind a prefix that was found: its first rows attend all keys, of which their own
 * rank sends what others select. */
static void rows_that_attend_all_keys_are_sent_all(void) {
    for (int gathers = 0; gathers < 2; gathers++) {
        wanted_case of = case_of(gathers, 0);
        of.dense = 1;
        wanted_run r;
        begin(&r, &of);
        const int64_t sent = bytes_sent(&r, r.chunks, 1), all = all_bytes(&r);
        const int64_t wanted = wanted_blocks(&r) * (cpa_test_ranks() - 1) * r.block_bytes;
        CU_ASSERT_EQUAL(sent, leaves_out(&r) && is_own(&r.cache, START) ? wanted : all);
        end(&r);
    }
}

/* Seven blocks of ten of a rank's go alone, of eight all. */
static void above_seven_tenths_all_goes(void) {
    enum { OF_RANK = 10, RANKS = 2, BLOCK = 128 };
    for (int kept = 7; kept <= 8 && cpa_test_ranks() == RANKS; kept++) {
        wanted_case of = case_of(1, 0);
        of.length = OF_RANK * RANKS * BLOCK;
        of.start = of.length - RANKS * BLOCK;
        of.step = 1;
        of.end = kept * RANKS * BLOCK;
        kept == 7 ? expect_wanted(&of) : expect_all(&of);
    }
}

static const cpa_test tests[] = {
    {"what another rank attends is sent", what_another_rank_attends_is_sent},
    {"both algorithms give the same bits", both_algorithms_give_the_same_bits},
    {"what a window hides is not sent", what_a_window_hides_is_not_sent},
    {"prefixes may be shared", prefixes_may_be_shared},
    {"drafts lie beside", drafts_lie_beside},
    {"caches may be quantised", caches_may_be_quantised},
    {"rows that attend all keys are sent all", rows_that_attend_all_keys_are_sent_all},
    {"above seven tenths all goes", above_seven_tenths_all_goes},
};
CPA_MPI_DEVICE_TEST_MAIN("context_wanted", tests)
