/* The owner map against dealing the tokens of a sequence out one by one. */
#include <cpattn/owner_map.h>
#include <stdlib.h>

#include "tests/fixtures/unit.h"

enum { MAX_RANKS = 9, MAX_TOKENS = 2400 };

typedef struct dealt_tokens {
    int64_t tokens;
    int32_t owner[MAX_TOKENS];
    int64_t local[MAX_TOKENS];                 /* index within the owner's shard */
    int64_t before[MAX_RANKS][MAX_TOKENS + 1]; /* tokens of a rank before each position */
} dealt_tokens;

/* Deals runs of I tokens to the ranks in turn, from rank `phase` on. */
static void deal(dealt_tokens *dealt, cpa_owner_map map, int32_t phase, int64_t tokens) {
    int64_t held[MAX_RANKS] = {0};
    int32_t rank = phase, in_run = 0;
    dealt->tokens = tokens;
    for (int64_t t = 0; t <= tokens; t++) {
        for (int32_t r = 0; r < map.cp_size; r++) dealt->before[r][t] = held[r];
        if (t == tokens) break;
        dealt->owner[t] = rank;
        dealt->local[t] = held[rank]++;
        if (++in_run == map.interleave) {
            in_run = 0;
            rank = rank + 1 == map.cp_size ? 0 : rank + 1;
        }
    }
}

static void for_every_map(void (*check)(const dealt_tokens *, cpa_owner_map, int32_t)) {
    static const int32_t interleaves[] = {1, 2, 3, 16, 48};
    static dealt_tokens dealt;
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        for (size_t i = 0; i < sizeof interleaves / sizeof *interleaves; i++) {
            cpa_owner_map map = {n, interleaves[i]};
            for (int32_t phase = 0; phase < n; phase++) {
                deal(&dealt, map, phase, (int64_t)5 * n * interleaves[i] + interleaves[i] / 2 + 1);
                check(&dealt, map, phase);
            }
        }
    }
}

static void check_owners(const dealt_tokens *dealt, cpa_owner_map map, int32_t phase) {
    int wrong = 0;
    for (int64_t t = 0; t < dealt->tokens; t++) wrong += cpa_owner_rank(map, phase, t) != dealt->owner[t];
    CU_ASSERT_EQUAL(wrong, 0);
}

static void check_positions(const dealt_tokens *dealt, cpa_owner_map map, int32_t phase) {
    int wrong = 0;
    for (int64_t t = 0; t < dealt->tokens; t++) {
        int32_t slot = cpa_owner_slot(map, dealt->owner[t], phase);
        wrong += cpa_shard_pos(map, slot, dealt->local[t]) != t;
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void check_lengths(const dealt_tokens *dealt, cpa_owner_map map, int32_t phase) {
    int wrong = 0;
    for (int64_t len = 0; len <= dealt->tokens; len++) {
        int64_t sum = 0;
        for (int32_t r = 0; r < map.cp_size; r++) {
            int64_t shard = cpa_shard_len(map, cpa_owner_slot(map, r, phase), len);
            wrong += shard != dealt->before[r][len];
            sum += shard;
        }
        wrong += sum != len;
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Chunks [start, end) with every start and a few ends: the owned positions are those of the local range. */
static void check_chunks(const dealt_tokens *dealt, cpa_owner_map map, int32_t phase) {
    int wrong = 0;
    for (int64_t start = 0; start < dealt->tokens; start++) {
        int64_t end = start + 1 + start * 7 % (3 * map.interleave);
        if (end > dealt->tokens) end = dealt->tokens;
        for (int32_t r = 0; r < map.cp_size; r++) {
            int32_t slot = cpa_owner_slot(map, r, phase);
            int64_t local = cpa_shard_len(map, slot, start);
            for (int64_t t = start; t < end; t++)
                if (dealt->owner[t] == r) wrong += cpa_shard_pos(map, slot, local++) != t;
            wrong += local != cpa_shard_len(map, slot, end);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void owner_is_the_rank_the_token_was_dealt_to(void) {
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

static void slots_are_a_rotation_of_the_ranks(void) {
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        cpa_owner_map map = {n, 16};
        for (int32_t phase = 0; phase < n; phase++) {
            CU_ASSERT_EQUAL(cpa_owner_slot(map, phase, phase), 0);
            for (int32_t r = 0; r < n; r++) CU_ASSERT_EQUAL((cpa_owner_slot(map, r, phase) + phase) % n, r);
        }
    }
}

static void positions_beyond_32_bits_are_exact(void) {
    cpa_owner_map map = {7, 48};
    for (int64_t t = INT64_C(1) << 40; t < (INT64_C(1) << 40) + 1000; t++) {
        int32_t slot = cpa_owner_slot(map, cpa_owner_rank(map, 3, t), 3);
        int64_t local = cpa_shard_len(map, slot, t);
        CU_ASSERT_EQUAL(cpa_shard_pos(map, slot, local), t);
        CU_ASSERT_EQUAL(cpa_shard_len(map, slot, t + 1), local + 1);
    }
}

static void a_whole_sequence_is_all_on_its_rank(void) {
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        cpa_owner_map map = {n, 16};
        for (int32_t home = 0; home < n; home++) {
            int32_t phase = cpa_owner_whole_phase(map, home);
            CU_ASSERT(cpa_owner_is_whole(map, phase) && !cpa_owner_is_whole(map, home));
            for (int32_t r = 0; r < n; r++) {
                int32_t slot = cpa_owner_slot(map, r, phase);
                for (int64_t t = 0; t < 100; t++) {
                    CU_ASSERT_EQUAL(cpa_owner_rank(map, phase, t), home);
                    CU_ASSERT_EQUAL(cpa_shard_len(map, slot, t), r == home ? t : 0);
                    if (r == home) CU_ASSERT_EQUAL(cpa_shard_pos(map, slot, t), t);
                }
            }
        }
    }
}

static const cpa_test tests[] = {
    {"owner is the rank the token was dealt to", owner_is_the_rank_the_token_was_dealt_to},
    {"pos inverts the local index", pos_inverts_the_local_index},
    {"len counts the shard's tokens before a position", len_counts_the_tokens_of_the_shard_before_a_position},
    {"a chunk is a contiguous local range on every rank", a_chunk_is_a_contiguous_local_range_on_every_rank},
    {"a whole sequence is all on its rank", a_whole_sequence_is_all_on_its_rank},
    {"slots are a rotation of the ranks", slots_are_a_rotation_of_the_ranks},
    {"positions beyond 32 bits are exact", positions_beyond_32_bits_are_exact},
};

CPA_TEST_MAIN("owner map", tests)
