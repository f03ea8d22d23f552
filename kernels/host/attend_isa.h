/* The inner loops of attend, built for several instruction sets and picked at run time.
 *
 * A tile is CPA_ATTEND_TILE consecutive local key indices of one KV head, packed as fp32 in panels of `lanes` columns:
 * keys as [panel of keys][k_dim][lanes], values as [panel of v_dim][CPA_ATTEND_TILE][lanes]. A group is up to `rows`
 * query rows that go through a tile together. Within one instruction set the result of a row has the same bits whatever
 * rows share its group: every sum has one accumulator and runs in ascending order of d or of the key. */
#ifndef CPA_HOST_ATTEND_ISA_H
#define CPA_HOST_ATTEND_ISA_H

#include <cpattn/types.h>

enum {
    CPA_ATTEND_TILE = 256,     /* divides CPA_HOST_SPLIT_TOKENS */
    CPA_ATTEND_MAX_ROWS = 14,  /* of a group, for any instruction set */
    CPA_ATTEND_MAX_LANES = 32, /* of a panel; divides CPA_ATTEND_TILE */
};

/* The keys or values of one head as they lie in the pages. Strides are in bytes. */
typedef struct cpa_attend_pages {
    const char *head; /* of block 0, token 0 */
    int64_t block_stride, token_stride;
    int32_t block_shift; /* log2 of the block size */
    cpa_dtype dtype;
    int32_t dim;
    const int32_t *table;
} cpa_attend_pages;

/* The keys that a row sees are the lanes [0, min(sinks, end)) and [first, end) of the tile, less those before the
 * tile's `begin`. */
typedef struct cpa_attend_lanes {
    int32_t end, first, sinks;
} cpa_attend_lanes;

/* The running softmax of a group over the tiles of one split. */
typedef struct cpa_attend_group {
    int32_t rows;
    const float *q; /* [k_dim][rows] */
    float *max;     /* [rows], of scores times log2(e); -inf at first */
    float *sum;     /* [rows], of 2^(score - max) */
    float *o;       /* [rows][o_stride], the same sum over values, padded to panels */
} cpa_attend_group;

typedef struct cpa_attend_tile {
    const float *k, *v; /* packed */
    int32_t k_dim, v_panels;
    int64_t o_stride;
    float scale;        /* log2(e) included */
    int32_t begin, end; /* lanes that some row of the group sees */
    int32_t masked;     /* some row does not see all of them, or they do not fill their panels */
    const cpa_attend_lanes *visible; /* [rows] of the group; read only if masked */
} cpa_attend_tile;

typedef struct cpa_attend_isa {
    const char *name;
    int32_t rows;
    int32_t lanes;
    int (*supported)(void);
    /* Packs the panels that hold the lanes [begin, end); lane 0 is key `key0`, counted from the first table entry, and
     * may be negative. Lanes outside [begin, end) become 0. */
    void (*pack_keys)(const cpa_attend_pages *pages, int64_t key0, int32_t begin, int32_t end, float *packed);
    void (*pack_values)(const cpa_attend_pages *pages, int64_t key0, int32_t begin, int32_t end, float *packed);
    /* Takes a group through a packed tile. */
    void (*attend)(const cpa_attend_tile *tile, const cpa_attend_group *group);
} cpa_attend_isa;

extern const cpa_attend_isa cpa_attend_portable;
#ifdef __x86_64__
extern const cpa_attend_isa cpa_attend_avx2;
extern const cpa_attend_isa cpa_attend_avx512;
#endif

#endif
