/* What the plan, the launcher and the kernels of attend share. C and CUDA C++.
 *
 * The rows of an item are packed: row r is query head r mod group of token r / group, so that the heads of a group
 * share the keys that a tile loads, and a decode token fills a tile with its group. A piece is a tile of rows of one
 * item against a range of its keys, for every KV head. Rows whose keys lie in several pieces get a partial state from
 * each, in the plan's work space; combine joins them in the order of the keys. */
#ifndef CPA_CUDA_ATTEND_H
#define CPA_CUDA_ATTEND_H

#include "kernels/cuda/attend/attend_split.h"
#include "kernels/cuda/device/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CPA_CUDA_DECODE_ROWS = 16,       /* of a warp of the decode kernel; a CTA takes so many, or twice as many, see
                                    cpa_cuda_decode_geometry */
    CPA_CUDA_MOST_DECODE_ROWS = 512, /* of an item that decode kernels take because a plan has to, see
                                        cpa_cuda_most_padded_rows; a plan is reserved for as many */
    CPA_CUDA_PREFILL_ROWS = 128,     /* rows of a prefill tile; of the Hopper kernel's, see cpa_cuda_hopper_rows */
    CPA_CUDA_PREFILL_KEYS = 128,     /* prefill pieces begin at multiples of this many keys */
    CPA_CUDA_DECODE_KEYS = 64,       /* decode pieces */
    CPA_CUDA_DECODE_RUN = 16,        /* keys that the decode kernel loads at once */
    CPA_CUDA_LEAST_BOX = 8           /* tokens of a block that the Hopper kernel copies at once, and not row by row */
};

typedef struct cpa_cuda_piece {
    int64_t q_row;              /* row in q and in the state of the item's first token */
    int64_t state_shift;        /* floats: see state_shifts in kernels/attend_plan.h */
    int64_t q_first;            /* local index in q_set of the item's first token */
    int64_t k_first;            /* index of the item's first key among those it is cut from */
    int64_t table;              /* first table entry of the item */
    int32_t row_begin, row_end; /* packed rows of the item */
    int32_t k_begin, k_end;     /* keys of the item, counted from k_first */
    cpa_token_set q_set, k_set;
    int32_t partial; /* first row in the work space; -1: the result is final */
    int32_t next;    /* decode: index of the CTA's next piece; -1: it was the last */
    /* Decode, if `partial` is a row: the tile's pieces, the first row of theirs in the work space, and the place of
     * their counter. */
    int32_t pieces, first_partial, counter;
    int32_t states; /* decode: how many states each row of the tile has, of shared keys and of the pieces */
    int32_t ready;  /* decode: not 0: the item's queries are in ready_q; see kernels/attend_plan.h */
    /* Not 0: the piece's rows become NaN, as an update of the plan found no such keys; it has no keys then. */
    int32_t refused;
} cpa_cuda_piece;

/* A token of an item that shares keys with others. A listed piece is one of such tokens, of several items: those of the
 * row list from q_row on, row_begin being 0. Its `partial` is how many states each of its rows has before this one. */
typedef struct cpa_cuda_listed_row {
    int64_t position;
    int64_t row;     /* row of the queries */
    int32_t partial; /* row in the work space of the token's first state: those of its heads begin there */
    int32_t stride;  /* rows in the work space from one state of the token to the next */
    int32_t ready, reserved;
} cpa_cuda_listed_row;

/* A prefill tile whose keys are split: piece s left its states in the work space from row `partial` + s * rows on. */
typedef struct cpa_cuda_split {
    int64_t q_row, state_shift;
    int32_t row_begin, row_end;
    int32_t partial;
    int32_t count;
} cpa_cuda_split;

/* An item for the simple kernel: its packed rows of all heads begin at `begin` among those of all items. */
typedef struct cpa_cuda_item {
    cpa_attend_item item;
    int64_t state_shift;
    int64_t begin;
    int32_t ready, refused; /* reserved plans: as in the piece */
} cpa_cuda_item;

/* Where the blocks of an item go that are prepared: block i is entry place + i of the plan's list of blocks, and place
 * at + i % part of the workspace. */
typedef struct cpa_cuda_key_place {
    int32_t place;    /* first entry in the plan's list of blocks; -1: the item's blocks are not prepared */
    int32_t at, part; /* first place in the workspace, and places in it */
} cpa_cuda_key_place;

/* Block tables that lie on the device: those of an item begin at `from` there. */
typedef struct cpa_cuda_table_source {
    int64_t from;
    cpa_cuda_key_place to;
} cpa_cuda_table_source;

/* Reserved plans, scratch of an update. A decode unit in the order in which units are assigned, with its cuts; and a
 * cut: tiles [begin, begin + tiles) of a unit, for a team of CTAs. */
typedef struct cpa_cuda_unit {
    int32_t item, of_item; /* index of the item; number of the unit among the item's units */
    int32_t first_cut, cuts, first_partial, counter;
} cpa_cuda_unit;
typedef struct cpa_cuda_cut {
    int32_t unit, begin, tiles, team;
} cpa_cuda_cut;

/* The same of prefill: an item of more rows, and what there is of the items before it. */
typedef struct cpa_cuda_tile_count {
    int32_t pieces, partial_rows, splits;
} cpa_cuda_tile_count;
typedef struct cpa_cuda_tiled_item {
    int32_t item, rows, tiles, keys; /* index of the item; packed rows, tiles of them; keys in CPA_CUDA_PREFILL_KEYS */
    cpa_cuda_tile_count before;
} cpa_cuda_tiled_item;

typedef struct cpa_cuda_costed_piece {
    cpa_cuda_piece piece;
    int64_t cost;
} cpa_cuda_costed_piece;

typedef struct cpa_cuda_cascade cpa_cuda_cascade; /* attend_cascade.h */

/* Memory of a plan, which its attends write to: the plan itself is constant to them. */
typedef struct cpa_cuda_plan_memory {
    char *stagings[2]; /* pinned; images of `image`, in turn: one may be on its way while the next is written */
    char *staging;     /* the one of `stagings` that has the plan as it is set */
    char *image;       /* device */
    int64_t image_capacity;
    float *partial; /* device: O [kv_heads, partial_rows, v_dim], then LSE [kv_heads, partial_rows] */
    int64_t partial_capacity;
    struct cpa_cuda_source *source;  /* host; attend_source.h: what is prepared in which pass, and the workspace */
    cpa_cuda_costed_piece *in_order; /* host; scratch of plan_set */
    int64_t in_order_capacity;
    cpa_attend_item *packed; /* host; scratch of plan_set: items whose tables lie one behind the other, and these */
    int32_t *packed_tables;
    int64_t packed_capacity, packed_tables_capacity;
    cpa_cuda_cascade *cascade; /* host; scratch of plan_set */
    cudaStream_t uploaded; /* the stream that copied the staging to the image after the plan was set, if `current` */
    uint64_t captures;     /* captures of `uploaded` when the staging was copied */
    int current;
    struct cpa_cuda_attend_choices *choices; /* host; attend_kernels.h */
} cpa_cuda_plan_memory;

/* Pieces of prefill that run together, longest first, and the tiles whose keys are split among them. */
typedef struct cpa_cuda_prefill {
    int64_t pieces_at, splits_at;
    int32_t n_pieces, n_splits;
    int32_t by_head; /* the first pieces, this many, run for one KV head after another, the rest for all at once */
} cpa_cuda_prefill;

/* The sections of the image begin at the offsets *_at. */
typedef struct cpa_cuda_plan {
    cpa_attend_plan base;
    cpa_cuda_plan_memory *memory;
    cpa_owner_map map;
    int32_t tile_rows;                 /* rows of a prefill tile */
    int64_t image_bytes, upload_bytes; /* bytes of the image; bytes of it that come from the host */
    int64_t items_at, tables_at, decode_at, counters_at, tickets_at;
    int64_t place_tables_at, listed_blocks_at; /* the tables with places in the workspace, and the block of each */
    int64_t n_places;                          /* blocks that are prepared, those of each pass one behind the other */
    const int32_t *device_tables;              /* the caller's tables; NULL: the image has them from the host */
    int64_t num_blocks;                        /* with device_tables: block ids are limited to those below it */
    int64_t sources_at, most_entries;          /* where sources begin; most table entries of an item */
    int64_t rows;                              /* packed rows of all items, per KV head */
    int32_t decode_ctas;                       /* decode CTAs for each KV head; 0: no item goes to the decode kernel */
    int32_t decode_rows;                       /* the most packed rows of an item that is not cut into prefill tiles */
    int32_t decode_wide;                       /* not 0: as `wide` of the shares of decode (attend_split.h) says */
    int32_t decode_row_tiles;                  /* 2 where a CTA has more than CPA_CUDA_DECODE_ROWS */
    cpa_cuda_prefill prefill; /* pieces of keys that are attended as they lie, or that are all prepared at once */
    int64_t most_keys;        /* most keys of an item with such prefill pieces */
    int64_t shared_at, rows_at;
    int32_t n_shared; /* pieces over keys that items share */
    int64_t partial_rows;
    int64_t units_at, cuts_at, places_at; /* reserved plans: scratch of an update, and `places` of the reservation */
    int64_t tiled_at, costs_at;           /* reserved plans: scratch of the prefill pieces of an update */
    int64_t counters_bytes;
    int64_t reserved_items;         /* reserved plans: items of all sequences */
    cpa_attend_refusal *refusal;    /* reserved plans: page-locked */
    int32_t reserved_first_partial; /* reserved plans: first row of the work space for the states of prefill */
} cpa_cuda_plan;

/* Prefill tiles of an update. */
typedef struct cpa_cuda_tile_args {
    int32_t rows; /* of a tile */
    int32_t multiprocessors, kv_heads;
    int32_t first_partial;
    int32_t most_pieces, most_splits; /* what there is room for; most_pieces 0: no item has tiles */
    cpa_cuda_tiled_item *items;
    int32_t *costs; /* of each piece, in the order of items */
    cpa_cuda_piece *pieces;
    cpa_cuda_split *splits;
} cpa_cuda_tile_args;

/* What the kernels of an update are told. */
typedef struct cpa_cuda_update_args {
    cpa_attend_update update;
    cpa_attend_reservation reservation; /* a copy, whose `places` are on the device */
    int64_t n_items;
    int32_t group;
    int32_t decode_rows;  /* packed rows of an item; those of more are prefill tiles */
    int32_t teams, heads; /* decode: teams of CTAs for each KV head, or for each `heads` of them, which a CTA takes */
    cpa_cuda_team team;
    int32_t *tables; /* [sequences, table_stride] */
    cpa_cuda_item *items;
    cpa_cuda_unit *units;
    cpa_cuda_cut *cuts;
    cpa_cuda_piece *pieces;
    cpa_cuda_tile_args tiles;
    cpa_attend_refusal *refusal; /* page-locked */
} cpa_cuda_update_args;

/* tanh(x) of x = scale * raw: exp(2 x) is exp2(exp_scale * raw); and near 0, where that loses the digits of a small
 * result, x times a polynomial in x^2, the minimax of the relative error: with three coefficients 7.8e-7 for |x| <
 * CPA_CUDA_TANH_NEAR, with five 5.7e-07 for |x| < CPA_CUDA_TANH_MIDDLE. */
#define CPA_CUDA_TANH_NEAR 0.28f
#define CPA_CUDA_TANH_MIDDLE 0.75f
enum { CPA_CUDA_TANH_NEAR_TERMS = 3, CPA_CUDA_TANH_MIDDLE_TERMS = 5 };
typedef struct cpa_cuda_tanh {
    float scale, exp_scale;
} cpa_cuda_tanh;
static inline cpa_cuda_tanh cpa_cuda_tanh_of(double scale) {
    const double log2_e = 1.4426950408889634;
    return (cpa_cuda_tanh){.scale = (float)scale, .exp_scale = (float)(2 * log2_e * scale)};
}

/* A line over tanh(x): far_scale / (exp(2 x) + 1) + shift + unit; or x times a polynomial, whose coefficients have the
 * unit as a factor, + shift. */
typedef struct cpa_cuda_tanh_line {
    float far_scale, far_shift, near_shift;
    float near[CPA_CUDA_TANH_NEAR_TERMS], middle[CPA_CUDA_TANH_MIDDLE_TERMS];
} cpa_cuda_tanh_line;
static inline cpa_cuda_tanh_line cpa_cuda_tanh_line_of(double unit, double shift) {
    const double near[] = {0x1.ffffe6p-1, -0x1.5526a6p-2, 0x1.04863ep-3};
    const double middle[] = {0x1.ffffeep-1, -0x1.554802p-2, 0x1.0f8b42p-3, -0x1.9a0facp-5, 0x1.a7ad9ep-7};
    cpa_cuda_tanh_line line = {
        .far_scale = (float)(-2 * unit), .far_shift = (float)(unit + shift), .near_shift = (float)shift};
    for (int i = 0; i < CPA_CUDA_TANH_NEAR_TERMS; i++) line.near[i] = (float)(unit * near[i]);
    for (int i = 0; i < CPA_CUDA_TANH_MIDDLE_TERMS; i++) line.middle[i] = (float)(unit * middle[i]);
    return line;
}

/* Capped scores lie within [-softcap, softcap]: where that leaves room in the exponents of fp32, and of the bf16 of
 * probabilities, no maximum is needed to keep them finite. exp2 of the line is exp(score - reference): from exp(-85) on,
 * and for a softcap of 60 at most exp(35). */
typedef struct cpa_cuda_capped {
    int32_t fits;
    float reference;
    cpa_cuda_tanh_line line;
} cpa_cuda_capped;
static inline cpa_cuda_capped cpa_cuda_capped_of(double softcap) {
    const double log2_e = 1.4426950408889634, least = 85, most = 60;
    const double reference = softcap < least - softcap ? softcap : least - softcap;
    return (cpa_cuda_capped){
        .fits = softcap <= most,
        .reference = (float)reference,
        .line = cpa_cuda_tanh_line_of(log2_e * softcap, -log2_e * reference),
    };
}

/* What is done to scores beside the mask of the layer (cpattn/score.h). */
typedef struct cpa_cuda_score {
    int32_t any; /* not 0: kernels with rules are launched; 0: kernels without, which know sink logits too */
    /* Not 0: scores change, and scale and scale_log2 of the kernel's arguments apply to changed scores. */
    int32_t transforms;
    int32_t indexed; /* not 0: scores depend on the indices of queries and keys */
    float pre_scale; /* scale of the raw scores, before they change */
    float softcap;
    cpa_cuda_tanh tanh;           /* tanh of a raw score times pre_scale / softcap */
    cpa_cuda_tanh_line tanh_line; /* the line over `tanh` that is tanh itself */
    cpa_cuda_capped capped;
    float temperature_len, temperature_inverse; /* 1 / log2(temperature_len) */
    const float *alibi_slopes, *sink_logits;
    cpa_key_bits custom; /* bits NULL: none */
    cpa_score_bias bias; /* values NULL: none */
} cpa_cuda_score;

/* What every kernel of attend is told. */
typedef struct cpa_cuda_attend_args {
    const char *q;
    const char *ready_q; /* queries of ready pieces, instead of q */
    const char *k, *v;
    int64_t q_row_stride, q_head_stride; /* strides in elements */
    int64_t k_block_stride, k_token_stride, k_head_stride;
    int64_t v_block_stride, v_token_stride, v_head_stride;
    /* log2 of the elements of a run of a row; CPA_KV_ONE_RUN: rows are not cut into runs. */
    int32_t k_run_shift, v_run_shift;
    int64_t k_run_stride, v_run_stride;
    cpa_dtype q_dtype, kv_dtype;
    float k_scale, v_scale; /* quantised caches: scales of all keys, and of all values */
    /* [kv_heads] scales of heads, by which those of the tensors are multiplied; NULL: none. */
    const float *k_head_scales, *v_head_scales;
    int32_t head_scale_step; /* elements between the scales of two heads; 0: all have the first */
    /* Quantised caches: bytes from a block to the scales of its rows; 0: rows have none. */
    int64_t k_words_at, v_words_at;
    const float *k_scales; /* widened codes: [blocks, kv_heads, block_size]; NULL: keys are what they stand for */
    int32_t q_heads, kv_heads, group, k_dim, v_dim;
    int32_t block_shift; /* log2(block_size) */
    int32_t resume;
    cpa_owner_map map;
    cpa_mask mask;
    float scale, scale_log2; /* scale_log2 = scale * log2(e) */
    float *o, *lse;
    int64_t o_row_stride, lse_row_stride, lse_head_stride;
    char *out;
    int64_t out_row_stride, out_head_stride; /* elements, or codes */
    const float *out_scale;                  /* NULL: `out` holds elements of q_dtype; else codes of e4m3 */
    const int32_t *tables;
    const cpa_cuda_item *items;
    int64_t n_items;
    const cpa_cuda_piece *pieces; /* decode: CTA i begins with the i-th */
    int32_t by_head;              /* prefill: as in the plan */
    const cpa_cuda_split *splits;
    uint32_t *counters; /* decode: pieces that are done, [tiles whose keys are split][CTAs of a piece]; else 0 */
    float *partial_o, *partial_lse;
    int64_t partial_rows;
    int32_t early;                   /* decode: not 0: the kernel may run beside the one before it on the stream */
    int32_t alone;                   /* decode: not 0: an early kernel may take the whole device */
    const cpa_cuda_listed_row *rows; /* rows of listed pieces; NULL: there are none */
    /* Decode: the kernel before is that of the shared keys. What its CTAs have waited for is there when this one
     * begins; what they write is needed where states are joined. */
    int32_t beside_shared;
    cpa_cuda_score score;
} cpa_cuda_attend_args;

/* attend_plan_memory.c: room in the image and its twin on the device, for partial states, for scratch; what was there
 * is lost when they grow. */
cpa_status cpa_cuda_plan_reserve_image(cpa_cuda_plan *plan, int64_t bytes, cpa_error *err);
cpa_status cpa_cuda_plan_reserve_partial(cpa_cuda_plan *plan, int64_t floats, cpa_error *err);
cpa_status cpa_cuda_plan_reserve_in_order(cpa_cuda_plan_memory *memory, int64_t n, cpa_error *err);
/* The image alone, for plans that write theirs on the device. */
cpa_status cpa_cuda_plan_allocate_image(cpa_cuda_plan *plan, int64_t bytes, cpa_error *err);

/* attend_plan.c: the block tables that the kernels read, on the device. */
const int32_t *cpa_cuda_plan_tables(const cpa_cuda_plan *plan);

/* Where a section of so many bytes of an image begins; *end moves behind it. */
static inline int64_t cpa_cuda_place_section(int64_t *end, int64_t bytes) {
    const int64_t alignment = 64, at = *end;
    *end += (bytes + alignment - 1) / alignment * alignment;
    return at;
}

/* What the CTAs of decode on a multiprocessor take of its shared memory, at most: for a single one more than devices of
 * 8.x have. */
enum { CPA_CUDA_WIDE_BYTES = 208 << 10 };

/* attend_plan_update.cu: the items, decode pieces and row maps of what an update reads; attend_plan_tiles.cu: its prefill
 * pieces. */
cpa_status cpa_cuda_read_sequences(const cpa_cuda_update_args *args, cpa_stream *stream);
cpa_status cpa_cuda_assign_pieces(const cpa_cuda_update_args *args, cpa_stream *stream);
cpa_status cpa_cuda_cut_tiles(const cpa_cuda_update_args *args, cpa_stream *stream);

/* Has the arguments name the keys and values of a view, whose strides are resolved. */
void cpa_cuda_take_view(cpa_cuda_attend_args *args, const cpa_kv_view *kv);
/* The most packed rows of an item that goes to the kernels of decode where prefill tiles are a choice: those of a CTA;
 * over latents, whose tiles of prefill are the same, those of several. */
int32_t cpa_cuda_most_decode_rows(const cpa_attention_shape *shape, int32_t block_size);
/* The same of a plan whose launches stay the same, which prefill tiles do not. */
int32_t cpa_cuda_most_padded_rows(const cpa_attention_shape *shape, int32_t block_size);

/* The pools of keys and of values as (dim, token, head, block), without pages of one block, for boxes of 64 columns and
 * of those of the tail, if there is one. */
typedef struct cpa_cuda_hopper_maps {
    CUtensorMap k, v, k_tail, v_tail;
} cpa_cuda_hopper_maps;
cpa_status cpa_cuda_attend_hopper(const cpa_cuda_attend_args *args, const cpa_cuda_hopper_maps *maps, int32_t n_pieces,
                                  cpa_stream *stream);
/* The same by CTAs that stay, and the queries as a tensor of (dim, head, row, 1), for boxes of 64 rows of the packed ones
 * of a group. `tickets`: a word that is 0, and is again when the kernel is done. */
typedef struct cpa_cuda_persistent_maps {
    CUtensorMap q, q_tail;
    cpa_cuda_hopper_maps pools;
} cpa_cuda_persistent_maps;
cpa_status cpa_cuda_attend_persistent(const cpa_cuda_attend_args *args, const cpa_cuda_persistent_maps *maps,
                                      int32_t n_pieces, uint32_t *tickets, cpa_stream *stream);
/* Widens `blocks` (on the device) of a quantised cache to the dtype of the queries: place i of the workspace becomes
 * block blocks[i], [block_size, kv_heads, dim], or is left as it is if that is negative. Values are what they stand
 * for, rounded; keys are codes less their zero, exact, and their scales go to k_scales, [kv_heads, wide_block] for
 * every wide_block tokens of the workspace. */
cpa_status cpa_cuda_attend_widen(const cpa_cuda_attend_args *args, const int32_t *blocks, int32_t n_blocks,
                                 int32_t wide_block, void *k, void *v, float *k_scales, cpa_stream *stream);
/* The same of a cache whose rows lie in runs, of codes in e4m3 or of elements of the queries' dtype, which become rows
 * with no scales. Blocks hold 16 tokens or more. */
cpa_status cpa_cuda_attend_widen_runs(const cpa_cuda_attend_args *args, const int32_t *blocks, int32_t n_blocks,
                                      int32_t wide_block, void *k, void *v, float *k_scales, cpa_stream *stream);
/* The same of a cache of CPA_TQ_: keys of length 1, rotated back, whose lengths are their scales. */
cpa_status cpa_cuda_attend_widen_turboquant(const cpa_cuda_attend_args *args, const int32_t *blocks, int32_t n_blocks,
                                            int32_t wide_block, void *k, void *v, float *k_scales, cpa_stream *stream);
/* Tokens of a block of the workspace that blocks of so many are widened to. It is ours, so small ones become one that is
 * copied at once. */
CPA_HOST_DEVICE static inline int32_t cpa_cuda_wide_block(int32_t block_size) {
    return block_size < 16 ? 64 : block_size;
}
/* Places of an item's blocks in the workspace, so many widened blocks being whole. */
CPA_HOST_DEVICE static inline int64_t cpa_cuda_wide_places(int32_t block_size, int64_t blocks) {
    const int64_t ratio = cpa_cuda_wide_block(block_size) / block_size;
    return (blocks + ratio - 1) / ratio * ratio;
}
/* Fills the tables of a plan, and those of what is prepared, from tables on the device. */
cpa_status cpa_cuda_take_tables(const cpa_cuda_plan *plan, cpa_stream *stream);
/* Whether the Hopper kernel copies row by row, without maps. */
static inline int cpa_cuda_hopper_takes_rows(int32_t block_size) {
    return block_size < CPA_CUDA_LEAST_BOX;
}
/* Tokens in a box of the tensor maps that the Hopper kernel takes. */
int32_t cpa_cuda_hopper_box(int32_t k_dim, int32_t v_dim, int32_t block_size, int32_t ruled);
/* Columns of the boxes of its tail maps: 16 or 32; 0: it takes none. Where keys have scales, that is so for all
 * heads. */
int32_t cpa_cuda_hopper_tail(int32_t k_dim, int32_t v_dim);
/* Rows of its tiles; it takes smaller ones as well. */
int32_t cpa_cuda_hopper_rows(int32_t k_dim, int32_t v_dim, int32_t block_size, int32_t ruled);
/* Over latents, whose map is that of keys, or over wide heads: pieces of decode, or of prefill, the lists of which begin
 * with the first `ctas`. What units of decode are split into is joined by cpa_cuda_attend_combine_units. */
typedef struct cpa_cuda_latent_form {
    int32_t v_in_k;
    int32_t paired; /* of elements: neighbouring CTAs, two and two, have the same keys all along */
} cpa_cuda_latent_form;
cpa_status cpa_cuda_attend_latent(const cpa_cuda_attend_args *args, const cpa_cuda_hopper_maps *maps,
                                  cpa_cuda_latent_form form, int32_t ctas, cpa_stream *stream);
/* The same of pieces of decode of 16 rows at most, over latents of the widths that cpa_cuda_latent_few_takes tells. */
cpa_status cpa_cuda_attend_latent_few(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream);
int cpa_cuda_latent_few_takes(const cpa_cuda_attend_args *args);
/* Tokens in a box of the maps of cpa_cuda_attend_latent. */
int32_t cpa_cuda_latent_box(cpa_cuda_latent_form form, int32_t block_size);
cpa_status cpa_cuda_attend_combine(const cpa_cuda_attend_args *args, int32_t n_splits, cpa_stream *stream);
/* The same of decode units, whose pieces are listed from the first `ctas` on, for kernels that do not join them. */
cpa_status cpa_cuda_attend_combine_units(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
