/* The owner map against giving the tokens of a sequence to the ranks one by one. */
#include <cpattn/owner_map.h>
#include <stdlib.h>

#include "tests/fixtures/unit.h"

enum { MAX_RANKS = 9, MAX_TOKENS = 2400 };

typedef struct given_tokens {
    int64_t tokens;
    int32_t owner[MAX_TOKENS];
    int64_t local[MAX_TOKENS];                 /* index within the owner's shard */
    int64_t before[MAX_RANKS][MAX_TOKENS + 1]; /* tokens of a rank before each position */
} given_tokens;

/* Gives runs of I tokens to the ranks in turn, from rank `first` on. */
static void give(given_tokens *given, cpa_owner_map map, int32_t first, int64_t tokens) {
    int64_t held[MAX_RANKS] = {0};
    int32_t rank = first, in_run = 0;
    given->tokens = tokens;
    for (int64_t t = 0; t <= tokens; t++) {
        for (int32_t r = 0; r < map.cp_size; r++) given->before[r][t] = held[r];
        if (t == tokens) break;
        given->owner[t] = rank;
        given->local[t] = held[rank]++;
        if (++in_run == map.interleave) {
            in_run = 0;
            rank = rank + 1 == map.cp_size ? 0 : rank + 1;
        }
    }
}

static void for_every_map(void (*check)(const given_tokens *, cpa_owner_map, cpa_placement)) {
    static const int32_t interleaves[] = {1, 2, 3, 16, 48};
    static given_tokens given;
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        for (size_t i = 0; i < sizeof interleaves / sizeof *interleaves; i++) {
            cpa_owner_map map = {n, interleaves[i]};
            for (int32_t first = 0; first < n; first++) {
                give(&given, map, first, (int64_t)5 * n * interleaves[i] + interleaves[i] / 2 + 1);
                check(&given, map, (cpa_placement){CPA_SHARDED, first});
            }
        }
    }
}

static void check_owners(const given_tokens *given, cpa_owner_map map, cpa_placement placement) {
    int wrong = 0;
    for (int64_t t = 0; t < given->tokens; t++) wrong += cpa_owner_rank(map, placement, t) != given->owner[t];
    CU_ASSERT_EQUAL(wrong, 0);
}

static void check_positions(const given_tokens *given, cpa_owner_map map, cpa_placement placement) {
    int wrong = 0;
    for (int64_t t = 0; t < given->tokens; t++) {
        cpa_token_set shard = cpa_tokens_on(map, placement, given->owner[t]);
        wrong += cpa_token_position(map, shard, given->local[t]) != t;
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void check_lengths(const given_tokens *given, cpa_owner_map map, cpa_placement placement) {
    int wrong = 0;
    for (int64_t len = 0; len <= given->tokens; len++) {
        int64_t sum = 0;
        for (int32_t r = 0; r < map.cp_size; r++) {
            const cpa_token_set shard = cpa_tokens_on(map, placement, r), others = {CPA_TOKENS_OTHERS, shard.shard};
            const int64_t before = cpa_tokens_before(map, shard, len);
            wrong += before != given->before[r][len] || cpa_tokens_before(map, others, len) != len - before;
            sum += before;
        }
        wrong += sum != len;
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Chunks [start, end) with every start and a few ends: the owned positions are those of the local range. */
static void check_chunks(const given_tokens *given, cpa_owner_map map, cpa_placement placement) {
    int wrong = 0;
    for (int64_t start = 0; start < given->tokens; start++) {
        int64_t end = start + 1 + start * 7 % (3 * map.interleave);
        if (end > given->tokens) end = given->tokens;
        for (int32_t r = 0; r < map.cp_size; r++) {
            cpa_token_set shard = cpa_tokens_on(map, placement, r);
            int64_t local = cpa_tokens_before(map, shard, start);
            for (int64_t t = start; t < end; t++)
                if (given->owner[t] == r) wrong += cpa_token_position(map, shard, local++) != t;
            wrong += local != cpa_tokens_before(map, shard, end);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Rows [start, start + 8) of a sequence, a token and its drafts, whatever of them is accepted. On each rank row i sees
 * the tokens that were given to it up to that row's own, which is no constant less than the last row's; and the blocks
 * that it needs no more once some drafts are rejected hold nothing but those. */
static void check_rows(const given_tokens *given, cpa_owner_map map, cpa_placement placement) {
    enum { ROWS = 8, BLOCK = 16 };
    int wrong = 0;
    for (int64_t start = 0; start + ROWS <= given->tokens; start++) {
        for (int32_t r = 0; r < map.cp_size; r++) {
            const cpa_token_set shard = cpa_tokens_on(map, placement, r);
            const int64_t blocks = (cpa_tokens_before(map, shard, start + ROWS) + BLOCK - 1) / BLOCK;
            int64_t seen = given->before[r][start];
            for (int64_t i = 0; i < ROWS; i++) {
                seen += given->owner[start + i] == r;
                wrong += cpa_tokens_before(map, shard, start + i + 1) != seen;
                const int64_t kept = (seen + BLOCK - 1) / BLOCK;
                if (kept < blocks) wrong += cpa_token_position(map, shard, kept * BLOCK) <= start + i;
                if (kept > 0) wrong += cpa_token_position(map, shard, (kept - 1) * BLOCK) > start + i;
            }
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void what_each_of_several_rows_sees_follows_from_its_position(void) {
    for_every_map(check_rows);
}

static void owner_is_the_rank_the_token_was_given_to(void) {
    for_every_map(check_owners);
}

static void pos_inverts_the_local_index(void) {
    for_every_map(check_positions);
}

static void len_counts_the_tokens_of_the_shard_before_a_position(void) {
    for_every_map(check_lengths);
}

static void a_chunk_is_a_contiguous_local_range_on_every_rank(void) {
    for_every_map(check_chunks);
}

static void shards_are_a_rotation_of_the_ranks(void) {
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        cpa_owner_map map = {n, 16};
        for (int32_t first = 0; first < n; first++) {
            for (int32_t r = 0; r < n; r++) {
                cpa_token_set set = cpa_tokens_on(map, (cpa_placement){CPA_SHARDED, first}, r);
                CU_ASSERT_EQUAL(set.kind, CPA_TOKENS_SHARD);
                CU_ASSERT(set.shard >= 0 && set.shard < n);
                CU_ASSERT_EQUAL((set.shard + first) % n, r);
            }
        }
    }
}

static void positions_beyond_32_bits_are_exact(void) {
    const cpa_owner_map map = {7, 48};
    const cpa_placement placement = {CPA_SHARDED, 3};
    for (int64_t t = INT64_C(1) << 40; t < (INT64_C(1) << 40) + 1000; t++) {
        cpa_token_set shard = cpa_tokens_on(map, placement, cpa_owner_rank(map, placement, t));
        int64_t local = cpa_tokens_before(map, shard, t);
        CU_ASSERT_EQUAL(cpa_token_position(map, shard, local), t);
        CU_ASSERT_EQUAL(cpa_tokens_before(map, shard, t + 1), local + 1);
    }
}

static void a_sequence_on_one_rank_is_all_there(void) {
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        cpa_owner_map map = {n, 16};
        for (int32_t home = 0; home < n; home++) {
            const cpa_placement placement = {CPA_ON_RANK, home};
            for (int32_t r = 0; r < n; r++) {
                cpa_token_set set = cpa_tokens_on(map, placement, r);
                CU_ASSERT_EQUAL(set.kind, r == home ? CPA_TOKENS_ALL : CPA_TOKENS_NONE);
                for (int64_t t = 0; t < 100; t++) {
                    CU_ASSERT_EQUAL(cpa_owner_rank(map, placement, t), home);
                    CU_ASSERT_EQUAL(cpa_tokens_before(map, set, t), r == home ? t : 0);
                    if (r == home) CU_ASSERT_EQUAL(cpa_token_position(map, set, t), t);
                }
            }
        }
    }
}

static void placements_name_a_rank_of_the_map(void) {
    const cpa_owner_map map = {3, 16};
    for (int32_t rank = -1; rank <= 3; rank++) {
        const int known = rank >= 0 && rank < 3;
        CU_ASSERT_EQUAL(cpa_placement_is_valid(map, (cpa_placement){CPA_SHARDED, rank}), known);
        CU_ASSERT_EQUAL(cpa_placement_is_valid(map, (cpa_placement){CPA_ON_RANK, rank}), known);
        CU_ASSERT(!cpa_placement_is_valid(map, (cpa_placement){(cpa_placement_kind)2, rank}));
    }
}

static const cpa_test tests[] = {
    {"owner is the rank the token was given to", owner_is_the_rank_the_token_was_given_to},
    {"pos inverts the local index", pos_inverts_the_local_index},
    {"len counts the shard's tokens before a position", len_counts_the_tokens_of_the_shard_before_a_position},
    {"a chunk is a contiguous local range on every rank", a_chunk_is_a_contiguous_local_range_on_every_rank},
    {"what each of several rows sees follows from its position",
     what_each_of_several_rows_sees_follows_from_its_position},
    {"a sequence on one rank is all there", a_sequence_on_one_rank_is_all_there},
    {"placements name a rank of the map", placements_name_a_rank_of_the_map},
    {"shards are a rotation of the ranks", shards_are_a_rotation_of_the_ranks},
    {"positions beyond 32 bits are exact", positions_beyond_32_bits_are_exact},
};

CPA_TEST_MAIN("owner map", tests)
