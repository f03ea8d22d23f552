/* How much of a waiting sequence can be found, in a placement: units, as cpa_prefix_unit cuts it. */
#ifndef CPA_SCHEDULER_FOUND_H
#define CPA_SCHEDULER_FOUND_H

#include "src/schedule/scheduler_internal.h"

/* Where unit j ends, or the known tokens. */
int64_t cpa_found_end(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement, int64_t j);
/* The digest of unit j, which is that of its last block: blocks are chained alike in every placement. NULL without
 * memory. */
const cpa_prefix_digest *cpa_found_digest(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int64_t j);
/* What unit j is found by; 0 without memory. */
int cpa_found_key(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int64_t j, cpa_prefix_digest *key);
/* The blocks of unit j in a group; NULL if it cannot be found, or not yet. */
const int32_t *cpa_found_blocks(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement, int32_t group,
                                int64_t j);
/* Behind so many units, found in all groups, the sequence goes on at cpa_found_position. The first group has all of
 * them, and any other those that it needs. Goes on where it ended the last time: what has been evicted since then shows
 * when the blocks are shared, for which it looks again. */
int64_t cpa_found_units(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement);
int64_t cpa_found_units_again(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement);
/* The same with those that are not on the device but in host memory, on disk, or on their way. */
int64_t cpa_found_with_evicted(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement);
/* At least the last known token is left to compute. */
int64_t cpa_found_position(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement,
                           int64_t units);
/* Whether a query that goes on behind so many units sees anything of unit j in a group; the first group needs all. The
 * tokens of a unit that it goes on within count as not computed, as they are where there is no room for a copy. */
int cpa_found_needs(const cpa_scheduler *s, const cpa_sequence *sequence, cpa_placement placement, int32_t group,
                    int64_t units, int64_t j);
/* Units that can be found, now, when they are fetched, or when one who computes the next of them is as far as is known. */
int64_t cpa_found_expect(cpa_scheduler *s, cpa_sequence *sequence, cpa_placement placement);
/* Whether a running sequence computes the first unit of its placement that cannot be found, or has just computed it. */
int cpa_found_later(cpa_scheduler *s, cpa_sequence *sequence);

#endif
