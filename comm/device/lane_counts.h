/* Whether the exchanges of a device transport move.
 *
 * A lane is a stream on which exchanges are done in order. As each is done, the device writes its count into a flag of
 * host memory, so that the host sees how far a lane is without a call to the device. */
#ifndef CPA_COMM_LANE_COUNTS_H
#define CPA_COMM_LANE_COUNTS_H

#include "comm/device/driver.h"

typedef struct cpa_lane cpa_lane;

typedef struct cpa_lane_counts {
    volatile uint32_t *done; /* [n_lanes], written by the device */
    cpa_lane *each;          /* [n_lanes] */
    int32_t n_lanes;
    uint32_t seen; /* the sum of `done` when it last changed, and when that was */
    double since;
} cpa_lane_counts;

cpa_status cpa_lane_counts_open(cpa_lane_counts *counts, int32_t n_lanes, cpa_error *err);
void cpa_lane_counts_close(cpa_lane_counts *counts);

/* Counts one more exchange on a lane; the caller enqueues the operation returned behind it. `peers` has a bit for each
 * rank that the exchange waits for. */
cpa_mem_op cpa_lane_counts_add(cpa_lane_counts *counts, int32_t lane, int64_t exchange, uint64_t peers);

/* How many exchanges are done, modulo 2^32. */
uint32_t cpa_lane_counts_done(const cpa_lane_counts *counts);

/* For how many seconds nothing has moved though something should; 0 when all is done. */
double cpa_lane_counts_stalled_s(cpa_lane_counts *counts);

/* The oldest exchange that is not done, and the ranks that it waits for; 0 if all is done. */
uint64_t cpa_lane_counts_awaited(const cpa_lane_counts *counts, int64_t *exchange);

/* Room for the names of 64 ranks, and those names: "rank 2" or "ranks 1, 3". */
enum { CPA_RANK_NAMES = 320 };
const char *cpa_rank_names(uint64_t ranks, char names[CPA_RANK_NAMES]);

#endif
