/* The inner loops of attend, built for several instruction sets and picked at run time.
 *
 * A tile is CPA_ATTEND_TILE consecutive local key indices. Packed, it is fp32 in panels of `lanes`
 * columns: keys as [panel of keys][k_dim][lanes], values as [panel of v_dim][key][lanes]. A group is up to `rows` query
 * rows that go through a tile together. Within one instruction set the result of a row has the same bits whatever rows
 * share its group: every sum has one accumulator and runs in ascending order of d or of the key. Sets that multiply
 * pairs of bf16 serve bf16 queries over bf16 keys and values alone, with packed tiles of their own (attend_pairs.h). */
#ifndef CPA_HOST_ATTEND_ISA_H
#define CPA_HOST_ATTEND_ISA_H

#include <cpattn/types.h>

enum {
    CPA_ATTEND_TILE = 256,      /* divides CPA_HOST_SPLIT_TOKENS */
    CPA_ATTEND_MAX_ROWS = 32,   /* of a group and head, for any instruction set */
    CPA_ATTEND_GROUP_ROWS = 64, /* of a group, over all its heads */
    /* Floats that hold the packed keys or the packed values of a tile. */
    CPA_ATTEND_PACKED = (CPA_ATTEND_TILE + 1) * CPA_MAX_HEAD_DIM,
    CPA_PAIR_Q_WORDS = CPA_MAX_HEAD_DIM / 2 /* from row to row of queries in pairs of bf16 */
};

/* Keys or values as they lie in the pages. Strides are in bytes. */
typedef struct cpa_attend_pages {
    const char *first; /* block 0, token 0, first head of the group */
    int64_t block_stride, token_stride, head_stride;
    /* Bytes of a run, and from run to run, of rows that are cut into runs; run_bytes 0: rows are not. */
    int64_t run_bytes, run_stride;
    int32_t block_shift; /* log2 of the block size */
    cpa_dtype dtype;
    cpa_kv_part part;
    int32_t dim;
    int32_t row_dim; /* elements of a row as it lies; more than dim for values that are a part of their keys */
    int64_t keys;    /* keys in the table */
    const int32_t *table;
    /* Scales of a quantised cache. */
    const char *scales;  /* the word of block 0, token 0, first head; NULL: rows have none */
    int64_t scale_bytes; /* from the word of a token to that of the next */
    int64_t scale_head_stride;
    float tensor_scale;
    const float *head_scales; /* scale of the first head, by which tensor_scale is multiplied; NULL: none */
    int32_t head_scale_step;
} cpa_attend_pages;

/* Whether rows are to be made floats, in one piece, before they are packed. */
static inline int cpa_attend_makes_rows(const cpa_attend_pages *pages) {
    return cpa_dtype_is_quantised(pages->dtype) || pages->run_bytes > 0;
}

/* The keys that a row sees are the lanes [0, min(sinks, end)) and [first, end) of the tile, less those before the
 * tile's `begin`. */
typedef struct cpa_attend_lanes {
    int32_t end, first, sinks;
} cpa_attend_lanes;

/* The running softmax of a group over the tiles of one split. A packed tile has one head; a group that reads pages may
 * hold the same rows of several neighbouring heads. */
typedef struct cpa_attend_group {
    int32_t rows, heads;
    const float *q;   /* [heads][k_dim][rows]; of pairs, which lie in floats' places: [heads][rows][CPA_PAIR_Q_WORDS] */
    float *max;       /* [heads][rows], of scores times log2(e); CPA_LOWEST_EXPONENT at first */
    const float *top; /* [heads][rows], max of the splits before; read with skip alone */
    float *sum;       /* [heads][rows], of 2^(score - max) */
    float *o;         /* [heads][rows][o_stride], the same sum over values */
    int64_t o_stride; /* v_dim rounded up to whole panels */
    float *scores;    /* room for [heads][rows][CPA_ATTEND_TILE] */
} cpa_attend_group;

/* Which keys a row and head attends by lists and blocks, as cpattn/selection.h has them. */
typedef struct cpa_attend_row_keys {
    int32_t listed;      /* not 0: the row attends keys of `list` alone, of `unit` tokens an entry */
    int32_t n_listed;    /* entries of `list`, none of them negative */
    const int32_t *list; /* [n_listed] */
    int32_t unit, block;
    int64_t n_blocks;
    const uint32_t *blocks; /* the bits of the blocks that the row attends; NULL: all blocks */
} cpa_attend_row_keys;

/* Makes the scores -inf of those lanes of [begin, end) whose keys, of ascending indices, the row does not attend. */
void cpa_attend_hide_keys(const cpa_attend_row_keys *keys, const int64_t *index, int32_t begin, int32_t end, float *s);

/* What cpattn/score.h asks of a row and head: factor is that of temperature, times the softcap. */
typedef struct cpa_attend_row_score {
    float factor, slope;
    int64_t index;        /* index of the query in its sequence */
    const char *bias;     /* bias of this row and head; NULL: none */
    const uint32_t *bits; /* NULL: the mask alone decides */
    int64_t bits_first, bits_end;
    cpa_attend_row_keys keys;
} cpa_attend_row_score;

/* Of a tile. */
typedef struct cpa_attend_tile_score {
    int transforms; /* scores change, and the tile's scale is without log2(e); else keys are hidden alone */
    int alibi, causal;
    int selects; /* rows attend their keys alone */
    float softcap, softcap_inverse;
    cpa_dtype bias_dtype;
    int64_t bias_first, bias_width;
    const int64_t *key_index;         /* [CPA_ATTEND_TILE] indices of keys in the sequence, ascending */
    const int32_t *key_after;         /* [CPA_ATTEND_TILE] key_index less the first of it, at most INT32_MAX / 2 */
    const cpa_attend_row_score *rows; /* [heads][rows] of the group */
} cpa_attend_tile_score;

typedef struct cpa_attend_tile {
    const cpa_attend_pages *k_pages, *v_pages;
    int64_t key0;       /* key of lane 0, counted from the first table entry; may be negative */
    int32_t begin, end; /* lanes in use, which some row of the group sees */
    int32_t masked;     /* not 0: some row does not see all lanes in use, or these do not fill their panels */
    const cpa_attend_lanes *visible; /* [rows] of the group; read only if masked */
    const float *k, *v; /* packed, at least where in use; NULL: read the pages, which suits a single group */
    float scale;        /* scale of scores, log2(e) included */
    /* NULL; or room for CPA_ATTEND_TILE, for a group of one row and head that reads pages: the values of keys whose
     * score is -inf then count as zeros, whatever they hold. */
    uint8_t *weighs;
    const cpa_attend_tile_score *score; /* NULL: scores stay as they are */
    /* Above 0: the tile is left out for a group all of whose rows have their scores, times log2(e), more than this below
     * their max and top. */
    float skip;
    int64_t *counts; /* [2], with skip: groups that looked at it, and those that it was left out for, are added */
} cpa_attend_tile;

typedef struct cpa_attend_isa {
    const char *name;
    int32_t rows;
    int32_t lanes;
    int32_t pairs; /* multiplies pairs of bf16 */
    int (*supported)(void);
    /* Packs the panels of the first head that hold the lanes in use; what is not in use becomes 0. */
    void (*pack)(const cpa_attend_tile *tile, float *k, float *v);
    /* Takes a group through a tile. */
    void (*attend)(const cpa_attend_tile *tile, const cpa_attend_group *group);
} cpa_attend_isa;

extern const cpa_attend_isa cpa_attend_portable;
#ifdef __x86_64__
extern const cpa_attend_isa cpa_attend_avx2;
extern const cpa_attend_isa cpa_attend_avx512;
extern const cpa_attend_isa cpa_attend_avx512bf16;
extern const cpa_attend_isa cpa_attend_amx;
#endif

/* All of this build, NULL after the last. */
extern const cpa_attend_isa *const cpa_attend_isas[];

#endif
