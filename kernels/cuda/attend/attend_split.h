/* How decode units are dealt to CTAs, and how many pieces prefill tiles come to when their keys are split: functions of
 * the batch and of the number of multiprocessors alone. */
#ifndef CPA_CUDA_ATTEND_SPLIT_H
#define CPA_CUDA_ATTEND_SPLIT_H

#include <cpattn/ops.h>

enum { CPA_CUDA_DECODE_OVERHEAD = 2 }; /* cost of beginning and ending a decode piece, in CPA_CUDA_DECODE_KEYS */

/* Decode units: the items whose packed rows fill one tile. Their keys count in tiles of CPA_CUDA_DECODE_KEYS. */
typedef struct cpa_cuda_decode_shares {
    int64_t ctas;    /* for each KV head, or each pair of them where a CTA takes two */
    int64_t cap;     /* of what a CTA takes: tiles, and the overhead of each piece */
    int64_t longest; /* piece */
    int apart;       /* units share no CTA, and are cut into equal pieces */
    int wide;        /* CTAs have a multiprocessor each */
} cpa_cuda_decode_shares;

/* wide_fits: the device has CPA_CUDA_WIDE_BYTES of shared memory for a CTA. */
cpa_cuda_decode_shares cpa_cuda_share_decode(const cpa_attend_batch *batch, int32_t multiprocessors, int wide_fits);
/* Pieces of a unit of so many tiles that shares no CTA; at least one. */
int64_t cpa_cuda_decode_pieces(int64_t tiles, int64_t cap);

/* Tiles of `tile_rows` packed rows; 0: the item has no rows, or goes to the decode kernel. */
int64_t cpa_cuda_prefill_tiles(const cpa_attend_batch *batch, const cpa_attend_item *item, int32_t tile_rows);
/* Pieces of all prefill tiles that are cut after every `split_keys` keys. */
int64_t cpa_cuda_prefill_pieces(const cpa_attend_batch *batch, int32_t tile_rows, int64_t split_keys);
/* The least n from `least` on such that a split of n * CPA_CUDA_PREFILL_KEYS keys makes at most `most_pieces`; the
 * search ends at `most`, or at `least` if that is more. */
int64_t cpa_cuda_least_split(const cpa_attend_batch *batch, int32_t tile_rows, int64_t least, int64_t most,
                             int64_t most_pieces);

#endif
