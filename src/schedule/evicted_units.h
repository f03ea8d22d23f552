/* Units that could be found until their blocks were taken for something else, kept in host memory and on disk
 * (options.keep_evicted), and those that are on their way back.
 *
 * A unit that is evicted from the device moves to host blocks that no swapped sequence has, in the same plan, and is
 * written to disk from there where there is one. Both keep the least recently used ones the shortest. It stays in both
 * when it comes back: from disk to host memory, from there to the device, each found in the second plan after, when the
 * ranks have told what of it was damaged. That is forgotten where it came from. Part of the scheduler. */
#ifndef CPA_EVICTED_UNITS_H
#define CPA_EVICTED_UNITS_H

#include "src/schedule/block_events.h"
#include "src/schedule/scheduler_internal.h"

/* Where a unit is that is not on the device. */
typedef enum cpa_evicted_place {
    CPA_EVICTED_NOWHERE = 0,
    CPA_EVICTED_COMING, /* on its way to the device, or to host memory */
    CPA_EVICTED_IN_HOST,
    CPA_EVICTED_ON_DISK
} cpa_evicted_place;

/* Without options.keep_evicted nothing is kept, and the other functions do nothing. */
cpa_status cpa_evicted_create(cpa_scheduler *s, cpa_error *err);
void cpa_evicted_destroy(cpa_scheduler *s);

/* A kept block of a pool is about to be taken: its unit is kept below the device, as far as there is room. */
void cpa_evicted_put(cpa_scheduler *s, int32_t pool, int32_t block, int32_t party);
cpa_evicted_place cpa_evicted_where(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key);
/* On which ranks a unit has blocks that is in host memory or on disk: those that are not -1. */
const int32_t *cpa_evicted_spread(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key);
/* The host blocks of a unit are not taken for anything else in this plan. */
cpa_status cpa_evicted_pin(cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key, cpa_error *err);
/* Keeps a device block from being taken for anything else before the second plan after this one; the caller's ownership
 * passes over. */
cpa_status cpa_evicted_hold(cpa_scheduler *s, int32_t pool, int32_t block, cpa_error *err);

/* Plans the way of a unit of a waiting sequence, which is in host memory, to the device, or from disk to host memory.
 * *started: there was room for it; of units from disk, no more than a plan may load. */
cpa_status cpa_evicted_fetch(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_stored_unit *unit, int *started,
                             cpa_error *err);
cpa_status cpa_evicted_load(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_stored_unit *unit, int *started,
                            cpa_error *err);

/* A plan begins: what arrived in the plan two before it can be found. */
cpa_status cpa_evicted_settle(cpa_scheduler *s, cpa_error *err);
/* Blocks on all ranks that can be found in host memory and on disk. */
void cpa_evicted_count(const cpa_scheduler *s, int64_t *in_host, int64_t *on_disk);
/* Whether something is on its way. */
int cpa_evicted_is_moving(const cpa_scheduler *s);

/* What the ranks tell of a move before the second plan after it: what it brought is damaged, or not there. The first
 * returns whether the swap_in was that of a unit. */
int cpa_evicted_fetch_failed(cpa_scheduler *s, const cpa_block_move *move);
void cpa_evicted_load_failed(cpa_scheduler *s, const cpa_disk_move *load);

/* A rank stores no more: from now on no plan has stores. */
void cpa_evicted_stop_stores(cpa_scheduler *s);

/* Adds to a plan, which was made last and has no chunks, what moves all that can be found on the device to disk, as
 * far as host memory has room for it on the way: the last plan before the engine may end. Nothing without a disk. */
void cpa_evicted_save(cpa_scheduler *s, cpa_step_plan *plan);

/* Before the first plan: lets n units be found that an earlier scheduler has left on disk, those first that were used
 * the longest ago. One is left out where a slot of it is another one's. */
cpa_status cpa_evicted_restore(cpa_scheduler *s, const cpa_restored_unit *units, int64_t n, cpa_error *err);

#endif
