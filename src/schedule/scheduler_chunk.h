/* How many tokens a sequence is given in a step, beside the budget and the threshold: with adaptive chunks no more than
 * blocks are there for without anyone giving way. */
#ifndef CPA_SCHEDULER_CHUNK_H
#define CPA_SCHEDULER_CHUNK_H

#include "src/schedule/scheduler_internal.h"

/* The tokens of the next chunk. Fixed chunks: what budget, threshold and known tokens allow. Adaptive ones: if that
 * needs more blocks than are free, but for one that is spared for each sequence that decodes, the largest multiple of
 * the block size that does not; if there is none, a block's worth, halved while another would have to give way for it.
 * A sequence that waits while others run is given 0 unless all of its known tokens fit, what those need for the rest of
 * their prompts being spared too: begun on less, it would only give way again. */
int64_t cpa_scheduler_chunk_tokens(cpa_scheduler *s, const cpa_sequence *sequence, int waits);

#endif
