#include "comm/device/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

/* How many exchanges of a lane are remembered until they are done. The host may be further ahead than that: of still
 * older ones only the peers of the oldest remembered are named. */
#define REMEMBERED 256

struct cpa_progress_lane {
    uint32_t added;
    struct {
        int64_t exchange;
        uint64_t peers;
    } queue[REMEMBERED];
};

cpa_status cpa_progress_open(cpa_progress *progress, int32_t n_lanes, cpa_error *err) {
    cpa_progress opened = {.n_lanes = n_lanes};
    if (n_lanes > 0) {
        void *flags = NULL;
        size_t bytes = (size_t)n_lanes * sizeof *opened.done;
        CPA_TRY(cpa_runtime_check(cudaHostAlloc(&flags, bytes, cudaHostAllocDefault), "cudaHostAlloc", err));
        memset(flags, 0, bytes);
        opened.done = flags;
        opened.lanes = calloc((size_t)n_lanes, sizeof *opened.lanes);
        if (!opened.lanes) {
            cudaFreeHost(flags);
            return cpa_fail(err, CPA_NO_MEMORY, "no memory for %d lanes", n_lanes);
        }
    }
    *progress = opened;
    return CPA_OK;
}

void cpa_progress_close(cpa_progress *progress) {
    cudaFreeHost((void *)(uintptr_t)progress->done);
    free(progress->lanes);
}

/* How many exchanges are not done, and in *sum how many are. */
static uint32_t outstanding(const cpa_progress *progress, uint32_t *sum) {
    uint32_t count = 0;
    *sum = 0;
    for (int32_t i = 0; i < progress->n_lanes; i++) {
        uint32_t done = progress->done[i];
        count += progress->lanes[i].added - done;
        *sum += done;
    }
    return count;
}

cpa_mem_op cpa_progress_add(cpa_progress *progress, int32_t lane, int64_t exchange, uint64_t peers) {
    cpa_progress_lane *l = &progress->lanes[lane];
    uint32_t sum;
    if (outstanding(progress, &sum) == 0) {
        progress->since = cpa_clock_now();
        progress->seen = sum;
    }
    l->queue[l->added % REMEMBERED].exchange = exchange;
    l->queue[l->added % REMEMBERED].peers = peers;
    l->added++;
    return cpa_mem_op_write((const uint32_t *)(uintptr_t)&progress->done[lane], l->added);
}

uint32_t cpa_progress_done(const cpa_progress *progress) {
    uint32_t done;
    outstanding(progress, &done);
    return done;
}

double cpa_progress_stalled_s(cpa_progress *progress) {
    uint32_t sum;
    if (outstanding(progress, &sum) == 0) return 0;
    double now = cpa_clock_now();
    if (sum != progress->seen) {
        progress->seen = sum;
        progress->since = now;
    }
    return now - progress->since;
}

uint64_t cpa_progress_awaited(const cpa_progress *progress, int64_t *exchange) {
    uint64_t peers = 0;
    *exchange = INT64_MAX;
    for (int32_t i = 0; i < progress->n_lanes; i++) {
        const cpa_progress_lane *lane = &progress->lanes[i];
        uint32_t behind = lane->added - progress->done[i];
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
