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
