/* Which keys a row attends, of those that the mask of its layer shows it: all, or those that a selection names. A
 * selection belongs to a layer; the plan of a step does not depend on it.
 *
 * Keys go by their index in the sequence (0 for its first token), whatever shard holds them: a selection is the same on
 * every rank, and a rank attends what it owns of it. A row without any key has O = 0 and LSE = -inf. On CUDA devices
 * sequences have up to 2^30 tokens.
 *
 * Structs here are on the host, what they point to is on the device of the call; all zero is no selection. */
#ifndef CPATTN_SELECTION_H
#define CPATTN_SELECTION_H

#include <stdint.h>

#include <cpattn/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Single keys by bits, for rows of drafted trees and for masks that others give whole. Bit b of a row is bit b mod 32
 * of its word row_word + b / 32, and stands for the key of index first + b: 1, it is seen. Of a row with row_word >= 0
 *
 *     t < first                    the mask of the layer decides, less its `right`
 *     first <= t < first + width   the bit decides in the place of `causal` and `right`; a window stays
 *     first + width <= t           not seen
 *
 * and a row with row_word = -1 has the mask of the layer alone. `first` is 0 for masks of whole sequences, the length
 * of the prefix for those that skip it, and that of the verified tokens for trees of drafts. */
typedef struct cpa_key_bits {
    const uint32_t *bits;
    const int64_t *row_word; /* [rows] */
    const int64_t *first;    /* [rows] */
    const int32_t *width;    /* [rows] */
    const int32_t *row_map;  /* [rows]: the entry of the arrays above of each row of q; NULL: the identity */
    int64_t reserved[4];     /* zero */
} cpa_key_bits;

/* NULL: nothing of that kind. */
typedef struct cpa_key_selection {
    const cpa_key_bits *bits;
    int64_t reserved[7]; /* zero */
} cpa_key_selection;

/* Words that `width` bits take. */
CPA_INLINE int64_t cpa_mask_words(int64_t width) {
    return (width + 31) / 32;
}

/* Packs `rows` rows of bytes, 0 or not, that lie row_stride bytes apart (0 = width) into rows of cpa_mask_words(width)
 * words, on the host. CPA_INVALID for NULL and negative counts, without anything written. Pure; thread-safe. */
CPA_API cpa_status cpa_mask_pack(const uint8_t *visible, int64_t rows, int64_t width, int64_t row_stride,
                                 uint32_t *bits);

#ifdef __cplusplus
}
#endif
#endif
