/* How many pieces the prefill tiles of a batch come to when their keys are split: functions of the batch alone. */
#ifndef CPA_CUDA_ATTEND_SPLIT_H
#define CPA_CUDA_ATTEND_SPLIT_H

#include <cpattn/ops.h>

/* Tiles of `tile_rows` packed rows; 0: the item has no rows, or goes to the decode kernel. */
int64_t cpa_cuda_prefill_tiles(const cpa_attend_batch *batch, const cpa_attend_item *item, int32_t tile_rows);
/* Pieces of all prefill tiles that are cut after every `split_keys` keys. */
int64_t cpa_cuda_prefill_pieces(const cpa_attend_batch *batch, int32_t tile_rows, int64_t split_keys);
/* The least n from `least` on such that a split of n * CPA_CUDA_PREFILL_KEYS keys makes at most `most_pieces`; the
 * search ends at `most`, or at `least` if that is more. */
int64_t cpa_cuda_least_split(const cpa_attend_batch *batch, int32_t tile_rows, int64_t least, int64_t most,
                             int64_t most_pieces);

#endif
