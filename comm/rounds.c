#include "comm/rounds.h"

static int is_power_of_two(int32_t n) {
    return (n & (n - 1)) == 0;
}

int32_t cpa_round_send_peer(int32_t size, int32_t rank, int32_t round) {
    return is_power_of_two(size) ? rank ^ round : (int32_t)(((int64_t)rank + round) % size);
}

int32_t cpa_round_recv_peer(int32_t size, int32_t rank, int32_t round) {
    return is_power_of_two(size) ? rank ^ round : (int32_t)(((int64_t)rank - round + size) % size);
}

int32_t cpa_pair_partner(int32_t size, int32_t rank, int32_t round) {
    const int32_t circle = cpa_pair_rounds(size), last = size - 1;
    if (circle < size && rank == last) return (int32_t)((int64_t)round * (size / 2) % circle); /* size / 2 halves */
    const int32_t partner = (int32_t)(((int64_t)round - rank + circle) % circle);
    return partner == rank && circle < size ? last : partner;
}
