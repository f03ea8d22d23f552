/* Whether the exchanges of a device transport move.
 *
 * A lane is a stream on which exchanges are done in order. As each is done, the device writes its count into a flag of
 * host memory, so that the host sees how far a lane is without a call to the device. */
#ifndef CPA_COMM_PROGRESS_H
#define CPA_COMM_PROGRESS_H

#include "comm/device/driver.h"

typedef struct cpa_progress_lane cpa_progress_lane;

typedef struct cpa_progress {
    volatile uint32_t *done; /* [n_lanes], written by the device */
    cpa_progress_lane *lanes;
    int32_t n_lanes;
    uint32_t seen; /* the sum of `done` when it last changed, and when that was */
    double since;
} cpa_progress;

cpa_status cpa_progress_open(cpa_progress *progress, int32_t n_lanes, cpa_error *err);
void cpa_progress_close(cpa_progress *progress);

/* Counts one more exchange on a lane; the caller enqueues the operation returned behind it. `peers` has a bit for each
 * rank that the exchange waits for. */
cpa_mem_op cpa_progress_add(cpa_progress *progress, int32_t lane, int64_t exchange, uint64_t peers);

/* How many exchanges are done, modulo 2^32. */
uint32_t cpa_progress_done(const cpa_progress *progress);

/* For how many seconds nothing has moved though something should; 0 when all is done. */
double cpa_progress_stalled_s(cpa_progress *progress);

/* The oldest exchange that is not done, and the ranks that it waits for; 0 if all is done. */
uint64_t cpa_progress_awaited(const cpa_progress *progress, int64_t *exchange);

/* Room for the names of 64 ranks, and those names: "rank 2" or "ranks 1, 3". */
enum { CPA_RANK_NAMES = 320 };
const char *cpa_rank_names(uint64_t ranks, char names[CPA_RANK_NAMES]);

#endif
