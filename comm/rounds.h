/* The order in which the ranks of an all-to-all meet: a pure function.
 *
 * In round r = 1 .. N-1 a rank exchanges with rank XOR r when N is a power of two (the pairs 0-1 2-3, then 0-2 1-3,
 * ...), and otherwise sends to rank + r and receives from rank - r (mod N). Either way every ordered pair meets exactly
 * once. */
#ifndef CPA_ROUNDS_H
#define CPA_ROUNDS_H

#include <stdint.h>

/* The rank that `rank` sends to in round r of N ranks; 1 <= r < N. */
int32_t cpa_round_send_peer(int32_t size, int32_t rank, int32_t round);
/* The rank that `rank` receives from in round r. */
int32_t cpa_round_recv_peer(int32_t size, int32_t rank, int32_t round);

/* The same meetings two by two, each pair once: in round r = 1 .. cpa_pair_rounds(N) ranks a and b meet of which a + b is
 * r modulo that number, and where N is even its last rank whoever would meet itself (the circle method of tournaments). */
static inline int32_t cpa_pair_rounds(int32_t size) {
    return size % 2 ? size : size - 1;
}
/* The rank that `rank` meets in round r; itself: nobody, as one rank of an odd number does. N >= 2. */
int32_t cpa_pair_partner(int32_t size, int32_t rank, int32_t round);

#endif
