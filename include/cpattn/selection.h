/* Which keys a row attends, of those that the mask of its layer shows it: all, or those that a selection names, by bits,
 * by lists of indices or by blocks. A selection belongs to a layer; the plan of a step does not depend on it.
 *
 * Keys go by their index in the sequence (0 for its first token), whatever shard holds them: a selection is the same on
 * every rank, and a rank attends what it owns of it. Each kind that is set has its say: a row attends a key that the
 * mask shows and that all of them name. So the bits of a tree of drafts go together with the lists of an indexer; bits
 * and blocks, which both say what whole prompts attend, do not go together. A row without any key has O = 0 and LSE =
 * -inf. Keys that are not selected weigh nothing, as those do that the mask hides.
 *
 * On the host the result of a row has the same bits however its batch is made up, and with all keys selected those that
 * it has without a selection. CUDA devices attend by bits on tensor cores; by lists too, beside the mask and sinks, in
 * bf16 and fp16: latents as cpattn/sparse.h has them, and heads of up to 256 columns in groups of up to 16 over a cache
 * of their dtype; and by blocks, on compute capability 9.0 in bf16 and fp16 over such a cache in pages of 8 tokens and
 * more, beside the mask and sinks: what costs is the keys that the rows of 128 neighbours of a head attend, best where
 * blocks are multiples of 128 tokens (of 64 for heads above 192 columns); quantised caches and CPA_VLLM_X are widened
 * before. Few rows beside, which attend all keys, have the kernels of decode, unless `resume` is set. Other lists and
 * blocks are their plain kernel's, which cpa_attend_plan_kernel tells. Sequences have up to 2^30 tokens there.
 *
 * Structs here are on the host, what they point to is on the device of the call; all zero is no selection. */
#ifndef CPATTN_SELECTION_H
#define CPATTN_SELECTION_H

#include <stddef.h>
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

/* Keys by lists, as an indexer gives the best k of each row. An entry e stands for the `unit` tokens from index
 * e * unit on. The list of row r and KV head h is
 *
 *     indices[r * row_stride + h * head_stride + i],   0 <= i < counts[r]
 *
 * whose last entries may be negative: these are none. The others ascend, none twice; which keys a row attends whose list
 * does not is not said. Indices past the end of a sequence name nothing. */
typedef struct cpa_key_indices {
    const int32_t *indices;
    const int32_t *counts;  /* [rows], at most `width`; negative: the row attends all keys; NULL: `width` */
    int64_t row_stride;     /* elements; 0: all rows have the same lists */
    int64_t head_stride;    /* from KV head to KV head; 0: all have the same */
    int32_t width;          /* the most entries of a list */
    int32_t unit;           /* tokens; 0 = 1 */
    const int32_t *row_map; /* [rows]: the r of each row of q; NULL: the identity */
    int64_t reserved[4];    /* zero */
} cpa_key_indices;

/* Keys by blocks of `block` tokens, for each query head: row r of head h attends the key of index t if bit t / block is
 * set of the `width` bits that begin at the word row_word[r] + h * head_stride. Rows of one tile of queries, 128
 * neighbours say, have the same word. A row with row_word = -1 attends all keys. */
typedef struct cpa_key_blocks {
    const uint32_t *bits;
    const int64_t *row_word; /* [rows] */
    int64_t head_stride;     /* words from query head to query head, those of width at least; 0: all have the same */
    int32_t width;           /* blocks that have a bit; no key behind them is attended */
    int32_t block;           /* tokens */
    const int32_t *row_map;  /* [rows]: the r of each row of q; NULL: the identity */
    int64_t reserved[4];     /* zero */
} cpa_key_blocks;

/* NULL: nothing of that kind. */
typedef struct cpa_key_selection {
    const cpa_key_bits *bits;
    const cpa_key_indices *indices;
    const cpa_key_blocks *blocks;
    int64_t reserved[5]; /* zero */
} cpa_key_selection;

/* Words that `width` bits take. */
CPA_INLINE int64_t cpa_mask_words(int64_t width) {
    return (width + 31) / 32;
}

/* Packs `rows` rows of bytes, 0 or not, that lie row_stride bytes apart (0 = width) into rows of cpa_mask_words(width)
 * words, on the host. CPA_INVALID for NULL and negative counts, without anything written. Pure; thread-safe. */
CPA_API cpa_status cpa_mask_pack(const uint8_t *visible, int64_t rows, int64_t width, int64_t row_stride,
                                 uint32_t *bits);

/* Blocks by a pattern, as vLLM's block-sparse parameters have it: head h of block row I attends the blocks J <= I with
 *
 *     J > I - local_blocks   or   (J + offset) mod vert_stride = 0
 *
 * where offset is (first_head + h) * head_step + 1 for head_step >= 0, and -head_step times the number of the KV head
 * plus 1 below 0. */
typedef struct cpa_block_pattern {
    size_t size;
    int32_t q_heads, kv_heads;
    int32_t first_head; /* the first of these heads among those of the model, of which a rank may have a part */
    int32_t local_blocks;
    int32_t vert_stride; /* at least 1 */
    int32_t head_step;
    int64_t first_row, rows; /* block rows: blocks of the sequence that queries lie in */
    int64_t k_blocks;        /* blocks of keys that have a bit */
} cpa_block_pattern;

/* The bits of a pattern on the host, [q_heads, rows, cpa_mask_words(k_blocks)]. CPA_INVALID, with a line, for numbers
 * that are out of range; nothing is written then. Pure; thread-safe. */
CPA_API cpa_status cpa_block_pattern_bits(const cpa_block_pattern *pattern, uint32_t *bits, cpa_error *err);

#ifdef __cplusplus
}
#endif
#endif
