#include "comm/device/lane_counts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* How many exchanges of a lane are remembered until they are done. The host may be further ahead than that: of still
 * older ones only the peers of the oldest remembered are named. */
#define REMEMBERED 256

struct cpa_lane {
    uint32_t added;
    struct {
        int64_t exchange;
        uint64_t peers;
    } queue[REMEMBERED];
};

cpa_status cpa_lane_counts_open(cpa_lane_counts *counts, int32_t n_lanes, cpa_error *err) {
    cpa_lane_counts opened = {.n_lanes = n_lanes};
    if (n_lanes > 0) {
        void *flags = NULL;
        size_t bytes = (size_t)n_lanes * sizeof *opened.done;
        CPA_TRY(cpa_runtime_check(cudaHostAlloc(&flags, bytes, cudaHostAllocDefault), "cudaHostAlloc", err));
        memset(flags, 0, bytes);
        opened.done = flags;
        opened.each = calloc((size_t)n_lanes, sizeof *opened.each);
        if (!opened.each) {
            cudaFreeHost(flags);
            return cpa_fail(err, CPA_NO_MEMORY, "no memory for %d lanes", n_lanes);
        }
    }
    *counts = opened;
    return CPA_OK;
}

void cpa_lane_counts_close(cpa_lane_counts *counts) {
    cudaFreeHost((void *)(uintptr_t)counts->done);
    free(counts->each);
}

/* How many exchanges are not done, and in *sum how many are. */
static uint32_t outstanding(const cpa_lane_counts *counts, uint32_t *sum) {
    uint32_t count = 0;
    *sum = 0;
    for (int32_t i = 0; i < counts->n_lanes; i++) {
        uint32_t done = counts->done[i];
        count += counts->each[i].added - done;
        *sum += done;
    }
    return count;
}

cpa_mem_op cpa_lane_counts_add(cpa_lane_counts *counts, int32_t lane, int64_t exchange, uint64_t peers) {
    cpa_lane *l = &counts->each[lane];
    uint32_t sum;
    if (outstanding(counts, &sum) == 0) {
        counts->since = cpa_clock_now();
        counts->seen = sum;
    }
    l->queue[l->added % REMEMBERED].exchange = exchange;
    l->queue[l->added % REMEMBERED].peers = peers;
    l->added++;
    return cpa_mem_op_write((const uint32_t *)(uintptr_t)&counts->done[lane], l->added);
}

uint32_t cpa_lane_counts_done(const cpa_lane_counts *counts) {
    uint32_t done;
    outstanding(counts, &done);
    return done;
}

double cpa_lane_counts_stalled_s(cpa_lane_counts *counts) {
    uint32_t sum;
    if (outstanding(counts, &sum) == 0) return 0;
    double now = cpa_clock_now();
    if (sum != counts->seen) {
        counts->seen = sum;
        counts->since = now;
    }
    return now - counts->since;
}

uint64_t cpa_lane_counts_awaited(const cpa_lane_counts *counts, int64_t *exchange) {
    uint64_t peers = 0;
    *exchange = INT64_MAX;
    for (int32_t i = 0; i < counts->n_lanes; i++) {
        const cpa_lane *lane = &counts->each[i];
        uint32_t behind = lane->added - counts->done[i];
        if (behind == 0) continue;
        uint32_t oldest = lane->added - (behind < REMEMBERED ? behind : REMEMBERED);
        int64_t waiting = lane->queue[oldest % REMEMBERED].exchange;
        if (waiting > *exchange) continue;
        if (waiting < *exchange) peers = 0;
        *exchange = waiting;
        peers |= lane->queue[oldest % REMEMBERED].peers;
    }
    return peers;
}

const char *cpa_rank_names(uint64_t ranks, char names[CPA_RANK_NAMES]) {
    int several = (ranks & (ranks - 1)) != 0;
    int length = snprintf(names, CPA_RANK_NAMES, several ? "ranks" : "rank");
    const char *separator = " ";
    for (int rank = 0; rank < 64; rank++) {
        if (!(ranks >> rank & 1)) continue;
        length += snprintf(names + length, (size_t)(CPA_RANK_NAMES - length), "%s%d", separator, rank);
        separator = ", ";
    }
    return names;
}
