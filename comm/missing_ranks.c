/* Who is still there: an empty message from each rank to each other one. A rank that hangs sends none. */
#include <sched.h>

#include "base/clock.h"
#include "comm/comm.h"

/* The messages are empty, so that nothing is lost by those that never arrive. One that an earlier call sent may still
 * be on its way: it says the same. */
static void notify(cpa_control *control, int32_t rank) {
    int done;
    if (cpa_comm_test(control->comm, &control->notified[rank], &done, NULL) != CPA_OK || !done) return;
    (void)cpa_comm_start_send(control->comm, rank, control->tag + CPA_CONTROL_TAG_PRESENT, NULL, 0,
                              &control->notified[rank], NULL);
}

/* Whether a message of the rank is there. One that is expected stays so until the channel is closed. */
static int has_arrived(cpa_control *control, int32_t rank) {
    cpa_comm_request **expected = &control->present[rank];
    int done = 0;
    if (!*expected && cpa_comm_start_receive(control->comm, rank, control->tag + CPA_CONTROL_TAG_PRESENT, NULL, 0,
                                             expected, NULL) != CPA_OK)
        return 0;
    return cpa_comm_test(control->comm, expected, &done, NULL) == CPA_OK && done;
}

uint64_t cpa_control_missing_ranks(cpa_control *control, double seconds) {
    uint64_t all = control->size < 64 ? ((uint64_t)1 << control->size) - 1 : UINT64_MAX;
    uint64_t silent = all & ~((uint64_t)1 << control->rank);
    const double begin = cpa_clock_now();
    for (int32_t rank = 0; rank < control->size; rank++) {
        if (rank != control->rank) notify(control, rank);
    }
    do {
        for (int32_t rank = 0; rank < control->size; rank++) {
            if (silent >> rank & 1 && has_arrived(control, rank)) silent &= ~((uint64_t)1 << rank);
        }
        sched_yield();
    } while (silent && cpa_clock_now() - begin < seconds);
    return silent;
}

int cpa_control_all_failed(cpa_control *control) {
    const double seconds = 5;                                        /* those that failed alike come here at once */
    if (cpa_comm_check(control->comm, -1, NULL) != CPA_OK) return 0; /* one is lost */
    return cpa_control_missing_ranks(control, seconds) == 0;
}
