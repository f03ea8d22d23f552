/* What a block of one layer is: a run of bytes with sections, all of it made from the shape of the layer's attention.
 *
 * Keys lie before values; where values are the first columns of keys, both are one section, the latents. Whoever
 * allocates, copies, swaps, checks or sends blocks moves these bytes and asks no more; whoever writes or reads rows
 * does it through a view of them. */
#ifndef CPA_BLOCK_LAYOUT_H
#define CPA_BLOCK_LAYOUT_H

#include <cpattn/types.h>

typedef enum cpa_section_kind { CPA_SECTION_KEYS = 0, CPA_SECTION_VALUES, CPA_SECTION_LATENTS } cpa_section_kind;

enum {
    /* Bytes of which the place of a section and the length of a block are multiples: what kernels load at once, and
     * what maps of tensors ask of addresses and strides. */
    CPA_SECTION_ALIGNMENT = 16,
    CPA_MOST_SECTIONS = 4
};

/* Rows of one kind, those of block_size tokens in all heads, and their scales. */
typedef struct cpa_block_section {
    cpa_section_kind kind;
    int32_t heads;
    int32_t width; /* elements of a row */
    cpa_row_traits row;
    int64_t row_bytes; /* bytes of a row, with the scales that lie in it */
    int64_t
        scale_bytes;   /* bytes of a row's scales in the array [heads, block_size] behind the rows; 0: there is none */
    int64_t scales_at; /* byte of the section at which that array begins */
    int64_t at;        /* byte of the block at which the section begins */
    int64_t bytes;     /* bytes of the rows and the scales behind them */
} cpa_block_section;

typedef struct cpa_block_layout {
    cpa_attention_shape shape; /* shape that all else follows from, with block_size */
    int32_t block_size;        /* tokens */
    int32_t n_sections;
    cpa_block_section sections[CPA_MOST_SECTIONS]; /* in the order in which they lie */
    int64_t bytes;                                 /* bytes of a block */
} cpa_block_layout;

cpa_block_layout cpa_block_layout_of(const cpa_attention_shape *shape, int32_t block_size);

/* The section of a kind; NULL where there is none. */
const cpa_block_section *cpa_block_section_of(const cpa_block_layout *layout, cpa_section_kind kind);

/* Blocks that begin at `memory` and then every `stride` bytes, 0: side by side, as the cache that operators take. */
cpa_kv_view cpa_block_layout_view(const cpa_block_layout *layout, void *memory, int64_t num_blocks, int64_t stride);

/* Whether each block of a view is the bytes of the layout, and may be copied as such. */
int cpa_block_layout_matches(const cpa_block_layout *layout, const cpa_kv_view *kv);

#endif
