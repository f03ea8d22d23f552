/* The self-test at start-up: every algorithm, end to end, on the ranks, device and transport that the run will use.
 *
 * A small cache and a scheduler of its own run a handful of requests with peaky inputs (one block, less than a block
 * for each rank, ragged tails, several interleave rounds; prefill in pieces, then decode), once with pass-KV and once
 * with pass-Q, and the sampled check (src/check/verify.h) compares the results with float64. */
#ifndef CPA_SELF_TEST_H
#define CPA_SELF_TEST_H

#include "comm/comm.h"
#include "src/worker/worker.h"

/* Collective. `options` are those of the run: shapes, dtypes, block size, interleave and staging are taken from them.
 * CPA_CHECK_FAILED, on every rank, with the first violation. */
cpa_status cpa_self_test(cpa_control *control, cpa_device *device, const cpa_worker_options *options, uint64_t seed,
                         int64_t *rows, cpa_error *err);

#endif
