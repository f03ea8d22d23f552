/* The schedule of an all-to-all: who meets whom in which round. */
#include <string.h>

#include "comm/rounds.h"
#include "tests/fixtures/unit.h"

enum { MAX_RANKS = 33 };

static void every_ordered_pair_meets_exactly_once(void) {
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        int sent[MAX_RANKS][MAX_RANKS], wrong = 0;
        memset(sent, 0, sizeof sent);
        for (int32_t round = 1; round < n; round++) {
            for (int32_t rank = 0; rank < n; rank++) {
                int32_t peer = cpa_round_send_peer(n, rank, round);
                CU_ASSERT_FATAL(peer >= 0 && peer < n);
                sent[rank][peer]++;
            }
        }
        for (int32_t from = 0; from < n; from++)
            for (int32_t to = 0; to < n; to++) wrong += sent[from][to] != (from != to);
        CU_ASSERT_EQUAL(wrong, 0);
    }
}

static void a_rank_receives_from_the_one_that_sends_to_it(void) {
    for (int32_t n = 1; n <= MAX_RANKS; n++) {
        for (int32_t round = 1; round < n; round++) {
            for (int32_t rank = 0; rank < n; rank++) {
                int32_t to = cpa_round_send_peer(n, rank, round), from = cpa_round_recv_peer(n, rank, round);
                CU_ASSERT_EQUAL(cpa_round_recv_peer(n, to, round), rank);
                CU_ASSERT_EQUAL(cpa_round_send_peer(n, from, round), rank);
            }
        }
    }
}

static void powers_of_two_meet_in_pairs(void) {
    for (int32_t n = 2; n <= 32; n *= 2) {
        for (int32_t round = 1; round < n; round++) {
            for (int32_t rank = 0; rank < n; rank++) {
                CU_ASSERT_EQUAL(cpa_round_send_peer(n, rank, round), rank ^ round);
                CU_ASSERT_EQUAL(cpa_round_recv_peer(n, rank, round), rank ^ round);
            }
        }
    }
}

static void other_sizes_rotate(void) {
    CU_ASSERT_EQUAL(cpa_round_send_peer(3, 2, 1), 0);
    CU_ASSERT_EQUAL(cpa_round_recv_peer(3, 2, 1), 1);
    CU_ASSERT_EQUAL(cpa_round_send_peer(5, 4, 3), 2);
    CU_ASSERT_EQUAL(cpa_round_recv_peer(5, 1, 3), 3);
}

static void every_pair_meets_once_and_both_know_it(void) {
    for (int32_t n = 2; n <= MAX_RANKS; n++) {
        int met[MAX_RANKS][MAX_RANKS], wrong = 0, idle = 0;
        memset(met, 0, sizeof met);
        for (int32_t round = 1; round <= cpa_pair_rounds(n); round++) {
            for (int32_t rank = 0; rank < n; rank++) {
                int32_t partner = cpa_pair_partner(n, rank, round);
                CU_ASSERT_FATAL(partner >= 0 && partner < n);
                wrong += cpa_pair_partner(n, partner, round) != rank;
                idle += partner == rank;
                met[rank][partner]++;
            }
        }
        for (int32_t a = 0; a < n; a++)
            for (int32_t b = 0; b < n; b++) wrong += a != b && met[a][b] != 1;
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_EQUAL(idle, n % 2 ? n : 0);
    }
}

static const cpa_test tests[] = {
    {"every ordered pair meets exactly once", every_ordered_pair_meets_exactly_once},
    {"a rank receives from the one that sends to it", a_rank_receives_from_the_one_that_sends_to_it},
    {"powers of two meet in pairs", powers_of_two_meet_in_pairs},
    {"other sizes rotate", other_sizes_rotate},
    {"every pair meets once and both know it", every_pair_meets_once_and_both_know_it},
};

CPA_TEST_MAIN("rounds", tests)
