/* The engine for tests: one run of some requests on the ranks of mpirun, on the device of device_fixture.h. All calls
 * are collective; what goes wrong is printed. */
#ifndef CPA_TESTS_ENGINE_FIXTURE_H
#define CPA_TESTS_ENGINE_FIXTURE_H

#include <mpi.h>

#include <cpattn/engine.h>

/* A small model over a cache that holds a few of its sequences; no self-test, one row in five is checked. */
cpa_engine_options cpa_test_engine_options(void);
/* A long prompt and short ones of ragged lengths, with the ids 0, 3, 6, .. */
void cpa_test_mixed_requests(cpa_request *requests, int64_t n);

/* An engine with these requests, which only rank 0 needs; NULL on every rank if that fails on one. */
cpa_engine *cpa_test_engine(const cpa_engine_options *options, const cpa_request *requests, int64_t n);
/* Runs the requests in an engine of their own. 1 if all of them finished and no checked row was wrong; *stats are those
 * of the run, zero if there was none. `on_finish` may be NULL. */
int cpa_test_engine_run(const cpa_engine_options *options, const cpa_request *requests, int64_t n,
                        cpa_finish_fn on_finish, void *ctx, cpa_engine_stats *stats);

#endif
